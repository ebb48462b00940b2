"""Counts every CPU byte that PyTorch allocates, by standing in for its allocator.

PyTorch has no peak counter for CPU memory. A small allocator in C++ (`cpu_allocator.cpp`) counts requests and passes
them on; it is compiled once per user and PyTorch version, and sees what no Python-level count can see: temporaries
inside kernels, and allocations of every thread.
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
from pathlib import Path
from types import TracebackType

import torch

from memsafe_rl.errors import ConfigError, MemsafeError

_SOURCE = Path(__file__).with_name("cpu_allocator.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_UNLIMITED = -1
_COUNTERS = ("live", "peak", "allocations", "refusals")

_open_counts: list[CountingAllocator] = []
"""Counts that are open now, outermost first; they share one allocator."""


class CountingAllocator:
    """Counts the bytes PyTorch holds on the CPU, from entry to exit.

    Only blocks allocated after entry count: the counters start at 0, and freeing what was there before changes nothing.
    Counts may be nested; the inner one counts from its own entry, so that freeing a block of the outer one makes its
    `live_bytes` fall below 0. Blocks outlive the count safely. Enter and leave while no other thread allocates.

    Args:
        capacity_bytes: int, bytes; an allocation that would pass it raises `torch.OutOfMemoryError` from inside the
            kernel. None for no limit.
        fail_at: the allocation that fails, counted from 1 at entry; later ones succeed. None for none.

    Raises:
        ConfigError: the capacity is negative, or `fail_at` is under 1.
        MemsafeError: on entry, if there is no C++ compiler or PyTorch does not take the allocator.
    """

    def __init__(self, capacity_bytes: int | None = None, fail_at: int | None = None) -> None:
        check_limits(capacity_bytes, fail_at)
        self._capacity_bytes = capacity_bytes
        self._fail_at = fail_at
        self._library: ctypes.CDLL | None = None
        self._base = dict.fromkeys(_COUNTERS, 0)
        self._closed: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        self._highest_bytes = 0

    @property
    def live_bytes(self) -> int:
        """Bytes held now (at exit, once the count is closed)."""
        return self._count("live")

    @property
    def peak_bytes(self) -> int:
        """Most bytes held since entry or `reset_peak`; refused allocations are no part of it."""
        if self._library is None:
            return self._closed["peak"]
        return max(self._highest_bytes, int(self._library.memsafe_peak())) - self._base["live"]

    @property
    def allocations(self) -> int:
        """Allocations asked for since entry, refused ones included."""
        return self._count("allocations")

    @property
    def refusals(self) -> int:
        """Allocations refused since entry."""
        return self._count("refusals")

    def reset_peak(self) -> None:
        """Starts a new peak at the bytes held now; counts around this one keep theirs."""
        library = self._opened()
        _remember_peaks(library)
        library.memsafe_reset_peak()
        self._highest_bytes = int(library.memsafe_live())

    def set_capacity(self, capacity_bytes: int | None) -> None:
        """Changes the capacity from now on.

        Args:
            capacity_bytes: int, bytes, counted from entry; None for no limit.

        Raises:
            ConfigError: the capacity is negative.
        """
        check_limits(capacity_bytes, None)
        self._capacity_bytes = capacity_bytes
        _apply_limits(self._opened())

    def fail_after(self, allocations: int) -> None:
        """Chooses the next allocation that fails.

        Args:
            allocations: which one from now on, from 1.

        Raises:
            ConfigError: `allocations` is under 1.
        """
        check_limits(None, allocations)
        self._fail_at = self.allocations + allocations
        _apply_limits(self._opened())

    def __enter__(self) -> CountingAllocator:
        if self._library is not None:
            raise MemsafeError("This count is open already. Make a second CountingAllocator for a nested count.")
        library = _library()
        if not _open_counts and library.memsafe_install() != 0:
            raise MemsafeError(
                "PyTorch did not take the counting CPU allocator, because another allocator was installed with a "
                "higher priority. Remove it, or count with StorageLedger."
            )
        _remember_peaks(library)
        library.memsafe_reset_peak()
        self._base = _read(library)
        self._highest_bytes = self._base["live"]
        self._library = library
        _open_counts.append(self)
        _apply_limits(library)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        library = self._opened()
        _remember_peaks(library)
        self._closed = {name: getattr(self, _PROPERTIES[name]) for name in _COUNTERS}
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

    def _count(self, name: str) -> int:
        if self._library is None:
            return self._closed[name]
        return int(getattr(self._library, f"memsafe_{name}")()) - self._base[name]


_PROPERTIES = {"live": "live_bytes", "peak": "peak_bytes", "allocations": "allocations", "refusals": "refusals"}


def check_limits(capacity_bytes: int | None, fail_at: int | None) -> None:
    """Refuses limits that cannot be meant.

    Args:
        capacity_bytes: int, bytes, or None.
        fail_at: an allocation counted from 1, or None.

    Raises:
        ConfigError: the capacity is negative, or the allocation is under 1.
    """
    if capacity_bytes is not None and capacity_bytes < 0:
        raise ConfigError(f"capacity_bytes is {capacity_bytes} bytes; give 0 or more, or None for no limit.")
    if fail_at is not None and fail_at < 1:
        raise ConfigError(f"The allocation to fail is number {fail_at}; allocations are counted from 1.")


def compiler_available() -> bool:
    """Whether `CountingAllocator` can be used: it was compiled before, or there is a compiler."""
    return _binary_path().exists() or _compiler() is not None


def _read(library: ctypes.CDLL) -> dict[str, int]:
    return {name: int(getattr(library, f"memsafe_{name}")()) for name in _COUNTERS}


def _remember_peaks(library: ctypes.CDLL) -> None:
    highest = int(library.memsafe_peak())
    for count in _open_counts:
        count._highest_bytes = max(count._highest_bytes, highest)


def _apply_limits(library: ctypes.CDLL) -> None:
    """Hands the tightest capacity and the nearest chosen failure of all open counts to the allocator."""
    limits = [
        count._base["live"] + count._capacity_bytes for count in _open_counts if count._capacity_bytes is not None
    ]
    library.memsafe_set_limit(max(0, min(limits)) if limits else _UNLIMITED)
    asked = int(library.memsafe_allocations())
    chosen = [count._base["allocations"] + count._fail_at for count in _open_counts if count._fail_at is not None]
    library.memsafe_set_fail_at(min((number for number in chosen if number > asked), default=0))


@functools.cache
def _library() -> ctypes.CDLL:
    binary = _binary_path()
    if not binary.exists():
        _compile(binary)
    library = ctypes.CDLL(str(binary))
    for name in _COUNTERS:
        getattr(library, f"memsafe_{name}").restype = ctypes.c_int64
    library.memsafe_set_limit.argtypes = library.memsafe_set_fail_at.argtypes = [ctypes.c_int64]
    return library


def _binary_path() -> Path:
    key = hashlib.sha256(_SOURCE.read_bytes() + f"{torch.__version__} {platform.machine()}".encode()).hexdigest()[:16]
    return _cache_directory() / f"cpu_allocator-{torch.__version__}-{key}.so"


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memsafe_rl"


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
