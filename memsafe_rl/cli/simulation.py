"""What a simulated device held in a run, as a table for people."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.types import Component, Phase
from memsafe_rl.units import format_bytes

_LEAST_SHARE = 0.01
"""Share of a peak under which a component is not worth telling."""


def show_simulation(device: SimulatedMemory, console: Console) -> None:
    """Prints what a simulated device held: its peak, the host's, and the highest moment of every phase."""
    peaks = device.phase_peaks()
    # The trainer starts a new peak in every phase, so that the device's own is that of the last one.
    highest = max((sum(parts.values()) for parts in peaks.values()), default=device.peak_bytes)
    capacity = device.capacity_bytes
    of_all = "" if not capacity else f" of {format_bytes(capacity)} ({highest / capacity:.0%})"
    console.print(
        f"Simulated device: at most {format_bytes(highest)}{of_all} held, {device.refusals} allocations refused; "
        f"host memory at most {format_bytes(device.host_peak_bytes)}.",
        highlight=False,
    )
    if not device.exact:
        console.print("Counted after each operator, since there is no C++ compiler: a kernel's own bytes are not seen.")
    console.print(_table(device, peaks))


def _table(device: SimulatedMemory, peaks: Mapping[Phase, Mapping[Component, int]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("phase", no_wrap=True)
    for title in ("times", "seconds", "peak"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("held by")
    for phase, parts in peaks.items():
        records = [record for record in device.timeline if record.phase is phase]
        seconds = sum(record.end_seconds - record.start_seconds for record in records)
        table.add_row(
            phase.value,
            str(len(records)),
            f"{seconds:.1f}",
            format_bytes(sum(parts.values())),
            _holders(parts),
        )
    return table


def _holders(parts: Mapping[Component, int]) -> str:
    """Names the components that held at least a hundredth, the largest first."""
    total = max(1, sum(parts.values()))
    shares = sorted(
        ((size / total, component.value.replace("_", " ")) for component, size in parts.items()), reverse=True
    )
    return ", ".join(f"{name} {share:.0%}" for share, name in shares if share >= _LEAST_SHARE)
