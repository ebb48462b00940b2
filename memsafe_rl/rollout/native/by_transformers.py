"""Rollouts by transformers' `generate` where nothing else can decode a network, and by what a user put in its place.

Axes: ``B`` rows of a wave, ``L`` tokens so far, ``V`` vocabulary.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from memsafe_rl.accounting import host_memory
from memsafe_rl.memory.planning.policies import check_plan
from memsafe_rl.memory.runtime.recovery import Attempt
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.rollout import refusal
from memsafe_rl.rollout.engine import Progress
from memsafe_rl.rollout.native.sequences import Drawer, LiveSequence, Streams, draw_next
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings, SequenceKey

_say_once = functools.cache(logging.getLogger(__name__).warning)
_HONOURED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "typical_p",
    "min_new_tokens",
    "min_length",
)


def generate_by_transformers(
    adapter: ModelAdapter,
    sequences: Sequence[LiveSequence],
    draw: Drawer,
    attempt: Attempt[RolloutPlan],
    progress: Progress | None = None,
) -> None:
    """Draws sequences to their ends by `generate`, in waves of one length: such a network pads in no trusted way."""

    def run_next(plan: RolloutPlan) -> None:
        check_plan(plan, RolloutPlan)
        _run_wave(adapter, _next_wave(sequences, adapter, plan), draw)

    while not all(one.ended for one in sequences):
        attempt(run_next)
        if progress is not None:
            progress(sum(one.ended for one in sequences), len(sequences))


def _next_wave(sequences: Sequence[LiveSequence], adapter: ModelAdapter, plan: RolloutPlan) -> list[LiveSequence]:
    """Chooses the longest rows that wait; an encoder reads prompts of one length only, without padding."""
    waiting = sorted((one for one in sequences if not one.ended), key=lambda one: -one.tokens)
    if adapter.geometry.source_bytes is not None:
        waiting = [one for one in waiting if len(one.prompt_ids) == len(waiting[0].prompt_ids)]
    tokens = waiting[0].tokens
    alike = sum(1 for one in waiting if one.tokens == tokens)
    limits = [plan.rows_in_flight, plan.prefill_tokens // tokens, alike]
    if plan.kv_bytes is not None and adapter.caches:
        limits.append(plan.kv_bytes // max(1, adapter.geometry.kv_bytes(tokens + max(one.limit for one in waiting))))
    # Waves of even size take as many steps as full ones and a short last one, at a lower peak.
    return waiting[: math.ceil(alike / math.ceil(alike / max(1, min(limits))))]


def _run_wave(adapter: ModelAdapter, rows: Sequence[LiveSequence], draw: Drawer) -> None:
    """Draws rows of one length to their ends; what they have drawn is all that is left of it."""
    with host_memory():
        read_BL = torch.stack([one.history() for one in rows])

    streams = Streams.of(rows, adapter.device)

    def choose(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
        tokens_B = draw_next(draw, logits_BV, rows, streams)
        with host_memory():
            return tokens_B, torch.tensor([one.ended for one in rows])

    adapter.decode_plainly(
        read_BL.to(adapter.device),
        choose,
        prompt_tokens=len(rows[0].prompt_ids),
        max_new_tokens=max(one.until - len(one.ids) for one in rows),
        cached=adapter.caches,
    )


def generate_by_override(
    adapter: ModelAdapter,
    own: Callable[..., Any],
    prompts: Sequence[Tensor],
    keys: Sequence[Sequence[SequenceKey]],
    settings: SamplingSettings,
    attempt: Attempt[RolloutPlan],
    *,
    begun: Sequence[Sequence[Completion | None]] | None,
    limits: Sequence[int],
) -> list[Completion]:
    """Has a user's ``own`` `generate` draw, called as by TRL, and cuts rows where they end; log-probs are NaN."""
    refusal.when(begun is not None, "engine/begun", engine="generate")
    _say_once(f"{type(adapter.model).__name__}.generate is not transformers' own: completions are its draws.")
    waiting = [(ids, most) for ids, group, most in zip(prompts, keys, limits, strict=True) for _ in group]
    drawn: list[Completion] = []

    def run_next(plan: RolloutPlan) -> None:
        check_plan(plan, RolloutPlan)
        rows = waiting[len(drawn) : len(drawn) + plan.rows_in_flight]
        padded = functools.partial(pad_sequence, batch_first=True, padding_side="left")
        ids_BL = padded([ids for ids, _ in rows], padding_value=adapter.pad_token_id).to(adapter.device)
        mask_BL = padded([torch.ones_like(ids) for ids, _ in rows]).to(adapter.device)
        config = _configuration(settings, max(most for _, most in rows), adapter.pad_token_id)
        output = own(input_ids=ids_BL, attention_mask=mask_BL, generation_config=config)
        with host_memory():
            begin = ids_BL.shape[1] if adapter.start_token_id is None else 1
            tokens_BT = getattr(output, "sequences", output)[:, begin:].cpu()
            drawn.extend(_cut(ids, most, settings) for ids, (_, most) in zip(tokens_BT, rows, strict=True))

    while len(drawn) < len(waiting):
        attempt(run_next)
    return drawn


def _configuration(settings: SamplingSettings, longest: int, pad_token_id: int) -> GenerationConfig:
    given = {"max_new_tokens": longest, "eos_token_id": list(settings.eos_token_ids), "pad_token_id": pad_token_id}
    for name, value in settings.chosen().items():
        refusal.when(name not in _HONOURED, "engine/setting", name=name, value=value, engine="generate")
    given |= {name: value for name in _HONOURED if (value := getattr(settings, name))}
    return GenerationConfig(**{"top_k": 0, **given}, do_sample=settings.temperature > 0)


def _cut(ids_T: Tensor, most: int, settings: SamplingSettings) -> Completion:
    ends = torch.isin(ids_T, torch.tensor(settings.eos_token_ids)).nonzero().flatten().tolist()
    length = min([most, len(ids_T), *(end + 1 for end in ends)])
    unknown_T = torch.full((length,), math.nan)
    return Completion(ids_T[:length].clone(), unknown_T, unknown_T, finished=bool(ends) and ends[0] < length)
