"""Growth in three steps in a row is named, with the tensors that are likely to be it; nothing else is."""

import gc

import pytest
import torch
from torch import nn

from memsafe_rl.memory.runtime.leaks import LeakWatch, find_strays
from memsafe_rl.types import Component

ACTIVATIONS, OTHER = Component.ACTIVATIONS, Component.OTHER


def alarms(*bytes_of_steps: int, component: Component = OTHER, steps_per_rollout: int = 1) -> list[int]:
    watch = LeakWatch()
    return [
        event["step"]
        for step, held in enumerate(bytes_of_steps, start=1)
        for event in watch.observe(
            step, {component: held, Component.WEIGHTS: 1000}, steps_per_rollout=steps_per_rollout
        )
    ]


def test_a_leak_from_the_first_step_is_named_at_the_fifth() -> None:
    assert alarms(10, 20, 30, 40, 50, 60, 70) == [5]


def test_a_streak_is_reported_once_and_a_new_one_again() -> None:
    assert alarms(5, 5, 5, 6, 7, 8, 9, 10, 10, 11, 12, 13, 14) == [6, 12]


@pytest.mark.slow
def test_a_leak_of_every_rollout_is_named_at_the_third_growth() -> None:
    assert alarms(10, 10, 20, 20, 30, 30, 40, 40, 50, 50, steps_per_rollout=2) == [7]
    assert alarms(10, 10, 20, 20, 30, 30, 40, 40, 50, 50) == []
    assert alarms(1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, steps_per_rollout=3) == [10]
    assert alarms(1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4, 4, 4, steps_per_rollout=3) == []
    assert alarms(1, 1, 2, 2, 3, 2, 3, 3, 4, 4, steps_per_rollout=2) == []
    assert alarms(10, 20, 30, 40, 50, 60, steps_per_rollout=4) == [5]


def test_growth_that_ends_is_no_leak() -> None:
    assert alarms(0, 1000, 1000, 1000, 1000) == []
    assert alarms(0, 500, 1000, 1500, 1500, 1500) == []
    assert alarms(5, 5, 6, 7, 7, 8, 9, 9) == []
    assert alarms(9, 8, 7, 6, 5) == []


def test_a_component_that_appears_late_may_do_so_once() -> None:
    watch = LeakWatch()
    seen = [{}, {}, {}, {OTHER: 7}, {OTHER: 7}, {OTHER: 8}, {OTHER: 9}, {OTHER: 10}]
    found = [watch.observe(step, held) for step, held in enumerate(seen, start=1)]
    assert [bool(events) for events in found] == [False] * 7 + [True]
    assert found[-1][0]["since_step"] == 6


def test_the_trajectory_may_grow() -> None:
    assert alarms(10, 20, 30, 40, 50, 60, component=Component.TRAJECTORY) == []


def test_the_alarm_states_component_bytes_and_step() -> None:
    watch = LeakWatch()
    for step, held in enumerate([100, 100, 100, 1124, 2148], start=1):
        assert not watch.observe(step, {ACTIVATIONS: held})
    (event,) = watch.observe(6, {ACTIVATIONS: 3172})
    assert (event["event"], event["kind"], event["step"], event["component"]) == ("alarm", "leak", 6, "activations")
    assert (event["since_step"], event["bytes_per_step"], event["live_bytes"]) == (4, 1024, 3172)
    assert event["sentence"].startswith(
        "The bytes of activations have grown in every step since step 4, by 1.00 KiB a step, to 3.10 KiB: "
    )


def test_the_alarm_of_a_rollout_counts_rollouts() -> None:
    watch = LeakWatch()
    found = [watch.observe(step, {OTHER: 1024 * (step // 2)}, steps_per_rollout=2) for step in range(1, 9)]
    (event,) = (event for events in found for event in events)
    assert (event["step"], event["since_step"], event["bytes_per_rollout"]) == (8, 4, 1024)
    assert event["sentence"].startswith(
        "The bytes of other have grown in every rollout since step 4, by 1.00 KiB a rollout, to 4.00 KiB: "
    )


def test_an_undetached_metric_is_found_by_its_graph() -> None:
    gc.collect()
    model = nn.Linear(3, 2)
    kept = []
    watch = LeakWatch()
    events = []
    for step in range(1, 6):
        kept.append(model(torch.ones(5, 3)).exp().mean())
        events += watch.observe(step, {ACTIVATIONS: 64 * step}, model.parameters)
    (event,) = events
    graphs = [stray for stray in event["tensors"] if stray["graph"] == "MeanBackward0"]
    assert [(stray["shape"], stray["dtype"], stray["count"]) for stray in graphs] == [((), "float32", 5)]
    assert "a metric that was not detached" in event["sentence"]
    assert "5 of shape () float32, 20 B, each with its graph (MeanBackward0)" in event["sentence"]


def test_what_was_alive_before_the_growth_is_no_suspect() -> None:
    gc.collect()
    model = nn.Linear(6, 2)
    older = [model(torch.ones(1, 6)).pow(power).mean(0).sum(0) for power in range(9)]  # as another test leaves them
    large = [torch.zeros(1, 1 + place, 80) for place in range(9)]
    kept, events = [], []
    watch = LeakWatch()
    for step in range(1, 6):
        kept.append(torch.zeros(3, 1, 1))
        events += watch.observe(step, {OTHER: 12 * step}, model.parameters)
    (event,) = events
    assert [(stray["shape"], stray["count"]) for stray in event["tensors"]] == [((3, 1, 1), 5)]
    assert "autograd" not in event["sentence"]
    assert len(older) == len(large) == 9


def test_strays_are_what_nobody_owns_the_repeated_before_the_large() -> None:
    gc.collect()
    state = torch.zeros(77, 100)
    rows = [torch.zeros(77, 3) for _ in range(4)]
    single = torch.zeros(77, 50)
    view_of_state = state[:, 5:9]
    found = [stray for stray in find_strays([state], limit=10_000) if stray.shape[:1] == (77,)]
    assert [(stray.shape, stray.count, stray.nbytes) for stray in found] == [
        ((77, 3), 4, 4 * 77 * 3 * 4),
        ((77, 50), 1, single.nbytes),
    ]
    assert view_of_state.shape == (77, 4)
    del rows


def test_tensors_elsewhere_are_no_suspects() -> None:
    kept = [torch.zeros(78, 3) for _ in range(3)]
    found = find_strays([], torch.device("meta"), limit=10_000)
    assert not [stray for stray in found if stray.shape == (78, 3)]
    assert len(kept) == 3
