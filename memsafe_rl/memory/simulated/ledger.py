"""Counts live tensor storage from Python, where no compiler is at hand and on fake tensors.

After each operator, storages not seen before are added through a weak reference whose death subtracts them. That works
through backward, checkpointing, saved-tensor hooks and optimizers. It does not see other threads, a storage resized
behind the dispatcher, or temporaries inside a kernel but those that `workspaces` knows; `CountingAllocator` does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from memsafe_rl.accounting import local_part
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.simulated.caching_allocator import Block, CachingAllocator
from memsafe_rl.memory.simulated.workspaces import WORKSPACES
from memsafe_rl.types import Component

DEVICE_OF = torch.ops.prim.device.default
"""What a fake tensor's ``device`` asks, more often than all operators together."""
_FRESH = ("aten::lift_fresh",)
"""Operators that hand out storage made behind the dispatcher (`torch.tensor`), though it looks like a view."""


@dataclass
class _Entry:
    """One storage that counts."""

    size: int  # int, bytes that count
    component: Component
    arena: _Arena  # where
    reference: weakref.ref[torch.UntypedStorage]
    rows: int  # length of the axis along which its tensor would be cut; 0 of a single number
    asked: int  # int, bytes of the storage, or of one rank's part of it
    block: Block | None  # of the allocator, where there is one


class _Arena:
    """Bytes held, what they are for, and the most there were since two moments."""

    def __init__(self) -> None:
        self.total = 0
        self.parts = dict.fromkeys(Component, 0)
        self.highest = [self.now, self.now]

    @property
    def now(self) -> tuple[int, dict[Component, int]]:
        return self.total, self.parts.copy()

    def add(self, component: Component, size: int) -> None:
        self.total += size
        self.parts[component] += size

    def note_peaks(self) -> None:
        # A peak that still stands takes the newest division, so that a claim right after an allocation is seen in it.
        for place, (most, _) in enumerate(self.highest):
            if self.total >= most:
                self.highest[place] = self.now


class Held(IntEnum):
    """What is asked of a count; the first three by the numbers of `cpu_allocator.cpp`."""

    PEAK = 0
    SPAN = 1
    HOST_PEAK = 2
    NOW = 3
    HOST_NOW = 4


def _total(held: Held, doc: str) -> Any:
    return property(lambda counter: counter.split(held)[0], doc=doc)


class ByteCounter:
    """Bytes held; what counts them says in its `split` how many there are, and what they are for."""

    live_bytes: int = _total(Held.NOW, "Bytes held now (at exit, once the count is closed), host memory left out.")
    peak_bytes: int = _total(
        Held.PEAK, "Most bytes held since entry or since the peak was restarted; refused allocations are no part of it."
    )
    host_live_bytes: int = _total(Held.HOST_NOW, "Bytes marked as host memory that are held now, or at exit.")
    host_peak_bytes: int = _total(Held.HOST_PEAK, "Most bytes marked as host memory that were held since entry.")


class StorageLedger(ByteCounter, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of the distinct storages created inside it, by purpose; refuses after the operator ran."""

    def __init__(
        self, allocator: CachingAllocator | None = None, capacity_bytes: int | None = None, fail_at: int | None = None
    ) -> None:
        check_limits(capacity_bytes, fail_at)
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocator = allocator
        self.set_capacity(capacity_bytes)
        self._fail_at = fail_at
        self.allocations = self._refusals = 0
        self._entries: dict[int, _Entry] = {}
        self._device = _Arena()
        self._host = _Arena()
        self._component: Component | None = None
        self._unmarked = Component.OTHER
        self._arena = self._device  # where what is allocated now counts
        self._parts: Mapping[Component, int] = {}

    def divide(self, parts: Mapping[Component, int]) -> None:
        """Counts of some components one rank's part only, as where their tensors are cut along their first axis."""
        self._parts = dict(parts)

    def split(self, held: Held) -> tuple[int, dict[Component, int]]:
        """Returns how many bytes there are, and how they divide."""
        if held in (Held.NOW, Held.HOST_NOW):
            return (self._device if held is Held.NOW else self._host).now
        total, parts = (self._host if held is Held.HOST_PEAK else self._device).highest[held is Held.SPAN]
        return total, parts.copy()

    def restart(self, held: Held) -> None:
        """Starts a new peak or span at the bytes held now; the other stays."""
        self._device.highest[held is Held.SPAN] = self._device.now

    def mark_component(self, component: Component | None) -> Component | None:
        """Says what is allocated for from now on."""
        before, self._component = self._component, component
        return before

    def mark_others(self, on_host: bool) -> bool:
        """Changes nothing: a ledger hears of its own thread alone."""
        return on_host

    def mark_host(self, on_host: bool) -> bool:
        """Says whether what is allocated from now on stands for host memory, which is counted apart."""
        before, self._arena = self._arena, self._host if on_host else self._device
        return before is self._host

    def set_unmarked(self, component: Component) -> Component:
        """Says what is allocated for where there is no mark."""
        before, self._unmarked = self._unmarked, component
        return before

    def claim(self, component: Component, tensors: Iterable[Tensor]) -> None:
        """Moves the bytes of tensors that count to a component."""
        for storage in (storage for tensor in tensors for storage in storages_of(tensor)):
            entry = self._entries.get(storage._cdata)
            if entry is not None:
                self._move(entry, component)

    def hold(self, component: Component, tensors: Iterable[Tensor]) -> None:
        """Counts tensors made outside, such as weights mapped from a file, until they die; others as large as now."""
        for tensor, storage in ((one, storage) for one in tensors for storage in storages_of(one)):
            entry = self._entries.get(storage._cdata)
            if entry is None:
                self._enter(storage, tensor, component, self._device)
            else:
                self._resize(storage)
                self._move(entry, component)

    def is_on_host(self, tensor: Tensor) -> bool:
        """Returns whether a tensor counts as host memory."""
        entries = (self._entries.get(storage._cdata) for storage in storages_of(tensor))
        return any(entry is not None and entry.arena is self._host for entry in entries)

    def see(self, tensor: Tensor, *, is_new: bool) -> None:
        """Counts what an operator gave that did not pass here."""
        for storage in storages_of(tensor):
            if storage._cdata in self._entries:
                self._resize(storage)
            elif is_new:
                self._enter(storage, tensor, self._component or self._unmarked, self._arena)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # whoever compiles under a ledger counts nothing, and the guard costs as much as an operator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operator and enters the storages it made."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is DEVICE_OF:
            return result
        foreign: set[int] | None = None
        for leaf in tensors_in((result,)):
            for storage in storages_of(leaf):
                if storage._cdata in self._entries:
                    self._resize(storage)
                    continue
                if foreign is None:
                    inputs = () if func.name() in _FRESH else (*args, *kwargs.values())
                    foreign = {s._cdata for x in tensors_in(inputs) for s in storages_of(x)}
                if storage._cdata not in foreign:
                    self._enter(storage, leaf, self._component or self._unmarked, self._arena)
        if (workspace := WORKSPACES.get(func.name())) is not None:
            self.see_workspace(workspace(args, result))
        return result

    def see_workspace(self, size: int) -> None:
        """Counts what the operator that just ran held inside, which is gone."""
        if size and self._arena is self._device:
            component = self._component or self._unmarked
            size, block = self._obtain(size, self._device)
            self._device.add(component, size)
            self._device.note_peaks()
            self._device.add(component, -size)
            self._give_back(block)

    def _asked(self, storage: torch.UntypedStorage, component: Component, rows: int) -> int:
        size, parts = storage.nbytes(), self._parts.get(component, 1)
        return -(-rows // parts) * -(-size // rows) if parts > 1 and rows > 0 else size

    def _enter(self, storage: torch.UntypedStorage, tensor: Tensor, component: Component, arena: _Arena) -> None:
        rows = tensor.shape[0] if tensor.dim() else 0
        key, asked = storage._cdata, self._asked(storage, component, rows)
        if asked == 0:
            return
        size, block = self._obtain(asked, arena)
        reference = weakref.ref(storage, lambda _: self._leave(key))
        self._entries[key] = _Entry(size, component, arena, reference, rows, asked, block)
        arena.add(component, size)
        arena.note_peaks()

    def _resize(self, storage: torch.UntypedStorage) -> None:
        entry = self._entries[storage._cdata]
        asked = self._asked(storage, entry.component, entry.rows)
        if asked != entry.asked:
            before = entry.size
            if self.allocator is None and asked > entry.asked:
                self._obtain(asked - entry.asked, entry.arena)
            self._exchange(entry, asked)
            entry.arena.add(entry.component, entry.size - before)
            entry.arena.note_peaks()

    def _exchange(self, entry: _Entry, asked: int) -> None:
        """Has a storage count as a new size: as on a device, the new block is there before the old one goes."""
        size, block = asked, None
        if self.allocator is not None and asked:
            size, block = self._obtain(asked, entry.arena)
        self._give_back(entry.block)
        entry.size, entry.asked, entry.block = size, asked, block

    @property
    def refusals(self) -> int:
        """Storages refused since entry."""
        return self._refusals + (0 if self.allocator is None else self.allocator.refusals)

    def set_capacity(self, capacity_bytes: int | None) -> None:
        """Changes the capacity from now on."""
        check_limits(capacity_bytes, None)
        self.capacity_bytes = capacity_bytes  # that may be held, under an allocator reserved; None for no limit
        if self.allocator is not None:
            self.allocator.limit_bytes = capacity_bytes

    def compact(self) -> None:
        """Has the allocator's model hold what is alive as if nothing else had ever been."""
        if self.allocator is None:
            return
        held = [entry for entry in self._entries.values() if entry.block is not None]
        for entry in held:
            self._give_back(entry.block)
        self.allocator.empty_cache()
        for entry in held:
            entry.block, before = self.allocator.allocate(entry.asked), entry.size
            entry.size = entry.block.size
            entry.arena.add(entry.component, entry.size - before)

    def fail_after(self, allocations: int) -> None:
        """Chooses the next storage that is refused, from 1."""
        check_limits(None, allocations)
        self._fail_at = self.allocations + allocations

    def _obtain(self, size: int, arena: _Arena) -> tuple[int, Block | None]:
        """Asks for bytes; returns how many count, and their block."""
        if arena is self._host:
            return size, None
        self.allocations += 1
        chosen, held = self.allocations == self._fail_at, self._device.total
        # Under an allocator's model too: what was reserved before the limit was set can be more than that.
        if chosen or (self.capacity_bytes is not None and held + size > self.capacity_bytes):
            self._refusals += 1
            raise refusal(size, held, chosen=chosen)
        if self.allocator is None:
            return size, None
        block = self.allocator.allocate(size)
        return block.size, block

    def _give_back(self, block: Block | None) -> None:
        if block is not None and self.allocator is not None:
            self.allocator.free(block)

    def _move(self, entry: _Entry, component: Component) -> None:
        arena = entry.arena
        arena.add(entry.component, -entry.size)
        storage = entry.reference() if self._parts else None
        asked = entry.asked if storage is None else self._asked(storage, component, entry.rows)
        if asked != entry.asked:
            self._exchange(entry, asked)
        arena.add(component, entry.size)
        entry.component = component
        arena.note_peaks()

    def _leave(self, key: int) -> None:
        entry = self._entries.pop(key)
        entry.arena.add(entry.component, -entry.size)
        self._give_back(entry.block)


def check_limits(capacity_bytes: int | None, fail_at: int | None) -> None:
    """Refuses limits that cannot be meant."""
    if capacity_bytes is not None and (type(capacity_bytes) is not int or capacity_bytes < 0):
        raise ConfigError(f"capacity_bytes is {capacity_bytes!r}; give whole bytes, 0 or more, or None for no limit.")
    if fail_at is not None and (type(fail_at) is not int or fail_at < 1):
        raise ConfigError(f"The allocation to fail is number {fail_at!r}; allocations are counted from 1.")


def refusal(requested_bytes: int, held_bytes: int, *, chosen: bool) -> torch.OutOfMemoryError:
    """Builds the error of a simulated device that refuses, in the allocator's own words."""
    reason = "this allocation was chosen to fail." if chosen else "the capacity would be passed."
    return torch.OutOfMemoryError(
        f"Simulated device out of memory. Tried to allocate {requested_bytes} bytes. "
        f"{held_bytes} bytes are live; {reason}"
    )


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors among arguments or results, those in lists too."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yields the storages of a tensor; of one that is divided among ranks, of this rank's part."""
    tensor = local_part(tensor)
    if type(tensor) is FakeTensor:  # whose `device` is an operator of its own
        if tensor.layout is torch.strided and tensor.fake_device.type != "meta":
            yield tensor.untyped_storage()
    elif bool(is_traceable_wrapper_subclass(tensor)):  # as its type guard, mypy would believe that there is none
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from storages_of(getattr(tensor, name))
    elif tensor.layout is torch.strided and tensor.device.type != "meta":
        yield tensor.untyped_storage()
