"""Rows that share their first tokens, laid out behind one copy of these: who sees whom, and attention so.

The tokens of a micro-batch lie end to end without padding. A *segment* is a stretch of tokens that is causal in itself:
a prompt, a completion, both where a prompt has but one, or what turns of a conversation have in common. A segment also
sees, whole, all those it follows: the parts of its softmax are joined by their log-sum-exp (Dao et al. 2022,
"FlashAttention", section 3.1), so that no key of a prompt is ever copied for a completion. A *trunk* is a segment that
several micro-batches follow: it is run before them, its keys and values are held, and what they add to their gradients
waits there until its own backward.

Axes: ``N`` tokens of a packed row, ``M`` completion tokens end to end, ``S`` segments of a run, ``W`` their width,
``U`` keys, ``H`` query heads, ``K`` key/value heads, ``D`` width of a head.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import noop_context_fn
from transformers.modeling_utils import AttentionInterface

from memsafe_rl.accounting import holding
from memsafe_rl.micro_batches import like_lengths
from memsafe_rl.models.decoding import fixed_split_attention as fixed_split
from memsafe_rl.models.language.kernels import Joined, Part, attend, attend_backward, target_of
from memsafe_rl.models.module_state import implementation
from memsafe_rl.ops.fixed_tiles import FIXED_TILES
from memsafe_rl.prefix_tree import Node, branches_of, fork, grow
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
        """Returns (N, heads, ...) as (S, heads, W, ...), zero where a segment has ended; a view where it can be."""
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


class Tail(NamedTuple):
    """A segment that sees another one."""

    gap: int  # tokens of its rows between the two
    tokens: int  # of its own


@dataclass(eq=False)
class Trunk:
    """Tokens that the rows of several micro-batches begin with, as these read them."""

    end: int  # tokens of those rows up to its end
    tokens: int  # of its own
    # the network's output, cut off from its graph, no narrower than float32: its gradient gathers here
    hidden_ND: Tensor | None = None
    dtype: torch.dtype = torch.float32  # of that output as the network gave it
    reader: str | None = None  # the PEFT adapter that it was read with
    # per layer, keys and values (N, heads, D), and once a micro-batch has given any their gradients, no narrower than
    # float32: in halves, small shares would soon add nothing to a large sum
    held: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    learnt: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def states(self) -> Tensor:
        """Returns the network's output (N, D) in its own type."""
        assert self.hidden_ND is not None, "a trunk is read before what follows it"
        return self.hidden_ND.to(self.dtype)

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Holds what a layer's queries to come will see; a recomputation finds it held already."""
        self.held.setdefault(layer, (key.detach(), value.detach()))

    def add(self, layer: int, keys: slice, shares: tuple[Tensor, Tensor]) -> None:
        """Adds to the gradients of some keys and their values."""
        if layer not in self.learnt:
            key, value = self.held[layer]
            wide = torch.promote_types(key.dtype, torch.float32)
            self.learnt[layer] = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
        for whole, share in zip(self.learnt[layer], shares, strict=True):
            whole[keys] += share


@dataclass(frozen=True)
class Shared:
    """A segment, or a trunk, that others see whole."""

    prompt: slice  # its tokens, in the packed row or in the trunk
    first: int  # first token of the first that sees it; the others follow end to end
    tails: tuple[Tail, ...]  # those that see it
    trunk: Trunk | None = None  # where its keys are held; None for the packed row


class Segment(NamedTuple):
    """A stretch of tokens in the packed row."""

    first: int  # its first token
    tokens: int
    behind: tuple[slice, ...] = ()  # the segments of the packed row that it sees whole, from the first on

    @property
    def own(self) -> slice:
        """Its tokens."""
        return slice(self.first, self.first + self.tokens)


@dataclass(frozen=True)
class Layout:
    """Who sees whom in a packed row."""

    runs: tuple[Run, ...]  # every segment, in runs of like length
    shared: tuple[Shared, ...]  # segments that others see, where these have tokens
    windows: tuple[int | None, ...]  # per layer, the attention window in tokens, None for full attention
    segments: tuple[Segment, ...] = ()
    keeps: Trunk | None = None  # where its keys and values are held for others; None where nobody else sees it
    images: tuple[slice, ...] = ()  # stretches whose tokens see each other, those that come later too
    alike: tuple[Run, ...] = ()  # these in runs of equal length


@dataclass(frozen=True)
class PackedRows:
    """Stored rows as one packed row."""

    ids: Tensor  # (1, N) int64
    positions: Tensor  # (1, N) int64; a completion's continue where its prompt ends
    # (M,) int64, for each completion token of the rows, in order, the token that predicts it, of the packed row or,
    # counted before those, of trunks
    places: Tensor
    layout: Layout  # who sees whom


def pack_rows(
    trajectory: Trajectory,
    rows: Sequence[int],
    windows: Sequence[int | None],
    device: torch.device,
    trunks: Sequence[Trunk] = (),
    images: Mapping[int, Sequence[slice]] = MappingProxyType({}),
) -> PackedRows:
    """Lays rows, without their last tokens, out behind one copy of what they share, or behind trunks."""
    held = trunks[-1].end if trunks else 0
    lengths = {
        row: trajectory.condition_lengths([row])[0] + max(0, trajectory.actions.lengths[row] - 1) for row in rows
    }
    roots = grow(branches_of(trajectory, rows), lengths, held)
    # What is below roots comes behind all of them, depth first: so does what sees a segment lie end to end.
    nodes = [*roots, *(node for root in roots for child in root.children for node in child.walk())]
    starts = accumulate((node.end - node.start for node in nodes), initial=0)
    firsts = {id(node): start for node, start in zip(nodes, starts, strict=False)}
    behind: dict[int, tuple[slice, ...]] = {id(root): () for root in roots}
    shared, segments = _behind_trunks(nodes, trunks), list[Segment]()
    for node in nodes:
        segments.append(segment := Segment(firsts[id(node)], node.end - node.start, behind[id(node)]))
        behind |= {id(child): (*segment.behind, segment.own) for child in node.children}
        tails = tuple(Tail(other.start - node.end, other.end - other.start) for other in node.walk())[1:]
        if any(tail.tokens for tail in tails):
            shared.append(Shared(segment.own, firsts[id(node.children[0])], tails))
    leaves = {node.row: segment for node, segment in zip(nodes, segments, strict=True) if not node.children}
    predicting = [_predicting(trajectory, row, leaves[row], held) for row in rows]
    layout = Layout(_runs(segments, device), tuple(shared), tuple(windows), tuple(segments))
    spans = [span for node, segment in zip(nodes, segments, strict=True) for span in _within(node, segment, images)]
    return _packed(trajectory, nodes, torch.cat(predicting), _two_way(layout, spans, device), device)


def pack_trunk(
    trajectory: Trajectory,
    rows: Sequence[int],
    windows: Sequence[int | None],
    device: torch.device,
    trunks: Sequence[Trunk] = (),
    images: Mapping[int, Sequence[slice]] = MappingProxyType({}),
) -> PackedRows:
    """Lays out what all of some rows share and no trunk holds yet, as one segment that is kept for them."""
    held = trunks[-1].end if trunks else 0
    end, _ = fork(branches_of(trajectory, rows))
    node = Node(rows[0], held, end)
    segments = (Segment(0, end - held),)
    keeps = Trunk(end, end - held)
    layout = Layout(_runs(segments, device), tuple(_behind_trunks([node], trunks)), tuple(windows), segments, keeps)
    layout = _two_way(layout, _within(node, segments[0], images), device)
    return _packed(trajectory, [node], torch.empty(0, dtype=torch.int64), layout, device)


def _behind_trunks(nodes: Sequence[Node], trunks: Sequence[Trunk]) -> list[Shared]:
    """Has all segments see every trunk."""
    return [
        Shared(
            slice(0, trunk.tokens), 0, tuple(Tail(one.start - trunk.end, one.end - one.start) for one in nodes), trunk
        )
        for trunk in trunks
    ]


def _packed(
    trajectory: Trajectory, nodes: Sequence[Node], places: Tensor, layout: Layout, device: torch.device
) -> PackedRows:
    prompts, actions = trajectory.conditions.rows(), trajectory.actions.rows()
    pieces, positions = [], []
    for node in nodes:
        prompt = prompts[trajectory.condition_of_row[node.row]]
        own = slice(max(0, node.start - len(prompt)), max(0, node.end - len(prompt)))
        pieces += [prompt[node.start : node.end], actions[node.row][own]]
        positions.append(torch.arange(node.start, node.end))
    ids, places_N = torch.cat(pieces)[None].to(device), torch.cat(positions)[None].to(device)
    return PackedRows(ids, places_N, places.to(device), layout)


def _predicting(trajectory: Trajectory, row: int, own: Segment, held: int) -> Tensor:
    """Indices of the tokens that predict a completion: its prompt's last, then its own but the last."""
    prompt, actions = trajectory.condition_lengths([row])[0], trajectory.actions.lengths[row]
    behind = [torch.arange(held + part.start, held + part.stop) for part in own.behind]
    path = torch.cat([torch.arange(held), *behind, torch.arange(held + own.first, held + own.first + own.tokens)])
    return path[prompt - 1 : prompt - 1 + actions]


def padded_layout(
    rows: int, width: int, windows: Sequence[int | None], device: torch.device, images: Sequence[Sequence[slice]]
) -> Layout:
    """Says who sees whom in rows padded on the right, each alone; tokens of an image of theirs see each other."""
    alone = tuple(Segment(row * width, width) for row in range(rows))
    spans = [_moved(span, row * width) for row, found in enumerate(images) for span in found]
    return _two_way(Layout((Run(rows, width, 0),), (), tuple(windows), alone), spans, device)


def _within(node: Node, segment: Segment, images: Mapping[int, Sequence[slice]]) -> list[slice]:
    """Returns where the images of a row lie that a segment holds; a prompt's are never divided among segments."""
    within = (span for span in images.get(node.row, ()) if node.start <= span.start < node.end)
    return [_moved(span, segment.first - node.start) for span in within]


def _moved(span: slice, by: int) -> slice:
    return slice(span.start + by, span.stop + by)


def _two_way(layout: Layout, spans: Sequence[slice], device: torch.device) -> Layout:
    """Has the tokens of some stretches of a layout see each other."""
    by_length = defaultdict[int, list[Segment]](list)
    for span in spans:
        by_length[span.stop - span.start].append(Segment(span.start, span.stop - span.start))
    alike = tuple(_run(members, device) for length, members in by_length.items() if length > 1)
    return replace(layout, images=tuple(spans), alike=alike) if spans else layout


def _runs(segments: Sequence[Segment], device: torch.device) -> tuple[Run, ...]:
    alike = like_lengths([segment.tokens for segment in segments])
    return tuple(_run([segments[place] for place in places], device) for places in alike)


def _run(members: Sequence[Segment], device: torch.device) -> Run:
    """Returns segments of like length, in the order of their tokens."""
    first, width, _ = members[0]
    if all(member[:2] == (first + index * width, width) for index, member in enumerate(members)):
        return Run(len(members), width, first)
    tokens = torch.cat([torch.arange(start, start + length) for start, length, _ in members])
    places = torch.cat([torch.arange(one.tokens) + index * width for index, one in enumerate(members)])
    return Run(len(members), width, first, (tokens.to(device), places.to(device)))


@contextmanager
def attending(configs: Iterable[Any], layout: Layout) -> Iterator[set[int]]:
    """Has networks attend over packed rows of one layout, and gives the layers that did."""
    known, layers = tuple(configs), set[int]()
    with holding(_SCOPE, (known, layout, layers)), implementation(known, ATTENTION):
        yield layers


def attention_again() -> Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[object]]]:
    """Returns what torch's checkpointing needs to attend in a recomputation as in the forward pass now running."""
    scope = _SCOPE.get()
    return noop_context_fn if scope is None else lambda: (nullcontext(), attending(*scope[:2]))


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
    """Attends over packed rows as transformers calls attention; equals each row behind its own copy of the prompt."""
    scope = _SCOPE.get()
    if scope is None:
        raise AssertionError("set only inside attending")
    unknown = ["a mask of the model's own"] if attention_mask is not None else []
    unknown += ["biases by position"] if options.get("position_bias") is not None else []
    unknown += ["dropout"] if dropout else []
    unknown += ["tokens that come later"] if not getattr(module, "is_causal", True) else []
    if unknown:
        raise NotImplementedError(f"attention takes {', '.join(unknown)}")
    layer, window = _window(module, scope[1], options.get("sliding_window"))
    scope[2].add(layer)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = _Call(scope[1], scale, options.get("softcap"), window, layer)
    by_row = FIXED_TILES.get()  # there each keeps its own type, as where rows are read alone or decoded
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
    layer: int  # which one it is


class _Attention(torch.autograd.Function):
    """Segments, and those that they follow as they see them, joined; saves little but what the network holds anyway.

    A part's backward takes the joined output and log-sum-exp, and so gives its share of the joined gradient.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: _Call) -> Tensor:
        target = target_of(query)
        if call.layout.keeps is not None:
            call.layout.keeps.keep(call.layer, key, value)
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        lse = torch.empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32), device=query.device)
        for run in call.layout.runs:
            out_part, lse_part = attend(_own_part(run, (query, key, value), call), target)
            run.put(out, out_part)
            run.put(lse, lse_part)
        for run in call.layout.alike:
            out_part, lse_part = attend(_later_part(run, (query, key, value), call), target)
            whole, sums = run.take(out), run.take(lse)
            _join(whole[:, :, :-1], sums[:, :, :-1], out_part.flip(2), lse_part.flip(2))
            run.put(out, whole)
            run.put(lse, sums)
        for shared in call.layout.shared:
            for part, rows, _ in _shared_parts(shared, (query, key, value), call):
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
        for run in layout.alike:
            joined = Joined(*(run.take(whole)[:, :, :-1].flip(2) for whole in (grad, out, lse)))
            shares = attend_backward(_later_part(run, inputs, ctx.call), joined, ctx.target)
            for whole, share, some in zip(grads, shares, (slice(-1), *[slice(1, None)] * 2), strict=True):
                total = run.take(whole)
                total[:, :, some] += share.flip(2)
                run.put(whole, total)
        for shared in layout.shared:
            for part, rows, keys in _shared_parts(shared, inputs, ctx.call):
                joined = Joined(*(whole[rows].transpose(0, 1)[None] for whole in (grad, out, lse)))
                dq, dk, dv = (share[0].transpose(0, 1) for share in attend_backward(part, joined, ctx.target))
                grads[0][rows] += dq
                if shared.trunk is not None:
                    shared.trunk.add(ctx.call.layer, keys, (dk, dv))
                else:
                    grads[1][keys] += dk
                    grads[2][keys] += dv
        if layout.keeps is not None:
            for whole, share in zip(grads[1:], layout.keeps.learnt.pop(ctx.call.layer, ()), strict=False):
                whole += share
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
        for segment in (one for one in call.layout.segments if one.tokens):
            own, sight = segment.own, _sight(segment, call, query.device)
            asked, keys, values = _one_row(segment, query, key, value)
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
        for segment in (one for one in ctx.call.layout.segments if one.tokens):
            own, sight = segment.own, _sight(segment, ctx.call, query.device)
            asked, keys, values = _one_row(segment, query, key, value)
            slope, mixed = (whole[own].transpose(0, 1)[None] for whole in (grad, out))
            of_query, of_key, of_value, _, of_sinks = fixed_split.gradients(
                slope, asked, keys, values, None, sinks, sight, mixed, lse[own].T[None]
            )
            dq[own] = of_query[0].transpose(0, 1)
            for whole, share in ((dk, of_key), (dv, of_value)):
                start = 0
                for span in (*segment.behind, own):
                    whole[span] += share[0, :, start : start + span.stop - span.start].transpose(0, 1)
                    start += span.stop - span.start
            if d_sinks is not None and of_sinks is not None:
                d_sinks += of_sinks
        of_all = None if d_sinks is None else d_sinks.to(sinks.dtype)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), of_all, None


def _one_row(segment: Segment, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries (1, H, W, D), keys (1, K, U, D) and values of a segment behind those that it follows."""
    spans = (*segment.behind, segment.own)
    keys, values = (torch.cat([whole[span] for span in spans]).transpose(0, 1)[None] for whole in (key, value))
    return query[segment.own].transpose(0, 1)[None], keys, values


def _sight(segment: Segment, call: _Call, device: torch.device) -> fixed_split.Sight:
    first, visible = sum(span.stop - span.start for span in segment.behind), None
    hides = call.window is not None and call.window < first + segment.tokens
    images = [span for span in call.layout.images if segment.own.start <= span.start < segment.own.stop]
    if hides or images:
        slots = torch.arange(first + segment.tokens, device=device)
        distance = slots[first:, None] - slots[None]
        seen = distance >= 0
        for span in images:
            own = _moved(span, -segment.first)
            seen[own, _moved(own, first)] = True
        visible = (seen if call.window is None else seen & (distance < call.window))[None, None]
    return fixed_split.Sight(call.scale, call.soft_cap, visible, None if images else first)


def _own_part(run: Run, inputs: tuple[Tensor, ...], call: _Call) -> Part:
    """Returns the part of segments that see themselves."""
    query, key, value = map(run.take, inputs)
    return Part(query, key, value, call.scale, call.soft_cap, first=0, window=call.window)


def _later_part(run: Run, inputs: tuple[Tensor, ...], call: _Call) -> Part:
    """Returns the part of images whose tokens see those that come later: from their ends, as causal as any other."""
    query, key, value = map(run.take, inputs)
    key, value = (whole[:, :, 1:].flip(2) for whole in (key, value))
    return Part(query[:, :, :-1].flip(2), key, value, call.scale, call.soft_cap, first=0)


def _shared_parts(shared: Shared, inputs: tuple[Tensor, ...], call: _Call) -> Iterator[tuple[Part, slice, slice]]:
    """Yields the parts of a segment or trunk that others see, each with the tokens of its queries and of its keys."""
    prompt, tokens, window = shared.prompt, shared.prompt.stop - shared.prompt.start, call.window
    query, *held = inputs if shared.trunk is None else (inputs[0], *shared.trunk.held[call.layer])
    spans: list[tuple[slice, slice, int | None]] = []
    if window is None or window >= tokens + max(sum(tail) for tail in shared.tails):
        spans.append((slice(shared.first, shared.first + sum(tail.tokens for tail in shared.tails)), prompt, None))
    else:  # a part for each that sees it, of the tokens and the keys that the window does not hide altogether
        start = shared.first
        for tail in shared.tails:
            near = window - 1 - tail.gap  # keys that its first query sees
            rows, keys = min(tail.tokens, near), min(tokens, near)
            if rows > 0:
                spans.append((slice(start, start + rows), slice(prompt.stop - keys, prompt.stop), keys + tail.gap))
            start += tail.tokens
    for rows_span, keys_span, first in spans:
        asked = query[rows_span].transpose(0, 1)[None]
        key, value = (whole[keys_span].transpose(0, 1)[None] for whole in held)
        yield Part(asked, key, value, call.scale, call.soft_cap, first, window), rows_span, keys_span


def _join(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Joins (N, H, D) and (N, H) in place: ``L = log(e^a + e^b)``, ``o = e^(a - L) o_a + e^(b - L) o_b``."""
    joined = torch.logaddexp(lse, more_lse)
    out.copy_(out * (lse - joined).exp()[..., None] + more_out * (more_lse - joined).exp()[..., None])
    lse.copy_(joined)


def _of_one_type(*parts: Tensor) -> tuple[Tensor, ...]:
    """Returns parts of one type: that of autocast where it is on, as torch's own attention does."""
    device = parts[0].device.type
    autocast = torch.is_autocast_enabled(device) and parts[0].dtype is not torch.float64
    kind = torch.get_autocast_dtype(device) if autocast else parts[-1].dtype
    return tuple(part.to(kind) for part in parts)


def _window(module: nn.Module, layout: Layout, told: int | None) -> tuple[int, int | None]:
    """Returns a layer's number, and its window by the config, which must agree with what it tells its attention."""
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise NotImplementedError("attention does not know its layer")
    window = layout.windows[int(index)]
    if told is not None and told != window:
        raise NotImplementedError(f"layer {index} has a window of {told} tokens where its config says {window}")
    return int(index), window


# In a compiled block it runs as it is: lengths on the host decide which kernels it calls.
AttentionInterface.register(ATTENTION, torch.compiler.disable(packed_attention))  # type: ignore[no-untyped-call]

_SCOPE: ContextVar[tuple[tuple[Any, ...], Layout, set[int]] | None] = ContextVar("packed attention", default=None)
