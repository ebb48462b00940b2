"""What a run keeps in its folder: the claim on it, the logs, and the checkpoint it last wrote."""

from __future__ import annotations

import copy
import json
import logging
import os
import shlex
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import TrainerState

from memsafe_rl.checkpoint.export import fill_card
from memsafe_rl.checkpoint.run_folder import RunFolder, claim, retaken, save_weights
from memsafe_rl.checkpoint.store import RunMark, checkpoint_folder, is_checkpoint, known_run, read_manifest
from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.diagnostics.status import MEMORY_FILE, METRICS_FILE, STEPS_FILE, replace_text, write_json
from memsafe_rl.errors import SaveError
from memsafe_rl.memory.runtime.stages import Stage
from memsafe_rl.parallel.replicas import Parallel
from memsafe_rl.records import RUN_FILE, records_until, still_ours
from memsafe_rl.training import refusal
from memsafe_rl.training.checkpoints import Checkpoints, Saved
from memsafe_rl.training.metrics.run_log import RunLog
from memsafe_rl.training.setup import RunState

logger = logging.getLogger(__name__)

_NICENESS = 10
STOP_FILE = "stop"
"""A file of this name in the run's folder ends the run after its step, as a signal does."""


class _Writing(NamedTuple):
    """A checkpoint on its way to the disk."""

    progress: TrainerState  # as it was then
    written: Future[None]
    give_up: Callable[[], None]  # forgets that it would be the best


class RunFiles:
    """Claims a run's folder, goes on in its logs, and writes its checkpoints; only the main rank writes."""

    def __init__(self, config: TrainerConfig, report: RunLog) -> None:
        self._config, self._report = config, report
        self.folder: RunFolder | None = None
        self.saved_step = 0
        self._models: set[Path] = set()  # folders of this run's own, beside its run folder
        self._writing: _Writing | None = None
        self._prepared: Future[None] | None = None
        self._writer = ThreadPoolExecutor(1, "memsafe_rl checkpoint", _behind_training)

    @property
    def mark(self) -> RunMark:
        """Which run, and which of its starts, this is."""
        return RunMark() if self.folder is None else self.folder.mark

    def has_unsaved(self, step: int) -> bool:
        """Whether steps were done that no checkpoint holds though one should; half restored, a run is in no step."""
        return self._config.save_strategy != "no" and step > self.saved_step

    def claim(self, parallel: Parallel, resume: bool | str | Path | None) -> Path | None:
        """Takes the folder for this run; returns the checkpoint to resume from, the same on all ranks."""
        found: list[Path | None] = []
        if parallel.is_main:
            path, overwrite = Path(self._config.output_dir), self._config.overwrite_output_dir
            self.folder = claim(path, resume or None, overwrite=overwrite, own=self.mark.run_id)
            found = [self.folder.checkpoint]
            if self.stop_asked():
                logger.warning("%s was there before this start; it is removed", path / STOP_FILE)
        return parallel.gather(found)[0]

    def open_logs(self, state: RunState, checkpoint: Path | None) -> None:
        """Goes on in the run's logs, and takes over the records of the steps that a checkpoint builds on."""
        self.saved_step = step = state.step
        folder, report = self.folder, self._report
        goes_on = folder is not None and folder.mark.start > 0
        if folder is not None:
            stamp = folder.mark.stamp
            try:
                lineage = folder.mark.lineage if goes_on else None
                report.records.open(folder.path / METRICS_FILE, stamp, lineage, step)
                report.events.open(folder.path / MEMORY_FILE, stamp, step=step)
                state.history.open(folder.path / STEPS_FILE, stamp, lineage and lineage.by_step(), step)
            except OSError as error:
                raise refusal("output_dir", path=error.filename or folder.path, error=error.strerror) from error
        if checkpoint is None:
            return
        logger.warning("run %s resumes at step %d from %s", self.mark.run_id, step, checkpoint)
        source, written = checkpoint.parent, read_manifest(checkpoint).mark
        if not goes_on:
            for record in records_until(source / STEPS_FILE, written.lineage.by_step(), step, written.run_id):
                state.history.append(record)
        logged = list(records_until(source / METRICS_FILE, written.lineage, step, written.run_id))
        if not state.progress.log_history:
            state.progress.log_history.extend(logged)
        for record in () if goes_on else logged:
            report.records.append(record)
        if len(state.history) < step:
            logger.warning(
                "%s holds %d of the %d steps before it; the others are missing in trainer.history",
                source / STEPS_FILE,
                len(state.history),
                step,
            )

    def prepare(self, checkpoints: Checkpoints, planned_steps: int) -> None:
        """Has memory made for copies, behind the first steps, where a checkpoint will be written beside training."""
        config = self._config
        due = config.save_strategy == "epoch" or (config.save_strategy == "steps" and config.save_steps < planned_steps)
        if due and self.folder is not None and checkpoints.writes_beside:
            self._prepared = self._writer.submit(checkpoints.prepared_copies())

    def save(
        self, checkpoints: Checkpoints, state: RunState, saved: Saved, *, wait: bool, best_before: str | None
    ) -> None:
        """Writes a checkpoint, after its steps' records and never two at a time; with `wait` before it returns."""
        progress, beside = copy.copy(state.progress), not wait and checkpoints.writes_beside
        give_up = partial(setattr, state.progress, "best_model_checkpoint", best_before)
        try:
            written = self._write(checkpoints, state, saved, beside=beside)
        except SaveError as error:
            give_up()
            self._complain(error)
            return
        self._writing = _Writing(progress, written, give_up)
        if not beside:
            self.finish()

    def _write(self, checkpoints: Checkpoints, state: RunState, saved: Saved, *, beside: bool) -> Future[None]:
        folder, repeat = checkpoint_folder(Path(self._config.output_dir), state.step), checkpoints.repeat
        self.ensure_ours(folder)
        if not self._report.write(state, durable=True):
            raise SaveError(f"{folder} was not saved: the logs beside it cannot be written. Free space there.")
        if self._prepared is not None:
            wait_for([self._prepared])  # a failure to make memory ahead shows where it is needed
        content = repeat(Stage.CHECKPOINT, checkpoints.content, state, self._report, saved, copied=beside)
        lineage = self.mark.lineage
        mark = replace(self.mark, lineage=lineage._replace(logged=(*lineage.logged, len(self._report.records))))
        values = content, mark, state.progress.best_model_checkpoint
        if beside:
            return self._writer.submit(checkpoints.write, *values)
        repeat(Stage.CHECKPOINT, checkpoints.write, *values)
        written: Future[None] = Future()
        written.set_result(None)
        return written

    def finish(self, *, wait: bool = True) -> None:
        """Takes note of the checkpoint that was being written, and tells callbacks; without `wait`, if it is there."""
        writing = self._writing
        if writing is None or not (wait or writing.written.done()):
            return
        self._writing = None
        try:
            writing.written.result()
        except SaveError as error:
            writing.give_up()
            self._complain(error)
        else:
            self.saved_step = writing.progress.global_step
            self._report.saved(writing.progress)

    def _complain(self, error: SaveError) -> None:
        if self._config.on_save_error == "raise":
            raise error
        logger.warning("%s", error)

    def save_model(self, folder: Path, write: Callable[[Path], None]) -> None:
        """Writes weights into a folder; see `save_weights`."""
        config, place = self._config, folder.absolute()
        overwrite = bool(config.overwrite_output_dir)
        if is_checkpoint(place) and place.parent.resolve() == Path(config.output_dir).resolve():
            raise refusal("save_model/checkpoint", folder=str(folder))
        save_weights(place, write, self.folder, replace=place in self._models, overwrite=overwrite)
        self._models.add(place)
        fill_card(place, Path(config.output_dir))

    def ensure_ours(self, what: Path) -> None:
        """Refuses to write into the folder of a run that took this one's place; claims anew what is gone."""
        if self.folder is not None and not still_ours(self.folder.path, self.mark.run_id):
            raise SaveError(
                f"{what} was not saved: the folder now belongs to run {known_run(self.folder.path).get('run_id')}, for "
                f"that of this run ({self.mark.run_id}) was moved away. Resume this run where its folder is now."
            )
        self.folder = None if self.folder is None else retaken(self.folder)

    def write(self, name: str, text: str) -> None:
        """Puts a further file into the folder, and remembers that it is the run's."""
        path = Path(self._config.output_dir) / name
        self.ensure_ours(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
        known = {} if self.folder is None else known_run(self.folder.path)
        if self.folder is not None and known.get("run_id") == self.mark.run_id:
            write_json(self.folder.path / RUN_FILE, {**known, "files": sorted({*known.get("files", ()), name})})

    def add(self, name: str, metrics: Mapping[str, Any]) -> None:
        """Adds metrics to a file of them."""
        path = Path(self._config.output_dir) / name
        known = json.loads(path.read_text()) if path.exists() else {}
        refusal.when(not isinstance(known, dict), "metrics_file", path=path)
        self.write(name, json.dumps({**known, **metrics}, indent=4))

    def stop_asked(self) -> str:
        """Returns the stop file that lies in the folder, and takes it away, so that the run can be resumed."""
        if self.folder is None or not (self.folder.path / STOP_FILE).exists():
            return ""
        if not still_ours(self.folder.path, self.mark.run_id):
            return ""  # it asks another run to stop
        (self.folder.path / STOP_FILE).unlink(missing_ok=True)
        return f"{self.folder.path / STOP_FILE} was found"

    def how_to_resume(self) -> str:
        """Says what was saved, and the command that goes on from there."""
        config = self._config
        saved = checkpoint_folder(Path(config.output_dir), self.saved_step)
        if not saved.is_dir():
            why = "save_strategy is 'no'" if config.save_strategy == "no" else "no step was done"
            return f"nothing was saved ({why})"
        if config.save_only_model:
            return (
                f"the weights of step {self.saved_step} are saved in {saved}, without what a resume needs "
                "(save_only_model=True); a new run can begin with that folder as its model"
            )
        return f"step {self.saved_step} is saved in {saved}; resume with: {resume_command(config)}"

    def what_follows(self) -> dict[str, str]:
        """Returns commands for a run that has ended, by what they are for."""
        config = self._config
        commands = {"report": shlex.join(["memsafe-rl", "report", config.output_dir])}
        if checkpoint_folder(Path(config.output_dir), self.saved_step).is_dir() and not config.save_only_model:
            commands["train longer"] = f"{resume_command(config)}, with a higher max_steps or num_train_epochs"
        return commands

    def release(self) -> None:
        """Lets other runs have the folder, after what is being written to it."""
        try:
            self.finish()
        except SaveError as error:  # whatever ends the run matters more
            logger.warning("%s", error)
        finally:
            if self.folder is not None:
                self.folder.release()


def resume_command(config: TrainerConfig) -> str:
    """Returns what resumes the run from its latest checkpoint: the command it was started with, or a call."""
    place = Path(sys.argv[0])
    if place.name == "memsafe-rl" or place.parts[-2:] == ("memsafe_rl", "__main__.py"):
        command = shlex.join(["memsafe-rl", *sys.argv[1:]])
        asked = "--resume-from-checkpoint" in command.replace("_", "-")
        return command if asked else f"{command} --resume-from-checkpoint true"
    if config.resume_from_checkpoint in ("auto", "true"):
        return shlex.join([Path(sys.executable).name, *sys.argv])
    return "trainer.train(resume_from_checkpoint=True)"


def _behind_training() -> None:
    """Lets training go first where both want a processor; where threads have no priority, they share it."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
