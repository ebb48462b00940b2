"""From rewards to advantages, over whole groups and whole rollouts, before anything is cut.

Axes: ``P`` groups, ``G`` rows of a group, ``B`` = P·G rows, ``F`` reward functions. NaN means "not scored".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.ops.registry import Registry, check_part, wrong_answer
from memsafe_rl.types import AdvantageResult


def turn_returns(rewards_T: Tensor, discount: float) -> Tensor:
    """Returns what follows each turn, ``R_t = sum_{k >= t} discount^(k - t) r_k`` (GiGPO, arXiv:2505.10978).

    Args:
        rewards_T: (T,), what each turn has earned.
        discount: in [0, 1], by which a reward counts less a turn earlier.

    Returns:
        (T,).
    """
    returns, following = torch.empty_like(rewards_T), rewards_T.new_zeros(())
    for turn in reversed(range(len(rewards_T))):
        following = rewards_T[turn] + discount * following
        returns[turn] = following
    return returns


def relative_to_state(
    returns_N: Tensor, states_N: Sequence[Hashable], compare: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Compares what follows a turn with what follows all turns that began in the same state of the same group.

    GiGPO (arXiv:2505.10978): ``A^S = (R - mean) / std`` over an anchor state's turns, or without the
    division, as ``compare`` has it. One episode may reach a state several times.

    Args:
        returns_N: (N,) of `turn_returns`; NaN for an episode that was not scored, which counts for nothing.
        states_N: for each turn its group and the state it began in.
        compare: of `memsafe_rl.ops.advantages`: compares (1, n) numbers with each other.

    Returns:
        (N,), 0 where no other turn began in the same state; and (N,) bool, whether one did.
    """
    alike: dict[Hashable, list[int]] = {}
    for place, state in enumerate(states_N):
        alike.setdefault(state, []).append(place)
    advantages_N, met_N = torch.zeros_like(returns_N), torch.zeros(len(states_N), dtype=torch.bool)
    for places in alike.values():
        if len(places) > 1:
            advantages_N[places] = compare(returns_N[places][None])[0].nan_to_num(nan=0.0)
            met_N[places] = True
    return advantages_N, met_N


def squared_score_norms(logprobs: Tensor, sharper_logprobs: Tensor) -> Tensor:
    """Returns the squared length of ``d log pi(a) / d logits``, ``1 - 2 pi(a) + sum_v pi(v)^2`` (arXiv:2602.07078).

    ``sum_v pi(v)^2 = exp(2 log pi(a) - log pi'(a))``, where pi' has half the temperature: both sides are
    ``sum_v exp(2 z_v) / (sum_v exp(z_v))^2``, so that no sum over the vocabulary has to be taken beside log-probs.

    Args:
        logprobs: (...), nats, of the taken tokens at the temperature of the run.
        sharper_logprobs: likewise, at half of it.

    Returns:
        (...), between 0 and 2.
    """
    return (1 - 2 * logprobs.exp() + (2 * logprobs - sharper_logprobs).exp()).clamp(min=0.0)


def expected_gaps(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Returns how far a reference is from the likeliest tokens' log-probs, ``sum_v w(v) (log pi(v) - log pi_ref(v))``.

    ``w(v) = pi(v) - pi(u)``, with u the likeliest token left out: where two tokens tie for the last place, the one that
    is in has a weight of 0, so that rounding cannot change the result.

    Args:
        logprobs: (..., K + 1), nats, falling, the last that of u; (..., K) if no token is left out, and w = pi.
        reference_logprobs: (..., K), nats, of the first K.

    Returns:
        (...), nats, of the type of ``logprobs``.
    """
    chances, count = logprobs.exp(), reference_logprobs.shape[-1]
    if logprobs.shape[-1] > count:
        chances = chances[..., :count] - chances[..., count:]
    return (chances * (logprobs[..., :count] - reference_logprobs)).sum(-1)


def optimal_token_advantages(rewards_G: Tensor, norms_GT: Tensor, mask_GT: Tensor) -> Tensor:
    """Compares a row, at each of its tokens, with its group's mean weighed by how far each row's score has spread.

    ``A_it = r_i - sum_j W_jt r_j / sum_j W_jt``, W_jt the sum of row j's squared score norms up to t, over the rows in
    which column t counts (arXiv:2602.07078, the optimal token baseline for a reward at the end).

    Departure from verl's form: nothing is added to the denominator, and where all rewards are equal A is exactly 0.

    Args:
        rewards_G: (G,) float64; NaN for a row that was not scored, which counts for nothing.
        norms_GT: (G, T) float64 of `squared_score_norms`.
        mask_GT: (G, T), 1 where a token counts.

    Returns:
        (G, T), 0 where a token does not count; 0 too where no other row is as long.
    """
    there_GT = mask_GT.bool() & ~rewards_G.isnan()[:, None]
    weights_GT = norms_GT.masked_fill(~there_GT, 0.0).cumsum(1).masked_fill(~there_GT, 0.0)
    rewards_GT = rewards_G.nan_to_num(nan=0.0)[:, None].expand_as(norms_GT)
    total_T = weights_GT.sum(0)
    baseline_T = (weights_GT * rewards_GT).sum(0) / total_T.masked_fill(total_T == 0, 1.0)
    alike_T = _all_equal(rewards_GT.masked_fill(~there_GT, math.nan).T)[:, 0]
    return (rewards_GT - baseline_T).masked_fill(~there_GT | alike_T, 0.0)


SCALES = ("group", "batch", "none")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")

_EPSILON = 1e-4


@dataclass(frozen=True)
class AdvantageEstimator:
    """A way to compare rewards, built in or a user's own: ``GRPOConfig(advantage_estimator=my_function)``.

    Args:
        name: its name in configurations, logs and checkpoints.
        function: gives advantages (P, G) from the weighted sums of rewards of the whole rollout on all ranks, (P, G)
            float64, NaN for a row without any score; an advantage that is NaN becomes 0.
        least_group: fewest rows of a group that it can compare.
        with_lengths: whether ``function`` takes a second argument, (P, G) float64: how many actions of each row count.

    Raises:
        ConfigError: If the name is no text, ``function`` is no function, or ``least_group`` is under 1.
    """

    name: str
    function: Callable[..., Tensor]
    least_group: int = 2
    with_lengths: bool = False

    def __post_init__(self) -> None:
        check_part(self)
        if type(self.least_group) is not int or self.least_group < 1:
            told = f"least_group of estimator {self.name!r} is {self.least_group!r}"
            raise ConfigError(f"{told}; it must be a whole number of at least 1.")


ESTIMATORS: Registry[AdvantageEstimator] = Registry("advantage_estimator", AdvantageEstimator)
"""Every estimator by its name in the configuration."""

register_advantage_estimator = ESTIMATORS.add
"""Makes an estimator known by name, for run files and settings read back."""


def estimated_advantages(
    rewards_BF: Tensor,
    weights_F: Tensor,
    group_size: int,
    *,
    estimator: str = "group",
    scale_rewards: str = "group",
    aggregation: str = "sum_then_normalize",
    lengths_B: Tensor | None = None,
) -> AdvantageResult:
    """Gives every row its advantage by the named estimator; "group" compares it with its group.

    ``sum_then_normalize``: ``A = (r - mean_group r) / (std r + 1e-4)``, r the weighted sum of a row's rewards; std over
    the group (GRPO, arXiv:2402.03300, section 4.1.2), over the batch (arXiv:2508.08221), or no division (Dr. GRPO,
    arXiv:2503.20783). ``normalize_then_sum`` (GDPO, arXiv:2601.05242): each reward function's scores are normalised in
    their group, summed with the weights, and the sums normalised over the batch. std has Bessel's correction. Scores
    that are NaN are left out of every sum, mean and std; a row without any score has advantage 0.

    Departure from TRL: computed in float64, and equal rewards give exactly 0 instead of a rounding error over 1e-4.

    Args:
        rewards_BF: (B, F), groups one after the other; NaN where a function gave None.
        weights_F: (F,).
        group_size: rows G of a group; B is a multiple of it.
        estimator: a key of `ESTIMATORS`.
        scale_rewards: "group", "batch" or "none", what divides in ``sum_then_normalize``; for "group" alone.
        aggregation: "sum_then_normalize" or "normalize_then_sum", for "group" alone.
        lengths_B: (B,), counted actions of each row, for estimators that weigh by them; None: all the same.

    Returns:
        Advantages, 0 for a row without any score; rewards; deviations (NaN where fewer than two scores gave one; 0 for
        groups of one); which rows have no score.

    Raises:
        ConfigError: If ``estimator``, ``scale_rewards`` or ``aggregation`` is unknown, or the estimator gives anything
            but one number for each row that is finite or NaN.
        DataError: If B is not a multiple of ``group_size``.
    """
    _known("scale_rewards", scale_rewards, SCALES)
    _known("multi_objective_aggregation", aggregation, AGGREGATIONS)
    if len(rewards_BF) % group_size:
        raise DataError(
            f"{len(rewards_BF)} rewarded rows cannot be cut into groups of {group_size}. "
            "Give every prompt the same number of completions."
        )
    scores_BF, weights_F = rewards_BF.double(), weights_F.to(rewards_BF.device).double()
    unscored_B = scores_BF.isnan().all(1)
    rewards_B = _weighted_sum(scores_BF, weights_F, unscored_B)
    groups_PG = rewards_B.view(-1, group_size)
    if estimator != "group":
        lengths_B = torch.ones_like(rewards_B) if lengths_B is None else lengths_B.to(rewards_B)
        compared_PG = _compared(ESTIMATORS[estimator], groups_PG, lengths_B.view(groups_PG.shape))
        advantages_B, std = compared_PG.reshape(-1), _nanstd(groups_PG)
    elif aggregation == "sum_then_normalize":
        std = _nanstd(rewards_B[None] if scale_rewards == "batch" else groups_PG)
        divisor = 1.0 if scale_rewards == "none" else std + _EPSILON
        advantages_B = (_centred(groups_PG) / divisor).view(-1)
    else:
        groups_FPG = scores_BF.t().reshape(len(weights_F), -1, group_size)
        normal_FPG = _centred(groups_FPG) / (_nanstd(groups_FPG) + _EPSILON)
        sums_B = _weighted_sum(normal_FPG.view(len(weights_F), -1).t(), weights_F, unscored_B)
        std = _nanstd(sums_B)
        # Their mean is 0 but for rounding, of which an equal group is to have no advantage.
        advantages_B = _centred(sums_B).masked_fill(sums_B == 0, 0.0) / (std + _EPSILON)
    std_B = std.expand(groups_PG.shape).reshape(-1)
    return AdvantageResult(advantages_B.nan_to_num(nan=0.0).float(), rewards_B.float(), std_B.float(), unscored_B)


def normalised_in_group(rewards_PG: Tensor) -> Tensor:
    """Compares each row with its group: ``A_i = (r_i - mean r) / (std r + 1e-4)``.

    GRPO (arXiv:2402.03300, section 4.1.2); `estimated_advantages` has its other scales and aggregations.

    Args:
        rewards_PG: (P, G), NaN for a row that was not scored.

    Returns:
        (P, G).
    """
    return _centred(rewards_PG) / (_nanstd(rewards_PG) + _EPSILON)


def leave_one_out(rewards_PG: Tensor) -> Tensor:
    """Compares each row with the mean of the others of its group: ``A_i = r_i - mean_{j != i} r_j``.

    RLOO (Ahmadian et al. 2024, arXiv:2402.14740, eq. 8); equal to ``G / (G - 1) (r_i - mean r)``.

    Args:
        rewards_PG: (P, G), NaN for a row that was not scored, which counts for nothing.

    Returns:
        (P, G); 0 for the only scored row of a group.
    """
    scored_P1 = rewards_PG.isnan().logical_not().sum(-1, keepdim=True)
    return _centred(rewards_PG) * scored_P1 / (scored_P1 - 1).clamp(min=1)


def centred_in_group(rewards_PG: Tensor) -> Tensor:
    """Compares each row with the mean of its group and divides by nothing: ``A_i = r_i - mean r``.

    Dr. GRPO (Liu et al. 2025, arXiv:2503.20783); `estimated_advantages` with ``scale_rewards="none"`` is the same.

    Args:
        rewards_PG: (P, G), NaN for a row that was not scored.

    Returns:
        (P, G).
    """
    return _centred(rewards_PG)


def normalised_in_batch(rewards_PG: Tensor) -> Tensor:
    """Compares each row with the whole rollout: ``A = (r - mean r) / (std r + 1e-4)`` over all rows of all ranks.

    REINFORCE++ (Hu et al. 2025, arXiv:2501.03262); with ``beta`` the KL is a term of the loss, as in GRPO.

    Args:
        rewards_PG: (P, G), NaN for a row that was not scored.

    Returns:
        (P, G).
    """
    rewards_B = rewards_PG.reshape(-1)
    return (_centred(rewards_B) / (_nanstd(rewards_B) + _EPSILON)).view(rewards_PG.shape)


def group_baseline_normalised_in_batch(rewards_PG: Tensor) -> Tensor:
    """Compares each row with its group, and then with the whole rollout: REINFORCE++-baseline (arXiv:2501.03262).

    Args:
        rewards_PG: (P, G), NaN for a row that was not scored.

    Returns:
        (P, G).
    """
    return normalised_in_batch(_centred(rewards_PG))


def relative_to_mean(rewards_PG: Tensor) -> Tensor:
    """Compares each row with the mean of its group, in units of that mean: ``A_i = (r_i - mean r) / mean r``.

    MaxRL (arXiv:2602.02710), for rewards of 0 and 1: the gradient of the log-likelihood of success, cut off after G - 1
    terms, where GRPO's is of its probability. A prompt that is seldom solved weighs more, without bound; a group of
    mean 0 learns nothing.

    Args:
        rewards_PG: (P, G), NaN for a row that was not scored.

    Returns:
        (P, G), at most G - 1.

    Raises:
        DataError: If a reward is negative, so that the mean is no measure of success.
    """
    if (rewards_PG < 0).any():
        least = float(rewards_PG.nan_to_num(nan=0.0).min())
        raise DataError(
            f"advantage_estimator 'maxrl' divides by a group's mean reward, but a reward is {least:g}. Give rewards of "
            "at least 0, best 0 and 1, or choose another advantage_estimator."
        )
    mean_P1 = rewards_PG.nanmean(-1, keepdim=True)
    return (_centred(rewards_PG) / mean_P1).masked_fill(mean_P1 == 0, 0.0)


def length_weighted(rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
    """Compares each row with the mean of its group weighed by lengths: ``A_i = r_i - sum_j l_j r_j / sum_j l_j``.

    OPO (arXiv:2505.23585): the baseline of least variance where a row's squared gradient grows with its length.

    Args:
        rewards_PG: (P, G), NaN for a row that was not scored, which counts for nothing.
        lengths_PG: (P, G), counted actions.

    Returns:
        (P, G); NaN in a group without an action.
    """
    weights_PG = lengths_PG.masked_fill(rewards_PG.isnan(), 0.0)
    return _centred(rewards_PG, weights_PG / weights_PG.sum(-1, keepdim=True))


for _estimator in (
    AdvantageEstimator("group", normalised_in_group),
    AdvantageEstimator("rloo", leave_one_out),
    AdvantageEstimator("dr_grpo", centred_in_group),
    AdvantageEstimator("reinforce++", normalised_in_batch, least_group=1),
    AdvantageEstimator("reinforce++-baseline", group_baseline_normalised_in_batch),
    AdvantageEstimator("maxrl", relative_to_mean),
    AdvantageEstimator("opo", length_weighted, with_lengths=True),
    AdvantageEstimator("otb", centred_in_group),  # of a whole row; `optimal_token_advantages` has its tokens
):
    ESTIMATORS.add(_estimator)


def zero_spread_groups(rewards: Tensor, group_size: int) -> Tensor:
    """Finds groups that teach nothing because all their scores are equal (DAPO's dynamic sampling, arXiv:2503.14476).

    Args:
        rewards: (B,) or (B, F), groups one after the other; NaN is no score. With several reward functions a group
            has no spread if none of its columns has.
        group_size: rows of a group.

    Returns:
        (P,) bool; True too for a group with fewer than two scores.
    """
    columns_FPG = rewards.reshape(len(rewards), -1).t().reshape(-1, len(rewards) // group_size, group_size)
    return _all_equal(columns_FPG)[..., 0].all(0)


def _weighted_sum(scores_BF: Tensor, weights_F: Tensor, unscored_B: Tensor) -> Tensor:
    return (scores_BF * weights_F).nansum(1).masked_fill(unscored_B, math.nan)


def _all_equal(values: Tensor) -> Tensor:
    """Says whether all numbers along the last axis, which stays as 1, are the same; True under two numbers."""
    missing = values.isnan()
    greatest = values.masked_fill(missing, -math.inf).amax(-1, keepdim=True)
    return greatest <= values.masked_fill(missing, math.inf).amin(-1, keepdim=True)


def _centred(values: Tensor, shares: Tensor | None = None) -> Tensor:
    """Subtracts the mean over the last axis, weighed by shares; exactly 0 where all are equal, NaN where none is."""
    if shares is None:
        mean = values.nanmean(-1, keepdim=True)
    else:
        mean = (values.nan_to_num(nan=0.0) * shares).sum(-1, keepdim=True)
    return (values - mean).masked_fill(_all_equal(values) & ~values.isnan(), 0.0)


def _nanstd(values: Tensor) -> Tensor:
    """Returns the deviation over the last axis, which stays as 1; NaN under two numbers, 0 for an axis of one."""
    count = values.isnan().logical_not().sum(-1, keepdim=True)
    if values.shape[-1] <= 1:
        return values.new_zeros(count.shape)
    squares = _centred(values).square().nansum(-1, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt().masked_fill(count < 2, math.nan)


def _compared(estimator: AdvantageEstimator, rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
    """Returns an estimator's advantages, (P, G); it may write to what it is given."""
    beside = (lengths_PG.clone(),) if estimator.with_lengths else ()
    given, told = estimator.function(rewards_PG.clone(), *beside), f"advantage_estimator {estimator.name!r}"
    if not isinstance(given, Tensor) or given.shape != rewards_PG.shape or not given.is_floating_point():
        raise wrong_answer(told, given, [tuple(rewards_PG.shape)], "one advantage for each completion")
    if given.isinf().any():
        raise ConfigError(f"{told} gave an infinite advantage. Bound it, or give NaN where a row is to count as 0.")
    return given.detach()


def _known(field: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"`{field}` is {value!r}, which is not known. Set it to one of {', '.join(known)}.")
