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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from itertools import groupby
from operator import attrgetter
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from memsafe_rl.accounting import device_type_of
from memsafe_rl.errors import MemsafeError
from memsafe_rl.models.decoding import fixed_split_attention as fixed_split
from memsafe_rl.models.decoding.shared_prefix_cache import (
    PromptBlock,
    Segment,
    SharedPrefixCache,
    SharedPrefixState,
    SourceMarks,
    as_floats,
)
from memsafe_rl.models.module_state import implementation, is_biased, replaced
from memsafe_rl.ops.fixed_tiles import FIXED_TILES
from memsafe_rl.types import SCORE_ELEMENTS, whole_blocks

NAME = "memsafe_rl_grouped"
"""The implementation's name in transformers' table."""

_active = threading.local()


@contextmanager
def shared_prefix_attention(configs: Iterable[Any], reading: Reading) -> Iterator[None]:
    """Has a model's layers attend to a state of rows and to the tokens they read."""
    with replaced([(_active, "reading", reading)]), implementation(configs, NAME):
        yield


@contextmanager
def biases_left_out(modules: Iterable[Any]) -> Iterator[None]:
    """Has T5's attention modules with a learned bias hand none on, since a `Reading` has it from a table of its own."""
    with replaced([(module, "compute_bias", partial(_no_bias, module)) for module in modules]):
        yield


def _no_bias(module: Any, *_args: Any, **_kwargs: Any) -> Tensor:
    """Returns a bias over no keys."""
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


P = ParamSpec("P")
T = TypeVar("T")


def _once(
    make: Callable[Concatenate[Reading, Segment, int, P], T],
) -> Callable[Concatenate[Reading, Segment, int, P], T]:
    """Has a reading make something once for all layers of a segment that have the same window and as wide prompts."""

    @wraps(make)
    def made(reading: Reading, segment: Segment, layer: int, /, *args: P.args, **kwargs: P.kwargs) -> T:
        alike = segment.rows.start, reading.state.windows[layer], segment.block.keys[layer].shape[2]
        name = make.__name__, *alike, *args, *kwargs.items()
        if name not in reading.made:
            reading.made[name] = make(reading, segment, layer, *args, **kwargs)
        return cast(T, reading.made[name])

    return made


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
        images: Sequence[slice] = (),
    ) -> None:
        self.images = images  # of the tokens of its only row, those that see each other
        self.state, self.cache, self.counts, self.keeps, self.sources = state, cache, counts, keeps, sources
        self.tokens = 1 if counts is None else max(counts)
        self.bias: nn.Module | None = None
        self.made: dict[tuple[object, ...], object] = {}
        self._filled: dict[int, int | Tensor] = {}

    @property
    def positions(self) -> Tensor:
        """Returns the position of each token read, (B, N) int64 on the device."""
        return self._from(self.state.counts[2, :, None])

    def _from(self, first_B1: Tensor) -> Tensor:
        """Returns the positions of the tokens that each row reads from a first one on."""
        return first_B1 if self.tokens == 1 else first_B1 + torch.arange(self.tokens, device=first_B1.device)

    def _slots_to_fill(self, layer: int) -> int | Tensor:
        """Returns where the tokens read go in a layer's suffixes, found once for all layers of as many slots."""
        slots = self.state.slots_of(layer)
        if slots not in self._filled:
            self._filled[slots] = self.state.places_of(slots, self.counts)
        return self._filled[slots]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> list[Tensor]:
        """Returns the attention of one layer's queries over prompts and suffixes, or what `_merged` makes it of."""
        state, drawn = self.state, self.counts is None
        if drawn:
            state.store(layer, key, value, self._slots_to_fill(layer))
        new = None if drawn else (key, value)
        has_kernel = drawn and _has_kernel(query, key, value, scoring)
        parts: list[tuple[Tensor, ...]] = []
        for segment in state.segments():
            asked, (keys, values) = _rows_of(query, segment), self._held_by(segment, layer, new)
            hidden = self._hidden_keys(segment, layer)
            if FIXED_TILES.get():
                parts.append((self._attend_by_place(segment, layer, asked, keys, values, scoring),))
            elif has_kernel:
                parts.append(self._attend_by_kernel(segment, layer, asked, keys, values, scoring))
            else:
                bias = None if scoring.bias is None else self._biased(segment, layer, scoring.bias)
                parts.append((self._attend_all(segment, asked, _Seen(keys, values, hidden, bias), scoring),))
        if not drawn and self.keeps:
            state.store(layer, key, value, self._slots_to_fill(layer))
        return [_joined(list(alike)) for alike in zip(*parts, strict=True)]

    def attend_source(self, layer: int, query: Tensor, scoring: Scoring) -> Tensor:
        """Returns the cross-attention of one layer's queries, over what an encoder read."""
        parts = []
        for segment in self.state.segments():
            source, asked = segment.block.source, _rows_of(query, segment)
            if source is None:
                raise NotImplementedError("no encoder has read the prompts of these rows")
            keys, values = source.keys[layer], source.values[layer]
            if FIXED_TILES.get():
                parts.append(_attend_source_by_place(segment, keys, values, asked, scoring))
            elif self.counts is None and _has_kernel(query, keys, values, scoring):
                mask = self._source_mask(segment, layer, query.dtype)
                out, _ = _kernel(segment.grouped(asked), keys, values, mask, scoring)
                parts.append(segment.by_row(out))
            else:
                seen = _Seen([keys], [values], self._hidden_source(segment, layer))
                parts.append(self._attend_all(segment, asked, seen, scoring))
        return _joined(parts).transpose(1, 2).contiguous()

    def _attend_by_kernel(
        self, segment: Segment, layer: int, query: Tensor, keys: list[Tensor], values: list[Tensor], scoring: Scoring
    ) -> tuple[Tensor, ...]:
        """Attends to prompts and to suffixes by a kernel each; returns outputs and log-sum-exps of both."""
        mask, own_mask = self._masks_of(segment, layer, query.dtype, scoring.bias)
        out, lse = _kernel(segment.grouped(query), keys[0], values[0], mask, scoring)
        own_out, own_lse = _kernel(query, keys[1], values[1], own_mask, scoring)
        return segment.by_row(out), segment.by_row(lse[..., None]), own_out, own_lse[..., None]

    @_once
    def _masks_of(
        self, segment: Segment, layer: int, dtype: torch.dtype, bias: nn.Module | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns what is added to the scores of prompts and of suffixes."""
        hidden, width = self._hidden_keys(segment, layer), segment.block.keys[layer].shape[2]
        mask = None if hidden is None else _added(hidden, dtype)[:, None]
        if bias is not None:
            biased = self._biased(segment, layer, bias)
            mask = biased if mask is None else biased + mask
        if mask is None:
            return None, None
        return mask[..., :width] if mask.shape[0] == 1 else segment.grouped(mask[..., :width]), mask[..., width:]

    @_once
    def _source_mask(self, segment: Segment, layer: int, dtype: torch.dtype) -> Tensor | None:
        """Returns what is added to the scores of what an encoder read, (P, 1, share, L)."""
        hidden = self._hidden_source(segment, layer)
        return None if hidden is None else segment.grouped(_added(hidden, dtype)[:, None])

    def _attend_by_place(
        self, segment: Segment, layer: int, query: Tensor, keys: list[Tensor], values: list[Tensor], scoring: Scoring
    ) -> Tensor:
        """Attends over keys laid out by the places of their tokens, as scoring sees them, a few rows at a time."""
        slots = max(self.state.positions) + self.tokens
        place_BK, visible_BNK = self._by_place(segment, layer, slots)
        prompt_B = torch.tensor(segment.prompts, device=query.device)
        bias = None if scoring.bias is None else self._biased(segment, layer, scoring.bias, slots)
        heads, width = keys[0].shape[1], query.shape[3]
        step, mixed = max(1, SCORE_ELEMENTS // (heads * slots * width)), []
        for start in range(0, len(query), step):
            rows = slice(start, start + step)
            laid = []
            for parts in (keys, values):
                whole = torch.cat([parts[0].index_select(0, prompt_B[rows]), *(part[rows] for part in parts[1:])], 2)
                index = place_BK[rows, None, :, None].expand(-1, heads, -1, whole.shape[3])
                laid.append(as_floats(whole.gather(2, index), query.dtype))
            sight = fixed_split.Sight(scoring.scale, scoring.soft_cap, visible_BNK[rows, None])
            own = bias if bias is None or len(bias) == 1 else bias[rows]
            mixed.append(fixed_split.attend(query[rows], laid[0], laid[1], sight, bias=own, sinks=scoring.sinks))
        return torch.cat(mixed)

    @_once
    def _by_place(self, segment: Segment, layer: int, slots: int) -> tuple[Tensor, Tensor]:
        """Finds where the key of each place lies (rows, K), and what tokens see (rows, N, K)."""
        now_BN, place_BK = self._places(segment, layer)
        order = torch.arange(place_BK.shape[1], device=place_BK.device).expand_as(place_BK)
        held = torch.where(place_BK < 0, slots, place_BK).clamp_max(slots)
        found = order.new_full((len(order), slots + 1), -1).scatter_(1, held, order)[:, :slots]
        laid_BK = torch.where(found >= 0, torch.arange(slots, device=order.device), -1)
        return found.clamp_min(0), ~self._unseen(laid_BK, now_BN, self.state.windows[layer], self.state.positions[0])

    def _held_by(
        self, segment: Segment, layer: int, new: tuple[Tensor, Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the keys and values that a segment attends to: prompts', suffixes' and those in neither yet."""
        state, block = self.state, segment.block
        used = self._used(segment, state.slots_of(layer))
        keys, values = [block.keys[layer]], [block.values[layer]]
        if used:
            keys.append(_rows_of(state.keys[layer], segment)[:, :, :used])
            values.append(_rows_of(state.values[layer], segment)[:, :, :used])
        if new is not None:
            keys.append(_rows_of(new[0], segment))
            values.append(_rows_of(new[1], segment))
        return keys, values

    def _attend_all(self, segment: Segment, query: Tensor, seen: _Seen, scoring: Scoring) -> Tensor:
        """Attends a few key/value heads at a time, and a few tokens where those of one head have too many scores."""
        heads, (rows, all_heads, tokens, width) = seen.keys[0].shape[1], query.shape
        keys, group = rows * sum(part.shape[2] for part in seen.keys), all_heads // heads
        query_BHRND = (query * scoring.scale).reshape(rows, heads, group, tokens, width)
        step = min(tokens, max(1, SCORE_ELEMENTS // max(1, keys * group)))
        # keys in 8 bits are floats while they are attended to, as wide as their head
        each = max(group * step, width if seen.keys[0].dtype == torch.int8 else 0)
        at_once = max(1, min(heads, SCORE_ELEMENTS // max(1, keys * each)))
        mixed = []
        for first in range(0, tokens, step):
            some = slice(first, first + step)
            chosen = (slice(head, head + at_once) for head in range(0, heads, at_once))
            pieces = [
                _attend_heads(segment, query_BHRND[:, part, :, some], seen, part, some, scoring) for part in chosen
            ]
            mixed.append(_joined(pieces, 1))
        return _joined(mixed, 3).flatten(1, 2)

    def _used(self, segment: Segment, slots: int) -> int:
        """Counts slots of a segment's suffixes that hold anything, this step's token if it was written first."""
        state = self.state
        written = max(state.lengths[segment.rows.start : segment.rows.stop]) + (1 if self.counts is None else 0)
        return min(written, slots) if state.keys or self.counts is None else 0

    @_once
    def _hidden_keys(self, segment: Segment, layer: int) -> Tensor | None:
        """Returns the keys outside of prompt, suffix, past or window, (rows, N, K) bool; None if none."""
        state, block, window = self.state, segment.block, self.state.windows[layer]
        lengths = [state.lengths[row] for row in segment.rows]
        prompts = list(map(attrgetter("base"), state.origins[segment.rows.start : segment.rows.stop]))
        dropped = [block.dropped[layer][prompt] for prompt in segment.prompts]
        width = block.keys[layer].shape[2]
        farthest = max(prompt + length for prompt, length in zip(prompts, lengths, strict=True)) + self.tokens
        padded = any(first < 0 or first + width > prompt for first, prompt in zip(dropped, prompts, strict=True))
        alike = self.counts is None and not padded and len({*lengths}) == 1
        if alike and (window is None or farthest <= window):
            return None
        now_BN, place_BK = self._places(segment, layer)
        return self._unseen(place_BK, now_BN, window, place_BK.shape[1] - self.tokens)  # those read are the last keys

    def _unseen(self, place_BK: Tensor, now_BN: Tensor, window: int | None, first: int) -> Tensor:
        """Returns which keys tokens do not see, (rows, N, K) bool; of the tokens read, ``first`` is the first key."""
        hidden_BNK = (place_BK < 0)[:, None] | (place_BK[:, None] > now_BN[:, :, None])
        for span in self.images:
            hidden_BNK[:, span, first + span.start : first + span.stop] = False
        if window is not None:
            hidden_BNK = hidden_BNK | (place_BK[:, None] <= now_BN[:, :, None] - window)
        return hidden_BNK

    def _places(self, segment: Segment, layer: int) -> tuple[Tensor, Tensor]:
        """Returns the place of each token read (rows, N) and of each key (rows, K) in its row; -1 for padding."""
        state, block, ring = self.state, segment.block, self.state.slots_of(layer)
        used = self._used(segment, ring)
        dropped = [block.dropped[layer][prompt] for prompt in segment.prompts]
        prompt_B1, length_B1, first_B1 = state.counts[:, segment.rows.start : segment.rows.stop, None].unbind(0)
        dropped_B1 = state.constant(tuple(dropped)) if any(dropped) else 0
        now_BN = self._from(first_B1)
        place_BL = dropped_B1 + torch.arange(block.keys[layer].shape[2], device=state.device)
        places = [torch.where((place_BL >= 0) & (place_BL < prompt_B1), place_BL, -1)]
        if used:
            last_B1 = length_B1 - (0 if self.counts is None else 1)
            # slot s of the ring holds the last token written there
            token_BS = last_B1 - (last_B1 - torch.arange(used, device=state.device)) % ring
            places.append(torch.where(token_BS >= 0, prompt_B1 + token_BS, -1))
        if self.counts is not None:
            places.append(now_BN)
        return now_BN, torch.cat(places, 1)

    @_once
    def _biased(self, segment: Segment, layer: int, module: nn.Module, by_place: int = 0) -> Tensor:
        """Returns what T5 adds to scores, (rows or 1, H × R, N, K), for keys in order or in ``by_place`` slots."""
        farthest = max(self.state.positions) + self.tokens
        if not by_place and self._is_plain(segment, layer):  # keys lie in the order of their tokens, the last nearest
            table_1HNW = self._bias_table(module, farthest)
            return table_1HNW[..., table_1HNW.shape[3] - farthest :]
        now_BN, place_BK = self._places(segment, layer)
        if by_place:
            place_BK = torch.arange(by_place, device=place_BK.device).expand(len(place_BK), -1)
        if len({self.state.lengths[row] for row in segment.rows}) == 1 and len({*segment.block.lengths}) == 1:
            now_BN, place_BK = now_BN[:1], place_BK[:1]
        distance_BNK = (now_BN[:, :, None] - place_BK[:, None]).clamp_min(0)
        return self._bias_table(module, farthest)[0, :, 0].flip(-1)[:, distance_BNK].transpose(0, 1)

    def _is_plain(self, segment: Segment, layer: int) -> bool:
        """Whether one token is read by rows alike, whose keys are all their tokens in order."""
        width, used = segment.block.keys[layer].shape[2], self._used(segment, self.state.slots_of(layer))
        alike = self._hidden_keys(segment, layer) is None and self.counts is None
        return alike and {*self.state.bases} == {width} and max(self.state.positions) + 1 == width + used

    def _bias_table(self, module: Any, farthest: int) -> Tensor:
        """Returns the network's biases by distance from a last token to all before, (1, H × R, 1, W), nearest last."""
        table = self.state.constants.get(id(module))
        if table is None or table.shape[3] < farthest:
            most = whole_blocks(2 * farthest)  # each step asks for one more
            table = type(module).compute_bias(module, 1, most, device=self.state.device, past_seen_tokens=most - 1)
            self.state.constants[id(module)] = table
        return cast(Tensor, table)

    @_once
    def _hidden_source(self, segment: Segment, layer: int) -> Tensor | None:
        """Returns the padding of prompts that an encoder read, (rows, 1, L) bool; None if there is none."""
        source = cast(PromptBlock, segment.block.source)
        width, lengths = source.keys[layer].shape[2], [source.lengths[prompt] for prompt in segment.prompts]
        if min(lengths) == width:
            return None
        length_B11 = torch.tensor(lengths, device=self.state.device)[:, None, None]
        return torch.arange(width, device=self.state.device) >= length_B11


def _has_kernel(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> bool:
    """Whether a kernel gives log-sum-exps too; not in half precision, where rows read again must get the same bits."""
    kinds = {query.dtype, key.dtype, value.dtype}
    alike = query.shape[-1] == key.shape[-1] == value.shape[-1]
    alike = alike and kinds in ({torch.float32}, {torch.float64})
    return device_type_of(query) == "cpu" and alike and scoring.soft_cap is None and scoring.sinks is None


def _kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Returns attention (B, H × R, N, D) and its log-sum-exp (B, H × R, N), by the CPU's flash kernel."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(query, key, value, 0.0, False, attn_mask=mask, scale=scoring.scale)
    return out, lse


def _added(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a mask to be added to scores: half of the lowest number, so that a row that sees nothing weighs 0."""
    return torch.zeros((), dtype=dtype, device=hidden.device).where(~hidden, torch.finfo(dtype).min / 2)


def _merged(out: Tensor, *others: Tensor) -> Tensor:
    """Merges attention over prompts and suffixes: ``o = o_p + sigmoid(L_s - L_p) (o_s - o_p)``, (B, N, H × R, D)."""
    if others:
        lse, own_out, own_lse = others
        out = torch.lerp(out, own_out, torch.sigmoid(own_lse - lse).to(out.dtype))
    return out.transpose(1, 2).contiguous()


def _joined(parts: list[Tensor], axis: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _attend_source_by_place(segment: Segment, keys: Tensor, values: Tensor, query: Tensor, scoring: Scoring) -> Tensor:
    """Attends over what an encoder read, a prompt at a time, so that no second copy of all sources is made."""
    lengths, mixed, start = cast(PromptBlock, segment.block.source).lengths, [], 0
    sight = fixed_split.Sight(scoring.scale, scoring.soft_cap)
    for prompt, run in groupby(segment.prompts):
        read = slice(prompt, prompt + 1), slice(None), slice(lengths[prompt])
        key, value = (as_floats(part[read], query.dtype) for part in (keys, values))
        rows = query[start : start + len(list(run))].transpose(0, 1)  # all see the same: queries of one product
        found = fixed_split.attend(rows.flatten(1, 2)[None], key, value, sight, sinks=scoring.sinks)
        mixed.append(found[0].view(*rows.shape[:3], -1).transpose(0, 1))
        start += rows.shape[1]
    return torch.cat(mixed)


def _attend_heads(
    segment: Segment, query_BHRND: Tensor, seen: _Seen, chosen: slice, tokens: slice, scoring: Scoring
) -> Tensor:
    """Attends for some heads and tokens of a segment, (rows, H, R, N, D)."""
    keys, values = ([part[:, chosen] for part in parts] for parts in (seen.keys, seen.values))
    dtype = query_BHRND.dtype if values[0].dtype == torch.int8 else values[0].dtype
    shape, query_BHXD = query_BHRND.shape[:4], query_BHRND.flatten(2, 3)
    scores = [segment.by_row(segment.grouped(query_BHXD) @ as_floats(keys[0], dtype).mT)]
    for part in keys[1:]:
        scores.append(query_BHXD @ as_floats(part, dtype).mT)
    split = torch.unflatten(_joined(scores, 3), 2, shape[2:])  # (B, H, R, N, K)
    del scores  # joined, and the largest thing here
    if scoring.soft_cap is not None:
        split = torch.tanh(split / scoring.soft_cap) * scoring.soft_cap
    if seen.bias is not None:
        split = split + torch.unflatten(seen.bias, 1, (-1, shape[2]))[:, chosen, :, tokens]
    if seen.hidden_BNK is not None:  # where an encoder reads, all tokens see the same
        hidden_BNK = seen.hidden_BNK if seen.hidden_BNK.shape[1] == 1 else seen.hidden_BNK[:, tokens]
        split = split.masked_fill_(hidden_BNK[:, None, None], -math.inf)
    width = split.shape[4]
    if scoring.sinks is not None:
        sink = scoring.sinks.view(-1, shape[2])[None, chosen, :, None, None].to(split.dtype).expand(*shape, 1)
        split = torch.cat([split, sink], 4)
    wide = torch.promote_types(split.dtype, torch.float32)
    weights = torch.softmax(split, 4, dtype=wide)[..., :width].to(dtype).flatten(2, 3)
    del split
    first, *others = torch.split(weights, [part.shape[2] for part in values], 3)
    mixed = segment.by_row(segment.grouped(first) @ as_floats(values[0], dtype))
    for part, value in zip(others, values[1:], strict=True):
        mixed = mixed + part @ as_floats(value, dtype)
    return torch.unflatten(mixed, 2, shape[2:])


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Has the reading in force attend; the form that transformers asks of an implementation."""
    if torch.compiler.is_compiling():
        return _compiled_attention(module, query, key, value, attention_mask, options), None
    reading: Reading | None = getattr(_active, "reading", None)
    if reading is None:
        raise MemsafeError(
            f"{type(module).__name__} runs while another thread draws completions with a network of the same config. "
            "Wait for the rollout, or give the second network a copy of the config."
        )
    adds_bias, scoring = options.get("position_bias") is not None, _scoring(module, query, attention_mask, options)
    biased, source = is_biased(module), None if reading.sources is None else reading.sources.layer_of(key)
    if source is not None and not biased:
        return reading.attend_source(source, query, scoring), None
    if biased and source is None:
        reading.bias = module
    if (adds_bias and reading.bias is None) or (biased and source is not None):
        raise NotImplementedError(f"{type(module).__name__} adds a bias to its scores that grouped rows do not know")
    scoring = scoring._replace(bias=reading.bias if adds_bias else None)
    return _merged(*reading.attend(reading.cache.current, query, key, value, scoring)), None


def _scoring(module: nn.Module, query: Tensor, attention_mask: Tensor | None, options: dict[str, Any]) -> Scoring:
    if attention_mask is not None:
        raise NotImplementedError(f"{type(module).__name__} attends in a way that grouped rows do not know")
    scale = options.get("scaling")
    return Scoring(query.shape[-1] ** -0.5 if scale is None else scale, options.get("softcap"), options.get("s_aux"))


def _rows_of(values: Tensor, segment: Segment) -> Tensor:
    return values[segment.rows.start : segment.rows.stop]


def _compiled_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Attends inside a compiled step: kernels over rows of any length are one call, what merges them is compiled."""
    scoring = _scoring(module, query, attention_mask, options)
    crosses = key.shape[2] == 0  # a mark: the keys lie in the prompts' blocks
    adds_bias = not crosses and options.get("position_bias") is not None
    settings = scoring.sinks, module.layer_idx, scoring.scale, scoring.soft_cap, adds_bias, crosses
    found = torch.ops.memsafe_rl.attend(query, key, value, *settings)
    return _merged(found[0]) if crosses else _merged(*found)


def _attend_in_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    layer: int,
    scale: float,
    soft_cap: float | None,
    adds_bias: bool,
    crosses: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Has the reading in force attend; where that needs no merging, the second part weighs nothing."""
    reading: Reading = _active.reading
    scoring = Scoring(scale, soft_cap, sinks, reading.bias if adds_bias else None)
    if crosses:
        whole = reading.attend_source(layer, query, scoring).transpose(1, 2).contiguous()
        return whole, query.new_empty(0), query.new_empty(0), query.new_empty(0)
    found = reading.attend(layer, query, key, value, scoring)
    if len(found) == 1:
        like = torch.promote_types(query.dtype, torch.float32)
        nothing = query.new_zeros((*query.shape[:3], 1), dtype=like)
        found += [nothing, torch.zeros_like(found[0]), nothing - math.inf]
    out, lse, own_out, own_lse = (part.contiguous() for part in found)
    return out, lse, own_out, own_lse


def _attend_on_fakes(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns outputs (B, H × R, N, D) and log-sum-exps (B, H × R, N, 1) without values."""
    if not key.shape[2]:  # a mark: cross-attention has one part
        return query.new_empty(query.shape), query.new_empty(0), query.new_empty(0), query.new_empty(0)
    outs, lses = (*query.shape[:3], value.shape[3]), (*query.shape[:3], 1)
    like = torch.promote_types(query.dtype, torch.float32)
    out, lse = (query.new_empty(outs), query.new_empty(lses, dtype=like))
    return out, lse, torch.empty_like(out), torch.empty_like(lse)


_LIBRARY: Any = torch.library.Library("memsafe_rl", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor? sinks, int layer, float scale, float? soft_cap, "
    "bool adds_bias, bool crosses) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),  # which keys it reads follows from lengths on the host
)
_LIBRARY.impl("attend", _attend_in_step, "CompositeExplicitAutograd")
torch.library.register_fake("memsafe_rl::attend", _attend_on_fakes, lib=_LIBRARY)

ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
