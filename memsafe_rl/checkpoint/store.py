"""How a checkpoint's folder is written, whole or not at all, checked and found; `training.checkpoints` fills it."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from memsafe_rl.checkpoint import refusal
from memsafe_rl.diagnostics.status import versions
from memsafe_rl.durable import contents, sha256_of, sync, sync_all
from memsafe_rl.errors import ConfigError, DamagedCheckpointError, SaveError, kind_and_line
from memsafe_rl.memory.runtime.failures import is_out_of_memory
from memsafe_rl.records import RUN_FILE, Lineage, read_json
from memsafe_rl.types import Ragged, Trajectory
from memsafe_rl.units import format_bytes

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
LOOP = "loop.json"
"""Where the run stood, in plain values."""
FORMAT = 2
"""Of `loop.json`; 1 held the history and had no manifest beside it."""
_MANIFEST_FORMAT = 1


@dataclass(frozen=True)
class RunMark:
    """Which run, and which of its starts, wrote something."""

    run_id: str = ""  # empty: written by a version without run ids
    start: int = -1
    lineage: Lineage = field(default_factory=Lineage)

    @property
    def stamp(self) -> dict[str, Any]:
        """What each line of a log repeats."""
        return {"run_id": self.run_id, "start": self.start}

    @property
    def plain(self) -> dict[str, Any]:
        """All of it, in values that JSON has a form for."""
        return {**self.stamp, "lineage": self.lineage.starts, "logged": self.lineage.logged}


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    mark: RunMark
    step: int = -1
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, Any]] | None = None  # bytes and sha256 by name; None: an earlier version's


def write_manifest(folder: Path, mark: RunMark, step: int) -> None:
    """Describes all files of a folder, in a file that is written last."""
    files = contents(folder)
    content = {"format": _MANIFEST_FORMAT, **mark.plain, "step": step, "versions": versions(), "files": files}
    (folder / MANIFEST).write_text(json.dumps({**content, "seal": _seal(content)}, indent=1))


def read_manifest(folder: Path) -> Manifest:
    """Reads what a checkpoint says of itself; checkpoints of earlier versions say nothing."""
    path = folder / MANIFEST
    try:
        if not path.exists():
            if int((read_json(folder / LOOP) or {}).get("format", 1)) >= FORMAT:
                raise FileNotFoundError("it is missing")
            return Manifest(RunMark())
        content = json.loads(path.read_text())
        if content.pop("seal") != _seal(content):
            raise ValueError("its seal does not fit its content")
        if content["format"] > _MANIFEST_FORMAT:
            by = dict(content.get("versions", {})).get("memsafe-rl", "unknown")
            raise refusal("manifest/format", path=str(path), content=content, by=by, known=_MANIFEST_FORMAT)
        starts = tuple((int(start), int(step)) for start, step in content["lineage"])
        lineage = Lineage(starts, tuple(map(int, content.get("logged", [-1] * len(starts)))))
        mark = RunMark(str(content["run_id"]), int(content["start"]), lineage)
        return Manifest(mark, int(content["step"]), dict(content["versions"]), dict(content["files"]))
    except ConfigError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{str(path)!r} is damaged ({type(error).__name__}: {error})") from error


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compares every file with what was written."""
    for name, written in (manifest.files or {}).items():
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpointError(f"{str(path)!r} is missing")
        if path.stat().st_size != written["bytes"]:
            sizes = f"{path.stat().st_size:,} bytes; written were {written['bytes']:,}"
            raise DamagedCheckpointError(f"{str(path)!r} has {sizes}")
        if sha256_of(path) != written["sha256"]:
            raise DamagedCheckpointError(f"{str(path)!r} differs from what was written (sha-256)")


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


PREFIX = "checkpoint-"
PREVIOUS = "previous"
"""The folder inside a run's own that keeps what other runs left there."""
_STATE = "training_state.pt"
_TRAINER = "trainer_state.json"
_TRAJECTORY_TENSORS, _TRAJECTORY_INDEX = "trajectory.safetensors", "trajectory.json"
RUN_STATE = frozenset({MANIFEST, LOOP, _STATE, _TRAINER, _TRAJECTORY_TENSORS, _TRAJECTORY_INDEX})
"""The files of a checkpoint that a resume needs and a user of the weights does not."""
_SIGNS_OF_DAMAGE = (OSError, EOFError, LookupError, RuntimeError, TypeError, ValueError, AttributeError)
"""What readers raise on torn files, whose bytes can look like anything."""
CANNOT_WRITE = (OSError, RuntimeError, SafetensorError)
"""What writers raise on a disk that is full or gone."""
_PLAIN_BYTES = 1 << 20  # allowance for the files of a checkpoint that hold no tensors
_UNKNOWN = RunMark("unknown", 1 << 30)
"""Of a checkpoint whose manifest is unreadable: it is taken for the newest, and passed over."""


@dataclass(frozen=True)
class CheckpointContent:
    """What a checkpoint will hold, as it stood when the step ended."""

    step: int  # optimizer steps done
    save_model: Callable[[Path], None]  # writes the weights in the form users load
    progress: str  # transformers' trainer state, as JSON
    tensors: dict[str, Any] | None  # of optimizer, schedule and loss scale; None for weights alone
    loop: str  # everything in plain values, as JSON
    trajectory: Trajectory | None  # the rollout that is being trained on, if any
    tensor_bytes: int  # bytes of all tensors that are going to be written


def write_checkpoint(output_dir: Path, content: CheckpointContent, mark: RunMark) -> Path:
    """Writes a checkpoint beside its final place and moves it there when it is complete; else nothing of it stays."""
    final = checkpoint_folder(output_dir, content.step)
    draft = _draft_of(final)
    try:
        draft.parent.mkdir(parents=True, exist_ok=True)
        remove(draft)
        if shutil.disk_usage(output_dir).free < content.tensor_bytes + _PLAIN_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        draft.mkdir()
        _write_files(draft, content)
        write_manifest(draft, mark, content.step)
        sync_all(draft)
        _replace(final, draft, mark)
    except BaseException as error:
        with suppress(OSError):
            remove(draft)
        if not isinstance(error, CANNOT_WRITE) or is_out_of_memory(error):
            raise
        raise SaveError(_why_not_saved(output_dir, final, content, error)) from None
    return final


def _write_files(draft: Path, content: CheckpointContent) -> None:
    content.save_model(draft)
    (draft / _TRAINER).write_text(content.progress)
    if content.tensors is not None:
        torch.save(content.tensors, draft / _STATE)
        (draft / LOOP).write_text(content.loop)
        if content.trajectory is not None:
            save_trajectory(content.trajectory, draft)


def _replace(final: Path, draft: Path, mark: RunMark) -> None:
    """Puts a draft in its place; at every moment the old or the new one can be found (`run_folder` looks for both)."""
    replaced = final.with_name(f".{final.name}.old")
    if final.is_dir():
        whose = owner_of(final)  # one that does not say so may be the user's
        final.rename(replaced if whose == mark.run_id else make_aside(final.parent, whose) / final.name)
    elif final.exists():
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
    try:
        draft.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    sync(final.parent)
    with suppress(OSError):
        if replaced.exists():
            remove(replaced.rename(draft))  # a half deleted one no longer says whose it is


def make_aside(output_dir: Path, run_id: str) -> Path:
    """Makes a folder for what another run, or the user, left in this one's; an error names `previous`."""
    run_id = Path(run_id).name or _UNKNOWN.run_id  # a user's run.json may say anything
    aside, count = output_dir / PREVIOUS / run_id, 1
    while aside.exists():
        count += 1
        aside = output_dir / PREVIOUS / f"{run_id}-{count}"
    try:
        aside.parent.mkdir(exist_ok=True)
        if aside.parent.stat().st_dev != output_dir.stat().st_dev:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        aside.mkdir()
    except OSError as error:
        told = f"{output_dir / PREVIOUS}, which has to be a folder on the disk of {output_dir}: {error.strerror}"
        raise OSError(error.errno, told) from error
    return aside


def remove(path: Path) -> None:
    """Deletes a folder or a file if it is there; of a link only itself."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def owner_of(folder: Path) -> str:
    """Returns the id of the run that wrote a checkpoint; "unknown" where it does not say so."""
    return _mark_of(folder).run_id or _UNKNOWN.run_id


def _draft_of(final: Path) -> Path:
    return final.with_name(f".{final.name}.part")


def _why_not_saved(output_dir: Path, final: Path, content: CheckpointContent, error: BaseException) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).partition("\n")[0]
    wanted = format_bytes(content.tensor_bytes + _PLAIN_BYTES)
    free = format_bytes(shutil.disk_usage(output_dir).free) if output_dir.exists() else "no folder"
    good = checkpoints(output_dir)
    last = f"The last good checkpoint is {good[-1]}." if good else "No checkpoint was written before it."
    way = "Move what is there away" if getattr(error, "errno", None) == errno.EEXIST else "Free space"
    return (
        f"{final} was not saved: {reason}. It takes {wanted}; free are {free}. {last} {way}, or set output_dir to "
        "another disk; on_save_error='warn' trains on without the checkpoint."
    )


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Any], Trajectory | None]:
    """Reads what a run needs besides the weights, from a folder that `find_checkpoint` gave."""
    try:
        tensors = torch.load(folder / _STATE, map_location="cpu", weights_only=True)
        loop = json.loads((folder / LOOP).read_text())
        state = json.loads((folder / _TRAINER).read_text())
        trajectory = None if loop.get("experience") is None else load_trajectory(folder)  # which may be another's
        return tensors, {**loop, "trainer_state": state}, trajectory
    except (*_SIGNS_OF_DAMAGE, pickle.UnpicklingError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise refusal("resume_from_checkpoint/torn", folder=str(folder), told=kind_and_line(error)) from error


def save_trajectory(trajectory: Trajectory, folder: Path) -> None:
    """Writes every field of a trajectory into a folder."""
    tensors: dict[str, Tensor] = {}
    index: dict[str, Any] = {}
    for one in fields(trajectory):
        value = getattr(trajectory, one.name)
        held = value.flat if isinstance(value, Ragged) else value
        if isinstance(held, Tensor):
            tensors[one.name] = held.contiguous().cpu()
            index[one.name] = {"lengths": value.lengths} if isinstance(value, Ragged) else {"tensor": True}
        else:
            index[one.name] = {"value": value}
    save_file(tensors, folder / _TRAJECTORY_TENSORS)
    (folder / _TRAJECTORY_INDEX).write_text(json.dumps(index))


def load_trajectory(folder: Path) -> Trajectory | None:
    """Reads what `save_trajectory` wrote."""
    if not (folder / _TRAJECTORY_INDEX).exists():
        return None
    tensors = load_file(folder / _TRAJECTORY_TENSORS)
    values: dict[str, Any] = {}
    for name, entry in json.loads((folder / _TRAJECTORY_INDEX).read_text()).items():
        if "lengths" in entry:
            values[name] = Ragged(tensors[name], tuple(entry["lengths"]))
        elif "tensor" in entry:
            values[name] = tensors[name]
        else:
            stored = entry["value"]
            values[name] = tuple(stored) if isinstance(stored, list) else stored
    return Trajectory(**values)


def find_checkpoint(output_dir: Path, wanted: bool | str | Path) -> Path | None:
    """Finds a sound checkpoint: ``wanted`` is a folder, True for the run's newest, or "auto" for that one or None."""
    refusal.when(not isinstance(wanted, (bool, str, Path)), "resume_from_checkpoint/kind", wanted=wanted)
    if not isinstance(wanted, bool) and str(wanted).lower() not in ("true", "auto"):
        return _named(Path(wanted))
    folder, why = newest_sound(output_dir)
    if folder is not None or str(wanted).lower() == "auto":
        return folder
    told = f"resume_from_checkpoint is True but {str(output_dir)!r} holds no sound folder '{PREFIX}N' of its run"
    refusal.when(why, "resume_from_checkpoint/unsound", told=told, why=why, previous=PREVIOUS)
    raise refusal("resume_from_checkpoint/none", told=told)


def newest_sound(output_dir: Path) -> tuple[Path | None, str]:
    """Returns the newest checkpoint that a run can resume from, or why the newest is none."""
    why = ""
    for folder in reversed(own_checkpoints(output_dir)):
        try:
            if _can_be_resumed(folder):
                return folder, ""
            logger.warning("%s holds weights only, and cannot be resumed from; one before it is looked for", folder)
            why = why or f"{folder.name} holds weights only; a new run can take it as its model"
        except DamagedCheckpointError as error:
            logger.warning("%s is damaged (%s); the checkpoint before it is used", folder, error)
            why = why or f"{folder.name} is damaged ({error})"
    return None, why


def _named(folder: Path) -> Path:
    """Returns a folder that a user named, if it is a sound checkpoint."""
    told = f"resume_from_checkpoint is {str(folder)!r}"
    refusal.when(not folder.is_dir(), "resume_from_checkpoint/folder", told=told)
    try:
        if _can_be_resumed(folder):
            return folder
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(
            f"{told}, which is damaged: {error}. Delete it and resume from an earlier one."
        ) from error
    raise refusal("resume_from_checkpoint/weights", told=told, loop=LOOP, state=_STATE, prefix=PREFIX)


def _can_be_resumed(folder: Path) -> bool:
    """Returns whether a checkpoint holds more than weights; compares its files with what was written."""
    manifest = read_manifest(folder)
    held = manifest.files if manifest.files is not None else {path.name for path in folder.iterdir()}
    if not {LOOP, _STATE} <= set(held):
        return False
    check_files(folder, manifest)
    return True


def step_of(folder: Path) -> int:
    """Returns the optimizer steps done in a checkpoint."""
    step = read_manifest(folder).step
    return step if step >= 0 else int(json.loads((folder / _TRAINER).read_text())["global_step"])


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    """Returns the folder of the checkpoint that is written after a step."""
    return output_dir / f"{PREFIX}{step}"


def step_named(folder: Path) -> int:
    """Returns the step in a checkpoint's name."""
    return int(folder.name.removeprefix(PREFIX))


def is_checkpoint(folder: Path) -> bool:
    """Returns whether a folder is named as checkpoints are."""
    return folder.name.startswith(PREFIX) and folder.name[len(PREFIX) :].isdigit()


def checkpoints(output_dir: Path) -> list[Path]:
    """Lists the folders of complete checkpoints, the one written last at the end."""
    return [path for _, path in _marked(output_dir)]


def _marked(output_dir: Path) -> list[tuple[RunMark, Path]]:
    """Lists checkpoints with whose they are, the one written last at the end."""
    marked = [(_mark_of(path), path) for path in output_dir.glob(f"{PREFIX}*") if path.is_dir() and is_checkpoint(path)]
    # A run that resumes from an earlier step writes lower numbers later, so starts count before steps.
    return sorted(marked, key=lambda one: (one[0].start, step_named(one[1])))


def known_run(output_dir: Path) -> dict[str, Any]:
    """Returns what `run.json` says of the folder's run; nothing where it is missing, torn or somebody else's file."""
    known = read_json(output_dir / RUN_FILE) or {}
    kinds = {"run_id": str, "start": int, "starts": list, "files": list}
    return known if all(isinstance(known.get(name, kind()), kind) for name, kind in kinds.items()) else {}


def own_checkpoints(output_dir: Path) -> list[Path]:
    """Lists the checkpoints of the run that `run.json` names, damaged ones and those of earlier versions too."""
    wanted = known_run(output_dir).get("run_id")
    runs = (wanted, _UNKNOWN.run_id, "")
    return [path for mark, path in _marked(output_dir) if wanted is None or mark.run_id in runs]


def _mark_of(folder: Path) -> RunMark:
    try:
        return read_manifest(folder).mark
    except ConfigError:  # damaged, or of a newer version
        return _UNKNOWN


def drop_old_checkpoints(output_dir: Path, mark: RunMark, limit: int | None, keep: str | None) -> None:
    """Deletes a run's oldest checkpoints above a limit, but never the newest nor the best, nor another run's."""
    if not limit or limit < 0:
        return
    found = [path for whose, path in _marked(output_dir) if whose.run_id == mark.run_id]
    kept = {path for path in found if keep is not None and path.resolve() == Path(keep).resolve()} | set(found[-1:])
    for path in reversed(found):
        if len(kept) < limit:
            kept.add(path)
    for path in found:
        if path in kept:
            continue
        try:  # under a name that a resumed run cleans up, should this process be killed meanwhile
            remove(path.rename(_draft_of(path)))
        except OSError as error:
            reason = error.strerror or error
            logger.warning("%s cannot be deleted (%s); save_total_limit=%d is not kept", path, reason, limit)
