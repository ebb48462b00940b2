"""SIGTERM, SIGINT, SIGHUP and a stop file end a run after its step, saved, with a code that says "try again"."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from memsafe_rl.checkpoint.store import checkpoints
from memsafe_rl.config.grpo import GRPOConfig
from memsafe_rl.errors import TrainingInterrupted
from memsafe_rl.memory.runtime.interrupts import SIGNALS, StopRequest, uninterrupted
from memsafe_rl.training.run_files import RunFiles, resume_command
from tests.trainers.helpers import count_digits, make_trainer, weights

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 500, "max_steps": 4}


@pytest.fixture(autouse=True)
def _signals_by_default() -> Iterator[None]:
    """Has every signal as a terminal's shell leaves it; one in the background ignores some."""
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


class At(TrainerCallback):
    """Does something at an event of a step."""

    def __init__(self, event: str, step: int, do: Any) -> None:
        def handler(args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step:
                do()

        setattr(self, event, handler)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_run_after_its_step_and_saves_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: signal.Signals
) -> None:
    whole = make_trainer(tmp_path / "whole", **SAVING)
    whole.train()
    rewarded: list[int] = []

    def reward(completions: list[str], **columns: Any) -> list[float]:
        rewarded.append(1)
        if len(rewarded) == 2:
            signal.raise_signal(number)
        return count_digits(completions, **columns)

    before = signal.getsignal(number)
    with pytest.raises(TrainingInterrupted) as caught:
        make_trainer(tmp_path / "run", reward_funcs=reward, **SAVING).train()
    assert (caught.value.code, caught.value.reason) == (75, number.name)
    assert signal.getsignal(number) == before
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-2"]
    assert f"step 2 is saved in {tmp_path / 'run' / 'checkpoint-2'}; resume with: " in caplog.text
    second = make_trainer(tmp_path / "run", reward_funcs=reward, **SAVING)
    second.train(resume_from_checkpoint=True)
    assert torch.equal(weights(second), weights(whole))


@pytest.mark.slow
@pytest.mark.parametrize("manner", ["twice", "no grace", "grace over", "grace over while it waits"])
def test_a_step_that_is_abandoned_is_resumed_from_its_beginning(tmp_path: Path, manner: str) -> None:
    whole = make_trainer(tmp_path / "whole", **SAVING)
    whole.train()
    rewarded: list[int] = []
    asked: list[float] = []
    grace = {"twice": 60.0, "no grace": 0.0}.get(manner, 0.05)

    def reward(completions: list[str], **columns: Any) -> list[float]:
        rewarded.append(1)
        if len(rewarded) == 3:
            asked.append(time.monotonic())
            signal.raise_signal(signal.SIGTERM)
            if manner == "twice":
                signal.raise_signal(signal.SIGTERM)
            if manner == "grace over while it waits":
                threading.Event().wait(60)
            while True:
                pass
        return count_digits(completions, **columns)

    with pytest.raises(TrainingInterrupted, match="SIGTERM"):
        make_trainer(tmp_path / "run", reward_funcs=reward, interrupt_grace_seconds=grace, **SAVING).train()
    assert time.monotonic() - asked[0] < 50
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-2"]
    second = make_trainer(tmp_path / "run", **SAVING)
    second.train(resume_from_checkpoint=True)
    assert torch.equal(weights(second), weights(whole))


@pytest.mark.slow
def test_a_stop_file_ends_the_run_and_is_taken_away(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, callbacks=[At("on_step_end", 2, (tmp_path / "stop").touch)], **SAVING)
    with pytest.raises(TrainingInterrupted, match="stop was found"):
        trainer.train()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2"]
    assert make_trainer(tmp_path, **SAVING).train(resume_from_checkpoint=True).global_step == 4


def test_advice_to_resume_is_given_only_where_there_is_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stops = At("on_step_end", 1, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(TrainingInterrupted):
        make_trainer(tmp_path, callbacks=[stops]).train()
    assert "SIGTERM: nothing was saved (save_strategy is 'no')" in caplog.text


def test_a_second_signal_lets_a_save_end_and_the_third_leaves() -> None:
    stop, heard = StopRequest(60), []

    def save() -> None:
        with stop.listening(), stop.saving():
            for count in (1, 2, 3):
                heard.append(count)
                signal.raise_signal(signal.SIGTERM)
            heard.append(4)

    with pytest.raises(TrainingInterrupted):
        save()
    assert heard == [1, 2, 3]


def test_a_third_signal_amid_a_save_begins_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, asked = RunFiles.save, []

    def interrupted(self: RunFiles, *values: Any, **named: Any) -> None:
        asked.append(1)
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        save(self, *values, **named)

    monkeypatch.setattr(RunFiles, "save", interrupted)
    with pytest.raises(TrainingInterrupted):
        make_trainer(tmp_path, **{**SAVING, "save_steps": 1}).train()
    assert (asked, checkpoints(tmp_path)) == ([1], [])


def test_a_commit_is_never_cut_in_half() -> None:
    stop, done = StopRequest(), []

    def step() -> None:
        with stop.listening():
            with uninterrupted():
                signal.raise_signal(signal.SIGTERM)
                done.append("the commit")
            done.append("something else")

    with pytest.raises(TrainingInterrupted):
        step()
    assert done == ["the commit"]


def test_what_a_commit_held_when_a_signal_came_goes_with_its_error() -> None:
    """The signal's frame was kept in a cycle, and with it the gradient that was being clipped."""

    class Held:
        pass

    def commit() -> weakref.ref[Held]:
        held = Held()
        signal.raise_signal(signal.SIGINT)
        return weakref.ref(held)

    gc.disable()
    try:
        with pytest.raises(TrainingInterrupted), StopRequest().listening(), uninterrupted():
            found = commit()
        assert found() is None
    finally:
        gc.enable()


def test_a_handler_of_the_scripts_own_stays() -> None:
    heard: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with StopRequest(60).listening():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert heard == [signal.SIGTERM]


@pytest.mark.slow
def test_a_process_that_is_asked_to_stop_ends_with_its_own_code(tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from tests.trainers.helpers import make_trainer
from tests.training.test_interrupts import SAVING, At
make_trainer(Path({str(tmp_path)!r}), callbacks=[At("on_step_end", 1, lambda: os.kill(os.getpid(), signal.SIGTERM))],
             **SAVING).train()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=os.environ)
    assert ended.returncode == 75, ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("grace", [0.0, 60.0])
def test_a_signal_while_a_checkpoint_is_read_leaves_it_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grace: float
) -> None:
    """Half restored, the step is already that of the checkpoint, and nothing else is."""
    make_trainer(tmp_path, **{**SAVING, "save_steps": 1, "max_steps": 2}).train()
    before = {path.name: path.read_bytes() for path in (tmp_path / "checkpoint-2").iterdir()}

    def interrupted(**_: Any) -> None:
        for _ in range(1 if grace == 0 else 2):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("memsafe_rl.training.checkpoints.Cursor", interrupted)
    with pytest.raises(TrainingInterrupted):
        make_trainer(tmp_path, interrupt_grace_seconds=grace, **SAVING).train(resume_from_checkpoint=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "checkpoint-2").iterdir()} == before


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_a_handler_of_the_scripts_own_waits_for_a_commit_too(raised: type[BaseException]) -> None:
    done: list[str] = []

    def own(*_: Any) -> None:
        raise raised

    def step() -> None:
        signal.signal(signal.SIGTERM, own)
        with StopRequest(60).listening(), uninterrupted():
            signal.raise_signal(signal.SIGTERM)
            done.append("the commit")

    with pytest.raises(raised):
        step()
    assert done == ["the commit"]
    assert signal.getsignal(signal.SIGTERM) is own


def test_the_command_that_resumes_can_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the path of the environment it was started from."""
    monkeypatch.setattr(sys, "argv", ["/home/me/.venv/bin/memsafe-rl", "train", "my run.yaml"])
    settings = GRPOConfig(max_steps=1, use_cpu=True)
    assert resume_command(settings) == "memsafe-rl train 'my run.yaml' --resume-from-checkpoint true"
    monkeypatch.setattr(sys, "argv", ["train.py", "--size", "3"])
    assert resume_command(settings) == "trainer.train(resume_from_checkpoint=True)"
    settings.resume_from_checkpoint = "auto"
    assert resume_command(settings) == f"{Path(sys.executable).name} train.py --size 3"
