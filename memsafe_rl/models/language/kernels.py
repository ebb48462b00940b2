"""Attention of one part of a softmax that gives its log-sum-exp, by the kernel that the device has for it.

No mask and no scores of all queries over all keys ever exist: a kernel keeps its scores to itself, and what no kernel
does in one call (a window, soft-capped scores, float64 on CUDA) is done a block of queries at a time, over the keys
that the block can see. Backward makes the scores again, of the log-sum-exp of the whole softmax.

The kernels are those behind `torch.nn.functional.scaled_dot_product_attention`, whose own form keeps the log-sum-exp to
itself. Their shapes were read in PyTorch 2.11 and 2.13; on a real CUDA device they have not been run yet.

Axes: ``S`` segments, ``H`` query heads, ``K`` key/value heads, ``W`` queries, ``U`` keys, ``D`` width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from memsafe_rl.accounting import device_type_of

_SCORES = 2**24
"""Most scores that exist together where no kernel keeps them to itself."""

_LEAST_BLOCK, _MOST_BLOCK = 64, 512
"""Queries that share a mask: about as many as the window is long, so that half of what is computed is seen."""

_ALIGNED = 8
"""Elements of which CUDA's kernels want whole multiples: 16 bytes in half precision."""
_MASK_ALIGNED, _LSE_ALIGNED = 16, 32
_FLASH_WIDEST = 256
"""Widest head of the flash kernel."""
_HALF = (torch.float16, torch.bfloat16)
_AMPERE = (8, 0)


class Kernel(Enum):
    """How attention is computed."""

    CPU_FLASH = "the CPU's flash kernel"
    FLASH = "CUDA's flash kernel"
    EFFICIENT = "CUDA's memory-efficient kernel"
    BLOCKS = "products of matrices, a block of queries at a time"


def kernel_for(
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    *,
    masked: bool = False,
    soft_capped: bool = False,
    capability: tuple[int, int] = _AMPERE,
) -> Kernel:
    """Decides which kernel attends before any tensor exists; ``masked`` where more than causality hides keys."""
    if soft_capped:
        return Kernel.BLOCKS
    if device_type == "cpu":
        return Kernel.CPU_FLASH if head_dim == value_dim else Kernel.BLOCKS
    if device_type != "cuda" or dtype not in (*_HALF, torch.float32):
        return Kernel.BLOCKS
    if dtype in _HALF and capability >= _AMPERE and not masked and head_dim == value_dim <= _FLASH_WIDEST:
        return Kernel.FLASH
    return Kernel.BLOCKS if dtype is torch.bfloat16 and capability < _AMPERE else Kernel.EFFICIENT


class Target(NamedTuple):
    """The device whose kernels attend."""

    device_type: str  # such as "cuda"
    capability: tuple[int, int] = _AMPERE  # of CUDA; what a device that is only stood for is taken to have


def target_of(tensor: Tensor) -> Target:
    """Returns the device that a tensor is on or stands for."""
    if tensor.is_cuda:
        return Target("cuda", torch.cuda.get_device_capability(tensor.device))
    return Target(device_type_of(tensor))


class Part(NamedTuple):
    """One part of a softmax: queries (S, H, W, D), each of which sees a key, over keys and values (S, K, U, D)."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float  # factor on the product of query and key
    soft_cap: float | None  # what scores are soft-capped at, None for nothing
    first: int | None  # the first query's place among the keys, of which none sees later ones; None if all see all
    window: int | None = None  # keys that a query sees, itself and those before it; None for all

    @property
    def is_plain(self) -> bool:
        """Whether the queries see all keys, or as many of them square as there are queries."""
        seen = self.key.shape[2]
        whole = self.first == 0 and seen == self.query.shape[2] and (self.window is None or self.window >= seen)
        return self.first is None or whole

    def kernel(self, target: Target) -> Kernel:
        """Returns what attends on a device."""
        return kernel_for(
            target.device_type,
            self.query.dtype,
            self.query.shape[-1],
            self.value.shape[-1],
            masked=not self.is_plain,
            soft_capped=self.soft_cap is not None,
            capability=target.capability,
        )

    def cut(self, rows: slice, keys: slice) -> Part:
        """Returns some queries over the keys that they see."""
        first = None if self.first is None else self.first + rows.start - keys.start
        key, value = self.key[:, :, keys], self.value[:, :, keys]
        return self._replace(query=self.query[:, :, rows], key=key, value=value, first=first)

    def hidden(self) -> Tensor | None:
        """Returns which keys each query does not see, (W, U) bool; None if all see all."""
        if self.first is None:
            return None
        width, seen = self.query.shape[2], self.key.shape[2]
        if self.first >= seen - 1 and (self.window is None or (self.first + width - 1) < self.window):
            return None
        places = torch.arange(self.first, self.first + width, device=self.query.device)[:, None]
        keys = torch.arange(seen, device=self.query.device)
        return keys > places if self.window is None else (keys > places) | (keys <= places - self.window)


class Joined(NamedTuple):
    """What a part's backward takes of the whole softmax: gradient and output (S, H, W, D), log-sum-exp (S, H, W)."""

    grad: Tensor
    out: Tensor
    lse: Tensor


def attend(part: Part, target: Target) -> tuple[Tensor, Tensor]:
    """Returns output (S, H, W, D) and log-sum-exp (S, H, W; at least float32) of one part of a softmax."""
    wide, kernel = _with_equal_heads(part), part.kernel(target)
    forward, _ = _CALLS[kernel]
    found = []
    for rows, keys in _blocks(wide, kernel):
        found.append(forward(wide.cut(rows, keys)))
    out, lse = found[0] if len(found) == 1 else (torch.cat(pieces, 2) for pieces in zip(*found, strict=True))
    return out.reshape(*part.query.shape[:3], -1), lse.reshape(part.query.shape[:3])


def attend_backward(part: Part, joined: Joined, target: Target) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of a part's queries, keys and values, its weights being those of the whole softmax."""
    wide, kernel = _with_equal_heads(part), part.kernel(target)
    seen = Joined(*(whole.reshape(*wide.query.shape[:3], *whole.shape[3:]) for whole in joined))
    dq, dk, dv = _backward(wide, seen, kernel)
    if part.query.shape[1] != part.key.shape[1]:
        dk, dv = (share.reshape(*part.key.shape[:2], -1, *share.shape[2:]).sum(2) for share in (dk, dv))
    return dq.reshape(part.query.shape), dk, dv


def _backward(part: Part, joined: Joined, kernel: Kernel) -> tuple[Tensor, Tensor, Tensor]:
    """Adds up what blocks of queries give the keys, in float32 at least."""
    blocks, (_, backward) = list(_blocks(part, kernel)), _CALLS[kernel]
    if len(blocks) == 1:
        return backward(part.cut(*blocks[0]), joined)
    wide = joined.lse.dtype
    dk, dv = (torch.zeros(whole.shape, dtype=wide, device=whole.device) for whole in (part.key, part.value))
    dqs = []
    for rows, keys in blocks:
        dq, dk_share, dv_share = backward(part.cut(rows, keys), Joined(*(whole[:, :, rows] for whole in joined)))
        dqs.append(dq)
        dk[:, :, keys] += dk_share
        dv[:, :, keys] += dv_share
    return torch.cat(dqs, 2), dk.to(part.key.dtype), dv.to(part.value.dtype)


def _with_equal_heads(part: Part) -> Part:
    """Returns every query head keys of its own: of a single segment without a copy, by taking key heads as segments."""
    kv_heads = part.key.shape[1]
    repeats = part.query.shape[1] // kv_heads
    if repeats == 1:
        return part
    if part.query.shape[0] > 1:
        key, value = part.key.repeat_interleave(repeats, 1), part.value.repeat_interleave(repeats, 1)
        return part._replace(key=key, value=value)
    key, value = part.key[0][:, None].expand(-1, repeats, -1, -1), part.value[0][:, None].expand(-1, repeats, -1, -1)
    return part._replace(query=part.query.reshape(kv_heads, repeats, *part.query.shape[2:]), key=key, value=value)


def _blocks(part: Part, kernel: Kernel) -> Iterator[tuple[slice, slice]]:
    """Cuts queries, beside the keys they see, so that a block's scores, or its mask, are small beside all."""
    segments, heads, width, _ = part.query.shape
    seen = part.key.shape[2]
    if kernel is Kernel.BLOCKS:
        step = max(1, min(_MOST_BLOCK, _SCORES // max(1, segments * heads * seen)))
    else:
        step = width if part.is_plain else min(max(part.window or seen, _LEAST_BLOCK), _MOST_BLOCK)
    for start in range(0, width, step):
        stop = min(start + step, width)
        first = 0 if part.first is None or part.window is None else max(0, part.first + start - part.window + 1)
        yield slice(start, stop), slice(first, seen if part.first is None else min(seen, part.first + stop))


def _flash_on_cpu(part: Part) -> tuple[Tensor, Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    causal, mask = _sight(part)
    out, lse = kernel(part.query, part.key, part.value, 0.0, causal, attn_mask=mask, scale=part.scale)
    return out, lse


def _flash_on_cpu_backward(part: Part, joined: Joined) -> tuple[Tensor, Tensor, Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    causal, mask = _sight(part)
    inputs, lse = (part.query, part.key, part.value), joined.lse.contiguous()
    dq, dk, dv = kernel(joined.grad, *inputs, joined.out, lse, 0.0, causal, attn_mask=mask, scale=part.scale)
    return dq, dk, dv


def _flash(part: Part) -> tuple[Tensor, Tensor]:
    inputs = (_aligned(whole) for whole in (part.query, part.key, part.value))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = kernel(*inputs, 0.0, part.first is not None, False, scale=part.scale)
    return out[..., : part.value.shape[-1]], lse


def _flash_backward(part: Part, joined: Joined) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (_aligned(whole) for whole in (part.query, part.key, part.value))
    no_dropout = joined.lse.new_empty(2, dtype=torch.int64)
    found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        _aligned(joined.grad),
        query,
        key,
        value,
        _aligned(joined.out),
        joined.lse.contiguous(),
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        part.first is not None,
        no_dropout,
        no_dropout,
        scale=part.scale,
    )
    return _narrowed(part, found)


def _efficient(part: Part) -> tuple[Tensor, Tensor]:
    inputs = (_aligned(whole) for whole in (part.query, part.key, part.value))
    causal, mask = _sight(part)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse, *_ = kernel(*inputs, mask, True, 0.0, causal, scale=part.scale)
    return out[..., : part.value.shape[-1]], lse[..., : part.query.shape[2]]


def _efficient_backward(part: Part, joined: Joined) -> tuple[Tensor, Tensor, Tensor]:
    causal, mask = _sight(part)
    # As the forward pass lays it out: of queries that do not exist, infinity makes all weights zero.
    lse = pad(joined.lse, (0, -joined.lse.shape[2] % _LSE_ALIGNED), value=torch.inf).contiguous()
    no_dropout = joined.lse.new_empty((), dtype=torch.int64)
    found = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        _aligned(joined.grad),
        *(_aligned(whole) for whole in (part.query, part.key, part.value)),
        mask,
        _aligned(joined.out),
        lse,
        no_dropout,
        no_dropout,
        0.0,
        [True, True, True, False],
        causal,
        scale=part.scale,
    )
    return _narrowed(part, found)


def _by_matmul(part: Part) -> tuple[Tensor, Tensor]:
    """One block by products of matrices, which every device has."""
    scores, _ = _scores(part)
    lse = scores.logsumexp(-1)
    return scores.sub_(lse[..., None]).exp_().to(part.value.dtype) @ part.value, lse


def _by_matmul_backward(part: Part, joined: Joined) -> tuple[Tensor, Tensor, Tensor]:
    """``P = e^(S - L)``, ``dV = P^T dO``, ``dS = P (dO V^T - rowsum(dO O))``, ``dQ = dS K``, ``dK = dS^T Q``."""
    query, key, value = part.query, part.key, part.value
    scores, slopes = _scores(part)
    weights = scores.sub_(joined.lse[..., None]).exp_()
    dv = weights.to(joined.grad.dtype).transpose(-1, -2) @ joined.grad
    means = (joined.grad * joined.out).sum(-1, dtype=weights.dtype)
    d_scores = weights.mul_(joined.grad @ value.transpose(-1, -2) - means[..., None]).mul_(slopes).to(query.dtype)
    return d_scores @ key, d_scores.transpose(-1, -2) @ query, dv


def _scores(part: Part) -> tuple[Tensor, Tensor | float]:
    """Returns scores (S, H, W, U), no narrower than float32, and their derivative by the product of query and key."""
    slopes: Tensor | float = part.scale
    wide = torch.promote_types(part.query.dtype, torch.float32)
    scores = (part.query @ part.key.transpose(-1, -2)).to(wide).mul_(part.scale)
    if part.soft_cap is not None:
        bent = scores.div_(part.soft_cap).tanh_()
        scores, slopes = part.soft_cap * bent, part.scale * (1 - bent.square())
    hidden = part.hidden()
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf), slopes


def _sight(part: Part) -> tuple[bool, Tensor | None]:
    """Returns whether the kernel's own causality, from the first key on, holds; else a mask (S, H, W, U)."""
    if part.is_plain:
        return part.first is not None, None
    hidden = part.hidden()
    if hidden is None:
        return False, None
    segments, heads, width, _ = part.query.shape
    seen = part.key.shape[2]
    # Half of the lowest number: a score added to it stays finite.
    mask = part.query.new_zeros(width, seen + -seen % _MASK_ALIGNED)[:, :seen]
    mask.masked_fill_(hidden, torch.finfo(mask.dtype).min / 2)
    return False, mask.expand(segments, heads, width, seen)


def _aligned(whole: Tensor) -> Tensor:
    """Returns (S, H, W, D) as CUDA's kernels take it: heads of whole multiples of 16 bytes, their elements together."""
    if whole.shape[-1] % _ALIGNED:
        return pad(whole, (0, -whole.shape[-1] % _ALIGNED))
    *strides, last = whole.stride()
    alike = last == 1 and not any(place % _ALIGNED for place in (*strides, whole.storage_offset()))
    return whole if alike else whole.contiguous()


def _narrowed(part: Part, found: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Takes the padding of heads off what a kernel gives for queries, keys and values."""
    dq, dk, dv, *_ = found
    head, value = part.query.shape[-1], part.value.shape[-1]
    return dq[..., :head], dk[..., :head], dv[..., :value]


_CALLS = {
    Kernel.CPU_FLASH: (_flash_on_cpu, _flash_on_cpu_backward),
    Kernel.FLASH: (_flash, _flash_backward),
    Kernel.EFFICIENT: (_efficient, _efficient_backward),
    Kernel.BLOCKS: (_by_matmul, _by_matmul_backward),
}
