"""Refuses allocations at random on a pretend CUDA device, in every scene of the storms, against calm runs on it.

    python -m benchmarks.device_storm --faults 200

Needs g++ and a CPU build of torch. It shows what recovery leaves behind where backward runs in a thread of the
device's; kernels, times and CUDA's own failures it does not show.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from pathlib import Path

from tests.device import pretend


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=200, help="how many at least")
    parser.add_argument("--seed", type=int, default=0, help="of the places they fall on")
    parser.add_argument("--scenes", default="", help="part of the names of the scenes that are run")
    arguments = parser.parse_args()
    device = pretend.load().devices[0]  # before anything imports torch

    from tests.device.runs import Tally, storm
    from tests.faults.scenes import SCENES

    logging.disable(logging.WARNING)
    scenes = [scene for scene in SCENES if arguments.scenes in scene.name]
    tallies: dict[str, list[Tally]] = {scene.name: [] for scene in scenes}
    began, round_number, faults = time.perf_counter(), 0, 0
    while faults < arguments.faults:
        for number, scene in enumerate(scenes):
            with tempfile.TemporaryDirectory() as folder:
                seed = arguments.seed + 1000 * round_number + number
                tally = storm(scene, device, runs=4, seed=seed, output_dir=Path(folder))
            tallies[scene.name].append(tally)
            faults += tally.findings.faults
            if faults >= arguments.faults:
                break
        round_number += 1
    _print(tallies, time.perf_counter() - began)


def _print(tallies: dict[str, list], seconds: float) -> None:  # type: ignore[type-arg]
    total = [tally for each in tallies.values() for tally in each]
    for name, each in tallies.items():
        if each:
            faults = sum(tally.findings.faults for tally in each)
            weights = max(tally.findings.weights for tally in each)
            print(
                f"{name:62} {sum(tally.runs for tally in each):4} runs {faults:4} faults, weights {weights:.1e} apart"
            )
    violations = [text for tally in total for text in tally.findings.violations]
    faults, runs = sum(tally.findings.faults for tally in total), sum(tally.runs for tally in total)
    by_phase: dict[str, int] = {}
    for tally in total:
        for phase, times in tally.findings.by_phase.items():
            by_phase[phase] = by_phase.get(phase, 0) + times
    print(f"{runs} runs, {faults} faults in {seconds:.0f} s: {by_phase}")
    print(f"most bytes held when a retry began: {max(tally.pinned_bytes for tally in total)}")
    print(f"violations {len(violations)}: {violations[:5]}")
    if violations:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
