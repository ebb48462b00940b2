"""Weights divided among ranks by FSDP2: whole where completions are drawn and scored, a block at a time in an update.

A pass without gradient runs on whole weights (`ShardedWeights.gathered`): they are gathered once, no collective follows
until they are dropped, and so each rank draws, scores and retries at its own pace.

An update communicates inside every forward and backward, in an order that the model fixes and neither rows nor plans
change. So ranks run micro-batches in *rounds*. Before each, all exchange one word: another micro-batch, none left, or
failed. A rank with none left plays a blank round: the same collectives, zeros for gradients. One that fails inside a
round plays its remaining collectives, and then all ranks drop the gradient and accumulate it again, the failed one
under its policy's next plan. No rank ever waits for a collective that another will not join.

Gradients are added up in each round for which some rank's plan sets `UpdatePlan.reduce_each`, the leanest way. Where
none does, each rank holds its own whole, and all add them up in a last round of nothing else.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from operator import call
from types import MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from memsafe_rl.accounting import charge, host_memory, local_part, staging
from memsafe_rl.errors import PeerOutOfMemoryError
from memsafe_rl.memory.runtime.failures import is_out_of_memory
from memsafe_rl.memory.runtime.interrupts import uninterrupted
from memsafe_rl.memory.runtime.stages import Stage
from memsafe_rl.models.blocks import blocks_of
from memsafe_rl.models.module_state import DividedPart, tensor_place
from memsafe_rl.parallel import failure, refusal
from memsafe_rl.parallel.one_process import Repeat, Run, WholeWeights
from memsafe_rl.parallel.replicas import Replicas
from memsafe_rl.types import Component

T = TypeVar("T")

_FORWARD = "memsafe_forward"
"""The method of a divided network inside of which FSDP2 expects its forward."""


class _Kind(Enum):
    """Collectives inside a forward and backward."""

    GATHER = "all-gather of a unit's weights"
    REDUCE = "reduce-scatter of a unit's gradients"


class _Operation(NamedTuple):
    """A collective of one unit."""

    group: int  # index of the unit's parameter group
    kind: _Kind


class _Word:
    """What ranks tell each other before a round."""

    DONE, MORE, MORE_EACH, FAILED = range(4)  # gradients are added up later after MORE, at once after MORE_EACH


_ROUNDS = {_Word.DONE: {_Kind.REDUCE}, _Word.MORE: {_Kind.GATHER}, _Word.MORE_EACH: {_Kind.GATHER, _Kind.REDUCE}}
"""What a round communicates, by the largest word before it."""


class _Noted:
    """FSDP2's own collective, noted once it was issued."""

    def __init__(self, weights: ShardedWeights, issue: Any, operation: _Operation) -> None:
        self._weights, self._issue, self._operation = weights, issue, operation
        self.allocate = issue.allocate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with uninterrupted(), staging():  # a collective that broke off half way could not be issued again
            return self._weights.issue(self._operation, partial(self._issue, *args, **kwargs))


def _once(stage: Stage, function: Callable[..., T], *values: Any) -> T:  # noqa: ARG001
    return function(*values)


class ShardedWeights:
    """Networks whose weights, gradients and optimizer states are divided, in place, among all ranks."""

    divided = in_rounds = True
    trained: Collection[str] = ()

    def __init__(self, networks: Sequence[nn.Module], ranks: Replicas, device: torch.device) -> None:
        self._ranks = ranks
        self._whole: Any = None  # the network whose weights are whole now
        self._recorded: list[_Operation] | None = None
        self._order: tuple[_Operation, ...] | None = None
        # what the round in progress still has to communicate; None between rounds, where a user may run a network
        self._left: deque[_Operation] | None = None
        # of a bias that T5's blocks hand on; nothing here changes it in place
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        mesh = init_device_mesh(device.type, (ranks.world_size,))
        with charge(Component.WEIGHTS):
            for network in networks:
                for unit in (*blocks_of(network), network):
                    fully_shard(unit, mesh=mesh, mp_policy=_in_float32(network))
        self._roots: list[Any] = list(networks)
        self._units: list[Any] = [
            module for root in self._roots for module in root.modules() if isinstance(module, FSDPModule)
        ]
        self._groups = [group for unit in self._units for group in unit._get_fsdp_state()._fsdp_param_groups]
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)  # denominators are those of the whole step
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_reduce_scatter_unused_params(True)  # else ranks that lack a gradient skip what others wait in
        for place, group in enumerate(self._groups):
            for name, issue, kind in (
                ("_all_gather_comm", DefaultAllGather(), _Kind.GATHER),
                ("_reduce_scatter_comm", DefaultReduceScatter(), _Kind.REDUCE),
            ):
                setattr(group, name, _Noted(self, issue, _Operation(place, kind)))
        for root in self._roots:
            setattr(root, _FORWARD, MethodType(lambda _, run: run(), root))
            register_fsdp_forward_method(root, _FORWARD)
            root._get_fsdp_state()._lazy_init()  # else the first block to run would take itself for a root

    @contextmanager
    def gathered(self, repeat: Repeat, network: nn.Module) -> Iterator[None]:
        """Holds a network's weights whole, and no other's, during passes without gradient; all ranks enter it."""
        root, before = self._root_of(network), self._whole
        if root is before or root is None:
            yield
            return
        self._change_to(root, repeat)
        try:
            yield
        except BaseException:
            self._change_to(None, repeat)  # the other ranks may have left
            raise
        self._change_to(before, repeat)

    def _change_to(self, root: Any, repeat: Repeat) -> None:
        """Drops what is whole, and gathers a root's weights."""
        self._reset()
        for unit in self._units:
            unit.set_reshard_after_forward(unit not in self._roots, recurse=False)
        self._whole = root
        if root is None:
            return
        inside = [(place, group) for place, group in enumerate(self._groups) if group.modules[0] in set(root.modules())]
        self._left = deque(_Operation(place, _Kind.GATHER) for place, _ in inside)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_reshard_after_forward(False, recurse=False)
        for _, group in inside:
            repeat(Stage.PREPARE, _unshard, group)
        self._end_round()

    def _root_of(self, network: nn.Module) -> Any:
        return next((module for module in network.modules() if module in self._roots), None)

    def forward_of(self, network: nn.Module) -> Run:
        """Returns what runs the forward of a network's trunk and head as one forward of what FSDP2 holds together."""
        root = self._root_of(network)
        return call if root is None else getattr(root, _FORWARD)

    def learn_order(self, run: Callable[[], object]) -> None:
        """Notes in which order a forward and backward communicate: all ranks run one together, before all else."""
        self._recorded = []
        run()
        self._order, self._recorded = tuple(self._recorded), None

    def rounds(self, micro_batches: Iterable[T], *, reduce_each: bool) -> Iterator[T]:
        """Yields this rank's micro-batches, one a round; plays blank rounds until no rank has any left."""
        self._reset()  # a user's own forward leaves traces
        waiting, more, owes = iter(micro_batches), _Word.MORE_EACH if reduce_each else _Word.MORE, False
        micro = next(waiting, None)
        while True:
            words = self._ranks.words(_Word.DONE if micro is None else more)
            if _Word.FAILED in words:
                self._reset()
                raise PeerOutOfMemoryError(f"rank {words.index(_Word.FAILED)} ran out of memory in this accumulation")
            if max(words) == _Word.DONE and not owes:
                return
            owes = max(words) == _Word.MORE
            self._begin_round(_ROUNDS[max(words)])
            if micro is None:
                self._play()
                self._end_passes()
            else:
                yield micro
                self._end_round()
                micro = next(waiting, None)

    def leave_round(self, repeat: Repeat) -> None:
        """Plays what is left of a round that failed, and tells the other ranks; all begin the accumulation again."""
        self.finish_round(repeat)
        self._ranks.words(_Word.FAILED)

    def finish_round(self, repeat: Repeat) -> None:
        """Plays what is left of a round or a gathering, so that nobody waits for this rank in it."""
        self._reset()
        self._play(repeat)
        self._reset()

    def _begin_round(self, kinds: Container[_Kind]) -> None:
        if self._order is None:
            raise AssertionError("learn the order of collectives before the first round")
        self._left = deque(operation for operation in self._order if operation.kind in kinds)
        for unit in self._units:
            unit.set_requires_gradient_sync(_Kind.REDUCE in kinds, recurse=False)

    def _end_round(self) -> None:
        if self._left:
            raise AssertionError(f"{len(self._left)} collectives of a round were left out, the first {self._left[0]}")
        self._left = None

    def issue(self, operation: _Operation, collective: Callable[[], T]) -> T:
        """Runs a collective of the round in progress, and notes how far that is."""
        if self._left is not None and list(self._left)[:1] != [operation]:
            raise AssertionError(f"{operation} does not belong where this round stands: {list(self._left)[:1]}")
        try:
            work = collective()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self._left = None
            raise self._ranks.lost(error) from error
        if self._left is not None:
            self._left.popleft()
        elif self._recorded is not None:
            self._recorded.append(operation)
        return work

    def _play(self, repeat: Repeat = _once) -> None:
        """Takes part in the remaining collectives without computing; what they bring of gradients is kept."""
        while self._left:
            before = list(self._left)
            repeat(Stage.ACCOMPANY, self._play_next, before[0])
            if len(self._left) == len(before):
                raise AssertionError(f"{before[0]} could not be played")
        self._left = None

    def _play_next(self, operation: _Operation) -> None:
        place, kind = operation
        group = self._groups[place]
        try:
            if kind is _Kind.GATHER:
                _unshard(group)
                group._to_sharded()
            else:
                group.post_backward()
        except BaseException:
            self._reset()  # what was gathered before memory ran out would pass for gathered the next time
            raise

    def _reset(self) -> None:
        """Leaves nothing of a pass that broke off, nor whole weights and gradients; the rank's parts stay."""
        for group in self._groups:
            for weight in group.fsdp_params:
                weight.unsharded_accumulated_grad = None
                if hasattr(weight, "_unsharded_param"):
                    weight._unsharded_param.grad = None
        self._end_passes()

    def _end_passes(self) -> None:
        for root in self._roots:
            root.reset_iter_state()
        for group in self._groups:
            for weight in group.fsdp_params:  # a gathering that broke off between its buffers counts as none
                if hasattr(weight, "_unsharded_param"):
                    weight.free_unsharded_param()

    def total_norm(self, norms: Callable[[], tuple[float, float]], repeat: Repeat) -> float:
        """Joins the norms of all ranks' parts, and that of the gradients that all have whole."""
        divided, whole = repeat(Stage.MEASURE, norms)
        return math.hypot(whole, *self._ranks.gather([divided]))

    def on_main(self, value: T, repeat: Repeat) -> T:
        """Copies tensors in nested dicts and lists to the host, the divided ones whole and on the main rank only."""
        return self._brought(value, {}, repeat)  # type: ignore[no-any-return]

    def _brought(self, value: Any, known: dict[Any, Any], repeat: Repeat) -> Any:
        if isinstance(value, (Tensor, DividedPart)):
            part = value.part if isinstance(value, DividedPart) else local_part(value)
            place = tensor_place(part)
            if place not in known:
                with host_memory():
                    if part is value:
                        known[place] = repeat(Stage.CHECKPOINT, partial(part.detach().to, "cpu", copy=True))
                    else:
                        parts = self._ranks.to_main(part, repeat)
                        known[place] = None if parts is None else repeat(Stage.CHECKPOINT, torch.cat, parts)
            return known[place]
        if isinstance(value, Mapping):
            return {name: self._brought(each, known, repeat) for name, each in value.items()}
        return (
            type(value)(self._brought(each, known, repeat) for each in value) if type(value) in (list, tuple) else value
        )


Shards = WholeWeights | ShardedWeights
"""Where a run's weights lie: whole on every rank, or divided."""


def _in_float32(network: nn.Module) -> MixedPrecisionPolicy:
    """Has gradients in half precision added up in float32, over ranks and over micro-batches that wait for it."""
    narrow = any(weight.requires_grad and weight.itemsize < torch.float32.itemsize for weight in network.parameters())
    return MixedPrecisionPolicy(reduce_dtype=torch.float32 if narrow else None)


def _unshard(group: Any) -> None:
    group.unshard()
    group.wait_for_unshard()


def save_whole_only(model: Any) -> None:
    """Has ``save_pretrained`` of a model whose weights are divided say who writes them whole."""
    save = model.save_pretrained

    def checked(*arguments: Any, state_dict: Any = None, **options: Any) -> Any:
        failure.when(state_dict is None, "save_pretrained")
        return save(*arguments, state_dict=state_dict, **options)

    model.save_pretrained = checked


def check_critic_dividable(critic: Any) -> None:
    """Refuses a critic that switches which of a network's weights are trained, which FSDP2 reads once."""
    refusal.when(critic.own_geometry is None and not critic.shares_forward, "critic")


def check_draws_tokens(adapter: Any) -> None:
    """Refuses to divide what is no language model."""
    is_none = getattr(adapter, "lm", None) is None or adapter.time_separable
    refusal.when(is_none, "fsdp/none", kind=type(adapter.model).__name__)


def check_dividable(adapter: Any) -> None:
    """Refuses to divide what has not been proved to learn the same."""
    refusal.when(not hasattr(FSDPModule, "reset_iter_state"), "fsdp/torch", version=torch.__version__)
    check_draws_tokens(adapter)
    kind, weights = type(adapter.model).__name__, dict(adapter.lm.named_parameters())
    refusal.when(not blocks_of(adapter.lm), "fsdp/blocks", kind=kind)
    refusal.when(any("trainable_tokens" in name for name in weights), "fsdp/rows", kind=kind)
    for block in blocks_of(adapter.lm):
        types = sorted({str(weight.dtype) for weight in block.parameters() if weight.requires_grad})
        refusal.when(len(types) > 1, "fsdp/types", kind=kind, types=" and ".join(types))
    odd = next((name for name, one in weights.items() if not one.is_floating_point()), None)
    refusal.when(odd is not None, "fsdp/quantised", kind=kind, name=odd)
