"""DPPO: a bound on how far a token's probability moves, in the place of the clip of its ratio."""

from __future__ import annotations

from collections.abc import Callable

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


def beyond_tv(ratios: Ratios) -> tuple[Tensor, Tensor]:
    """Marks what DPPO-Binary-TV holds back (arXiv:2602.04879): tokens that have already moved too far.

    ``A > 0`` and ``p - p_old > epsilon_high``, or ``A < 0`` and ``p - p_old < -epsilon_low``; p is the token's
    probability, so that |p - p_old| is the total variation between the two-point distributions "this token, or
    another".

    Args:
        ratios: the micro-batch.

    Returns:
        (B, T) bool each, too far down and too far up.
    """
    settings = ratios.settings
    logprobs_BT, old_BT = _both(ratios)
    moved_BT = logprobs_BT.exp() - old_BT.exp()
    low = (moved_BT < -settings.epsilon_low) & (ratios.advantages < 0)
    return low, (moved_BT > settings.epsilon_high) & (ratios.advantages > 0)


def beyond_kl(ratios: Ratios) -> tuple[Tensor, Tensor]:
    """Marks what DPPO-Binary-KL holds back (arXiv:2602.04879), as `beyond_tv` does.

    ``p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))`` exceeds ``epsilon_high`` with ``A > 0`` and
    ``p > p_old``, or ``epsilon_low`` with ``A < 0`` and ``p < p_old``; nats.

    Args:
        ratios: the micro-batch.

    Returns:
        (B, T) bool each, too far down and too far up.
    """
    settings = ratios.settings
    logprobs_BT, old_BT = _both(ratios)
    least = torch.finfo(logprobs_BT.dtype).eps  # of a sure token rounding says whether others have a probability
    others_BT, old_others_BT = (torch.expm1(each).abs().clamp(min=least) for each in (logprobs_BT, old_BT))
    kl_BT = old_BT.exp() * (old_BT - logprobs_BT) + torch.xlogy(old_others_BT, old_others_BT / others_BT)
    low = (kl_BT > settings.epsilon_low) & (logprobs_BT < old_BT) & (ratios.advantages < 0)
    return low, (kl_BT > settings.epsilon_high) & (logprobs_BT > old_BT) & (ratios.advantages > 0)


def _both(ratios: Ratios) -> tuple[Tensor, Tensor]:
    """Returns the log-probs and the old ones, without gradient."""
    logprobs_BT = ratios.logprobs_BT.detach()
    return logprobs_BT, logprobs_BT - ratios.log_ratio_BT.detach()


def _register(name: str, beyond: Callable[[Ratios], tuple[Tensor, Tensor]]) -> None:
    """Makes known ``-sg(M min(r, delta)) A log pi``, (B, T); M is 0 where a token is marked, which is measured."""

    def surrogate(ratios: Ratios) -> Tensor:
        low, high = beyond(ratios)
        weights = bounded_ratio(ratios).detach() * ~(low | high)
        return -weights * ratios.advantages * ratios.logprobs_BT

    def measure(ratios: Ratios) -> Measures:
        return count_marks(ratios, *beyond(ratios))

    traits = LossTraits(("token",), separable=True, tokens_only=True, every_row=False)
    register_loss(Loss(name, surrogate, traits, measure, CLIPPING_METRICS))


_register("dppo", beyond_tv)
_register("dppo_kl", beyond_kl)
