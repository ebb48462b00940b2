"""Methods of TRL's and transformers' trainers that a subclass may replace here, and why it may not replace the others.

A script written for TRL often derives from its trainer. What such a subclass replaces is called where TRL would call
it, or refused when the class is made: never left out in silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from memsafe_rl.errors import ConfigError, DataError, texts_beside
from memsafe_rl.rewards.runner import Attempt, PendingScores, RewardScores, run_once
from memsafe_rl.training.metrics.run_log import Hooks
from memsafe_rl.training.optim.optimizer import build_scheduler, given_optimizers

INSTEAD = {name: entry["instead"] for entry in texts_beside(__file__, "instead.yaml") for name in entry["names"]}
"""By method or attribute that TRL's trainer has and ours lacks: what to do instead."""

_GIVEN = ("prompt", "completion", "completion_ids")
_METADATA = frozenset({"_name", "_paper", "_tag_names", "_template_file", "_send_telemetry"})


def refuse_ignored(cls: type, ours: type) -> None:
    """Refuses, by a TypeError, a subclass with a method that TRL's trainer would call and ours has no step for."""
    for name in sorted((INSTEAD.keys() | (set(dir(Trainer)) - set(dir(ours)))) - _METADATA):
        own = inspect.getattr_static(cls, name, None)
        if own is not inspect.getattr_static(ours, name, None) and not isinstance(own, type):
            reason = INSTEAD.get(name, "the loop has no such step")
            raise TypeError(f"{cls.__name__}.{name} would never be called: {reason}.")


def _replaces(trainer: Any, ours: type, name: str) -> bool:
    """Returns whether a trainer's class has a method of its own in place of ours."""
    return inspect.getattr_static(type(trainer), name) is not inspect.getattr_static(ours, name)


def hooks_of(trainer: Any, ours: type) -> Hooks:
    """Returns the loop those steps that a trainer's class does in its own way."""
    own = partial(_replaces, trainer, ours)

    def made(name: str, given: Any, kept: str) -> Any:
        found = getattr(trainer, kept) if given is None else given
        if found is None:
            raise ConfigError(
                f"{type(trainer).__name__}.{name} makes nothing. Return what it makes, or set self.{kept}."
            )
        return found

    def create_optimizer(_max_steps: int) -> None:
        trainer.optimizer = made("create_optimizer", trainer.create_optimizer(), "optimizer")

    def create_scheduler(optimizer: torch.optim.Optimizer, _config: Any, max_steps: int) -> Any:
        given = made("create_scheduler", trainer.create_scheduler(max_steps, optimizer), "lr_scheduler")
        trainer.lr_scheduler = None  # a later call of train() makes another
        return given_optimizers((None, given))[1]

    def save_model(folder: Path) -> None:
        trainer.save_model(str(folder), _internal_call=True)

    both = trainer.create_optimizer_and_scheduler if own("create_optimizer_and_scheduler") else None
    return Hooks(
        create_optimizers=both or (create_optimizer if own("create_optimizer") else None),
        create_scheduler=create_scheduler if own("create_scheduler") else build_scheduler,
        evaluate=trainer.evaluate if own("evaluate") else None,
        log=trainer.log if own("log") else None,
        save_model=save_model if own("save_model") else None,
    )


class OwnRewards:
    """The `_calculate_rewards` of a trainer's class as the rewards of its runs."""

    def __init__(self, trainer: Any, calculate: Callable[..., Any], ours: type) -> None:
        self._trainer, self._calculate = trainer, calculate
        self._scores: RewardScores | None = None
        self._attempt: Attempt = run_once
        if _replaces(trainer, ours, "_calculate_rewards"):
            trainer.rewards.calculate = self

    def call_functions(self, inputs: Sequence[Mapping[str, Any]], *rows: Sequence[Any]) -> Tensor:
        """Calls the reward functions themselves on prompts, completions and ids, (B, F), and keeps what they logged."""
        columns = {name: [row[name] for row in inputs] for name in inputs[0] if name not in _GIVEN}
        state, attempt = self._trainer.state, self._attempt
        self._scores = self._trainer.rewards.call_each(*rows, columns, state, attempt).result()
        return self._scores.rewards_BF

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Any],
        trainer_state: Any,  # noqa: ARG002
        attempt: Attempt,
    ) -> PendingScores:
        """Has the trainer's class reward all rows, and checks what it gives."""
        names, rows = self._trainer.rewards.names, range(len(prompts))
        if not rows:  # of an evaluation with fewer rows than ranks; a user's method may look at the first one
            return PendingScores(partial(RewardScores, torch.zeros(0, len(names)), names))
        inputs = [{"prompt": prompts[row], **{name: values[row] for name, values in columns.items()}} for row in rows]
        self._scores, self._attempt = None, attempt
        found = self._calculate(inputs, prompts, completions, completion_ids)
        if not isinstance(found, Tensor) or found.shape != (len(prompts), len(names)):
            given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise DataError(
                f"{type(self._trainer).__name__}._calculate_rewards returned {given} for {len(prompts)} completions "
                f"and {len(names)} reward functions. Return a tensor ({len(prompts)}, {len(names)}), NaN for no reward."
            )
        rewards_BF = found.detach().to("cpu", torch.float32)
        for row in rewards_BF.isinf().any(1).nonzero()[:, 0].tolist():
            raise DataError(
                f"{type(self._trainer).__name__}._calculate_rewards returned {rewards_BF[row].tolist()} for row {row} "
                f"of {len(prompts)}. Bound the rewards, or give NaN for no reward."
            )
        scores = replace(self._scores or RewardScores(rewards_BF, names), rewards_BF=rewards_BF)
        return PendingScores(lambda: scores, lambda: None)
