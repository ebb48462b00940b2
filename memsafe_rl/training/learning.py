"""One optimizer step: what its loss is divided by, its gradient under a plan, and the moving of the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memsafe_rl.accounting import is_on_host, weights_of
from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.data.order import merge_orders
from memsafe_rl.errors import MemsafeError
from memsafe_rl.memory.planning.plan_checks import check_packing
from memsafe_rl.memory.planning.policies import MemoryPolicy
from memsafe_rl.memory.runtime.attribution import optimizer_tensors, watch_gradients
from memsafe_rl.memory.runtime.recovery import Recovery
from memsafe_rl.memory.runtime.tracker import MemoryTracker
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.models.language.causal_lm import autocast
from memsafe_rl.ops.merging import merge_weights
from memsafe_rl.parallel.ranks import Ranks
from memsafe_rl.rollout.scoring import update_work
from memsafe_rl.trainers.hf_surface import TrainerSurface
from memsafe_rl.training.controllers import Controllers
from memsafe_rl.training.critic_advantages import CriticAdvantages
from memsafe_rl.training.experience import ExperienceMaker
from memsafe_rl.training.gradient import (
    StepGradient,
    StepTerms,
    accumulate_gradient,
    contributes,
    entropy_masks,
    joined,
)
from memsafe_rl.training.objectives import (
    GradientsAside,
    as_seen_by,
    gradient_metrics,
    learning_rows,
    objective_metrics,
    with_objectives,
)
from memsafe_rl.training.optim.optimizer import Committer, ReferenceMix, build_optimizer, build_scheduler, check_holds
from memsafe_rl.training.samples import Rollout
from memsafe_rl.training.step_metrics import read_step, step_metrics
from memsafe_rl.training.weight_sample import WeightSample, is_due, rounds_to_nearest, sample_weights
from memsafe_rl.types import Denominators, Phase, Trajectory, UpdatePlan, UpdateWork


class LearningTrainer(TrainerSurface):
    """Learns from rows of a rollout: fixes the terms of a step, accumulates its gradient and commits it.

    Which rows, and what comes before and after them, is the business of the loop in `OnPolicyTrainer`.
    """

    args: TrainerConfig
    model: Any
    adapter: ModelAdapter
    memory_policy: MemoryPolicy
    credit: CriticAdvantages | None
    _reference_model: Any
    _recovery: Recovery
    _tracker: MemoryTracker
    _ranks: Ranks
    _maker: ExperienceMaker
    _packable: bool
    _controllers: Controllers
    _committer: Committer | None
    _given_optimizers: tuple[torch.optim.Optimizer | None, Any]

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; None before `train`."""
        return None if self._committer is None else self._committer.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The learning-rate schedule; None before `train`."""
        return None if self._committer is None else self._committer.scheduler

    def park_optimizer(self) -> None:
        """Moves the optimizer's state to host memory until the next commit; nothing where there is none yet."""
        if self._committer is not None:
            self._committer.park()

    @property
    def _committed(self) -> Committer:
        if self._committer is None:
            raise AssertionError("training has not begun")
        return self._committer

    def _trained(self) -> Any:
        """Gives the module of all that is trained."""
        return self.model if self.credit is None else self.credit.trained(self.model)

    def _weights(self) -> list[Tensor]:
        """Gives the weights of the model, and of a reference and a critic beside it."""
        critic = None if self.credit is None else self.credit.critic.beside
        return list(weights_of(*(model for model in (self.model, self._reference_model, critic) if model is not None)))

    def _optimizer_bytes(self) -> tuple[int, int]:
        """Counts the bytes of the optimizer's state, and of it those that wait in host memory."""
        if getattr(self, "_committer", None) is None:
            return 0, 0
        held, device = optimizer_tensors(self._committed.optimizer), self.adapter.device
        parked = [tensor for tensor in held if is_on_host(tensor) or tensor.device != device]
        return sum(tensor.nbytes for tensor in held), sum(tensor.nbytes for tensor in parked)

    def _make_optimizer(self, max_steps: int) -> None:
        """Makes optimizer, schedule and loss scale, and the optimizer's state before anything else wants its bytes."""
        optimizer, scheduler = self._given_optimizers
        if optimizer is not None:
            critic = {} if self.credit is None else {"critic": self.credit.critic.beside}
            check_holds(optimizer, {"model": self.model, **critic})
        optimizer = optimizer or self._recovery.repeat(lambda: build_optimizer(self._trained(), self.args))
        scheduler = scheduler or build_scheduler(optimizer, self.args, max_steps)
        scaler = torch.amp.GradScaler(self.adapter.device.type) if self.args.fp16 else None
        self._committer = Committer(
            self._trained(), optimizer, scheduler, max_grad_norm=self.args.max_grad_norm, scaler=scaler
        )
        self._committer.drop_gradients()
        with self._tracker.phase(Phase.OPTIMIZER):
            self._recovery.repeat(self._committer.make_state)
        self._callbacks.optimizer, self._callbacks.lr_scheduler = optimizer, scheduler

    def _fix_terms(self, experience: Rollout, rows: Sequence[int]) -> StepTerms:
        """Fixes every denominator and threshold over the whole step and all ranks, before anything is cut."""
        trajectory, masks = experience.trajectory, None
        if self.args.top_entropy_quantile < 1.0:
            with self._tracker.phase(Phase.SCORE):
                masks = entropy_masks(
                    self.adapter,
                    trajectory,
                    rows,
                    top_quantile=self.args.top_entropy_quantile,
                    temperature=self.args.temperature,
                    tile=self._tracker.update_plan.logprob_tile,
                    attempt=self._maker.scoring(trajectory, rows),
                    repeat=self._recovery.repeat,
                    ranks=self._ranks,
                )
        counts = self._recovery.repeat(lambda: trajectory.counted_actions)
        tokens = sum(counts[row] for row in rows)
        kept = tokens if masks is None else sum(sum(masks[row].tolist()) for row in rows)
        counted = sum(trajectory.group_of_row[row] >= 0 for row in rows)
        settings = self.args.loss_settings()
        terms = StepTerms(
            settings=settings if self.credit is None else self.credit.steered(settings),
            denominators=Denominators(rows=counted, tokens=tokens, entropy_tokens=kept),
            temperature=self.args.temperature,
            with_entropy=True,
            entropy_coef=self._controllers.entropy_coef(self.args),
            entropy_masks=masks,
            sampler_is_external=experience.external,
            values=None if self.credit is None else self.credit.value_terms(),
        )
        return with_objectives(terms, trajectory, rows, [control.beta for control in self._controllers.betas.values()])

    def _mine(self, trajectory: Trajectory, rows: Sequence[int]) -> list[int]:
        """This rank's rows that can move a weight."""
        useful = [row for row in rows if contributes(trajectory, row, every_row=self.args.every_row_learns)]
        return self._ranks.balance(useful, trajectory.row_lengths(useful))

    def _plan_update(self, trajectory: Trajectory, mine: Sequence[int]) -> None:
        """Asks the memory policy how to cut this rank's rows."""
        work = self._work(trajectory, mine)
        plan = self.memory_policy.before_update(work, self._tracker.state())
        self._tracker.adopt(plan, UpdatePlan)
        check_packing(plan, work)

    def _work(self, trajectory: Trajectory, mine: Sequence[int]) -> UpdateWork:
        work = update_work(self.adapter, trajectory, mine, packable=self._packable)
        work = replace(work, gradients_aside=self.args.gradients_aside)
        return work if self.credit is None else self.credit.planned(work)

    def _gradient(self, experience: Rollout, mine: Sequence[int], terms: StepTerms) -> tuple[Rollout, StepGradient]:
        """Accumulates the step's gradient over micro-batches and ranks; of several objectives, theirs, and merges them.

        Moves no weight. What waits for the last objective's gradient is complete: only an objective whose accumulation
        ran out of memory is begun again.
        """
        if not terms.objectives:
            return self._gradient_of(experience, mine, terms)
        trajectory, waiting = experience.trajectory, GradientsAside(self._committed.parameters)
        try:
            found = []
            for index, part in enumerate(terms.objectives):
                every_row = part.settings.beta != 0 or self.args.gives_entropy_bonus
                rows = self._recovery.repeat(partial(learning_rows, trajectory, index, mine, every_row=every_row))
                experience, gradient = self._gradient_of(experience, rows, part, index)
                found.append(gradient)
                waiting.add(last=index + 1 == len(terms.objectives))
            merge = self._merge(waiting, [part.denominators.tokens > 0 for part in terms.objectives])
        finally:
            waiting.drop()
        weights = [objective.weight for objective in self.args.objective_list]
        return experience, self._recovery.repeat(lambda: joined(found, weights, merge))

    def _gradient_of(
        self, experience: Rollout, mine: Sequence[int], terms: StepTerms, objective: int | None = None
    ) -> tuple[Rollout, StepGradient]:
        """Accumulates a gradient over micro-batches, again from the start if memory runs out, then over ranks."""

        def accumulate(plan: UpdatePlan) -> tuple[Rollout, StepGradient]:
            self._make_room(plan)
            placed = experience.to(plan.trajectory_device, self.adapter.device)
            trajectory = placed.trajectory
            gradient = accumulate_gradient(
                self.adapter,
                trajectory if objective is None else as_seen_by(trajectory, objective),
                mine,
                plan,
                terms,
                autocast=self._autocast,
                scale=self._committed.scaled,
            )
            return placed, gradient

        work = self._work(experience.trajectory, mine)
        to_come = work.gradients_aside - (objective or 0)  # those of earlier objectives are held already
        attempts = self._recovery.attempts(self._tracker.update_plan, replace(work, gradients_aside=to_come))
        self.model.train(not self.args.disable_dropout)
        try:
            with watch_gradients(self._committed.parameters):
                placed, gradient = attempts(accumulate, undo=self._committed.drop_gradients)
        finally:
            self.model.eval()
        self._recovery.repeat(self._committed.complete_gradients)
        self._ranks.sum_gradients(self._committed.parameters)
        return placed, gradient

    def _merge(self, gradients: GradientsAside, there: Sequence[bool]) -> dict[str, float]:
        """Puts the merged gradient in place of the objectives' own, and gives what is known of them.

        An objective that scored no counted action of the step is not there, and leaves the merge to the others.
        """
        config, objectives = self.args, self.args.objective_list
        gram = self._ranks.gather([self._recovery.repeat(lambda: gradients.gram().tolist())])[0]  # the same everywhere

        def coefficients() -> tuple[float, ...]:
            return merge_weights(
                torch.tensor(gram, dtype=torch.float64),
                weights_K=[objective.weight for objective in objectives],
                **config.merge_settings(),
                orders=merge_orders(len(objectives), config.seed, self.state.global_step),
                there=there,
            )

        found = self._recovery.repeat(coefficients)
        gradients.add_up(found)
        scale = self._recovery.repeat(lambda: self._committed.loss_scale)
        return gradient_metrics(objectives, gram, found, scale)

    def _make_room(self, plan: UpdatePlan) -> None:
        """Takes from the device what the plan wants elsewhere while the gradient is accumulated."""
        if plan.park_optimizer:
            self.park_optimizer()

    def _measure(self, gradient: StepGradient, terms: StepTerms) -> dict[str, float]:
        """Measures the gradient's norm and reads the step's numbers; the last thing that may be repeated."""
        norm = self._recovery.repeat(self._committed.measure)
        numbers = self._recovery.repeat(lambda: read_step(gradient, norm))
        self._refuse_broken(numbers.grad_norm)
        metrics = step_metrics(numbers, terms, self._ranks) | gradient.merge
        for objective, part, own in zip(self.args.objective_list, gradient.objectives, terms.objectives, strict=False):
            found = self._recovery.repeat(partial(read_step, part, norm))
            metrics |= objective_metrics(objective, step_metrics(found, own, self._ranks), own)
        if any(own.settings.beta == 0 for own in terms.objectives):
            metrics.pop("kl", None)  # would be that of some rows only
        return metrics

    def _look_at_weights(self) -> WeightSample | None:
        """Notes a sample of half-precision weights where it is to be seen whether the step to come moves them."""
        committer, last = self._committed, self.state.max_steps
        due = is_due(self.state.global_step, self.args.get_warmup_steps(last), last)
        wanted = due and self.args.alarm_rules.lost_updates is not None
        if not wanted or committer.learning_rate == 0 or not rounds_to_nearest(committer.optimizer):
            return None
        return self._recovery.repeat(lambda: sample_weights(committer.parameters))

    def _refuse_broken(self, norm: float) -> None:
        """Refuses a gradient that would leave every weight NaN; in fp16 the loss scale expects such, and skips them."""
        if math.isfinite(norm) or self._committed.scaler is not None:
            return
        raise MemsafeError(
            f"The gradient of step {self.state.global_step + 1} is not finite (norm {norm}); no weight has moved. "
            "Either the policy has diverged (lower learning_rate, look at kl and ratios), or some part of the "
            "network has no finite derivative there, such as sqrt(0) or a torch.where over NaN; "
            "torch.autograd.set_detect_anomaly(True) names it."
        )

    def _commit(self) -> None:
        """Moves the weights. An optimizer whose step allocates works on a copy's word: it is undone, never resumed."""
        committer, repeat = self._committed, self._recovery.repeat
        with self._tracker.phase(Phase.OPTIMIZER):
            repeat(committer.unpark)
            repeat(committer.prepare_commit)
            repeat(committer.commit, undo=committer.roll_back)
            self._sync_reference()

    def _sync_reference(self) -> None:
        """Moves the reference towards the model every so often (Gorbatovski et al. 2024, TR-DPO, eq. 4)."""
        reference = self._reference_model
        due = (self.state.global_step + 1) % self.args.ref_model_sync_steps == 0
        if self.args.sync_ref_model and due and reference is not None:
            self._recovery.repeat(ReferenceMix(reference, self.model, self.args.ref_model_mixup_alpha).finish)

    def _autocast(self) -> torch.autocast:
        """The context of every forward pass; left after each, so that its weight cache never outlives one."""
        return autocast(self.adapter.device, self.args.autocast_dtype)
