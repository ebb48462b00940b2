"""A tiny GRPO run that every trainer test starts from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
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
    "environment_factory",
    "tools",
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


def rewire(trainer: Any, part: str, name: str, wrap: Callable[[Any], Any]) -> None:
    """Wraps a method of a part that the loop builds anew whenever its setup changes."""

    def wrapped() -> None:
        override(attrgetter(part)(trainer.loop), name, wrap)

    def used(use: Any, setup: Any) -> None:
        use(setup)
        wrapped()

    override(trainer.loop, "use", lambda use: partial(used, use))
    wrapped()


def override(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Wraps a method by a class of its own: a wrapper on the object would hold on to it, and to all that it holds."""
    kind = type(owner)
    method = getattr(kind, name)

    def wrapped(self: Any, *arguments: Any, **named: Any) -> Any:
        bound = method.fget(self) if isinstance(method, property) else partial(method, self)
        return wrap(bound)(*arguments, **named)

    owner.__class__ = type(kind.__name__, (kind,), {name: wrapped})


def trained(trainer: PPOTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double() for p in trainer.setup.trained.parameters() if p.requires_grad])


def gradient_of(trainer: PPOTrainer, steps: int = 1) -> torch.Tensor:
    """Returns the gradient of a step, of the policy and of the critic, as it is when weights are about to move."""
    trainer.loop.begin(None)
    trainer.loop.files.folder.release()
    for _ in range(steps - 1):
        trainer.loop.step()
    trainer.loop.state.rollout = trainer.loop.state.rollout or trainer.loop.collect()
    return gradient_under(trainer)


def gradient_under(trainer: PPOTrainer, policy: FixedPolicy | None = None) -> torch.Tensor:
    """Returns the gradient of the step that comes next, cut by another policy than the trainer's where one is given."""
    state, learner = trainer.loop.state, trainer.loop.learner
    trajectory = state.rollout.trajectory
    rows = trajectory.rows_of(learner.step_samples(state.cursor))
    terms = learner.terms(state.rollout, rows, state.controllers)
    mine = learner.local_rows(trajectory, rows)
    learner.plan(trajectory, mine)
    if policy is not None:
        plan = policy.before_update(learner.work(trajectory, mine), trainer.setup.memory_state())
        trainer.setup.memory.adopt(plan, UpdatePlan)
    trainer.setup.committed.drop_gradients()
    learner.gradient(state.rollout, mine, terms, step=trainer.state.global_step)
    return torch.cat([p.grad.flatten().double() for p in trainer.setup.committed.parameters])
