"""Host and device tell apart, copies land when they are waited for, and a missing wait is found."""

from __future__ import annotations

import pytest
import torch

from tests.device.pretend import Pretend

N = 1000


def test_host_and_device_do_not_mix(cuda: Pretend) -> None:
    here, there = torch.ones(3), torch.ones(3, device="cuda")
    for mix in (lambda: there + here, lambda: there @ here, lambda: torch.cat([there, here])):
        with pytest.raises(RuntimeError, match=r"same device, but found at least two devices, cuda:0 and cpu"):
            mix()
    with pytest.raises(RuntimeError, match=r"cuda:0 and cuda:1"):
        there + there.to("cuda:1")
    with pytest.raises(RuntimeError, match="same device"):
        there.gather(0, torch.tensor([0]))
    assert (there + torch.tensor(2.0)).tolist() == [3.0, 3.0, 3.0]  # a scalar of the host is an argument


def test_an_index_of_the_host_is_taken_at_the_price_of_an_upload(cuda: Pretend) -> None:
    there = torch.arange(5, device="cuda")
    cuda.counts.reset()
    assert there[torch.tensor([1, 2])].device.type == "cuda"
    assert cuda.counts.transfers() == {"upload, pageable": 1}


def test_both_devices_count_their_own_bytes(cuda: Pretend) -> None:
    torch.cuda.empty_cache()
    before = [torch.cuda.memory_allocated(index) for index in (0, 1)]
    on_second = torch.zeros(1024, device="cuda:1")
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
        also = torch.zeros(1024, device="cuda")
    assert also.device == on_second.device
    assert [torch.cuda.memory_allocated(index) for index in (0, 1)] == [before[0], before[1] + 8192]
    assert torch.equal(on_second.to("cuda:0").cpu(), torch.zeros(1024))


def test_a_read_back_is_garbage_until_its_event_is_waited_for(cuda: Pretend) -> None:
    there, here = torch.arange(N, device="cuda"), torch.zeros(N, dtype=torch.int64).pin_memory()
    here.copy_(there, non_blocking=True)
    landed = torch.cuda.Event()
    landed.record()
    there += 1  # later work of the stream changes nothing of what was read
    assert not torch.equal(here, torch.arange(N))
    landed.synchronize()
    assert torch.equal(here, torch.arange(N))
    assert cuda.counts.total("wait for an event") == 1


@pytest.mark.parametrize("wait", ["stream", "device", "item", "blocking copy"])
def test_every_wait_lands_what_came_before(wait: str, cuda: Pretend) -> None:
    there, here = torch.arange(N, device="cuda"), torch.zeros(N, dtype=torch.int64).pin_memory()
    here.copy_(there, non_blocking=True)
    if wait == "stream":
        torch.cuda.current_stream().synchronize()
    elif wait == "device":
        torch.cuda.synchronize()
    elif wait == "item":
        there[0].item()
    else:
        there.cpu()
    assert torch.equal(here, torch.arange(N))


def test_an_event_from_before_a_copy_does_not_land_it(cuda: Pretend) -> None:
    there, here = torch.arange(N, device="cuda"), torch.zeros(N, dtype=torch.int64).pin_memory()
    early = torch.cuda.Event()
    early.record()
    here.copy_(there, non_blocking=True)
    early.synchronize()
    assert not torch.equal(here, torch.arange(N))


def test_pageable_memory_and_blocking_copies_are_there_at_once(cuda: Pretend) -> None:
    there, pageable = torch.arange(N, device="cuda"), torch.zeros(N, dtype=torch.int64)
    assert torch.equal(pageable.copy_(there, non_blocking=True), torch.arange(N))
    pinned = torch.zeros(N, dtype=torch.int64).pin_memory()
    assert torch.equal(pinned.copy_(there), torch.arange(N))
    assert cuda.counts.total("read-back") == 2


def test_to_the_host_without_blocking_is_into_pinned_memory_and_wants_a_wait(cuda: Pretend) -> None:
    here = torch.arange(N, device="cuda").to("cpu", non_blocking=True)
    assert here.is_pinned()
    assert not torch.equal(here, torch.arange(N))
    torch.cuda.synchronize()
    assert torch.equal(here, torch.arange(N))


def test_an_upload_is_read_from_the_host_when_the_stream_gets_to_it(cuda: Pretend) -> None:
    here = torch.zeros(N).pin_memory()
    there = torch.empty(N, device="cuda").copy_(here, non_blocking=True)
    here.fill_(1.0)  # too early: nobody waited
    assert there.sum().item() == N


def test_out_and_back_on_one_stream_needs_no_wait(cuda: Pretend) -> None:
    there, here = torch.arange(N, device="cuda"), torch.zeros(N, dtype=torch.int64).pin_memory()
    here.copy_(there, non_blocking=True)
    again = torch.empty_like(there).copy_(here, non_blocking=True)
    assert torch.equal(again, there)


def test_another_stream_has_to_wait_for_an_upload(cuda: Pretend) -> None:
    here, side = torch.ones(N).pin_memory(), torch.cuda.Stream()
    there = torch.empty(N, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there.copy_(here, non_blocking=True)
    with pytest.raises(RuntimeError, match="missing wait"):
        there.sum()
    torch.cuda.current_stream().wait_stream(side)
    assert there.sum().item() == N
    side.synchronize()


def test_a_side_stream_has_to_wait_for_the_work_it_reads(cuda: Pretend) -> None:
    side, there = torch.cuda.Stream(), torch.ones(N, device="cuda")
    here = torch.zeros(N).pin_memory()
    with torch.cuda.stream(side), pytest.raises(RuntimeError, match="missing wait"):
        here.copy_(there, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    with torch.cuda.stream(side):
        side.wait_event(ready)
        here.copy_(there, non_blocking=True)
    with pytest.raises(RuntimeError, match="missing wait"):
        there.zero_()  # while the side stream may still read it
    side.synchronize()
    assert here.sum().item() == N
    there.zero_()


def test_generators_are_the_devices_own(cuda: Pretend) -> None:
    host = torch.get_rng_state()
    torch.cuda.manual_seed_all(3)
    first = torch.randn(4, device="cuda")
    other = torch.randn(4, device="cuda:1")
    assert torch.equal(first.cpu(), other.cpu())
    state = torch.cuda.get_rng_state(1)
    drawn = torch.nn.functional.dropout(torch.ones(64, device="cuda:1"), 0.5)
    torch.cuda.set_rng_state(state, 1)
    assert torch.equal(drawn, torch.nn.functional.dropout(torch.ones(64, device="cuda:1"), 0.5))
    assert torch.equal(host, torch.get_rng_state())
    with pytest.raises(RuntimeError, match="'cuda' device type for generator"):
        torch.randn(4, device="cuda", generator=torch.Generator())
    own = torch.Generator("cuda").manual_seed(5)
    assert torch.equal(
        torch.rand(3, device="cuda", generator=own.clone_state()), torch.rand(3, device="cuda", generator=own)
    )


def test_counts_tell_kernels_from_views_and_allocations(cuda: Pretend) -> None:
    there = torch.ones(4, 4, device="cuda")
    cuda.counts.reset()
    torch.empty(3, device="cuda")
    there.t().reshape(16).view(2, 8)[:1]  # one copy, for the transposed layout
    there * there
    there.sum().item()
    torch.ones(3).cuda()
    assert sum(cuda.counts.operators().values()) == 5
    assert cuda.counts.total("upload") == 1
    assert cuda.counts.total("read-back") == 1
    there.nonzero()
    assert cuda.counts.total("wait for a size") == 1
