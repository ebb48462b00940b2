"""A forecast of PPO beside the run it was made for, for every kind of critic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig

from memsafe_rl import GRPOConfig, PPOConfig, PPOTrainer, SimulatedMemory, forecast_memory
from memsafe_rl.errors import ConfigError
from memsafe_rl.types import Phase
from tests.tiny import tiny_model, tiny_tokenizer

ROOM = 2**30
LENGTH = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen3", vocab_size=4000, layers=2, hidden=64).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    tiny_model("llama", vocab_size=4000, layers=2, hidden=32, tied=False).save_pretrained(path / "critic")
    return path


def config_for(folder: Path, **settings: Any) -> PPOConfig:
    return PPOConfig(
        str(folder / "run"),
        per_device_train_batch_size=16,
        num_iterations=2,
        max_completion_length=LENGTH,
        generation_kwargs={"min_new_tokens": LENGTH},
        memory_forecast=True,
        max_steps=2,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        alarms=False,
        **settings,
    )


@pytest.mark.parametrize(
    ("critic", "settings"), [("trunk", {}), ("adapter", {}), ("adapter", {"kl_coef": 0.0}), ("model", {})]
)
@pytest.mark.slow
def test_peaks_are_what_the_run_then_holds(folder: Path, critic: str, settings: dict[str, Any]) -> None:
    given: dict[str, Any] = {"trunk": None, "adapter": "adapter", "model": str(folder / "critic")}
    lora = LoraConfig(r=8, target_modules="all-linear") if critic == "adapter" else None
    prompts = Dataset.from_dict({"prompt": [f"{index:02d}".ljust(20, ".") for index in range(32)]})
    with SimulatedMemory(ROOM, exact=True) as memory:
        trainer = PPOTrainer(
            str(folder),
            lambda completions, **_: [float(len(text) % 2) for text in completions],
            config_for(folder, **settings),
            prompts,
            peft_config=lora,
            critic=given[critic],
        )
        trainer.train()
        held = {phase: sum(parts.values()) for phase, parts in memory.phase_peaks().items()}
    forecast = trainer.forecast
    assert forecast is not None
    assert forecast.peak_bytes == pytest.approx(max(held.values()), rel=0.01)
    for phase in (Phase.ROLLOUT, Phase.SCORE, Phase.UPDATE, Phase.OPTIMIZER):
        assert forecast.phase_bytes[phase] == pytest.approx(held[phase], rel=0.03), phase
    failures = ("failure", "retry", "fallback")
    assert [event["event"] for event in trainer.memory_events if event["event"] in failures] == []


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.slow
def test_the_check_of_a_large_critic_counts(tied: bool, tmp_path: Path) -> None:
    tiny_model("llama", vocab_size=4000, layers=1, hidden=32).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    tiny_model("llama", vocab_size=4000, layers=4, hidden=96, tied=tied).save_pretrained(tmp_path / "critic")
    with SimulatedMemory(ROOM, exact=True) as memory:
        trainer = PPOTrainer(
            str(tmp_path),
            lambda completions, **_: [0.0] * len(completions),
            config_for(tmp_path),
            Dataset.from_dict({"prompt": ["ab"] * 16}),
            peft_config=LoraConfig(r=8, target_modules="all-linear"),
            critic=str(tmp_path / "critic"),
        )
        held = sum(memory.phase_peaks()[Phase.LOAD].values())
    assert trainer.forecast is not None
    assert trainer.forecast.phase_bytes[Phase.LOAD] == pytest.approx(held, rel=0.001)


@pytest.mark.slow
def test_rows_of_later_steps_are_scored_with_all_others(folder: Path) -> None:
    lengths = (9, 9, 30, 4, 4, 18, 15, 20, 32, 40, 28, 34, 27, 6, 35, 37)
    config = PPOConfig(
        str(folder / "run"),
        num_generations=8,
        per_device_train_batch_size=16,
        steps_per_generation=2,
        max_completion_length=33,
        generation_kwargs={"min_new_tokens": 33},
        memory_forecast=True,
        kl_coef=0.0,
        max_steps=2,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        alarms=False,
    )
    prompts = Dataset.from_dict(
        {"prompt": [f"{index:02d}".ljust(count, ".")[:count] for index, count in enumerate(lengths)]}
    )
    with SimulatedMemory(ROOM, exact=True) as memory:
        trainer = PPOTrainer(
            str(folder), lambda completions, **_: [0.0, 1.0] * (len(completions) // 2), config, prompts
        )
        trainer.train()
        held = sum(memory.phase_peaks()[Phase.SCORE].values())
    assert trainer.forecast is not None
    assert trainer.forecast.phase_bytes[Phase.SCORE] == pytest.approx(held, rel=0.01)


@pytest.mark.slow
def test_a_critic_belongs_to_ppo(folder: Path) -> None:
    found = forecast_memory(
        str(folder),
        config_for(folder),
        device_bytes=ROOM,
        prompt_tokens=20,
        critic="adapter",
        peft_config=LoraConfig(r=8),
    )
    assert found.fits
    with pytest.raises(ConfigError, match="critic is given without a PPOConfig"):
        forecast_memory(str(folder), GRPOConfig(), device_bytes=ROOM, critic="adapter")
