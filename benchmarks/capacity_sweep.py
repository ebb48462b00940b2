"""Trains on simulated devices of ever fewer bytes: the same tokens and weights, down to the leanest plan's floor.

    python -m benchmarks.capacity_sweep

The natural run has all the memory it wants and takes it: every row at once, one micro-batch, nothing recomputed. Each
other run gets weights + gradients + optimizer state plus a share of what the natural run held above them, and
`AdaptivePolicy` to make do with it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.small import byte_tokenizer, small_qwen3
from memsafe_rl import (
    AdaptivePolicy,
    FixedPolicy,
    GRPOConfig,
    GRPOTrainer,
    MemoryBudgetError,
    MemoryPolicy,
    RolloutPlan,
    SimulatedMemory,
    UpdatePlan,
)
from memsafe_rl.accounting import host_memory
from memsafe_rl.units import format_bytes

SHARES = (1.0, 0.8, 0.6, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02)
PROMPTS = [f"{a} and {b}" + "?" * (a + b) for a in range(4) for b in range(4)]
BELOW_THE_FLOOR = 0.85
"""Of the leanest plan's peak: nothing can fit."""
NATURAL = FixedPolicy(
    RolloutPlan(rows_in_flight=10**6, prefill_tokens=10**9, score_tokens=10**9),
    UpdatePlan(micro_batch_tokens=10**9, logprob_tile=10**6, trajectory_device="device"),
)
LEANEST = FixedPolicy(
    RolloutPlan(rows_in_flight=1, prefill_tokens=1, score_tokens=1),
    UpdatePlan(micro_batch_tokens=1, logprob_tile=1, checkpointing=True, offload_activations=True, park_optimizer=True),
)


@dataclass
class Outcome:
    """What one run on one device did.

    Args:
        capacity_bytes: int, bytes of the device; None if unlimited.
        finished: whether all steps were done.
        peak_bytes: int, most bytes held, by the allocator's count.
        failures: failed allocations.
        fallbacks: plans given up for a leaner one.
        seconds: wall time.
        error: what was said where it did not fit.
    """

    capacity_bytes: int | None
    finished: bool = True
    peak_bytes: int = 0
    failures: int = 0
    fallbacks: int = 0
    seconds: float = 0.0
    error: str = ""
    error_step: int = -1
    state_bytes: int = 0
    weights: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    start: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    tokens: list[list[int]] = field(default_factory=list)
    ties: float = 0.0


def train(policy: MemoryPolicy, capacity_bytes: int | None, *, lora: bool, steps: int) -> Outcome:
    """Trains a small model on a simulated device.

    Args:
        policy: cuts the work.
        capacity_bytes: int, bytes of the device; None for no limit.
        lora: train an adapter instead of all weights.
        steps: optimizer steps.

    Returns:
        What happened.
    """
    outcome = Outcome(capacity_bytes)

    def digits(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        outcome.tokens += completion_ids
        return [sum(map(str.isdigit, text)) / 4 + len(set(text)) / 50 for text in completions]

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, SimulatedMemory(capacity_bytes) as memory:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=16,
            num_generations=8,
            num_iterations=2,
            max_completion_length=48,
            learning_rate=1e-3,
            beta=0.02,
            max_steps=steps,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            memory_budget="auto" if capacity_bytes is None else capacity_bytes,
        )
        trainer = None
        try:
            trainer = GRPOTrainer(
                small_qwen3(4096, hidden=128, layers=4),
                digits,
                args=config,
                train_dataset=Dataset.from_dict(
                    {"prompt": [f"{a} and {b}" + "?" * (a + b) for a in range(4) for b in range(4)]}
                ),
                processing_class=byte_tokenizer(),
                peft_config=LoraConfig(r=8, target_modules="all-linear") if lora else None,
                memory_policy=policy,
            )
            outcome.start = weights_of(trainer)
            trainer.train()
        except MemoryBudgetError as error:
            outcome.finished, outcome.error = False, str(error)
            outcome.error_step = error.failure.step
        outcome.seconds = time.perf_counter() - started
        outcome.peak_bytes = max(sum(split.values()) for split in memory.phase_peaks().values())
        if trainer is not None:
            outcome.weights = weights_of(trainer)
            outcome.state_bytes = state_bytes(trainer, memory.live_by_component())
            kinds = [event["event"] for event in trainer.memory_events]
            outcome.failures, outcome.fallbacks = kinds.count("failure"), kinds.count("fallback")
            outcome.ties = sum(record.get("sampling/tied_fraction", 0.0) for record in trainer.history)
    return outcome


def weights_of(trainer: GRPOTrainer) -> torch.Tensor:
    """Copies the trained weights.

    Args:
        trainer: the trainer.

    Returns:
        (N,) float64.
    """
    with host_memory():  # the copy is the benchmark's, not the run's
        return torch.cat([p.detach().flatten().double() for p in trainer.model.parameters() if p.requires_grad])


def state_bytes(trainer: GRPOTrainer, held: Mapping[str, int]) -> int:
    """Counts weights (a reference's too), gradients and optimizer state.

    Args:
        trainer: a trainer that has trained.
        held: bytes on the device now, by component.

    Returns:
        int, bytes.
    """
    gradients = sum(weight.nbytes for weight in trainer.model.parameters() if weight.requires_grad)
    return held["weights"] + held["optimizer"] + gradients


def sweep(*, lora: bool, steps: int) -> dict[str, Any]:
    """Runs the natural run, the leanest one, and one for every share.

    Args:
        lora: train an adapter instead of all weights.
        steps: optimizer steps of each run.

    Returns:
        Figures by name, ready for JSON.
    """
    natural = train(NATURAL, None, lora=lora, steps=steps)
    leanest = train(LEANEST, None, lora=lora, steps=steps)
    above = natural.peak_bytes - natural.state_bytes
    travelled = (natural.weights - natural.start).norm()
    rows = []
    capacities = {f"{share:.0%}": natural.state_bytes + int(share * above) for share in SHARES}
    capacities["below the floor"] = int(BELOW_THE_FLOOR * leanest.peak_bytes)
    for share, capacity in track(
        capacities.items(), description="LoRA" if lora else "all weights", console=Console(stderr=True)
    ):
        outcome = train(AdaptivePolicy(), capacity, lora=lora, steps=steps)
        same = outcome.finished and outcome.tokens == natural.tokens
        moved = float((outcome.weights - natural.weights).norm() / travelled) if outcome.finished else None
        kept = {k: v for k, v in vars(outcome).items() if k not in ("weights", "start", "tokens", "state_bytes")}
        rows.append({"share": share, **kept, "tokens_equal": same, "weights_off": moved})
    return {
        "natural_peak_bytes": natural.peak_bytes,
        "natural_seconds": natural.seconds,
        "state_bytes": natural.state_bytes,
        "leanest_peak_bytes": leanest.peak_bytes,
        "rows": rows,
    }


def show(title: str, result: dict[str, Any], console: Console) -> None:
    """Prints a sweep as a table.

    Args:
        title: what was trained.
        result: from `sweep`.
        console: where.
    """
    state, natural, leanest = (format_bytes(result[f"{n}_bytes"]) for n in ("state", "natural_peak", "leanest_peak"))
    table = Table(title=f"{title}: natural peak {natural}, state {state}, leanest plan's peak {leanest}")
    for name in ("share", "capacity", "peak", "finished", "tokens", "weights off", "failed", "fallbacks", "seconds"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        off = "-" if row["weights_off"] is None else f"{row['weights_off']:.1e}"
        table.add_row(
            row["share"],
            format_bytes(row["capacity_bytes"]),
            format_bytes(row["peak_bytes"]),
            "yes" if row["finished"] else f"no, at step {row['error_step'] + 1}",
            "same" if row["tokens_equal"] else "-",
            off,
            str(row["failures"]),
            str(row["fallbacks"]),
            f"{row['seconds']:.1f}",
        )
    console.print(table)
    for row in result["rows"]:
        if row["error"]:
            console.print(f"{row['share']}: {row['error']}", soft_wrap=True, highlight=False)
            break


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the sweeps, prints them and keeps the figures.

    Args:
        arguments: command line, None for the process's own.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of each run")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/capacity_sweep.json"))
    options = parser.parse_args(arguments)
    console = Console()
    results = {name: sweep(lora=name == "lora", steps=options.steps) for name in ("full", "lora")}
    for name, result in results.items():
        show({"full": "All weights", "lora": "LoRA"}[name], result, console)
    options.out.write_text(json.dumps({"machine": describe_machine(), **results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
