"""Remedies that change the task: taken only if the user listed them, after every lossless one, and always told."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memsafe_rl.types import MemoryFailure, Phase

SHORTEST_COMPLETION = 16
"""Tokens below which completions are not cut."""
SMALLEST_GROUP = 4
"""Completions a prompt below which a group is not cut: at 2, standardised advantages are always +-0.707."""
LEAN_OPTIMIZER = "adamw_8bit"
QUANTISED_CACHE = "quantized"
"""The kind of cache, under transformers' name, that is kept in 8 bits."""

_PASSES = frozenset({Phase.ROLLOUT, Phase.REWARD, Phase.SCORE, Phase.UPDATE, Phase.EVALUATE})


@dataclass(frozen=True)
class Degradation:
    """One change of the task."""

    name: str  # the remedy, as listed in `allow_lossy`
    changes: Mapping[str, tuple[Any, Any]]  # old and new value of every setting it changes

    def __str__(self) -> str:
        return ", ".join(f"{name} {old} -> {new}" for name, (old, new) in self.changes.items())


def next_degradation(config: Any, allowed: Sequence[str], failure: MemoryFailure) -> Degradation | None:
    """Chooses the next remedy, in the user's order; one is used up before the next."""
    for name in allowed:
        changes = LOSSY_REMEDIES[name](config, failure)
        if changes:
            return Degradation(name, changes)
    return None


def degrade(config: Any, degradation: Degradation) -> None:
    """Changes the settings as a degradation says."""
    for name, (_, value) in degradation.changes.items():
        setattr(config, name, value)


Changes = dict[str, tuple[Any, Any]]


def _shorter_completions(config: Any, failure: MemoryFailure) -> Changes:
    """Halves the longest completion: caches, activations and logits of a row shrink with it."""
    now = config.max_completion_length
    shorter = max(SHORTEST_COMPLETION, now // 2, int((config.generation_kwargs or {}).get("min_new_tokens") or 0))
    if failure.phase not in _PASSES or shorter >= now:
        return {}
    return {"max_completion_length": (now, shorter)}


def _smaller_groups(config: Any, failure: MemoryFailure) -> Changes:
    """Halves the group and the effective batch with it, the prompts staying the same: a smaller rollout is held."""
    group, rows = config.num_generations, config.per_device_train_batch_size
    if failure.phase not in _PASSES or group % 2 or group // 2 < SMALLEST_GROUP or rows % 2:
        return {}
    changes: Changes = {
        "num_generations": (group, group // 2),
        "per_device_train_batch_size": (rows, rows // 2),
        "generation_batch_size": (config.generation_batch_size, config.generation_batch_size // 2),
    }
    tries = config.eval_pass_at or []
    if config.num_generations_eval is None and any(k > group // 2 for k in tries):
        changes["eval_pass_at"] = (tries, [k for k in tries if k <= group // 2])
    return changes


def _fewer_passes(config: Any, failure: MemoryFailure) -> Changes:
    """Learns one time less from each rollout; at one pass, old log-probs need not be held."""
    now = config.num_iterations
    learns = failure.phase in _PASSES - {Phase.EVALUATE}
    return {"num_iterations": (now, now - 1)} if learns and now > 1 else {}


def _rounded_cache(config: Any, failure: MemoryFailure) -> Changes:
    """Keeps keys and values of rollouts in 8 bits: about half of their bytes in bf16, a quarter of those in fp32."""
    now = config.cache_implementation
    if failure.phase not in (Phase.ROLLOUT, Phase.EVALUATE) or now == QUANTISED_CACHE:
        return {}
    return {"cache_implementation": (now, QUANTISED_CACHE)}


def _leaner_optimizer(config: Any, failure: MemoryFailure) -> Changes:
    """Keeps the optimizer's moments in 8 bits: a quarter of AdamW's state; they start anew."""
    named = str(getattr(config.optim, "value", config.optim))
    if failure.phase is Phase.REWARD or not named.startswith("adamw_torch"):
        return {}
    return {"optim": (named, LEAN_OPTIMIZER)} if importlib.util.find_spec("bitsandbytes") else {}


LOSSY_REMEDIES: dict[str, Callable[[Any, MemoryFailure], Changes]] = {
    "max_completion_length": _shorter_completions,
    "num_generations": _smaller_groups,
    "num_iterations": _fewer_passes,
    "cache_implementation": _rounded_cache,
    "optim": _leaner_optimizer,
}
"""Every remedy that `allow_lossy` may name, and the settings it would change now."""
