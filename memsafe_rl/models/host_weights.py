"""Frozen weights that wait in host memory and come to the device while their block runs.

A parameter stays the object it is. While the network runs, so does its storage on the device, which is filled before
the block's forward or backward and emptied after it, as FSDP2 does with what it gathers. So autograd, PEFT and
attention code hold weights as ever, and a block computes what it would compute if it had never left. Between two runs,
a parameter that is away is its copy on the host, for callbacks, checkpoints and whoever else reads or writes it.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, update_wrapper
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from memsafe_rl.accounting import charge, hold, host_memory, is_on_host, local_part, weights_of
from memsafe_rl.models.blocks import blocks_of
from memsafe_rl.models.geometry import weight_bytes
from memsafe_rl.types import Component, blocks_on_host

_LEAST_BYTES = 4096
"""Bytes under which a weight, such as a norm's, is not worth a transfer."""


@dataclass
class _Streamed:
    """The frozen weights of a block; the last two are made when it leaves the device."""

    block: nn.Module
    frozen: list[nn.Parameter]
    weights: list[Tensor] = field(default_factory=list)  # on the device, without a version that autograd checks
    copies: list[Tensor] = field(default_factory=list)  # on the host

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.frozen)

    def copy_back(self) -> None:
        for weight, waiting in zip(self.weights, self.copies, strict=True):
            weight.copy_(waiting, non_blocking=True)

    def read_from(self, *, host: bool) -> None:
        """Has the parameters be their copies on the host, or what is on the device."""
        for weight, data in zip(self.frozen, self.copies if host else self.weights, strict=True):
            weight.data = data

    def take_over(self) -> None:
        """Takes what was laid into the parameters meanwhile."""
        self.copies = [weight.data for weight in self.frozen]


class _Bringing:
    """A block's forward that has its weights, and its backward, on the device."""

    def __init__(self, host: HostWeights, index: int, forward: Callable[..., Any]) -> None:
        self._host, self._index, self._forward = host, index, forward
        update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._host.bring(self._index)
        result = self._forward(*args, **kwargs)
        if self._host.at_rest and torch._C._current_graph_task_id() < 0:  # what is written next, the host keeps
            self._host.release()
        for tensor in tree_leaves(result) if torch.is_grad_enabled() else ():
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._host.bring(self._index))  # type: ignore[no-untyped-call]
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns the plain forward of the block's copy, whose weights are all where they were read."""
        return copy.deepcopy(self._forward, memo)


class HostWeights:
    """Keeps the frozen weights of some of a network's blocks on the host; brings each in while its block runs.

    The next one, by what came last time, is on its way then: two are on the device at most. After `release`, a
    parameter that is away is read and written on the host. A reference's blocks come last, and leave before any other.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], reference_blocks: int = 0, staying: Sequence[nn.Module] = ()
    ) -> None:
        own = ({weight.untyped_storage()._cdata for weight in block.parameters()} for block in (*blocks, *staying))
        shared = {storage for storage, holders in Counter(chain(*own)).items() if holders > 1}  # stay for the others
        divided = any(local_part(weight) is not weight for weight in weights_of(*blocks))  # FSDP2 brings those
        frozen = [[] if divided else list(_frozen_weights(block, shared)) for block in blocks]
        self._blocks = [_Streamed(block, own) for block, own in zip(blocks, frozen, strict=True)]
        self.reference_blocks = reference_blocks
        self._away: frozenset[int] = frozenset()  # blocks whose weights wait on the host
        self._settled: frozenset[int] = frozenset()  # blocks whose weights lie on the host as ordinary tensors
        self._here: dict[int, torch.cuda.Event | None] = {}  # those of them that are on the device, or on their way
        self._after: dict[tuple[bool, int], int] = {}
        self._last: tuple[bool, int] | None = None
        self.at_rest = True  # parameters that are away are their copies; else they are what is on the device

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """int, bytes of each block's frozen weights, which can wait on the host."""
        return tuple(streamed.nbytes for streamed in self._blocks)

    @property
    def resident(self) -> int | None:
        """Blocks whose weights stay on the device; None where there are none that could leave it."""
        return len(self._blocks) - len(self._away) if self._blocks else None

    @property
    def has_moved_none(self) -> bool:
        """Whether all weights are where the network was loaded."""
        return not (self._away or self._settled)

    def place(self, resident: int | None, device: torch.device | None = None) -> None:
        """Leaves so many blocks on the device until `release`, spread evenly; a call that failed may be repeated."""
        self.release()
        if not any(streamed.frozen for streamed in self._blocks):
            return
        away = blocks_on_host(len(self._blocks), resident, self.reference_blocks)
        for index in sorted(self._settled - away):
            for weight in self._blocks[index].frozen:
                weight.data = weight.data.to(device or weight.device, copy=True)
        self._settled = frozenset()
        for index in sorted(away - self._away):
            self._send(index, device)
        returned: list[int] = []
        try:
            for index in sorted(self._away - away):
                self._fill(index, wait=True)
                del self._here[index]
                self._away -= {index}
                del vars(self._blocks[index].block)["forward"]
                returned.append(index)
        except BaseException:
            for index in returned:
                self._send(index, device)
            raise
        for index in self._away:
            self._blocks[index].take_over()
            self._blocks[index].read_from(host=False)
        self.at_rest = False

    def bring_back(self, device: torch.device) -> None:
        """Leaves all blocks on the device but those of a reference that are away."""
        self.place(max(self.resident or 0, len(self._blocks) - self.reference_blocks), device)
        self.release()

    def settle_on_host(self) -> None:
        """Lays weights of blocks that are away down on the host as tensors that can move, until `place`."""
        self.release()
        for streamed in (self._blocks[index] for index in self._away):
            streamed.weights, streamed.copies = [], []
            del vars(streamed.block)["forward"]
        self._settled, self._away = self._away, frozenset()

    def release(self) -> None:
        """Takes from the device what is there only because its block ran last; what is away is read on the host."""
        for index in list(self._here):
            self._empty(index)
        for index in () if self.at_rest else self._away:
            self._blocks[index].read_from(host=True)
        self._last, self.at_rest = None, True

    def _send(self, index: int, device: torch.device | None) -> None:
        streamed = self._blocks[index]
        frozen = [weight for weight in streamed.frozen if not weight.requires_grad]  # others are trained by now
        with host_memory():  # into the memory of before, if it has left before; it may have been written to meanwhile
            copies = _host_copies(frozen, streamed.copies, device)
        streamed.frozen, streamed.copies = frozen, copies
        pairs = zip(frozen, copies, strict=True)
        streamed.weights = [_emptied(weight, waiting, device or weight.device) for weight, waiting in pairs]
        self._away |= {index}
        vars(streamed.block)["forward"] = _Bringing(self, index, streamed.block.forward)
        streamed.read_from(host=True)
        self._empty(index)

    def bring(self, index: int) -> None:
        """Has a block's weights on the device, the next one's on their way, and no others."""
        if index not in self._away:
            return
        backward = torch._C._current_graph_task_id() >= 0
        if self._last is not None and self._last[0] == backward and self._last[1] != index:
            self._after[self._last] = index
        self._last = (backward, index)
        following = self._after.get(self._last, self._neighbour(index, backward=backward))
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

    def _neighbour(self, index: int, *, backward: bool) -> int | None:
        """Returns the next block in order, in a forward the first after the last, as long as nothing else is known."""
        order = sorted(self._away)
        place = order.index(index) + (-1 if backward else 1)
        return None if place < 0 else order[place % len(order)]

    def _fill(self, index: int, *, wait: bool) -> None:
        """Copies a block's weights to the device; all of them are there afterwards, or none."""
        streamed = self._blocks[index]
        if self.at_rest and index not in self._here:
            streamed.take_over()
        self._here[index] = None
        try:
            with charge(Component.WEIGHTS):
                for weight in streamed.weights:
                    weight.untyped_storage().resize_(weight.nbytes)
                self._here[index] = _copied(streamed, wait=wait)
            hold(Component.WEIGHTS, streamed.weights)
            streamed.read_from(host=False)
        except BaseException:
            self._empty(index)
            raise

    def _empty(self, index: int) -> None:
        streamed, arriving = self._blocks[index], self._here.pop(index, None)
        if arriving is not None:  # its bytes are another's only after what is still being written to them
            torch.cuda.current_stream(streamed.weights[0].device).wait_event(arriving)
        if self.at_rest:
            streamed.read_from(host=True)
        for weight in streamed.weights:
            weight.untyped_storage().resize_(0)
        hold(Component.WEIGHTS, streamed.weights)


_known: weakref.WeakKeyDictionary[nn.Module, HostWeights] = weakref.WeakKeyDictionary()


def host_weights_of(network: nn.Module, reference: nn.Module | None = None) -> HostWeights:
    """Returns what moves a network's and its reference's weights, always the same one while any is on the host."""
    known = _known.get(network)
    if known is None or known.has_moved_none:
        own, copies = (() if one is None else blocks_of(one) for one in (network, reference))
        copies = tuple(block for block in copies if block not in own)  # of a tower that both hold
        known = HostWeights((*own, *copies), len(copies))
        if not any(known.block_bytes[: len(own)]):  # of a network that is trained as a whole
            known = HostWeights(copies or own, len(copies), own if copies else ())
        _known[network] = known
    return known


def put_on(
    network: nn.Module, device: torch.device, room_bytes: int | None = None, reference: nn.Module | None = None
) -> bool:
    """Moves a network and its reference to a device; whether frozen blocks, its own last, stay on the host for room."""
    device = torch.device("cpu") if device.type == "cpu" else device  # "cpu:0", as of ranks, would copy all weights
    networks = [one for one in (network, reference) if one is not None]
    weights, missing = host_weights_of(network, reference), 0
    if room_bytes is not None:
        missing = sum(map(weight_bytes, networks)) - room_bytes
    sizes, placed = weights.block_bytes, _is_placed(network)
    stay = missing > 0 and any(sizes) and not (placed and reference is None)
    if stay:
        others = len(sizes) - weights.reference_blocks
        suffices = sum(sorted(sizes[others:])[:-2]) >= missing  # two come and go
        weights.place(others if suffices or placed else 0, device)
    for one in networks:
        if not _is_placed(one) and any(held.device != device for held in (*one.parameters(), *one.buffers())):
            one.to(device)
    there = [weight for weight in weights_of(*networks) if not is_on_host(weight)]
    hold(Component.WEIGHTS, there)  # on a CPU they are mapped from the file
    return stay


def _is_placed(network: Any) -> bool:
    """Whether loading placed a network, but for one in 4 bits that was quantised on the host."""
    if getattr(network, "is_loaded_in_4bit", False) and not any(weight.is_cuda for weight in network.parameters()):
        return False
    return bool(getattr(network, "is_quantized", False) or getattr(network, "hf_device_map", None))


def _copied(streamed: _Streamed, *, wait: bool) -> torch.cuda.Event | None:
    """Copies from the host; returns the event of arrival if the copies need not be waited for now."""
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


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _host_copies(frozen: Sequence[Tensor], before: Sequence[Tensor], device: torch.device | None) -> list[Tensor]:
    """Copies weights to the host, into earlier copies that fit."""
    copies = []
    for weight, there in zip_longest(frozen, before[: len(frozen)]):
        pinned = (device or weight.device).type == "cuda"
        if there is None or (there.shape, there.dtype, there.device.type) != (weight.shape, weight.dtype, "cpu"):
            there = torch.empty_like(weight, device="cpu", pin_memory=pinned)
        copies.append(there.copy_(weight))
    return copies


def _emptied(weight: nn.Parameter, waiting: Tensor, device: torch.device) -> Tensor:
    """Returns what a weight is on the device: itself, where it is there and its storage can be emptied, else a copy."""
    storage = weight.untyped_storage()
    left = storage._cdata == waiting.untyped_storage()._cdata  # at a try that was refused
    if weight.device == device and storage.resizable() and not left:
        return weight.data
    del storage
    weight.data = waiting  # so that its own bytes are free before those that take their place come and go
    empty = torch.empty_like(waiting, device=device)
    empty.untyped_storage().resize_(0)
    return empty


def _frozen_weights(block: nn.Module, shared: set[int]) -> Iterator[nn.Parameter]:
    """Yields a block's matrices that can leave: frozen, large, alone in their storage; tables, read by others, stay."""
    for module in block.modules():
        for weight in () if isinstance(module, nn.Embedding) else module.parameters(recurse=False):
            storage = weight.untyped_storage()
            alone = storage._cdata not in shared and (storage.nbytes() == weight.nbytes or not storage.resizable())
            if alone and not weight.requires_grad and weight.dim() > 1 and weight.nbytes >= _LEAST_BYTES:
                yield weight
