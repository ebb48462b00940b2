"""Norms and rotary positions in fewer operators while rows are decoded: a decoded token costs a launch for every one.

Root-mean-square norms, two fifths of a network's operators, take two kernels instead of six. The pair (x, -x) has mean
0 and the mean square of x as its variance, so that torch's layer norm of it, one kernel on every device, gives
``x / sqrt(mean(x^2) + eps)`` in its first half.

Rotary positions take three operators a tensor instead of five. ``rotate_half`` of queries and keys is a roll by half
their width whose first half changes its sign; the sign goes to the sines instead, which all layers share. Where tokens
that are read again must get the bits that they had, in half precision and in fixed tiles, products are rounded as the
network rounds them, by one operator more.

Axes: ``B`` rows, ``H`` heads, ``N`` tokens, ``D`` width of what is normed or rotated.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from inspect import signature
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.functional import layer_norm

from memsafe_rl.accounting import host_memory
from memsafe_rl.models.module_state import is_hooked, replaced
from memsafe_rl.ops.fixed_tiles import FIXED_TILES

_FUNCTION = "apply_rotary_pos_emb"
_PARAMETERS = ["q", "k", "cos", "sin", "unsqueeze_dim"]


def norms_of(network: nn.Module) -> tuple[nn.Module, ...]:
    """Finds the modules of a network that do what `short_norms` puts in their place."""
    return tuple(module for module in network.modules() if _is_norm(module))


@contextmanager
def short_norms(norms: Iterable[Any], constants: dict[Any, Any]) -> Iterator[None]:
    """Has norms run in two kernels; their weights are kept, twice over, among constants while no weight moves."""
    if "norms" not in constants:
        constants["norms"] = [(norm, _ShortNorm(norm)) for norm in norms if not is_hooked(norm)]
    with replaced([(norm, "forward", short) for norm, short in constants["norms"]]):
        yield


class _ShortNorm:
    """A norm's forward."""

    def __init__(self, norm: Any) -> None:
        self._own, self._eps = norm.forward, norm.variance_epsilon
        self._signs_21 = torch.ones(2, 1, device=norm.weight.device)
        self._signs_21[1] = -1.0
        self._weights_2D = norm.weight.detach().expand(2, -1).contiguous()

    def __call__(self, hidden: Tensor) -> Tensor:
        """Norms (..., D), rounded where the network's own norm rounds."""
        # In half precision, rows that are read again must get the bits that they had.
        plain = hidden.dtype == self._weights_2D.dtype == torch.float32
        if torch.is_autocast_enabled(hidden.device.type) or not plain:
            own: Tensor = self._own(hidden)
            return own
        both = hidden.unsqueeze(-2) * self._signs_21
        return layer_norm(both, both.shape[-2:], self._weights_2D, None, self._eps)[..., 0, :]


def _is_norm(module: nn.Module) -> bool:
    weights = list(module.parameters(recurse=False))
    if len(weights) != 1 or weights[0] is not getattr(module, "weight", None) or any(module.children()):
        return False
    plain = weights[0].ndim == 1 and weights[0].dtype in (torch.float32, torch.float16, torch.bfloat16)
    named = isinstance(getattr(module, "variance_epsilon", None), float)
    alone = len(signature(type(module).forward).parameters) == 2  # a norm that also takes a gate does more
    return plain and named and alone and _is_root_mean_square(cast(Hashable, type(module)))


@lru_cache
def _is_root_mean_square(kind: Any) -> bool:
    """Tries a class's own forward beside the short one: other norms add 1 to their weight, or round elsewhere."""
    with unset_fake_temporarily(), host_memory(), torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            norm: Any = nn.Module()
            norm.weight = nn.Parameter(torch.linspace(0.5, 2.0, 6).to(dtype))
            norm.variance_epsilon = 0.1
            norm.forward = partial(kind.forward, norm)
            hidden = torch.tensor([[0.3, -1.7, 0.2, 2.9, 0.0, -0.6], [9.0, 1e-3, 4.0, -7.0, 5.0, 5.0]]).to(dtype)
            if not torch.allclose(kind.forward(norm, hidden), _ShortNorm(norm)(hidden), rtol=1e-6, atol=1e-6):
                return False
    return True


def rotations_of(network: nn.Module) -> tuple[ModuleType, ...]:
    """Finds the files of transformers whose function for rotary positions does what `short_rotations` puts there."""
    files = {sys.modules[type(module).__module__] for module in network.modules()}
    return tuple(file for file in files if rotates_halves(getattr(file, _FUNCTION, None)))


@contextmanager
def short_rotations(files: tuple[ModuleType, ...]) -> Iterator[None]:
    """Has rotary positions take three operators; for one thread at a time, as what switches attention is."""
    with replaced([(file, _FUNCTION, _ShortRotation(getattr(file, _FUNCTION))) for file in files]):
        yield


class _ShortRotation:
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
    if FIXED_TILES.get() or values.dtype not in (torch.float32, torch.float64):
        return kept.add_(turned.mul_(signed_sin))
    return kept.addcmul_(turned, signed_sin)


@lru_cache
def rotates_halves(function: Any) -> bool:
    """Tries a network's own function beside the short one: others turn neighbours, or a part of the width."""
    if function is None or list(signature(function).parameters) != _PARAMETERS:
        return False
    with unset_fake_temporarily(), host_memory(), torch.no_grad():
        q, k = (torch.linspace(-2.0, 3.0, 16).view(1, 2, 1, 8), torch.linspace(5.0, 1.0, 8).view(1, 1, 1, 8))
        cos, sin = torch.linspace(0.1, 1.0, 8).view(1, 1, 8), torch.linspace(-0.7, 0.9, 8).view(1, 1, 8)
        try:
            own = function(q, k, cos, sin)
        except RuntimeError:  # it takes cosines and sines of another width
            return False
        pairs = zip(own, _ShortRotation(function)(q, k, cos, sin), strict=True)
        return all(float((one - short).abs().max()) < 1e-6 for one, short in pairs)
