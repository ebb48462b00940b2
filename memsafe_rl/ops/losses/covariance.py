"""Clip-Cov and KL-Cov: the few tokens that make entropy collapse are left out of the loss, or pay for moving.

A policy's entropy falls with the covariance of log-probs and advantages, and few tokens make most of it (Cui et al.
2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv:2505.22617).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from memsafe_rl.ops.losses.core import (
    CLIPPING_METRICS,
    Loss,
    LossTraits,
    Measures,
    Ratios,
    StepTokens,
    beyond_rounding,
    clipped_surrogate,
    measure_clipping,
    register_loss,
    total,
)
from memsafe_rl.types import LossSettings

_TIE = 1e-6
"""Share by which covariances that are equal may differ by rounding: first tokens of equal completions have one."""


def covariances(tokens: StepTokens) -> Tensor:
    """Returns each token's part of the covariance, ``(A - mean A) (log pi - mean log pi)`` (arXiv:2505.22617).

    Departure from the authors' code: the means are over the whole optimizer step.

    Args:
        tokens: the step.

    Returns:
        (M,) float64; -inf where an action does not count.
    """
    mask_M = tokens.mask_M
    count = mask_M.sum().clamp(min=1)
    advantages_M, logprobs_M = (
        each_M - each_M.masked_fill(~mask_M, 0.0).sum() / count for each_M in (tokens.advantages_M, tokens.logprobs_M)
    )
    return (advantages_M * logprobs_M).masked_fill(~mask_M, -math.inf)


def mark_in_band(tokens: StepTokens, settings: LossSettings) -> Tensor:
    """Marks for Clip-Cov (arXiv:2505.22617) a share of the step's tokens, drawn among those in the band.

    Those whose covariance lies between ``clip_cov_low`` and ``clip_cov_high`` and whose ratio is not clipped anyway are
    drawn from, without replacement, by the order of `StepTokens.uniforms_M`.

    Args:
        tokens: the step.
        settings: the configuration.

    Returns:
        (M,) bool, at most ``max(1, floor(cov_fraction N))`` of N tokens.
    """
    covariance_M, ratio_M = covariances(tokens), tokens.log_ratio_M.exp()
    over_M = (ratio_M > 1 + settings.epsilon_high) & (tokens.advantages_M > 0)
    clipped_M = over_M | ((ratio_M < 1 - settings.epsilon_low) & (tokens.advantages_M < 0))
    in_band_M = (covariance_M > settings.clip_cov_low) & (covariance_M < settings.clip_cov_high) & ~clipped_M
    order_M = tokens.uniforms_M.masked_fill(~in_band_M, math.inf).argsort(stable=True)
    first_M = torch.arange(len(order_M), device=order_M.device) < _share(tokens, settings)
    return in_band_M & torch.zeros_like(in_band_M).index_copy(0, order_M, first_M)


def mark_greatest(tokens: StepTokens, settings: LossSettings) -> Tensor:
    """Marks for KL-Cov (arXiv:2505.22617) the share of the step's tokens with the greatest covariances.

    Departures from the authors' code: all of those that tie at the edge are marked, and none whose covariance is not
    positive, which does not lower entropy.

    Args:
        tokens: the step.
        settings: the configuration.

    Returns:
        (M,) bool.
    """
    covariance_M = covariances(tokens)
    descending_M = torch.cat([covariance_M.sort(descending=True).values, covariance_M.new_full((1,), -math.inf)])
    edge = descending_M.take(_share(tokens, settings) - 1).clamp(min=torch.finfo(torch.float64).tiny)
    return covariance_M >= edge * (1 - _TIE)


def clip_cov_surrogate(ratios: Ratios) -> Tensor:
    """Clip-Cov (arXiv:2505.22617): PPO's clipped objective, without gradient where a token is marked.

    Args:
        ratios: the micro-batch.

    Returns:
        (B, T).
    """
    losses = clipped_surrogate(ratios)
    return losses if ratios.marks_BT is None else losses * (1 - ratios.marks_BT)


def kl_cov_surrogate(ratios: Ratios) -> Tensor:
    """KL-Cov (arXiv:2505.22617): ``-r A``, plus ``kl_cov_coef |log r|`` where a token is marked.

    Args:
        ratios: the micro-batch.

    Returns:
        (B, T).
    """
    losses, apart_BT = -ratios.ratio * ratios.advantages, ratios.log_ratio_BT.abs()
    if ratios.marks_BT is None:
        return losses
    # A token that has not moved has no slope; what rounding leaves of it would have one of either sign.
    return losses + ratios.settings.kl_cov_coef * (ratios.marks_BT * beyond_rounding(apart_BT)) * apart_BT


def _share(tokens: StepTokens, settings: LossSettings) -> Tensor:
    """Counts the tokens to be marked, at least one."""
    return (tokens.mask_M.sum() * settings.cov_fraction + 1e-9).floor().long().clamp(min=1)


def measure_marks(ratios: Ratios) -> Measures:
    """Counts the marked tokens, ``cov_marked``."""
    marks = torch.zeros_like(ratios.mask_BT) if ratios.marks_BT is None else ratios.marks_BT
    return Measures({"cov_marked": total(marks, ratios.mask_BT)})


def measure_clip_cov(ratios: Ratios) -> Measures:
    """Counts what clipping holds back, as `count_marks` does, and the marked tokens."""
    clipping = measure_clipping(ratios)
    return clipping._replace(sums={**clipping.sums, **measure_marks(ratios).sums})


_MARKED = {"cov_marked_ratio": ("cov_marked", None)}
_TRAITS = LossTraits(("token",), separable=True, tokens_only=True, every_row=False)
_METRICS = {**CLIPPING_METRICS, **_MARKED}
register_loss(Loss("clip_cov", clip_cov_surrogate, _TRAITS, measure_clip_cov, _METRICS, mark_in_band))
register_loss(Loss("kl_cov", kl_cov_surrogate, replace(_TRAITS, every_row=True), measure_marks, _MARKED, mark_greatest))
