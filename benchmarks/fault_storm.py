"""Does a run that keeps running out of memory learn what an untroubled one learns?

    python -m benchmarks.fault_storm [--faults 1000] [--seed 0]

Every fault is an allocation, chosen at random, that a simulated device refuses from inside the kernel with a genuine
`torch.OutOfMemoryError`. Each configuration trains a tiny Qwen3 with two passes over every rollout. First it goes
through whole runs, once untroubled and once under faults, and the final weights are compared. Then it goes step by
step: each optimizer step is done untroubled, everything is put back as it was before, and the same step is done under
faults; half of them fall anywhere, half into a phase that was drawn first. Compared are the sampled tokens, what is
stored for later steps, the gradient before clipping, the weights, the bytes held, and what the reward function was
given. Where plans may become leaner, several faults fall on a step.

At the end runs are broken off in the middle of a storm: by a reward function that raises, by one that runs out of
memory itself, by a callback that raises, by Ctrl+C at any operator, and by memory that never suffices. The error has to
come out, nothing may be left behind, and the run has to go on from its checkpoint as if nothing had happened.

Writes `benchmarks/results/fault_storm.json`; exits with 1 if anything was not as it must be.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.machine import describe_machine
from tests.faults.scenes import SCENES, Scene
from tests.faults.storms import Findings, storm_over
from tests.faults.upsets import UPSETS, upset

_COLUMNS = ("faults", "leaner plans", "steps", "bitwise", "gradient", "final weights", "seconds lost")


def storms(scenes: Sequence[Scene], faults: int, seed: int, folder: Path, progress: Progress) -> dict[str, Findings]:
    """Sends storms over every scene.

    Args:
        scenes: the configurations.
        faults: how many over all scenes, at least.
        seed: of the choices.
        folder: where trainers write.
        progress: shows how far they are.

    Returns:
        What was found, by the scene's name.
    """
    task = progress.add_task("faults", total=faults)
    found: dict[str, Findings] = {}
    for number, scene in enumerate(scenes):
        progress.update(task, description=scene.name)
        share = faults * (number + 1) // len(scenes) - faults * number // len(scenes)
        found[scene.name] = storm_over(
            scene, share, seed + number, folder / str(number), lambda fallen: progress.advance(task, fallen)
        )
    return found


def upsets(scenes: Sequence[Scene], count: int, seed: int, folder: Path, progress: Progress) -> dict[str, Any]:
    """Has the user's own code break off runs of every scene, in every way.

    Args:
        scenes: the configurations.
        count: times for each scene and way.
        seed: of the places.
        folder: where trainers write.
        progress: shows how far they are.

    Returns:
        How many there were of each kind, and what may not be.
    """
    task = progress.add_task("the user's own errors", total=len(scenes) * len(UPSETS) * count)
    violations: list[str] = []
    for scene in scenes:
        progress.update(task, description=f"user's errors: {scene.name}")
        for kind in UPSETS:
            for number in range(count):
                violations += upset(scene, kind, seed + number, folder / "upsets")
                progress.advance(task)
    return {"of_each_kind": len(scenes) * count, "kinds": list(UPSETS), "violations": violations}


def totals(found: dict[str, Findings]) -> dict[str, Any]:
    """Adds up what was found over all scenes.

    Args:
        found: by scene.

    Returns:
        Plain values.
    """
    parts = list(found.values())
    by_phase: Counter[str] = sum((part.by_phase for part in parts), Counter())
    added = ("faults", "fallbacks", "runs", "steps", "compared_steps", "bitwise_steps", "tokens", "excused_ties")
    return {
        **{name: sum(getattr(part, name) for part in parts) for name in added},
        "by_phase": dict(by_phase),
        "largest_gradient_difference": max(part.gradient for part in parts),
        "largest_weight_difference": max(part.weights for part in parts),
        "seconds_lost": sum(part.seconds_lost for part in parts),
        "violations": sum(len(part.violations) for part in parts),
    }


def show(found: dict[str, Findings]) -> Table:
    """Lays out what was found.

    Args:
        found: by scene.

    Returns:
        A table with a row for each scene.
    """
    table = Table("configuration", *_COLUMNS, title="the same step, untroubled and under faults")
    for name, part in found.items():
        table.add_row(
            name,
            str(part.faults),
            str(part.fallbacks),
            str(part.steps),
            f"{part.bitwise_steps} of {part.compared_steps}",
            f"{part.gradient:.1e}",
            f"{part.weights:.1e}",
            f"{part.seconds_lost:.1f}",
        )
    return table


def main() -> None:
    """Runs the storms and writes the figures down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000, help="allocations refused, at least (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of every choice (default: 0)")
    parser.add_argument("--upsets", type=int, default=3, help="user's errors of each kind and scene (default: 3)")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/fault_storm.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("memsafe_rl").setLevel(logging.ERROR)
    started, console = time.perf_counter(), Console(width=120)
    bars = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(*bars, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress,
    ):
        found = storms(SCENES, arguments.faults, arguments.seed, Path(folder), progress)
        upset_found = upsets(SCENES, arguments.upsets, arguments.seed, Path(folder), progress)
    seconds = time.perf_counter() - started
    summary = {"seconds": seconds, "cpu_seconds": time.process_time(), **totals(found)}
    console.print(show(found))
    console.print(summary)
    console.print(f"user's errors: {upset_found['of_each_kind']} of each kind")
    violations = [f"{name}: {what}" for name, part in found.items() for what in part.violations]
    for what in [*violations, *upset_found["violations"]]:
        console.print(f"[red]{what}[/red]", markup=True)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "machine": describe_machine(),
        "seed": arguments.seed,
        "summary": summary,
        "scenes": {name: {**vars(part), "by_phase": dict(part.by_phase)} for name, part in found.items()},
        "users_errors": upset_found,
    }
    arguments.results.write_text(json.dumps(record, indent=2) + "\n")
    if violations or upset_found["violations"]:
        sys.exit(1)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
