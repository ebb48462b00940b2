"""Advantages of RLOO: rewards pay for the KL to the reference, and each is compared with the others of its group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from memsafe_rl.accounting import claim
from memsafe_rl.config.grpo import RLOOConfig
from memsafe_rl.ops.advantages import leave_one_out, normalised_in_batch
from memsafe_rl.training.algorithms.advantages import CriticFree, ScoringNeeds, with_logprobs
from memsafe_rl.types import Component, Ragged, Trajectory

if TYPE_CHECKING:
    from memsafe_rl.training.scorer import Scorer


class LeaveOneOutAdvantages(CriticFree):
    """Compares the rewards of a prompt's completions, less what each pays for its KL to the reference."""

    joins_sequences = False  # a ratio is of a whole completion

    def __init__(self, config: RLOOConfig) -> None:
        self._config = config

    @property
    def needs(self) -> ScoringNeeds:
        """Log-probs, where rewards pay for the KL."""
        return ScoringNeeds(logprobs=self._config.has_reference)

    def score(self, scorer: Scorer, trajectory: Trajectory, later_rows: Sequence[int]) -> Trajectory:
        """Adds the log-probs from which the KL is taken; the first update's ratios are of its own even so."""
        return with_logprobs(scorer, trajectory, later_rows) if self._config.has_reference else trajectory

    def assign(self, trajectory: Trajectory, rewards_B: Tensor, group_size: int) -> tuple[Trajectory, dict[str, float]]:
        """Gives each row ``A_i = r_i - mean_{j != i} r_j``, ``r = clip(reward) - beta sum_t (log pi - log pi_ref)``.

        Sums and means are in float64; a row that no reward function scored is left out, and its advantage is 0.
        """
        config, metrics = self._config, {}
        scores_B = rewards_B.double()
        if config.reward_clip_range is not None:
            scores_B = scores_B.clamp(*config.reward_clip_range)
        if trajectory.ref_logprobs is not None and trajectory.old_logprobs is not None:
            rows = range(len(trajectory))
            gaps = Ragged(trajectory.old_logprobs.flat - trajectory.ref_logprobs.flat, trajectory.actions.lengths)
            kl_B = (gaps.pad(rows, 0).double() * trajectory.loss_mask.pad(rows, 0)).sum(1)
            scores_B = scores_B - config.beta * kl_B
            metrics = {
                "kl": float(kl_B.sum()) / max(1, sum(trajectory.counted_actions)),
                "objective/kl": float(kl_B.mean()),
            }
        advantages_PG = leave_one_out(scores_B.view(-1, group_size))
        if config.normalize_advantages:
            advantages_PG = normalised_in_batch(advantages_PG)
        advantages_B = advantages_PG.reshape(-1).nan_to_num(nan=0.0).float()
        claim(Component.TRAJECTORY, [advantages_B])
        return replace(trajectory, advantages=advantages_B), metrics

    def placeholder(self, trajectory: Trajectory, numbers: Ragged | None) -> Trajectory:
        """Lays made-up log-probs where rewards pay for the KL."""
        return replace(trajectory, old_logprobs=numbers) if self._config.has_reference else trajectory
