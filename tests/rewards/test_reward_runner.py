"""Reward functions: how they are called, and which answers are taken or refused."""

import asyncio
import functools
import logging
import math
import threading
from decimal import Decimal

import numpy as np
import pytest
import torch

from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.rewards import RewardRunner

PROMPTS = ["a", "a", "b", "b"]
COMPLETIONS = ["1", "22", "333", "4444"]
IDS = [[1], [2, 2], [3, 3, 3], [4, 4, 4, 4]]


def score(functions, columns=None, **options):
    runner = RewardRunner(functions)
    try:
        return runner.begin(PROMPTS, COMPLETIONS, IDS, columns, **options).result()
    finally:
        runner.close()


def length(completions, **kwargs):
    return [len(text) for text in completions]


async def slow_length(completions, **kwargs):
    await asyncio.sleep(0.05)
    return [-len(text) for text in completions]


def returning(value):
    def reward(**kwargs):
        return value

    return reward


def test_a_function_gets_everything_by_keyword_exactly_once():
    calls = []

    def reward(**kwargs):
        calls.append(kwargs)
        return [0.0] * 4

    score(reward, {"answer": [1, 2, 3, 4], "note": "one for all"}, trainer_state="state")
    (call,) = calls
    assert callable(call.pop("log_extra"))
    assert callable(call.pop("log_metric"))
    assert call == {
        "prompts": PROMPTS,
        "completions": COMPLETIONS,
        "completion_ids": IDS,
        "answer": [1, 2, 3, 4],
        "note": "one for all",
        "trainer_state": "state",
    }


def test_a_function_without_kwargs_gets_only_what_it_names():
    def reward(completions, answer, unused=7):
        assert unused == 7
        return [float(a == b) for a, b in zip(completions, answer, strict=True)]

    scores = score(reward, {"answer": ["1", "x", "333", "x"], "other": [0] * 4})
    assert scores.rewards_BF.squeeze(1).tolist() == [1, 0, 1, 0]


def test_a_decorated_function_is_asked_what_its_decorator_names():
    def inner(completion, gold, bonus=0.0):
        return bonus + (completion == gold)

    @functools.wraps(inner)
    def for_each(completions, answer):
        return list(map(inner, completions, answer))

    def scaled(completions, factor):
        return [factor * len(text) for text in completions]

    twice = functools.update_wrapper(functools.partial(scaled, factor=2.0), scaled)

    @functools.wraps(twice)
    def retried(*args, **kwargs):
        return twice(*args, **kwargs)

    class Judge:
        @torch.no_grad()
        def __call__(self, completions):
            return [float(len(text)) for text in completions]

        @torch.no_grad()
        def twice(self, completions):
            return [2.0 * len(text) for text in completions]

    methods = [Judge(), Judge().twice, functools.partial(for_each)]
    scores = score([for_each, twice, retried, *methods], {"answer": ["1", "x", "333", "x"], "other": 0})
    lengths, doubled = [1, 2, 3, 4], [2, 4, 6, 8]
    assert scores.rewards_BF.T.tolist() == [[1, 0, 1, 0], doubled, doubled, lengths, doubled, [1, 0, 1, 0]]


def test_a_function_cannot_disturb_the_next_one():
    def greedy(completions, answer, **kwargs):
        answer.clear()
        return [completions.pop() and 0.0 for _ in range(4)]

    def reads(completions, answer, **kwargs):
        return [float(len(completions) == len(answer) == 4)] * 4

    assert score([greedy, reads], {"answer": [1, 2, 3, 4]}).rewards_BF[:, 1].tolist() == [1] * 4


@pytest.mark.parametrize(
    "output",
    [
        [1, None, 0.5, math.nan],
        [True, None, np.float32(0.5), None],
        [Decimal(1), None, Decimal("0.5"), None],
        (torch.tensor(1.0), None, torch.tensor([0.5]), np.float64("nan")),
        np.array([1, np.nan, 0.5, np.nan]),
        torch.tensor([1, math.nan, 0.5, math.nan], dtype=torch.bfloat16),
        torch.tensor([[1], [math.nan], [0.5], [math.nan]]),
        iter([np.True_, None, 0.5, None]),
    ],
)
def test_numbers_of_every_kind_are_taken_and_none_is_nan(output):
    rewards_BF = score([returning(output), length]).rewards_BF
    assert rewards_BF.dtype == torch.float32
    assert rewards_BF.shape == (4, 2)
    torch.testing.assert_close(rewards_BF[:, 0], torch.tensor([1, math.nan, 0.5, math.nan]), equal_nan=True)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ([1.0, 2.0], "returned 2 rewards for 4 completions"),
        (0.5, r"returned 0.5 \(float\) for 4 completions"),
        (torch.tensor(0.5), r"returned tensor\(0.5000\) \(Tensor\)"),
        ("1111", r"returned '1111' \(str\)"),
        (None, r"returned None \(NoneType\)"),
        ({1, 2, 3, 4}, r"\(set\)"),
        ([1, 2, "3", 4], r"returned '3' \(str\) for row 2 of 4"),
        ([1, [2], 3, 4], r"returned \[2\] \(list\) for row 1 of 4"),
        ([1, 2, 3, 1j], r"\(complex\) for row 3 of 4"),
        ([math.inf, 2, 3, 4], "returned inf for row 0 of 4"),
        ([1, 2, 3, -1e39], "row 3 of 4, which is infinite in float32"),
        ([1, 2, 3, 10**400], "row 3 of 4, which is infinite in float32"),
        (torch.zeros(4, 2), "for row 0 of 4"),
    ],
)
def test_other_answers_are_refused_by_function_row_and_value(output, message):
    with pytest.raises(DataError, match=f"Reward function 'reward' .*{message}"):
        score(returning(output))


def test_an_exception_of_a_function_comes_out_untouched():
    error = KeyError("mine")

    def fails(**kwargs):
        raise error

    async def fails_later(**kwargs):
        raise error

    for functions in (fails, [length, fails_later], [slow_length, fails]):
        with pytest.raises(KeyError) as caught:
            score(functions)
        assert caught.value is error


def test_async_functions_run_together_also_inside_a_running_loop():
    together = asyncio.Barrier(2)

    async def meets(completions, **kwargs):
        await asyncio.wait_for(together.wait(), timeout=5)
        return [1.0] * 4

    class Meets:
        async def __call__(self, completions, **kwargs):
            await meets(completions)
            return [2.0] * 4

    def wrapped(**kwargs):
        return slow_length(**kwargs)

    runner = RewardRunner([meets, length, Meets(), wrapped])
    expected = [[1.0, 1.0, 2.0, -1.0], [1.0, 4.0, 2.0, -4.0]]
    assert runner.begin(PROMPTS, COMPLETIONS, IDS).result().rewards_BF[[0, 3]].tolist() == expected

    async def notebook():
        return runner.begin(PROMPTS, COMPLETIONS, IDS).result()

    scores = asyncio.run(notebook())
    runner.close()
    assert scores.rewards_BF[[0, 3]].tolist() == expected
    assert scores.names == ("meets", "length", "Meets", "wrapped")
    assert scores.seconds["wrapped"] >= 0.05 > scores.seconds["length"]


def test_async_functions_keep_one_loop_for_the_run():
    loops, threads = [], []

    async def reward(**kwargs):
        loops.append(asyncio.get_running_loop())
        threads.append(threading.current_thread())
        return [0.0] * 4

    runner = RewardRunner(reward)
    for _ in range(2):
        runner.begin(PROMPTS, COMPLETIONS, IDS).result()
    assert loops[0] is loops[1]
    assert threads[0] is threads[1] is not threading.current_thread()
    assert threads[0].is_alive()
    runner.close()
    assert loops[0].is_closed()
    assert not threads[0].is_alive()


def test_a_failing_async_function_cancels_the_others():
    cancelled = []

    async def waits(**kwargs):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def fails(**kwargs):
        await asyncio.sleep(0.01)
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        score([waits, fails])
    assert cancelled == [True]


def test_names_are_trl_s_and_distinct():
    class Callable:
        def __call__(self, **kwargs):
            return [0.0] * 4

    other = returning([0.0] * 4)
    runner = RewardRunner([length, functools.partial(length), Callable(), other, other, lambda **_: [0.0] * 4])
    assert runner.names == ("length", "length_2", "Callable", "reward", "reward_2", "<lambda>")


def test_distinct_names_do_not_meet_a_given_one():
    def length_2(**kwargs):
        return [0.0] * 4

    assert RewardRunner([length, length, length_2]).names == ("length", "length_3", "length_2")


def test_logged_columns_and_metrics_come_back():
    def first(completions, log_extra, log_metric, **kwargs):
        for text in completions:
            log_extra("text", [text])
        log_extra("shared", [0] * 4)
        log_metric("ratio", 0.5)
        return [0.0] * 4

    def second(log_extra, log_metric):
        log_extra("shared", [1] * 4)
        log_extra("text", list(COMPLETIONS))
        log_metric("ratio", torch.tensor(1.5))
        return [0.0] * 4

    scores = score([first, second])
    assert scores.extras == {"text": COMPLETIONS, "shared": [0] * 4, "second/shared": [1] * 4}
    assert scores.metrics == {"ratio": [0.5, 1.5]}

    def wrong(log_extra):
        log_extra("text", ["only one"])
        return [0.0] * 4

    with pytest.raises(DataError, match="'wrong' logged 1 values in column 'text' for 4"):
        score(wrong)


def test_rows_without_any_reward_are_warned_of_once(caplog):
    runner = RewardRunner([returning([None, None, 1.0, None]), returning([None, 1.0, 1.0, None])])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            runner.begin(PROMPTS, COMPLETIONS, IDS).result()
    (record,) = caplog.records
    assert "2 of 4 completions" in record.getMessage()
    assert "row 0 with prompt 'a'" in record.getMessage()


def test_columns_are_checked_before_anything_is_called():
    calls = []

    def reward(completions, solution, **kwargs):
        calls.append(1)

    runner = RewardRunner([reward])
    with pytest.raises(DataError, match=r"'reward' needs 'solution'.*it has answer"):
        runner.check_columns(["prompt", "answer"])
    with pytest.raises(DataError, match="Did you mean 'solutions'"):
        runner.begin(PROMPTS, COMPLETIONS, IDS, {"solutions": [1] * 4}).result()
    with pytest.raises(DataError, match="column 'prompts'"):
        runner.check_columns(["prompts", "solution"])
    with pytest.raises(DataError, match="'solution' has 3 values for 4 prompts"):
        runner.begin(PROMPTS, COMPLETIONS, IDS, {"solution": [1] * 3}).result()
    runner.check_columns(["prompt", "completion", "completion_ids", "solution"])
    assert not calls


def test_no_rows_give_no_rewards_and_no_call():
    def reward(**kwargs):
        raise AssertionError

    assert RewardRunner([reward]).begin([], [], []).result().rewards_BF.shape == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "reward_funcs is empty"),
        ((None,), "reward_funcs is empty"),
        (([length, 3],), r"reward_funcs\[1\] is 3 \(int\)"),
        (([length], None, [1.0, 2.0]), "reward_weights has 2 entries for 1"),
        (([length], None, [math.nan]), r"reward_weights\[0\] is nan"),
        (([length, length], [None]), "reward_processing_classes has 1 entries for 2"),
    ],
)
def test_senseless_settings_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        RewardRunner(*arguments)


def test_weights_are_ones_unless_given():
    assert RewardRunner([length, length]).weights == (1.0, 1.0)
    assert RewardRunner(length, reward_weights=[2]).weights == (2.0,)


def test_a_missing_package_is_named_before_the_run():
    def reward(**kwargs):
        return []

    reward.required_packages = {"no_such_package_here": "no-such-package"}
    with pytest.raises(ConfigError, match=r"'reward' needs the package no-such-package.*pip install no-such-package"):
        RewardRunner(reward)
