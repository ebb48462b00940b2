"""Root-mean-square norms in two kernels while rows are decoded, where a network's own takes six.

A decoded token costs a launch for every operator, and norms are two fifths of a network's operators. The pair (x, -x)
has mean 0 and the mean square of x as its variance, so that torch's layer norm of it, one kernel on every device, gives
``x / sqrt(mean(x^2) + eps)`` in its first half.

Axes: ``D`` width of what is normed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.functional import layer_norm

from memsafe_rl.accounting import host_memory
from memsafe_rl.models.module_state import is_hooked, replaced

_HALF = (torch.float16, torch.bfloat16)


def norms_of(network: nn.Module) -> tuple[nn.Module, ...]:
    """Finds the modules of a network that do what `short_norms` puts in their place."""
    return tuple(module for module in network.modules() if _is_norm(module))


@contextmanager
def short_norms(norms: Iterable[Any], constants: dict[Any, Any]) -> Iterator[None]:
    """Has norms run in two kernels; their weights are kept, twice over, among constants while no weight moves."""
    if "norms" not in constants:
        constants["norms"] = [(norm, _Short(norm)) for norm in norms if not is_hooked(norm)]
    with replaced([(norm, "forward", short) for norm, short in constants["norms"]]):
        yield


class _Short:
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
    plain = weights[0].ndim == 1 and weights[0].dtype in (torch.float32, *_HALF)
    return (
        plain and isinstance(getattr(module, "variance_epsilon", None), float) and _agrees(cast(Hashable, type(module)))
    )


@lru_cache
def _agrees(kind: Any) -> bool:
    """Tries a class's own forward beside the short one: other norms add 1 to their weight, or round elsewhere."""
    with unset_fake_temporarily(), host_memory(), torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            norm: Any = nn.Module()
            norm.weight = nn.Parameter(torch.linspace(0.5, 2.0, 6).to(dtype))
            norm.variance_epsilon = 0.1
            norm.forward = partial(kind.forward, norm)
            hidden = torch.tensor([[0.3, -1.7, 0.2, 2.9, 0.0, -0.6], [9.0, 1e-3, 4.0, -7.0, 5.0, 5.0]]).to(dtype)
            short = _Short(norm)(hidden)
            if not torch.allclose(kind.forward(norm, hidden), short, rtol=1e-6, atol=1e-6):
                return False
    return True
