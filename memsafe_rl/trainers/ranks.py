"""The ranks of a replicated data-parallel run; with one rank everything here is the identity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import Tensor, nn

from memsafe_rl.errors import ConfigError

Item = TypeVar("Item")

_REPLICATED = {
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
}


class Ranks:
    """Splits work over ranks and brings results together; no collective happens anywhere else.

    Args:
        accelerator: the launcher's view of devices and processes.

    Raises:
        ConfigError: the launcher asks for sharded weights.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        if accelerator.distributed_type not in _REPLICATED:
            raise ConfigError(
                f"the launcher asks for {accelerator.distributed_type}; only one process or replicated data parallel "
                "is supported. Launch with distributed_type NO, MULTI_GPU or MULTI_CPU."
            )
        self._accelerator = accelerator
        self.world_size: int = accelerator.num_processes
        self.rank: int = accelerator.process_index
        self.is_main: bool = accelerator.is_main_process

    def share(self, count: int) -> range:
        """Gives this rank's contiguous block of `count` rows; blocks differ by at most one row."""
        start = self.rank * count // self.world_size
        return range(start, (self.rank + 1) * count // self.world_size)

    def balance(self, rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Gives this rank's rows of a step so that all ranks have about as many tokens.

        Args:
            rows: rows of the step, the same on every rank.
            lengths: tokens of each of them.

        Returns:
            This rank's rows, in the order given.
        """
        if self.world_size == 1:
            return list(rows)
        loads = [0] * self.world_size
        owner: dict[int, int] = {}
        for place in sorted(range(len(rows)), key=lambda place: -lengths[place]):
            lightest = loads.index(min(loads))
            loads[lightest] += lengths[place]
            owner[place] = lightest
        return [row for place, row in enumerate(rows) if owner[place] == self.rank]

    def gather(self, items: list[Item]) -> list[Item]:
        """Joins every rank's list, in rank order, on every rank; tensors must lie on the host."""
        return items if self.world_size == 1 else list(gather_object(items))

    def sum(self, values: Tensor) -> Tensor:
        """Adds a tensor over ranks."""
        return values if self.world_size == 1 else self._reduce(values, torch.distributed.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Takes a tensor's elementwise maximum over ranks."""
        return values if self.world_size == 1 else self._reduce(values, torch.distributed.ReduceOp.MAX)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Adds every parameter's gradient over ranks, in place; a missing gradient counts as zero."""
        if self.world_size == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)

    def same(self, value: Any) -> Any:
        """Gives every rank the main rank's value."""
        if self.world_size == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def wait(self) -> None:
        """Waits for all ranks."""
        self._accelerator.wait_for_everyone()

    def _reduce(self, values: Tensor, operation: Any) -> Tensor:
        total = values.clone().to(self._accelerator.device)
        torch.distributed.all_reduce(total, op=operation)
        return total.to(values.device)
