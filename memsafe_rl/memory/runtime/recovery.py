"""Runs work again when memory ran out, so that the failed attempt leaves no trace; the one place that catches OOM.

In what order matters. The `except` block is left first, since its traceback holds the frames and their tensors. Then
partial results are undone, random generators put back, and autograd's queue emptied: a backward that raises leaves
queued nodes in the calling thread, which hold the graph until that thread's next backward. Only then is the work run
again: first under the same plan, then under the policy's next one.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from torch.utils._python_dispatch import _disable_current_modes

from memsafe_rl.accounting import host_memory
from memsafe_rl.errors import ConfigError, MemoryBudgetError
from memsafe_rl.memory.planning.policies import MemoryPolicy
from memsafe_rl.memory.runtime.failures import is_out_of_memory, requested_bytes
from memsafe_rl.memory.runtime.stages import RETRIES, Retry, Stage
from memsafe_rl.memory.runtime.tracker import MemoryTracker
from memsafe_rl.memory.runtime.verdict import changes, explain
from memsafe_rl.types import MemoryFailure, RolloutPlan, RolloutWork, UpdatePlan, UpdateWork

logger = logging.getLogger(__name__)

T = TypeVar("T")
Plan = TypeVar("Plan")
Plan_co = TypeVar("Plan_co", covariant=True)
Work = RolloutWork | UpdateWork

SAME_PLAN_TRIES = 2
"""Tries a plan gets: a fresh one, and one after everything that can be freed was freed."""
UNPLANNED_TRIES = 6
"""Tries of work that nothing can make smaller."""
_MOST_PLANS = 60
"""Plans for one piece of work beyond which a policy is going in circles."""


class Attempt(Protocol[Plan_co]):
    """Runs a unit of work under the plan in force until it succeeds, with ever leaner plans."""

    def __call__(self, unit: Callable[[Plan_co], T], undo: Callable[[], None] | None = None) -> T:
        """Runs the unit."""


@dataclass(frozen=True)
class _Failed:
    """What is kept of a failed attempt: words and numbers, nothing that could hold a tensor."""

    message: str
    requested_bytes: int | None


@dataclass(frozen=True)
class _Done(Generic[T]):
    """What a unit returned."""

    value: T


@dataclass(frozen=True)
class _Start:
    """The state a unit starts from."""

    random: RandomState
    live_bytes: int


class Attempts(Generic[Plan]):
    """One piece of work in units that may each be repeated; the plan after a failed unit serves the later ones too."""

    def __init__(self, recovery: Recovery, stage: Stage, plan: Plan, work: Work | None) -> None:
        self.stage = stage
        self.plan = plan
        self.work = work
        self.failed_plans: list[Plan] = []
        self._recovery = recovery

    def __call__(self, unit: Callable[[Plan], T], undo: Callable[[], None] | None = None) -> T:
        """Runs a unit until it succeeds."""
        return self._recovery.run(self, unit, undo or _nothing)


def under(plan: Plan) -> Attempt[Plan]:
    """Gives attempts that run every unit once, under one plan, and catch nothing."""

    def run(unit: Callable[[Plan], T], undo: Callable[[], None] | None = None) -> T:  # noqa: ARG001
        return unit(plan)

    return run


class Recovery:
    """Catches out-of-memory errors, clears away what failed, and runs it again as `stages.RETRIES` allows.

    Args:
        tracker: the run's memory; gets an event for every failure, retry and fallback.
        policy: gives the plan after one that failed.
        may_repeat: asks the other processes whether a stage may run again.
    """

    def __init__(
        self, tracker: MemoryTracker, policy: MemoryPolicy, may_repeat: Callable[[str], bool] = lambda _: True
    ) -> None:
        self.tracker = tracker
        self._policy = policy
        self._may_repeat = may_repeat

    def attempts(self, stage: Stage, plan: Plan, work: Work) -> Attempts[Plan]:
        """Begins a stage that a plan cuts; its units run again under ever leaner plans."""
        return Attempts(self, _allowed(stage, Retry.LEANER_PLAN), plan, work)

    def repeat(
        self,
        stage: Stage,
        function: Callable[..., T],
        *values: Any,
        undo: Callable[[], None] | None = None,
        **named: Any,
    ) -> T:
        """Runs a stage that no plan cuts until it succeeds, a few times at most.

        Args:
            stage: which stage it is.
            function: does the work; changes nothing but what `undo` takes back.
            *values: its arguments.
            undo: takes back what a failed attempt may have left.
            **named: further arguments by name.

        Returns:
            What the function returned.

        Raises:
            MemoryBudgetError: it failed every time.
        """

        def unit(plan: None) -> T:  # noqa: ARG001
            return function(*values, **named)

        return self.run(Attempts(self, _allowed(stage, Retry.SAME_PLAN), None, None), unit, undo or _nothing)

    def once(self, stage: Stage, function: Callable[..., T], *values: Any, **named: Any) -> T:
        """Runs a stage once, whatever the table allows; where it does not fit, the error says who holds what."""
        live, began = self.tracker.meter.live_bytes(), time.perf_counter()

        def unit(plan: None) -> T:  # noqa: ARG001
            return function(*values, **named)

        outcome = _try(unit, None)
        if isinstance(outcome, _Done):
            return outcome.value
        clear_device_cache()
        attempts = Attempts(self, stage, None, None)
        self._record_failure(outcome, live, 1, time.perf_counter() - began)
        raise self._verdict(attempts, outcome)

    def run(self, attempts: Attempts[Plan], unit: Callable[[Plan], T], undo: Callable[[], None]) -> T:
        """Runs a unit until it succeeds: again under the same plan, then under the policy's next ones."""
        start, tries = self._start(), 0
        while True:
            began = time.perf_counter()
            outcome = _try(unit, attempts.plan)
            if isinstance(outcome, _Done):
                return outcome.value
            self._clear(start, undo)
            tries += 1
            self._record_failure(outcome, start.live_bytes, tries, time.perf_counter() - began)
            if not self._may_repeat(attempts.stage):
                raise self._verdict(attempts, outcome)
            if tries < (UNPLANNED_TRIES if attempts.plan is None else SAME_PLAN_TRIES):
                self.tracker.record("retry", phase=self.tracker.phase_now, tries=tries)
                continue
            self._descend(attempts, outcome)
            tries = 0

    def _start(self) -> _Start:
        """Reads the random state, which allocates too."""
        live, tries = self.tracker.meter.live_bytes(), 0
        while True:
            began = time.perf_counter()
            outcome = _try(lambda _: capture_random_state(), None)
            if isinstance(outcome, _Done):
                return _Start(outcome.value, self.tracker.meter.live_bytes())
            clear_device_cache()
            tries += 1
            self._record_failure(outcome, live, tries, time.perf_counter() - began)
            if tries == UNPLANNED_TRIES:
                raise self._verdict(Attempts(self, Stage.PREPARE, None, None), outcome)

    def _clear(self, start: _Start, undo: Callable[[], None]) -> None:
        """Leaves nothing of a failed attempt; called with its exception gone."""
        with host_memory():
            undo()
            set_random_state(start.random)
        flush_autograd()
        clear_device_cache()

    def _record_failure(self, failed: _Failed, live_before: int, tries: int, seconds: float) -> None:
        live = self.tracker.meter.live_bytes()
        self.tracker.record(
            "failure",
            phase=self.tracker.phase_now,
            tries=tries,
            requested_bytes=failed.requested_bytes,
            live_bytes=live,
            pinned_bytes=live - live_before,
            seconds_lost=seconds,
            message=failed.message,
        )
        logger.info("out of memory in phase %s, try %d: %s", self.tracker.phase_now, tries, failed.message)

    def _descend(self, attempts: Attempts[Plan], failed: _Failed) -> None:
        """Puts the policy's next plan in place of one that failed."""
        plan = attempts.plan
        attempts.failed_plans.append(plan)
        failure = self._failure(attempts, failed)
        if not isinstance(plan, (RolloutPlan, UpdatePlan)):
            raise self._verdict(attempts, failed)
        self.tracker.remember(failure)
        leaner: RolloutPlan | UpdatePlan | None = None
        if len(attempts.failed_plans) < _MOST_PLANS:
            leaner = self._policy.after_oom(plan, failure)  # type: ignore[type-var]
        if leaner is None:
            raise self._verdict(attempts, failed)
        self.tracker.adopt(leaner, UpdatePlan if isinstance(plan, UpdatePlan) else RolloutPlan)
        if any(not changes(cast(RolloutPlan | UpdatePlan, failed), leaner) for failed in attempts.failed_plans):
            raise ConfigError(
                f"{type(self._policy).__name__}.after_oom answered a plan that had failed already. Return a leaner "
                "plan, or None to give up."
            )
        self.tracker.record("fallback", phase=self.tracker.phase_now, changes=changes(plan, leaner))
        logger.warning("out of memory twice in phase %s: going on with %s", self.tracker.phase_now, leaner)
        attempts.plan = cast(Plan, leaner)

    def _failure(self, attempts: Attempts[Any], failed: _Failed) -> MemoryFailure:
        return MemoryFailure(
            phase=self.tracker.phase_now,
            requested_bytes=failed.requested_bytes,
            attempt=len(attempts.failed_plans),
            message=failed.message,
            step=self.tracker.step,
            plan=attempts.plan,
            work=attempts.work,
            budget_bytes=self.tracker.budget_bytes,
            live_bytes=self.tracker.meter.live_bytes(),
        )

    def _verdict(self, attempts: Attempts[Any], failed: _Failed) -> MemoryBudgetError:
        failure = self._failure(attempts, failed)
        held = {str(component): size for component, size in self.tracker.held_bytes().items()}
        plans = [plan for plan in attempts.failed_plans if plan is not None]
        return MemoryBudgetError(
            explain(failure, held, plans, limit_bytes=self.tracker.limit_bytes, policy=type(self._policy).__name__),
            failure=failure,
            held_bytes=held,
        )


def _allowed(stage: Stage, retry: Retry) -> Stage:
    """Gives the stage back where the table allows this way of repeating it."""
    if RETRIES[stage] is not retry:
        raise AssertionError(f"stage {stage} is to be repeated so: {RETRIES[stage]}, not so: {retry}")
    return stage


def _try(unit: Callable[[Plan], T], plan: Plan) -> _Done[T] | _Failed:
    """Runs a unit; an out-of-memory error dies here, together with the frames it holds."""
    try:
        return _Done(unit(plan))
    except BaseException as error:
        if not is_out_of_memory(error):
            raise
        return _Failed((str(error).strip().splitlines() or [type(error).__name__])[0], requested_bytes(error))


def flush_autograd() -> None:
    """Runs a backward of one scalar, which empties the calling thread's queue of what a failed one left there."""
    with host_memory(), torch.inference_mode(False), torch.enable_grad():
        scalar = torch.zeros((), requires_grad=True)
        torch.autograd.backward(scalar * 1.0)


def _nothing() -> None:
    """Undoes nothing."""


# ------------------------------------------------------------------ random state


class RandomState(NamedTuple):
    """The state of every random generator a user's code may draw from; holds no tensor, and so no byte of a device."""

    python: tuple[Any, ...]  # of `random`
    numpy: tuple[Any, ...]  # of `numpy.random`
    torch: bytes  # of the CPU
    cuda: tuple[bytes, ...]  # of every CUDA device


def capture_random_state() -> RandomState:
    """Takes the present state; cheap enough for every step."""
    with _disable_current_modes():  # generators have real states, where all other tensors are fake too
        cuda = map(_bytes_of, torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else ()
        own = _bytes_of(torch.get_rng_state())
        return RandomState(random.getstate(), tuple(np.random.get_state()), own, tuple(cuda))


def set_random_state(state: RandomState) -> None:
    """Puts back what `capture_random_state` took."""
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    with _disable_current_modes():
        torch.set_rng_state(_tensor_of(state.torch))
        if state.cuda:
            torch.cuda.set_rng_state_all([_tensor_of(device) for device in state.cuda])


def plain_random_state(state: RandomState) -> dict[str, Any]:
    """Writes a state in plain values, ready for JSON."""
    algorithm, words, position, has_gauss, gauss = state.numpy
    return {
        "python": state.python,
        "numpy": [algorithm, np.asarray(words).tolist(), position, has_gauss, gauss],
        "torch": list(state.torch),
        "cuda": [list(device) for device in state.cuda],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restores what `plain_random_state` wrote."""
    version, words, gauss = state["python"]
    algorithm, numbers, position, has_gauss, cached = state["numpy"]
    set_random_state(
        RandomState(
            (version, tuple(words), gauss),
            (algorithm, np.array(numbers, dtype=np.uint32), position, has_gauss, cached),
            bytes(state["torch"]),
            tuple(map(bytes, state["cuda"])) if torch.cuda.is_available() else (),
        )
    )


def _bytes_of(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor_of(state: bytes) -> torch.Tensor:
    """Lends bytes to a tensor, without an allocation that could fail."""
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
