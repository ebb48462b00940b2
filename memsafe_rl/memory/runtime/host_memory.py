"""Moves tensors between the device and host memory: by request, and for what autograd saves.

On a CPU both are one memory. Under a simulated device they are told apart by `accounting.host_memory`, and a move is a
copy into or out of the part that stands for the host; where nobody counts, there is nothing to move.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import call
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memsafe_rl.accounting import host_memory, is_on_host, listened_to
from memsafe_rl.memory.simulated.ledger import storages_of

_LEAST_BYTES = 1024
"""Bytes under which a saved tensor is not worth a transfer."""

_ALIGNMENT = 64
"""Bytes; what allocators start storages at multiples of, at least."""

_LARGEST_SPREAD = 2
"""How many times its own bytes a tensor may spread over, for what lies between its elements to be moved with it."""


@torch.no_grad()
def to_host(tensor: Tensor) -> Tensor:
    """Moves a tensor to host memory: pinned where it comes from CUDA, so that it comes back fast."""
    if tensor.device.type != "cpu":
        return _into_host(tensor.detach(), wait=True)
    return _copied_to_arena(tensor) if listened_to() and not is_on_host(tensor) else tensor


@torch.no_grad()
def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Moves a tensor to a device."""
    if torch.device(device).type != "cpu":
        return tensor.detach().to(device, non_blocking=tensor.is_pinned())
    if tensor.device.type != "cpu":
        return tensor.detach().cpu()
    return tensor.detach().clone() if is_on_host(tensor) else tensor


@contextmanager
def offloaded(weights: Iterable[Tensor]) -> Iterator[None]:
    """Keeps on the host what autograd saves inside, weights left out, until the backward pass outside asks for it."""
    kept = list(weights)
    if all(weight.device.type == "cpu" for weight in kept) and not listened_to():
        yield
        return
    with saved_tensors_hooks(_Offload(kept).pack, call):
        yield


def _stayed(tensor: Tensor, version: int) -> Tensor:
    """Returns a saved tensor that was left where it was; autograd leaves the check to whoever keeps a tensor."""
    if tensor._version != version:
        raise RuntimeError(
            f"A tensor of shape {tuple(tensor.shape)} that the gradient needs was changed in place after the forward "
            f"pass (version {tensor._version}, saved at {version}). Change it after the backward pass, or change a "
            "copy of it."
        )
    return tensor


@dataclass(frozen=True, eq=False)
class _Piece:
    """Elements of a storage, on the host."""

    elements: Tensor
    device: torch.device
    origin: weakref.ref[torch.UntypedStorage]


@torch.no_grad()
def _brought_back(piece: _Piece, shape: tuple[int, ...], strides: tuple[int, ...], offset: int | None) -> Tensor:
    """Returns a saved tensor as it lay in its piece; no offset where the piece is the tensor without its gaps."""
    if offset is not None:
        return _onto_device(piece).as_strided(shape, strides, offset)
    target = torch.empty_strided(shape, strides, dtype=piece.elements.dtype, device=piece.device)
    return target.copy_(piece.elements, non_blocking=piece.elements.is_pinned())


def _onto_device(piece: _Piece) -> Tensor:
    if piece.device.type == "cpu":
        return piece.elements.clone()
    return piece.elements.to(piece.device, non_blocking=piece.elements.is_pinned())


class _Offload:
    """Packs saved tensors into what gives them back, most from host memory; each piece of a storage is moved once."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = {storage._cdata: storage for weight in weights for storage in storages_of(weight)}
        self._pieces: weakref.WeakValueDictionary[tuple[Any, ...], _Piece] = weakref.WeakValueDictionary()

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Returns what autograd calls for the tensor."""
        # Without its graph, for a tensor that an operator saves of its own output would keep itself alive.
        saved = tensor.detach()
        if not self._moves(saved):
            return partial(_stayed, saved, saved._version)
        shape, strides, start = tuple(saved.shape), saved.stride(), int(saved.storage_offset())
        spread = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if spread > _LARGEST_SPREAD * saved.numel():
            return partial(_brought_back, self._piece(saved, (start, shape, strides)), shape, strides, None)
        # A start as far from a multiple of 64 bytes as before, so that kernels cut their sums as before.
        lead = start % max(1, _ALIGNMENT // saved.itemsize)
        lying = saved.as_strided((lead + spread,), (1,), start - lead)
        return partial(_brought_back, self._piece(lying, (start - lead, lead + spread)), shape, strides, lead)

    def _moves(self, tensor: Tensor) -> bool:
        storages = list(storages_of(tensor))
        if len(storages) != 1 or storages[0]._cdata in self._weights or tensor.nbytes < _LEAST_BYTES:
            return False
        if tensor.is_conj() or tensor.is_neg() or is_on_host(tensor):
            return False
        return tensor.device.type != "cpu" or listened_to()

    def _piece(self, tensor: Tensor, place: tuple[Any, ...]) -> _Piece:
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version, tensor.dtype, *place)
        known = self._pieces.get(key)
        # A storage that died may have left its address to another.
        if known is not None and known.origin() is storage:
            return known
        made = _Piece(_into_host(tensor, wait=False), tensor.device, weakref.ref(storage))
        self._pieces[key] = made
        return made


def _into_host(tensor: Tensor, *, wait: bool) -> Tensor:
    """Copies a tensor to the host; unless told to wait, only later work of the same stream may read it."""
    if tensor.device.type == "cpu":
        return _copied_to_arena(tensor)
    if tensor.device.type != "cuda":
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=not wait)


def _copied_to_arena(tensor: Tensor) -> Tensor:
    with host_memory():
        return tensor.detach().clone()
