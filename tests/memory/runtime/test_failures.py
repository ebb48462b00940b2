"""A failed allocation is known in every wording, and nothing else is."""

import pytest
import torch

from memsafe_rl.errors import ConfigError, MemoryBudgetError
from memsafe_rl.memory.runtime.failures import is_out_of_memory, requested_bytes
from memsafe_rl.memory.simulated.device import SimulatedMemory

MIB = 2**20
HINT = "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be"
NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:76, "

ALLOCATIONS = [
    ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 4.00 GiB", 20 * MIB),
    ("CUDA out of memory. Tried to allocate 512 bytes. GPU 0 has a total capacity of 4.00 GiB", 512),
    ("CUDA out of memory. Tried to allocate more than 1EB memory.", None),
    ("HIP out of memory. Tried to allocate 432.00 MiB. GPU 0 has a total capacity of 15.92 GiB", 432 * MIB),
    ("XPU out of memory. Tried to allocate 512.00 KiB. GPU 0 has a total capacity of 16.50 GiB.", 512 * 1024),
    (
        "MPS backend out of memory (MPS allocated: 5.56 GB, max allowed: 6.80 GB). Tried to allocate 768.00 MB",
        768 * MIB,
    ),
    ("MPS backend out of memory (MPS allocated: 16.00 GB). Tried to allocate 256 bytes on shared pool.", 256),
    ("Invalid buffer size: 19.50 GiB", 19 * 1024 * MIB + 512 * MIB),
    ("CUDA error: out of memory" + HINT, None),
    ("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com", None),
    ("HIP error: out of memory" + HINT, None),
    ("CUDA driver error: out of memory", None),
    ("CUDA NVRTC error: NVRTC_ERROR_OUT_OF_MEMORY", None),
    ("Triton Error [CUDA]: out of memory", None),
    ("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)", None),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", None),
    ("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`", None),
    ("CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`", None),
    ("CUDA error: resource allocation failed when calling `cusparseCreate(handle)`", None),
    ("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`. If you keep", None),
    ("cuFFT error: CUFFT_ALLOC_FAILED", None),
    ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", None),
    ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", None),
    ("cuDNN Frontend error: [cudnn_frontend] Error: CUDNN_STATUS_ALLOC_FAILED", None),
    ("MIOpen error: miopenStatusAllocFailed", None),
    (NCCL + "unhandled cuda error\nLast error:\nFailed to CUDA calloc 67108864 bytes", 64 * MIB),
    (NCCL + "internal error\nLast error:\nFailed to CUDA calloc async 1920 bytes", 1920),
    (NCCL + "unhandled cuda error\nLast error:\nCuda failure 'out of memory'", None),
    (NCCL + "unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'", None),
    (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4503599627370496 bytes. Error code 12 (Cannot allocate memory)",
        4503599627370496,
    ),
    (
        "[enforce fail at a.cpp:9] data. DefaultCPUAllocator: not enough memory: you tried to allocate 80 bytes",
        80,
    ),
    ("unable to mmap 9989150328 bytes from file </a/model.safetensors>: Cannot allocate memory (12)", 9989150328),
    ("std::bad_alloc", None),
]

OTHERS = [
    "out of memory",
    "The grader says: CUDA out of memory. Tried to allocate 2 GiB",
    "Worker log:\nCUDA out of memory. Tried to allocate 2.00 GiB",
    "CUDA error: device-side assert triggered" + HINT,
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: too many resources requested for launch",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`",
    "CUDA error: insufficient resources when calling `cusparseSpGEMM_workEstimation(handle)`",
    "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
    "level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
    NCCL + "unhandled cuda error\nLast error:\nCuda failure 'invalid argument'",
    "unable to mmap 280 bytes from file </torch_59534>: Invalid argument (22)",
    "std::bad_alloc in my own extension",
    "Storage size calculation overflowed with sizes=[9223372036854775807]",
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
]


@pytest.mark.parametrize(("text", "asked"), ALLOCATIONS)
def test_every_wording_of_a_failed_allocation_is_known(text: str, asked: int | None) -> None:
    for kind in (RuntimeError, torch.AcceleratorError, torch.distributed.DistBackendError, torch.OutOfMemoryError):
        assert is_out_of_memory(kind(text)), kind
        assert requested_bytes(kind(text)) == asked, kind


@pytest.mark.parametrize("text", OTHERS)
def test_no_other_failure_is_taken_for_one(text: str) -> None:
    for kind in (RuntimeError, torch.AcceleratorError, torch.distributed.DistBackendError):
        assert not is_out_of_memory(kind(text)), kind
        assert requested_bytes(kind(text)) is None


class RewardError(RuntimeError):
    """A user's own class."""


@pytest.mark.parametrize(
    "kind", [ValueError, KeyError, MemoryError, NotImplementedError, RewardError, KeyboardInterrupt, SystemExit]
)
def test_only_what_pytorch_raises_counts(kind: type[BaseException]) -> None:
    for text, _ in ALLOCATIONS:
        assert not is_out_of_memory(kind(text))
        assert requested_bytes(kind(text)) is None


def test_the_real_thing_on_this_machine() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)
    assert requested_bytes(caught.value) == 4 * 2**50


@pytest.mark.parametrize("exact", [None, False])
def test_a_simulated_device_says_what_was_asked_for(exact: bool | None) -> None:
    with SimulatedMemory(capacity_bytes=10_000, exact=exact), pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(20_000, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert requested_bytes(caught.value) == 20_000


def raised_from(outer: BaseException, cause: BaseException) -> BaseException:
    outer.__cause__ = cause
    return outer


def test_a_library_may_wrap_the_failure_in_its_own_words() -> None:
    failure = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
    library = type("SafetensorError", (Exception,), {"__module__": "safetensors._safetensors_rust"})
    for outer in (RuntimeError("Loading failed"), OSError("Unable to load weights"), library("no")):
        wrapped = raised_from(outer, failure)
        assert is_out_of_memory(wrapped)
        assert requested_bytes(wrapped) == 2 * MIB
        assert is_out_of_memory(raised_from(RuntimeError("twice"), wrapped))


def test_who_handles_a_failure_and_raises_something_else_decided() -> None:
    failure = torch.OutOfMemoryError("CUDA out of memory.")
    for outer in (
        ValueError("bad"),
        RewardError("no"),
        KeyboardInterrupt(),
        MemoryBudgetError("no"),
        ConfigError("x"),
    ):
        assert not is_out_of_memory(raised_from(outer, failure))
    # A second error during the handling of the first stands for itself.
    during = RuntimeError("cleanup failed")
    during.__context__ = failure
    assert not is_out_of_memory(during)


def test_causes_that_run_in_a_circle_end() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)
