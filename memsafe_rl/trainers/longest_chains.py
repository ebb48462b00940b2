"""What a forecast tries of a denoiser in place of the longest rows of tokens: chains, which are all alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memsafe_rl.accounting import host_memory
from memsafe_rl.models.diffusion import DiffusionAdapter
from memsafe_rl.trainers.data import Prompts
from memsafe_rl.types import Ragged, SequenceKey, Trajectory


def embedded_prompts(adapter: DiffusionAdapter, count: int) -> Prompts:
    """Gives prompts of the longest embedding there can be.

    Args:
        adapter: the policy.
        count: how many.

    Returns:
        The prompts, without examples.
    """
    with host_memory():
        return Prompts((), (), tuple(torch.zeros(adapter.policy.condition_shape) for _ in range(count)))


def keys_of(rows: Sequence[tuple[int, int]]) -> list[list[SequenceKey]]:
    """Names the chains of (prompt, sample) pairs.

    Args:
        rows: the pairs, prompt by prompt.

    Returns:
        For each prompt the keys of its samples.
    """
    prompts = dict.fromkeys(prompt for prompt, _ in rows)
    return [[SequenceKey(0, 0, *row) for row in rows if row[0] == prompt] for prompt in prompts]


def chains(adapter: DiffusionAdapter, prompts: int, rows: int, *, needs_old: bool) -> Trajectory:
    """Lays down a rollout of chains, on the host.

    Args:
        adapter: the policy.
        prompts: unique prompts.
        rows: chains; as many to each prompt.
        needs_old: whether a later update reads old log-probs.

    Returns:
        The trajectory; every advantage differs from zero.
    """
    policy = adapter.policy
    steps, group = policy.num_inference_steps, rows // prompts
    candidates = policy.trained_steps.candidates(policy.stds)
    wanted = policy.trained_steps.count(len(candidates))
    with host_memory():
        states = torch.zeros(rows * steps, *policy.sample_shape, dtype=policy.state_dtype)
        mask = torch.ones(rows * steps, dtype=torch.uint8)
        zeros: Tensor = torch.zeros(rows * steps)
        signs = torch.tensor([1.0, -1.0]).repeat(-(-rows // 2))[:rows]
        embedded = embedded_prompts(adapter, prompts).ids
        lengths = (steps,) * rows
        numbers: Any = Ragged(zeros, lengths)
        return Trajectory(
            conditions=Ragged.from_rows(list(embedded)),
            condition_of_row=tuple(row // group for row in range(rows)),
            actions=Ragged(states, lengths),
            loss_mask=Ragged(mask, lengths),
            sampling_logprobs=numbers,
            advantages=signs,
            group_of_row=tuple(row // group for row in range(rows)),
            finished=(True,) * rows,
            old_logprobs=numbers if needs_old else None,
            has_old=(needs_old,) * rows,
            starts=torch.zeros(rows, *policy.sample_shape, dtype=policy.state_dtype),
            columns=candidates[:wanted],
        )
