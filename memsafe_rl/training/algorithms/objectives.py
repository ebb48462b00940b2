"""One objective or several: whose rows are whose, one gradient of all, coefficients that move, and the log.

Axes: ``B`` rows, ``F`` reward functions, ``K`` objectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.config.objectives import Objective
from memsafe_rl.memory.runtime.stages import Stage
from memsafe_rl.micro_batches import merge_orders
from memsafe_rl.ops.entropy import EntropyControl, adaptive_entropy_coef, applied_entropy_coef
from memsafe_rl.ops.losses import LOSSES
from memsafe_rl.ops.merging import add_up, cosines, exact_factors, gram_matrix, merge_weights
from memsafe_rl.training.gradient import StepGradient, StepTerms, joined
from memsafe_rl.training.metrics.step_metrics import read_step, step_metrics
from memsafe_rl.types import Denominators, Trajectory

if TYPE_CHECKING:
    from memsafe_rl.training.samples import Rollout
    from memsafe_rl.training.setup import TrainingSetup


def scored_rows(trajectory: Trajectory, index: int, rows: Sequence[int]) -> list[int]:
    """Returns the rows that an objective's reward functions scored."""
    values = trajectory.objective_values[index]
    return [row for row in rows if not math.isnan(values[row])]


def learning_rows(trajectory: Trajectory, index: int, rows: Sequence[int], *, every_row: bool) -> list[int]:
    """Returns the rows from which an objective can learn something."""
    values, counted = trajectory.objective_values[index], trajectory.counted_actions
    return [row for row in scored_rows(trajectory, index, rows) if counted[row] > 0 and (every_row or values[row] != 0)]


def as_seen_by(trajectory: Trajectory, index: int) -> Trajectory:
    """Returns a rollout with the advantages of one objective."""
    assert trajectory.objective_advantages is not None, "the rollout was given advantages without objectives"
    return replace(trajectory, advantages=trajectory.objective_advantages[:, index], objective_advantages=None)


def with_objectives(terms: StepTerms, trajectory: Trajectory, rows: Sequence[int], betas: Sequence[float]) -> StepTerms:
    """Fixes each objective's denominators over its own rows of a whole step, before anything is cut."""
    if not betas:
        return terms
    counts, masks, parts = trajectory.counted_actions, terms.entropy_masks, []
    for index, beta in enumerate(betas):
        own = scored_rows(trajectory, index, rows)
        tokens = sum(counts[row] for row in own)
        kept = tokens if masks is None else sum(int(masks[row].sum()) for row in own)
        denominators = Denominators(rows=len(own), tokens=tokens, entropy_tokens=kept)
        parts.append(replace(terms, settings=replace(terms.settings, beta=beta), denominators=denominators))
    whole = Denominators(*(sum(values) for values in zip(*(astuple(part.denominators) for part in parts), strict=True)))
    return replace(terms, denominators=whole, objectives=tuple(parts))


class BetaControl(NamedTuple):
    """Where the steering of an objective's beta stands."""

    beta: float  # the coefficient of the next step
    # measured KLs since beta last moved, in nats per token, oldest first, at most a window of them
    recent: tuple[float, ...] = ()


def steered(control: BetaControl, objective: Objective, kl: float) -> BetaControl:
    """Moves an objective's beta when the KL has left its band for most of a window, and begins a new window then."""
    if not objective.adaptive_beta or objective.kl_band is None or math.isnan(kl):
        return control
    recent = (*control.recent, kl)[-objective.beta_window :]
    middle, (low, high) = median(recent), objective.kl_band
    if len(recent) < objective.beta_window or low <= middle <= high:
        return BetaControl(control.beta, recent)
    lower, higher = objective.beta_factors
    least, most = objective.bounds
    return BetaControl(min(most, max(least, control.beta * (lower if middle < low else higher))))


def gradient_metrics(
    objectives: Sequence[Objective], gram_KK: Sequence[Sequence[float]], coefficients_K: Sequence[float], scale: float
) -> dict[str, float]:
    """Returns the length of each objective's gradient, its coefficient in the merge, and the angles between them."""
    metrics = {}
    for index, objective in enumerate(objectives):
        square = gram_KK[index][index]
        metrics[f"objectives/{objective.name}/grad_norm"] = math.sqrt(square) / scale if square >= 0 else math.nan
        metrics[f"objectives/{objective.name}/coefficient"] = coefficients_K[index]
    for (i, j), cosine in cosines(gram_KK).items():
        metrics[f"objectives/cosine/{objectives[i].name}/{objectives[j].name}"] = cosine
    return metrics


Accumulate = Callable[..., tuple["Rollout", StepGradient]]
"""Accumulates the gradient of some rows over micro-batches and ranks; see `Learner.gradient`."""


class Combiner:
    """Makes one gradient of what a run learns: of one objective its own, of several their merge."""

    def __init__(self, objectives: Sequence[Objective]) -> None:
        self._objectives = objectives
        # most whole gradients held, one of each finished objective, while the last one accumulates
        self.gradients_aside = max(0, len(objectives) - 1)

    def accumulate(
        self,
        setup: TrainingSetup,
        accumulate: Accumulate,
        rollout: Rollout,
        rows: Sequence[int],
        terms: StepTerms,
        *,
        step: int,
    ) -> tuple[Rollout, StepGradient]:
        """Accumulates each objective's gradient; only one whose accumulation ran out of memory begins again."""
        trajectory, parameters = rollout.trajectory, setup.committed.parameters
        repeat, found = setup.recovery.repeat, []
        gradients: list[list[Tensor]] = []  # whole ones of finished objectives, until the others' are there
        try:
            for index, part in enumerate(terms.objectives):
                pushes = setup.settings.gives_entropy_bonus or LOSSES[part.settings.loss_type].traits.every_row
                every_row = part.settings.beta != 0 or pushes
                rollout, gradient = accumulate(
                    rollout,
                    repeat(Stage.MERGE, learning_rows, trajectory, index, rows, every_row=every_row),
                    part,
                    view=partial(as_seen_by, index=index),
                    gradients_aside=self.gradients_aside - index,  # those of earlier objectives are held already
                )
                found.append(gradient)
                gradients.append([weight.grad for weight in parameters if weight.grad is not None])
                if index + 1 < len(terms.objectives):
                    for weight in parameters:
                        weight.grad = None
            merge = self.merge(setup, gradients, [part.denominators.tokens > 0 for part in terms.objectives], step)
        finally:
            gradients.clear()
        return rollout, repeat(Stage.MERGE, joined, found, [objective.weight for objective in self._objectives], merge)

    def merge(
        self, setup: TrainingSetup, gradients: list[list[Tensor]], there: Sequence[bool], step: int
    ) -> dict[str, float]:
        """Merges the gradients of objectives that are there, having scored a counted action; returns what is logged."""
        repeat, config = setup.recovery.repeat, setup.config
        gram = setup.parallel.gather([repeat(Stage.MERGE, gram_matrix, gradients).tolist()])[0]  # the same everywhere
        weights = [objective.weight for objective in self._objectives]
        coefficients = repeat(Stage.MERGE, _coefficients, gram, weights, config, step, there)
        add_up(gradients, coefficients, repeat(Stage.MERGE, exact_factors, gradients[-1], coefficients[-1]))
        scale = repeat(Stage.MERGE, setup.committed.read_loss_scale)
        return gradient_metrics(self._objectives, gram, coefficients, scale)

    def metrics(
        self, setup: TrainingSetup, gradient: StepGradient, terms: StepTerms, norm: Tensor, metrics: dict[str, float]
    ) -> dict[str, float]:
        """Adds each objective's loss, KL and beta to a step's metrics."""
        for objective, part, own in zip(self._objectives, gradient.objectives, terms.objectives, strict=True):
            found = step_metrics(setup.recovery.repeat(Stage.MEASURE, read_step, part, norm), own, setup.parallel)
            known = {"loss": found["loss"], "beta": own.settings.beta, "kl": found.get("kl")}
            metrics |= {f"objectives/{objective.name}/{key}": one for key, one in known.items() if one is not None}
        if any(own.settings.beta == 0 for own in terms.objectives):
            metrics.pop("kl", None)  # would be that of some rows only
        return metrics


def _coefficients(
    gram: Sequence[Sequence[float]], weights: Sequence[float], config: TrainerConfig, step: int, there: Sequence[bool]
) -> tuple[float, ...]:
    orders = merge_orders(len(weights), config.seed, step)
    gram_KK = torch.tensor(gram, dtype=torch.float64)
    method, cagrad_c = config.gradient_merge, config.cagrad_c
    return merge_weights(gram_KK, method, weights, cagrad_c=cagrad_c, orders=orders, there=there)


@dataclass(frozen=True)
class Controllers:
    """Where the steered coefficients stand."""

    entropy: EntropyControl  # the adaptive entropy bonus
    betas: Mapping[str, BetaControl]  # each objective's beta, by the objective's name, in their order

    @classmethod
    def at_start(cls, config: TrainerConfig) -> Controllers:
        """Returns where a run begins."""
        betas = {objective.name: BetaControl(objective.beta) for objective in config.objective_list}
        return cls(EntropyControl(config.entropy_coef), betas)

    def entropy_coef(self, config: TrainerConfig) -> float:
        """Returns the coefficient of the entropy bonus in the next step."""
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
        entropy = metrics.get("active_entropy", metrics.get("entropy", math.nan))
        return Controllers(self._entropy_after(entropy, config), betas)

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values for a checkpoint."""
        return {"entropy": list(self.entropy), "betas": {name: list(control) for name, control in self.betas.items()}}

    def loaded(self, state: Mapping[str, Any]) -> Controllers:
        """Returns where a checkpoint left off."""
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
