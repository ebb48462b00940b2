"""What a rollout's completions are compared with: their group's rewards, or a critic's values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from memsafe_rl.accounting import claim
from memsafe_rl.config.grpo import GRPOConfig, RLOOConfig
from memsafe_rl.config.objectives import Objective
from memsafe_rl.config.ppo import PPOConfig
from memsafe_rl.models.critic import Critic
from memsafe_rl.ops.advantages import (
    centred_in_group,
    leave_one_out,
    normalised_in_batch,
    normalised_in_group,
    optimal_token_advantages,
    relative_to_state,
    squared_score_norms,
    turn_returns,
)
from memsafe_rl.ops.gae import (
    adaptive_kl_coef,
    explained_variance,
    generalized_advantages,
    kl_estimates,
    token_rewards,
    whiten,
)
from memsafe_rl.training import failure, refusal
from memsafe_rl.training.gradient import ValueTerms
from memsafe_rl.types import AdvantageResult, Component, Ragged, Trajectory, Turn, UnitBytes, UpdateWork

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
        """Returns the critic's part of an optimizer step's loss."""
        return ValueTerms(self.critic, self._config.vf_coef, self._config.vf_clip)

    def score(self, scorer: Scorer, trajectory: Trajectory, later_samples: Sequence[int]) -> Trajectory:
        """Adds values, and log-probs where they are needed, from the same pass if the critic shares it."""
        critic, everyone = self.critic, list(range(len(trajectory)))
        later = set(later_samples) if self._pays_kl else set()
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
        """Returns every action of a rollout its advantage and return; whitening is over all rows of all ranks."""
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
        return _credited(
            trajectory,
            metrics,
            # for the log, where a row has one advantage: (B,) float32
            advantages=(advantages_BT.sum(1) / mask_BT.sum(1).clamp(min=1)).float(),
            action_advantages=_unpadded(advantages_BT, lengths),
            returns=_unpadded(returns_BT, lengths),
        )

    def placeholder(self, trajectory: Trajectory, numbers: Ragged | None) -> Trajectory:
        """Lays made-up numbers where values, returns and advantages of actions go."""
        return replace(trajectory, values=numbers, returns=numbers, action_advantages=numbers)

    def end_rollout(self, metrics: Mapping[str, float]) -> None:
        """Moves the KL coefficients towards the target by a rollout's KL."""
        config = self._config
        self._rollouts += 1
        steers = self._rollouts > config.critic_warmup_rollouts  # before, the policy is the reference
        if config.kl_target is not None and steers and ROLLOUT_KL in metrics:
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
        """Returns the factor of the KL coefficients, and the rollouts learnt from."""
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
        """Returns each action's KL to the reference, (B, T), estimated where it is not known; None without one."""
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


Advantages: TypeAlias = "GroupAdvantages | CriticAdvantages"
"""Turns a rollout's rewards into advantages, and says what that needs of scoring, loss and memory."""

Assigned = tuple[Trajectory, dict[str, float]]
"""A rollout with its advantages, and what is logged of them."""


@dataclass(frozen=True)
class ScoringNeeds:
    """What an estimator has scored of every rollout before its advantages are known."""

    logprobs: bool = False  # whether every row's log-probs are scored under the present weights
    columns: tuple[int, ...] | None = None  # the columns scored of a row; None for all that count
    sharper: bool = False  # whether rows are scored again at half the temperature
    likeliest: int | None = None  # of a token's likeliest rivals, those that the reference scores beside it
    turns: bool = False  # whether a row's turns are kept until then
    with_kl: bool = False  # whether the KL to the reference comes with the log-probs, in closed form


def _credited(trajectory: Trajectory, metrics: dict[str, float], **found: Any) -> Assigned:
    """Lays what was found into a rollout, whose bytes are counted then."""
    credited = replace(trajectory, **found)
    claim(Component.TRAJECTORY, credited.tensors())
    return credited, metrics


def compared(trajectory: Trajectory, rewards_B: Tensor, group_size: int) -> Assigned:  # noqa: ARG001
    """Leaves each row its group advantage, which needs nothing but rewards."""
    return trajectory, {}


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages that come from rewards and log-probs alone: nothing more to train or to save."""

    assign: Callable[[Trajectory, Tensor, int], Assigned] = compared  # takes the store, rewards (B,) and group size
    needs: ScoringNeeds = ScoringNeeds()  # what is scored beyond what the loss needs
    joins_sequences: bool = True  # whether an episode that became several sequences can be learnt from
    by_token: bool = False  # whether a sequence's tokens have advantages of their own
    critics: tuple[Critic, ...] = ()  # networks whose values are read, and which are trained and saved
    kl_scale: float = 1.0  # by which the loss's KL coefficient is multiplied

    def score(self, scorer: Scorer, trajectory: Trajectory, later_samples: Sequence[int]) -> Trajectory:
        """Adds log-probs under the present weights if needed; the first update's ratios are of its own even so."""
        if not self.needs.logprobs:
            return trajectory
        rows, later = range(len(trajectory)), set(later_samples)
        known = trajectory.old_logprobs if self.needs.likeliest else None
        old = known or scorer.scored(scorer.adapter, trajectory, list(rows))
        if self.needs.sharper:
            sharper = scorer.scored(scorer.adapter, trajectory, list(rows), temperature_factor=0.5)
            trajectory = replace(trajectory, sharper_logprobs=sharper)
        return replace(trajectory, old_logprobs=old, has_old=tuple(row in later for row in rows))

    def placeholder(self, trajectory: Trajectory, numbers: Ragged | None) -> Trajectory:
        """Lays made-up numbers where `score` and `assign` would lay true ones."""
        trajectory = replace(trajectory, old_logprobs=numbers) if self.needs.logprobs else trajectory
        trajectory = replace(trajectory, expected_gaps=numbers) if self.needs.likeliest else trajectory
        return replace(trajectory, action_advantages=numbers) if self.by_token else trajectory

    def work(self, work: UpdateWork) -> UpdateWork:
        """Adds nothing."""
        return work

    def loss_term(self) -> ValueTerms | None:
        """Adds no term."""
        return None

    def end_rollout(self, metrics: Mapping[str, float]) -> None:
        """Moves nothing."""

    def reset(self) -> None:
        """Has nothing to forget."""

    def state_dict(self) -> dict[str, Any]:
        """Keeps the scale under which checkpoints of critics are read, at its start."""
        return {"kl_scale": self.kl_scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has nothing to restore."""


def advantages_by_objective(
    rewards_BF: Tensor,
    names: Sequence[str],
    weights_F: Tensor,
    objectives: Sequence[Objective],
    estimate: Callable[[Tensor, Tensor], AdvantageResult],
) -> AdvantageResult:
    """Returns every row its advantage; of several objectives, each sees its own rewards alone."""
    whole = estimate(rewards_BF, weights_F)
    if not objectives:
        return whole
    columns = [[names.index(reward) for reward in objective.rewards] for objective in objectives]
    parts = tuple(estimate(rewards_BF[:, chosen], weights_F[chosen]) for chosen in columns)
    added_B = torch.stack([one.weight * part.advantages_B for one, part in zip(objectives, parts, strict=True)]).sum(0)
    return replace(whole, advantages_B=added_B, objectives=parts)


def objective_advantages(advantages: AdvantageResult) -> Tensor | None:
    """Returns what `Trajectory.objective_advantages` holds."""
    columns = [part.advantages_B.masked_fill(part.unscored_B, math.nan) for part in advantages.objectives]
    return torch.stack(columns, 1) if columns else None


def reward_metrics(objectives: Sequence[Objective], advantages: AdvantageResult) -> dict[str, float]:
    """Returns each objective's mean reward, and the share of rows that it scored."""
    metrics = {}
    for objective, part in zip(objectives, advantages.objectives, strict=True):
        known = part.rewards_B[~part.unscored_B]
        metrics[f"objectives/{objective.name}/reward"] = known.mean().item() if known.numel() else math.nan
        metrics[f"objectives/{objective.name}/scored"] = known.numel() / max(1, part.rewards_B.numel())
    return metrics


def leave_one_out_advantages(config: RLOOConfig) -> GroupAdvantages:
    """Compares a completion's reward, less what it pays for its KL to the reference, with the others of its prompt."""
    needs = ScoringNeeds(logprobs=config.has_reference)
    return GroupAdvantages(partial(_less_the_others, config), needs, joins_sequences=False)  # a ratio is of a whole row


def _less_the_others(config: RLOOConfig, trajectory: Trajectory, rewards_B: Tensor, group_size: int) -> Assigned:
    """Returns each row ``A_i = r_i - mean_{j != i} r_j``, ``r = clip(reward) - beta sum_t (log pi - log pi_ref)``.

    Sums and means are in float64; a row that no reward function scored is left out, and its advantage is 0.
    """
    metrics: dict[str, float] = {}
    scores_B = rewards_B.double()
    if config.reward_clip_range is not None:
        scores_B = scores_B.clamp(*config.reward_clip_range)
    if trajectory.ref_logprobs is not None and trajectory.old_logprobs is not None:
        rows = range(len(trajectory))
        gaps = Ragged(trajectory.old_logprobs.flat - trajectory.ref_logprobs.flat, trajectory.actions.lengths)
        kl_B = (gaps.pad(rows, 0).double() * trajectory.loss_mask.pad(rows, 0)).sum(1)
        scores_B = scores_B - config.beta * kl_B
        metrics["kl"] = float(kl_B.sum()) / max(1, sum(trajectory.counted_actions))
        metrics["objective/kl"] = float(kl_B.mean())
    advantages_PG = leave_one_out(scores_B.view(-1, group_size))
    metrics["frac_reward_zero_std"] = (advantages_PG == 0).all(1).double().mean().item()
    if config.normalize_advantages:
        advantages_PG = normalised_in_batch(advantages_PG)
    advantages_B = advantages_PG.reshape(-1).nan_to_num(nan=0.0).float()
    return _credited(trajectory, metrics, advantages=advantages_B)


def distilled_advantages(config: GRPOConfig) -> GroupAdvantages:
    """Adds to a row's group advantage what each of its tokens pays for leaving a teacher, undiscounted."""
    needs = ScoringNeeds(logprobs=True, likeliest=config.distillation_top_k)
    return GroupAdvantages(partial(_taught, config), needs, joins_sequences=False, by_token=True)


def _taught(config: GRPOConfig, trajectory: Trajectory, rewards_B: Tensor, group_size: int) -> Assigned:  # noqa: ARG001
    """Returns each token ``A_t = A - coef (log pi(a_t) - log pi_teacher(a_t) - b_t)``, with ``A`` of its row's group.

    ``b_t``, the likeliest tokens' `expected_gaps` or 0, is the same whichever was drawn: no bias, less noise. Where
    ``A`` is 0, the expected gradient of an on-policy update is that of the tokens' KL to the teacher, given what is
    before them (Thinking Machines, "On-Policy Distillation", 2025; MiniLLM, arXiv:2306.08543).
    """
    old, teacher = trajectory.old_logprobs, trajectory.ref_logprobs
    assert old is not None, "log-probs come before advantages"
    assert teacher is not None, "likewise"
    lengths, mask = trajectory.actions.lengths, trajectory.loss_mask.flat.bool()
    gaps = (old.flat - teacher.flat).masked_fill(~mask, 0.0)
    known = trajectory.expected_gaps
    paid = gaps if known is None else gaps - known.flat.to(gaps.dtype)
    by_token = trajectory.advantages.repeat_interleave(torch.tensor(lengths)).to(gaps.dtype)
    by_token -= config.distillation_coef * paid
    advantages = Ragged(by_token.masked_fill(~mask, 0.0), lengths)
    metrics = {"distillation/kl": float(gaps.sum()) / max(1, int(mask.sum()))}
    return _credited(trajectory, metrics, action_advantages=advantages, expected_gaps=None)


def token_baseline_advantages() -> GroupAdvantages:
    """Compares each token of a completion with those at its place in the others, by the optimal token baseline."""
    return GroupAdvantages(_by_place, ScoringNeeds(logprobs=True, sharper=True), joins_sequences=False, by_token=True)


def _by_place(trajectory: Trajectory, rewards_B: Tensor, group_size: int) -> Assigned:
    """Returns each token ``A_t = r - B_t``, in float64, a group at a time."""
    old, sharper, lengths = trajectory.old_logprobs, trajectory.sharper_logprobs, trajectory.actions.lengths
    assert old is not None, "log-probs come before advantages"
    assert sharper is not None, "likewise"
    parts: list[Tensor] = []
    for first in range(0, len(trajectory), group_size):
        rows = range(first, first + group_size)
        norms_GT = squared_score_norms(old.pad(rows, 0).double(), sharper.pad(rows, 0).double())
        rewards_G, mask_GT = rewards_B[first : first + group_size].double(), trajectory.loss_mask.pad(rows, 0)
        found_GT = optimal_token_advantages(rewards_G, norms_GT, mask_GT)
        parts += [found_GT[place, : lengths[row]].float() for place, row in enumerate(rows)]
    return _credited(trajectory, {}, action_advantages=Ragged.from_rows(parts), sharper_logprobs=None)


def turn_advantages(config: GRPOConfig) -> GroupAdvantages:
    """Adds how a turn compares with others in its state: ``A_t = A^E + coef A^S`` (GiGPO, arXiv:2505.10978)."""
    return GroupAdvantages(partial(_by_turn, config), ScoringNeeds(turns=True), by_token=True)


def _by_turn(config: GRPOConfig, trajectory: Trajectory, rewards_B: Tensor, group_size: int) -> Assigned:
    """Returns each token's episode advantage plus its turn's own; the last turn has the rest of the reward."""
    unscaled = config.scale_rewards == "none" or config.advantage_estimator in ("dr_grpo", "rloo")
    compare = centred_in_group if unscaled else normalised_in_group
    lengths, played = trajectory.actions.lengths, trajectory.turns or ((),) * len(trajectory)
    turns: dict[int, list[tuple[int, Turn]]] = {}
    for row, sample in enumerate(trajectory.sample_of_row or range(len(trajectory))):
        turns.setdefault(sample, []).extend((row, turn) for turn in played[row])
    returns, states = [torch.zeros(0, dtype=torch.float64)], []
    for sample, own in turns.items():
        paid_T = torch.tensor([turn.reward for _, turn in own], dtype=torch.float64)
        paid_T[-1:] += rewards_B[sample].double() - paid_T.sum()
        returns.append(turn_returns(paid_T, config.turn_discount))
        states += [(sample // group_size, turn.state) for _, turn in own]
    advantages_N, met_N = relative_to_state(torch.cat(returns), states, compare)
    by_token = trajectory.advantages.repeat_interleave(torch.tensor(lengths))
    views = Ragged(by_token, lengths).rows()
    places = [place for own in turns.values() for place in own]
    for (row, turn), advantage in zip(places, (config.turn_advantage_coef * advantages_N).tolist(), strict=True):
        later = [other.start for other in played[row] if other.start > turn.start]
        views[row][turn.start : min(later, default=lengths[row])] += advantage
    masked = by_token.masked_fill(~trajectory.loss_mask.flat.bool(), 0.0)
    metrics = {"turns/compared": float(met_N.double().mean()) if len(met_N) else 0.0}
    return _credited(trajectory, metrics, action_advantages=Ragged(masked, lengths), turns=())
