"""Attention whose output for a token does not depend, to the bit, on how keys are kept or which tokens are read beside.

The key of position ``p`` always lies in slot ``p``; scores and mixed values are made a tile of `TILE_KEYS` slots and
`TILE_QUERIES` queries at a time, every product of one shape, and tiles are added from the first to the last. A slot
that a query does not see weighs exactly 0, so that neither padding nor further slots change a bit. The greatest score,
which is subtracted, is the same in any order. Scores, weights and sums are float32 (float64 under float64).

Axes: ``B`` rows, ``H`` key/value heads, ``R`` query heads of each, ``N`` queries, ``Q`` queries of a tile,
``K`` slots, ``T`` tiles of slots, ``D`` width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import AttentionInterface

NAME = "memsafe_rl_fixed_split"
"""Name under which transformers knows this attention."""

TILE_KEYS = 32
"""Slots whose scores are made in one product."""

TILE_QUERIES = 16
"""Queries of one product, of each query head."""


@dataclass(frozen=True)
class Sight:
    """What queries see, and what a layer does to their scores."""

    scale: float  # factor on the scores
    soft_cap: float | None = None  # bound of the scores, None for none
    # (B or 1, 1 or H x R, N or 1, K) bool, True where a query sees a slot; None: all, or all up to itself
    visible: Tensor | None = None
    first: int | None = None  # slot of the first query, where queries see what is not behind themselves; else None

    def of(self, queries: slice, slots: int, held: int, device: torch.device) -> Tensor | None:
        """Returns which held slots some queries see, (B or 1, heads or 1, queries or 1, slots) bool; None: all."""
        seen = None
        if self.visible is not None:
            some = self.visible if self.visible.shape[2] == 1 else self.visible[:, :, queries]
            seen = functional.pad(some[..., :slots], (0, max(0, slots - some.shape[3])))
        if self.first is not None:
            places = torch.arange(self.first + queries.start, self.first + queries.stop, device=device)
            own = (torch.arange(slots, device=device)[None] <= places[:, None])[None, None]
            seen = own if seen is None else seen & own
        if seen is None and slots > held:
            seen = (torch.arange(slots, device=device) < held)[None, None, None]
        return seen


def attend(
    query: Tensor, key: Tensor, value: Tensor, sight: Sight, *, bias: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Returns ``softmax(cap(scale q k^T) + bias) v``, (B, H x R, N, D) of the type of the values.

    Queries are (B, H x R, N, D), keys and values (B, H, K, D), a bias (B or 1, H x R, N, K); sinks (H x R,) are scores
    that take weight and give nothing.
    """
    given = (query, key, value, bias, sinks)
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in given):
        mixed: Tensor = _Attention.apply(*given, sight)  # type: ignore[no-untyped-call]
        return mixed
    return forward(*given, sight)[0]


class _Attention(torch.autograd.Function):
    """Keeps its inputs, its output and each query's log-sum-exp; backward makes the weights again, tile by tile."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, sinks: Tensor | None, sight: Sight
    ) -> Tensor:
        out, lse = forward(query, key, value, bias, sinks, sight)
        ctx.save_for_backward(query, key, value, bias, sinks, out, lse)
        ctx.sight = sight
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, sinks, out, lse = ctx.saved_tensors
        wide = gradients(grad, query, key, value, bias, sinks, ctx.sight, out, lse)
        like = (query, key, value, bias, sinks)
        narrow = (
            None if part is None or own is None else part.to(own.dtype) for part, own in zip(wide, like, strict=True)
        )
        return *narrow, None


def gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    sight: Sight,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of queries, keys, values, bias and sinks, in float32 at least, from those of the output.

    ``P = e^(S - L)``, ``dV = P^T dO``, ``dS = P (dO V^T - rowsum(dO O))``, ``dQ = dS K``, ``dK = dS^T Q``.
    """
    with torch.autocast(query.device.type, enabled=False):  # which would narrow products
        heads, wide, held = key.shape[1], lse.dtype, key.shape[2]
        keys, values = (_padded(part, 2, TILE_KEYS).to(wide) for part in (key, value))
        dq = torch.empty_like(query, dtype=wide)
        dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=wide)
        for part, slots in _query_tiles(query, keys, sight):
            count = part.stop - part.start
            asked, slope, mixed = (
                _by_head(_padded(whole[:, :, part].to(wide), 2, TILE_QUERIES), heads) for whole in (query, grad, out)
            )
            scores, bend = _scored(_products(asked, keys[:, :, :slots])[:, :, :, :count], part, held, bias, sight)
            weights = (scores - _by_head(lse[:, :, part, None], heads)).exp_()
            by_weight = _products(slope, values[:, :, :slots]) - (slope * mixed).sum(-1, keepdim=True)
            d_scores = weights * by_weight[:, :, :, :count]
            dv[:, :, :slots] += _by_slot(_padded(weights, 3, TILE_QUERIES), slope)
            if d_bias is not None:
                share = d_scores.flatten(1, 2)[..., : min(slots, held)]
                d_bias[:, :, part, : min(slots, held)] += share.sum_to_size(len(d_bias), *share.shape[1:])
            d_scores = _padded(d_scores * bend, 3, TILE_QUERIES)
            dq[:, :, part] = _added(d_scores, keys[:, :, :slots], count)[0].flatten(1, 2)
            dk[:, :, :slots] += _by_slot(d_scores, asked)
        d_sinks = None
        if sinks is not None:
            means = (grad * out).sum(-1, dtype=wide)
            d_sinks = -((sinks.to(wide)[None, :, None] - lse).exp() * means).sum((0, 2))
        return dq, dk[:, :, :held], dv[:, :, :held], d_bias, d_sinks


def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, sinks: Tensor | None, sight: Sight
) -> tuple[Tensor, Tensor]:
    """Returns the output of `attend`, and the log-sum-exp of every query's scores (B, H x R, N)."""
    with torch.autocast(query.device.type, enabled=False):  # which would narrow products
        heads, wide = key.shape[1], torch.promote_types(query.dtype, torch.float32)
        rows, all_heads, tokens, _ = query.shape
        keys, values = (_padded(part, 2, TILE_KEYS).to(wide) for part in (key, value))
        out = value.new_empty(rows, all_heads, tokens, value.shape[3])
        lse = torch.empty(rows, all_heads, tokens, dtype=wide, device=query.device)
        for part, slots in _query_tiles(query, keys, sight):
            count = part.stop - part.start
            asked = _by_head(_padded(query[:, :, part].to(wide), 2, TILE_QUERIES), heads)
            scores, _ = _scored(_products(asked, keys[:, :, :slots])[:, :, :, :count], part, key.shape[2], bias, sight)
            sink = None if sinks is None else sinks.to(wide).view(heads, -1)[None, :, :, None, None]
            peak = scores.amax(4, keepdim=True)
            peak = peak if sink is None else torch.maximum(peak, sink)
            peak = peak.masked_fill(peak == -torch.inf, 0)
            weights = _padded((scores - peak).exp_(), 3, TILE_QUERIES)
            mixed, total = _added(weights, values[:, :, :slots], count)
            if sink is not None:
                total = total + (sink - peak).exp()
            # A query that sees nothing, such as padding, gives 0.
            out[:, :, part] = (mixed / total.masked_fill(total == 0, 1)).flatten(1, 2).to(out.dtype)
            lse[:, :, part] = (total.log() + peak).flatten(1, 2)[..., 0]
        return out, lse


def _query_tiles(query: Tensor, keys: Tensor, sight: Sight) -> Iterator[tuple[slice, int]]:
    """Cuts the queries into tiles; returns each with the slots, in tiles as the keys are, that it may see."""
    tokens, held = query.shape[2], keys.shape[2]
    for start in range(0, tokens, TILE_QUERIES):
        stop = min(tokens, start + TILE_QUERIES)
        seen = held if sight.first is None else min(held, -(-(sight.first + stop) // TILE_KEYS) * TILE_KEYS)
        yield slice(start, stop), seen


def _scored(
    products: Tensor, part: slice, held: int, bias: Tensor | None, sight: Sight
) -> tuple[Tensor, Tensor | float]:
    """Returns scores (B, H, R, Q, K), -inf where nothing is seen, and their slopes by the product of query and key."""
    heads, slots = products.shape[1], products.shape[4]
    scores: Tensor = products * sight.scale
    bend: Tensor | float = sight.scale
    if sight.soft_cap is not None:
        bent = torch.tanh(scores / sight.soft_cap)
        scores, bend = sight.soft_cap * bent, sight.scale * (1 - bent.square())
    if bias is not None:
        some = bias[:, :, part, :slots].to(scores.dtype)
        scores = scores + _by_head(functional.pad(some, (0, slots - some.shape[3])), heads)
    seen = sight.of(part, slots, held, scores.device)
    if seen is not None:
        scores = scores.masked_fill(~_by_head(seen, heads if seen.shape[1] > 1 else 1), -torch.inf)
    return scores, bend


def _products(left_BHRQD: Tensor, keys_BHKD: Tensor) -> Tensor:
    """Multiplies one tile of queries with every tile of slots; all products have one shape and layout."""
    rows, heads, slots, width = keys_BHKD.shape
    tiles = keys_BHKD.reshape(-1, TILE_KEYS, width).contiguous()
    left = left_BHRQD.flatten(2, 3)[:, :, None].expand(-1, -1, slots // TILE_KEYS, -1, -1)
    products = torch.bmm(left.reshape(len(tiles), -1, width).contiguous(), tiles.mT)
    whole = products.view(rows, heads, slots // TILE_KEYS, -1, TILE_KEYS).transpose(2, 3).flatten(3)
    return whole.view(*left_BHRQD.shape[:4], slots)


def _added(weights_BHRQK: Tensor, values_BHKD: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Mixes values for the first queries, adding tiles of slots in order; returns the sums of weights too."""
    *shape, group, queries, slots = weights_BHRQK.shape
    tiles, width = slots // TILE_KEYS, group * queries
    by_tile = weights_BHRQK.reshape(*shape, width, tiles, TILE_KEYS).transpose(2, 3).contiguous()
    values = values_BHKD.reshape(-1, TILE_KEYS, values_BHKD.shape[3]).contiguous()
    sums = torch.bmm(by_tile.view(-1, width, TILE_KEYS), values), by_tile.sum(4, keepdim=True)
    mixed, totals = (part.view(*shape, tiles, group, queries, -1)[:, :, :, :, :count] for part in sums)
    for tile in range(1, tiles):
        mixed[:, :, 0] += mixed[:, :, tile]
        totals[:, :, 0] += totals[:, :, tile]
    return mixed[:, :, 0], totals[:, :, 0]


def _padded(values: Tensor, axis: int, size: int) -> Tensor:
    """Fills an axis up with zeros to a multiple of a size."""
    missing = -values.shape[axis] % size
    return functional.pad(values, (*[0, 0] * (values.ndim - axis - 1), 0, missing)) if missing else values


def _by_head(values: Tensor, heads: int) -> Tensor:
    """Lays (B, H x R, N, X) out as (B, H, R, N, X)."""
    return torch.unflatten(values, 1, (heads, -1))


def _by_slot(weights_BHRQK: Tensor, right_BHRQD: Tensor) -> Tensor:
    """Adds up over one tile of queries for every slot, (B, H, K, D); all products have one shape and layout."""
    *shape, group, queries, slots = weights_BHRQK.shape
    tiles, width = slots // TILE_KEYS, group * queries
    left = weights_BHRQK.reshape(*shape, width, tiles, TILE_KEYS).permute(0, 1, 3, 4, 2).reshape(-1, TILE_KEYS, width)
    right = right_BHRQD.flatten(2, 3)[:, :, None].expand(-1, -1, tiles, -1, -1).reshape(len(left), width, -1)
    return torch.bmm(left.contiguous(), right.contiguous()).view(*shape, slots, -1)


def fixed_split_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attends over rows whose slots are their positions, in the form in which transformers calls any attention."""
    if options.get("dropout"):
        raise NotImplementedError("attention takes dropout, which has no form in fixed splits")
    scaling, is_causal, bias = (options.get(name) for name in ("scaling", "is_causal", "position_bias"))
    visible = attention_mask
    if visible is not None and visible.dtype is not torch.bool:
        bias = visible if bias is None else bias + visible
        visible = None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    alone = attention_mask is None and causal and query.shape[2] > 1
    first = key.shape[2] - query.shape[2] if alone else None
    sight = Sight(query.shape[-1] ** -0.5 if scaling is None else scaling, options.get("softcap"), visible, first)
    if bias is not None:
        bias = bias.expand(-1, query.shape[1], query.shape[2], -1)
    return attend(query, key, value, sight, bias=bias, sinks=options.get("s_aux")).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, fixed_split_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
