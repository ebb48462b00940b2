"""The counts of bytes: the allocator, the ledger, and the simulated device built on them."""

import gc
import math
import re
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memsafe_rl.errors import ConfigError, MemsafeError
from memsafe_rl.memory.simulated import counting
from memsafe_rl.memory.simulated.caching_allocator import CachingAllocator
from memsafe_rl.memory.simulated.counting import CountingAllocator
from memsafe_rl.memory.simulated.device import SimulatedMemory, active_simulation
from memsafe_rl.memory.simulated.ledger import Held, StorageLedger

KIB = 1024


def floats(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB // 4)


def train_step(checkpointed: bool = False) -> None:
    """One AdamW step of a small network, everything made inside."""
    torch.manual_seed(0)
    network = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    x = torch.randn(256, 64)
    for block in network:
        x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False) if checkpointed else block(x)
    x.square().mean().backward()
    optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_allocator_and_the_ledger_agree_on_a_training_step(checkpointed: bool) -> None:
    with StorageLedger() as ledger:
        train_step(checkpointed)
    gc.collect()
    with CountingAllocator() as memory:
        train_step(checkpointed)
        gc.collect()
        assert memory.live_bytes == 0
    assert ledger.live_bytes == 0
    # Scratch inside kernels is all they may differ by, and it depends on the processor; equal to the byte on x86.
    assert memory.peak_bytes == pytest.approx(ledger.peak_bytes, rel=5e-3)


def test_the_counts_repeat_to_the_byte() -> None:
    peaks = set()
    for _ in range(3):
        with CountingAllocator() as memory:
            train_step()
        peaks.add((memory.peak_bytes, memory.allocations))
    assert len(peaks) == 1


def test_the_allocator_sees_scratch_inside_a_kernel_and_the_ledger_only_what_it_was_told_of() -> None:
    x, rows = torch.randn(64, 4096), torch.randint(4096, (64, 4096))
    for scratch, known in ((lambda: x.logsumexp(-1), True), (lambda: x.scatter_add(1, rows, x).sort(1), False)):
        with StorageLedger() as ledger:
            scratch()
        with CountingAllocator() as memory:
            scratch()
        assert (ledger.peak_bytes == memory.peak_bytes) is known
        assert ledger.peak_bytes <= memory.peak_bytes


@pytest.mark.parametrize("exact", [False, True])
def test_live_and_peak_bytes_by_hand(exact: bool) -> None:
    before = floats(64)
    with SimulatedMemory(exact=exact) as memory:
        assert active_simulation() is memory
        a = floats(8)
        view = a[10:]
        outside = before.view(2, -1)
        b = floats(4)
        assert (memory.live_bytes, memory.peak_bytes) == (12 * KIB, 12 * KIB)
        del a
        assert memory.live_bytes == 12 * KIB, "a view keeps its storage alive"
        del view, before, outside
        assert (memory.live_bytes, memory.peak_bytes) == (4 * KIB, 12 * KIB)
        memory.reset_peak()
        assert memory.peak_bytes == 4 * KIB
    del b
    assert active_simulation() is None
    assert (memory.live_bytes, memory.peak_bytes) == (4 * KIB if exact else 0, 4 * KIB)


@pytest.mark.parametrize("exact", [False, True])
def test_the_capacity_refuses_and_a_refusal_leaves_no_trace(exact: bool) -> None:
    with SimulatedMemory(capacity_bytes=16 * KIB, exact=exact) as memory:
        held = floats(10)
        with pytest.raises(torch.OutOfMemoryError, match=f"Tried to allocate {8 * KIB} bytes.*10240 bytes are live"):
            floats(8)
        assert (memory.live_bytes, memory.peak_bytes, memory.refusals) == (10 * KIB, 10 * KIB, 1)
        fits = floats(6)
        assert memory.peak_bytes == 16 * KIB
        memory.set_capacity(None)
        more = floats(8)
        assert memory.peak_bytes == 24 * KIB
        del held, fits, more
        assert memory.live_bytes == 0


@pytest.mark.parametrize("exact", [False, True])
def test_the_chosen_allocation_fails_and_only_it(exact: bool) -> None:
    for number in (1, 3):
        with SimulatedMemory(fail_at=number, exact=exact) as memory:
            made = [floats(1) for _ in range(number - 1)]
            with pytest.raises(torch.OutOfMemoryError, match="chosen to fail"):
                floats(1)
            made += [floats(1), floats(1)]
            assert memory.live_bytes == len(made) * KIB
            memory.fail_after(2)
            made.append(floats(1))
            with pytest.raises(torch.OutOfMemoryError):
                floats(1)


@pytest.mark.slow
def test_every_allocation_of_a_step_can_fail_and_nothing_is_left() -> None:
    with CountingAllocator() as memory:
        train_step()
    for number in range(1, memory.allocations + 1, 7):
        with CountingAllocator(fail_at=number) as failing:
            with pytest.raises(torch.OutOfMemoryError):
                train_step()
            # A backward that raises leaves its queue full; the next one on this thread empties it.
            torch.ones(1, requires_grad=True).sum().backward()
            gc.collect()
            assert (failing.live_bytes, failing.refusals) == (0, 1), f"allocation {number}"


def test_blocks_outlive_the_count_and_do_not_disturb_the_next() -> None:
    with CountingAllocator() as memory:
        kept = torch.arange(1000.0)
    assert memory.live_bytes == kept.nbytes
    with CountingAllocator() as memory:
        assert kept.sum() == 499500
        kept.resize_(3000)
        del kept
        gc.collect()
        assert memory.live_bytes == 0
    assert torch.empty(10).numel() == 10


def test_counts_nest_and_each_keeps_its_own_peak() -> None:
    with CountingAllocator(capacity_bytes=64 * KIB) as outer:
        a = floats(16)
        with CountingAllocator() as inner:
            b = floats(8)
            assert (inner.live_bytes, inner.peak_bytes) == (8 * KIB, 8 * KIB)
            del a
            assert (inner.live_bytes, inner.peak_bytes) == (-8 * KIB, 8 * KIB)
            inner.restart(Held.PEAK)
            assert (inner.peak_bytes, outer.peak_bytes) == (-8 * KIB, 24 * KIB)
            with pytest.raises(torch.OutOfMemoryError):
                floats(60)
        with CountingAllocator(capacity_bytes=4 * KIB), pytest.raises(torch.OutOfMemoryError):
            floats(8)
        c = floats(32)
        del b, c
        assert (outer.live_bytes, outer.peak_bytes) == (0, 40 * KIB)


def test_an_exception_closes_the_count() -> None:
    memory = SimulatedMemory(capacity_bytes=KIB, exact=True)
    with pytest.raises(torch.OutOfMemoryError), memory:
        floats(2)
    assert active_simulation() is None
    assert floats(2).numel() == 512
    with pytest.raises(MemsafeError, match="closed"):
        memory.reset_peak()


def test_other_threads_are_counted() -> None:
    made = []
    with CountingAllocator() as memory:
        thread = threading.Thread(target=lambda: made.append(floats(8)))
        thread.start()
        thread.join()
        assert memory.live_bytes == 8 * KIB


def test_blocks_stay_aligned() -> None:
    with CountingAllocator():
        assert all(torch.empty(n).data_ptr() % 64 == 0 for n in (1, 7, 1000))


def test_the_ledger_rounds_tracks_and_follows_a_resize() -> None:
    weights = torch.empty(100)
    with StorageLedger(CachingAllocator()) as ledger:
        for tensor in (weights, weights[10:]):
            ledger.see(tensor, is_new=True)
        assert ledger.live_bytes == 512
        x = torch.empty(10)
        x.resize_(1000)
        assert ledger.live_bytes == 512 + 4096
        assert torch.empty(10, device="meta").numel() == 10
        assert torch.tensor([1.0]).item() == 1.0
        assert ledger.peak_bytes == 512 + 4096 + 512


def test_a_compacted_ledger_holds_what_is_alive_without_the_gaps_between() -> None:
    from torch._subclasses import FakeTensorMode

    allocator, mib = CachingAllocator(), 2**20
    with FakeTensorMode(), StorageLedger(allocator) as ledger:
        large = torch.empty(42 * mib + mib // 2, dtype=torch.uint8)
        adapter = torch.empty(mib + 2**16, dtype=torch.uint8)  # in what its segment of 44 MiB has left
        del large
        allocator.empty_cache()
        assert allocator.reserved_bytes == 44 * mib
        ledger.compact()
        assert allocator.reserved_bytes == 20 * mib
        assert ledger.live_bytes == allocator.allocated_bytes == adapter.nbytes
        del adapter
        assert ledger.live_bytes == allocator.allocated_bytes == 0


def test_the_ledger_counts_fake_tensors() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), StorageLedger() as ledger:
        network = nn.Linear(1000, 1000, bias=False)
        network(torch.empty(10, 1000)).sum().backward()
        assert ledger.live_bytes == 2 * 4_000_000


def test_senseless_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="capacity_bytes is -1; give whole bytes, 0 or more"):
        SimulatedMemory(capacity_bytes=-1)
    with pytest.raises(ConfigError, match="counted from 1"):
        SimulatedMemory(fail_at=0)
    for capacity in (math.nan, 1.5, True):
        with pytest.raises(ConfigError, match=f"capacity_bytes is {capacity}; give whole bytes"):
            SimulatedMemory(capacity)  # type: ignore[arg-type]


def test_a_capacity_may_be_a_size_as_text() -> None:
    assert SimulatedMemory("2GiB").capacity_bytes == 2 * 2**30
    with pytest.raises(ConfigError, match="'much' is not a byte count"):
        SimulatedMemory("much")


def test_without_a_compiler_the_remedy_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(counting, "_compiler", lambda: None)
    assert SimulatedMemory().exact is False
    with pytest.raises(MemsafeError, match=r"needs a C\+\+ compiler"):
        counting._compile(counting._binary_path())


def test_a_failed_compilation_says_why(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(counting, "_compiler", lambda: "false")
    with pytest.raises(MemsafeError, match="false failed"):
        counting._compile(counting._binary_path())
    assert not counting._binary_path().exists()


@pytest.mark.slow
def test_the_example_of_the_docs_runs_and_prints_what_they_show(capsys) -> None:
    page = (Path(__file__).parents[3] / "docs" / "simulated-memory.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    (shown,) = re.findall(r"^```text\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    exec(block, {"__name__": "docs"})
    line = re.compile(r"^(\w+) +([\d.]+) MiB: (.+)$", flags=re.MULTILINE)
    wanted, printed = (
        {found[0]: found[1:] for found in line.findall(text)} for text in (shown, capsys.readouterr().out)
    )
    assert list(printed) == list(wanted)
    for phase, (peak, parts) in printed.items():
        # Scratch of kernels depends on the processor.
        assert float(peak) == pytest.approx(float(wanted[phase][0]), rel=0.05, abs=0.2)
        assert re.findall(r"[a-z_]+", parts) == re.findall(r"[a-z_]+", wanted[phase][1])
