"""What do frozen weights on the host save and cost, and are results the same bits?

    python -m benchmarks.host_weights [--networks "Qwen3, 17M"] [--device pretend]

Random networks of three sizes learn two steps of GRPO with LoRA from prompts of 32 tokens, with all, half, a quarter
and none of their blocks resident: bytes held and forecast by phase, completion tokens a second of the second step, and
whether trained weights are bitwise those of the resident run. Then comes a run whose budget is 0.8 of the weights'
bytes. On a CPU a counting allocator stands for the device; ``--device pretend`` runs on the pretend CUDA device
(docs/device.md), where copies land when they are waited for. Writes ``benchmarks/results/host_weights.json``, the
part of this device; seconds there say nothing of a card, whose bus is not that of the host.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from benchmarks.forecast_error import beside, save_network
from benchmarks.machine import describe_machine
from benchmarks.small import EOS_ID, PAD_ID, byte_tokenizer
from memsafe_rl import AdaptivePolicy, FixedPolicy, GRPOConfig, GRPOTrainer, MemoryPolicy, RolloutPlan, UpdatePlan
from tests.device import build, pretend

RESULTS = Path(__file__).parent / "results" / "host_weights.json"
GROUP, ROWS, PROMPT_TOKENS, COMPLETION_TOKENS = 4, 8, 32, 16
SHARES = (1.0, 0.5, 0.25, 0.0)
"""Of the blocks, those that stay on the device."""
BUDGET = 0.8
"""Of the weights' bytes."""
LEAST_DEVICE_BUDGET = 16 << 20
"""Below it a card, which reserves bytes 2 MiB at a time, has no segments to share out."""
_QWEN3 = {"head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": True}
_IDS = {"pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "bos_token_id": None}


def qwen3(vocab: int, hidden: int, layers: int) -> PretrainedConfig:
    """Returns the config of a Qwen3 with heads 32 wide."""
    heads = hidden // 32
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    return Qwen3Config(**sizes, num_attention_heads=heads, num_key_value_heads=heads // 2, **_QWEN3, **_IDS)


NETWORKS: dict[str, PretrainedConfig] = {
    "Qwen3, 0.9M": qwen3(512, 96, 8),
    "Qwen3, 17M": qwen3(4096, 320, 12),
    "SmolLM2-135M": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **_IDS,
    ),
}


def alternating(completions: list[str], **_: Any) -> list[float]:
    """Rewards every other completion."""
    return [float(index % 2) for index in range(len(completions))]


def prompts_of_one_length() -> Dataset:
    """Returns eight prompts."""
    return Dataset.from_dict({"prompt": [f"{index:02d}".ljust(PROMPT_TOKENS, ".") for index in range(8)]})


def trainer(folder: Path, policy: MemoryPolicy, on_device: bool, budget: int | None = None) -> GRPOTrainer:
    """Makes a trainer for the network in a folder."""
    config = GRPOConfig(
        str(folder / "run"),
        num_generations=GROUP,
        per_device_train_batch_size=ROWS,
        max_completion_length=COMPLETION_TOKENS,
        generation_kwargs={"min_new_tokens": COMPLETION_TOKENS},
        beta=0.04,
        learning_rate=1e-3,
        model_init_kwargs={"dtype": torch.float32},
        bf16=False,
        memory_forecast=True,
        memory_budget="auto" if budget is None else budget,
        overwrite_output_dir=True,
        max_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not on_device,
    )
    lora = LoraConfig(r=8, target_modules="all-linear")
    given: dict[str, Any] = {"processing_class": byte_tokenizer(), "peft_config": lora, "memory_policy": policy}
    return GRPOTrainer(str(folder), alternating, config, prompts_of_one_length(), **given)


def measure(name: str, make: Callable[[], GRPOTrainer], *, on_device: bool) -> dict[str, Any]:
    """Runs a trainer beside its forecast; gives bytes, tokens a second and a digest of what was learnt."""
    made: list[GRPOTrainer] = []

    def remembered() -> GRPOTrainer:
        made.append(make())
        return made[0]

    found = beside(name, remembered, on_device=on_device)
    ours = made.pop()
    digest = hashlib.sha256()
    for weight in ours.model.parameters():
        if weight.requires_grad:
            digest.update(weight.detach().cpu().numpy().tobytes())
    errors = {
        phase: size / found["held_bytes"][phase] - 1
        for phase, size in found["forecast_bytes"].items()
        if found["held_bytes"].get(phase)
    }
    plans = [event["resident_blocks"] for event in ours.memory_events if event["event"] == "plan"]
    return {
        "blocks": len(ours.adapter.geometry.frozen_block_bytes),
        "block_bytes": max(ours.adapter.geometry.frozen_block_bytes),
        "weights_bytes": ours.adapter.geometry.parameter_bytes,
        "resident_blocks": plans,
        "peak_bytes": found["held_peak_bytes"],
        "forecast_peak_bytes": found["forecast_peak_bytes"],
        "peak_error": found["forecast_peak_bytes"] / found["held_peak_bytes"] - 1,
        "phase_errors": errors,
        "held_bytes": found["held_bytes"],
        "reserved_bytes": found["reserved_bytes"],
        "failures": found["failures"],
        "tokens_per_second": ROWS * COMPLETION_TOKENS / ours.history[-1]["step_time"],
        "trained_weights": digest.hexdigest(),
    }


def of_network(name: str, *, on_device: bool) -> dict[str, Any]:
    """Measures a network with each share of its blocks resident, and under a budget below its weights' bytes."""
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder, config = Path(place), NETWORKS[name]
        save_network(config, place)
        for share in SHARES:
            blocks = None if share == 1 else round(share * config.num_hidden_layers)
            plans = FixedPolicy(
                RolloutPlan(resident_blocks=blocks), UpdatePlan(resident_blocks=blocks, checkpointing=True)
            )
            label = f"{share:.0%} resident"
            rows[label] = measure(label, lambda plans=plans: trainer(folder, plans, on_device), on_device=on_device)
        whole = rows["100% resident"]
        for row in rows.values():
            row["same_bits"] = row["trained_weights"] == whole["trained_weights"]
        budget = int(BUDGET * whole["weights_bytes"])
        if on_device and budget < LEAST_DEVICE_BUDGET:
            return rows
        label = f"budget of {BUDGET} of the weights"
        run = measure(label, lambda: trainer(folder, AdaptivePolicy(), on_device, budget), on_device=on_device)
        rows[label] = {**run, "budget_bytes": budget}
    return rows


def show(results: dict[str, Any], console: Console) -> None:
    """Prints the figures."""
    for name, rows in results.items():
        table = Table("run", "peak, MB", "forecast", "tokens/s", "same bits", "failures", title=name)
        for label, row in rows.items():
            same = {True: "yes", False: "NO", None: ""}[row.get("same_bits")]
            peak, speed = f"{row['peak_bytes'] / 1e6:.2f}", f"{row['tokens_per_second']:.1f}"
            table.add_row(label, peak, f"{row['peak_error']:+.2%}", speed, same, str(row["failures"]))
        console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the networks and writes what was found.

    Args:
        arguments: of the command line; None for those of this process.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--device", choices=("cpu", "pretend"), default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the figures go")
    given = parser.parse_args(arguments)
    if given.device == "pretend" and not pretend.is_loaded():
        if reason := build.missing():
            parser.error(f"--device pretend: {reason}. Use cpu.")
        own = sys.argv[1:] if arguments is None else arguments
        sys.exit(subprocess.call([sys.executable, "-m", "tests.device", "benchmarks.host_weights", *own]))
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' of its own names
    known = json.loads(given.out.read_text()) if given.out.exists() else {}
    results = known.get(given.device, {}).get("results", {})
    for name in given.networks:
        results[name] = of_network(name, on_device=given.device == "pretend")
        show({name: results[name]}, Console())
        known[given.device] = {"machine": describe_machine(), "results": results}
        given.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
