"""Learns sums with PPO in a few minutes on one core: `python -m examples.qwen_ppo`.

The task of the quickstart, with one answer to a question instead of eight: a critic foresees how often the model is
right, and each token of an answer is judged by what it changes in that. The critic is a head on the model's own hidden
states; `--critic adapter` gives it a second LoRA adapter (the model is then trained by one too), `--critic model` a
network of its own of a quarter of the size. `--t5` takes an encoder-decoder in place of the Qwen3.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from peft import LoraConfig

from examples import quickstart, t5_sums
from examples.quickstart import ANSWER_TOKENS, Parts, WarmUp, run
from memsafe_rl import PPOConfig, PPOTrainer


def settings(output_dir: Path, seed: int, steps: int) -> PPOConfig:
    """Returns the configuration.

    Args:
        output_dir: folder of the run.
        seed: of the run.
        steps: optimizer steps.

    Returns:
        The configuration.
    """
    return PPOConfig(
        output_dir=str(output_dir),
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=256,
        num_iterations=2,
        max_completion_length=ANSWER_TOKENS,
        learning_rate=5e-4,
        lr_scheduler_type="linear",
        warmup_steps=10,
        vf_coef=0.5,
        kl_coef=0.01,
        eval_strategy="steps",
        eval_steps=max(1, steps // 8),
        eval_on_start=True,
        num_generations_eval=4,
        save_steps=steps,
        overwrite_output_dir=True,
        use_cpu=True,
    )


def critic_of(kind: str, parts: Parts) -> dict[str, Any]:
    """Returns the trainer's arguments for a kind of critic.

    Args:
        kind: "trunk", "adapter" or "model".
        parts: what the trainer is made of.

    Returns:
        Named arguments.
    """
    if kind == "adapter":
        return {"critic": "adapter", "peft_config": LoraConfig(r=16, target_modules="all-linear")}
    if kind == "model":
        config = copy.deepcopy(parts.model.config)
        config.hidden_size, config.intermediate_size = 32, 96
        return {"critic": type(parts.model)(config)}
    return {}


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Runs the example from a command line.

    Args:
        arguments: command line, None for the process's own.

    Returns:
        Held-out accuracies, 0 to 1.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default: 0)")
    parser.add_argument("--critic", choices=("trunk", "adapter", "model"), default="trunk", help="(default: trunk)")
    parser.add_argument("--t5", action="store_true", help="an encoder-decoder in place of the Qwen3")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of PPO (default: 400)")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/qwen_ppo"), help="where files go")
    given = parser.parse_args(arguments)
    if given.t5 and given.critic == "model":
        parser.error("--critic model is a small Qwen3, made for the Qwen3; leave --t5 out")
    started = time.perf_counter()
    make = t5_sums.small_parts if given.t5 else quickstart.small_parts
    parts = make(given.output_dir, given.seed, given.steps, WarmUp())
    parts = replace(parts, config=settings(given.output_dir, given.seed, given.steps))
    accuracy = run(parts, PPOTrainer, "PPO", **critic_of(given.critic, parts))
    questions = len(parts.held_out)
    print(f"held-out accuracy, {questions} questions    before   after   (seed {given.seed}, critic: {given.critic})")
    for way in ("sampled", "greedy"):
        print(f"  {way:30s} {accuracy[f'{way}_before']:6.1%}  {accuracy[f'{way}_after']:6.1%}")
    print(f"{time.perf_counter() - started:.0f} s; checkpoint, metrics.jsonl, learning_curve.png in {given.output_dir}")
    return accuracy


if __name__ == "__main__":
    main()
