"""Async reward functions that take too long: cancelled, called again, named, or left out; and waited for at the end."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from memsafe_rl.errors import DataError, MemsafeError, RewardTimeoutError
from memsafe_rl.rewards import RewardRunner, RewardScores, calls
from memsafe_rl.rewards.calls import TimeoutPolicy

PROMPTS, COMPLETIONS, IDS = ["a", "b"], ["1", "22"], [[1], [2, 2]]


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def judge_slow_until(call: int, log: list[str] | None = None) -> Callable[..., Any]:
    """An async judge that only answers its given call, counted from 1."""
    made: list[int] = []

    async def judge(log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        made.append(1)
        log_extra("call", [len(made)] * 2)
        log_metric("calls", len(made))
        try:
            await asyncio.sleep(0 if len(made) == call else 60)
        except asyncio.CancelledError:
            if log is not None:
                log.append("cancelled")
            raise
        return [0.5, 0.25]

    return judge


def score(functions: Any, patience: TimeoutPolicy) -> RewardScores:
    runner = RewardRunner(functions, patience=patience)
    try:
        return runner.begin(PROMPTS, COMPLETIONS, IDS).result()
    finally:
        runner.close()


def test_a_judge_that_is_too_slow_is_cancelled_and_called_again(caplog: pytest.LogCaptureFixture) -> None:
    log: list[str] = []
    scores = score([length, judge_slow_until(3, log)], TimeoutPolicy(0.05, retries=2))
    assert scores.rewards_BF.tolist() == [[1.0, 0.5], [2.0, 0.25]]
    assert scores.timeouts == {"judge": 2}
    assert log == ["cancelled", "cancelled"]
    assert 0.1 <= scores.seconds["judge"] < 5
    # What the cancelled calls logged is gone.
    assert scores.extras == {"call": [3, 3]}
    assert scores.metrics == {"calls": [3.0]}
    again = "Reward function 'judge' did not answer within 0.05 seconds. It is called again."
    assert [record.message for record in caplog.records] == [again, again]


def test_a_judge_that_never_answers_ends_the_run_by_name_seconds_and_remedy() -> None:
    with pytest.raises(RewardTimeoutError) as caught:
        score([judge_slow_until(9), length], TimeoutPolicy(0.05, retries=1))
    assert str(caught.value) == (
        "Reward function 'judge' did not answer for 2 completions within 0.05 seconds (reward_timeout_seconds), called "
        "2 time(s). Raise reward_timeout_seconds or reward_retries, or set reward_timeout_result='none' to "
        "continue without its rewards."
    )
    assert isinstance(caught.value, MemsafeError)
    assert isinstance(caught.value, TimeoutError)


def test_its_rewards_are_none_if_the_user_says_so(caplog: pytest.LogCaptureFixture) -> None:
    scores = score([judge_slow_until(9), length], TimeoutPolicy(0.05, gives_none=True))
    torch.testing.assert_close(scores.rewards_BF, torch.tensor([[torch.nan, 1.0], [torch.nan, 2.0]]), equal_nan=True)
    assert scores.timeouts == {"judge": 1}
    assert "Its rewards of 2 completions are None." in caplog.text


def test_a_timeout_of_the_functions_own_comes_out_untouched() -> None:
    made: list[int] = []

    async def judge(**_: Any) -> list[float]:
        made.append(1)
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match=r"^mine$"):
        score(judge, TimeoutPolicy(5.0, retries=3))
    assert made == [1]


def raised_by(work: Callable[[], Any]) -> BaseException | None:
    """Runs something that must end within 20 seconds, and gives what it raised."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)
        else:
            raised.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "still waiting"
    return raised[0]


async def raises(error: BaseException) -> None:
    raise error


async def in_a_task(error: BaseException) -> None:
    await asyncio.create_task(raises(error))


async def in_a_task_of_its_own(error: BaseException) -> None:
    task = asyncio.create_task(raises(error))
    await asyncio.sleep(30)
    await task


@pytest.mark.parametrize(
    ("where", "error"),
    [
        (raises, SystemExit(3)),
        (raises, KeyboardInterrupt("enough")),
        (raises, ValueError("mine")),
        (in_a_task, SystemExit(3)),
        (in_a_task, ValueError("mine")),
        (in_a_task_of_its_own, SystemExit(3)),
        (in_a_task_of_its_own, KeyboardInterrupt("enough")),
    ],
)
@pytest.mark.parametrize("patience", [TimeoutPolicy(), TimeoutPolicy(60.0, retries=2)], ids=["endless", "patient"])
def test_whatever_a_judge_raises_comes_out(
    where: Callable[[BaseException], Awaitable[None]], error: BaseException, patience: TimeoutPolicy
) -> None:
    log, broken = list[str](), [True]

    async def judge(**_: Any) -> list[float]:
        await asyncio.sleep(0)
        if broken[0]:
            await where(error)
        return [0.5, 0.25]

    runner = RewardRunner([judge, judge_slow_until(2, log)], patience=patience)
    assert raised_by(lambda: runner.begin(PROMPTS, COMPLETIONS, IDS).result()) is error
    broken[0] = False
    assert runner.begin(PROMPTS, COMPLETIONS, IDS).result().rewards_BF[:, 0].tolist() == [0.5, 0.25]
    runner.close()
    assert log == ["cancelled"]


def cancel_everything() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda: asyncio.sleep(0), None),
        (lambda: raises(asyncio.CancelledError()), r"function\(s\) 'judge' ended in asyncio.CancelledError"),
        (lambda: asyncio.to_thread(raises_cancelled), r"function\(s\) 'judge' ended in asyncio.CancelledError"),
        (lambda: asyncio.sleep(0, cancel_everything()), r"function\(s\) 'judge' ended in asyncio.CancelledError"),
        (lambda: asyncio.sleep(0.1, asyncio.get_running_loop().stop()), "stopped its event loop"),
    ],
    ids=["nothing", "raised", "in a thread", "all tasks", "loop"],
)
def test_a_judge_that_cancels_itself_is_named(what: Callable[[], Awaitable[Any]], said: str | None) -> None:
    async def judge(**_: Any) -> list[float]:
        await what()
        return [0.5, 0.25]

    def work() -> None:
        if said is None:
            score(judge, TimeoutPolicy())
            return
        with pytest.raises(MemsafeError, match=said):
            score(judge, TimeoutPolicy())

    assert raised_by(work) is None


def raises_cancelled() -> None:
    raise asyncio.CancelledError


def test_what_ends_the_loop_between_two_rollouts_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    between = threading.Event()

    async def leave() -> None:
        while not between.is_set():
            await asyncio.sleep(0.01)
        raise SystemExit(4)

    async def judge(**_: Any) -> list[float]:
        left.append(asyncio.create_task(leave()))
        return [0.5, 0.25]

    left: list[asyncio.Task[None]] = []
    runner, last = RewardRunner(judge), time.monotonic() + 60
    for rollout in (1, 2):
        runner.begin(PROMPTS, COMPLETIONS, IDS).result()
        between.set()
        while len(caplog.records) < rollout and time.monotonic() < last:
            time.sleep(0.01)
        between.clear()
    runner.close()
    assert ["ended between two rollouts" in record.message for record in caplog.records] == [True, True]


@pytest.mark.parametrize(
    "patience", [TimeoutPolicy(1e10), TimeoutPolicy(1e300), TimeoutPolicy(1.5, retries=10**10)], ids=repr
)
def test_any_finite_patience_can_be_had(patience: TimeoutPolicy) -> None:
    """An event waits for 292 years at most."""
    assert score(judge_slow_until(1), patience).rewards_BF.tolist() == [[0.5], [0.25]]


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (lambda _, metric: metric("quality", "x"), r"'judge' logged 'x' \(str\) as metric 'quality'. Log one number"),
        (lambda _, metric: metric("quality", None), r"'judge' logged None \(NoneType\) as metric 'quality'"),
        (lambda _, metric: metric("quality", torch.ones(2)), r"\(Tensor\) as metric 'quality'"),
        (lambda extra, _: extra("notes", 5), r"'judge' logged 5 \(int\) in column 'notes'. Log a list"),
    ],
)
def test_what_cannot_be_logged_is_named(log: Callable[[Any, Any], None], said: str) -> None:
    def judge(log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        log_metric("fine", torch.ones(1))
        log(log_extra, log_metric)
        return [1.0, 1.0]

    with pytest.raises(DataError, match=said):
        score(judge, TimeoutPolicy())


@pytest.mark.slow
def test_a_judge_that_blocks_its_loop_ends_the_run_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GRACE_SECONDS", 0.2)
    free, blocked = threading.Event(), [True]

    async def judge(**_: Any) -> list[float]:
        if blocked[0]:
            free.wait(20)
        return [0.0, 1.0]

    runner = RewardRunner(judge, patience=TimeoutPolicy(0.1))
    began = time.monotonic()
    with pytest.raises(RewardTimeoutError, match=r"'judge' did not answer within 0.3 seconds .* blocks its event loop"):
        runner.begin(PROMPTS, COMPLETIONS, IDS).result()
    assert time.monotonic() - began < 10
    blocked[0] = False
    assert runner.begin(PROMPTS, COMPLETIONS, IDS).result().rewards_BF.tolist() == [[0.0], [1.0]]
    free.set()
    runner.close()


def test_a_slow_function_that_is_not_async_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def judge(**_: Any) -> list[float]:
        time.sleep(0.05)
        return [1.0, 1.0]

    scores = score(judge, TimeoutPolicy(0.01))
    assert scores.rewards_BF.tolist() == [[1.0], [1.0]]
    assert scores.timeouts == {}
    assert "'judge' took" in caplog.text
    assert "It is not async" in caplog.text


def test_without_a_limit_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert score([judge_slow_until(1), length], TimeoutPolicy()).timeouts == {}
    assert not caplog.records


def test_what_is_begun_runs_on_until_it_is_waited_for() -> None:
    order: list[str] = []
    asked, answered = threading.Event(), threading.Event()

    async def judge(**_: Any) -> list[float]:
        order.append("asked")
        asked.set()
        await asyncio.to_thread(answered.wait, 10)
        order.append("answered")
        return [1.0, 0.0]

    runner = RewardRunner([judge, length])
    pending = runner.begin(PROMPTS, COMPLETIONS, IDS)
    assert asked.wait(10)
    order.append("meanwhile")
    answered.set()
    assert pending.result().rewards_BF.tolist() == [[1.0, 1.0], [0.0, 2.0]]
    assert order == ["asked", "meanwhile", "answered"]
    runner.close()


def test_what_is_begun_can_be_cancelled() -> None:
    log: list[str] = []
    runner = RewardRunner(judge_slow_until(9, log))
    pending = runner.begin(PROMPTS, COMPLETIONS, IDS)
    time.sleep(0.05)
    pending.cancel()
    runner.close()
    assert log == ["cancelled"]
