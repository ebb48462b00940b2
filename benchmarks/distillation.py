"""Does a larger teacher's view of each token teach faster than the rewards alone?

    python -m benchmarks.distillation [--seeds 0 1 2] [--steps 160]

The quickstart's task and model, warmed up once a seed. The teacher is twice as wide and has two blocks more, and has
seen right answers only. Plain GRPO learns from the rewards, distillation from the teacher alone, and the third from
both; of "less the mean", what the eight likeliest tokens would pay on average is taken off. Rivals differ in nothing
else. Shows held-out accuracy after equal optimizer steps, as mean ± standard deviation over the seeds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.dppo import learn, spread
from benchmarks.machine import describe_machine
from examples.quickstart import ANSWER_TOKENS, Parts, WarmUp, small_parts, warm_up
from examples.tasks import greedy_accuracy

RESULTS = Path("benchmarks/results/distillation.json")
RIVALS: dict[str, dict[str, Any]] = {
    "plain GRPO": {},
    "teacher alone": {"reward_weights": [0.0]},
    "teacher alone, less the mean": {"reward_weights": [0.0], "distillation_top_k": 8},
    "rewards and teacher": {"distillation_coef": 0.5},
    "rewards and teacher, less the mean": {"distillation_coef": 0.5, "distillation_top_k": 8},
}
"""By name, what each rival sets; all but the first have the teacher."""


def teacher_of(parts: Parts, seed: int, folder: str) -> float:
    """Makes and saves a larger network of the student's vocabulary that knows the task; gives its held-out accuracy."""
    own = parts.model.config
    sizes = {name: 2 * getattr(own, name) for name in ("hidden_size", "intermediate_size")}
    layers = own.num_hidden_layers + 2
    shape = {**sizes, "num_hidden_layers": layers, "layer_types": None, "max_window_layers": layers}
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**{**own.to_dict(), **shape}))
    train = [{"question": one["prompt"], "answer": one["answer"]} for one in parts.train]
    warm_up(model, parts.tokenizer, train, WarmUp(wrong_steps=0), seed)
    model.save_pretrained(folder)
    parts.tokenizer.save_pretrained(folder)
    return greedy_accuracy(model, parts.tokenizer, parts.held_out, new_tokens=ANSWER_TOKENS)


def main() -> None:
    """Runs every rival with every seed, shows a table and writes the figures down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=160, help="optimizer steps (default: 160)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    records: dict[str, list[dict[str, float]]] = {name: [] for name in RIVALS}
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as folder:
            parts = small_parts(Path(folder) / "run", seed, given.steps, WarmUp())
            taught = teacher_of(parts, seed, folder)
            for name, settings in RIVALS.items():
                teacher = {"teacher_model_name_or_path": folder} if settings else {}
                found = learn(parts, Path(folder) / "run", seed, given.steps, loss_type="grpo", **settings, **teacher)
                records[name].append({"seed": seed, "teacher": taught, **found})
    columns = ("before", "after", "teacher", "seconds")
    table = Table("what teaches", *columns, title=f"{given.steps} optimizer steps, {len(given.seeds)} seeds")
    for name, runs in records.items():
        table.add_row(name, *(spread([run[column] for run in runs]) for column in columns))
    Console().print(table)
    found_all = {"machine": describe_machine(), "steps": given.steps, "runs": records}
    given.results.write_text(json.dumps(found_all, indent=1) + "\n")


if __name__ == "__main__":
    main()
