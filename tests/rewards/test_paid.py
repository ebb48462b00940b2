"""Rewards that are paid for: asked once for each answer, whatever fails, resumes or runs again."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from memsafe_rl import GRPOConfig, GRPOTrainer
from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.rewards import Ask, PaidReward, RewardRunner, RewardScores
from tests.tiny import tiny_model, tiny_tokenizer

QUICK = Ask(retries=3, backoff_seconds=0.001)


class Judge:
    """Counts its answers by question, and fails as it is told."""

    def __init__(self, fails: Any = (0).__gt__) -> None:
        self.answered: Counter[tuple[str, str]] = Counter()
        self.calls = self.running = self.most = 0
        self._fails = fails

    async def __call__(self, prompt: str, completion: str, answer: str) -> tuple[float, float]:
        self.calls += 1
        call = self.calls
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001)
        self.running -= 1
        if self._fails(call):
            raise ConnectionError(f"call {call}")
        self.answered[prompt, completion] += 1
        return float(len(completion)), 0.25


def score(reward: PaidReward, completions: list[str], prompts: list[str] | None = None) -> RewardScores:
    runner = RewardRunner(reward)
    prompts = prompts or ["p"] * len(completions)
    try:
        ids = [[1]] * len(completions)
        return runner.begin(prompts, completions, ids, {"answer": ["a"] * len(completions)}).result()
    finally:
        runner.close()


def test_equal_completions_are_asked_about_once_and_another_process_finds_the_answers(tmp_path: Path) -> None:
    judge = Judge()
    scores = score(PaidReward(judge, tmp_path / "answers.sqlite"), ["x", "yy", "x"])
    assert scores.rewards_BF[:, 0].tolist() == [1.0, 2.0, 1.0]
    assert scores.metrics["Judge/asked"] == [2.0]
    assert scores.metrics["Judge/cost"] == [0.5]
    again = score(PaidReward(judge, tmp_path / "answers.sqlite"), ["yy", "zzz"])
    assert again.rewards_BF[:, 0].tolist() == [2.0, 3.0]
    assert judge.answered == {("p", "x"): 1, ("p", "yy"): 1, ("p", "zzz"): 1}
    # other instructions are another question
    score(PaidReward(judge, tmp_path / "answers.sqlite", version="2"), ["x"])
    assert judge.answered["p", "x"] == 2


def test_a_tenth_of_all_calls_fail_and_no_answer_is_paid_for_twice(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    judge = Judge(lambda _: draw.random() < 0.1)
    reward = PaidReward(judge, tmp_path / "answers.sqlite", ask=Ask(retries=9, backoff_seconds=0.001, concurrency=3))
    completions = [str(draw.randrange(10**6)) for _ in range(100)]
    for part in (completions[:60], completions[30:], completions):
        assert score(reward, part).rewards_BF[:, 0].tolist() == [float(len(text)) for text in part]
    assert set(judge.answered.values()) == {1}
    assert judge.calls > len(set(completions))
    assert judge.most == 3


def test_what_was_answered_before_a_failure_is_not_asked_again(tmp_path: Path) -> None:
    judge = Judge(lambda call: 5 <= call < 30)
    reward = PaidReward(judge, tmp_path / "answers.sqlite", ask=Ask(retries=1, backoff_seconds=0, concurrency=2))
    completions = [str(number) for number in range(20)]
    with pytest.raises(ConnectionError, match="call"):
        score(reward, completions)
    assert judge.calls < 10  # nothing new was asked after the failure
    judge.calls = 30
    assert score(reward, completions).rewards_BF[:, 0].tolist() == [float(len(text)) for text in completions]
    assert set(judge.answered.values()) == {1}


@pytest.mark.parametrize("fallback", [0.5, None])
def test_a_fallback_stands_in_and_is_asked_about_again(fallback: float | None) -> None:
    judge = Judge(lambda call: call <= 2)
    reward = PaidReward(judge, None, ask=Ask(retries=0, fallback=fallback))
    first = score(reward, ["x", "yy"])
    assert first.metrics["Judge/fell_back"] == [2.0]
    assert first.rewards_BF[:, 0].nan_to_num(-1).tolist() == [-1.0 if fallback is None else fallback] * 2
    assert score(reward, ["x", "yy"]).rewards_BF[:, 0].tolist() == [1.0, 2.0]


def test_a_judge_that_blocks_runs_in_threads_and_one_that_is_late_is_called_again() -> None:
    together, calls = threading.Barrier(4, timeout=30), Counter[str]()

    def judge(completion: str) -> float:
        calls[completion] += 1
        together.wait()
        return 1.0

    assert score(PaidReward(judge, None, ask=Ask(concurrency=4)), list("abcd")).rewards_BF.sum() == 4

    async def late(completion: str) -> float:
        calls["late"] += 1
        await asyncio.sleep(60 if calls["late"] == 1 else 0)
        return 2.0

    ask = Ask(timeout_seconds=0.05, backoff_seconds=0)
    assert score(PaidReward(late, None, ask=ask), ["x"]).rewards_BF.item() == 2.0
    assert calls["late"] == 2


@pytest.mark.slow
def test_late_calls_in_threads_hold_up_no_other_and_their_answers_are_kept(tmp_path: Path) -> None:
    hang, calls = threading.Event(), Counter[str]()

    def judge(completion: str) -> tuple[float, float]:
        calls[completion] += 1
        if completion == "x" and calls["x"] == 1:
            hang.wait(30)
        return 1.0, 0.5

    ask = Ask(retries=1, timeout_seconds=0.3, backoff_seconds=0, concurrency=1)
    try:
        assert score(PaidReward(judge, None, ask=ask), ["x", "y"]).rewards_BF.sum() == 2
    finally:
        hang.set()
    hang.clear()
    calls.clear()
    threading.Timer(0.5, hang.set).start()
    reward = PaidReward(judge, tmp_path / "answers.sqlite", ask=Ask(retries=0, timeout_seconds=0.1))
    with pytest.raises(TimeoutError):
        score(reward, ["x"])
    deadline = time.monotonic() + 30
    while not reward._known({reward._question(0, {"completion": "x"})}) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert score(reward, ["x"]).rewards_BF.item() == 1.0
    assert calls["x"] == 1


def test_an_infinite_reward_is_not_kept(tmp_path: Path) -> None:
    said = iter((float("inf"), 1e39, 1.0))

    async def judge(completion: str) -> float:
        return next(said)

    for _ in range(2):
        with pytest.raises(DataError, match="Return a finite number"):
            score(PaidReward(judge, tmp_path / "answers.sqlite", ask=QUICK), ["x"])
    assert score(PaidReward(judge, tmp_path / "answers.sqlite", ask=QUICK), ["x"]).rewards_BF.item() == 1.0


@pytest.mark.slow
def test_a_resumed_run_asks_only_what_was_never_answered(tmp_path: Path) -> None:
    def trainer(judge: Judge, folder: str = "run") -> GRPOTrainer:
        config = GRPOConfig(
            output_dir=str(tmp_path / folder),
            max_steps=4,
            save_steps=2,
            num_generations=4,
            per_device_train_batch_size=4,
            max_completion_length=6,
            report_to=[],
            memory_budget=None,
            use_cpu=True,
        )
        data = Dataset.from_dict({"prompt": ["a b", "c d", "e f", "g h"], "answer": list("1234")})
        reward = PaidReward(judge, tmp_path / "answers.sqlite", ask=Ask(retries=0, concurrency=1))
        return GRPOTrainer(tiny_model(), reward, config, data, processing_class=tiny_tokenizer())

    judge = Judge(lambda call: call == 14)
    with pytest.raises(ConnectionError):
        trainer(judge).train()
    resumed = trainer(judge)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert set(judge.answered.values()) == {1}

    plain = Judge()
    (tmp_path / "answers.sqlite").unlink()
    unbroken = trainer(plain, "plain")
    unbroken.train()
    for name, weight in unbroken.model.state_dict().items():
        torch.testing.assert_close(weight, resumed.model.state_dict()[name], rtol=0, atol=0)


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="retries is -1"):
        Ask(retries=-1)
    with pytest.raises(ConfigError, match="timeout_seconds is 'soon'"):
        Ask(timeout_seconds="soon")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot keep answers"):
        PaidReward(Judge(), tmp_path)
    with pytest.raises(DataError, match=r"'Judge' needs 'answer', and the dataset has no such column"):
        RewardRunner(PaidReward(Judge(), None)).check_columns(["prompt"])

    async def chatty(completion: str) -> Any:
        return "fine"

    with pytest.raises(DataError, match="Judge 'chatty' returned 'fine'"):
        score(PaidReward(chatty, None, ask=QUICK), ["x"])


def test_an_answer_that_cannot_be_written_is_not_paid_for_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "answers.sqlite"
    judge = Judge()
    reward = PaidReward(judge, cache, ask=QUICK)
    with closing(sqlite3.connect(cache, isolation_level=None)) as file:  # how a full disk answers, for root too
        file.execute("CREATE TRIGGER full BEFORE INSERT ON answers BEGIN SELECT RAISE(ABORT, 'disk is full'); END")
    for _ in range(2):
        assert score(reward, ["x", "yy"]).rewards_BF[:, 0].tolist() == [1.0, 2.0]
    assert judge.calls == 2
    assert "answers.sqlite cannot be written (disk is full): answers are kept for this run only." in caplog.text
