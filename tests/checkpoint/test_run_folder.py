"""A run folder belongs to one run, and nothing a run has written is lost."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from memsafe_rl.checkpoint.run_folder import claim, refuse_taken
from memsafe_rl.checkpoint.store import checkpoints
from memsafe_rl.checkpoint.weights import read_weights
from memsafe_rl.errors import ConfigError, DamagedCheckpointError, SaveError
from memsafe_rl.records import read_lines
from memsafe_rl.trainers.grpo import GRPOTrainer
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.helpers import PROMPTS, count_digits, make_trainer, weights
from tests.trainers.test_ppo import make_ppo

ONE = [{"prompt": PROMPTS[0]}]
SAVING = {"save_strategy": "steps", "save_steps": 1}


def lines(path: Path) -> list[dict[str, Any]]:
    return read_lines(path)[0]


def run_id(folder: Path) -> str:
    return json.loads((folder / "run.json").read_text())["run_id"]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_logs_of_a_run_that_left_no_weights_move_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(tmp_path, max_steps=3).train()
    first = run_id(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in ("steps.jsonl", "metrics.jsonl", "memory.jsonl")}
    make_trainer(tmp_path, max_steps=1).train()
    assert {name: (tmp_path / "previous" / first / name).read_bytes() for name in before} == before
    assert [line["step"] for line in lines(tmp_path / "steps.jsonl")] == [1]
    assert run_id(tmp_path) != first
    assert f"are now in {tmp_path / 'previous' / first}" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("left", ["checkpoint", "weights"])
def test_a_folder_with_another_runs_weights_is_refused(tmp_path: Path, left: str) -> None:
    trainer = make_trainer(tmp_path, max_steps=1, **(SAVING if left == "checkpoint" else {}))
    trainer.train()
    if left == "weights":
        trainer.save_model()
    told = r"holds (checkpoint-1|model\.safetensors) of an earlier run \(\w{8}\).*resume_from_checkpoint=True.*another"
    with pytest.raises(ConfigError, match=told + r" output_dir.*overwrite_output_dir=True"):
        make_trainer(tmp_path, max_steps=1).train()
    first = run_id(tmp_path)
    held = {path.name for path in tmp_path.iterdir()} - {".run.lock"}
    make_trainer(tmp_path, max_steps=1, overwrite_output_dir=True).train()
    assert {path.name for path in (tmp_path / "previous" / first).iterdir()} == held
    assert checkpoints(tmp_path) == []


@pytest.mark.slow
def test_a_second_call_of_the_same_trainer_keeps_the_first_ones_files(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=2, **SAVING)
    trainer.train()
    first = run_id(tmp_path)
    trainer.train()
    assert [path.name for path in checkpoints(tmp_path / "previous" / first)] == ["checkpoint-1", "checkpoint-2"]
    assert len(lines(tmp_path / "steps.jsonl")) == len(lines(tmp_path / "previous" / first / "steps.jsonl")) == 2


def test_an_evaluation_between_two_runs_is_logged_with_the_first(tmp_path: Path) -> None:
    prompts = Dataset.from_dict({"prompt": ["1+1="]})
    trainer = make_trainer(tmp_path, max_steps=1, eval_dataset=prompts)
    trainer.evaluate()
    trainer.train()
    first = run_id(tmp_path)
    trainer.evaluate()
    trainer.train()
    logged = [
        ["eval_reward" in line for line in lines(folder / "metrics.jsonl")]
        for folder in (tmp_path / "previous" / first, tmp_path)
    ]
    assert logged == [[True, False, False, True], [False, False]]


@pytest.mark.slow
def test_a_checkpoint_of_another_run_that_was_copied_here_is_not_resumed(tmp_path: Path) -> None:
    make_trainer(tmp_path / "a", max_steps=1, **SAVING).train()
    make_trainer(tmp_path / "b", max_steps=2, **SAVING).train()
    shutil.copytree(tmp_path / "b" / "checkpoint-2", tmp_path / "a" / "checkpoint-2")
    found = claim(tmp_path / "a", True)
    found.release()
    assert found.checkpoint == tmp_path / "a" / "checkpoint-1"
    with pytest.raises(ConfigError, match="which holds checkpoint-1, checkpoint-2 of an earlier run"):
        claim(tmp_path / "a", tmp_path / "a" / "checkpoint-2")


def test_two_runs_cannot_train_in_one_folder(tmp_path: Path) -> None:
    held = claim(tmp_path, None)
    with pytest.raises(ConfigError, match=rf"another run is training \(process {os.getpid()} on .*{held.mark.run_id}"):
        make_trainer(tmp_path).train()
    with pytest.raises(ConfigError, match="another run is training"):  # as the command says before it loads weights
        refuse_taken(tmp_path)
    held.release()
    refuse_taken(tmp_path)
    make_trainer(tmp_path, max_steps=1).train()


@pytest.mark.slow
def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from memsafe_rl.checkpoint.run_folder import claim
claim(Path({str(tmp_path)!r}), None)
if os.fork() == 0:
    os.execvp("sleep", ["sleep", "60"])  # a reward's process that outlives the run
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    claim(tmp_path, None).release()


@pytest.mark.slow
def test_a_resumed_run_cuts_no_log_and_marks_what_is_done_again(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole", max_steps=6)
    whole.train()
    first = make_trainer(tmp_path / "run", max_steps=5, **SAVING)
    first.train()
    second = make_trainer(tmp_path / "run", max_steps=6)
    second.train(tmp_path / "run" / "checkpoint-3")
    for name in ("steps.jsonl", "metrics.jsonl"):
        found = [line for line in lines(tmp_path / "run" / name) if "train_runtime" not in line]
        assert [(line["step"], line["start"], line.get("redone", False)) for line in found] == [
            *((step, 0, False) for step in (1, 2, 3, 4, 5)),
            *((4, 1, True), (5, 1, True), (6, 1, False)),
        ]
        assert {line["run_id"] for line in found} == {run_id(tmp_path / "run")}
    assert weights(second).equal(weights(whole))
    learnt = ("step", "epoch", "loss", "grad_norm", "reward", "num_tokens", "learning_rate")
    assert [[one[name] for name in learnt] for one in second.history] == [
        [one[name] for name in learnt] for one in whole.history
    ]
    logged = [(one["step"], one.get("loss")) for one in second.state.log_history]
    assert logged == [(one["step"], one.get("loss")) for one in whole.state.log_history]


@pytest.mark.slow
def test_rotation_never_takes_the_newest_of_a_run_that_went_back(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=5, **SAVING).train()
    make_trainer(tmp_path, max_steps=4, save_total_limit=1, **SAVING).train(tmp_path / "checkpoint-2")
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-4"]


@pytest.mark.slow
def test_zero_steps_of_training_are_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path / "run", max_steps=2, **SAVING).train()
    told = r"nothing is left to train: .*checkpoint-2 is at step 2 of {}. Raise max_steps"
    with pytest.raises(ConfigError, match=told.format(1)):
        make_trainer(tmp_path / "run", max_steps=1).train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match=told.format(2)):  # as a new run
        make_trainer(tmp_path / "new", max_steps=2).train(tmp_path / "run" / "checkpoint-2")


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(tmp_path / "run", max_steps=3, **SAVING).train()
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoint-3").iterdir())
    assert {"model.safetensors", "training_state.pt", "loop.json", "trainer_state.json", "manifest.json"} <= {*names}
    for name in names:
        for damage in (flip_a_bit, lambda path: path.write_bytes(path.read_bytes()[:-1]), Path.unlink):
            shutil.copytree(tmp_path / "run", tmp_path / "damaged")
            damage(tmp_path / "damaged" / "checkpoint-3" / name)
            caplog.clear()
            found = claim(tmp_path / "damaged", True)
            found.release()
            assert found.checkpoint == tmp_path / "damaged" / "checkpoint-2", (name, damage)
            assert name in caplog.text, (name, damage)
            with pytest.raises(DamagedCheckpointError, match=r"checkpoint-3.*Delete it and resume from an earlier one"):
                claim(tmp_path / "damaged", tmp_path / "damaged" / "checkpoint-3")
            shutil.rmtree(tmp_path / "damaged")


@pytest.mark.slow
def test_auto_starts_anew_where_there_is_nothing_to_resume(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=1, resume_from_checkpoint="auto", **SAVING).train()
    trainer = make_trainer(tmp_path, max_steps=2, resume_from_checkpoint="auto", **SAVING)
    trainer.train()
    assert [line["start"] for line in lines(tmp_path / "steps.jsonl")] == [0, 1]


def test_strays_of_a_dead_run_go_and_a_checkpoint_being_replaced_comes_back(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=2, **SAVING).train()
    (tmp_path / "checkpoint-2").rename(tmp_path / ".checkpoint-2.old")
    (tmp_path / ".checkpoint-2.part").mkdir()
    (tmp_path / ".run.json.123").write_text("{")
    folder = claim(tmp_path, True)
    folder.release()
    assert folder.checkpoint == tmp_path / "checkpoint-2"
    assert not [path for path in tmp_path.glob(".*") if path.name != ".run.lock"]


@pytest.mark.parametrize("choice", ["raise", "warn"])
def test_a_full_disk_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, choice: str
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    trainer = make_trainer(tmp_path, max_steps=2, on_save_error=choice, **SAVING)
    told = "checkpoint-1 was not saved: No space left on device"
    if choice == "raise":
        with pytest.raises(SaveError, match=told + r". It takes .* free are 1000 B"):
            trainer.train()
    else:
        assert trainer.train().global_step == 2
        assert told in caplog.text
    assert checkpoints(tmp_path) == []
    assert not list(tmp_path.glob(".checkpoint-*"))


@pytest.mark.parametrize("place", ["/proc/x", "file", "x" * 300, "a\0b"])
def test_an_unusable_folder_is_named_before_any_weight_is_loaded(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    told = r" is .*, which cannot be written \(.*\)"
    with pytest.raises(ConfigError, match="^output_dir" + told):
        make_trainer(tmp_path / place, model="no/such-model")
    with pytest.raises(ConfigError, match="^save_model's folder" + told):
        make_trainer(tmp_path).save_model(str(tmp_path / place))


def test_what_cannot_be_saved_or_followed_is_named_before_any_weight_is_loaded(tmp_path: Path) -> None:
    class Unsavable(type(tiny_tokenizer())):  # type: ignore[misc]
        def save_pretrained(self, *_: Any, **__: Any) -> None:
            raise NotImplementedError("its vocabulary is elsewhere")

    tokenizer = tiny_tokenizer()
    tokenizer.__class__ = Unsavable
    with pytest.raises(ConfigError, match=r"Unsavable whose files cannot be saved \(NotImplementedError: its vocab"):
        make_trainer(tmp_path, processing_class=tokenizer, save_strategy="steps")
    make_trainer(tmp_path, processing_class=tokenizer)
    with pytest.raises(ConfigError, match="report_to has 'clearml', which is not installed"):
        make_trainer(tmp_path, report_to="clearml")


def test_a_log_that_is_deleted_during_the_run_is_written_again(tmp_path: Path) -> None:
    class Deletes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            while state.global_step == 2 and (tmp_path / "run").exists():  # its status may be written meanwhile
                shutil.rmtree(tmp_path / "run", ignore_errors=True)

    trainer = make_trainer(tmp_path / "run", max_steps=4, callbacks=[Deletes()])
    trainer.train()
    assert [line["step"] for line in lines(tmp_path / "run" / "steps.jsonl")] == [1, 2, 3, 4]
    assert [one["step"] for one in trainer.history] == [1, 2, 3, 4]


def test_what_the_user_keeps_in_the_folder_stays(tmp_path: Path) -> None:
    names = (".settings.json.bak", ".notes.json.swp", ".checkpoint-x.old", ".checkpoint-mine.part")
    for name in names:
        (tmp_path / name).write_text("mine")
    make_trainer(tmp_path, max_steps=1).train()
    assert [(tmp_path / name).read_text() for name in names] == ["mine"] * 4


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_where_the_folder_has_another_name(tmp_path: Path) -> None:
    best = SimpleNamespace(step=2)

    class Best(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == best.step:
                state.best_global_step = best.step

    make_trainer(tmp_path / "run", max_steps=3, callbacks=[Best()], **SAVING).train()
    (tmp_path / "run").rename(tmp_path / "moved")
    make_trainer(tmp_path / "moved", max_steps=6, save_total_limit=2, **SAVING).train(resume_from_checkpoint=True)
    assert [path.name for path in checkpoints(tmp_path / "moved")] == ["checkpoint-2", "checkpoint-6"]


def test_a_callback_that_fails_at_the_end_leaves_no_lock(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_run_closed(self) -> None:
            raise OSError("the callback's own")

    with pytest.raises(OSError, match="the callback's own"):
        make_trainer(tmp_path, max_steps=1, callbacks=[Fails()]).train()
    make_trainer(tmp_path, max_steps=1).train()


class TestBackground:
    """A checkpoint that is written while training goes on is the one that would have been written at once."""

    def contents(self, folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".safetensors"}

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["full", "lora", "ppo"])
    def test_it_holds_the_step_it_was_taken_at(self, tmp_path: Path, kind: str) -> None:
        def trainer(folder: Path, **settings: Any) -> Any:
            defaults = {"max_steps": 4, "num_iterations": 2, "lr_scheduler_type": "constant"}
            settings = {**defaults, **SAVING, **settings}
            if kind == "ppo":
                return make_ppo(folder, **settings)
            return make_trainer(folder, peft_config=LoraConfig(r=2) if kind == "lora" else None, **settings)

        at_once = trainer(tmp_path / "a")
        at_once.train()
        beside = trainer(tmp_path / "b", save_in_background=True)
        beside.train()
        for step in (1, 2, 3, 4):
            one, other = (tmp_path / name / f"checkpoint-{step}" for name in "ab")
            assert self.contents(one) == self.contents(other)
            assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
        resumed = trainer(tmp_path / "b", max_steps=5, save_in_background=True)
        resumed.train(tmp_path / "b" / "checkpoint-2")
        assert torch.equal(
            weights(resumed), weights(self.trained(trainer(tmp_path / "c", max_steps=5, save_strategy="no")))
        )

    def trained(self, trainer: Any) -> Any:
        trainer.train()
        return trainer

    def test_callbacks_hear_of_it_once_it_is_there(self, tmp_path: Path) -> None:
        seen: list[tuple[int, bool]] = []

        class Listens(TrainerCallback):
            def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                seen.append((state.global_step, (tmp_path / f"checkpoint-{state.global_step}").is_dir()))

        make_trainer(tmp_path, max_steps=4, callbacks=[Listens()], save_in_background=True, **SAVING).train()
        assert seen == [(step, True) for step in (1, 2, 3, 4)]

    def test_the_last_one_that_cannot_be_written_ends_the_run(self, tmp_path: Path, monkeypatch: Any) -> None:
        def full(*_: Any) -> None:
            time.sleep(1)  # the run is over by then
            raise OSError(28, "No space left on device")

        class SavesOnce(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                control.should_save, control.should_training_stop = state.global_step == 1, state.global_step == 2

        monkeypatch.setattr("memsafe_rl.checkpoint.store.write_manifest", full)
        trainer = make_trainer(tmp_path, max_steps=3, save_in_background=True, callbacks=[SavesOnce()])
        with pytest.raises(SaveError, match="checkpoint-1 was not saved: No space left"):
            trainer.train()

    @pytest.mark.parametrize("choice", ["raise", "warn"])
    def test_what_cannot_be_written_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, choice: str
    ) -> None:
        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("memsafe_rl.checkpoint.store.write_manifest", full)
        trainer = make_trainer(tmp_path, max_steps=3, save_in_background=True, on_save_error=choice, **SAVING)
        if choice == "raise":
            with pytest.raises(SaveError, match="checkpoint-1 was not saved: No space left"):
                trainer.train()
        else:
            trainer.train()
            assert caplog.text.count("was not saved: No space left") == 3
        assert not list(tmp_path.glob(".checkpoint-*"))
        claim(tmp_path, None, overwrite=True).release()


@pytest.mark.slow
def test_a_run_whose_epochs_end_before_the_planned_steps_saves_and_evaluates_its_end(tmp_path: Path) -> None:
    """Filtered groups take more prompts a step: 16 steps were planned, and the last one done had no checkpoint."""

    def half(completions: list[str], **_: Any) -> list[float]:
        return [float(any(character.isdigit() for character in text)) for text in completions]

    settings: dict[str, Any] = {"reward_funcs": half, "max_steps": -1, "dynamic_sampling": True, "save_steps": 500}
    settings |= {
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "eval_steps": 500,
        "eval_dataset": ONE,
    }
    trainer = make_trainer(tmp_path, num_train_epochs=2, **settings)
    done = trainer.train().global_step
    assert 0 < done < 16
    assert [path.name for path in checkpoints(tmp_path)] == [f"checkpoint-{done}"]
    assert make_trainer(tmp_path, num_train_epochs=2, **settings).train(resume_from_checkpoint=True).global_step == done
    longer = make_trainer(tmp_path, num_train_epochs=3, **settings)
    assert longer.train(resume_from_checkpoint=True).global_step > done


@pytest.mark.slow
def test_a_best_step_that_could_not_be_saved_costs_not_the_best_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, scores = shutil.disk_usage, iter((1.0, 2.0, 0.0))

    class Full(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            full = write(tmp_path)._replace(free=1000) if state.global_step == 2 else write(tmp_path)
            monkeypatch.setattr(shutil, "disk_usage", lambda _: full)

    class Mine(GRPOTrainer):
        def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
            return {"eval_reward": next(scores)}

    made = make_trainer(
        tmp_path,
        max_steps=3,
        on_save_error="warn",
        save_total_limit=1,
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=ONE,
        metric_for_best_model="reward",
        **SAVING,
    )
    trainer = Mine(
        tiny_model(),
        count_digits,
        made.args,
        made.train_dataset,
        ONE,
        processing_class=tiny_tokenizer(),
        callbacks=[Full()],
    )
    trainer.train()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-3"]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    best = tiny_model()
    read_weights(best, tmp_path / "checkpoint-1")
    assert all(
        torch.equal(one, other) for one, other in zip(best.parameters(), trainer.model.parameters(), strict=True)
    )


def test_a_callback_of_a_users_may_have_a_method_called_close(tmp_path: Path) -> None:
    """It was called before the last records were logged."""

    class Writes(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.file = (tmp_path / "mine.txt").open("w")

        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.file.write("logged\n")

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.close()

        def close(self) -> None:
            self.file.close()

    make_trainer(tmp_path / "run", max_steps=1, callbacks=[Writes()]).train()
    assert (tmp_path / "mine.txt").read_text() == "logged\n" * 2


def test_a_run_folder_is_not_changed_under_a_trainer(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "a", max_steps=1)
    trainer.args.output_dir = str(tmp_path / "b")
    with pytest.raises(ConfigError, match=r"args\.output_dir was changed to .*/b' after the trainer was built"):
        trainer.train()
