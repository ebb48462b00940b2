"""PPO: a critic gives every action an advantage of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset, IterableDataset

from memsafe_rl.config.ppo import PPOConfig
from memsafe_rl.data.external_rollout import RolloutFunction
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.planning.policies import MemoryPolicy
from memsafe_rl.models.critic import Critic, critic_of
from memsafe_rl.trainers.policy_trainer import PolicyTrainer
from memsafe_rl.training.assembly.protocol import TrainingRequest


class PPOTrainer(PolicyTrainer):
    """Trains a model with Proximal Policy Optimization (Schulman et al. 2017, arXiv 1707.06347).

    A critic foresees what is still to come of a completion, so that each action has an advantage of its own
    (generalized advantages, arXiv 1506.02438) and a prompt needs no group. Everything else, from the arguments and
    errors to what happens when memory runs out, is as in `GRPOTrainer`.

    Args:
        model: as in `GRPOTrainer`, or a `DiffusionPolicy`, whose denoising steps are then the actions (DPPO, arXiv
            2409.00588).
        optimizers: an optimizer and a schedule; a given optimizer must hold the critic's weights too.
        critic: None for a head on the model's own hidden states (one forward gives log-probs and values); "adapter"
            for a second adapter on the model's base, made as `peft_config` says; or another model with the same
            tokenizer, perhaps a smaller one: its name, its path, or the model itself, which is then trained in place.
            Of a `DiffusionPolicy`: None for a small network on state, timestep and condition, or a module that is
            called as the denoiser is and gives one value for each state.
        ref_model: the reference, without an adapter: a name, or a model, which is then frozen; None for a copy.
        reward_model: TRL's name for ``reward_funcs``: a reward model, which reads the model's own tokens.
        value_model: TRL's name for ``critic``; a network that classifies sequences with one number
            (`AutoModelForSequenceClassification`) keeps its last layer as the critic's head.
    """

    config_class = PPOConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: PPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] | None = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: RolloutFunction | None = None,
        environment_factory: Any = None,
        memory_policy: MemoryPolicy | str | None = None,
        critic: Any = None,
        *,
        ref_model: Any = None,
        reward_model: Any = None,
        value_model: Any = None,
    ) -> None:
        if reward_model is not None and reward_processing_classes is None:
            reward_processing_classes = processing_class  # as TRL's, it reads the model's own tokens
        reward_funcs = _given("reward_funcs", reward_funcs, "reward_model", reward_model)
        critic = critic_of(_given("critic", critic, "value_model", value_model))
        if critic is not None and critic is model:
            raise ConfigError(
                "critic is the model itself. Leave critic out for a head on the model's own hidden states, or give a "
                "copy of the model."
            )
        data = train_dataset, eval_dataset, processing_class, reward_processing_classes
        parts = quantization_config, peft_config, tools, rollout_func, environment_factory, memory_policy
        self._build(TrainingRequest(model, reward_funcs, *data, *parts, critic, ref_model), args, callbacks, optimizers)

    @property
    def critic(self) -> Critic:
        """What foresees rewards."""
        critic: Critic = self.setup.advantages.critic  # type: ignore[union-attr]
        return critic


def _given(name: str, value: Any, other: str, named: Any) -> Any:
    """Returns an argument that may be passed under either of two names."""
    if value is not None and named is not None:
        raise ConfigError(f"{other} is another name of {name}. Pass one of the two.")
    return named if value is None else value
