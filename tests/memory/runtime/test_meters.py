"""Meters agree with what is known, and a simulated device holds a run to its budget."""

import mmap
from dataclasses import replace

import pytest
import torch

from memsafe_rl.accounting import charge
from memsafe_rl.memory.planning.search import extra_bytes
from memsafe_rl.memory.runtime.meters import CudaMeter, HostMeter, SimulatedMeter, meter_for
from memsafe_rl.memory.runtime.tracker import MemoryTracker
from memsafe_rl.memory.simulated.caching_allocator import CachingAllocator
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.types import Component, MemoryFailure, ModelGeometry, Phase, RolloutPlan, UpdatePlan, UpdateWork

CPU = torch.device("cpu")
GIB = 2**30


@pytest.mark.parametrize("exact", [None, False])
def test_a_budget_is_enforced_on_a_simulated_device_and_released(exact: bool | None) -> None:
    with SimulatedMemory(capacity_bytes=100_000, exact=exact) as device:
        meter = meter_for(CPU)
        meter.enforce(10_000)
        assert device.capacity_bytes == 10_000
        assert meter.total_bytes() == 100_000
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(20_000, dtype=torch.uint8)
        meter.release()
        assert device.capacity_bytes == 100_000
        assert torch.empty(20_000, dtype=torch.uint8).nbytes == 20_000


@pytest.mark.parametrize(("own", "budget", "limit"), [(50, 80, 50), (80, 50, 50), (None, 50, 50)])
def test_the_smaller_of_capacity_and_budget_binds(own: int | None, budget: int, limit: int) -> None:
    with SimulatedMemory(capacity_bytes=own) as device:
        meter = SimulatedMeter(device)
        meter.enforce(budget)
        assert device.capacity_bytes == limit
        meter.enforce(budget - 10)
        assert device.capacity_bytes == min(limit, budget - 10)
        meter.release()
        meter.release()
        assert device.capacity_bytes == own


def test_a_capacity_changed_later_is_the_devices_own() -> None:
    with SimulatedMemory(capacity_bytes=1000) as device:
        meter = SimulatedMeter(device)
        device.set_capacity(2000)
        assert meter.total_bytes() == 2000
        meter.enforce(500)
        meter.release()
        assert device.capacity_bytes == 2000


def test_the_host_meter_reads_the_process_and_enforces_nothing() -> None:
    meter = HostMeter()
    before = meter.live_bytes()
    meter.enforce(1)
    size = 50_000_000
    with mmap.mmap(-1, size) as block:  # pages of its own: a tensor may get pages that the process holds already
        block.write(b"x" * size)
        # Other pages of the process come and go; half of the block is far above that.
        assert meter.live_bytes() > before + size // 2
    meter.release()
    assert (meter.allocator_retries(), meter.live_by_component(), meter.is_exact) == (0, {}, False)


def test_meters_without_a_count_answer_with_none() -> None:
    if not torch.cuda.is_available():
        # Without a card PyTorch gives no statistics rather than zeros.
        assert CudaMeter(torch.device("cuda")).allocator_retries() == 0
    assert CudaMeter(torch.device("cuda")).is_exact
    with SimulatedMemory() as device:
        assert SimulatedMeter(device).allocator_retries() == 0
        assert SimulatedMeter(device).is_exact


class Card:
    """What `torch.cuda` says of a card of 80 GiB on which somebody set a limit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fraction: float) -> None:
        self.fraction = fraction
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * GIB, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: self.fraction)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self._set)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 12 * GIB)

    def _set(self, fraction: float, device: torch.device) -> None:
        assert 0 <= fraction <= 1  # as PyTorch demands
        assert device == torch.device("cuda", 1)
        self.fraction = fraction

    @property
    def allowed_bytes(self) -> int:
        """As PyTorch works it out."""
        return int(self.fraction * float(80 * GIB))


@pytest.mark.parametrize("budget_bytes", [16 * GIB, 2**20 * 33, 80 * GIB, 70_000_000_001])
def test_on_a_card_the_budget_holds_reserved_bytes_until_it_is_released(
    monkeypatch: pytest.MonkeyPatch, budget_bytes: int
) -> None:
    card = Card(monkeypatch, 1.0)
    meter = CudaMeter(torch.device("cuda", 1))
    meter.release()
    assert card.fraction == 1.0
    meter.enforce(2**30)
    meter.enforce(budget_bytes)
    assert card.allowed_bytes == budget_bytes
    meter.release()
    meter.release()
    assert card.fraction == 1.0
    assert meter.reserved_peak_bytes() == 12 * GIB


def test_a_lower_limit_of_the_users_stays_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, 0.25)
    meter = CudaMeter(torch.device("cuda", 1))
    meter.enforce(40 * GIB)
    assert card.fraction == 0.25
    meter.enforce(10 * GIB)
    assert card.allowed_bytes == 10 * GIB
    meter.release()
    assert card.fraction == 0.25


class CardMeter(CudaMeter):
    """A card whose counters a test sets."""

    live, allocated, reserved = 100, 100, 100

    def __init__(self) -> None:
        super().__init__(torch.device("cuda"))

    def live_bytes(self) -> int:
        return self.live

    def peak_bytes(self) -> int:
        return self.allocated

    def reset_peak(self) -> None:
        pass

    def reserved_peak_bytes(self) -> int:
        return self.reserved


def test_plans_leave_what_the_forecast_says_the_allocator_needs_and_no_more_than_was_seen() -> None:
    meter = CardMeter()
    tracker = MemoryTracker("cuda", meter, 10_000)
    tracker.expect({}, {"update": 700, "rollout": 300})
    meter.allocated, meter.reserved = 5000, 6000
    for phase in (Phase.UPDATE, Phase.ROLLOUT):
        with tracker.phase(phase):
            pass
    assert tracker.state().stranded_bytes == {"update": 700, "rollout": 300}  # 1000 were cached, needed or not
    meter.reserved = 5400
    with tracker.phase(Phase.UPDATE):
        pass
    assert tracker.state().stranded_bytes == {"update": 400, "rollout": 300}
    again = MemoryTracker("cuda", meter, 10_000)
    again.load_state_dict(tracker.state_dict())
    assert again.state().stranded_bytes == tracker.state().stranded_bytes
    metrics = tracker.drain()
    assert (metrics["memory/update_reserved_bytes"], metrics["memory/reserved_bytes"]) == (6000, 6000)
    assert "memory/update_reserved_bytes" not in tracker.drain()


def test_a_run_knows_the_plans_that_failed_in_its_forecast() -> None:
    plan = RolloutPlan(score_tokens=4096)
    failed = MemoryFailure(phase=Phase.SCORE, requested_bytes=100, attempt=1, message="", plan=plan)
    tracker = MemoryTracker("cuda", CardMeter(), 10_000)
    tracker.expect({}, {}, (failed,))
    assert tracker.state().failures == (replace(failed, foreseen=True),)
    resumed = MemoryTracker("cuda", CardMeter(), 10_000)
    resumed.load_state_dict(tracker.state_dict())
    assert resumed.state().failures == tracker.state().failures


def test_a_failure_is_remembered_with_what_was_estimated_for_it() -> None:
    geometry = ModelGeometry(2, 64, 128, 4, 2, 16, 500, None, (None, None), 10**6, 10**6, 4, 4, head_trainable=False)
    work, plan = UpdateWork((30,) * 4, (20,) * 4, geometry), UpdatePlan(60)
    tracker = MemoryTracker("cuda", CardMeter(), 10_000)
    failed = MemoryFailure(phase=Phase.UPDATE, requested_bytes=100, attempt=1, message="", plan=plan, work=work)
    tracker.remember(failed)
    estimate = extra_bytes(Phase.UPDATE, work, plan)
    assert estimate
    assert tracker.state().failures == (replace(failed, work=None, estimated_bytes=estimate),)


def test_a_card_that_is_only_counted_tells_what_its_allocator_needed() -> None:
    with SimulatedMemory(allocator=CachingAllocator()) as device:
        meter = SimulatedMeter(device)
        tracker = MemoryTracker("cuda", meter, 2**30)
        with tracker.phase(Phase.UPDATE):
            kept = torch.empty(3 * 2**20, dtype=torch.uint8)
            torch.empty(30 * 2**20, dtype=torch.uint8)
            kept.resize_(4 * 2**20)
        # 3 and 4 MiB share a segment of 20; the 30 MiB are gone when the 4 come.
        assert tracker.reserved_peaks == {Phase.UPDATE: 50 * 2**20}
        assert tracker.state().stranded_bytes == {"update": 50 * 2**20 - 33 * 2**20}
        assert device.live_bytes == 4 * 2**20
        device.empty_cache()
        assert device.allocator.reserved_bytes == 20 * 2**20
        meter.enforce(40 * 2**20)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(21 * 2**20, dtype=torch.uint8)
        assert (device.refusals, kept.nbytes) == (1, 4 * 2**20)
    with SimulatedMemory() as plain:
        assert (SimulatedMeter(plain).reserved_peak_bytes(), SimulatedMeter(plain).stranded_bytes()) == (None, None)


def test_components_come_from_the_simulation() -> None:
    with SimulatedMemory() as device:
        with charge(Component.WEIGHTS):
            kept = torch.empty(3000, dtype=torch.uint8)
        held = SimulatedMeter(device).live_by_component()
    assert held[Component.WEIGHTS] == kept.nbytes == 3000
