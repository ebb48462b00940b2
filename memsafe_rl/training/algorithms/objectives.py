"""Several objectives: what each of them is, which rows are its own, how its beta is steered, and what is logged of it.

Axes: ``B`` rows, ``F`` reward functions, ``K`` objectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from memsafe_rl.config.objectives import Objective
from memsafe_rl.ops.merging import add_up, cosines, gram_matrix
from memsafe_rl.training.gradient import StepTerms
from memsafe_rl.types import AdvantageResult, Denominators, Trajectory

# ------------------------------------------------------------------ advantages and rows


def judge(
    rewards_BF: Tensor,
    names: Sequence[str],
    weights_F: Tensor,
    objectives: Sequence[Objective],
    estimate: Callable[[Tensor, Tensor], AdvantageResult],
) -> AdvantageResult:
    """Judges every row, for each objective by that objective's rewards alone."""
    whole = estimate(rewards_BF, weights_F)
    if not objectives:
        return whole
    columns = [[names.index(reward) for reward in objective.rewards] for objective in objectives]
    parts = tuple(estimate(rewards_BF[:, chosen], weights_F[chosen]) for chosen in columns)
    added_B = torch.stack([one.weight * part.advantages_B for one, part in zip(objectives, parts, strict=True)]).sum(0)
    return replace(whole, advantages_B=added_B, objectives=parts)


def objective_advantages(advantages: AdvantageResult) -> Tensor | None:
    """Gives what `Trajectory.objective_advantages` holds."""
    columns = [part.advantages_B.masked_fill(part.unscored_B, math.nan) for part in advantages.objectives]
    return torch.stack(columns, 1) if columns else None


def scored_rows(trajectory: Trajectory, index: int, rows: Sequence[int]) -> list[int]:
    """Gives the rows that an objective's reward functions scored."""
    values = trajectory.objective_values[index]
    return [row for row in rows if not math.isnan(values[row])]


def learning_rows(trajectory: Trajectory, index: int, rows: Sequence[int], *, every_row: bool) -> list[int]:
    """Gives the rows that can move a weight for an objective's sake."""
    values, counted = trajectory.objective_values[index], trajectory.counted_actions
    scored = scored_rows(trajectory, index, rows)
    return [row for row in scored if counted[row] > 0 and (every_row or values[row] != 0)]


def as_seen_by(trajectory: Trajectory, index: int) -> Trajectory:
    """Gives a rollout with the advantages of one objective."""
    if trajectory.objective_advantages is None:
        raise AssertionError("the rollout was judged without objectives")
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


class GradientsAside:
    """Complete gradients of some objectives, which wait for those of the others."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._gradients: list[list[Tensor]] = []

    def add(self, *, last: bool) -> None:
        """Takes the parameters' gradients; copies nothing."""
        self._gradients.append([parameter.grad for parameter in self._parameters if parameter.grad is not None])
        if not last:
            for parameter in self._parameters:
                parameter.grad = None

    def gram(self) -> Tensor:
        """Gives the gradients' dot products, (K, K) float64."""
        return gram_matrix(self._gradients)

    def plain_gram(self) -> list[list[float]]:
        """Gives the gradients' dot products as plain numbers, so that ranks can compare them."""
        plain: list[list[float]] = self.gram().tolist()
        return plain

    def add_up(self, coefficients_K: Sequence[float]) -> None:
        """Puts the combination of all in place of the last; allocates nothing."""
        add_up(self._gradients, coefficients_K)

    def drop(self) -> None:
        """Lets go of all of them."""
        self._gradients.clear()


# ------------------------------------------------------------------ beta


class BetaControl(NamedTuple):
    """Where the steering of an objective's beta stands."""

    beta: float  # the coefficient of the next step
    # measured KLs since beta last moved, in nats per token, oldest first, at most a window of them
    recent: tuple[float, ...] = ()


def kl_bands(objectives: Sequence[Objective]) -> dict[str, tuple[float, float]]:
    """Gives the KL bands of the objectives that have one, by name."""
    return {objective.name: objective.kl_band for objective in objectives if objective.kl_band is not None}


def first_betas(objectives: Sequence[Objective]) -> dict[str, BetaControl]:
    """Gives where the steering of each objective's beta begins, by name, in their order."""
    return {objective.name: BetaControl(objective.beta) for objective in objectives}


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


# ------------------------------------------------------------------ what is logged


def reward_metrics(objectives: Sequence[Objective], advantages: AdvantageResult) -> dict[str, float]:
    """Gives each objective's mean reward, and the share of rows that it scored."""
    metrics = {}
    for objective, part in zip(objectives, advantages.objectives, strict=True):
        known = part.rewards_B[~part.unscored_B]
        metrics[f"objectives/{objective.name}/reward"] = known.mean().item() if known.numel() else math.nan
        metrics[f"objectives/{objective.name}/scored"] = known.numel() / max(1, part.rewards_B.numel())
    return metrics


def objective_metrics(objective: Objective, metrics: Mapping[str, float], terms: StepTerms) -> dict[str, float]:
    """Picks what is logged of one objective's part of a step."""
    name = f"objectives/{objective.name}"
    known = {"loss": metrics["loss"], "beta": terms.settings.beta}
    if "kl" in metrics:
        known["kl"] = metrics["kl"]
    return {f"{name}/{key}": value for key, value in known.items()}


def gradient_metrics(
    objectives: Sequence[Objective], gram_KK: Sequence[Sequence[float]], coefficients_K: Sequence[float], scale: float
) -> dict[str, float]:
    """Gives the length of each objective's gradient, its coefficient in the merge, and the angles between them."""
    metrics = {}
    for index, objective in enumerate(objectives):
        square = gram_KK[index][index]
        metrics[f"objectives/{objective.name}/grad_norm"] = math.sqrt(square) / scale if square >= 0 else math.nan
        metrics[f"objectives/{objective.name}/coefficient"] = coefficients_K[index]
    for (i, j), cosine in cosines(gram_KK).items():
        metrics[f"objectives/cosine/{objectives[i].name}/{objectives[j].name}"] = cosine
    return metrics
