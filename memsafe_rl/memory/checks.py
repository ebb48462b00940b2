"""What a plan may ask for: a policy's mistake is named, never quietly ignored."""

from __future__ import annotations

from memsafe_rl.errors import ConfigError
from memsafe_rl.types import RolloutPlan, UpdatePlan

_PLACES = ("device", "host")


def check_rollout_plan(plan: RolloutPlan) -> None:
    """Refuses a rollout plan that cannot be carried out.

    Args:
        plan: what a memory policy answered.

    Raises:
        ConfigError: a count is below 1, or something is asked for that does not exist yet.
    """
    for name in ("rows_in_flight", "prefill_tokens", "score_tokens", "reward_rows"):
        _at_least_one(plan, name)
    if plan.engine != "native":
        raise ConfigError(f"RolloutPlan.engine is {plan.engine!r}; only 'native' exists yet. Leave engine out.")
    if plan.cache_dtype is not None:
        raise ConfigError(
            f"RolloutPlan.cache_dtype is {plan.cache_dtype!r}; the cache has the model's own type. Leave it out."
        )


def check_update_plan(plan: UpdatePlan) -> None:
    """Refuses an update plan that cannot be carried out.

    Args:
        plan: what a memory policy answered.

    Raises:
        ConfigError: a count is below 1, a place is unknown, or something is asked for that does not exist yet.
    """
    for name in ("micro_batch_tokens", "logprob_tile"):
        _at_least_one(plan, name)
    if plan.trajectory_device not in _PLACES:
        raise ConfigError(
            f"UpdatePlan.trajectory_device is {plan.trajectory_device!r}; write one of {', '.join(map(repr, _PLACES))}."
        )
    if plan.pack_prompts:
        raise ConfigError("UpdatePlan.pack_prompts is True, which is not supported yet. Leave it out.")


def _at_least_one(plan: RolloutPlan | UpdatePlan, name: str) -> None:
    value = getattr(plan, name)
    if value < 1:
        raise ConfigError(f"{type(plan).__name__}.{name} is {value}; it must be at least 1.")
