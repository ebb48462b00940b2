"""What the examples share: sums with an exact reward, questions held out by hash, and a picture of what was learnt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from datasets import Dataset
from reasoning_gym import create_dataset, get_score_answer_fn

_SCORE = get_score_answer_fn("chain_sum")


def sums(*, terms: tuple[int, int], digits: tuple[int, int], count: int) -> list[dict[str, str]]:
    """Draws distinct sums, the same ones whatever the run's seed.

    Args:
        terms: least and most numbers in a sum.
        digits: least and most digits of a number.
        count: sums drawn, before repeats are dropped.

    Returns:
        Mappings with "question" and "answer".
    """
    drawn = create_dataset(
        "chain_sum",
        size=count,
        seed=0,
        min_terms=terms[0],
        max_terms=terms[1],
        min_digits=digits[0],
        max_digits=digits[1],
    )
    return [{"question": text, "answer": right} for text, right in {i["question"]: i["answer"] for i in drawn}.items()]


def is_held_out(question: str, one_in: int) -> bool:
    """Tells whether a question is kept from training: a property of its text alone.

    Args:
        question: the text.
        one_in: one question of so many is held out.

    Returns:
        Whether it is.
    """
    return int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big") % one_in == 0


def split(sums: Sequence[dict[str, str]], one_in: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Parts questions into those to learn from and those to be judged by.

    Args:
        sums: mappings with "question".
        one_in: one question of so many is held out.

    Returns:
        Questions for training, questions held out.
    """
    marks = [is_held_out(item["question"], one_in) for item in sums]
    train = [item for item, held_out in zip(sums, marks, strict=True) if not held_out]
    return train, [item for item, held_out in zip(sums, marks, strict=True) if held_out]


def as_dataset(sums: Sequence[dict[str, str]], prompts: Sequence[Any]) -> Dataset:
    """Puts prompts and right answers into a dataset.

    Args:
        sums: mappings with "answer".
        prompts: one prompt each: a text, or a list of chat messages.

    Returns:
        A dataset with the columns "prompt" and "answer".
    """
    return Dataset.from_dict({"prompt": list(prompts), "answer": [item["answer"] for item in sums]})


def exact(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """Pays 1 for the right number and nothing else, 0 for anything else.

    Args:
        completions: texts, or lists of chat messages.
        answer: right answers.

    Returns:
        One reward a completion.
    """
    return [float(is_right(text, right)) for text, right in zip(completions, answer, strict=True)]


def is_right(completion: Any, answer: str) -> bool:
    """Tells whether a completion is the right number; reasoning-gym's own score decides.

    Args:
        completion: a text, or a list of chat messages.
        answer: the right answer.

    Returns:
        Whether it is.
    """
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return bool(_SCORE(answer=text.strip(), entry={"answer": answer}) >= 1.0)


@torch.inference_mode()
def greedy_accuracy(model: Any, tokenizer: Any, dataset: Dataset, *, new_tokens: int, batch: int = 128) -> float:
    """Answers every question with the likeliest tokens.

    Args:
        model: a causal language model, or an encoder-decoder.
        tokenizer: its tokenizer.
        dataset: "prompt" and "answer".
        new_tokens: longest answer, in tokens.
        batch: questions answered together.

    Returns:
        Share of right answers, 0 to 1.
    """
    right = 0
    for rows in dataset.iter(batch):
        texts = [prompt if isinstance(prompt, str) else _chat(tokenizer, prompt) for prompt in rows["prompt"]]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
        ids = model.generate(
            **inputs.to(model.device), max_new_tokens=new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
        first = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
        answers = tokenizer.batch_decode(ids[:, first:], skip_special_tokens=True)
        right += sum(map(is_right, answers, rows["answer"]))
    return right / len(dataset)


def _chat(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    return str(text)


LEARNT = (("training reward", "reward", "-"), ("held out, sampled", "eval_reward", "o-"))
"""What is drawn of a run, unless it is told otherwise: label, name in the log, style of the line."""


def draw_learning_curve(
    log: Sequence[dict[str, float]], path: Path, *, title: str, lines: Sequence[tuple[str, str, str]] = LEARNT
) -> None:
    """Draws reward and held-out accuracy over optimizer steps.

    Args:
        log: `trainer.state.log_history`.
        path: picture to write.
        title: stands above the picture.
        lines: label, name in the log and style of each line.
    """
    mpl.use("Agg")
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, key, style in lines:
        points = [(record["step"], record[key]) for record in log if key in record]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name)
    axes.set(xlabel="optimizer step", ylabel="share of right answers", ylim=(0, 1), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
