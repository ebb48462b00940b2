"""What a run is known to hold on its device, by what it is for: counted from its owners, gradients as they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from memsafe_rl.accounting import claim, is_on_host, listened_to, local_part, weights_of
from memsafe_rl.memory.simulated.ledger import storages_of
from memsafe_rl.types import Component


@dataclass
class Holdings:
    """The long-lived tensors of a run."""

    device: torch.device  # where the model computes
    networks: tuple[nn.Module, ...] = ()  # the model, and every network beside it
    optimizer: Callable[[], list[Tensor]] = list  # gives what is held to move the weights
    trajectory: Callable[[], list[Tensor]] = list  # gives the tensors of the stored rollout
    optimizer_parts: int = 1  # ranks that share the optimizer's state
    resident_blocks: Callable[[], int | None] = lambda: None  # gives the blocks whose frozen weights are on the device

    def by_component(self) -> dict[Component, int]:
        """Counts the bytes on the device by what they are for; nothing while the model is still being loaded."""
        if not self.networks:
            return {}
        return held_by(
            self.device,
            weights=list(weights_of(*self.networks)),
            optimizer=self.optimizer(),
            trajectory=self.trajectory(),
        )

    def optimizer_bytes(self) -> tuple[int, int]:
        """Counts the bytes of the optimizer's state, and of it those offloaded to host memory."""
        held = self.optimizer()
        offloaded = [tensor for tensor in held if is_on_host(tensor) or tensor.device != self.device]
        parts = self.optimizer_parts
        return sum(tensor.nbytes for tensor in held) // parts, sum(tensor.nbytes for tensor in offloaded) // parts

    def tensors(self) -> list[Tensor]:
        """Gives the tensors that may outlive a step."""
        return [*map(local_part, weights_of(*self.networks)), *self.optimizer(), *self.trajectory()]


# ------------------------------------------------------------------ who owns what


def watch_gradients(parameters: Iterable[Tensor]) -> ExitStack:
    """Claims gradients for their component as soon as a backward has made them, until it is closed."""
    hooks = ExitStack()
    for weight in parameters if listened_to() else ():
        if weight.requires_grad:
            hook = weight.register_post_accumulate_grad_hook(_claim_gradient)  # type: ignore[no-untyped-call]
            hooks.callback(hook.remove)
    return hooks


def held_by(
    device: torch.device | str,
    *,
    weights: Iterable[Tensor],
    optimizer: Iterable[Tensor] = (),
    trajectory: Iterable[Tensor] = (),
) -> dict[Component, int]:
    """Counts the bytes that known owners hold on a device, each storage once, whole, for the first of them below."""
    tensors = list(weights)
    owned: dict[Component, Iterable[Tensor]] = {
        Component.WEIGHTS: tensors,
        Component.GRADIENTS: [tensor.grad for tensor in tensors if tensor.grad is not None],
        Component.OPTIMIZER: optimizer,
        Component.TRAJECTORY: trajectory,
    }
    place, seen = torch.device(device), set[int]()
    return {
        component: sum(storage.nbytes() for storage in _new_storages(found, place, seen))
        for component, found in owned.items()
    }


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Gives the tensors of an optimizer's state."""
    values = [list(entries.values()) for entries in optimizer.state.values()]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _claim_gradient(weight: Tensor) -> None:
    if weight.grad is not None:
        claim(Component.GRADIENTS, [weight.grad])


def _new_storages(tensors: Iterable[Tensor], device: torch.device, seen: set[int]) -> Iterator[torch.UntypedStorage]:
    simulated = listened_to()
    for tensor in tensors:
        if simulated and is_on_host(tensor):
            continue
        for storage in storages_of(tensor):
            lies_there = storage.device.type == device.type and device.index in (None, storage.device.index)
            if lies_there and storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage
