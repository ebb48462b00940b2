"""Do ranks that share weights by FSDP2, and run out of memory again and again, learn what one process learns?

    python -m benchmarks.sharded_storm [--faults 300] [--seed 0] [--only CASE]

Two processes over gloo train a tiny Qwen3, full, with LoRA or with gradients added up once a step, and a tiny T5 in
float64, three steps at a time, always from the same weights. In every run allocations of one rank or of both fail, with
a genuine `torch.OutOfMemoryError` from inside the kernel: in rollout, scoring, forward, head, backward, gathering or
commit, two thirds of them in the update, where ranks communicate inside of what fails. The other rank may be in any
collective then. Compared with one process are the tokens, the gradient of every step and the weights; and nothing may
be held afterwards. A rank that ends no phase, and meets no failure, for two minutes hangs: then both say where they
stand.

Writes `benchmarks/results/sharded_storm.json`; exits with 1 if anything was not as it must be, or a rank hung.
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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.machine import describe_machine
from memsafe_rl.types import Phase
from tests.parallel.test_ranks import Pulse, run_ranks, set_up_rank
from tests.parallel.test_ranks_under_faults import WORKING, build, listen_to_steps, storm
from tests.trainers.helpers import relative, weights

CASES = {
    "sharded": "full",
    "sharded lora": "lora",
    "sharded t5": "t5",
    "sharded, once a step": "full",
    "sharded, saving": "full",
}
"""What is stormed, and what one process runs beside it."""
PHASES = (*WORKING, *(Phase.UPDATE,) * (2 * len(WORKING)))
"""What fails; while a checkpoint is due after every step, its writing."""
PATIENCE_SECONDS = 120
"""After which a rank that did not get on hangs, however slow the machine; a phase takes a second or two."""
MOST_GRADIENT, MOST_WEIGHTS = 1e-6, 1e-4
"""Differences allowed: relative, and of the distance travelled (Adam makes of rounding what it makes of a gradient)."""


def _rank(case: str, faults: int, seed: int, rank: int, port: int, folder: str) -> None:
    logging.getLogger("memsafe_rl").setLevel(logging.ERROR)
    set_up_rank(rank, port)
    started, pulse = time.perf_counter(), Pulse(Path(folder), rank)
    phases = (Phase.CHECKPOINT,) if "saving" in case else PHASES
    found = storm(Path(folder) / "run", case, rank, seed, pulse, faults=faults, phases=phases, failing=(0, 1))
    seconds = {
        "seconds": time.perf_counter() - started,
        "longest_seconds_without_progress": pulse.longest_seconds,
    }
    torch.save({**found, **seconds}, Path(folder) / f"{rank}.pt")


def compared(case: str, ranks: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Compares what the ranks did with one process.

    Args:
        case: of `CASES`.
        ranks: what each rank found.
        folder: where the one process writes.

    Returns:
        Counts, the largest differences, and what may not be.
    """
    alone = build(folder, CASES[case], ranks=1)
    start, notes = weights(alone), listen_to_steps(alone)
    alone.train()
    travelled = (weights(alone) - start).norm()
    outcomes = [found["outcome"] for found in ranks]
    faulty = [f"{case}: rank {rank} ended with {told}" for rank, told in enumerate(outcomes) if told != "no error"]
    by_phase: Counter[str] = Counter()
    gradient, weight, fallbacks, faults = 0.0, 0.0, 0, 0
    for number, pair in enumerate(zip(*(found["runs"] for found in ranks), strict=True)):
        faults += pair[0]["faults"]
        for run in pair:
            by_phase.update(run["phases"])
            fallbacks += run["fallbacks"]
            weight = max(weight, float((run["weights"] - weights(alone)).norm() / travelled))
            for seen, expected in zip(run["notes"], notes, strict=True):
                gradient = max(gradient, relative(seen["gradient"].double(), expected["gradient"].double()))
                if not torch.equal(seen["tokens"], expected["tokens"]):
                    faulty.append(f"{case}: run {number} drew other tokens")
            if run["gained_bytes"]:
                faulty.append(f"{case}: run {number} left {run['gained_bytes']} bytes")
    if gradient > MOST_GRADIENT or weight > MOST_WEIGHTS:
        faulty.append(f"{case}: gradients differ by up to {gradient:.1e}, weights by up to {weight:.1e} of the way")
    return {
        "runs": len(ranks[0]["runs"]),
        "faults": faults,
        "by_phase": dict(by_phase),
        "leaner_plans": fallbacks,
        "largest_gradient_difference": gradient,
        "largest_weight_difference": weight,
        **{name: max(found[name] for found in ranks) for name in ("seconds", "longest_seconds_without_progress")},
        "violations": faulty,
    }


def main() -> None:
    """Runs the storms and writes the figures down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300, help="allocations refused, at least (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="of every choice (default: 0)")
    parser.add_argument("--only", choices=CASES, help="one case, with its share of the faults, beside what is written")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/sharded_storm.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("memsafe_rl").setLevel(logging.ERROR)
    console, found = Console(width=120), {}
    if arguments.only and arguments.results.exists():
        found = json.loads(arguments.results.read_text())["cases"]
    for number, case in enumerate(CASES):
        if arguments.only not in (None, case):
            continue
        with tempfile.TemporaryDirectory() as folder, console.status(f"{case}: two ranks train under faults"):
            work = partial(_rank, case, arguments.faults // len(CASES), arguments.seed + number)
            found[case] = compared(case, run_ranks(work, Path(folder), PATIENCE_SECONDS), Path(folder) / "alone")
        console.print({case: found[case]})
        record = {"machine": describe_machine(), "seed": arguments.seed, "cases": found}
        arguments.results.write_text(json.dumps(record, indent=2) + "\n")
    if any(one["violations"] for one in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
