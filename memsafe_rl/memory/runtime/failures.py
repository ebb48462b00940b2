"""Tells a failed device allocation, in every form PyTorch gives it, from every other error."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from memsafe_rl.errors import MemsafeError

_ALLOC_STATUS = r"(?:CU|HIP)(?:BLAS|SPARSE|SOLVER|FFT)_(?:STATUS_)?ALLOC_FAILED\b"
_FORMS = re.compile(
    "|".join(
        (
            # The caching allocators: "CUDA out of memory. Tried to allocate ..."; likewise HIP, XPU, NPU.
            r"[A-Z]{2,5} out of memory\.",
            r"MPS backend out of memory\b",
            r"Invalid buffer size: [\d.]+ [KMGT]i?B",
            r"FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed",
            # The runtime and the driver, whoever called them.
            r"(?:CUDA|HIP) (?:driver )?error: out of memory\b",
            r"Triton Error \[(?:CUDA|HIP)\]: out of memory\b",
            r"CUDA NVRTC error: NVRTC_ERROR_OUT_OF_MEMORY\b",
            r"[^\n]*\bUR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY\b",
            # Libraries that allocate by themselves; cuSPARSE is the one that reports in words.
            rf"(?:CUDA|HIP|cusolver|hipsolver|cuFFT|hipFFT) error: {_ALLOC_STATUS}",
            r"(?:CUDA|HIP) error: resource allocation failed when calling `(?:cu|hip)sparse",
            r"cuDNN (?:Frontend )?error: [^\n]*\bCUDNN_STATUS_(?:ALLOC|INTERNAL_ERROR_\w+_ALLOCATION)_FAILED\b",
            r"MIOpen error: miopenStatusAllocFailed\b",
            r"NCCL error in: (?s:.*)(?:Cuda failure (?:\d+ )?'out of memory'|Failed to CUDA calloc (?:async )?\d)",
            # The host, which is the device of a CPU run.
            r"(?:\[enforce fail at [^\]]*\] .{0,20})?DefaultCPUAllocator: (?:can't allocate|not enough) memory",
            r"unable to mmap \d+ bytes from file <[^\n]*: Cannot allocate memory \(12\)",
            r"std::bad_alloc\Z",
        )
    )
)
_REQUESTS = re.compile(
    r"(?:[Tt]ried to allocate|Requested\s*:|Invalid buffer size:|unable to mmap|Failed to CUDA calloc(?: async)?)\s+"
    r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>bytes|[KMGT]i?B|B)\b"
)
_POWERS = {"b": 0, "k": 1, "m": 2, "g": 3, "t": 4}

_WRAPPING_LIBRARIES = frozenset({"accelerate", "bitsandbytes", "peft", "safetensors", "torch", "transformers"})


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error is a device allocation that failed.

    True for `torch.OutOfMemoryError`, for messages of device runtimes, their libraries and the CPU allocator that begin
    by saying so, and for errors raised ``from`` one of these by a library. False for `MemoryError`, of Python's own
    heap; for a status that a bad index in a kernel gives too; and for a user's own exception class.
    """
    return _allocation_failure(error) is not None


def requested_bytes(error: BaseException) -> int | None:
    """Reads from the message how many bytes the failed allocation asked for."""
    failure = _allocation_failure(error)
    found = None if failure is None else _REQUESTS.search(str(failure))
    if found is None:
        return None
    # PyTorch divides by 1024 whether it writes "MiB" or, in older MPS messages, "MB".
    return int(float(found["number"]) * 1024 ** _POWERS[found["unit"][0].lower()])


def _allocation_failure(error: BaseException) -> BaseException | None:
    return next((link for link in _causes(error) if _is_itself(link)), None)


def _is_itself(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    known = type(error) is RuntimeError or (isinstance(error, RuntimeError) and _library(error) == "torch")
    return known and _FORMS.match(str(error)) is not None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Goes from an error to what it was raised ``from``, as long as a library may have done so."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        wrapped = type(link) in (RuntimeError, OSError) or _library(link) in _WRAPPING_LIBRARIES
        link = link.__cause__ if wrapped and not isinstance(link, MemsafeError) else None


def _library(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]
