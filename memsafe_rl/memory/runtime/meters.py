"""Reads how many bytes this process holds, and holds it to a budget where the device can.

The counts come from the CUDA allocator, from a simulated device, or from the operating system on a CPU. The first two
enforce a budget by themselves, CUDA on reserved bytes; on a CPU the plans keep it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import psutil
import torch

from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.simulated.device import SimulatedMemory, active_simulation, open_simulations
from memsafe_rl.types import Component

_RESET_HIGH_WATER_MARK = b"5"
"""The value that makes Linux forget a process's highest resident size (see proc(5), clear_refs)."""
_FILE_BYTES = 4096
"""More than any of the kernel's files about a process is long."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
"""Unit of the kernel's sizes."""


@dataclass(frozen=True)
class DeviceFacts:
    """What a device is; does not change while a run lasts."""

    kind: str  # "cuda", "simulated" or "host"
    name: str  # the card's name, or what stands for one
    capability: str | None  # the card's compute capability, such as "9.0"; None where there is no card
    uuid: str | None  # the card's identity for its driver; None where there is no card
    total_bytes: int  # int, bytes of the device


class _Undivided:
    """A device that does not know what its bytes are for."""

    def live_by_component(self) -> Mapping[Component, int]:
        """Bytes held now by what they are for: nobody keeps the count."""
        return {}

    def peak_by_component(self) -> Mapping[Component, int]:
        """The same at the peak of the phase left last: nobody keeps the count."""
        return {}

    def stranded_bytes(self) -> int | None:
        """Bytes the allocator needed beside live tensors in that phase: nobody counts what could have gone back."""
        return None


class CudaMeter(_Undivided):
    """The CUDA caching allocator's own counters, and its own limit, which holds reserved bytes."""

    is_exact = True  # whether the count is the tensors' own bytes, not whatever else the process holds

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own_fraction: float | None = None

    @property
    def _card(self) -> torch.device:
        """The device with its number, which PyTorch's own limit wants."""
        return self._device if self._device.index is not None else torch.device("cuda", torch.cuda.current_device())

    def facts(self) -> DeviceFacts:
        """What the card is."""
        card = torch.cuda.get_device_properties(self._device)
        uuid = getattr(card, "uuid", None)
        capability = f"{card.major}.{card.minor}"
        return DeviceFacts("cuda", card.name, capability, None if uuid is None else str(uuid), self.total_bytes())

    def live_bytes(self) -> int:
        """Bytes held now."""
        return torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        """Most bytes held since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        """Starts a new peak at the bytes held now."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def total_bytes(self) -> int:
        """Bytes of the card."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free_bytes(self) -> int:
        """Bytes the driver calls free plus what this process has reserved."""
        return self.unheld_bytes() + torch.cuda.memory_reserved(self._device)

    def unheld_bytes(self) -> int:
        """Bytes that nobody holds, as the driver says."""
        return torch.cuda.mem_get_info(self._device)[0]

    def reserved_bytes(self) -> int | None:
        """Bytes that the allocator holds now, cached ones included."""
        return torch.cuda.memory_reserved(self._device)

    def reserved_peak_bytes(self) -> int | None:
        """Most bytes taken from the driver since `reset_peak`, cached ones included."""
        return torch.cuda.max_memory_reserved(self._device)

    def allocator_retries(self) -> int:
        """Allocations that succeeded only after all cached memory went back to the driver."""
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))

    def refusals(self) -> int:
        """Allocations that failed."""
        return int(torch.cuda.memory_stats(self._device).get("num_ooms", 0))

    def enforce(self, budget_bytes: int) -> None:
        """Has the allocator reserve no more than the budget until `release`; a lower limit set before stays."""
        if self._own_fraction is None:
            self._own_fraction = torch.cuda.get_per_process_memory_fraction(self._card)
        # PyTorch rounds fraction times total down; half a byte more keeps a budget of whole segments whole.
        fraction = (budget_bytes + 0.5) / self.total_bytes()
        torch.cuda.set_per_process_memory_fraction(min(self._own_fraction, fraction), self._card)

    def release(self) -> None:
        """Gives the allocator its own limit back."""
        if self._own_fraction is not None:
            torch.cuda.set_per_process_memory_fraction(self._own_fraction, self._card)
            self._own_fraction = None


class HostMeter(_Undivided):
    """The resident size of this process, mapped files included; its peak restarts on Linux only."""

    is_exact = False

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._sizes = _kept_open(self, "/proc/self/statm", os.O_RDONLY)
        self._status = _kept_open(self, "/proc/self/status", os.O_RDONLY)
        self._clear_refs = _kept_open(self, "/proc/self/clear_refs", os.O_WRONLY)

    def facts(self) -> DeviceFacts:
        """Says that there is no card."""
        return DeviceFacts("host", "memory of this machine, no card", None, None, self.total_bytes())

    def live_bytes(self) -> int:
        """Resident bytes now."""
        if self._sizes is None:
            return int(self._process.memory_info().rss)
        return int(os.pread(self._sizes, _FILE_BYTES, 0).split()[1]) * _PAGE_BYTES

    def peak_bytes(self) -> int:
        """Highest resident bytes since `reset_peak` on Linux, resident bytes now elsewhere."""
        if self._status is not None:
            _, found, rest = os.pread(self._status, _FILE_BYTES, 0).partition(b"VmHWM:")
            if found:
                return int(rest.split(maxsplit=1)[0]) * 1024
        return self.live_bytes()

    def reset_peak(self) -> None:
        """Restarts the highest resident size where the system allows it."""
        if self._clear_refs is not None:
            os.pwrite(self._clear_refs, _RESET_HIGH_WATER_MARK, 0)

    def total_bytes(self) -> int:
        """Bytes of physical memory."""
        return int(psutil.virtual_memory().total)

    def free_bytes(self) -> int:
        """Bytes available to new work plus what this process holds."""
        return self.unheld_bytes() + self.live_bytes()

    def unheld_bytes(self) -> int:
        """Bytes available to new work, as the operating system says."""
        return int(psutil.virtual_memory().available)

    def reserved_bytes(self) -> int | None:
        """None: nothing is cached."""
        return None

    def reserved_peak_bytes(self) -> int | None:
        """None: what the process holds is all there is to know."""
        return None

    def allocator_retries(self) -> int:
        """None: memory of the host is not cached in blocks that could run short."""
        return 0

    def refusals(self) -> int:
        """None: nobody refuses."""
        return 0

    def enforce(self, budget_bytes: int) -> None:
        """Does nothing: the plans keep the budget, and a limit of the operating system would kill, not refuse."""

    def release(self) -> None:
        """Does nothing: nothing was enforced."""


class SimulatedMeter:
    """The counters of a simulated device."""

    is_exact = True

    def __init__(self, simulation: SimulatedMemory) -> None:
        self._simulation = simulation
        self._own_capacity_bytes = simulation.capacity_bytes
        self._enforced = False

    @property
    def is_open(self) -> bool:
        """Whether the simulated device is in force."""
        return self._simulation in open_simulations()

    def facts(self) -> DeviceFacts:
        """Says that the device is simulated."""
        return DeviceFacts("simulated", "simulated device in host memory", None, None, self.total_bytes())

    def live_bytes(self) -> int:
        """Bytes held now."""
        return self._simulation.live_bytes

    def peak_bytes(self) -> int:
        """Most bytes held since `reset_peak`."""
        return self._simulation.peak_bytes

    def reset_peak(self) -> None:
        """Starts a new peak at the bytes held now."""
        self._simulation.reset_peak()

    def total_bytes(self) -> int:
        """Bytes of the simulated device, whatever is enforced on it; the machine's memory if it has no limit."""
        capacity = self._own_capacity_bytes if self._enforced else self._simulation.capacity_bytes
        return int(psutil.virtual_memory().total) if capacity is None else capacity

    def free_bytes(self) -> int:
        """Bytes nobody else holds: all of them."""
        return self.total_bytes()

    def unheld_bytes(self) -> int:
        """Bytes that nobody holds."""
        return max(0, self.total_bytes() - self.live_bytes())

    def reserved_bytes(self) -> int | None:
        """None: a simulated device caches nothing."""
        return None

    def live_by_component(self) -> Mapping[Component, int]:
        """Bytes held now by what they are for."""
        return self._simulation.live_by_component()

    def peak_by_component(self) -> Mapping[Component, int]:
        """Bytes held by what they are for, at the peak of the phase left last."""
        record = self._simulation.last_phase
        return {} if record is None else record.components

    def reserved_peak_bytes(self) -> int | None:
        """Most bytes a card's allocator would have reserved in the phase left last; None of a plain device."""
        record = self._simulation.last_phase
        return None if record is None or record.reserved is None else record.reserved.reserved

    def stranded_bytes(self) -> int | None:
        """Bytes that it could not have done without beside live tensors, in that phase."""
        record = self._simulation.last_phase
        return None if record is None or record.reserved is None else record.reserved.needed - record.reserved.allocated

    def allocator_retries(self) -> int:
        """None: a simulated device caches nothing."""
        return 0

    def refusals(self) -> int:
        """Allocations that the device has refused."""
        return self._simulation.refusals

    def enforce(self, budget_bytes: int) -> None:
        """Lowers the device's capacity to the budget until `release`."""
        if not self._enforced:
            self._own_capacity_bytes = self._simulation.capacity_bytes
            self._enforced = True
        own = self._own_capacity_bytes
        self._simulation.set_capacity(budget_bytes if own is None else min(own, budget_bytes))

    def release(self) -> None:
        """Gives the device its own capacity back."""
        if self._enforced:
            self._simulation.set_capacity(self._own_capacity_bytes)
            self._enforced = False


MemoryMeter = CudaMeter | HostMeter | SimulatedMeter
"""Bytes held on one device."""


def check_meter(meter: MemoryMeter) -> None:
    """Refuses to count on one device what happens on another."""
    if isinstance(meter, SimulatedMeter):
        if not meter.is_open:
            raise ConfigError(
                "the trainer was built inside a SimulatedMemory that has been left. Train inside the same with block, "
                "or build another trainer."
            )
    elif (simulation := active_simulation()) is not None and simulation.capacity_bytes is not None:
        raise ConfigError(
            "the trainer was built outside of the SimulatedMemory it is used in, so that its weights are not on that "
            "device. Build model and trainer inside the with block."
        )


def meter_for(device: torch.device) -> MemoryMeter:
    """Chooses the meter of a device."""
    simulation = active_simulation()
    if simulation is not None:
        return SimulatedMeter(simulation)
    return CudaMeter(device) if device.type == "cuda" else HostMeter()


def _kept_open(owner: object, path: str, flags: int) -> int | None:
    """Opens one of the kernel's files for as long as its owner lives, for opening costs more than reading."""
    try:
        descriptor = os.open(path, flags)
    except OSError:
        return None
    weakref.finalize(owner, os.close, descriptor)
    return descriptor
