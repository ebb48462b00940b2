"""Advantages from a critic: what PPO knows beyond GRPO.

Axes: ``B`` rows, ``T`` actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memsafe_rl.accounting import claim
from memsafe_rl.config.ppo import PPOConfig
from memsafe_rl.models.critic import Critic
from memsafe_rl.ops.gae import (
    adaptive_kl_coef,
    explained_variance,
    generalized_advantages,
    kl_estimates,
    token_rewards,
    whiten,
)
from memsafe_rl.training import failure, refusal
from memsafe_rl.training.algorithms.advantages import ScoringNeeds
from memsafe_rl.training.gradient import ValueTerms
from memsafe_rl.types import Component, Ragged, Trajectory, UnitBytes, UpdateWork

if TYPE_CHECKING:
    from memsafe_rl.training.scorer import Scorer

ROLLOUT_KL = "objective/kl"
"""Name of the metric that holds a rollout's KL to the reference, nats a row."""


class CriticAdvantages:
    """Generalized advantages from a critic's values: each action has one of its own."""

    joins_sequences = False

    def __init__(self, config: PPOConfig, critic: Critic) -> None:
        self.critic, self.critics = critic, (critic,)
        warmup = config.critic_warmup_rollouts
        refusal.when(warmup and critic.shares_forward, "critic_warmup_rollouts", value=warmup)
        self._config = config
        self.kl_scale, self._rollouts = 1.0, 0

    @property
    def needs(self) -> ScoringNeeds:
        """Values, and log-probs or a closed-form KL where rewards pay for the KL."""
        columns = self.critic.judged_columns
        return ScoringNeeds(self._pays_kl, columns, with_kl=columns is not None and self._pays_kl)

    @property
    def _pays_kl(self) -> bool:
        """Whether every action's log-prob, or KL in closed form, is needed before advantages are."""
        if self.critic.judged_columns is not None:
            return self._config.kl_coef != 0 or self._config.kl_target is not None
        return self.critic.shares_forward or self._config.has_reference

    def work(self, work: UpdateWork) -> UpdateWork:
        """Adds the critic's gradients to a step's shape, and what its pairs hold."""
        trainable_bytes = work.geometry.trainable_bytes + self.critic.beside_bytes
        unit, own = work.geometry.unit, self.critic.own_geometry
        if unit is not None and own is not None and own.unit is not None:  # its pass comes after the model's
            unit = UnitBytes(*map(max, astuple(unit), astuple(own.unit)))
        return replace(work, geometry=replace(work.geometry, trainable_bytes=trainable_bytes, unit=unit))

    def loss_term(self) -> ValueTerms:
        """Gives the critic's part of an optimizer step's loss."""
        return ValueTerms(self.critic, self._config.vf_coef, self._config.vf_clip)

    def score(self, scorer: Scorer, trajectory: Trajectory, later_rows: Sequence[int]) -> Trajectory:
        """Adds values, and log-probs where they are needed, from the same pass if the critic shares it.

        Rows of the first update have their old log-probs from that update even so: then its ratios are exactly 1.
        """
        critic, everyone = self.critic, list(range(len(trajectory)))
        later = set(later_rows) if self._pays_kl else set()
        has_old = tuple(row in later for row in everyone)
        if critic.shares_forward:
            mine, found = scorer.passed(scorer.adapter, trajectory, everyone, value_head=critic.head)
            old = scorer.laid_beside(trajectory, mine, [scores.logprobs for scores in found])
            values = [scores.values for scores in found if scores.values is not None]
            stored = scorer.laid_beside(trajectory, mine, values)
            return replace(trajectory, old_logprobs=old, values=stored, has_old=has_old)
        columns = critic.judged_columns
        if self._pays_kl and columns is not None:
            mine, found = scorer.passed(scorer.adapter, trajectory, everyone, with_kl=True, columns=columns)
            old = scorer.laid_beside(trajectory, mine, [scores.logprobs for scores in found])
            kl = scorer.laid_beside(trajectory, mine, [scores.kl for scores in found if scores.kl is not None])
            trajectory = replace(trajectory, old_logprobs=old, kl=kl)
        elif self._pays_kl:
            trajectory = replace(trajectory, old_logprobs=scorer.scored(scorer.adapter, trajectory, everyone))
        return replace(trajectory, values=scorer.valued(critic, trajectory, columns), has_old=has_old)

    def assign(
        self,
        trajectory: Trajectory,
        rewards_B: Tensor,
        group_size: int,  # noqa: ARG002
    ) -> tuple[Trajectory, dict[str, float]]:
        """Gives every action of a rollout its advantage and return; whitening is over all rows of all ranks."""
        config, rows = self._config, range(len(trajectory))
        assert trajectory.values is not None, "values come before advantages"
        mask_BT, values_BT = trajectory.loss_mask.pad(rows, 0).bool(), trajectory.values.pad(rows, 0)
        judged_BT = self._judged(mask_BT)
        _refuse_broken(values_BT, judged_BT)
        kl_BT = self._kl(trajectory)
        scores_B = self._scores(trajectory, rewards_B.to(values_BT.dtype))
        rewards_BT = token_rewards(scores_B, judged_BT, kl_BT=kl_BT, kl_coef=config.kl_coef * self.kl_scale)
        costs_B = scores_B - rewards_BT.sum(1)
        if config.whiten_rewards:
            rewards_BT = whiten(rewards_BT, judged_BT, shift_mean=False)
        found = generalized_advantages(
            rewards_BT, values_BT, judged_BT, gamma=config.gamma, gae_lambda=config.gae_lambda
        )
        returns_BT, advantages_BT = found.returns_BT, found.advantages_BT.masked_fill(~mask_BT, 0.0)
        if config.gae_lambda_critic is not None:
            lambdas = {"gamma": config.gamma, "gae_lambda": config.gae_lambda_critic}
            returns_BT = generalized_advantages(rewards_BT, values_BT, judged_BT, **lambdas).returns_BT
        if config.whiten_advantages:
            advantages_BT = whiten(advantages_BT, mask_BT)
        if self._rollouts < config.critic_warmup_rollouts:
            advantages_BT = torch.zeros_like(advantages_BT)
        metrics = _metrics(values_BT, returns_BT, judged_BT)
        if kl_BT is not None:
            counted_B = judged_BT.any(1)
            kl_B = (kl_BT * judged_BT).sum(1)
            metrics |= {
                ROLLOUT_KL: float(kl_B[counted_B].mean()),
                "objective/non_score_reward": -float(costs_B[counted_B].mean()),
                **({} if config.beta else {"kl": float(kl_B.sum()) / max(1, int(judged_BT.sum()))}),
                "kl_coef": (config.kl_coef or config.beta) * self.kl_scale,
            }
        lengths = trajectory.actions.lengths
        judged = replace(
            trajectory,
            # for the log, where a row has one advantage: (B,) float32
            advantages=(advantages_BT.sum(1) / mask_BT.sum(1).clamp(min=1)).float(),
            action_advantages=_unpadded(advantages_BT, lengths),
            returns=_unpadded(returns_BT, lengths),
        )
        claim(Component.TRAJECTORY, judged.tensors())
        return judged, metrics

    def placeholder(self, trajectory: Trajectory, numbers: Ragged | None) -> Trajectory:
        """Lays made-up numbers where values, returns and advantages of actions go."""
        return replace(trajectory, values=numbers, returns=numbers, action_advantages=numbers)

    def end_rollout(self, metrics: Mapping[str, float]) -> None:
        """Moves the KL coefficients towards the target by a rollout's KL."""
        config = self._config
        self._rollouts += 1
        if config.kl_target is not None and ROLLOUT_KL in metrics:
            self.kl_scale = adaptive_kl_coef(
                self.kl_scale,
                metrics[ROLLOUT_KL],
                target=config.kl_target,
                rows=config.rollout_rows,
                horizon=config.kl_horizon,
            )

    def reset(self) -> None:
        """Starts the KL coefficients where the configuration has them, and the critic's warm-up."""
        self.kl_scale, self._rollouts = 1.0, 0

    def state_dict(self) -> dict[str, Any]:
        """Gives the factor of the KL coefficients, and the rollouts learnt from."""
        return {"kl_scale": self.kl_scale, "rollouts": self._rollouts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores them; a checkpoint of earlier versions, which had no warm-up, is past it."""
        self.kl_scale = state["kl_scale"]
        self._rollouts = state.get("rollouts", self._config.critic_warmup_rollouts)

    def _judged(self, mask_BT: Tensor) -> Tensor:
        """Marks the actions through which advantages are added up: those that count, or all candidates of a chain."""
        columns = self.critic.judged_columns
        if columns is None:
            return mask_BT
        judged_T = torch.zeros(mask_BT.shape[1], dtype=torch.bool)
        judged_T[list(columns)] = True
        return mask_BT.any(1, keepdim=True) & judged_T

    def _scores(self, trajectory: Trajectory, rewards_B: Tensor) -> Tensor:
        scores_B = rewards_B.nan_to_num(nan=0.0)
        if self._config.missing_eos_penalty is None:
            return scores_B
        unfinished_B = torch.tensor([not finished for finished in trajectory.finished], dtype=scores_B.dtype)
        return scores_B - self._config.missing_eos_penalty * unfinished_B

    def _kl(self, trajectory: Trajectory) -> Tensor | None:
        """Gives each action's KL to the reference, (B, T), estimated where it is not known; None without one."""
        if trajectory.kl is not None:
            return trajectory.kl.pad(range(len(trajectory)), 0)
        if trajectory.ref_logprobs is None:
            return None
        assert trajectory.old_logprobs is not None, "log-probs come before advantages where there is a reference"
        rows = range(len(trajectory))
        logprobs_BT, reference_BT = trajectory.old_logprobs.pad(rows, 0), trajectory.ref_logprobs.pad(rows, 0)
        return kl_estimates(logprobs_BT, reference_BT, self._config.kl_estimator)


def _refuse_broken(values_BT: Tensor, judged_BT: Tensor) -> None:
    broken = (judged_BT & ~values_BT.isfinite()).nonzero().tolist()
    if broken:
        (row, column), judged = broken[0], int(judged_BT.sum())
        value = float(values_BT[row, column])
        raise failure("values", row=row, column=column, value=value, broken=len(broken), judged=judged)


def _metrics(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
    counted = max(1, int(mask_BT.sum()))
    return {
        "returns/mean": float(returns_BT.sum()) / counted,
        "values/mean": float(values_BT.masked_fill(~mask_BT, 0.0).sum()) / counted,
        "explained_variance": float(explained_variance(values_BT, returns_BT, mask_BT)),
    }


def _unpadded(values_BT: Tensor, lengths: tuple[int, ...]) -> Ragged:
    return Ragged.from_rows([values_T[:length] for values_T, length in zip(values_BT, lengths, strict=True)])
