"""Row-wise operators whose result for a row does not depend, to the bit, on the rows beside it.

A matrix product picks its kernel, and with it the order of its sums, by how many rows it is given; a vectorised
function treats the last few elements of an array in another way than the others. Here every product has `TILE_ROWS`
rows, padded with zeros, and functions are written as steps that round each element alike. He and Thinking Machines Lab
2025, "Defeating Nondeterminism in LLM Inference", describe the first for GPUs; departure: one height of tiles for all
shapes.

Axes: ``M`` rows, ``N`` rows of a tile, ``K`` inputs, ``O`` outputs, ``E`` experts.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from memsafe_rl.accounting import device_type_of

TILE_ROWS = 16
"""Rows of every product: few enough that decoding a handful of rows wastes little, enough to fill a kernel."""

_here = threading.local()


@contextmanager
def fixed_tiles(enabled: bool = True) -> Iterator[None]:
    """Has linear maps, experts and activation functions of this thread compute each row as if it were alone.

    Args:
        enabled: False changes nothing.
    """
    if not enabled or fixed_tiles_on():
        yield
        return
    _here.on = True
    try:
        with _FixedTiles():
            yield
    finally:
        _here.on = False


def fixed_tiles_on() -> bool:
    """Tells whether this thread computes in fixed tiles."""
    return getattr(_here, "on", False)


def tiled_linear(inputs: Tensor, weight_OK: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Gives ``x W^T + b`` in tiles of `TILE_ROWS` rows; gradients are those of one whole product.

    Args:
        inputs: (..., K), any float type.
        weight_OK: (O, K).
        bias_O: (O,), or None.

    Returns:
        (..., O), in autocast's type where autocast is on, else in the type of the inputs.
    """
    parts = [inputs, weight_OK] if bias_O is None else [inputs, weight_OK, bias_O]
    device = inputs.device.type
    if torch.is_autocast_enabled(device) and inputs.dtype is not torch.float64:
        kind = torch.get_autocast_dtype(device)
        parts = [part.to(kind) for part in parts]
    rows_MK = parts[0].reshape(-1, inputs.shape[-1])
    with torch.autocast(device, enabled=False):
        if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
            out_MO: Tensor = _TiledLinear.apply(rows_MK, *parts[1:], *[None] * (3 - len(parts)))  # type: ignore[no-untyped-call]
        else:
            out_MO = _tiled_product(rows_MK, *parts[1:])
    return out_MO.view(*inputs.shape[:-1], out_MO.shape[-1])


class _TiledLinear(torch.autograd.Function):
    """A linear map: forward in fixed tiles, backward in whole products, since sums over rows depend on the cut."""

    @staticmethod
    def forward(ctx: Any, rows_MK: Tensor, weight_OK: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows_MK, weight_OK)
        return _tiled_product(rows_MK, weight_OK, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MO: Tensor) -> tuple[Tensor | None, ...]:
        rows_MK, weight_OK = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            grad_MO @ weight_OK if wanted[0] else None,
            grad_MO.mT @ rows_MK if wanted[1] else None,
            grad_MO.sum(0) if wanted[2] else None,
        )


def _tiled_product(rows_MK: Tensor, weight_OK: Tensor, bias_O: Tensor | None = None) -> Tensor:
    out_MO = rows_MK.new_empty(len(rows_MK), len(weight_OK))
    weight_KO = weight_OK.mT
    for start in range(0, len(rows_MK), TILE_ROWS):
        tile_NK, target_NO = rows_MK[start : start + TILE_ROWS], out_MO[start : start + TILE_ROWS]
        count = len(tile_NK)
        if count < TILE_ROWS:
            tile_NK = functional.pad(tile_NK, (0, 0, 0, TILE_ROWS - count))
        product_NO = tile_NK @ weight_KO if bias_O is None else torch.addmm(bias_O, tile_NK, weight_KO)
        target_NO.copy_(product_NO[:count])
    return out_MO


# ------------------------------------------------------------------ experts


def tiled_experts(rows_MK: Tensor, weight_EKO: Tensor, *, offs: Tensor, **unknown: Any) -> Tensor:
    """Gives each row's product with its expert's weight, rows sorted by expert; reads no value on the host.

    Every expert's rows are laid into tiles of their own, as many as any routing of so many rows may need.
    """
    if any(value is not None for value in unknown.values()):
        raise NotImplementedError(f"experts with {', '.join(unknown)} have no form in fixed tiles")
    rows, experts = len(rows_MK), len(weight_EKO)
    tiles = min(rows, rows // TILE_ROWS + min(experts, rows))
    place_M = torch.arange(rows, device=rows_MK.device)
    # Rows behind the last expert's are those of experts on other ranks; what they become is masked by the caller.
    expert_M = torch.searchsorted(offs.long(), place_M, right=True).clamp_max(experts - 1)
    ends_E = offs.long().clone()
    ends_E[-1] = rows
    starts_E = functional.pad(ends_E[:-1], (1, 0))
    tiles_E = (ends_E - starts_E + TILE_ROWS - 1) // TILE_ROWS
    last_E = tiles_E.cumsum(0)
    slot_M = (last_E - tiles_E)[expert_M] * TILE_ROWS + place_M - starts_E[expert_M]
    expert_T = torch.searchsorted(last_E, torch.arange(tiles, device=rows_MK.device), right=True)
    laid = rows_MK.new_zeros(tiles * TILE_ROWS, rows_MK.shape[1]).index_copy(0, slot_M, rows_MK)
    expert_T = expert_T.clamp_max(experts - 1)
    products = [
        laid[tile * TILE_ROWS : (tile + 1) * TILE_ROWS] @ weight_EKO.index_select(0, expert_T[tile : tile + 1])[0]
        for tile in range(tiles)
    ]
    return torch.cat(products).index_select(0, slot_M)


# ------------------------------------------------------------------ activation functions


class _Elementwise(torch.autograd.Function):
    """A function of each element, written as steps that a CPU rounds alike wherever the element stands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: Callable[[Tensor], Tensor], slope: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.slope = slope
        return steps(x if x.dtype is torch.float64 else x.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.slope(grad, *ctx.saved_tensors), None, None


def _in_steps(
    own: Callable[..., Tensor], steps: Callable[[Tensor], Tensor], slope: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Has a function take these steps on a CPU; kernels of other devices treat every element alike."""

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if device_type_of(x) != "cpu":
            return own(x, *args, **kwargs)
        found: Tensor = _Elementwise.apply(x, steps, slope)  # type: ignore[no-untyped-call]
        return found

    return run


def _gelu_tanh_steps(x: Tensor) -> Tensor:
    inner = x * x
    return inner.mul_(x).mul_(0.044715).add_(x).mul_(math.sqrt(2 / math.pi)).tanh_().add_(1).mul_(x).mul_(0.5)


_silu = _in_steps(functional.silu, lambda x: x / x.neg().exp_().add_(1), torch.ops.aten.silu_backward)
_sigmoid = _in_steps(
    torch.sigmoid,
    lambda x: x.neg().exp_().add_(1).reciprocal_(),
    lambda grad, x: torch.ops.aten.sigmoid_backward(grad, x.sigmoid()),
)
_gelu_erf = _in_steps(
    functional.gelu,
    lambda x: (x * math.sqrt(0.5)).erf_().add_(1).mul_(x).mul_(0.5),
    torch.ops.aten.gelu_backward,
)
_gelu_tanh = _in_steps(
    partial(functional.gelu, approximate="tanh"),
    _gelu_tanh_steps,
    partial(torch.ops.aten.gelu_backward, approximate="tanh"),
)


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return (_gelu_tanh if approximate == "tanh" else _gelu_erf)(x)


def _addmm(bias: Tensor, rows: Tensor, weight_KO: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Takes the form of GPT-2's linear layers, whose weight lies the other way round."""
    if beta != 1 or alpha != 1 or bias.ndim != 1:
        return torch.addmm(bias, rows, weight_KO, beta=beta, alpha=alpha)
    return tiled_linear(rows, weight_KO.mT, bias)


_TILED: dict[Any, Callable[..., Tensor]] = {
    functional.linear: tiled_linear,
    torch.addmm: _addmm,
    functional.silu: _silu,
    functional.gelu: _gelu,
    torch.sigmoid: _sigmoid,
    Tensor.sigmoid: _sigmoid,
}
for _name, _owner in (("grouped_mm", functional), ("_grouped_mm", torch)):
    if hasattr(_owner, _name):
        _TILED[getattr(_owner, _name)] = tiled_experts


class _FixedTiles(TorchFunctionMode):
    """Puts these operators in the place of torch's own, whoever calls them: layers, adapters, quantised weights."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _TILED.get(func, func)(*args, **(kwargs or {}))
