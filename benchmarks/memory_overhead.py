"""What do budget, policy, tracker, events and recovery cost while nothing fails?

    python -m benchmarks.memory_overhead [--pairs 40]

Writes ``benchmarks/results/memory_overhead.json``. One trainer repeats one rollout and the two optimizer steps that
learn from it, from the same weights, in turns as it is and bare: units called directly, phases, plans, events and the
ends of steps neither measured nor noted, no random state kept, and the policy's answers replayed from the run before.
What is compared is the processor time of neighbouring turns, so that a machine that is busy with other work slows both
alike; the figure is the median of their ratios, with the interval that holds it in 95 of 100 resamplings. Peaks are
counted by an allocator that sees every byte in every thread. Leaks are looked for where bytes are counted (a card, a
simulated device), not on a plain CPU, and so are no part of the time.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.small import byte_tokenizer, small_qwen3
from memsafe_rl import AdaptivePolicy, GRPOConfig, GRPOTrainer, MemoryPolicy
from memsafe_rl.memory.runtime.recovery import Attempts
from memsafe_rl.memory.runtime.tracker import MemoryTracker
from memsafe_rl.memory.simulated.counting import CountingAllocator
from memsafe_rl.training import loop as base
from memsafe_rl.types import MemoryState, RolloutPlan, RolloutWork, UpdatePlan, UpdateWork

RESULTS = Path(__file__).parent / "results" / "memory_overhead.json"
STEPS = 2
"""Optimizer steps of a turn: one rollout, two passes over it."""


class Tape(MemoryPolicy):
    """Asks a policy and keeps its answers, or gives the kept ones again.

    Args:
        policy: makes the plans.
    """

    def __init__(self, policy: MemoryPolicy) -> None:
        self.policy = policy
        self.replays = False
        self._answers: list[RolloutPlan | UpdatePlan] = []
        self._next = 0

    def rewind(self, *, replays: bool) -> None:
        """Begins a run that asks anew, or one that repeats the answers of the last."""
        self.replays, self._next = replays, 0
        if not replays:
            self._answers.clear()

    def before_rollout(self, work: RolloutWork, memory: MemoryState) -> RolloutPlan:
        """Answers with a rollout plan."""
        return self._answer(lambda: self.policy.before_rollout(work, memory))  # type: ignore[return-value]

    def before_update(self, work: UpdateWork, memory: MemoryState) -> UpdatePlan:
        """Answers with an update plan."""
        return self._answer(lambda: self.policy.before_update(work, memory))  # type: ignore[return-value]

    def _answer(self, ask: Callable[[], RolloutPlan | UpdatePlan]) -> RolloutPlan | UpdatePlan:
        if not self.replays:
            self._answers.append(ask())
        self._next += 1
        return self._answers[self._next - 1]


@contextmanager
def bare() -> Iterator[None]:
    """Takes away everything that watches memory or could repeat a unit."""

    with (
        patch.object(Attempts, "__call__", _run_once),
        patch.object(MemoryTracker, "phase", _answering(nullcontext())),
        patch.object(MemoryTracker, "adopt", _only_remember),
        patch.object(MemoryTracker, "record", _answering(None)),
        patch.object(MemoryTracker, "end_step", _answering(None)),
        patch.object(MemoryTracker, "drain", _answering({})),
        patch.object(MemoryTracker, "state", _answering(None)),
        patch.object(base, "capture_random_state", _answering(None)),
    ):
        yield


def _run_once(attempts: Attempts[Any], unit: Callable[[Any], Any], undo: Any = None) -> Any:  # noqa: ARG001
    with attempts.around(attempts.plan):
        return unit(attempts.plan)


def _only_remember(tracker: MemoryTracker, plan: RolloutPlan | UpdatePlan, *_: Any) -> None:
    tracker._plans[type(plan)] = plan


def _answering(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


class Bench:
    """A trainer that takes turns.

    Args:
        folder: where it writes.
        lora: train an adapter instead of all weights.
        new_tokens: longest completion, in tokens.
    """

    def __init__(self, folder: str, *, lora: bool, new_tokens: int = 48) -> None:
        self.tape = Tape(AdaptivePolicy())
        self.trainer = GRPOTrainer(
            small_qwen3(4096, hidden=128, layers=4),
            digits,
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=16,
                num_generations=8,
                num_iterations=STEPS,
                max_completion_length=new_tokens,
                learning_rate=1e-3,
                beta=0.02,
                max_steps=STEPS,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                disable_tqdm=True,
                alarms=False,
            ),
            train_dataset=Dataset.from_dict(
                {"prompt": [f"{a} and {b}" + "?" * (a + b) for a in range(4) for b in range(4)]}
            ),
            processing_class=byte_tokenizer(),
            peft_config=LoraConfig(r=8, target_modules="all-linear") if lora else None,
            memory_policy=self.tape,
        )
        self._start = [parameter.detach().clone() for parameter in self.trainer.model.parameters()]
        self._seconds: list[float] = []
        step = self.trainer.loop.step

        def timed() -> None:
            began = time.process_time()
            step()
            self._seconds.append(time.process_time() - began)

        self.trainer.loop.step = timed  # type: ignore[method-assign]

    def turn(self, *, bare_of_memory: bool) -> float:
        """Trains once from the same weights.

        Args:
            bare_of_memory: without what watches memory.

        Returns:
            Processor seconds of its steps.
        """
        with torch.no_grad():
            for parameter, value in zip(self.trainer.model.parameters(), self._start, strict=True):
                parameter.copy_(value)
        self.trainer.memory_events.clear()
        self.tape.rewind(replays=bare_of_memory)
        self._seconds.clear()
        gc.collect()
        with bare() if bare_of_memory else nullcontext():
            self.trainer.train()
        return sum(self._seconds)

    def peak_bytes(self, *, bare_of_memory: bool) -> int:
        """Counts the most bytes that a turn holds above what the trainer held before it.

        Args:
            bare_of_memory: without what watches memory.

        Returns:
            int, bytes.
        """
        with CountingAllocator() as counter:
            self.turn(bare_of_memory=bare_of_memory)
            return counter.peak_bytes


def digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(str.isdigit, text)) / 4 + len(set(text)) / 50 for text in completions]


def interval(ratios: Sequence[float], resamplings: int = 2000) -> tuple[float, float]:
    """Returns the 95 % interval of a median by resampling.

    Args:
        ratios: what was measured.
        resamplings: how often to draw as many again.

    Returns:
        The 2.5th and 97.5th percentile of the medians.
    """
    dice = random.Random(0)
    medians = sorted(statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(resamplings))
    return medians[resamplings // 40], medians[-1 - resamplings // 40]


def measure(name: str, pairs: int) -> dict[str, Any]:
    """Takes turns.

    Args:
        name: "full" or "lora".
        pairs: turns of each kind.

    Returns:
        Figures by name, ready for JSON.
    """
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder, lora=name == "lora")
        for bare_of_memory in (False, True):
            bench.turn(bare_of_memory=bare_of_memory)
        peaks = {kind: bench.peak_bytes(bare_of_memory=kind == "bare") for kind in ("whole", "bare")}
        seconds: dict[str, list[float]] = {"whole": [], "bare": []}
        for pair in track(range(pairs), description=name, console=Console(stderr=True)):
            for kind in ("whole", "bare") if pair % 2 == 0 else ("bare", "whole"):
                seconds[kind].append(bench.turn(bare_of_memory=kind == "bare"))
        ratios = [whole / plain for whole, plain in zip(seconds["whole"], seconds["bare"], strict=True)]
        low, high = interval(ratios)
        return {
            "overhead": statistics.median(ratios) - 1,
            "overhead_95": [low - 1, high - 1],
            "step_cpu_seconds": {kind: statistics.median(values) / STEPS for kind, values in seconds.items()},
            "peak_bytes": peaks,
            "more_peak_bytes": peaks["whole"] - peaks["bare"],
            "pairs": pairs,
        }


def show(results: dict[str, dict[str, Any]]) -> None:
    table = Table(title="Watching memory while nothing fails")
    for column in ("trained", "CPU ms a step, bare", "whole", "overhead", "95 %", "peak bytes, bare", "whole"):
        table.add_column(column, justify="right")
    for name, result in results.items():
        table.add_row(
            name,
            *(f"{1000 * result['step_cpu_seconds'][kind]:.1f}" for kind in ("bare", "whole")),
            f"{result['overhead']:+.2%}",
            " to ".join(f"{bound:+.2%}" for bound in result["overhead_95"]),
            *(f"{result['peak_bytes'][kind]:,}" for kind in ("bare", "whole")),
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="turns of each kind")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {name: measure(name, arguments.pairs) for name in ("full", "lora")}
    show(results)
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps({"machine": describe_machine(), **results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
