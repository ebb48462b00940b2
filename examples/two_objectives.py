"""Learns two things that are in each other's way, in minutes on one core: `python -m examples.two_objectives`.

Half of the questions are sums; the other half are sums with a hole in them, "3 + ? - 5 =", which have no answer. The
objective `truth` pays the right number for the former, `honesty` pays "?" for the latter, and neither has an opinion of
the other's questions. A small Qwen3 is warmed up until it adds well, and then muddled, so that it answers either kind
with a number or with "?" as if by the toss of a coin. From there, whatever makes "?" rarer is good for the one and bad
for the other, until the model looks for the hole.

Each objective has its own advantages, its own KL to the start with its own beta, and its own gradient; CAGrad merges
the two once per optimizer step. A tenth of the questions, picked by a hash of their text, is never trained on.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from examples.quickstart import ANSWER_TOKENS, WarmUp, make_model, make_tokenizer, warm_up
from examples.tasks import draw_learning_curve, is_right, split, sums
from memsafe_rl import GRPOConfig, GRPOTrainer

UNKNOWN = "?"
OBJECTIVES: dict[str, dict[str, Any]] = {
    "truth": {"rewards": ["right_number"], "beta": 0.01, "kl_band": [0.05, 0.5], "adaptive_beta": True},
    "honesty": {"rewards": ["admits_not_knowing"], "beta": 0.01, "kl_band": [0.05, 0.5], "adaptive_beta": True},
}
CURVES = tuple(
    line
    for name in OBJECTIVES
    for line in (
        (f"{name}, training", f"objectives/{name}/reward", "-"),
        (f"{name}, held out", f"eval_objectives/{name}/reward", "o-"),
    )
)


def right_number(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float | None]:
    """Pays 1 for the right number; has no opinion where there is none.

    Args:
        completions: texts.
        answer: right answers, "?" for a question with a hole.

    Returns:
        One reward a completion.
    """
    pairs = zip(completions, answer, strict=True)
    return [None if right == UNKNOWN else float(is_right(text, right)) for text, right in pairs]


def admits_not_knowing(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float | None]:
    """Pays 1 for "?" where nobody can know; has no opinion of the other questions.

    Args:
        completions: texts.
        answer: right answers, "?" for a question with a hole.

    Returns:
        One reward a completion.
    """
    pairs = zip(completions, answer, strict=True)
    return [float(text.strip() == UNKNOWN) if right == UNKNOWN else None for text, right in pairs]


def with_holes(items: Sequence[dict[str, str]], seed: int) -> list[dict[str, str]]:
    """Takes a number out of every other question.

    Args:
        items: mappings with "question" and "answer".
        seed: of which number.

    Returns:
        As many mappings; the answer to a question with a hole is "?".
    """
    draw, found = random.Random(seed), []
    for place, item in enumerate(items):
        if place % 2 == 0:
            found.append(item)
            continue
        numbers = list(re.finditer(r"\d+", item["question"]))
        start, end = draw.choice(numbers).span()
        found.append({"question": item["question"][:start] + UNKNOWN + item["question"][end:], "answer": UNKNOWN})
    return found


def muddled(items: Sequence[dict[str, str]], seed: int) -> list[dict[str, str]]:
    """Mixes up what to say: every question comes with its answer, and with what would fit the other kind.

    Args:
        items: mappings with "question" and "answer".
        seed: of the numbers that stand for an unknown one.

    Returns:
        Twice as many mappings.
    """
    draw = random.Random(seed)
    numbers = [item["answer"] for item in items if item["answer"] != UNKNOWN]
    others = [draw.choice(numbers) if item["answer"] == UNKNOWN else UNKNOWN for item in items]
    return [*items, *({**item, "answer": other} for item, other in zip(items, others, strict=True))]


def settings(output_dir: Path, seed: int, steps: int, merge: str) -> GRPOConfig:
    """Returns the configuration.

    Args:
        output_dir: folder of the run.
        seed: of the run.
        steps: optimizer steps.
        merge: how the two gradients become one.

    Returns:
        The configuration.
    """
    return GRPOConfig(
        output_dir=str(output_dir),
        seed=seed,
        max_steps=steps,
        objectives=OBJECTIVES,
        gradient_merge=merge,
        per_device_train_batch_size=256,
        num_generations=8,
        num_iterations=2,
        max_completion_length=ANSWER_TOKENS,
        learning_rate=3e-4,
        lr_scheduler_type="linear",
        warmup_steps=10,
        eval_strategy="steps",
        eval_steps=max(1, steps // 8),
        eval_on_start=True,
        num_generations_eval=4,
        save_steps=steps,
        overwrite_output_dir=True,
        use_cpu=True,
    )


@dataclass(frozen=True)
class Parts:
    """What a trainer is made of.

    Args:
        model: the network.
        tokenizer: its tokenizer.
        train: prompts and answers to learn from.
        held_out: prompts and answers to be judged by.
        config: settings of the run.
    """

    model: Any
    tokenizer: Any
    train: Dataset
    held_out: Dataset
    config: GRPOConfig


def make_parts(config: GRPOConfig, adding: WarmUp, muddling: WarmUp) -> Parts:
    """Makes the questions and a model that knows more than it shows.

    Args:
        config: settings of the run; the seed is that of everything random.
        adding: supervision on right answers.
        muddling: supervision on mixed-up ones, after it.

    Returns:
        The parts.
    """
    torch.set_num_threads(1)  # a model this small gains nothing from a second one, and results repeat anywhere
    train, held_out = split(with_holes(sums(terms=(3, 3), digits=(1, 1), count=20_000), seed=0), one_in=10)
    tokenizer = make_tokenizer([item["question"] for item in train])
    model = make_model(tokenizer, config.seed)
    warm_up(model, tokenizer, train, adding, config.seed)
    warm_up(model, tokenizer, muddled(train, config.seed), muddling, config.seed)
    train_set, held_out_set = (
        Dataset.from_dict({"prompt": [item["question"] for item in part], "answer": [item["answer"] for item in part]})
        for part in (train, held_out)
    )
    return Parts(model, tokenizer, train_set, held_out_set, config)


@dataclass(frozen=True)
class Gain:
    """How far an objective has come on held-out questions.

    Args:
        before: mean reward before the run.
        after: mean reward after it.
        questions: how many it is taken over, a few samples each.
    """

    before: float
    after: float
    questions: int

    @property
    def standard_errors(self) -> float:
        """The gain over its standard error, as if the samples of a question were one: rather too small."""
        variance = sum(share * (1 - share) for share in (self.before, self.after)) / self.questions
        return (self.after - self.before) / math.sqrt(max(variance, 1e-12))


def run(parts: Parts) -> dict[str, Gain]:
    """Trains, and judges before and after.

    Args:
        parts: what a trainer is made of.

    Returns:
        What was gained, by objective.
    """
    trainer = GRPOTrainer(
        parts.model,
        [right_number, admits_not_knowing],
        args=parts.config,
        train_dataset=parts.train,
        eval_dataset=parts.held_out,
        processing_class=parts.tokenizer,
    )
    trainer.train()
    log = trainer.state.log_history
    draw_learning_curve(
        log,
        Path(parts.config.output_dir) / "learning_curve.png",
        title=f"Two objectives merged by {parts.config.gradient_merge}, {len(parts.held_out)} questions held out",
        lines=CURVES,
    )
    holes = sum(answer == UNKNOWN for answer in parts.held_out["answer"])
    questions = {"truth": len(parts.held_out) - holes, "honesty": holes}
    first, *_, last = [record for record in log if "eval_reward" in record]

    def gain(name: str) -> Gain:
        held_out = f"eval_objectives/{name}/reward"
        return Gain(first[held_out], last[held_out], questions[name])

    return {name: gain(name) for name in OBJECTIVES}


def main(arguments: Sequence[str] | None = None) -> dict[str, Gain]:
    """Runs the example from a command line.

    Args:
        arguments: command line, None for the process's own.

    Returns:
        What was gained, by objective.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default: 0)")
    parser.add_argument("--merge", default="cagrad", choices=("sum", "pcgrad", "cagrad"), help="how gradients merge")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of GRPO (default: 400)")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/two_objectives"), help="where files go")
    given = parser.parse_args(arguments)
    started = time.perf_counter()
    config = settings(given.output_dir, given.seed, given.steps, given.merge)
    parts = make_parts(config, WarmUp(800, 0), WarmUp(150, 0))
    print(f"{len(parts.train)} questions to learn from, {len(parts.held_out)} held out")
    gains = run(parts)
    print(f"held-out reward   before   after   gain over its standard error   (seed {given.seed}, {given.merge})")
    for name, gain in gains.items():
        print(f"  {name:14s} {gain.before:7.1%} {gain.after:7.1%}   {gain.standard_errors:.1f}")
    print(f"{time.perf_counter() - started:.0f} s; checkpoint, metrics.jsonl, learning_curve.png in {given.output_dir}")
    return gains


if __name__ == "__main__":
    main()
