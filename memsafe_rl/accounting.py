"""Says what bytes are for, to whoever counts them: phase, component, and whether they stand for host memory.

The rooms that allocate mark what they do; a simulated device listens. Without a listener a mark is one test of a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from itertools import islice, product
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from memsafe_rl.types import Component, Phase

Turn = TypeVar("Turn")
Value = TypeVar("Value")

_listeners: list[Listener] = []
_counters: list[Counter] = []
_turns: int | None = None  # turns of a loop that are worth running; None for all
_UNHEARD: AbstractContextManager[None] = nullcontext()  # the mark that nobody hears
_PLAIN = (Tensor, nn.Parameter)  # types of tensors that have nothing beside their elements
_STANDS_FOR: ContextVar[str | None] = ContextVar("type of the device that CPU tensors stand for", default=None)


class Listener(Protocol):
    """Follows the phases of a run; a phase holds for the whole process, whatever thread allocates."""

    def enter_phase(self, phase: Phase) -> None:
        """Attributes what is allocated from now on to a phase, until it is left; phases may be nested."""

    def leave_phase(self) -> None:
        """Goes back to the phase before the one entered last."""


class Counter(Protocol):
    """Counts allocations under the marks in force; they hold for the thread that sets them."""

    def mark_component(self, component: Component | None) -> Component | None:
        """Attributes what this thread allocates from now on to a component, and gives the mark before."""

    def mark_host(self, on_host: bool) -> bool:
        """Counts what this thread allocates from now on as host memory or not, and gives the mark before."""

    def mark_others(self, on_host: bool) -> bool:
        """Counts what threads without marks allocate from now on as host memory or not; returns the last setting."""

    def claim(self, component: Component, tensors: Iterable[Tensor]) -> None:
        """Moves the bytes of counted tensors to a component; passes over others."""

    def hold(self, component: Component, tensors: Iterable[Tensor]) -> None:
        """Counts tensors from now on as if they were allocated now, at the sizes that their storages have now."""

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether a tensor is counted as host memory."""


def listen(listener: Listener, *counters: Counter) -> None:
    """Sends all phases from now on to a listener too, and all marks to its counters."""
    _listeners.append(listener)
    _counters.extend(counters)


def stop_listening(listener: Listener, *counters: Counter) -> None:
    """Sends no more phases to a listener, and no more marks to its counters."""
    _listeners.remove(listener)
    for counter in counters:
        _counters.remove(counter)


@contextmanager
def among_ourselves() -> Iterator[None]:
    """Sends the marks made inside to those only who begin to listen inside."""
    before = _listeners.copy(), _counters.copy()
    _listeners.clear()
    _counters.clear()
    try:
        yield
    finally:
        _listeners[:], _counters[:] = before


def listened_to() -> bool:
    """Whether anybody counts."""
    return bool(_counters)


def in_phase(phase: Phase) -> AbstractContextManager[None]:
    """Attributes what is allocated inside to a phase."""
    return _in_phase(phase) if _listeners else _UNHEARD


def charge(component: Component) -> AbstractContextManager[None]:
    """Attributes what this thread allocates inside to a component."""
    return _marked(component, "mark_component") if _counters else _UNHEARD


def host_memory() -> AbstractContextManager[None]:
    """Declares that what this thread allocates inside stands for host memory, as a simulated device has to be told."""
    return _marked(True, "mark_host") if _counters else _UNHEARD


def staging() -> AbstractContextManager[None]:
    """Declares that a collective runs inside, for which gloo's threads allocate host memory."""
    return _marked(True, "mark_host", "mark_others") if _counters else _UNHEARD


def claim(component: Component, tensors: Iterable[Tensor]) -> None:
    """Attributes existing tensors to a component, whatever they were made for."""
    if _counters:
        found = list(tensors)
        for counter in _counters:
            counter.claim(component, found)


def hold(component: Component, tensors: Iterable[Tensor]) -> None:
    """Declares that existing tensors, such as weights mapped from a file, lie on the device from now on."""
    if _counters:
        found = list(tensors)
        for counter in _counters:
            counter.hold(component, found)


def is_on_host(tensor: Tensor) -> bool:
    """Whether a tensor on the CPU stands for host memory of a simulated device."""
    return any(counter.is_on_host(tensor) for counter in _counters)


@contextmanager
def holding(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Has a context variable hold a value inside."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def standing_for(device_type: str) -> AbstractContextManager[None]:
    """Has CPU tensors inside stand for those of a device, so that code takes the branches it takes there."""
    return holding(_STANDS_FOR, device_type)


def device_type_of(tensor: Tensor) -> str:
    """Returns the type of the device that a tensor is on or stands for."""
    own = tensor.device.type
    return _STANDS_FOR.get() or own if own == "cpu" else own


def only_bytes_matter() -> AbstractContextManager[None]:
    """Declares that numbers computed inside are nobody's, so that of a loop's like turns the first two tell all."""
    return _running(2)


def every_turn() -> AbstractContextManager[None]:
    """Has loops run to their end again, for who counts what they do."""
    return _running(None)


@contextmanager
def _running(turns: int | None) -> Iterator[None]:
    global _turns
    before, _turns = _turns, turns
    try:
        yield
    finally:
        _turns = before


def worth_running(
    turns: Iterable[Turn], telling: Callable[[Sequence[Turn]], list[int]] | None = None
) -> Iterator[Turn]:
    """Yields the turns of a loop whose turns take bytes and give them back."""
    if _turns is None or telling is None:
        return islice(turns, _turns)
    listed = list(turns)
    return iter([listed[place] for place in sorted({0, *telling(listed)})])


def weights_of(*networks: nn.Module) -> Iterator[Tensor]:
    """Walks all tensors that make up networks, some of them perhaps twice."""
    for layer in (layer for network in networks for layer in network.modules()):
        for tensor in (*layer._parameters.values(), *layer._buffers.values()):
            if tensor is not None:
                yield tensor
                if type(tensor) not in _PLAIN:
                    yield from _quantisation_state(tensor)
        state = layer.__dict__.get("state")  # where an 8-bit layer moves its tensors in its first forward
        if state is not None:
            yield from _tensors(state, "CB", "SCB")


def local_part(tensor: Tensor) -> Tensor:
    """Returns what this rank holds of a tensor: its part of one that FSDP2 divides, else all."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def _quantisation_state(weight: Tensor) -> Iterator[Tensor]:
    yield from _tensors(weight, "CB", "SCB")
    state = getattr(weight, "quant_state", None)
    while state is not None:
        yield from _tensors(state, "absmax", "code", "offset")
        state = getattr(state, "state2", None)


def _tensors(owner: object, *names: str) -> Iterator[Tensor]:
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, Tensor):
            yield value


@contextmanager
def _in_phase(phase: Phase) -> Iterator[None]:
    with ExitStack() as stack:
        for listener in _listeners:
            listener.enter_phase(phase)
            stack.callback(listener.leave_phase)
        yield


@contextmanager
def _marked(value: Component | bool, *marks: str) -> Iterator[None]:
    """Sets some marks of `Counter` inside, and what they were before again afterwards."""
    with ExitStack() as stack:
        for mark, counter in product(marks, _counters):
            setting = getattr(counter, mark)
            stack.callback(setting, setting(value))
        yield


def autocast_bytes(device: torch.device) -> int | None:
    """Returns the width of an element under the autocast in force."""
    kind = device.type
    return torch.get_autocast_dtype(kind).itemsize if torch.is_autocast_enabled(kind) else None
