"""Weights that correct for completions drawn by another sampler than the trained model, and the rejection of some."""

from __future__ import annotations

import torch
from torch import Tensor


def importance_weights(
    old_logprobs_T: Tensor,
    sampling_logprobs_T: Tensor,
    mask_T: Tensor,
    *,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> Tensor:
    """Returns every action of one sequence the weight `π_old / π_sampler`, bounded.

    ``w_t = exp(old_t − sampled_t)`` per token, or ``exp Σ_t m_t (old_t − sampled_t)`` per sequence; a `truncate` mode
    clamps it to the bounds, a `mask` mode drops it outside them (truncated and masked importance sampling,
    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"). A position that the
    sampler could not score (NaN) keeps weight 1.

    Args:
        old_logprobs_T: (T,), nats, of the trained model before the first update.
        sampling_logprobs_T: (T,), nats, of the sampler; NaN where unknown.
        mask_T: (T,), 1 where an action counts.
        mode: "token_truncate", "token_mask", "sequence_truncate" or "sequence_mask".
        clip_min: lower bound, None for none.
        clip_max: upper bound, None for none.

    Returns:
        (T,), of the type of `old_logprobs_T`.
    """
    difference = torch.nan_to_num((old_logprobs_T - sampling_logprobs_T) * mask_T, nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum().expand_as(difference)
    weights = difference.exp()
    low = -torch.inf if clip_min is None else clip_min
    high = torch.inf if clip_max is None else clip_max
    if mode.endswith("truncate"):
        return weights.clamp(low, high)
    return weights.masked_fill((weights < low) | (weights > high), 0.0)


def accepted(
    old_logprobs_T: Tensor, sampling_logprobs_T: Tensor, mask_T: Tensor, *, criterion: str, limit: float
) -> Tensor:
    """Marks the actions of one sequence whose log-probs agree well enough with their sampler's to be learnt from.

    With ``d_t = old_t − sampled_t``, an estimate of the KL from the sampler to the model is bounded: k1, ``|d_t|``, or
    k3, ``exp(d_t) − 1 − d_t`` (Schulman 2020, "Approximating KL Divergence"). Of a sequence the mean over its counted
    actions is bounded (``|mean d_t|`` for k1), and all of it accepted or rejected. A position that the sampler could
    not score (NaN) counts as no difference.

    Args:
        old_logprobs_T: (T,), nats, of the trained model before the first update.
        sampling_logprobs_T: (T,), nats, of the sampler; NaN where unknown.
        mask_T: (T,), 1 where an action counts.
        criterion: "token_k1", "token_k3", "sequence_k1" or "sequence_k3".
        limit: most that is accepted, nats.

    Returns:
        (T,), of the type of `old_logprobs_T`, 1 where accepted and 0 elsewhere.
    """
    difference = torch.nan_to_num((old_logprobs_T - sampling_logprobs_T) * mask_T, nan=0.0)
    level, _, estimator = criterion.partition("_")
    estimate = difference if estimator == "k1" else difference.expm1() - difference
    if level == "sequence":
        estimate = (estimate.sum() / mask_T.sum().clamp(min=1)).expand_as(estimate)
    return (estimate.abs() <= limit).to(old_logprobs_T.dtype)
