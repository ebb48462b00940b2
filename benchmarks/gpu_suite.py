"""Checks and times everything on this machine's CUDA device, in under eight minutes.

    python -m benchmarks.gpu_suite [--parts prove budget] [--rehearse]

Each part is a process of its own, so that one that fails or hangs takes no other with it and keeps what it has found.
Checks run beside one another where there are cores for it; what is timed has the machine to itself:

- prove: the gradient of one step under a lean plan, under the plain plan, and with refused allocations in it, for
  causal models and T5, GRPO and PPO, full and LoRA, in float32 and bfloat16;
- storm: allocations that the device's own allocator refuses at random places of whole runs: nothing pinned, no other
  token, the same weights;
- budget: whole runs under ever smaller budgets of reserved bytes, GRPO, LoRA, PPO and T5: the same tokens and weights,
  never above the budget, and no failure where 40 % above the state is left;
- forecast: bytes, held and reserved, and seconds forecast before the run beside the allocator's, the driver's and the
  clock's figures, for networks of real size with random weights;
- random: peaks of runs drawn at random beside their forecasts;
- invariance: the same rows in waves and cuts of other sizes, in bf16: no token and no log-prob differs;
- launches: operators, uploads and read-backs a decoded token, beside `generate`;
- rollout: tokens per second beside transformers' `generate`;
- step: seconds and peak of a rollout and its optimizer step beside TRL, where TRL is installed.

Writes ``benchmarks/results/gpu_suite.json`` with the device's name and versions after every part. `--rehearse` runs the
same code on the pretend CUDA device (docs/device.md) with tiny networks, and writes nothing unless `--out` is given.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.machine import describe_machine
from tests.device import build

Record = dict[str, Any]

Rows = Iterator[tuple[str, Record]]

RESULTS = Path(__file__).parent / "results" / "gpu_suite.json"


class Part(NamedTuple):
    """A part, and how long it may take.

    Args:
        module: of `benchmarks.gpu_parts`.
        function: in it, which takes a `Size` and yields names of rows with their values.
        seconds: after which it is given up on a card.
        timed: whether it is timed.
    """

    module: str
    function: str
    seconds: int
    timed: bool = False

    def run(self, *, rehearse: bool) -> None:
        """Runs it in this process, when a line on standard input says so, and prints each row as it is known."""
        sizes = import_module("benchmarks.gpu_parts.sizes")
        function: Callable[[Any], Rows] = getattr(import_module(f"benchmarks.gpu_parts.{self.module}"), self.function)
        sys.stdin.readline()
        began = time.perf_counter()
        for row, values in function(sizes.REHEARSAL if rehearse else sizes.CARD):
            print(json.dumps({row: values}), flush=True)
        print(json.dumps({"whole part": {"seconds": time.perf_counter() - began}}), flush=True)


PARTS = {
    "prove": Part("exactness", "prove", 150),
    "storm": Part("exactness", "storm", 150),
    "budget": Part("budgets", "budget", 150),
    "random": Part("forecasts", "random_runs", 150),
    "invariance": Part("exactness", "invariance", 150),
    "rollout": Part("speed", "rollout", 60, timed=True),
    "forecast": Part("forecasts", "forecast", 180, timed=True),
    "step": Part("speed", "step", 100, timed=True),
    "launches": Part("speed", "launches", 60, timed=True),
}
DEADLINE_SECONDS = 470
"""Of all parts on a card; one that would begin later is not run."""
REHEARSAL_PATIENCE = 8
"""How much longer a rehearsal may take: its kernels run on a CPU, which may be busy."""
_CORES_EACH = 3
"""Cores for each of the processes that run beside one another; as many more are made ready meanwhile."""
_ROW = '{"'
"""How a line with a row begins; libraries print others."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts, shows what they found, and writes it.

    Args:
        arguments: of the command line; None for those of this process.

    Returns:
        0 where every check passed, else 1.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rehearse", action="store_true", help="tiny networks on the pretend CUDA device")
    parser.add_argument("--out", type=Path, help=f"where the figures go; {RESULTS} where a card is measured")
    parser.add_argument("--alone", choices=list(PARTS), help=argparse.SUPPRESS)  # a part in a process of its own
    given = parser.parse_args(arguments)
    if given.alone:
        PARTS[given.alone].run(rehearse=given.rehearse)
        return 0
    if given.rehearse:
        if reason := build.missing():
            parser.error(f"--rehearse: {reason}")
        build.built()  # before a part's seconds count
    elif not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --rehearse runs the same code on a pretend one")
    results = _run(given.parts, given.rehearse, given.out or (None if given.rehearse else RESULTS))
    console = Console(width=160)
    for name, found in results.items():
        console.print(_table(name, found))
        for values in found.values():
            console.print(values.get("told", ""), markup=False, end="")
    passed = all(row.get("passed", True) for found in results.values() for row in found.values())
    console.print("every check passed" if passed else "SOMETHING FAILED: see the rows above")
    return 0 if passed else 1


def _run(parts: Sequence[str], rehearse: bool, out: Path | None) -> dict[str, Record]:
    """Runs checks beside one another and what is timed alone, and writes what is known after each."""
    results: dict[str, Record] = {}
    patience = REHEARSAL_PATIENCE if rehearse else 1
    ends = time.perf_counter() + DEADLINE_SECONDS * patience
    checks, timed = ([name for name in parts if PARTS[name].timed is of] for of in (False, True))
    width = max(1, (os.cpu_count() or 1) // _CORES_EACH)
    groups = [checks[start : start + width] for start in range(0, len(checks), width)] + [[name] for name in timed]
    ahead = iter([name for group in groups for name in group])
    children: dict[str, _Child] = {}
    with (
        Progress(console=Console(stderr=True)) as progress,
        tempfile.TemporaryDirectory() as folder,
        ExitStack() as stack,
    ):
        bar = progress.add_task("", total=len(parts))
        for group in groups:
            progress.update(bar, description=", ".join(group))
            for name in itertools.islice(ahead, max(0, 2 * width - len(children))):
                children[name] = stack.enter_context(_Child(name, rehearse, Path(folder)))
            left = ends - time.perf_counter()
            for name in group if left > 0 else ():
                children[name].begin()
            for name in group:
                patient = min(PARTS[name].seconds * patience, ends - time.perf_counter())
                child = children.pop(name)
                results[name] = child.result(max(0, patient)) if left > 0 else _failed("no time was left for it\n")
                progress.advance(bar)
                if out is not None:
                    out.write_text(json.dumps({"machine": describe_machine(), "results": results}, indent=1) + "\n")
    return results


class _Child:
    """A part in a process of its own, which imports what it needs and waits until it is told to begin."""

    def __init__(self, name: str, rehearse: bool, folder: Path) -> None:
        self._files = [folder / f"{name}.{stream}" for stream in ("out", "err")]
        command = [sys.executable, "-m", *(["tests.device"] if rehearse else []), "benchmarks.gpu_suite"]
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # with several, TRL wants a launcher
        with self._files[0].open("w") as out, self._files[1].open("w") as err:
            self._process = subprocess.Popen(
                [*command, "--alone", name, *(["--rehearse"] if rehearse else [])],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                text=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": first, "PRETEND_DEVICES": "1"},
            )

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None, "it was asked for"
        self._process.stdin.close()

    def begin(self) -> None:
        """Has the part begin."""
        assert self._process.stdin is not None, "it was asked for"
        with suppress(BrokenPipeError):  # it is dead already, and `result` says why
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def result(self, seconds: float) -> Record:
        """Waits for its end; returns all rows that it has found, and how it failed where it did."""
        given_up = ""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            given_up = f"given up after {seconds:.0f} s: "
        told, wrong = (file.read_text() for file in self._files)
        lines = [line for line in told.splitlines(keepends=True) if line.startswith(_ROW) and line.endswith("\n")]
        found: Record = {row: values for line in lines for row, values in json.loads(line).items()}
        if not self._process.returncode:
            return found
        print(wrong[-4000:], file=sys.stderr)  # a traceback names this machine's folders; what is kept does not
        return {**found, **_failed(f"{given_up}{(wrong.strip().splitlines() or [''])[-1]}\n")}


def _failed(why: str) -> Record:
    return {"error": {"passed": False, "told": why}}


def _table(name: str, found: Record) -> Table:
    columns = list(dict.fromkeys(column for row in found.values() for column in row if column != "told"))
    table = Table(name, *(column.replace("_", " ") for column in columns))
    for row, values in found.items():
        table.add_row(row, *(_shown(column, values.get(column)) for column in columns))
    return table


def _shown(column: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if column.endswith("_bytes") and abs(value) > 1000:
        return f"{value / 2**20:,.1f} MiB"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
