"""Rollouts that nobody drew, for probes, proofs and forecasts: of tokens, and of chains, which are all alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from memsafe_rl.accounting import host_memory
from memsafe_rl.data.prompts import Prompts
from memsafe_rl.models.diffusion.adapter import DiffusionAdapter
from memsafe_rl.types import Ragged, Trajectory


def lay_down(prompts: Sequence[Tensor], completions: Sequence[Tensor], group_size: int, objectives: int) -> Trajectory:
    """Lays prompts and completions down as a rollout in which every action counts and no advantage is zero."""
    rows = len(completions)
    advantages = torch.tensor([1.0, -1.0]).repeat(-(-rows // 2))[:rows] * (0.5 + torch.arange(rows) / rows)
    shifted = [advantages.roll(index) for index in range(objectives)]
    actions = Ragged.from_rows(list(completions))
    return Trajectory(
        conditions=Ragged.from_rows(list(prompts)),
        condition_of_row=tuple(row // group_size for row in range(rows)),
        actions=actions,
        loss_mask=Ragged(torch.ones(len(actions.flat), dtype=torch.uint8), actions.lengths),
        sampling_logprobs=Ragged(torch.zeros(len(actions.flat)), actions.lengths),
        advantages=advantages,
        objective_advantages=torch.stack(shifted, 1) if shifted else None,
        group_of_row=tuple(row // group_size for row in range(rows)),
        finished=(True,) * rows,
        has_old=(False,) * rows,
    )


def embedded_prompts(adapter: DiffusionAdapter, count: int) -> Prompts:
    """Returns prompts of the longest embedding there can be."""
    with host_memory():
        return Prompts((), (), tuple(torch.zeros(adapter.policy.condition_shape) for _ in range(count)))


def chains(adapter: DiffusionAdapter, prompts: int, group_size: int, objectives: int, *, needs_old: bool) -> Trajectory:
    """Lays down a rollout of chains, on the host."""
    policy, rows = adapter.policy, prompts * group_size
    candidates = policy.trained_steps.candidates(policy.stds)
    with host_memory():
        states = torch.zeros(rows, policy.num_inference_steps, *policy.sample_shape, dtype=policy.state_dtype)
        starts = torch.zeros(rows, *policy.sample_shape, dtype=policy.state_dtype)
        trajectory = lay_down(embedded_prompts(adapter, prompts).ids, states.unbind(), group_size, objectives)
    return replace(
        trajectory,
        old_logprobs=trajectory.sampling_logprobs if needs_old else None,
        has_old=(needs_old,) * rows,
        starts=starts,
        columns=candidates[: policy.trained_steps.count(len(candidates))],
    )
