"""Where a configuration is filled in and checked: first every setting by itself, then what must fit together."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from transformers.optimization import get_scheduler
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames
from transformers.utils import logging as transformers_logging

from memsafe_rl.config.degradation import LOSSY_REMEDIES
from memsafe_rl.config.generation_options import check_generation
from memsafe_rl.config.settings import OPTIMIZER_ARGUMENTS
from memsafe_rl.config.values import check_choice, read, unknown
from memsafe_rl.errors import ConfigError
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

logger = logging.getLogger(__name__)
_say_once = functools.cache(logger.warning)

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
        raise ConfigError(
            f"num_generations is {config.num_generations}; advantages compare the completions of one prompt, so "
            f"that at least {config.least_group} are needed. Set num_generations={max(8, config.least_group)}."
        )
    batch = config.per_device_train_batch_size * config.world_size
    written = f"per_device_train_batch_size {config.per_device_train_batch_size} x {config.world_size} rank(s)"
    given, steps = config.generation_batch_size, config.steps_per_generation
    accumulation = config.gradient_accumulation_steps
    if steps is None and (given or 0) % batch:
        raise ConfigError(
            f"generation_batch_size is {given}, not a multiple of {written} = {batch}. Set "
            f"generation_batch_size={batch * math.ceil((given or 0) / batch)}."
        )
    if steps is None:
        steps = accumulation if given is None else given // batch
        config.fill("steps_per_generation", steps)
    if given is None:
        config.fill("generation_batch_size", batch * steps)
    elif given != batch * steps:
        raise ConfigError(
            f"generation_batch_size is {given}, but {written} x steps_per_generation {steps} = {batch * steps}. Set "
            "only one of the two."
        )
    if steps < accumulation and accumulation % steps == 0 and config.num_iterations == 1:
        _say_once(
            f"steps_per_generation is {steps}, and an optimizer step takes {accumulation} batches: its "
            f"{accumulation // steps} rollouts are drawn with the same weights, so they are drawn as one."
        )
        steps = accumulation
        config.fill("steps_per_generation", steps)
        config.fill("generation_batch_size", batch * steps)
    _check_rollout(config, batch, steps, written)


def _check_rollout(config: TrainerConfig, batch: int, steps: int, written: str) -> None:
    group, accumulation = config.num_generations, config.gradient_accumulation_steps
    whole_groups = group // math.gcd(group, batch)
    fitting = math.lcm(accumulation, whole_groups)
    remedy = f"Set steps_per_generation={fitting * math.ceil(steps / fitting)} (and leave generation_batch_size)."
    if batch * steps % group:
        raise ConfigError(
            f"The generation batch, {written} x steps_per_generation {steps} = {batch * steps} completions, is "
            f"not a multiple of num_generations {group}. {remedy}"
        )
    if steps % accumulation:
        raise ConfigError(
            f"steps_per_generation is {steps}, not a multiple of gradient_accumulation_steps {accumulation}: an "
            f"optimizer step would straddle two rollouts. {remedy}"
        )


def _fill_precision(config: TrainerConfig) -> None:
    if config.fp16 and config.bf16:
        raise ConfigError("fp16 and bf16 are both True. Set one of them to False.")
    on_cuda = config.device.type == "cuda"
    supported = on_cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    if config.bf16 and on_cuda and not supported:
        raise ConfigError("bf16 is True, but this CUDA device does not support it. Set fp16=True, bf16=False.")
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
            raise ConfigError(f"{name} is {steps}; above 1 it must be a whole number of optimizer steps.")
    for k in config.eval_pass_at or ():
        if not 1 <= k <= config.eval_generations:
            raise ConfigError(
                f"eval_pass_at has {k}, but an evaluation draws {config.eval_generations} completion(s) a prompt. "
                f"Set num_generations_eval={max(1, k)}, or lower k."
            )
    if config.metric_for_best_model is None and (config.load_best_model_at_end or config.save_strategy == "best"):
        config.fill("metric_for_best_model", "reward")
    if config.metric_for_best_model is not None and config.greater_is_better is None:
        config.fill("greater_is_better", not config.metric_for_best_model.endswith("loss"))


def _fill_rest(config: TrainerConfig) -> None:
    if config.max_steps == 0:
        raise ConfigError("max_steps is 0, which TRL reads as all epochs. Give optimizer steps, or -1 for all epochs.")
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
            raise ConfigError(
                f"optim_args has {argument.strip()!r}, which optim {config.optim.value!r} does not take. {allowed}"  # type: ignore[attr-defined]
            )
    arguments = dict(config.lr_scheduler_kwargs or {})
    try:  # transformers checks them only when it makes the schedule
        some = torch.optim.SGD([torch.empty(1, device="meta")], lr=1.0)  # a check allocates nothing
        get_scheduler(config.lr_scheduler_type, some, 0, 1, scheduler_specific_kwargs=arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"lr_scheduler_kwargs is {arguments!r}, which lr_scheduler_type {config.lr_scheduler_type.value!r} cannot "  # type: ignore[attr-defined]
            f"use: {error}. Set what it takes, or another lr_scheduler_type."
        ) from None


def _check_importance(config: TrainerConfig) -> None:
    rejection, limit = config.sampler_rejection, config.sampler_rejection_limit
    if (rejection is None) != (limit is None):
        raise ConfigError(
            f"sampler_rejection is {rejection!r} with sampler_rejection_limit {limit!r}, and neither works alone. Set "
            "both, such as sampler_rejection='token_k1' and sampler_rejection_limit=0.7 (nats), or leave both out."
        )
    low, high = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
    if low is not None and high is not None and low >= high:
        raise ConfigError(
            f"vllm_importance_sampling_clip_min is {low}, not below vllm_importance_sampling_clip_max {high}. "
            "Lower the first or raise the second."
        )
    if low is None and high is None and config.vllm_importance_sampling_mode.endswith("truncate"):
        raise ConfigError(
            f"vllm_importance_sampling_mode is {config.vllm_importance_sampling_mode!r}, but it has no bound. "
            "Set vllm_importance_sampling_clip_max=3.0."
        )


def _check_sharding(config: TrainerConfig) -> None:
    """Refuses what FSDP2 cannot do here, or what has not been proved to learn the same under it."""
    unknown = [word for word in (config.fsdp or "").split() if word not in ("full_shard", "auto_wrap")]
    if unknown:
        raise ConfigError(
            f"fsdp is {config.fsdp!r}, but {unknown[0]!r} is not supported: weights, gradients and optimizer state are "
            "divided, block by block. Set fsdp='full_shard'."
        )
    odd = [name for name, value in (config.fsdp_config or {}).items() if value not in _FSDP_SETTINGS.get(name, ())]
    if odd and config.fsdp:
        raise ConfigError(
            f"fsdp_config has {odd[0]}={(config.fsdp_config or {})[odd[0]]!r}, which is not supported: FSDP2 divides "
            "each block, with every setting as PyTorch has it. Leave it out."
        )
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
    if optim not in _ELEMENTWISE:
        raise ConfigError(
            f"optim is {optim!r} with fsdp, but what it does to a weight depends on how the weight is cut. Set optim "
            f"to one of {', '.join(_ELEMENTWISE)}."
        )
    for name, is_set in together.items():
        if is_set:
            raise ConfigError(f"{name} is set with fsdp, under which it does not work yet. Leave one of the two out.")
    for name, known in _LAUNCHED_WITH.items():
        value = os.environ.get(name, known[0])
        if value.lower() not in known:
            raise ConfigError(
                f"the launcher sets {name}={value!r}, which is not supported: FSDP2 divides each block and keeps its "
                f"parts on the device. Write {name.lower()}: {known[0]} in accelerate's file."
            )


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
        names = " and ".join(config.engines_chosen)
        raise ConfigError(f"{names} are both set. Set one of them, for there is one engine.")
    chosen = [setting for setting, engine in config.engines_chosen.items() if engine != RolloutPlan.engine]
    if config.caches_in_8_bits:
        _check_rounded_cache(config, chosen)
    if not chosen:
        return
    for name in ("verify_plan", "probe_worst_case"):
        if getattr(config, name):
            raise ConfigError(
                f"{name} is True with {chosen[0]}; it looks at the library's own engine. Leave one of the two out."
            )
    if "vllm_server" in config.engines_chosen.values():
        _check_servers(config)
    if "vllm" in config.engines_chosen.values():
        _check_vllm(config)
    check_options(config.transformers_continuous_batching_config or {})


def _check_rounded_cache(config: TrainerConfig, engines: Sequence[str]) -> None:
    told = f"cache_implementation is {config.cache_implementation!r}"
    if engines:
        raise ConfigError(f"{told} with {engines[0]}, which keeps its own cache. Leave one of the two out.")
    if config.verify_plan:
        raise ConfigError(
            f"{told} with verify_plan, which proves that plans change no token; a cache in 8 bits may, where "
            "rounding tips a number over. Leave one of the two out."
        )
    if config.partial_rollout_tokens is not None:
        raise ConfigError(
            f"{told} with partial_rollout_tokens={config.partial_rollout_tokens}, whose completions go on under "
            "newer weights; only one of these corrections can be made. Leave one of the two out."
        )


def _check_vllm(config: TrainerConfig) -> None:
    refuse_missing_vllm()
    if config.world_size > 1:
        raise ConfigError(
            f"use_vllm is True in a run of {config.world_size} ranks; vLLM would take over their process group. "
            "Run one process, or leave use_vllm out."
        )
    longest = config.vllm_max_model_length
    if longest is not None and longest <= config.max_completion_length:
        raise ConfigError(
            f"vllm_max_model_length is {longest}, which leaves no prompt beside max_completion_length "
            f"{config.max_completion_length}. Raise it to the longest prompt plus {config.max_completion_length}."
        )


def _check_servers(config: TrainerConfig) -> None:
    for url in config.vllm_servers:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
            shown = "with a name or password" if "@" in url else repr(url)
            raise ConfigError(
                f"vllm_server_base_url has the address {shown}. Write http://HOST:PORT, several separated by commas; "
                f"a server's key belongs in the environment variable {KEY_VARIABLE}."
            )
    if config.world_size > 1:
        raise ConfigError(
            f"vllm_mode is 'server' in a run of {config.world_size} ranks, each of which would hand its weights over. "
            "Run one process, or leave use_vllm out."
        )
    if config.vllm_enable_sleep_mode:
        raise ConfigError(
            "vllm_enable_sleep_mode is True with vllm_mode 'server', whose memory is not this run's. Leave it out."
        )


def _check_reference(config: TrainerConfig) -> None:
    if config.sync_ref_model and not config.has_reference:
        raise ConfigError(
            "sync_ref_model is True, but beta is 0, so that there is no reference. "
            "Set beta above 0 or sync_ref_model=False."
        )
    if config.use_adaptive_entropy and not config.entropy_coef_min <= config.entropy_coef <= config.entropy_coef_max:
        raise ConfigError(
            f"entropy_coef is {config.entropy_coef}, outside entropy_coef_min {config.entropy_coef_min} and "
            f"entropy_coef_max {config.entropy_coef_max}. Set it between them."
        )
    _ = config.kl_stop_rule, config.alarm_rules


def _check_saving(config: TrainerConfig) -> None:
    if config.save_strategy == "best" and config.eval_strategy == "no":
        raise ConfigError("save_strategy is 'best', but eval_strategy 'no' finds none. Set eval_strategy='steps'.")
    if not config.load_best_model_at_end or config.save_strategy == "best":
        return
    if config.eval_strategy != config.save_strategy:
        raise ConfigError(
            f"load_best_model_at_end needs equal strategies, but save_strategy is {config.save_strategy.value!r} "  # type: ignore[attr-defined]
            f"and eval_strategy {config.eval_strategy.value!r}. Set eval_strategy={config.save_strategy.value!r}."  # type: ignore[attr-defined]
        )
    if config.eval_strategy == "steps" and not _is_multiple(config.save_steps, config.eval_steps or 0):
        raise ConfigError(
            f"load_best_model_at_end needs every checkpoint to be evaluated, but save_steps {config.save_steps} is "
            f"not a multiple of eval_steps {config.eval_steps}. Set save_steps={config.eval_steps}."
        )


def _check_memory(config: TrainerConfig) -> None:
    if config.batch_invariant and config.compile_mode is not None:
        raise ConfigError(
            "batch_invariant=True fixes the tiles of every product, which torch.compile would choose anew. Leave one "
            "of batch_invariant and torch_compile out."
        )
    check_budget(config.memory_budget)
    for remedy in config.allow_lossy:
        check_choice("allow_lossy", remedy, tuple(LOSSY_REMEDIES))
    _check_checkpointing(config)
    if isinstance(config.pad_to_multiple_of, str) and config.pad_to_multiple_of != "auto":
        config.fill("pad_to_multiple_of", read("pad_to_multiple_of", config.pad_to_multiple_of, int | None))
        config.declared["pad_to_multiple_of"].read(config.pad_to_multiple_of)


def _check_checkpointing(config: TrainerConfig) -> None:
    kinds: dict[str, Any] = {"use_reentrant": bool, "offload": bool, "every_n_layers": int}
    instead = {
        "use_reentrant": "recomputation here is not reentrant, with the same gradient",
        "every_n_layers": "the plan recomputes all blocks or none, and cuts micro-batches to fit beside either",
    }
    given = config.gradient_checkpointing_kwargs or {}
    for key, value in given.items():
        if key not in kinds:
            raise unknown(key, kinds, "key of gradient_checkpointing_kwargs")
        found = read(f"{key} of gradient_checkpointing_kwargs", value, kinds[key])
        if key == "every_n_layers" and found < 1:
            raise ConfigError(f"every_n_layers of gradient_checkpointing_kwargs is {found}; it must be at least 1.")
        if (key, found) in (("use_reentrant", True), ("every_n_layers", max(2, found))):
            _say_once(f"gradient_checkpointing_kwargs has {key}={found!r}, which changes nothing here: {instead[key]}.")


def _is_multiple(whole: float, part: float) -> bool:
    """Tells whether one count of steps is a multiple of another; shares of a run only compare with shares."""
    if part <= 0 or (whole < 1) != (part < 1):
        return False
    quotient = whole / part
    return round(quotient) >= 1 and math.isclose(quotient, round(quotient), rel_tol=1e-9)
