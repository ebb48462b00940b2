"""A resumed run logs, evaluates, saves and stops where the unbroken one does."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from memsafe_rl.errors import TrainingInterrupted
from memsafe_rl.records import read_lines
from memsafe_rl.training.collector import Collector
from tests.trainers.helpers import make_trainer, weights
from tests.training.test_interrupts import At

EVALUATING: dict[str, Any] = {
    "eval_dataset": Dataset.from_dict({"prompt": ["1+1=", "2+1="]}),
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 500,
    "logging_steps": 2,
    "max_steps": 4,
    "interrupt_grace_seconds": 0.0,
}


def test_a_resume_on_a_smaller_device_keeps_to_its_own_budget(tmp_path: Path) -> None:
    settings = {"memory_budget": "auto", "save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path, max_steps=1, **settings).train()
    resumed = make_trainer(tmp_path, max_steps=2, **settings)
    resumed.setup.memory.budget_bytes = 64 << 20
    resumed.train(resume_from_checkpoint=True)
    assert resumed.setup.memory.budget_bytes == 64 << 20


def kill() -> None:
    raise RuntimeError("as a kill leaves it")


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


def logged(trainer: Any) -> list[dict[str, Any]]:
    """Returns what was logged, without what a clock says or a machine holds."""
    kept = ("step", "epoch", "loss", "reward", "eval_reward", "grad_norm", "learning_rate", "entropy")
    return [{name: record[name] for name in kept if name in record} for record in trainer.state.log_history]


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize("event", ["on_step_end", "on_log", "evaluation", "on_evaluate"])
def test_what_followed_a_step_that_was_cut_short_is_done_by_the_next_start(
    tmp_path: Path, event: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_trainer(tmp_path / "whole", **EVALUATING)
    whole.train()
    cut = make_trainer(tmp_path / "run", **EVALUATING)
    if event == "evaluation":
        evaluate = Collector.evaluate

        def cut_short(*given: Any) -> Any:
            if cut.state.global_step == step:
                terminate()
            return evaluate(*given)

        monkeypatch.setattr(Collector, "evaluate", cut_short)
    else:
        cut.add_callback(At(event, step, terminate))
    with pytest.raises(TrainingInterrupted):
        cut.train()
    monkeypatch.undo()
    resumed = make_trainer(tmp_path / "run", **EVALUATING)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(weights(resumed), weights(whole))
    if event == "on_evaluate":  # the record stands already, its evaluation is not known to have been heard
        assert {json.dumps(one) for one in logged(resumed)} == {json.dumps(one) for one in logged(whole)}
    else:
        assert logged(resumed) == logged(whole)


@pytest.mark.slow
def test_the_end_of_an_epoch_after_the_last_save_is_not_lost(tmp_path: Path) -> None:
    """The checkpoint of the epoch's last step is written before the epoch is evaluated."""
    settings = {**EVALUATING, "eval_strategy": "epoch", "save_steps": 8, "max_steps": 9}

    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    assert [one["step"] for one in whole.state.log_history if "eval_reward" in one] == [8, 9]
    with pytest.raises(RuntimeError, match="as a kill"):
        make_trainer(tmp_path / "run", callbacks=[At("on_epoch_end", 8, kill)], **settings).train()
    resumed = make_trainer(tmp_path / "run", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed) == logged(whole)


@pytest.mark.slow
@pytest.mark.parametrize("event", ["on_epoch_end", "on_step_begin"])
def test_what_is_logged_behind_its_steps_checkpoint_counts_once_after_two_kills(tmp_path: Path, event: str) -> None:
    """The epoch's evaluation follows the checkpoint; the first kill comes before it, or after it."""
    settings = {**EVALUATING, "eval_strategy": "epoch", "save_steps": 1, "max_steps": 10}
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    for place in ((event, 8), ("on_step_begin", 9)):
        killed = make_trainer(tmp_path / "run", callbacks=[At(*place, kill)], **settings)
        with pytest.raises(RuntimeError, match="as a kill"):
            killed.train(resume_from_checkpoint="auto")
    resumed = make_trainer(tmp_path / "run", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed) == logged(whole)
    lines = {name: read_lines(tmp_path / name / "metrics.jsonl")[0] for name in ("whole", "run")}
    once = [(line["step"], "eval_reward" in line) for line in lines["run"] if not line.get("redone")]
    assert once == [(line["step"], "eval_reward" in line) for line in lines["whole"]]
    assert len(lines["run"]) - len(once) == (event == "on_step_begin")


@pytest.mark.slow
def test_completions_that_were_not_shown_before_a_kill_are_shown_after_it(tmp_path: Path) -> None:
    """A rollout's completions are shown at the next log, and the checkpoint lies between the two."""
    settings = {**EVALUATING, "log_completions": True, "steps_per_generation": 2, "save_steps": 1, "max_steps": 4}
    make_trainer(tmp_path / "whole", **settings).train()
    with pytest.raises(RuntimeError, match="as a kill"):
        make_trainer(tmp_path / "run", callbacks=[At("on_step_begin", 1, kill)], **settings).train()
    make_trainer(tmp_path / "run", **settings).train(resume_from_checkpoint=True)
    shown = [
        {path.name: path.read_text() for path in (tmp_path / name / "completions").iterdir()}
        for name in ("whole", "run")
    ]
    assert sorted(shown[0]) == ["completions_00002.jsonl", "completions_00004.jsonl"]
    assert shown[1] == shown[0]


@pytest.mark.slow
@pytest.mark.parametrize("event", ["on_evaluate", "on_epoch_end"])
@pytest.mark.parametrize("number", [1, 2])
def test_the_best_and_the_patience_survive_a_signal_while_callbacks_hear(
    tmp_path: Path, event: str, number: int
) -> None:
    settings: dict[str, Any] = {
        **EVALUATING,
        "metric_for_best_model": "reward",
        "load_best_model_at_end": True,
        "eval_strategy": "epoch" if event == "on_epoch_end" else "steps",
        "save_strategy": "epoch" if event == "on_epoch_end" else "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "max_steps": 8,
    }
    whole, cut, resumed = (
        make_trainer(tmp_path / folder, callbacks=[EarlyStoppingCallback(3, 100.0)], **settings)
        for folder in ("whole", "run", "run")
    )
    whole.train()
    cut.add_callback(At(event, 8 if event == "on_epoch_end" else number, terminate))  # after the patience has counted
    with pytest.raises(TrainingInterrupted):
        cut.train()
    assert resumed.train(resume_from_checkpoint=True).global_step == whole.state.global_step
    for name in ("best_metric", "best_global_step", "global_step"):
        assert getattr(resumed.state, name) == getattr(whole.state, name), name
    assert whole.state.best_metric is not None
    evaluated = [one["step"] for one in logged(resumed) if "eval_reward" in one]
    expected = [one["step"] for one in logged(whole) if "eval_reward" in one]
    assert evaluated == expected if event == "on_epoch_end" else set(evaluated) == set(expected)


@pytest.mark.slow
def test_a_run_that_died_after_its_last_checkpoint_is_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {**EVALUATING, "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    ended: list[int] = []
    whole = make_trainer(tmp_path, **settings)
    whole.train()  # and dies before its script saves
    for resume in (True, "auto", tmp_path / "checkpoint-4"):
        again = make_trainer(tmp_path, callbacks=[At("on_train_end", 4, lambda: ended.append(4))], **settings)
        assert again.train(resume_from_checkpoint=resume).global_step == 4
        assert "nothing is left to train: " in caplog.text
        again.save_model()
        assert torch.equal(weights(again), weights(whole))
        assert [record["step"] for record in again.history] == [1, 2, 3, 4]
    assert ended == [4, 4, 4]


@pytest.mark.slow
def test_a_state_that_json_cannot_hold_is_left_out_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Odd(TrainerCallback, ExportableState):
        def __init__(self) -> None:
            self.seen: Any = {1, 2}

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"seen": self.seen}}

    odd, settings = Odd(), {"save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path, callbacks=[odd], **settings).train()
    assert "what Odd exports as its state is not saved, for JSON has no form for it" in caplog.text
    again = Odd()
    make_trainer(tmp_path, max_steps=3, callbacks=[again], **settings).train(resume_from_checkpoint=True)
    assert again.seen == {1, 2}
    again.seen = np.array([1, 2])
    make_trainer(tmp_path, max_steps=4, callbacks=[again], **settings).train(resume_from_checkpoint=True)
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["Odd"]["attributes"] == {"seen": [1, 2]}


@pytest.mark.slow
def test_averages_of_half_a_window_are_resumed(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 3, "max_steps": 6}
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    make_trainer(tmp_path / "run", **{**settings, "max_steps": 2, "logging_steps": 3}).train()
    resumed = make_trainer(tmp_path / "run", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert [one["step"] for one in resumed.state.log_history][-3:] == [3, 6, 6]
    assert [one for one in logged(resumed) if one["step"] in (3, 6)] == logged(whole)


@pytest.mark.slow
def test_patience_goes_on_where_it_was(tmp_path: Path) -> None:
    settings = {
        **EVALUATING,
        "metric_for_best_model": "reward",
        "load_best_model_at_end": True,
        "eval_steps": 1,
        "save_steps": 1,
        "max_steps": 8,
    }

    def trainer(folder: Path, **more: Any) -> Any:
        # Nothing improves by this much, so that each evaluation after the first takes of the patience.
        return make_trainer(folder, callbacks=[EarlyStoppingCallback(3, 100.0)], **{**settings, **more})

    whole = trainer(tmp_path / "whole")
    assert whole.train().global_step == 4
    trainer(tmp_path / "run", max_steps=3).train()
    state = json.loads((tmp_path / "run" / "checkpoint-3" / "trainer_state.json").read_text())
    counted = state["stateful_callbacks"]["EarlyStoppingCallback"]["attributes"]
    assert counted == {"early_stopping_patience_counter": 2}
    assert trainer(tmp_path / "run").train(resume_from_checkpoint=True).global_step == 4


@pytest.mark.slow
def test_numbers_of_numpy_in_the_trainers_state_are_saved(tmp_path: Path) -> None:
    class Sets(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            state.best_metric, state.trial_params = np.float32(0.5), {"lr": np.array([1.0, 2.0])}

    settings = {"save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(tmp_path, callbacks=[Sets()], **settings)
    trainer.train()
    trainer.save_state()
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        saved = json.loads((folder / "trainer_state.json").read_text())
        assert (saved["best_metric"], saved["trial_params"]) == (0.5, {"lr": [1.0, 2.0]})
    resumed = make_trainer(tmp_path, max_steps=3, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.best_metric == 0.5


@pytest.mark.slow
def test_a_record_keeps_its_own_fields_whatever_a_user_logs(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    mine = {"start": 7, "redone": True, "run_id": "mine", "epoch": 40.0, "seconds": 3.0, "step": 99}

    class Logs(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                trainer.log(mine)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            heard.append(dict(logs))

    settings = {"save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(tmp_path, callbacks=[Logs()], **settings)
    trainer.train()
    assert heard[0] == mine
    line = read_lines(tmp_path / "metrics.jsonl")[0][0]
    run = json.loads((tmp_path / "run.json").read_text())["run_id"]
    assert (line["step"], line["start"], line["run_id"], line["seconds"]) == (1, 0, run, 3.0)
    assert "redone" not in line
    assert line["epoch"] == trainer.state.log_history[0]["epoch"] < 1
    assert {line[f"logged/{name}"] for name in ("start", "run_id", "epoch", "step")} == {7, "mine", 40.0, 99}
    resumed = make_trainer(tmp_path, max_steps=3, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.log_history[0] == trainer.state.log_history[0]
