"""Counts every CPU byte that PyTorch allocates, by standing in for its allocator.

PyTorch has no peak counter for CPU memory. A small allocator in C++ (`cpu_allocator.cpp`) counts requests and passes
them on; it is compiled once per user and PyTorch version, and sees what no Python-level count can see: temporaries
inside kernels, and allocations of every thread. Each block remembers what it is for, so that it is taken off the right
count whenever and wherever it is freed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Hashable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from memsafe_rl.errors import MemsafeError
from memsafe_rl.memory.simulated.ledger import ByteCounter, Held, check_limits, refusal, storages_of
from memsafe_rl.types import Component

_SOURCE = Path(__file__).with_name("cpu_allocator.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_UNLIMITED = -1
_MOST_ELEMENTS = 2**24  # of a kernel's arguments, up to which it is run to see what it holds inside (some 0.1 s)
_UNMARKED = -1
_ADMITTED, _CHOSEN = 0, 1  # whether the allocator took a storage; else it was too large
_COMPONENTS = tuple(Component)
_NUMBERS = {component: number for number, component in enumerate(_COMPONENTS)}
_PEAKS = (Held.PEAK, Held.SPAN, Held.HOST_PEAK)  # those that the allocator keeps

_INSIDE: dict[Hashable, int] = {}  # what kernels were found to hold
_open_counts: list[CountingAllocator] = []
"""Counts that are open now, outermost first; they share one allocator."""

_Split = tuple[int, ...]
"""Bytes held, then how they divide, by the number of the component."""

_SPLIT = 1 + len(_COMPONENTS)
_ALLOCATIONS, _REFUSALS, _DEVICE, _HOST = 0, 1, slice(2, 2 + _SPLIT), slice(2 + _SPLIT, 2 + 2 * _SPLIT)
"""Where the allocator's counters stand in a reading."""


class CountingAllocator(ByteCounter):
    """Counts what PyTorch allocates on the CPU, nested too; at entry and exit no other thread may allocate."""

    def __init__(self, capacity_bytes: int | None = None, fail_at: int | None = None) -> None:
        check_limits(capacity_bytes, fail_at)
        self.capacity_bytes = capacity_bytes  # that may be held, counted from entry; None for no limit
        self._fail_at = fail_at
        self._library: ctypes.CDLL | None = None
        self._base = self._closed = (0,) * _HOST.stop
        self._highest: dict[Held, _Split] = dict.fromkeys(_PEAKS, (0,) * _SPLIT)

    def split(self, held: Held) -> tuple[int, dict[Component, int]]:
        """Returns how many bytes there are, and how they divide."""
        if held in (Held.NOW, Held.HOST_NOW):
            numbers = self._reading()[_DEVICE if held is Held.NOW else _HOST]
        else:
            highest = self._highest[held]
            if self._library is not None:
                highest = max(_read_peak(self._library, held), highest, key=itemgetter(0))  # the newer of equal ones
            numbers = _minus(highest, self._base[_HOST if held is Held.HOST_PEAK else _DEVICE])
        return numbers[0], dict(zip(_COMPONENTS, numbers[1:], strict=True))

    def restart(self, held: Held) -> None:
        """Starts a new peak or span at the bytes held now; the other, and counts around this one, keep theirs."""
        library = self._opened()
        _remember(library, held)
        library.memsafe_restart_peak(held)
        self._highest[held] = _read_peak(library, held)

    @property
    def allocations(self) -> int:
        """Allocations asked for since entry, refused ones included, host memory left out."""
        return self._reading()[_ALLOCATIONS]

    @property
    def refusals(self) -> int:
        """Allocations refused since entry."""
        return self._reading()[_REFUSALS]

    def set_capacity(self, capacity_bytes: int | None) -> None:
        """Changes the capacity from now on."""
        check_limits(capacity_bytes, None)
        self.capacity_bytes = capacity_bytes
        _apply_limits(self._opened())

    def fail_after(self, allocations: int) -> None:
        """Chooses the next allocation that fails."""
        check_limits(None, allocations)
        self._fail_at = self.allocations + allocations
        _apply_limits(self._opened())

    def mark_component(self, component: Component | None) -> Component | None:
        """Says what this thread allocates for from now on; a mark may outlive the count."""
        if self._library is None:
            return None
        before = self._library.memsafe_mark_component(_UNMARKED if component is None else _NUMBERS[component])
        return None if before == _UNMARKED else _COMPONENTS[before]

    def mark_others(self, on_host: bool) -> bool:
        """Counts what threads without marks of their own allocate from now on as host memory or not."""
        return self._library is not None and bool(self._library.memsafe_mark_others(on_host))

    def mark_host(self, on_host: bool) -> bool:
        """Says whether what this thread allocates from now on stands for host memory, which is counted apart."""
        return self._library is not None and bool(self._library.memsafe_mark_host(on_host))

    def set_unmarked(self, component: Component) -> Component:
        """Says what is allocated for where a thread has no mark."""
        before: int = self._opened().memsafe_set_unmarked(_NUMBERS[component])
        return _COMPONENTS[before]

    def claim(self, component: Component, tensors: Iterable[Tensor]) -> None:
        """Moves the bytes of tensors that count to a component."""
        found = [storage for tensor in tensors for storage in storages_of(tensor)]
        addresses = (ctypes.c_int64 * len(found))(*(storage._cdata for storage in found))
        self._opened().memsafe_claim(_NUMBERS[component], addresses, len(found))

    def hold(self, component: Component, tensors: Iterable[Tensor]) -> None:
        """Counts tensors made elsewhere, such as weights mapped from a file, until they die."""
        library, held = self._opened(), ctypes.c_int64()
        for storage in (storage for tensor in tensors for storage in storages_of(tensor)):
            verdict = library.memsafe_hold(_NUMBERS[component], storage._cdata, ctypes.byref(held))
            if verdict != _ADMITTED:
                raise refusal(storage.nbytes(), held.value, chosen=verdict == _CHOSEN)

    def is_on_host(self, tensor: Tensor) -> bool:
        """Returns whether a tensor counts as host memory."""
        library = self._opened()
        return any(library.memsafe_is_on_host(storage._cdata) for storage in storages_of(tensor))

    def __enter__(self) -> CountingAllocator:
        if self._library is not None:
            raise MemsafeError("This count is open already. Make a second CountingAllocator for a nested count.")
        library = _library()
        if not _open_counts and library.memsafe_install(_NUMBERS[Component.OTHER]) != 0:
            raise MemsafeError(
                "PyTorch did not take the counting CPU allocator, because another allocator was installed with a "
                "higher priority. Remove it, or count with StorageLedger."
            )
        self._base, self._library = _read(library), library
        for held in _PEAKS:
            self.restart(held)
        _open_counts.append(self)
        _apply_limits(library)
        return self

    def __exit__(self, *_: object) -> None:
        library = self._opened()
        for held in _PEAKS:
            _remember(library, held)
        self._closed = self._reading()
        self._library = None
        _open_counts.remove(self)
        if _open_counts:
            _apply_limits(library)
        else:
            library.memsafe_uninstall()

    def _opened(self) -> ctypes.CDLL:
        if self._library is None:
            raise MemsafeError("This count is closed. Use it inside its `with` block.")
        return self._library

    def _reading(self) -> tuple[int, ...]:
        return self._closed if self._library is None else _minus(_read(self._library), self._base)


def measured_inside(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Counts what a CPU kernel holds besides arguments and result, by running it once on others of the same shapes."""
    given = tree_leaves((args, kwargs))
    if sum(one.numel() for one in given if isinstance(one, Tensor)) > _MOST_ELEMENTS or not compiler_available():
        return 0
    key = func, *((*one.shape, one.stride(), one.dtype) if isinstance(one, Tensor) else one for one in given)
    if key not in _INSIDE:
        with _disable_current_modes(), torch.no_grad(), CountingAllocator() as count:
            before = count.mark_host(True)  # devices that count around this one hold none of it
            try:
                args, kwargs = tree_map_only(
                    Tensor, lambda one: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype), (args, kwargs)
                )
                count.restart(Held.HOST_PEAK)
                _ = func(*args, **kwargs)
                _INSIDE[key] = count.host_peak_bytes - count.host_live_bytes  # a product of halves in float32, say
            finally:
                count.mark_host(before)
    return _INSIDE[key]


def compiler_available() -> bool:
    """Whether `CountingAllocator` can be used: it was compiled before, or there is a compiler."""
    return _binary_path().exists() or _compiler() is not None


def _minus(numbers: tuple[int, ...], base: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(value - start for value, start in zip(numbers, base, strict=True))


def _read(library: ctypes.CDLL) -> tuple[int, ...]:
    width = 1 + library.memsafe_components()
    numbers = (ctypes.c_int64 * (2 + 2 * width))()
    library.memsafe_read(numbers)
    return (*numbers[: 2 + _SPLIT], *numbers[2 + width : 2 + width + _SPLIT])


def _read_peak(library: ctypes.CDLL, held: Held) -> _Split:
    numbers = (ctypes.c_int64 * (1 + library.memsafe_components()))()
    library.memsafe_read_peak(held, numbers)
    return tuple(numbers[:_SPLIT])


def _remember(library: ctypes.CDLL, held: Held) -> None:
    """Hands a peak to all open counts, before the allocator starts a new one."""
    highest = _read_peak(library, held)
    for count in _open_counts:
        count._highest[held] = max(highest, count._highest[held], key=itemgetter(0))


def _apply_limits(library: ctypes.CDLL) -> None:
    """Hands the tightest capacity and the nearest chosen failure of all open counts to the allocator."""
    limits = [
        count._base[_DEVICE][0] + count.capacity_bytes for count in _open_counts if count.capacity_bytes is not None
    ]
    library.memsafe_set_limit(max(0, min(limits)) if limits else _UNLIMITED)
    asked = _read(library)[_ALLOCATIONS]
    chosen = [count._base[_ALLOCATIONS] + count._fail_at for count in _open_counts if count._fail_at is not None]
    library.memsafe_set_fail_at(min((number for number in chosen if number > asked), default=0))


@functools.cache
def _library() -> ctypes.CDLL:
    binary = _binary_path()
    if not binary.exists():
        _compile(binary)
    # The interpreter's lock is kept: calls are short, and none waits for anything that needs it.
    library = ctypes.PyDLL(str(binary))
    number, address = ctypes.c_int64, ctypes.c_void_p
    library.memsafe_set_limit.argtypes = library.memsafe_set_fail_at.argtypes = [number]
    library.memsafe_claim.argtypes = [ctypes.c_int, address, number]
    library.memsafe_hold.argtypes = [ctypes.c_int, number, address]
    library.memsafe_is_on_host.argtypes = [number]
    return library


def _binary_path() -> Path:
    key = hashlib.sha256(_SOURCE.read_bytes() + f"{torch.__version__} {platform.machine()}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "memsafe_rl" / f"cpu_allocator-{torch.__version__}-{key}.so"


def _compiler() -> str | None:
    chosen = os.environ.get("CXX")
    return chosen if chosen and shutil.which(chosen) else next(filter(None, map(shutil.which, _COMPILERS)), None)


def _compile(binary: Path) -> None:
    """Compiles the allocator and moves it into place whole, so that processes compiling at once do not disturb."""
    compiler = _compiler()
    if compiler is None:
        raise MemsafeError(
            "Counting CPU memory with the allocator needs a C++ compiler, and none of CXX, c++, g++, clang++ was "
            "found. Install one (Debian: g++), or count with StorageLedger, which needs none."
        )
    torch_directory = Path(torch.__file__).parent
    binary.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=binary.parent) as directory:
        output = Path(directory) / binary.name
        command = [compiler, "-O2", "-std=c++20", "-shared", "-fPIC", str(_SOURCE), "-o", str(output)]
        command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
        command += [f"-I{torch_directory / 'include'}", f"-L{torch_directory / 'lib'}", "-lc10"]
        command += [f"-Wl,-rpath,{torch_directory / 'lib'}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise MemsafeError(
                f"Compiling the counting CPU allocator with {compiler} failed ({done.returncode}). Set CXX to a C++20 "
                f"compiler, or count with StorageLedger. The compiler said:\n{done.stderr[-2000:]}"
            )
        output.replace(binary)
