"""A tiny run beside the forecast made for it: what tests of forecasts share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PretrainedConfig

from memsafe_rl import GRPOConfig, GRPOTrainer, SimulatedMemory
from memsafe_rl.types import Phase
from tests.tiny import tiny_tokenizer

ROOM = 2**30
LENGTH = 24


def config_for(folder: Path, **settings: Any) -> GRPOConfig:
    """Returns the settings of a short run whose completions have their full length."""
    length = settings.get("max_completion_length", LENGTH)
    defaults: dict[str, Any] = {
        "num_generations": 4,
        "per_device_train_batch_size": 16,
        "max_completion_length": length,
        "generation_kwargs": {"min_new_tokens": length},
        "memory_forecast": True,
        "max_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return GRPOConfig(str(folder / "run"), **{**defaults, **settings})


def alternating(completions: list[str], **_: Any) -> list[float]:
    """Rewards every other completion."""
    return [float(index % 2) for index in range(len(completions))]


def prompts(count: int = 8, length: int = 20) -> Dataset:
    """Returns prompts of one length."""
    return Dataset.from_dict({"prompt": [f"{index:02d}".ljust(length, ".") for index in range(count)]})


def saved(config: PretrainedConfig, kind: Any, folder: Path) -> Path:
    """Saves a network with random weights, and a tokenizer."""
    kind.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def run(
    folder: Path,
    reward_funcs: Any = alternating,
    given: dict[str, Any] | None = None,
    *,
    exact: bool = True,
    **settings: Any,
) -> tuple[GRPOTrainer, dict[Phase, int]]:
    """Trains under a device that counts every byte, or all but those that kernels of this processor hold inside.

    Gives the trainer and the peak of every phase.
    """
    with SimulatedMemory(ROOM, exact=exact) as memory:
        trainer = GRPOTrainer(
            str(folder), reward_funcs, config_for(folder, **settings), **{"train_dataset": prompts(), **(given or {})}
        )
        trainer.train()
        held = {phase: sum(parts.values()) for phase, parts in memory.phase_peaks().items()}
    return trainer, held
