"""What values settings may have: types, ranges and choices, as pure functions of names and values."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args, get_origin

from memsafe_rl.config.refusals import nearest
from memsafe_rl.errors import ConfigError
from memsafe_rl.ops.advantages import ESTIMATORS
from memsafe_rl.ops.losses import LOSSES
from memsafe_rl.ops.registry import Registry

_TRUE, _FALSE, _NONE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}, {"none", "null", ""}

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "a mapping (JSON on a command line)",
    NoneType: "none",
}


@dataclass(frozen=True)
class Range:
    """An interval of numbers.

    Args:
        low: least number.
        high: greatest number.
        open_low: whether ``low`` itself lies outside.
        open_high: whether ``high`` itself lies outside.
        none: what None stands for, where infinity might be written for it; empty where that is unlikely.
    """

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    none: str = ""

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below and _is_finite(value)

    def __str__(self) -> str:
        bounds = []
        if self.low > -math.inf:
            bounds.append(f"{'more than' if self.open_low else 'at least'} {self.low:g}")
        if self.high < math.inf:
            bounds.append(f"{'less than' if self.open_high else 'at most'} {self.high:g}")
        words = " and ".join(bounds) or "finite"
        return f"{words}, or None for {self.none}" if self.none else words


_POSITIVE = Range(0, open_low=True)
_NOT_NEGATIVE = Range(0)
_SHARE = Range(0, 1)
_AT_LEAST_ONE = Range(1)

RANGES: dict[str, Range] = {
    "per_device_train_batch_size": _AT_LEAST_ONE,
    "per_device_eval_batch_size": _AT_LEAST_ONE,
    "gradient_accumulation_steps": _AT_LEAST_ONE,
    "steps_per_generation": _AT_LEAST_ONE,
    "generation_batch_size": _AT_LEAST_ONE,
    "num_iterations": _AT_LEAST_ONE,
    "num_generations_eval": _AT_LEAST_ONE,
    "num_train_epochs": _POSITIVE,
    "max_steps": Range(-1),
    "learning_rate": _NOT_NEGATIVE,
    "warmup_steps": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "adam_beta1": Range(0, 1, open_high=True),
    "adam_beta2": Range(0, 1, open_high=True),
    "adam_epsilon": _NOT_NEGATIVE,
    "max_grad_norm": _NOT_NEGATIVE,
    "router_aux_loss_coef": _NOT_NEGATIVE,
    "torch_empty_cache_steps": _AT_LEAST_ONE,
    "pad_to_multiple_of": _AT_LEAST_ONE,
    "eval_steps": _NOT_NEGATIVE,
    "eval_delay": _NOT_NEGATIVE,
    "save_steps": _POSITIVE,
    "save_total_limit": _AT_LEAST_ONE,
    "logging_steps": _POSITIVE,
    "num_completions_to_print": _AT_LEAST_ONE,
    "seed": Range(0, 2**63, open_high=True),
    "data_seed": Range(0, 2**63, open_high=True),
    "max_prompt_length": _AT_LEAST_ONE,
    "max_completion_length": _AT_LEAST_ONE,
    "max_turn_length": _AT_LEAST_ONE,
    "max_episode_turns": _AT_LEAST_ONE,
    "max_tool_calling_iterations": _NOT_NEGATIVE,
    "temperature": _POSITIVE,
    "top_p": Range(0, 1, open_low=True),
    "top_k": _NOT_NEGATIVE,
    "min_p": _SHARE,
    "repetition_penalty": _POSITIVE,
    "top_h": Range(0, 1, open_low=True),
    "typical_p": Range(0, 1, open_low=True),
    "epsilon_cutoff": Range(0, 1, open_high=True),
    "eta_cutoff": Range(0, 1, open_high=True),
    "encoder_repetition_penalty": _POSITIVE,
    "no_repeat_ngram_size": _NOT_NEGATIVE,
    "encoder_no_repeat_ngram_size": _NOT_NEGATIVE,
    "min_length": _NOT_NEGATIVE,
    "min_new_tokens": _NOT_NEGATIVE,
    "forced_bos_token_id": _NOT_NEGATIVE,
    "vllm_gpu_memory_utilization": Range(0, 1, open_low=True),
    "vllm_max_model_length": _AT_LEAST_ONE,
    "vllm_importance_sampling_clip_max": _POSITIVE,
    "vllm_importance_sampling_clip_min": _NOT_NEGATIVE,
    "epsilon": _POSITIVE,
    "epsilon_high": _POSITIVE,
    "delta": _POSITIVE,
    "beta": _NOT_NEGATIVE,
    "cagrad_c": Range(0, 1, open_high=True),
    "ref_model_mixup_alpha": _SHARE,
    "ref_model_sync_steps": _AT_LEAST_ONE,
    "entropy_coef_delta": _NOT_NEGATIVE,
    "entropy_target": _NOT_NEGATIVE,
    "off_policy_mask_threshold": _POSITIVE,
    "top_entropy_quantile": _SHARE,
    "sapo_temperature_pos": _POSITIVE,
    "sapo_temperature_neg": _POSITIVE,
    "vespo_k_pos": _NOT_NEGATIVE,
    "vespo_lambda_pos": _NOT_NEGATIVE,
    "vespo_k_neg": _NOT_NEGATIVE,
    "vespo_lambda_neg": _NOT_NEGATIVE,
    "eval_pass_threshold": Range(),
    "dynamic_sampling_max_rounds": _AT_LEAST_ONE,
    "reward_timeout_seconds": Range(0, open_low=True, none="no limit"),
    "partial_rollout_tokens": _AT_LEAST_ONE,
    "reward_retries": _NOT_NEGATIVE,
    "gamma": _SHARE,
    "gae_lambda": _SHARE,
    "vf_coef": _NOT_NEGATIVE,
    "vf_clip": _POSITIVE,
    "kl_coef": _NOT_NEGATIVE,
    "kl_target": _POSITIVE,
    "kl_horizon": _POSITIVE,
    "missing_eos_penalty": _NOT_NEGATIVE,
}
"""The numbers that make sense; a setting that is None is not looked at."""

CHOICES: dict[str, Collection[str]] = {
    "loss_type": LOSSES,
    "importance_sampling_level": ("token", "sequence"),
    "advantage_estimator": ESTIMATORS,
    "gradient_merge": ("sum", "pcgrad", "cagrad"),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "kl_estimator": ("k1", "k3"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "reward_timeout_result": ("error", "none"),
    "overlong_prompts": ("error", "filter", "truncate"),
    "trajectory_device": ("device", "host"),
    "eval_strategy": ("no", "steps", "epoch"),
    "logging_strategy": ("no", "steps", "epoch"),
    "save_strategy": ("no", "steps", "epoch", "best"),
    "lr_scheduler_type": (
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
    ),
    "log_level": ("passive", "detail", "debug", "info", "warning", "error", "critical"),
    "log_level_replica": ("passive", "detail", "debug", "info", "warning", "error", "critical"),
}
"""The words that make sense."""

REGISTRIES: dict[str, Registry[Any]] = {"loss_type": LOSSES, "advantage_estimator": ESTIMATORS}
"""Settings that also take a user's own part, which is entered under its name."""

OPTIMIZERS: dict[str, str] = {
    "adamw_torch": "torch",
    "adamw_torch_fused": "torch",
    "sgd": "torch",
    "adafactor": "torch",
    "adagrad": "torch",
    "rmsprop": "torch",
    "adamw_8bit": "bitsandbytes",
    "adamw_bnb_8bit": "bitsandbytes",
    "paged_adamw_8bit": "bitsandbytes",
    "paged_adamw_32bit": "bitsandbytes",
    "lion_8bit": "bitsandbytes",
    "lion_32bit": "bitsandbytes",
    "paged_lion_8bit": "bitsandbytes",
    "paged_lion_32bit": "bitsandbytes",
    "ademamix": "bitsandbytes",
    "ademamix_8bit": "bitsandbytes",
    "paged_ademamix_8bit": "bitsandbytes",
    "paged_ademamix_32bit": "bitsandbytes",
    "rmsprop_bnb": "bitsandbytes",
    "rmsprop_bnb_8bit": "bitsandbytes",
    "rmsprop_bnb_32bit": "bitsandbytes",
    "adamw_torch_4bit": "torchao",
    "adamw_torch_8bit": "torchao",
}
"""The optimizers that can be named, and the package each needs.

Left out: those that move weights inside the backward pass (layer-wise GaLore and APOLLO, LOMO), which no failed attempt
could undo; those that need target modules; those whose weights differ between training and evaluation (schedule-free);
those of other devices.
"""

UNITS_OF_KL = ("token", "sequence")
ESTIMATORS_OF_KL = ("k3", "k1")


def read(name: str, value: Any, hint: Any) -> Any:
    """Reads a setting as its declared type, from Python, YAML or a command line."""
    if hint is Any:
        return value
    kinds = get_args(hint) if get_origin(hint) not in (list, tuple, dict) and get_args(hint) else (hint,)
    plain = {get_origin(kind) or kind: kind for kind in kinds}
    if isinstance(value, str):
        return _read_text(name, value, plain)
    if value is None and NoneType in plain:
        return None
    if isinstance(value, bool) and bool in plain:
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and (int in plain or float in plain):
        if isinstance(value, int) or float in plain:
            return value
        if value.is_integer():
            return int(value)
    if isinstance(value, Mapping) and dict in plain:
        return dict(value)
    if isinstance(value, Sequence) and (list in plain or tuple in plain):
        return _read_items(name, value, plain)
    raise _wrong(name, value, plain)


def _read_text(name: str, text: str, plain: Mapping[Any, Any]) -> Any:
    stripped = text.strip()
    if NoneType in plain and stripped.lower() in _NONE:
        return None
    if stripped[:1] in ("{", "[") and {dict, list, tuple} & set(plain):
        return read(name, _from_json(name, stripped), _union(plain))
    if bool in plain and stripped.lower() in _TRUE | _FALSE:
        return stripped.lower() in _TRUE
    number = _number(stripped)
    if number is not None and int in plain and float(number).is_integer() and str not in plain:
        return int(number)
    if number is not None and float in plain:
        return number
    if list in plain or tuple in plain:
        return _read_items(name, [item.strip() for item in stripped.split(",")], plain)
    if str in plain and dict not in plain:
        return text
    raise _wrong(name, text, plain)


def _union(plain: Mapping[Any, Any]) -> Any:
    kinds = [kind for base, kind in plain.items() if base is not str]
    union = kinds[0]
    for kind in kinds[1:]:
        union = union | kind
    return union


def _number(text: str) -> int | float | None:
    for parse in (int, float):
        try:
            return parse(text)
        except ValueError:
            continue
    return None


def _from_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f'{name} is {text!r}, which is not JSON ({error}). Write it like {{"name": 1}} or [1, 2].'
        ) from None


def _read_items(name: str, items: Sequence[Any], plain: Mapping[Any, Any]) -> list[Any] | tuple[Any, ...]:
    base = list if list in plain else tuple
    inner = get_args(plain[base])[0]
    return base(read(name, item, inner) for item in items)


def _wrong(name: str, value: Any, plain: Mapping[Any, Any]) -> ConfigError:
    # Where a list or a mapping is asked for, text is only how a command line writes it; saying so would mislead.
    written_as_text = {dict, tuple} & set(plain)
    words = [_WORDS[base] for base in plain if base is not str or not written_as_text]
    return ConfigError(f"{name} is {value!r}; it must be {' or '.join(dict.fromkeys(words))}.")


def _is_finite(value: float) -> bool:
    """Whether a number is a finite float; a whole number may also be too large for one."""
    return abs(value) <= sys.float_info.max


def check_range(name: str, value: float) -> None:
    """Refuses a number outside its range."""
    if name in RANGES:
        check_in(name, value, RANGES[name])


def check_in(told: str, value: float, allowed: Range) -> None:
    """Refuses a number outside a range."""
    if value in allowed:
        return
    wanted = str(allowed)
    finite = "" if _is_finite(value) or wanted == "finite" else "finite, and "
    raise ConfigError(f"{told} is {value!r}; it must be {finite}{wanted}.")


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Refuses a word that is not among some choices, and names the nearest one."""
    if value not in choices:
        close = nearest(str(value), choices)
        hint = f" Did you mean {close!r}?" if close else ""
        raise ConfigError(f"{name} is {str(value)!r}; it must be one of {', '.join(choices)}.{hint}")
