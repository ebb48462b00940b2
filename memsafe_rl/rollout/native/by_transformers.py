"""Rollouts of networks that only transformers' `generate` can decode: the same draws, in waves of one length.

Axes: ``B`` rows of a wave, ``L`` tokens so far, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from memsafe_rl.accounting import host_memory
from memsafe_rl.memory.planning.policies import check_rollout_plan
from memsafe_rl.memory.runtime.recovery import Attempt
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.rollout.engine import Progress
from memsafe_rl.rollout.native.sequences import (
    Drawer,
    LiveSequence,
    Streams,
    begin_sequences,
    checked_limits,
    draw_next,
)
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings, SequenceKey


def generate_by_transformers(
    adapter: ModelAdapter,
    prompts: Sequence[Tensor],
    keys: Sequence[Sequence[SequenceKey]],
    settings: SamplingSettings,
    attempt: Attempt[RolloutPlan],
    progress: Progress | None = None,
    *,
    begun: Sequence[Sequence[Completion | None]] | None = None,
    limits: Sequence[int] | None = None,
) -> list[Completion]:
    """Samples completions by `generate`, in waves of one length, for such a network's own padding is not trusted.

    Each row has its own copy of the prompt, and rows that have ended stay until the longest ends: that is `generate`,
    and why it is the last resort.
    """
    limits = checked_limits(limits, len(prompts), settings.max_new_tokens)
    draw = Drawer(settings, adapter.start_token_id)
    with host_memory():
        sequences = begin_sequences(prompts, keys, settings, begun, limits)

    def run_next(plan: RolloutPlan) -> None:
        check_rollout_plan(plan)
        _run_wave(adapter, _next_wave(sequences, adapter, plan), draw)

    while not all(one.ended for one in sequences):
        attempt(run_next)
        if progress is not None:
            progress(sum(one.ended for one in sequences), len(sequences))
    with host_memory():
        return [one.completion(draw.keeps_model_logprobs) for one in sequences]


def _next_wave(sequences: Sequence[LiveSequence], adapter: ModelAdapter, plan: RolloutPlan) -> list[LiveSequence]:
    """Chooses the longest rows that wait; an encoder reads prompts of one length only, without padding."""
    waiting = sorted((one for one in sequences if not one.ended), key=lambda one: -one.tokens)
    if adapter.geometry.source_bytes is not None:
        waiting = [one for one in waiting if len(one.prompt_ids) == len(waiting[0].prompt_ids)]
    tokens = waiting[0].tokens
    alike = sum(1 for one in waiting if one.tokens == tokens)
    limits = [plan.rows_in_flight, plan.prefill_tokens // tokens, alike]
    if plan.kv_bytes is not None and adapter.caches:
        longest = tokens + max(one.limit for one in waiting)
        limits.append(plan.kv_bytes // max(1, adapter.geometry.kv_bytes(longest)))
    most = max(1, min(limits))
    # Waves of even size take as many steps as full ones and a short last one, at a lower peak.
    return waiting[: math.ceil(alike / math.ceil(alike / most))]


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
