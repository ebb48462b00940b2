"""PPO's arithmetic over rows × columns: rewards of single actions, advantages, whitening, value loss and KL control.

Axes: ``B`` rows, ``T`` columns: completion tokens, or denoising steps. A mask may have holes (tokens of an environment
between those of an agent): the next action is then the next one that counts, and what stands in a hole is never read.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

_VARIANCE_FLOOR = 1e-8


class Generalized(NamedTuple):
    """Advantages and returns, one per action.

    Args:
        advantages_BT: (B, T), 0 where an action does not count.
        returns_BT: (B, T), what a critic should have said; 0 where an action does not count.
    """

    advantages_BT: Tensor
    returns_BT: Tensor


class ValueShare(NamedTuple):
    """A micro-batch's share of the step's value loss.

    Args:
        loss: scalar with gradient.
        clipped: detached scalar, counted actions whose value clipping holds back.
    """

    loss: Tensor
    clipped: Tensor


def generalized_advantages(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, *, gamma: float, gae_lambda: float
) -> Generalized:
    """Weighs how much better every action went than the critic foresaw.

    ``A_t = sum_k (gamma lambda)^k delta_{t+k}`` with ``delta_t = r_t + gamma V_{t+1} - V_t`` (Schulman et al. 2016,
    arXiv:1506.02438, eq. 16), over the actions of a row that count; the value after the last is 0, for the row ends
    there. Returns are ``A_t + V_t``.

    Computed in float64, for a long row sums thousands of terms, and in about log2(T) steps.

    Args:
        rewards_BT: (B, T).
        values_BT: (B, T), the critic's, of the state in which each action was taken.
        mask_BT: (B, T), not 0 where an action counts.
        gamma: discount per action.
        gae_lambda: 0 for the one-step error, 1 for all that follows.

    Returns:
        Advantages and returns, of the type of ``values_BT``.
    """
    wide_BT, counted_BT, columns = values_BT.double(), mask_BT.bool(), values_BT.shape[1]
    holes_BT = ~counted_BT
    places_BT = torch.arange(columns, device=values_BT.device).where(counted_BT, columns)
    next_BT = pad(places_BT.flip(1).cummin(1).values.flip(1)[:, 1:], (0, 1), value=columns)[:, :columns]
    next_values_BT = pad(wide_BT.masked_fill(holes_BT, 0.0), (0, 1)).gather(1, next_BT)
    advantages_BT = (rewards_BT.double() + gamma * next_values_BT - wide_BT).masked_fill(holes_BT, 0.0)
    decay_BT = torch.full_like(wide_BT, gamma * gae_lambda).masked_fill(holes_BT, 1.0)
    reach = 1  # errors in each sum so far; adding the sum that starts `reach` later doubles them
    while reach < columns:
        advantages_BT[:, :-reach].add_(decay_BT[:, :-reach] * advantages_BT[:, reach:])
        decay_BT[:, :-reach] = decay_BT[:, :-reach] * decay_BT[:, reach:]
        reach *= 2
    advantages_BT = advantages_BT.masked_fill(holes_BT, 0.0)
    returns_BT = (advantages_BT + wide_BT).masked_fill(holes_BT, 0.0)
    return Generalized(advantages_BT.to(values_BT.dtype), returns_BT.to(values_BT.dtype))


def whiten(values_BT: Tensor, mask_BT: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Brings counted numbers to deviation 1, and to mean 0 unless the mean is kept.

    ``(x - m) / sqrt(v + 1e-8)``, m and v (with Bessel's correction) over all counted actions of all rows, as OpenAI's
    lm-human-preferences and TRL's PPO have it. To be given a whole rollout, all ranks' rows: m and v of a part differ.

    Args:
        values_BT: (B, T).
        mask_BT: (B, T), not 0 where an action counts.
        shift_mean: whether the mean goes; False adds it again, unscaled (for rewards).

    Returns:
        (B, T), of the same type, 0 where an action does not count; the numbers as they are where fewer than two count.
    """
    counted_BT, wide_BT = mask_BT.bool(), values_BT.double()
    mean, variance, count = _moments(wide_BT, counted_BT)
    white_BT = (wide_BT - mean) * (variance + _VARIANCE_FLOOR).rsqrt()
    white_BT = white_BT if shift_mean else white_BT + mean
    white_BT = torch.where(count < 2, wide_BT, white_BT)
    return white_BT.masked_fill(~counted_BT, 0.0).to(values_BT.dtype)


def token_rewards(scores_B: Tensor, mask_BT: Tensor, *, kl_BT: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """Spreads a row's score over its actions: all of it to the last that counts, and each pays for its own KL.

    ``r_t = -c KL_t + [t is the last] score`` (Ziegler et al. 2019, arXiv:1909.08593, eq. 2, per token as in Stiennon et
    al. 2020, arXiv:2009.01325).

    Args:
        scores_B: (B,).
        mask_BT: (B, T), not 0 where an action counts.
        kl_BT: (B, T), nats, an estimate of each action's KL to the reference; None for none.
        kl_coef: what a nat costs.

    Returns:
        (B, T), of the type of ``scores_B``; 0 where an action does not count, and all 0 in a row where none does.
    """
    counted_BT = mask_BT.bool()
    after_BT = counted_BT.flip(1).cumsum(1).flip(1)
    last_BT = counted_BT & (after_BT == 1)
    rewards_BT = torch.where(last_BT, scores_B[:, None], scores_B.new_zeros(()))
    if kl_BT is None:
        return rewards_BT
    return rewards_BT - kl_coef * kl_BT.to(scores_B.dtype).masked_fill(~counted_BT, 0.0)


def kl_estimates(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimates each action's KL to the reference from the action that was drawn.

    ``k1 = log pi - log pi_ref``, unbiased, of either sign; ``k3 = exp(-k1) - 1 + k1``, unbiased, never negative
    (Schulman 2020, "Approximating KL Divergence").

    Args:
        logprobs: (...), nats, of the network that drew the actions.
        ref_logprobs: likewise, of the reference.
        estimator: "k1" or "k3".

    Returns:
        (...), nats.
    """
    gap = logprobs - ref_logprobs
    return {"k1": gap, "k3": torch.expm1(-gap) + gap}[estimator]


def value_loss(
    values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor, *, clip: float | None, tokens: int
) -> ValueShare:
    """Returns a micro-batch's share of the critic's loss; the shares of any split add up to the same loss.

    ``L = 1/2 sum max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / N`` over counted actions: the clipping of
    OpenAI's baselines (`ppo2`), which holds a value that moves past its bound in one rollout. N is the step's.

    Args:
        values_BT: (B, T), with gradient.
        old_values_BT: (B, T), those of the rollout.
        returns_BT: (B, T).
        mask_BT: (B, T), 1 where an action counts.
        clip: the bound c, in units of reward; None for no clipping.
        tokens: counted actions N of the whole optimizer step and all ranks.

    Returns:
        The share, and how many values clipping holds back.
    """
    skipped_BT = ~mask_BT.bool()
    errors_BT = (values_BT - returns_BT).masked_fill(skipped_BT, 0.0).square()
    if clip is None:
        return ValueShare(0.5 * errors_BT.sum() / max(tokens, 1), mask_BT.new_zeros(()))
    bounded_BT = torch.clamp(values_BT, old_values_BT - clip, old_values_BT + clip)
    clipped_BT = (bounded_BT - returns_BT).masked_fill(skipped_BT, 0.0).square()
    total = torch.maximum(errors_BT, clipped_BT).sum()
    return ValueShare(0.5 * total / max(tokens, 1), (clipped_BT > errors_BT).sum().detach())


def explained_variance(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Says which share of the returns' variance a critic foresaw: ``1 - Var(R - V) / Var(R)`` over counted actions.

    Args:
        values_BT: (B, T).
        returns_BT: (B, T).
        mask_BT: (B, T), not 0 where an action counts.

    Returns:
        Scalar float64: 1 for a perfect critic, 0 for one that says the same of everything, less for a misleading one;
        NaN where returns do not differ.
    """
    counted_BT, returns_BT = mask_BT.bool(), returns_BT.double()
    spread = _moments(returns_BT, counted_BT)[1]
    missed = _moments(returns_BT - values_BT.double(), counted_BT)[1]
    return torch.where(spread > 0.0, 1.0 - missed / spread, torch.nan)


def adaptive_kl_coef(coef: float, kl: float, *, target: float, rows: int, horizon: float) -> float:
    """Moves the coefficient of the KL towards the one that holds the KL at its target.

    ``e = clip(KL / target - 1, -0.2, 0.2)``, ``c' = c (1 + K e)`` (Ziegler et al. 2019, arXiv:1909.08593, section 2.2),
    with ``K = rows / horizon`` as in the code published with it, so that no batch size changes the pace.

    Args:
        coef: the coefficient before.
        kl: nats a row, mean over the rollout.
        target: nats a row.
        rows: rows of the rollout.
        horizon: rows over which the coefficient could change by a factor of about 1.2.

    Returns:
        The coefficient after; the same where the KL is no number.
    """
    if math.isnan(kl):
        return coef
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * rows / horizon)


def _moments(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean, variance with Bessel's correction and count of the counted numbers, as scalars; reads no value."""
    count = counted.sum()
    mean = values.masked_fill(~counted, 0.0).sum() / count.clamp(min=1)
    squares = (values - mean).square().masked_fill(~counted, 0.0).sum()
    return mean, squares / (count - 1).clamp(min=1), count
