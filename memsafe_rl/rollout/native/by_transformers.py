"""Rollouts of networks that only transformers' `generate` can decode: the same draws, in waves of one length.

Axes: ``B`` rows of a wave, ``L`` tokens so far, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from memsafe_rl.accounting import host_memory
from memsafe_rl.memory.planning.plan_checks import check_rollout_plan
from memsafe_rl.memory.runtime.recovery import Attempt
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.rollout.engine import Progress
from memsafe_rl.rollout.native.drawing import Drawer, key_tensor, refuse_broken
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings, SequenceKey

_Place = tuple[int, int]
"""A prompt and one of its samples."""


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
    """Samples completions by `generate`; `native.generation` calls it, in eval mode, with what it checked.

    A wave holds rows of one length, since such a network's own way with padding is what could not be trusted. A wave is
    what is repeated when memory runs out; finished waves are kept. Tokens come from the same counter-based draws as
    elsewhere, so the waves change none. Each row has its own copy of the prompt, and rows that have ended stay until
    the longest ends: that is `generate`, and why it is the last resort.
    """
    most = [settings.max_new_tokens] * len(prompts) if limits is None else limits
    with host_memory():
        earlier = {
            (prompt, sample): None if begun is None else begun[prompt][sample]
            for prompt, group in enumerate(keys)
            for sample in range(len(group))
        }
        read = {place: _joined(prompts[place[0]], one) for place, one in earlier.items()}
    ended = {
        place: one
        for place, one in earlier.items()
        if one is not None and (one.finished or len(one.ids) >= most[place[0]])
    }
    waiting = sorted((place for place in earlier if place not in ended), key=lambda place: -len(read[place]))

    def run_next(plan: RolloutPlan) -> dict[_Place, Completion]:
        check_rollout_plan(plan)
        alike = _alike(waiting, prompts) if adapter.geometry.source_bytes is not None else waiting
        longest = max(most[place[0]] for place in alike)
        places = next_wave(alike, [len(read[place]) for place in alike], longest, adapter, plan)
        rows = [
            _Row(read[place], len(prompts[place[0]]), keys[place[0]][place[1]], most[place[0]], earlier[place])
            for place in places
        ]
        _run_wave(adapter, rows, settings)
        with host_memory():
            keeps_own = Drawer(settings, adapter.start_token_id).keeps_model_logprobs
            return {place: row.completion(keeps_own) for place, row in zip(places, rows, strict=True)}

    while waiting:
        ended |= attempt(run_next)
        waiting = [place for place in waiting if place not in ended]
        if progress is not None:
            progress(len(ended), len(earlier))
    return [ended[place] for place in earlier]


def next_wave(
    waiting: Sequence[_Place],
    lengths: Sequence[int],
    max_new_tokens: int,
    adapter: ModelAdapter,
    plan: RolloutPlan,
) -> list[_Place]:
    """Cuts the next wave from the head of the rows that wait."""
    alike = sum(1 for length in lengths if length == lengths[0])
    limits = [plan.rows_in_flight, plan.prefill_tokens // lengths[0], alike]
    if plan.kv_bytes is not None and adapter.caches:
        limits.append(plan.kv_bytes // max(1, adapter.geometry.kv_bytes(lengths[0] + max_new_tokens)))
    most = max(1, min(limits))
    # Waves of even size take as many steps as full ones and a short last one, at a lower peak.
    return list(waiting[: math.ceil(alike / math.ceil(alike / most))])


def _alike(waiting: Sequence[_Place], prompts: Sequence[Tensor]) -> list[_Place]:
    """Rows whose prompts are as long as the first one's: an encoder reads them without padding."""
    return [place for place in waiting if len(prompts[place[0]]) == len(prompts[waiting[0][0]])]


@dataclass
class _Row:
    """One completion as far as it has been drawn, on the host.

    Args:
        read: (length,) int64, prompt and what was drawn before.
        prompt_tokens: length of the prompt.
        key: name of its random stream.
        limit: longest completion, in tokens.
        earlier: what was drawn before; None for nothing.
    """

    read: Tensor
    prompt_tokens: int
    key: SequenceKey
    limit: int
    earlier: Completion | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    model_logprobs: list[float] = field(default_factory=list)
    ties: int = 0
    ended: bool = False
    finished: bool = False

    @property
    def position(self) -> int:
        """Index of the next token in its completion."""
        return len(self.read) - self.prompt_tokens + len(self.ids)

    def history(self, *, with_prompt: bool = True) -> Tensor:
        """Gives prompt and completion, (length,) int64 on the host."""
        first = 0 if with_prompt else self.prompt_tokens
        return torch.cat([self.read[first:], torch.tensor(self.ids, dtype=torch.int64)])

    def completion(self, keeps_model_logprobs: bool) -> Completion:
        """Gives what was drawn, now and before."""
        ids = torch.tensor(self.ids, dtype=torch.int64)
        logprobs, own = torch.tensor(self.logprobs), torch.tensor(self.model_logprobs)
        ties = self.ties
        if self.earlier is not None:
            ids, logprobs = torch.cat([self.earlier.ids, ids]), torch.cat([self.earlier.logprobs, logprobs])
            own, ties = torch.cat([self.earlier.model_logprobs, own]), ties + self.earlier.ties
        return Completion(ids, logprobs, own if keeps_model_logprobs else logprobs, self.finished, ties)


def _run_wave(adapter: ModelAdapter, rows: Sequence[_Row], settings: SamplingSettings) -> None:
    """Draws rows of one length to their ends; what they have drawn is all that is left of it."""
    draw, eos = Drawer(settings, adapter.start_token_id), frozenset(settings.eos_token_ids)
    steps = [row.limit - row.position for row in rows]
    if settings.max_step_tokens is not None:
        steps = [min(left, settings.max_step_tokens) for left in steps]
    with host_memory():
        keys_B4 = key_tensor([row.key for row in rows])
        read_BL = torch.stack([row.read for row in rows])

    def choose(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
        device = logits_BV.device
        going = [place for place, row in enumerate(rows) if not row.ended]
        alive = [rows[place] for place in going]
        with host_memory():
            index = torch.tensor(going)
            positions_B = torch.tensor([row.position for row in alive])
            histories = [row.history() for row in alive] if draw.needs_history else None
        lengths = [row.prompt_tokens for row in alive] if draw.needs_prompt_lengths else None
        part_BV = logits_BV if len(going) == len(rows) else logits_BV[index.to(device)]
        tokens_B, values_4B = draw(part_BV, keys_B4[index].to(device), positions_B.to(device), histories, lengths)
        with host_memory():
            values_4B = values_4B.cpu()
            refuse_broken(values_4B, [row.key for row in alive], positions_B.tolist())
            _note(alive, values_4B, [steps[place] for place in going], eos)
            _end_by_text(alive, draw)
            ended_B = torch.tensor([row.ended for row in rows])
        return tokens_B.new_zeros(len(rows)).index_copy_(0, index.to(device), tokens_B), ended_B

    adapter.decode_plainly(
        read_BL.to(adapter.device),
        choose,
        prompt_tokens=rows[0].prompt_tokens,
        max_new_tokens=max(steps),
        cached=adapter.caches,
    )


def _note(rows: Sequence[_Row], values_4B: Tensor, steps: Sequence[int], eos: frozenset[int]) -> None:
    for row, most, (token, logprob, own, tied) in zip(rows, steps, values_4B.T.tolist(), strict=True):
        row.ids.append(int(token))
        row.logprobs.append(logprob)
        row.model_logprobs.append(own)
        row.ties += bool(tied)
        row.finished = int(token) in eos
        row.ended = row.finished or len(row.ids) >= most


def _end_by_text(rows: Sequence[_Row], draw: Drawer) -> None:
    if not draw.stops_by_text:
        return
    running = [row for row in rows if not row.finished]
    texts = [row.history(with_prompt=draw.reads_on) for row in running]
    for row, end in zip(running, draw.ends_by_text(texts), strict=True):
        row.finished, row.ended = end, row.ended or end


def _joined(prompt: Tensor, earlier: Completion | None) -> Tensor:
    return prompt.cpu() if earlier is None else torch.cat([prompt.cpu(), earlier.ids])
