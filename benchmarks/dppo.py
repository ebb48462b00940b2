"""Does bounding probabilities learn more from stale rollouts than clipping ratios?

    python -m benchmarks.dppo [--seeds 0 1 2] [--steps 160]

The quickstart's task and model, warmed up once a seed. Every rollout of 1,024 completions gives 16 optimizer steps:
four passes (K=4) over four parts, so that the last ones learn from weights that are 15 steps old. Losses differ in
nothing else; plain GRPO, with a fresh rollout of 256 for each of as many steps, stands beside them. Shows held-out
accuracy after equal optimizer steps, as mean ± standard deviation over the seeds, and the share of tokens held back.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from examples.quickstart import ANSWER_TOKENS, Parts, WarmUp, small_parts
from examples.tasks import exact, greedy_accuracy
from memsafe_rl import GRPOConfig, GRPOTrainer

STALE = {"num_iterations": 4, "steps_per_generation": 4}
RIVALS: dict[str, dict[str, Any]] = {
    "plain GRPO, fresh rollouts": {"loss_type": "grpo"},
    "dapo, clip 0.2 and 0.28": {"loss_type": "dapo", "epsilon_high": 0.28, **STALE},
    "dppo, 0.15": {"loss_type": "dppo", "epsilon": 0.15, **STALE},
    "dppo_kl, 0.05": {"loss_type": "dppo_kl", "epsilon": 0.05, **STALE},
}
"""By name, what each rival sets."""


def learn(parts: Parts, folder: Path, seed: int, steps: int, **settings: Any) -> dict[str, float]:
    """Trains a copy of the warmed-up model and judges it on the held-out questions.

    Args:
        parts: the warmed-up model and the task.
        folder: of the run.
        seed: of the run.
        steps: optimizer steps.
        settings: what the rival sets.

    Returns:
        Accuracy before and after, the greatest share of tokens held back in a step, the greatest KL to the old model
        (k3, nats per token), and seconds.
    """
    model = copy.deepcopy(parts.model)
    before = greedy_accuracy(model, parts.tokenizer, parts.held_out, new_tokens=ANSWER_TOKENS)
    config = GRPOConfig(
        output_dir=str(folder),
        overwrite_output_dir=True,
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=256,
        num_generations=8,
        max_completion_length=ANSWER_TOKENS,
        learning_rate=3e-4,
        lr_scheduler_type="linear",
        warmup_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        alarms=False,
        use_cpu=True,
        **settings,
    )
    trainer = GRPOTrainer(model, exact, args=config, train_dataset=parts.train, processing_class=parts.tokenizer)
    start = time.perf_counter()
    trainer.train()
    history = trainer.history
    return {
        "before": before,
        "after": greedy_accuracy(trainer.model.eval(), parts.tokenizer, parts.held_out, new_tokens=ANSWER_TOKENS),
        "most_held_back": max(line.get("clip_ratio/region_mean", 0.0) for line in history),
        "most_kl": max(line["approx_kl/k3_token"] for line in history),
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    """Runs every rival with every seed, shows a table and writes the figures down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=160, help="optimizer steps (default: 160)")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/dppo"), help="where the runs write")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/dppo.json"))
    arguments = parser.parse_args()
    records: dict[str, list[dict[str, float]]] = {name: [] for name in RIVALS}
    for seed in arguments.seeds:
        parts = small_parts(arguments.output_dir, seed, arguments.steps, WarmUp())
        for name, settings in RIVALS.items():
            found = learn(parts, arguments.output_dir, seed, arguments.steps, **settings)
            records[name].append({"seed": seed, **found})
    table = Table(title=f"{arguments.steps} optimizer steps, {len(arguments.seeds)} seeds")
    for column in ("loss", "held out before", "held out after", "most held back", "most KL", "seconds"):
        table.add_column(column)
    for name, runs in records.items():
        shown = [spread([run[key] for run in runs]) for key in runs[0] if key != "seed"]
        table.add_row(name, *shown)
    Console().print(table)
    found_all = {"machine": describe_machine(), "steps": arguments.steps, "runs": records}
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(found_all, indent=2) + "\n")


def spread(values: list[float]) -> str:
    """Shows mean and standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"


if __name__ == "__main__":
    main()
