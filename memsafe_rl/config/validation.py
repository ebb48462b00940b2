"""Fills in and checks a configuration, one setting at a time, then together; texts are in `refusals.yaml`."""

from __future__ import annotations

import functools
import logging
import math
import os
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from transformers.optimization import get_scheduler
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames
from transformers.utils import logging as transformers_logging

from memsafe_rl.config import refusal
from memsafe_rl.config.declaring import check_choice, check_known, read
from memsafe_rl.config.degradation import LOSSY_REMEDIES
from memsafe_rl.config.generation_options import check_generation
from memsafe_rl.config.settings import OPTIMIZER_ARGUMENTS
from memsafe_rl.memory.budget import check_budget
from memsafe_rl.ops.advantages import ESTIMATORS
from memsafe_rl.ops.losses import LOSSES
from memsafe_rl.ops.registry import Registry
from memsafe_rl.rollout.engines import ENGINES
from memsafe_rl.rollout.external.sampling_support import check_options, refuse_missing_vllm
from memsafe_rl.rollout.server.routes import KEY_VARIABLE
from memsafe_rl.types import RolloutPlan

if TYPE_CHECKING:
    from memsafe_rl.config.base import TrainerConfig

_say_once = functools.cache(logging.getLogger(__name__).warning)

ENUMS = {kind.__name__: kind for kind in (HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType, OptimizerNames)}
"""The enumerations of transformers that settings are declared with."""

REGISTRIES: dict[str, Registry[Any]] = {"losses": LOSSES, "estimators": ESTIMATORS, "engines": ENGINES}
"""The registries that settings are declared with; a user's own part is entered under its name."""


def validate(config: TrainerConfig) -> None:
    """Reads every setting as its type, fills in what was left open, and checks all of it."""
    _read_settings(config)
    _fill_batches(config)
    _fill_precision(config)
    _fill_evaluation(config)
    _fill_rest(config)
    check_generation(config)
    _check_optimizer(config)
    _check_importance(config)
    _check_engine(config)
    _check_sharding(config)
    _check_reference(config)
    _check_saving(config)
    _check_memory(config)
    config.check_algorithm()


def _read_settings(config: TrainerConfig) -> None:
    for name, one in config.declared.items():
        given = getattr(config, name)
        registry = REGISTRIES.get(one.registry)
        is_left_out = given is None and one.default is None
        value = one.read(given if registry is None or is_left_out else registry.name_of(given))
        if registry is not None and value is not None:
            check_choice(name, value, registry)
        object.__setattr__(config, name, ENUMS[one.enum](value) if one.enum else value)


def _fill_batches(config: TrainerConfig) -> None:
    if config.num_generations < config.least_group:
        raise refusal("num_generations/least", config=config, enough=max(8, config.least_group))
    batch = config.per_device_train_batch_size * config.world_size
    written = f"per_device_train_batch_size {config.per_device_train_batch_size} x {config.world_size} rank(s)"
    given, steps = config.generation_batch_size, config.steps_per_generation
    accumulation = config.gradient_accumulation_steps
    if steps is None and (given or 0) % batch:
        fitting = batch * math.ceil((given or 0) / batch)
        raise refusal("generation_batch_size/multiple", given=given, written=written, batch=batch, fitting=fitting)
    if steps is None:
        steps = accumulation if given is None else given // batch
        config.fill("steps_per_generation", steps)
    if given is None:
        config.fill("generation_batch_size", batch * steps)
    elif given != batch * steps:
        raise refusal("generation_batch_size/twice", given=given, written=written, steps=steps, product=batch * steps)
    if steps < accumulation and accumulation % steps == 0 and config.num_iterations == 1:
        _say_once(
            f"steps_per_generation is {steps}, and an optimizer step takes {accumulation} batches: its "
            f"{accumulation // steps} rollouts are drawn with the same weights, so they are drawn as one."
        )
        steps = accumulation
        config.fill("steps_per_generation", steps)
        config.fill("generation_batch_size", batch * steps)
    group = config.num_generations
    fitting = math.lcm(accumulation, group // math.gcd(group, batch))  # of whole groups
    remedy = f"Set steps_per_generation={fitting * math.ceil(steps / fitting)} (and leave generation_batch_size)."
    if (rows := batch * steps) % group:
        raise refusal("num_generations/multiple", written=written, steps=steps, rows=rows, group=group, remedy=remedy)
    refusal.when(steps % accumulation, "steps_per_generation", steps=steps, accumulation=accumulation, remedy=remedy)


def _fill_precision(config: TrainerConfig) -> None:
    refusal.when(config.fp16 and config.bf16, "fp16/bf16")
    on_cuda = config.device.type == "cuda"
    supported = on_cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    refusal.when(config.bf16 and on_cuda and not supported, "bf16/device")
    if config.bf16 is None:
        config.fill("bf16", supported and not config.fp16)
        if not supported and not config.fp16:
            _say_once(f"bf16 is off: on this device ({config.device.type}) the forward passes run in float32.")


def _fill_evaluation(config: TrainerConfig) -> None:
    if config.eval_strategy != "no" and not config.do_eval:
        config.fill("do_eval", True)
    if config.eval_strategy == "steps" and not config.eval_steps:
        config.fill("eval_steps", config.logging_steps)
    for name in ("eval_steps", "save_steps", "logging_steps"):
        steps = getattr(config, name)
        if steps is not None and steps > 1 and not float(steps).is_integer():
            raise refusal("steps/whole", name=name, steps=steps)
    for k in config.eval_pass_at or ():
        refusal.when(not 1 <= k <= config.eval_generations, "eval_pass_at", k=k, config=config, least=max(1, k))
    if config.metric_for_best_model is None and (config.load_best_model_at_end or config.save_strategy == "best"):
        config.fill("metric_for_best_model", "reward")
    if config.metric_for_best_model is not None and config.greater_is_better is None:
        config.fill("greater_is_better", not config.metric_for_best_model.endswith("loss"))


def _fill_rest(config: TrainerConfig) -> None:
    refusal.when(config.max_steps == 0, "max_steps")
    weights = config.reward_weights
    refusal.when(config.dynamic_sampling and weights and not any(weights), "dynamic_sampling/weights", weights=weights)
    for name, default in (("output_dir", "trainer_output"), ("allow_lossy", ())):
        if getattr(config, name) is None:
            config.fill(name, default)
    config.fill("output_dir", os.path.expanduser(config.output_dir))
    if config.disable_tqdm is None:
        config.fill("disable_tqdm", transformers_logging.get_verbosity() > logging.WARNING)
    config.fill("report_to", _trackers(config))
    if str(config.resume_from_checkpoint).lower() == "true":
        config.fill("resume_from_checkpoint", True)


def _trackers(config: TrainerConfig) -> list[str]:
    asked = [tracker for tracker in config.trackers if tracker.lower() != "none"]
    if "all" in asked:
        return sorted(str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers())
    for tracker in asked:
        check_choice("report_to", tracker, ("none", "all", *LOGGER_TYPE_TO_CLASS))
    return asked


def _check_optimizer(config: TrainerConfig) -> None:
    known = OPTIMIZER_ARGUMENTS.get(config.optim.value, ())  # type: ignore[attr-defined]
    for argument in config.optim_args.split(",") if config.optim_args else ():
        name, equals, value = map(str.strip, argument.partition("="))
        if name not in known or not equals or not value:
            allowed = f"It takes {', '.join(known)}, as 'name=value,name=value'." if known else "It takes none."
            raise refusal("optim_args", argument=argument.strip(), config=config, allowed=allowed)
    arguments = dict(config.lr_scheduler_kwargs or {})
    try:  # transformers checks them only when it makes the schedule
        some = torch.optim.SGD([torch.empty(1, device="meta")], lr=config.learning_rate)  # a check allocates nothing
        get_scheduler(config.lr_scheduler_type, some, 0, 1, scheduler_specific_kwargs=arguments)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise refusal("lr_scheduler_kwargs", arguments=arguments, config=config, error=error) from None


def _check_importance(config: TrainerConfig) -> None:
    rejection, limit = config.sampler_rejection, config.sampler_rejection_limit
    refusal.when((rejection is None) != (limit is None), "sampler_rejection", rejection=rejection, limit=limit)
    low, high = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
    if low is not None and high is not None and low >= high:
        raise refusal("vllm_importance_sampling_clip_min", low=low, high=high)
    if low is None and high is None and config.vllm_importance_sampling_mode.endswith("truncate"):
        raise refusal("vllm_importance_sampling_mode", config=config)


def _check_sharding(config: TrainerConfig) -> None:
    """Refuses what FSDP2 cannot do here, or what has not been proved to learn the same under it."""
    unknown = [word for word in (config.fsdp or "").split() if word not in ("full_shard", "auto_wrap")]
    refusal.when(unknown, "fsdp", config=config, unknown=unknown)
    odd = [name for name, value in (config.fsdp_config or {}).items() if value not in _FSDP_SETTINGS.get(name, ())]
    if odd and config.fsdp:
        raise refusal("fsdp_config", odd=odd, value=(config.fsdp_config or {})[odd[0]])
    if not config.sharded:
        return
    together = {
        "torch_compile": config.compile_mode is not None,
        "fp16": config.fp16,
        "objectives": bool(config.objective_list),
        "master_weights='stochastic_rounding'": config.master_weights == "stochastic_rounding",
        "save_in_background": config.save_in_background is True,
    }
    optim = getattr(config.optim, "value", str(config.optim))
    refusal.when(optim not in _ELEMENTWISE, "fsdp/optim", optim=optim, known=", ".join(_ELEMENTWISE))
    for name, is_set in together.items():
        refusal.when(is_set, "fsdp/beside", name=name)
    for name, known in _LAUNCHED_WITH.items():
        value = os.environ.get(name, known[0])
        if value.lower() not in known:
            raise refusal("fsdp/launcher", name=name, value=value, entry=name.lower(), known=known)


_ELEMENTWISE = ("adamw_torch_fused", "adamw_torch", "sgd", "adagrad", "rmsprop")
_LAUNCHED_WITH = {
    "FSDP_OFFLOAD_PARAMS": ("false", "0", "no"),
    "FSDP_SHARDING_STRATEGY": ("full_shard", "1"),
    "FSDP_RESHARD_AFTER_FORWARD": ("true", "1", "yes", "full_shard"),
}
"""What accelerate's launcher may say of how weights are divided; the first is what its file has by itself."""
_FSDP_SETTINGS: dict[str, tuple[object, ...]] = {
    "version": (2, "2"),
    "fsdp_version": (2, "2"),
    "reshard_after_forward": (True, "true"),
    "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",),
}


def _check_engine(config: TrainerConfig) -> None:
    if len(config.engines_chosen) > 1:
        raise refusal("engines/both", names=" and ".join(config.engines_chosen))
    chosen = [setting for setting, engine in config.engines_chosen.items() if engine != RolloutPlan.engine]
    if config.caches_in_8_bits:
        told, partial = f"cache_implementation is {config.cache_implementation!r}", config.partial_rollout_tokens
        refusal.when(chosen, "cache_implementation/engine", told=told, engines=chosen)
        refusal.when(config.verify_plan, "cache_implementation/verify_plan", told=told)
        refusal.when(partial is not None, "cache_implementation/partial", told=told, config=config)
    if not chosen:
        return
    for name in ("verify_plan", "probe_worst_case"):
        refusal.when(getattr(config, name), "engines/beside", name=name, chosen=chosen)
    if "vllm_server" in config.engines_chosen.values():
        for url in config.vllm_servers:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
                shown = "with a name or password" if "@" in url else repr(url)
                raise refusal("vllm_server_base_url", shown=shown, variable=KEY_VARIABLE)
        refusal.when(config.world_size > 1, "vllm_mode/ranks", config=config)
        refusal.when(config.vllm_enable_sleep_mode, "vllm_enable_sleep_mode")
    if "vllm" in config.engines_chosen.values():
        refuse_missing_vllm()
        refusal.when(config.world_size > 1, "use_vllm/ranks", config=config)
        longest = config.vllm_max_model_length
        if longest is not None and longest <= config.max_completion_length:
            raise refusal("vllm_max_model_length", longest=longest, config=config)
    check_options(config.transformers_continuous_batching_config or {})


def _check_reference(config: TrainerConfig) -> None:
    refusal.when(config.sync_ref_model and not config.has_reference, "sync_ref_model")
    if config.use_adaptive_entropy and not config.entropy_coef_min <= config.entropy_coef <= config.entropy_coef_max:
        raise refusal("entropy_coef", config=config)
    _ = config.kl_stop_rule, config.alarm_rules


def _check_saving(config: TrainerConfig) -> None:
    refusal.when(config.save_strategy == "best" and config.eval_strategy == "no", "save_strategy")
    if not config.load_best_model_at_end or config.save_strategy == "best":
        return
    refusal.when(config.eval_strategy != config.save_strategy, "load_best_model_at_end/strategies", config=config)
    if config.eval_strategy == "steps" and not _is_multiple(config.save_steps, config.eval_steps or 0):
        raise refusal("load_best_model_at_end/steps", config=config)


def _check_memory(config: TrainerConfig) -> None:
    refusal.when(config.batch_invariant and config.compile_mode is not None, "batch_invariant")
    refusal.when(config.batch_invariant and not config.disable_dropout, "batch_invariant/dropout")
    check_budget(config.memory_budget)
    for remedy in config.allow_lossy:
        check_choice("allow_lossy", remedy, tuple(LOSSY_REMEDIES))
    kinds: dict[str, Any] = {"use_reentrant": bool, "offload": bool, "every_n_layers": int}
    instead = {
        "use_reentrant": "recomputation here is not reentrant, with the same gradient",
        "every_n_layers": "the plan recomputes all blocks or none, and cuts micro-batches to fit beside either",
    }
    given = config.gradient_checkpointing_kwargs or {}
    check_known(given, kinds, "key of gradient_checkpointing_kwargs")
    for key, value in given.items():
        found = read(f"{key} of gradient_checkpointing_kwargs", value, kinds[key])
        refusal.when(key == "every_n_layers" and found < 1, "every_n_layers", found=found)
        if (key, found) in (("use_reentrant", True), ("every_n_layers", max(2, found))):
            _say_once(f"gradient_checkpointing_kwargs has {key}={found!r}, which changes nothing here: {instead[key]}.")
    if isinstance(config.pad_to_multiple_of, str) and config.pad_to_multiple_of != "auto":
        config.fill("pad_to_multiple_of", read("pad_to_multiple_of", config.pad_to_multiple_of, int | None))
        config.declared["pad_to_multiple_of"].read(config.pad_to_multiple_of)


def _is_multiple(whole: float, part: float) -> bool:
    """Returns whether one count of steps is a multiple of another; shares of a run only compare with shares."""
    if part <= 0 or (whole < 1) != (part < 1):
        return False
    quotient = whole / part
    return round(quotient) >= 1 and math.isclose(quotient, round(quotient), rel_tol=1e-9)
