"""The folder of one run: claimed while it trains, kept apart from other runs' files, which are never deleted."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout

from memsafe_rl.checkpoint import refusal, store
from memsafe_rl.checkpoint.store import PREFIX, PREVIOUS, RunMark, checkpoints, known_run, make_aside, read_manifest
from memsafe_rl.diagnostics.status import write_json
from memsafe_rl.durable import sync_all
from memsafe_rl.errors import ConfigError, MemsafeError, SaveError
from memsafe_rl.memory.runtime.failures import is_out_of_memory
from memsafe_rl.records import RUN_FILE, read_json, still_ours

logger = logging.getLogger(__name__)

_LOCK = ".run.lock"
_WAIT_SECONDS = 600.0  # for another process that saves weights in the same folder
_MOVING = ".moving.json"
"""What is being moved aside, so that a start that is killed meanwhile splits no run: the next one goes on."""
_DRAFT, _READY, _NAMES = ".weights.part", ".weights.new", ".names"
"""Weights being written, and written whole but not yet in their place; the second holds all their names."""
_CARD = "README.md"  # written beside an adapter; one that is there is the user's
_STRAY = re.compile(rf"\.({PREFIX}\d+|weights)\.(part|old)|\.push-\w+|\.(run|monitor(-\d+)?|\.moving)\.json\.\d+")
"""Names of what a killed run leaves half written."""
_LOGS = (
    *("run.json", "steps.jsonl", "metrics.jsonl", "memory.jsonl", "monitor.json", "monitor-[0-9]*.json"),
    *("report.html", "completions/completions_[0-9]*.jsonl"),
)
_SHARD = "-" + "[0-9]" * 5 + "-of-" + "[0-9]" * 5
_OF_ADAPTERS = ("adapter_model.safetensors", f"adapter_model{_SHARD}.safetensors", "critic.safetensors")
_WEIGHTS = (
    *_OF_ADAPTERS,
    *("model.safetensors", f"model{_SHARD}.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", f"pytorch_model{_SHARD}.bin", "pytorch_model.bin.index.json"),
)
"""Names that savers give to weights and no others, for what fits them is moved or replaced."""
_BESIDE_WEIGHTS = (
    *("config.json", "generation_config.json", "adapter_config.json", "chat_template.jinja", "chat_template.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
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
    """Takes a folder for a run; an earlier run's weights move aside only with ``overwrite`` or if they are ``own``."""
    lock = _lock(path)
    try:
        _clean(path)
        known = known_run(path)
        checkpoint = None if resume is None else store.find_checkpoint(path, resume)
        if checkpoint is not None and _is_own(checkpoint, path, known):
            mark = _next_start(checkpoint, known)
        else:
            aside = _make_way(path, known, overwrite=overwrite or bool(own and known.get("run_id") == own))
            if checkpoint is not None and not checkpoint.exists():
                checkpoint = aside / checkpoint.name
            known, mark = {}, RunMark(uuid.uuid4().hex[:8], 0)
        _sign(path, mark, known)
    except BaseException as error:
        lock.release()
        if isinstance(error, OSError):
            raise _unwritable(path, error) from error
        raise
    return RunFolder(path, mark, checkpoint, lock)


def retaken(folder: RunFolder) -> RunFolder:
    """Claims a training run's folder anew where it was moved or deleted, before the run writes to its old place."""
    if not folder.lock.is_locked or (folder.path / RUN_FILE).exists():
        return folder
    folder.lock.release()
    lock = _lock(folder.path)
    _sign(folder.path, folder.mark, {})
    return replace(folder, lock=lock)


def _sign(path: Path, mark: RunMark, known: Mapping[str, Any]) -> None:
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "claimed": time.time()}
    write_json(path / RUN_FILE, {**known, **mark.plain, **holder})


def check_earlier(path: Path, *, overwrite: bool) -> None:
    """Refuses to begin anew where an earlier run left weights."""
    names = sorted(each.name for each in (*checkpoints(path), *_matching(path, _WEIGHTS)))
    if names and not overwrite:
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        run_id, way = known_run(path).get("run_id", "unknown"), _how_to_go_on(path)
        told = f"{shown} of an earlier run ({run_id})"
        raise refusal("output_dir/earlier", path=str(path), told=told, way=way, previous=PREVIOUS)


def refuse_taken(path: Path) -> None:
    """Refuses a folder in which another run is training now."""
    if (path / _LOCK).exists():
        _lock(path).release()


def check_writable(path: Path, told: str = "output_dir") -> None:
    """Proves that a folder can be made and written."""
    probe = path / f".probe-{os.getpid()}"
    try:
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"\n")
        probe.unlink()
        for folder in made:  # the run makes them again when it trains
            folder.rmdir()
    except (OSError, ValueError) as error:  # a name with a null character is a ValueError
        raise _unwritable(path, error, told) from error


def _unwritable(path: Path, error: Exception, told: str = "output_dir") -> MemsafeError:
    return refusal("output_dir/written", told=told, path=str(path), reason=error.args[-1])


def _lock(path: Path, *, wait_seconds: float = 0) -> BaseFileLock:
    check_writable(path)
    path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path / _LOCK, timeout=wait_seconds)
    try:
        lock.acquire()
    except Timeout as error:
        holder = known_run(path)
        whose = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}, run {holder.get('run_id', '?')}"
        raise refusal("output_dir/taken", path=str(path), whose=whose) from error
    except OSError as error:
        raise _unwritable(path, error) from error
    return lock


def _clean(path: Path) -> None:
    """Removes what a dead run left half written; what was being replaced comes back, what was being moved arrives."""
    _finish_moving(path)
    _finish_weights(path)
    strays = [each for each in path.iterdir() if _STRAY.fullmatch(each.name)]
    for replaced in (each for each in strays if each.suffix == ".old"):
        final = path / replaced.name.removeprefix(".").removesuffix(".old")
        if not final.exists():
            replaced.rename(final)
        elif store.owner_of(replaced) == known_run(path).get("run_id"):
            store.remove(replaced)
        else:
            replaced.rename(make_aside(path, store.owner_of(replaced)) / final.name)
    for half in (each for each in strays if each.suffix != ".old"):
        store.remove(half)


def _is_own(checkpoint: Path, folder: Path, known: Mapping[str, Any]) -> bool:
    """Returns whether a checkpoint is one of the run whose folder this is, not another's that was copied there."""
    run_id = read_manifest(checkpoint).mark.run_id
    lies_in = checkpoint.absolute().parent.resolve() == folder.resolve()  # a link there is the run's too
    return lies_in and (not run_id or known.get("run_id", run_id) == run_id)


def _next_start(checkpoint: Path, known: Mapping[str, Any]) -> RunMark:
    """Returns the mark of a run that goes on in its own folder."""
    written = read_manifest(checkpoint).mark
    run_id = written.run_id or str(known.get("run_id", "")) or uuid.uuid4().hex[:8]
    start = max(int(known.get("start", 0)), written.start) + 1
    return RunMark(run_id, start, written.lineage.resumed(start, store.step_of(checkpoint)))


def _make_way(path: Path, known: Mapping[str, Any], *, overwrite: bool) -> Path:
    """Moves an earlier run's files into a folder of their own, and gives it; refuses where they are more than logs."""
    check_earlier(path, overwrite=overwrite)
    weights = [*checkpoints(path), *_matching(path, _WEIGHTS)]
    noted = [path / str(name) for name in known.get("files", ()) if (path / str(name)).exists()]
    moved = [*_matching(path, _LOGS), *noted, *weights, *(_matching(path, _BESIDE_WEIGHTS) if weights else ())]
    return _move_aside(path, moved, str(known.get("run_id", "unknown"))) if moved else path


def _how_to_go_on(path: Path) -> str:
    with suppress(ConfigError):  # of a newer version, which a resume explains
        sound, why = store.newest_sound(path)
        if sound is None and "is damaged" in why:
            return f"{why}, and none before it can be resumed. Mend it"
        if sound is None:
            return (
                "Weights alone cannot be resumed by resume_from_checkpoint=True: begin a new run with them as its model"
            )
    return "Resume that run (resume_from_checkpoint=True)"


def _move_aside(path: Path, moved: Iterable[Path], run_id: str) -> Path:
    """Moves files into a folder of their own, and gives it; the next start ends what is cut short."""
    aside = make_aside(path, run_id)
    write_json(path / _MOVING, {"to": aside.name, "names": [each.relative_to(path).as_posix() for each in moved]})
    _finish_moving(path)
    logger.warning("the earlier run's files in %s are now in %s", path, aside)
    return aside


def _finish_moving(path: Path) -> None:
    moving = read_json(path / _MOVING)
    if moving is None:
        return
    aside = path / PREVIOUS / Path(moving["to"]).name
    for name in moving["names"]:
        if (path / name).exists() and not (aside / name).exists():
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            _rename(path / name, aside / name)
    (path / _MOVING).unlink()


def _rename(source: Path, target: Path) -> None:
    """Moves a file, a folder, or a link, which points to the same place afterwards."""
    if source.is_symlink() and not source.readlink().is_absolute():
        target.symlink_to(source.resolve())
        source.unlink()
    else:
        source.rename(target)


def save_weights(
    path: Path, write: Callable[[Path], None], held: RunFolder | None, *, replace: bool, overwrite: bool
) -> None:
    """Writes weights into a folder, all of their files or none; none that another run left there is overwritten.

    ``held`` is this run's own folder, if it trains. ``replace`` is for weights in a folder that is no run's, which are
    moved aside otherwise; ``overwrite`` moves another run's weights aside, which are refused otherwise.
    """
    check_writable(path, "save_model's folder")
    here = held is not None and held.path.resolve() == path.resolve() and still_ours(path, held.mark.run_id)
    training = here and held is not None and held.lock.is_locked
    fresh = not path.exists()
    lock = None if training else _lock(path, wait_seconds=0 if (path / RUN_FILE).exists() else _WAIT_SECONDS)
    try:
        if lock is not None:
            _clean(path)
        known = known_run(path)
        owner = known.get("run_id")
        if owner is not None and (held is None or owner != held.mark.run_id):
            _make_way(path, known, overwrite=overwrite)
        _write_weights(path, write, replace=replace or owner is not None)
    except store.CANNOT_WRITE as error:
        if isinstance(error, MemsafeError) or is_out_of_memory(error):
            raise
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise SaveError(f"weights were not saved in {path}: {reason}. Free space, or save to another folder.") from None
    finally:
        if lock is not None:
            lock.release()
        if fresh and [*path.glob("*")] == [path / _LOCK]:  # nothing was saved
            shutil.rmtree(path)


def _write_weights(path: Path, write: Callable[[Path], None], *, replace: bool) -> None:
    draft = path / _DRAFT
    store.remove(draft)
    draft.mkdir(parents=True)
    try:
        write(draft)
        names = [each.name for each in draft.iterdir()]
        (draft / _NAMES).write_text(json.dumps(names))
        sync_all(draft)
        _finish_weights(path)  # of an earlier call by the run that trains here
        there = {
            *_replaced_by(draft, path),
            *(path / name for name in names if name != _CARD and (path / name).exists()),
        }
        if there and not replace:
            _move_aside(path, sorted(there), "unknown")
        draft.rename(path / _READY)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    _finish_weights(path)


def _finish_weights(path: Path) -> None:
    """Puts weights that were written whole in their place, and takes those away that they replace."""
    ready = path / _READY
    if (ready / _NAMES).exists():  # otherwise only its removal was cut short
        names = json.loads((ready / _NAMES).read_text())
        for stale in (each for each in _replaced_by(ready, path) if each.name not in names):
            stale.unlink()
        for name in names:
            source, target = ready / name, path / name
            if source.is_dir() and target.is_dir():
                shutil.rmtree(target)
            if source.exists() and not (name == _CARD and target.exists()):
                source.rename(target)
    store.remove(ready)


def _replaced_by(written: Path, path: Path) -> Iterable[Path]:
    """Finds the weights that new ones take the place of: an adapter's leave those of the model that it adapts."""
    configs = [read_json(each) or {} for each in written.rglob("adapter_config.json")]
    adapts = any(Path(config.get("base_model_name_or_path") or "?").resolve() == path.resolve() for config in configs)
    return _matching(path, _OF_ADAPTERS if adapts else _WEIGHTS)


def _matching(path: Path, patterns: Iterable[str]) -> Iterable[Path]:
    return (each for pattern in patterns for each in sorted(path.glob(pattern)))
