"""Several objectives: what each of them is, which rows are its own, how its beta is steered, and what is logged of it.

Axes: ``B`` rows, ``F`` reward functions, ``K`` objectives.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memsafe_rl.errors import ConfigError
from memsafe_rl.ops.merging import add_up, cosines, gram_matrix
from memsafe_rl.trainers.checks import Range, check_in, read
from memsafe_rl.trainers.refusals import unknown
from memsafe_rl.trainers.update import StepTerms
from memsafe_rl.types import AdvantageResult, Denominators, Trajectory

_BOUNDS_SPAN = 10.0
"""Without bounds, a steered beta goes no further than so many times, or a so-manieth of, where it began."""


@dataclass(frozen=True)
class Objective:
    """One of several things a run learns at once; its rows are those that its reward functions scored.

    Args:
        name: what it is called in the configuration and the log.
        rewards: names of its reward functions.
        weight: multiplies its gradient before the merge.
        beta: coefficient of its KL to the reference, in nats; where it begins if it is steered.
        kl_band: least and greatest KL to the reference, in nats per token, beyond which there is an alarm; None: none.
        adaptive_beta: whether beta is steered so that the KL stays in its band.
        beta_bounds: least and greatest beta that steering reaches; None for a tenth of beta and ten times as much.
        beta_window: measured KLs of which the median is held against the band.
        beta_factors: multiply beta when that median is below, or above, the band.
    """

    name: str
    rewards: tuple[str, ...]
    weight: float = 1.0
    beta: float = 0.0
    kl_band: tuple[float, float] | None = None
    adaptive_beta: bool = False
    beta_bounds: tuple[float, float] | None = None
    beta_window: int = 20
    beta_factors: tuple[float, float] = (0.85, 1.15)

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and greatest beta that steering reaches."""
        return self.beta_bounds or (self.beta / _BOUNDS_SPAN, self.beta * _BOUNDS_SPAN)


_KINDS: dict[str, Any] = {
    "rewards": list[str],
    "weight": float,
    "beta": float,
    "kl_band": list[float] | None,
    "adaptive_beta": bool,
    "beta_bounds": list[float] | None,
    "beta_window": int,
    "beta_factors": list[float],
}
_RANGES = {
    "weight": Range(0, open_low=True),
    "beta": Range(0),
    "beta_window": Range(1),
}
_EXAMPLE = "objectives={'fairness': {'rewards': ['unbiased'], 'beta': 0.1}, 'truth': {'rewards': ['factual']}}"


def read_objectives(given: Mapping[str, Any] | None, *, beta: float) -> tuple[Objective, ...]:
    """Reads the setting `objectives`.

    Args:
        given: what each is made of, by name; None for one objective, the weighted sum of all rewards.
        beta: that of an objective which names none.

    Returns:
        The objectives, in the order given; none where there is but the sum of all rewards.

    Raises:
        ConfigError: something is unknown, or makes no sense; the message names it, its value and the remedy.
    """
    if given is None:
        return ()
    if not given:
        raise ConfigError(f"objectives is {dict(given)!r}, which names none. Write {_EXAMPLE}, or leave it out.")
    objectives = tuple(_read_objective(name, settings, beta) for name, settings in given.items())
    _refuse_twins(objectives)
    return objectives


def _refuse_twins(objectives: Sequence[Objective]) -> None:
    """Refuses two objectives of the same rewards, whose rows and advantages would be the same."""
    seen: dict[frozenset[str], str] = {}
    for objective in objectives:
        rewards = frozenset(objective.rewards)
        if rewards in seen:
            raise ConfigError(
                f"objectives[{objective.name!r}] has the same rewards as objectives[{seen[rewards]!r}], "
                f"{list(objective.rewards)}, so that both would learn the same. Join them, or give one other rewards."
            )
        seen[rewards] = objective.name


def _read_objective(name: str, given: Any, beta: float) -> Objective:
    told = f"objectives[{name!r}]"
    if not isinstance(name, str) or not name.strip() or "/" in name:
        raise ConfigError(f"{told}: a name is text without '/', as metrics bear it. Write {_EXAMPLE}.")
    if isinstance(given, Objective):
        raise ConfigError(f"{told} is an {type(given).__name__}; write its settings as a mapping, as in {_EXAMPLE}.")
    if not isinstance(given, Mapping):
        raise ConfigError(f"{told} is {given!r}; it must be a mapping, as in {_EXAMPLE}.")
    settings: dict[str, Any] = {"beta": beta}
    for key, value in given.items():
        if key not in _KINDS:
            raise unknown(key, tuple(_KINDS), f"key of {told}")
        settings[key] = _read_part(f"{told}['{key}']", key, value)
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


def _read_part(told: str, key: str, value: Any) -> Any:
    part = read(told, value, _KINDS[key])
    if key in _RANGES:
        check_in(told, part, _RANGES[key])
    if key in ("kl_band", "beta_bounds") and part is not None:
        what, example = ("nats per token", "[0.02, 0.06]") if key == "kl_band" else ("nats", "[0.01, 1.0]")
        if len(part) != 2 or not 0 <= part[0] < part[1] < math.inf:
            raise ConfigError(f"{told} is {value!r}; it must be [low, high] in {what}, such as {example}.")
    if key == "beta_factors" and (len(part) != 2 or not 0 < part[0] < 1 < part[1] < math.inf):
        raise ConfigError(f"{told} is {value!r}; it must be [lower, raise] around 1, such as [0.85, 1.15].")
    return tuple(part) if isinstance(part, list) else part


def _check_beta(told: str, objective: Objective) -> None:
    """Refuses a band of what is not measured, and a steering without a band, or of a beta outside its bounds."""
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
    """Refuses objectives whose reward functions are not there, and reward functions that no objective has.

    Args:
        objectives: what is learnt.
        names: of the run's reward functions.

    Raises:
        ConfigError: the two do not fit.
    """
    for objective in objectives:
        for reward in objective.rewards:
            if reward not in names:
                raise unknown(reward, tuple(names), f"reward function of objectives[{objective.name!r}]")
    used = {reward for objective in objectives for reward in objective.rewards}
    unused = [name for name in names if name not in used]
    if objectives and unused:
        raise ConfigError(
            f"no objective has the reward function {unused[0]!r}, which would teach nothing. Add it to one of "
            f"{', '.join(objective.name for objective in objectives)} (with a reward weight of 0 where it is only to "
            "be logged), or leave it out of reward_funcs."
        )


# ------------------------------------------------------------------ advantages and rows


def judge(
    rewards_BF: Tensor,
    names: Sequence[str],
    weights_F: Tensor,
    objectives: Sequence[Objective],
    estimate: Callable[[Tensor, Tensor], AdvantageResult],
) -> AdvantageResult:
    """Judges every row, for each objective by that objective's rewards alone.

    Args:
        rewards_BF: (B, F), NaN where a function gave None.
        names: of the F reward functions.
        weights_F: (F,), their weights.
        objectives: what is learnt; none for the weighted sum of all rewards.
        estimate: gives advantages of some columns with their weights.

    Returns:
        Rewards of all functions together, and each objective's in ``objectives``. With objectives, the advantages are
        theirs, weighted and added, for people to look at; each objective learns from its own.
    """
    whole = estimate(rewards_BF, weights_F)
    if not objectives:
        return whole
    columns = [[names.index(reward) for reward in objective.rewards] for objective in objectives]
    parts = tuple(estimate(rewards_BF[:, chosen], weights_F[chosen]) for chosen in columns)
    added_B = torch.stack([one.weight * part.advantages_B for one, part in zip(objectives, parts, strict=True)]).sum(0)
    return replace(whole, advantages_B=added_B, objectives=parts)


def objective_advantages(advantages: AdvantageResult) -> Tensor | None:
    """Gives what `Trajectory.objective_advantages` holds.

    Args:
        advantages: from `judge`.

    Returns:
        (B, K) float32, NaN where an objective did not score a row; None without objectives.
    """
    columns = [part.advantages_B.masked_fill(part.unscored_B, math.nan) for part in advantages.objectives]
    return torch.stack(columns, 1) if columns else None


def scored_rows(trajectory: Trajectory, index: int, rows: Sequence[int]) -> list[int]:
    """Gives the rows that an objective's reward functions scored.

    Args:
        trajectory: the store.
        index: of the objective.
        rows: among which.

    Returns:
        Those rows, in the order given.
    """
    values = trajectory.objective_values[index]
    return [row for row in rows if not math.isnan(values[row])]


def learning_rows(trajectory: Trajectory, index: int, rows: Sequence[int], *, every_row: bool) -> list[int]:
    """Gives the rows that can move a weight for an objective's sake.

    Args:
        trajectory: the store.
        index: of the objective.
        rows: among which.
        every_row: whether its loss has a term without the advantage in it, such as a KL.

    Returns:
        Those rows, in the order given.
    """
    values, counted = trajectory.objective_values[index], trajectory.counted_actions
    scored = scored_rows(trajectory, index, rows)
    return [row for row in scored if counted[row] > 0 and (every_row or values[row] != 0)]


def as_seen_by(trajectory: Trajectory, index: int) -> Trajectory:
    """Gives a rollout with the advantages of one objective.

    Args:
        trajectory: the store; may be anywhere.
        index: of the objective.

    Returns:
        The same rows; only those that the objective scored are to be learnt from.
    """
    if trajectory.objective_advantages is None:
        raise AssertionError("the rollout was judged without objectives")
    return replace(trajectory, advantages=trajectory.objective_advantages[:, index], objective_advantages=None)


def with_objectives(terms: StepTerms, trajectory: Trajectory, rows: Sequence[int], betas: Sequence[float]) -> StepTerms:
    """Fixes each objective's denominators over its own rows of a whole step, before anything is cut.

    Args:
        terms: what the step has fixed for all rows together.
        trajectory: the store.
        rows: rows of the step, over all ranks.
        betas: the objectives' present coefficients of the KL; empty without objectives.

    Returns:
        The terms with the objectives' in them; their denominators added up in its own. Those given without objectives.
    """
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
    """Complete gradients of some objectives, which wait for those of the others.

    Args:
        parameters: those that are trained; each has a gradient when one is added.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._gradients: list[list[Tensor]] = []

    def add(self, *, last: bool) -> None:
        """Takes the parameters' gradients; copies nothing.

        Args:
            last: whether they stay in place as well, where the merged gradient will be.
        """
        self._gradients.append([parameter.grad for parameter in self._parameters if parameter.grad is not None])
        if not last:
            for parameter in self._parameters:
                parameter.grad = None

    def gram(self) -> Tensor:
        """Gives the gradients' dot products, (K, K) float64."""
        return gram_matrix(self._gradients)

    def add_up(self, coefficients_K: Sequence[float]) -> None:
        """Puts the combination of all in place of the last; allocates nothing.

        Args:
            coefficients_K: from `ops.merging.merge_weights`.
        """
        add_up(self._gradients, coefficients_K)

    def drop(self) -> None:
        """Lets go of all of them."""
        self._gradients.clear()


# ------------------------------------------------------------------ beta


class BetaControl(NamedTuple):
    """Where the steering of an objective's beta stands.

    Args:
        beta: the coefficient of the next step.
        recent: measured KLs since beta last moved, in nats per token, oldest first, at most a window of them.
    """

    beta: float
    recent: tuple[float, ...] = ()


def kl_bands(objectives: Sequence[Objective]) -> dict[str, tuple[float, float]]:
    """Gives the KL bands of the objectives that have one, by name."""
    return {objective.name: objective.kl_band for objective in objectives if objective.kl_band is not None}


def first_betas(objectives: Sequence[Objective]) -> dict[str, BetaControl]:
    """Gives where the steering of each objective's beta begins, by name, in their order."""
    return {objective.name: BetaControl(objective.beta) for objective in objectives}


def steered(control: BetaControl, objective: Objective, kl: float) -> BetaControl:
    """Moves an objective's beta when the KL has left its band for most of a window, and begins a new window then.

    Args:
        control: where the steering stands.
        objective: band, window, factors and bounds.
        kl: KL to the reference of the step just done, nats per token; NaN where the objective had no row in it.

    Returns:
        Where it stands now; the same beta for an objective that is not steered.
    """
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
    """Gives each objective's mean reward, and the share of rows that it scored.

    Args:
        objectives: what is learnt.
        advantages: from `judge`.

    Returns:
        Names and values; NaN for the reward of an objective that scored no row.
    """
    metrics = {}
    for objective, part in zip(objectives, advantages.objectives, strict=True):
        known = part.rewards_B[~part.unscored_B]
        metrics[f"objectives/{objective.name}/reward"] = known.mean().item() if known.numel() else math.nan
        metrics[f"objectives/{objective.name}/scored"] = known.numel() / max(1, part.rewards_B.numel())
    return metrics


def objective_metrics(objective: Objective, metrics: Mapping[str, float], terms: StepTerms) -> dict[str, float]:
    """Picks what is logged of one objective's part of a step.

    Args:
        objective: which.
        metrics: of its rows alone.
        terms: what the step has fixed for them.

    Returns:
        Names and values: its loss, beta and, where it is in the loss, KL.
    """
    name = f"objectives/{objective.name}"
    known = {"loss": metrics["loss"], "beta": terms.settings.beta}
    if "kl" in metrics:
        known["kl"] = metrics["kl"]
    return {f"{name}/{key}": value for key, value in known.items()}


def gradient_metrics(
    objectives: Sequence[Objective], gram_KK: Sequence[Sequence[float]], coefficients_K: Sequence[float], scale: float
) -> dict[str, float]:
    """Gives the length of each objective's gradient, its coefficient in the merge, and the angles between them.

    Args:
        objectives: what is learnt.
        gram_KK: (K, K) numbers, from `ops.merging.gram_matrix`.
        coefficients_K: from `ops.merging.merge_weights`.
        scale: the loss scale that the gradients are multiplied by; 1 for none.

    Returns:
        Names and values.
    """
    metrics = {}
    for index, objective in enumerate(objectives):
        square = gram_KK[index][index]
        metrics[f"objectives/{objective.name}/grad_norm"] = math.sqrt(square) / scale if square >= 0 else math.nan
        metrics[f"objectives/{objective.name}/coefficient"] = coefficients_K[index]
    for (i, j), cosine in cosines(gram_KK).items():
        metrics[f"objectives/cosine/{objectives[i].name}/{objectives[j].name}"] = cosine
    return metrics
