"""The folder of one run: claimed while it trains, kept apart from other runs' files, which are never deleted."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout

from memsafe_rl.checkpoint.manifest import RunMark, read_manifest
from memsafe_rl.checkpoint.store import PREFIX, PREVIOUS, checkpoints, find_checkpoint, known_run, make_aside, step_of
from memsafe_rl.diagnostics.status import RUN_FILE, write_json
from memsafe_rl.errors import ConfigError

logger = logging.getLogger(__name__)

_LOCK = ".run.lock"
_STRAY = re.compile(rf"\.{PREFIX}\d+\.(part|old)|\.(run|monitor(-\d+)?)\.json\.\d+")
"""Names of what a killed run leaves half written."""
_LOGS = (
    *("run.json", "steps.jsonl", "metrics.jsonl", "memory.jsonl", "monitor.json", "monitor-*.json", "completions"),
    *("report.html", "trainer_state.json", "*_results.json"),
)
_WEIGHTS = ("model*.safetensors", "adapter_model.safetensors", "critic.safetensors", "pytorch_model*.bin")
_BESIDE_WEIGHTS = (
    *("model.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "spiece.model"),
    *("chat_template*",),
)


@dataclass(frozen=True)
class RunFolder:
    """A folder that belongs to a run for as long as the run trains."""

    path: Path
    mark: RunMark
    checkpoint: Path | None  # that the run resumes from
    lock: BaseFileLock

    def release(self) -> None:
        """Lets other runs have the folder."""
        self.lock.release()


def claim(path: Path, resume: bool | str | Path | None, *, overwrite: bool = False, own: str = "") -> RunFolder:
    """Takes a folder for a run, and moves an earlier run's files aside where that loses nothing.

    Args:
        path: the run's `output_dir`.
        resume: what to resume from, as `find_checkpoint` takes it; None for a new run.
        overwrite: move an earlier run aside even if it left checkpoints or weights.
        own: id of a run that may be moved aside like that: the same trainer's earlier one.

    Returns:
        The folder with the run's id and the number of this start.

    Raises:
        ConfigError: the folder cannot be written, is in use, or holds another run's checkpoints or weights.
    """
    lock = _lock(path)
    try:
        _clean(path)
        known = known_run(path)
        checkpoint = None if resume is None else find_checkpoint(path, resume)
        if checkpoint is not None and _is_own(checkpoint, path, known):
            mark = _next_start(checkpoint, known)
        else:
            aside = _make_way(path, known, overwrite=overwrite or bool(own and known.get("run_id") == own))
            if checkpoint is not None and not checkpoint.exists():
                checkpoint = aside / checkpoint.name
            known, mark = {}, RunMark(uuid.uuid4().hex[:8], 0)
        write_json(path / RUN_FILE, {**known, **mark.plain, **_holder()})
    except BaseException as error:
        lock.release()
        if isinstance(error, OSError):
            raise _unwritable(path, error) from error
        raise
    return RunFolder(path, mark, checkpoint, lock)


def check_writable(path: Path) -> None:
    """Proves that a folder can be made and written.

    Raises:
        ConfigError: it cannot.
    """
    probe = path / f".probe-{os.getpid()}"
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"\n")
        probe.unlink()
        for folder in made:  # the run makes them again when it trains
            folder.rmdir()
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"output_dir is {str(path)!r}, which cannot be written ({error.strerror}). Set output_dir to a folder that can "
        "be made and written to."
    )


def _lock(path: Path) -> BaseFileLock:
    check_writable(path)
    path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path / _LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        holder = known_run(path)
        whose = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}, run {holder.get('run_id', '?')}"
        raise ConfigError(
            f"output_dir is {str(path)!r}, where another run is training ({whose}). Wait for its end, or set another "
            "output_dir."
        ) from error
    except OSError as error:
        raise _unwritable(path, error) from error
    return lock


def _holder() -> dict[str, object]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "claimed": time.time()}


def _clean(path: Path) -> None:
    """Removes what a dead run left half written; a checkpoint that was being replaced comes back."""
    strays = [each for each in path.iterdir() if _STRAY.fullmatch(each.name)]
    for replaced in (each for each in strays if each.suffix == ".old"):
        final = path / replaced.name.removeprefix(".").removesuffix(".old")
        if final.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(final)
    for draft in (each for each in strays if each.suffix == ".part"):
        shutil.rmtree(draft)
    for beside in (each for each in strays if each.suffix not in (".old", ".part")):
        beside.unlink(missing_ok=True)


def _is_own(checkpoint: Path, folder: Path, known: Mapping[str, Any]) -> bool:
    """Tells whether a checkpoint is one of the run whose folder this is, not another's that was copied there."""
    run_id = read_manifest(checkpoint).mark.run_id
    lies_in = checkpoint.resolve().parent == folder.resolve()
    return lies_in and (not run_id or known.get("run_id", run_id) == run_id)


def _next_start(checkpoint: Path, known: Mapping[str, Any]) -> RunMark:
    """Gives the mark of a run that goes on in its own folder."""
    written = read_manifest(checkpoint).mark
    run_id = written.run_id or str(known.get("run_id", "")) or uuid.uuid4().hex[:8]
    started = [int(known.get("start", 0)), written.start]
    start = max(started) + 1
    return RunMark(run_id, start, written.lineage.resumed(start, step_of(checkpoint)))


def _make_way(path: Path, known: Mapping[str, Any], *, overwrite: bool) -> Path:
    """Moves an earlier run's files into a folder of their own, and gives it; refuses where they are more than logs."""
    weights = [*checkpoints(path), *_matching(path, _WEIGHTS)]
    if weights and not overwrite:
        shown = ", ".join(sorted(each.name for each in weights)[:4]) + (", ..." if len(weights) > 4 else "")
        raise ConfigError(
            f"output_dir is {str(path)!r}, which holds {shown} of an earlier run ({known.get('run_id', 'unknown')}). "
            "Resume that run (resume_from_checkpoint=True), set another output_dir, or set overwrite_output_dir=True, "
            f"which moves the earlier run into {PREVIOUS}/."
        )
    moved = [*_matching(path, _LOGS), *weights, *(_matching(path, _BESIDE_WEIGHTS) if weights else ())]
    if not moved:
        return path
    aside = make_aside(path, str(known.get("run_id", "unknown")))
    for each in dict.fromkeys(moved):
        each.rename(aside / each.name)
    logger.warning("the earlier run's files in %s are now in %s", path, aside)
    return aside


def _matching(path: Path, patterns: Iterable[str]) -> Iterable[Path]:
    return (each for pattern in patterns for each in sorted(path.glob(pattern)))
