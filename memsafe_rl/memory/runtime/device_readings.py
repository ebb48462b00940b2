"""What a device and its allocator say of themselves from inside the process that uses them.

From outside most of it cannot be had: allocated and reserved bytes, retries and out-of-memory errors are counters of
the process, and another process reads only its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from memsafe_rl.memory.runtime.meters import MemoryMeter, SimulatedMeter


@dataclass(frozen=True)
class DeviceFacts:
    """What a device is; does not change while a run lasts."""

    kind: str  # "cuda", "simulated" or "host"
    name: str  # the card's name, or what stands for one
    capability: str | None  # the card's compute capability, such as "9.0"; None where there is no card
    uuid: str | None  # the card's identity for its driver; None where there is no card
    total_bytes: int  # int, bytes of the device


@dataclass(frozen=True)
class AllocatorCounters:
    """What the allocator counts, read without a word to the driver, so that any thread may at any time."""

    allocated_bytes: int  # int, bytes of live tensors; of the whole process where nobody counts tensors
    reserved_bytes: int | None  # int, bytes that the allocator holds, live or not; None where it caches none
    retries: int  # allocations that succeeded only after all cached memory went back to the driver
    ooms: int  # allocations that failed


def device_facts(meter: MemoryMeter, device: torch.device) -> DeviceFacts:
    """Says what a run's device is."""
    if isinstance(meter, SimulatedMeter):
        return DeviceFacts("simulated", "simulated device in host memory", None, None, meter.total_bytes())
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        uuid = getattr(card, "uuid", None)
        capability = f"{card.major}.{card.minor}"
        return DeviceFacts("cuda", card.name, capability, None if uuid is None else str(uuid), meter.total_bytes())
    return DeviceFacts("host", "memory of this machine, no card", None, None, meter.total_bytes())


def allocator_counters(meter: MemoryMeter, device: torch.device) -> AllocatorCounters:
    """Reads the allocator's counters."""
    if isinstance(meter, SimulatedMeter):
        return AllocatorCounters(meter.live_bytes(), None, 0, meter.refusals())
    if device.type == "cuda":
        counted = torch.cuda.memory_stats(device)
        return AllocatorCounters(
            allocated_bytes=int(counted.get("allocated_bytes.all.current", 0)),
            reserved_bytes=int(counted.get("reserved_bytes.all.current", 0)),
            retries=int(counted.get("num_alloc_retries", 0)),
            ooms=int(counted.get("num_ooms", 0)),
        )
    return AllocatorCounters(meter.live_bytes(), None, 0, 0)


def driver_free_bytes(meter: MemoryMeter, device: torch.device) -> int:
    """Asks how many bytes nobody holds: the driver on a card, the operating system elsewhere."""
    if isinstance(meter, SimulatedMeter):
        return max(0, meter.total_bytes() - meter.live_bytes())
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
