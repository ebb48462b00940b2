"""Passes without gradient over a stored rollout: reference, values, old log-probs, importance weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from memsafe_rl.accounting import charge, host_memory
from memsafe_rl.memory.runtime.recovery import Attempt
from memsafe_rl.memory.runtime.stages import Stage
from memsafe_rl.models.adapter import Context, ModelAdapter
from memsafe_rl.models.critic import Critic
from memsafe_rl.ops.advantages import expected_gaps
from memsafe_rl.ops.sampler_correction import accepted, importance_weights
from memsafe_rl.rollout.scoring import RowScores, read_sources, score_all, value_all
from memsafe_rl.rollout.server.teacher import taught_logprobs
from memsafe_rl.training.samples import Samples
from memsafe_rl.training.setup import TrainingSetup
from memsafe_rl.types import Component, Phase, Ragged, RolloutPlan, RolloutWork, Trajectory, UpdateWork


class Scorer:
    """Scores stored rollouts in slices that the rollout plan bounds."""

    def __init__(self, setup: TrainingSetup) -> None:
        self._setup = setup
        self._config, self._settings = setup.config, setup.settings
        self.adapter = setup.adapter

    def attempt(
        self, stage: Stage, work: RolloutWork | UpdateWork, context: Context | None = None
    ) -> Attempt[RolloutPlan]:
        """Runs units of this work under the rollout plan in force, each in a context of its own, else in autocast."""
        setup = self._setup
        around = partial(setup.under, enter=context or setup.autocast)
        return setup.recovery.attempts(stage, setup.memory.rollout_plan, work, around)

    def local_rows(self, trajectory: Trajectory, rows: Sequence[int]) -> list[int]:
        """Returns this rank's part of rows that are scored together."""
        return self._setup.parallel.balance(rows, trajectory.action_lengths(rows))

    def scored(
        self,
        adapter: ModelAdapter,
        trajectory: Trajectory,
        rows: Sequence[int],
        known: Ragged | None = None,
        **how: Any,
    ) -> Ragged:
        """Scores rows, shared over the ranks, into a store of all rows, beside what is known of the others."""
        mine, found = self.passed(adapter, trajectory, rows, **how)
        return self.laid_beside(trajectory, mine, [scores.logprobs for scores in found], known)

    def passed(
        self,
        adapter: ModelAdapter,
        trajectory: Trajectory,
        rows: Sequence[int],
        context: Context | None = None,
        temperature_factor: float = 1.0,
        **wanted: Any,
    ) -> tuple[list[int], list[RowScores]]:
        """Passes this rank's part of some rows through a network; returns which they are, and their scores."""
        mine = self.local_rows(trajectory, rows)
        with self._setup.gathered(adapter.model):
            found = score_all(
                adapter,
                trajectory,
                mine,
                temperature=self._config.temperature * temperature_factor,
                attempt=self.attempt(Stage.SCORE, adapter.work(trajectory, mine), context),
                tile=self._setup.memory.update_plan.logprob_tile,
                **wanted,
            )
        return mine, found

    def valued(self, critic: Critic, trajectory: Trajectory, columns: Sequence[int] | None) -> Ragged:
        """Returns a critic's values of all rows, shared over the ranks."""
        mine = self.local_rows(trajectory, list(range(len(trajectory))))
        with critic.running() as network, self._setup.gathered(network.model):
            attempt = self.attempt(Stage.SCORE, network.work(trajectory, mine))
            values = value_all(network, trajectory, mine, critic.head, attempt=attempt, columns=columns)
        return self.laid_beside(trajectory, mine, values)

    def laid_beside(
        self, trajectory: Trajectory, mine: Sequence[int], found: Sequence[Tensor], known: Ragged | None = None
    ) -> Ragged:
        """Joins what every rank found of its rows, beside what is known of the others."""
        pairs = dict(self._setup.parallel.gather(list(zip(mine, found, strict=True))))
        with host_memory(), charge(Component.TRAJECTORY):
            return self._setup.recovery.repeat(Stage.STORE, trajectory.actions.beside, pairs, known)

    @property
    def keeps_sources(self) -> bool:
        """Whether what an encoder reads is kept with the rollout: it is frozen, and would read it more than once."""
        config, known = self._config, self._settings
        again = config.num_iterations > 1 or known.updates_per_epoch > 1 or known.has_reference
        # Dropout would read a prompt anew each time.
        return bool(self.adapter.reads_alike) and again and config.disable_dropout

    def with_sources(self, trajectory: Trajectory) -> Trajectory:
        """Adds what a frozen encoder makes of the prompts, read once for scoring and all updates."""
        if not self.keeps_sources:
            return trajectory
        with self._setup.memory.phase(Phase.SCORE, compared=False), charge(Component.TRAJECTORY):
            # What decides which tokens are trained on must not round differently in another plan.
            context = self._setup.row_by_row if self._settings.marks_tokens else None
            work = self.adapter.work(trajectory, range(len(trajectory)))
            sources = read_sources(self.adapter, trajectory, self.attempt(Stage.SCORE, work, context))
        return replace(trajectory, sources=sources)

    def with_room_for_sources(self, trajectory: Trajectory) -> Trajectory:
        """Lays zeros where `with_sources` would lay what an encoder makes of the prompts."""
        if not self.keeps_sources:
            return trajectory
        dtype = next(self.adapter.model.parameters()).dtype  # their last norm gives it under autocast, too
        with host_memory():
            room = torch.zeros(len(trajectory.conditions.flat), self.adapter.geometry.hidden_size, dtype=dtype)
            return replace(trajectory, sources=Ragged(room, trajectory.conditions.lengths))

    def score_unrewarded(self, trajectory: Trajectory, later_samples: Sequence[int], *, external: bool) -> Trajectory:
        """Adds what no reward changes: reference log-probs, values, and old log-probs that correct another sampler."""
        # A KL in closed form is taken in the update, from the means of both networks.
        referred = self._settings.has_reference and not self.adapter.closed_form_kl
        everyone, likeliest = list(range(len(trajectory))), self._setup.advantages.needs.likeliest
        with self._setup.memory.phase(Phase.SCORE):
            if likeliest:
                trajectory = self._compared(trajectory, likeliest)
            elif referred:
                with self.adapter.reference() as reference:
                    trajectory = replace(trajectory, ref_logprobs=self.scored(reference, trajectory, everyone))
            elif self._config.teacher_model_server_url is not None:
                trajectory = self._taught(trajectory, self._config.teacher_model_server_url)
            trajectory = self._setup.advantages.score(self, trajectory, later_samples)
            if self.corrects(external):
                old = trajectory.old_logprobs or self.scored(self.adapter, trajectory, everyone)
                trajectory = replace(trajectory, old_logprobs=old, has_old=(True,) * len(trajectory))
        return trajectory

    def _taught(self, trajectory: Trajectory, url: str) -> Trajectory:
        """Adds the log-probs of a teacher on a server."""
        mine, prompts = self.local_rows(trajectory, range(len(trajectory))), trajectory.conditions.rows()
        drawn, places = trajectory.actions.rows(), trajectory.condition_of_row
        asked = [(prompts[places[row]].tolist() + drawn[row].tolist(), len(drawn[row])) for row in mine]
        with host_memory():
            found = taught_logprobs(url, self._config.vllm_server_timeout, asked)
        return replace(trajectory, ref_logprobs=self.laid_beside(trajectory, mine, found))

    def _compared(self, trajectory: Trajectory, count: int) -> Trajectory:
        """Adds log-probs of model and reference, and by how much the likeliest tokens' differ on average."""
        everyone = list(range(len(trajectory)))
        mine, own = self.passed(self.adapter, trajectory, everyone, choices=count + 1)
        ids = {row: cast(Tensor, scores.choices)[:, :count] for row, scores in zip(mine, own, strict=True)}
        with self.adapter.reference() as reference:
            _, others = self.passed(reference, trajectory, everyone, choices=ids)
        with host_memory(), charge(Component.TRAJECTORY):
            gaps = self._setup.recovery.repeat(Stage.STORE, _gaps, own, others)
        return replace(
            trajectory,
            old_logprobs=self.laid_beside(trajectory, mine, [scores.logprobs for scores in own]),
            ref_logprobs=self.laid_beside(trajectory, mine, [scores.logprobs for scores in others]),
            expected_gaps=self.laid_beside(trajectory, mine, gaps),
        )

    def score_stale(self, trajectory: Trajectory, samples: Samples) -> Trajectory:
        """Returns importance weights to the rows that older weights began; all others weigh 1."""
        rows = [row for row, stale in enumerate(samples.stale) if stale]
        if not rows:
            return trajectory

        def weighed() -> Ragged:
            found = {row: self._correction(trajectory, row, samples.completions[row].model_logprobs) for row in rows}
            return trajectory.actions.beside(found, Ragged(torch.ones_like(old.flat), trajectory.actions.lengths))

        with self._setup.memory.phase(Phase.SCORE):
            old = self.scored(self.adapter, trajectory, rows, known=trajectory.old_logprobs)
            has_old = tuple(known or stale for known, stale in zip(trajectory.has_old, samples.stale, strict=True))
            trajectory = replace(trajectory, old_logprobs=old, has_old=has_old)
            with host_memory(), charge(Component.TRAJECTORY):
                weights = self._setup.recovery.repeat(Stage.STORE, weighed)
            return replace(trajectory, importance_weights=weights)

    def score_later(self, trajectory: Trajectory, later_samples: Sequence[int], *, external: bool) -> Trajectory:
        """Adds old log-probs of rows that are first trained on after the weights have moved, or importance weights."""
        repeat = self._setup.recovery.repeat
        with self._setup.memory.phase(Phase.SCORE):
            if self.corrects(external):
                with host_memory(), charge(Component.TRAJECTORY):
                    weights = repeat(Stage.STORE, self._corrections, trajectory)
                return replace(trajectory, importance_weights=weights)
            wanting = [row for row in trajectory.rows_of(later_samples) if not trajectory.has_old[row]]
            later = repeat(Stage.STORE, self._setup.contributing, trajectory, wanting)
            if not later:
                return trajectory
            old = self.scored(self.adapter, trajectory, later, known=trajectory.old_logprobs)
            has_old = tuple(known or row in set(later) for row, known in enumerate(trajectory.has_old))
            return replace(trajectory, old_logprobs=old, has_old=has_old)

    def corrects(self, external: bool) -> bool:
        """Whether the loss corrects completions that another sampler drew."""
        config = self._config
        return external and (config.vllm_importance_sampling_correction or config.sampler_rejection is not None)

    def _corrections(self, trajectory: Trajectory) -> Ragged:
        assert trajectory.sampling_logprobs is not None, "a rollout has the log-probs it was drawn with"
        sampled = trajectory.sampling_logprobs.rows()
        return Ragged.from_rows([self._correction(trajectory, row, sampled[row]) for row in range(len(trajectory))])

    def _correction(self, trajectory: Trajectory, row: int, sampling_logprobs_T: Tensor) -> Tensor:
        """Weighs a row's actions by how much likelier they have become since they were drawn, or rejects them."""
        assert trajectory.old_logprobs is not None, "corrections follow scoring"
        config, old_T = self._config, trajectory.old_logprobs.rows()[row]
        compared = old_T, sampling_logprobs_T, trajectory.loss_mask.rows()[row]
        weights_T = torch.ones_like(old_T)
        if config.vllm_importance_sampling_correction:
            low, high = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
            mode = config.vllm_importance_sampling_mode
            weights_T = importance_weights(*compared, mode=mode, clip_min=low, clip_max=high)
        if config.sampler_rejection is not None and config.sampler_rejection_limit is not None:
            limit = config.sampler_rejection_limit
            weights_T = weights_T * accepted(*compared, criterion=config.sampler_rejection, limit=limit)
        return weights_T


def _gaps(own: Sequence[RowScores], others: Sequence[RowScores]) -> list[Tensor]:
    pairs = cast(Any, zip(own, others, strict=True))
    return [expected_gaps(ours.choice_logprobs, theirs.choice_logprobs) for ours, theirs in pairs]
