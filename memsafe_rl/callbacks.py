"""What a run shows and writes down: banner, progress bar, metrics log, completions table, trackers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

from memsafe_rl.units import format_bytes

METRICS_FILE = "metrics.jsonl"
MEMORY_FILE = "memory.jsonl"
_CELL_CHARACTERS = 400


class MetricsLog(TrainerCallback):  # type: ignore[misc]
    """Appends every log to `metrics.jsonl` and every memory event to `memory.jsonl` in the run's folder.

    Args:
        output_dir: the run's folder.
        events: the run's memory events, a list that grows.
    """

    def __init__(self, output_dir: Path, events: Sequence[Mapping[str, Any]]) -> None:
        self._output_dir = output_dir
        self._events = events
        self._written = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Opens the logs; after a resume, lines of steps that are done again are dropped."""
        if not state.is_world_process_zero:
            return
        self._output_dir.mkdir(parents=True, exist_ok=True)
        for name in (METRICS_FILE, MEMORY_FILE):
            path = self._output_dir / name
            lines = path.read_text().splitlines() if path.exists() and state.global_step > 0 else []
            kept = [line for line in lines if json.loads(line)["step"] <= state.global_step]
            path.write_text("".join(line + "\n" for line in kept))

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:  # noqa: ARG002
        """Writes one line of metrics."""
        if state.is_world_process_zero and logs is not None and self._output_dir.exists():
            self._append(METRICS_FILE, [{"step": state.global_step, **logs}])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Writes the memory events of the step."""
        if state.is_world_process_zero:
            self._append(MEMORY_FILE, self._events[self._written :])
            self._written = len(self._events)

    def _append(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        with (self._output_dir / name).open("a") as file:
            for record in records:
                file.write(json.dumps(record, default=str) + "\n")


class ProgressBar(TrainerCallback):  # type: ignore[misc]
    """A progress bar with reward, completion length, peak memory and the time left.

    Args:
        console: where it is drawn.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._progress: Progress | None = None
        self._task: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Draws the bar."""
        if not state.is_world_process_zero:
            return
        self._progress = Progress(
            TextColumn("[bold]GRPO"),
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
        """Moves the bar; called by the trainer after every optimizer step.

        Args:
            step: optimizer steps done.
            metrics: the step's metrics.
        """
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
        """Shows how far a rollout is.

        Args:
            ended: completions that have ended.
            total: completions of the rollout.
        """
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
    """Shows logged completions as a table and keeps them as JSON lines in the run's folder.

    Args:
        output_dir: the run's folder.
        limit: completions shown; None for all.
        unique_prompts: show one completion a prompt.
        console: where it is drawn.
    """

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
    """Passes logs to the trackers that accelerate knows (wandb, tensorboard, trackio ...).

    Args:
        accelerator: started with `log_with`.
        project: name of the project.
        run_name: name of the run, None for the tracker's choice.
    """

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
    """Prints what a run is about to do.

    Args:
        facts: names and values, in order.
        console: where it is printed.
    """
    table = Table(title="memsafe_rl", show_header=False, title_justify="left", min_width=60)
    for name, value in facts.items():
        table.add_row(name, value)
    (console or Console(stderr=True)).print(table)


def _cell(value: Any) -> Text:
    if isinstance(value, float):
        return Text(f"{value:.3f}")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    # A Text, since a model's own brackets are no markup of ours.
    return Text(text if len(text) <= _CELL_CHARACTERS else text[:_CELL_CHARACTERS] + " …")
