"""Temporaries inside kernels, which no count of storages from Python can see.

Those of the CPU's kernels are measured with torch 2.13. Those of CUDA's are what their sources allocate (`mha_bwd` of
FlashAttention 2 and `_efficient_attention_backward`, as PyTorch builds them); not yet measured on a card.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def _exponentials(args: tuple[Any, ...], result: Tensor) -> int:
    """``logsumexp`` keeps the exponentials of its whole input, and the peaks they are relative to."""
    return int(args[0].nbytes + result.nbytes)


def _probabilities(args: tuple[Any, ...], _: Tensor) -> int:
    """``multinomial`` draws by dividing a copy of the probabilities by noise."""
    return int(args[0].nbytes)


def _flash_backward(args: tuple[Any, ...], _: object) -> int:
    """Flash's backward adds up the queries' gradient in float32, and keeps a float32 number for each query."""
    segments, heads, width, head = args[1].shape
    rows = -(-width // _FLASH_ROWS) * _FLASH_ROWS
    columns = 32 if head <= _FLASH_ROWS else 64
    return int(segments * heads * rows * (-(-head // columns) * columns + 1) * _FLOAT_BYTES)


def _efficient_backward(args: tuple[Any, ...], _: object) -> int:
    """The efficient backward keeps a float32 number for each query; in half precision, float32 gradients of queries."""
    segments, heads, width, head = args[1].shape
    sums = head if args[1].dtype.itemsize < _FLOAT_BYTES else 0
    rows = -(-width // _FLASH_ROWS) * _FLASH_ROWS
    return int(segments * heads * (width + rows * sums) * _FLOAT_BYTES)


_FLOAT_BYTES = 4
_FLASH_ROWS = 128
"""Queries that a block of CUDA's kernels takes."""

WORKSPACES: Mapping[str, Callable[[tuple[Any, ...], Any], int]] = {
    "aten::logsumexp": _exponentials,
    "aten::multinomial": _probabilities,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}
"""By operator, the bytes that its kernel holds for a moment besides its arguments and results; others hold a few."""
