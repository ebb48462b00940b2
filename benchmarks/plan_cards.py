"""What would common networks hold on common cards, and how long does it take to know?

    python -m benchmarks.plan_cards [--models Qwen/Qwen3-4B] [--cards 24 80] [--published]

Writes ``benchmarks/results/plan_cards.json``: for every network, with LoRA and with LoRA on a base in 4 bits, and every
card, what `forecast_memory` says of GRPO with 32 completions of up to 1,024 tokens (8 a prompt, prompts of 512 tokens),
and the seconds it took, imports left out. Nothing is loaded; nothing here was measured on a card. ``--published``
forecasts the update of what prime-rl measured on one H100 (the baselines of its repository, January 2026)
instead.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import BitsAndBytesConfig

from benchmarks.machine import describe_machine
from memsafe_rl import FixedPolicy, GRPOConfig, RolloutPlan, UpdatePlan, forecast_memory
from memsafe_rl.types import Phase

RESULTS = Path(__file__).parent / "results" / "plan_cards.json"
MODELS = (
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.1-8B",
)
CARDS = (8, 16, 24, 40, 80)
KINDS = ("LoRA", "LoRA, 4 bits")
PROMPT_TOKENS = 512


PUBLISHED_GIB = {
    ("Qwen/Qwen3-4B", 16_384, False): 23.30,
    ("Qwen/Qwen3-4B", 16_384, True): 20.57,
    ("Qwen/Qwen3-4B", 65_536, False): 41.99,
    ("Qwen/Qwen3-4B", 65_536, True): 31.06,
    ("Qwen/Qwen3-0.6B", 16_384, False): 5.15,
    ("Qwen/Qwen3-0.6B", 65_536, False): 11.45,
    ("Qwen/Qwen3-0.6B", 65_536, True): 7.92,
}
"""By network, tokens of a forward, and whether activations are offloaded: GiB as published, LoRA of rank 16."""
ROW_TOKENS = 16_384


def beside_published(folder: str) -> list[dict[str, Any]]:
    """Forecasts the update that others have measured: as many tokens at once, activations recomputed.

    Args:
        folder: where a run would write.

    Returns:
        For each setting the published peak, and the forecast with a base in bf16 and in float32.
    """
    found = []
    for (model, tokens, offloaded), published in PUBLISHED_GIB.items():
        update = UpdatePlan(
            micro_batch_tokens=tokens, checkpointing=True, offload_activations=offloaded, logprob_tile=1024
        )
        forecast = forecast_memory(
            model,
            GRPOConfig(
                folder,
                num_generations=4,
                per_device_train_batch_size=8,
                max_completion_length=ROW_TOKENS - PROMPT_TOKENS,
                report_to="none",
            ),
            device_bytes="80GiB",
            prompt_tokens=PROMPT_TOKENS,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
            memory_policy=FixedPolicy(RolloutPlan(rows_in_flight=1, prefill_tokens=PROMPT_TOKENS), update),
        )
        narrow = sum(forecast.phases[Phase.UPDATE].values()) / 2**30
        # LoRA weights are float32 already; the base is the rest, at 2 bytes a weight.
        base = (forecast.job.geometry.parameter_bytes - forecast.job.geometry.trainable_bytes) / 2**30
        found.append(
            {
                "model": model,
                "tokens": tokens,
                "offloaded": offloaded,
                "published_gib": published,
                "forecast_bf16_gib": round(narrow, 2),
                "forecast_float32_base_gib": round(narrow + base, 2),
            }
        )
    return found


def ask(model: str, kind: str, gib: int, folder: str) -> dict[str, Any]:
    """Forecasts one run on one card.

    Args:
        model: name of the network.
        kind: one of `KINDS`.
        gib: memory of the card, in GiB.
        folder: where a run would write.

    Returns:
        Peak, verdict, plan and seconds.
    """
    config = GRPOConfig(
        folder,
        num_generations=8,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        max_completion_length=1024,
        report_to="none",
    )
    base = None
    if kind.endswith("4 bits"):
        base = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
        )
    started = time.perf_counter()
    found = forecast_memory(
        model,
        config,
        device_bytes=gib * 2**30,
        prompt_tokens=PROMPT_TOKENS,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        quantization_config=base,
    )
    seconds = time.perf_counter() - started
    keep = ("predicted_peak_bytes", "peak_phase", "fits", "phases", "rollout_plan", "update_plan")
    plain = found.plain()
    return {**{name: plain[name] for name in keep}, "seconds": round(seconds, 2)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Asks about every network and card.

    Args:
        arguments: of the command line; None for those of this process.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' of its own names
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--cards", nargs="*", type=int, default=list(CARDS), help="GiB")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--published", action="store_true", help="beside figures that others measured, instead")
    given = parser.parse_args(arguments)
    if given.published:
        with tempfile.TemporaryDirectory() as folder:
            _keep(given.out, published=beside_published(folder))
        return
    results: dict[str, dict[str, dict[str, Any]]] = {}
    asked = [(model, kind, gib) for model in given.models for kind in KINDS for gib in given.cards]
    with tempfile.TemporaryDirectory() as folder:
        for model, kind, gib in track(asked, "forecasting", console=Console(stderr=True)):
            results.setdefault(f"{model}, {kind}", {})[str(gib)] = ask(model, kind, gib, folder)
            _keep(given.out, results=results)
    show(results, given.cards)


def _keep(path: Path, **found: Any) -> None:
    """Writes what was found beside what is there."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**kept, "machine": describe_machine(), **found}, indent=1) + "\n")


def show(results: dict[str, dict[str, dict[str, Any]]], cards: Sequence[int]) -> None:
    """Prints peak and seconds by network and card.

    Args:
        results: what was found.
        cards: GiB of each card.
    """
    table = Table("GiB predicted (s)", *(f"{gib} GiB" for gib in cards))
    for name, found in results.items():
        cells = []
        for gib in cards:
            one = found[str(gib)]
            peak, seconds = one["predicted_peak_bytes"] / 2**30, one["seconds"]
            cells.append(f"{peak:.1f} ({seconds:.0f})" if one["fits"] else f"no ({seconds:.0f})")
        table.add_row(name, *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
