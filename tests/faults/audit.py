"""Finds the allocations of a run that no guard surrounds: an out-of-memory error there would end it.

One run tells all of them, where refusing them one by one takes a run each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from memsafe_rl import accounting
from memsafe_rl.memory.runtime import recovery
from memsafe_rl.types import Component

_GUARDS = (recovery.Attempts.__call__.__code__, recovery.Recovery._tried.__code__)
"""The functions that run what may be repeated."""


class _HostMark:
    """Follows whether what is allocated stands for host memory."""

    on_host = False

    def mark_host(self, on_host: bool) -> bool:
        before, self.on_host = self.on_host, on_host
        return before

    def mark_others(self, on_host: bool) -> bool:
        return on_host

    def mark_component(self, component: Component | None) -> Component | None:
        return component

    def claim(self, component: Component, tensors: Iterable[Tensor]) -> None: ...
    def hold(self, component: Component, tensors: Iterable[Tensor]) -> None: ...
    def is_on_host(self, tensor: Tensor) -> bool:
        return self.on_host

    def enter_phase(self, phase: Any) -> None: ...
    def leave_phase(self) -> None: ...


class _Audit(TorchDispatchMode):
    """Notes operators of the package that made a tensor on the device outside of every guard."""

    def __init__(self, mark: _HostMark) -> None:
        super().__init__()
        self.mark = mark
        self.guarded = 0
        self.unguarded: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = operator(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        if self.mark.on_host or all(tensor.untyped_storage().data_ptr() in given for tensor in _tensors(made)):
            return made
        frame, lines = sys._getframe(1), list[str]()
        while frame is not None and frame.f_code not in _GUARDS:
            place = frame.f_code.co_filename
            if "/memsafe_rl/" in place:
                lines.append(f"{place.rpartition('/memsafe_rl/')[2]}:{frame.f_lineno}")
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None:
            self.guarded += 1
        elif lines:
            self.unguarded.append(f"{operator} at {', called from '.join(lines[:4])}")
        return made


def _tensors(values: Any) -> list[Tensor]:
    found = (one for one in tree_flatten(values)[0] if isinstance(one, Tensor))
    return [one for one in found if one.numel() and one.device.type != "meta"]


@contextmanager
def audited() -> Iterator[_Audit]:
    """Notes what runs inside."""
    mark = _HostMark()
    accounting.listen(mark, mark)
    try:
        with _Audit(mark) as audit:
            yield audit
    finally:
        accounting.stop_listening(mark, mark)
