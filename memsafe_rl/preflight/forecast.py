"""Forecasts a run by running its own step on fake tensors: the longest rows, under the plans it would choose."""

from __future__ import annotations

import copy
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from memsafe_rl.accounting import charge, in_phase
from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.config.grpo import GRPOConfig
from memsafe_rl.config.ppo import PPOConfig
from memsafe_rl.data.prompts import usable_prompts
from memsafe_rl.errors import MemoryBudgetError, kind_and_line
from memsafe_rl.memory.runtime.recovery import Recovery, capture_random_state, set_random_state
from memsafe_rl.memory.simulated.device import SimulatedMemory, active_simulation
from memsafe_rl.memory.simulated.workspaces import about_cuda
from memsafe_rl.models.critic import add_critic_adapter
from memsafe_rl.models.diffusion.policy import DiffusionPolicy, prepare_policy
from memsafe_rl.models.loading import check_teacher
from memsafe_rl.models.module_state import replaced
from memsafe_rl.models.teacher import Teacher
from memsafe_rl.preflight import refusal
from memsafe_rl.preflight.cards import multiprocessors_of
from memsafe_rl.preflight.dry_run import DryRun, SharedState
from memsafe_rl.preflight.fake.device import fake_device, give_fake_weights
from memsafe_rl.preflight.fake.families import config_for
from memsafe_rl.preflight.fake.networks import fake_language_model, fake_reward_model, hollow_copy, shallow_copy
from memsafe_rl.preflight.fake.sharding import read_sharding
from memsafe_rl.preflight.outcome import MemoryForecast
from memsafe_rl.preflight.speed import DeviceSpeed, measured_speed
from memsafe_rl.training.assembly.factory import Inputs, Machine
from memsafe_rl.training.optim.half_weights import MasterCopies
from memsafe_rl.types import Component, Phase, RolloutPlan
from memsafe_rl.units import parse_bytes

logger = logging.getLogger(__name__)

_UNLIMITED_BYTES = 2**60


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
    speed: DeviceSpeed | None = None,
    card: str | None = None,
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
            (weights too). Trainers run under "none" and "fsdp".
        speed: the device's, for an estimate of a step's seconds; None for none.
        card: the CUDA device's name, such as "H100", which decides what sums hold; None for the one at hand, if any.

    Returns:
        The forecast; ``refusal`` says why where the run cannot fit.

    Raises:
        ConfigError: no config of the model can be read, the device has no bytes, or settings contradict each other.
    """
    total = parse_bytes(device_bytes) if isinstance(device_bytes, str) else device_bytes
    if isinstance(total, bool) or not isinstance(total, int) or total < 1:
        raise refusal("device_bytes", device_bytes=device_bytes)
    refusal.when(not isinstance(model, (str, DiffusionPolicy)), "model/kind", kind=type(model).__name__)
    refusal.when(critic is not None and not isinstance(args, PPOConfig), "critic")
    started = time.perf_counter()
    config = _config_of_forecast(args if args is not None else GRPOConfig(report_to="none"), device, ranks)
    shared = SharedState(read_sharding(sharding, ranks), ranks)
    run = partial(DryRun, config, device, total, shared, policy=memory_policy, speed=speed)
    properties: Any = None if card is None else multiprocessors_of(card)
    if card is None and device == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties()  # of the one at hand; asking it makes a CUDA context
    cuda = about_cuda(properties) if device == "cuda" else ()
    if not isinstance(model, str):
        if processing_class is not None or prompt_tokens is not None or quantization_config is not None:
            raise refusal("denoiser")
        dry = run(critic=lambda: _with_fake_weights(critic) if isinstance(critic, nn.Module) else critic)
        with _simulating(dry, properties) as memory:
            found = dry.run_model(*_fake_chains(model, config, peft_config), memory)
        told = ("all chains are alike", *cuda)
    else:
        network = _Network.of(model, config, device, peft_config, quantization_config, critic)
        network = replace(network, sees_images=hasattr(processing_class, "image_processor"))
        dry = run(
            dataset=train_dataset,
            tokenizer=processing_class,
            prompt_tokens=prompt_tokens,
            critic=partial(_critic_of_tokens, critic, config),
            evaluation=eval_dataset,
            reward_models=lambda: [_fake_reward_model(one, config) for one in reward_models],
        )
        with _simulating(dry, properties) as memory:
            found = dry.run(network, memory, reference=network.reference_of(config))
        rewards = ("reward models read as many tokens as prompt and completion have",) if reward_models else ()
        told = (dry.about_prompts, network.assumption, *cuda, *rewards)
    assumptions = (*shared.sentences(), *told, *(() if args is None else _about_engines(args)))
    return replace(found, seconds=time.perf_counter() - started, assumptions=assumptions)


def _about_engines(args: TrainerConfig) -> tuple[str, ...]:
    """Says what is counted where another engine draws the rollouts."""
    engines = set(args.engines_chosen.values()) - {RolloutPlan.engine}
    if not engines:
        return ()
    if engines == {"vllm_server"}:
        return ("servers draw on other cards: rollout is what the own engine holds when it draws what none answers",)
    return (f"rollout is what the own engine would hold; what {', '.join(engines)} holds comes in its place",)


@dataclass(frozen=True)
class _Network:
    """A language model of which only the config is read."""

    config: Any  # of transformers
    init: Mapping[str, Any]  # `model_init_kwargs`, the config left out
    device: str  # kind of device
    peft_config: Any
    quantization: Any
    trust_remote_code: bool
    beside: Callable[[Any], None] | None  # puts a critic's or a teacher's adapter beside its own
    teacher: Teacher | None = None  # a network of its own
    sees_images: bool = False  # whether a processor reads the prompts
    half: torch.dtype = torch.bfloat16  # type of frozen weights on a card

    @classmethod
    def of(
        cls, model: str, settings: TrainerConfig, device: str, peft_config: Any, quantization_config: Any, critic: Any
    ) -> _Network:
        """Reads the config of a named network; takes what the settings say of its loading out of them."""
        init = dict(settings.model_init_kwargs or {})
        given = init.pop("config", None)
        places = {name: init[name] for name in ("revision", "cache_dir", "token", "local_files_only") if name in init}
        config = given or config_for(model, trust_remote_code=settings.trust_remote_code, **places)
        quantization = quantization_config or init.get("quantization_config") or _declared_quantization(config)
        refusal.when(quantization is not None and peft_config is None, "quantization/adapter")
        settings.model_init_kwargs = None
        name, beside = settings.teacher_model_name_or_path, add_critic_adapter if critic == "adapter" else None
        teacher = None if name is None else Teacher.named(name, dict(settings.teacher_model_init_kwargs or {}))
        if teacher is not None and teacher.joins(model, peft_config):
            beside, teacher = partial(teacher.join, fake=True), None
        half, trusted = settings.autocast_dtype or torch.bfloat16, settings.trust_remote_code
        return cls(config, init, device, peft_config, quantization, trusted, beside, teacher, half=half)

    def __call__(self, *, frozen: bool = False, shallow: bool = False) -> Any:
        """Makes it with fake weights; ``frozen`` as a reference, ``shallow`` with one block of each kind."""
        return fake_language_model(
            shallow_copy(self.config) if shallow else self.config,
            dtype=self.dtype(frozen=frozen),
            peft_config=self.peft_config,
            quantization_config=self.quantization,
            trust_remote_code=self.trust_remote_code,
            frozen=frozen,
            beside=None if frozen else self.beside,
            sees_images=self.sees_images,
        )

    def reference_of(self, settings: TrainerConfig) -> Callable[[], Any]:
        """Returns what makes a run's reference: its teacher, a copy, or nothing where an adapter is switched off."""
        if (teacher := self.teacher) is not None:
            config = config_for(teacher.base, "teacher", trust_remote_code=self.trust_remote_code)
            check_teacher(teacher.name, config, self.config)
            init, adapter = teacher.arguments, teacher.adapter
            own = replace(self, config=config, init=init, quantization=init.get("quantization_config"))
            return partial(replace(own, peft_config=adapter), frozen=True)
        return partial(self, frozen=True) if settings.has_reference and self.peft_config is None else lambda: None

    def dtype(self, *, frozen: bool = False) -> torch.dtype:
        """Returns the type in which its weights are loaded, as `load_model` does."""
        given = _dtype(self.init.get("dtype", self.init.get("torch_dtype")), self.config)
        is_frozen = frozen or self.peft_config is not None
        return given or (self.half if self.device == "cuda" and is_frozen else torch.float32)

    @property
    def assumption(self) -> str:
        """Says in which type weights are taken to be."""
        base = f"weights of the base are {str(self.dtype()).removeprefix('torch.')}"
        return base if self.quantization is None else f"{base}, in 4 bits where bitsandbytes quantises"


@contextmanager
def _simulating(dry: DryRun, card: Any) -> Iterator[SimulatedMemory]:
    """Stands for a run's device; the budget is kept from the optimizer's state on, before which nothing is refused."""
    loud = (Recovery.__module__, MasterCopies.__module__, usable_prompts.__module__)  # the forecast says what came
    state = capture_random_state()  # building a trainer seeds generators
    try:
        with (
            replaced([(told, "disabled", True) for told in map(logging.getLogger, loud)]),
            fake_device(_UNLIMITED_BYTES, stands_for=dry.device, card=card) as memory,
        ):
            memory.ledger.divide(dry.shared.parts)
            yield memory
    finally:
        set_random_state(state)


def _fake_chains(model: Any, config: TrainerConfig, peft_config: Any) -> tuple[Any, Any]:
    """Returns a diffusion policy and its reference with fake weights."""
    with in_phase(Phase.LOAD), charge(Component.WEIGHTS):
        with torch.device("meta"):
            adapter, has_reference = copy.deepcopy(peft_config), config.has_reference
            found = prepare_policy(hollow_copy(model), peft_config=adapter, device="meta", with_reference=has_reference)
        for network in found:
            if network is not None:
                give_fake_weights(network)
    return found


def _critic_of_tokens(critic: Any, config: TrainerConfig, *, shallow: bool = False) -> Any:
    """Returns a trainer's argument for a critic of a language model, its weights fake; ``shallow`` as of a model."""
    if critic is None or (isinstance(critic, str) and critic == "adapter"):
        return critic
    named, trusted = isinstance(critic, str), config.trust_remote_code
    own = config_for(critic, "critic", trust_remote_code=trusted) if named else critic.config
    own = shallow_copy(own) if shallow else own
    return fake_language_model(own, dtype=torch.float32 if named else critic.dtype, trust_remote_code=trusted)


def _with_fake_weights(network: nn.Module) -> Any:
    """Returns a network like another, with fake weights."""
    fake = hollow_copy(network)
    give_fake_weights(fake)
    return fake


def wants_forecast(args: Any, model: Any) -> bool:
    """Whether a trainer forecasts its run before it loads weights."""
    named = isinstance(model, str)
    refusal.when(args.memory_forecast and not named, "memory_forecast", kind=type(model).__name__)
    if args.memory_forecast is None:
        return named and (args.device.type == "cuda" or args.memory_budget != "auto")
    return bool(args.memory_forecast)


def forecast_before_loading(inputs: Inputs, machine: Machine) -> MemoryForecast | None:
    """Forecasts a run before its weights are loaded; plans begin with what that tells, or with nothing if it fails."""
    config, request, tracker = copy.copy(inputs.config), inputs.request, machine.recovery.tracker
    config.memory_budget = f"{tracker.budget_bytes}B"
    try:
        dtype = config.autocast_dtype or torch.float32
        # What is timed would count on a simulated device.
        found = forecast_memory(
            request.model,
            config,
            device_bytes=tracker.meter.total_bytes(),
            device=config.device.type,
            train_dataset=inputs.train_dataset,
            processing_class=inputs.models.processing_class,
            peft_config=request.peft_config,
            quantization_config=request.quantization_config,
            memory_policy=inputs.memory_policy,
            critic=request.critic,
            eval_dataset=inputs.eval_dataset,
            reward_models=inputs.rewards.models,
            speed=measured_speed(config.device, dtype) if active_simulation() is None else None,
            ranks=config.world_size if config.sharded else 1,
            sharding="fsdp" if config.sharded else "none",
        )
    except Exception as error:  # fake tensors do not run every network, and a run needs no forecast
        logger.warning("no forecast of this run's memory: %s", kind_and_line(error))
        return None
    tracker.record("forecast", **found.plain())
    if found.fits:
        logger.info("forecast: %s", found.sentence())
    elif config.allow_lossy:
        logger.warning("forecast: %s; the run starts, since allow_lossy names remedies", found.sentence())
    else:
        raise MemoryBudgetError(f"Forecast before loading weights: the run {found.sentence()}")
    tracker.expect(found.corrections, found.stranded_bytes, found.failures)
    return found


def _config_of_forecast(args: TrainerConfig, device: str, ranks: int) -> TrainerConfig:
    """Returns a run's settings as a forecast takes them: silent, on the CPU, but in the device's types."""
    refusal.when(device not in ("cuda", "cpu"), "device", device=device)
    config = copy.copy(args) if ranks == 1 else args.on_ranks(ranks)
    left_open = config.left_open("bf16")
    config.use_cpu, config.report_to, config.disable_tqdm = True, "none", True
    config.verify_plan = config.probe_worst_case = config.memory_forecast = False
    config.reward_weights = config.eval_pass_reward = None  # rewards are synthetic
    config.load_best_model_at_end = False
    config.use_vllm = config.use_transformers_continuous_batching = False
    config.rollout_engine, config.async_rollouts = None, 0
    if device == "cuda" and left_open and not config.fp16:
        config.bf16 = True
    return config


def _declared_quantization(config: Any) -> Any:
    """Returns what a config says of how its weights were saved: 4 bits of bitsandbytes, or nothing."""
    declared = getattr(config, "quantization_config", None)
    if declared is None:
        return None
    plain = declared if isinstance(declared, dict) else declared.to_dict()
    refusal.when(not plain.get("load_in_4bit"), "quantization/saved", method=plain.get("quant_method", "unknown"))
    known = inspect.signature(BitsAndBytesConfig).parameters
    return BitsAndBytesConfig(**{name: value for name, value in plain.items() if name in known})


def _dtype(given: Any, config: Any) -> Any:
    """Reads a type of weights: a name, "auto" for that of the config, a type itself, or None where nobody chooses."""
    if given == "auto":
        given = config.dtype or torch.float32
    return getattr(torch, given) if isinstance(given, str) else given


def _fake_reward_model(model: Any, settings: Any) -> Any:
    """Returns a reward model with fake weights, of the types in which it would be loaded."""
    if not isinstance(model, str):
        return _with_fake_weights(model)
    init = dict(settings.model_init_kwargs or {})
    config = config_for(model, "reward model", trust_remote_code=settings.trust_remote_code)
    dtype = _dtype(init.get("dtype", init.get("torch_dtype", "auto")), config) or torch.float32
    return fake_reward_model(config, name=model, dtype=dtype, trust_remote_code=settings.trust_remote_code)
