"""Rotary positions in three operators a tensor while rows are decoded, where a network's own take five.

``rotate_half`` of queries and keys is a roll by half their width whose first half changes its sign; the sign goes to
the sines instead, which all layers share. Where tokens that are read again must get the bits that they had, in half
precision and in fixed tiles, products are rounded as the network rounds them, by one operator more.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from memsafe_rl.accounting import host_memory
from memsafe_rl.models.module_state import replaced
from memsafe_rl.ops.fixed_tiles import fixed_tiles_on

_FUNCTION = "apply_rotary_pos_emb"
_PARAMETERS = ["q", "k", "cos", "sin", "unsqueeze_dim"]


def rotations_of(network: nn.Module) -> tuple[ModuleType, ...]:
    """Finds the files of transformers whose function for rotary positions does what `short_rotations` puts there."""
    files = {sys.modules[type(module).__module__] for module in network.modules()}
    return tuple(file for file in files if _agrees(getattr(file, _FUNCTION, None)))


@contextmanager
def short_rotations(files: tuple[ModuleType, ...]) -> Iterator[None]:
    """Has rotary positions take three operators; for one thread at a time, as what switches attention is."""
    with replaced([(file, _FUNCTION, _Short(getattr(file, _FUNCTION))) for file in files]):
        yield


class _Short:
    """The function, for one forward pass of a network."""

    def __init__(self, own: Any) -> None:
        self._own = own
        self._signed: dict[int, tuple[Tensor, Tensor]] = {}  # sines by their identity, held so that it stays theirs

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """Rotates queries and keys (B, H, N, D) by cosines and sines (B, N, D)."""
        if not (q.shape[-1] == k.shape[-1] == sin.shape[-1] and q.dtype == k.dtype == cos.dtype):
            rotated: tuple[Tensor, Tensor] = self._own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
            return rotated
        if id(sin) not in self._signed:
            first, second = sin.chunk(2, -1)
            self._signed[id(sin)] = sin, torch.cat([-first, second], -1)
        signed = self._signed[id(sin)][1].unsqueeze(unsqueeze_dim)
        return _rotated(q, cos.unsqueeze(unsqueeze_dim), signed), _rotated(k, cos.unsqueeze(unsqueeze_dim), signed)


def _rotated(values: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    turned, kept = values.roll(values.shape[-1] // 2, -1), values * cos
    if fixed_tiles_on() or values.dtype not in (torch.float32, torch.float64):
        return kept.add_(turned.mul_(signed_sin))
    return kept.addcmul_(turned, signed_sin)


@lru_cache
def _agrees(function: Any) -> bool:
    """Tries a network's own function beside the short one: others turn neighbours, or a part of the width."""
    if function is None or list(inspect.signature(function).parameters) != _PARAMETERS:
        return False
    with unset_fake_temporarily(), host_memory(), torch.no_grad():
        q, k = (torch.linspace(-2.0, 3.0, 16).view(1, 2, 1, 8), torch.linspace(5.0, 1.0, 8).view(1, 1, 1, 8))
        cos, sin = torch.linspace(0.1, 1.0, 8).view(1, 1, 8), torch.linspace(-0.7, 0.9, 8).view(1, 1, 8)
        try:
            own = function(q, k, cos, sin)
        except RuntimeError:  # it takes cosines and sines of another width
            return False
        return all(
            float((one - short).abs().max()) < 1e-6
            for one, short in zip(own, _Short(function)(q, k, cos, sin), strict=True)
        )
