"""Caches of transformers: one that keeps nothing, for scoring, and one that says what it allocates for."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from memsafe_rl.accounting import charge
from memsafe_rl.types import Component


class _TransitLayer(DynamicLayer):  # type: ignore[misc]
    """A layer that hands keys and values on and keeps none."""

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class _MarkedCache(DynamicCache):  # type: ignore[misc]
    """A growing cache that says what it allocates for."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        with charge(Component.KV_CACHE):
            updated: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return updated


def growing_cache(config: Any) -> Any:
    """Builds a cache that grows with every token, for decoding."""
    return _MarkedCache(config=config)


def transit_cache() -> Any:
    """Builds a cache that stays empty, which tells transformers' mask code all it must know without reading tensors.

    Without a cache and a mask, that code looks for packed sequences in tensor values: a wait for the device, and on
    fake tensors a mask that the real run does not have. With an empty cache it takes shapes alone, builds no mask where
    the attention kernel knows causality itself, and one window mask for all rows where a layer has a window.
    """
    return Cache(layer_class_to_replicate=_TransitLayer)


def is_trimmable(cache: Any) -> bool:
    """Tells whether slots can be cut off the front of a cache."""
    return bool(cache.layers) and all(
        type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers
    )
