"""Loads the pretend CUDA device and gives `torch.cuda` the functions that a CPU build lacks.

`load()` has to run before anything imports torch. What came before it in the process is no matter. Devices: 2 of 8 GiB,
or `PRETEND_DEVICES` of `PRETEND_DEVICE_BYTES`.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.device import build

NEVER = -1
"""An allocation that is never refused."""

_OF_A_DEVICE: tuple[Any, ...] = (ctypes.c_int,)
_NUMBERS = frozenset(
    ("allocated", "reserved", "peak_allocated", "peak_reserved", "allocations", "refusals", "capacity", "elsewhere")
)
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {  # name: result, arguments
    "devices": (ctypes.c_int, ()),
    **dict.fromkeys(_NUMBERS, (ctypes.c_int64, _OF_A_DEVICE)),
    "memory_stats": (ctypes.c_char_p, _OF_A_DEVICE),
    **dict.fromkeys(("empty_cache", "reset_peaks", "reset_totals"), (None, _OF_A_DEVICE)),
    **dict.fromkeys(("set_capacity", "set_elsewhere", "fail_at"), (None, (ctypes.c_int, ctypes.c_int64))),
    "set_fraction": (None, (ctypes.c_int, ctypes.c_double)),
    "set_expandable": (None, (ctypes.c_int, ctypes.c_int)),
    **dict.fromkeys(("operators", "transfers"), (ctypes.c_char_p, ())),
    "reset_counts": (None, ()),
    "random_state": (ctypes.c_int64, (ctypes.c_int, ctypes.c_char_p)),
    "set_random_state": (None, (ctypes.c_int, ctypes.c_char_p, ctypes.c_int64)),
    "seed": (None, (ctypes.c_int, ctypes.c_uint64)),
    "draw_from_host": (None, (ctypes.c_int,)),
}


class PretendDevice:
    """One of the devices: its memory, and what fails on it.

    Args:
        library: the loaded library.
        index: which device.
    """

    def __init__(self, library: Any, index: int) -> None:
        self._library, self.index, self.fraction = library, index, 1.0

    def __getattr__(self, name: str) -> Any:
        """Returns a number: allocated, reserved, peak_allocated, peak_reserved, allocations, refusals, capacity."""
        if name not in _NUMBERS:
            raise AttributeError(name)
        return int(getattr(self._library, f"pretend_{name}")(self.index))

    def memory_stats(self) -> dict[str, int]:
        """Returns what `torch.cuda.memory_stats` gives."""
        stats: dict[str, int] = json.loads(self._library.pretend_memory_stats(self.index))
        return stats

    def set_capacity(self, size_bytes: int) -> None:
        """Sets the bytes of the card; what is reserved may not pass them."""
        self._library.pretend_set_capacity(self.index, size_bytes)

    def set_elsewhere(self, size_bytes: int) -> None:
        """Sets what contexts and libraries hold outside of PyTorch."""
        self._library.pretend_set_elsewhere(self.index, size_bytes)

    def set_expandable(self, is_expandable: bool) -> None:
        """Chooses `expandable_segments`; segments made before stay as they are."""
        self._library.pretend_set_expandable(self.index, is_expandable)

    def set_fraction(self, fraction: float) -> None:
        """Limits reserved bytes to a fraction of the card, as `set_per_process_memory_fraction` does."""
        self._library.pretend_set_fraction(self.index, fraction)
        self.fraction = fraction

    def fail_at(self, place: int) -> None:
        """Refuses the allocation with this place in the life of the device; `NEVER` takes it back."""
        self._library.pretend_fail_at(self.index, place)

    def fail_after(self, more: int) -> None:
        """Refuses the `more`-th allocation from now on."""
        self.fail_at(self.allocations + more)

    @contextmanager
    def capacity_of(self, size_bytes: int) -> Iterator[None]:
        """Sets the bytes of the card for what runs inside."""
        before = self.capacity
        self.set_capacity(size_bytes)
        try:
            yield
        finally:
            self.set_capacity(before)


class Counts:
    """What ran on all devices since the last `reset`: operators and transfers by name, and how often."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def reset(self) -> None:
        """Starts at nothing."""
        self._library.pretend_reset_counts()

    def operators(self) -> dict[str, int]:
        """Counts kernels by operator; views and allocations are none."""
        counts: dict[str, int] = json.loads(self._library.pretend_operators())
        return counts

    def transfers(self) -> dict[str, int]:
        """Counts uploads, read-backs and waits by kind, such as "upload, pageable" or "wait for an event"."""
        counts: dict[str, int] = json.loads(self._library.pretend_transfers())
        return counts

    def total(self, kind: str) -> int:
        """Counts transfers whose kind begins so: "upload", "read-back", "wait"."""
        return sum(times for name, times in self.transfers().items() if name.startswith(kind))


class Pretend:
    """The loaded library: its devices and counts."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.devices = [PretendDevice(library, index) for index in range(library.pretend_devices())]
        self.counts = Counts(library)
        self.kernels: Any = None  # what holds the kernels that only CUDA has

    def draw_from_host(self, draws: bool) -> None:
        """Lets the device draw the CPU generator's random numbers, so that a run can be compared with one there."""
        self.library.pretend_draw_from_host(draws)


_loaded: list[Pretend] = []


def is_loaded() -> bool:
    """Whether this process runs on the pretend device."""
    return bool(_loaded)


def load() -> Pretend:
    """Loads the device, builds it if need be, and completes `torch.cuda`; once in a process.

    Returns:
        Its devices and counts.

    Raises:
        RuntimeError: torch is loaded already, or the device cannot be had on this machine.
    """
    if _loaded:
        return _loaded[0]
    if "torch" in sys.modules:
        raise RuntimeError("The pretend CUDA device has to be loaded before torch is.")
    if reason := build.missing():
        raise RuntimeError(reason)
    library = ctypes.CDLL(str(build.built()), mode=ctypes.RTLD_GLOBAL)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, f"pretend_{name}")
        function.restype, function.argtypes = result, arguments
    _loaded.append(Pretend(library))
    from tests.device import cuda

    cuda.complete(_loaded[0])
    from tests.models.language.cuda_kernels import give_to_cuda  # `memsafe_rl` wants a whole `torch.cuda`

    _loaded[0].kernels = give_to_cuda()
    return _loaded[0]
