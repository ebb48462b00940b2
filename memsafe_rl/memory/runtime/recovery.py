"""Runs work again when memory ran out, so that the failed attempt leaves no trace; the one place that catches OOM.

In what order matters. The `except` block is left first, since its traceback holds the frames and their tensors. Then
partial results are undone, random generators put back, and autograd's queues emptied: a backward that raises leaves
queued nodes in the threads it ran in, which hold the graph until the next backward there. Only then is the work run
again: first under the same plan, then under the policy's next one.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from memsafe_rl.accounting import host_memory
from memsafe_rl.errors import ConfigError, MemoryBudgetError, PeerOutOfMemoryError, first_line
from memsafe_rl.memory.planning.policies import MemoryPolicy
from memsafe_rl.memory.runtime.explanation import changes, explain
from memsafe_rl.memory.runtime.failures import is_out_of_memory, requested_bytes
from memsafe_rl.memory.runtime.stages import Retry, Stage
from memsafe_rl.memory.runtime.tracker import MemoryTracker
from memsafe_rl.memory.simulated.device import open_simulations
from memsafe_rl.types import MemoryFailure, RolloutPlan, RolloutWork, UpdatePlan, UpdateWork

logger = logging.getLogger(__name__)

T = TypeVar("T")
Plan = TypeVar("Plan")
Plan_co = TypeVar("Plan_co", covariant=True)
Around = Callable[[Plan], AbstractContextManager[object]]
Work = RolloutWork | UpdateWork

SAME_PLAN_TRIES = 2
"""Tries a plan gets: a fresh one, and one after everything that can be freed was freed."""
UNPLANNED_TRIES = 6
"""Tries of work that nothing can make smaller."""
_MOST_PLANS = 60
"""Plans for one piece of work beyond which a policy is going in circles."""
_SIDE = 16
"""Rows and columns of the product that makes cuBLAS's handles."""

_FLUSHES: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}
"""Per device a scalar, a view of it and the view's gradient, all that a backward needs without allocating."""


class Attempt(Protocol[Plan_co]):
    """Runs a unit of work under the plan in force until it succeeds, with ever leaner plans."""

    def __call__(self, unit: Callable[[Plan_co], T], undo: Callable[[], None] | None = None) -> T:
        """Runs the unit."""


@dataclass(frozen=True)
class _Failed:
    """What is kept of a failed attempt: words and numbers, nothing that could hold a tensor."""

    message: str
    requested_bytes: int | None

    @classmethod
    def of(cls, error: BaseException) -> _Failed:
        """Reads them from an error."""
        return cls(first_line(error), requested_bytes(error))


def under(plan: Plan) -> Attempt[Plan]:
    """Returns attempts that run every unit once, under one plan, and catch nothing."""

    def run(unit: Callable[[Plan], T], undo: Callable[[], None] | None = None) -> T:  # noqa: ARG001
        return unit(plan)

    return run


class Recovery:
    """Catches out-of-memory errors, clears away what failed, and runs it again as its `Stage` allows."""

    def __init__(self, tracker: MemoryTracker, policy: MemoryPolicy) -> None:
        self.tracker = tracker
        self.policy = policy

    def attempts(
        self,
        stage: Stage,
        plan: Plan,
        work: Work,
        around: Around[Plan] = nullcontext,
        leave_round: Callable[[], None] | None = None,
    ) -> Attempts[Plan]:
        """Begins a stage of units run again under leaner plans; ``leave_round`` has other ranks begin again too."""
        _check_allowed(stage, Retry.LEANER_PLAN)
        return Attempts(self, plan, work, around, leave_round)

    def repeat(
        self,
        stage: Stage,
        function: Callable[..., T],
        *values: Any,
        undo: Callable[[], None] | None = None,
        **named: Any,
    ) -> T:
        """Runs a stage that no plan cuts until it succeeds, a few times at most; `undo` takes back a failed attempt."""
        _check_allowed(stage, Retry.SAME_PLAN)

        def unit(plan: None) -> T:  # noqa: ARG001
            return function(*values, **named)

        return Attempts(self, None)(unit, undo)

    def once(self, stage: Stage, function: Callable[..., T], *values: Any, **named: Any) -> T:
        """Runs a stage once; where it does not fit, the error says who holds what."""
        _check_allowed(stage, Retry.NEVER, Retry.SAME_PLAN)
        return self._tried(1, function, *values, **named)

    def start(self) -> tuple[RandomState, int]:
        """Reads the state a unit starts from, random state and bytes; reading the former allocates too."""
        return self._tried(UNPLANNED_TRIES, capture_random_state), self.tracker.meter.live_bytes()

    def _tried(self, most: int, function: Callable[..., T], *values: Any, **named: Any) -> T:
        """Runs a function up to so many times; nothing of a failure outlives its frame but words and numbers."""
        live, tries = self.tracker.meter.live_bytes(), 0
        while True:
            began = time.perf_counter()
            try:
                return function(*values, **named)
            except BaseException as error:
                if not is_out_of_memory(error):
                    raise
                failed = _Failed.of(error)
            empty_caches()
            tries += 1
            self.record_failure(failed, live, tries, began)
            if tries == most:
                raise Attempts(self, None).verdict(failed)

    def record_failure(self, failed: _Failed, live_before: int, tries: int, began: float) -> None:
        """Adds the event of a failed attempt."""
        live = self.tracker.meter.live_bytes()
        self.tracker.record(
            "failure",
            phase=self.tracker.phase_now,
            tries=tries,
            requested_bytes=failed.requested_bytes,
            live_bytes=live,
            pinned_bytes=live - live_before,
            seconds_lost=time.perf_counter() - began,
            message=failed.message,
        )
        logger.info("out of memory in phase %s, try %d: %s", self.tracker.phase_now, tries, failed.message)


@dataclass
class Attempts(Generic[Plan]):
    """One piece of work in units that may each be repeated; the plan after a failed unit serves the later ones too."""

    recovery: Recovery
    plan: Plan  # in force; None where no plan cuts the work
    work: Work | None = None
    around: Around[Plan] = nullcontext
    leave_round: Callable[[], None] | None = None
    failed_plans: list[Plan] = field(default_factory=list)

    def __call__(self, unit: Callable[[Plan], T], undo: Callable[[], None] | None = None) -> T:
        """Runs a unit until it succeeds: again under the same plan, then under the policy's next ones."""
        (state, live), tries, tracker = self.recovery.start(), 0, self.recovery.tracker
        while True:
            began, failed = time.perf_counter(), None
            try:
                with self.around(self.plan):
                    return unit(self.plan)
            except PeerOutOfMemoryError:
                tracker.record("joined_retry", phase=tracker.phase_now)
            except BaseException as error:
                if not is_out_of_memory(error):
                    raise
                failed = _Failed.of(error)
            _clear(state, undo)  # only here, where the error has died together with the frames it held
            if failed is None:
                continue
            if self.leave_round is not None:
                self.leave_round()
                _clear(state, undo)  # of what the rest of the round brought
            tries += 1
            self.recovery.record_failure(failed, live, tries, began)
            if tries < (UNPLANNED_TRIES if self.plan is None else SAME_PLAN_TRIES):
                tracker.record("retry", phase=tracker.phase_now, tries=tries)
                continue
            self._descend(failed)
            tries = 0

    def _descend(self, failed: _Failed) -> None:
        """Puts the policy's next plan in place of one that failed."""
        plan, tracker, policy = self.plan, self.recovery.tracker, self.recovery.policy
        self.failed_plans.append(plan)
        failure = self._failure(failed)
        if not isinstance(plan, (RolloutPlan, UpdatePlan)):
            raise self.verdict(failed)
        tracker.remember(failure)
        leaner: RolloutPlan | UpdatePlan | None = None
        if len(self.failed_plans) < _MOST_PLANS:
            leaner = policy.after_oom(plan, failure)  # type: ignore[type-var]
        if leaner is None:
            raise self.verdict(failed)
        tracker.adopt(leaner, UpdatePlan if isinstance(plan, UpdatePlan) else RolloutPlan)
        if any(not changes(cast(RolloutPlan | UpdatePlan, failed), leaner) for failed in self.failed_plans):
            raise ConfigError(
                f"{type(policy).__name__}.after_oom answered a plan that had failed already. Return a leaner "
                "plan, or None to give up."
            )
        tracker.record("fallback", phase=tracker.phase_now, changes=changes(plan, leaner))
        logger.warning("out of memory twice in phase %s: continuing with %s", tracker.phase_now, leaner)
        self.plan = cast(Plan, leaner)

    def _failure(self, failed: _Failed) -> MemoryFailure:
        tracker = self.recovery.tracker
        return MemoryFailure(
            phase=tracker.phase_now,
            requested_bytes=failed.requested_bytes,
            attempt=len(self.failed_plans),
            message=failed.message,
            step=tracker.step,
            plan=cast(Any, self.plan),
            work=self.work,
            budget_bytes=tracker.budget_bytes,
            live_bytes=tracker.meter.live_bytes(),
        )

    def verdict(self, failed: _Failed) -> MemoryBudgetError:
        """Says why the work is given up, and who holds what."""
        failure, tracker = self._failure(failed), self.recovery.tracker
        held = {str(component): size for component, size in tracker.held_bytes().items()}
        plans = [cast(RolloutPlan | UpdatePlan, plan) for plan in self.failed_plans if plan is not None]
        return MemoryBudgetError(
            explain(failure, held, plans, limit_bytes=tracker.limit_bytes, policy=type(self.recovery.policy).__name__),
            failure=failure,
            held_bytes=held,
        )


def _check_allowed(stage: Stage, *ways: Retry) -> None:
    if stage.retry not in ways:
        raise AssertionError(f"stage {stage} is to be repeated so: {stage.retry}, not so: {ways[-1]}")


def _clear(state: RandomState, undo: Callable[[], None] | None) -> None:
    """Leaves nothing of a failed attempt; called with its exception gone."""
    with host_memory():
        if undo is not None:
            undo()
        set_random_state(state)
    flush_autograd()
    empty_caches()


def empty_caches() -> None:
    """Has allocators give back what they keep for later, those of simulated devices too."""
    clear_device_cache()
    for device in open_simulations():
        device.empty_cache()


def prepare_device(device: torch.device) -> None:
    """Has cuBLAS take its tens of MiB for each thread before weights are loaded, and makes `flush_autograd`'s graph."""
    if device.type == "cpu":
        return
    with torch.inference_mode(False), torch.enable_grad():
        try:  # a product in this thread and, as it is done again and differentiated, in the device's
            square = torch.zeros(_SIDE, _SIDE, device=device, requires_grad=True)
            torch.autograd.grad(checkpoint(_product, square, use_reentrant=False).sum(), square)
        except RuntimeError as error:
            # Later this status may mean a kernel's bad index too; nothing has run yet.
            if "CUBLAS_STATUS_NOT_INITIALIZED" not in str(error):
                raise
            message = f"CUDA out of memory. cuBLAS found no room for its handle on {device}: {error}"
            raise torch.OutOfMemoryError(message) from error
        if device not in _FLUSHES:
            scalar = torch.zeros((), device=device, requires_grad=True)
            _FLUSHES[device] = scalar, scalar.view(()), torch.ones((), device=device)


def _product(square: Tensor) -> Tensor:
    """A biased product, which needs cublasLt's handle too; `exp` keeps it, or a recomputation would stop before it."""
    return torch.addmm(square[0], square, square).exp()


def flush_autograd() -> None:
    """Runs a scalar's backward on host and devices: its nodes are old ones, which run after what a failed one left."""
    with host_memory(), torch.inference_mode(False), torch.enable_grad():
        torch.autograd.backward(torch.zeros((), requires_grad=True) * 1.0)
        for leaf, view, gradient in _FLUSHES.values():
            torch.autograd.grad(view, leaf, gradient, retain_graph=True)


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
    """Restores what `plain_random_state` wrote; of CUDA devices, those that are there both then and now."""
    version, words, gauss = state["python"]
    algorithm, numbers, position, has_gauss, cached = state["numpy"]
    set_random_state(
        RandomState(
            (version, tuple(words), gauss),
            (algorithm, np.array(numbers, dtype=np.uint32), position, has_gauss, cached),
            bytes(state["torch"]),
            tuple(map(bytes, state["cuda"][: torch.cuda.device_count()])),
        )
    )


def _bytes_of(state: Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor_of(state: bytes) -> Tensor:
    """Lends bytes to a tensor, without an allocation that could fail."""
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
