"""One gradient of one objective or several: who accumulates what, what waits meanwhile, and how it is merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.config.objectives import Objective
from memsafe_rl.data.order import merge_orders
from memsafe_rl.memory.runtime.stages import Stage
from memsafe_rl.ops.merging import merge_weights
from memsafe_rl.training.algorithms.objectives import (
    GradientsAside,
    as_seen_by,
    gradient_metrics,
    learning_rows,
    objective_metrics,
    with_objectives,
)
from memsafe_rl.training.gradient import StepGradient, StepTerms, joined
from memsafe_rl.training.metrics.step_metrics import read_step, step_metrics
from memsafe_rl.training.samples import Rollout
from memsafe_rl.types import Trajectory

if TYPE_CHECKING:
    from memsafe_rl.training.setup import TrainingSetup


class Accumulate(Protocol):
    """Accumulates the gradient of some rows over micro-batches and ranks."""

    def __call__(
        self,
        rollout: Rollout,
        rows: Sequence[int],
        terms: StepTerms,
        *,
        view: Callable[[Trajectory], Trajectory],
        gradients_aside: int,
    ) -> tuple[Rollout, StepGradient]:
        """Accumulates.

        Args:
            rollout: the rollout.
            rows: this rank's rows.
            terms: what the step has fixed.
            view: gives the trajectory as this objective learns from it.
            gradients_aside: gradients of further objectives that will wait beside this one.

        Returns:
            The rollout where the plan has put it, and what accumulating left besides the gradient.
        """


def _as_it_is(trajectory: Trajectory) -> Trajectory:
    return trajectory


class Combiner:
    """Makes one gradient of what a run learns: of one objective its own, of several their merge.

    Attributes:
        gradients_aside: whole gradients that wait for those of further objectives.
    """

    def __init__(self, objectives: Sequence[Objective]) -> None:
        self._objectives = objectives
        self.gradients_aside = max(0, len(objectives) - 1)

    def fix(self, terms: StepTerms, trajectory: Trajectory, rows: Sequence[int], betas: Sequence[float]) -> StepTerms:
        """Fixes each objective's denominators over its own rows of a whole step, before anything is cut."""
        return with_objectives(terms, trajectory, rows, betas)

    def accumulate(
        self,
        setup: TrainingSetup,
        rollout: Rollout,
        rows: Sequence[int],
        terms: StepTerms,
        accumulate: Accumulate,
        *,
        step: int,
    ) -> tuple[Rollout, StepGradient]:
        """Accumulates each objective's gradient; only one whose accumulation ran out of memory begins again."""
        if not terms.objectives:
            return accumulate(rollout, rows, terms, view=_as_it_is, gradients_aside=0)
        trajectory, waiting = rollout.trajectory, GradientsAside(setup.committed.parameters)
        repeat, found = setup.recovery.repeat, []
        try:
            for index, part in enumerate(terms.objectives):
                every_row = part.settings.beta != 0 or setup.config.gives_entropy_bonus
                own = repeat(Stage.MERGE, learning_rows, trajectory, index, rows, every_row=every_row)
                rollout, gradient = accumulate(
                    rollout,
                    own,
                    part,
                    view=partial(as_seen_by, index=index),
                    gradients_aside=self.gradients_aside - index,  # those of earlier objectives are held already
                )
                found.append(gradient)
                waiting.add(last=index + 1 == len(terms.objectives))
            merge = self.merge(setup, waiting, [part.denominators.tokens > 0 for part in terms.objectives], step)
        finally:
            waiting.drop()
        weights = [objective.weight for objective in self._objectives]
        return rollout, repeat(Stage.MERGE, joined, found, weights, merge)

    def merge(
        self, setup: TrainingSetup, gradients: GradientsAside, there: Sequence[bool], step: int
    ) -> dict[str, float]:
        """Puts the merged gradient in place of the objectives' own, and gives what is known of them.

        An objective that scored no counted action of the step is not there, and leaves the merge to the others.
        """
        repeat, config = setup.recovery.repeat, setup.config
        gram = setup.parallel.gather([repeat(Stage.MERGE, gradients.plain_gram)])[0]  # the same everywhere
        weights = [objective.weight for objective in self._objectives]
        coefficients = repeat(Stage.MERGE, _coefficients, gram, weights, config, step, there)
        gradients.add_up(coefficients)
        scale = repeat(Stage.MERGE, setup.committed.read_loss_scale)
        return gradient_metrics(self._objectives, gram, coefficients, scale)

    def metrics(
        self,
        setup: TrainingSetup,
        gradient: StepGradient,
        terms: StepTerms,
        norm: Tensor,
        metrics: dict[str, float],
    ) -> dict[str, float]:
        """Adds each objective's loss, KL and beta."""
        for objective, part, own in zip(self._objectives, gradient.objectives, terms.objectives, strict=True):
            numbers = setup.recovery.repeat(Stage.MEASURE, read_step, part, norm)
            metrics |= objective_metrics(objective, step_metrics(numbers, own, setup.parallel), own)
        if any(own.settings.beta == 0 for own in terms.objectives):
            metrics.pop("kl", None)  # would be that of some rows only
        return metrics


def _coefficients(
    gram: Sequence[Sequence[float]], weights: Sequence[float], config: TrainerConfig, step: int, there: Sequence[bool]
) -> tuple[float, ...]:
    orders = merge_orders(len(weights), config.seed, step)
    gram_KK = torch.tensor(gram, dtype=torch.float64)
    return merge_weights(gram_KK, weights_K=weights, **config.merge_settings(), orders=orders, there=there)
