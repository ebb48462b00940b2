"""Meters agree with what is known, and a simulated device holds a run to its budget."""

import mmap

import pytest
import torch

from memsafe_rl.accounting import charge
from memsafe_rl.memory.runtime.meters import CudaMeter, HostMeter, SimulatedMeter, meter_for
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.types import Component

CPU = torch.device("cpu")


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


def test_components_come_from_the_simulation() -> None:
    with SimulatedMemory() as device:
        with charge(Component.WEIGHTS):
            kept = torch.empty(3000, dtype=torch.uint8)
        held = SimulatedMeter(device).live_by_component()
    assert held[Component.WEIGHTS] == kept.nbytes == 3000
