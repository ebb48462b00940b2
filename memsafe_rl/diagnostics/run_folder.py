"""Reads a run's folder: settings, steps, logs, memory events, completions, and its final status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memsafe_rl.diagnostics.status import MEMORY_FILE, METRICS_FILE, STATUS_FILE, STEPS_FILE
from memsafe_rl.errors import ConfigError
from memsafe_rl.records import RUN_FILE, read_json, read_lines

_COMPLETIONS = "completions"
_PER_STEP = ("loss", "memory/peak_bytes")
"""Metrics that mark a line of the log as a training step, not an evaluation or a total."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """Everything a run has written."""

    path: Path
    run: Record  # settings, device, forecast and versions; may be empty
    steps: Sequence[Record]
    logs: Sequence[Record]  # evaluations and totals included
    events: Sequence[Record]
    completions: Mapping[int, Sequence[Record]]  # by step
    status: Record
    damaged: int  # unreadable lines, such as one cut off by a crash


def read_run(folder: Path) -> RunFolder:
    """Reads a run's folder."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"{str(folder)!r} {what}. Give the output_dir of a run, the folder with {METRICS_FILE}.")
    run = read_json(folder / RUN_FILE) or {}
    run_id = str(run.get("run_id", ""))
    steps, first = read_lines(folder / STEPS_FILE, run_id)
    logs, second = read_lines(folder / METRICS_FILE, run_id)
    events, third = read_lines(folder / MEMORY_FILE, run_id)
    steps = list({line["step"]: line for line in steps}.values())  # of a step done again, what came of it last
    # A run of an earlier version wrote no steps; its log has them, averaged over logging_steps.
    steps = [line for line in steps or logs if all(name in line for name in _PER_STEP)]
    if not steps and not run and not events:
        raise ConfigError(
            f"{str(folder)!r} holds no run: neither {STEPS_FILE} nor {METRICS_FILE} has a training step. "
            "Give the output_dir of a run that has finished a step; a checkpoint's folder lies one level below it."
        )
    return RunFolder(
        path=folder,
        run=run,
        steps=steps,
        logs=logs,
        events=events,
        completions=_completions(folder / _COMPLETIONS),
        status=read_json(folder / STATUS_FILE) or {},
        damaged=first + second + third,
    )


def _completions(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Reads the first and the last file of completions; those between are not shown."""
    files = sorted(folder.glob("completions_*.jsonl"))
    chosen = dict.fromkeys([*files[:1], *files[-1:]])
    read = [read_lines(path)[0] for path in chosen]
    return {int(rows[0]["step"]): rows for rows in read if rows}
