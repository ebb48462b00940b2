"""What the training step asks of its processes, whether there is one, replicas of one model, or shards of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from torch import nn

from memsafe_rl.types import Component

Item = TypeVar("Item")


class Parallel(Protocol):
    """The processes of a run."""

    @property
    def world_size(self) -> int:
        """Processes of the run."""

    @property
    def rank(self) -> int:
        """Index of this one."""

    @property
    def is_main(self) -> bool:
        """Whether this one writes logs and checkpoints."""

    def share(self, count: int) -> range:
        """Gives this rank's contiguous block of rows.

        Args:
            count: rows of all ranks.

        Returns:
            Indices; the blocks of two ranks differ by at most one row.
        """

    def balance(self, rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Gives this rank's rows of a step, so that all ranks have about as many tokens.

        Args:
            rows: indices of the rows of all ranks.
            lengths: tokens of each of these rows.

        Returns:
            Indices, in the order given.
        """

    def gather(self, items: list[Item]) -> list[Item]:
        """Joins every rank's list on every rank, in rank order.

        Args:
            items: this rank's, which can be pickled.

        Returns:
            All ranks' items.

        Raises:
            MemsafeError: another rank has failed.
        """

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Adds every parameter's gradient over ranks, in place.

        Args:
            parameters: the same on every rank, each with a gradient.

        Raises:
            MemsafeError: another rank has failed.
        """

    def wait(self) -> None:
        """Waits for all ranks.

        Raises:
            MemsafeError: another rank has failed.
        """

    def fail(self, reason: str) -> None:
        """Tells the other ranks that this one has ended.

        Args:
            reason: one line for people.
        """

    def may_repeat(self, stage: str) -> bool:
        """Asks whether a stage that ran out of memory here may run again; sharded ranks have to agree.

        Args:
            stage: name of the stage.

        Returns:
            Whether it may.
        """

    def whole(self) -> AbstractContextManager[None]:
        """Holds the weights whole while phases without gradient run; no collective happens inside.

        Returns:
            A context.
        """

    def local_bytes(self, component: Component, size_bytes: int) -> int:
        """Gives this rank's part of what the whole model would hold.

        Args:
            component: what the bytes are for.
            size_bytes: int, bytes of the whole.

        Returns:
            int, bytes.
        """
