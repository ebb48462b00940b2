"""What is scored of a rollout before it is learnt from: reference, values of a critic, old log-probs, corrections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from memsafe_rl.accounting import charge, host_memory
from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.memory.runtime.recovery import Attempt, Recovery
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.ops.importance import importance_weights
from memsafe_rl.parallel.ranks import Ranks
from memsafe_rl.rollout.scoring import RowScores, read_sources, score_all, update_work, value_all
from memsafe_rl.training.critic_advantages import CriticAdvantages
from memsafe_rl.training.gradient import contributes
from memsafe_rl.training.samples import Samples
from memsafe_rl.types import Component, Phase, Ragged, RolloutPlan, RolloutWork, Trajectory, UpdateWork, ValueHead

Made = TypeVar("Made")


class RolloutScorer:
    """Scores stored rollouts without gradient, in slices that the rollout plan bounds."""

    def __init__(
        self,
        config: TrainerConfig,
        adapter: ModelAdapter,
        recovery: Recovery,
        ranks: Ranks,
        autocast: Callable[[], AbstractContextManager[object]],
        owner: Any,
        credit: CriticAdvantages | None,
    ) -> None:
        self._config = config
        self._adapter = adapter
        self._recovery = recovery
        self._tracker = recovery.tracker
        self._ranks = ranks
        self._autocast = autocast
        self._owner = owner
        self._credit = credit

    def _attempt(self, work: RolloutWork | UpdateWork) -> Attempt[RolloutPlan]:
        return self._attempt_in(work, self._autocast)

    def _attempt_in(
        self, work: RolloutWork | UpdateWork, context: Callable[[], AbstractContextManager[object]]
    ) -> Attempt[RolloutPlan]:
        """Runs units of this work under the rollout plan in force, each in a context of its own."""
        attempts = self._recovery.attempts(self._tracker.rollout_plan, work)

        def run(unit: Callable[[RolloutPlan], Made], undo: Callable[[], None] | None = None) -> Made:
            def prepared(plan: RolloutPlan) -> Made:
                if plan.park_optimizer:
                    self._owner.park_optimizer()
                with context():
                    return unit(plan)

            return attempts(prepared, undo)

        return run

    def scoring(self, trajectory: Trajectory, rows: Sequence[int]) -> Attempt[RolloutPlan]:
        """Begins a scoring pass without gradient."""
        return self._attempt(update_work(self._adapter, trajectory, rows))

    @property
    def keeps_sources(self) -> bool:
        """Whether what an encoder reads is kept with the rollout: it is frozen, and would read it more than once."""
        config = self._config
        again = config.num_iterations > 1 or config.updates_per_epoch > 1 or config.has_reference
        # Dropout would read a prompt anew each time.
        return self._adapter.reads_alike and again and config.disable_dropout

    def _with_sources(self, trajectory: Trajectory) -> Trajectory:
        """Adds what a frozen encoder makes of the prompts, read once for scoring and all updates."""
        if not self.keeps_sources:
            return trajectory
        with self._tracker.phase(Phase.SCORE, compared=False), charge(Component.TRAJECTORY):
            sources = read_sources(self._adapter, trajectory, self.scoring(trajectory, range(len(trajectory))))
        return replace(trajectory, sources=sources)

    def _score_everyone(self, trajectory: Trajectory, later_rows: Sequence[int], *, external: bool) -> Trajectory:
        """Adds what no reward changes: reference log-probs, values, and old log-probs that correct another sampler."""
        # A denoiser's KL is taken in the update, in closed form, from the means of both networks.
        referred = self._config.has_reference and not self._adapter.closed_form_kl
        corrected = self._corrected(external)
        if not (corrected or referred or self._credit is not None):
            return trajectory
        everyone = list(range(len(trajectory)))
        with self._tracker.phase(Phase.SCORE):
            if referred:
                with self._adapter.reference() as reference:
                    trajectory = replace(trajectory, ref_logprobs=self._scored(reference, trajectory, everyone))
            if self._credit is not None:
                trajectory = self._valued(trajectory, later_rows, self._credit)
            if corrected:
                old = trajectory.old_logprobs or self._scored(self._adapter, trajectory, everyone)
                trajectory = replace(trajectory, old_logprobs=old, has_old=(True,) * len(trajectory))
        return trajectory

    def _valued(self, trajectory: Trajectory, later_rows: Sequence[int], credit: CriticAdvantages) -> Trajectory:
        """Adds a critic's values, and where they are needed log-probs, from the same pass if the critic shares it.

        Rows of the first update have their old log-probs from that update even so: then its ratios are exactly 1.
        """
        critic, everyone = credit.critic, list(range(len(trajectory)))
        if critic.shares_forward:
            stores = self._scored_with_values(trajectory, everyone, critic.head)
            trajectory = replace(trajectory, old_logprobs=stores[0], values=stores[1])
        else:
            if credit.wants_logprobs and credit.has_closed_kl:
                trajectory = self._with_kl(trajectory, critic.judged_columns)
            elif credit.wants_logprobs:
                old = self._scored(self._adapter, trajectory, everyone)
                trajectory = replace(trajectory, old_logprobs=old)
            with critic.running() as network:
                mine = self._ranks.balance(everyone, trajectory.action_lengths(everyone))
                attempt = self._attempt(update_work(network, trajectory, mine))
                judged = critic.judged_columns
                values = value_all(network, trajectory, mine, critic.head, attempt=attempt, columns=judged)
            trajectory = replace(trajectory, values=self._laid_beside(trajectory, mine, values))
        later = set(later_rows) if credit.wants_logprobs else set()
        return replace(trajectory, has_old=tuple(row in later for row in everyone))

    def _with_kl(self, trajectory: Trajectory, columns: Sequence[int] | None) -> Trajectory:
        """Adds the KL to the reference in closed form of some columns, and the log-probs that come with it."""
        mine, scored = self._passed(self._adapter, trajectory, range(len(trajectory)), with_kl=True, columns=columns)
        old = self._laid_beside(trajectory, mine, [scores.logprobs for scores in scored])
        kl = self._laid_beside(trajectory, mine, [scores.kl for scores in scored if scores.kl is not None])
        return replace(trajectory, old_logprobs=old, kl=kl)

    def _scored_with_values(
        self, trajectory: Trajectory, rows: Sequence[int], value_head: ValueHead
    ) -> tuple[Ragged, Ragged]:
        """Scores rows, shared over the ranks, into stores of log-probs and of values."""
        mine, scored = self._passed(self._adapter, trajectory, rows, value_head=value_head)
        logprobs = self._laid_beside(trajectory, mine, [scores.logprobs for scores in scored])
        values = [scores.values for scores in scored if scores.values is not None]
        return logprobs, self._laid_beside(trajectory, mine, values)

    def _scored(
        self, adapter: ModelAdapter, trajectory: Trajectory, rows: Sequence[int], known: Ragged | None = None
    ) -> Ragged:
        """Scores rows, shared over the ranks, into a store of all rows, beside what is known of the others."""
        mine, scored = self._passed(adapter, trajectory, rows)
        return self._laid_beside(trajectory, mine, [scores.logprobs for scores in scored], known)

    def _passed(
        self, adapter: ModelAdapter, trajectory: Trajectory, rows: Sequence[int], **wanted: Any
    ) -> tuple[list[int], list[RowScores]]:
        """Passes this rank's part of some rows through a network; gives which they are, and their scores."""
        mine = self._ranks.balance(rows, trajectory.action_lengths(rows))
        scored = score_all(
            adapter,
            trajectory,
            mine,
            temperature=self._config.temperature,
            attempt=self.scoring(trajectory, mine),
            tile=self._tracker.update_plan.logprob_tile,
            **wanted,
        )
        return mine, scored

    def _laid_beside(
        self, trajectory: Trajectory, mine: Sequence[int], found: Sequence[Tensor], known: Ragged | None = None
    ) -> Ragged:
        """Joins what every rank found of its rows, beside what is known of the others."""
        pairs = dict(self._ranks.gather(list(zip(mine, found, strict=True))))
        with host_memory(), charge(Component.TRAJECTORY):
            return self._recovery.repeat(lambda: trajectory.actions.beside(pairs, known))

    def _score_stale(self, trajectory: Trajectory, samples: Samples) -> Trajectory:
        """Corrects rows that older weights have begun by what the present ones think of them; the others weigh 1."""
        rows = [row for row, stale in enumerate(samples.stale) if stale]
        if not rows:
            return trajectory

        def weighed() -> Ragged:
            found = {row: self._correction(trajectory, row, samples.completions[row].model_logprobs) for row in rows}
            ones = Ragged(torch.ones_like(old.flat), trajectory.actions.lengths)
            return trajectory.actions.beside(found, ones)

        with self._tracker.phase(Phase.SCORE):
            old = self._scored(self._adapter, trajectory, rows, known=trajectory.old_logprobs)
            has_old = tuple(known or stale for known, stale in zip(trajectory.has_old, samples.stale, strict=True))
            trajectory = replace(trajectory, old_logprobs=old, has_old=has_old)
            with host_memory(), charge(Component.TRAJECTORY):
                weights = self._recovery.repeat(weighed)
            return replace(trajectory, importance_weights=weights)

    def _score_later(self, trajectory: Trajectory, later_rows: Sequence[int], *, external: bool) -> Trajectory:
        """Adds old log-probs where the first update will come too late to give them, and weights they correct by."""
        with self._tracker.phase(Phase.SCORE):
            if self._corrected(external):
                with host_memory(), charge(Component.TRAJECTORY):
                    weights = self._recovery.repeat(lambda: self._corrections(trajectory))
                return replace(trajectory, importance_weights=weights)
            wanting = [row for row in trajectory.rows_of(later_rows) if not trajectory.has_old[row]]
            later = self._recovery.repeat(lambda: [row for row in wanting if self._learns(trajectory, row)])
            if not later:
                return trajectory
            old = self._scored(self._adapter, trajectory, later, known=trajectory.old_logprobs)
            has_old = tuple(known or row in set(later) for row, known in enumerate(trajectory.has_old))
            return replace(trajectory, old_logprobs=old, has_old=has_old)

    def _corrected(self, external: bool) -> bool:
        return external and self._config.vllm_importance_sampling_correction

    def _learns(self, trajectory: Trajectory, row: int) -> bool:
        return contributes(trajectory, row, every_row=self._config.every_row_learns)

    def _corrections(self, trajectory: Trajectory) -> Ragged:
        if trajectory.sampling_logprobs is None:
            raise AssertionError("a rollout has the log-probs it was drawn with")
        sampled = trajectory.sampling_logprobs.rows()
        return Ragged.from_rows([self._correction(trajectory, row, sampled[row]) for row in range(len(trajectory))])

    def _correction(self, trajectory: Trajectory, row: int, sampling_logprobs_T: Tensor) -> Tensor:
        """Weighs a row's actions by how much likelier they have become since they were drawn."""
        if trajectory.old_logprobs is None:
            raise AssertionError("corrections follow scoring")
        return importance_weights(
            trajectory.old_logprobs.rows()[row],
            sampling_logprobs_T,
            trajectory.loss_mask.rows()[row],
            mode=self._config.vllm_importance_sampling_mode,
            clip_min=self._config.vllm_importance_sampling_clip_min,
            clip_max=self._config.vllm_importance_sampling_clip_max,
        )
