"""Does the trainer learn what TRL's learns?

First the same rollouts go into both: they start from the same small random model, see the same prompts in the same
order and are handed the same completions and rewards through `rollout_func`. After 20 optimizer steps (two passes over
ten rollouts) the distance between their weights is compared with the distance each has travelled.

Then each samples for itself and learns the quickstart's task (`--seeds`): held-out accuracy, seconds of training and
most bytes held above the weights, optimizer steps being equal.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from rich.console import Console
from rich.table import Table

import memsafe_rl
from benchmarks.machine import describe_machine
from benchmarks.small import EOS_ID, byte_tokenizer, small_qwen3
from examples.quickstart import Parts, WarmUp, small_parts
from examples.tasks import exact, greedy_accuracy
from memsafe_rl.memory.simulated.counting import CountingAllocator

VOCAB_SIZE = 258
GROUP_SIZE = 8
LONGEST = 24


class Rollouts:
    """Gives random completions that depend on the call and the row only, so that both trainers get the same."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Draws for the next call."""
        generator = torch.Generator().manual_seed(1000 + self.calls)
        self.calls += 1
        lengths = torch.randint(2, LONGEST, (len(prompts),), generator=generator).tolist()
        completions = [[*torch.randint(2, VOCAB_SIZE, (n,), generator=generator).tolist(), EOS_ID] for n in lengths]
        return {
            "prompt_ids": trainer.processing_class(text=prompts)["input_ids"],
            "completion_ids": completions,
            "logprobs": [[0.0] * len(ids) for ids in completions],
        }


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Pays for small token ids: any reward will do that differs within a group."""
    return [sum(token < VOCAB_SIZE // 2 for token in ids) / len(ids) for ids in completion_ids]


def settings(output_dir: Path, optim: str, steps: int) -> dict[str, Any]:
    """The configuration of both trainers."""
    return {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "num_generations": GROUP_SIZE,
        "num_iterations": 2,
        "max_completion_length": LONGEST,
        "max_steps": steps,
        "optim": optim,
        "learning_rate": 0.1 if optim == "sgd" else 1e-3,
        "lr_scheduler_type": "constant",
        "shuffle_dataset": False,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": steps,
    }


def run(
    make: Callable[..., Any], config: Callable[..., Any], output_dir: Path, optim: str, steps: int, **extra: Any
) -> tuple[torch.Tensor, float]:
    """Trains one trainer and gives its weights and seconds."""
    trainer = make(
        model=small_qwen3(VOCAB_SIZE),
        reward_funcs=reward,
        args=config(**settings(output_dir, optim, steps), **extra),
        train_dataset=Dataset.from_dict({"prompt": [f"{n}+{n % 7}=" for n in range(200)]}),
        processing_class=byte_tokenizer(),
        rollout_func=Rollouts(),
    )
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    return torch.cat([p.detach().flatten().double() for p in trainer.model.parameters()]), seconds


def learn_task(make: Callable[..., Any], config: Callable[..., Any], parts: Parts, **extra: Any) -> dict[str, float]:
    """Lets a trainer learn the quickstart's task with its own sampling and judges it on the held-out questions."""
    shared = ("output_dir", "seed", "max_steps", "per_device_train_batch_size", "num_generations", "num_iterations")
    shared += ("max_completion_length", "learning_rate", "lr_scheduler_type", "warmup_steps", "use_cpu")
    chosen = {name: getattr(parts.config, name) for name in shared}
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_steps": 50, "bf16": False}
    trainer = make(
        model=copy.deepcopy(parts.model),
        reward_funcs=exact,
        args=config(**chosen, **quiet, **extra),
        train_dataset=parts.train,
        processing_class=parts.tokenizer,
    )
    with CountingAllocator() as memory:
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    longest = parts.config.max_completion_length
    judge = memsafe_rl.GRPOTrainer(
        trainer.model.eval(),
        exact,
        args=memsafe_rl.GRPOConfig(**{**chosen, **quiet}, num_generations_eval=4),
        train_dataset=parts.train,
        eval_dataset=parts.held_out,
        processing_class=parts.tokenizer,
    )
    return {
        "sampled": judge.evaluate()["eval_reward"],
        "greedy": greedy_accuracy(trainer.model, parts.tokenizer, parts.held_out, new_tokens=longest),
        "seconds": seconds,
        "peak_bytes": float(memory.peak_bytes),
    }


def compare_task(seeds: Sequence[int], steps: int, output_dir: Path) -> list[dict[str, Any]]:
    """Runs both trainers on the quickstart's task, one seed after the other, and shows a table."""
    table = Table(title=f"The quickstart's task, {steps} optimizer steps, own sampling")
    for column in ("seed", "trainer", "held out, sampled", "held out, greedy", "seconds", "peak MiB"):
        table.add_column(column)
    records = []
    for seed in seeds:
        parts = small_parts(output_dir / "task", seed, steps, WarmUp())
        rivals: dict[str, Callable[[], dict[str, float]]] = {
            "memsafe_rl": lambda: learn_task(memsafe_rl.GRPOTrainer, memsafe_rl.GRPOConfig, parts),  # noqa: B023
            "TRL": lambda: learn_task(trl.GRPOTrainer, trl.GRPOConfig, parts, gradient_checkpointing=False),  # noqa: B023
        }
        for name, learn in rivals.items():
            found = learn()
            records.append({"seed": seed, "trainer": name, **found})
            shares = (f"{found['sampled']:.1%}", f"{found['greedy']:.1%}")
            table.add_row(str(seed), name, *shares, f"{found['seconds']:.0f}", f"{found['peak_bytes'] / 2**20:.0f}")
    Console().print(table)
    return records


def main() -> None:
    """Runs both comparisons and writes the figures down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--seeds", type=int, nargs="*", default=[], help="also learn the task, with these seeds")
    parser.add_argument("--task-steps", type=int, default=200, help="optimizer steps of the task (default: 200)")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/learning"), help="where the runs write")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/learning.json"))
    arguments = parser.parse_args()
    start = torch.cat([p.detach().flatten().double() for p in small_qwen3(VOCAB_SIZE).parameters()])
    table = Table(title=f"{arguments.steps} optimizer steps, two passes a rollout")
    for column in ("optimizer", "distance travelled", "difference", "difference / distance", "seconds", "TRL seconds"):
        table.add_column(column)
    records = []
    for optim in ("sgd", "adamw_torch"):
        ours, seconds = run(
            memsafe_rl.GRPOTrainer,
            memsafe_rl.GRPOConfig,
            arguments.output_dir / "ours",
            optim,
            arguments.steps,
            vllm_importance_sampling_correction=False,
        )
        theirs, their_seconds = run(
            trl.GRPOTrainer, trl.GRPOConfig, arguments.output_dir / "trl", optim, arguments.steps
        )
        travelled, apart = float((theirs - start).norm()), float((ours - theirs).norm())
        record = {
            "optimizer": optim,
            "steps": arguments.steps,
            "distance_travelled": travelled,
            "difference": apart,
            "relative_difference": apart / travelled,
            "seconds": seconds,
            "trl_seconds": their_seconds,
        }
        records.append(record)
        table.add_row(
            optim,
            f"{travelled:.3g}",
            f"{apart:.3g}",
            f"{apart / travelled:.2g}",
            f"{seconds:.1f}",
            f"{their_seconds:.1f}",
        )
    Console().print(table)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    task = compare_task(arguments.seeds, arguments.task_steps, arguments.output_dir)
    found = {"machine": describe_machine(), "same_rollouts": records, "own_sampling": task}
    arguments.results.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
