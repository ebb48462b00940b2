"""Switches a network to another of transformers' attention implementations for one forward."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask

_switch = threading.RLock()


def attention_configs(model: nn.Module) -> tuple[Any, ...]:
    """Finds every config from which a module of a network reads its kind of attention; walks all modules."""
    configs = (getattr(module, "config", None) for module in model.modules())
    found = {id(config): config for config in configs if hasattr(config, "_attn_implementation_internal")}
    return tuple(found.values())


def keep_eager_masks_finite() -> None:
    """Bounds the masks of transformers' eager attention by float32's lowest number, for every network of this process.

    Most networks take the softmax of eager attention in float32. There, float64's lowest number is -inf: padding that
    sees nothing, such as padding under a window, becomes NaN, and from the next layer on so does its whole row.
    """
    ALL_MASK_ATTENTION_FUNCTIONS.register("eager", _finite_eager_mask)


def _finite_eager_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    mask: Tensor | None = eager_mask(*args, **kwargs)
    if mask is None or mask.dtype is not torch.float64:
        return mask
    return mask.clamp_(min=torch.finfo(torch.float32).min)


@contextmanager
def implementation(configs: Iterable[Any], name: str) -> Iterator[None]:
    """Has networks take an attention implementation; each goes back to its own at the end.

    One thread at a time: networks, and copies of one, may share a config.
    """
    known = tuple(configs)
    with _switch:
        yield from _switched(known, name)


def _switched(known: tuple[Any, ...], name: str) -> Iterator[None]:
    # Not through the public setter, which writes to the configs of parts of the model too, and would not give back.
    earlier = [config._attn_implementation_internal for config in known]
    try:
        for config in known:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, own in zip(known, earlier, strict=True):
            config._attn_implementation_internal = own
