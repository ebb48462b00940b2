"""Whatever a file system does to a run: nothing is lost, one line says what happened, and the run can go on."""

import builtins
import errno
import fnmatch
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memsafe_rl.checkpoint import store
from memsafe_rl.checkpoint.run_folder import claim
from memsafe_rl.checkpoint.store import (
    MANIFEST,
    RunMark,
    _seal,
    check_files,
    checkpoints,
    find_checkpoint,
    read_manifest,
    write_manifest,
)
from memsafe_rl.errors import ConfigError, DamagedCheckpointError, MemsafeError, SaveError
from memsafe_rl.records import read_lines
from memsafe_rl.trainers.grpo import GRPOTrainer
from tests.trainers.helpers import make_trainer, weights
from tests.training.test_interrupts import At

FILES = (
    *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *("trainer_state.json", "training_state.pt", "loop.json", "trajectory.json", "trajectory.safetensors"),
    "manifest.json",
)
OPENED_BY_PYTHON = ("config.json", "generation_config.json", "tokenizer_config.json", "trainer_state.json", "loop.json")
LOGS = ("steps.jsonl", "metrics.jsonl", "memory.jsonl")
DONE, ALL = 2, 5
"""Steps of the run that most of these resume, and steps at its end; the fifth draws a new rollout."""


class Disk:
    """Fails chosen calls on chosen paths, for as long as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._faults: list[tuple[str, str, int]] = []
        for module, name in ((builtins, "open"), (io, "open"), *((os, name) for name in self.OF_OS)):
            monkeypatch.setattr(module, name, self._watched(getattr(module, name), name))

    OF_OS = ("open", "mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "write")

    def fails(self, call: str, path: str, number: int = errno.ENOSPC) -> None:
        """Has a call fail on paths that fit a pattern."""
        self._faults.append((call, path, number))

    def heals(self) -> None:
        """Lets all calls through again."""
        self._faults.clear()

    def _watched(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            for call, pattern, number in self._faults:
                if call == name and any(fnmatch.fnmatch(path, pattern) for path in _paths(name, arguments)):
                    raise OSError(number, os.strerror(number), pattern)
            return original(*arguments, **named)

        return called


def _paths(name: str, arguments: tuple[Any, ...]) -> Iterator[str]:
    """Yields the paths that a call writes to."""
    if name in ("fsync", "write"):
        yield os.readlink(f"/proc/self/fd/{arguments[0]}")
    elif name != "open" or (arguments[1:] and arguments[1] not in ("r", "rb", os.O_RDONLY)):
        yield from (os.fspath(each) for each in arguments if isinstance(each, (str, os.PathLike)))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def trainer_in(folder: Path, **settings: Any) -> GRPOTrainer:
    defaults = {"max_steps": ALL, "num_iterations": 4, "save_strategy": "steps", "save_steps": 1}
    return make_trainer(folder, **{**defaults, **settings})


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template") / "run"
    torch.manual_seed(0)
    trainer_in(folder, max_steps=DONE).train()
    assert {path.name for path in (folder / "checkpoint-1").iterdir()} == set(FILES)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    torch.manual_seed(0)
    trainer = trainer_in(tmp_path_factory.mktemp("whole"), save_strategy="no")
    trainer.train()
    return weights(trainer)


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Path:
    """A run that has done two of its four steps."""
    return Path(shutil.copytree(template, tmp_path / "run"))


def broken(kind: type[Exception], match: str, work: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """Expects an error that says in one line what is the matter."""
    with pytest.raises(kind, match=match) as caught:
        work(*arguments, **named)
    assert isinstance(caught.value, MemsafeError)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700
    return str(caught.value)


def sound(folder: Path) -> list[str]:
    """Lists the checkpoints, all of which must be as they were written, and expects nothing half written beside."""
    for checkpoint in checkpoints(folder):
        check_files(checkpoint, read_manifest(checkpoint))
    assert [path.name for path in folder.glob(".*") if path.name != ".run.lock"] == []
    return [path.name for path in checkpoints(folder)]


def steps_in(path: Path) -> list[int]:
    """Lists the steps of a log that are not marked as done again."""
    lines = (line for line in read_lines(path)[0] if "train_runtime" not in line)
    return [line["step"] for line in lines if not line.get("redone")]


def ends_whole(folder: Path, whole: torch.Tensor, resume: bool | str | Path = True, logs: int = 2) -> GRPOTrainer:
    """Expects that a run goes on to its end, bit for bit, and that its logs miss nothing."""
    trainer = trainer_in(folder)
    trainer.train(resume_from_checkpoint=resume)
    assert torch.equal(weights(trainer), whole)
    for name in LOGS[:logs]:
        assert sorted(steps_in(folder / name)) == list(range(1, ALL + 1)), name
    assert sound(folder)[-1] == f"checkpoint-{ALL}"
    return trainer


class TestACheckpointThatCannotBeWritten:
    """Earlier ones stay, the error names it, and the run goes on once there is room."""

    def third_save_fails(self, run: Path, whole: torch.Tensor, put: Callable[[], Any], heal: Callable[[], Any]) -> str:
        told = broken(SaveError, "checkpoint-3 was not saved", self.resume, run, At("on_step_begin", DONE, put))
        heal()
        assert sound(run) == ["checkpoint-1", "checkpoint-2"]
        assert steps_in(run / "steps.jsonl") == [1, 2, 3]
        assert f"The last good checkpoint is {run / 'checkpoint-2'}" in told
        ends_whole(run, whole)
        return told

    def resume(self, run: Path, callback: Any) -> None:
        trainer_in(run, callbacks=[callback]).train(resume_from_checkpoint=True)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", FILES)
    def test_the_disk_gives_up_at_a_file(self, run: Path, whole: torch.Tensor, disk: Disk, name: str) -> None:
        put = lambda: disk.fails("fsync", f"*.part/{name}", errno.EIO)  # noqa: E731
        assert "Input/output error" in self.third_save_fails(run, whole, put, disk.heals)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", [*OPENED_BY_PYTHON, "manifest.json"])
    def test_the_disk_is_full_when_a_file_is_opened(
        self, run: Path, whole: torch.Tensor, disk: Disk, name: str
    ) -> None:
        put = lambda: disk.fails("open", f"*.part/{name}")  # noqa: E731
        assert "No space left on device" in self.third_save_fails(run, whole, put, disk.heals)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["model.safetensors", "training_state.pt"])
    def test_a_file_may_not_get_that_large(
        self, run: Path, whole: torch.Tensor, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """A genuine refusal of the system, in the middle of a file that C++ or Rust writes."""
        write, (soft, hard) = store._write_files, resource.getrlimit(resource.RLIMIT_FSIZE)

        def limited(*arguments: Any) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, ((run / "checkpoint-2" / name).stat().st_size - 100, hard))
            try:
                write(*arguments)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

        put = lambda: monkeypatch.setattr(store, "_write_files", limited)  # noqa: E731
        heal = lambda: monkeypatch.setattr(store, "_write_files", write)  # noqa: E731
        self.third_save_fails(run, whole, put, heal)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("call", "path", "number"),
        [
            ("mkdir", "*.checkpoint-3.part", errno.EROFS),
            ("mkdir", "*.checkpoint-3.part", errno.EACCES),
            ("mkdir", "*.checkpoint-3.part", errno.EDQUOT),
            ("rename", "*.checkpoint-3.part", errno.EACCES),
            ("rename", "*.checkpoint-3.part", errno.EXDEV),
        ],
    )
    def test_the_folder_refuses(
        self, run: Path, whole: torch.Tensor, disk: Disk, call: str, path: str, number: int
    ) -> None:
        told = self.third_save_fails(run, whole, lambda: disk.fails(call, path, number), disk.heals)
        assert os.strerror(number) in told

    @pytest.mark.slow
    def test_one_that_was_to_be_replaced_stays(self, run: Path, whole: torch.Tensor, disk: Disk) -> None:
        before = {path.name: path.read_bytes() for path in (run / "checkpoint-2").iterdir()}
        disk.fails("rename", "*.checkpoint-2.part")
        broken(SaveError, "checkpoint-2 was not saved: No space", trainer_in(run).train, run / "checkpoint-1")
        disk.heals()
        assert {path.name: path.read_bytes() for path in (run / "checkpoint-2").iterdir()} == before
        ends_whole(run, whole)

    @pytest.mark.slow
    def test_the_run_may_train_on_without_it(
        self, run: Path, whole: torch.Tensor, disk: Disk, caplog: pytest.LogCaptureFixture
    ) -> None:
        disk.fails("fsync", "*.checkpoint-3.part/loop.json")
        trainer = trainer_in(run, on_save_error="warn")
        trainer.train(resume_from_checkpoint=True)
        assert "checkpoint-3 was not saved: No space left on device" in caplog.text
        assert torch.equal(weights(trainer), whole)
        assert sound(run) == ["checkpoint-1", "checkpoint-2", "checkpoint-4", "checkpoint-5"]

    @pytest.mark.slow
    def test_an_old_one_that_cannot_be_deleted_ends_nothing(
        self, run: Path, whole: torch.Tensor, disk: Disk, caplog: pytest.LogCaptureFixture
    ) -> None:
        disk.fails("rename", "*/checkpoint-1", errno.EACCES)
        trainer = trainer_in(run, save_total_limit=1)
        trainer.train(resume_from_checkpoint=True)
        assert f"{run / 'checkpoint-1'} cannot be deleted (Permission denied)" in caplog.text
        assert torch.equal(weights(trainer), whole)
        assert sound(run) == ["checkpoint-1", "checkpoint-5"]


class TestLogsThatCannotBeWritten:
    """Records wait in memory until they can be."""

    @pytest.mark.slow
    @pytest.mark.parametrize("name", LOGS)
    def test_a_read_only_log_is_named_before_the_first_step(
        self, run: Path, whole: torch.Tensor, disk: Disk, name: str
    ) -> None:
        disk.fails("open", f"*/{name}", errno.EROFS)
        broken(ConfigError, rf"{name} cannot be written \(Read-only file system\)", trainer_in(run).train, True)
        disk.heals()
        ends_whole(run, whole)

    @pytest.mark.slow
    def test_a_full_disk_that_is_freed_again_loses_no_record(
        self, run: Path, whole: torch.Tensor, disk: Disk, caplog: pytest.LogCaptureFixture
    ) -> None:
        callbacks = [
            At("on_step_begin", DONE, lambda: disk.fails("write", "*.jsonl")),
            At("on_step_begin", DONE + 1, disk.heals),
        ]
        trainer = trainer_in(run, on_save_error="warn", callbacks=callbacks)
        trainer.train(resume_from_checkpoint=True)
        assert caplog.text.count("records wait in memory") == len(LOGS)
        assert "checkpoint-3 was not saved: the logs beside it cannot be written" in caplog.text
        assert torch.equal(weights(trainer), whole)
        assert [steps_in(run / name) for name in LOGS[:2]] == [[1, 2, 3, 4, 5]] * 2
        assert sound(run) == ["checkpoint-1", "checkpoint-2", "checkpoint-4", "checkpoint-5"]

    @pytest.mark.slow
    def test_a_full_disk_ends_the_run_where_a_checkpoint_is_due(
        self, run: Path, whole: torch.Tensor, disk: Disk
    ) -> None:
        disk.fails("write", "*/steps.jsonl")
        broken(SaveError, "checkpoint-3 was not saved: the logs beside it", trainer_in(run).train, True)
        disk.heals()
        ends_whole(run, whole)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["run.json", "monitor.json", "completions_00001.jsonl"])
    def test_what_only_shows_a_run_never_ends_it(
        self, tmp_path: Path, whole: torch.Tensor, disk: Disk, caplog: pytest.LogCaptureFixture, name: str
    ) -> None:
        begins = At("on_train_begin", 0, lambda: disk.fails("open", f"*{name}*"))
        trainer = trainer_in(tmp_path, log_completions=True, callbacks=[begins])
        trainer.callback_handler.callbacks.insert(0, trainer.callback_handler.callbacks.pop())
        trainer.train()
        assert "No space left on device" in caplog.text
        assert torch.equal(weights(trainer), whole)
        assert len(sound(tmp_path)) == ALL


class TestAFolderThatChangesUnderTheRun:
    """Deleted, moved, filled by others, or reached by a link."""

    @pytest.mark.slow
    @pytest.mark.parametrize("event", ["on_step_begin", "on_save"])
    @pytest.mark.parametrize("away", [True, False])
    def test_it_vanishes(self, run: Path, whole: torch.Tensor, event: str, away: bool) -> None:
        elsewhere = run.with_name("elsewhere")
        step = DONE + (event == "on_save")
        vanish = At(event, step, lambda: run.rename(elsewhere) if away else shutil.rmtree(run))
        trainer = trainer_in(run, callbacks=[vanish])
        trainer.train(resume_from_checkpoint=True)
        assert torch.equal(weights(trainer), whole)
        assert steps_in(run / "steps.jsonl") == [1, 2, 3, 4, 5]
        assert sound(run) == [f"checkpoint-{number}" for number in range(step + 1, ALL + 1)]
        assert not away or sound(elsewhere)[:2] == ["checkpoint-1", "checkpoint-2"]
        assert find_checkpoint(run, True) == run / f"checkpoint-{ALL}"

    @pytest.mark.slow
    def test_it_is_reached_by_a_link(self, run: Path, whole: torch.Tensor) -> None:
        link = run.with_name("link")
        link.symlink_to(run, target_is_directory=True)
        trainer = ends_whole(link, whole)
        assert link.is_symlink()
        assert trainer.state.global_step == ALL
        assert len(checkpoints(run)) == ALL

    @pytest.mark.slow
    def test_it_has_spaces_and_other_letters_in_its_name(self, run: Path, whole: torch.Tensor) -> None:
        odd = run.rename(run.with_name("мой  run 'é\"; #1"))
        ends_whole(odd, whole, resume=str(odd / "checkpoint-2"))

    @pytest.mark.slow
    @pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no second file system")
    def test_it_is_on_another_device_than_temporary_files(
        self, tmp_path: Path, whole: torch.Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert Path("/dev/shm").stat().st_dev != tmp_path.stat().st_dev
        monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
        trainer = trainer_in(tmp_path / "run")
        trainer.train()
        assert torch.equal(weights(trainer), whole)
        assert len(sound(tmp_path / "run")) == ALL

    @pytest.mark.slow
    def test_the_clock_was_set_back(self, run: Path, whole: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        for number, path in enumerate([*sorted(run.rglob("*")), run]):
            os.utime(path, (2e9 - 1e6 * number,) * 2)
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() - 1e8)
        ends_whole(run, whole)

    @pytest.mark.slow
    def test_users_own_files_stay_as_they_are(self, run: Path, whole: torch.Tensor) -> None:
        mine = {
            name: run / name
            for name in ("notes.txt", "checkpoint-abc/x", "checkpoint-/x", "data/checkpoint-9/x", ".hidden", "stopped")
        }
        for path in mine.values():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("mine")
        trainer = trainer_in(run, save_total_limit=1)
        trainer.train(resume_from_checkpoint=True)
        assert torch.equal(weights(trainer), whole)
        trainer_in(run, overwrite_output_dir=True, max_steps=1).train()
        assert {name: path.read_text() for name, path in mine.items()} == dict.fromkeys(mine, "mine")

    @pytest.mark.slow
    def test_a_file_has_a_checkpoints_name(self, run: Path, whole: torch.Tensor) -> None:
        (run / "checkpoint-3").write_text("mine")
        broken(SaveError, r"checkpoint-3 was not saved: File exists.* Move what", trainer_in(run).train, True)
        assert (run / "checkpoint-3").read_text() == "mine"
        (run / "checkpoint-3").unlink()
        ends_whole(run, whole)

    @pytest.mark.slow
    def test_another_runs_checkpoint_is_neither_taken_nor_deleted(self, run: Path, whole: torch.Tensor) -> None:
        for number in (3, 9):
            shutil.copytree(run / "checkpoint-1", run / f"checkpoint-{number}")
            (run / f"checkpoint-{number}" / MANIFEST).unlink()
            write_manifest(run / f"checkpoint-{number}", RunMark("theirs", 7), number)
        held = {path.name: path.read_bytes() for path in (run / "checkpoint-3").iterdir()}
        trainer = trainer_in(run, save_total_limit=1)
        trainer.train(resume_from_checkpoint=True)
        assert torch.equal(weights(trainer), whole)
        assert sorted(sound(run)) == ["checkpoint-5", "checkpoint-9"]
        aside = run / "previous" / "theirs" / "checkpoint-3"
        assert {path.name: path.read_bytes() for path in aside.iterdir()} == held

    @pytest.mark.slow
    def test_a_second_run_changes_nothing(self, run: Path, whole: torch.Tensor) -> None:
        def another() -> None:
            before = (run / "run.json").read_bytes()
            for resume in (None, True, "auto"):
                broken(ConfigError, "another run is training", trainer_in(run).train, resume)
            assert (run / "run.json").read_bytes() == before

        first = trainer_in(run, callbacks=[At("on_step_end", 3, another)])
        first.train(resume_from_checkpoint=True)
        assert torch.equal(weights(first), whole)

    def test_a_killed_run_left_its_lock(self, run: Path, whole: torch.Tensor) -> None:
        script = f"""
import os, signal
from filelock import FileLock
lock = FileLock({str(run / ".run.lock")!r})
lock.acquire()
os.kill(os.getpid(), signal.SIGKILL)
"""
        assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
        assert (run / ".run.lock").exists()
        ends_whole(run, whole)

    @pytest.mark.parametrize("path", ["*/.run.json.*", "*/.run.lock", "*/.probe-*"])
    def test_a_read_only_folder_is_named_before_the_first_step(self, run: Path, disk: Disk, path: str) -> None:
        disk.fails("open", path, errno.EROFS)
        told = r"output_dir is .*, which cannot be written \(Read-only file system\). Set output_dir to a folder"
        broken(ConfigError, told, lambda: trainer_in(run).train(resume_from_checkpoint=True))
        disk.heals()
        claim(run, True).release()


class TestWhatIsReadBack:
    """Torn, missing or foreign files cost at most the steps after the last sound checkpoint."""

    @pytest.mark.slow
    @pytest.mark.parametrize("content", [None, "", '{"run_id": "', "[1]", '{"run_id": 7}', '{"start": "x"}', b"\xff"])
    def test_run_json_is_missing_or_torn(self, run: Path, whole: torch.Tensor, content: str | bytes | None) -> None:
        written = json.loads((run / "run.json").read_text())["run_id"]
        (run / "run.json").unlink()
        if content is not None:
            (run / "run.json").write_bytes(content if isinstance(content, bytes) else content.encode())
        ends_whole(run, whole)
        assert json.loads((run / "run.json").read_text())["run_id"] == written

    @pytest.mark.slow
    def test_run_json_is_another_runs(self, run: Path, whole: torch.Tensor) -> None:
        known = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**known, "run_id": "theirs"}))
        broken(ConfigError, "holds no sound folder 'checkpoint-N' of its run", trainer_in(run).train, True)
        broken(ConfigError, "holds checkpoint-1, checkpoint-2 of an earlier run", trainer_in(run).train, "auto")
        broken(ConfigError, "holds checkpoint-1, checkpoint-2 of", trainer_in(run).train, run / "checkpoint-2")
        assert sound(run) == ["checkpoint-1", "checkpoint-2"]
        trainer = trainer_in(run, overwrite_output_dir=True)
        trainer.train(resume_from_checkpoint=run / "checkpoint-2")
        assert torch.equal(weights(trainer), whole)
        assert sound(run / "previous" / "theirs") == ["checkpoint-1", "checkpoint-2"]
        assert [one["step"] for one in trainer.history] == [1, 2, 3, 4, 5]

    @pytest.mark.slow
    @pytest.mark.parametrize("damage", ["missing", "empty", "cut", "unterminated", "garbage", "a newer start's"])
    @pytest.mark.parametrize("name", LOGS[:2])
    def test_a_log_is_damaged(self, run: Path, whole: torch.Tensor, name: str, damage: str) -> None:
        content = (run / name).read_bytes()
        lines = content.splitlines(keepends=True)
        damaged = {
            "empty": b"",
            "cut": content[: len(lines[0]) // 2],
            "unterminated": content[:-1],
            "garbage": b"\x00\xff{}\n"
            + lines[0]
            + b'{"step": "x"}\n[]\n{"step": 1e999}\n'
            + b"".join(lines[1:])
            + b"{",
            "a newer start's": content + lines[1].replace(b'"start": 0', b'"start": 5'),
        }
        if damage == "missing":
            (run / name).unlink()
        else:
            (run / name).write_bytes(damaged[damage])
        trainer = trainer_in(run)
        trainer.train(resume_from_checkpoint=True)
        assert torch.equal(weights(trainer), whole)
        assert (run / name).read_bytes().startswith(damaged.get(damage, b""))
        kept = {"missing": [], "empty": [], "cut": []}.get(damage, [1, 2])
        assert steps_in(run / name) == [*kept, *([2] if damage == "a newer start's" else []), 3, 4, 5]
        history = kept if name == "steps.jsonl" else [1, 2]
        assert [one["step"] for one in trainer.history] == [*history, 3, 4, 5]

    @pytest.mark.parametrize("name", FILES)
    def test_a_file_of_every_checkpoint_is_damaged(self, run: Path, name: str) -> None:
        """Nothing is sound, so nothing may be resumed from, begun anew over it, or deleted."""
        for checkpoint in checkpoints(run):
            content = bytearray((checkpoint / name).read_bytes())
            content[len(content) // 3] ^= 16
            (checkpoint / name).write_bytes(content)
        held = sorted(path for path in run.rglob("*") if path.name != ".run.lock")
        broken(ConfigError, "holds no sound folder", claim, run, True)
        broken(ConfigError, "holds checkpoint-1, checkpoint-2 of an earlier run", claim, run, "auto")
        broken(DamagedCheckpointError, "checkpoint-2.*which is damaged", claim, run, run / "checkpoint-2")
        assert sorted(path for path in run.rglob("*") if path.name != ".run.lock") == held

    @pytest.mark.slow
    def test_the_newest_is_damaged(self, run: Path, whole: torch.Tensor, caplog: pytest.LogCaptureFixture) -> None:
        (run / "checkpoint-2" / "training_state.pt").unlink()
        ends_whole(run, whole)
        told = re.search(r"checkpoint-2 is damaged .*training_state.pt' is missing.*checkpoint before it", caplog.text)
        assert told is not None

    def test_a_newer_version_wrote_it(self, run: Path) -> None:
        path = run / "checkpoint-2" / MANIFEST
        content = json.loads(path.read_text())
        del content["seal"]
        content |= {"format": 2, "versions": {"memsafe-rl": "9.1"}, "files": []}
        path.write_text(json.dumps({**content, "seal": _seal(content)}))
        for resume in (True, "auto", run / "checkpoint-2"):
            broken(ConfigError, r"format 2, of a newer memsafe-rl \(9.1\).*Upgrade memsafe-rl", claim, run, resume)
        assert claim(run, run / "checkpoint-1").checkpoint == run / "checkpoint-1"

    @pytest.mark.slow
    @pytest.mark.parametrize("into", ["its own folder", "a new one"])
    def test_a_checkpoint_alone_is_enough(self, run: Path, whole: torch.Tensor, into: str, tmp_path: Path) -> None:
        alone = tmp_path / "else where" / "checkpoint-2"
        shutil.copytree(run / "checkpoint-2", alone)
        shutil.rmtree(run)
        folder = alone.parent if into == "its own folder" else tmp_path / "new"
        trainer = trainer_in(folder)
        trainer.train(resume_from_checkpoint=alone)
        assert torch.equal(weights(trainer), whole)
        assert steps_in(folder / "steps.jsonl") == [3, 4, 5]
        assert [one["step"] for one in trainer.history] == [3, 4, 5]
