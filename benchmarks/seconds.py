"""Do steps take as long as the forecast says?

    python -m benchmarks.seconds [--settings 10] [--seed 0]

Random small networks, rows, lengths, LoRA or all weights: seconds of a step as `forecast_memory` estimates them from a
calibration of this machine just before, beside those of a run whose completions all reach their full length. One
thread, and its processor seconds, so that other work on the machine counts little; of the steps after the first, which
warms up, the median.

Writes `benchmarks/results/seconds.json`; exits with 1 if an estimate is off by more than 30 %.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import TrainerCallback

from benchmarks.machine import describe_machine
from benchmarks.small import filled_tokenizer, small_qwen3
from memsafe_rl import GRPOConfig, GRPOTrainer, forecast_memory
from memsafe_rl.preflight.speed import measured_speed

RESULTS = Path(__file__).parent / "results" / "seconds.json"
LIMIT = 0.30
STEPS = 4


@dataclass(frozen=True)
class Setting:
    """A run."""

    hidden: int
    layers: int
    vocab: int
    prompts: int
    group: int
    prompt: int
    completion: int
    lora: bool
    iterations: int


@dataclass(frozen=True)
class Found:
    """Seconds of its steps."""

    setting: Setting
    estimated: float
    measured: float

    @property
    def error(self) -> float:
        """By how much the estimate is off."""
        return self.estimated / self.measured - 1


class Clock(TrainerCallback):  # type: ignore[misc]
    """Notes the processor seconds at the end of every step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Notes them."""
        self.ends.append(time.process_time())


def draw(chance: random.Random) -> Setting:
    """Draws a setting."""
    return Setting(
        hidden=chance.choice((64, 128, 256, 512)),
        layers=chance.randint(2, 10),
        vocab=chance.choice((300, 2000, 16000)),
        prompts=chance.randint(1, 6),
        group=chance.choice((2, 4, 8)),
        prompt=chance.randint(8, 120),
        completion=chance.randint(12, 80),
        lora=chance.random() < 0.5,
        iterations=chance.choice((1, 1, 2)),
    )


def pay(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Pays something that differs within groups."""
    return [sum(ids) % 13 / 13 for ids in completion_ids]


def compare(setting: Setting) -> Found:
    """Forecasts a run and runs it."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = small_qwen3(setting.vocab, hidden=setting.hidden, layers=setting.layers)
        model.save_pretrained(folder)
        rows = setting.prompts * setting.group
        config = GRPOConfig(
            output_dir=f"{folder}/run",
            per_device_train_batch_size=rows,
            num_generations=setting.group,
            num_iterations=setting.iterations,
            max_completion_length=setting.completion,
            generation_kwargs={"min_new_tokens": setting.completion},
            max_steps=1 + STEPS,
            bf16=False,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            alarms=False,
        )
        inputs: dict[str, Any] = {
            "train_dataset": Dataset.from_dict({"prompt": ["1" * setting.prompt] * max(2, setting.prompts)}),
            "processing_class": filled_tokenizer(setting.vocab),
            "peft_config": LoraConfig(r=8, target_modules="all-linear") if setting.lora else None,
        }
        measured_speed.cache_clear()  # a shared machine is not as fast in one minute as in the next
        speed = measured_speed(torch.device("cpu"), torch.float32, time.process_time)
        forecast = forecast_memory(folder, config, device_bytes="64GiB", device="cpu", speed=speed, **inputs)
        clock = Clock()
        GRPOTrainer(folder, pay, args=config, callbacks=[clock], **inputs).train()
    if forecast.step_seconds is None:
        raise AssertionError("tokens are decoded here, so their seconds are estimated")
    measured = statistics.median(end - start for start, end in pairwise(clock.ends))
    return Found(setting, forecast.step_seconds.step, measured)


def main() -> None:
    """Compares estimates with runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=int, default=10, help="how many (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the settings (default: 0)")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"(default: {RESULTS.name})")
    given = parser.parse_args()
    torch.set_num_threads(1)
    chance, console = random.Random(given.seed), Console()
    settings = [draw(chance) for _ in range(given.settings)]
    found = [compare(one) for one in track(settings, description="runs", console=Console(stderr=True))]
    table = Table("setting", "estimated s", "measured s", "error", title=f"seed {given.seed}")
    for one in found:
        text = " ".join(f"{name}={value}" for name, value in asdict(one.setting).items())
        table.add_row(text, f"{one.estimated:.3f}", f"{one.measured:.3f}", f"{one.error:+.0%}")
    console.print(table)
    errors = [one.error for one in found]
    worst = max(errors, key=abs)
    console.print(f"worst {worst:+.0%}, median {statistics.median(map(abs, errors)):.0%}")
    record = {
        "machine": describe_machine(),
        "seed": given.seed,
        "limit": LIMIT,
        "worst": worst,
        "runs": [{**asdict(one), "error": one.error} for one in found],
    }
    given.results.parent.mkdir(parents=True, exist_ok=True)
    given.results.write_text(json.dumps(record, indent=2) + "\n")
    if abs(worst) > LIMIT:
        sys.exit(1)


if __name__ == "__main__":
    main()
