"""The pretend device's allocator against sequences that were worked out by hand from PyTorch's rules."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from memsafe_rl.memory.simulated.caching_allocator import AllocatorSettings, CachingAllocator
from tests.device.allocator_sequences import SEQUENCES, MiB, Sequence
from tests.device.pretend import NEVER, Pretend, PretendDevice


@pytest.fixture
def device(cuda: Pretend) -> Iterator[PretendDevice]:
    """The second device, which nothing else uses, empty before and after."""
    device = cuda.devices[1]
    torch.cuda.empty_cache()
    before = device.capacity
    assert device.reserved == 0
    torch.cuda.reset_peak_memory_stats(1)
    yield device
    device.set_capacity(before)
    device.set_elsewhere(0)
    torch.cuda.empty_cache()
    device.set_expandable(False)
    assert device.reserved == 0


def request(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device="cuda:1")


@pytest.mark.parametrize("sequence", SEQUENCES, ids=lambda sequence: sequence.name)
def test_a_sequence_leaves_what_the_rules_say(sequence: Sequence, device: PretendDevice) -> None:
    device.set_capacity(sequence.capacity_bytes)
    device.set_expandable(sequence.expandable)
    held: dict[str, torch.Tensor] = {}
    for number, event in enumerate(sequence.events):
        if event.action == "allocate":
            held[event.name] = request(event.requested_bytes)
        elif event.action == "refuse":
            with pytest.raises(torch.OutOfMemoryError):
                request(event.requested_bytes)
        elif event.action == "free":
            del held[event.name]
        else:
            torch.cuda.empty_cache()
        expected = (event.allocated_bytes, event.reserved_bytes)
        assert (device.allocated, device.reserved) == expected, (number, event)
    held.clear()


@pytest.mark.parametrize("expandable", [False, True], ids=["plain", "expandable"])
@pytest.mark.parametrize("seed", range(4))
def test_it_and_the_forecasts_allocator_agree_on_random_requests(
    seed: int, expandable: bool, device: PretendDevice
) -> None:
    """Two allocators that were written apart, byte for byte after every request, under a limit that binds."""
    dice, limit = random.Random(seed), 120 * MiB
    device.set_capacity(2 * limit)
    torch.cuda.set_per_process_memory_fraction(0.5, 1)
    device.set_expandable(expandable)
    before = torch.cuda.memory_stats(1)["num_alloc_retries"]
    other = CachingAllocator(AllocatorSettings(expandable_segments=expandable), limit_bytes=limit)
    held = []
    for number in range(800):
        if held and dice.random() < 0.42:
            tensor, block = held.pop(dice.randrange(len(held)))
            del tensor
            other.free(block)
        elif dice.random() < 0.01:
            torch.cuda.empty_cache()
            other.empty_cache()
        else:
            size = int(2 ** dice.uniform(4, 26))
            try:
                block = other.allocate(size)
            except torch.OutOfMemoryError:
                with pytest.raises(torch.OutOfMemoryError):
                    request(size)
            else:
                held.append((request(size), block))
        expected = (other.allocated_bytes, other.reserved_bytes)
        assert (device.allocated, device.reserved) == expected, (seed, number)
    assert other.refusals > 0
    assert torch.cuda.memory_stats(1)["num_alloc_retries"] - before == other.retries


def test_blocks_of_expandable_segments_serve_no_more_once_they_are_turned_off(device: PretendDevice) -> None:
    device.set_expandable(True)
    first, second = request(12 * MiB), request(MiB)
    del first
    device.set_expandable(False)
    third = request(12 * MiB)
    assert device.reserved == (20 + 2 + 12) * MiB
    del second, third


def test_the_statistics_are_those_of_torch(device: PretendDevice) -> None:
    a, b = request(4 * MiB), request(3 * MiB)
    del a
    stats = torch.cuda.memory_stats("cuda:1")
    assert stats["allocated_bytes.all.current"] == stats["active_bytes.large_pool.current"] == 3 * MiB
    assert stats["allocated_bytes.all.peak"] == 7 * MiB
    assert stats["reserved_bytes.large_pool.current"] == 20 * MiB
    assert stats["inactive_split_bytes.all.current"] == 17 * MiB
    assert stats["inactive_split.all.current"] == 2
    assert stats["segment.all.current"] == 1
    assert stats["requested_bytes.small_pool.current"] == 0
    torch.cuda.reset_peak_memory_stats("cuda:1")
    assert torch.cuda.max_memory_allocated("cuda:1") == 3 * MiB
    del b


def test_retries_and_failures_are_counted(device: PretendDevice) -> None:
    before = torch.cuda.memory_stats("cuda:1")
    device.set_capacity(32 * MiB)
    cached = request(24 * MiB)
    del cached
    held = request(30 * MiB)  # frees the 24 first
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 30\.00 MiB"):
        request(30 * MiB)
    stats = torch.cuda.memory_stats("cuda:1")
    assert stats["num_alloc_retries"] - before["num_alloc_retries"] == 2
    assert stats["num_ooms"] - before["num_ooms"] == 1
    del held


def test_a_fraction_and_what_others_hold_limit_reserved_bytes(device: PretendDevice) -> None:
    device.set_capacity(100 * MiB)
    torch.cuda.set_per_process_memory_fraction(0.3, "cuda:1")
    held = [request(20 * MiB)]
    with pytest.raises(torch.OutOfMemoryError):
        request(12 * MiB)
    held.append(request(10 * MiB))
    torch.cuda.set_per_process_memory_fraction(1.0, "cuda:1")
    device.set_elsewhere(65 * MiB)
    with pytest.raises(torch.OutOfMemoryError):
        request(10 * MiB)
    assert torch.cuda.mem_get_info("cuda:1") == (5 * MiB, 100 * MiB)
    held.clear()


def test_the_chosen_allocation_is_refused_once(device: PretendDevice) -> None:
    device.fail_after(2)
    held = request(1)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        request(1)
    assert request(1).numel() == held.numel() == 1
    device.fail_at(NEVER)


def test_fresh_memory_is_garbage_also_where_it_was_used_before(device: PretendDevice) -> None:
    zeros = torch.zeros(1000, device="cuda:1")
    address = zeros.data_ptr()
    del zeros
    again = torch.empty(1000, device="cuda:1")
    assert again.data_ptr() == address
    assert again.isnan().all()
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert torch.empty(10, dtype=dtype, device="cuda:1").isnan().all()
    assert torch.empty(10, dtype=torch.int64, device="cuda:1").min() > 2**60


def test_a_block_lent_to_another_stream_waits_for_it(device: PretendDevice) -> None:
    with torch.cuda.device(1):
        side, pinned = torch.cuda.Stream(1), torch.empty(4 * MiB, dtype=torch.uint8, pin_memory=True)
        lent = request(4 * MiB)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            pinned.copy_(lent, non_blocking=True)
        lent.record_stream(side)
        del lent
        stats = torch.cuda.memory_stats()
        assert stats["allocated_bytes.all.current"] == 0
        assert stats["active_bytes.all.current"] == 4 * MiB
        side.synchronize()
        held = request(1)  # looks after what has ended
        assert torch.cuda.memory_stats()["active_bytes.large_pool.current"] == 0
        del held


KERNELS = {
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, (512,), x[0], x[1]),
    "group norm": lambda x: torch.nn.functional.group_norm(x, 4, x[0], x[1]),
    "outer product, added": lambda x: torch.addr(x, x[:, 0], x[0], beta=0.5),
}
"""What CUDA has kernels of its own for, besides compositions that hold their result twice."""


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_holds_its_result_once(name: str, device: PretendDevice) -> None:
    given = torch.randn(4096, 512, device="cuda:1")
    torch.cuda.reset_peak_memory_stats(1)
    before = device.allocated
    result = KERNELS[name](given)
    assert given.nbytes <= device.peak_allocated - before < 1.1 * given.nbytes
    del result, given
