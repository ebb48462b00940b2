"""GMPO: one ratio a row, the geometric mean of its clipped tokens' ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from memsafe_rl.ops.losses.core import (
    CLIPPING_METRICS,
    Loss,
    LossTraits,
    Measures,
    Ratios,
    count_marks,
    register_loss,
    row_mean,
)


def gmpo_surrogate(ratios: Ratios) -> Tensor:
    """GMPO, ``-exp(mean_t clip(log r_t)) A`` a row, averaged over rows (arXiv:2507.20673, eq. 4).

    ``clip(log r)`` is ``min(log r, epsilon_high)`` where A > 0 and ``max(log r, -epsilon_low)`` otherwise: the bounds
    are of the logarithm. Under ``top_entropy_quantile`` the mean is over the marked tokens, as in TRL.

    Args:
        ratios: the micro-batch.

    Returns:
        (B, T), the same for all tokens of a row of one advantage.
    """
    settings, mask_BT, marked_BT = ratios.settings, ratios.mask_BT, ratios.entropy_mask_BT
    low_BT = ratios.log_ratio_BT.clamp(min=-settings.epsilon_low)
    high_BT = ratios.log_ratio_BT.clamp(max=settings.epsilon_high)
    clipped_BT = torch.where(ratios.advantages > 0, high_BT, low_BT)
    kept_BT = mask_BT if marked_BT is None else mask_BT * marked_BT
    row_ratio_B1 = row_mean(clipped_BT, kept_BT)[:, None].exp()
    # The marks that later multiply a row's tokens take a share of its mean, which is given back here.
    unmarked_B1 = (mask_BT.sum(1) / kept_BT.sum(1).clamp(min=1))[:, None]
    return (-row_ratio_B1 * ratios.advantages * unmarked_B1).expand_as(clipped_BT)


def measure_gmpo(ratios: Ratios) -> Measures:
    """Counts the tokens whose log-ratio is clipped, as `count_marks` does."""
    settings, log_ratio_BT = ratios.settings, ratios.log_ratio_BT
    low = (log_ratio_BT < -settings.epsilon_low) & (ratios.advantages < 0)
    return count_marks(ratios, low, (log_ratio_BT > settings.epsilon_high) & (ratios.advantages > 0))


_TRAITS = LossTraits(("token",), aggregation="seq-mean-token-mean", every_row=False)
register_loss(Loss("gmpo", gmpo_surrogate, _TRAITS, measure_gmpo, CLIPPING_METRICS))
