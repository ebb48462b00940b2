"""Which of the sequences that wait may join the running batch without passing a plan's limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from memsafe_rl.types import ModelGeometry, RolloutPlan

_JOIN_SHARE = 8
"""Joining copies the cache and reads prompts for few rows: it waits until so large a share of the rows is free."""


class Candidate(NamedTuple):
    """A sequence that waits."""

    prompt: int  # index of its prompt; samples of a prompt stand side by side
    prompt_tokens: int  # length of the prompt
    drawn_tokens: int  # tokens it has drawn before
    # most tokens it may draw in all; where prompts are kept once, that any row of the batch may draw, since rows are as
    # wide as the widest; of a prompt that was kept in part, what is read behind it counts too
    max_new_tokens: int
    is_kept: bool = False  # whether its prompt's cache was kept, whose bytes count with those of the batch's prompts


def admit(
    waiting: Sequence[Candidate], plan: RolloutPlan, geometry: ModelGeometry, *, rows: int, prompt_bytes: int
) -> int:
    """Counts how many of the first candidates may join.

    Every row counts as long as it can become, so that no row ever has to leave for others. At least one joins a batch
    that is empty, unless it was kept: it may be smaller when it is read anew. Where the network keeps a prompt once for
    its group, only a group that does not fit whole is parted, and goes alone.
    """
    most = _most_rows(waiting, plan, geometry, rows, prompt_bytes)
    if most < 1:
        return 0 if rows or waiting[0].is_kept else 1
    if rows and most < min(len(waiting), -(-plan.rows_in_flight // _JOIN_SHARE)):
        return 0
    if waiting[0].is_kept:
        return most
    if waiting[0].drawn_tokens and not geometry.shares_prompts:
        return min(most, max(1, plan.prefill_tokens // max(one.prompt_tokens + one.drawn_tokens for one in waiting)))
    per_prompt = max(1, plan.prefill_tokens // waiting[0].prompt_tokens)
    prompts = list(dict.fromkeys(one.prompt for one in waiting[:most]))[:per_prompt]
    chosen = [one for one in waiting[:most] if one.prompt in prompts]
    if geometry.shares_prompts and len(prompts) > 1 and len(chosen) < len(waiting):
        following = waiting[len(chosen)].prompt
        whole = [one for one in chosen if one.prompt != following]
        return len(whole) or len(chosen)
    return len(chosen)


def _most_rows(
    waiting: Sequence[Candidate], plan: RolloutPlan, geometry: ModelGeometry, rows: int, prompt_bytes: int
) -> int:
    """Candidates for which there are rows and bytes."""
    free = plan.rows_in_flight - rows
    if not geometry.shares_prompts:
        waves = math.ceil(len(waiting) / max(1, plan.rows_in_flight))
        free = min(free, math.ceil(len(waiting) / waves))  # even waves take as many steps, at a lower peak
    most = min(free, len(waiting))
    if plan.kv_bytes is None:
        return most
    if not geometry.shares_prompts:
        return min(most, plan.kv_bytes // max(1, *(row_bytes(one, geometry) for one in waiting)))
    prompts: dict[int, int] = {}
    for count, one in enumerate(waiting[:most]):
        prompts.setdefault(one.prompt, 0 if one.is_kept else geometry.prompt_kv_bytes(waiting[0].prompt_tokens))
        held = prompt_bytes + sum(prompts.values())
        if geometry.batch_kv_bytes(held, rows + count + 1, one.max_new_tokens) > plan.kv_bytes:
            return count
    return most


def row_bytes(one: Candidate, geometry: ModelGeometry) -> int:
    """Counts the cache of a row that keeps its own prompt, as long as it can become."""
    return geometry.kv_bytes(one.prompt_tokens + one.max_new_tokens)
