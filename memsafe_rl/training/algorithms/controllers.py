"""Coefficients that a run's own measurements move from one optimizer step to the next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.ops.entropy import EntropyControl, adaptive_entropy_coef, applied_entropy_coef
from memsafe_rl.training.algorithms.objectives import BetaControl, first_betas, steered


@dataclass(frozen=True)
class Controllers:
    """Where the steered coefficients stand."""

    entropy: EntropyControl  # the adaptive entropy bonus
    betas: Mapping[str, BetaControl]  # each objective's beta, by the objective's name, in their order

    @classmethod
    def at_start(cls, config: TrainerConfig) -> Controllers:
        """Gives where a run begins."""
        return cls(EntropyControl(config.entropy_coef), first_betas(config.objective_list))

    def entropy_coef(self, config: TrainerConfig) -> float:
        """Gives the coefficient of the entropy bonus in the next step."""
        if not config.use_adaptive_entropy:
            return config.entropy_coef
        return applied_entropy_coef(self.entropy, config.entropy_target)

    def after(self, metrics: Mapping[str, float], config: TrainerConfig) -> Controllers:
        """Moves on from a step."""
        betas = {
            objective.name: steered(
                self.betas[objective.name], objective, metrics.get(f"objectives/{objective.name}/kl", math.nan)
            )
            for objective in config.objective_list
        }
        if not config.gives_entropy_bonus:
            return replace(self, betas=betas)
        return Controllers(self._entropy_after(metrics.get("active_entropy", metrics["entropy"]), config), betas)

    def state_dict(self) -> dict[str, Any]:
        """Gives plain values for a checkpoint."""
        return {
            "entropy": list(self.entropy),
            "betas": {name: list(control) for name, control in self.betas.items()},
        }

    def loaded(self, state: Mapping[str, Any]) -> Controllers:
        """Gives where a checkpoint left off."""
        betas = {name: BetaControl(beta, tuple(kls)) for name, (beta, kls) in state.get("betas", {}).items()}
        return Controllers(EntropyControl(*state["entropy"]), {**self.betas, **betas})

    def _entropy_after(self, entropy: float, config: TrainerConfig) -> EntropyControl:
        if not config.use_adaptive_entropy:
            return EntropyControl(config.entropy_coef, entropy)
        return adaptive_entropy_coef(
            self.entropy,
            entropy,
            target=config.entropy_target,
            delta=config.entropy_coef_delta,
            minimum=config.entropy_coef_min,
            maximum=config.entropy_coef_max,
        )
