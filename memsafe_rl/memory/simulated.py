"""A device of N bytes on any CPU: counts what is held and refuses what does not fit."""

from __future__ import annotations

from types import TracebackType

import torch

from memsafe_rl.memory.counting import CountingAllocator, check_limits, compiler_available
from memsafe_rl.memory.ledger import StorageLedger

_active: list[SimulatedMemory] = []


class SimulatedMemory:
    """Counts live tensor storage on the CPU and raises a genuine `torch.OutOfMemoryError` where a device would.

    With a C++ compiler it stands in for PyTorch's allocator (`CountingAllocator`): exact, in every thread, failing
    inside the kernel. Without one it counts storages after each operator (`StorageLedger`): temporaries inside
    kernels go unseen, and so do other threads. Only what is allocated inside counts, so build the model inside.

    Args:
        capacity_bytes: int, bytes; an allocation that would pass it is refused. None for no limit.
        fail_at: the allocation that fails, counted from 1 at entry; later ones succeed. None for none.
        exact: True demands the allocator, False the ledger; None takes what is there.

    Raises:
        ConfigError: the capacity is negative, or `fail_at` is under 1.
        MemsafeError: on entry, if the allocator is demanded and there is no C++ compiler.
    """

    def __init__(
        self, capacity_bytes: int | None = None, fail_at: int | None = None, *, exact: bool | None = None
    ) -> None:
        self.exact = compiler_available() if exact is None else exact
        self._counter: CountingAllocator | LimitedLedger
        self._counter = (CountingAllocator if self.exact else LimitedLedger)(capacity_bytes, fail_at)

    @property
    def live_bytes(self) -> int:
        """Bytes held now (at exit, once it is closed)."""
        return self._counter.live_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes held since entry or `reset_peak`; refused allocations are no part of it."""
        return self._counter.peak_bytes

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes of the device, None if unlimited."""
        return self._counter._capacity_bytes

    @property
    def allocations(self) -> int:
        """Allocations asked for since entry, refused ones included."""
        return self._counter.allocations

    @property
    def refusals(self) -> int:
        """Allocations refused since entry."""
        return self._counter.refusals

    def reset_peak(self) -> None:
        """Starts a new peak at the bytes held now."""
        self._counter.reset_peak()

    def set_capacity(self, capacity_bytes: int | None) -> None:
        """Changes the capacity from now on.

        Args:
            capacity_bytes: int, bytes, counted from entry; None for no limit.
        """
        self._counter.set_capacity(capacity_bytes)

    def fail_after(self, allocations: int) -> None:
        """Chooses the next allocation that fails.

        Args:
            allocations: which one from now on, from 1.
        """
        self._counter.fail_after(allocations)

    def __enter__(self) -> SimulatedMemory:
        self._counter.__enter__()
        _active.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _active.remove(self)
        self._counter.__exit__(kind, error, traceback)


def active_simulation() -> SimulatedMemory | None:
    """Gives the innermost simulated device in force, None outside of any."""
    return _active[-1] if _active else None


class LimitedLedger:
    """A `StorageLedger` with the limits of `CountingAllocator`; it refuses after the operator ran, before it counts.

    Args:
        capacity_bytes: int, bytes; None for no limit.
        fail_at: the storage that is refused, counted from 1 at entry; None for none.
    """

    def __init__(self, capacity_bytes: int | None = None, fail_at: int | None = None) -> None:
        check_limits(capacity_bytes, fail_at)
        self._capacity_bytes = capacity_bytes
        self._fail_at = fail_at
        self._ledger = StorageLedger(on_growth=self._admit)
        self.allocations = 0
        self.refusals = 0

    @property
    def live_bytes(self) -> int:
        """Bytes held now."""
        return self._ledger.live_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes held since entry or `reset_peak`."""
        return self._ledger.peak_bytes

    def reset_peak(self) -> None:
        """Starts a new peak at the bytes held now."""
        self._ledger.reset_peak()

    def set_capacity(self, capacity_bytes: int | None) -> None:
        """Changes the capacity from now on."""
        check_limits(capacity_bytes, None)
        self._capacity_bytes = capacity_bytes

    def fail_after(self, allocations: int) -> None:
        """Chooses the next storage that is refused, from 1."""
        check_limits(None, allocations)
        self._fail_at = self.allocations + allocations

    def __enter__(self) -> LimitedLedger:
        self._ledger.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ledger.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]

    def _admit(self, size: int) -> None:
        self.allocations += 1
        chosen = self.allocations == self._fail_at
        held = self._ledger.live_bytes
        if chosen or (self._capacity_bytes is not None and held + size > self._capacity_bytes):
            self.refusals += 1
            reason = "this allocation was chosen to fail." if chosen else "the capacity would be passed."
            raise torch.OutOfMemoryError(
                f"Simulated device out of memory. Tried to allocate {size} bytes. {held} bytes are live; {reason}"
            )
