"""Switches a network to another of transformers' attention implementations for one forward."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_switch = threading.RLock()


def attention_configs(model: nn.Module) -> tuple[Any, ...]:
    """Finds every config from which a module of a network reads its kind of attention; walks all modules."""
    configs = (getattr(module, "config", None) for module in model.modules())
    found = {id(config): config for config in configs if hasattr(config, "_attn_implementation_internal")}
    return tuple(found.values())


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
