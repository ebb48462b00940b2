"""What one of several ranks would hold where weights, gradients and optimizer states are divided among them.

The components that are divided count by one rank's part (`StorageLedger.divide`); what a rank gathers for a while is
laid down beside them at the moments at which FSDP2 does so (torch 2.13, ``torch/distributed/fsdp/_fully_shard``), one
unit per block and one for the rest, the root:

- a forward keeps a block's whole weights until its end, and the buffer they were gathered into until the next one's, or
  the end of the forward;
- a backward keeps a block's whole weights and the buffer of the block before it, which is fetched ahead;
- a block's whole gradients wait for its end, and the flat copy that is then reduced for the next block's end; where
  they are added up once a step, all whole gradients wait for that, which goes unit by unit;
- buffers, such as the scales of a base in 4 bits, are whole on every rank;
- the root's whole weights stay from the first forward to the end of the backward; then its whole gradients are reduced.

ZeRO-3 is taken to gather alike. Rollouts hold the whole weights, as TRL's do (``ds3_gather_for_generation``,
``summon_full_params``), and so do passes without gradient: those of the network that they read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memsafe_rl.accounting import charge
from memsafe_rl.models.blocks import find_blocks
from memsafe_rl.models.module_state import replaced
from memsafe_rl.preflight import refusal
from memsafe_rl.types import Component, Phase


class Sharding(StrEnum):
    """Ways of dividing a run's state among ranks, as accelerate's users call them."""

    NONE = "none"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    FSDP = "fsdp"


_DIVISIBLE = (Component.OPTIMIZER, Component.GRADIENTS, Component.WEIGHTS)
_DIVIDED = {Sharding.NONE: 0, Sharding.ZERO1: 1, Sharding.ZERO2: 2, Sharding.ZERO3: 3, Sharding.FSDP: 3}
"""How many of these, the first ones first, each way divides."""
_GATHERED_WHOLE = (Phase.ROLLOUT, Phase.EVALUATE, Phase.SCORE)


def parts_of(sharding: Sharding, ranks: int) -> dict[Component, int]:
    """Returns the ranks that share each component."""
    return dict.fromkeys(_DIVISIBLE[: _DIVIDED[sharding]], ranks) if ranks > 1 else {}


def read_sharding(given: str, ranks: int) -> Sharding:
    """Reads a way of dividing."""
    refusal.when(isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1, "ranks", ranks=ranks)
    refusal.when(given not in list(Sharding), "sharding/word", given=given, known=", ".join(Sharding))
    refusal.when(Sharding(given) is not Sharding.NONE and ranks == 1, "sharding/ranks", given=given)
    return Sharding(given)


class _Unit:
    """Weights that are gathered together."""

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        own = list(weights)
        self.name = f"gradients of {id(self)}"
        self.is_reduced = False  # whether gradients of an earlier micro-batch of the step were added up
        self.bytes = sum(weight.nbytes for weight in own)
        self.trained_bytes = sum(weight.nbytes for weight in own if weight.requires_grad)
        # of its gradients as they are added up, in float32 or wider
        self.reduced_bytes = sum(max(4, weight.itemsize) * weight.numel() for weight in own if weight.requires_grad)


class Gathering:
    """Lays down what a rank gathers; an `accounting.Listener`, for the phases, and hooks on the blocks."""

    def __init__(self, networks: Sequence[nn.Module], ranks: int, judges: Sequence[nn.Module] = ()) -> None:
        self._ranks = ranks
        self._phases: list[Phase] = []
        self._held: dict[str, Tensor] = {}
        self._whole: dict[str, _Unit] | None = None  # units whose gradients wait to be added up; None: none has to
        self._units: list[_Unit] = []
        buffers = sum(buffer.nbytes for network in networks for buffer in network.buffers())
        with charge(Component.WEIGHTS):  # of which the ledger counts one rank's part
            self._buffers = torch.empty((ranks - 1) * buffers, dtype=torch.uint8)
        self._network_bytes = [_bytes_of(network.parameters()) for network in networks]
        self._judge_bytes = sum(_bytes_of(judge.parameters()) for judge in judges)
        self._roots = [self._divide(network) for network in networks]
        weight: Any = getattr(getattr(networks[0], "get_input_embeddings", lambda: None)(), "weight", None)
        head = getattr(networks[0], "get_output_embeddings", lambda: None)()
        late = isinstance(weight, Tensor) and weight.requires_grad and getattr(head, "weight", None) is not weight
        self._late_bytes = int(weight.nbytes) if late else 0  # of the root's gradients, those the backward ends with

    def _divide(self, network: nn.Module) -> _Unit:
        blocks = find_blocks(network)
        units = [_Unit(block.parameters()) for block in blocks]
        inside = {id(weight) for block in blocks for weight in block.parameters()}
        self._units += units
        for place, block in enumerate(blocks):
            for weight in block.parameters():
                if weight.requires_grad:
                    hook = partial(self._arrive, units[place])
                    weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            block.register_forward_pre_hook(partial(self._begin_block, units, place))
            block.register_forward_hook(partial(self._end_block, units, place))
        return _Unit(weight for weight in network.parameters() if id(weight) not in inside)

    def enter_phase(self, phase: Phase) -> None:
        """Gathers what a phase holds throughout."""
        self._phases.append(phase)
        if phase in _GATHERED_WHOLE:
            whole = max(self._network_bytes) if phase is Phase.SCORE else self._network_bytes[0]
            self._hold("whole", whole + (self._judge_bytes if phase is Phase.EVALUATE else 0))
        elif phase is Phase.REWARD:
            self._hold("whole", self._judge_bytes)
        elif phase is Phase.UPDATE:
            self._begin()

    def _begin(self) -> None:
        self._held.clear()
        self._hold("root", max(root.bytes for root in self._roots))
        for unit in self._units:
            unit.is_reduced = False

    def leave_phase(self) -> None:
        """Drops everything gathered."""
        self._phases.pop()
        self._held.clear()

    @contextmanager
    def reducing(self, each: bool) -> Iterator[None]:
        """Stands for the rounds of a step, which add up the gradients of each micro-batch, or all at their end."""
        with replaced([(self, "_whole", None if each else {})]):
            self._begin()
            yield
            self._drop("root", "gradients", "buffer")
            for name, unit in (self._whole or {}).items():
                self._hold("gradients", unit.reduced_bytes)
                self._drop(name)
            self._drop("gradients")

    def _begin_block(self, units: Sequence[_Unit], place: int, _block: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._by_blocks:
            return
        self._drop("gradients", "root's gradients", "ahead")
        self._hold("buffer", units[place].bytes)
        self._hold("block", units[place].bytes)
        first = args[0] if args else None
        if place == 0 and isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(lambda _: self._end_backward(units[0]))  # type: ignore[no-untyped-call]

    def _end_block(self, units: Sequence[_Unit], place: int, _block: nn.Module, _args: Any, output: Any) -> None:
        self._drop("block")
        found = output[0] if isinstance(output, tuple) else output
        if self._by_blocks and isinstance(found, Tensor) and found.requires_grad:
            found.register_hook(lambda _: self._backward(units, place))  # type: ignore[no-untyped-call]

    def _backward(self, units: Sequence[_Unit], place: int) -> None:
        if place + 1 == len(units):
            self._drop("buffer")
            self._hold("root's gradients", self._rest(self._roots[0].trained_bytes - self._late_bytes))
        else:
            self._end_unit(units[place + 1])
        self._hold("block", units[place].bytes)
        self._hold("ahead", units[place - 1].bytes if place else 0)

    def _arrive(self, unit: _Unit, weight: Tensor) -> None:
        """Holds other ranks' parts of a whole gradient, or of their sum, which the ledger leaves out."""
        if not self._by_blocks:
            return
        name, size = unit.name, weight.nbytes if unit.is_reduced else self._rest(weight.nbytes)
        if self._whole is not None and name in self._whole:  # which it is added to, one by one or as a block if wider
            name, size = "gradients", weight.nbytes if unit.reduced_bytes > unit.trained_bytes else 0
        self._hold(name, size + (self._held[name].nbytes if name in self._held else 0))

    def _end_unit(self, unit: _Unit) -> None:
        """Copies a unit's whole gradients to be added up, or keeps them for that."""
        self._drop("block", "gradients")
        if self._whole is None:
            self._hold("gradients", unit.reduced_bytes)
            self._drop(unit.name)
            unit.is_reduced = True
        else:
            self._keep(unit)

    def _keep(self, unit: _Unit) -> None:
        """Holds a unit's whole gradients until all are added up."""
        assert self._whole is not None, "gradients are added up at once"
        self._whole[unit.name] = unit
        self._hold(unit.name, unit.reduced_bytes - -(-unit.trained_bytes // self._ranks))

    def _end_backward(self, first: _Unit) -> None:
        root = self._roots[0]
        self._drop("ahead")
        self._end_unit(first)
        if self._whole is not None:
            self._drop("root's gradients")
            self._keep(root)
        else:
            # The root's weights are gone when its gradients are copied to be reduced, and the part that stays is made.
            reduced = root.reduced_bytes + -(-root.reduced_bytes // self._ranks)
            self._hold("gradients", max(first.reduced_bytes, reduced - root.bytes))

    @property
    def _by_blocks(self) -> bool:
        return self._phases[-1:] == [Phase.UPDATE]

    def _rest(self, size: int) -> int:
        """Bytes of whole gradients beyond the part that counts as the rank's own."""
        return size - -(-size // self._ranks)

    def _hold(self, name: str, size: int) -> None:
        self._drop(name)
        if size:
            with charge(Component.OTHER):
                self._held[name] = torch.empty(size, dtype=torch.uint8)

    def _drop(self, *names: str) -> None:
        for name in names:
            self._held.pop(name, None)


def _bytes_of(weights: Iterable[nn.Parameter]) -> int:
    return sum(weight.nbytes for weight in weights)
