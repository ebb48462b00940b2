"""Replicas, where every rank holds the whole model and learns from its own rows.

A rank that fails never leaves the others waiting. Before any collective all ranks exchange a word: whether one of them
has failed, and the sizes of what follows. A rank that cannot continue takes part in one last exchange, `fail`; the
others learn of it at their next collective, whichever that is, and end with its reason. For one that ran out of memory
and tries again they wait there (with divided weights see `shards`).

So that no failure falls between an exchange and its collective, everything that can fail is done before or after:
objects are turned into bytes, gradients are complete, Ctrl+C is held back, and the communication itself works in place,
on the host except for the gradients.
"""

from __future__ import annotations

import copyreg
import io
import logging
import pickle
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import is_initialized
from accelerate.utils import DistributedType, parse_flag_from_env
from torch import Tensor, distributed, nn

from memsafe_rl.accounting import host_memory
from memsafe_rl.errors import MemsafeError
from memsafe_rl.memory.runtime.interrupts import uninterrupted
from memsafe_rl.memory.runtime.stages import Stage
from memsafe_rl.parallel import failure, refusal
from memsafe_rl.parallel.one_process import OneProcess, Repeat
from memsafe_rl.types import Component

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

_KNOWN = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP}
_DIVIDED = (Component.WEIGHTS, Component.GRADIENTS, Component.OPTIMIZER)
_REASON_BYTES = 1000
_POLL_SECONDS = 0.01
_FAILED = 1 << 62  # in place of a size
_CUT_OFF = "An earlier collective of this rank did not complete, so the ranks are out of step. Start the run again."


def open_accelerator(use_cpu: bool, **options: Any) -> Accelerator:
    """Opens accelerate for one trainer, on a device that no later one changes, though a process has one state."""
    use_cpu = use_cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
    accelerator = Accelerator(cpu=use_cpu and not is_initialized(), **options)
    device = torch.device("cpu") if use_cpu else PartialState().default_device
    if (accelerator.device.type == "cpu") == (device.type == "cpu"):
        return accelerator
    refusal.when(accelerator.num_processes > 1, "use_cpu", use_cpu=use_cpu, connected=accelerator.device.type)
    accelerator.state.__dict__ = {**vars(accelerator.state), "device": device, "_cpu": use_cpu}
    return accelerator


def connect(accelerator: Accelerator, *, sharded: bool, timeout_seconds: float) -> Parallel:
    """Returns what stands for the processes of a run, as it was launched, which may share what they train."""
    kind = accelerator.distributed_type
    refusal.when(kind not in _KNOWN, "distributed_type", kind=kind)
    if accelerator.num_processes == 1:
        return OneProcess()
    return Replicas(accelerator, sharded=sharded, timeout_seconds=timeout_seconds)


@contextmanager
def sharing_failures(parallel: Parallel) -> Iterator[None]:
    """Tells the other ranks of an error, so that none waits for one that has left."""
    try:
        yield
    except BaseException as error:
        parallel.fail(f"{type(error).__name__}: {error}")
        raise


class Replicas:
    """Splits work over ranks and brings results together; no collective happens anywhere else."""

    def __init__(self, accelerator: Accelerator, *, sharded: bool = False, timeout_seconds: float = 1800) -> None:
        self.world_size: int = accelerator.num_processes
        # ranks that share each component
        self._parts: dict[Component, int] = dict.fromkeys(_DIVIDED if sharded else (), self.world_size)
        self.rank: int = accelerator.process_index
        self.is_main: bool = accelerator.is_main_process
        self._ended: str | None = None
        # Words and bytes go over the host whatever the device, so that they neither need nor disturb its memory.
        self._hosts: Any = distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        # Tensors over plain Python buffers: read and written without an allocation that could fail.
        self._word = array("q", [0] * (1 + self.world_size))
        self._word_tensor = torch.frombuffer(self._word, dtype=torch.int64)
        self._reason = bytearray(_REASON_BYTES)
        self._reason_tensor = torch.frombuffer(self._reason, dtype=torch.uint8)

    def share(self, count: int) -> range:
        """Returns this rank's contiguous block of `count` rows; blocks differ by at most one row."""
        return range(self.rank * count // self.world_size, (self.rank + 1) * count // self.world_size)

    def balance(self, rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Returns this rank's rows of a step so that all ranks have about as many tokens."""
        loads = [0] * self.world_size
        owner: dict[int, int] = {}
        for place in sorted(range(len(rows)), key=lambda place: -lengths[place]):
            lightest = loads.index(min(loads))
            loads[lightest] += lengths[place]
            owner[place] = lightest
        return [row for place, row in enumerate(rows) if owner[place] == self.rank]

    def gather(self, items: list[Item]) -> list[Item]:
        """Joins every rank's list, in rank order, on every rank."""
        with host_memory():
            stream = io.BytesIO()
            pickler = pickle.Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL)
            pickler.dispatch_table = {**copyreg.dispatch_table, Tensor: _reduced}
            pickler.dump(items)
            own = bytearray(stream.getbuffer())
            with self._collective(len(own)) as sizes:
                parts = [own if source == self.rank else bytearray(size) for source, size in enumerate(sizes)]
                for source, part in enumerate(parts):
                    distributed.broadcast(torch.frombuffer(part, dtype=torch.uint8), src=source, group=self._hosts)
            found = [items if source == self.rank else pickle.loads(part) for source, part in enumerate(parts)]
        return [item for part in found for item in part]

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Adds every parameter's gradient over ranks, in place."""
        gradients = [parameter.grad for parameter in parameters if parameter.requires_grad]  # others: frozen since
        assert all(gradient is not None for gradient in gradients), "complete the gradients before they are summed"
        with self._collective():
            for gradient in gradients:
                distributed.all_reduce(gradient)

    def spread(self, weights: Iterable[Tensor]) -> None:
        """Gives every rank the main rank's weights, in place."""
        with self._collective(), torch.no_grad():
            for weight in weights:
                whole = weight.detach().contiguous()
                distributed.broadcast(whole, src=0)
                weight.copy_(whole)

    def any_rank(self, *wishes: bool) -> tuple[bool, ...]:
        """Whether any rank has each of some wishes."""
        words = self.words(sum(wish << place for place, wish in enumerate(wishes)))
        return tuple(any(word >> place & 1 for word in words) for place in range(len(wishes)))

    def words(self, word: int) -> tuple[int, ...]:
        """Exchanges one number a rank; returns all, in rank order."""
        with self._collective(word) as words:
            return words

    def to_main(self, part: Tensor, repeat: Repeat) -> list[Tensor] | None:
        """Brings every rank's part of a tensor to the host of the main rank, in rank order; the others get None."""
        with host_memory():
            own = repeat(Stage.CHECKPOINT, _on_host, part)
            with self._collective(own.shape[0]) as rows:
                if not self.is_main:
                    if own.numel():
                        distributed.send(own.view(torch.uint8), 0, group=self._hosts)
                    return None
                parts = [own, *repeat(Stage.CHECKPOINT, _rooms, own, rows[1:])]
                for source, other in enumerate(parts):
                    if source != self.rank and other.numel():
                        distributed.recv(other.view(torch.uint8), source, group=self._hosts)
        return parts

    def local_bytes(self, component: Component, size_bytes: int) -> int:
        """Returns the bytes that one rank holds, rounded up."""
        return -(-size_bytes // self._parts.get(component, 1))

    def wait(self) -> None:
        """Waits for all ranks; at once where the ranks have parted, so that what is left can still be saved."""
        if self._ended is None:
            with self._collective():
                pass

    def fail(self, reason: str) -> None:
        """Tells the other ranks that this one has ended, if it can: each of them raises at its next collective."""
        if self._ended is not None:
            return
        self._ended = f"This rank has ended already: {reason}"
        self._reason[:] = reason.encode()[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")
        try:
            self._exchange(_FAILED, has_failed=True)
        except RuntimeError as error:
            logger.warning("rank %d could not tell the other ranks why it ended: %s", self.rank, error)

    def rejoin(self) -> None:
        """Lets ranks go on that have all failed in one exchange, where none is ahead of another."""
        if set(self._word[1:]) == {_FAILED}:
            self._ended = None

    @contextmanager
    def _collective(self, size: int = 0) -> Iterator[tuple[int, ...]]:
        """Exchanges the word, gives each rank's size, and runs the collective inside."""
        if self._ended is not None:
            raise MemsafeError(self._ended)
        with uninterrupted():
            self._ended = _CUT_OFF
            try:
                failed = self._exchange(size)
                if failed is not None:
                    reason = self._reason.rstrip(b"\0").decode(errors="replace").rstrip(" .:")
                    self._ended = str(failure("ended", failed=failed, reason=reason))
                    raise MemsafeError(self._ended)
                yield tuple(self._word[1:])
            except RuntimeError as error:
                raise self.lost(error) from error
            self._ended = None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Marks where others than this class communicate: a rank that fails inside can tell nobody, and ends."""
        self._ended = _CUT_OFF
        yield
        self._ended = None

    def lost(self, error: RuntimeError) -> MemsafeError:
        """Says that a collective broke off, after which no other can work."""
        self._ended = _CUT_OFF
        return failure("lost", rank=self.rank, error=error)

    def _exchange(self, size: int = 0, *, has_failed: bool = False) -> int | None:
        """One reduction of a few integers; where a rank has failed, its reason follows."""
        self._word[:] = array("q", [0] * len(self._word))
        self._word[0] = self.rank + 1 if has_failed else 0
        self._word[1 + self.rank] = size
        work = distributed.all_reduce(self._word_tensor, distributed.ReduceOp.MAX, group=self._hosts, async_op=True)
        while has_failed and not work.is_completed():
            time.sleep(_POLL_SECONDS)  # the others may be busy for long before they listen; Ctrl+C is heard meanwhile
        work.wait()
        failed = self._word[0] - 1
        if failed < 0:
            return None
        distributed.broadcast(self._reason_tensor, src=failed, group=self._hosts)
        return failed


Parallel = OneProcess | Replicas
"""The processes of a run: one, or replicas of one model; what knows of several stands in these two."""


def _reduced(tensor: Tensor) -> Any:
    """Pickles a tensor as its own bytes; PyTorch's way writes all of the storage that a row of a batch is a view of."""
    flat = tensor.detach().cpu().reshape(-1).contiguous()
    return _unpickled_tensor, (flat.view(torch.uint8).numpy().tobytes(), flat.dtype, tuple(tensor.shape))


def _unpickled_tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _on_host(part: Tensor) -> Tensor:
    return part.detach().to("cpu").contiguous()


def _rooms(own: Tensor, rows: Sequence[int]) -> list[Tensor]:
    return [own.new_empty((count, *own.shape[1:])) for count in rows]
