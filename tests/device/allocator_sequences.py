"""Requests worked out by hand from the rules of PyTorch's CUDA caching allocator, and what they leave allocated and
reserved.

The rules (`c10/cuda/CUDACachingAllocator.cpp`): requests are rounded up to 512 bytes. At most 1 MiB: the small pool, in
segments of 2 MiB. Under 10 MiB: segments of 20 MiB. From 10 MiB on: a segment of the request, rounded up to 2 MiB. A
block is cut if what is left is at least 512 bytes (small pool, or expandable) or over 1 MiB (large pool). The smallest
free block that is large enough serves, the lowest in memory among equals. Free neighbours merge. What is uncut and free
goes back when a request finds no room, and at `empty_cache`. Under `expandable_segments`, pages are mapped in units of
2 MiB (small pool) or 20 MiB (large pool), at the lowest addresses where there is room; the end of a segment counts as
large as it may become, and serves after all holes.
"""

from __future__ import annotations

from typing import NamedTuple

KiB, MiB = 1 << 10, 1 << 20


class Event(NamedTuple):
    """What happens, and what is then held.

    Args:
        action: "allocate", "refuse" (an allocation that fails), "free" or "empty" (the cache).
        name: of the block; "" where none is meant.
        requested_bytes: 0 where nothing is requested.
        allocated_bytes: after it.
        reserved_bytes: after it.
    """

    action: str
    name: str
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


class Sequence(NamedTuple):
    """Events on an empty device of one stream.

    Args:
        name: for people.
        events: in order.
        expandable: whether `expandable_segments` is on.
        capacity_bytes: of the card.
    """

    name: str
    events: tuple[Event, ...]
    expandable: bool = False
    capacity_bytes: int = 1 << 30


def _allocate(name: str, requested_bytes: int, allocated_bytes: int, reserved_bytes: int) -> Event:
    return Event("allocate", name, requested_bytes, allocated_bytes, reserved_bytes)


def _free(name: str, allocated_bytes: int, reserved_bytes: int) -> Event:
    return Event("free", name, 0, allocated_bytes, reserved_bytes)


def _empty(allocated_bytes: int, reserved_bytes: int) -> Event:
    return Event("empty", "", 0, allocated_bytes, reserved_bytes)


SEQUENCES = (
    Sequence(
        "one byte takes 512 of a segment of 2 MiB",
        (
            _allocate("a", 1, 512, 2 * MiB),
            _free("a", 0, 2 * MiB),  # kept for the next request
            _empty(0, 0),
        ),
    ),
    Sequence(
        "small blocks share segments, and free neighbours merge",
        (
            _allocate("a", MiB, MiB, 2 * MiB),
            _allocate("b", MiB, 2 * MiB, 2 * MiB),  # exactly the rest
            _allocate("c", 512, 2 * MiB + 512, 4 * MiB),
            _free("a", MiB + 512, 4 * MiB),
            _free("b", 512, 4 * MiB),  # a and b are one block of 2 MiB again
            _allocate("d", MiB, MiB + 512, 4 * MiB),  # from behind c, which is 512 bytes smaller
            _empty(MiB + 512, 2 * MiB),  # the first segment is whole
        ),
    ),
    Sequence(
        "rests of the small pool serve, down to 512 bytes",
        (
            _allocate("a", 700 * KiB, 700 * KiB, 2 * MiB),
            _allocate("b", 700 * KiB, 1400 * KiB, 2 * MiB),
            _allocate("c", 700 * KiB, 2100 * KiB, 4 * MiB),  # 648 KiB are left of the first segment
            _allocate("d", 600 * KiB, 2700 * KiB, 4 * MiB),  # the smaller of the two rests
            _allocate("e", 48 * KiB, 2748 * KiB, 4 * MiB),  # exactly what d left
            _allocate("f", 512, 2748 * KiB + 512, 4 * MiB),
        ),
    ),
    Sequence(
        "a byte over 1 MiB belongs to the large pool",
        (
            _allocate("a", MiB + 1, MiB + 512, 20 * MiB),
            _allocate("b", 18 * MiB, 20 * MiB, 20 * MiB),  # the rest would be 1 MiB less 512: b gets it too
            _free("a", 19 * MiB - 512, 20 * MiB),
            _empty(19 * MiB - 512, 20 * MiB),  # the segment is cut
            _free("b", 0, 20 * MiB),
            _empty(0, 0),
        ),
    ),
    Sequence(
        "from 10 MiB on, a segment of its own",
        (
            _allocate("a", 10 * MiB, 10 * MiB, 10 * MiB),
            _allocate("b", 10 * MiB + 1, 20 * MiB + 512, 22 * MiB),  # 12 MiB, cut: 2 MiB less 512 are left
            _allocate("c", 10 * MiB - 512, 30 * MiB, 42 * MiB),  # just under: 20 MiB
            _allocate("d", MiB + MiB // 2, 32 * MiB - 512, 42 * MiB),  # what b left, all of it
        ),
    ),
    Sequence(
        "a rest of the large pool up to 1 MiB stays with its block",
        (
            _allocate("a", 11 * MiB, 12 * MiB, 12 * MiB),  # exactly 1 MiB: not over
            _allocate("b", 11 * MiB - 512, 23 * MiB - 512, 24 * MiB),  # 1 MiB and 512: cut
            _free("a", 11 * MiB - 512, 24 * MiB),
            _empty(11 * MiB - 512, 12 * MiB),
        ),
    ),
    Sequence(
        "the smallest block that is large enough serves",
        (
            _allocate("a", 12 * MiB, 12 * MiB, 12 * MiB),
            _allocate("b", 14 * MiB, 26 * MiB, 26 * MiB),
            _allocate("c", 16 * MiB, 42 * MiB, 42 * MiB),
            _free("a", 30 * MiB, 42 * MiB),
            _free("b", 16 * MiB, 42 * MiB),
            _free("c", 0, 42 * MiB),
            _allocate("d", 13 * MiB, 14 * MiB, 42 * MiB),  # b's, uncut
            _allocate("e", 12 * MiB, 26 * MiB, 42 * MiB),  # a's
            _allocate("f", 5 * MiB, 31 * MiB, 42 * MiB),  # c's, cut; no segment of 20 MiB
            _empty(31 * MiB, 42 * MiB),
            _free("d", 17 * MiB, 42 * MiB),
            _empty(17 * MiB, 28 * MiB),
        ),
    ),
    Sequence(
        "holes in a segment: each too small, together large enough",
        (
            _allocate("a", 4 * MiB, 4 * MiB, 20 * MiB),
            _allocate("b", 4 * MiB, 8 * MiB, 20 * MiB),
            _allocate("c", 4 * MiB, 12 * MiB, 20 * MiB),
            _free("a", 8 * MiB, 20 * MiB),
            _free("c", 4 * MiB, 20 * MiB),  # merges with the 8 MiB behind it
            _allocate("d", 13 * MiB, 18 * MiB, 34 * MiB),  # 4 and 12 MiB are free, not together; d gets 14, uncut
            _free("b", 14 * MiB, 34 * MiB),  # now the 20 MiB are together
            _allocate("e", 20 * MiB, 34 * MiB, 34 * MiB),
        ),
    ),
    Sequence(
        "a request that finds no room frees whole cached segments and asks again",
        (
            _allocate("a", 12 * MiB, 12 * MiB, 12 * MiB),
            _free("a", 0, 12 * MiB),
            _allocate("b", 24 * MiB, 24 * MiB, 24 * MiB),
        ),
        capacity_bytes=32 * MiB,
    ),
    Sequence(
        "cut segments cannot be freed, so that a request fails with bytes to spare",
        (
            _allocate("a", 4 * MiB, 4 * MiB, 20 * MiB),
            _allocate("b", 6 * MiB, 10 * MiB, 20 * MiB),
            Event("refuse", "c", 12 * MiB, 10 * MiB, 20 * MiB),
            _free("a", 6 * MiB, 20 * MiB),
            Event("refuse", "c", 12 * MiB, 6 * MiB, 20 * MiB),  # 14 MiB are free, in pieces of 4 and 10
            _free("b", 0, 20 * MiB),
            _allocate("c", 12 * MiB, 12 * MiB, 20 * MiB),  # whole again, and large enough
        ),
        capacity_bytes=24 * MiB,
    ),
    Sequence(
        "small and large pool do not lend to each other",
        (
            _allocate("a", 2 * MiB, 2 * MiB, 20 * MiB),
            _allocate("b", KiB, 2 * MiB + KiB, 22 * MiB),  # although 18 MiB are free
            _free("a", KiB, 22 * MiB),
            _allocate("c", 512, KiB + 512, 22 * MiB),
            _empty(KiB + 512, 2 * MiB),
        ),
    ),
    Sequence(
        "expandable, large: pages are added behind, and taken back by units",
        (
            _allocate("a", 4 * MiB, 4 * MiB, 20 * MiB),
            _allocate("b", 18 * MiB, 22 * MiB, 40 * MiB),  # 16 MiB were free, one unit more
            _free("b", 4 * MiB, 40 * MiB),
            _empty(4 * MiB, 20 * MiB),  # the second unit; of the first, a holds a part
            _free("a", 0, 20 * MiB),
            _empty(0, 0),
        ),
        expandable=True,
    ),
    Sequence(
        "expandable: the end of a segment is left for what fits nowhere else",
        (
            _allocate("a", 12 * MiB, 12 * MiB, 20 * MiB),
            _allocate("b", 6 * MiB, 18 * MiB, 20 * MiB),
            _allocate("c", 17 * MiB, 35 * MiB, 40 * MiB),  # 2 MiB were free, one unit more; 5 are left
            _free("a", 23 * MiB, 40 * MiB),
            _allocate("d", 4 * MiB, 27 * MiB, 40 * MiB),  # from a's 12, although the 5 at the end are a better fit
            _allocate("e", 25 * MiB, 52 * MiB, 60 * MiB),  # these 5, and one unit more
        ),
        expandable=True,
    ),
    Sequence(
        "expandable: pages that went back are mapped again before others are added",
        (
            _allocate("a", 25 * MiB, 25 * MiB, 40 * MiB),
            _allocate("b", 30 * MiB, 55 * MiB, 60 * MiB),
            _free("a", 30 * MiB, 60 * MiB),
            _empty(30 * MiB, 40 * MiB),  # the first unit; 5 MiB of the second stay free before b, and 5 of the third
            _allocate("c", 22 * MiB, 52 * MiB, 60 * MiB),  # the first unit and 2 of the 5
            _allocate("d", 5 * MiB, 57 * MiB, 60 * MiB),
        ),
        expandable=True,
    ),
    Sequence(
        "expandable, small: a block lies across two units and holds both",
        (
            _allocate("a", 512, 512, 2 * MiB),
            _allocate("b", MiB, MiB + 512, 2 * MiB),
            _allocate("c", MiB, 2 * MiB + 512, 4 * MiB),  # 1 MiB less 512 was free
            _free("a", 2 * MiB, 4 * MiB),
            _free("b", MiB, 4 * MiB),
            _empty(MiB, 4 * MiB),  # no unit is free as a whole
            _free("c", 0, 4 * MiB),
            _empty(0, 0),
        ),
        expandable=True,
    ),
)
