"""Several objectives: the declaration of each, read from the setting `objectives` and checked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from memsafe_rl.config.declaring import Setting, declare, setting
from memsafe_rl.config.values import check_band, unknown
from memsafe_rl.errors import ConfigError

_BOUNDS_SPAN = 10.0  # without bounds, a steered beta stays within this factor of its first value, up or down
_BANDS = {"kl_band": ("nats per token", "[0.02, 0.06]"), "beta_bounds": ("nats", "[0.01, 1.0]")}


@declare(frozen=True)
class Objective:
    """One of several things a run learns at once; its rows are those that its reward functions scored."""

    declared: ClassVar[Mapping[str, Setting]]

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


_EXAMPLE = "objectives={'fairness': {'rewards': ['unbiased'], 'beta': 0.1}, 'truth': {'rewards': ['factual']}}"


def read_objectives(given: Mapping[str, Any] | None, *, beta: float) -> tuple[Objective, ...]:
    """Reads the setting `objectives`."""
    if given is None:
        return ()
    if not given:
        raise ConfigError(f"objectives is {dict(given)!r}, which names none. Write {_EXAMPLE}, or leave it out.")
    objectives = tuple(_read_objective(name, settings, beta) for name, settings in given.items())
    seen: dict[frozenset[str], str] = {}
    for objective in objectives:
        rewards = frozenset(objective.rewards)
        if rewards in seen:
            raise ConfigError(
                f"objectives[{objective.name!r}] has the same rewards as objectives[{seen[rewards]!r}], "
                f"{list(objective.rewards)}, so that both would learn the same. Join them, or give one other rewards."
            )
        seen[rewards] = objective.name
    return objectives


def _read_objective(name: str, given: Any, beta: float) -> Objective:
    told = f"objectives[{name!r}]"
    if not isinstance(name, str) or not name.strip() or "/" in name:
        raise ConfigError(f"{told}: a name is text without '/', since metrics carry it. Write {_EXAMPLE}.")
    if isinstance(given, Objective):
        raise ConfigError(f"{told} is an {type(given).__name__}; write its settings as a mapping, as in {_EXAMPLE}.")
    if not isinstance(given, Mapping):
        raise ConfigError(f"{told} is {given!r}; it must be a mapping, as in {_EXAMPLE}.")
    settings: dict[str, Any] = {"beta": beta}
    for key, value in given.items():
        if key not in Objective.declared:
            raise unknown(key, Objective.declared, f"key of {told}")
        place = f"{told}['{key}']"
        settings[key] = part = Objective.declared[key].read(value, place)
        if key in _BANDS:
            check_band(place, value, part, *_BANDS[key])
        if key == "beta_factors" and (len(part) != 2 or not 0 < part[0] < 1 < part[1] < math.inf):
            raise ConfigError(f"{place} is {value!r}; it must be [lower, raise] around 1, such as [0.85, 1.15].")
    if not settings.get("rewards"):
        raise ConfigError(f"{told} has no reward functions. Name at least one: {told}['rewards']=['...'].")
    twice = [reward for reward, times in Counter(settings["rewards"]).items() if times > 1]
    if twice:
        raise ConfigError(
            f"{told}['rewards'] names {twice[0]!r} more than once, which would count it as often. Name it once, and "
            "weigh it by reward_weights."
        )
    objective = Objective(name=name, **settings)
    _check_beta(told, objective)
    return objective


def _check_beta(told: str, objective: Objective) -> None:
    """Refuses a band for a KL that is not measured, steering without a band, and a beta outside its bounds."""
    if objective.kl_band is not None and objective.beta == 0:
        raise ConfigError(
            f"{told}['kl_band'] is {list(objective.kl_band)}, but its beta is 0, so that its KL to the reference is "
            f"not measured. Set {told}['beta'] above 0, or leave kl_band out."
        )
    if not objective.adaptive_beta:
        return
    if objective.kl_band is None:
        raise ConfigError(
            f"{told}['adaptive_beta'] is True without a band to steer to. Set {told}['kl_band'], such as [0.02, 0.06] "
            "nats per token."
        )
    low, high = objective.bounds
    if low == 0 or not low <= objective.beta <= high:
        raise ConfigError(
            f"{told}['beta_bounds'] is [{low:g}, {high:g}]; it must begin above 0 and hold beta, which is "
            f"{objective.beta:g}. Move the bounds or beta."
        )


def check_reward_names(objectives: Sequence[Objective], names: Sequence[str]) -> None:
    """Refuses objectives whose reward functions are not there, and reward functions that no objective has."""
    for objective in objectives:
        for reward in objective.rewards:
            if reward not in names:
                raise unknown(reward, tuple(names), f"reward function of objectives[{objective.name!r}]")
    used = {reward for objective in objectives for reward in objective.rewards}
    unused = [name for name in names if name not in used]
    if objectives and unused:
        raise ConfigError(
            f"no objective uses the reward function {unused[0]!r}, so the model would not learn from it. Add it to "
            f"{', '.join(objective.name for objective in objectives)} (with a reward weight of 0 where it is only to "
            "be logged), or leave it out: of reward_funcs, or of the environment whose reward() it is."
        )
