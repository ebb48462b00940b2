"""One rollout ahead: servers draw the next one while this one is learnt from, and every run draws the same."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from threading import Event, Semaphore
from typing import Any
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset

from memsafe_rl.errors import ConfigError
from memsafe_rl.training.learner import Learner
from tests.rollout.external.common import small_model
from tests.rollout.server.fake_server import FakeServer
from tests.trainers.helpers import PROMPTS, make_trainer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    started = FakeServer()
    yield started
    started.stop()


def run_on(server: FakeServer, folder: Path, **settings: Any) -> Any:
    fixed = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
    chosen = {"max_steps": 5, "async_rollouts": 1, "vllm_importance_sampling_mode": "token_truncate", **settings}
    return make_trainer(folder, model=small_model(tied=False), **fixed, **chosen)


def watched(trainer: Any, **arguments: Any) -> tuple[list[list[list[int]]], list[float]]:
    """Trains; gives each rollout's tokens, and how far off their log-probs are once they are learnt from."""
    tokens: list[list[list[int]]] = []
    gaps: list[float] = []
    step = Learner.step

    def noting(learner: Learner, state: Any) -> Any:
        if state.cursor.starts_rollout:
            rows = state.rollout.trajectory
            tokens.append([row.tolist() for row in rows.actions.rows()])
            with torch.no_grad():
                gaps.append(max(gap_of(trainer.model, rows, row) for row in range(len(rows))))
        return step(learner, state)

    with patch.object(Learner, "step", noting):
        trainer.train(**arguments)
    return tokens, gaps


def gap_of(model: Any, rows: Any, row: int) -> float:
    prompt, ids = rows.conditions.rows()[rows.condition_of_row[row]], rows.actions.rows()[row]
    logits = model(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1]
    own = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    return float((own - rows.sampling_logprobs.rows()[row]).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"num_iterations": 2, "max_steps": 10}], ids=["one step", "two steps"])
def test_rollouts_carry_weights_that_are_one_rollout_old(
    more: dict[str, Any], tmp_path: Path, server: FakeServer
) -> None:
    trainer = run_on(server, tmp_path, **more)
    drawn = trainer.setup.engine.supports.ahead.begin
    begun_at: list[int] = []

    def begin(*values: Any) -> None:
        begun_at.append(trainer.state.global_step)
        drawn(*values)

    trainer.setup.engine.supports.ahead.begin = begin
    _, gaps = watched(trainer)
    steps = trainer.args.num_iterations
    assert begun_at == [0, steps, 2 * steps, 3 * steps]  # before each rollout but the last is learnt from
    assert server.drawn == 5 * 8
    assert gaps[0] < 1e-4
    assert min(gaps[1:]) > 1e-3  # the weights have moved since
    # the first two are drawn with the same weights, then one rollout's steps lie between
    assert server.asked.count("/collective_rpc") == 4


@pytest.mark.slow
def test_a_run_is_repeatable_and_resumes_to_the_bit(tmp_path: Path, server: FakeServer) -> None:
    whole = run_on(server, tmp_path / "whole")
    first = watched(whole)[0]
    stopped = run_on(server, tmp_path / "cut", max_steps=5, save_strategy="steps", save_steps=2, save_total_limit=None)
    assert watched(stopped)[0] == first
    resumed = run_on(server, tmp_path / "on", max_steps=5)
    asked = server.drawn
    rest = watched(resumed, resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))[0]
    assert rest == first[2:]
    assert server.drawn - asked == 2 * 8  # the third rollout came with the checkpoint
    for mine, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.slow
def test_drawing_goes_on_while_the_run_learns(tmp_path: Path, server: FakeServer) -> None:
    step, learning, answered, drawn_within = Learner.step, Event(), Semaphore(0), []

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if server.drawn > 8:  # the first rollout is drawn before anything is learnt
            assert learning.wait(60)
            answered.release()
        return body

    def waiting(learner: Learner, state: Any) -> Any:
        learning.set()
        ahead = 8 if len(drawn_within) < 2 else 0
        drawn_within.append(sum(answered.acquire(timeout=60) for _ in range(ahead)))
        learning.clear()
        return step(learner, state)

    server.spoil = answer
    with patch.object(Learner, "step", waiting):
        run_on(server, tmp_path, max_steps=3).train()
    assert drawn_within == [8, 8, 0]
    assert server.drawn == 3 * 8


@pytest.mark.slow
def test_evaluations_wait_until_the_servers_are_done_with_the_older_weights(tmp_path: Path, server: FakeServer) -> None:
    prompts = Dataset.from_dict({"prompt": PROMPTS[:2]})
    evaluated = run_on(
        server, tmp_path / "evaluated", eval_strategy="steps", eval_steps=1, eval_dataset=prompts, max_steps=3
    )
    assert watched(evaluated)[0] == watched(run_on(server, tmp_path / "plain", max_steps=3))[0]


@pytest.mark.slow
def test_a_server_that_fails_for_a_moment_changes_no_token(tmp_path: Path, server: FakeServer) -> None:
    expected = watched(run_on(server, tmp_path / "healthy", max_steps=3))[0]
    calls = count()
    server.spoil = lambda answer: {} if next(calls) % 13 == 10 else answer
    assert watched(run_on(server, tmp_path / "failing", max_steps=3))[0] == expected
    assert next(calls) > 3 * 8


@pytest.mark.slow
def test_what_a_dead_server_leaves_undrawn_is_drawn_later(
    tmp_path: Path, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = run_on(server, tmp_path, max_steps=3)
    server.dies_after = 8 + 3
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "5 of 8 completions were not drawn ahead and are drawn with newer weights" in caplog.text
    assert "The own engine draws 5 of 8 completions" in caplog.text
    assert trainer.state.global_step == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_vllm": False}, "async_rollouts is 1, but the engine 'native' draws in this process"),
        ({"async_rollouts": 2}, "async_rollouts is 2"),
        ({"dynamic_sampling": True}, "async_rollouts is 1, but with dynamic_sampling"),
        ({"vllm_importance_sampling_correction": False}, "vllm_importance_sampling_correction is False"),
        ({"use_vllm": False, "rollout_func": print}, "Leave it out beside tools, environment_factory and rollout_func"),
    ],
)
def test_what_cannot_be_drawn_ahead_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    fixed = {"use_vllm": True, "vllm_mode": "server", "async_rollouts": 1}
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, model=small_model(tied=False), **{**fixed, **settings})
