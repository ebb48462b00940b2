"""What a run prints: banner, progress bar, completions, summary."""

from __future__ import annotations

import errno
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text
from transformers import TrainerCallback

from memsafe_rl.diagnostics.run_figures import RunFigures
from memsafe_rl.records import run_id_of, still_ours
from memsafe_rl.units import chat_text, format_bytes, format_seconds

logger = logging.getLogger(__name__)

_CELL_CHARACTERS = 400
_SHOWN = {
    "reward": "reward {:.3f}",
    "loss": "loss {:z.4f}",
    "kl": "KL {:.4f}",
    "entropy": "entropy {:.3g}",
    "completions/mean_length": "length {:.0f}",
    "completions/clipped_ratio": "truncated {:.0%}",
}
_ON_THE_BAR = ("reward", "completions/mean_length", "memory/peak_bytes")


class ProgressBar(TrainerCallback):  # type: ignore[misc]
    """A line of metrics at every log; on a terminal, a progress bar below them."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._progress: Progress | None = None
        self._task: Any = None
        self._began: float | None = None  # None: this process shows nothing
        self._first_step = self._first_tokens = 0
        self._tokens = self._peak = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Notes where the run starts from, and draws the bar, named after the algorithm."""
        if not state.is_world_process_zero:
            return
        self._began, self._peak = time.monotonic(), 0.0
        self._first_step, self._first_tokens = state.global_step, state.num_input_tokens_seen
        self._tokens = self._first_tokens
        if not (self._console.is_terminal or self._console.is_jupyter):
            return
        name, facts = TextColumn(f"[bold]{args.algorithm}"), TextColumn("{task.fields[facts]}")
        columns = name, BarColumn(), MofNCompleteColumn(), facts, TimeElapsedColumn(), TimeRemainingColumn()
        self._progress = Progress(*columns, console=self._console)
        self._task = self._progress.add_task("train", total=state.max_steps, completed=state.global_step, facts="")
        self._progress.start()

    def on_progress(self, step: int, metrics: Mapping[str, float]) -> None:
        """Moves the bar; called by the trainer after every optimizer step."""
        self._tokens = metrics.get("num_tokens", self._tokens)
        self._peak = max(self._peak, metrics.get("memory/peak_bytes", 0.0))
        if self._progress is not None:
            shown = {name: metrics[name] for name in _ON_THE_BAR if name in metrics}
            self._progress.update(self._task, completed=step, facts="  ".join(_words(shown)))

    def on_sampling(self, ended: int, total: int) -> None:
        """Shows the progress of a rollout."""
        if self._progress is not None:
            self._progress.update(self._task, facts=f"sampling {ended}/{total}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:  # noqa: ARG002
        """Prints the averages since the last log, or an evaluation, as one line."""
        logs = logs or {}
        evaluations = [name.removesuffix("reward") for name in logs if name.endswith("_reward") and "/" not in name]
        if self._began is None or not ("loss" in logs or evaluations):
            return
        words = [f"step {state.global_step}/{state.max_steps}"]
        if "loss" in logs:
            words += [*_words({**logs, "memory/peak_bytes": self._peak}), *self._speed(state)]
            self._peak = 0.0
        else:
            prefix = evaluations[0]
            words += [prefix.rstrip("_"), *_words({name.removeprefix(prefix): value for name, value in logs.items()})]
        self._console.print("  ".join(words), soft_wrap=self._progress is None, highlight=False, markup=False)

    def _speed(self, state: Any) -> list[str]:
        """Returns tokens a second since training began, and the time left at the pace so far."""
        seconds, done = time.monotonic() - (self._began or 0.0), state.global_step - self._first_step
        if not done:  # a resumed run logs the step after which it was cut short
            return []
        rate, left = (self._tokens - self._first_tokens) / seconds, (state.max_steps - state.global_step) / done
        return [f"{rate:,.0f} tokens/s"] * (rate > 0) + [f"ETA {format_seconds(seconds * left)}"] * (left > 0)

    def on_run_closed(self) -> None:
        """Stops the bar, also after an error."""
        self._began = None
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _words(metrics: Mapping[str, Any]) -> list[str]:
    """Writes those of a step's metrics that people watch; NaN, which logs hold as None, is shown as such."""
    known = {name: math.nan if value is None else value for name, value in metrics.items()}
    if math.isnan(known.get("entropy", 0.0)):  # a step whose rewards are all equal trains no token
        del known["entropy"]
    words = [form.format(known[name]) for name, form in _SHOWN.items() if name in known]
    if "reward" in known and "reward_std" in known:
        words[0] += f" ± {known['reward_std']:.3f}"
    if "memory/peak_bytes" in known:
        budget = f" of {format_bytes(int(known['memory/budget_bytes']))}" if "memory/budget_bytes" in known else ""
        words.append(f"peak {format_bytes(int(known['memory/peak_bytes']))}{budget}")
    return words


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
        table = Table(*(Column(name, overflow="fold") for name in rows[0]), title=f"Step {step}", show_lines=True)
        for row in rows[: self._limit]:
            table.add_row(*(_cell(value) for value in row.values()))
        if self._limit != 0:
            self._console.print(table)


def banner(facts: Mapping[str, str], console: Console | None = None, *, title: str = "memsafe_rl") -> None:
    """Prints what a run is about to do."""
    table = Table(title=title, show_header=False, title_justify="left", min_width=60)
    for name, value in facts.items():
        table.add_row(name, value)
    (console or Console(stderr=True)).print(table)


def summary(
    figures: RunFigures, console: Console | None = None, *, then: Mapping[str, str] | None = None, since: int = 0
) -> None:
    """Prints what a run came to since a step: memory forecast and measured, time, failures, and what may follow."""
    console = console or Console(stderr=True)
    peak, budget, share, error = figures.peak_bytes, figures.budget_bytes, figures.budget_share, figures.forecast_error
    lost = figures.seconds_lost / figures.seconds if figures.seconds else 0.0
    samples, tokens, rewards = figures.samples_per_second, figures.tokens_per_second, figures.last_reward
    whose = "" if figures.counts_tensors else ", of the whole process"
    facts = {
        "steps": f"{figures.steps} in {figures.seconds:,.1f} s",
        "forecast peak": figures.forecast_bytes is not None and format_bytes(figures.forecast_bytes),
        "measured peak": peak is not None and f"{format_bytes(peak)}, in {figures.peak_phase}{whose}",
        "forecast error": error is not None and f"{error:+.1%}",
        "budget": budget and share is not None and f"{format_bytes(budget)}, {share:.1%} used at the peak",
        "failures survived": f"{figures.failures}, leaner plans {figures.leaner_plans}",
        "lost to memory": f"{figures.seconds_lost:,.2f} s, {lost:.1%} of the time",
        "samples a second": samples is not None and f"{samples:.2f}",
        "tokens a second": tokens is not None and f"{tokens:,.0f}",
        "reward": rewards is not None and f"{figures.first_reward:.3f} at the start, {rewards:.3f} at the end",
    }
    known = {name: text for name, text in facts.items() if isinstance(text, str)}
    banner(known, console, title="memsafe_rl: the run" + (f" since step {since}" if since else ""))
    for purpose, command in (then or {}).items():
        console.print(f"{purpose}: {command}", soft_wrap=True, highlight=False, markup=False)


def _cell(value: Any) -> Text:
    if isinstance(value, float):
        return Text(f"{value:.3f}")
    text = chat_text(value)
    # A Text, since a model's own brackets are no markup of ours.
    return Text(text if len(text) <= _CELL_CHARACTERS else text[:_CELL_CHARACTERS] + " …")
