"""What the examples reach, and how long they take.

    python -m benchmarks.studies [--only quickstart]

Runs each example that the pages show results of, one after another, each in a process of its own with one thread.
Seconds are the process's, imports and supervision included. SmolLM2 needs its package, as the example says. Writes down
every run when it has ended, beside those of the file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from examples.two_objectives import Gain

RESULTS = Path("benchmarks/results/studies.json")
STUDIES = (
    "quickstart --seed 0",
    "t5_sums --seed 0",
    "two_objectives --seed 0 --merge cagrad",
    "agent_user_grpo --seed 0",
    "motion_grpo --seed 0",
    "motion_grpo --seed 0 --ppo",
    "qwen_ppo --seed 0",
    "quickstart --seed 1",
    "quickstart --seed 2",
    "agent_user_grpo --seed 1",
    "motion_grpo --seed 1",
    "qwen_ppo --seed 0 --critic adapter",
    "two_objectives --seed 0 --merge sum",
    "qwen_ppo --seed 0 --t5",
    "qwen_ppo --seed 1",
    "motion_grpo --seed 1 --ppo",
    "two_objectives --seed 1 --merge cagrad",
    "smollm2_grpo --seed 0",
)


def of_log(folder: Path) -> dict[str, Any]:
    """Returns what the pages tell of a log: what the critic foresaw last, and the first cosines, of ten steps each."""
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    foreseen = [record["explained_variance"] for record in log if "explained_variance" in record]
    cosines = [record[name] for record in log for name in record if name.startswith("objectives/cosine/")]
    found: dict[str, Any] = {"explained_variance": foreseen[-1]} if foreseen else {}
    return {**found, "cosines_of_tens": cosines[:2]} if cosines else found


def study(command: str) -> dict[str, Any]:
    """Runs an example and gives what it found, its seconds and the most bytes of its process."""
    name, *words = command.split()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = importlib.import_module(f"examples.{name}").main([*words, "--output-dir", folder])
        rows = found.items() if isinstance(found, Mapping) else [("sampled", found)]
        plain = {key: asdict(one) if isinstance(one, Gain) else one for key, one in rows} | of_log(Path(folder))
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_seconds = used.ru_utime + used.ru_stime
    times = {"seconds": time.perf_counter() - started, "cpu_seconds": cpu_seconds}
    return {**plain, **times, "process_bytes": used.ru_maxrss * 1024}


def main() -> None:
    """Runs the examples, shows a table and writes the figures down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="those whose command contains this")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    runs = json.loads(given.results.read_text())["runs"] if given.results.exists() else {}
    table = Table("example", "found")
    for command in (command for command in STUDIES if given.only in command):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            runs[command] = process.submit(study, command).result()
        found = {"machine": describe_machine(), "runs": {name: runs[name] for name in STUDIES if name in runs}}
        given.results.write_text(json.dumps(found, indent=1) + "\n")
        table.add_row(command, str(runs[command]))
    Console().print(table)


if __name__ == "__main__":
    main()
