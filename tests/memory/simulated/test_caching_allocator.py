"""PyTorch's rules for reserved bytes: sequences worked out by hand from the source, and invariants under random ones.

Each sequence is a list of steps, `+name size`, `-name` or `empty`, and after it what the allocator has reserved, what
of that it could not give back, and what it counts as allocated; sizes in KiB, `b` for bytes.
"""

import random

import pytest
import torch

from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.simulated.caching_allocator import AllocatorSettings, Block, CachingAllocator
from tests.device.allocator_sequences import SEQUENCES as SHARED
from tests.device.allocator_sequences import Sequence

KIB, MIB = 2**10, 2**20
PLAIN, GROWING = AllocatorSettings(), AllocatorSettings(expandable_segments=True)
UNCUT = AllocatorSettings(max_split_bytes=64 * MIB)


def run(steps: str, allocator: CachingAllocator) -> dict[str, Block]:
    """Plays steps such as ``+a 3072 -a empty``."""
    blocks: dict[str, Block] = {}
    words = iter(steps.split())
    for word in words:
        if word == "empty":
            allocator.empty_cache()
        elif word[0] == "-":
            allocator.free(blocks.pop(word[1:]))
        else:
            size = next(words)
            blocks[word[1:]] = allocator.allocate(int(size[:-1]) if size[-1] == "b" else int(float(size) * KIB))
    return blocks


SEQUENCES = {
    # One byte takes a block of 512 B in a segment of 2 MiB.
    "one byte": (PLAIN, "+a 1b", 2048, 2048, 0.5),
    # 1 MiB is still small; two of them fill a segment, and the third opens the next.
    "small blocks fill 2 MiB": (PLAIN, "+a 1024 +b 1024 +c 0.5", 4096, 4096, 2048.5),
    # One byte more is large: a segment of 20 MiB, and the block has 1 MiB and 512 B.
    "the least large block": (PLAIN, "+a 1048577b", 20480, 20480, 1024.5),
    # 9 + 9 MiB leave 2 MiB of 20; the third 9 need another segment.
    "large blocks share 20 MiB": (PLAIN, "+a 9216 +b 9216 +c 9216", 40960, 40960, 27648),
    # From 10 MiB on a segment of its own, a multiple of 2 MiB: 10 stays 10, and 11 becomes 12, of which the last 1 MiB
    # is not cut off, since more than 1 MiB would have to remain: it counts as allocated.
    "own segments are multiples of 2 MiB": (PLAIN, "+a 10240 +b 11264", 22528, 22528, 22528),
    # 10.5 MiB in 12: the rest of 1.5 MiB is cut off, and serves a later request of 1.5 MiB.
    "the rest of an own segment serves": (PLAIN, "+a 10752 +b 1536", 12288, 12288, 12288),
    # A freed segment stays reserved, but could go back; a smaller request is cut out of it and holds all of it.
    "a cached segment is cut": (PLAIN, "+a 40960 -a +b 5120", 40960, 40960, 5120),
    "a cached segment could go back": (PLAIN, "+a 40960 -a", 40960, 0, 0),
    # Best fit: of 12 and 30 MiB cached, 11.5 MiB goes into the 12 (0.5 MiB uncut), so that the 30 can go back.
    "the smallest that fits": (PLAIN, "+a 30720 +b 12288 -a -b +c 11776", 43008, 12288, 12288),
    # Neighbours join: 6 + 6 + 6 of a 20 MiB segment, the first two freed, make room for 12.
    "free neighbours join": (PLAIN, "+a 6144 +b 6144 +c 6144 -a -b +d 12288", 20480, 20480, 18432),
    # Freed in the other order they do not touch, and 12 MiB needs its own segment.
    "free strangers do not": (PLAIN, "+a 6144 +b 6144 +c 6144 -a -c +d 12288", 32768, 32768, 18432),
    # Emptying gives whole segments back and keeps that of `b`, with its free 5 MiB in front and 10 behind.
    "emptying": (PLAIN, "+a 5120 +b 5120 +c 61440 -a -c empty", 20480, 20480, 5120),
    # Pools are apart: 1.5 MiB free in a small segment serve no large request, nor 15 MiB of a large one a small one.
    "pools are apart": (PLAIN, "+a 512 +b 5120 +c 1536 -b +d 256", 22528, 22528, 2304),
    # Blocks from max_split_size (64 MiB) on are not cut: 50 MiB does not get the cached 80 ...
    "too large to be cut": (UNCUT, "+a 81920 -a +b 51200", 133120, 51200, 51200),
    # ... 70 MiB gets it whole, being within 20 MiB of it; 65 MiB does not get 90, but a segment of 66, uncut.
    "near enough to be taken whole": (UNCUT, "+a 81920 -a +b 71680", 81920, 81920, 81920),
    "not near enough": (UNCUT, "+a 92160 -a +b 66560", 159744, 67584, 67584),
    # Expandable: pages of 20 MiB for large blocks, 2 MiB for small ones, one segment each, blocks beside each other.
    "pages": (GROWING, "+a 25600 +b 1536 +c 10240 +d 100", 43008, 43008, 37476),
    # The free end of the segment and one new page make room for 30 MiB after 25: 55 of 60.
    "the end grows": (GROWING, "+a 25600 +b 30720", 61440, 61440, 56320),
    # Pages 0 (all of it free) could go back; page 1 holds `b` from 25 MiB on, so its first 5 MiB could not.
    "whole pages could go back": (GROWING, "+a 25600 +b 30720 -a", 61440, 40960, 30720),
    "whole pages go back": (GROWING, "+a 25600 +b 30720 -a empty", 40960, 40960, 30720),
    # Mapped again at the lowest address: 20 empty + 5 free MiB in front of `b` take 22 MiB, and no page is added.
    "holes are filled": (GROWING, "+a 25600 +b 30720 -a empty +c 22528", 61440, 61440, 53248),
    # 26 MiB do not fit there: behind `b` 5 MiB are free and 21 more need two pages.
    "too small a hole": (GROWING, "+a 25600 +b 30720 -a empty +c 26624", 81920, 81920, 57344),
    # The 5 MiB at the end count as large as they may grow: `d` takes the hole of 12, and 25 MiB need one page, not two.
    "the end is spared": (GROWING, "+a 12288 +b 6144 +c 17408 -a +d 4096 +e 25600", 61440, 61440, 53248),
    # A freed block that is cut where it was: expandable segments cut off any rest of 512 B.
    "fine cuts": (GROWING, "+a 20480 -a +b 20479.5 +c 1024.5", 40960, 40960, 21504),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_worked_out_by_hand(name: str) -> None:
    settings, steps, reserved, needed, allocated = SEQUENCES[name]
    allocator = CachingAllocator(settings)
    run(steps, allocator)
    found = (allocator.reserved_bytes, allocator.needed_bytes, allocator.allocated_bytes)
    assert [size / KIB for size in found] == [reserved, needed, allocated]


@pytest.mark.parametrize("sequence", SHARED, ids=lambda sequence: sequence.name)
def test_a_sequence_leaves_what_the_rules_say(sequence: Sequence) -> None:
    """The same sequences as the pretend CUDA device's allocator, which was written apart."""
    settings = AllocatorSettings(expandable_segments=sequence.expandable)
    allocator, held = CachingAllocator(settings, limit_bytes=sequence.capacity_bytes), {}
    for number, event in enumerate(sequence.events):
        if event.action == "allocate":
            held[event.name] = allocator.allocate(event.requested_bytes)
        elif event.action == "refuse":
            with pytest.raises(torch.OutOfMemoryError):
                allocator.allocate(event.requested_bytes)
        elif event.action == "free":
            allocator.free(held.pop(event.name))
        else:
            allocator.empty_cache()
        expected = (event.allocated_bytes, event.reserved_bytes)
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == expected, (number, event)


LIMITED = {
    # 20 MiB cached and 30 wanted: the cache goes back first. Then 40 are held, and half a MiB would take 2 more.
    "the cache goes back": (PLAIN, 40, "+a 20480 -a +b 30720 +c 10240", "+d 512", 40960, 2),
    # 18 MiB go back, but not the 20 that hold `a` and `c`: 24 are refused though 13 + 20 are free.
    "fragments do not": (PLAIN, 40, "+a 5120 +b 15360 -b +c 2048 +d 18432 -d", "+e 24576", 20480, 1),
    # A request of 2 MiB asks for 20: refused with 19 free.
    "a small one asks for 20 MiB": (PLAIN, 39, "+a 20480", "+b 2048", 20480, 1),
    # Blocks too large to be cut go back alone: the 80 MiB, and the 30 MiB stay cached.
    "large ones go back first": (UNCUT, 120, "+a 81920 +b 30720 -a -b +c 51200", "+d 102400", 51200, 1),
    # Expandable: the pages that `a` filled go back, and 40 MiB fit behind `b`.
    "pages go back": (GROWING, 80, "+a 30720 +b 30720 -a +c 40960", "+d 40960", 81920, 2),
}


@pytest.mark.parametrize("name", LIMITED)
def test_a_limit_is_kept_and_refuses_only_what_cannot_be_made_room_for(name: str) -> None:
    settings, limit, fitting, refused, reserved, retries = LIMITED[name]
    allocator = CachingAllocator(settings, limit_bytes=limit * MIB)
    run(fitting, allocator)
    with pytest.raises(torch.OutOfMemoryError, match=f"limit of {limit * MIB} bytes"):
        run(refused, allocator)
    assert (allocator.reserved_bytes / KIB, allocator.retries) == (reserved, retries)


def test_peaks_begin_anew() -> None:
    allocator = CachingAllocator()
    blocks = run("+a 40960 -a +b 15360", allocator)
    before = allocator.restart_peak()
    assert (before.reserved, before.needed, before.allocated) == (40 * MIB, 40 * MIB, 40 * MIB)
    peak = allocator.peak
    assert (peak.reserved, peak.needed, peak.allocated) == (40 * MIB, 40 * MIB, 15 * MIB)
    allocator.free(blocks["b"])
    allocator.restart_peak()
    assert (allocator.peak.reserved, allocator.peak.needed, allocator.peak.allocated) == (40 * MIB, 0, 0)


@pytest.mark.parametrize("seed", range(12))
def test_what_could_go_back_is_what_goes_back(seed: int) -> None:
    """Whatever the history: emptying leaves exactly the needed bytes, and after the last block nothing is reserved."""
    dice = random.Random(seed)
    settings = (PLAIN, GROWING, UNCUT)[seed % 3]
    allocator, held = CachingAllocator(settings, limit_bytes=None if seed % 2 else 700 * MIB), []
    for _ in range(1500):
        if dice.random() < 0.6 or not held:
            try:
                held.append(allocator.allocate(int(2 ** dice.uniform(0, 28))))
            except torch.OutOfMemoryError:
                assert allocator.reserved_bytes == allocator.needed_bytes
        else:
            allocator.free(held.pop(dice.randrange(len(held))))
        if dice.random() < 0.02:
            needed = allocator.needed_bytes
            allocator.empty_cache()
            assert allocator.reserved_bytes == allocator.needed_bytes == needed
    assert allocator.allocated_bytes == sum(block.size for block in held)
    for block in held:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.allocated_bytes, allocator.needed_bytes) == (0, 0, 0)


def test_settings_are_read_where_pytorch_reads_them() -> None:
    text = "roundup_power2_divisions:[256:1,512:2,>:4], expandable_segments:True,max_split_size_mb:128"
    settings = AllocatorSettings.read({"PYTORCH_CUDA_ALLOC_CONF": text, "PYTORCH_ALLOC_CONF": "max_split_size_mb:50"})
    assert settings == AllocatorSettings(
        expandable_segments=True,
        max_split_bytes=128 * MIB,
        left_out=("roundup_power2_divisions:[256:1,512:2,>:4]",),
    )
    assert AllocatorSettings.read({"PYTORCH_ALLOC_CONF": "large_segment_size_mb:40,backend:native"}) == (
        AllocatorSettings(large_segment_bytes=40 * MIB)
    )
    assert AllocatorSettings.read({}) == AllocatorSettings()
    for wrong in ("expandable_segments:yes", "max_split_size_mb:many"):
        with pytest.raises(ConfigError, match=wrong):
            AllocatorSettings.read({"PYTORCH_ALLOC_CONF": wrong})
