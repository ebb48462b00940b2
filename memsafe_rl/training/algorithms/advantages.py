"""From rewards to advantages: what GRPO, RLOO and PPO differ in; and the estimator that compares a group's rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from memsafe_rl.models.critic import Critic
from memsafe_rl.training.gradient import ValueTerms
from memsafe_rl.types import LossSettings, ModelGeometry, Ragged, Trajectory, UpdateWork

if TYPE_CHECKING:
    from memsafe_rl.training.scorer import Scorer


@dataclass(frozen=True)
class ScoringNeeds:
    """What an estimator has scored of every rollout before its advantages are known."""

    logprobs: bool = False  # whether every row's log-probs are scored under the present weights
    columns: tuple[int, ...] | None = None  # the columns scored of a row; None for all that count
    with_kl: bool = False  # whether the KL to the reference comes with the log-probs, in closed form
    critics: tuple[Critic, ...] = ()  # networks whose values are read


class Advantages(Protocol):
    """Turns a rollout's rewards into advantages, and says what that needs of scoring, loss and memory.

    Attributes:
        joins_sequences: whether an episode that became several sequences can be learnt from.
    """

    joins_sequences: bool

    @property
    def needs(self) -> ScoringNeeds:
        """What is scored of every rollout."""

    def modules(self) -> dict[str, nn.Module]:
        """Names what is trained beside the model.

        Returns:
            Modules by name; none where only the model is trained.
        """

    def geometries(self) -> dict[str, ModelGeometry]:
        """Names the networks of their own that read whole rows.

        Returns:
            Their sizes by name.
        """

    def work(self, work: UpdateWork) -> UpdateWork:
        """Adds what is trained beside the model to the shape of an optimizer step.

        Args:
            work: the step's rows and the model's geometry.

        Returns:
            The same rows, with the bytes of both.
        """

    def score(self, scorer: Scorer, trajectory: Trajectory, later_rows: Sequence[int]) -> Trajectory:
        """Scores what advantages are made from, beside the rewards.

        Args:
            scorer: runs passes without gradient.
            trajectory: the store, on the host.
            later_rows: rows that no optimizer step reads before the weights first move.

        Returns:
            The store with it.
        """

    def assign(self, trajectory: Trajectory, rewards_B: Tensor) -> tuple[Trajectory, dict[str, float]]:
        """Gives every action of a rollout its advantage.

        Args:
            trajectory: the store, with what `score` added and each row's group advantage.
            rewards_B: (B,) float32, NaN for a row that was not scored.

        Returns:
            The store with advantages, and what is logged of them.

        Raises:
            MemsafeError: a value is not finite.
        """

    def loss_settings(self, settings: LossSettings) -> LossSettings:
        """Gives the policy's loss with its coefficients as they stand now.

        Args:
            settings: the loss as configured.

        Returns:
            The same loss.
        """

    def loss_term(self) -> ValueTerms | None:
        """Gives what is learnt in the same backward as the policy's loss.

        Returns:
            The critic's loss; None where nothing is.
        """

    def placeholder(self, trajectory: Trajectory, numbers: Ragged | None) -> Trajectory:
        """Lays made-up numbers where `score` and `assign` would write theirs, for a dry run.

        Args:
            trajectory: the store.
            numbers: a number for each action.

        Returns:
            The store with the fields that an update reads.
        """

    def end_rollout(self, metrics: Mapping[str, float]) -> None:
        """Moves coefficients by what was measured of a rollout that is used up.

        Args:
            metrics: the rollout's.
        """

    def reset(self) -> None:
        """Forgets what earlier rollouts have moved; trained weights stay."""

    def state_dict(self) -> dict[str, Any]:
        """Gives what a checkpoint keeps beside the weights.

        Returns:
            Plain values.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave.

        Args:
            state: plain values; what is not known is left out.
        """

    def saved_weights(self) -> Mapping[str, Tensor]:
        """Gives the weights that are trained beside the model's.

        Returns:
            Tensors by name; empty where there are none.
        """

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Writes the weights that are trained beside the model's.

        Args:
            folder: holds the model's weights.
            weights: of `saved_weights`, or copies of them.
        """

    def load(self, folder: Path) -> None:
        """Reads them back, in place and bit for bit.

        Args:
            folder: as `save` wrote it.

        Raises:
            ConfigError: the folder does not hold them.
        """


class GroupAdvantages:
    """Compares the rewards of a prompt's completions; a row has one advantage, which needs nothing but rewards."""

    joins_sequences = True

    @property
    def needs(self) -> ScoringNeeds:
        """Nothing beyond what the loss needs."""
        return ScoringNeeds()

    def modules(self) -> dict[str, nn.Module]:
        """Trains nothing beside the model."""
        return {}

    def geometries(self) -> dict[str, ModelGeometry]:
        """Has no network of its own."""
        return {}

    def work(self, work: UpdateWork) -> UpdateWork:
        """Adds nothing."""
        return work

    def score(self, scorer: Scorer, trajectory: Trajectory, later_rows: Sequence[int]) -> Trajectory:  # noqa: ARG002
        """Scores nothing."""
        return trajectory

    def assign(self, trajectory: Trajectory, rewards_B: Tensor) -> tuple[Trajectory, dict[str, float]]:  # noqa: ARG002
        """Leaves each row its group advantage."""
        return trajectory, {}

    def loss_settings(self, settings: LossSettings) -> LossSettings:
        """Leaves the loss as configured."""
        return settings

    def loss_term(self) -> ValueTerms | None:
        """Adds no term."""
        return None

    def placeholder(self, trajectory: Trajectory, numbers: Ragged | None) -> Trajectory:  # noqa: ARG002
        """Leaves the store as it is."""
        return trajectory

    def end_rollout(self, metrics: Mapping[str, float]) -> None:
        """Moves nothing."""

    def reset(self) -> None:
        """Has nothing to forget."""

    def state_dict(self) -> dict[str, Any]:
        """Keeps the scale under which checkpoints of critics are read, at its start."""
        return {"kl_scale": 1.0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has nothing to restore."""

    def saved_weights(self) -> Mapping[str, Tensor]:
        """Has no weights."""
        return {}

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Has no weights."""

    def load(self, folder: Path) -> None:
        """Has no weights."""
