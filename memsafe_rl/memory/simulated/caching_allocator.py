"""PyTorch's CUDA caching allocator by its own rules, without a card: which bytes it reserves for a run's tensors.

A card runs out of *reserved* bytes: the allocator takes whole segments from the driver, cuts blocks out of them, and
gives back only what no block lies in. The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` and
``c10/core/AllocatorConfig.h`` of PyTorch 2.11 to 2.13, for one stream and no CUDA graph.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch

from memsafe_rl.errors import ConfigError
from memsafe_rl.units import format_bytes

_MIB = 2**20
_UNIT = 512  # all blocks are multiples of it (kMinBlockSize)
_MOST_SMALL = _MIB  # the largest request that the pool of small blocks serves (kSmallSize)
_SMALL_SEGMENT = 2 * _MIB  # size of the segments in that pool (kSmallBuffer)
_LEAST_OWN_SEGMENT = 10 * _MIB  # the smallest request that gets a segment of its own (kMinLargeAlloc)
_SEGMENT_UNIT = 2 * _MIB  # such segments are multiples of it (kRoundLarge)
_ADDRESSES = 2**50  # addresses of an expandable segment: more than any card fills
_NO_LIMIT = 2**63
_SIZES = {
    "max_split_size_mb": "max_split_bytes",
    "max_non_split_rounding_mb": "max_rounding_bytes",
    "large_segment_size_mb": "large_segment_bytes",
}
_LEFT_OUT = {  # settings that matter but are not modelled, and their defaults
    "backend": "native",
    "garbage_collection_threshold": "0",
    "per_process_memory_fraction": "1.0",
    "roundup_power2_divisions": "",
    "throw_on_cudamalloc_oom": "False",
}


@dataclass(frozen=True)
class AllocatorSettings:
    """What ``PYTORCH_CUDA_ALLOC_CONF`` says, as far as it decides which bytes are reserved."""

    expandable_segments: bool = False  # segments grow page by page, and pages without a block can go back
    max_split_bytes: int = _NO_LIMIT  # int, bytes; blocks as large as this are never cut
    max_rounding_bytes: int = 20 * _MIB  # int, bytes; how much larger than a request such a block may be
    large_segment_bytes: int = 20 * _MIB  # int, bytes; segments for requests between 1 and 10 MiB
    left_out: tuple[str, ...] = ()  # settings in force that the model does not know

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> AllocatorSettings:
        """Reads the allocator's settings from the variable that PyTorch would read, its defaults where it is unset."""
        names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        variable = next((name for name in names if name in environment), None)
        if variable is None:
            return cls()
        text = "".join(environment[variable].split())
        found = dict(re.findall(r"(\w+):(\[[^]]*\]|[^,]*)", text))
        known: dict[str, Any] = {}
        try:
            if "expandable_segments" in found:
                known["expandable_segments"] = {"True": True, "False": False}[found["expandable_segments"]]
            known |= {field: int(found[name]) * _MIB for name, field in _SIZES.items() if name in found}
        except (KeyError, ValueError):
            raise ConfigError(f"{variable} is {text!r}, which PyTorch refuses. Correct it, or unset it.") from None
        unmodelled = (f"{name}:{found[name]}" for name, plain in _LEFT_OUT.items() if found.get(name, plain) != plain)
        return cls(**known, left_out=tuple(unmodelled))


class Block:
    """A stretch of a segment: handed out, free, or (of an expandable segment) without memory behind it."""

    __slots__ = ("address", "after", "allocated", "before", "mapped", "origin", "pool", "size")

    def __init__(self, pool: _Pool, address: int, size: int, origin: int | None) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.origin = origin  # where its expandable segment begins; None in other segments
        self.allocated, self.mapped = False, True
        self.before: Block | None = None
        self.after: Block | None = None

    def cut(self, size: int) -> Block:
        """Shortens the block to a size, and gives the rest."""
        rest = Block(self.pool, self.address + size, self.size - size, self.origin)
        rest.before, rest.after, rest.mapped = self, self.after, self.mapped
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest

    def swallow(self, other: Block) -> None:
        """Takes a neighbour's bytes over."""
        if other is self.before:
            self.address, self.before = other.address, other.before
            if self.before is not None:
                self.before.after = self
        else:
            self.after = other.after
            if self.after is not None:
                self.after.before = self
        self.size += other.size


class _Pool:
    """Blocks without a tensor, small and large ones apart."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.free: list[tuple[int, int, Block]] = []  # by size, then address
        self.unmapped: list[tuple[int, Block]] = []  # by address


@dataclass(slots=True)
class Reserved:
    """The highest counts of some stretch of time, in bytes."""

    reserved: int = 0  # int, bytes taken from the driver
    needed: int = 0  # int, bytes of them that could not have been given back
    allocated: int = 0  # int, bytes of blocks handed out

    def over(self, other: Reserved) -> Reserved:
        """Returns the higher of each count."""
        return Reserved(*map(max, astuple(self), astuple(other)))


class CachingAllocator:
    """Counts what PyTorch's allocator would reserve on a CUDA device, up to a limit, for the blocks it is asked for."""

    def __init__(self, settings: AllocatorSettings | None = None, limit_bytes: int | None = None) -> None:
        self.settings = settings or AllocatorSettings()
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0
        self.allocated_bytes = 0
        self.retries = 0  # allocations that succeeded, or failed, after all that is free had gone back
        self.refusals = 0
        self.peak = Reserved()
        self._returnable = 0
        self._small, self._large = _Pool(small=True), _Pool(small=False)
        self._next_address = _ADDRESSES

    @property
    def needed_bytes(self) -> int:
        """Reserved bytes that could not be given back now."""
        return self.reserved_bytes - self._returnable

    def restart_peak(self) -> Reserved:
        """Starts a new peak at what is held now, and gives the old one."""
        before, self.peak = self.peak, Reserved()
        self._note_peak()
        return before

    def allocate(self, size: int) -> Block:
        """Hands out a block of at least so many bytes; refuses where the limit binds after all free ones went back."""
        rounded = -(-size // _UNIT) * _UNIT
        pool = self._small if rounded <= _MOST_SMALL else self._large
        block = self._find(pool, rounded) or self._new(pool, rounded)
        if block is None:
            self.refusals += 1
            raise torch.OutOfMemoryError(
                f"Simulated device out of memory. Tried to allocate {rounded} bytes. {self.allocated_bytes} bytes are "
                f"live, {self.reserved_bytes} are reserved, and the limit of {self.limit_bytes} bytes "
                f"({format_bytes(self.limit_bytes or 0)}) would be passed."
            )
        rest = block.size - rounded
        if pool.small or self.settings.expandable_segments:
            cuts = rest >= _UNIT
        else:
            cuts = rest > _MOST_SMALL and rounded < self.settings.max_split_bytes
        if cuts:
            self._put(block.cut(rounded))
        block.allocated = True
        self.allocated_bytes += block.size
        self._note_peak()
        return block

    def free(self, block: Block) -> None:
        """Takes a block back."""
        block.allocated = False
        self.allocated_bytes -= block.size
        self._put(self._merged(block))

    def empty_cache(self) -> None:
        """Gives all segments back in which no block is handed out, and all such pages of expandable ones."""
        for pool in (self._large, self._small):
            for _, _, block in pool.free.copy():
                if block.origin is not None:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    self._give_back(block)

    def _note_peak(self) -> None:
        peak = self.peak
        peak.reserved = max(peak.reserved, self.reserved_bytes)
        peak.needed = max(peak.needed, self.needed_bytes)
        peak.allocated = max(peak.allocated, self.allocated_bytes)

    def _find(self, pool: _Pool, size: int) -> Block | None:
        """Takes the smallest free block that is large enough, of equal ones the first."""
        free, most = pool.free, self.settings.max_split_bytes
        place = bisect_left(free, (size,))
        if place == len(free):
            return None
        if self.settings.expandable_segments:
            # The end of a segment counts as large as it may grow, and is left for what fits nowhere else.
            while place + 1 < len(free) and _room(free[place + 1][2]) < _room(free[place][2]):
                place += 1
        block = free[place][2]
        if (block.size >= most) if size < most else (block.size >= size + self.settings.max_rounding_bytes):
            return None
        self._take(block)
        return block

    def _new(self, pool: _Pool, size: int) -> Block | None:
        """Takes a segment from the driver, once more after some cached ones have gone back, and after all have."""
        block = self._grow(pool, size)
        if block is None and self._give_back_enough(pool, size):
            block = self._grow(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._grow(pool, size)
        return block

    def _grow(self, pool: _Pool, size: int) -> Block | None:
        """Takes a segment from the driver if the limit allows it."""
        if pool.small:
            segment = _SMALL_SEGMENT
        elif size < _LEAST_OWN_SEGMENT:
            segment = self.settings.large_segment_bytes
        else:
            segment = -(-size // _SEGMENT_UNIT) * _SEGMENT_UNIT
        if self.limit_bytes is not None and self.reserved_bytes + segment > self.limit_bytes:
            return None
        if self.settings.expandable_segments:
            return self._expand(pool, size)
        self.reserved_bytes += segment
        self._next_address += segment
        return Block(pool, self._next_address - segment, segment, None)

    def _give_back_enough(self, pool: _Pool, size: int) -> bool:
        """Gives back blocks too large to be cut, as many as a request asks for; whether that sufficed."""
        most = self.settings.max_split_bytes
        if most == _NO_LIMIT or self.settings.expandable_segments:
            return False
        wanted = max(size, most)
        place = bisect_left(pool.free, (wanted,))
        if place < len(pool.free):
            self._give_back(pool.free[place][2])
            return True
        given = 0
        while given < wanted and pool.free and pool.free[-1][0] >= most:
            given += pool.free[-1][0]
            self._give_back(pool.free[-1][2])
        return given >= wanted

    def _give_back(self, block: Block) -> None:
        self._take(block)
        self.reserved_bytes -= block.size

    def _put(self, block: Block) -> None:
        """Enters a block among the free ones."""
        insort(block.pool.free, (block.size, block.address, block))
        self._returnable += self._spare(block)

    def _take(self, block: Block) -> None:
        """Takes a block from the free ones."""
        free = block.pool.free
        del free[bisect_left(free, (block.size, block.address))]
        self._returnable -= self._spare(block)

    def _spare(self, block: Block) -> int:
        """Bytes of a free block that could go back to the driver."""
        if block.origin is None:
            return block.size if block.before is None and block.after is None else 0
        first, last = self._pages_within(block)
        return max(0, last - first)

    def _merged(self, block: Block) -> Block:
        """Joins a block with what lies beside it in the same state."""
        for other in (block.before, block.after):
            if other is not None and not other.allocated and other.mapped == block.mapped:
                if other.mapped:
                    self._take(other)
                else:
                    _withdraw(other)
                block.swallow(other)
        return block

    def _page(self, pool: _Pool) -> int:
        return _SMALL_SEGMENT if pool.small else self.settings.large_segment_bytes

    def _pages_within(self, block: Block) -> tuple[int, int]:
        """Addresses between which a block fills whole pages of its segment."""
        page, origin = self._page(block.pool), block.origin or 0
        first = -(-(block.address - origin) // page) * page
        return origin + first, origin + (block.address + block.size - origin) // page * page

    def _expand(self, pool: _Pool, size: int) -> Block:
        """Puts memory behind the lowest addresses at which there is room for a block."""
        block = self._lowest_room(pool, size)
        if not block.mapped:
            self._map(block, min(block.size, size))
        while block.size < size:
            following = block.after
            assert following is not None, "the chosen block has room for its request"
            self._map(following, min(size - block.size, following.size))
            block = following
        self._take(block)
        return block

    def _lowest_room(self, pool: _Pool, size: int) -> Block:
        for _, block in pool.unmapped:
            start = block.before if block.before is not None and not block.before.allocated else block
            room, here = 0, start
            while room < size and not here.allocated:
                room += here.size
                if here.after is None:
                    break
                here = here.after
            if room >= size:
                return start
        page, origin = self._page(pool), self._next_address
        block = Block(pool, origin, _ADDRESSES // page * page, origin)
        block.mapped = False
        self._next_address += block.size
        insort(pool.unmapped, (block.address, block))
        return block

    def _map(self, block: Block, size: int) -> None:
        """Puts memory behind the first pages of an empty block, and joins it with what is free beside it."""
        page = self._page(block.pool)
        _withdraw(block)
        mapped = -(-size // page) * page
        if mapped < block.size:
            rest = block.cut(mapped)
            insort(block.pool.unmapped, (rest.address, rest))
        block.mapped = True
        self.reserved_bytes += block.size
        self._put(self._merged(block))

    def _unmap(self, block: Block) -> None:
        """Gives back the pages that a free block fills."""
        first, last = self._pages_within(block)
        if first >= last:
            return
        self._take(block)
        if block.address + block.size > last:
            self._put(block.cut(last - block.address))
        if first > block.address:
            front, block = block, block.cut(first - block.address)
            self._put(front)
        block.mapped = False
        self.reserved_bytes -= block.size
        block = self._merged(block)
        if block.before is not None or block.after is not None:
            insort(block.pool.unmapped, (block.address, block))


def _room(block: Block) -> int:
    """How large a free block may grow."""
    following = block.after
    return block.size + (following.size if following is not None and not following.mapped else 0)


def _withdraw(block: Block) -> None:
    """Takes a block from those without memory behind them."""
    unmapped = block.pool.unmapped
    del unmapped[bisect_left(unmapped, (block.address,))]
