"""`forecast_memory`: the peaks of a run, known before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.config.grpo import GRPOConfig
from memsafe_rl.config.ppo import PPOConfig
from memsafe_rl.errors import ConfigError
from memsafe_rl.models.diffusion.policy import DiffusionPolicy
from memsafe_rl.preflight.forecast import forecast_run
from memsafe_rl.preflight.outcome import MemoryForecast
from memsafe_rl.trainers.grpo import GRPOTrainer
from memsafe_rl.trainers.ppo import PPOTrainer
from memsafe_rl.units import parse_bytes


def forecast_memory(
    model: str | DiffusionPolicy,
    args: TrainerConfig | None = None,
    *,
    device_bytes: int | str,
    device: str = "cuda",
    prompt_tokens: int | None = None,
    train_dataset: Any = None,
    processing_class: Any = None,
    peft_config: Any = None,
    quantization_config: Any = None,
    memory_policy: Any = None,
    critic: Any = None,
    eval_dataset: Any = None,
    reward_models: Sequence[Any] = (),
    ranks: int = 1,
    sharding: str = "none",
) -> MemoryForecast:
    """Forecasts the peak of every phase of a run, without its weights and without its device.

    The run's own code is run on tensors that hold no bytes: its policy makes the plans, and the longest rows go through
    every phase of a step.

    Args:
        model: a name known here or on a hub that can be reached, or a folder with a ``config.json``; or a
            `DiffusionPolicy`, whose weights are only looked at.
        args: the run's settings, a `GRPOConfig` or a `PPOConfig`; None for GRPO's defaults.
        device_bytes: memory of the device, in bytes or as text such as "24GiB".
        device: "cuda" for the types and the granularity of a CUDA device, "cpu" for those of a CPU.
        prompt_tokens: longest prompt, in tokens; None for the longest of ``train_dataset``, else
            ``args.max_prompt_length``, else 512 or what the context leaves.
        train_dataset: the run's prompts; needs ``processing_class``.
        processing_class: the run's tokenizer.
        peft_config: config of a new adapter.
        quantization_config: transformers' `BitsAndBytesConfig` with ``load_in_4bit``.
        memory_policy: as the trainer takes it.
        critic: as `PPOTrainer` takes it.
        eval_dataset: the run's evaluation prompts, counted where ``args`` has an `eval_strategy`; None to assume as
            many as a rollout has completions, as long as the run's longest.
        reward_models: sequence classifiers among the rewards: names or folders as for ``model``, or models.
        ranks: ranks of the run, of which one is forecast; batch sizes are per rank, as everywhere.
        sharding: what the ranks share: "none", "zero1" (optimizer states), "zero2" (gradients too), "zero3" or "fsdp"
            (weights too). Trainers run under "none" only.

    Returns:
        The forecast; ``refusal`` says why where the run cannot fit.

    Raises:
        ConfigError: the model has no config that can be read, the device has no bytes, or settings contradict each
            other.
    """
    total = parse_bytes(device_bytes) if isinstance(device_bytes, str) else device_bytes
    if isinstance(total, bool) or not isinstance(total, int) or total < 1:
        raise ConfigError(f"device_bytes is {device_bytes!r}; write bytes, or a size such as '24GiB'.")
    if not isinstance(model, (str, DiffusionPolicy)):
        raise ConfigError(
            f"model is a {type(model).__name__}; a forecast takes a name or a folder, for its config, or a "
            "DiffusionPolicy."
        )
    if critic is not None and not isinstance(args, PPOConfig):
        raise ConfigError("critic is given without a PPOConfig. Pass args=PPOConfig(...), or leave critic out.")
    return forecast_run(
        PPOTrainer if isinstance(args, PPOConfig) else GRPOTrainer,
        model,
        args if args is not None else GRPOConfig(report_to="none"),
        device_bytes=total,
        device=device,
        prompt_tokens=prompt_tokens,
        train_dataset=train_dataset,
        processing_class=processing_class,
        peft_config=peft_config,
        quantization_config=quantization_config,
        memory_policy=memory_policy,
        critic=critic,
        eval_dataset=eval_dataset,
        reward_models=reward_models,
        ranks=ranks,
        sharding=sharding,
    )
