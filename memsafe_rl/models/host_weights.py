"""Frozen weights that wait in host memory and come to the device while their block runs.

A tensor stays the object it is, and so does its storage, which is filled before the block's forward or backward and
emptied after it, as FSDP2 does with what it gathers. So autograd, PEFT and attention code hold weights as ever, and a
block computes what it would compute if it had never left.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from memsafe_rl.accounting import charge, hold, host_memory, weights_of
from memsafe_rl.models.blocks import blocks_of
from memsafe_rl.types import Component, blocks_on_host

_LEAST_BYTES = 4096
"""Bytes under which a weight, such as a norm's, is not worth a transfer."""


@dataclass
class _Streamed:
    """The frozen weights of a block; the last two are made when it first leaves the device."""

    block: nn.Module
    frozen: list[nn.Parameter]
    weights: list[Tensor] = field(default_factory=list)  # the same storages, without a version that autograd checks
    copies: list[Tensor] = field(default_factory=list)  # on the host

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.frozen)

    def copy_back(self) -> None:
        for weight, copy in zip(self.weights, self.copies, strict=True):
            weight.copy_(copy, non_blocking=True)


class HostWeights:
    """Keeps the frozen weights of some of a network's blocks on the host; brings each in while its block runs.

    While a block runs, the one that is expected next is on its way, so that two of them are on the device at most.
    Which comes next is what came next the last time, forward and backward apart.

    Args:
        blocks: the network's blocks, in the order in which they run.
    """

    @staticmethod
    def of(network: nn.Module) -> HostWeights:
        """Gives what moves a network's weights, always the same while any of them is on the host."""
        known = _known.get(network)
        if known is None or not (known._away or known._settled):
            known = _known[network] = HostWeights(blocks_of(network))
        return known

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        shared = _storages_of_several(blocks)
        self._blocks = [_Streamed(block, list(_frozen_weights(block, shared))) for block in blocks]
        self._away: frozenset[int] = frozenset()  # blocks whose weights wait on the host
        self._settled: frozenset[int] = frozenset()  # blocks whose weights lie on the host as ordinary tensors
        self._here: dict[int, torch.cuda.Event | None] = {}  # those of them that are on the device, or on their way
        self._after: dict[tuple[bool, int], int] = {}
        self._last: tuple[bool, int] | None = None

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """int, bytes of each block's frozen weights, which can wait on the host."""
        return tuple(streamed.nbytes for streamed in self._blocks)

    @property
    def resident(self) -> int:
        """Blocks whose weights stay on the device."""
        return len(self._blocks) - len(self._away)

    def place(self, resident: int | None, device: torch.device | None = None) -> None:
        """Leaves so many blocks on the device, the others spread evenly among them; a call that failed may be repeated.

        Args:
            resident: blocks on the device; None for all.
            device: where blocks run; None for where their weights are.
        """
        away = blocks_on_host(len(self._blocks), resident)
        if away == self._away and not self._settled:
            return
        for index in sorted(self._settled - away):
            for weight in self._blocks[index].frozen:
                weight.data = weight.data.to(device or weight.device, copy=True)
        self._settled = frozenset()
        self.release()
        for index in sorted(away - self._away):
            self._send(index, device)
        returned: list[int] = []
        try:
            for index in sorted(self._away - away):
                self._return(index)
                returned.append(index)
        except BaseException:
            for index in returned:
                self._send(index, device)
            raise

    def settle_on_host(self) -> None:
        """Lays weights of blocks that are away down on the host, where the device has no room for all.

        They can be saved and moved from there; the blocks do not run before `place` has brought them back.
        """
        self.release()
        for streamed in (self._blocks[index] for index in self._away):
            for weight, copy in zip(streamed.frozen, streamed.copies, strict=True):
                weight.data = copy
            streamed.weights, streamed.copies = [], []
            del vars(streamed.block)["forward"]
        self._settled, self._away = self._away, frozenset()

    def release(self) -> None:
        """Takes from the device what is there only because its block ran last."""
        for index in list(self._here):
            self._empty(index)
        self._last = None

    def _send(self, index: int, device: torch.device | None) -> None:
        streamed = self._blocks[index]
        if not streamed.copies:
            with host_memory():
                streamed.copies = [_host_copy(weight, device or weight.device) for weight in streamed.frozen]
            for weight in streamed.frozen:
                # a storage that is mapped from a file cannot be emptied
                if weight.device != (device or weight.device) or not weight.untyped_storage().resizable():
                    weight.data = torch.empty_like(weight, device=device)
                    weight.untyped_storage().resize_(0)
            streamed.weights = [weight.data for weight in streamed.frozen]
        self._empty(index)
        self._away |= {index}
        vars(streamed.block)["forward"] = self._bringing(index, streamed.block.forward)

    def _return(self, index: int) -> None:
        self._fill(index, wait=True)
        del self._here[index]
        self._away -= {index}
        del vars(self._blocks[index].block)["forward"]

    def _bringing(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Gives a block's forward that has its weights, and its backward, on the device."""

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._bring(index)
            result = forward(*args, **kwargs)
            for tensor in tree_leaves(result) if torch.is_grad_enabled() else ():
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(partial(self._before_backward, index))  # type: ignore[no-untyped-call]
            return result

        return run

    def _before_backward(self, index: int, _: Tensor) -> None:
        if index in self._away:
            self._bring(index)

    def _bring(self, index: int) -> None:
        """Has a block's weights on the device, the next one's on their way, and no others."""
        backward = torch._C._current_graph_task_id() >= 0
        if self._last is not None and self._last[0] == backward and self._last[1] != index:
            self._after[self._last] = index
        self._last = (backward, index)
        following = self._after.get(self._last)
        for other in [other for other in self._here if other not in (index, following)]:
            self._empty(other)
        if index not in self._here:
            self._fill(index, wait=True)
        arrived = self._here[index]
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)
            self._here[index] = None
        if following is not None and following in self._away and following not in self._here:
            self._fill(following, wait=False)

    def _fill(self, index: int, *, wait: bool) -> None:
        """Copies a block's weights to the device; all of them are there afterwards, or none."""
        streamed = self._blocks[index]
        self._here[index] = None
        try:
            with charge(Component.WEIGHTS):
                for weight in streamed.weights:
                    weight.untyped_storage().resize_(weight.nbytes)
                self._here[index] = _copied(streamed, wait=wait)
            hold(Component.WEIGHTS, streamed.weights)
        except BaseException:
            self._empty(index)
            raise

    def _empty(self, index: int) -> None:
        for weight in self._blocks[index].weights:
            weight.untyped_storage().resize_(0)
        hold(Component.WEIGHTS, self._blocks[index].weights)
        self._here.pop(index, None)


_known: weakref.WeakKeyDictionary[nn.Module, HostWeights] = weakref.WeakKeyDictionary()


def put_on(network: nn.Module, device: torch.device, room_bytes: int | None = None) -> bool:
    """Moves a network to a device; frozen weights of its blocks stay on the host if all of it would pass the room.

    Args:
        network: on the host, or there already.
        device: where it runs.
        room_bytes: int, bytes that its weights may take; None for no limit.

    Returns:
        Whether weights stay on the host.
    """
    size = sum({weight.untyped_storage()._cdata: weight.nbytes for weight in weights_of(network)}.values())
    weights = HostWeights.of(network)
    stay = room_bytes is not None and size > room_bytes and any(weights.block_bytes)
    if stay:
        weights.place(0, device)
    if any(tensor.device != device for tensor in (*network.parameters(), *network.buffers())):
        network.to(device)
    hold(Component.WEIGHTS, weights_of(network))  # on a CPU they are mapped from the file
    return stay


def _copied(streamed: _Streamed, *, wait: bool) -> torch.cuda.Event | None:
    """Copies from the host; gives the event of arrival if the copies need not be waited for now."""
    device = streamed.weights[0].device if streamed.weights else torch.device("cpu")
    if device.type != "cuda" or wait:
        streamed.copy_back()
        return None
    beside, arrived = _stream_of(device), torch.cuda.Event()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream(device))  # whose memory it is until now
    with torch.cuda.stream(beside):
        streamed.copy_back()
        arrived.record(beside)
    return arrived


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _stream_of(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]


def _host_copy(weight: Tensor, device: torch.device) -> Tensor:
    copy = torch.empty_like(weight, device="cpu", pin_memory=device.type == "cuda")
    return copy.copy_(weight)


def _storages_of_several(blocks: Sequence[nn.Module]) -> set[int]:
    """Finds storages that more than one block holds, which cannot come and go with one."""
    seen: set[int] = set()
    twice: set[int] = set()
    for block in blocks:
        own = {weight.untyped_storage()._cdata for weight in block.parameters()}
        twice |= own & seen
        seen |= own
    return twice


def _frozen_weights(block: nn.Module, shared: set[int]) -> Iterator[nn.Parameter]:
    """Gives the matrices of a block that can leave: frozen, large enough, and alone in their storage.

    Tables stay: T5's other blocks read the biases of the first.
    """
    for module in block.modules():
        for weight in () if isinstance(module, nn.Embedding) else module.parameters(recurse=False):
            storage = weight.untyped_storage()
            alone = storage._cdata not in shared and (storage.nbytes() == weight.nbytes or not storage.resizable())
            if alone and not weight.requires_grad and weight.dim() > 1 and weight.nbytes >= _LEAST_BYTES:
                yield weight
