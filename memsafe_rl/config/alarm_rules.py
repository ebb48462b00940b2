"""Rules a healthy run keeps: the limits of `alarms`, read and checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from memsafe_rl.config.refusals import unknown
from memsafe_rl.config.values import Range, check_in, read
from memsafe_rl.errors import ConfigError


@dataclass(frozen=True)
class AlarmRules:
    """From which values on there is an alarm; None switches a rule off.

    Args:
        truncation: share of a rollout's completions that are cut off.
        judge_seconds: seconds that one reward function takes for a rollout.
        equal_rewards: share of groups whose rewards are all equal.
        kl: least and greatest KL to the reference, in nats per token.
        throughput_drop: share of the usual speed that is lost.
        retries: failed allocations within the last `WINDOW_STEPS` steps, after each of which work was done again.
        objective_kl: whether each objective's KL is held against its own `kl_band`.
        lost_updates: share of trained weights of half precision whose update is rounded away.
    """

    truncation: float | None = 0.05
    judge_seconds: float | None = 6.0
    equal_rewards: float | None = 0.9
    kl: tuple[float, float] | None = None
    throughput_drop: float | None = 0.5
    retries: int | None = 3
    objective_kl: bool | None = True
    lost_updates: float | None = 0.5


ALARMS = tuple(rule.name for rule in fields(AlarmRules))
"""The names of the rules."""

NO_ALARMS = json.dumps(dict.fromkeys(ALARMS))
"""All rules off, as a configuration file would write it."""

_SHARE = Range(0, 1, open_low=True, none="no alarm")
_RANGES = {
    "truncation": _SHARE,
    "judge_seconds": Range(0, open_low=True, none="no alarm"),
    "equal_rewards": _SHARE,
    "lost_updates": _SHARE,
    "throughput_drop": Range(0, 1, open_low=True, open_high=True, none="no alarm"),
    "retries": Range(1, none="no alarm"),
}
_KINDS: dict[str, Any] = {"retries": int | None, "kl": list[float] | None, "objective_kl": bool | None}


def read_rules(given: Mapping[str, Any] | None, *, has_reference: bool) -> AlarmRules:
    """Reads the setting `alarms`."""
    limits: dict[str, Any] = {}
    for name, value in (given or {}).items():
        if name not in ALARMS:
            raise unknown(name, ALARMS, "alarm")
        limits[name] = _read_limit(name, None if value is False else value)
    if limits.get("kl") is not None and not has_reference:
        raise ConfigError(
            f"alarms has kl={list(limits['kl'])}, but beta is 0, so that there is no reference to measure it to. Set "
            "beta above 0, or kl_stop for the KL to the model before an update."
        )
    return AlarmRules(**limits)


def _read_limit(name: str, value: Any) -> Any:
    told = f"alarms['{name}']"
    limit = read(told, value, _KINDS.get(name, float | None))
    if limit is None:
        return None
    if name == "kl":
        if len(limit) != 2 or not 0 <= limit[0] < limit[1] < math.inf:
            raise ConfigError(f"{told} is {value!r}; it must be [low, high] in nats per token, such as [0.02, 0.15].")
        return tuple(limit)
    if name in _RANGES:
        check_in(told, limit, _RANGES[name])
    return limit
