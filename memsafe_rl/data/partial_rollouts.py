"""Partial rollouts: a completion that is long waits half drawn for the next rollout, instead of all waiting for it.

A rollout keeps as many prompts in play as it learns from. In each round every completion in play draws at most so many
tokens; a group whose completions have all ended is whole and may be learnt from, the others stay in play beside fresh
prompts. What is whole or half drawn when there are groups enough waits for the next rollout, half drawn ones with the
random stream they began with. Completions that were begun under older weights are corrected by importance weights.

The same tricks with another bookkeeping: Kimi k1.5 (Kimi Team 2025, "Scaling Reinforcement Learning with LLMs",
section 2.6.2, partial rollouts).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memsafe_rl.accounting import host_memory
from memsafe_rl.data.prompts import Prompts
from memsafe_rl.types import Completion, SequenceKey


@dataclass(frozen=True)
class OpenGroup:
    """A prompt and its completions as far as they are drawn."""

    position: int  # of the prompt in the data, in prompts consumed since the run began
    rollout: int  # index of the rollout in which it was begun
    prompt: int  # its index among the prompts begun there
    prompts: Prompts  # the one prompt
    completions: tuple[Completion | None, ...]  # one a sample; None where nothing is drawn

    def waiting(self, limit: int) -> list[int]:
        """Returns the samples that go on."""
        return [
            sample
            for sample, drawn in enumerate(self.completions)
            if drawn is None or not (drawn.finished or len(drawn.ids) >= limit)
        ]

    def key(self, seed: int, sample: int) -> SequenceKey:
        """Names the random stream of a sample: the one it was begun with."""
        return SequenceKey(seed, self.rollout, self.prompt, sample)

    def with_drawn(self, drawn: Mapping[int, Completion]) -> OpenGroup:
        """Puts what some samples have drawn by now in the place of what they had."""
        return replace(self, completions=tuple(drawn.get(s, earlier) for s, earlier in enumerate(self.completions)))

    def fitted(self, samples: int, limit: int) -> OpenGroup:
        """Leaves out samples and tokens above the run's limits, which may have been lowered since they were drawn."""
        return replace(self, completions=tuple(drawn and _cut(drawn, limit) for drawn in self.completions[:samples]))


@dataclass(frozen=True)
class Gathered:
    """The groups of one rollout."""

    whole: tuple[OpenGroup, ...]  # those to learn from, the oldest first
    waiting: tuple[OpenGroup, ...]  # those that wait for the next rollout, whole or not
    consumed: int  # prompts that were begun
    rounds: int  # draws


def begin_groups(
    prompts: Prompts, samples: int, *, position: int, rollout: int, first_prompt: int
) -> tuple[OpenGroup, ...]:
    """Begins a group for every prompt."""
    alone = [Prompts(*((value,) for value in row)) for row in zip(*vars(prompts).values(), strict=True)]
    return tuple(
        OpenGroup(position + i, rollout, first_prompt + i, own, (None,) * samples) for i, own in enumerate(alone)
    )


def joined_prompts(groups: Sequence[OpenGroup]) -> Prompts:
    """Joins the prompts of some groups."""
    columns = zip(*(vars(group.prompts).values() for group in groups), strict=True)
    return Prompts(*(tuple(value for part in column for value in part) for column in columns))


def gather_groups(
    waiting: Sequence[OpenGroup],
    *,
    wanted: int,
    limit: int,
    begin: Callable[[int, int], Sequence[OpenGroup]],
    draw: Callable[[Sequence[OpenGroup]], Sequence[OpenGroup]],
) -> Gathered:
    """Draws, a bounded number of tokens a round, until enough groups are whole."""
    groups, consumed, rounds = list(waiting), 0, 0
    while True:
        whole = [group for group in groups if not group.waiting(limit)]
        if len(whole) >= wanted:
            break
        in_play = [group for group in groups if group.waiting(limit)]
        missing = max(0, wanted - len(in_play))
        if missing:
            in_play += begin(consumed, missing)
            consumed += missing
        groups = [*whole, *draw(in_play)]
        rounds += 1
    in_order = sorted(groups, key=lambda group: (group.rollout, group.prompt))
    chosen = [group for group in in_order if not group.waiting(limit)][:wanted]
    taken = {(group.rollout, group.prompt) for group in chosen}
    left = [group for group in in_order if (group.rollout, group.prompt) not in taken]
    return Gathered(tuple(chosen), tuple(left), consumed, rounds)


def plain_groups(groups: Sequence[OpenGroup]) -> list[dict[str, Any]]:
    """Writes groups as plain values; prompts are left out, since the data has them."""
    return [
        {
            **{name: getattr(group, name) for name in ("position", "rollout", "prompt")},
            "completions": [drawn and plain_completion(drawn) for drawn in group.completions],
        }
        for group in groups
    ]


def groups_from(plain: Sequence[Mapping[str, Any]], read: Callable[[int], Prompts]) -> tuple[OpenGroup, ...]:
    """Reads what `plain_groups` wrote."""
    groups = []
    for entry in plain:
        completions = tuple(drawn and completion_from(drawn) for drawn in entry["completions"])
        place = entry["position"], entry["rollout"], entry["prompt"]
        groups.append(OpenGroup(*place, read(entry["position"]), completions))
    return tuple(groups)


def _cut(drawn: Completion, limit: int) -> Completion:
    if len(drawn.ids) <= limit:
        return drawn
    logprobs = drawn.logprobs[:limit]
    own = logprobs if drawn.model_logprobs is drawn.logprobs else drawn.model_logprobs[:limit]
    mask = None if drawn.mask is None else drawn.mask[:limit]
    return Completion(drawn.ids[:limit], logprobs, own, finished=False, ties=drawn.ties, mask=mask)


def plain_completion(drawn: Completion) -> dict[str, Any]:
    """Writes a completion as plain values."""
    own = None if drawn.model_logprobs is drawn.logprobs else drawn.model_logprobs.tolist()
    mask = None if drawn.mask is None else drawn.mask.tolist()
    numbers = {"ids": drawn.ids.tolist(), "logprobs": drawn.logprobs.tolist(), "model_logprobs": own, "mask": mask}
    return {**numbers, "finished": drawn.finished, "ties": drawn.ties}


def completion_from(plain: Mapping[str, Any]) -> Completion:
    """Reads what `plain_completion` wrote."""
    own = plain["model_logprobs"]
    with host_memory():
        ids = torch.tensor(plain["ids"], dtype=torch.int64)
        logprobs = torch.tensor(plain["logprobs"], dtype=torch.float32)
        own_logprobs = logprobs if own is None else torch.tensor(own, dtype=torch.float32)
        mask = None if plain.get("mask") is None else torch.tensor(plain["mask"], dtype=torch.uint8)
    return Completion(ids, logprobs, own_logprobs, plain["finished"], plain["ties"], mask=mask)
