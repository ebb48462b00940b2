"""What a plan may ask for: a policy's mistake is named, never quietly ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from memsafe_rl.errors import ConfigError
from memsafe_rl.types import RolloutPlan, UpdatePlan, UpdateWork

_PLACES = ("device", "host")
_CACHE_DTYPES = (None, "int8")


def check_rollout_plan(plan: RolloutPlan) -> None:
    """Refuses a rollout plan that cannot be carried out."""
    _check_kind(plan, RolloutPlan)
    for name in ("rows_in_flight", "prefill_tokens", "score_tokens", "reward_rows"):
        _check_count(plan, name)
    if plan.kv_bytes is not None:
        _check_count(plan, "kv_bytes")
    if plan.kept_kv_bytes != 0:
        _check_count(plan, "kept_kv_bytes")
    _check_switch(plan, "park_optimizer")
    _check_predictions(plan)
    if plan.cache_dtype not in _CACHE_DTYPES:
        raise ConfigError(
            f"RolloutPlan.cache_dtype is {plan.cache_dtype!r}; write one of {', '.join(map(repr, _CACHE_DTYPES))}."
        )


def check_update_plan(plan: UpdatePlan) -> None:
    """Refuses an update plan that cannot be carried out."""
    _check_kind(plan, UpdatePlan)
    for name in ("micro_batch_tokens", "logprob_tile"):
        _check_count(plan, name)
    for name in ("checkpointing", "offload_activations", "pack_prompts", "park_optimizer"):
        _check_switch(plan, name)
    _check_predictions(plan)
    if plan.trajectory_device not in _PLACES:
        raise ConfigError(
            f"UpdatePlan.trajectory_device is {plan.trajectory_device!r}; write one of {', '.join(map(repr, _PLACES))}."
        )


def check_packing(plan: UpdatePlan, work: UpdateWork) -> None:
    """Refuses a plan that packs what cannot be packed."""
    if plan.pack_prompts and work.row_tokens and not work.prompts:
        raise ConfigError(
            f"UpdatePlan.pack_prompts is True, but these {len(work.row_tokens)} rows cannot share their prompts: the "
            "network gives packed rows other log-probs (the log says why), or learns under dropout "
            "(disable_dropout=False). Leave pack_prompts out, or set it only where work.prompts is not empty."
        )


def _check_kind(plan: Any, kind: type) -> None:
    if not isinstance(plan, kind):
        raise ConfigError(f"The memory policy answered {plan!r} where it must give a {kind.__name__}.")


def _check_count(plan: RolloutPlan | UpdatePlan, name: str) -> None:
    value = getattr(plan, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{type(plan).__name__}.{name} is {value!r}; it must be a whole number. Round it down.")
    if value < 1:
        raise ConfigError(f"{type(plan).__name__}.{name} is {value}; it must be at least 1.")


def _check_switch(plan: RolloutPlan | UpdatePlan, name: str) -> None:
    value = getattr(plan, name)
    if not isinstance(value, bool):
        raise ConfigError(f"{type(plan).__name__}.{name} is {value!r}; write True or False.")


def _check_predictions(plan: RolloutPlan | UpdatePlan) -> None:
    if not isinstance(plan.predicted_bytes, Mapping):
        raise ConfigError(
            f"{type(plan).__name__}.predicted_bytes is {plan.predicted_bytes!r}; it must be a mapping of phase to "
            "bytes. Leave it out."
        )
    for name, size in plan.predicted_bytes.items():
        if isinstance(size, bool) or not isinstance(size, (int, float)) or not math.isfinite(size):
            raise ConfigError(f"{type(plan).__name__}.predicted_bytes[{name!r}] is {size!r}; it must be bytes.")
