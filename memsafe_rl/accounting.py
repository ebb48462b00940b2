"""Says what bytes are for, to whoever counts them: phase, component, and whether they stand for host memory.

The rooms that allocate mark what they do; a simulated device listens. Without a listener every mark is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from torch import Tensor

from memsafe_rl.types import Component, Phase

_listeners: list[Listener] = []


class Listener(Protocol):
    """Counts allocations under the marks in force; marks are set and put back in the thread that allocates."""

    def mark_phase(self, phase: Phase | None) -> Phase | None:
        """Attributes what is allocated from now on to a phase, and gives the mark before."""

    def mark_component(self, component: Component | None) -> Component | None:
        """Attributes what is allocated from now on to a component, and gives the mark before."""

    def mark_host(self, on_host: bool) -> bool:
        """Counts what is allocated from now on as host memory or not, and gives the mark before."""

    def claim(self, component: Component, tensors: Iterable[Tensor]) -> None:
        """Moves the bytes of existing tensors to a component."""


def listen(listener: Listener) -> None:
    """Sends all marks from now on to a listener too.

    Args:
        listener: counts allocations.
    """
    _listeners.append(listener)


def stop_listening(listener: Listener) -> None:
    """Sends no more marks to a listener.

    Args:
        listener: one passed to `listen` before.
    """
    _listeners.remove(listener)


def listened_to() -> bool:
    """Whether anybody counts."""
    return bool(_listeners)


@contextmanager
def in_phase(phase: Phase) -> Iterator[None]:
    """Attributes what is allocated inside to a phase.

    Args:
        phase: what the run is doing.
    """
    with ExitStack() as stack:
        for listener in _listeners:
            stack.callback(listener.mark_phase, listener.mark_phase(phase))
        yield


@contextmanager
def charge(component: Component) -> Iterator[None]:
    """Attributes what is allocated inside to a component.

    Args:
        component: what the bytes are for.
    """
    with ExitStack() as stack:
        for listener in _listeners:
            stack.callback(listener.mark_component, listener.mark_component(component))
        yield


@contextmanager
def host_memory() -> Iterator[None]:
    """Declares that what is allocated inside stands for host memory, which no device limit binds.

    Only a simulated device needs to be told, for there both lie on the CPU.
    """
    with ExitStack() as stack:
        for listener in _listeners:
            stack.callback(listener.mark_host, listener.mark_host(True))
        yield


def claim(component: Component, tensors: Iterable[Tensor]) -> None:
    """Attributes existing tensors to a component, whatever they were made for.

    Args:
        component: what the bytes are for.
        tensors: any tensors; those nobody counts are passed over.
    """
    if not _listeners:
        return
    found = list(tensors)
    for listener in _listeners:
        listener.claim(component, found)
