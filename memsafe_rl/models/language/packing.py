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
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import noop_context_fn
from transformers.modeling_utils import AttentionInterface

from memsafe_rl.models.decoding import fixed_split_attention as fixed_split
from memsafe_rl.models.language.kernels import Joined, Part, attend, attend_backward, target_of
from memsafe_rl.models.module_state import implementation
from memsafe_rl.ops.fixed_tiles import fixed_tiles_on
from memsafe_rl.slices import like_lengths
from memsafe_rl.types import Trajectory

ATTENTION = "memsafe_rl_packed"
"""Name under which transformers knows this attention."""


@dataclass(frozen=True)
class Run:
    """Segments of like length that attention takes together."""

    segments: int  # how many
    width: int  # tokens of the longest
    first: int  # first token of the first segment
    # (sum of lengths,) int64 each: their tokens in the packed row, and where these lie in ``segments`` rows of
    # ``width``; None where all are equally long and lie end to end
    scattered: tuple[Tensor, Tensor] | None = None

    def take(self, packed: Tensor) -> Tensor:
        """Gives (N, heads, ...) as (S, heads, W, ...), zero where a segment has ended; a view where it can be."""
        count = self.segments * self.width
        if self.scattered is None:
            rows = packed[self.first : self.first + count]
        else:
            tokens, places = self.scattered
            rows = packed.new_zeros(count, *packed.shape[1:])
            rows.index_copy_(0, places, packed.index_select(0, tokens))
        return rows.view(self.segments, self.width, *packed.shape[1:]).transpose(1, 2)

    def put(self, packed: Tensor, segments: Tensor) -> None:
        """Writes (S, heads, W, ...) to where the segments lie in (N, heads, ...)."""
        rows = segments.transpose(1, 2).flatten(0, 1)
        if self.scattered is None:
            packed[self.first : self.first + self.segments * self.width] = rows
        else:
            tokens, places = self.scattered
            packed.index_copy_(0, tokens, rows.index_select(0, places))


@dataclass(frozen=True)
class Shared:
    """A prompt that several completions see."""

    prompt: slice  # tokens of the prompt
    first: int  # first token of the first completion; the others follow end to end
    tails: tuple[int, ...]  # tokens of each completion that are read (its last one predicts nothing)


@dataclass(frozen=True)
class Layout:
    """Who sees whom in a packed row."""

    runs: tuple[Run, ...]  # every segment, in runs of like length
    # prompts with several completions, at least one of which has tokens of its own to be read
    shared: tuple[Shared, ...]
    windows: tuple[int | None, ...]  # per layer, the attention window in tokens, None for full attention
    segments: tuple[tuple[int, int], ...] = ()  # every segment, first token and tokens


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
    pieces: list[tuple[Tensor, Tensor]] = []  # ids and positions of each segment
    segments: list[tuple[int, int]] = []
    ends, first_own = {}, {}

    def add(ids: Tensor, position: int) -> int:
        """Appends a segment whose first token has a position; gives the place of that token."""
        start = sum(segments[-1]) if segments else 0
        pieces.append((ids, torch.arange(position, position + len(ids))))
        segments.append((start, len(ids)))
        return start

    for condition, members in groups.items():
        alone = [tails[members[0]]] if len(members) == 1 else []
        start = add(torch.cat([prompts[condition], *alone]), 0)
        ends[condition] = start + len(prompts[condition])
        first_own[members[0]] = ends[condition]
    shared = []
    for condition, members in groups.items():
        if len(members) == 1:
            continue
        length = len(prompts[condition])
        for row in members:
            first_own[row] = add(tails[row], length)
        lengths = tuple(len(tails[row]) for row in members)
        shared.append(Shared(slice(ends[condition] - length, ends[condition]), first_own[members[0]], lengths))
    predicting = [
        _predicting(ends[trajectory.condition_of_row[row]] - 1, first_own[row], len(actions[row])) for row in rows
    ]
    alike = like_lengths([tokens for _, tokens in segments])
    runs = tuple(_run([segments[place] for place in places], device) for places in alike)
    layout = Layout(runs, tuple(group for group in shared if any(group.tails)), tuple(windows), tuple(segments))
    ids, positions = map(torch.cat, zip(*pieces, strict=True))
    return PackedRows(ids[None].to(device), positions[None].to(device), torch.cat(predicting).to(device), layout)


def padded_layout(rows: int, width: int, windows: Sequence[int | None]) -> Layout:
    """Says who sees whom in rows padded on the right, each alone."""
    alone = tuple((row * width, width) for row in range(rows))
    return Layout((Run(rows, width, 0),), (), tuple(windows), alone)


def _predicting(last_of_prompt: int, first: int, length: int) -> Tensor:
    """Indices of the tokens that predict a completion: its prompt's last, then its own but the last."""
    own = torch.arange(first, first + max(0, length - 1))
    return torch.cat([torch.full((min(1, length),), last_of_prompt), own])


def _run(members: Sequence[tuple[int, int]], device: torch.device) -> Run:
    """Gives segments of like length (first token, tokens), in the order of their tokens."""
    first, width = members[0]
    if all(member == (first + index * width, width) for index, member in enumerate(members)):
        return Run(len(members), width, first)
    tokens = torch.cat([torch.arange(start, start + length) for start, length in members])
    places = torch.cat([torch.arange(length) + index * width for index, (_, length) in enumerate(members)])
    return Run(len(members), width, first, (tokens.to(device), places.to(device)))


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
    unknown = ["a mask of the model's own"] if attention_mask is not None else []
    unknown += ["biases by position"] if options.get("position_bias") is not None else []
    unknown += ["dropout"] if dropout else []
    unknown += ["tokens that come later"] if not getattr(module, "is_causal", True) else []
    if unknown:
        raise NotImplementedError(f"attention takes {', '.join(unknown)}")
    window = _window(module, scope[1], options.get("sliding_window"))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = _Call(scope[1], scale, options.get("softcap"), window)
    by_row = fixed_tiles_on()  # there each keeps its own type, as where rows are read alone or decoded
    typed = (query, key, value) if by_row else _of_one_type(query, key, value)
    parts = [part.transpose(1, 2).flatten(0, 1) for part in typed]
    attention = _AttentionByRow if by_row else _Attention
    packed: Tensor = attention.apply(*parts, options.get("s_aux"), call)  # type: ignore[no-untyped-call]
    return packed.view(query.shape[0], -1, *packed.shape[1:]), None


class _Call(NamedTuple):
    """What a layer asks of its attention besides queries, keys and values."""

    layout: Layout  # who sees whom
    scale: float  # factor on the product of query and key
    soft_cap: float | None  # what scores are soft-capped at, None for nothing
    window: int | None  # keys that a query sees, itself and those before it; None for all


class _Attention(torch.autograd.Function):
    """Segments, and prompts as their completions see them, joined; it saves little but what the network holds anyway.

    A part's backward takes the joined output and log-sum-exp in place of its own: the weights it makes of them are
    those of the joined softmax, so that each part gives its own keys' gradient and its share of the queries'.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: _Call) -> Tensor:
        target = target_of(query)
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        lse = torch.empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32), device=query.device)
        for run in call.layout.runs:
            out_part, lse_part = attend(_own_part(run, (query, key, value), call), target)
            run.put(out, out_part)
            run.put(lse, lse_part)
        for shared in call.layout.shared:
            for part, rows, _ in _prompt_parts(shared, (query, key, value), call):
                out_part, lse_part = attend(part, target)
                _join(out[rows], lse[rows], out_part[0].transpose(0, 1), lse_part[0].transpose(0, 1))
        if sinks is not None:
            _join(out, lse, torch.zeros_like(out), sinks.to(lse.dtype).expand_as(lse))
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.call, ctx.target = call, target
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        layout, inputs = ctx.call.layout, (query, key, value)
        grads = [part.new_empty(part.shape) for part in inputs]
        for run in layout.runs:
            joined = Joined(run.take(grad), run.take(out), run.take(lse))
            part = _own_part(run, inputs, ctx.call)
            for whole, share in zip(grads, attend_backward(part, joined, ctx.target), strict=True):
                run.put(whole, share)
        for shared in layout.shared:
            for part, rows, keys in _prompt_parts(shared, inputs, ctx.call):
                joined = Joined(*(whole[rows].transpose(0, 1)[None] for whole in (grad, out, lse)))
                shares = attend_backward(part, joined, ctx.target)
                for whole, span, share in zip(grads, (rows, keys, keys), shares, strict=True):
                    whole[span] += share[0].transpose(0, 1)
        of_sinks = None
        if sinks is not None:
            weights = (sinks.to(lse.dtype) - lse).exp()
            of_sinks = -(weights * (grad * out).sum(-1, dtype=lse.dtype)).sum(0).to(sinks.dtype)
        return *grads, of_sinks, None


class _AttentionByRow(torch.autograd.Function):
    """Each segment alone, a completion behind its prompt, so that no bit depends on what else is packed."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: _Call) -> Tensor:
        out = value.new_empty(*query.shape[:2], value.shape[-1])
        lse = torch.empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32), device=query.device)
        for own, prompt in _segments_alone(call.layout):
            sight = _sight(own, prompt, call, query.device)
            asked, keys, values = _one_row(own, prompt, query, key, value)
            mixed, sums = fixed_split.forward(asked, keys, values, None, sinks, sight)
            out[own], lse[own] = mixed[0].transpose(0, 1), sums[0].T
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(whole, dtype=lse.dtype) for whole in (query, key, value))
        d_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=lse.dtype)
        for own, prompt in _segments_alone(ctx.call.layout):
            sight = _sight(own, prompt, ctx.call, query.device)
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
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), of_all, None


def _segments_alone(layout: Layout) -> Iterator[tuple[slice, slice]]:
    """Gives the tokens of each segment, and those of the prompt that it follows, which may be none."""
    behind: dict[int, slice] = {}
    for shared in layout.shared:
        start = shared.first
        for tail in shared.tails:
            behind[start] = shared.prompt
            start += tail
    for start, length in layout.segments:
        if length:
            yield slice(start, start + length), behind.get(start, slice(0, 0))


def _one_row(own: slice, prompt: slice, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gives queries (1, H, W, D), keys (1, K, U, D) and values of a segment behind its prompt."""
    keys, values = (torch.cat([whole[prompt], whole[own]]).transpose(0, 1)[None] for whole in (key, value))
    return query[own].transpose(0, 1)[None], keys, values


def _sight(own: slice, prompt: slice, call: _Call, device: torch.device) -> fixed_split.Sight:
    first, tokens, visible = prompt.stop - prompt.start, own.stop - own.start, None
    if call.window is not None and call.window < first + tokens:
        slots = torch.arange(first + tokens, device=device)
        distance = slots[first:, None] - slots[None]
        visible = ((distance >= 0) & (distance < call.window))[None, None]
    return fixed_split.Sight(call.scale, call.soft_cap, visible, first)


def _own_part(run: Run, inputs: tuple[Tensor, ...], call: _Call) -> Part:
    """Gives the part of segments that see themselves."""
    query, key, value = map(run.take, inputs)
    return Part(query, key, value, call.scale, call.soft_cap, first=0, window=call.window)


def _prompt_parts(shared: Shared, inputs: tuple[Tensor, ...], call: _Call) -> Iterator[tuple[Part, slice, slice]]:
    """Gives the parts of a prompt that its completions see, each with the tokens of its queries and of its keys.

    All their tokens are one segment of queries, unless a window hides some of the prompt from them: then each
    completion has a part of its own, of the tokens and the keys that it does not hide altogether.
    """
    prompt, tokens, window = shared.prompt, shared.prompt.stop - shared.prompt.start, call.window
    spans: list[tuple[slice, slice, int | None]] = []
    if window is None or window >= tokens + max(shared.tails):
        spans.append((slice(shared.first, shared.first + sum(shared.tails)), prompt, None))
    else:
        start = shared.first
        for tail in shared.tails:
            rows, keys = min(tail, window - 1), min(tokens, window - 1)
            if rows > 0:
                spans.append((slice(start, start + rows), slice(prompt.stop - keys, prompt.stop), keys))
            start += tail
    for rows_span, keys_span, first in spans:
        query, key, value = (
            whole[span].transpose(0, 1)[None]
            for whole, span in zip(inputs, (rows_span, keys_span, keys_span), strict=True)
        )
        yield Part(query, key, value, call.scale, call.soft_cap, first, window), rows_span, keys_span


def _join(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Joins in place two parts of a softmax, (N, H, D) and (N, H), over two sets of keys.

    ``L = log(e^a + e^b)``, ``o = e^(a - L) o_a + e^(b - L) o_b``.
    """
    joined = torch.logaddexp(lse, more_lse)
    out.copy_(out * (lse - joined).exp()[..., None] + more_out * (more_lse - joined).exp()[..., None])
    lse.copy_(joined)


def _of_one_type(*parts: Tensor) -> tuple[Tensor, ...]:
    """Gives parts of one type: that of autocast where it is on, as torch's own attention does."""
    device = parts[0].device.type
    autocast = torch.is_autocast_enabled(device) and parts[0].dtype is not torch.float64
    kind = torch.get_autocast_dtype(device) if autocast else parts[-1].dtype
    return tuple(part.to(kind) for part in parts)


def _window(module: nn.Module, layout: Layout, told: int | None) -> int | None:
    """Gives a layer's window by the config, which must agree with what the layer tells its attention."""
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise NotImplementedError("attention does not know its layer")
    window = layout.windows[int(index)]
    if told is not None and told != window:
        raise NotImplementedError(f"layer {index} has a window of {told} tokens where its config says {window}")
    return window


# In a compiled block it runs as it is: lengths on the host decide which kernels it calls.
AttentionInterface.register(ATTENTION, torch.compiler.disable(packed_attention))  # type: ignore[no-untyped-call]

_SCOPE: ContextVar[tuple[tuple[Any, ...], Layout] | None] = ContextVar("packed attention", default=None)
