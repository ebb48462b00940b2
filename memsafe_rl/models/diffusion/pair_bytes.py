"""What one (row, column) pair of a network holds whose pairs are run one by one: measured, for it has any shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memsafe_rl.errors import ConfigError
from memsafe_rl.models.blocks import find_blocks, recomputed
from memsafe_rl.types import UnitBytes


def blocks_of(network: nn.Module) -> tuple[nn.Module, ...]:
    """Gives the repeated blocks of a network."""
    inner = network.get_base_model() if isinstance(network, PeftModel) else network
    try:
        return find_blocks(cast(nn.Module, inner))
    except ConfigError:
        return (cast(nn.Module, inner),)


def measured_pair(
    forward: Callable[[], Tensor], weights: Iterable[Tensor], blocks: Sequence[nn.Module], state_size: int, width: int
) -> tuple[UnitBytes, int]:
    """Runs one pair forward with a graph, and counts what it keeps and the elements of its widest block's input."""
    own = {weight.untyped_storage()._cdata for weight in weights}
    kept, inputs, elements = _kept_bytes(forward, own, blocks, recompute=False)
    outside, again, _ = _kept_bytes(forward, own, blocks, recompute=True)
    widest = max(inputs, default=0)
    unit = UnitBytes(
        kept=kept,
        recomputed=min(kept, outside + sum(again)),
        forward=max(2 * widest, kept // max(1, len(inputs))),
        state=state_size * elements,
    )
    return unit, max(1, widest // width)


def _kept_bytes(
    forward: Callable[[], Tensor], weights: set[int], blocks: Sequence[nn.Module], *, recompute: bool
) -> tuple[int, list[int], int]:
    """Counts what autograd saves of one pair besides weights, the bytes of each block's input, and what comes out."""
    saved: dict[int, int] = {}
    inputs: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    def note(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors = [value for value in (*arguments, *named.values()) if isinstance(value, Tensor)]
        inputs.append(max((value.nbytes for value in tensors), default=0))

    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(saved_tensors_hooks(keep, lambda tensor: tensor))
        if recompute:
            stack.enter_context(recomputed(blocks))
        for block in blocks:
            stack.callback(block.register_forward_pre_hook(note, with_kwargs=True).remove)
        given = forward()  # its graph holds what is saved, so that no address comes twice
    return sum(saved.values()), inputs, given.numel()
