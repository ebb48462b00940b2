"""Rows that share a prompt, laid out behind one copy of it: tokens, positions, and who sees whom, and attention so.

The tokens of a micro-batch lie end to end without padding: first every prompt, then the completions of each prompt. A
*segment* is a stretch of tokens that is causal in itself: a prompt, a completion, or both where a prompt has but one.
A completion's segment sees its whole prompt too: the two parts of its softmax are joined by their log-sum-exp (Dao et
al. 2022, "FlashAttention", section 3.1), so that no key of a prompt is ever copied for a completion.

Axes: ``N`` tokens of a packed row, ``M`` completion tokens end to end, ``S`` segments of a run, ``W`` their width,
``U`` keys, ``H`` query heads, ``K`` key/value heads, ``D`` width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import noop_context_fn
from transformers.modeling_utils import AttentionInterface

from memsafe_rl.models.decoding import fixed_split_attention as fixed_split
from memsafe_rl.models.module_state import implementation
from memsafe_rl.ops.fixed_tiles import fixed_tiles_on
from memsafe_rl.types import Trajectory

_LIKE = 2
"""Segments of a run differ in length by at most this factor, so that padding stays below what is computed."""

ATTENTION = "memsafe_rl_packed"
"""Name under which transformers knows this attention."""

_SCORES = 2**26
"""Most scores that exist together where no kernel keeps them to itself."""


@dataclass(frozen=True)
class Run:
    """Segments of like length that attention takes together."""

    segments: int  # how many
    width: int  # tokens of the longest
    first: int | None  # first token of the first segment, where all are equally long and lie end to end; else None
    # (sum of lengths,) int64, their tokens in the packed row; None where ``first`` is known
    tokens: Tensor | None = None
    # (sum of lengths,) int64, where these lie in ``segments`` rows of ``width``; None likewise
    places: Tensor | None = None

    def take(self, packed: Tensor) -> Tensor:
        """Gives (N, heads, ...) as (S, heads, W, ...), zero where a segment has ended; a view where it can be."""
        count = self.segments * self.width
        if self.first is not None:
            rows = packed[self.first : self.first + count]
        else:
            if self.tokens is None or self.places is None:
                raise AssertionError("a run is one stretch of tokens or has their indices")
            rows = packed.new_zeros(count, *packed.shape[1:])
            rows.index_copy_(0, self.places, packed.index_select(0, self.tokens))
        return rows.view(self.segments, self.width, *packed.shape[1:]).transpose(1, 2)

    def put(self, packed: Tensor, segments: Tensor) -> None:
        """Writes (S, heads, W, ...) to where the segments lie in (N, heads, ...)."""
        rows = segments.transpose(1, 2).flatten(0, 1)
        if self.first is not None:
            packed[self.first : self.first + self.segments * self.width] = rows
        elif self.tokens is not None and self.places is not None:
            packed.index_copy_(0, self.tokens, rows.index_select(0, self.places))


@dataclass(frozen=True)
class Shared:
    """A prompt that several completions see."""

    prompt: int  # first token of the prompt
    prompt_tokens: int  # its tokens
    first: int  # first token of the first completion; the others follow end to end
    tails: tuple[int, ...]  # tokens of each completion that are read (its last one predicts nothing)

    @property
    def prompt_span(self) -> slice:
        """Tokens of the prompt."""
        return slice(self.prompt, self.prompt + self.prompt_tokens)

    @property
    def tail_span(self) -> slice:
        """Tokens of all its completions."""
        return slice(self.first, self.first + sum(self.tails))


@dataclass(frozen=True)
class Layout:
    """Who sees whom in a packed row."""

    runs: tuple[Run, ...]  # every segment, in runs of like length
    # prompts with several completions, at least one of which has tokens of its own to be read
    shared: tuple[Shared, ...]
    windows: tuple[int | None, ...]  # per layer, the attention window in tokens, None for full attention
    segments: tuple[tuple[int, int], ...] = ()  # every segment, first token and tokens
    # additive masks by what they depend on; made once, for all layers
    masks: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def own_mask(self, width: int, window: int | None, like: Tensor) -> Tensor | None:
        """Gives the mask (1, 1, W, W) of a causal segment under a window; None where plain causality will do."""
        if window is None or window >= width:
            return None

        def visible() -> Tensor:
            places = torch.arange(width, device=like.device)
            return _visible(places, places, window)

        return self._mask(("own", width, window), visible, like)

    def prompt_mask(self, shared: Shared, window: int | None, like: Tensor) -> Tensor | None:
        """Gives the mask (1, 1, completion tokens, prompt tokens) under a window; None where all is seen."""
        if window is None or window >= shared.prompt_tokens + max(shared.tails):
            return None

        def visible() -> Tensor:
            keys = torch.arange(shared.prompt_tokens, device=like.device)
            tails = [torch.arange(tail, device=like.device) for tail in shared.tails]
            return _visible(torch.cat(tails) + shared.prompt_tokens, keys, window)

        return self._mask((shared, window), visible, like)

    def _mask(self, key: tuple[Any, ...], visible: Callable[[], Tensor], like: Tensor) -> Tensor:
        if (*key, like.dtype) not in self.masks:
            # Half of the lowest number: a score added to it stays finite, and a row that sees nothing weighs 0.
            hidden = torch.finfo(like.dtype).min / 2
            mask = torch.zeros((), dtype=like.dtype, device=like.device).where(visible(), hidden)
            self.masks[*key, like.dtype] = mask[None, None]
        return self.masks[*key, like.dtype]


@dataclass(frozen=True)
class PackedRows:
    """Stored rows as one packed row."""

    ids: Tensor  # (1, N) int64
    positions: Tensor  # (1, N) int64; a completion's continue where its prompt ends
    places: Tensor  # (M,) int64, for each completion token of the rows, in order, the token that predicts it
    layout: Layout  # who sees whom


def pack_rows(
    trajectory: Trajectory, rows: Sequence[int], windows: Sequence[int | None], device: torch.device
) -> PackedRows:
    """Lays rows out behind one copy of each of their prompts; a row with a prompt of its own stays in one piece.

    A completion's last token is left out, since nothing follows that it could predict.
    """
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(trajectory.condition_of_row[row], []).append(row)
    prompts, actions = trajectory.conditions.rows(), trajectory.actions.rows()
    tails = {row: actions[row][:-1] for row in rows}
    builder = _Builder()
    ends, first_own = {}, {}
    for condition, members in groups.items():
        alone = [tails[members[0]]] if len(members) == 1 else []
        start = builder.add(torch.cat([prompts[condition], *alone]), position=0)
        ends[condition] = start + len(prompts[condition])
        first_own[members[0]] = ends[condition]
    shared = []
    for condition, members in groups.items():
        if len(members) == 1:
            continue
        length = len(prompts[condition])
        for row in members:
            first_own[row] = builder.add(tails[row], position=length)
        lengths = tuple(len(tails[row]) for row in members)
        shared.append(Shared(ends[condition] - length, length, first_own[members[0]], lengths))
    places = [
        _predicting(ends[trajectory.condition_of_row[row]] - 1, first_own[row], len(actions[row])) for row in rows
    ]
    layout = Layout(
        _runs(builder.segments, device),
        tuple(group for group in shared if any(group.tails)),
        tuple(windows),
        tuple(builder.segments),
    )
    ids, positions = torch.cat(builder.ids), torch.cat(builder.positions)
    return PackedRows(ids[None].to(device), positions[None].to(device), torch.cat(places).to(device), layout)


class _Builder:
    """Collects segments end to end."""

    def __init__(self) -> None:
        self.ids: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.segments: list[tuple[int, int]] = []
        self._tokens = 0

    def add(self, ids: Tensor, *, position: int) -> int:
        """Appends a segment whose first token has a position; gives the place of that token."""
        start = self._tokens
        self.ids.append(ids)
        self.positions.append(torch.arange(position, position + len(ids)))
        self.segments.append((start, len(ids)))
        self._tokens += len(ids)
        return start


def _predicting(last_of_prompt: int, first: int, length: int) -> Tensor:
    """Indices of the tokens that predict a completion: its prompt's last, then its own but the last."""
    own = torch.arange(first, first + max(0, length - 1))
    return torch.cat([torch.full((min(1, length),), last_of_prompt), own])


def _visible(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Gives which positions see which: themselves, and those at most ``window - 1`` before them."""
    distance = queries[:, None] - keys[None]
    return (distance >= 0) & (distance < window)


def _runs(segments: Iterable[tuple[int, int]], device: torch.device) -> tuple[Run, ...]:
    """Sorts segments (first token, tokens) into runs of like length, the longest first."""
    order = sorted((segment for segment in segments if segment[1]), key=lambda segment: (-segment[1], segment[0]))
    runs: list[list[tuple[int, int]]] = []
    for segment in order:
        if runs and runs[-1][0][1] <= _LIKE * segment[1]:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return tuple(map(partial(_run, device=device), runs))


def _run(members: Sequence[tuple[int, int]], device: torch.device) -> Run:
    first, width = members[0]
    if all(member == (first + index * width, width) for index, member in enumerate(members)):
        return Run(len(members), width, first)
    tokens = torch.cat([torch.arange(start, start + length) for start, length in members])
    places = torch.cat([torch.arange(length) + index * width for index, (_, length) in enumerate(members)])
    return Run(len(members), width, None, tokens.to(device), places.to(device))


# ------------------------------------------------------------------ attention among packed rows


@contextmanager
def attending(configs: Iterable[Any], layout: Layout) -> Iterator[None]:
    """Has networks attend over packed rows of one layout."""
    known = tuple(configs)
    token = _SCOPE.set((known, layout))
    try:
        with implementation(known, ATTENTION):
            yield
    finally:
        _SCOPE.reset(token)


def attention_again() -> Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]:
    """Gives what torch's checkpointing needs to attend in a recomputation as in the forward pass now running."""
    scope = _SCOPE.get()
    return noop_context_fn if scope is None else lambda: (nullcontext(), attending(*scope))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attends over packed rows, in the form in which transformers calls any attention.

    Equals attention row by row, each row with its own copy of the prompt.
    """
    scope = _SCOPE.get()
    if scope is None:
        raise AssertionError("set only inside attending")
    layout = scope[1]
    unknown = ["a mask of the model's own"] if attention_mask is not None else []
    unknown += ["biases by position"] if options.get("position_bias") is not None else []
    unknown += ["dropout"] if dropout else []
    unknown += ["tokens that come later"] if not getattr(module, "is_causal", True) else []
    if unknown:
        raise NotImplementedError(f"attention takes {', '.join(unknown)}")
    window = _window(module, layout, options.get("sliding_window"))
    scoring = _Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, options.get("softcap"))
    parts = [part[0].transpose(0, 1) for part in _of_one_type(query, key, value)]
    attention = _AttentionByRow if fixed_tiles_on() else _Attention
    packed: Tensor = attention.apply(*parts, options.get("s_aux"), layout, window, scoring)  # type: ignore[no-untyped-call]
    return packed[None], None


class _Scoring(NamedTuple):
    """How scores are made of queries and keys: a factor, and what they are soft-capped at, None for nothing."""

    scale: float
    softcap: float | None


class _Part(NamedTuple):
    """One part of a softmax: queries (S, H, W, D) over keys (S, K, U, D) and values (S, K, U, D).

    Without a mask, a causal part's queries see the keys up to their own place.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    mask: Tensor | None
    scoring: _Scoring


class _Joined(NamedTuple):
    """What a part's backward takes of the whole softmax: gradient and output (S, H, W, D), log-sum-exp (S, H, W)."""

    grad: Tensor
    out: Tensor
    lse: Tensor


class _Attention(torch.autograd.Function):
    """Segments, and prompts as their completions see them, joined; it saves little but what the network holds anyway.

    A part's backward takes the joined output and log-sum-exp in place of its own: the weights it makes of them are
    those of the joined softmax, so that each part gives its own keys' gradient and its share of the queries'.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        layout: Layout,
        window: int | None,
        scoring: _Scoring,
    ) -> Tensor:
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        lse = torch.empty(query.shape[:2], dtype=_wide(query), device=query.device)
        for run in layout.runs:
            out_part, lse_part = _attend(_own_part(layout, run, (query, key, value), window, scoring))
            run.put(out, out_part)
            run.put(lse, lse_part)
        for shared in layout.shared:
            out_part, lse_part = _attend(_prompt_part(layout, shared, (query, key, value), window, scoring))
            tails = shared.tail_span
            _join(out[tails], lse[tails], out_part[0].transpose(0, 1), lse_part[0].transpose(0, 1))
        if sinks is not None:
            _join(out, lse, torch.zeros_like(out), sinks.to(lse.dtype).expand_as(lse))
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.layout, ctx.window, ctx.scoring = layout, window, scoring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        layout, inputs = ctx.layout, (query, key, value)
        grads = [part.new_empty(part.shape) for part in inputs]
        for run in layout.runs:
            joined = _Joined(run.take(grad), run.take(out), run.take(lse))
            part = _own_part(layout, run, inputs, ctx.window, ctx.scoring)
            for whole, share in zip(grads, _attend_backward(part, joined), strict=True):
                run.put(whole, share)
        for shared in layout.shared:
            tails, prompt = shared.tail_span, shared.prompt_span
            joined = _Joined(*(whole[tails].transpose(0, 1)[None] for whole in (grad, out, lse)))
            part = _prompt_part(layout, shared, inputs, ctx.window, ctx.scoring)
            shares = _attend_backward(part, joined)
            for whole, span, share in zip(grads, (tails, prompt, prompt), shares, strict=True):
                whole[span] += share[0].transpose(0, 1)
        of_sinks = None
        if sinks is not None:
            weights = (sinks.to(lse.dtype) - lse).exp()
            of_sinks = -(weights * (grad * out).sum(-1, dtype=lse.dtype)).sum(0).to(sinks.dtype)
        return *grads, of_sinks, None, None, None


class _AttentionByRow(torch.autograd.Function):
    """Each segment alone, a completion behind its prompt, so that no bit depends on what else is packed."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        layout: Layout,
        window: int | None,
        scoring: _Scoring,
    ) -> Tensor:
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        lse = torch.empty(query.shape[:2], dtype=_wide(query), device=query.device)
        for own, prompt in _segments_alone(layout):
            sight = _sight(own, prompt, window, scoring, query.device)
            asked, keys, values = _one_row(own, prompt, query, key, value)
            mixed, sums = fixed_split.forward(asked, keys, values, None, sinks, sight)
            out[own], lse[own] = mixed[0].transpose(0, 1), sums[0].T
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.layout, ctx.window, ctx.scoring = layout, window, scoring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(whole, dtype=lse.dtype) for whole in (query, key, value))
        d_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=lse.dtype)
        for own, prompt in _segments_alone(ctx.layout):
            sight = _sight(own, prompt, ctx.window, ctx.scoring, query.device)
            asked, keys, values = _one_row(own, prompt, query, key, value)
            slope, mixed = (whole[own].transpose(0, 1)[None] for whole in (grad, out))
            of_query, of_key, of_value, _, of_sinks = fixed_split.gradients(
                slope, asked, keys, values, None, sinks, sight, mixed, lse[own].T[None]
            )
            dq[own] = of_query[0].transpose(0, 1)
            for whole, share in ((dk, of_key), (dv, of_value)):
                before, behind = share[0].transpose(0, 1).tensor_split([prompt.stop - prompt.start])
                whole[prompt] += before
                whole[own] += behind
            if d_sinks is not None and of_sinks is not None:
                d_sinks += of_sinks
        of_all = None if d_sinks is None else d_sinks.to(sinks.dtype)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), of_all, None, None, None


def _segments_alone(layout: Layout) -> Iterator[tuple[slice, slice]]:
    """Gives the tokens of each segment, and those of the prompt that it follows, which may be none."""
    behind: dict[int, slice] = {}
    for shared in layout.shared:
        start = shared.first
        for tail in shared.tails:
            behind[start] = shared.prompt_span
            start += tail
    for start, length in layout.segments:
        if length:
            yield slice(start, start + length), behind.get(start, slice(0, 0))


def _one_row(own: slice, prompt: slice, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gives queries (1, H, W, D), keys (1, K, U, D) and values of a segment behind its prompt."""
    keys, values = (torch.cat([whole[prompt], whole[own]]).transpose(0, 1)[None] for whole in (key, value))
    return query[own].transpose(0, 1)[None], keys, values


def _sight(own: slice, prompt: slice, window: int | None, scoring: _Scoring, device: torch.device) -> fixed_split.Sight:
    first, tokens, visible = prompt.stop - prompt.start, own.stop - own.start, None
    if window is not None and window < first + tokens:
        slots = torch.arange(first + tokens, device=device)
        visible = _visible(slots[first:], slots, window)[None, None]
    return fixed_split.Sight(scoring.scale, scoring.softcap, visible, first)


def _own_part(layout: Layout, run: Run, inputs: tuple[Tensor, ...], window: int | None, scoring: _Scoring) -> _Part:
    """Gives the part of segments that see themselves."""
    query, key, value = map(run.take, inputs)
    mask = layout.own_mask(run.width, window, query)
    return _Part(query, key, value, mask is None, mask, scoring)


def _prompt_part(
    layout: Layout, shared: Shared, inputs: tuple[Tensor, ...], window: int | None, scoring: _Scoring
) -> _Part:
    """Gives the part of a prompt that all its completions see: their tokens as one segment of queries."""
    spans = (shared.tail_span, shared.prompt_span, shared.prompt_span)
    query, key, value = (whole[span].transpose(0, 1)[None] for whole, span in zip(inputs, spans, strict=True))
    return _Part(query, key, value, False, layout.prompt_mask(shared, window, query), scoring)


def _join(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Joins in place two parts of a softmax, (N, H, D) and (N, H), over two sets of keys.

    ``L = log(e^a + e^b)``, ``o = e^(a - L) o_a + e^(b - L) o_b``.
    """
    joined = torch.logaddexp(lse, more_lse)
    out.copy_(out * (lse - joined).exp()[..., None] + more_out * (more_lse - joined).exp()[..., None])
    lse.copy_(joined)


def _attend(part: _Part) -> tuple[Tensor, Tensor]:
    """Gives output (S, H, W, D) and log-sum-exp (S, H, W) of one part."""
    wide = _with_equal_heads(part)
    out, lse = (_flash if _has_kernel(part) else _by_matmul)(wide)
    return out.reshape(*part.query.shape[:3], -1), lse.reshape(part.query.shape[:3])


def _attend_backward(part: _Part, joined: _Joined) -> tuple[Tensor, Tensor, Tensor]:
    """Gives the gradients of a part's queries, keys and values."""
    wide = _with_equal_heads(part)
    seen = _Joined(*(whole.reshape(*wide.query.shape[:3], *whole.shape[3:]) for whole in joined))
    dq, dk, dv = (_flash_backward if _has_kernel(part) else _by_matmul_backward)(wide, seen)
    if part.query.shape[1] != part.key.shape[1]:
        dk, dv = (share.reshape(*part.key.shape[:2], -1, *share.shape[2:]).sum(2) for share in (dk, dv))
    return dq.reshape(part.query.shape), dk, dv


def _has_kernel(part: _Part) -> bool:
    """Whether there is a kernel for a part that keeps scores to itself and gives their log-sum-exp."""
    alike = part.query.shape[-1] == part.value.shape[-1]
    return part.query.device.type == "cpu" and alike and part.scoring.softcap is None


def _with_equal_heads(part: _Part) -> _Part:
    """Gives every query head keys of its own: of a single segment without a copy, by taking key heads as segments."""
    kv_heads = part.key.shape[1]
    repeats = part.query.shape[1] // kv_heads
    if repeats == 1:
        return part
    if part.query.shape[0] > 1:
        key, value = part.key.repeat_interleave(repeats, 1), part.value.repeat_interleave(repeats, 1)
        return part._replace(key=key, value=value)
    key, value = part.key[0][:, None].expand(-1, repeats, -1, -1), part.value[0][:, None].expand(-1, repeats, -1, -1)
    query = part.query.reshape(kv_heads, repeats, *part.query.shape[2:])
    return part._replace(query=query, key=key, value=value)


def _flash(part: _Part) -> tuple[Tensor, Tensor]:
    """One part by the CPU's flash kernel."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    inputs, scale = (part.query, part.key, part.value), part.scoring.scale
    out, lse = kernel(*inputs, 0.0, part.causal, attn_mask=part.mask, scale=scale)
    return out, lse


def _flash_backward(part: _Part, joined: _Joined) -> tuple[Tensor, Tensor, Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = kernel(
        joined.grad,
        part.query,
        part.key,
        part.value,
        joined.out,
        joined.lse.contiguous(),
        0.0,
        part.causal,
        attn_mask=part.mask,
        scale=part.scoring.scale,
    )
    return dq, dk, dv


def _by_matmul(part: _Part) -> tuple[Tensor, Tensor]:
    """One part by products of matrices, which every device has; a slice of its scores exists at a time."""
    outs, sums = [], []
    for rows in _query_slices(part):
        scores, _ = _scores(part, rows)
        sums.append(scores.logsumexp(-1))
        outs.append((scores - sums[-1][..., None]).exp().to(part.value.dtype) @ part.value)
    return torch.cat(outs, 2), torch.cat(sums, 2)


def _by_matmul_backward(part: _Part, joined: _Joined) -> tuple[Tensor, Tensor, Tensor]:
    """``P = e^(S - L)``, ``dV = P^T dO``, ``dS = P (dO V^T - rowsum(dO O))``, ``dQ = dS K``, ``dK = dS^T Q``."""
    query, key, value = part.query, part.key, part.value
    dqs = []
    dk, dv = (torch.zeros(whole.shape, dtype=joined.lse.dtype, device=whole.device) for whole in (key, value))
    for rows in _query_slices(part):
        grad = joined.grad[:, :, rows]
        scores, slopes = _scores(part, rows)
        weights = (scores - joined.lse[:, :, rows, None]).exp()
        dv += weights.to(grad.dtype).transpose(-1, -2) @ grad
        means = (grad * joined.out[:, :, rows]).sum(-1, dtype=weights.dtype)
        d_scores = weights * (grad @ value.transpose(-1, -2) - means[..., None]) * slopes
        d_scores = d_scores.to(query.dtype)
        dqs.append(d_scores @ key)
        dk += d_scores.transpose(-1, -2) @ query[:, :, rows]
    return torch.cat(dqs, 2), dk.to(key.dtype), dv.to(value.dtype)


def _scores(part: _Part, rows: slice) -> tuple[Tensor, Tensor | float]:
    """Gives scores (S, H, rows, U), no narrower than float32, and their derivative by the product of query and key.

    A query that does not see a key has minus infinity, or what the mask says.
    """
    scale, cap = part.scoring
    slopes: Tensor | float = scale
    scores = (part.query[:, :, rows] @ part.key.transpose(-1, -2)).to(_wide(part.query)) * scale
    if cap is not None:
        bent = torch.tanh(scores / cap)
        scores, slopes = cap * bent, scale * (1 - bent.square())
    if part.mask is not None:
        return scores + part.mask[:, :, rows], slopes
    if not part.causal:
        return scores, slopes
    places = torch.arange(part.key.shape[2], device=scores.device)
    return scores.masked_fill(places[None] > places[rows, None], -torch.inf), slopes


def _query_slices(part: _Part) -> Iterator[slice]:
    """Cuts the queries so that a slice's scores have at most `_SCORES` elements."""
    segments, heads, width, _ = part.query.shape
    step = max(1, _SCORES // max(1, segments * heads * part.key.shape[2]))
    for start in range(0, width, step):
        yield slice(start, min(start + step, width))


def _of_one_type(*parts: Tensor) -> tuple[Tensor, ...]:
    """Gives parts of one type: that of autocast where it is on, as torch's own attention does."""
    device = parts[0].device.type
    autocast = torch.is_autocast_enabled(device) and parts[0].dtype is not torch.float64
    kind = torch.get_autocast_dtype(device) if autocast else parts[-1].dtype
    return tuple(part.to(kind) for part in parts)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def _window(module: nn.Module, layout: Layout, told: int | None) -> int | None:
    """Gives a layer's window by the config, which must agree with what the layer tells its attention."""
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise NotImplementedError("attention does not know its layer")
    window = layout.windows[int(index)]
    if told is not None and told != window:
        raise NotImplementedError(f"layer {index} has a window of {told} tokens where its config says {window}")
    return window


AttentionInterface.register(ATTENTION, packed_attention)

_SCOPE: ContextVar[tuple[tuple[Any, ...], Layout] | None] = ContextVar("packed attention", default=None)
