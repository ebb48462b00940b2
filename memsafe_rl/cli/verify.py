"""`memsafe-rl verify`: one probe step under three plans, side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memsafe_rl.cli.train import TRAINERS, Run, device_of, ingredients
from memsafe_rl.preflight.verify import PlanRun, Verification, verify_plan
from memsafe_rl.units import format_bytes

_TITLES = {"plain": "plain plan", "halved": "half the plan", "chosen": "chosen plan", "failures": "with two failures"}

_WHOLE_PROCESS = "Bytes are those of the whole process, libraries included; --simulate SIZE counts only tensors."


def verify(run: Run, console: Console) -> bool:
    """Verifies on the run's own model that its plan changes nothing, and prints the comparison."""
    given = ingredients(run)
    with device_of(run, console):
        found = verify_plan(TRAINERS[run.fields.trainer](**given).loop)
    if run.config.should_log:
        show_verification(found, console)
    return found.passed


def show_verification(found: Verification, console: Console) -> None:
    """Prints a table of the three steps, notes, and the verdict."""
    console.print(comparison(found))
    own = () if found.exact_bytes else (_WHOLE_PROCESS,)
    for note in (*found.notes, *own):
        console.print(note, highlight=False, style="dim")
    console.print(Text(found.sentence(), style="bold green" if found.passed else "bold red"))


def comparison(found: Verification) -> Table:
    """Lays the three steps side by side."""
    table = Table(title=f"One probe step of {found.rows} completions", title_justify="left")
    table.add_column("", no_wrap=True)
    for arm in found.arms:
        table.add_column(_TITLES[arm.name], justify="right")

    def row(name: str, cell: Callable[[PlanRun], str], *, ends: bool = False) -> None:
        table.add_row(name, *(cell(arm) for arm in found.arms), end_section=ends)

    row("rows in flight", lambda arm: f"{min(arm.rollout_plan.rows_in_flight, found.rows):,}")
    row("micro-batches", lambda arm: f"{arm.micro_batches:,}")
    row("log-prob tile, tokens", lambda arm: f"{arm.update_plan.logprob_tile:,}")
    row("activations", _activations)
    row("trajectory", lambda arm: f"on the {arm.update_plan.trajectory_device}")
    row("failures recovered from", lambda arm: f"{arm.failures:,}", ends=True)
    row("sampled tokens equal", _tokens)
    row("gradient difference", lambda arm: _or_dash(arm.gradient_difference, "{:.1e}".format))
    row("equal bit for bit", lambda arm: "yes" if arm.same_bits else "no", ends=True)
    for phase in found.plain.phase_peaks:
        row(f"peak in {phase}", lambda arm, phase=phase: _or_dash(arm.phase_peaks.get(phase)))  # type: ignore[misc]
    row("peak" if found.exact_bytes else "peak of the process", lambda arm: format_bytes(arm.peak_bytes))
    if found.plain.name == "plain":
        row("saved", lambda arm: _saved(arm, found))
    row("seconds", lambda arm: f"{arm.seconds:.1f}")
    return table


def _activations(arm: PlanRun) -> str:
    plan = arm.update_plan
    return "offloaded" if plan.offload_activations else "recomputed" if plan.checkpointing else "kept"


def _tokens(arm: PlanRun) -> str:
    """Counts the tokens equal to the chosen plan's, and the differing rows that are certified ties."""
    equal = f"{arm.tokens_equal:,} of {arm.tokens:,}"
    return f"{equal}; {arm.rows_excused} of {arm.rows_differing} rows tied" if arm.rows_differing else equal


def _or_dash(value: Any, write: Callable[[Any], str] = format_bytes) -> str:
    return "-" if value is None else write(value)


def _saved(arm: PlanRun, found: Verification) -> str:
    if arm is found.plain:
        return "-"
    saved = found.plain.peak_bytes - arm.peak_bytes
    return f"{format_bytes(saved)} ({saved / found.plain.peak_bytes:.0%})"
