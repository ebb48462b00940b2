"""One process: everything that knows of several is the identity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import nn

from memsafe_rl.types import Component

Item = TypeVar("Item")


@dataclass(frozen=True)
class OneProcess:
    """A run of one process, or one rank of several on which a dry run stands for all."""

    # ranks that share each component; empty where everything is whole
    parts: Mapping[Component, int] = field(default_factory=dict)
    world_size: int = 1  # processes
    rank: int = 0  # index of this one
    is_main: bool = True  # whether this one writes logs and checkpoints

    def share(self, count: int) -> range:
        """Gives all rows."""
        return range(count)

    def balance(self, rows: Sequence[int], lengths: Sequence[int]) -> list[int]:  # noqa: ARG002
        """Gives all rows."""
        return list(rows)

    def gather(self, items: list[Item]) -> list[Item]:
        """Gives the items back."""
        return items

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leaves gradients as they are."""

    def wait(self) -> None:
        """Returns at once."""

    def fail(self, reason: str) -> None:
        """Informs nobody."""

    def local_bytes(self, component: Component, size_bytes: int) -> int:
        """Divides the bytes by the ranks that share the component, rounded up."""
        return -(-size_bytes // self.parts.get(component, 1))
