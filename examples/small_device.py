"""The same training on ever smaller devices: `python -m examples.small_device`, on any CPU, in about a minute.

A simulated device counts every byte PyTorch asks for and refuses what does not fit, as a card would. The first run has
no limit and takes what is fast. The second runs on a device that refuses an allocation in every update: the update is
done again. The others are given weights, gradients, optimizer state and a share of what the first held above them:
plans get leaner, and the same tokens are sampled and the same weights learnt.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.quickstart import make_tokenizer
from examples.tasks import sums
from memsafe_rl import GRPOConfig, GRPOTrainer, MemoryBudgetError, SimulatedMemory

SHARES = (0.5, 0.2, 0.02)
"""Of what the first run held above its state."""
REFUSED = 1000
"""The allocation, counted from the rewards on, that an unreliable device refuses: in the middle of an update."""
TOO_SMALL = 0.8
"""Of the state alone."""


@dataclass(frozen=True)
class Run:
    """What one training on one device came to.

    Args:
        weights: (N,) trained weights, float64.
        completions: sampled token ids.
        peak_bytes: int, most bytes held.
        state_bytes: int, bytes of weights, gradients and optimizer state.
        failures: allocations that failed.
        plan: the last update's plan, in words.
    """

    weights: torch.Tensor
    completions: list[list[int]]
    peak_bytes: int
    state_bytes: int
    failures: int
    plan: str


def train(capacity_bytes: int | None, steps: int, *, refusing: bool = False) -> Run:
    """Trains on a simulated device.

    Args:
        capacity_bytes: int, bytes of the device; None for no limit.
        steps: optimizer steps.
        refusing: whether the device refuses one allocation in every update, for no reason.

    Returns:
        What came of it.

    Raises:
        MemoryBudgetError: not even the leanest plan fits.
    """
    questions = sums(terms=(3, 3), digits=(1, 1), count=400)
    tokenizer = make_tokenizer([item["question"] for item in questions])
    completions: list[list[int]] = []

    def even_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
        completions.extend(completion_ids)
        if refusing:
            device.fail_after(REFUSED)
        return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

    with SimulatedMemory(capacity_bytes) as device:
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
        tokens = {"vocab_size": 512, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
        trainer = GRPOTrainer(
            Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **tokens)),
            even_ids,
            args=GRPOConfig(
                "outputs/small_device",
                num_generations=16,
                per_device_train_batch_size=64,
                max_completion_length=64,
                learning_rate=1e-4,
                max_steps=steps,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                memory_budget="auto" if capacity_bytes is None else "100%",
            ),
            train_dataset=Dataset.from_dict({"prompt": [item["question"] for item in questions]}),
            processing_class=tokenizer,
        )
        trainer.train()
        held = {str(component): size for component, size in device.live_by_component().items()}
    trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    plan = [event for event in trainer.memory_events if event["event"] == "plan" and event["kind"] == "update"][-1]
    return Run(
        weights=torch.cat([weight.detach().flatten().double() for weight in trained]),
        completions=completions,
        peak_bytes=max(sum(split.values()) for split in device.phase_peaks().values()),
        state_bytes=held["weights"] + held["optimizer"] + sum(weight.nbytes for weight in trained),
        failures=sum(event["event"] == "failure" for event in trainer.memory_events),
        plan=in_words(plan),
    )


def in_words(plan: dict[str, Any]) -> str:
    """Says what an update's plan asks for.

    Args:
        plan: the event of a plan.

    Returns:
        A few words.
    """
    switches = {
        "checkpointing": "recompute",
        "offload_activations": "offload",
        "park_optimizer": "optimizer on the host",
    }
    chosen = [word for name, word in switches.items() if plan[name]]
    return ", ".join([f"{plan['micro_batch_tokens']} tokens", *chosen])


def main() -> None:
    """Trains on all devices and prints what each did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps of each run")
    steps = parser.parse_args().steps
    # Matrices this small gain nothing from a second thread, and on a busy machine threads wait for each other.
    torch.set_num_threads(1)
    console, table = Console(), Table(title="One training, six devices")
    for name in ("device", "peak", "failed allocations", "plan of the last update", "tokens", "weights differ by"):
        table.add_column(name)
    whole = train(None, steps)
    table.add_row("no limit", mib(whole.peak_bytes), str(whole.failures), whole.plan, "", "")
    add_row(table, "unreliable", train(None, steps, refusing=True), whole)
    above = whole.peak_bytes - whole.state_bytes
    capacities = [whole.state_bytes + int(share * above) for share in SHARES] + [int(TOO_SMALL * whole.state_bytes)]
    for capacity in track(capacities, description="Smaller devices", console=Console(stderr=True)):
        try:
            run = train(capacity, steps)
        except MemoryBudgetError as error:
            table.add_row(mib(capacity), "", "", "none fits", "", "")
            console.print(f"{mib(capacity)}: {error}\n", soft_wrap=True, highlight=False)
            continue
        add_row(table, mib(capacity), run, whole)
    console.print(table)


def add_row(table: Table, device: str, run: Run, whole: Run) -> None:
    """Adds what one run did, beside the run with all the memory it wants.

    Args:
        table: to add to.
        device: name of the device.
        run: the run.
        whole: the other.
    """
    same = "same" if run.completions == whole.completions else "differ"
    apart = float((run.weights - whole.weights).norm() / whole.weights.norm())
    table.add_row(device, mib(run.peak_bytes), str(run.failures), run.plan, same, f"{apart:.0e}")


def mib(size_bytes: int) -> str:
    """Writes bytes as MiB.

    Args:
        size_bytes: int, bytes.

    Returns:
        Text.
    """
    return f"{size_bytes / 2**20:.1f} MiB"


if __name__ == "__main__":
    main()
