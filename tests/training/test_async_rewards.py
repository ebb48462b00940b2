"""Async reward functions are waited for while the reference scores; nothing that is learnt changes by it."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from memsafe_rl.errors import MemoryBudgetError, RewardTimeoutError
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.trainers.grpo import GRPOTrainer
from memsafe_rl.types import Phase
from tests.trainers.helpers import count_digits, make_trainer, rewire, weights


class Judge:
    """Pays for digits, and notes whether the reference had scored by the time it answered."""

    __name__ = "judge"

    def __init__(self, patience_seconds: float) -> None:
        self.scored = threading.Event()
        self.after_scoring: list[bool] = []
        self.cancelled = 0
        self._patience_seconds = patience_seconds

    async def __call__(self, completions: list[str], **_: Any) -> list[float]:
        try:
            self.after_scoring.append(await asyncio.to_thread(self.scored.wait, self._patience_seconds))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.scored.clear()
        return count_digits(completions)


def listen(trainer: GRPOTrainer, judge: Judge) -> None:
    """Has the judge hear of every scoring pass."""

    def noted(scored: Any, *arguments: Any, **named: Any) -> Any:
        found = scored(*arguments, **named)
        judge.scored.set()
        return found

    rewire(trainer, "collector.scorer", "scored", lambda scored: partial(noted, scored))


def train_with(tmp_path: Path, judge: Judge, **settings: Any) -> GRPOTrainer:
    given = {"beta": 0.1, "num_iterations": 2, "steps_per_generation": 2, "max_steps": 4}
    trainer = make_trainer(tmp_path, reward_funcs=[judge, count_digits], **{**given, **settings})
    listen(trainer, judge)
    trainer.train()
    return trainer


@pytest.mark.slow
def test_the_reference_scores_while_a_judge_is_waited_for(tmp_path: Path) -> None:
    waiting = Judge(patience_seconds=20)
    overlapped = train_with(tmp_path / "a", waiting)
    assert waiting.after_scoring == [True]
    alone = Judge(patience_seconds=0.05)
    one_by_one = train_with(tmp_path / "b", alone, overlap_async_rewards=False)
    assert alone.after_scoring == [False]
    assert torch.equal(weights(overlapped), weights(one_by_one))
    assert [record["reward"] for record in overlapped.history if "reward" in record] == [
        record["reward"] for record in one_by_one.history if "reward" in record
    ]


@pytest.mark.slow
def test_a_run_that_a_slow_judge_ended_goes_on_with_more_patience(tmp_path: Path) -> None:
    slow = [True]

    async def judge(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(60 if slow[0] and trainer.state.global_step else 0)
        return count_digits(completions)

    settings = {"reward_funcs": [judge], "save_strategy": "steps", "save_steps": 100}
    trainer = make_trainer(tmp_path, reward_timeout_seconds=0.05, **settings)
    with pytest.raises(RewardTimeoutError):
        trainer.train()
    slow[0] = False
    again = make_trainer(tmp_path, reward_timeout_seconds=30, reward_retries=1, **settings)
    assert again.train(resume_from_checkpoint=True).global_step == 2


@pytest.mark.parametrize("overlap", [True, False])
def test_a_judge_that_leaves_ends_the_run(tmp_path: Path, overlap: bool) -> None:
    async def judge(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0)
        if trainer.state.global_step:
            raise SystemExit(3)
        return count_digits(completions)

    trainer = make_trainer(tmp_path, reward_funcs=[judge], beta=0.1, overlap_async_rewards=overlap)
    with pytest.raises(SystemExit) as left:
        trainer.train()
    assert (left.value.code, trainer.state.global_step) == (3, 1)


def test_dynamic_sampling_waits_for_the_rewards_first(tmp_path: Path) -> None:
    judge = Judge(patience_seconds=0.05)
    train_with(tmp_path, judge, dynamic_sampling=True, max_steps=1)
    assert not any(judge.after_scoring)


def test_a_judge_is_cancelled_when_scoring_ends_the_run(tmp_path: Path) -> None:
    judge = Judge(patience_seconds=20)
    trainer = make_trainer(tmp_path, reward_funcs=[judge], beta=0.1, max_steps=1)

    def squeezed(*_: Any, **__: Any) -> Any:
        raise MemoryBudgetError("no room")

    rewire(trainer, "collector.scorer", "scored", lambda _: squeezed)
    with pytest.raises(MemoryBudgetError, match="no room"):
        trainer.train()
    trainer.rewards.close()
    judge.scored.set()
    assert (judge.cancelled, judge.after_scoring) == (1, [])


@pytest.mark.slow
def test_a_failure_in_the_overlapped_scoring_asks_no_judge_twice(tmp_path: Path) -> None:
    asked: list[int] = []

    async def judge(completions: list[str], **_: Any) -> list[float]:
        asked.append(len(completions))
        await asyncio.sleep(0.01)
        return count_digits(completions)

    def trained(folder: Path, faults: int) -> torch.Tensor:
        with SimulatedMemory() as device:
            trainer = make_trainer(folder, reward_funcs=[judge], beta=0.1, max_steps=2)
            phase = trainer.setup.memory.phase

            def failing(name: Phase, **options: Any) -> Any:
                if name is Phase.SCORE and faults:
                    device.fail_after(3)
                return phase(name, **options)

            trainer.setup.memory.phase = failing  # type: ignore[method-assign]
            trainer.train()
            failed = [event for event in trainer.memory_events if event["event"] == "failure"]
            assert bool(failed) == bool(faults)
            return weights(trainer)

    calm = trained(tmp_path / "calm", 0)
    assert torch.equal(trained(tmp_path / "failing", 1), calm)
    assert asked == [8, 8, 8, 8]


@pytest.mark.slow
def test_seconds_and_timeouts_of_a_judge_are_logged(tmp_path: Path) -> None:
    calls: list[int] = []

    async def judge(completions: list[str], **_: Any) -> list[float]:
        calls.append(1)
        await asyncio.sleep(60 if len(calls) == 1 else 0)
        return count_digits(completions)

    settings = {"reward_timeout_seconds": 0.05, "reward_retries": 1, "max_steps": 1}
    trainer = make_trainer(tmp_path, reward_funcs=[judge], **settings)
    trainer.train()
    (log,) = (log for log in trainer.state.log_history if "loss" in log)
    assert log["rewards/judge/timeouts"] == 1
    assert 0.05 <= log["time/reward/judge_seconds"] < 10
    calls.clear()
    with pytest.raises(RewardTimeoutError, match="reward_timeout_seconds"):
        make_trainer(tmp_path, reward_funcs=[judge], **{**settings, "reward_retries": 0}).train()
    calls.clear()
    none = make_trainer(
        tmp_path,
        reward_funcs=[judge, count_digits],
        **{**settings, "reward_retries": 0, "reward_timeout_result": "none"},
    )
    none.train()
    assert none.state.log_history[0]["rewards/judge/mean"] is None
