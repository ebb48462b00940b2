"""What the loss and the KL stop read of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from memsafe_rl.config.values import check_choice, read, unknown
from memsafe_rl.errors import ConfigError
from memsafe_rl.types import LossSettings

if TYPE_CHECKING:
    from memsafe_rl.config.base import TrainerConfig


@dataclass(frozen=True)
class KLStop:
    """When the passes over a rollout end early."""

    target: float  # KL to the model before the first update on that rollout, in nats, above which they end
    unit: str = "token"  # "token" (mean over tokens) or "sequence" (sum over a row, mean over rows)
    estimator: str = "k3"  # "k3" or "k1" (Schulman 2020, "Approximating KL divergence")

    def exceeded(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Gives the KL to the old model and its bound once the KL exceeds it; otherwise nothing."""
        measured = metrics[f"approx_kl/{self.estimator}_{self.unit}"]
        return {"measured": measured, "target": self.target} if measured > self.target else {}


def loss_settings(config: TrainerConfig) -> LossSettings:
    """Gives what the loss reads; what an algorithm has no setting for stays at its default."""
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    clipping: dict[str, Any] = {"epsilon_low": config.epsilon, "epsilon_high": high}
    if config.kl_in_rewards:
        clipping["beta"] = 0.0
    own = {field.name for field in fields(LossSettings)} - clipping.keys()
    return LossSettings(**{name: getattr(config, name) for name in own if hasattr(config, name)}, **clipping)


def read_kl_stop(given: Any) -> KLStop | None:
    """Reads the setting `kl_stop`."""
    if given is None:
        return None
    parts: dict[str, Any] = dict(given) if isinstance(given, dict) else {"target": given}
    for key in parts:
        if key not in ("target", "unit", "estimator"):
            raise unknown(key, ("target", "unit", "estimator"), "key of kl_stop")
    if "target" not in parts:
        raise ConfigError(f"kl_stop is {given!r}, without a target. Set kl_stop={{'target': 0.02}} (nats).")
    rule = KLStop(**{**parts, "target": read("kl_stop", parts["target"], float)})
    if not rule.target > 0:
        raise ConfigError(f"kl_stop is {rule.target!r}; it must be more than 0 nats. None switches it off.")
    check_choice("unit of kl_stop", rule.unit, ("token", "sequence"))
    check_choice("estimator of kl_stop", rule.estimator, ("k3", "k1"))
    return rule
