"""Refuses allocations at random on a CUDA device, in every scene of the storms, and compares with calm runs on it.

    python -m benchmarks.device_storm --faults 200

Writes ``benchmarks/results/device_storm.json``. The device is the pretend one of the tests (docs/device.md), which
needs g++ and a CPU build of torch: backward runs in a thread of the device's, as on a card; kernels, times and CUDA's
own failures it does not show. `benchmarks.gpu_suite` does the same on a card.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.device import pretend

if TYPE_CHECKING:  # the device has to be there before torch is
    from tests.device.runs import Refusing, Tally
    from tests.faults.scenes import Scene

RESULTS = Path(__file__).parent / "results" / "device_storm.json"
_RUNS = 4  # under faults, beside each calm run


def storms(
    scenes: Sequence[Scene], device: Refusing, faults: int, seed: int, told: Callable[[str], object] = lambda _: None
) -> dict[str, list[Tally]]:
    """Goes over the scenes, again and again, until enough allocations were refused.

    Args:
        scenes: the configurations.
        device: refuses.
        faults: how many at least.
        seed: of the places that they fall on.
        told: hears the name of each scene before it is run.

    Returns:
        What was found, by the scene's name.
    """
    from tests.device.runs import storm

    tallies: dict[str, list[Tally]] = {scene.name: [] for scene in scenes}
    fallen = round_number = 0
    while fallen < faults:
        for number, scene in enumerate(scenes):
            told(scene.name)
            with tempfile.TemporaryDirectory() as folder:
                tally = storm(scene, device, _RUNS, seed + 1000 * round_number + number, Path(folder))
            tallies[scene.name].append(tally)
            fallen += tally.findings.faults
            if fallen >= faults:
                break
        round_number += 1
    return tallies


def summary(tallies: Iterable[Tally]) -> dict[str, Any]:
    """Adds up what was found.

    Args:
        tallies: of some storms.

    Returns:
        Plain values.
    """
    found = list(tallies)
    by_phase: Counter[str] = sum((tally.findings.by_phase for tally in found), Counter())
    return {
        "runs": sum(tally.runs for tally in found),
        "faults": sum(tally.findings.faults for tally in found),
        "by_phase": dict(by_phase),
        "pinned_bytes": max((tally.pinned_bytes for tally in found), default=0),
        "weights_apart": max((tally.findings.weights for tally in found), default=0.0),
        "violations": [text for tally in found for text in tally.findings.violations],
    }


def main() -> None:
    """Runs the storms, shows what they found, and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200, help="how many at least")
    parser.add_argument("--seed", type=int, default=0, help="of the places they fall on")
    parser.add_argument("--scenes", default="", help="part of the names of the scenes that are run; nothing is written")
    parser.add_argument("--out", type=Path, help=f"where the figures go; {RESULTS} where all scenes are run")
    given = parser.parse_args()
    device = pretend.load().devices[0]  # before anything imports torch

    from benchmarks.machine import describe_machine
    from tests.faults.scenes import SCENES

    logging.disable(logging.WARNING)
    scenes = [scene for scene in SCENES if given.scenes in scene.name]
    began = time.perf_counter()
    tallies = storms(scenes, device, given.faults, given.seed, lambda name: print(name, flush=True))
    total = {**summary(tally for each in tallies.values() for tally in each), "seconds": time.perf_counter() - began}
    record = {name: summary(each) for name, each in tallies.items() if each}
    _print(record, total)
    out = given.out or (None if given.scenes else RESULTS)
    if out is not None:
        found = {"machine": describe_machine(), "seed": given.seed, "summary": total, "scenes": record}
        out.write_text(json.dumps(found, indent=1) + "\n")
    if total["violations"]:
        raise SystemExit(1)


def _print(record: Mapping[str, Mapping[str, Any]], total: Mapping[str, Any]) -> None:
    for name, found in record.items():
        apart = found["weights_apart"]
        print(f"{name:62} {found['runs']:4} runs {found['faults']:4} faults, weights {apart:.1e} apart")
    print(f"{total['runs']} runs, {total['faults']} faults in {total['seconds']:.0f} s: {total['by_phase']}")
    print(f"most bytes held when a retry began: {total['pinned_bytes']}")
    print(f"violations {len(total['violations'])}: {total['violations'][:5]}")


if __name__ == "__main__":
    main()
