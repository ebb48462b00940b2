"""DPPO: a bound on how far a token's probability moves, in the place of the clip of its ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from memsafe_rl.ops.losses.core import (
    CLIPPING_METRICS,
    Loss,
    LossTraits,
    Measures,
    Ratios,
    bounded_ratio,
    count_marks,
    register_loss,
)


def dppo_surrogate(ratios: Ratios) -> Tensor:
    """DPPO-Binary-TV, ``-sg(M min(r, delta)) A log pi`` (arXiv:2602.04879).

    ``M = 0`` where the token has already moved too far in the direction of its advantage: ``A > 0`` and
    ``p - p_old > epsilon_high``, or ``A < 0`` and ``p - p_old < -epsilon_low``; p is the token's probability, so that
    |p - p_old| is the total variation between the two-point distributions "this token, or another".

    Args:
        ratios: the micro-batch.

    Returns:
        (B, T).
    """
    return _surrogate(ratios, *_beyond_tv(ratios))


def dppo_kl_surrogate(ratios: Ratios) -> Tensor:
    """DPPO-Binary-KL, `dppo_surrogate` with another M (arXiv:2602.04879).

    ``M = 0`` where ``p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))`` exceeds ``epsilon_high`` with
    ``A > 0`` and ``p > p_old``, or ``epsilon_low`` with ``A < 0`` and ``p < p_old``; nats.

    Args:
        ratios: the micro-batch.

    Returns:
        (B, T).
    """
    return _surrogate(ratios, *_beyond_kl(ratios))


def measure_dppo(ratios: Ratios) -> Measures:
    """Counts the tokens that `dppo_surrogate` holds back, as `count_marks` does."""
    return count_marks(ratios, *_beyond_tv(ratios))


def measure_dppo_kl(ratios: Ratios) -> Measures:
    """Counts the tokens that `dppo_kl_surrogate` holds back, as `count_marks` does."""
    return count_marks(ratios, *_beyond_kl(ratios))


def _surrogate(ratios: Ratios, low: Tensor, high: Tensor) -> Tensor:
    weights = bounded_ratio(ratios).detach() * ~(low | high)
    return -weights * ratios.advantages * ratios.logprobs_BT


def _beyond_tv(ratios: Ratios) -> tuple[Tensor, Tensor]:
    """Marks tokens that moved too far down, and too far up, (B, T) each."""
    settings = ratios.settings
    logprobs_BT, old_BT = _both(ratios)
    moved_BT = logprobs_BT.exp() - old_BT.exp()
    low = (moved_BT < -settings.epsilon_low) & (ratios.advantages < 0)
    return low, (moved_BT > settings.epsilon_high) & (ratios.advantages > 0)


def _beyond_kl(ratios: Ratios) -> tuple[Tensor, Tensor]:
    settings = ratios.settings
    logprobs_BT, old_BT = _both(ratios)
    others_BT, old_others_BT = torch.expm1(logprobs_BT).abs(), torch.expm1(old_BT).abs()
    # NaN, which exceeds nothing, where both probabilities are 1.
    kl_BT = old_BT.exp() * (old_BT - logprobs_BT) + torch.xlogy(old_others_BT, old_others_BT / others_BT)
    low = (kl_BT > settings.epsilon_low) & (logprobs_BT < old_BT) & (ratios.advantages < 0)
    return low, (kl_BT > settings.epsilon_high) & (logprobs_BT > old_BT) & (ratios.advantages > 0)


def _both(ratios: Ratios) -> tuple[Tensor, Tensor]:
    """Gives the log-probs and the old ones, without gradient."""
    logprobs_BT = ratios.logprobs_BT.detach()
    return logprobs_BT, logprobs_BT - ratios.log_ratio_BT.detach()


_TRAITS = LossTraits(("token",), separable=True, tokens_only=True)
register_loss(Loss("dppo", dppo_surrogate, _TRAITS, measure_dppo, CLIPPING_METRICS))
register_loss(Loss("dppo_kl", dppo_kl_surrogate, _TRAITS, measure_dppo_kl, CLIPPING_METRICS))
