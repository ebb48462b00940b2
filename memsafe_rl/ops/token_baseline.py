"""The optimal token baseline: of least variance at every position, from log-probs alone.

Axes: ``G`` rows of a group, ``T`` columns.
"""

from __future__ import annotations

import math

from torch import Tensor


def squared_score_norms(logprobs: Tensor, sharper_logprobs: Tensor) -> Tensor:
    """Gives the squared length of ``d log pi(a) / d logits``, ``1 - 2 pi(a) + sum_v pi(v)^2`` (arXiv:2602.07078).

    ``sum_v pi(v)^2 = exp(2 log pi(a) - log pi'(a))``, where pi' has half the temperature: both sides are
    ``sum_v exp(2 z_v) / (sum_v exp(z_v))^2``, so that no sum over the vocabulary has to be taken beside log-probs.

    Args:
        logprobs: (...), nats, of the taken tokens at the temperature of the run.
        sharper_logprobs: likewise, at half of it.

    Returns:
        (...), between 0 and 2.
    """
    return (1 - 2 * logprobs.exp() + (2 * logprobs - sharper_logprobs).exp()).clamp(min=0.0)


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
    most_T = rewards_GT.masked_fill(~there_GT, -math.inf).amax(0)
    alike_T = most_T <= rewards_GT.masked_fill(~there_GT, math.inf).amin(0)
    return (rewards_GT - baseline_T).masked_fill(~there_GT | alike_T, 0.0)
