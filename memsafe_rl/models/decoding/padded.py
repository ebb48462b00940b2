"""Rows being decoded that each keep a prompt of their own, padded on the left to one width, in transformers' cache.

Axes: ``B`` rows, ``L`` tokens read in one forward, ``V`` vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from memsafe_rl.accounting import charge, claim
from memsafe_rl.models.adapter import DecodeState
from memsafe_rl.models.geometry import is_trimmable
from memsafe_rl.models.module_state import cache_name
from memsafe_rl.types import Component


class _MarkedCache(DynamicCache):  # type: ignore[misc]
    """A growing cache that says what it allocates for."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        with charge(Component.KV_CACHE):
            updated: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return updated


@dataclass
class PaddedState(DecodeState):
    """Keys and values of rows being decoded, padded on the left to one width."""

    lm: Any  # the network, whose own forward reads tokens
    accepted: frozenset[str]  # what that takes
    cache: Any  # transformers' cache
    pads_B: Tensor  # (B,) int64 on the device, slots of padding before each row
    pads: tuple[int, ...]  # the same on the host
    width: int  # slots of every row, padding included
    trimmable: bool  # whether common padding may be cut off (every layer is plain or windowed attention)

    @classmethod
    def of_prompts(
        cls, lm: Any, prompts: Sequence[Tensor], pad_token_id: int, device: torch.device
    ) -> tuple[Tensor, PaddedState]:
        """Reads prompts; returns logits (B, V) of the next tokens, and the cache."""
        width = max(int(prompt.shape[0]) for prompt in prompts)
        pads = tuple(width - int(prompt.shape[0]) for prompt in prompts)
        ids_BL = pad_sequence(list(prompts), True, pad_token_id, "left")
        cache, pads_B = _MarkedCache(config=lm.config), torch.tensor(pads, device=device)
        accepted = frozenset(inspect.signature(lm.forward).parameters)
        state = cls(lm, accepted, cache, pads_B, pads, width=0, trimmable=is_trimmable(cache))
        return state.read(ids_BL.to(device)), state

    @property
    def rows(self) -> int:
        """Sequences held."""
        return int(self.pads_B.shape[0])

    def nbytes(self) -> int:
        """Bytes of the cache, storage that a windowed layer still pins included."""
        storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in self.tensors())}
        return sum(storage.nbytes() for storage in storages.values())

    def tensors(self) -> Iterator[Tensor]:
        """Yields all that the layers hold: keys and values, or the states of recurrent layers."""
        held = tree_leaves([vars(layer) for layer in self.cache.layers])
        return (tensor for tensor in held if isinstance(tensor, Tensor) and tensor.ndim)

    def select(self, rows: Sequence[int]) -> PaddedState:
        """Keeps, drops, repeats or reorders rows, layer by layer, and cuts off padding that all of them share."""
        pads = tuple(self.pads[row] for row in rows)
        trim = min(pads, default=0) if self.trimmable else 0
        on_device = torch.tensor(rows, device=self.pads_B.device)
        with charge(Component.KV_CACHE):
            for layer in self.cache.layers:
                if trim:
                    # A windowed layer counts all slots it has seen but holds the last ``window - 1`` at most.
                    width = held = layer.get_seq_length() - trim
                    if isinstance(layer, DynamicSlidingWindowLayer):
                        layer.cumulative_length, held = width, min(width, layer.sliding_window - 1)
                    first = layer.keys.shape[-2] - held
                    layer.keys, layer.values = layer.keys[:, :, first:], layer.values[:, :, first:]
                layer.reorder_cache(on_device)
        pads_B = self.pads_B.index_select(0, on_device) - trim
        return replace(self, pads_B=pads_B, pads=tuple(pad - trim for pad in pads), width=self.width - trim)

    def join(self, other: PaddedState) -> PaddedState:
        """Refuses: rows of several caches have their padding in different places."""
        raise NotImplementedError("rows that are padded on the left cannot join others")

    def stretch(self, tokens: int) -> bool:
        """Widens every row in place by so many tokens, with keys and values that mean nothing."""
        if not self.trimmable:
            return False
        self.width += tokens
        for layer in self.cache.layers:
            held = self.width
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = max(layer.cumulative_length, self.width)
                held = min(self.width, layer.sliding_window - 1)
            missing = held - layer.keys.shape[-2]
            if missing > 0:
                layer.keys, layer.values = (
                    torch.cat([part, part[:, :, :1].expand(-1, -1, missing, -1)], dim=2)
                    for part in (layer.keys, layer.values)
                )
        return True

    def read(self, ids_BL: Tensor) -> Tensor:
        """Reads L more tokens of every row into the cache and gives logits (B, V) after the last one."""
        width = self.width + ids_BL.shape[1]
        inputs: dict[str, Any] = {"input_ids": ids_BL, cache_name(self.accepted): self.cache, "use_cache": True}
        if "logits_to_keep" in self.accepted:
            inputs["logits_to_keep"] = 1
        if any(self.pads):
            slots_1L = torch.arange(width, device=ids_BL.device)[None]
            inputs["attention_mask"] = (slots_1L >= self.pads_B[:, None]).long()
            if "position_ids" in self.accepted:
                inputs["position_ids"] = (slots_1L[:, self.width :] - self.pads_B[:, None]).clamp_min(0)
        logits_BLV = self.lm(**inputs).logits
        claim(Component.LOGITS, [logits_BLV])
        if not self.trimmable:
            claim(Component.KV_CACHE, self.tensors())  # states of recurrent layers, which no update marks
        self.width = width
        return cast(Tensor, logits_BLV[:, -1])
