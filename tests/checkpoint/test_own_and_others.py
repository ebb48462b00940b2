"""What is a run's own is written and moved whole; what is another's, or the user's, stays as it is."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from memsafe_rl.checkpoint.run_folder import claim
from memsafe_rl.checkpoint.store import checkpoints
from memsafe_rl.checkpoint.weights import read_weights
from memsafe_rl.diagnostics.run_figures import read_run
from memsafe_rl.diagnostics.status import write_json
from memsafe_rl.errors import ConfigError, SaveError, TrainingInterrupted
from memsafe_rl.records import read_lines, run_id_of
from tests.checkpoint.test_file_system import Disk
from tests.checkpoint.test_run_folder import SAVING, run_id
from tests.processes import started
from tests.tiny import tiny_model
from tests.trainers.helpers import make_trainer, weights
from tests.training.test_interrupts import At


def held(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def model_in(folder: Path) -> torch.Tensor:
    model = tiny_model()
    read_weights(model, folder)
    return torch.cat([weight.detach().flatten().double() for weight in model.parameters()])


class TestWeightsThatAreSaved:
    """`save_model` writes all files or none, and over nobody else's."""

    @pytest.mark.slow
    def test_another_runs_are_refused_or_moved_aside(self, tmp_path: Path) -> None:
        trained = make_trainer(tmp_path, max_steps=1)
        trained.train()
        trained.save_model()
        first, before = run_id(tmp_path), (tmp_path / "model.safetensors").read_bytes()
        told = r"model.safetensors of an earlier run.*another output_dir.*overwrite_output_dir=True"
        for folder in (None, tmp_path):
            with pytest.raises(ConfigError, match=told):
                make_trainer(tmp_path).save_model(folder)
        assert (tmp_path / "model.safetensors").read_bytes() == before
        other = make_trainer(tmp_path, overwrite_output_dir=True)
        other.save_model()
        assert (tmp_path / "previous" / first / "model.safetensors").read_bytes() == before
        assert torch.equal(model_in(tmp_path), weights(other))

    def test_a_folder_that_cannot_be_written_is_not_called_output_dir(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        with pytest.raises(
            ConfigError, match=r"^save_model's folder is .*file/x.* Set save_model's folder to a folder"
        ):
            make_trainer(tmp_path / "run").save_model(tmp_path / "file" / "x")

    @pytest.mark.slow
    def test_its_own_are_replaced(self, tmp_path: Path) -> None:
        for folder in (None, tmp_path / "final"):
            trainer = make_trainer(tmp_path / "run", overwrite_output_dir=True)
            trainer.train()
            trainer.save_model(folder)
            with torch.no_grad():
                next(trainer.model.parameters()).add_(1)
            trainer.save_model(folder)
            where = folder or tmp_path / "run"
            assert torch.equal(model_in(where), weights(trainer))
            assert not (where / "previous" / "unknown").exists()
            assert not list(where.glob(".weights*"))

    def test_unknown_ones_in_any_folder_move_aside(self, tmp_path: Path) -> None:
        make_trainer(tmp_path / "a").save_model(tmp_path / "final")
        (tmp_path / "final" / "README.md").write_text("mine")
        before = held(tmp_path / "final")
        del before["README.md"]
        make_trainer(tmp_path / "b", peft_config=LoraConfig(r=2)).save_model(tmp_path / "final")
        assert (tmp_path / "final" / "README.md").read_text() == "mine"
        aside = held(tmp_path / "final" / "previous" / "unknown")
        assert aside.items() <= before.items()
        assert "model.safetensors" in aside
        assert (tmp_path / "final" / "adapter_model.safetensors").exists()

    def test_an_adapters_leave_those_of_the_model_that_it_adapts(self, tmp_path: Path) -> None:
        make_trainer(tmp_path / "a").save_model(tmp_path / "base")
        before = (tmp_path / "base" / "model.safetensors").read_bytes()
        trainer = make_trainer(tmp_path / "b", model=str(tmp_path / "base"), peft_config=LoraConfig(r=2))
        for _ in range(2):
            trainer.save_model(tmp_path / "base")
            assert (tmp_path / "base" / "model.safetensors").read_bytes() == before
            assert (tmp_path / "base" / "adapter_model.safetensors").exists()

    def test_a_live_runs_folder_is_refused(self, tmp_path: Path) -> None:
        live = claim(tmp_path, None)
        with pytest.raises(ConfigError, match="another run is training"):
            make_trainer(tmp_path).save_model()
        live.release()

    @pytest.mark.parametrize(
        "fault", [("fsync", "*model.safetensors"), ("fsync", "*/.names"), ("rename", "*.weights.part")]
    )
    def test_a_full_disk_leaves_the_old_ones(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: tuple[str, str]
    ) -> None:
        trainer = make_trainer(tmp_path)
        trainer.train()
        trainer.save_model()
        before = held(tmp_path)
        disk = Disk(monkeypatch)
        disk.fails(*fault)
        with pytest.raises(SaveError, match=r"weights were not saved in .*: No space left on device. Free space"):
            trainer.save_model()
        disk.heals()
        assert held(tmp_path) == before

    def test_a_kill_between_two_files_is_made_good_by_the_next_start(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer = make_trainer(tmp_path, **SAVING)
        trainer.train()
        trainer.save_model()
        with torch.no_grad():
            next(trainer.model.parameters()).add_(1)
        (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"a part of what is replaced")
        disk = Disk(monkeypatch)
        disk.fails("rename", "*.weights.new/model.safetensors")
        with pytest.raises(SaveError):
            trainer.save_model()
        disk.heals()
        claim(tmp_path, True).release()
        assert torch.equal(model_in(tmp_path), weights(trainer))
        assert not list(tmp_path.glob(".weights*"))
        assert not list(tmp_path.glob("model-*"))

    @pytest.mark.slow
    def test_names_that_no_saver_gives_are_the_users(self, tmp_path: Path) -> None:
        mine = ("model-best.safetensors", "model_old.safetensors", "pytorch_model_notes.bin", "docs.index.json")
        trainer = make_trainer(tmp_path, overwrite_output_dir=True)
        trainer.train()
        for name in (*mine, "tokenizer_notes.txt", "monitor-mine.json"):
            (tmp_path / name).write_text("mine")
        trainer.save_model()
        make_trainer(tmp_path, overwrite_output_dir=True).train()
        for name in (*mine, "tokenizer_notes.txt", "monitor-mine.json"):
            assert (tmp_path / name).read_text() == "mine"

    def test_an_index_moves_aside_with_its_shards(self, tmp_path: Path) -> None:
        shards = {"model-00001-of-00002.safetensors": "1", "model.safetensors.index.json": "{}"}
        for name, content in shards.items():
            (tmp_path / name).write_text(content)
        make_trainer(tmp_path / "run").save_model(tmp_path)
        aside = tmp_path / "previous" / "unknown"
        assert {name: (aside / name).read_text() for name in shards} == shards
        assert not any((tmp_path / name).exists() for name in shards)

    @pytest.mark.parametrize("stops_at", ["model.safetensors", "config.json"])
    def test_a_move_that_was_cut_short_overwrites_nothing_later(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops_at: str
    ) -> None:
        final = tmp_path / "final"
        make_trainer(tmp_path / "a").save_model(final)
        before = (final / "model.safetensors").read_bytes()
        other = make_trainer(tmp_path / "b", seed=3)
        with torch.no_grad():
            next(other.model.parameters()).add_(1)
        disk = Disk(monkeypatch)
        disk.fails("rename", f"{final}/{stops_at}")
        with pytest.raises(SaveError):
            other.save_model(final)
        assert (final / ".moving.json").exists()
        disk.heals()
        other.save_model(final)
        assert not (final / ".moving.json").exists()
        assert torch.equal(model_in(final), weights(other))
        assert (final / "previous" / "unknown" / "model.safetensors").read_bytes() == before

    def test_what_a_move_finds_in_its_place_stays(self, tmp_path: Path) -> None:
        aside = tmp_path / "previous" / "unknown"
        aside.mkdir(parents=True)
        (aside / "model.safetensors").write_text("moved")
        (tmp_path / "model.safetensors").write_text("newer")
        write_json(tmp_path / ".moving.json", {"to": "unknown", "names": ["model.safetensors"]})
        make_trainer(tmp_path / "a").save_model(tmp_path)
        assert (aside / "model.safetensors").read_text() == "moved"
        assert (tmp_path / "previous" / "unknown-2" / "model.safetensors").read_text() == "newer"

    def test_a_removal_that_was_cut_short_is_ended(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, **SAVING)
        trainer.train()
        trainer.save_model()
        (tmp_path / ".weights.new").mkdir()  # its names went first
        claim(tmp_path, True).release()
        assert not (tmp_path / ".weights.new").exists()
        assert torch.equal(model_in(tmp_path), weights(trainer))

    @pytest.mark.slow
    def test_two_processes_save_in_turn(self, tmp_path: Path) -> None:
        (tmp_path / "final").mkdir()
        script = """
import sys, time
from pathlib import Path
from memsafe_rl.checkpoint.run_folder import save_weights
def write(folder):
    Path(sys.argv[2]).touch()
    (folder / "model.safetensors").write_text("theirs")
    time.sleep(3)
save_weights(Path(sys.argv[1]), write, None, replace=False, overwrite=False)
"""
        trainer, writing = make_trainer(tmp_path / "run"), tmp_path / "writing"
        other = started(script, tmp_path / "final", writing, log=tmp_path / "log")
        while not writing.exists():
            assert other.is_alive(), (tmp_path / "log").read_text()
            time.sleep(0.02)
        trainer.save_model(tmp_path / "final")
        other.join()
        assert other.exitcode == 0
        assert (tmp_path / "final" / "previous" / "unknown" / "model.safetensors").read_text() == "theirs"
        assert torch.equal(model_in(tmp_path / "final"), weights(trainer))

    @pytest.mark.slow
    @pytest.mark.parametrize("beside", [False, True])
    def test_a_checkpoint_of_the_run_is_refused_by_name(self, tmp_path: Path, beside: bool) -> None:
        class Saves(TrainerCallback):
            def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                with pytest.raises(ConfigError, match="checkpoint-1', the place of a checkpoint of this run"):
                    trainer.save_model(tmp_path / "checkpoint-1")

        trainer = make_trainer(tmp_path, callbacks=[Saves()], save_in_background=beside, **SAVING)
        trainer.train()
        assert claim(tmp_path, tmp_path / "checkpoint-1").checkpoint == tmp_path / "checkpoint-1"


class TestMovingAside:
    """An earlier run is moved whole, and nothing but that run."""

    @pytest.mark.slow
    @pytest.mark.parametrize("stops_at", ["run.json", "steps.jsonl", "checkpoint-1", "checkpoint-2"])
    def test_a_kill_amid_the_moves_splits_no_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops_at: str
    ) -> None:
        make_trainer(tmp_path, **SAVING).train()
        first, before = run_id(tmp_path), held(tmp_path)
        disk = Disk(monkeypatch)
        disk.fails("rename", f"{tmp_path}/{stops_at}")
        with pytest.raises(ConfigError, match="cannot be written"):
            make_trainer(tmp_path, overwrite_output_dir=True).train()
        disk.heals()
        make_trainer(tmp_path, max_steps=1).train()
        del before[".run.lock"]
        assert held(tmp_path / "previous" / first) == before
        assert [path.name for path in (tmp_path / "previous").iterdir()] == [first]
        assert checkpoints(tmp_path) == []
        assert not list(tmp_path.glob(".moving*"))

    @pytest.mark.slow
    def test_what_the_user_keeps_beside_it_stays(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, log_completions=True)
        result = trainer.train()
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
        mine = {name: tmp_path / name for name in ("baseline_results.json", "completions/chosen.txt", "notes/a.txt")}
        for path in mine.values():
            path.parent.mkdir(exist_ok=True)
            path.write_text("mine")
        first = run_id(tmp_path)
        make_trainer(tmp_path, max_steps=1).train()
        assert {name: path.read_text() for name, path in mine.items()} == dict.fromkeys(mine, "mine")
        moved = {path.name for path in (tmp_path / "previous" / first).iterdir()}
        assert {"train_results.json", "all_results.json", "trainer_state.json", "completions"} <= moved
        assert [path.name for path in (tmp_path / "completions").iterdir()] == ["chosen.txt"]

    @pytest.mark.slow
    def test_a_folder_of_the_users_named_as_a_checkpoint_moves_aside(self, tmp_path: Path) -> None:
        make_trainer(tmp_path, max_steps=1, **SAVING).train()
        (tmp_path / "checkpoint-2").mkdir()
        (tmp_path / "checkpoint-2" / "notes.txt").write_text("mine")
        (tmp_path / ".checkpoint-1.old").mkdir()
        (tmp_path / ".checkpoint-1.old" / "notes.txt").write_text("mine too")
        make_trainer(tmp_path, **SAVING).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        aside = tmp_path / "previous"
        assert (aside / "unknown" / "checkpoint-1" / "notes.txt").read_text() == "mine too"
        assert (aside / "unknown-2" / "checkpoint-2" / "notes.txt").read_text() == "mine"
        assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-2"]

    @pytest.mark.parametrize("name", ["../../escaped", ""])
    def test_whatever_a_run_calls_itself_it_stays_in_the_folder(self, tmp_path: Path, name: str) -> None:
        run = tmp_path / "a" / "run"
        run.mkdir(parents=True)
        (run / "run.json").write_text(json.dumps({"run_id": name, "mine": 1}))
        claim(run, None).release()
        assert json.loads((run / "previous" / (name[6:] or "unknown") / "run.json").read_text())["mine"] == 1
        assert [path.name for path in (*tmp_path.iterdir(), *(tmp_path / "a").iterdir())] == ["a", "run"]

    @pytest.mark.parametrize("other_disk", [False, True])
    def test_where_nothing_can_be_moved_the_place_is_named(self, tmp_path: Path, other_disk: bool) -> None:
        make_trainer(tmp_path, **SAVING).train()
        before = held(tmp_path)
        if other_disk:
            if not Path("/dev/shm").is_dir() or os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:
                pytest.skip("there is no second file system")
            (tmp_path / "previous").symlink_to("/dev/shm", target_is_directory=True)
        else:
            (tmp_path / "previous").write_text("mine")
        with pytest.raises(
            ConfigError, match=r"previous, which has to be a folder on the disk of .*: (File|Inval|Cross)"
        ):
            make_trainer(tmp_path, overwrite_output_dir=True).train()
        (tmp_path / "previous").unlink()
        assert held(tmp_path) == before

    @pytest.mark.slow
    def test_a_link_that_moves_aside_points_to_the_same_place(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        make_trainer(run, **SAVING).train()
        (run / "checkpoint-2").rename(tmp_path / "kept")
        (run / "checkpoint-2").symlink_to("../kept")
        earlier = run_id(run)
        make_trainer(run, overwrite_output_dir=True, **SAVING).train()
        moved = run / "previous" / earlier / "checkpoint-2"
        assert moved.is_symlink()
        assert moved.resolve() == tmp_path / "kept"

    @pytest.mark.slow
    def test_of_a_link_only_the_link_is_deleted(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        make_trainer(tmp_path / "run", max_steps=1, **SAVING).train()
        (tmp_path / "run" / "checkpoint-1").rename(tmp_path / "kept")
        for link in ("checkpoint-1", ".checkpoint-5.part"):
            (tmp_path / "run" / link).symlink_to(tmp_path / "kept")
        before = held(tmp_path / "kept")
        trainer = make_trainer(tmp_path / "run", save_total_limit=1, **SAVING)
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
        assert "cannot be deleted" not in caplog.text
        assert [path.name for path in (tmp_path / "run").glob("*checkpoint*")] == ["checkpoint-2"]
        assert held(tmp_path / "kept") == before


def test_results_of_somebody_else_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "all_results.json").write_text("[1, 2]")
    with pytest.raises(ConfigError, match=r"all_results.json holds no metrics .* Move it, or set combined=False"):
        make_trainer(tmp_path).save_metrics("train", {"loss": 1.0})
    assert (tmp_path / "all_results.json").read_text() == "[1, 2]"


class TestWhereARunIs:
    """The folder is the one of the start, whatever happens around it."""

    def test_a_callback_changes_the_working_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path)
        away = At("on_step_end", 1, lambda: os.chdir(tmp_path / "elsewhere"))
        trainer = make_trainer(Path("run"), callbacks=[away], **SAVING)
        trainer.train()
        trainer.save_model()
        assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-1", "checkpoint-2"]
        assert (tmp_path / "run" / "model.safetensors").exists()
        assert not list((tmp_path / "elsewhere").iterdir())

    @pytest.mark.slow
    def test_another_run_took_its_place_after_it_was_moved(self, tmp_path: Path) -> None:
        run, moved = tmp_path / "run", tmp_path / "moved"

        def taken() -> None:
            run.rename(moved)
            claim(run, None).release()

        trainer = make_trainer(run, max_steps=3, callbacks=[At("on_step_begin", 1, taken)], **SAVING)
        with pytest.raises(SaveError, match=r"checkpoint-2 was not saved: the folder now belongs to run \w{8}, for"):
            trainer.train()
        assert checkpoints(run) == []
        assert [path.name for path in checkpoints(moved)] == ["checkpoint-1"]
        assert make_trainer(moved, max_steps=3).train(resume_from_checkpoint=True).global_step == 3

    @pytest.mark.slow
    def test_a_place_that_it_makes_again_is_its_own(self, tmp_path: Path) -> None:
        run, refused = tmp_path / "run", []

        def resume() -> None:
            with pytest.raises(ConfigError, match="where another run is training") as error:
                make_trainer(run, max_steps=4).train(resume_from_checkpoint=True)
            refused.append(str(error.value))

        moves, resumes = At("on_step_begin", 1, lambda: run.rename(tmp_path / "moved")), At("on_step_begin", 3, resume)
        trainer = make_trainer(run, max_steps=4, callbacks=[moves, resumes], **SAVING)
        trainer.train()
        assert len(refused) == 1
        assert run_id_of(run) == run_id_of(tmp_path / "moved") != ""
        assert make_trainer(run, max_steps=5).train(resume_from_checkpoint=True).global_step == 5

    @pytest.mark.slow
    def test_another_run_took_its_place_after_it_was_deleted(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What the first writes from then on stays out of the other's folder."""
        run = tmp_path / "run"
        settings = {**SAVING, "log_completions": True}
        after: dict[str, bytes] = {}

        def taken() -> None:
            shutil.rmtree(run)
            make_trainer(run, **settings).train()
            (run / "stop").touch()
            after.update(held(run))

        first = make_trainer(
            run, max_steps=4, log_completions=True, save_strategy="no", callbacks=[At("on_step_end", 2, taken)]
        )
        result = first.train()
        for save in (first.save_state, lambda: first.save_metrics("train", result.metrics)):
            with pytest.raises(SaveError, match=r"was not saved: the folder now belongs to run \w{8}, for that"):
                save()
        assert held(run) == after
        assert "its folder was moved or deleted, and is another run's now" in caplog.text
        assert [record["step"] for record in first.history] == [1, 2, 3, 4]
        (run / "stop").unlink()
        second = make_trainer(run, max_steps=3, **SAVING)
        second.train(resume_from_checkpoint=True)
        assert [record["step"] for record in second.history] == [1, 2, 3]

    def test_weights_are_not_saved_where_another_run_trains_by_now(self, tmp_path: Path) -> None:
        run = tmp_path / "run"

        def taken() -> None:
            shutil.rmtree(run)
            live = claim(run, None)
            with pytest.raises(ConfigError, match="another run is training"):
                first.save_model()
            live.release()

        first = make_trainer(
            run, overwrite_output_dir=True, save_strategy="no", callbacks=[At("on_step_end", 2, taken)]
        )
        first.train()
        assert not list(run.rglob("model.safetensors"))

    @pytest.mark.slow
    def test_lines_of_another_run_are_not_read(self, tmp_path: Path) -> None:
        make_trainer(tmp_path, **SAVING).train()
        ours = run_id(tmp_path)
        for name in ("steps.jsonl", "metrics.jsonl"):
            text = (tmp_path / name).read_text()
            (tmp_path / name).write_text(text + text.replace(ours, "another1"))
        shown = read_run(tmp_path)
        assert {line["run_id"] for line in (*shown.steps, *shown.logs)} == {ours}
        resumed = make_trainer(tmp_path, max_steps=3, **SAVING)
        resumed.train(resume_from_checkpoint=True)
        assert [record["step"] for record in resumed.history] == [1, 2, 3]
        assert [one["step"] for one in resumed.state.log_history if "loss" in one] == [1, 2, 3]

    def test_a_stop_file_from_before_the_start_is_removed(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "stop").touch()
        assert make_trainer(tmp_path).train().global_step == 2
        assert f"{tmp_path / 'stop'} was there before this start; it is removed" in caplog.text
        assert not (tmp_path / "stop").exists()


@pytest.mark.slow
def test_what_was_logged_before_a_run_began_from_anothers_checkpoint_survives_two_resumes(tmp_path: Path) -> None:
    make_trainer(tmp_path / "a", **SAVING).train()
    make_trainer(tmp_path / "b", max_steps=4, **SAVING).train(tmp_path / "a" / "checkpoint-2")
    shutil.rmtree(tmp_path / "a")
    last = make_trainer(tmp_path / "b", max_steps=5, **SAVING)
    last.train(resume_from_checkpoint=True)
    assert [one["step"] for one in last.state.log_history if "loss" in one] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in read_lines(tmp_path / "b" / "metrics.jsonl")[0] if "loss" in line][:2] == [1, 2]


@pytest.mark.slow
def test_advice_where_all_checkpoints_are_damaged_leads_on(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=1, **SAVING).train()
    with (tmp_path / "checkpoint-1" / "model.safetensors").open("ab") as file:
        file.write(b"more")
    for resume in (None, True, "auto"):
        with pytest.raises(
            ConfigError, match=r"checkpoint-1 is damaged \(.*model.safetensors.*overwrite_output_dir=True"
        ):
            make_trainer(tmp_path, max_steps=1).train(resume_from_checkpoint=resume)
    anew = make_trainer(tmp_path, max_steps=1, overwrite_output_dir=True)
    anew.train(resume_from_checkpoint="auto")
    assert len(list((tmp_path / "previous").glob("*/checkpoint-1"))) == 1


@pytest.mark.slow
def test_no_resume_is_asked_for_whatever_the_configuration_says(tmp_path: Path) -> None:
    make_trainer(tmp_path, **SAVING).train()
    trainer = make_trainer(tmp_path, max_steps=3, resume_from_checkpoint="auto", overwrite_output_dir=True)
    trainer.train(resume_from_checkpoint=False)
    assert trainer.history[0]["step"] == 1
    assert (tmp_path / "previous").is_dir()


@pytest.mark.slow
def test_advice_after_weights_alone_were_saved_leads_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {**SAVING, "save_only_model": True, "max_steps": 3}
    stop = At("on_step_begin", 1, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(TrainingInterrupted):
        make_trainer(tmp_path, callbacks=[stop], **settings).train()
    assert "a new run can begin with that folder as its model" in caplog.text
    assert "resume with" not in caplog.text
    with pytest.raises(ConfigError, match="checkpoint-2 holds weights only; a new run can take it as its model"):
        make_trainer(tmp_path, **settings).train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match=r"Weights alone cannot be resumed .*: begin a new run with them as its"):
        make_trainer(tmp_path, **settings).train(resume_from_checkpoint="auto")


@pytest.mark.slow
def test_a_script_that_cannot_save_ends_in_one_line(tmp_path: Path) -> None:
    """Two scripts, forks of one interpreter, which each end as an interpreter does."""
    script = """
import os, sys
from pathlib import Path
from memsafe_rl.checkpoint import store
from tests.trainers.helpers import make_trainer
def full(*_):
    try:
        raise ValueError("an inner one")
    except ValueError as error:
        raise OSError(28, "No space left on device") from error
store.write_manifest = full
folder, beside = Path(sys.argv[1]), bool(os.fork())
if beside:
    _, status = os.wait()
    (folder / "code").write_text(str(os.waitstatus_to_exitcode(status)))
else:
    sys.stderr = (folder / "log").open("w")
run = make_trainer(folder / str(beside), save_strategy="steps", save_steps=1, save_in_background=beside)
run.train()
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert (ended.returncode, (tmp_path / "code").read_text()) == (1, "1")
    for told in (ended.stderr, (tmp_path / "log").read_text()):
        last = told.strip().splitlines()[-1]
        assert last.startswith("memsafe_rl.errors.SaveError: ")
        assert "checkpoint-1 was not saved: No space left on device" in last
        assert told.count("Traceback (most recent call last)") == 1


@pytest.mark.slow
def test_the_best_step_that_was_not_saved_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As with transformers, evaluations between two checkpoints count, and the best that was saved is loaded."""

    class Better(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
            metrics["eval_mine"] = float({1: 1, 2: 2, 3: 3, 4: 0}[state.global_step])

    settings = {"eval_steps": 1, "save_steps": 2, "max_steps": 4, "metric_for_best_model": "mine"}
    trainer = make_trainer(
        tmp_path,
        eval_strategy="steps",
        save_strategy="steps",
        load_best_model_at_end=True,
        greater_is_better=True,
        eval_dataset=[{"prompt": "1+1="}],
        callbacks=[Better()],
        **settings,
    )
    trainer.train()
    assert trainer.state.best_global_step == 3
    assert torch.equal(weights(trainer), model_in(tmp_path / "checkpoint-2"))
    assert "the best step, 3, was not saved, so that of checkpoint-2 is loaded, the best when it was" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("damage", [lambda held: held[:100] + b"x" + held[101:], lambda held: held[:100]])
def test_a_damaged_best_checkpoint_is_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    last: list[torch.Tensor] = []

    class First(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
            metrics["eval_mine"] = -float(state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            weights_of_best = tmp_path / "checkpoint-1" / "model.safetensors"
            weights_of_best.write_bytes(damage(weights_of_best.read_bytes()))
            last[:] = [weights(trainer)]

    best = {"load_best_model_at_end": True, "metric_for_best_model": "mine", "greater_is_better": True}
    trainer = make_trainer(tmp_path, eval_dataset=[{"prompt": "1+1="}], callbacks=[First()], **best, **settings)
    trainer.train()
    assert trainer.state.best_global_step == 1
    assert torch.equal(weights(trainer), last[0])
    assert "the best step, 1, cannot be loaded, so the last weights stay: " in caplog.text
    assert "model.safetensors' " in caplog.text


@pytest.mark.slow
def test_a_newer_checkpoint_without_a_state_is_not_passed_over_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(tmp_path, **{**SAVING, "max_steps": 1}).train()
    bare: dict[str, Any] = {**SAVING, "save_only_model": True, "max_steps": 2}
    make_trainer(tmp_path, **bare).train(resume_from_checkpoint=True)
    again = make_trainer(tmp_path, **{**SAVING, "max_steps": 3})
    again.train(resume_from_checkpoint=True)
    assert "checkpoint-2 holds weights only, and cannot be resumed from; one before it is looked for" in caplog.text
    assert again.state.global_step == 3
