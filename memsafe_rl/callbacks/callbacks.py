"""What a run shows and writes down: banner, progress bar, metrics log, completions table, trackers."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

from memsafe_rl.diagnostics.run_figures import RunFigures, phase_peaks
from memsafe_rl.diagnostics.status import RUN_FILE, STEPS_FILE, enter_index, process_started, status_file, write_json
from memsafe_rl.memory.runtime.device_readings import allocator_counters, device_facts, driver_free_bytes
from memsafe_rl.memory.runtime.tracker import MemoryTracker
from memsafe_rl.units import format_bytes

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
MEMORY_FILE = "memory.jsonl"
_CELL_CHARACTERS = 400
_ERROR_CHARACTERS = 4000
_VERSIONS_OF = ("memsafe-rl", "torch", "transformers", "peft", "accelerate", "bitsandbytes", "vllm")
_SHOWN_METRICS = (
    "reward",
    "kl",
    "entropy",
    "completions/mean_length",
    "completions/clipped_ratio",
    "step_time",
    "num_tokens",
)
"""Metrics of the last step that a status file repeats."""


class MetricsLog(TrainerCallback):  # type: ignore[misc]
    """Appends every log to `metrics.jsonl` and every memory event to `memory.jsonl` in the run's folder."""

    def __init__(self, output_dir: Path, events: Sequence[Mapping[str, Any]]) -> None:
        self._output_dir = output_dir
        self._events = events
        self._written = 0
        self._is_main = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Opens the logs; after a resume, lines of steps that are done again are dropped."""
        if not state.is_world_process_zero:
            return
        self._is_main = True
        self._output_dir.mkdir(parents=True, exist_ok=True)
        _keep_lines(self._output_dir / METRICS_FILE, state.global_step)
        _keep_lines(self._output_dir / MEMORY_FILE, state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:  # noqa: ARG002
        """Writes one line of metrics."""
        if state.is_world_process_zero and logs is not None and self._output_dir.exists():
            self._append(METRICS_FILE, [{"step": state.global_step, **logs}])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Writes the memory events of the step."""
        self._is_main = bool(state.is_world_process_zero)
        self._write_events()

    def close(self) -> None:
        """Writes the events of a step that did not end."""
        self._write_events()

    def _write_events(self) -> None:
        if self._is_main and self._output_dir.exists():
            self._append(MEMORY_FILE, self._events[self._written :])
            self._written = len(self._events)

    def _append(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        with (self._output_dir / name).open("a") as file:
            for record in records:
                file.write(json.dumps(record, default=str) + "\n")


class RunRecord(TrainerCallback):  # type: ignore[misc]
    """Writes what a run is into `run.json`, and every step, not only those that are logged, into `steps.jsonl`."""

    def __init__(
        self,
        output_dir: Path,
        tracker: MemoryTracker,
        device: torch.device,
        facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._output_dir = output_dir
        self._tracker = tracker
        self._device = device
        self._facts = facts
        self._is_main = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Writes down what the run is; after a resume, lines of steps that are done again are dropped."""
        if not state.is_world_process_zero:
            return
        self._is_main = True
        self._output_dir.mkdir(parents=True, exist_ok=True)
        _keep_lines(self._output_dir / STEPS_FILE, state.global_step)
        content = {
            "began": time.time(),
            "first_step": state.global_step,
            "max_steps": state.max_steps,
            "device": asdict(device_facts(self._tracker.meter, self._device)),
            "budget_bytes": self._tracker.budget_bytes,
            "counts_tensors": self._tracker.meter.is_exact,
            "versions": {"python": platform.python_version(), **_versions()},
            "command": " ".join(sys.argv),
            "config": args.to_sanitized_dict(),
            **self._facts(),
        }
        write_json(self._output_dir / RUN_FILE, content)

    def on_progress(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one line; called by the trainer after every optimizer step."""
        if not self._is_main or not self._output_dir.exists():
            return
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = {"step": step, "seconds": time.time(), **finite, "held_at_peak": self._tracker.step_parts}
        with (self._output_dir / STEPS_FILE).open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")


class StatusFile(TrainerCallback):  # type: ignore[misc]
    """Tells whoever watches the run how it stands, in `monitor.json`, once a second while it trains.

    A thread of its own reads counters and writes the file, so that a long phase is watched as well as a short one and
    the run waits for nothing. The driver is asked between steps only, by the run itself.
    """

    def __init__(
        self,
        output_dir: Path,
        tracker: MemoryTracker,
        device: torch.device,
        *,
        rank: int = 0,
        world_size: int = 1,
        every_seconds: float = 1.0,
    ) -> None:
        self._path = output_dir / status_file(rank)
        self._tracker = tracker
        self._device = device
        self._every_seconds = every_seconds
        self._fixed: dict[str, Any] = {"rank": rank, "world_size": world_size}
        self._now: dict[str, Any] = {"metrics": {}}
        self._peaks: dict[str, int] = {}
        self._counted = {"failure": 0, "retry": 0}
        self._seen = 0
        self._asked = -self._every_seconds
        self._entry: Path | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Begins to write."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fixed |= {
            "pid": os.getpid(),
            "process_started": process_started(os.getpid()),
            "host": socket.gethostname(),
            "run_dir": str(self._path.parent.resolve()),
            "began": time.time(),
            "max_steps": state.max_steps,
            "device": asdict(device_facts(self._tracker.meter, self._device)),
            "counts_tensors": self._tracker.meter.is_exact,
        }
        self._now = {"state": "training", "step": state.global_step, "sampling": None, "metrics": {}}
        self._peaks, self._seen, self._asked = {}, 0, -self._every_seconds
        self._counted = dict.fromkeys(self._counted, 0)
        self._ask_driver()
        if not self.write():
            return
        self._entry = enter_index(self._path.parent) if self._fixed["rank"] == 0 else None
        self._over.clear()
        # By weak reference, so that a trainer whose run was never closed is not kept for good.
        watched = (weakref.ref(self), self._over, self._every_seconds)
        self._thread = threading.Thread(target=_keep_writing, args=watched, name="memsafe_rl status", daemon=True)
        self._thread.start()

    def on_progress(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes a step's metrics; called by the trainer after every optimizer step."""
        shown = {name: metrics[name] for name in _SHOWN_METRICS if name in metrics}
        last = phase_peaks(metrics)
        for name, peak in last.items():
            self._peaks[name] = max(self._peaks.get(name, 0), peak)
        self._now = {
            **self._now,
            "step": step,
            "sampling": None,
            "last_step_peak_bytes": last,
            "metrics": {**self._now["metrics"], **shown},  # later passes over a rollout have no reward of their own
        }
        self._ask_driver()

    def on_sampling(self, ended: int, total: int) -> None:
        """Takes how far a rollout is."""
        self._now = {**self._now, "sampling": [ended, total]}

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Says that the run came to its end, which `close` cannot know."""
        self._now = {**self._now, "state": "finished", "ended_by": ""}
        self.write()

    def close(self) -> None:
        """Stops writing, also after an error, which it names."""
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()
        self._thread = None
        error = sys.exc_info()[1]
        if self._now.get("state") == "training":
            told = "" if error is None else f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
            self._now = {**self._now, "state": "stopped", "ended_by": told}
        self.write()
        if self._entry is not None:
            self._entry.unlink(missing_ok=True)

    def write(self) -> bool:
        """Writes the file."""
        try:
            write_json(self._path, self.snapshot())
        except OSError as error:
            logger.warning("memsafe-rl monitor cannot follow this run any longer: %s", error)
            return False
        return True

    def _ask_driver(self) -> None:
        # In this thread and between phases: a driver that is asked while another thread captures a graph breaks it.
        if time.monotonic() - self._asked < self._every_seconds:
            return
        self._asked = time.monotonic()
        self._now = {**self._now, "free_bytes": driver_free_bytes(self._tracker.meter, self._device)}

    def snapshot(self) -> dict[str, Any]:
        """Gives how the run stands, in plain values."""
        tracker, counters = self._tracker, allocator_counters(self._tracker.meter, self._device)
        peaks = dict(self._peaks)
        for name, peak in dict(tracker.phase_peaks).items():
            peaks[str(name)] = max(peaks.get(name, 0), peak)
        plans = (tracker.rollout_plan, tracker.update_plan)
        predicted = {name: size for plan in plans for name, size in plan.predicted_bytes.items() if "/" not in name}
        self._count_events()
        return {
            **self._fixed,
            **self._now,
            "written": time.time(),
            "phase": str(tracker.phase_now),
            "budget_bytes": tracker.budget_bytes,
            "allocated_bytes": counters.allocated_bytes,
            "reserved_bytes": counters.reserved_bytes,
            "phase_peak_bytes": peaks,
            "peak_bytes": max(peaks.values(), default=counters.allocated_bytes),
            "predicted_bytes": predicted,
            "allocator_retries": counters.retries,
            "allocator_ooms": counters.ooms,
            "failures": self._counted["failure"],
            "retries": self._counted["retry"],
        }

    def _count_events(self) -> None:
        events, end = self._tracker.events, len(self._tracker.events)
        for event in events[self._seen : end]:
            if event["event"] in self._counted:
                self._counted[event["event"]] += 1
        self._seen = end


class ProgressBar(TrainerCallback):  # type: ignore[misc]
    """A progress bar with reward, completion length, peak memory and the time left."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._progress: Progress | None = None
        self._task: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Draws the bar, named after the algorithm."""
        if not state.is_world_process_zero:
            return
        self._progress = Progress(
            TextColumn(f"[bold]{args.algorithm}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("train", total=state.max_steps, completed=state.global_step, facts="")
        self._progress.start()

    def on_progress(self, step: int, metrics: Mapping[str, float]) -> None:
        """Moves the bar; called by the trainer after every optimizer step."""
        if self._progress is None:
            return
        facts = []
        if "reward" in metrics:
            facts.append(f"reward {metrics['reward']:.3f}")
        if "completions/mean_length" in metrics:
            facts.append(f"length {metrics['completions/mean_length']:.0f}")
        if "memory/peak_bytes" in metrics:
            facts.append(f"peak {format_bytes(int(metrics['memory/peak_bytes']))}")
        self._progress.update(self._task, completed=step, facts="  ".join(facts))

    def on_sampling(self, ended: int, total: int) -> None:
        """Shows how far a rollout is."""
        if self._progress is not None:
            self._progress.update(self._task, facts=f"sampling {ended}/{total}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Stops the bar."""
        self.close()

    def close(self) -> None:
        """Stops the bar, also after an error."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class CompletionsTable(TrainerCallback):  # type: ignore[misc]
    """Shows logged completions as a table and keeps them as JSON lines in the run's folder."""

    def __init__(
        self, output_dir: Path, *, limit: int | None, unique_prompts: bool, console: Console | None = None
    ) -> None:
        self._folder = output_dir / "completions"
        self._limit = limit
        self._unique_prompts = unique_prompts
        self._console = console or Console()

    def on_completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Shows and keeps completions."""
        self._folder.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"step": step, **row}, default=str) for row in rows)
        (self._folder / f"completions_{step:05d}.jsonl").write_text("".join(line + "\n" for line in lines))
        if self._unique_prompts:
            rows = list({str(row["prompt"]): row for row in reversed(rows)}.values())[::-1]
        table = Table(title=f"Step {step}", show_lines=True)
        for name in rows[0]:
            table.add_column(name, overflow="fold")
        for row in rows[: self._limit]:
            table.add_row(*(_cell(value) for value in row.values()))
        self._console.print(table)


class Trackers(TrainerCallback):  # type: ignore[misc]
    """Passes logs to the trackers that accelerate knows (wandb, tensorboard, trackio ...)."""

    def __init__(self, accelerator: Any, *, project: str, run_name: str | None) -> None:
        self._accelerator = accelerator
        self._project = project
        self._run_name = run_name

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Opens the trackers with the run's configuration."""
        plain = {
            name: value if isinstance(value, (bool, int, float, str)) else str(value)
            for name, value in args.to_sanitized_dict().items()
        }
        named = {"wandb": {"name": self._run_name}} if self._run_name else {}
        self._accelerator.init_trackers(self._project, config=plain, init_kwargs=named)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:  # noqa: ARG002
        """Passes one log on."""
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, (int, float))}
        self._accelerator.log(numbers, step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Closes the trackers."""
        self._accelerator.end_training()


def banner(facts: Mapping[str, str], console: Console | None = None) -> None:
    """Prints what a run is about to do."""
    table = Table(title="memsafe_rl", show_header=False, title_justify="left", min_width=60)
    for name, value in facts.items():
        table.add_row(name, value)
    (console or Console(stderr=True)).print(table)


def summary(figures: RunFigures, console: Console | None = None) -> None:
    """Prints what a run came to: memory forecast and measured, time, and what failures cost."""
    table = Table(title="memsafe_rl: the run", show_header=False, title_justify="left", min_width=60)
    for name, value in _summary_facts(figures).items():
        table.add_row(name, value)
    (console or Console(stderr=True)).print(table)


def _summary_facts(figures: RunFigures) -> dict[str, str]:
    facts = {"steps": f"{figures.steps} in {figures.seconds:,.1f} s"}
    if figures.forecast_bytes is not None:
        facts["forecast peak"] = format_bytes(figures.forecast_bytes)
    if figures.peak_bytes is not None:
        facts["measured peak"] = f"{format_bytes(figures.peak_bytes)}, in {figures.peak_phase}"
    if figures.forecast_error is not None:
        facts["error of the forecast"] = f"{figures.forecast_error:+.1%}"
    if figures.budget_bytes is not None and figures.budget_share is not None:
        facts["budget"] = f"{format_bytes(figures.budget_bytes)}, {figures.budget_share:.1%} used at the peak"
    share = figures.seconds_lost / figures.seconds if figures.seconds else 0.0
    facts["failures survived"] = f"{figures.failures}, leaner plans {figures.leaner_plans}"
    facts["lost to memory"] = f"{figures.seconds_lost:,.2f} s, {share:.1%} of the time"
    if figures.samples_per_second is not None:
        facts["samples a second"] = f"{figures.samples_per_second:.2f}"
    if figures.tokens_per_second is not None:
        facts["tokens a second"] = f"{figures.tokens_per_second:,.0f}"
    if figures.first_reward is not None and figures.last_reward is not None:
        facts["reward"] = f"{figures.first_reward:.3f} at first, {figures.last_reward:.3f} at last"
    return facts


def _keep_writing(watched: weakref.ref[StatusFile], over: threading.Event, every_seconds: float) -> None:
    while not over.wait(every_seconds):
        status = watched()
        if status is None or not status.write():
            return
        del status


def _keep_lines(path: Path, last_step: int) -> None:
    """Leaves in a log the lines of steps up to one; none where a run begins."""
    lines = path.read_text().splitlines() if path.exists() and last_step > 0 else []
    kept = [line for line in lines if json.loads(line)["step"] <= last_step]
    path.write_text("".join(line + "\n" for line in kept))


def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONS_OF:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cell(value: Any) -> Text:
    if isinstance(value, float):
        return Text(f"{value:.3f}")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    # A Text, since a model's own brackets are no markup of ours.
    return Text(text if len(text) <= _CELL_CHARACTERS else text[:_CELL_CHARACTERS] + " …")
