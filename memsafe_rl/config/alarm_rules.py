"""Rules a run is held to: the limits of `alarms`, and the KL at which the passes over a rollout end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from memsafe_rl.config import refusal
from memsafe_rl.config.declaring import Declared, check_band, check_choice, check_known, declare, read, setting

rule = partial(setting, none="no alarm", positional=True)


@declare(frozen=True)
class AlarmRules(Declared):
    """From which values on there is an alarm; None switches a rule off."""

    truncation: float | None = rule(0.05, "Share of a rollout's completions that are cut off.", above=0, high=1)
    judge_seconds: float | None = rule(6.0, "Seconds that one reward function takes for a rollout.", above=0)
    equal_rewards: float | None = rule(0.9, "Share of groups whose rewards are all equal.", above=0, high=1)
    kl: tuple[float, float] | None = rule(None, "Least and greatest KL to the reference, in nats per token.")
    throughput_drop: float | None = rule(0.5, "Share of the usual speed that is lost.", above=0, below=1)
    retries: int | None = rule(3, "Failed allocations in the last `WINDOW_STEPS` steps that made work repeat.", low=1)
    objective_kl: bool | None = rule(True, "Whether each objective's KL is held against its own `kl_band`.")
    lost_updates: float | None = rule(
        0.5, "Share of trained weights of half precision whose update is rounded away.", above=0, high=1
    )


ALARMS = tuple(AlarmRules.declared)
"""The names of the rules."""


def read_rules(given: Mapping[str, Any] | None, *, has_reference: bool) -> AlarmRules:
    """Reads the setting `alarms`."""
    limits: dict[str, Any] = {}
    check_known(given or (), ALARMS, "alarm")
    for name, value in (given or {}).items():
        told = f"alarms['{name}']"
        limits[name] = limit = AlarmRules.declared[name].read(None if value is False else value, told)
        if name == "kl":
            check_band(told, value, limit, "nats per token", "[0.02, 0.15]")
    if limits.get("kl") is not None and not has_reference:
        raise refusal("alarms/kl", band=list(limits["kl"]))
    return AlarmRules(**limits)


@dataclass(frozen=True)
class KLStop:
    """When the passes over a rollout end early."""

    target: float  # KL to the model before the first update on that rollout, in nats, above which they end
    unit: str = "token"  # "token" (mean over tokens) or "sequence" (sum over a row, mean over rows)
    estimator: str = "k3"  # "k3" or "k1" (Schulman 2020, "Approximating KL divergence")

    def exceeded(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns the KL to the old model and its bound once the KL exceeds it; otherwise nothing."""
        measured = metrics[f"approx_kl/{self.estimator}_{self.unit}"]
        return {"measured": measured, "target": self.target} if measured > self.target else {}


def read_kl_stop(given: Any) -> KLStop | None:
    """Reads the setting `kl_stop`."""
    if given is None:
        return None
    parts: dict[str, Any] = dict(given) if isinstance(given, dict) else {"target": given}
    check_known(parts, ("target", "unit", "estimator"), "key of kl_stop")
    refusal.when("target" not in parts, "kl_stop/target", given=given)
    rule = KLStop(**{**parts, "target": read("kl_stop", parts["target"], float)})
    refusal.when(not rule.target > 0, "kl_stop/bound", rule=rule)
    check_choice("unit of kl_stop", rule.unit, ("token", "sequence"))
    check_choice("estimator of kl_stop", rule.estimator, ("k3", "k1"))
    return rule
