"""What a run prints: banner, progress bar, completions, summary."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

from memsafe_rl.diagnostics.run_figures import RunFigures
from memsafe_rl.records import run_id_of, still_ours
from memsafe_rl.units import format_bytes

logger = logging.getLogger(__name__)

_CELL_CHARACTERS = 400


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
        name, facts = TextColumn(f"[bold]{args.algorithm}"), TextColumn("{task.fields[facts]}")
        columns = name, BarColumn(), MofNCompleteColumn(), facts, TimeElapsedColumn(), TimeRemainingColumn()
        self._progress = Progress(*columns, console=self._console)
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
        """Shows the progress of a rollout."""
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
        self._run_id = ""
        self._limit = limit
        self._unique_prompts = unique_prompts
        self._console = console or Console()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Notes whose the folder is."""
        self._run_id = run_id_of(self._folder.parent)

    def on_completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Shows and keeps completions."""
        lines = (json.dumps({"step": step, **row}, default=str) for row in rows)
        path = self._folder / f"completions_{step:05d}.jsonl"
        try:
            if not still_ours(self._folder.parent, self._run_id):
                raise OSError(errno.ESTALE, "the folder is another run's now")
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(line + "\n" for line in lines))
        except OSError as error:
            logger.warning("%s cannot be written (%s)", path, error.strerror)
        if self._unique_prompts:
            rows = list({str(row["prompt"]): row for row in reversed(rows)}.values())[::-1]
        table = Table(title=f"Step {step}", show_lines=True)
        for name in rows[0]:
            table.add_column(name, overflow="fold")
        for row in rows[: self._limit]:
            table.add_row(*(_cell(value) for value in row.values()))
        self._console.print(table)


def banner(facts: Mapping[str, str], console: Console | None = None) -> None:
    """Prints what a run is about to do."""
    _print_facts("memsafe_rl", facts, console)


def summary(figures: RunFigures, console: Console | None = None) -> None:
    """Prints a run's results: memory forecast and measured, time, and what failures cost."""
    _print_facts("memsafe_rl: the run", _summary_facts(figures), console)


def _print_facts(title: str, facts: Mapping[str, str], console: Console | None) -> None:
    table = Table(title=title, show_header=False, title_justify="left", min_width=60)
    for name, value in facts.items():
        table.add_row(name, value)
    (console or Console(stderr=True)).print(table)


def _summary_facts(figures: RunFigures) -> dict[str, str]:
    facts = {"steps": f"{figures.steps} in {figures.seconds:,.1f} s"}
    if figures.forecast_bytes is not None:
        facts["forecast peak"] = format_bytes(figures.forecast_bytes)
    if figures.peak_bytes is not None:
        facts["measured peak"] = f"{format_bytes(figures.peak_bytes)}, in {figures.peak_phase}"
    if figures.forecast_error is not None:
        facts["forecast error"] = f"{figures.forecast_error:+.1%}"
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
        facts["reward"] = f"{figures.first_reward:.3f} at the start, {figures.last_reward:.3f} at the end"
    return facts


def _cell(value: Any) -> Text:
    if isinstance(value, float):
        return Text(f"{value:.3f}")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    # A Text, since a model's own brackets are no markup of ours.
    return Text(text if len(text) <= _CELL_CHARACTERS else text[:_CELL_CHARACTERS] + " …")
