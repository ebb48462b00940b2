"""Reads how many bytes this process holds: from the CUDA allocator, or from the operating system on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import psutil
import torch

from memsafe_rl.memory.simulated import SimulatedMemory, active_simulation

_RESET_HIGH_WATER_MARK = "5"
"""The value that makes Linux forget a process's highest resident size (see proc(5), clear_refs)."""


class MemoryMeter(Protocol):
    """Bytes held on one device."""

    def live_bytes(self) -> int:
        """Bytes held now."""

    def peak_bytes(self) -> int:
        """Most bytes held since `reset_peak`."""

    def reset_peak(self) -> None:
        """Starts a new peak at the bytes held now."""

    def total_bytes(self) -> int:
        """Bytes of the device."""

    def free_bytes(self) -> int:
        """Bytes nobody holds, plus what this process holds already."""


class CudaMeter:
    """The CUDA caching allocator's own counters (allocated bytes).

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

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
        return torch.cuda.mem_get_info(self._device)[0] + torch.cuda.memory_reserved(self._device)


class HostMeter:
    """The resident size of this process as the operating system sees it.

    PyTorch keeps no count of CPU memory; the resident size includes Python and mapped files, and its peak can be
    restarted on Linux only.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._clear_refs = Path("/proc/self/clear_refs")
        self._status = Path("/proc/self/status")

    def live_bytes(self) -> int:
        """Resident bytes now."""
        return int(self._process.memory_info().rss)

    def peak_bytes(self) -> int:
        """Highest resident bytes since `reset_peak` on Linux, resident bytes now elsewhere."""
        if self._status.exists():
            for line in self._status.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return self.live_bytes()

    def reset_peak(self) -> None:
        """Restarts the highest resident size where the system allows it."""
        if self._clear_refs.exists():
            self._clear_refs.write_text(_RESET_HIGH_WATER_MARK)

    def total_bytes(self) -> int:
        """Bytes of physical memory."""
        return int(psutil.virtual_memory().total)

    def free_bytes(self) -> int:
        """Bytes available to new work plus what this process holds."""
        return int(psutil.virtual_memory().available) + self.live_bytes()


class SimulatedMeter:
    """The counters of a simulated device.

    Args:
        simulation: a simulated device in force.
    """

    def __init__(self, simulation: SimulatedMemory) -> None:
        self._simulation = simulation

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
        """Bytes of the simulated device; the machine's memory if it has no limit."""
        capacity = self._simulation.capacity_bytes
        return int(psutil.virtual_memory().total) if capacity is None else capacity

    def free_bytes(self) -> int:
        """Bytes nobody else holds: all of them."""
        return self.total_bytes()


def meter_for(device: torch.device) -> MemoryMeter:
    """Chooses the meter of a device.

    Args:
        device: where the model lives.

    Returns:
        The simulated device in force, the CUDA allocator's counters, or the process's resident size.
    """
    simulation = active_simulation()
    if simulation is not None:
        return SimulatedMeter(simulation)
    return CudaMeter(device) if device.type == "cuda" else HostMeter()
