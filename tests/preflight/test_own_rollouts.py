"""A run holds what its own rollouts make it hold: the forecast tries these, in the order in which they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig

from memsafe_rl import AdaptivePolicy
from memsafe_rl.preflight.fake.device import fake_device
from memsafe_rl.preflight.own_rollouts import own_rollouts, worst_trials
from memsafe_rl.preflight.worst_case import Longest, find_longest
from memsafe_rl.types import Phase
from tests.preflight import beside
from tests.tiny import tiny_model, tiny_tokenizer

LENGTHS = (5, 40, 12, 70, 9, 31, 66, 22, 58, 17, 80, 3, 44, 27, 13, 61)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen3", vocab_size=3000, layers=2, hidden=64).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def ragged(*lengths: int) -> Dataset:
    return Dataset.from_dict({"prompt": [f"{index:02d}".ljust(most, ".")[:most] for index, most in enumerate(lengths)]})


def run(folder: Path, *, pack_prompts: bool | None = None, **settings: Any) -> tuple[Any, dict[Phase, int]]:
    given = {
        "train_dataset": ragged(*LENGTHS),
        "memory_policy": AdaptivePolicy(pack_prompts=pack_prompts),
        "peft_config": LoraConfig(r=8, target_modules="all-linear") if settings.pop("lora", False) else None,
    }
    return beside.run(folder, given=given, alarms=False, **{"per_device_train_batch_size": 12, **settings})


def check(trainer: Any, held: dict[Phase, int], *, rel: float = 0.005) -> None:
    assert trainer.forecast is not None
    for phase, size in trainer.forecast.phase_bytes.items():
        assert size == pytest.approx(held[phase], rel=rel), phase


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_shorter_prompts_may_get_a_plan_that_holds_more(folder: Path, seed: int) -> None:
    trainer, held = run(folder, pack_prompts=False, seed=seed, max_steps=3)
    check(trainer, held)


@pytest.mark.slow
def test_steps_of_a_shuffled_rollout_are_those_of_the_run(folder: Path) -> None:
    parts = {"per_device_train_batch_size": 6, "steps_per_generation": 2, "num_iterations": 2}
    trainer, held = run(folder, pack_prompts=False, max_steps=8, **parts)
    check(trainer, held)


@pytest.mark.slow
def test_the_first_rollout_is_scored_under_the_tile_of_no_plan(folder: Path) -> None:
    trainer, held = run(folder, lora=True, beta=0.04, max_steps=2)
    check(trainer, held)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_the_first_step_comes_before_an_optimizer_that_makes_its_state_in_it(folder: Path, steps: int) -> None:
    trainer, held = run(folder, optim="adamw_torch", beta=0.04, max_steps=steps)
    check(trainer, held)
