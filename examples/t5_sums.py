"""Learns sums with GRPO and an encoder-decoder in a few minutes on one core: `python -m examples.t5_sums`.

The task of the quickstart for a small T5: its encoder reads a question once for all answers to it, its decoder draws
them. The warm-up leaves it answering badly when it is sampled; GRPO sees only whether an answer is right. With
`--model google/flan-t5-small` (where a hub can be reached) a pretrained one learns longer sums in its place.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

from examples.quickstart import Parts, WarmUp, make_tokenizer, run, small_settings, warm_up
from examples.tasks import as_dataset, split, sums
from memsafe_rl import GRPOConfig


def make_model(tokenizer: Any, seed: int) -> T5ForConditionalGeneration:
    """Makes a random T5 of two blocks to a stack.

    Args:
        tokenizer: gives the vocabulary.
        seed: of the weights.

    Returns:
        The model, fp32.
    """
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=512,
        d_model=64,
        d_kv=16,
        d_ff=192,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    return T5ForConditionalGeneration(config)


def answer_loss(model: Any, tokenizer: Any, questions: Sequence[str], answers: Sequence[str]) -> torch.Tensor:
    """Computes the mean cross-entropy of the answers' tokens, given the questions.

    Args:
        model: an encoder-decoder.
        tokenizer: its tokenizer.
        questions: texts.
        answers: texts; the end token is added.

    Returns:
        A scalar with gradient, nats.
    """
    asked = tokenizer(list(questions), return_tensors="pt", padding=True, return_token_type_ids=False)
    given = [torch.tensor([*ids, tokenizer.eos_token_id]) for ids in tokenizer(list(answers))["input_ids"]]
    labels_BL = torch.nn.utils.rnn.pad_sequence(given, batch_first=True, padding_value=-100)
    loss: torch.Tensor = model(**asked, labels=labels_BL).loss
    return loss


def small_parts(output_dir: Path, seed: int, steps: int, warming: WarmUp) -> Parts:
    """Makes and warms up the small T5; one-digit sums of three terms.

    Args:
        output_dir: folder of the run.
        seed: of everything random.
        steps: optimizer steps of GRPO.
        warming: supervision before them.

    Returns:
        The parts.
    """
    torch.set_num_threads(1)  # a model this small gains nothing from a second one, and results repeat anywhere
    train, held_out = split(sums(terms=(3, 3), digits=(1, 1), count=20_000), one_in=10)
    tokenizer = make_tokenizer([item["question"] for item in train])
    model = make_model(tokenizer, seed)
    warm_up(model, tokenizer, train, warming, seed, answer_loss)
    train_set, held_out_set = (as_dataset(part, [item["question"] for item in part]) for part in (train, held_out))
    return Parts(model, tokenizer, train_set, held_out_set, small_settings(output_dir, seed, steps))


def named_parts(name: str, output_dir: Path, seed: int, steps: int) -> Parts:
    """Names a pretrained encoder-decoder, which the trainer loads and which needs no warm-up; sums of two terms.

    Args:
        name: of the model on a hub, or its folder.
        output_dir: folder of the run.
        seed: of the run.
        steps: optimizer steps of GRPO.

    Returns:
        The parts.
    """
    train, held_out = split(sums(terms=(2, 2), digits=(1, 2), count=4_000), one_in=20)
    train_set, held_out_set = (as_dataset(part, [item["question"] for item in part]) for part in (train, held_out))
    config = GRPOConfig(
        output_dir=str(output_dir),
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=8,
        learning_rate=2e-5,
        warmup_steps=10,
        eval_strategy="steps",
        eval_steps=max(1, steps // 4),
        eval_on_start=True,
        num_generations_eval=2,
        save_steps=steps,
        overwrite_output_dir=True,
    )
    return Parts(name, AutoTokenizer.from_pretrained(name), train_set, held_out_set, config)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Runs the example from a command line.

    Args:
        arguments: command line, None for the process's own.

    Returns:
        Held-out accuracies, 0 to 1.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default: 0)")
    parser.add_argument("--model", help="a pretrained encoder-decoder in place of the small one")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of GRPO (default: 400)")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/t5_sums"), help="where files go")
    given = parser.parse_args(arguments)
    started = time.perf_counter()
    place = (given.output_dir, given.seed, given.steps)
    parts = named_parts(given.model, *place) if given.model else small_parts(*place, WarmUp())
    accuracy = run(parts)
    questions = len(parts.held_out)
    print(f"held-out accuracy, {questions} questions    before   after   (seed {given.seed})")
    for way in ("sampled", "greedy"):
        print(f"  {way:30s} {accuracy[f'{way}_before']:6.1%}  {accuracy[f'{way}_after']:6.1%}")
    print(f"{time.perf_counter() - started:.0f} s; checkpoint, metrics.jsonl, learning_curve.png in {given.output_dir}")
    return accuracy


if __name__ == "__main__":
    main()
