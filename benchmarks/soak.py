"""Does a long run hold more and more memory, write more and more, or get slower and slower?

    python -m benchmarks.soak [--steps 2000] [--save-steps 20]

Trains a tiny model, and looks at it whenever a checkpoint was written: live tensors (how many, and the bytes of their
storage), what Python holds by tracemalloc, resident memory, the bytes of the checkpoint, and the median step time.
`trainer.state.log_history` is a list that grows by transformers' contract; its bytes are counted and taken off. Steps
are slower than usual, for tracemalloc watches every allocation; it watches the first as closely as the last.

Writes `benchmarks/results/soak.json`; exits with 1 if a limit is passed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import tracemalloc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import track
from transformers import TrainerCallback

from benchmarks.machine import describe_machine
from memsafe_rl.checkpoint.store import checkpoint_folder
from memsafe_rl.records import read_lines
from tests.trainers.helpers import make_trainer

SETTLED = 100
"""Steps after which nothing should grow any more."""
LIMITS = {
    "tensors": 0,
    "tensor_bytes": 0,
    "python_bytes": 1_000_000,
    "resident_bytes": 8_000_000,
    "share_of_bytes_saved": 0.01,
    "step_seconds_ratio": 1.15,
}


@dataclass(frozen=True)
class Sample:
    """What a run holds after a save.

    Args:
        step: optimizer steps done.
        tensors: live tensors that the garbage collector knows.
        tensor_bytes: of their storages.
        python_bytes: traced by tracemalloc, without `log_history`.
        log_history_bytes: of `trainer.state.log_history`.
        resident_bytes: of the process.
        saved_bytes: of the checkpoint.
    """

    step: int
    tensors: int
    tensor_bytes: int
    python_bytes: int
    log_history_bytes: int
    resident_bytes: int
    saved_bytes: int


class Watch(TrainerCallback):  # type: ignore[misc]
    """Takes a sample after every save."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._history_bytes, self._records_seen = 0, 0

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Takes a sample."""
        gc.collect()
        new = state.log_history[self._records_seen :]
        self._records_seen = len(state.log_history)
        self._history_bytes += sum(sys.getsizeof(one) + sum(map(sys.getsizeof, one.values())) for one in new)
        storages = live_storages()
        folder = checkpoint_folder(Path(args.output_dir), state.global_step)
        self.samples.append(
            Sample(
                step=state.global_step,
                tensors=len(storages),
                tensor_bytes=sum(dict(storages).values()),
                python_bytes=tracemalloc.get_traced_memory()[0] - self._history_bytes,
                log_history_bytes=self._history_bytes,
                resident_bytes=psutil.Process().memory_info().rss,
                saved_bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
            )
        )


class Bar(TrainerCallback):  # type: ignore[misc]
    """Shows how far the run is."""

    def __init__(self, steps: int) -> None:
        self._steps = iter(track(range(steps), description="steps", console=Console(stderr=True)))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Moves on."""
        next(self._steps, None)


def live_storages() -> list[tuple[int, int]]:
    """Returns place and bytes of the storage of every live tensor."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = [each.untyped_storage() for each in tensors if each.layout == torch.strided]
    return [(storage.data_ptr(), storage.nbytes()) for storage in storages]


def soak(folder: Path, steps: int, save_steps: int, **settings: Any) -> tuple[list[Sample], list[float], Path]:
    """Trains, and looks at what the run holds.

    Args:
        folder: where it writes.
        steps: optimizer steps, two of them to a rollout.
        save_steps: steps between two samples.
        settings: of the trainer, besides.

    Returns:
        Samples, seconds of every step, and the run's folder.
    """
    watch = Watch()
    trainer = make_trainer(
        folder,
        max_steps=steps,
        num_iterations=2,
        logging_steps=10,
        learning_rate=1e-4,
        save_strategy="steps",
        save_steps=save_steps,
        save_total_limit=2,
        **{**settings, "callbacks": [watch, *settings.get("callbacks", ())]},
    )
    tracemalloc.start()
    try:
        trainer.train()
    finally:
        tracemalloc.stop()
    return watch.samples, [record["step_time"] for record in trainer.history], folder


def growth(samples: Sequence[Sample], seconds: Sequence[float], settled: int = SETTLED) -> dict[str, float]:
    """Compares the end of a run with what it was when it had settled.

    Args:
        samples: what it held after each save.
        seconds: of every step.
        settled: steps after which it should not grow.

    Returns:
        By name of the limit: what was added, the largest difference of saved bytes as a share, and the ratio of the
        median times of the last steps and the first ones after it had settled.
    """
    after = [sample for sample in samples if sample.step >= settled]
    first, last = after[0], after[-1]
    saved = [sample.saved_bytes for sample in after]
    return {
        **{
            name: getattr(last, name) - getattr(first, name)
            for name in ("tensors", "tensor_bytes", "python_bytes", "resident_bytes")
        },
        "share_of_bytes_saved": max(saved) / min(saved) - 1,
        "step_seconds_ratio": statistics.median(seconds[-settled:]) / statistics.median(seconds[settled : 2 * settled]),
    }


def main() -> None:
    """Soaks a run and writes the figures down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps (default: 2000)")
    parser.add_argument("--save-steps", type=int, default=20, help="steps between two checkpoints (default: 20)")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/soak.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        samples, seconds, folder = soak(
            Path(place), arguments.steps, arguments.save_steps, callbacks=[Bar(arguments.steps)]
        )
        recorded = [line["step"] for line in read_lines(folder / "steps.jsonl")[0]]
    found = growth(samples, seconds)
    passed = {name: value for name, value in found.items() if value > LIMITS[name]}
    if recorded != list(range(1, arguments.steps + 1)):
        passed["records"] = len(recorded)
    Console().print({"growth": found, "limits": LIMITS, "beyond": passed})
    record = {
        "machine": describe_machine(),
        "load": os.getloadavg(),
        "steps": arguments.steps,
        "limits": LIMITS,
        "growth": found,
        "median_step_seconds": statistics.median(seconds),
        "log_history_bytes": samples[-1].log_history_bytes,
        "samples": [asdict(sample) for sample in samples],
    }
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(record, indent=2) + "\n")
    if passed:
        sys.exit(1)


if __name__ == "__main__":
    main()
