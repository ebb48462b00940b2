"""Writes a trajectory to disk and reads it back, bit for bit."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from memsafe_rl.types import Ragged, Trajectory

_TENSORS = "trajectory.safetensors"
_INDEX = "trajectory.json"
TRAJECTORY_FILES = (_TENSORS, _INDEX)
"""The files that hold a rollout."""


def save_trajectory(trajectory: Trajectory, folder: Path) -> None:
    """Writes every field of a trajectory into a folder."""
    tensors: dict[str, Tensor] = {}
    index: dict[str, Any] = {}
    for field in fields(trajectory):
        value = getattr(trajectory, field.name)
        if isinstance(value, Ragged):
            tensors[field.name] = value.flat.contiguous().cpu()
            index[field.name] = {"lengths": value.lengths}
        elif isinstance(value, Tensor):
            tensors[field.name] = value.contiguous().cpu()
            index[field.name] = {"tensor": True}
        else:
            index[field.name] = {"value": value}
    save_file(tensors, folder / _TENSORS)
    (folder / _INDEX).write_text(json.dumps(index))


def load_trajectory(folder: Path) -> Trajectory | None:
    """Reads what `save_trajectory` wrote."""
    if not (folder / _INDEX).exists():
        return None
    tensors = load_file(folder / _TENSORS)
    values: dict[str, Any] = {}
    for name, entry in json.loads((folder / _INDEX).read_text()).items():
        if "lengths" in entry:
            values[name] = Ragged(tensors[name], tuple(entry["lengths"]))
        elif "tensor" in entry:
            values[name] = tensors[name]
        else:
            stored = entry["value"]
            values[name] = tuple(stored) if isinstance(stored, list) else stored
    return Trajectory(**values)
