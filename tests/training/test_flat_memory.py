"""Nothing is held longer than its step: live bytes stay flat to the byte, and what a user leaks is named."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.trainers.grpo import GRPOTrainer
from memsafe_rl.types import Component
from tests.tiny import tiny_model
from tests.trainers.helpers import PROMPTS, count_digits, cut, make_trainer

ON_DEVICE = cut(24, 3, trajectory_device="device")
LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.fixture
def device() -> Iterator[SimulatedMemory]:
    gc.collect()  # what another test leaked is no suspect here
    with SimulatedMemory() as memory:
        yield memory


def held_after_steps(trainer: GRPOTrainer, device: SimulatedMemory) -> list[dict[Component, int]]:
    """Trains; gives live bytes by component when each step's callbacks, evaluation and checkpoint are over."""
    held: list[dict[Component, int]] = []
    finish = trainer.loop.finish_step

    def finished(metrics: dict[str, float]) -> None:
        finish(metrics)
        held.append({component: size for component, size in device.live_by_component().items() if size})

    trainer.loop.finish_step = finished  # type: ignore[method-assign]
    trainer.train()
    return held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        pytest.param({}, 101, marks=pytest.mark.slow),
        ({"num_iterations": 2, "peft_config": None, "policy": ON_DEVICE}, 41),
    ],
)
def test_live_bytes_are_flat_over_many_steps(
    tmp_path: Path, device: SimulatedMemory, settings: dict[str, Any], steps: int
) -> None:
    trainer = make_trainer(
        tmp_path,
        model=tiny_model(layers=1, scale=4.0),
        per_device_train_batch_size=4,
        max_completion_length=3,
        beta=0.1,
        max_steps=steps,
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS[:1]}),
        eval_strategy="steps",
        eval_steps=20,
        save_strategy="steps",
        save_steps=40,
        save_total_limit=1,
        **{"peft_config": LORA, **settings},
    )
    held = held_after_steps(trainer, device)
    assert len(held) == steps
    between = [set(components) - {Component.TRAJECTORY} for components in held]
    assert all(names == {Component.WEIGHTS, Component.OPTIMIZER} for names in between[1:])
    assert all(len({components[name] for components in held[1:]}) == 1 for name in between[-1])
    used_up = held[1 :: settings.get("num_iterations", 1)]
    assert all(Component.TRAJECTORY not in components for components in used_up)
    assert not [event for event in trainer.memory_events if event.get("kind") == "leak"]


class KeepsLosses(TrainerCallback):
    """Watches a loss of its own and forgets to detach it."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        ids = torch.arange(2, 10).reshape(2, 4)
        self.losses.append(model(input_ids=ids, labels=ids).loss)


class KeepsScores:
    """A reward with a network of its own, which remembers what it gave."""

    __name__ = "keeps_scores"

    def __init__(self) -> None:
        self.network = torch.nn.Linear(50, 1)
        self.scores: list[torch.Tensor] = []

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        scores = self.network(torch.rand(len(completions), 50)).sigmoid().flatten()
        self.scores.append(scores)
        return [digits + score for digits, score in zip(count_digits(completions), scores.tolist(), strict=True)]


def alarm_of(trainer: GRPOTrainer) -> dict[str, Any]:
    trainer.train()
    (alarm,) = (event for event in trainer.memory_events if event.get("kind") == "leak")
    return dict(alarm)


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_loss_that_a_callback_forgets_to_detach_is_named_by_the_fifth_step(
    tmp_path: Path, device: SimulatedMemory, caplog: pytest.LogCaptureFixture, epochs: int
) -> None:
    leak = KeepsLosses()
    alarm = alarm_of(make_trainer(tmp_path, max_steps=7, num_iterations=epochs, callbacks=[leak]))
    assert (alarm["kind"], alarm["component"], alarm["step"], alarm["since_step"]) == ("leak", "other", 5, 3)
    assert alarm["bytes_per_step"] > 10_000
    assert "The bytes of other have grown in every step since step 3" in alarm["sentence"]
    assert "at least one of them pins its autograd graph, e.g. a metric that was not detached" in alarm["sentence"]
    assert alarm["sentence"] in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "step", "time"), [(1, 5, "step"), (2, 7, "rollout")])
def test_scores_that_a_reward_keeps_are_named_when_they_grew_three_times(
    tmp_path: Path, device: SimulatedMemory, epochs: int, step: int, time: str
) -> None:
    leak = KeepsScores()
    alarm = alarm_of(make_trainer(tmp_path, max_steps=8, num_iterations=epochs, reward_funcs=[leak]))
    assert (alarm["component"], alarm["step"], alarm["since_step"]) == ("other", step, 3)
    # What sigmoid and the linear layer saved: 8 scores and 8 × 50 inputs.
    assert alarm[f"bytes_per_{time}"] == 4 * (8 + 8 * 50)
    assert f"have grown in every {time} since step 3, by 1.59 KiB a {time}" in alarm["sentence"]
    assert {(8,), (8, 1)} <= {stray["shape"] for stray in alarm["tensors"] if stray["graph"]}
