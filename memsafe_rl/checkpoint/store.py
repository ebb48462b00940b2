"""Checkpoints: a folder that is there whole or not at all, and everything a run needs to go on bit for bit."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from memsafe_rl.checkpoint.trajectory_file import load_trajectory, save_trajectory
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.runtime.failures import is_out_of_memory
from memsafe_rl.types import Trajectory

PREFIX = "checkpoint-"
_STATE = "training_state.pt"
_LOOP = "loop.json"
_TRAINER = "trainer_state.json"
_SIGNS_OF_DAMAGE = (OSError, EOFError, LookupError, RuntimeError, TypeError, ValueError, AttributeError)
"""What readers raise on torn files, whose bytes can look like anything."""


def write_checkpoint(
    output_dir: Path,
    step: int,
    *,
    save_model: Callable[[Path], None],
    write_state: Callable[[Path], None],
    tensors: dict[str, Any] | None,
    loop: dict[str, Any],
    trajectory: Trajectory | None,
) -> Path:
    """Writes a checkpoint beside its final place and moves it there when it is complete."""
    final = checkpoint_folder(output_dir, step)
    draft = output_dir / f".{PREFIX}{step}.part"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    save_model(draft)
    write_state(draft / _TRAINER)
    if tensors is not None:
        torch.save(tensors, draft / _STATE)
        (draft / _LOOP).write_text(json.dumps(loop))
        if trajectory is not None:
            save_trajectory(trajectory, draft)
    for path in draft.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    if final.exists():
        shutil.rmtree(final)
    draft.rename(final)
    return final


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Any], Trajectory | None]:
    """Reads what a run needs besides the weights."""
    if not (folder / _LOOP).exists() or not (folder / _STATE).exists():
        raise ConfigError(
            f"resume_from_checkpoint is {str(folder)!r}, which holds no {_LOOP} or {_STATE}. Name a folder "
            f"'{PREFIX}N' written without save_only_model."
        )
    try:
        tensors = torch.load(folder / _STATE, map_location="cpu", weights_only=True)
        loop = json.loads((folder / _LOOP).read_text())
        state = json.loads((folder / _TRAINER).read_text())
        return tensors, {**loop, "trainer_state": state}, load_trajectory(folder)
    except (*_SIGNS_OF_DAMAGE, pickle.UnpicklingError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            f"resume_from_checkpoint is {str(folder)!r}, which is damaged ({type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}). Delete it and resume from an earlier one."
        ) from error


def find_checkpoint(output_dir: Path, wanted: bool | str | Path) -> Path:
    """Finds the checkpoint to resume from."""
    if not isinstance(wanted, (bool, str, Path)):
        raise ConfigError(f"resume_from_checkpoint is {wanted!r}; it must be True, or a checkpoint's folder.")
    if not isinstance(wanted, bool) and str(wanted).lower() != "true":
        if not Path(wanted).is_dir():
            told = str(wanted)
            raise ConfigError(f"resume_from_checkpoint is {told!r}, which is not a folder. Name a checkpoint folder.")
        return Path(wanted)
    found = [path for path in checkpoints(output_dir) if (path / _LOOP).exists()]
    if not found:
        raise ConfigError(
            f"resume_from_checkpoint is True but {str(output_dir)!r} holds no folder '{PREFIX}N'. Start without it."
        )
    return found[-1]


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    """Gives the folder of the checkpoint that is written after a step."""
    return output_dir / f"{PREFIX}{step}"


def checkpoints(output_dir: Path) -> list[Path]:
    """Lists complete checkpoints, oldest first."""
    found = [path for path in output_dir.glob(f"{PREFIX}*") if path.is_dir() and path.name[len(PREFIX) :].isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))


def drop_old_checkpoints(output_dir: Path, limit: int | None, keep: str | None) -> None:
    """Deletes the oldest checkpoints above a limit, but never the newest nor the best."""
    if not limit or limit < 0:
        return
    found = checkpoints(output_dir)
    kept = {path for path in found if keep is not None and path == Path(keep)} | set(found[-1:])
    for path in reversed(found):
        if len(kept) < limit:
            kept.add(path)
    for path in found:
        if path not in kept:
            shutil.rmtree(path)
