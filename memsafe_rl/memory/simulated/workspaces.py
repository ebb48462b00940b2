"""Temporaries inside CPU kernels, which no count of storages from Python can see; measured with torch 2.13."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def _exponentials(args: tuple[Any, ...], result: Tensor) -> int:
    """``logsumexp`` keeps the exponentials of its whole input, and the peaks they are relative to."""
    return int(args[0].nbytes + result.nbytes)


def _probabilities(args: tuple[Any, ...], _: Tensor) -> int:
    """``multinomial`` draws by dividing a copy of the probabilities by noise."""
    return int(args[0].nbytes)


WORKSPACES: Mapping[str, Callable[[tuple[Any, ...], Tensor], int]] = {
    "aten::logsumexp": _exponentials,
    "aten::multinomial": _probabilities,
}
"""By operator, the bytes that its kernel holds for a moment besides its arguments and results; others hold a few."""
