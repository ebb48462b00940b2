"""A tiny GRPO run that every trainer test starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from memsafe_rl.config.grpo import GRPOConfig
from memsafe_rl.memory.planning.policies import FixedPolicy
from memsafe_rl.trainers.grpo import GRPOTrainer
from memsafe_rl.trainers.ppo import PPOTrainer
from memsafe_rl.types import RolloutPlan, UpdatePlan
from tests.tiny import tiny_model, tiny_tokenizer

PROMPTS = [f"{a}+{b}=" + " " * (a % 3) for a in range(4) for b in range(4)]


def count_digits(completions: list[str], **_: Any) -> list[float]:
    """Pays for digits: a reward that differs within almost every group of a random model."""
    return [sum(character.isdigit() for character in text) / 4 + len(text) / 50 for text in completions]


def make_trainer(output_dir: Path, *, model: Any = None, policy: Any = None, **settings: Any) -> GRPOTrainer:
    arguments = {name: settings.pop(name) for name in list(settings) if name in ARGUMENTS}
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
    }
    config = GRPOConfig(output_dir=str(output_dir), **{**defaults, **settings})
    given: dict[str, Any] = {
        "reward_funcs": count_digits,
        "train_dataset": Dataset.from_dict({"prompt": PROMPTS}),
        "processing_class": tiny_tokenizer(),
    }
    return GRPOTrainer(
        model=tiny_model() if model is None else model,
        args=config,
        memory_policy=policy,
        **{**given, **arguments},
    )


ARGUMENTS = {
    "reward_funcs",
    "train_dataset",
    "eval_dataset",
    "processing_class",
    "callbacks",
    "optimizers",
    "peft_config",
    "rollout_func",
    "quantization_config",
    "reward_processing_classes",
}


def cut(micro_batch_tokens: int = 8192, rows_in_flight: int = 64, **update: Any) -> FixedPolicy:
    return FixedPolicy(
        RolloutPlan(rows_in_flight=rows_in_flight),
        UpdatePlan(micro_batch_tokens=micro_batch_tokens, **update),
    )


def weights(trainer: GRPOTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double() for p in trainer.model.parameters() if p.requires_grad])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def trained(trainer: PPOTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double() for p in trainer._trained().parameters() if p.requires_grad])


def gradient_of(trainer: PPOTrainer, steps: int = 1) -> torch.Tensor:
    """Gives the gradient of a step, of the policy and of the critic, as it is when weights are about to move."""
    trainer._begin(None)
    for _ in range(steps - 1):
        trainer._train_step()
    trainer._experience = trainer._experience or trainer._roll_out()
    trajectory, rows = trainer._experience.trajectory, trainer._rows()
    terms = trainer._fix_terms(trainer._experience, rows)
    mine = trainer._mine(trajectory, rows)
    trainer._plan_update(trajectory, mine)
    trainer._gradient(trainer._experience, mine, terms)
    return torch.cat([p.grad.flatten().double() for p in trainer._committed.parameters])
