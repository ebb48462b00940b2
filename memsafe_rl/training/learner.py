"""One optimizer step: its denominators, its gradient over micro-batches under a plan, and the commit."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from memsafe_rl.accounting import charge
from memsafe_rl.errors import MemoryBudgetError
from memsafe_rl.memory.planning.policies import check_packing
from memsafe_rl.memory.runtime.stages import Stage
from memsafe_rl.memory.runtime.tracker import watch_gradients
from memsafe_rl.micro_batches import Cursor, rows_of_step
from memsafe_rl.ops.losses import LOSSES
from memsafe_rl.training import failure, refusal
from memsafe_rl.training.algorithms.objectives import Controllers, with_objectives
from memsafe_rl.training.gradient import (
    BalanceTerms,
    StepGradient,
    StepTerms,
    accumulate_gradient,
    as_it_is,
    entropy_masks,
    loss_marks,
    loss_of_scores,
)
from memsafe_rl.training.metrics.step_metrics import (
    WeightSample,
    is_due,
    read_step,
    rounds_to_nearest,
    sample_weights,
    step_metrics,
)
from memsafe_rl.training.optim.half_weights import half_weights_for, half_weights_of, remedies_named
from memsafe_rl.training.optim.optimizer import (
    Committer,
    ReferenceMix,
    build_optimizer,
    build_scheduler,
    check_holds,
    trained_names,
)
from memsafe_rl.training.samples import Rollout
from memsafe_rl.training.scorer import Scorer
from memsafe_rl.training.setup import RunState, TrainingSetup
from memsafe_rl.types import Component, Denominators, Phase, Trajectory, UpdatePlan, UpdateWork
from memsafe_rl.units import format_bytes

logger = logging.getLogger(__name__)

Marks = Mapping[int, Tensor]
"""For each row, 1 where an action of it is marked."""


@contextmanager
def counting_experts(setup: TrainingSetup, found: list[Tensor]) -> Iterator[None]:
    """Notes which experts a slice's tokens choose, once the slice has run to its end."""
    with setup.row_by_row(), setup.adapter.routers.counting() as counts:
        yield
    found.extend(counts)


def _added(parts: Sequence[Tensor], size: int, device: torch.device) -> Tensor:
    nothing = torch.zeros(size, dtype=torch.float64, device=device)
    return torch.stack([nothing, *(part.to(device) for part in parts)]).sum(0)


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step knows before its weights move."""

    rollout: Rollout  # the rollout, where the plan has put it, with the old log-probs that this step gave
    metrics: dict[str, float]  # the step's, over all ranks
    sample: WeightSample | None  # half-precision weights before the step, to see if it moves them; None: not watched


class Learner:
    """Trains on the rows of a rollout, one optimizer step at a time; holds no state of its own."""

    def __init__(self, setup: TrainingSetup) -> None:
        self._setup = setup
        self._config, self._settings = setup.config, setup.settings
        self._repeat = setup.recovery.repeat

    def step(self, state: RunState) -> StepResult:
        """Accumulates the gradient of the next optimizer step; `commit` then moves the weights.

        Args:
            state: where the run stands; its rollout is there.

        Returns:
            What is known of the step; the gradient lies in the parameters.

        Raises:
            MemoryBudgetError: no plan of the policy's fits.
            MemsafeError: the gradient is not finite.
        """
        rollout = state.rollout
        assert rollout is not None, "a step learns from a rollout"
        if self._setup.shards.divided:
            self._refuse_frozen()
        rows = rollout.trajectory.rows_of(self.step_samples(state.cursor))
        scores_first = self._settings.marks_tokens or self._setup.adapter.routers is not None
        with self._setup.gathered() if scores_first else nullcontext():
            # over the whole step, before anything is cut
            terms = self.terms(rollout, rows, state.controllers, step=state.step)
        mine = self.local_rows(rollout.trajectory, rows)
        self.plan(rollout.trajectory, mine)
        with self._setup.memory.phase(Phase.UPDATE):
            rollout, gradient = self.gradient(rollout, mine, terms, step=state.step)
            metrics = self.measure(gradient, terms, step=state.step)
            self._repeat(Stage.MEASURE, self._setup.committed.clip)  # before callbacks see the gradients
            sample = self._sample_weights(state)
            if self._config.num_iterations > 1 and state.cursor.epoch == 0:
                rollout = self._with_old_logprobs(rollout, gradient)
        return StepResult(rollout, metrics | {"plan/micro_batches": float(gradient.micro_batches)}, sample)

    def _refuse_frozen(self) -> None:
        """Refuses weights frozen or unfrozen after the ranks had agreed on whose gradients they add up."""
        agreed, now = self._setup.shards.trained, trained_names(self._setup.trained)
        if now != agreed:
            raise refusal("fsdp/frozen", trained=len(agreed), now=len(now))

    def commit(self, step: int) -> None:
        """Applies step number `step`; a commit that runs out of memory is rolled back and retried."""
        committer = self._setup.committed
        with self._setup.memory.phase(Phase.OPTIMIZER):
            self._repeat(Stage.COMMIT, committer.unpark)  # brings back the optimizer state that a plan sent to the host
            self._repeat(Stage.COMMIT, committer.prepare_commit)
            self._repeat(Stage.COMMIT, committer.commit, undo=committer.roll_back)
            self._sync_reference(step)

    def make_state(self) -> None:
        """Makes the optimizer's state before anything else wants its bytes."""
        committer = self._setup.committed
        with (
            self._setup.memory.phase(Phase.OPTIMIZER),
            remedies_named(committer.half.replaces_any, self._config.master_weights),
        ):
            self._repeat(Stage.PREPARE, committer.make_state)
            _check_commit_fits(self._setup)

    def step_samples(self, cursor: Cursor) -> list[int]:
        """Returns the samples of an optimizer step, over all ranks."""
        known = self._settings
        return self._repeat(Stage.PREPARE, rows_of_step, cursor, known.rollout_rows, known.step_rows, known.order_seed)

    def later_samples(self, cursor: Cursor) -> list[int]:
        """Returns the samples outside the rollout's first optimizer step: when their turn comes, weights have moved."""
        first = set(self.step_samples(cursor))
        return [row for row in range(self._settings.rollout_rows) if row not in first]

    def terms(self, rollout: Rollout, rows: Sequence[int], controllers: Controllers, *, step: int = 0) -> StepTerms:
        """Computes what no cut may change: denominators, coefficients, masks, expert balance, over all ranks."""
        terms = self._loss_terms(rollout, rows, controllers, step)
        return replace(terms, balance=self._balance(rollout.trajectory, rows))

    def _loss_terms(self, rollout: Rollout, rows: Sequence[int], controllers: Controllers, step: int) -> StepTerms:
        trajectory, config = rollout.trajectory, self._config
        masks, marks = self._marks(trajectory, rows, step) if self._settings.marks_tokens else (None, None)
        counts = self._repeat(Stage.PREPARE, attrgetter("counted_actions"), trajectory)
        tokens = sum(counts[row] for row in rows)
        kept = tokens if masks is None else sum(sum(masks[row].tolist()) for row in rows)
        counted, loss = sum(trajectory.group_of_row[row] >= 0 for row in rows), self._settings.loss
        terms = StepTerms(
            settings=replace(loss, beta=loss.beta * self._setup.advantages.kl_scale),
            denominators=Denominators(rows=counted, tokens=tokens, entropy_tokens=kept),
            temperature=config.temperature,
            with_entropy=True,
            entropy_coef=controllers.entropy_coef(config),
            entropy_masks=masks,
            marks=marks,
            sampler_is_external=rollout.external,
            values=self._setup.advantages.loss_term(),
        )
        return with_objectives(terms, trajectory, rows, [control.beta for control in controllers.betas.values()])

    def _balance(self, trajectory: Trajectory, rows: Sequence[int]) -> BalanceTerms | None:
        """Counts how often a step's tokens choose each expert, in a pass without gradient."""
        setup, routers = self._setup, self._setup.adapter.routers
        if routers is None:
            return None
        rows = self._repeat(Stage.PREPARE, setup.contributing, trajectory, rows)
        found: list[Tensor] = []
        with setup.memory.phase(Phase.SCORE):
            Scorer(setup).passed(setup.adapter, trajectory, rows, context=partial(counting_experts, setup, found))
            added = partial(_added, size=routers.experts + 1, device=setup.adapter.device)
            mine = self._repeat(Stage.STORE, added, found)
            return BalanceTerms(routers.losses, self._repeat(Stage.STORE, added, setup.parallel.gather([mine])))

    def _marks(self, trajectory: Trajectory, rows: Sequence[int], step: int) -> tuple[Marks | None, Marks | None]:
        """Returns the top-entropy mask and the loss's own, scored row by row: rounding may not move what is masked."""
        setup, config, repeat = self._setup, self._config, self._repeat
        quantile, loss = config.top_entropy_quantile, self._settings.loss
        with_entropy, masks, marks = quantile < 1.0, None, None
        with setup.memory.phase(Phase.SCORE):
            mine, scored = Scorer(setup).passed(
                setup.adapter, trajectory, rows, context=setup.row_by_row, with_entropy=with_entropy
            )
            found = dict(setup.parallel.gather(list(zip(mine, scored, strict=True))))
            if with_entropy:
                entropies = {row: one.entropies for row, one in found.items() if one.entropies is not None}
                masks = repeat(Stage.STORE, entropy_masks, trajectory, rows, entropies, top_quantile=quantile)
            if LOSSES[loss.loss_type].mark is not None:
                logprobs, key = {row: one.logprobs for row, one in found.items()}, (config.seed, step)
                marks = repeat(Stage.STORE, loss_marks, trajectory, rows, logprobs, loss, key)
        return masks, marks

    def local_rows(self, trajectory: Trajectory, rows: Sequence[int]) -> list[int]:
        """Returns this rank's rows that can move a weight."""
        useful = self._repeat(Stage.PREPARE, self._setup.contributing, trajectory, rows)
        return self._setup.parallel.balance(useful, trajectory.row_lengths(useful))

    def work(self, trajectory: Trajectory, rows: Sequence[int]) -> UpdateWork:
        """Returns the shape of this rank's part of an optimizer step, with a critic's and the gradients set aside."""
        setup = self._setup
        # Under dropout, completions behind one prompt would share its mask.
        work = setup.adapter.work(trajectory, rows, packable=self._config.disable_dropout)
        work = setup.advantages.work(replace(work, gradients_aside=setup.combiner.gradients_aside))
        own = setup.parallel.local_bytes(Component.GRADIENTS, work.geometry.trainable_bytes)
        geometry = replace(work.geometry, trainable_bytes=own)
        return replace(work, geometry=geometry, whole_gradient_bytes=setup.whole_gradient_bytes)

    def plan(self, trajectory: Trajectory, rows: Sequence[int]) -> None:
        """Asks the memory policy how to cut this rank's rows."""
        work = self.work(trajectory, rows)
        plan = self._setup.memory_policy.before_update(work, self._setup.memory_state())
        self._setup.memory.adopt(plan, UpdatePlan)
        check_packing(plan, work)

    def gradient(
        self,
        rollout: Rollout,
        rows: Sequence[int],
        terms: StepTerms,
        *,
        step: int,
        view: Callable[[Trajectory], Trajectory] = as_it_is,
        gradients_aside: int = 0,
    ) -> tuple[Rollout, StepGradient]:
        """Accumulates a gradient over micro-batches, again where memory runs out, and sums it over ranks."""
        setup, committer = self._setup, self._setup.committed
        if terms.objectives:
            return setup.combiner.accumulate(setup, partial(self.gradient, step=step), rollout, rows, terms, step=step)

        def accumulate(plan: UpdatePlan) -> tuple[Rollout, StepGradient]:
            setup.make_room(plan)
            placed = rollout.to(plan.trajectory_device, setup.adapter.device)
            found = accumulate_gradient(
                setup.adapter,
                view(placed.trajectory),
                rows,
                plan,
                terms,
                autocast=setup.autocast,
                scale=committer.scaled,
                shards=setup.shards,
            )
            return placed, found

        work = replace(self.work(rollout.trajectory, rows), gradients_aside=gradients_aside)
        around = partial(setup.under, enter=nullcontext)
        leave = partial(setup.shards.leave_round, self._repeat)
        attempts = setup.recovery.attempts(Stage.ACCUMULATE, setup.memory.update_plan, work, around, leave)
        setup.model.train(not self._config.disable_dropout)
        try:
            with watch_gradients(committer.parameters):
                placed, gradient = attempts(accumulate, undo=committer.drop_gradients)
        finally:
            setup.model.eval()
        self._repeat(Stage.MEASURE, committer.complete_gradients)
        setup.parallel.sum_gradients(committer.half.parts.whole)
        return placed, gradient

    def measure(self, gradient: StepGradient, terms: StepTerms, *, step: int) -> dict[str, float]:
        """Measures the gradient's norm and reads the step's numbers; nothing after it may be repeated."""
        committer = self._setup.committed
        total = self._setup.shards.total_norm(committer.norms, self._repeat)
        norm = self._repeat(Stage.MEASURE, committer.measure, total)
        numbers = self._repeat(Stage.MEASURE, read_step, gradient, norm)
        # in fp16 the loss scale expects such a gradient, and skips it
        if not math.isfinite(numbers.grad_norm) and committer.scaler is None:
            raise failure("gradient", step=step + 1, norm=numbers.grad_norm)
        metrics = step_metrics(numbers, terms, self._setup.parallel) | gradient.merge
        return self._setup.combiner.metrics(self._setup, gradient, terms, norm, metrics)

    def _with_old_logprobs(self, rollout: Rollout, gradient: StepGradient) -> Rollout:
        """Keeps the first update's own log-probs, detached, as the old ones of the later passes."""
        trajectory = rollout.trajectory
        found = dict(self._setup.parallel.gather(self._repeat(Stage.STORE, _fresh_logprobs, trajectory, gradient)))
        if not found:
            return rollout
        has_old = tuple(known or row in found for row, known in enumerate(trajectory.has_old))
        with charge(Component.TRAJECTORY):
            store = self._repeat(Stage.STORE, trajectory.actions.beside, found, trajectory.old_logprobs)
        return replace(rollout, trajectory=replace(trajectory, old_logprobs=store, has_old=has_old))

    def loss_of(self, rollout: Rollout, controllers: Controllers) -> float:
        """Returns the loss of a whole rollout with the weights that drew it, over all ranks; moves nothing."""
        trajectory, rows = rollout.trajectory, list(range(len(rollout.trajectory)))
        terms = self._loss_terms(rollout, rows, controllers, step=0)
        with self._setup.memory.phase(Phase.EVALUATE):
            mine, scored = Scorer(self._setup).passed(self._setup.adapter, trajectory, rows, with_entropy=True)
            share = self._repeat(Stage.MEASURE, loss_of_scores, trajectory, mine, terms, scored)
        return sum(self._setup.parallel.gather([share]))

    def _sample_weights(self, state: RunState) -> WeightSample | None:
        """Copies some half-precision weights when it is time to check that a step moves them."""
        committer, last = self._setup.committed, state.progress.max_steps
        due = self._settings.watches_updates and is_due(state.step, committer.warmup_steps, last)
        if not due or committer.learning_rate == 0 or not rounds_to_nearest(committer.optimizer):
            return None
        return self._repeat(Stage.MEASURE, sample_weights, committer.stepped)

    def _sync_reference(self, step: int) -> None:
        """Moves the reference towards the model every so often (Gorbatovski et al. 2024, TR-DPO, eq. 4)."""
        config, reference = self._config, self._setup.reference_model
        if config.sync_ref_model and (step + 1) % config.ref_model_sync_steps == 0:
            assert reference is not None, "a run without one is refused"
            self._repeat(Stage.COMMIT, ReferenceMix(reference, self._setup.model, config.ref_model_mixup_alpha).finish)


def make_committer(
    setup: TrainingSetup,
    given: tuple[torch.optim.Optimizer | None, Any],
    max_steps: int,
    schedule: Callable[[torch.optim.Optimizer, Any, int], Any] = build_scheduler,
) -> Committer:
    """Makes optimizer, schedule and loss scale."""
    config, repeat = setup.config, setup.recovery.repeat
    optimizer, scheduler = given
    if optimizer is not None:
        refusal.when(setup.shards.divided, "optimizers/divided", kind=type(optimizer).__name__)
        check_holds(optimizer, {"model": setup.model, **setup.beside})
        rounds = config.master_weights is None and rounds_to_nearest(optimizer)
        if rounds and half_weights_of(setup.trained, None, None):
            logger.warning(
                "the %s in optimizers holds weights in half precision, which rounds small updates away, and keeps no "
                "float32 copies: load the model in float32, or name an optimizer by optim for master_weights.",
                type(optimizer).__name__,
            )
    replaced = half_weights_of(setup.trained, config.master_weights, optimizer)
    with remedies_named(bool(replaced), config.master_weights):
        half = repeat(Stage.PREPARE, half_weights_for, setup.trained, config, optimizer)
    optimizer = optimizer or repeat(Stage.PREPARE, build_optimizer, setup.trained, config, half)
    moved = getattr(getattr(scheduler, "scheduler", scheduler), "optimizer", None)  # of accelerate's wrapper
    known = moved in (None, optimizer, getattr(optimizer, "optimizer", None))
    refusal.when(not known, "optimizers/schedule", kind=type(scheduler).__name__)
    scheduler = scheduler or schedule(optimizer, config, max_steps)
    committer = Committer(
        setup.trained,
        optimizer,
        scheduler,
        max_grad_norm=config.max_grad_norm,
        scaler=torch.amp.GradScaler(setup.adapter.device.type) if config.fp16 else None,
        warmup_steps=config.get_warmup_steps(max_steps),
        half=half,
    )
    setup.holdings.optimizer = committer.tensors
    committer.drop_gradients()
    return committer


def _check_commit_fits(setup: TrainingSetup) -> None:
    """Refuses early an optimizer that steps in float32 and has no room at any commit, whatever the plan."""
    committer, parallel = setup.committed, setup.parallel
    if not committer.half.replaces_any:
        return
    held = setup.holdings.by_component()
    held[Component.GRADIENTS] = sum(parameter.nbytes for parameter in committer.parameters)
    held[Component.OPTIMIZER] += committer.half.scratch_bytes
    divided = setup.shards.divided  # what is held is then this rank's part already
    needed = sum(size if divided else parallel.local_bytes(component, size) for component, size in held.items())
    if needed > setup.memory.budget_bytes:
        parts = ", ".join(f"{component} {format_bytes(size)}" for component, size in held.items() if size)
        raise MemoryBudgetError(
            f"A step of the optimizer needs {format_bytes(needed)} ({parts}), and the budget is "
            f"{format_bytes(setup.memory.budget_bytes)}.",
            held_bytes={str(component): size for component, size in held.items()},
        )


def _fresh_logprobs(trajectory: Trajectory, gradient: StepGradient) -> list[tuple[int, Tensor]]:
    return [(row, values.cpu()) for row, values in gradient.logprobs.items() if not trajectory.has_old[row]]
