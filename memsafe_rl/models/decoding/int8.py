"""Keys and values in 8 bits: whole numbers, and one scale for each token and head, in the same row of bytes.

Axes: ``D`` width of a head; all others are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memsafe_rl.types import CACHE_SCALE_BYTES

_LARGEST = 127
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def packed(values: Tensor) -> Tensor:
    """Rounds vectors to whole multiples of a 127th of their largest element.

    ``s = max|x| / 127``, ``q = round(x / s)``: symmetric 8-bit rounding, the scale by vector (Dettmers et al.,
    arXiv:2208.07339, Eq. 1).
    """
    wide = values.float()
    scale = wide.abs().amax(-1, keepdim=True).div_(_LARGEST).clamp_min_(_SMALLEST_SCALE)
    numbers = wide.div(scale).round_().to(torch.int8)
    return torch.cat([numbers, scale.contiguous().view(torch.int8)], -1)


def unpacked(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Gives vectors back as floats, ``q · s``."""
    scale = values[..., -CACHE_SCALE_BYTES:].contiguous().view(torch.float32)
    return values[..., :-CACHE_SCALE_BYTES].float().mul_(scale).to(dtype)


def as_floats(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Gives cached vectors as floats, whether they are kept in 8 bits or not."""
    return unpacked(values, dtype) if values.dtype == torch.int8 else values
