"""What no count of storages from Python can see: temporaries inside kernels, and what CUDA's libraries hold.

Temporaries inside CPU kernels are measured with torch 2.13, those that follow from the processor where they are asked
for. Those of CUDA's are what their sources allocate: `mha_bwd` of FlashAttention 2, `_efficient_attention_backward`
and, compared with an H200, `setReduceConfig` of `Reduce.cuh` and `launch_stable_sort_kernel` of `SortStable.cu`. What
its libraries hold is read from PyTorch's source.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memsafe_rl.memory.simulated.caching_allocator import AllocatorSettings
from memsafe_rl.units import format_bytes

_KIB = 2**10


def _flash_backward(args: Sequence[Any], _: object) -> int:
    """Flash's backward holds queries' gradients in float32, a number for each, and shared keys' for every head."""
    segments, heads, width, head = args[1].shape
    rows = -(-width // QUERIES) * QUERIES
    columns = 32 if head <= QUERIES else 64
    own_bytes = 0 if args[2].shape[1] == heads else (args[2].nbytes + args[3].nbytes) // args[2].shape[1] * heads
    return int(segments * heads * rows * (-(-head // columns) * columns + 1) * _FLOAT_BYTES + own_bytes)


def _efficient_backward(args: Sequence[Any], _: object) -> int:
    """The efficient backward keeps a float32 number for each query; in half precision, float32 gradients of queries."""
    segments, heads, width, head = args[1].shape
    sums = head if args[1].dtype.itemsize < _FLOAT_BYTES else 0
    rows = -(-width // QUERIES) * QUERIES
    return int(segments * heads * (width + rows * sums) * _FLOAT_BYTES)


_FLOAT_BYTES = 4
QUERIES = 128
"""Queries that a block of CUDA's kernels takes."""

WORKSPACES: Mapping[str, Callable[[Sequence[Any], Any], int]] = {
    "aten::logsumexp": lambda args, result: int(args[0].nbytes + result.nbytes),  # exponentials of the input, and peaks
    "aten::multinomial": lambda args, _: int(args[0].nbytes),  # a copy of the probabilities, divided by noise
    # rows of scores that are all hidden are looked for
    "aten::_safe_softmax": lambda _, result: int(result.numel() + result.numel() // result.shape[-1]),
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}
"""By operator, the bytes that its kernel holds for a moment besides its arguments and results; others hold a few."""

_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
_CHOICES, _SUMS = ("aten::where", "aten::masked_fill"), ("aten::sum", "aten::mean")


def is_measured(name: str, args: Sequence[Any]) -> bool:
    """Whether what a CPU kernel holds besides follows from the processor: oneDNN's products of halves, attention."""
    return "flash_attention_for_cpu" in name or (name in _PRODUCTS and args[-1].dtype.itemsize < _FLOAT_BYTES)


def cast_bytes(func: Any, args: Sequence[Any], result: Any) -> int:
    """Counts the copies that a CPU kernel makes of arguments, and of a result it writes to, that have another type."""
    name = func.name()
    if torch.Tag.pointwise not in func.tags and not name.startswith(_SUMS):
        return 0
    chooses = name.startswith(_CHOICES)  # by truth values, which stay such
    tensors = (one for one in args if isinstance(one, torch.Tensor) and one.dim())
    taken = [one for one in tensors if one.dtype is not torch.bool or not chooses]
    common = functools.reduce(torch.promote_types, {one.dtype for one in (*taken, result)})
    cast = [*taken, result] if result is args[0] else taken
    return int(sum(one.numel() for one in cast if one.dtype is not common) * common.itemsize)


_PLACE_BYTES, _IN_PLACE, _FEW_ROWS, _ALONE = 8, 4096, 128, 10**6
"""Of a number's place; longest rows sorted in place; from how many rows on, and from which length, CUDA sorts each."""


def sort_bytes(func: Any, args: Sequence[Any]) -> int:
    """Counts what a CUDA sort along the last axis holds: places of the numbers, and as much as it sorts, for CUB."""
    if not func.name().startswith("aten::sort") or (length := math.prod(args[0].shape[-1:])) <= _IN_PLACE:
        return 0
    number, pair = args[0].numel(), args[0].itemsize + _PLACE_BYTES
    if length == number or length >= _ALONE:
        return int(length * (_PLACE_BYTES + pair))
    return int(number * (_PLACE_BYTES + pair * (2 if number < _FEW_ROWS * length else 1)))


_ADDED_UP = (*_SUMS, "aten::linalg_vector_norm")
_REDUCTIONS = {"aten::sum.dim_IntList": 1, "aten::mean.dim": 1, "aten::linalg_vector_norm": 2}
"""Reductions of some axes, and which of their arguments names these."""
_BLOCK_THREADS, _WARP, _LOADS = 512, 32, 4
_FEWEST, _MOST = 16, 256
"""Numbers that a thread of a reduction adds up, where blocks share a result."""


def reduction_bytes(func: Any, args: Sequence[Any], result: Any, card: Any) -> int:
    """Counts what a CUDA sum, mean or norm holds: a copy in its result's type, and on a known card shared columns."""
    if not (name := func.name()).startswith(_ADDED_UP):
        return 0
    whole, named = args[0], _REDUCTIONS.get(name)
    widens = whole.dtype in (torch.float16, torch.bfloat16) and result.dtype is torch.float32  # without a copy
    held = 0 if widens or whole.dtype is result.dtype else whole.numel() * result.itemsize
    if named is not None and card is not None and whole.numel() >= _MOST and card.max_threads_per_multi_processor:
        held += max(_FLOAT_BYTES, result.itemsize) * _shared_columns(whole, card, *args[named : named + 1])
    return int(held)


def _shared_columns(whole: torch.Tensor, card: Any, axes: Any = None) -> int:
    """Counts columns that blocks of threads share, once a block; too high above 2 GiB, where CUDA cuts tensors."""
    summed, kept = _laid_out(whole, axes)
    if not summed or not kept or summed[0][0] < kept[0][0]:  # threads side by side add up one result
        return 0
    inputs, outputs = (math.prod(size for _, size in side) for side in (summed, kept))
    others = kept[0][1], *(stride for stride, _ in (*summed, *kept[1:]))
    lanes = math.gcd(_LOADS, whole.storage_offset(), *others) if kept[0][0] == 1 else 1  # results that a thread makes
    most = _BLOCK_THREADS // lanes
    wide, high = (min(most, 1 << (length.bit_length() - 1)) for length in (outputs // lanes, inputs))
    rows = min(high, most // min(wide, _WARP))
    columns = min(wide, most // rows)
    each, grid = -(-inputs // rows), -(-(outputs // lanes) // columns)
    wanted = card.multi_processor_count * (card.max_threads_per_multi_processor // (columns * rows))
    if each < _MOST or grid > wanted:
        return 0
    blocks = max(min(-(-wanted // grid), -(-each // _FEWEST)), -(-each // _MOST))
    return int(outputs * blocks * columns * lanes) if blocks > 1 else 0


def _laid_out(tensor: torch.Tensor, axes: Any) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns strides and sizes of axes added up, as they lie in the input, and of those kept, as in the result."""
    number, strides = tensor.dim(), tensor.stride()
    among = {axis % number for axis in ([axes] if isinstance(axes, int) else axes or range(number))}
    found: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    for axis in sorted(range(number), key=lambda axis: (axis in among and (strides[axis] or math.inf), -axis)):
        side, stride, size = found[axis not in among], strides[axis], tensor.shape[axis]
        if size > 1 and side and side[-1][0] * side[-1][1] == stride:
            side[-1] = side[-1][0], side[-1][1] * size
        elif size > 1:
            side.append((stride, size))
    return found


CUBLAS_BYTES = {"9.0": 32 * _KIB**2, "": 8 * _KIB**2 + 128 * _KIB}
"""Workspace of a cuBLAS handle by compute capability, "" for all others: ``parseChosenWorkspaceSize`` in PyTorch's
``aten/src/ATen/cuda/CublasHandlePool.cpp``."""
_CUBLAS_HANDLES = 2
"""Threads that multiply, each with a handle of its own: the one that runs the step, and autograd's for the device."""
_CUBLASLT_KIB = 1024
"""Workspace of cublasLt beside each, unless ``CUBLASLT_WORKSPACE_SIZE`` is set (``parseCUDABlasLtWorkspaceSize``)."""
_CONTEXT = "300 to 600 MiB"
"""What a CUDA context with PyTorch's kernels takes, by what users report of many cards and drivers; an assumption."""


def cublas_bytes(environment: Mapping[str, str], capability: str | None = None) -> int:
    """Counts what cuBLAS holds through PyTorch's allocator of a card (None: of the one that takes most)."""
    sizes = re.findall(r":(\d+):(\d+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    most = max(CUBLAS_BYTES.values()) if capability is None else CUBLAS_BYTES.get(capability, CUBLAS_BYTES[""])
    own = sum(int(size) * _KIB * int(count) for size, count in sizes) if sizes else most
    lt = environment.get("CUBLASLT_WORKSPACE_SIZE", "")
    return _CUBLAS_HANDLES * (own + _KIB * (int(lt) if lt.isdigit() else _CUBLASLT_KIB))


def about_cuda(card: Any) -> tuple[str, ...]:
    """Says what a forecast for a card takes for granted, of its properties."""
    capability = None if card is None else f"{card.major}.{card.minor}"
    cublas, left_out = cublas_bytes(os.environ, capability), AllocatorSettings.read(os.environ).left_out
    return (
        f"CPU kernels stand for CUDA's but in attention{', sorts and sums' if capability else ' and sorts'}; what "
        "others of CUDA's hold inside for a moment is left out",
        f"cuBLAS takes {format_bytes(cublas)} for its workspaces besides, through PyTorch's allocator",
        f"the CUDA context takes {_CONTEXT} outside of PyTorch, by what is reported of many cards",
        *((f"the allocator's {', '.join(left_out)} left out: reserved bytes will differ",) if left_out else ()),
    )
