"""Learns sums with GRPO in a few minutes on one core, from nothing: `python -m examples.quickstart`.

A small Qwen3 is made on the spot and warmed up with supervision: first on right answers, then on partly wrong ones, so
that it knows how to add and yet answers badly when it is sampled. GRPO then sees only whether an answer is right. A
tenth of the questions, picked by a hash of their text, is never trained on; accuracy is measured on those.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.progress import track
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.tasks import as_dataset, draw_learning_curve, exact, greedy_accuracy, split, sums
from memsafe_rl import GRPOConfig, GRPOTrainer

ANSWER_TOKENS = 4
"""A sign, two digits and the end."""


@dataclass(frozen=True)
class WarmUp:
    """Supervision before GRPO.

    Args:
        right_steps: steps on right answers.
        wrong_steps: steps on partly wrong answers, after those.
        wrong_share: share of wrong answers in them.
        batch: questions a step.
        learning_rate: at its highest; it falls to 0 over all steps.
    """

    right_steps: int = 800
    wrong_steps: int = 150
    wrong_share: float = 0.6
    batch: int = 128
    learning_rate: float = 1.5e-3


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Trains a byte-pair tokenizer of at most 512 tokens, in which every digit is a token of its own.

    Args:
        texts: what it is trained on.

    Returns:
        The tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=512,
            special_tokens=["<pad>", "<eos>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Makes a random Qwen3 of two blocks.

    Args:
        tokenizer: gives the vocabulary.
        seed: of the weights.

    Returns:
        The model, fp32.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def warm_up(
    model: Any, tokenizer: Any, train: Sequence[dict[str, str]], settings: WarmUp, seed: int, loss_of: Any = None
) -> None:
    """Teaches the model to answer: well at first, then partly wrong, so that it knows more than it shows.

    Args:
        model: is changed in place.
        tokenizer: its tokenizer.
        train: mappings with "question" and "answer".
        settings: how long and how wrong.
        seed: of batches and wrong answers.
        loss_of: computes the loss of a batch; None for `answer_loss`.
    """
    draw = random.Random(seed)
    answers = sorted({item["answer"] for item in train})
    steps = settings.right_steps + settings.wrong_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50) * (1 - step / steps))
    model.train()
    for step in track(range(steps), description="Warm-up", transient=True):
        wrong_share = settings.wrong_share if step >= settings.right_steps else 0.0
        batch = draw.choices(train, k=settings.batch)
        labels = [draw.choice(answers) if draw.random() < wrong_share else item["answer"] for item in batch]
        loss = (loss_of or answer_loss)(model, tokenizer, [item["question"] for item in batch], labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def answer_loss(model: Any, tokenizer: Any, questions: Sequence[str], answers: Sequence[str]) -> torch.Tensor:
    """Computes the mean cross-entropy of the answers' tokens, given the questions.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        questions: texts.
        answers: texts; the end token is added.

    Returns:
        A scalar with gradient, nats.
    """
    asked = tokenizer(list(questions))["input_ids"]
    given = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(list(answers))["input_ids"]]
    rows = [torch.tensor(q + a) for q, a in zip(asked, given, strict=True)]
    labels = [torch.tensor([-100] * len(q) + a) for q, a in zip(asked, given, strict=True)]
    ids_BL = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    labels_BL = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    # Padding stands on the right, where a causal model's earlier positions do not see it.
    logits = model(input_ids=ids_BL, attention_mask={"full_attention": None}, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels_BL[:, 1:].flatten())


def small_settings(output_dir: Path, seed: int, steps: int) -> GRPOConfig:
    """Returns the configuration for the small model.

    Args:
        output_dir: folder of the run.
        seed: of the run.
        steps: optimizer steps.

    Returns:
        The configuration.
    """
    return GRPOConfig(
        output_dir=str(output_dir),
        seed=seed,
        max_steps=steps,
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


def named_settings(output_dir: Path, seed: int, steps: int) -> GRPOConfig:
    """Returns the configuration for a pretrained chat model.

    Args:
        output_dir: folder of the run.
        seed: of the run.
        steps: optimizer steps.

    Returns:
        The configuration.
    """
    return GRPOConfig(
        output_dir=str(output_dir),
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=16,
        learning_rate=2e-6,
        warmup_steps=10,
        eval_strategy="steps",
        eval_steps=max(1, steps // 4),
        eval_on_start=True,
        num_generations_eval=2,
        save_steps=steps,
        overwrite_output_dir=True,
        chat_template_kwargs={"enable_thinking": False},
    )


@dataclass(frozen=True)
class Parts:
    """What a trainer is made of.

    Args:
        model: the network, or its name.
        tokenizer: its tokenizer.
        train: prompts and answers to learn from.
        held_out: prompts and answers to be judged by.
        config: settings of the run.
    """

    model: Any
    tokenizer: Any
    train: Dataset
    held_out: Dataset
    config: Any


def small_parts(output_dir: Path, seed: int, steps: int, warming: WarmUp) -> Parts:
    """Makes and warms up the small model; one-digit sums of three terms.

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
    warm_up(model, tokenizer, train, warming, seed)
    train_set, held_out_set = (as_dataset(part, [item["question"] for item in part]) for part in (train, held_out))
    return Parts(model, tokenizer, train_set, held_out_set, small_settings(output_dir, seed, steps))


def named_parts(name: str, output_dir: Path, seed: int, steps: int) -> Parts:
    """Names a pretrained chat model, which the trainer loads and which needs no warm-up; harder sums.

    Args:
        name: of the model on a hub, or its folder.
        output_dir: folder of the run.
        seed: of the run.
        steps: optimizer steps of GRPO.

    Returns:
        The parts.
    """
    train, held_out = split(sums(terms=(3, 5), digits=(2, 3), count=4_000), one_in=20)
    ask = " Reply with the number alone."
    train_set, held_out_set = (
        as_dataset(part, [[{"role": "user", "content": item["question"] + ask}] for item in part])
        for part in (train, held_out)
    )
    # By its name, the trained weights come in float32, whatever the checkpoint holds: bfloat16 would lose the updates.
    return Parts(
        name, AutoTokenizer.from_pretrained(name), train_set, held_out_set, named_settings(output_dir, seed, steps)
    )


def run(parts: Parts, trainer_class: Any = GRPOTrainer, algorithm: str = "GRPO", **further: Any) -> dict[str, float]:
    """Trains and measures before and after.

    Args:
        parts: what a trainer is made of.
        trainer_class: the trainer.
        algorithm: its name in the picture.
        further: further arguments of the trainer.

    Returns:
        Held-out accuracies, 0 to 1.
    """
    trainer = trainer_class(
        parts.model,
        exact,
        args=parts.config,
        train_dataset=parts.train,
        eval_dataset=parts.held_out,
        processing_class=parts.tokenizer,
        **further,
    )

    def greedy() -> float:
        longest = parts.config.max_completion_length
        return greedy_accuracy(trainer.model, parts.tokenizer, parts.held_out, new_tokens=longest)

    before = greedy()
    trainer.train()
    if "eval_reward" not in trainer.state.log_history[-2]:  # the last record holds the run's totals
        trainer.evaluate()
    after = greedy()
    sampled = [record["eval_reward"] for record in trainer.state.log_history if "eval_reward" in record]
    draw_learning_curve(
        trainer.state.log_history,
        Path(parts.config.output_dir) / "learning_curve.png",
        title=f"{algorithm} on sums, {len(parts.held_out)} questions held out",
    )
    return {
        "sampled_before": sampled[0],
        "sampled_after": sampled[-1],
        "greedy_before": before,
        "greedy_after": after,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Runs the example from a command line.

    Args:
        arguments: command line, None for the process's own.

    Returns:
        Held-out accuracies, 0 to 1.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default: 0)")
    parser.add_argument("--model", help="a pretrained chat model in place of the small one, such as Qwen/Qwen3-0.6B")
    parser.add_argument("--steps", type=int, default=800, help="optimizer steps of GRPO (default: 800)")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/quickstart"), help="where files go")
    given = parser.parse_args(arguments)
    started = time.perf_counter()
    place = (given.output_dir, given.seed, given.steps)
    parts = named_parts(given.model, *place) if given.model else small_parts(*place, WarmUp())
    print(f"{len(parts.train)} questions to learn from, {len(parts.held_out)} held out")
    accuracy = run(parts)
    print(f"held-out accuracy    before   after   (seed {given.seed})")
    for way in ("sampled", "greedy"):
        print(f"  {way:18s} {accuracy[f'{way}_before']:6.1%}  {accuracy[f'{way}_after']:6.1%}")
    print(f"{time.perf_counter() - started:.0f} s; checkpoint, metrics.jsonl, learning_curve.png in {given.output_dir}")
    return accuracy


if __name__ == "__main__":
    main()
