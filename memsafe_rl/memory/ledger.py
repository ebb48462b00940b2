"""Counts live tensor storage from Python, where no compiler is at hand and on fake tensors.

After each operator, storages not seen before are added through a weak reference whose death subtracts them. That works
through backward, checkpointing, saved-tensor hooks and optimizers. It does not see temporaries inside a kernel, other
threads, or a storage resized behind the dispatcher; `CountingAllocator` does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_FRESH = ("aten::lift_fresh",)
"""Operators that hand out storage made behind the dispatcher (`torch.tensor`), though it looks like a view."""


class StorageLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of the distinct storages created inside it.

    A view adds nothing, nor does a view of a tensor made outside. Meta tensors hold nothing; fake tensors count as
    what they stand for.

    Args:
        granularity_bytes: int, bytes; each storage counts as a multiple of it (512 for the CUDA allocator).
        on_growth: called with the bytes of each new storage before it is entered; it may raise to refuse the storage,
            which then never enters the count.
    """

    def __init__(self, granularity_bytes: int = 1, on_growth: Callable[[int], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._granularity_bytes = granularity_bytes
        self._on_growth = on_growth
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._live_bytes = 0
        self._peak_bytes = 0

    @property
    def live_bytes(self) -> int:
        """Bytes held now."""
        return self._live_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes held since entry or `reset_peak`."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        """Starts a new peak at the bytes held now."""
        self._peak_bytes = self._live_bytes

    def track(self, *tensors: Tensor) -> None:
        """Counts tensors made outside, such as weights or the state of a quantised layer, until they die.

        Args:
            tensors: any tensors; storages known already add nothing.
        """
        for tensor in tensors:
            for storage in _storages(tensor):
                self._enter(storage)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operator and enters the storages it made."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        foreign: set[int] | None = None
        for leaf in tree_leaves(result):
            for storage in _storages(leaf) if isinstance(leaf, Tensor) else ():
                if storage._cdata in self._sizes:
                    self._resize(storage)
                    continue
                if foreign is None:
                    inputs = () if func.name() in _FRESH else tree_leaves((args, kwargs))
                    foreign = {s._cdata for x in inputs if isinstance(x, Tensor) for s in _storages(x)}
                if storage._cdata not in foreign:
                    self._enter(storage)
        return result

    def _rounded(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // self._granularity_bytes) * self._granularity_bytes

    def _enter(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, self._rounded(storage)
        if key in self._sizes or size == 0:
            return
        self._grow(size)
        self._sizes[key] = size
        self._references[key] = weakref.ref(storage, lambda _: self._leave(key))

    def _resize(self, storage: torch.UntypedStorage) -> None:
        change = self._rounded(storage) - self._sizes[storage._cdata]
        if change:
            self._grow(change)
            self._sizes[storage._cdata] += change

    def _grow(self, size: int) -> None:
        if size > 0 and self._on_growth is not None:
            self._on_growth(size)
        self._live_bytes += size
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)

    def _leave(self, key: int) -> None:
        self._live_bytes -= self._sizes.pop(key)
        del self._references[key]


def _is_wrapper(tensor: Tensor) -> bool:
    # A plain answer: the type guard it wraps makes the type checker believe that no such tensor exists.
    return bool(is_traceable_wrapper_subclass(tensor))


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Gives the storages of a tensor: several for a wrapper subclass, none where nothing is held."""
    if _is_wrapper(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from _storages(getattr(tensor, name))
    elif tensor.layout is torch.strided and tensor.device.type != "meta":
        yield tensor.untyped_storage()
