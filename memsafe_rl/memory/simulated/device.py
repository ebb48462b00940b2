"""A device of N bytes on any CPU: counts what is held, says what it is for, and refuses what does not fit."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from memsafe_rl.accounting import listen, stop_listening
from memsafe_rl.errors import MemsafeError
from memsafe_rl.memory.simulated.caching_allocator import CachingAllocator, Reserved
from memsafe_rl.memory.simulated.counting import CountingAllocator, compiler_available
from memsafe_rl.memory.simulated.ledger import ByteCounter, Held, StorageLedger
from memsafe_rl.types import Component, Phase
from memsafe_rl.units import parse_bytes

_WORKING_PHASES = frozenset({Phase.ROLLOUT, Phase.SCORE, Phase.UPDATE, Phase.EVALUATE})
"""Phases in which networks run, so that what nobody marks is activations."""

_active: list[SimulatedMemory] = []


@dataclass(frozen=True)
class PhaseRecord:
    """One phase that was entered and left."""

    phase: Phase  # what the run was doing
    start_seconds: float  # when it was entered, in seconds since the simulation was
    end_seconds: float  # when it was left, in seconds since the simulation was entered
    live_bytes: int  # int, bytes held when it was left
    peak_bytes: int  # int, most bytes held within it, phases nested in it left out
    components: Mapping[Component, int]  # int, bytes of every component at that peak; they sum to it
    reserved: Reserved | None = None  # the highest counts of the allocator in force; None without one


@dataclass
class _OpenPhase:
    """A phase that was entered and not left yet."""

    phase: Phase
    start_seconds: float
    unmarked_before: Component
    peak: dict[Component, int] = field(default_factory=dict)
    reserved: Reserved = field(default_factory=Reserved)

    def see(self, split: dict[Component, int], allocator: CachingAllocator | None) -> None:
        if sum(split.values()) >= sum(self.peak.values()) or not self.peak:
            self.peak = split
        if allocator is not None:
            self.reserved = self.reserved.over(allocator.restart_peak())


def _counted(name: str, doc: str) -> Any:
    """Makes an attribute that is read from what counts."""
    return property(attrgetter(f"_counter.{name}"), doc=doc)


class SimulatedMemory(ByteCounter):
    """Counts live tensor storage on the CPU and raises a genuine `torch.OutOfMemoryError` where a device would.

    With a C++ compiler it stands in for PyTorch's allocator (`CountingAllocator`): exact, in every thread, failing
    inside the kernel. Without one it counts storages after each operator (`StorageLedger`): temporaries inside
    kernels go unseen, and so do other threads. Only what is allocated inside counts, and what is declared to be held
    (`accounting.hold`), as weights mapped from a file are when the library loads them; so build the model inside.

    Bytes are attributed by the marks of `accounting`, which the library sets as it works: to a phase, to a component,
    or to the host, whose bytes are counted apart and never refused. What carries no mark counts as activations while a
    network runs (rollout, score, update, evaluate) and as other elsewhere.

    Args:
        capacity_bytes: bytes, or a size such as "2GiB"; an allocation that would pass it is refused. None for no limit.
        fail_at: the allocation that fails, counted from 1 at entry; later ones succeed. None for none.
        exact: True demands the allocator, False the ledger; None takes what is there.
        allocator: rules by which a card's allocator reserves bytes for what the ledger counts, empty yet; the capacity
            holds the reserved bytes then.

    Raises:
        ConfigError: the capacity is no size or negative, or `fail_at` is under 1.
        MemsafeError: on entry, if the allocator is demanded and there is no C++ compiler.
    """

    def __init__(
        self,
        capacity_bytes: int | str | None = None,
        fail_at: int | None = None,
        *,
        exact: bool | None = None,
        allocator: CachingAllocator | None = None,
    ) -> None:
        capacity_bytes = parse_bytes(capacity_bytes) if isinstance(capacity_bytes, str) else capacity_bytes
        self.exact = allocator is None and (compiler_available() if exact is None else exact)
        self.allocator = allocator
        self._counter: CountingAllocator | StorageLedger
        if self.exact:
            self._counter = CountingAllocator(capacity_bytes, fail_at)
        else:
            self._counter = StorageLedger(allocator, capacity_bytes, fail_at)
        self._entered_at = 0.0
        self._open_phases: list[_OpenPhase] = []
        self._timeline: list[PhaseRecord] = []

    capacity_bytes: int | None = _counted("capacity_bytes", "Bytes of the device, None if unlimited.")
    allocations: int = _counted("allocations", "Allocations on the device since entry, refused ones included.")
    refusals: int = _counted("refusals", "Allocations refused since entry.")

    @property
    def timeline(self) -> list[PhaseRecord]:
        """One record for every phase left so far, in the order they were left."""
        return list(self._timeline)

    @property
    def last_phase(self) -> PhaseRecord | None:
        """The record of the phase that was left last; None before any was."""
        return self._timeline[-1] if self._timeline else None

    def split(self, held: Held) -> tuple[int, dict[Component, int]]:
        """Returns how many bytes there are, and how they divide."""
        return self._counter.split(held)

    def live_by_component(self) -> dict[Component, int]:
        """Divides `live_bytes` by what they are for; the bytes of all components sum to it."""
        return self.split(Held.NOW)[1]

    def phase_peaks(self) -> dict[Phase, dict[Component, int]]:
        """Divides, by component, the most bytes held in each phase entered so far; `reset_peak` leaves it alone."""
        self._look()
        peaks: dict[Phase, dict[Component, int]] = {}
        left = [(record.phase, record.components) for record in self._timeline]
        for phase, split in (*left, *((one.phase, one.peak) for one in reversed(self._open_phases))):
            if phase not in peaks or sum(split.values()) > sum(peaks[phase].values()):
                peaks[phase] = dict(split)
        return peaks

    def reserved_peaks(self) -> dict[Phase, Reserved]:
        """Returns the highest counts of the allocator in every phase left so far; nothing without an allocator."""
        peaks: dict[Phase, Reserved] = {}
        for record in self._timeline:
            if record.reserved is not None:
                peaks[record.phase] = record.reserved.over(peaks.get(record.phase, Reserved()))
        return peaks

    def empty_cache(self) -> None:
        """Gives back what an allocator keeps for later; without one, nothing is kept."""
        if self.allocator is not None:
            self.allocator.empty_cache()

    def reset_peak(self) -> None:
        """Starts a new `peak_bytes` at the bytes held now; peaks of phases stay."""
        self._counter.restart(Held.PEAK)

    def set_capacity(self, capacity_bytes: int | None) -> None:
        """Changes the capacity, in bytes counted from entry, from now on; None for no limit."""
        self._counter.set_capacity(capacity_bytes)

    @property
    def ledger(self) -> StorageLedger:
        """What counts where no allocator does, and can be told of what it does not see."""
        if not isinstance(self._counter, StorageLedger):
            raise MemsafeError("A device that counts real allocations counts all of them, whole. Pass exact=False.")
        return self._counter

    def fail_after(self, allocations: int) -> None:
        """Chooses the next allocation that fails, counted from 1 from now on."""
        self._counter.fail_after(allocations)

    def enter_phase(self, phase: Phase) -> None:
        """Attributes what is allocated from now on to a phase; `accounting.in_phase` calls it."""
        self._look()
        unmarked = Component.ACTIVATIONS if phase in _WORKING_PHASES else Component.OTHER
        self._open_phases.append(_OpenPhase(phase, self._seconds(), self._counter.set_unmarked(unmarked)))
        self._counter.restart(Held.SPAN)

    def leave_phase(self) -> None:
        """Records the phase entered last and goes back to the one before; `accounting.in_phase` calls it."""
        if self not in _active:
            return
        self._look()
        left = self._open_phases.pop()
        self._counter.set_unmarked(left.unmarked_before)
        self._counter.restart(Held.SPAN)
        self._timeline.append(
            PhaseRecord(
                phase=left.phase,
                start_seconds=left.start_seconds,
                end_seconds=self._seconds(),
                live_bytes=self.live_bytes,
                peak_bytes=sum(left.peak.values()),
                components=left.peak,
                reserved=None if self.allocator is None else left.reserved,
            )
        )

    def _look(self) -> None:
        """Has the phase entered last see the most bytes held since then, or since one nested in it was left."""
        if self._open_phases:
            self._open_phases[-1].see(self.split(Held.SPAN)[1], self.allocator)

    def forget_phases(self, kept: Collection[Phase] = ()) -> None:
        """Forgets all other phases left so far."""
        if self.allocator is not None:
            self.allocator.restart_peak()
        self._timeline = [record for record in self._timeline if record.phase in kept]

    def __enter__(self) -> SimulatedMemory:
        self._counter.__enter__()
        self._entered_at = time.perf_counter()
        self._open_phases.clear()
        _active.append(self)
        listen(self, self._counter)
        return self

    def __exit__(self, *error: Any) -> None:
        stop_listening(self, self._counter)
        _active.remove(self)
        self._counter.__exit__(*error)

    def _seconds(self) -> float:
        return time.perf_counter() - self._entered_at


def open_simulations() -> tuple[SimulatedMemory, ...]:
    """Returns the simulated devices in force, outermost first."""
    return tuple(_active)


def active_simulation() -> SimulatedMemory | None:
    """Returns the innermost simulated device in force, None outside of any."""
    return _active[-1] if _active else None
