"""A real TRL trainer on a tiny random model, and one optimizer step's batch in its form and in ours."""

from __future__ import annotations

import math
import tempfile
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from memsafe_rl.ops.logprobs import pad_rows, token_logprobs
from memsafe_rl.types import Denominators, LinearHead, LossInputs, LossSettings, TokenDistribution
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer

TEMPERATURE = 0.9
MAX_LENGTH = 11
PROMPT_LENGTHS, LENGTHS = (3, 5, 2, 4, 5, 1), (7, 3, 1, 9, 4, 6)
TRUNCATED_ROW = 4
PROMPT_WIDTH, WIDTH = max(PROMPT_LENGTHS), max(LENGTHS)


def trl_trainer(**config: Any) -> GRPOTrainer:
    """Builds TRL's trainer around a fresh copy of the tiny model, as a script would, with one micro-batch a step."""
    folder = tempfile.mkdtemp()
    arguments = GRPOConfig(
        **{
            "output_dir": folder,
            "per_device_train_batch_size": len(LENGTHS),
            "num_generations": 2,
            "max_completion_length": MAX_LENGTH,
            "temperature": TEMPERATURE,
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "disable_dropout": True,
            **config,
        }
    )
    trainer = GRPOTrainer(
        model=tiny_model("qwen3", hidden=16),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * len(LENGTHS)}),
        processing_class=tiny_tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def step_batch(model: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Makes a step in TRL's form: old, reference and sampler's log-probs around the model's own, one row masked."""
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(2, VOCAB_SIZE, (len(LENGTHS), PROMPT_WIDTH), generator=generator)
    completions = torch.randint(2, VOCAB_SIZE, (len(LENGTHS), WIDTH), generator=generator)
    prompt_mask = (torch.arange(PROMPT_WIDTH) >= PROMPT_WIDTH - torch.tensor(PROMPT_LENGTHS)[:, None]).long()
    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).long()
    mask[TRUNCATED_ROW] = 0
    batch = {
        "prompt_ids": prompts * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": completions * mask,
        "completion_mask": mask,
        "advantages": torch.tensor([1.3, -0.7, 0.4, -1.1, 0.9, -0.2], dtype=dtype),
        "num_items_in_batch": mask.sum(),
    }
    with torch.no_grad():
        logprobs, _ = our_scores(model, batch)

    def around(width: float, row_gaps: Tensor | float = 0.0) -> Tensor:
        noise = width * (torch.rand(logprobs.shape, generator=generator, dtype=torch.float64) - 0.5)
        return (logprobs - (noise + row_gaps).clamp(math.log(0.5), math.log(1.5)).to(dtype)) * mask

    # Ratios from 0.5 to 1.5 of tokens and of rows alike, on both sides for both signs of the advantage.
    row_gaps = torch.tensor([0.35, 0.35, -0.55, -0.5, 0.1, 0.2], dtype=torch.float64)[:, None]
    batch["old_per_token_logps"] = around(0.4, row_gaps)
    batch["ref_per_token_logps"] = around(1.0)
    batch["sampling_per_token_logps"] = around(0.6)
    return batch


def distribution(model: Any, batch: dict[str, Tensor], rows: list[int] | None = None) -> TokenDistribution:
    """Runs the model's trunk over some rows, as an adapter would."""
    rows = list(range(len(batch["prompt_ids"]))) if rows is None else rows
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)[rows]
    attended = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)[rows]
    hidden = model.model(input_ids=ids, attention_mask=attended, use_cache=False).last_hidden_state
    lengths = tuple(LENGTHS[row] for row in rows)
    states = [hidden[i, PROMPT_WIDTH - 1 : PROMPT_WIDTH - 1 + length] for i, length in enumerate(lengths)]
    tokens = [batch["completion_ids"][row, : LENGTHS[row]] for row in rows]
    return TokenDistribution(torch.cat(states), torch.cat(tokens), lengths, LinearHead(model.lm_head.weight))


def our_scores(
    model: Any, batch: dict[str, Tensor], rows: list[int] | None = None, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Returns our log-probs and entropies, padded."""
    scored = distribution(model, batch, rows)
    logprobs, entropies = token_logprobs(scored, temperature=TEMPERATURE, tile=4, with_entropy=with_entropy)
    return pad_rows(logprobs, scored.lengths), None if entropies is None else pad_rows(entropies, scored.lengths)


def our_inputs(
    model: Any, batch: dict[str, Tensor], settings: LossSettings, rows: list[int] | None = None, **extra: Any
) -> LossInputs:
    """Returns the same step, or some rows of it, as our loss takes it."""
    chosen = list(range(len(LENGTHS))) if rows is None else rows
    width = max(LENGTHS[row] for row in chosen)

    def cut(name: str) -> Tensor:
        value = batch[name][chosen]
        return value[:, :width] if value.shape[1:] == (WIDTH,) else value

    logprobs, entropies = our_scores(model, batch, rows, with_entropy=True)
    given = {name: value[chosen][:, :width] for name, value in extra.items() if isinstance(value, Tensor)}
    return LossInputs(
        logprobs_BT=logprobs,
        advantages_B=cut("advantages"),
        mask_BT=cut("completion_mask").to(logprobs.dtype),
        old_logprobs_BT=cut("old_per_token_logps") if "old_per_token_logps" in batch else None,
        ref_logprobs_BT=cut("ref_per_token_logps") if settings.beta else None,
        entropies_BT=entropies,
        **{**extra, **given},
    )


def counts_of(batch: dict[str, Tensor], active: Tensor | None = None) -> Denominators:
    """Counts the whole step."""
    mask = batch["completion_mask"]
    return Denominators(len(mask), int(mask.sum()), int((mask if active is None else mask * active).sum()))


def gradient_of(loss: Tensor, model: Any) -> Tensor:
    """Returns the gradient of all parameters as one vector."""
    parameters = list(model.parameters())
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(grads, parameters, strict=True)
    return torch.cat([(torch.zeros_like(value) if grad is None else grad).flatten() for grad, value in pairs])


def distance(actual: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference over the norm of what is expected."""
    return float((actual - expected).norm() / expected.norm())
