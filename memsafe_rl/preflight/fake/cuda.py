"""Functions as CUDA computes them, for fake CPU tensors that stand for its own.

Attention takes CUDA's kernel, of which products of matrices hold scores (where queries share heads in float32) and the
others want padding; autocast widens more than on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from memsafe_rl.models.language.kernels import Kernel, kernel_for

_HALF = (torch.float16, torch.bfloat16)
_MASK_ALIGNED = 16
"""Keys to whose whole multiples PyTorch pads masks."""


_IN_FLOAT32 = {
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "norm", "pow", "__pow__",
    "reciprocal", "rsqrt", "sinh", "tan", "dist", "layer_norm", "group_norm", "renorm", "cosine_similarity",
    "binary_cross_entropy_with_logits", "kl_div", "l1_loss", "smooth_l1_loss", "softplus",
}  # fmt: skip
_INTO_FLOAT32 = {"cumprod", "cumsum", "log_softmax", "prod", "softmax", "sum"}
"""Functions that autocast computes in float32 on CUDA and not on a CPU, and those that give float32 unless told a type
(PyTorch's ``autocast_mode.h``)."""


class CudaFunctions(TorchFunctionMode):
    """Has functions that CUDA computes otherwise than the CPU hold what they hold there."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs attention by CUDA's kernels, and under autocast in CUDA's types; everything else as it is."""
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        if func is torch.autograd.backward:
            with self:  # for blocks that are recomputed; edges do not come here again, as tensors would
                return func(tuple(map(get_gradient_edge, args[0])), *args[1:], **kwargs)
        name = getattr(func, "__name__", "")
        if (name in _IN_FLOAT32 or name in _INTO_FLOAT32) and torch.is_autocast_enabled("cpu"):
            if name in _IN_FLOAT32:
                args, kwargs = tree_map(_wide, (args, kwargs))
            elif isinstance(args[0], Tensor) and args[0].dtype in _HALF:
                kwargs = {"dtype": torch.float32, **kwargs}
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    parts, head, seen = [part.to(kind) for part in (query, key, value)], query.shape[-1], key.shape[-2]
    kernel = kernel_for("cuda", kind, head, value.shape[-1], masked=attn_mask is not None)
    own_heads, aligned = query.shape[1] == key.shape[1], 16 // kind.itemsize
    if query.dim() == 4 and not (is_causal and query.shape[-2] != seen):
        if kernel is Kernel.FLASH and (own_heads or enable_gqa):
            scale = head**-0.5 if scale is None else scale
            padded = (pad(part, (0, -head % aligned)) if head % aligned else part for part in parts)
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(*padded, dropout_p, is_causal, scale=scale)[0][..., :head]  # type: ignore[no-any-return]
        if kernel is not Kernel.BLOCKS and own_heads and not (head % aligned or value.shape[-1] % aligned):
            mask = None if attn_mask is None else _padded(attn_mask, parts[0]).expand(*query.shape[:3], seen)
            graded = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
            efficient = torch.ops.aten._scaled_dot_product_efficient_attention
            return efficient(*parts, mask, graded, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def _padded(mask: Tensor, like: Tensor) -> Tensor:
    """Gives a mask in floats whose rows begin at multiples of 16."""
    seen = mask.shape[-1]
    mask = torch.where(mask, 0.0, -torch.inf).to(like.dtype) if mask.dtype is torch.bool else mask.to(like.dtype)
    return pad(mask, (0, -seen % _MASK_ALIGNED))[..., :seen] if seen % _MASK_ALIGNED else mask
