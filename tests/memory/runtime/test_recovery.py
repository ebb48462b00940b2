"""Recovery by itself: units that fail by hand, and genuine refusals of the exact allocator."""

import gc
import math
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from memsafe_rl.accounting import charge
from memsafe_rl.errors import ConfigError, MemoryBudgetError
from memsafe_rl.memory.planning.policies import FixedPolicy, MemoryPolicy
from memsafe_rl.memory.runtime.explanation import explain
from memsafe_rl.memory.runtime.meters import SimulatedMeter
from memsafe_rl.memory.runtime.recovery import SAME_PLAN_TRIES, UNPLANNED_TRIES, Recovery, under
from memsafe_rl.memory.runtime.stages import Stage
from memsafe_rl.memory.runtime.tracker import MemoryTracker
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.types import (
    Component,
    MemoryFailure,
    Phase,
    RolloutPlan,
    RolloutWork,
    UnitBytes,
    UpdatePlan,
    UpdateWork,
)
from memsafe_rl.units import format_bytes
from tests.memory.planning.test_policies import GEOMETRY

WORK = UpdateWork(row_tokens=(9, 7), action_tokens=(4, 4), geometry=GEOMETRY)
PLAN = UpdatePlan(micro_batch_tokens=8)
MIB = 2**20


class Halving(MemoryPolicy):
    """Halves the micro-batch down to one token, and notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, MemoryFailure]] = []

    def before_rollout(self, work: RolloutWork, memory: Any) -> RolloutPlan:
        return RolloutPlan()

    def before_update(self, work: UpdateWork, memory: Any) -> UpdatePlan:
        return PLAN

    def after_oom(self, plan: Any, failure: MemoryFailure) -> Any:
        self.asked.append((plan, failure))
        if plan.micro_batch_tokens == 1:
            return None
        return replace(plan, micro_batch_tokens=plan.micro_batch_tokens // 2)


@dataclass
class Device:
    """A simulated device with a recovery on it."""

    memory: SimulatedMemory
    tracker: MemoryTracker
    policy: Any
    recovery: Recovery

    def attempts(self, plan: Any = PLAN, work: Any = WORK) -> Any:
        return self.recovery.attempts(Stage.ACCUMULATE, plan, work)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.tracker.events if event["event"] == kind]


@pytest.fixture
def device() -> Iterator[Device]:
    with SimulatedMemory(exact=True) as memory:
        tracker = MemoryTracker("cpu", SimulatedMeter(memory), 10**9)
        policy = Halving()
        yield Device(memory, tracker, policy, Recovery(tracker, policy))


class Failing:
    """A unit that fails a number of times, and notes the plans it was run under."""

    def __init__(self, times: int, message: str = "CUDA out of memory. Tried to allocate 2.00 GiB.") -> None:
        self.times, self.message = times, message
        self.plans: list[Any] = []

    def __call__(self, plan: Any = None) -> str:
        self.plans.append(plan)
        if len(self.plans) <= self.times:
            raise torch.OutOfMemoryError(self.message)
        return "done"

    @property
    def sizes(self) -> list[int]:
        return [plan.micro_batch_tokens for plan in self.plans]


# ------------------------------------------------------------------ plans


def test_work_that_fits_runs_once_and_leaves_no_event(device: Device) -> None:
    unit, undone = Failing(0), []
    assert device.attempts()(unit, undo=lambda: undone.append(1)) == "done"
    assert (unit.sizes, undone, device.tracker.events, device.policy.asked) == ([8], [], [], [])


def test_the_first_retry_has_the_same_plan(device: Device) -> None:
    unit = Failing(1)
    assert device.attempts()(unit) == "done"
    assert unit.sizes == [8, 8]
    assert device.policy.asked == []
    assert device.tracker.state().failures == ()


def test_the_policy_is_asked_once_for_every_failure_that_outlives_the_retry(device: Device) -> None:
    unit = Failing(5)
    assert device.attempts()(unit) == "done"
    assert unit.sizes == [8, 8, 4, 4, 2, 2]
    assert [plan.micro_batch_tokens for plan, _ in device.policy.asked] == [8, 4]
    assert SAME_PLAN_TRIES == 2


def test_the_policy_is_told_what_failed(device: Device) -> None:
    device.tracker.step = 7
    kept = torch.zeros(1000)
    attempts = device.attempts()
    with device.tracker.phase(Phase.UPDATE):
        attempts(Failing(4))
    first, second = (failure for _, failure in device.policy.asked)
    assert first.phase is Phase.UPDATE
    assert first.requested_bytes == 2 * 2**30
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.message.startswith("CUDA out of memory")
    assert first.step == 7
    assert (first.plan, second.plan) == (PLAN, replace(PLAN, micro_batch_tokens=4))
    assert first.work is WORK
    assert first.budget_bytes == 10**9
    assert kept.nbytes <= first.live_bytes < kept.nbytes + 10_000
    remembered = device.tracker.state().failures
    assert [failure.attempt for failure in remembered] == [1, 2]
    assert all(failure.work is None for failure in remembered)  # a work holds one number a row


def test_the_plan_that_went_through_serves_the_units_that_follow(device: Device) -> None:
    attempts, later = device.attempts(), Failing(1)
    attempts(Failing(2))
    attempts(later)
    assert later.sizes == [4, 4]
    assert attempts.plan.micro_batch_tokens == 4
    assert device.tracker.update_plan.micro_batch_tokens == 4
    fresh = Failing(0)
    device.attempts()(fresh)
    assert fresh.sizes == [8]


def test_a_rollout_plan_shrinks_alike(device: Device) -> None:
    class FewerRows(FixedPolicy):
        def after_oom(self, plan: Any, failure: Any) -> Any:
            return replace(plan, rows_in_flight=plan.rows_in_flight - 1)

    recovery = Recovery(device.tracker, FewerRows())
    work = RolloutWork(prompt_tokens=(3,), group_size=4, max_new_tokens=5, geometry=GEOMETRY)
    unit = Failing(2)
    recovery.attempts(Stage.ACCUMULATE, RolloutPlan(rows_in_flight=4), work)(unit)
    assert [plan.rows_in_flight for plan in unit.plans] == [4, 4, 3]
    assert device.tracker.rollout_plan.rows_in_flight == 3


def test_a_policy_that_gives_up_ends_in_an_error_that_says_everything(device: Device) -> None:
    with charge(Component.WEIGHTS):
        weights = torch.zeros(3 * MIB // 4)
    with charge(Component.OPTIMIZER):
        moments = torch.zeros(6 * MIB // 4)
    device.tracker.step = 4
    with device.tracker.phase(Phase.UPDATE), pytest.raises(MemoryBudgetError) as caught:
        device.attempts()(Failing(99))
    error, text = caught.value, str(caught.value)
    assert "The gradient does not fit in memory (step 5)" in text
    limit = format_bytes(device.tracker.meter.total_bytes())
    assert f"2.00 GiB could not be allocated within {limit}, of which" in text
    assert "optimizer 6.00 MiB, weights 3.00 MiB" in text
    assert "The largest holder is optimizer." in text
    assert "4 plan(s) were tried, from the first to the last micro_batch_tokens 8 to 1" in text
    assert "train an adapter" in text
    assert "lower max_completion_length" in text
    assert "raise memory_budget" in text
    assert text.endswith("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert isinstance(error, MemoryError)
    assert (error.held_bytes["weights"], error.held_bytes["optimizer"]) == (weights.nbytes, moments.nbytes)
    assert error.failure.attempt == 4
    assert error.failure.plan.micro_batch_tokens == 1
    assert len(device.tracker.state().failures) == 4
    # Nothing of the failed attempts hangs on the error, not even as what happened before it.
    assert error.__context__ is None
    assert error.__cause__ is None


def test_a_policy_that_answers_the_plan_that_failed_is_refused(device: Device) -> None:
    class Stubborn(FixedPolicy):
        def after_oom(self, plan: Any, failure: Any) -> Any:
            return replace(plan)

    recovery = Recovery(device.tracker, Stubborn())
    with pytest.raises(ConfigError, match=r"Stubborn.after_oom answered a plan that had failed already"):
        recovery.attempts(Stage.ACCUMULATE, PLAN, WORK)(Failing(99))


def test_a_policy_that_goes_in_circles_is_refused_and_one_that_never_ends_is_ended(device: Device) -> None:
    class Circling(FixedPolicy):
        def after_oom(self, plan: Any, failure: Any) -> Any:
            return replace(plan, micro_batch_tokens=3 - plan.micro_batch_tokens)

    class Growing(FixedPolicy):
        def after_oom(self, plan: Any, failure: Any) -> Any:
            return replace(plan, micro_batch_tokens=plan.micro_batch_tokens + 1)

    with pytest.raises(ConfigError, match=r"Circling.after_oom answered a plan that had failed already"):
        Recovery(device.tracker, Circling()).attempts(Stage.ACCUMULATE, replace(PLAN, micro_batch_tokens=1), WORK)(
            Failing(10**9)
        )
    recovery, unit = Recovery(device.tracker, Growing()), Failing(10**9)
    told = r"60 plan\(s\) were tried.*Growing gave no further plan"
    with device.tracker.phase(Phase.UPDATE), pytest.raises(MemoryBudgetError, match=told):
        recovery.attempts(Stage.ACCUMULATE, PLAN, WORK)(unit)
    assert len(unit.plans) == 60 * SAME_PLAN_TRIES


def test_a_plan_that_cannot_be_carried_out_is_refused(device: Device) -> None:
    class Absurd(FixedPolicy):
        def after_oom(self, plan: Any, failure: Any) -> Any:
            return replace(plan, micro_batch_tokens=0)

    with pytest.raises(ConfigError, match="micro_batch_tokens"):
        Recovery(device.tracker, Absurd()).attempts(Stage.ACCUMULATE, PLAN, WORK)(Failing(99))


def test_what_a_policy_raises_comes_out(device: Device) -> None:
    class Broken(FixedPolicy):
        def after_oom(self, plan: Any, failure: Any) -> Any:
            raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        Recovery(device.tracker, Broken()).attempts(Stage.ACCUMULATE, PLAN, WORK)(Failing(99))


def test_what_is_advised_fits_what_runs() -> None:
    def told(phase: Phase, **more: Any) -> str:
        return explain(MemoryFailure(phase, 10, 1, "no", **more), {}, [], limit_bytes=9, policy="")

    assert told(Phase.LOAD).startswith("Loading the model does not fit")
    assert told(Phase.LOAD, step=1).startswith("Work between two steps does not fit")
    assert "lower max_completion_length" in told(Phase.UPDATE, work=WORK)
    denoises = replace(WORK, geometry=replace(GEOMETRY, unit=UnitBytes(1, 1, 1, 1)))
    assert "To change: train an adapter, set guidance_gradient=False" in told(Phase.UPDATE, work=denoises)


def test_work_without_a_plan_is_repeated_a_few_times(device: Device) -> None:
    unit = Failing(UNPLANNED_TRIES - 1)
    assert device.recovery.repeat(Stage.STORE, unit) == "done"
    assert len(unit.plans) == UNPLANNED_TRIES
    hopeless = Failing(UNPLANNED_TRIES)
    with pytest.raises(MemoryBudgetError, match="there is nothing in it to cut") as caught:
        device.recovery.repeat(Stage.STORE, hopeless)
    assert len(hopeless.plans) == UNPLANNED_TRIES
    assert device.policy.asked == []
    assert (caught.value.failure.plan, caught.value.failure.work) == (None, None)


def test_an_error_of_an_inner_piece_of_work_is_not_tried_again_by_the_outer_one(device: Device) -> None:
    inner, outer = Failing(99), []

    def unit() -> None:
        outer.append(1)
        device.recovery.repeat(Stage.STORE, inner)

    with pytest.raises(MemoryBudgetError):
        device.recovery.repeat(Stage.STORE, unit)
    assert len(outer) == 1


def test_attempts_under_one_plan_catch_nothing() -> None:
    unit = Failing(1)
    with pytest.raises(torch.OutOfMemoryError):
        under(PLAN)(unit)
    assert unit.plans == [PLAN]


# ------------------------------------------------------------------ events


def test_every_failure_retry_and_fallback_has_its_event(device: Device) -> None:
    device.tracker.step, held = 3, torch.zeros(100)
    with device.tracker.phase(Phase.SCORE):
        device.attempts()(Failing(3))
    assert [event["event"] for event in device.tracker.events] == [
        "failure",
        "retry",
        "failure",
        "plan",
        "fallback",
        "failure",
        "retry",
    ]
    assert {event["step"] for event in device.tracker.events} == {3}
    failures = device.events("failure")
    assert [event["tries"] for event in failures] == [1, 2, 1]
    for event in failures:
        assert event["phase"] == Phase.SCORE
        assert event["requested_bytes"] == 2 * 2**30
        assert event["message"] == "CUDA out of memory. Tried to allocate 2.00 GiB."
        assert event["pinned_bytes"] == 0
        assert event["live_bytes"] == held.nbytes  # and nothing of the recovery's own, such as a random state
        assert 0 <= event["seconds_lost"] < 5
    assert device.events("retry") == [
        {"event": "retry", "step": 3, "phase": Phase.SCORE, "tries": 1},
        {"event": "retry", "step": 3, "phase": Phase.SCORE, "tries": 1},
    ]
    assert device.events("fallback") == [
        {"event": "fallback", "step": 3, "phase": Phase.SCORE, "changes": {"micro_batch_tokens": (8, 4)}}
    ]


def test_bytes_that_a_failed_unit_leaves_behind_are_reported(device: Device) -> None:
    kept: list[torch.Tensor] = []

    def careless() -> None:
        if not kept:
            kept.append(torch.zeros(MIB // 4))
            raise torch.OutOfMemoryError("")

    device.recovery.repeat(Stage.STORE, careless)
    assert device.events("failure")[0]["pinned_bytes"] == MIB
    assert device.events("failure")[0]["message"] == "OutOfMemoryError"
    assert device.events("failure")[0]["requested_bytes"] is None


# ------------------------------------------------------------------ what a failed attempt leaves


def test_a_failed_attempt_is_undone_before_the_next(device: Device) -> None:
    order: list[str] = []

    def unit(plan: Any) -> None:
        order.append("try")
        if order.count("try") < 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    device.attempts()(unit, undo=lambda: order.append("undo"))
    assert order == ["try", "undo", "try", "undo", "try", "undo", "try"]


def test_the_last_failure_is_undone_too(device: Device) -> None:
    undone: list[int] = []
    with pytest.raises(MemoryBudgetError):
        device.recovery.repeat(Stage.STORE, Failing(99), undo=lambda: undone.append(1))
    assert len(undone) == UNPLANNED_TRIES


def test_every_try_draws_the_same_random_numbers(device: Device) -> None:
    drawn: list[tuple[float, float, float, float]] = []

    def unit(plan: Any) -> None:
        # One gaussian of a pair, so that the other one, which generators keep, has to be put back too.
        drawn.append((random.gauss(), float(np.random.randn()), float(torch.rand(1)), float(torch.randn(1))))
        if len(drawn) < 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def draw_too() -> None:
        random.random(), np.random.rand(), torch.rand(1)

    device.attempts()(unit, undo=draw_too)
    assert len(drawn) == 4
    assert len(set(drawn)) == 1


def test_after_a_recovery_random_numbers_go_on_as_if_nothing_had_failed(device: Device) -> None:
    def run(failures: int) -> list[float]:
        random.seed(5), np.random.seed(5), torch.manual_seed(5)
        unit = Failing(failures)
        device.attempts()(lambda plan: (random.random(), np.random.rand(), torch.rand(3), unit(plan)))
        return [random.random(), float(np.random.rand()), float(torch.rand(1))]

    assert run(0) == run(1) == run(3)


def refused(device: Device, allocation: int) -> Callable[[Any], torch.Tensor]:
    """A unit that holds a mebibyte when the device refuses another, the first time."""
    calls: list[int] = []

    def unit(plan: Any = None) -> torch.Tensor:
        calls.append(1)
        held = torch.zeros(MIB // 4)
        if len(calls) == 1:
            device.memory.fail_after(allocation)
        return torch.exp(held)

    return unit


def test_a_genuine_refusal_is_survived_and_pins_nothing(device: Device) -> None:
    before = device.memory.live_bytes
    result = device.attempts()(refused(device, 1))
    assert float(result.sum()) == MIB // 4
    assert device.memory.refusals == 1
    assert device.events("failure")[0]["pinned_bytes"] == 0
    assert device.events("failure")[0]["requested_bytes"] == MIB
    del result
    assert device.memory.live_bytes == before


def test_frames_of_a_failed_unit_are_gone_before_it_is_undone(device: Device) -> None:
    """Not even a cycle of frames and exceptions: there is no garbage collection between tries."""
    tensors: list[weakref.ref[torch.Tensor]] = []
    alive_at_undo: list[int] = []
    live_at_undo: list[int] = []

    def generator() -> Iterator[torch.Tensor]:
        local = torch.zeros(MIB // 4)
        tensors.append(weakref.ref(local))
        yield local
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def unit(plan: Any) -> str:
        if tensors:
            return "done"
        outer = torch.zeros(MIB // 4)
        tensors.append(weakref.ref(outer))
        try:
            return str([part.sum() + outer.sum() for part in generator()])
        except torch.OutOfMemoryError:
            wrapped = torch.zeros(MIB // 4)
            tensors.append(weakref.ref(wrapped))
            raise torch.OutOfMemoryError("CUDA out of memory.") from RuntimeError(wrapped)

    def undo() -> None:
        alive_at_undo.append(sum(reference() is not None for reference in tensors))
        live_at_undo.append(device.memory.live_bytes - before)

    before = device.memory.live_bytes
    gc.disable()
    try:
        assert device.attempts()(unit, undo=undo) == "done"
    finally:
        gc.enable()
    assert len(tensors) == 3
    assert alive_at_undo == [0]
    assert live_at_undo[0] < MIB // 4  # the random state alone
    assert device.events("failure")[0]["pinned_bytes"] == 0


class _FailsInBackward(torch.autograd.Function):
    """Passes a tensor through; its backward is refused the first time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tries: list[int]) -> torch.Tensor:
        ctx.tries = tries
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.tries.append(1)
        if len(ctx.tries) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return grad.clone(), None


def test_what_a_failed_backward_leaves_in_autograds_queue_is_freed(device: Device) -> None:
    """Nodes that were ready when another one raised stay queued in this thread, with all they saved."""
    weight = torch.ones(MIB // 4, requires_grad=True)
    tries: list[int] = []

    def unit(plan: Any) -> None:
        # The branch that fails was made last and so runs first; the other one is ready too and waits, graph in hand.
        waiting = (weight * 2).exp()
        failing = _FailsInBackward.apply(weight, tries)
        torch.autograd.backward(waiting.sum() + failing.sum())

    def undo() -> None:
        weight.grad = None
        pinned_before_the_flush.append(device.memory.live_bytes - before)

    pinned_before_the_flush: list[int] = []
    before = device.memory.live_bytes
    device.attempts()(unit, undo=undo)
    assert len(tries) == 2
    assert pinned_before_the_flush[0] >= MIB  # else this test shows nothing
    assert device.events("failure")[0]["pinned_bytes"] == 0
    assert float(weight.grad.min()) == float(weight.grad.max()) == pytest.approx(2 * math.exp(2) + 1)
    weight.grad = None
    assert device.memory.live_bytes == before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_clearing_up_works_where_gradients_are_off(device: Device, mode: Any) -> None:
    with mode():
        assert device.recovery.repeat(Stage.STORE, Failing(1)) == "done"


def test_the_random_state_itself_may_not_fit(device: Device) -> None:
    """Reading a generator's state allocates."""
    state = torch.get_rng_state()
    device.memory.fail_after(1)
    assert device.recovery.repeat(Stage.STORE, Failing(0)) == "done"
    assert device.memory.refusals == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert len(device.events("failure")) == 1
    with SimulatedMemory(capacity_bytes=1, exact=True) as full:
        tracker = MemoryTracker("cpu", SimulatedMeter(full), 1)
        with pytest.raises(MemoryBudgetError, match="could not be allocated"):
            Recovery(tracker, Halving()).repeat(Stage.STORE, Failing(0))


def test_clearing_up_needs_no_memory_of_the_device(device: Device) -> None:
    calls: list[int] = []

    def unit() -> str:
        calls.append(1)
        if len(calls) == 1:
            device.memory.set_capacity(device.memory.live_bytes)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return "done"

    def undo() -> None:
        torch.zeros(1)

    assert device.recovery.repeat(Stage.STORE, unit, undo=undo) == "done"
    assert device.memory.refusals == 0


# ------------------------------------------------------------------ everything else passes


class UsersError(Exception):
    """A user's own."""


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad reward"),
        MemoryError(),
        RuntimeError("the text said: CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: device-side assert triggered"),
        KeyboardInterrupt(),
        SystemExit(3),
        UsersError("mine"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_other_error_passes_untouched(device: Device, error: BaseException) -> None:
    runs: list[int] = []

    def unit(plan: Any = None) -> None:
        runs.append(1)
        raise error

    with pytest.raises(type(error)) as caught:
        device.attempts()(unit)
    assert caught.value is error
    assert caught.value.__context__ is None
    with pytest.raises(type(error)):
        device.recovery.repeat(Stage.STORE, unit)
    assert len(runs) == 2
    assert device.tracker.events == []


def test_an_error_of_the_users_own_that_follows_an_allocation_failure_passes(device: Device) -> None:
    def unit() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        except torch.OutOfMemoryError as error:
            raise UsersError from error

    with pytest.raises(UsersError):
        device.recovery.repeat(Stage.STORE, unit)
    assert device.tracker.events == []


def test_an_interrupt_after_a_failure_passes_with_the_failure_undone(device: Device) -> None:
    undone: list[int] = []
    calls: list[int] = []

    def unit() -> None:
        calls.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory.") if len(calls) == 1 else KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        device.recovery.repeat(Stage.STORE, unit, undo=lambda: undone.append(1))
    assert undone == [1]
    assert caught.value.__context__ is None
