"""A run of one process, whose weights lie whole: what several ranks do between them changes nothing here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from operator import call
from typing import Any, TypeVar

from torch import nn

from memsafe_rl.types import Component

T = TypeVar("T")
Run = Callable[[Callable[[], Any]], Any]
Repeat = Callable[..., Any]
"""Runs a stage, `(stage, function, *values)`, until it fits; `Recovery.repeat` is one."""


@dataclass(frozen=True)
class OneProcess:
    """A run of one process, or one rank of several on which a dry run stands for all."""

    # ranks that share each component; empty where everything is whole
    parts: Mapping[Component, int] = field(default_factory=dict)
    world_size: int = 1  # processes
    rank: int = 0  # index of this one
    is_main: bool = True  # whether this one writes logs and checkpoints

    def share(self, count: int) -> range:
        """Returns all rows."""
        return range(count)

    def balance(self, rows: Sequence[int], lengths: Sequence[int]) -> list[int]:  # noqa: ARG002
        """Returns all rows."""
        return list(rows)

    def gather(self, items: list[T]) -> list[T]:
        """Returns the items back."""
        return items

    def any_rank(self, *wishes: bool) -> tuple[bool, ...]:
        """Returns the wishes back."""
        return wishes

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leaves gradients as they are."""

    def wait(self) -> None:
        """Returns at once."""

    def fail(self, reason: str) -> None:
        """Informs nobody."""

    def rejoin(self) -> None:
        """Returns at once: nobody has left."""

    def local_bytes(self, component: Component, size_bytes: int) -> int:
        """Divides the bytes by the ranks that share the component, rounded up."""
        return -(-size_bytes // self.parts.get(component, 1))


class WholeWeights:
    """Weights that lie whole on every rank."""

    divided = False  # whether ranks share the weights
    trained: Collection[str] = ()  # names of weights that ranks which share them have agreed to train

    def __init__(self, foreseen: Callable[[bool], AbstractContextManager[None]] | None = None) -> None:
        self.in_rounds = foreseen is not None  # whether micro-batches share nothing, as in the rounds of ranks
        self._foreseen = foreseen or (lambda _: nullcontext())  # context of rounds that a dry run stands for

    def gathered(self, repeat: Repeat, network: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002
        """Changes nothing: the weights are whole."""
        return nullcontext()

    def forward_of(self, network: nn.Module) -> Run:  # noqa: ARG002
        """Returns what runs a network's forward: nothing besides."""
        return call

    def rounds(self, micro_batches: Iterable[T], *, reduce_each: bool) -> Iterator[T]:
        """Yields this rank's micro-batches."""
        with self._foreseen(reduce_each):
            yield from micro_batches

    def leave_round(self, repeat: Repeat) -> None:
        """Returns at once: a failure concerns nobody else."""

    def finish_round(self, repeat: Repeat) -> None:
        """Returns at once: nobody waits."""

    def total_norm(self, norms: Callable[[], tuple[float, float]], repeat: Repeat) -> float | None:  # noqa: ARG002
        """Returns None: each rank can measure its gradients alone."""
        return None

    def on_main(self, value: T, repeat: Repeat) -> T:  # noqa: ARG002
        """Gives back what a checkpoint holds."""
        return value


WHOLE = WholeWeights()
