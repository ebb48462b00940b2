"""Root-mean-square norms in two kernels while rows are decoded, where a network's own takes six.

A decoded token costs a launch for every operator, and norms are two fifths of a network's operators. The pair (x, -x)
has mean 0 and the mean square of x as its variance, so that torch's layer norm of it, one kernel on every device, gives
``x / sqrt(mean(x^2) + eps)`` in its first half.

Axes: ``D`` width of what is normed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.functional import layer_norm

from memsafe_rl.accounting import host_memory

_HALF = (torch.float16, torch.bfloat16)


def norms_of(network: nn.Module) -> tuple[nn.Module, ...]:
    """Finds the modules of a network that do what `short_norms` puts in their place."""
    return tuple(module for module in network.modules() if _is_norm(module))


@contextmanager
def short_norms(norms: tuple[nn.Module, ...], constants: dict[Any, Any]) -> Iterator[None]:
    """Has norms run in two kernels.

    Args:
        norms: of `norms_of`.
        constants: where their weights are kept twice over, for as long as no weight moves.
    """
    if "norms" not in constants:
        signs = {norm.weight.device: torch.tensor([[1.0], [-1.0]], device=norm.weight.device) for norm in norms}
        constants["norms"] = [(norm, _Short(norm, signs[norm.weight.device])) for norm in norms if _is_free(norm)]
    short: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = constants["norms"]
    for norm, forward in short:
        norm.__dict__["forward"] = forward
    try:
        yield
    finally:
        for norm, _ in short:
            norm.__dict__.pop("forward", None)


class _Short:
    """A norm's forward."""

    def __init__(self, norm: Any, signs_21: Tensor) -> None:
        self._own, self._weight, self._eps, self._signs_21 = norm.forward, norm.weight, norm.variance_epsilon, signs_21
        self._pair_2D = norm.weight.detach().expand(2, -1).contiguous() if norm.weight.dtype == torch.float32 else None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Norms (..., D), rounded where the network's own norm rounds."""
        if torch.is_autocast_enabled(hidden.device.type) or hidden.dtype != self._weight.dtype:
            own: Tensor = self._own(hidden)
            return own
        both = hidden.unsqueeze(-2) * self._signs_21  # float32 in any case
        if self._pair_2D is not None:
            return layer_norm(both, both.shape[-2:], self._pair_2D, None, self._eps)[..., 0, :]
        return layer_norm(both, both.shape[-2:], None, None, self._eps)[..., 0, :].to(hidden.dtype) * self._weight


def _is_norm(module: Any) -> bool:
    names = [name for name, _ in module.named_parameters(recurse=False)]
    plain = names == ["weight"] and module.weight.ndim == 1 and not any(module.children())
    kinds = (torch.float32, *_HALF)
    return plain and isinstance(getattr(module, "variance_epsilon", None), float) and module.weight.dtype in kinds and _agrees(type(module))


def _is_free(module: nn.Module) -> bool:
    """Whether calling a module does no more than its class's forward."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


@lru_cache
def _agrees(kind: type[nn.Module]) -> bool:
    """Tries a class's own forward beside the short one: other norms add 1 to their weight, or round elsewhere."""
    with unset_fake_temporarily(), host_memory(), torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            norm: Any = nn.Module()
            norm.weight = nn.Parameter(torch.linspace(0.5, 2.0, 6).to(dtype))
            norm.variance_epsilon = 0.1
            norm.forward = partial(kind.forward, norm)
            hidden = torch.tensor([[0.3, -1.7, 0.2, 2.9, 0.0, -0.6], [9.0, 1e-3, 4.0, -7.0, 5.0, 5.0]]).to(dtype)
            short = _Short(norm, torch.tensor([[1.0], [-1.0]]))(hidden)
            if not torch.allclose(kind.forward(norm, hidden), short, rtol=1e-6, atol=1e-6):
                return False
    return True
