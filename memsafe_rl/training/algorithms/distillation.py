"""On-policy distillation: each token pays for what a teacher finds less likely than the model, beside the rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memsafe_rl.accounting import claim
from memsafe_rl.training.algorithms.advantages import CriticFree, ScoringNeeds, with_logprobs
from memsafe_rl.types import Component, Ragged, Trajectory

if TYPE_CHECKING:
    from memsafe_rl.training.scorer import Scorer


class DistilledAdvantages(CriticFree):
    """Adds to a row's group advantage what each of its tokens pays: a reverse KL to the teacher, undiscounted.

    Where group advantages are 0, the expected gradient of an on-policy update is that of every token's KL to the
    teacher, given its prefix (Thinking Machines, "On-Policy Distillation", 2025; MiniLLM, arXiv:2306.08543).
    """

    joins_sequences = False  # a sequence's tokens have advantages of their own

    def __init__(self, coef: float) -> None:
        self._coef = coef

    @property
    def needs(self) -> ScoringNeeds:
        """Log-probs of the model beside those of the teacher."""
        return ScoringNeeds(logprobs=True)

    def score(self, scorer: Scorer, trajectory: Trajectory, later_rows: Sequence[int]) -> Trajectory:
        """Adds the model's log-probs."""
        return with_logprobs(scorer, trajectory, later_rows)

    def assign(
        self,
        trajectory: Trajectory,
        rewards_B: Tensor,  # noqa: ARG002
        group_size: int,  # noqa: ARG002
    ) -> tuple[Trajectory, dict[str, float]]:
        """Gives each token ``A_t = A - coef (log pi(a_t) - log pi_teacher(a_t))``, with ``A`` of its row's group."""
        old, teacher = trajectory.old_logprobs, trajectory.ref_logprobs
        if old is None or teacher is None:
            raise AssertionError("log-probs come before advantages")
        lengths, mask = trajectory.actions.lengths, trajectory.loss_mask.flat.bool()
        gaps = (old.flat - teacher.flat).masked_fill(~mask, 0.0)
        by_token = trajectory.advantages.repeat_interleave(torch.tensor(lengths)).to(gaps.dtype) - self._coef * gaps
        distilled = replace(trajectory, action_advantages=Ragged(by_token.masked_fill(~mask, 0.0), lengths))
        claim(Component.TRAJECTORY, distilled.tensors())
        return distilled, {"distillation/kl": float(gaps.sum()) / max(1, int(mask.sum()))}

    def placeholder(self, trajectory: Trajectory, numbers: Ragged | None) -> Trajectory:
        """Lays made-up numbers where log-probs and advantages of tokens go."""
        return replace(trajectory, old_logprobs=numbers, action_advantages=numbers)
