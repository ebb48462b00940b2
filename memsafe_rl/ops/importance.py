"""Weights that correct for completions drawn by another sampler than the trained model."""

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
    """Gives every action of one sequence the weight `π_old / π_sampler`, bounded.

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
