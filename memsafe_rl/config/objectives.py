"""Several objectives: the declaration of each, read from the setting `objectives` and checked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from memsafe_rl.config import refusal
from memsafe_rl.config.declaring import Declared, check_band, check_known, declare, setting

_BOUNDS_SPAN = 10.0  # without bounds, a steered beta stays within this factor of its first value, up or down
_BANDS = {"kl_band": ("nats per token", "[0.02, 0.06]"), "beta_bounds": ("nats", "[0.01, 1.0]")}


@declare(frozen=True)
class Objective(Declared):
    """One of several things a run learns at once; its rows are those that its reward functions scored."""

    name: str
    rewards: tuple[str, ...] = setting((), "Names of its reward functions.", positional=True)
    weight: float = setting(1.0, "Multiplies its gradient before the merge.", above=0)
    beta: float = setting(0.0, "Coefficient of its KL to the reference, in nats; where it begins if it adapts.", low=0)
    kl_band: tuple[float, float] | None = setting(
        None, "Least and greatest KL to the reference, in nats per token, beyond which there is an alarm; None: none."
    )
    adaptive_beta: bool = setting(False, "Whether beta adapts so that the KL stays in its band.")
    beta_bounds: tuple[float, float] | None = setting(
        None, "Least and greatest beta that it adapts to; None: a tenth of beta and ten times as much."
    )
    beta_window: int = setting(20, "Measured KLs of which the median is held against the band.", low=1)
    beta_factors: tuple[float, float] = setting(
        (0.85, 1.15), "Multiply beta when that median is below, or above, the band."
    )

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and greatest beta that steering reaches."""
        return self.beta_bounds or (self.beta / _BOUNDS_SPAN, self.beta * _BOUNDS_SPAN)


def read_objectives(given: Mapping[str, Any] | None, *, beta: float) -> tuple[Objective, ...]:
    """Reads the setting `objectives`."""
    if given is None:
        return ()
    refusal.when(not given, "objectives/none", given=dict(given))
    objectives = tuple(_read_objective(name, settings, beta) for name, settings in given.items())
    seen: dict[frozenset[str], str] = {}
    for objective in objectives:
        rewards = frozenset(objective.rewards)
        if rewards in seen:
            raise refusal("objectives/twice", objective=objective, other=seen[rewards], rewards=list(objective.rewards))
        seen[rewards] = objective.name
    return objectives


def _read_objective(name: str, given: Any, beta: float) -> Objective:
    told = f"objectives[{name!r}]"
    refusal.when(not isinstance(name, str) or not name.strip() or "/" in name, "objectives/name", told=told)
    refusal.when(isinstance(given, Objective), "objectives/object", told=told, kind=type(given).__name__)
    refusal.when(not isinstance(given, Mapping), "objectives/mapping", told=told, given=given)
    settings: dict[str, Any] = {"beta": beta}
    check_known(given, Objective.declared, f"key of {told}")
    for key, value in given.items():
        place = f"{told}['{key}']"
        settings[key] = part = Objective.declared[key].read(value, place)
        if key in _BANDS:
            check_band(place, value, part, *_BANDS[key])
        if key == "beta_factors" and (len(part) != 2 or not 0 < part[0] < 1 < part[1] < math.inf):
            raise refusal("objectives/beta_factors", place=place, value=value)
    refusal.when(not settings.get("rewards"), "objectives/rewards", told=told)
    twice = [reward for reward, times in Counter(settings["rewards"]).items() if times > 1]
    refusal.when(twice, "objectives/reward_twice", told=told, twice=twice)
    objective = Objective(name=name, **settings)
    if objective.kl_band is not None and objective.beta == 0:  # a KL that is not measured
        raise refusal("objectives/kl_band", told=told, kl_band=list(objective.kl_band))
    refusal.when(objective.adaptive_beta and objective.kl_band is None, "objectives/adaptive_beta", told=told)
    low, high = objective.bounds
    if objective.adaptive_beta and (low == 0 or not low <= objective.beta <= high):
        raise refusal("objectives/beta_bounds", told=told, low=low, high=high, objective=objective)
    return objective


def check_reward_names(objectives: Sequence[Objective], names: Sequence[str]) -> None:
    """Refuses objectives whose reward functions are not there, and reward functions that no objective has."""
    for objective in objectives:
        check_known(objective.rewards, names, f"reward function of objectives[{objective.name!r}]")
    used = {reward for objective in objectives for reward in objective.rewards}
    unused = [name for name in names if name not in used]
    if objectives and unused:
        raise refusal("objectives/unused", unused=unused, names=", ".join(objective.name for objective in objectives))
