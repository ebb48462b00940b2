"""What does a teacher cost in memory: resident, on the host, or as an adapter on the model's base?

    python -m benchmarks.teacher_memory

A random Qwen3 of 17 M weights learns two steps from a teacher of 64 M, with LoRA and whole: beside it, then within a
budget that has no room for it, then from an adapter on its own base. Shows peaks that a counting allocator found, how
far the forecast was from them, and how far the trained weights are from those of the run without a budget. Writes
``benchmarks/results/teacher_memory.json``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from benchmarks.forecast_error import beside, save_network
from benchmarks.host_weights import alternating, prompts_of_one_length, qwen3
from benchmarks.machine import describe_machine
from benchmarks.small import byte_tokenizer
from memsafe_rl import GRPOConfig, GRPOTrainer

RESULTS = Path(__file__).parent / "results" / "teacher_memory.json"
STUDENT, TEACHER = qwen3(4096, 320, 12), qwen3(4096, 576, 16)
SHARE = 0.7
"""Of the teacher's bytes, those that the smaller budget lacks."""


def trainer(folder: Path, teacher: Path | None, lora: bool, budget: int | None) -> GRPOTrainer:
    """Makes a trainer for the student in a folder."""
    config = GRPOConfig(
        str(folder / "run"),
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=16,
        generation_kwargs={"min_new_tokens": 16},
        learning_rate=1e-4,
        teacher_model_name_or_path=None if teacher is None else str(teacher),
        memory_forecast=True,
        memory_budget="auto" if budget is None else budget,
        alarms=False,
        overwrite_output_dir=True,
        max_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    peft = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    given: dict[str, Any] = {"processing_class": byte_tokenizer(), "peft_config": peft}
    return GRPOTrainer(str(folder), alternating, config, prompts_of_one_length(), **given)


def measure(folder: Path, teacher: Path | None, lora: bool, budget: int | None = None) -> dict[str, Any]:
    """Runs a student beside its forecast; gives bytes, and what was learned."""
    made: list[GRPOTrainer] = []

    def remembered() -> GRPOTrainer:
        made.append(trainer(folder, teacher, lora, budget))
        return made[0]

    found = beside(str(teacher), remembered, on_device=False)
    ours = made.pop()
    held = found["held_bytes"]
    errors = [size / held[phase] - 1 for phase, size in found["forecast_bytes"].items() if held.get(phase)]
    plans = [event["resident_blocks"] for event in ours.memory_events if event["event"] == "plan"]
    learned = [weight.detach().flatten() for weight in ours.model.parameters() if weight.requires_grad]
    return {
        "peak_bytes": found["held_peak_bytes"],
        "peak_error": found["forecast_peak_bytes"] / found["held_peak_bytes"] - 1,
        "worst_phase_error": max(errors, key=abs),
        "budget_bytes": budget,
        "failures": found["failures"],
        "resident_blocks": plans,
        "learned": torch.cat(learned),
    }


def cases(folder: Path, lora: bool) -> dict[str, dict[str, Any]]:
    """Runs all kinds of teachers; gives what was found by what they are."""
    student, large = folder / "student", folder / "teacher"
    size = sum(weight.nbytes for weight in AutoModelForCausalLM.from_pretrained(large).parameters())
    found = {"none": measure(student, None, lora), "resident": measure(student, large, lora)}
    budget = found["resident"]["peak_bytes"] - int(SHARE * size)
    found["on the host"] = measure(student, large, lora, budget)
    found["an adapter"] = measure(student, student / "adapter", lora)
    plain = found["resident"]["learned"]
    found["on the host"]["distance"] = float((found["on the host"]["learned"] - plain).norm() / plain.norm())
    for one in found.values():
        del one["learned"]
    return found


def main() -> None:
    """Runs every case, shows a table and writes the figures down."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    records: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        save_network(STUDENT, str(folder / "student"))
        save_network(TEACHER, str(folder / "teacher"))
        adapted = LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        base = AutoModelForCausalLM.from_pretrained(folder / "student")
        get_peft_model(base, adapted).save_pretrained(folder / "student" / "adapter")
        for name, lora in (("LoRA", True), ("all weights", False)):
            records[name] = cases(folder, lora)
    table = Table("trained", "teacher", "peak, MB", "of resident", "forecast", "worst phase", "distance", "failures")
    for name, found in records.items():
        whole = found["resident"]["peak_bytes"]
        for kind, one in found.items():
            errors = (f"{100 * one[key]:+.2f} %" for key in ("peak_error", "worst_phase_error"))
            size, distance = one["peak_bytes"], f"{one['distance']:.0e}" if "distance" in one else ""
            cells = (name, kind, f"{size / 1e6:.1f}", f"{size / whole:.2f}", *errors, distance, str(one["failures"]))
            table.add_row(*cells)
    Console().print(table)
    RESULTS.write_text(json.dumps({"machine": describe_machine(), "cases": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
