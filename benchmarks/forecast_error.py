"""How far is a forecast from what the run then holds?

    python -m benchmarks.forecast_error [--families qwen3 gpt2] [--quick]

Writes ``benchmarks/results/forecast_error.json``. Every setting is forecast on fake tensors, then really run for two
steps under an allocator that counts every byte, with completions forced to their full length. Networks are small, so
that a run takes seconds; what is left out or counted wrongly weighs more in them than in large ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    T5Config,
)

from benchmarks.machine import describe_machine
from benchmarks.small import EOS_ID, PAD_ID, byte_tokenizer
from memsafe_rl import GRPOConfig, GRPOTrainer, SimulatedMemory

RESULTS = Path(__file__).parent / "results" / "forecast_error.json"
VOCAB = 16_000
PROMPT_TOKENS = 48
DEVICE_BYTES = 8 * 2**30

_IDS = {"pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "bos_token_id": None}
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
_MIXED = {"sliding_window": 32, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
FAMILIES: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**_SIZES, **_IDS, tie_word_embeddings=True),
    "llama": LlamaConfig(**_SIZES, **_IDS, tie_word_embeddings=False),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=256, n_layer=4, n_head=8, n_positions=512, **_IDS),
    "gemma3": Gemma3TextConfig(**{**_SIZES, "num_hidden_layers": 3}, **_IDS, **_MIXED),
    "t5": T5Config(
        vocab_size=VOCAB,
        d_model=256,
        d_ff=768,
        d_kv=32,
        num_layers=4,
        num_heads=8,
        decoder_start_token_id=PAD_ID,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
    ),
}
"""Small networks of each family."""


@dataclass(frozen=True)
class Setting:
    """One run that is forecast and made.

    Args:
        family: one of `FAMILIES`.
        adapter: whether a LoRA adapter is trained, else all weights.
        checkpointing: whether activations are recomputed; None for what the plan decides.
        num_generations: completions a prompt.
        max_completion_length: tokens of each.
        num_iterations: passes over each rollout.
        beta: weight of the reference's KL.
        budget_share: of what the run would hold with all the room, what it may hold; None for all the room.
    """

    family: str
    adapter: bool
    checkpointing: bool | None
    num_generations: int
    max_completion_length: int
    num_iterations: int
    beta: float = 0.0
    budget_share: float | None = None

    def __str__(self) -> str:
        what = "LoRA" if self.adapter else "full"
        recomputed = {None: "free", True: "recomputed", False: "kept"}[self.checkpointing]
        parts = [self.family, what, recomputed, f"G={self.num_generations}", f"{self.max_completion_length} tokens"]
        parts += [f"K={self.num_iterations}"] + (["KL"] if self.beta else [])
        return ", ".join(parts + ([f"{self.budget_share:.0%}"] if self.budget_share else []))


def settings(families: Sequence[str]) -> list[Setting]:
    """Lists the settings of some families."""
    listed = []
    for family in families:
        listed += [
            Setting(family, False, False, 4, 64, 1),
            Setting(family, False, True, 8, 96, 2),
            Setting(family, True, False, 8, 48, 2, 0.04),
            Setting(family, True, True, 4, 128, 1),
            Setting(family, False, None, 4, 96, 2, 0.04),
            Setting(family, True, None, 8, 64, 1, 0.0, 0.6),
        ]
    return listed


def measure(setting: Setting, folder: Path) -> dict[str, Any]:
    """Forecasts a setting, and runs it.

    Args:
        setting: what is run.
        folder: of the saved network.

    Returns:
        Bytes of every phase, forecast and held, and how the run went.
    """
    budget: int | None = None
    if setting.budget_share is not None:
        plain = measure(Setting(**{**asdict(setting), "budget_share": None}), folder)
        least = plain["state_bytes"]
        budget = int(least + setting.budget_share * (plain["held_peak_bytes"] - least))
    started = time.perf_counter()
    with SimulatedMemory(DEVICE_BYTES) as memory:
        trainer = _trainer(setting, folder, budget)
        forecast = trainer.forecast
        if forecast is None:
            raise SystemExit(f"{setting}: there was no forecast; see the warning above")
        trainer.train()
        held = {phase.value: sum(parts.values()) for phase, parts in memory.phase_peaks().items()}
        state = memory.live_bytes
    failed = [event for event in trainer.memory_events if event["event"] in ("retry", "failure", "fallback")]
    foreseen = {phase.value: size for phase, size in forecast.phase_bytes.items()}
    return {
        "forecast_bytes": foreseen,
        "held_bytes": held,
        "forecast_peak_bytes": max(foreseen.values()),
        "held_peak_bytes": max(held.values()),
        "state_bytes": state,
        "failures": len(failed),
        "forecast_seconds": forecast.seconds,
        "seconds": time.perf_counter() - started,
    }


def _trainer(setting: Setting, folder: Path, budget: int | None) -> GRPOTrainer:
    rows = 4 * setting.num_generations
    config = GRPOConfig(
        str(folder / "run"),
        num_generations=setting.num_generations,
        per_device_train_batch_size=rows,
        max_completion_length=setting.max_completion_length,
        num_iterations=setting.num_iterations,
        beta=setting.beta,
        gradient_checkpointing=setting.checkpointing,
        generation_kwargs={"min_new_tokens": setting.max_completion_length},
        memory_forecast=True,
        memory_budget="auto" if budget is None else budget,
        max_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    prompts = [f"{index:02d}".ljust(PROMPT_TOKENS, ".") for index in range(16)]
    gpt2 = setting.family == "gpt2"
    modules = ["c_attn", "c_proj", "c_fc"] if gpt2 else "all-linear"
    return GRPOTrainer(
        str(folder),
        _alternating,
        config,
        Dataset.from_dict({"prompt": prompts}),
        processing_class=byte_tokenizer(),
        peft_config=LoraConfig(r=16, target_modules=modules, fan_in_fan_out=gpt2) if setting.adapter else None,
    )


def _alternating(completions: list[str], **_: Any) -> list[float]:
    """Pays neighbours differently, so that every row learns."""
    return [float(index % 2) for index in range(len(completions))]


def _errors(found: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Gives the relative error of every phase that was forecast, and of the peak."""
    for phase, size in found["forecast_bytes"].items():
        if phase in found["held_bytes"]:
            yield phase, size / found["held_bytes"][phase] - 1
    yield "peak", found["forecast_peak_bytes"] / found["held_peak_bytes"] - 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the settings and writes what was found.

    Args:
        arguments: of the command line; None for those of this process.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' of its own names
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--quick", action="store_true", help="two settings of the first family; nothing written")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the figures go")
    given = parser.parse_args(arguments)
    wanted = settings(given.families[:1])[:2] if given.quick else settings(given.families)
    results: dict[str, Any] = {}
    for setting in track(wanted, "forecasting and running", console=Console(stderr=True)):
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            config = FAMILIES[setting.family]
            kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
            model = kind.from_config(config, dtype=torch.float32)
            model.save_pretrained(folder)
            del model
            found = measure(setting, Path(folder))
        results[str(setting)] = {**found, "errors": dict(_errors(found))}
    _show(results)
    if not given.quick:
        given.out.write_text(json.dumps({"machine": describe_machine(), "results": results}, indent=1) + "\n")


def _show(results: dict[str, Any]) -> None:
    phases = ("load", "rollout", "score", "update", "optimizer", "peak")
    table = Table("setting", "held, MB", *(f"{phase}, %" for phase in phases), "failures", "forecast, s")
    for name, found in results.items():
        errors = [found["errors"].get(phase) for phase in phases]
        shown = ["" if error is None else f"{100 * error:+.2f}" for error in errors]
        held, seconds = found["held_peak_bytes"] / 1e6, found["forecast_seconds"]
        table.add_row(name, f"{held:.1f}", *shown, str(found["failures"]), f"{seconds:.1f}")
    peaks = [abs(found["errors"]["peak"]) for found in results.values()]
    console = Console(width=160)
    console.print(table)
    console.print(f"peak: worst {100 * max(peaks):.2f} %, median {100 * statistics.median(peaks):.3f} %")


if __name__ == "__main__":
    main()
