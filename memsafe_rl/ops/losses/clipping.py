"""PPO's clipped objective, shared by the losses that differ only in how they average it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from memsafe_rl.ops.losses.aggregation import row_mean, total
from memsafe_rl.ops.losses.base import Measures, Ratios

CLIPPING_METRICS = {f"clip_ratio/{side}_mean": (f"clip_{side}", None) for side in ("low", "high", "region")}
"""The metrics that `measure_clipping` gives, as `Loss` holds them."""


def clipped_surrogate(ratios: Ratios) -> Tensor:
    """PPO's clipped objective, ``-min(min(r, delta) A, clip(r, 1 - e_low, 1 + e_high) A)``.

    PPO, arXiv:1707.06347, eq. 7; the two ranges are DAPO's (arXiv:2503.14476, eq. 8), ``delta`` is INTELLECT-2's
    (arXiv:2505.07291).

    Args:
        ratios: the micro-batch.

    Returns:
        (B, T|1).
    """
    settings = ratios.settings
    clipped = ratios.ratio.clamp(1 - settings.epsilon_low, 1 + settings.epsilon_high)
    return -torch.min(_bounded(ratios) * ratios.advantages, clipped * ratios.advantages)


def measure_clipping(ratios: Ratios) -> Measures:
    """Counts ratios that clipping holds back, under TRL's conditions.

    ``sums``: ``clip_low``, ``clip_high``, ``clip_region`` and ``ratios`` (how many there are: divide by it); ``lows``
    and ``highs``: the least share of low-clipped and the greatest of high-clipped ratios in a row.
    """
    settings, advantages = ratios.settings, ratios.advantages
    bounded = _bounded(ratios)
    low = (bounded < 1 - settings.epsilon_low) & (advantages < 0)
    high = (bounded > 1 + settings.epsilon_high) & (advantages > 0)
    sums = {
        "clip_low": total(low, ratios.mask_BT),
        "clip_high": total(high, ratios.mask_BT),
        "clip_region": total(low | high, ratios.mask_BT),
        "ratios": total(torch.ones_like(low), ratios.mask_BT),
    }
    lows = {"clip_low": _row_shares(low, ratios.mask_BT, math.inf).amin()}
    return Measures(sums, lows, {"clip_high": _row_shares(high, ratios.mask_BT, -math.inf).amax()})


def _bounded(ratios: Ratios) -> Tensor:
    delta = ratios.settings.delta
    return ratios.ratio if delta is None else ratios.ratio.clamp(max=delta)


def _row_shares(marks: Tensor, mask_BT: Tensor, if_empty: float) -> Tensor:
    """Gives the share of marked ratios in each row, (B,)."""
    if marks.shape[1] == 1:
        return marks[:, 0].float()
    return torch.where(mask_BT.sum(1) > 0, row_mean(marks.float(), mask_BT), if_empty)
