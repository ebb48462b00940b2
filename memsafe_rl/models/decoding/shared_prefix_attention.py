"""Attention of rows over their prompts and their own suffixes, as one of transformers' attention implementations.

A model whose layers look their attention up by name is switched to it while rows are decoded; everything else of the
model runs as it is. The keys of a prompt are read once for all rows of its group, in one matrix product. Where an
encoder reads the prompts, cross-attention has their keys to itself, and a row's own tokens attend to each other.

Axes: ``B`` rows, ``H`` key/value heads, ``R`` query heads of each, ``N`` tokens read in one forward, ``L`` slots of a
prompt, ``S`` slots of a suffix, ``K`` keys a row attends to, ``D`` width of a head.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from memsafe_rl.accounting import device_type_of
from memsafe_rl.errors import MemsafeError
from memsafe_rl.models.decoding import fixed_split_attention as fixed_split
from memsafe_rl.models.decoding.shared_prefix_cache import (
    Segment,
    SharedPrefixCache,
    SharedPrefixState,
    SourceMarks,
    as_floats,
)
from memsafe_rl.models.module_state import implementation
from memsafe_rl.ops.fixed_tiles import fixed_tiles_on
from memsafe_rl.types import SCORE_ELEMENTS, whole_blocks

NAME = "memsafe_rl_grouped"
"""The implementation's name in transformers' table."""

_active = threading.local()


@contextmanager
def shared_prefix_attention(configs: Iterable[Any], reading: Reading) -> Iterator[None]:
    """Has a model's layers attend to a state of rows and to the tokens they read."""
    _active.reading = reading
    try:
        with implementation(configs, NAME):
            yield
    finally:
        _active.reading = None


@contextmanager
def biases_left_out(modules: Iterable[Any]) -> Iterator[None]:
    """Has T5's attention modules with a learned bias hand none on, since a `Reading` has it from a table of its own."""
    known = tuple(modules)
    for module in known:
        module.__dict__["compute_bias"] = partial(_no_bias, module)
    try:
        yield
    finally:
        for module in known:
            module.__dict__.pop("compute_bias", None)


def _no_bias(module: Any, *_args: Any, **_kwargs: Any) -> Tensor:
    """Gives a bias over no keys."""
    weight: Tensor = module.relative_attention_bias.weight
    return weight.new_empty(1, weight.shape[1], 1, 0)


class Scoring(NamedTuple):
    """What a layer does to its scores."""

    scale: float  # factor on the scores
    soft_cap: float | None = None  # bound of the scores, None for none
    sinks: Tensor | None = None  # (H × R,) a score that takes weight and gives nothing; None for none
    # T5's attention module with a learned bias for each distance between tokens; None for no bias
    bias: nn.Module | None = None


class _Seen(NamedTuple):
    """What a segment's queries see: the first keys and values are the prompts', the others the rows' own."""

    keys: list[Tensor]  # (rows, H, tokens, D) each
    values: list[Tensor]  # likewise
    hidden_BNK: Tensor | None  # what must not be seen, (rows, N or 1, K) bool; None for nothing
    bias: Tensor | None = None  # what is added to scores, (rows or 1, H × R, N, K)

    def by_tokens(self, tokens: slice) -> _Seen:
        """Gives what some of the queries see."""
        hidden = self.hidden_BNK
        alike = hidden is None or hidden.shape[1] == 1  # where an encoder reads, all tokens see the same
        bias = None if self.bias is None else self.bias[:, :, tokens]
        return self._replace(hidden_BNK=hidden if alike or hidden is None else hidden[:, tokens], bias=bias)

    def by_heads(self, chosen: slice, heads: int) -> _Seen:
        """Gives what the queries of some of the key/value heads see; the bias by head, (B, H, R, N, K)."""
        bias = None if self.bias is None else self.bias.reshape(self.bias.shape[0], heads, -1, *self.bias.shape[2:])
        return _Seen(
            [part[:, chosen] for part in self.keys],
            [part[:, chosen] for part in self.values],
            self.hidden_BNK,
            None if bias is None else bias[:, chosen],
        )


class Reading:
    """Tokens that the rows of a state read in one forward, and what each of them can see."""

    def __init__(
        self,
        state: SharedPrefixState,
        cache: SharedPrefixCache,
        counts: Sequence[int] | None = None,
        *,
        keeps: bool = True,
        sources: SourceMarks | None = None,
    ) -> None:
        self.state, self.cache, self.counts, self.keeps, self.sources = state, cache, counts, keeps, sources
        self.tokens = 1 if counts is None else max(counts)
        self.bias: nn.Module | None = None
        self._hidden: dict[tuple[int, int | None, int, int], Tensor | None] = {}
        self._hidden_sources: dict[int, Tensor | None] = {}
        self._filled: dict[int, int | Tensor] = {}
        self._placed: dict[tuple[int, int | None, int, int], tuple[Tensor, Tensor]] = {}
        self._biases: dict[tuple[int, int, int, int, int], Tensor] = {}
        self._masks: dict[tuple[int, int | None, int, int, int], tuple[Tensor | None, Tensor | None]] = {}

    @property
    def positions(self) -> Tensor:
        """Gives the position of each token read, (B, N) int64 on the device."""
        first_B1 = self.state.counts[2, :, None]
        return first_B1 if self.tokens == 1 else first_B1 + torch.arange(self.tokens, device=first_B1.device)

    def _slots_to_fill(self, layer: int) -> int | Tensor:
        """Gives where the tokens read go in a layer's suffixes, found once for all layers of as many slots."""
        slots = self.state.slots_of(layer)
        if slots not in self._filled:
            self._filled[slots] = self.state.places_of(slots, self.counts)
        return self._filled[slots]

    def source_layer(self, key: Tensor) -> int | None:
        """Tells which cross-attention layer asks, by what it takes for its keys; None if none does."""
        return None if self.sources is None else self.sources.layer_of(key)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Gives the attention of one layer's queries over prompts and suffixes."""
        layer, state = self.cache.current, self.state
        drawn = self.counts is None
        if drawn:
            state.store(layer, key, value, self._slots_to_fill(layer))
        if fixed_tiles_on():
            new = None if drawn else (key, value)
            parts = [
                self._attend_by_place(part, layer, _rows_of(query, part), new, scoring) for part in state.segments()
            ]
            if not drawn and self.keeps:
                state.store(layer, key, value, self._slots_to_fill(layer))
            return torch.cat(parts).transpose(1, 2).contiguous()
        if drawn and _has_kernel(query, key, value, scoring):
            return _joined([self._attend_by_kernel(part, layer, query, scoring) for part in state.segments()])
        grouped = _grouped_queries(query * scoring.scale, key.shape[1])
        parts = []
        for segment in state.segments():
            seen = self._seen_by(segment, layer, None if drawn else (key, value), scoring.bias)
            parts.append(self._attend_all(segment, _rows_of(grouped, segment), seen, scoring))
        if not drawn and self.keeps:
            state.store(layer, key, value, self._slots_to_fill(layer))
        return self._by_token(parts, query)

    def attend_source(self, layer: int, query: Tensor, scoring: Scoring) -> Tensor:
        """Gives the cross-attention of one layer's queries, over what an encoder read."""
        parts = []
        for segment in self.state.segments():
            source = segment.block.source
            if source is None:
                raise NotImplementedError("no encoder has read the prompts of these rows")
            keys, values = source.keys[layer], source.values[layer]
            if fixed_tiles_on():
                parts.append(
                    _attend_source_by_place(segment, keys, values, query, scoring).transpose(1, 2).contiguous()
                )
                continue
            if self.counts is None and _has_kernel(query, keys, values, scoring):
                mask = self._source_mask(segment, query)
                out, _ = _kernel(segment.spread(_rows_of(query, segment)), keys, values, mask, scoring)
                parts.append(segment.gather(out).transpose(1, 2))
                continue
            asked = _rows_of(query, segment)
            seen = _Seen([keys], [values], self._hidden_source(segment))
            grouped = _grouped_queries(asked * scoring.scale, keys.shape[1])
            parts.append(self._by_token([self._attend_all(segment, grouped, seen, scoring)], asked))
        return _joined(parts)

    def _attend_by_kernel(self, segment: Segment, layer: int, query: Tensor, scoring: Scoring) -> Tensor:
        """Attends to prompts and to suffixes by a kernel each, and joins both by their log-sum-exp, (rows, 1, H, D).

        ``o = o_p + sigmoid(L_s - L_p) (o_s - o_p)``.
        """
        state, block, used = self.state, segment.block, self._used(segment, layer)
        asked = _rows_of(query, segment)
        mask, own_mask = self._masks_of(segment, layer, used, query, scoring.bias)
        out, lse = _kernel(segment.spread(asked), block.keys[layer], block.values[layer], mask, scoring)
        keys, values = (_rows_of(store[layer], segment)[:, :, :used] for store in (state.keys, state.values))
        own_out, own_lse = _kernel(asked, keys, values, own_mask, scoring)
        share = torch.sigmoid(own_lse[..., None] - segment.gather(lse[..., None]))
        return torch.lerp(segment.gather(out), own_out, share.to(out.dtype)).transpose(1, 2)

    def _masks_of(
        self, segment: Segment, layer: int, used: int, query: Tensor, bias: nn.Module | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gives what is added to the scores of prompts and of suffixes, the same for all layers alike."""
        window, width = self.state.windows[layer], segment.block.keys[layer].shape[2]
        name = (segment.rows.start, window, width, used, id(bias))
        if name not in self._masks:
            hidden, mask = self._hidden_keys(segment, layer, used), None
            if hidden is not None:
                mask = _added(hidden, query)[:, None]
            if bias is not None:
                biased = self._biased(segment, layer, used, bias)
                mask = biased if mask is None else biased + mask
            if mask is None:
                self._masks[name] = None, None
            elif mask.shape[0] == 1:
                self._masks[name] = mask[..., :width], mask[..., width:]
            else:
                self._masks[name] = segment.spread(mask[..., :width]), mask[..., width:]
        return self._masks[name]

    def _source_mask(self, segment: Segment, query: Tensor) -> Tensor | None:
        """Gives what is added to the scores of what an encoder read, (P, 1, share, L), the same for all layers."""
        hidden, name = self._hidden_source(segment), (segment.rows.start, -1, 0, 0, 0)
        if name not in self._masks:
            mask = None if hidden is None else segment.spread(_added(hidden, query)[:, None])
            self._masks[name] = mask, None
        return self._masks[name][0]

    def _attend_by_place(
        self, segment: Segment, layer: int, query: Tensor, new: tuple[Tensor, Tensor] | None, scoring: Scoring
    ) -> Tensor:
        """Attends over keys laid out by the places of their tokens, as scoring sees them, a few rows at a time."""
        seen, slots = self._seen_by(segment, layer, new, None), max(self.state.positions) + self.tokens
        place_BK, visible_BNK = self._by_place(segment, layer, slots)
        prompt_B = torch.tensor(segment.prompts, device=query.device)
        bias = None if scoring.bias is None else self._biased(segment, layer, slots, scoring.bias, by_place=True)
        heads, width = seen.keys[0].shape[1], query.shape[3]
        step, mixed = max(1, SCORE_ELEMENTS // (heads * slots * width)), []
        for start in range(0, len(query), step):
            rows = slice(start, start + step)
            laid = []
            for parts in (seen.keys, seen.values):
                whole = torch.cat([parts[0].index_select(0, prompt_B[rows]), *(part[rows] for part in parts[1:])], 2)
                index = place_BK[rows, None, :, None].expand(-1, heads, -1, whole.shape[3])
                laid.append(as_floats(whole.gather(2, index), query.dtype))
            sight = fixed_split.Sight(scoring.scale, scoring.soft_cap, visible_BNK[rows, None])
            own = bias if bias is None or len(bias) == 1 else bias[rows]
            mixed.append(fixed_split.attend(query[rows], laid[0], laid[1], sight, bias=own, sinks=scoring.sinks))
        return torch.cat(mixed)

    def _by_place(self, segment: Segment, layer: int, slots: int) -> tuple[Tensor, Tensor]:
        """Finds where the key of each place lies (rows, K), and what tokens see (rows, N, K); once for all alike."""
        window, used = self.state.windows[layer], self._used(segment, layer)
        name = (segment.rows.start, window, segment.block.keys[layer].shape[2], used)
        if name not in self._placed:
            now_BN, place_BK = self._places(segment, layer, used)
            order = torch.arange(place_BK.shape[1], device=place_BK.device).expand_as(place_BK)
            held = torch.where(place_BK < 0, slots, place_BK).clamp_max(slots)
            found = order.new_full((len(order), slots + 1), -1).scatter_(1, held, order)[:, :slots]
            place = torch.arange(slots, device=order.device)
            visible = (found >= 0)[:, None] & (place <= now_BN[:, :, None])
            if window is not None:
                visible = visible & (place > now_BN[:, :, None] - window)
            self._placed[name] = found.clamp_min(0), visible
        return self._placed[name]

    def _by_token(self, parts: Sequence[Tensor], query: Tensor) -> Tensor:
        """Lays what segments attended to, (rows, H, R × N, D) each, out as the model wants it."""
        mixed = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return mixed.reshape(query.shape[0], query.shape[1], self.tokens, -1).transpose(1, 2).contiguous()

    def _seen_by(
        self, segment: Segment, layer: int, new: tuple[Tensor, Tensor] | None, bias: nn.Module | None
    ) -> _Seen:
        """Gives what one segment attends to: prompts, suffixes and tokens that are in neither yet."""
        state, block, used = self.state, segment.block, self._used(segment, layer)
        keys, values = [block.keys[layer]], [block.values[layer]]
        if used:
            keys.append(_rows_of(state.keys[layer], segment)[:, :, :used])
            values.append(_rows_of(state.values[layer], segment)[:, :, :used])
        if new is not None:
            keys.append(_rows_of(new[0], segment))
            values.append(_rows_of(new[1], segment))
        hidden = self._hidden_keys(segment, layer, used)
        return _Seen(keys, values, hidden, None if bias is None else self._biased(segment, layer, used, bias))

    def _attend_all(self, segment: Segment, query_BHXD: Tensor, seen: _Seen, scoring: Scoring) -> Tensor:
        """Attends a few key/value heads at a time, and a few tokens where those of one head have too many scores."""
        rows, heads, width = query_BHXD.shape[:3]
        keys, group = rows * sum(part.shape[2] for part in seen.keys), width // self.tokens
        step = min(self.tokens, max(1, SCORE_ELEMENTS // max(1, keys * group)))
        mixed = []
        for first in range(0, self.tokens, step):
            query, some = query_BHXD, seen
            if step < self.tokens:
                query_BHRND = query_BHXD.reshape(rows, heads, group, self.tokens, -1)
                query = query_BHRND[:, :, :, first : first + step].flatten(2, 3)
                some = seen.by_tokens(slice(first, first + step))
            # keys in 8 bits are floats while they are attended to, as wide as their head
            each = max(query.shape[2], query.shape[3] if seen.keys[0].dtype == torch.int8 else 0)
            at_once = max(1, min(heads, SCORE_ELEMENTS // max(1, keys * each)))
            pieces = []
            for head in range(0, heads, at_once):
                chosen = slice(head, head + at_once)
                pieces.append(
                    _attend_heads(
                        segment,
                        query[:, chosen],
                        some.by_heads(chosen, heads),
                        scoring.soft_cap,
                        None if scoring.sinks is None else scoring.sinks.view(heads, -1)[chosen],
                        min(step, self.tokens - first),
                    )
                )
            mixed.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1))
            del query, pieces  # copies, which the next tokens need not find there
        if len(mixed) == 1:
            return mixed[0]
        return torch.cat([part.reshape(*part.shape[:2], group, -1, part.shape[3]) for part in mixed], 3).flatten(2, 3)

    def _used(self, segment: Segment, layer: int) -> int:
        """Slots of a segment's suffixes that hold anything, this step's token included if it was written first."""
        state = self.state
        written = max(state.lengths[row] for row in segment.rows) + (1 if self.counts is None else 0)
        return min(written, state.slots_of(layer)) if state.keys or self.counts is None else 0

    def _hidden_keys(self, segment: Segment, layer: int, used: int) -> Tensor | None:
        """Gives the keys that tokens must not see, (rows, N, K) bool, the same for all layers alike; None if none.

        Hidden is what lies outside of prompt, suffix, past or window.
        """
        state, block = self.state, segment.block
        window, width = state.windows[layer], block.keys[layer].shape[2]
        name = (segment.rows.start, window, width, used)
        if name in self._hidden:
            return self._hidden[name]
        hidden_BNK = None
        lengths = [state.lengths[row] for row in segment.rows]
        prompts = [state.bases[row] for row in segment.rows]
        dropped = [block.dropped[layer][prompt] for prompt in segment.prompts]
        farthest = max(prompt + length for prompt, length in zip(prompts, lengths, strict=True)) + self.tokens
        padded = any(first < 0 or first + width > prompt for first, prompt in zip(dropped, prompts, strict=True))
        alike = self.counts is None and not padded and len({*lengths}) == 1
        if not alike or (window is not None and farthest > window):
            now_BN, place_BK = self._places(segment, layer, used)
            hidden_BNK = (place_BK < 0)[:, None] | (place_BK[:, None] > now_BN[:, :, None])
            if window is not None:
                hidden_BNK = hidden_BNK | (place_BK[:, None] <= now_BN[:, :, None] - window)
        self._hidden[name] = hidden_BNK
        return hidden_BNK

    def _places(self, segment: Segment, layer: int, used: int) -> tuple[Tensor, Tensor]:
        """Gives the place of each token read (rows, N) and of each key (rows, K) in its row; -1 for padding."""
        state, block = self.state, segment.block
        dropped = [block.dropped[layer][prompt] for prompt in segment.prompts]
        prompt_B1, length_B1, _ = state.counts[:, segment.rows.start : segment.rows.stop, None].unbind(0)
        dropped_B1 = state.constant(tuple(dropped)) if any(dropped) else 0
        now_BN = self.positions[segment.rows.start : segment.rows.stop]
        place_BL = dropped_B1 + torch.arange(block.keys[layer].shape[2], device=state.device)
        places = [torch.where((place_BL >= 0) & (place_BL < prompt_B1), place_BL, -1)]
        if used:
            # A ring of so many slots: slot s holds the last token written there.
            ring, last_B1 = state.slots_of(layer), length_B1 - (0 if self.counts is None else 1)
            token_BS = last_B1 - (last_B1 - torch.arange(used, device=state.device)) % ring
            places.append(torch.where(token_BS >= 0, prompt_B1 + token_BS, -1))
        if self.counts is not None:
            places.append(now_BN)
        return now_BN, torch.cat(places, 1)

    def _biased(self, segment: Segment, layer: int, used: int, module: Any, *, by_place: bool = False) -> Tensor:
        """Gives what T5 adds to scores, (rows or 1, H × R, N, K): a number for each distance."""
        name = (segment.rows.start, layer if self.state.windows[layer] else -1, segment.rows.stop, used, id(module))
        if name not in self._biases:
            farthest = max(self.state.positions) + self.tokens
            if not by_place and self._is_plain(segment, layer, used):
                # keys lie in the order of their tokens, the last one nearest
                table_1HNW = self._bias_table(module, farthest)
                self._biases[name] = table_1HNW[..., table_1HNW.shape[3] - farthest :]
                return self._biases[name]
            now_BN, place_BK = self._places(segment, layer, self._used(segment, layer))
            if by_place:
                place_BK = torch.arange(used, device=place_BK.device).expand(len(place_BK), -1)
            if len({self.state.lengths[row] for row in segment.rows}) == 1 and len({*segment.block.lengths}) == 1:
                now_BN, place_BK = now_BN[:1], place_BK[:1]
            distance_BNK = (now_BN[:, :, None] - place_BK[:, None]).clamp_min(0)
            table_HW = self._bias_table(module, farthest)[0, :, 0].flip(-1)
            self._biases[name] = table_HW[:, distance_BNK].transpose(0, 1)
        return self._biases[name]

    def _is_plain(self, segment: Segment, layer: int, used: int) -> bool:
        """Whether one token is read by rows alike, whose keys are all their tokens in order."""
        width = segment.block.keys[layer].shape[2]
        alike = self._hidden_keys(segment, layer, used) is None and self.counts is None
        return alike and {*self.state.bases} == {width} and max(self.state.positions) + 1 == width + used

    def _bias_table(self, module: Any, farthest: int) -> Tensor:
        """Gives the network's own table of distances of a last token to all before, (1, H × R, 1, W), the nearest last.

        Made for more tokens than there are, and then for as many more, since each step asks for one more of them.
        """
        table = self.state.constants.get(id(module))
        if table is None or table.shape[3] < farthest:
            most = whole_blocks(2 * farthest)
            table = type(module).compute_bias(module, 1, most, device=self.state.device, past_seen_tokens=most - 1)
            self.state.constants[id(module)] = table
        return cast(Tensor, table)

    def _hidden_source(self, segment: Segment) -> Tensor | None:
        """Gives the padding of prompts that an encoder read, (rows, 1, L) bool; None if there is none."""
        source = segment.block.source
        if source is not None and segment.rows.start not in self._hidden_sources:
            width, lengths = source.keys[0].shape[2], [source.lengths[prompt] for prompt in segment.prompts]
            hidden = None
            if min(lengths) < width:
                length_B11 = torch.tensor(lengths, device=self.state.device)[:, None, None]
                hidden = torch.arange(width, device=self.state.device) >= length_B11
            self._hidden_sources[segment.rows.start] = hidden
        return self._hidden_sources[segment.rows.start]


def _has_kernel(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> bool:
    """Whether there is a kernel that keeps scores to itself and gives their log-sum-exp.

    In half precision there is none: rows that are read again must get the bits that they had.
    """
    kinds = {query.dtype, key.dtype, value.dtype}
    alike = query.shape[-1] == key.shape[-1] == value.shape[-1]
    alike = alike and kinds in ({torch.float32}, {torch.float64})
    return device_type_of(query) == "cpu" and alike and scoring.soft_cap is None and scoring.sinks is None


def _kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Gives attention (B, H × R, N, D) and its log-sum-exp (B, H × R, N), by the CPU's flash kernel."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(query, key, value, 0.0, False, attn_mask=mask, scale=scoring.scale)
    return out, lse


def _added(hidden: Tensor, like: Tensor) -> Tensor:
    """Gives a mask to be added to scores: half of the lowest number, so that a row that sees nothing weighs 0."""
    lowest = torch.finfo(like.dtype).min / 2
    return torch.zeros((), dtype=like.dtype, device=like.device).where(~hidden, lowest)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _attend_source_by_place(segment: Segment, keys: Tensor, values: Tensor, query: Tensor, scoring: Scoring) -> Tensor:
    """Attends over what an encoder read, a row at a time, so that no second copy of all sources is made."""
    asked, source, mixed = _rows_of(query, segment), segment.block.source, []
    for row, prompt in enumerate(segment.prompts):
        length = keys.shape[2] if source is None else source.lengths[prompt]
        key, value = (as_floats(part[prompt : prompt + 1, :, :length], query.dtype) for part in (keys, values))
        sight = fixed_split.Sight(scoring.scale, scoring.soft_cap)
        mixed.append(fixed_split.attend(asked[row : row + 1], key, value, sight, sinks=scoring.sinks))
    return torch.cat(mixed)


def _attend_heads(
    segment: Segment, query_BHXD: Tensor, seen: _Seen, soft_cap: float | None, sinks_HR: Tensor | None, tokens: int
) -> Tensor:
    """Attends for some heads of a segment: the first keys are the prompts', the others the rows' own."""
    keys, values, hidden_BNK, bias_BHRNK = seen
    dtype = query_BHXD.dtype if values[0].dtype == torch.int8 else values[0].dtype
    scores = [segment.by_row(segment.grouped(query_BHXD) @ as_floats(keys[0], dtype).mT)]
    for part in keys[1:]:
        scores.append(query_BHXD @ as_floats(part, dtype).mT)
    scores_BHXK = torch.cat(scores, 3) if len(scores) > 1 else scores[0]
    del scores  # joined, and the largest thing here
    if soft_cap is not None:
        scores_BHXK = torch.tanh(scores_BHXK / soft_cap) * soft_cap
    rows, heads, _, width = scores_BHXK.shape
    split = scores_BHXK.view(rows, heads, -1, tokens, width)  # (B, H, R, N, K)
    if bias_BHRNK is not None:
        split = split + bias_BHRNK
    if hidden_BNK is not None:
        split = split.masked_fill_(hidden_BNK[:, None, None], -math.inf)
    if sinks_HR is not None:
        sink = sinks_HR[None, :, :, None, None].to(split.dtype).expand(*split.shape[:4], 1)
        split = torch.cat([split, sink], 4)
    wide = torch.promote_types(split.dtype, torch.float32)
    del scores_BHXK
    weights = torch.softmax(split, 4, dtype=wide)[..., :width].to(dtype).reshape(rows, heads, -1, width)
    del split
    lengths = [part.shape[2] for part in values]
    first, *others = torch.split(weights, lengths, 3)
    mixed = segment.by_row(segment.grouped(first) @ as_floats(values[0], dtype))
    for part, value in zip(others, values[1:], strict=True):
        mixed = mixed + part @ as_floats(value, dtype)
    return mixed


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Has the reading in force attend; the form that transformers asks of an implementation."""
    reading: Reading | None = getattr(_active, "reading", None)
    if reading is None:
        raise MemsafeError(
            f"{type(module).__name__} runs while another thread draws completions with a network of the same config. "
            "Wait for the rollout, or give the second network a copy of the config."
        )
    if attention_mask is not None:
        raise NotImplementedError(f"{type(module).__name__} attends in a way that grouped rows do not know")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    biased = _is_biased(module)
    source = reading.source_layer(key)
    if source is not None and not biased:
        return reading.attend_source(source, query, Scoring(scale, softcap, s_aux)), None
    if biased and source is None:
        reading.bias = module
    if (position_bias is not None and reading.bias is None) or (biased and source is not None):
        raise NotImplementedError(f"{type(module).__name__} adds a bias to its scores that grouped rows do not know")
    bias = None if position_bias is None else reading.bias
    return reading.attend(query, key, value, Scoring(scale, softcap, s_aux, bias)), None


def biased_modules(network: nn.Module) -> tuple[nn.Module, ...]:
    """Finds T5's attention modules with a learned bias for each distance."""
    return tuple(module for module in network.modules() if _is_biased(module))


def _is_biased(module: nn.Module) -> bool:
    return bool(getattr(module, "has_relative_attention_bias", False))


def _grouped_queries(query: Tensor, heads: int) -> Tensor:
    """Lays queries (B, H × R, N, D) out as (B, H, R × N, D)."""
    return query.reshape(query.shape[0], heads, -1, query.shape[3])


def _rows_of(values: Tensor, segment: Segment) -> Tensor:
    return values[segment.rows.start : segment.rows.stop]


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
