"""What a run is known to hold on its device, filled in as its parts are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memsafe_rl.accounting import is_on_host, weights_of
from memsafe_rl.memory.runtime.attribution import held_by, optimizer_tensors
from memsafe_rl.types import Component


def _nothing() -> list[Tensor]:
    return []


@dataclass
class Holdings:
    """The long-lived tensors of a run."""

    device: torch.device  # where the model computes
    networks: tuple[nn.Module, ...] = ()  # the model, and every network beside it
    optimizer: torch.optim.Optimizer | None = None  # None before training begins
    trajectory: Callable[[], list[Tensor]] = _nothing  # gives the tensors of the stored rollout
    optimizer_parts: int = 1  # ranks that share the optimizer's state

    def by_component(self) -> dict[Component, int]:
        """Counts the bytes on the device by what they are for; nothing while the model is still being loaded."""
        if not self.networks:
            return {}
        return held_by(
            self.device,
            weights=list(weights_of(*self.networks)),
            optimizer=self.optimizer,
            trajectory=self.trajectory(),
        )

    def optimizer_bytes(self) -> tuple[int, int]:
        """Counts the bytes of the optimizer's state, and of it those offloaded to host memory."""
        if self.optimizer is None:
            return 0, 0
        held = optimizer_tensors(self.optimizer)
        offloaded = [tensor for tensor in held if is_on_host(tensor) or tensor.device != self.device]
        parts = self.optimizer_parts
        return sum(tensor.nbytes for tensor in held) // parts, sum(tensor.nbytes for tensor in offloaded) // parts

    def tensors(self) -> list[Tensor]:
        """Gives the tensors that may outlive a step."""
        state = [] if self.optimizer is None else optimizer_tensors(self.optimizer)
        return [*weights_of(*self.networks), *state, *self.trajectory()]
