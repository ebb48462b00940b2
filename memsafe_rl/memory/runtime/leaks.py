"""Names what grows from step to step although nothing should: a leak, and the tensors that are likely to be it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from memsafe_rl.types import Component
from memsafe_rl.units import format_bytes

PATIENCE = 3
"""Steps, or rollouts, in a row a component must grow in before it is called a leak."""

Kind = tuple[tuple[int, ...], str, str | None]
"""Shape and type of a tensor, and the operation that made it if it holds an autograd graph."""

WARM_UP_STEPS = 2
"""Steps that may grow: optimizer state, caches and buffers are made when first needed."""

_VARYING = frozenset({Component.TRAJECTORY})
"""Components whose bytes follow the lengths of what was sampled."""


@dataclass(frozen=True)
class Streak:
    """How long a component has been growing."""

    live_bytes: int  # int, bytes at the last observation
    growths: int = 0  # observations that were above the one before, none of them below
    since_step: int = 0  # step of the first of them
    start_bytes: int = 0  # int, bytes before it
    flat: int = 0  # observations since the last growth
    paused: bool = False  # whether any growth was followed by an observation without

    def after(self, step: int, live_bytes: int, steps_per_rollout: int = 1) -> Streak:
        """Returns the streak once another step was observed."""
        if live_bytes == self.live_bytes and self.growths and self.flat + 1 < steps_per_rollout:
            return replace(self, flat=self.flat + 1)
        if live_bytes <= self.live_bytes:
            return Streak(live_bytes)
        if not self.growths:
            return Streak(live_bytes, growths=1, since_step=step, start_bytes=self.live_bytes)
        paused = self.paused or self.flat > 0
        return replace(self, live_bytes=live_bytes, growths=self.growths + 1, flat=0, paused=paused)

    @property
    def bytes_per_growth(self) -> int:
        """Bytes gained each time, on average over the streak."""
        return (self.live_bytes - self.start_bytes) // max(1, self.growths)


@dataclass(frozen=True)
class Stray:
    """Tensors of one kind that nobody known owns."""

    shape: tuple[int, ...]  # of each of them
    dtype: str  # of each of them
    count: int  # how many there are
    nbytes: int  # int, bytes of all of them, without the graphs they may hold
    graph: str | None  # name of the operation that made them, if they hold an autograd graph; None otherwise

    def __str__(self) -> str:
        held = f", each with its graph ({self.graph})" if self.graph else ""
        return f"{self.count} of shape {self.shape} {self.dtype}, {format_bytes(self.nbytes)}{held}"


class LeakWatch:
    """Gives one alarm for each component that grew in three steps, or three rollouts, in a row, once per streak."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._streaks: dict[Component, Streak] = {}
        self._censuses: dict[Component, dict[Kind, int]] = {}
        self._observations = 0

    def observe(
        self,
        step: int,
        live_by_component: Mapping[Component, int],
        known: Callable[[], Iterable[Tensor]] = tuple,
        *,
        steps_per_rollout: int = 1,
    ) -> list[dict[str, Any]]:
        """Compares the end of an optimizer step with the one before."""
        self._observations += 1
        settled = self._observations > WARM_UP_STEPS
        events = []
        for component in sorted(set(live_by_component) | set(self._streaks)):
            if component in _VARYING:
                continue
            live_bytes = live_by_component.get(component, 0)
            before = self._streaks.get(component, Streak(0))
            streak = before.after(step, live_bytes, steps_per_rollout) if settled else Streak(live_bytes)
            self._streaks[component] = streak
            if streak.growths == PATIENCE - 1 and not streak.flat:
                unowned = _unowned(known(), self._device)
                self._censuses[component] = {kind: len(sizes) for kind, sizes in unowned.items()}
            if streak.growths == PATIENCE and not streak.flat:
                strays = find_strays(known(), self._device, before=self._censuses.pop(component))
                events.append(_leak_event(step, component, streak, strays))
        return events


def find_strays(
    known: Iterable[Tensor],
    device: torch.device | None = None,
    limit: int = 5,
    before: Mapping[Kind, int] | None = None,
) -> list[Stray]:
    """Searches Python's objects for tensors that belong to nobody known; those that hold a graph come first."""
    strays = [
        Stray(*kind[:2], len(sizes), sum(sizes), kind[2])
        for kind, sizes in _unowned(known, device).items()
        if len(sizes) > (before or {}).get(kind, 0) and (kind[2] or any(sizes))
    ]
    return sorted(strays, key=lambda stray: (stray.graph is None, stray.count < PATIENCE, -stray.nbytes))[:limit]


def _unowned(known: Iterable[Tensor], device: torch.device | None) -> dict[Kind, list[int]]:
    """Returns the bytes of each tensor among Python's objects that is not known, by kind."""
    owned = {tensor.untyped_storage().data_ptr() for tensor in known if type(tensor) in (Tensor, nn.Parameter)}
    kinds: dict[Kind, list[int]] = {}
    for thing in gc.get_objects():
        # `isinstance` would ask lazy modules and dead proxies for their class; subclasses may have no storage.
        if type(thing) is not Tensor or thing.layout != torch.strided:
            continue
        if (device is not None and thing.device.type != device.type) or thing.untyped_storage().data_ptr() in owned:
            continue
        graph = None if thing.grad_fn is None else thing.grad_fn.name()
        kinds.setdefault((tuple(thing.shape), str(thing.dtype).removeprefix("torch."), graph), []).append(thing.nbytes)
    return kinds


def _leak_event(step: int, component: Component, streak: Streak, strays: list[Stray]) -> dict[str, Any]:
    time = "rollout" if streak.paused else "step"
    sentence = (
        f"The bytes of {component} have grown in every {time} since step {streak.since_step}, by "
        f"{format_bytes(streak.bytes_per_growth)} a {time}, to {format_bytes(streak.live_bytes)}: something keeps "
        f"tensors of past steps alive"
    )
    if any(stray.graph for stray in strays):
        sentence += ", and at least one of them pins its autograd graph, e.g. a metric that was not detached"
    if strays:
        sentence += f"; likely {'; '.join(map(str, strays))}"
    return {
        "event": "alarm",
        "kind": "leak",
        "step": step,
        "component": str(component),
        "since_step": streak.since_step,
        f"bytes_per_{time}": streak.bytes_per_growth,
        "live_bytes": streak.live_bytes,
        "tensors": [asdict(stray) for stray in strays],
        "sentence": f"{sentence}. Keep numbers instead of tensors (`.item()`), or detach them.",
    }
