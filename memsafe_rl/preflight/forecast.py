"""Forecasts a run by running its own step on fake tensors: the longest rows, under the plans it would choose.

Nothing of the step is modelled. The trainer is built around a network of fake weights, its policy makes the plans, and
every phase is tried as `probe_worst_case` tries it; storages count as on a device of the size asked for, which refuses
what does not fit, so that plans are made again as in the run.
"""

from __future__ import annotations

import copy
import inspect
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from memsafe_rl.accounting import charge, in_phase
from memsafe_rl.errors import ConfigError, MemoryBudgetError
from memsafe_rl.memory.runtime.random_state import capture_random_state, set_random_state
from memsafe_rl.memory.runtime.recovery import Recovery
from memsafe_rl.memory.runtime.tracker import MemoryTracker
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.models.diffusion.policy import prepare_policy
from memsafe_rl.preflight.dry_run import Rehearsed, Shared
from memsafe_rl.preflight.fake.device import fake_device, give_fake_weights
from memsafe_rl.preflight.fake.families import config_for
from memsafe_rl.preflight.fake.networks import fake_language_model, fake_reward_model, hollow_copy, shallow_copy
from memsafe_rl.preflight.fake.sharding import read_sharding
from memsafe_rl.preflight.outcome import MemoryForecast
from memsafe_rl.types import Component, Phase

logger = logging.getLogger(__name__)

_UNLIMITED_BYTES = 2**60


def forecast_run(
    trainer_class: type[Any],
    model: Any,
    args: Any,
    *,
    device_bytes: int,
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
    """Forecasts the peak of every phase of a trainer's run, without its weights and without its device."""
    started = time.perf_counter()
    settings, shared = _settings(args, device, ranks), Shared(read_sharding(sharding, ranks), ranks)
    if not isinstance(model, str):
        if processing_class is not None or prompt_tokens is not None or quantization_config is not None:
            raise ConfigError("A DiffusionPolicy has no tokens. Leave processing_class and the like out.")
        found = _forecast_chains(
            trainer_class, model, settings, device_bytes, device, peft_config, memory_policy, critic, shared
        )
        return replace(found, seconds=time.perf_counter() - started)
    init = dict(settings.model_init_kwargs or {})
    given = init.pop("config", None)
    places = {name: init[name] for name in ("revision", "cache_dir", "token", "local_files_only") if name in init}
    config = given or config_for(model, trust_remote_code=settings.trust_remote_code, **places)
    quantization_config = quantization_config or init.get("quantization_config") or _declared_quantization(config)
    if quantization_config is not None and peft_config is None:
        raise ConfigError("A 4-bit base cannot be trained. Pass a peft_config such as LoraConfig(r=16), or no 4 bits.")
    settings.model_init_kwargs = None

    def network(*, frozen: bool = False, shallow: bool = False) -> Any:
        return fake_language_model(
            shallow_copy(config) if shallow else config,
            dtype=_base_dtype(init, config, device, frozen=frozen or peft_config is not None),
            peft_config=None if frozen else peft_config,
            quantization_config=quantization_config,
            trust_remote_code=settings.trust_remote_code,
            frozen=frozen,
            with_critic=critic == "adapter" and not frozen,
        )

    rehearsed = Rehearsed(
        trainer_class,
        device,
        settings,
        train_dataset,
        processing_class,
        prompt_tokens,
        memory_policy,
        partial(_critic_of_tokens, critic, settings, device),
        eval_dataset,
        lambda: [_fake_reward_model(one, settings) for one in reward_models],
        shared,
    )
    with _rehearsing_on(device) as memory:
        memory.divide(shared.parts)
        found = rehearsed.run(network, memory, device_bytes, copies=settings.has_reference and peft_config is None)
    dtype = _base_dtype(init, config, device, frozen=peft_config is not None)
    base = f"weights of the base are {str(dtype).removeprefix('torch.')}"
    assumed = (
        *shared.sentences(),
        rehearsed.about_prompts,
        *(() if not reward_models else ("reward models read as many tokens as prompt and completion have",)),
        base if quantization_config is None else f"{base}, in 4 bits where bitsandbytes quantises",
        *(_ABOUT_CUDA if device == "cuda" else ()),
    )
    return replace(found, assumptions=assumed, seconds=time.perf_counter() - started)


@contextmanager
def _rehearsing_on(device: str) -> Iterator[SimulatedMemory]:
    """Stands for a device; the budget is kept from the optimizer's state on, and before that nothing is refused."""
    with _random_state_kept(), _in_silence(), fake_device(_UNLIMITED_BYTES, stands_for=device) as memory:
        yield memory


@contextmanager
def _in_silence() -> Iterator[None]:
    """Keeps failed allocations from being told: nobody's memory has run out, and the forecast itself says what came."""
    told = logging.getLogger(Recovery.__module__)

    def silent(_: logging.LogRecord) -> bool:
        return False

    told.addFilter(silent)
    try:
        yield
    finally:
        told.removeFilter(silent)


def _forecast_chains(
    trainer_class: type[Any],
    model: Any,
    settings: Any,
    device_bytes: int,
    device: str,
    peft_config: Any,
    memory_policy: Any,
    critic: Any,
    shared: Shared,
) -> MemoryForecast:
    """Forecasts a run of a diffusion policy."""
    further = partial(_critic_of_states, critic)
    rehearsed = Rehearsed(trainer_class, device, settings, None, None, None, memory_policy, further, shared=shared)
    with _rehearsing_on(device) as memory:
        memory.divide(shared.parts)
        with in_phase(Phase.LOAD), charge(Component.WEIGHTS):
            with torch.device("meta"):
                trained, reference = prepare_policy(
                    hollow_copy(model),
                    peft_config=copy.deepcopy(peft_config),
                    device="meta",
                    with_reference=settings.has_reference,
                )
            for network in (trained, reference):
                if network is not None:
                    give_fake_weights(network)
        found = rehearsed.run_trainer(trained, reference, None, memory, device_bytes)
    about = _ABOUT_CUDA if device == "cuda" else ()
    return replace(found, assumptions=(*shared.sentences(), "all chains are alike", *about))


def _critic_of_tokens(critic: Any, settings: Any, device: str) -> dict[str, Any]:
    """Gives a trainer's argument for a critic of a language model, its weights fake."""
    if critic is None or critic == "adapter":
        return {} if critic is None else {"critic": critic}
    trusted = settings.trust_remote_code
    own = config_for(critic, "critic", trust_remote_code=trusted) if isinstance(critic, str) else critic.config
    kind = _base_dtype({}, own, device, frozen=False) if isinstance(critic, str) else critic.dtype
    return {"critic": fake_language_model(own, dtype=kind, trust_remote_code=trusted)}


def _critic_of_states(critic: Any) -> dict[str, Any]:
    """Gives a trainer's argument for a critic of a denoiser, its weights fake."""
    if not isinstance(critic, nn.Module):
        return {} if critic is None else {"critic": critic}
    return {"critic": _with_fake_weights(critic)}


def _with_fake_weights(network: nn.Module) -> Any:
    """Gives a network like another, with fake weights."""
    fake = hollow_copy(network)
    give_fake_weights(fake)
    return fake


def wants_forecast(args: Any, model: Any) -> bool:
    """Whether a trainer forecasts its run before it loads weights."""
    named = isinstance(model, str)
    if args.memory_forecast and not named:
        raise ConfigError(
            f"memory_forecast is True, but model is a {type(model).__name__} whose weights are there already. Give its "
            "name or folder, or use probe_worst_case."
        )
    if args.memory_forecast is None:
        return named and (args.device.type == "cuda" or args.memory_budget != "auto")
    return bool(args.memory_forecast)


def foresee(
    trainer_class: type[Any], model: str, args: Any, tracker: MemoryTracker, **given: Any
) -> MemoryForecast | None:
    """Forecasts a run that is about to load its weights, and refuses one that cannot fit."""
    settings = copy.copy(args)
    settings.memory_budget = tracker.budget_bytes
    device = args.device.type
    try:
        found = forecast_run(
            trainer_class, model, settings, device_bytes=tracker.meter.total_bytes(), device=device, **given
        )
    except Exception as error:  # fake tensors do not run every network, and a run needs no forecast
        logger.warning("no forecast of this run's memory: %s: %s", type(error).__name__, str(error).split("\n")[0])
        return None
    tracker.record("forecast", **found.plain())
    if found.fits:
        logger.info("forecast: %s", found.sentence())
    elif args.allow_lossy:
        logger.warning("forecast: %s; going on, for allow_lossy names remedies", found.sentence())
    else:
        raise MemoryBudgetError(f"Forecast before loading weights: the run {found.sentence()}")
    return found


_ABOUT_CUDA = (
    "CPU kernels stand for CUDA's: what the driver, cuBLAS and other CUDA kernels hold besides is not counted and has "
    "not been measured yet",
)


def _settings(args: Any, device: str, ranks: int) -> Any:
    """Gives a run's settings as a forecast takes them: silent, on the CPU, but in the device's types."""
    if device not in ("cuda", "cpu"):
        raise ConfigError(f"device is {device!r}; write 'cuda' or 'cpu'.")
    settings = copy.copy(args)
    if ranks != 1:
        kind = type(args)  # its world_size asks the launcher
        settings.__class__ = type(kind.__name__, (kind,), {"world_size": property(lambda _: ranks)})
    left_open = "bf16" in settings._filled
    settings.use_cpu, settings.report_to, settings.disable_tqdm = True, "none", True
    settings.verify_plan = settings.probe_worst_case = settings.memory_forecast = False
    settings.reward_weights = settings.eval_pass_reward = None  # rewards are made up
    settings.load_best_model_at_end = False
    settings.use_vllm = settings.use_transformers_continuous_batching = False
    if device == "cuda" and left_open and not settings.fp16:
        settings.bf16 = True
    return settings


def _declared_quantization(config: Any) -> Any:
    """Gives what a config says of how its weights were saved: 4 bits of bitsandbytes, or nothing."""
    declared = getattr(config, "quantization_config", None)
    if declared is None:
        return None
    plain = declared if isinstance(declared, dict) else declared.to_dict()
    if not plain.get("load_in_4bit"):
        raise ConfigError(
            f"the model is saved quantised ({plain.get('quant_method', 'unknown')}), in a way that cannot be forecast. "
            "Use probe_worst_case in the run itself."
        )
    known = inspect.signature(BitsAndBytesConfig).parameters
    return BitsAndBytesConfig(**{name: value for name, value in plain.items() if name in known})


def _base_dtype(init: Mapping[str, Any], config: Any, device: str, *, frozen: bool) -> torch.dtype:
    """Gives the type in which a named model's weights are loaded, as `load_model` does."""
    given = init.get("dtype", init.get("torch_dtype"))
    if given == "auto":
        given = config.dtype or torch.float32
    if isinstance(given, torch.dtype):
        return given
    if isinstance(given, str):
        return cast(torch.dtype, getattr(torch, given))
    return torch.bfloat16 if device == "cuda" and frozen else torch.float32


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Puts random generators back: building a trainer seeds them."""
    state = capture_random_state()
    try:
        yield
    finally:
        set_random_state(state)


def _fake_reward_model(model: Any, settings: Any) -> Any:
    """Gives a reward model with fake weights, of the types in which it would be loaded."""
    if not isinstance(model, str):
        return _with_fake_weights(model)
    init = dict(settings.model_init_kwargs or {})
    config = config_for(model, "reward model", trust_remote_code=settings.trust_remote_code)
    given = init.get("dtype", init.get("torch_dtype", "auto"))
    own = config.dtype if given == "auto" else getattr(torch, given) if isinstance(given, str) else given
    return fake_reward_model(
        config, name=model, dtype=own or torch.float32, trust_remote_code=settings.trust_remote_code
    )
