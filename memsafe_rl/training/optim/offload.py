"""Keeps an optimizer's state in host memory while no step needs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memsafe_rl.accounting import charge
from memsafe_rl.memory.runtime.host_memory import to_device, to_host
from memsafe_rl.types import Component

_LEAST_BYTES = 4096
"""Bytes under which a tensor, such as a count of steps or a table of 256 numbers, is not worth a transfer."""


class _Moved(NamedTuple):
    """Where a parked tensor stands in the state, and the device it came from."""

    places: tuple[tuple[dict[str, Any], str], ...]
    device: torch.device

    def put(self, tensor: Tensor) -> None:
        for state, name in self.places:
            state[name] = tensor


class OptimizerOffload:
    """Moves an optimizer's state to host memory and back, one tensor after another.

    A tensor that several parameters share is moved once and stays shared. Tensors of managed memory, which the driver
    moves by itself, and those under 4 KiB stay.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parked: list[_Moved] = []

    def park(self) -> None:
        """Moves to the host what is not there yet; a call that failed may be repeated."""
        there = {id(state[name]) for moved in self._parked for state, name in moved.places[:1]}
        places: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for state, name in self._places():
            if id(state[name]) not in there:
                places.setdefault(id(state[name]), []).append((state, name))
        for shared in places.values():
            state, name = shared[0]
            moved = _Moved(tuple(shared), state[name].device)
            moved.put(to_host(state[name]))
            self._parked.append(moved)

    def unpark(self) -> None:
        """Moves everything back to where it came from; a call that failed may be repeated."""
        with charge(Component.OPTIMIZER):
            while self._parked:
                moved = self._parked[-1]
                state, name = moved.places[0]
                moved.put(to_device(state[name], moved.device))
                self._parked.pop()

    def forget(self) -> None:
        """Forgets what was parked, once other state has taken its place."""
        self._parked.clear()

    def _places(self) -> Iterator[tuple[dict[str, Any], str]]:
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.nbytes >= _LEAST_BYTES and not getattr(value, "is_paged", False):
                    yield state, name
