"""What an optimizer step may move, copied to the host, so that a step that broke off half way can be undone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memsafe_rl.accounting import host_memory
from memsafe_rl.memory.runtime.recovery import capture_random_state, set_random_state

Restore = Callable[[], Any]

_KEEP_GRADIENTS = frozenset({"torch", "transformers", "bitsandbytes"})
"""Libraries whose optimizers read gradients and never write to them."""


class Snapshot:
    """Holds weights, optimizer state, schedule, random generators and gradients as they were.

    Everything an optimizer reaches through its attributes is held: parameter groups with their weights and rates,
    state by parameter, counters, tables of its own, and optimizers inside it. Objects of other kinds are taken to be
    constant. Gradients are copied only for optimizers of unknown make, since those of PyTorch, transformers and
    bitsandbytes leave them as they are.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: Any, parameters: Sequence[nn.Parameter], *, clipped: int
    ) -> None:
        self.clipped = clipped
        self.holds_gradients = type(optimizer).__module__.partition(".")[0] not in _KEEP_GRADIENTS
        self._scheduler = scheduler
        with host_memory():
            self._random = capture_random_state()
            seen: dict[int, Restore] = {}
            self._optimizer = remember(optimizer, seen)
            self._weights = remember(list(parameters), seen)  # where the optimizer holds others in their place
            self._schedule = remember(scheduler.state_dict(), seen)
            gradients = [(parameter, parameter.grad) for parameter in parameters]
            self._gradients = [
                (parameter, remember(gradient, seen) if self.holds_gradients else _constant(gradient))
                for parameter, gradient in gradients
            ]

    def restore(self) -> None:
        """Puts everything back bit for bit, in place; allocates nothing on the device and may be repeated."""
        self._optimizer()
        self._weights()
        self._scheduler.load_state_dict(self._schedule())
        for parameter, gradient in self._gradients:
            parameter.grad = gradient()
        set_random_state(self._random)


def remember(value: Any, seen: dict[int, Restore]) -> Restore:
    """Copies a value and all that it holds to the host."""
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = _constant(value)  # for what holds itself
    if isinstance(value, Tensor):
        seen[id(value)] = _remember_tensor(value)
    elif isinstance(value, dict):
        seen[id(value)] = _remember_dict(value, seen)
    elif isinstance(value, (list, tuple)):
        seen[id(value)] = _remember_items(value, seen)
    elif isinstance(value, torch.optim.Optimizer):
        remembered = remember(vars(value), seen)
        seen[id(value)] = lambda: (remembered(), value)[1]
    return seen[id(value)]


def _constant(value: Any) -> Restore:
    return lambda: value


def _remember_tensor(value: Tensor) -> Restore:
    if isinstance(value, nn.Parameter) and not value.requires_grad:
        return _constant(value)
    storage = value.detach()
    copy = storage.to("cpu", copy=True)

    def restore() -> Tensor:
        with torch.no_grad():
            if type(value) in (Tensor, nn.Parameter) and value.data_ptr() != storage.data_ptr():
                value.data = storage
            storage.copy_(copy)
        return value

    return restore


def _remember_dict(value: dict[Any, Any], seen: dict[int, Restore]) -> Restore:
    parts = {key: remember(part, seen) for key, part in value.items()}

    def restore() -> dict[Any, Any]:
        items = {key: part() for key, part in parts.items()}
        value.clear()
        value.update(items)
        return value

    return restore


def _remember_items(value: list[Any] | tuple[Any, ...], seen: dict[int, Restore]) -> Restore:
    parts = [remember(part, seen) for part in value]

    def restore() -> list[Any] | tuple[Any, ...]:
        items = [part() for part in parts]
        if isinstance(value, list):
            value[:] = items
        return value

    return restore
