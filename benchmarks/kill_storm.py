"""Is anything lost when a run is killed, at any moment and as often as one likes?

    python -m benchmarks.kill_storm [--kills 100] [--terms 20] [--seed 0] [--only SCENE]

A tiny model trains with a checkpoint after every step. SIGKILL ends its process and a new one resumes with "auto",
until all blows have fallen; then the run may go to its end. Two thirds fall at a random moment: while the process
starts or in the middle of a step. One third is aimed: at the n-th rename, fsync, write, deletion or `torch.save`,
before it, after it, or halfway through it. One configuration deletes old checkpoints, one writes them in the
background, and in two of them two ranks train, of which one is hit, with whole or with shared weights. SIGTERM ends
further processes, which have to leave with code 75 and their step saved.

At the end of each run weights and optimizer state have to be those of an unbroken run, bit for bit. Every step must
stand in `steps.jsonl` and `metrics.jsonl` exactly once (besides lines marked as done again), every checkpoint must be
sound, nothing half written may lie about, and the folder must be free.

Processes are forked from one that has imported everything. Writes `benchmarks/results/kill_storm.json`; exits with 1
if anything was not as it must be.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.machine import describe_machine
from tests.faults.kills import SCENES, Found, draw_blows, storm_over


def main() -> None:
    """Sends the storm over all scenes and writes the figures down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="processes ended by SIGKILL (default: 100)")
    parser.add_argument("--terms", type=int, default=20, help="processes ended by SIGTERM (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of every choice (default: 0)")
    parser.add_argument("--only", choices=[scene.name for scene in SCENES], help="one configuration")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/kill_storm.json"))
    arguments = parser.parse_args()
    scenes = [scene for scene in SCENES if arguments.only in (None, scene.name)]
    whole = sum(scene.share for scene in scenes)
    started, draw, console = time.perf_counter(), random.Random(arguments.seed), Console(width=120)
    bars = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    found: dict[str, Found] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(*bars, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress,
    ):
        task, done = progress.add_task("blows", total=arguments.kills + arguments.terms), 0.0
        for scene in scenes:
            progress.update(task, description=scene.name)
            shares = [
                round(count * (done + scene.share) / whole) - round(count * done / whole)
                for count in (arguments.kills, arguments.terms)
            ]
            done += scene.share
            place = Path(folder) / scene.name
            place.mkdir()
            blows = draw_blows(draw, scene, *shares)
            found[scene.name] = storm_over(scene, blows, place, fallen=lambda: progress.advance(task))
    blows = sum((part.blows for part in found.values()), Counter[str]())
    summary = {
        "seconds": time.perf_counter() - started,
        "kills": blows.total() - blows["SIGTERM"],
        "terms": blows["SIGTERM"],
        "aimed": sum(count for name, count in blows.items() if "." in name),
        **{name: sum(getattr(part, name) for part in found.values()) for name in ("runs", "starts", "steps_redone")},
        "damaged_checkpoints_passed_over": sum(part.passed_over for part in found.values()),
        "violations": sum(len(part.violations) for part in found.values()),
    }
    console.print(summary)
    for name, part in found.items():
        for what in part.violations:
            console.print(f"{name}: {what}", style="red", markup=False)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "machine": describe_machine(),
        "seed": arguments.seed,
        "summary": summary,
        "scenes": {name: {**dataclasses.asdict(part), "blows": dict(part.blows)} for name, part in found.items()},
    }
    arguments.results.write_text(json.dumps(record, indent=2) + "\n")
    if summary["violations"]:
        sys.exit(1)


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    main()
