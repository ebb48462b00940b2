"""CISPO: the ratio is clipped and detached, so that every token keeps a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from memsafe_rl.ops.losses.core import Loss, LossTraits, Measures, Ratios, register_loss, total


def cispo_surrogate(ratios: Ratios) -> Tensor:
    """CISPO, ``-sg(min(r, e_high)) A log pi`` (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5), the bound itself is e_high.

    Args:
        ratios: the micro-batch.

    Returns:
        (B, T).
    """
    bounded = ratios.ratio.detach().clamp(max=ratios.settings.epsilon_high)
    return -bounded * ratios.advantages * ratios.logprobs_BT


def measure_cispo(ratios: Ratios) -> Measures:
    """Counts ratios over CISPO's bound with a positive advantage, ``cispo_clip`` of ``ratios``."""
    over = (ratios.ratio > ratios.settings.epsilon_high) & (ratios.advantages > 0)
    return Measures({"cispo_clip": total(over, ratios.mask_BT), "ratios": total(torch.ones_like(over), ratios.mask_BT)})


_TRAITS = LossTraits(("token",), separable=True, every_row=False)
register_loss(Loss("cispo", cispo_surrogate, _TRAITS, measure_cispo, {"cispo_clip_ratio": ("cispo_clip", None)}))
