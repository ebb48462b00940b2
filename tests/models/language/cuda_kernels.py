"""What kernels that only CUDA has take and give, by plain products of matrices: their arguments, layouts and refusals.

They stand in for kernels that the CPU build does not have. Each refuses what the real one refuses or reads otherwise:
heads that are not whole multiples of 16 bytes, causality over a rectangle, a log-sum-exp without its padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memsafe_rl.accounting import host_memory

LSE_ALIGNED = 32


def _check(*wholes: Tensor) -> None:
    for whole in wholes:
        assert whole.dim() == 4
        assert whole.dtype == wholes[0].dtype
        aligned = 16 // max(whole.itemsize, 2)
        assert whole.shape[-1] % aligned == 0
        assert whole.stride(-1) == 1
        assert not any(place % aligned for place in (*whole.stride()[:3], whole.storage_offset()))


def _seen(query: Tensor, key: Tensor, causal: bool, scale: float, bias: Tensor | None = None) -> Tensor:
    scores = query.double() @ _per_head(key, query).mT * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        assert query.shape[2] == key.shape[2], "kernels disagree on where a rectangle is causal"
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    return scores


def _per_head(whole: Tensor, query: Tensor) -> Tensor:
    """Returns every query head keys or values of its own."""
    return whole.double().repeat_interleave(query.shape[1] // whole.shape[1], 1)


def _wide(whole: Tensor) -> torch.dtype:
    return torch.float64 if whole.dtype is torch.float64 else torch.float32


def _gradients(grad: Tensor, inputs: tuple[Tensor, ...], out: Tensor, lse: Tensor, scores: Tensor, scale: float) -> Any:
    query, *given = (whole.double() for whole in inputs)
    key, value = (_per_head(whole, query) for whole in given)
    weights = (scores - lse.double()[..., None]).exp()
    means = (grad.double() * out.double()).sum(-1, keepdim=True)
    d_bias = weights * (grad.double() @ value.mT - means)
    d_scores = d_bias * scale
    found = (d_scores.mT @ query, weights.mT @ grad.double())
    own = (one.unflatten(1, (like.shape[1], -1)).sum(2) for one, like in zip(found, given, strict=True))
    return d_scores @ key, *own, d_bias


def _laid(values: Tensor, like: Tensor) -> Tensor:
    """As CUDA lays results out: tokens before heads."""
    return values.to(like.dtype).transpose(1, 2).contiguous().transpose(1, 2)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _check(query, key, value)
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
    assert dropout_p == 0.0
    assert not return_debug_mask
    scores = _seen(query, key, is_causal, query.shape[-1] ** -0.5 if scale is None else scale)
    out = _laid(scores.softmax(-1) @ _per_head(value, query), query)
    seed = torch.empty(2, dtype=torch.uint64)
    unused = torch.empty((), dtype=torch.uint64)
    lse = scores.logsumexp(-1).to(_wide(query))
    return out, lse, None, None, query.shape[2], key.shape[2], seed, unused, query.new_empty(0)


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(grad_out, query, key, value, out)
    assert cum_seq_q is None
    assert cum_seq_k is None
    assert (max_q, max_k) == (query.shape[2], key.shape[2])
    assert logsumexp.shape == query.shape[:3]
    assert logsumexp.is_contiguous()
    assert dropout_p == 0.0
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = _seen(query, key, is_causal, scale)
    found = _gradients(grad_out, (query, key, value), out, logsumexp, scores, scale)
    dq, dk, dv = (torch.empty_like(whole).copy_(one) for whole, one in zip((query, key, value), found, strict=False))
    return dq, dk, dv


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    _check(query, key, value)
    _check_bias(query, key, attn_bias)
    assert dropout_p == 0.0
    assert not (is_causal and attn_bias is not None)
    scores = _seen(query, key, is_causal, query.shape[-1] ** -0.5 if scale is None else scale, attn_bias)
    width = query.shape[2] if compute_log_sumexp else 0
    lse = torch.full((*query.shape[:2], _padded(width)), torch.inf, dtype=_wide(query), device=query.device)
    found = scores.logsumexp(-1)[..., :width]
    lse[..., :width] = found.where(found > -torch.inf, torch.inf)  # rows that see nothing give nothing back either
    seed, offset = torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)
    return _laid(torch._safe_softmax(scores, -1) @ value.double(), query), lse, seed, offset


def efficient_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    _check(grad_out_, query, key, value, out)
    _check_bias(query, key, attn_bias)
    width = query.shape[2]
    assert logsumexp.shape == (*query.shape[:2], _padded(width))
    assert not any(place % 8 for place in logsumexp.stride()[:2])
    assert bool((logsumexp[..., width:] == torch.inf).all())
    assert len(grad_input_mask) == 4  # of the first three, all are computed, wanted or not
    assert dropout_p == 0.0
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = _seen(query, key, is_causal, scale, attn_bias)
    *found, d_bias = _gradients(grad_out_, (query, key, value), out, logsumexp[..., :width], scores, scale)
    dq, dk, dv = (_laid(one, query) for one in found)
    return dq, dk, dv, d_bias.to(query.dtype) if attn_bias is not None and grad_input_mask[3] else None


def _padded(width: int) -> int:
    return -(-width // LSE_ALIGNED) * LSE_ALIGNED


def _check_bias(query: Tensor, key: Tensor, bias: Tensor | None) -> None:
    if bias is not None:
        assert bias.shape == (*query.shape[:3], key.shape[2])
        assert bias.dtype == query.dtype
        assert bias.stride(-1) == 1
        assert not any(place % 8 for place in bias.stride()[:3])


def _none(*_: Any) -> tuple[tuple[int, ...], ...]:
    return ()


def _again(made: Tensor) -> Tensor:
    return torch.empty_strided(made.shape, made.stride(), dtype=made.dtype).copy_(made)


def _flash_workspace(_: Tensor, query: Tensor, *__: Any) -> tuple[tuple[int, ...], ...]:
    """``softmax_d`` and ``dq_accum`` of ``mha_bwd``, float32."""
    segments, heads, width, head = query.shape
    rows = -(-width // 128) * 128
    columns = -(-head // 32) * 32 if head <= 128 else -(-head // 64) * 64
    return (segments, heads, rows), (segments, rows, heads, columns)


def _efficient_workspace(_: Tensor, query: Tensor, *__: Any) -> tuple[tuple[int, ...], ...]:
    """``delta``, and sums in float32 of gradients in half precision."""
    segments, heads, width, head = query.shape
    sums = () if query.dtype.itemsize > 2 else ((segments, heads, -(-width // 128) * 128, head),)
    return ((segments, heads, width), *sums)


WORKSPACES = {"flash backward": _flash_workspace, "efficient backward": _efficient_workspace}


_STAND_INS = {
    "flash": flash,
    "flash backward": flash_backward,
    "efficient": efficient,
    "efficient backward": efficient_backward,
}


def _operator(name: str) -> str:
    kind, *backward = name.split()
    return "_".join(["_scaled_dot_product", kind, "attention", *backward])


def _wide_sum(total: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    """A product of half-precision matrices, added up in float32."""
    with host_memory():
        return out.copy_(torch.addmm(total, left.to(out_dtype), right.to(out_dtype)))


@contextmanager
def cuda_kernels() -> Iterator[list[str]]:
    """Gives the CPU these kernels; the list names those of attention that ran, in order."""
    ran: list[str] = []
    library = torch.library.Library("aten", "IMPL")

    def noted(name: str, stand_in: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            ran.append(name)
            with host_memory():  # the scores that a kernel keeps to itself
                found = stand_in(*args, **kwargs)
            workspace = [torch.empty(size) for size in WORKSPACES.get(name, _none)(*args)]
            made = tuple(_again(one) if isinstance(one, Tensor) else one for one in found)
            del workspace
            return made

        return run

    for name, stand_in in _STAND_INS.items():
        library.impl(_operator(name), noted(name, stand_in), "CPU")
    library.impl("addmm.dtype_out", _wide_sum, "CPU")
    try:
        yield ran
    finally:
        library._destroy()


def give_to_cuda() -> list[torch.library.Library]:
    """Returns a pretend CUDA device these kernels, for as long as what is returned is held.

    Their arithmetic runs as its other operators do, on the host; only results and workspaces are held on the device.
    """
    own, aten = torch.library.Library("pretend", "DEF"), torch.library.Library("aten", "IMPL")

    def on_device(name: str, kernel: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            workspace = [torch.empty(size, device=args[0].device) for size in WORKSPACES.get(name, _none)(*args)]
            found = kernel(*args, **kwargs)
            del workspace
            return found

        return run

    for name, stand_in in _STAND_INS.items():
        asked = _operator(name)
        own.define(str(getattr(torch.ops.aten, asked).default._schema).removeprefix("aten::"))
        own.impl(asked, stand_in, "CPU")
        aten.impl(asked, on_device(name, getattr(torch.ops.pretend, asked)), "CUDA")
    return [own, aten]
