"""Recomputation of transformer blocks in the backward pass, in any mode of the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from memsafe_rl.models import refusal
from memsafe_rl.models.batch_invariance import computed_again
from memsafe_rl.models.module_state import replaced


def find_blocks(trunk: nn.Module) -> tuple[nn.Module, ...]:
    """Finds the repeated blocks of a network; refuses one that has none."""
    blocks = blocks_of(trunk)
    refusal.when(not blocks, "gradient_checkpointing", kind=type(trunk).__name__)
    return blocks


def blocks_of(trunk: nn.Module) -> tuple[nn.Module, ...]:
    """Finds the repeated blocks of a network; none where it has none."""
    lists = [tuple(module) for module in trunk.modules() if isinstance(module, nn.ModuleList)]
    return tuple(_outermost(trunk)) or max(lists, key=len, default=())


def recomputed(blocks: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Drops what each block's forward would save, and runs that forward again in backward.

    transformers' own switch looks at ``training`` and does nothing in eval mode, where updates run. Only the forward
    must run inside; a module's hooks stay outside what is repeated. Gradients are bitwise those without it.
    """
    return replaced([(block, "forward", _checkpointed(block)) for block in blocks])


def _checkpointed(block: nn.Module) -> Callable[..., Any]:
    forward: Callable[..., Any] = block.forward

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Reading the random state allocates; only dropout, which eval mode switches off, needs it.
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=block.training,
            context_fn=computed_again(),
            **kwargs,
        )

    return run


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from _outermost(child)
