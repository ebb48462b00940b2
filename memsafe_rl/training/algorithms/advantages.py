"""From rewards to advantages: what GRPO, RLOO and PPO differ in; and the estimator that compares a group's rewards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn

from memsafe_rl.models.critic import Critic
from memsafe_rl.training.gradient import ValueTerms
from memsafe_rl.types import LossSettings, Ragged, Trajectory, UpdateWork

if TYPE_CHECKING:
    from memsafe_rl.training.algorithms.critic_advantages import CriticAdvantages
    from memsafe_rl.training.algorithms.distillation import DistilledAdvantages
    from memsafe_rl.training.algorithms.leave_one_out import LeaveOneOutAdvantages
    from memsafe_rl.training.scorer import Scorer

Advantages: TypeAlias = "GroupAdvantages | DistilledAdvantages | LeaveOneOutAdvantages | CriticAdvantages"
"""Turns a rollout's rewards into advantages, and says what that needs of scoring, loss and memory."""


@dataclass(frozen=True)
class ScoringNeeds:
    """What an estimator has scored of every rollout before its advantages are known."""

    logprobs: bool = False  # whether every row's log-probs are scored under the present weights
    columns: tuple[int, ...] | None = None  # the columns scored of a row; None for all that count
    with_kl: bool = False  # whether the KL to the reference comes with the log-probs, in closed form


class CriticFree(ABC):
    """What advantages have in common that come from rewards and log-probs alone: nothing more to train or to save."""

    critics: tuple[Critic, ...] = ()  # networks whose values are read, and which are trained and saved

    @property
    @abstractmethod
    def needs(self) -> ScoringNeeds:
        """What is scored beyond what the loss needs."""

    @abstractmethod
    def score(self, scorer: Scorer, trajectory: Trajectory, later_rows: Sequence[int]) -> Trajectory:
        """Scores what advantages are made from."""

    @abstractmethod
    def assign(self, trajectory: Trajectory, rewards_B: Tensor, group_size: int) -> tuple[Trajectory, dict[str, float]]:
        """Gives each row its advantage."""

    @abstractmethod
    def placeholder(self, trajectory: Trajectory, numbers: Ragged | None) -> Trajectory:
        """Lays made-up numbers where `score` would lay true ones."""

    def modules(self) -> dict[str, nn.Module]:
        """Trains nothing beside the model."""
        return {}

    def work(self, work: UpdateWork) -> UpdateWork:
        """Adds nothing."""
        return work

    def loss_settings(self, settings: LossSettings) -> LossSettings:
        """Leaves the loss as configured."""
        return settings

    def loss_term(self) -> ValueTerms | None:
        """Adds no term."""
        return None

    def end_rollout(self, metrics: Mapping[str, float]) -> None:  # noqa: B027 - nothing is what there is to do
        """Moves nothing."""

    def reset(self) -> None:  # noqa: B027
        """Has nothing to forget."""

    def state_dict(self) -> dict[str, Any]:
        """Keeps the scale under which checkpoints of critics are read, at its start."""
        return {"kl_scale": 1.0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Has nothing to restore."""


def with_logprobs(scorer: Scorer, trajectory: Trajectory, later_rows: Sequence[int]) -> Trajectory:
    """Adds every row's log-probs under the present weights; the first update's ratios are of its own even so."""
    rows, later = range(len(trajectory)), set(later_rows)
    old = scorer.scored(scorer.adapter, trajectory, list(rows))
    return replace(trajectory, old_logprobs=old, has_old=tuple(row in later for row in rows))


class GroupAdvantages(CriticFree):
    """Compares the rewards of a prompt's completions; a row has one advantage, which needs nothing but rewards."""

    joins_sequences = True  # whether an episode that became several sequences can be learnt from

    @property
    def needs(self) -> ScoringNeeds:
        """Nothing beyond what the loss needs."""
        return ScoringNeeds()

    def score(self, scorer: Scorer, trajectory: Trajectory, later_rows: Sequence[int]) -> Trajectory:  # noqa: ARG002
        """Scores nothing."""
        return trajectory

    def assign(
        self,
        trajectory: Trajectory,
        rewards_B: Tensor,  # noqa: ARG002
        group_size: int,  # noqa: ARG002
    ) -> tuple[Trajectory, dict[str, float]]:
        """Leaves each row its group advantage."""
        return trajectory, {}

    def placeholder(self, trajectory: Trajectory, numbers: Ragged | None) -> Trajectory:  # noqa: ARG002
        """Leaves the store as it is."""
        return trajectory
