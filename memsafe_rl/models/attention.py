"""Attention of rows over their prompts and their own suffixes, as one of transformers' attention implementations.

A model whose layers look their attention up by name is switched to it while rows are decoded; everything else of the
model runs as it is. The keys of a prompt are read once for all rows of its group, in one matrix product.

Axes: ``B`` rows, ``H`` key/value heads, ``R`` query heads of each, ``N`` tokens read in one forward, ``L`` slots of a
prompt, ``S`` slots of a suffix, ``K`` keys a row attends to, ``D`` width of a head.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from memsafe_rl.models.grouped import GroupedCache, GroupedDecodeState, Segment

NAME = "memsafe_rl_grouped"
"""The implementation's name in transformers' table."""

_SCORE_ELEMENTS = 1 << 21
"""Scores that exist at the same time, at least those of one key/value head."""

_active = threading.local()


@contextmanager
def grouped_attention(model: nn.Module, reading: Reading) -> Iterator[None]:
    """Has a model's layers attend to a state of rows and to the tokens they read.

    Args:
        model: the network; its configs name another implementation inside.
        reading: what is read.
    """
    configs = {id(config): config for config in _configs(model)}.values()
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = NAME
    _active.reading = reading
    try:
        yield
    finally:
        _active.reading = None
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name


class Reading:
    """Tokens that the rows of a state read in one forward, and what each of them can see.

    Args:
        state: the rows; room for the tokens must be reserved.
        cache: what the model sees as its cache.
        counts: how many tokens each row reads; None for one.
        keeps: whether the tokens are written into the rows' suffixes; False where they belong to the prompt.
    """

    def __init__(
        self,
        state: GroupedDecodeState,
        cache: GroupedCache,
        counts: Sequence[int] | None = None,
        *,
        keeps: bool = True,
    ) -> None:
        self.state, self.cache, self.counts, self.keeps = state, cache, counts, keeps
        self.tokens = 1 if counts is None else max(counts)
        self._hidden: dict[tuple[int, int | None, int, int], Tensor | None] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, soft_cap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Gives the attention of one layer's queries.

        Args:
            query: (B, H × R, N, D).
            key: (B, H, N, D), of the tokens read.
            value: (B, H, N, D).
            scale: factor on the scores.
            soft_cap: bound of the scores, None for none.
            sinks: (H × R,) a score that takes weight and gives nothing; None for none.

        Returns:
            (B, N, H × R, D).
        """
        layer, state = self.cache.current, self.state
        drawn = self.counts is None
        if drawn:
            state.store(layer, key, value)
        rows, heads = query.shape[0], key.shape[1]
        grouped = (query * scale).reshape(rows, heads, -1, query.shape[3])  # (B, H, R × N, D)
        parts = [
            self._attend_rows(segment, layer, grouped, None if drawn else (key, value), soft_cap, sinks)
            for segment in state.segments()
        ]
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        if not drawn and self.keeps:
            state.store(layer, key, value, self.counts)
        return mixed.reshape(rows, query.shape[1], self.tokens, -1).transpose(1, 2).contiguous()

    def _attend_rows(
        self,
        segment: Segment,
        layer: int,
        query_BHXD: Tensor,
        new: tuple[Tensor, Tensor] | None,
        soft_cap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attends for one segment, a few key/value heads at a time."""
        state, rows = self.state, slice(segment.rows.start, segment.rows.stop)
        block, used = segment.block, self._used(segment, layer)
        keys, values = [block.keys[layer]], [block.values[layer]]
        if used:
            keys.append(state.keys[layer][rows, :, :used])
            values.append(state.values[layer][rows, :, :used])
        if new is not None:
            keys.append(new[0][rows])
            values.append(new[1][rows])
        query_BHXD = query_BHXD[rows]
        heads = query_BHXD.shape[1]
        each = query_BHXD.shape[0] * query_BHXD.shape[2] * sum(part.shape[2] for part in keys)
        step = max(1, min(heads, _SCORE_ELEMENTS // each))
        hidden = self._hidden_keys(segment, layer, used)
        pieces = [
            self._attend_heads(
                segment,
                query_BHXD[:, head : head + step],
                [part[:, head : head + step] for part in keys],
                [part[:, head : head + step] for part in values],
                hidden,
                soft_cap,
                None if sinks is None else sinks.view(heads, -1)[head : head + step],
            )
            for head in range(0, heads, step)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)

    def _attend_heads(
        self,
        segment: Segment,
        query_BHXD: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        hidden_BNK: Tensor | None,
        soft_cap: float | None,
        sinks_HR: Tensor | None,
    ) -> Tensor:
        """Attends for some heads of a segment: the first keys are the prompts', the others the rows' own."""
        scores = [segment.by_row(segment.grouped(query_BHXD) @ keys[0].mT)]
        scores += [query_BHXD @ part.mT for part in keys[1:]]
        scores_BHXK = torch.cat(scores, 3) if len(scores) > 1 else scores[0]
        if soft_cap is not None:
            scores_BHXK = torch.tanh(scores_BHXK / soft_cap) * soft_cap
        rows, heads, _, width = scores_BHXK.shape
        split = scores_BHXK.view(rows, heads, -1, self.tokens, width)  # (B, H, R, N, K)
        if hidden_BNK is not None:
            split = split.masked_fill(hidden_BNK[:, None, None], -math.inf)
        if sinks_HR is not None:
            sink = sinks_HR[None, :, :, None, None].to(split.dtype).expand(*split.shape[:4], 1)
            split = torch.cat([split, sink], 4)
        wide = torch.promote_types(split.dtype, torch.float32)
        weights = torch.softmax(split, 4, dtype=wide)[..., :width].to(values[0].dtype).reshape(rows, heads, -1, width)
        lengths = [part.shape[2] for part in values]
        first, *others = torch.split(weights, lengths, 3)
        mixed = segment.by_row(segment.grouped(first) @ values[0])
        for part, value in zip(others, values[1:], strict=True):
            mixed = mixed + part @ value
        return mixed

    def _used(self, segment: Segment, layer: int) -> int:
        """Slots of a segment's suffixes that hold anything, this step's token included if it was written first."""
        state = self.state
        written = max(state.lengths[row] for row in segment.rows) + (1 if self.counts is None else 0)
        return min(written, state.slots_of(layer)) if state.keys or self.counts is None else 0

    def _hidden_keys(self, segment: Segment, layer: int, used: int) -> Tensor | None:
        """Gives the keys that tokens must not see, (rows, N, K) bool, the same for all layers alike; None if none."""
        window, width = self.state.windows[layer], segment.block.keys[layer].shape[2]
        name = (segment.rows.start, window, width, used)
        if name not in self._hidden:
            self._hidden[name] = self._find_hidden(segment, layer, used)
        return self._hidden[name]

    def _find_hidden(self, segment: Segment, layer: int, used: int) -> Tensor | None:
        """Places each key in its row, and hides what lies outside of prompt, suffix, past or window."""
        state, block = self.state, segment.block
        window, width = state.windows[layer], block.keys[layer].shape[2]
        lengths = [state.lengths[row] for row in segment.rows]
        prompts = [block.lengths[prompt] for prompt in segment.prompts]
        dropped = [block.dropped[layer][prompt] for prompt in segment.prompts]
        farthest = max(prompt + length for prompt, length in zip(prompts, lengths, strict=True)) + self.tokens
        padded = any(first < 0 or first + width > prompt for first, prompt in zip(dropped, prompts, strict=True))
        if self.counts is None and not padded and len({*lengths}) == 1 and (window is None or farthest <= window):
            return None
        table = torch.tensor([prompts, lengths, dropped], device=state.device)[:, :, None]  # (3, rows, 1)
        prompt_B1, length_B1, dropped_B1 = table.unbind(0)
        steps_N = torch.arange(self.tokens, device=state.device)
        now_BN = prompt_B1 + length_B1 + steps_N
        place_BL = dropped_B1 + torch.arange(width, device=state.device)
        places = [torch.where((place_BL >= 0) & (place_BL < prompt_B1), place_BL, -1)]
        if used:
            # A ring of so many slots: slot s holds the last token written there.
            ring, last_B1 = state.slots_of(layer), length_B1 - (0 if self.counts is None else 1)
            token_BS = last_B1 - (last_B1 - torch.arange(used, device=state.device)) % ring
            places.append(torch.where(token_BS >= 0, prompt_B1 + token_BS, -1))
        if self.counts is not None:
            places.append(now_BN)
        place_BK = torch.cat(places, 1)[:, None]
        hidden_BNK = (place_BK < 0) | (place_BK > now_BN[:, :, None])
        return hidden_BNK if window is None else hidden_BNK | (place_BK <= now_BN[:, :, None] - window)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Has the reading in force attend; the form that transformers asks of an implementation."""
    reading: Reading | None = getattr(_active, "reading", None)
    if reading is None or attention_mask is not None or position_bias is not None:
        raise NotImplementedError(f"{type(module).__name__} attends in a way that grouped rows do not know")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return reading.attend(query, key, value, scale, softcap, s_aux), None


def _configs(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            yield config


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
