"""A run's folder, read: settings, steps, logs, memory events and completions; and the run in a few figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memsafe_rl.diagnostics.status import MEMORY_FILE, METRICS_FILE, STATUS_FILE, STEPS_FILE
from memsafe_rl.errors import ConfigError
from memsafe_rl.records import RUN_FILE, read_json, read_lines

PHASES = ("load", "rollout", "reward", "score", "update", "optimizer", "evaluate", "checkpoint")
"""The values of `memsafe_rl.types.Phase`, whose import would take seconds."""


@dataclass(frozen=True)
class RunFigures:
    """A run in a few figures; None where unknown."""

    steps: int
    seconds: float
    peak_bytes: int | None
    peak_phase: str | None
    budget_bytes: int | None  # what the run was allowed
    forecast_bytes: int | None  # peak forecast before the run
    failures: int
    leaner_plans: int  # switches to a leaner plan
    seconds_lost: float  # time spent on work that then failed
    samples: int | None
    samples_per_second: float | None  # over the time of all steps
    tokens_per_second: float | None  # prompts and completions, over the time of all steps
    first_reward: float | None  # mean reward of the first rollout
    last_reward: float | None  # mean reward of the last rollout
    counts_tensors: bool = True  # whether peaks are those of tensors, as forecasts are, not of the whole process

    @property
    def budget_share(self) -> float | None:
        """The peak over the budget."""
        return self.peak_bytes / self.budget_bytes if self.budget_bytes and self.peak_bytes is not None else None

    @property
    def forecast_error(self) -> float | None:
        """The forecast over the measured peak, less one; None where that is the whole process's."""
        ratio = self.forecast_bytes / self.peak_bytes if self.forecast_bytes and self.peak_bytes else None
        return None if ratio is None or not self.counts_tensors else ratio - 1


def run_figures(
    steps: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    *,
    rollout_rows: float | None = None,
    counts_tensors: bool = True,
) -> RunFigures:
    """Summarises a run."""
    seconds = sum(number(step.get("step_time")) or 0.0 for step in steps)
    peaks = [(peak, phase) for step in steps for phase, peak in by_phase(step).items()]
    peak, phase = max(peaks) if peaks else (None, None)
    rewards = known(steps, "reward")
    samples = None if rollout_rows is None else int(len(known(steps, "completions/mean_length")) * rollout_rows)
    tokens, budgets = known(steps, "num_tokens"), known(steps, "memory/budget_bytes")
    # A resumed run's first record carries the tokens of the part before it.
    drawn = tokens[-1] - (0.0 if steps and steps[0].get("step") == 1 else tokens[0]) if tokens else 0.0
    forecasts = [event["predicted_peak_bytes"] for event in events if event.get("event") == "forecast"]
    failures = [event for event in events if event.get("event") == "failure"]
    return RunFigures(
        steps=len(steps),
        seconds=seconds,
        peak_bytes=peak,
        peak_phase=phase,
        budget_bytes=int(budgets[-1]) if budgets else None,
        forecast_bytes=int(forecasts[-1]) if forecasts else None,
        failures=len(failures),
        leaner_plans=sum(event.get("event") == "fallback" for event in events),
        seconds_lost=sum(number(event.get("seconds_lost")) or 0.0 for event in failures),
        samples=samples,
        samples_per_second=samples / seconds if samples and seconds else None,
        tokens_per_second=drawn / seconds if drawn and seconds else None,
        first_reward=rewards[0] if rewards else None,
        last_reward=rewards[-1] if rewards else None,
        counts_tensors=counts_tensors,
    )


def by_phase(record: Mapping[str, Any], count: str = "_peak_bytes") -> dict[str, int]:
    """Returns a count of one step's bytes by phase: the peaks, or such as "_reserved_bytes"."""
    found = {
        name.removeprefix("memory/").removesuffix(count): number(value)
        for name, value in record.items()
        if name.startswith("memory/") and name.endswith(count)
    }
    return {name: int(value) for name, value in found.items() if value is not None}


def column(records: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    """Lists a metric's values, None where one is no number."""
    return [number(record.get(name)) for record in records]


def known(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Lists a metric's values where they are numbers."""
    return [value for value in column(records, name) if value is not None]


def number(value: Any) -> float | None:
    """Returns a value as a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < float("inf") else None


_COMPLETIONS = "completions"
_PER_STEP = ("loss", "memory/peak_bytes")
"""Metrics that mark a line of the log as a training step, not an evaluation or a total."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """Everything a run has written."""

    path: Path
    run: Record  # settings, device, forecast and versions; may be empty
    counts_tensors: bool  # whether what was measured is the tensors' bytes alone
    steps: Sequence[Record]
    logs: Sequence[Record]  # evaluations and totals included
    events: Sequence[Record]
    completions: Mapping[int, Sequence[Record]]  # by step
    status: Record
    damaged: int  # unreadable lines, such as one cut off by a crash

    @property
    def figures(self) -> RunFigures:
        """The run in a few figures."""
        rows = number(self.run.get("rollout_rows"))
        return run_figures(self.steps, self.events, rollout_rows=rows, counts_tensors=self.counts_tensors)


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
        counts_tensors=bool(run.get("counts_tensors", True)),
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
    read = [read_lines(path)[0] for path in dict.fromkeys([*files[:1], *files[-1:]])]
    return {int(rows[0]["step"]): rows for rows in read if rows}
