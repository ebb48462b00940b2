"""A cache of keys and values in which the rows of a group share their prompt, and rows join and leave freely.

A prompt is read once and kept once, however many rows follow it; what a row has drawn lies in its own suffix. A row's
attention runs over both (`shared_prefix_attention`). Lengths are host integers, so nothing here reads a tensor.

Axes: ``B`` rows, ``P`` prompts of a block, ``H`` key/value heads, ``L`` slots of a prompt, ``S`` slots of a suffix,
``N`` tokens read in one forward, ``D`` width of a head.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from memsafe_rl.accounting import charge, claim
from memsafe_rl.types import CACHE_SCALE_BYTES, Component, whole_blocks

_LARGEST_INT8 = 127
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(eq=False)
class PromptBlock:
    """Keys and values of prompts that were read together; several states may hold it."""

    lengths: tuple[int, ...]  # tokens of each of the P prompts
    keys: list[Tensor]  # per layer (P, H, L, D), padded
    values: list[Tensor]  # per layer, likewise
    # per layer, tokens of each prompt that lie before slot 0; below 0 where padding lies there
    dropped: list[tuple[int, ...]]
    kept_whole: bool = False  # whether rows may still begin at these prompts, so none of them may be freed
    # what an encoder read for these prompts, which rows attend to apart from their own tokens; None without an encoder.
    # Where there is one, ``lengths`` count what the decoder read before a row's own tokens
    source: PromptBlock | None = None
    # rows that wait outside of any state and may go on at these prompts, so none of them may be freed either
    waiting: WeakSet[RowCache] = field(default_factory=WeakSet)

    @property
    def stays_whole(self) -> bool:
        """Whether none of it may be freed."""
        return self.kept_whole or bool(self.waiting)

    def tensors(self) -> Iterator[Tensor]:
        """Yields all keys and values."""
        yield from (*self.keys, *self.values)
        if self.source is not None:
            yield from self.source.tensors()

    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(part.nbytes for part in self.tensors())

    def narrow(self, prompts: Sequence[int]) -> None:
        """Keeps some prompts only, a layer at a time, so that little is there twice."""
        index = torch.tensor(prompts, device=self.keys[0].device)
        with charge(Component.KV_CACHE):
            for store in (self.keys, self.values):
                for layer, part in enumerate(store):
                    store[layer] = part.index_select(0, index)
        self.lengths = tuple(self.lengths[p] for p in prompts)
        self.dropped = [tuple(layer[p] for p in prompts) for layer in self.dropped]
        if self.source is not None:
            self.source.narrow(prompts)

    def trim(self, windows: Sequence[int | None], drawn: int) -> None:
        """Frees of each windowed layer what no row that has drawn so many tokens can see."""
        for layer, window in enumerate(windows):
            kept = self.keys[layer].shape[2] if window is None else max(1, window - 1 - drawn)
            if kept < self.keys[layer].shape[2]:
                starts = tuple(length - kept for length in self.lengths)
                for store in (self.keys, self.values):
                    store[layer] = _shifted(store[layer], starts, self.dropped[layer], kept)
                self.dropped[layer] = starts


class Origin(NamedTuple):
    """Where a row begins."""

    block: PromptBlock  # holds its prompt
    prompt: int  # index of its prompt in the block
    base: int  # tokens of the prompt that it has read


@dataclass(eq=False)
class RowCache:
    """Keys and values of a row that waits outside of any state, in storage of their own except for its prompt's."""

    rows = 1
    block: PromptBlock  # holds its prompt
    prompt: int  # index of its prompt in the block
    base: int  # tokens of the prompt that belong to it
    length: int  # tokens behind them
    # per layer (1, H, S, D), no more than its tokens; empty where there are none
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)  # per layer, likewise

    def __post_init__(self) -> None:
        self.block.waiting.add(self)

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values it has, the prompt's included."""
        return self.base + self.length

    def nbytes(self) -> int:
        """Bytes of its own, without its prompt's."""
        return sum(part.nbytes for part in (*self.keys, *self.values))


@dataclass(frozen=True)
class Segment:
    """Neighbouring rows whose prompts lie in one block."""

    block: PromptBlock  # the block
    rows: range  # the rows
    prompts: tuple[int, ...]  # for each of them, the index of its prompt in the block
    share: int  # most rows of one prompt
    # (rows,) int64, where each row lies among P × share places; None where they lie in that very order
    places: Tensor | None
    takes: Tensor | None  # (P × share,) int64, the row at each place, any row where there is none; None like ``places``

    def grouped(self, values: Tensor) -> Tensor:
        """Lays rows (rows, H, X, Y) out by prompt, (P, H, share × X, Y); a view where X is 1 and they lie in order."""
        taken = values if self.takes is None else values.index_select(0, self.takes)
        return torch.unflatten(taken, 0, (-1, self.share)).transpose(1, 2).flatten(2, 3)

    def by_row(self, values: Tensor) -> Tensor:
        """Takes back what `grouped` did."""
        rows = torch.unflatten(values, 2, (self.share, -1)).transpose(1, 2).flatten(0, 1)
        return rows if self.places is None else rows.index_select(0, self.places)


@dataclass
class SharedPrefixState:
    """Rows being decoded."""

    windows: tuple[int | None, ...]  # per layer, its attention window in tokens, None for full attention
    origins: tuple[Origin, ...]  # where each of the B rows begins
    lengths: list[int]  # for each row, tokens in its suffix
    device: torch.device  # where the network computes
    keys: list[Tensor] = field(default_factory=list)  # per layer (B, H, S, D), suffixes; empty while no row has any
    values: list[Tensor] = field(default_factory=list)  # per layer, likewise
    capacity: int = 0  # slots of a suffix, where no window makes it shorter
    # what is made of the weights and of lengths once and used in every step; states made of this one share it, and
    # none outlives a rollout, within which no weight moves
    constants: dict[Any, Any] = field(default_factory=dict)
    _segments: tuple[Segment, ...] | None = None
    _counts: Tensor | None = None

    @classmethod
    def of_prompts(cls, block: PromptBlock, windows: tuple[int | None, ...], device: torch.device) -> SharedPrefixState:
        """Returns one row for each prompt of a block; they have drawn nothing."""
        origins = tuple(Origin(block, prompt, length) for prompt, length in enumerate(block.lengths))
        return cls(windows, origins, [0] * len(origins), device)

    @classmethod
    def resumed(
        cls,
        rows: Sequence[RowCache],
        tokens: Sequence[int],
        more: Sequence[int],
        windows: tuple[int | None, ...],
        device: torch.device,
    ) -> SharedPrefixState:
        """Puts rows that waited, of which so many tokens hold, into a state with room for more."""
        pairs = zip(rows, tokens, strict=True)
        origins = tuple(Origin(row.block, row.prompt, min(row.base, count)) for row, count in pairs)
        lengths = [count - origin.base for count, origin in zip(tokens, origins, strict=True)]
        state = cls(windows, origins, lengths, device)
        if any(lengths):
            state.capacity = whole_blocks(max(length + count for length, count in zip(lengths, more, strict=True)))
            state._refill(rows)
        return state

    @property
    def rows(self) -> int:
        """Sequences held."""
        return len(self.origins)

    @property
    def bases(self) -> tuple[int, ...]:
        """For each row, the tokens of its prompt that it has read."""
        return tuple(origin.base for origin in self.origins)

    @property
    def positions(self) -> list[int]:
        """For each row, the position of the token it reads next."""
        return [base + length for base, length in zip(self.bases, self.lengths, strict=True)]

    @property
    def counts(self) -> Tensor:
        """Returns bases, lengths and positions on the device, (3, B) int64; taken there once while rows stay."""
        if self._counts is None:
            self._counts = torch.tensor([self.bases, self.lengths, self.positions], device=self.device)
        return self._counts

    def advance(self, counts: Sequence[int] | None = None) -> None:
        """Counts tokens that rows have read; one each where no counts are given."""
        read = [1] * self.rows if counts is None else counts
        self.lengths = [length + count for length, count in zip(self.lengths, read, strict=True)]
        if counts is not None:
            self._counts = None
        elif self._counts is not None:
            self._counts[1:].add_(1)

    def constant(self, values: tuple[int, ...]) -> Tensor:
        """Returns whole numbers on the device, (B, 1) int64; taken there when they are first asked for."""
        if values not in self.constants:
            self.constants[values] = torch.tensor(values, device=self.device)[:, None]
        return cast(Tensor, self.constants[values])

    def segments(self) -> tuple[Segment, ...]:
        """Cuts the rows where the block changes."""
        if self._segments is None:
            runs = itertools.groupby(range(self.rows), key=lambda row: id(self.origins[row].block))
            self._segments = tuple(map(self._segment, [list(run) for _, run in runs]))
        return self._segments

    def tensors(self) -> Iterator[Tensor]:
        """Yields all keys and values held."""
        for block in self.prompt_blocks():
            yield from block.tensors()
        yield from (*self.keys, *self.values)

    def nbytes(self) -> int:
        """Bytes of all keys and values held."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors())

    def prompt_blocks(self) -> list[PromptBlock]:
        """Returns the blocks that the rows follow, each once."""
        return list({id(origin.block): origin.block for origin in self.origins}.values())

    def select(self, rows: Sequence[int]) -> SharedPrefixState:
        """Keeps, drops, repeats or reorders rows; suffixes shrink to the longest that is left."""
        state = self._beginning([self.origins[row] for row in rows], [self.lengths[row] for row in rows])
        if state.capacity:
            state._refill([self], torch.tensor(rows, device=self.device))
        state.give_up_idle_prompts()
        return state

    def _beginning(self, origins: Sequence[Origin], lengths: list[int]) -> SharedPrefixState:
        """Returns a state of other rows, with no suffixes yet."""
        capacity = whole_blocks(max(lengths, default=0))
        return SharedPrefixState(
            self.windows, tuple(origins), lengths, self.device, capacity=capacity, constants=self.constants
        )

    def join(self, other: SharedPrefixState) -> SharedPrefixState:
        """Puts the rows of another state behind this one's."""
        state = self._beginning(self.origins + other.origins, self.lengths + other.lengths)
        state.capacity = max(self.capacity, other.capacity)
        if state.capacity:
            state._refill([self, other])
        return state

    def set_aside(self, leaving: Mapping[int, int], staying: Sequence[int]) -> tuple[SharedPrefixState, list[RowCache]]:
        """Takes rows out, to wait outside of any state, a tensor at a time, so that no more is ever there twice."""
        rest = self._beginning([self.origins[row] for row in staying], [self.lengths[row] for row in staying])
        aside = [RowCache(*self.origins[row], length) for row, length in leaving.items()]
        index = torch.tensor(staying, device=self.device) if rest.capacity else None
        with charge(Component.KV_CACHE):
            for name in ("keys", "values"):
                store: list[Tensor] = getattr(self, name)
                for layer, held in enumerate(store):
                    for row, cache in zip(leaving, aside, strict=True):
                        if cache.length:
                            getattr(cache, name).append(held[row : row + 1, :, : cache.length].clone())
                    if index is not None:
                        getattr(rest, name).append(held[:, :, : rest.slots_of(layer)].index_select(0, index))
                    store[layer] = held.new_empty(0)
        if staying:
            rest.give_up_idle_prompts()
        return rest, aside

    def reserve(self, tokens: int | Sequence[int]) -> None:
        """Makes room for more tokens."""
        counts = [tokens] * self.rows if isinstance(tokens, int) else tokens
        needed = max((length + count for length, count in zip(self.lengths, counts, strict=True)), default=0)
        if needed <= self.capacity:
            return
        self.capacity = whole_blocks(needed)
        if self.keys:
            before = replace(self)
            self.keys, self.values = [], []
            self._refill([before])
        for block in self.prompt_blocks():
            if not block.stays_whole:
                rows = [row for row in zip(self.origins, self.lengths, strict=True) if row[0].block is block]
                drawn = min(origin.base + more - block.lengths[origin.prompt] for origin, more in rows)
                block.trim(self.windows, max(0, drawn))  # the fewest tokens that a row has behind its whole prompt

    def replace_prompt(self, block: PromptBlock) -> None:
        """Has every row follow the only prompt of another block."""
        self.origins = (Origin(block, 0, block.lengths[0]),) * self.rows
        self._segments, self._counts, self.constants = None, None, {}  # among these, what was made for the last block

    def stretch(self, tokens: int) -> bool:
        """Widens every row by so many tokens, with keys and values that mean nothing."""
        self.reserve(tokens)
        self.lengths, self._counts = [length + tokens for length in self.lengths], None
        return True

    def stretch_prompt(self, tokens: int) -> None:
        """Widens the only prompt by so many tokens, with keys and values that mean nothing."""
        block, read = self.origins[0].block, []
        for keys, values, window in zip(block.keys, block.values, self.windows, strict=True):
            slots = tokens if window is None else min(tokens, max(1, window - 1))
            read.append((keys[:, :, :1].expand(-1, -1, slots, -1), values[:, :, :1].expand(-1, -1, slots, -1)))
        self.replace_prompt(longer_block(block, read, tokens, self.windows))

    def slots_of(self, layer: int) -> int:
        """Slots of a layer's suffixes: a window is a ring."""
        window = self.windows[layer]
        return self.capacity if window is None else min(self.capacity, window)

    def places_of(self, slots: int, counts: Sequence[int] | None = None) -> int | Tensor:
        """Finds where new tokens go in layers of so many slots; the same for all of them."""
        if counts is None:
            if len(set(self.lengths)) == 1:
                return self.lengths[0] % slots
            rows = torch.arange(self.rows, device=self.device)
            return torch.stack([rows, torch.zeros_like(rows), self.counts[1] % slots])
        # Of a row's new tokens, a ring keeps the last ones.
        wanted = [
            (row, token, (length + token) % slots)
            for row, length in enumerate(self.lengths)
            for token in range(max(0, counts[row] - slots), counts[row])
        ]
        return torch.tensor(wanted, dtype=torch.int64, device=self.device).reshape(-1, 3).T

    def store(self, layer: int, keys_BHND: Tensor, values_BHND: Tensor, places: int | Tensor) -> None:
        """Writes new tokens behind what the rows hold; their lengths are counted by who reads the tokens."""
        if layer == len(self.keys):
            slots = self.slots_of(layer)
            with charge(Component.KV_CACHE):
                for store, new in ((self.keys, keys_BHND), (self.values, values_BHND)):
                    store.append(new.new_zeros((self.rows, new.shape[1], slots, new.shape[3])))
        if isinstance(places, int):  # both in one launch
            held_here = [store[layer][:, :, places] for store in (self.keys, self.values)]
            torch._foreach_copy_(held_here, [keys_BHND[:, :, 0], values_BHND[:, :, 0]])
        else:
            for held, new in ((self.keys[layer], keys_BHND), (self.values[layer], values_BHND)):
                rows, tokens, slots_of_tokens = places.unbind(0)
                one_each = new.shape[2] == 1 and len(rows) == self.rows
                held[rows, :, slots_of_tokens] = new[:, :, 0] if one_each else new[rows, :, tokens]

    def give_up_idle_prompts(self) -> None:
        """Frees prompts that no row follows any more, where they are at least half of a block."""
        for block in self.prompt_blocks():
            used = sorted({origin.prompt for origin in self.origins if origin.block is block})
            if block.stays_whole or 2 * len(used) > len(block.lengths):
                continue
            block.narrow(used)
            self.origins = tuple(
                origin._replace(prompt=used.index(origin.prompt)) if origin.block is block else origin
                for origin in self.origins
            )
            self._segments = None

    def _refill(self, sources: Sequence[SharedPrefixState | RowCache], index: Tensor | None = None) -> None:
        """Moves suffixes to stores of this state's size, tensor by tensor: no more is ever there twice."""
        with charge(Component.KV_CACHE):
            for name in ("keys", "values"):
                stores: list[list[Tensor]] = [getattr(source, name) for source in sources]
                for layer in range(max(map(len, stores))):
                    getattr(self, name).append(self._moved(layer, stores, [source.rows for source in sources], index))

    def _moved(self, layer: int, stores: Sequence[list[Tensor]], rows: list[int], index: Tensor | None) -> Tensor:
        slots, like = self.slots_of(layer), next(store[layer] for store in stores if store)
        if index is not None:
            moved = like[:, :, :slots].index_select(0, index)  # at once: rows taken apart would be there twice
            stores[0][layer] = like.new_empty(0)
            return moved
        moved = like.new_zeros((self.rows, like.shape[1], slots, like.shape[3]))
        for part, store in zip(torch.split(moved, rows), stores, strict=True):
            if store:
                used = min(slots, store[layer].shape[2])
                part[:, :, :used] = store[layer][:, :, :used]
                store[layer] = like.new_empty(0)
        return moved

    def _segment(self, rows: list[int]) -> Segment:
        block, prompts = self.origins[rows[0]].block, tuple(self.origins[row].prompt for row in rows)
        share = max(Counter(prompts).values())
        nth = [itertools.count(prompt * share) for prompt in range(len(block.lengths))]
        flat, takes = [next(nth[prompt]) for prompt in prompts], [0] * (len(block.lengths) * share)
        ordered = flat == list(range(len(takes)))
        for row, place in enumerate(flat):
            takes[place] = row
        return Segment(
            block=block,
            rows=range(rows[0], rows[-1] + 1),
            prompts=prompts,
            share=share,
            places=None if ordered else torch.tensor(flat, device=self.device),
            takes=None if ordered else torch.tensor(takes, device=self.device),
        )


class SharedPrefixCache(Cache):  # type: ignore[misc]
    """What a model's attention layers see as their cache: an empty one, which hands new keys and values on."""

    def __init__(
        self,
        *,
        reads_prompts: bool,
        in_8_bits: bool = False,
        lengths: Sequence[int] = (),
        windows: Sequence[int | None] = (),
    ) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.reads_prompts, self.in_8_bits, self.lengths, self.windows = reads_prompts, in_8_bits, lengths, windows
        self.read: list[tuple[Tensor, Tensor]] = []
        self.current = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes a layer's new keys and values."""
        self.current = layer_idx
        if not self.in_8_bits:
            keys, values = key_states, value_states
        else:
            keys, values = to_int8(key_states), to_int8(value_states)
        if not self.reads_prompts:
            return keys, values
        if layer_idx != len(self.read):
            raise NotImplementedError(f"layer {layer_idx} hands in its keys after {len(self.read)} layers")
        self.read.append((self._kept(keys, layer_idx), self._kept(values, layer_idx)))
        return as_floats(keys, key_states.dtype), as_floats(values, value_states.dtype)

    def _kept(self, states: Tensor, layer: int) -> Tensor:
        """Returns what rows may still see of keys or values."""
        window = self.windows[layer] if self.windows else None
        if window is None or states.shape[2] <= max(1, window - 1):
            return _kept(states)
        slots = max(1, window - 1)
        return _shifted(states, [length - slots for length in self.lengths], [0] * len(self.lengths), slots)


class SourceMarks(Cache):  # type: ignore[misc]
    """What cross-attention layers see as their filled cache: marks, since the keys lie in the prompts' blocks."""

    def __init__(self, layers: int, device: torch.device) -> None:
        marked = [DynamicLayer() for _ in range(layers)]
        for layer in marked:
            layer.keys = layer.values = torch.empty((1, 1, 0, 1), device=device)
        super().__init__(layers=marked)
        self._layers = {id(layer.keys): index for index, layer in enumerate(marked)}

    def layer_of(self, key: Tensor) -> int | None:
        """Tells which layer a mark belongs to; None if it is no mark."""
        return self._layers.get(id(key))


def block_of(read: Sequence[tuple[Tensor, Tensor]], lengths: Sequence[int]) -> PromptBlock:
    """Makes a block of prompts that were read, padded on the right, in one forward."""
    return PromptBlock(
        lengths=tuple(lengths),
        keys=[keys for keys, _ in read],
        values=[values for _, values in read],
        dropped=[_starts(lengths, keys.shape[2]) for keys, _ in read],
    )


def longer_block(
    block: PromptBlock, read: list[tuple[Tensor, Tensor]], tokens: int, windows: Sequence[int | None]
) -> PromptBlock:
    """Puts the next tokens of a block's only prompt behind it."""
    lengths = (block.lengths[0] + tokens,)
    longer = PromptBlock(lengths, block.keys, block.values, list(block.dropped))
    read.reverse()
    for layer in range(len(read)):
        keys, values = read.pop()
        if keys.shape[2] < tokens:
            longer.keys[layer], longer.values[layer] = keys, values
            longer.dropped[layer] = _starts(lengths, keys.shape[2])
            continue
        with charge(Component.KV_CACHE):
            longer.keys[layer] = torch.cat([longer.keys[layer], keys], 2)
            del keys
            longer.values[layer] = torch.cat([longer.values[layer], values], 2)
    longer.trim(windows, 0)
    return longer


def _starts(lengths: Sequence[int], held: int) -> tuple[int, ...]:
    """Returns for each prompt the place of slot 0, where so many slots hold all of the longest or the last of each."""
    return tuple(length - held if held < max(lengths) else 0 for length in lengths)


def _shifted(part: Tensor, starts: Sequence[int], dropped: Sequence[int], kept: int) -> Tensor:
    """Copies from each prompt so many slots from its start on; what lies before slot 0 is zeros."""
    with charge(Component.KV_CACHE):
        shifted = part.new_zeros((*part.shape[:2], kept, part.shape[3]))
    for prompt, (start, first) in enumerate(zip(starts, dropped, strict=True)):
        begin = max(0, first - start)
        source = part[prompt, :, start + begin - first : start + kept - first]
        shifted[prompt, :, begin : begin + source.shape[1]] = source
    return shifted


def _kept(states: Tensor) -> Tensor:
    """Returns keys or values in storage of their own, with rows, heads and slots in this order."""
    with charge(Component.KV_CACHE):
        kept = states.contiguous()
        if kept.untyped_storage().nbytes() > kept.nbytes:
            kept = kept.clone()
    claim(Component.KV_CACHE, [kept])
    return kept


def to_int8(values: Tensor) -> Tensor:
    """Rounds vectors to whole multiples of a 127th of their largest element, the scale behind them in the same row.

    ``s = max|x| / 127``, ``q = round(x / s)``: symmetric 8-bit rounding, the scale by vector (Dettmers et al.,
    arXiv:2208.07339, Eq. 1).
    """
    wide = values.float()
    scale = wide.abs().amax(-1, keepdim=True).div_(_LARGEST_INT8).clamp_min_(_SMALLEST_SCALE)
    return torch.cat([wide.div(scale).round_().to(torch.int8), scale.contiguous().view(torch.int8)], -1)


def from_int8(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns vectors back as floats, ``q · s``."""
    scale = values[..., -CACHE_SCALE_BYTES:].contiguous().view(torch.float32)
    return values[..., :-CACHE_SCALE_BYTES].float().mul_(scale).to(dtype)


def as_floats(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns cached vectors as floats, whether they are kept in 8 bits or not."""
    return from_int8(values, dtype) if values.dtype == torch.int8 else values
