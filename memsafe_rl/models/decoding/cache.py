"""Caches of keys and values: one that keeps nothing, for scoring, and the state of rows being decoded.

Axes: ``B`` rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
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


@dataclass
class CausalDecodeState:
    """Keys and values of rows being decoded, padded on the left to one width.

    Args:
        cache: transformers' cache.
        pads_B: (B,) int64 on the device, slots of padding before each row.
        pads: the same on the host.
        width: slots of every row, padding included.
        trimmable: whether common padding may be cut off (every layer is plain or windowed attention).
    """

    cache: Any
    pads_B: Tensor
    pads: tuple[int, ...]
    width: int
    trimmable: bool

    @property
    def rows(self) -> int:
        """Sequences held."""
        return int(self.pads_B.shape[0])

    @property
    def padded(self) -> bool:
        """Whether any row may have padding."""
        return any(self.pads)

    def nbytes(self) -> int:
        """Bytes of the cache, storage that a windowed layer still pins included."""
        storages = {}
        for tensor in self.tensors():
            storage = tensor.untyped_storage()
            storages[id(tensor) if isinstance(tensor, FakeTensor) else storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    def tensors(self) -> Iterator[Tensor]:
        """Gives all that the layers hold: keys and values, or the states of recurrent layers."""
        return _tensors([vars(layer) for layer in self.cache.layers])

    def select(self, rows: Sequence[int]) -> CausalDecodeState:
        """Keeps, drops, repeats or reorders rows, layer by layer, and cuts off padding that all of them share."""
        pads = tuple(self.pads[row] for row in rows)
        trim = min(pads, default=0) if self.trimmable else 0
        on_device = torch.tensor(rows, device=self.pads_B.device)
        with charge(Component.KV_CACHE):
            for layer in self.cache.layers:
                _select(layer, on_device, trim)
        return CausalDecodeState(
            cache=self.cache,
            pads_B=self.pads_B.index_select(0, on_device) - trim,
            pads=tuple(pad - trim for pad in pads),
            width=self.width - trim,
            trimmable=self.trimmable,
        )

    def stretch(self, tokens: int) -> bool:
        """Widens every row in place by so many tokens, with keys and values that mean nothing."""
        if not self.trimmable:
            return False
        self.width += tokens
        for layer in self.cache.layers:
            _stretch(layer, self.width)
        return True


def is_trimmable(cache: Any) -> bool:
    """Tells whether slots can be cut off the front of a cache."""
    return bool(cache.layers) and all(
        type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers
    )


def _select(layer: Any, rows: Tensor, trim: int) -> None:
    if trim:
        # A windowed layer counts all slots it has seen but holds the last ``window - 1`` at most.
        width = layer.get_seq_length() - trim
        held = width
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = width
            held = min(width, layer.sliding_window - 1)
        first = layer.keys.shape[-2] - held
        layer.keys, layer.values = layer.keys[:, :, first:], layer.values[:, :, first:]
    layer.reorder_cache(rows)


def _stretch(layer: Any, slots: int) -> None:
    held = slots
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = max(layer.cumulative_length, slots)
        held = min(slots, layer.sliding_window - 1)
    missing = held - layer.keys.shape[-2]
    if missing > 0:
        layer.keys, layer.values = (
            torch.cat([part, part[:, :, :1].expand(-1, -1, missing, -1)], dim=2) for part in (layer.keys, layer.values)
        )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.ndim:
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
