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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from memsafe_rl.accounting import device_type_of, holding

TILE_ROWS = 16
"""Rows of every product: few enough that decoding a handful of rows wastes little, enough to fill a kernel."""

SUMMED_ROWS = 256
"""Rows that are widened at once for a sum over rows in float32."""

FIXED_TILES: ContextVar[bool] = ContextVar("memsafe_rl_fixed_tiles", default=False)
"""Whether this thread computes in fixed tiles."""


@contextmanager
def fixed_tiles(enabled: bool = True) -> Iterator[None]:
    """Has linear maps, experts and activation functions of this thread compute each row as if it were alone.

    Args:
        enabled: False changes nothing.
    """
    if not enabled or FIXED_TILES.get():
        yield
        return
    with holding(FIXED_TILES, True), _FixedTiles():
        yield


def tiled_linear(inputs: Tensor, weight_OK: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Returns ``x W^T + b`` in tiles of `TILE_ROWS` rows, as is the gradient of ``x``: to the bit that of a row alone.

    Gradients of weight and bias are sums over rows, which no cut leaves alone to the bit: float32 ones are summed in
    float32, and so differ by rounding alone, whatever autocast narrows.

    Args:
        inputs: (..., K), any float type.
        weight_OK: (O, K).
        bias_O: (O,), or None.

    Returns:
        (..., O), in autocast's type where autocast is on, else in the type of the inputs.
    """
    parts = (inputs.reshape(-1, inputs.shape[-1]), weight_OK, bias_O)
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in parts):
        out_MO: Tensor = _TiledLinear.apply(*parts)  # type: ignore[no-untyped-call]
    else:
        out_MO = _tiled_product(*parts)
    return out_MO.view(*inputs.shape[:-1], out_MO.shape[-1])


class _TiledLinear(torch.autograd.Function):
    """A linear map, forward and backward of a row alone in fixed tiles."""

    @staticmethod
    def forward(ctx: Any, rows_MK: Tensor, weight_OK: Tensor, bias_O: Tensor | None) -> Tensor:
        out_MO = _tiled_product(rows_MK, weight_OK, bias_O)
        ctx.save_for_backward(rows_MK.to(out_MO.dtype), weight_OK)
        ctx.kinds = rows_MK.dtype, None if bias_O is None else bias_O.dtype
        return out_MO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MO: Tensor) -> tuple[Tensor | None, ...]:
        rows_MK, weight_OK = ctx.saved_tensors
        (of_rows, of_weight, of_bias), (kind, bias_kind) = ctx.needs_input_grad, ctx.kinds
        with torch.autocast(grad_MO.device.type, enabled=False):
            return (
                _tiled_product(grad_MO, weight_OK.to(grad_MO.dtype).mT).to(kind) if of_rows else None,
                _summed_product(grad_MO, rows_MK, weight_OK.dtype) if of_weight else None,
                grad_MO.sum(0, dtype=bias_kind) if of_bias else None,
            )


def _tiled_product(rows_MK: Tensor, weight_OK: Tensor, bias_O: Tensor | None = None) -> Tensor:
    out_MO = None
    for tile, rows_NK in enumerate(torch.split(rows_MK, TILE_ROWS)):
        tile_NK = functional.pad(rows_NK, (0, 0, 0, TILE_ROWS - len(rows_NK))) if len(rows_NK) < TILE_ROWS else rows_NK
        # Under autocast, torch keeps the narrow copy of a weight for all tiles, tokens and layers that use it.
        product_NO = functional.linear(tile_NK, weight_OK, bias_O)
        if out_MO is None:
            out_MO = product_NO.new_empty(len(rows_MK), len(weight_OK))
        out_MO[tile * TILE_ROWS : (tile + 1) * TILE_ROWS] = product_NO[: len(rows_NK)]
    assert out_MO is not None, "torch.split gives at least one tile"
    return out_MO


def _summed_product(grad_MO: Tensor, rows_MK: Tensor, kind: torch.dtype) -> Tensor:
    """Returns ``G^T X``, (O, K), summed over rows in a type."""
    if grad_MO.dtype == kind:
        return grad_MO.mT @ rows_MK
    total_OK = torch.zeros(grad_MO.shape[1], rows_MK.shape[1], dtype=kind, device=grad_MO.device)
    for grad_NO, rows_NK in zip(torch.split(grad_MO, SUMMED_ROWS), torch.split(rows_MK, SUMMED_ROWS), strict=True):
        total_OK.addmm_(grad_NO.mT.to(kind), rows_NK.to(kind))
    return total_OK


def tiled_experts(rows_MK: Tensor, weight_EKO: Tensor, *, offs: Tensor, **unknown: Any) -> Tensor:
    """Returns each row's product with its expert's weight, rows sorted by expert; reads no value on the host.

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
    tiles_MO: Tensor = _TiledExperts.apply(laid, weight_EKO, expert_T.clamp_max(experts - 1))  # type: ignore[no-untyped-call]
    return tiles_MO.index_select(0, slot_M)


class _TiledExperts(torch.autograd.Function):
    """Each tile's product with its expert's weight; no copy of a weight outlives its tile."""

    @staticmethod
    def forward(ctx: Any, rows_MK: Tensor, weight_EKO: Tensor, expert_T: Tensor) -> Tensor:
        tiles = zip(torch.split(rows_MK, TILE_ROWS), torch.split(expert_T, 1), strict=True)
        out_MO = torch.cat([tile_NK @ weight_EKO.index_select(0, expert)[0] for tile_NK, expert in tiles])
        ctx.save_for_backward(rows_MK.to(out_MO.dtype), weight_EKO, expert_T)
        ctx.kind = rows_MK.dtype
        return out_MO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MO: Tensor) -> tuple[Tensor | None, ...]:
        rows_MK, weight_EKO, expert_T = ctx.saved_tensors
        of_rows, of_weight, _ = ctx.needs_input_grad
        wide = torch.promote_types(weight_EKO.dtype, torch.float32)
        rows_grad_MK = torch.empty_like(rows_MK) if of_rows else None
        total_EKO = torch.zeros_like(weight_EKO, dtype=wide) if of_weight else None
        with torch.autocast(grad_MO.device.type, enabled=False):
            for tile, expert in enumerate(torch.split(expert_T, 1)):
                part = slice(tile * TILE_ROWS, (tile + 1) * TILE_ROWS)
                if rows_grad_MK is not None:
                    weight_KO = weight_EKO.index_select(0, expert)[0].to(grad_MO.dtype)
                    rows_grad_MK[part] = grad_MO[part] @ weight_KO.mT
                if total_EKO is not None:
                    share_KO = rows_MK[part].mT.to(wide) @ grad_MO[part].to(wide)
                    total_EKO.index_add_(0, expert, share_KO[None])
        return (
            None if rows_grad_MK is None else rows_grad_MK.to(ctx.kind),
            None if total_EKO is None else total_EKO.to(weight_EKO.dtype),
            None,
        )


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


_silu = _in_steps(functional.silu, lambda x: x / x.neg().exp_().add_(1), torch.ops.aten.silu_backward)
_sigmoid = _in_steps(
    torch.sigmoid,
    lambda x: x.neg().exp_().add_(1).reciprocal_(),
    lambda grad, x: torch.ops.aten.sigmoid_backward(grad, x.sigmoid()),
)
_gelu_erf = _in_steps(
    functional.gelu, lambda x: (x * math.sqrt(0.5)).erf_().add_(1).mul_(x).mul_(0.5), torch.ops.aten.gelu_backward
)
_gelu_tanh = _in_steps(
    partial(functional.gelu, approximate="tanh"),
    lambda x: (x * x).mul_(x).mul_(0.044715).add_(x).mul_(math.sqrt(2 / math.pi)).tanh_().add_(1).mul_(x).mul_(0.5),
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
