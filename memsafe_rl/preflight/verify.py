"""Proof on the user's own model: one step under the plain plan, the chosen plan, and with failures.

Nothing is left behind: no weight moves, no reward function is called, and the run is bit for bit the one without it.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from memsafe_rl.accounting import host_memory, local_part
from memsafe_rl.data.prompts import Prompts
from memsafe_rl.errors import MemoryBudgetError, MemsafeError
from memsafe_rl.memory.planning.estimator import rollout_parts, update_parts
from memsafe_rl.memory.planning.policies import MemoryPolicy
from memsafe_rl.memory.runtime.host_memory import to_host
from memsafe_rl.memory.runtime.stages import Stage
from memsafe_rl.memory.simulated.device import active_simulation
from memsafe_rl.micro_batches import measure_slices
from memsafe_rl.models.blocks import blocks_of
from memsafe_rl.preflight.synthetic import lay_down
from memsafe_rl.preflight.worst_case import untouched
from memsafe_rl.training.algorithms.objectives import Controllers
from memsafe_rl.training.collector import Collector
from memsafe_rl.training.gradient import StepTerms
from memsafe_rl.training.learner import Learner
from memsafe_rl.training.loop import TrainingLoop
from memsafe_rl.training.samples import Groups, Rollout
from memsafe_rl.training.scorer import Scorer
from memsafe_rl.training.setup import TrainingSetup
from memsafe_rl.types import (
    Completion,
    MemoryFailure,
    MemoryState,
    Phase,
    RolloutPlan,
    RolloutWork,
    Trajectory,
    UpdatePlan,
    UpdateWork,
)
from memsafe_rl.units import format_bytes

logger = logging.getLogger(__name__)

Plan = TypeVar("Plan", RolloutPlan, UpdatePlan)

TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}
"""Largest difference of two gradients, over their global norm, that the order of sums explains, by the coarsest type.

In float32 splits moved the gradient of small networks by 1e-7 to 6e-7 and that of SmolLM2-135M by up to 1e-6, which
itself lies 4e-6 from the gradient in float64. In bfloat16 they moved it by 2.9e-3 to 6.5e-3, and the distance is 1e-2;
float16 has three more bits. A wrong denominator moves a gradient by a hundredth of its norm or more.
"""
_EIGHT_BIT_TOLERANCE = 5e-2
"""For 8-bit bases, which pick their outlier columns per batch: a split was measured to move the gradient by 1e-2."""
_NO_SUCH_BYTES = 2**60
"""Bytes that no device has: an allocation of them is refused by the device's own allocator."""


@dataclass(frozen=True)
class PlanRun:
    """The probe step under one plan."""

    name: str  # "chosen", "plain", "halved" or "failures"
    rollout_plan: RolloutPlan  # how the rollout was cut in the end
    update_plan: UpdatePlan  # how the update was cut in the end
    tokens: int  # tokens sampled under the chosen plan, which the others are compared with
    tokens_equal: int  # of these, how many this plan sampled too, each row up to its first difference
    rows_differing: int  # rows with a difference
    rows_excused: int  # of these, how many have a certified tie, so that either token was right
    # norm of the difference to the gradient of the plan compared with, over that one's norm; None for the one that the
    # others are compared with
    gradient_difference: float | None
    same_bits: bool  # whether the gradient is the chosen plan's, bit for bit
    micro_batches: int  # of the last try, for each of several objectives
    failures: int  # out-of-memory errors that were recovered from, injected ones included
    peak_bytes: int  # int, most bytes held
    phase_peaks: dict[str, int]  # bytes, by phase
    seconds: float  # wall time


@dataclass(frozen=True)
class Verification:
    """What the proof found."""

    plain: PlanRun  # the step under the plain plan, or under a halved one where the plain one does not fit
    chosen: PlanRun  # the step under the memory policy's plan
    # the same with a failure in the rollout and one in the backward; half of that plan where the other two cut nothing
    failing: PlanRun
    rows: int  # completions sampled
    precision: str  # the coarsest type in which the network computes
    tolerance: float  # largest difference of gradients that passes
    # whether sampled tokens must be equal; False in half precision, where waves of other sizes may draw others
    judges_tokens: bool
    exact_bytes: bool  # whether peaks are the tensors' own bytes, not those of the whole process
    notes: tuple[str, ...]  # what a reader must know of how it was done

    @property
    def arms(self) -> tuple[PlanRun, PlanRun, PlanRun]:
        """The three steps, in the order in which they are told."""
        return self.plain, self.chosen, self.failing

    @property
    def difference(self) -> float:
        """The largest difference of gradients; NaN where one is not finite."""
        found = [arm.gradient_difference or 0.0 for arm in (self.chosen, self.failing)]
        return math.nan if any(math.isnan(value) for value in found) else max(found)

    @property
    def tokens_agree(self) -> bool:
        """Whether every row is equal or excused by a certified tie."""
        return all(arm.rows_differing == arm.rows_excused for arm in self.arms)

    @property
    def passed(self) -> bool:
        """Whether the gradient is equal within the tolerance, and the tokens where they are judged."""
        return self.difference <= self.tolerance and (self.tokens_agree or not self.judges_tokens)

    def sentence(self) -> str:
        """Says the verdict in one plain sentence, with the tolerance."""
        other = f"the {self.plain.name} plan"
        third = "a leaner plan" if self.failing.micro_batches > self.chosen.micro_batches else "the chosen plan"
        bound = f"tolerance {self.tolerance:g} in {self.precision}"
        if math.isnan(self.difference):
            return f"NOT PROVED: a gradient is infinite or not a number, so that nothing can be compared ({bound})."
        if self.difference > self.tolerance:
            worst = max((self.chosen, self.failing), key=lambda arm: arm.gradient_difference or 0.0)
            whose = f"{third}'s gradient after failures" if worst is self.failing else "the chosen plan's gradient"
            return f"NOT EQUAL: {whose} differs from that of {other} by {self.difference:.1e} of its norm ({bound})."
        if self.judges_tokens and not self.tokens_agree:
            wrong = sum(arm.rows_differing - arm.rows_excused for arm in self.arms)
            return (
                f"NOT EQUAL: {wrong} of {self.rows} completions differ between plans without a certified tie, though "
                f"the gradients agree ({bound})."
            )
        tokens = "the same tokens and " if self.tokens_agree else ""
        uncut = all(arm.micro_batches == 1 for arm in self.arms)
        return (
            f"EQUAL: {other}, the chosen plan, and {third} with failures give {tokens}the same gradient within "
            f"{self.difference:.1e} of its norm ({bound})."
            + (" Cuts were not tested: every plan ran the step as one micro-batch." if uncut else "")
        )


def require_proof(loop: TrainingLoop) -> None:
    """Verifies the plan of a run that is about to begin."""
    found = verify_plan(loop)
    loop.setup.memory.record(
        "verify",
        passed=found.passed,
        compared_with=found.plain.name,
        gradient_difference=found.difference,
        tolerance=found.tolerance,
        tokens=found.chosen.tokens,
        tokens_equal=[arm.tokens_equal for arm in found.arms],
        peak_bytes=[arm.peak_bytes for arm in found.arms],
        seconds=sum(arm.seconds for arm in found.arms),
    )
    if not found.passed:
        raise MemsafeError(
            f"verify_plan: {found.sentence()} A loss of your own must treat each row by itself. Otherwise run "
            "`memsafe-rl verify` for the whole comparison and report it, or set verify_plan=False to train anyway."
        )
    # Said as a warning, which is what is shown by default: whoever asks for a proof wants its outcome.
    logger.warning("verify_plan: %s", found.sentence())


def verify_plan(loop: TrainingLoop) -> Verification:
    """Runs one probe step under the chosen plan and under the plain plan, and with failures under one that cuts."""
    if loop.setup.committer is None:
        loop.make_optimizer()
    with untouched(loop.setup):
        return _Comparison(loop.setup, step=loop.state.step).run()


@dataclass(frozen=True)
class _Pinned(MemoryPolicy):
    """Fixed plans to begin with, and the user's policy after a failure; without one, nothing after a failure."""

    rollout: RolloutPlan
    update: UpdatePlan
    then: MemoryPolicy | None

    def before_rollout(self, work: RolloutWork, memory: MemoryState) -> RolloutPlan:  # noqa: ARG002
        return self.rollout

    def before_update(self, work: UpdateWork, memory: MemoryState) -> UpdatePlan:  # noqa: ARG002
        return self.update

    def after_oom(self, plan: Plan, failure: MemoryFailure) -> Plan | None:
        return None if self.then is None else self.then.after_oom(plan, failure)


class _Faults:
    """Counts forward passes of a block in the middle of the network, and fails in chosen ones."""

    def __init__(self, block: nn.Module, device: torch.device, chosen: Mapping[Phase, int]) -> None:
        self.calls = {Phase.ROLLOUT: 0, Phase.UPDATE: 0}
        self._block, self._device, self._chosen = block, device, chosen

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Watches the passes of one phase: a rollout's fails where the block begins, an update's in its backward."""

        def watch(_module: nn.Module, _inputs: Any, output: Any = None) -> None:
            parts = output if isinstance(output, (tuple, list)) else (output,)
            found = next((part for part in parts if isinstance(part, Tensor) and part.requires_grad), None)
            if phase is Phase.UPDATE and found is None:
                return
            self.calls[phase] += 1
            if self.calls[phase] - 1 == self._chosen.get(phase):
                if found is None:
                    self._fail()
                else:
                    found.register_hook(self._fail)  # type: ignore[no-untyped-call]

        begins = phase is Phase.ROLLOUT
        hook = (self._block.register_forward_pre_hook if begins else self._block.register_forward_hook)(watch)
        try:
            yield
        finally:
            hook.remove()

    def _fail(self, *_: Tensor) -> None:
        """Fails as an allocation does: on a simulated device by asking its allocator for what it cannot give."""
        if active_simulation() is not None:
            torch.empty(_NO_SUCH_BYTES, dtype=torch.uint8, device=self._device)
        raise torch.OutOfMemoryError(f"{self._device.type.upper()} out of memory. Injected to verify the plan.")


class _Comparison:
    """The probe step of a setup under several plans; keeps what the plan runs share."""

    def __init__(self, setup: TrainingSetup, *, step: int) -> None:
        self._setup = setup
        self._step = step
        config = setup.config
        rows = -(-config.step_rows // config.world_size)
        count = -(-rows // config.num_generations)
        self._prompts: Prompts = setup.models.reader(setup.source.take(0, count))
        self._group = config.num_generations
        self._rows = count * self._group
        blocks = blocks_of(setup.model) or (setup.model,)
        self._block = blocks[len(blocks) // 2]
        self._completions: list[Completion] = []
        self._trajectory: Trajectory | None = None
        self._terms: StepTerms | None = None
        self._digest = ""
        self._reference: list[Tensor] = []
        self._compared = False
        self._notes: list[str] = []

    def run(self) -> Verification:
        """Runs the arms: the chosen plan first, since what it sampled is what the others learn from."""
        setup = self._setup
        counting = _Faults(self._block, setup.adapter.device, {})
        chosen = self._run("chosen", setup.memory_policy, counting)
        plain = self._plain_arm(chosen)
        chosen = replace(chosen, gradient_difference=plain.gradient_difference)
        plain = replace(plain, gradient_difference=None)
        failing = self._failing_arm(chosen, counting, cuts=max(chosen.micro_batches, plain.micro_batches) > 1)
        self._notes.append("Advantages are synthetic, none of them zero; reward functions were not called.")
        if not setup.config.disable_dropout:
            self._notes.append("Dropout was off; in the run, a micro-batch of another size draws other masks.")
        if setup.draw_rollout is not None:
            self._notes.append("The library's own engine sampled; in the run, rollout_func does.")
        tolerance, precision = _tolerance(setup)
        return Verification(
            plain=plain,
            chosen=chosen,
            failing=failing,
            rows=self._rows,
            precision=precision,
            tolerance=tolerance,
            judges_tokens=precision in ("float32", "float64"),
            exact_bytes=setup.memory.meter.is_exact,
            notes=tuple(self._notes),
        )

    def _plain_arm(self, chosen: PlanRun) -> PlanRun:
        """The step under the plain plan; under half of the chosen one where the plain plan does not fit."""
        rollout, update = self._plain_plans()
        lacking = self._lacking(rollout, update)
        if self._setup.shards.divided:
            lacking = "ranks share the weights, and one that it does not fit would leave the others waiting"
        if lacking is None:
            try:
                return self._run("plain", _Pinned(rollout, update, None))
            except MemoryBudgetError as error:
                asked = getattr(error.failure, "requested_bytes", None)
                phase = getattr(error.failure, "phase", "it")
                wanted = "an allocation" if asked is None else f"an allocation of {format_bytes(asked)}"
                limit = format_bytes(self._setup.memory.limit_bytes)
                lacking = f"{wanted} was refused in phase {phase}, within {limit}"
        # The error is gone now, with all that it held.
        told = "is not tried" if self._setup.shards.divided else "does not fit"
        self._notes.append(f"The plain plan {told}: {lacking}. So the chosen plan is compared with half of it.")
        rollout, update = self._halved_plans(chosen)
        return self._run("halved", _Pinned(rollout, update, self._setup.memory_policy))

    def _failing_arm(self, chosen: PlanRun, counted: _Faults, *, cuts: bool) -> PlanRun:
        """The chosen plan, or half of it where nothing is cut yet, failing in mid-rollout and in the last backward."""
        plans = (chosen.rollout_plan, chosen.update_plan) if cuts else self._halved_plans(chosen)
        doubled = not cuts and self._rows > 1  # half a micro-batch passes a block as often; one row is not halved
        backward = counted.calls[Phase.UPDATE] * (1 + doubled) - 1
        calls = {Phase.ROLLOUT: counted.calls[Phase.ROLLOUT] // 2, Phase.UPDATE: backward}
        faults = _Faults(self._block, self._setup.adapter.device, calls)
        arm = self._run("failures", _Pinned(*plans, self._setup.memory_policy), faults)
        if arm.failures < chosen.failures + 2:
            self._notes.append(f"Only {arm.failures} of 2 failures took place.")
        return arm

    # One arm

    def _run(self, name: str, policy: MemoryPolicy, faults: _Faults | None = None) -> PlanRun:
        """Runs the probe step under a policy, and compares it with the step before."""
        committer = self._setup.committed
        self._setup.recovery.repeat(Stage.PREPARE, committer.unpark)  # every plan run begins alike
        trial, started = self._setup.dry(policy, step=self._step), time.perf_counter()
        learner = Learner(trial)
        watch: Callable[[Phase], Any] = nullcontext if faults is None else faults.during
        with trial.gathered(), watch(Phase.ROLLOUT):
            completions = self._sample(trial)
        rollout, rows = self._rollout(trial, completions)
        terms = self._terms = self._terms or learner.terms(rollout, rows, Controllers.at_start(trial.config))
        learner.plan(rollout.trajectory, rows)
        with trial.memory.phase(Phase.UPDATE), watch(Phase.UPDATE):
            _, gradient = learner.gradient(rollout, rows, terms, step=self._step)
        seconds, tracker = time.perf_counter() - started, trial.memory
        difference, digest = self._compare()
        self._digest = self._digest or digest
        equal, differing, excused = self._equal_tokens(completions)
        committer.drop_gradients()
        return PlanRun(
            name=name,
            rollout_plan=tracker.rollout_plan,
            update_plan=tracker.update_plan,
            tokens=sum(len(completion.ids) for completion in self._completions),
            tokens_equal=equal,
            rows_differing=differing,
            rows_excused=excused,
            gradient_difference=difference,
            same_bits=digest == self._digest,
            micro_batches=max(part.micro_batches for part in gradient.objectives or (gradient,)),
            failures=sum(event["event"] == "failure" for event in tracker.events),
            peak_bytes=max(tracker.phase_peaks.values()),
            phase_peaks={str(phase): peak for phase, peak in tracker.phase_peaks.items()},
            seconds=seconds,
        )

    def _sample(self, trial: TrainingSetup) -> list[Completion]:
        """Samples the probe's completions with the random streams of the run's first rollout."""
        collector, groups = Collector(trial), Groups(self._prompts, self._group, trial.config.seed, rollout=0)
        collector.plan(self._prompts)
        with trial.memory.phase(Phase.ROLLOUT):
            return collector.generate(groups, range(self._rows), step=self._step)

    def _rollout(self, trial: TrainingSetup, completions: list[Completion]) -> tuple[Rollout, range]:
        """Scores the completions of the first plan run under this one's plan."""
        if not self._completions:
            self._completions = completions
            with host_memory():
                ids = [completion.ids for completion in completions]
                self._trajectory = lay_down(self._prompts.ids, ids, self._group, len(trial.config.objective_list))
        rows, scorer = range(self._rows), Scorer(trial)
        later = rows if trial.config.updates_per_epoch > 1 else ()
        trajectory = scorer.score_unrewarded(self._laid_down(), later, external=False)
        trajectory, _ = trial.advantages.assign(trajectory, trajectory.advantages, self._group)
        trajectory = scorer.score_later(trajectory, later, external=False)
        return Rollout(trajectory, consumed=0, external=False), rows

    def _compare(self) -> tuple[float | None, str]:
        """Compares the gradient with the previous run's, parameter by parameter, and keeps it on the host."""
        setup, fingerprint, first = self._setup, hashlib.blake2b(digest_size=16), not self._reference
        distance = old_norm = new_norm = 0.0
        with host_memory(), torch.no_grad():
            for place, parameter in enumerate(setup.committed.parameters):
                assert parameter.grad is not None, "the gradients are complete"
                new = to_host(local_part(parameter.grad))
                fingerprint.update(new.contiguous().flatten().view(torch.uint8).numpy().data)
                if first:
                    self._reference.append(new)
                    continue
                old, self._reference[place] = self._reference[place], new
                distance += float((new.double() - old.double()).square().sum())
                old_norm += float(old.double().square().sum())
                new_norm += float(new.double().square().sum())
        # The chosen plan's gradient comes first, the plain one's second, and the one with failures third.
        found = [(distance, old_norm if self._compared else new_norm, fingerprint.hexdigest())]
        parts = setup.parallel.gather(found) if setup.shards.divided else found  # else each rank verifies by itself
        distances, norms, digests = zip(*parts, strict=True)
        self._compared = not first
        return (None if first else _ratio(sum(distances), sum(norms))), " ".join(digests)

    def _equal_tokens(self, completions: Sequence[Completion]) -> tuple[int, int, int]:
        """Counts tokens equal to the first arm's, rows that differ, and those among them with a certified tie."""
        equal = differing = excused = 0
        for mine, theirs in zip(completions, self._completions, strict=True):
            both = zip(mine.ids.tolist(), theirs.ids.tolist(), strict=False)
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
            equal += common
            if common < max(len(mine.ids), len(theirs.ids)):
                differing += 1
                excused += bool(mine.ties or theirs.ties)
        return equal, differing, excused

    # Plans

    def _plain_plans(self) -> tuple[RolloutPlan, UpdatePlan]:
        rows, trajectory = self._rows, self._laid_down()
        every = rows * max(max(trajectory.row_lengths(range(rows))), max(len(ids) for ids in self._prompts.ids))
        return (
            RolloutPlan(rows_in_flight=rows, prefill_tokens=every, score_tokens=every, reward_rows=rows),
            UpdatePlan(micro_batch_tokens=every, logprob_tile=len(trajectory.actions.flat), trajectory_device="device"),
        )

    def _halved_plans(self, chosen: PlanRun) -> tuple[RolloutPlan, UpdatePlan]:
        """Half the chosen plan; where a micro-batch is a single row already, half its tile of logits."""
        trajectory, rollout, update = self._laid_down(), chosen.rollout_plan, chosen.update_plan
        work = self._setup.adapter.work(trajectory, range(self._rows), packable=update.pack_prompts)
        largest = measure_slices(work, update.micro_batch_tokens, packed=update.pack_prompts).tokens
        tokens = max(max(work.row_tokens), largest // 2)
        tile = update.logprob_tile if chosen.micro_batches < self._rows else max(1, update.logprob_tile // 2)
        rows = max(1, min(rollout.rows_in_flight, self._rows) // 2)
        return (
            replace(rollout, rows_in_flight=rows, score_tokens=max(1, rollout.score_tokens // 2), predicted_bytes={}),
            replace(update, micro_batch_tokens=tokens, logprob_tile=tile, predicted_bytes={}),
        )

    def _lacking(self, rollout: RolloutPlan, update: UpdatePlan) -> str | None:
        """Says why a plan must not even be tried: on a machine that kills rather than refuses, it must fit for sure."""
        setup = self._setup
        if setup.memory.meter.is_exact:
            return None
        trajectory = self._laid_down()
        sampling = Collector(setup).work(self._prompts, self._group)
        learning = Learner(setup).work(trajectory, range(self._rows))
        needed = max(sum(rollout_parts(sampling, rollout).values()), sum(update_parts(learning, update).values()))
        room = setup.memory.budget_bytes - setup.memory.meter.live_bytes()
        if needed <= room:
            return None
        return f"it would need about {format_bytes(needed)} of the {format_bytes(max(0, room))} that are left"

    def _laid_down(self) -> Trajectory:
        assert self._trajectory is not None, "the chosen plan runs first"
        return self._trajectory


def _tolerance(setup: TrainingSetup) -> tuple[float, str]:
    """Returns the largest difference that passes, and the coarsest type in which the network computes."""
    kinds = {parameter.dtype for parameter in setup.model.parameters() if parameter.is_floating_point()}
    known = [kind for kind in TOLERANCES if kind in kinds or kind is setup.config.autocast_dtype]
    coarsest = known[-1] if known else torch.float32
    name = str(coarsest).removeprefix("torch.")
    if getattr(setup.model, "is_loaded_in_8bit", False):
        return max(_EIGHT_BIT_TOLERANCE, TOLERANCES[coarsest]), f"8-bit weights and {name}"
    return TOLERANCES[coarsest], name


def _ratio(squared_distance: float, squared_norm: float) -> float:
    """Returns the relative difference; infinite where the gradient it is relative to is zero and the other is not."""
    if squared_norm == 0.0:
        return 0.0 if squared_distance == 0.0 else math.inf
    return math.sqrt(squared_distance / squared_norm)
