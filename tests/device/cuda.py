"""The functions of `torch.cuda` that a CPU build lacks, for the pretend device."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from tests.device.pretend import Pretend

_NAME = "Pretend CUDA device"


def complete(pretend: Pretend) -> None:
    """Puts the functions in place; the libraries that look for CUDA when they are imported are imported before."""
    with contextlib.suppress(ImportError):
        importlib.import_module("bitsandbytes")  # its kernels are out of reach
    cuda = torch.cuda
    cuda._initialized = True
    functions = {**_devices(pretend), **_memory(pretend), **_random(pretend), **_streams(pretend)}
    for name, function in functions.items():
        setattr(cuda, name, function)
    cuda.memory.__dict__.update({name: function for name, function in functions.items() if hasattr(cuda.memory, name)})
    cuda.random.__dict__.update({name: function for name, function in functions.items() if hasattr(cuda.random, name)})
    torch.storage._StorageBase.clone = _cloned(torch.storage._StorageBase.clone)  # type: ignore[method-assign]
    torch.UntypedStorage.resize_ = _resized(torch.UntypedStorage.resize_)  # type: ignore[method-assign]
    conf = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", ""))
    for device in pretend.devices:
        device.set_expandable("expandable_segments:True" in conf)


def _index(device: Any = None) -> int:
    """Returns the index of a device as users name it; the current one without a name."""
    if device is None:
        return int(torch._C._accelerator_getDeviceIndex())
    if isinstance(device, int):
        return device
    named = torch.device(device)
    return int(torch._C._accelerator_getDeviceIndex()) if named.index is None else named.index


class _On:
    """`torch.cuda.device`: makes a device the current one for what runs inside."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _index()
        torch._C._accelerator_setDeviceIndex(self.idx)

    def __exit__(self, *_: object) -> None:
        torch._C._accelerator_setDeviceIndex(self.prev_idx)


def _devices(pretend: Pretend) -> dict[str, Any]:
    def properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            name=_NAME,
            major=8,
            minor=0,
            total_memory=pretend.devices[_index(device)].capacity,
            multi_processor_count=8,
            warp_size=32,
            L2_cache_size=1 << 20,
            regs_per_multiprocessor=65536,
            max_threads_per_multi_processor=0,  # so that its reductions hold nothing besides
            gcnArchName="",
            uuid=str(_index(device)),
        )

    def set_device(device: Any) -> None:
        torch._C._accelerator_setDeviceIndex(_index(device))

    return {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: len(pretend.devices),
        "current_device": lambda: _index(),
        "set_device": set_device,
        "device": _On,
        "device_of": lambda tensor: _On(tensor.device) if tensor.is_cuda else contextlib.nullcontext(),
        "get_device_name": lambda _=None: _NAME,
        "get_device_capability": lambda _=None: (8, 0),
        "get_device_properties": properties,
        "is_bf16_supported": lambda **_: True,
        "is_current_stream_capturing": lambda: False,
        "ipc_collect": lambda: None,
        "_sleep": lambda _: None,
    }


def _memory(pretend: Pretend) -> dict[str, Any]:
    def of(device: Any) -> Any:
        return pretend.devices[_index(device)]

    def call(name: str) -> Any:
        return lambda device=None: getattr(pretend.library, f"pretend_{name}")(_index(device))

    def empty_cache() -> None:
        for device in pretend.devices:
            pretend.library.pretend_empty_cache(device.index)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        each = of(device)
        return each.capacity - each.elsewhere - each.reserved, each.capacity

    return {
        "empty_cache": empty_cache,
        "mem_get_info": mem_get_info,
        "memory_allocated": lambda device=None: of(device).allocated,
        "max_memory_allocated": lambda device=None: of(device).peak_allocated,
        "memory_reserved": lambda device=None: of(device).reserved,
        "max_memory_reserved": lambda device=None: of(device).peak_reserved,
        "memory_stats": lambda device=None: of(device).memory_stats(),
        "reset_peak_memory_stats": call("reset_peaks"),
        "reset_accumulated_memory_stats": call("reset_totals"),
        "get_per_process_memory_fraction": lambda device=None: of(device).fraction,
        "set_per_process_memory_fraction": lambda fraction, device=None: of(device).set_fraction(fraction),
    }


def _random(pretend: Pretend) -> dict[str, Any]:
    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        size = pretend.library.pretend_random_state(_index(device), None)
        buffer = ctypes.create_string_buffer(size)
        pretend.library.pretend_random_state(_index(device), buffer)
        return torch.frombuffer(bytearray(buffer.raw), dtype=torch.uint8)

    def set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
        pretend.library.pretend_set_random_state(_index(device), state.numpy().tobytes(), state.numel())

    def set_rng_state_all(states: Any) -> None:
        for index, state in enumerate(states):
            _check(pretend, index)
            set_rng_state(state, index)

    def manual_seed(seed: int) -> None:
        pretend.library.pretend_seed(_index(), seed % 2**64)

    def manual_seed_all(seed: int) -> None:
        for device in pretend.devices:
            pretend.library.pretend_seed(device.index, seed % 2**64)

    return {
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [get_rng_state(device.index) for device in pretend.devices],
        "set_rng_state_all": set_rng_state_all,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        "seed": lambda: manual_seed(torch.seed()),
        "seed_all": lambda: manual_seed_all(torch.seed()),
        "initial_seed": lambda: 0,
    }


def _check(pretend: Pretend, index: int) -> None:
    if index >= len(pretend.devices):
        raise IndexError("tuple index out of range")  # what indexing `torch.cuda.default_generators` gives


class Stream(torch.Stream):
    """`torch.cuda.Stream` over the streams of the pretend device."""

    def __new__(cls, device: Any = None, **_: Any) -> Stream:
        """Makes a stream of a device."""
        return super().__new__(cls, torch.device("cuda", _index(device)))

    @property
    def cuda_stream(self) -> int:
        """Number of the stream."""
        return int(self.stream_id)


class Event(torch.Event):
    """`torch.cuda.Event` over the events of the pretend device."""

    def __new__(cls, enable_timing: bool = False, **_: Any) -> Event:
        """Makes an event of the current device."""
        return super().__new__(cls, torch.device("cuda"), enable_timing=enable_timing)


def _streams(pretend: Pretend) -> dict[str, Any]:
    def current_stream(device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(_index(device))

    def default_stream(device: Any = None) -> torch.Stream:
        return torch.Stream(stream_id=0, device_index=_index(device), device_type=1)

    def synchronize(device: Any = None) -> None:
        torch.accelerator.synchronize(_index(device))

    @contextlib.contextmanager
    def stream(used: torch.Stream | None) -> Iterator[None]:
        with contextlib.nullcontext() if used is None else used:
            yield

    return {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": torch.accelerator.set_stream,
        "synchronize": synchronize,
    }


def _resized(resize: Any) -> Any:
    """Resizes storages of the device by its own operator; the CPU build's method knows those of the host alone."""

    def resized(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, size)
        torch.ops.pretend.resize_storage(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), size)
        return storage

    return resized


def _cloned(clone: Any) -> Any:
    """Clones storages of the device through tensors; the CPU build's clone makes one of the host."""

    def cloned(storage: Any) -> Any:
        if storage.device.type != "cuda":
            return clone(storage)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone().untyped_storage()

    return cloned
