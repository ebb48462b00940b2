"""How far is the forecast of a sharded rank from what it then holds?

    python -m benchmarks.sharded_forecast [--only NAME]

Two processes over gloo train tiny Qwen3 and T5 networks under ``fsdp="full_shard"``, each under an allocator that
counts every byte; every trainer has forecast its run before it loaded weights. Completions are forced to their full
length.

Every network does so twice: with gradients added up over ranks after each micro-batch, and once a step.

Writes `benchmarks/results/sharded_forecast.json`; exits with 1 where a phase is more than 1 % below or 3 % above.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config, T5Config, T5ForConditionalGeneration

from benchmarks.forecast_error import beside
from benchmarks.machine import describe_machine
from benchmarks.small import byte_tokenizer
from memsafe_rl import AdaptivePolicy, GRPOTrainer, MemoryPolicy, RolloutPlan, UpdatePlan
from memsafe_rl.memory.planning.search import with_prediction
from memsafe_rl.types import MemoryFailure, MemoryState, RolloutWork, UpdateWork
from tests.parallel.test_ranks import run_ranks, set_up_rank
from tests.preflight.beside import alternating, config_for

CASES: dict[str, dict[str, Any]] = {
    "tied head": {"vocab_size": 4000},
    "untied head": {"vocab_size": 2000, "tie_word_embeddings": False},
    "LoRA": {"vocab_size": 4000, "lora": 16},
    "many blocks": {"vocab_size": 500, "num_hidden_layers": 8},
    "LoRA on 4 bits": {"vocab_size": 4000, "lora": 16, "4bit": True},
    "reference": {"vocab_size": 1000, "beta": 0.1},
    "activations kept": {"vocab_size": 1000, "num_hidden_layers": 3, "tokens": 96, "checkpointing": False},
    "T5": {"vocab_size": 2000, "t5": True},
    "T5, LoRA": {"vocab_size": 2000, "t5": True, "lora": 16},
    "T5, activations kept": {"vocab_size": 1000, "t5": True, "tokens": 96, "checkpointing": False},
}
PHASES = ("load", "rollout", "score", "update", "optimizer")
MOST_LOW, MOST_HIGH = 0.01, 0.03
ONCE = ", added up once a step"
PATIENCE_SECONDS = 900


@dataclass(frozen=True)
class Reducing(MemoryPolicy):
    """The default's plans, with gradients added up over ranks after each micro-batch, or once a step.

    Args:
        each: after each.
        policy: the default.
    """

    each: bool
    policy: MemoryPolicy

    def before_rollout(self, work: RolloutWork, memory: MemoryState) -> RolloutPlan:
        """Returns the default's plan."""
        return self.policy.before_rollout(work, memory)

    def before_update(self, work: UpdateWork, memory: MemoryState) -> UpdatePlan:
        """Returns the default's plan, but for the moment at which gradients are added up."""
        return with_prediction(replace(self.policy.before_update(work, memory), reduce_each=self.each), work, memory)

    def after_oom(self, plan: Any, failure: MemoryFailure) -> Any:
        """Returns the default's next plan."""
        return self.policy.after_oom(plan, failure)


def save_model(case: dict[str, Any], folder: Path) -> None:
    """Saves the network of a case.

    Args:
        case: of `CASES`.
        folder: where it goes.
    """
    if "t5" in case:
        small = {"d_model": 128, "d_ff": 384, "d_kv": 32, "num_layers": 3, "num_heads": 4, "pad_token_id": 0}
        config = T5Config(vocab_size=case["vocab_size"], decoder_start_token_id=0, eos_token_id=1, **small)
        T5ForConditionalGeneration(config).save_pretrained(folder)
        return
    known = ("vocab_size", "num_hidden_layers", "tie_word_embeddings")
    sizes = {
        "num_hidden_layers": 4,
        "tie_word_embeddings": True,
        **{name: case[name] for name in known if name in case},
    }
    width = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1}
    AutoModelForCausalLM.from_config(Qwen3Config(**width, **heads, **sizes)).save_pretrained(folder)


def make_trainer(case: dict[str, Any], folder: Path, *, each: bool = True) -> GRPOTrainer:
    """Makes a rank's trainer of a case, which forecasts its run."""
    config = config_for(
        folder,
        per_device_train_batch_size=8,
        max_completion_length=case.get("tokens", 32),
        beta=case.get("beta", 0.0),
        fsdp="full_shard",
        alarms=False,
    )
    if "4bit" in case:
        stored = {"bnb_4bit_quant_storage": torch.bfloat16, "bnb_4bit_use_double_quant": False}
        config.model_init_kwargs = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **stored)}
    checkpointing = case.get("checkpointing", True)
    prompts = [f"{index:02d}".ljust(24, ".") for index in range(16)]
    return GRPOTrainer(
        str(folder / "model"),
        alternating,
        config,
        Dataset.from_dict({"prompt": prompts}),
        processing_class=byte_tokenizer(),
        memory_policy=Reducing(each, AdaptivePolicy(checkpointing=checkpointing)),
        peft_config=LoraConfig(r=case["lora"], target_modules="all-linear") if "lora" in case else None,
    )


def _rank(names: list[str], rank: int, port: int, folder: str) -> None:
    logging.getLogger("memsafe_rl").setLevel(logging.ERROR)
    set_up_rank(rank, port)
    found = {
        f"{name}{told}": beside(
            name, partial(make_trainer, CASES[name], Path(folder) / name, each=not told), on_device=False
        )
        for name in names
        for told in ("", ONCE)
    }
    torch.save(found, Path(folder) / f"{rank}.pt")


def main() -> None:
    """Prints and writes a row for every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(CASES), help="one case; nothing is written")
    only = parser.parse_args().only
    names = [name for name in CASES if only in (None, name)]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            save_model(CASES[name], Path(folder) / name / "model")
        ranks = run_ranks(partial(_rank, names), Path(folder), PATIENCE_SECONDS)
    table, fine = Table("network", "peak, MB", *PHASES, title="forecast of a rank, beside what it held"), True
    for name in ranks[0]:
        found = max((one[name] for one in ranks), key=lambda one: one["held_peak_bytes"])
        held, foreseen = found["held_bytes"], found["forecast_bytes"]
        errors = {phase: foreseen[phase] / held[phase] - 1 for phase in PHASES if phase in foreseen and phase in held}
        fine = fine and all(-MOST_LOW <= error <= MOST_HIGH for phase, error in errors.items())
        cells = (f"{errors[phase]:+.2%}" if phase in errors else "" for phase in PHASES)
        table.add_row(name, f"{found['held_peak_bytes'] / 1e6:.1f}", *cells)
    Console(width=120).print(table)
    if only is None:
        record = {"machine": describe_machine(), "cases": CASES, "ranks": ranks}
        Path("benchmarks/results/sharded_forecast.json").write_text(json.dumps(record, indent=2) + "\n")
    if not fine:
        sys.exit(1)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
