"""A user's own setting is read as its type, checked, and held to when a run is resumed."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from memsafe_rl import ConfigError, GRPOConfig, GRPOTrainer
from memsafe_rl.config.base import configuration
from memsafe_rl.config.declaring import declare, setting
from tests.tiny import tiny_model, tiny_tokenizer


@configuration
@declare()
class LengthConfig(GRPOConfig):
    """GRPO with a reward for length."""

    length_bonus: float = setting(0.0, "Reward for a token of a completion; 0: none.", low=0)


def train(folder: Path, resume: bool = False, **given: Any) -> float:
    config = LengthConfig(
        str(folder), max_steps=1 + resume, max_completion_length=4, save_steps=1, use_cpu=True, **given
    )
    prompts = Dataset.from_dict({"prompt": ["1", "2", "3", "4"]})

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [config.length_bonus * len(ids) for ids in completion_ids]

    trainer = GRPOTrainer(tiny_model(), reward, config, prompts, processing_class=tiny_tokenizer())
    trainer.train(resume_from_checkpoint=resume)
    return trainer.history[-1]["reward"] / trainer.history[-1]["completions/mean_length"]


def test_a_setting_from_outside_is_read_checked_and_held_to(tmp_path: Path) -> None:
    assert train(tmp_path, length_bonus="0.5") == pytest.approx(0.5)
    for wrong, words in (
        ({"length_bonus": -1}, "must be at least 0"),
        ({"length_bonu": 1}, "Did you mean 'length_bonus'"),
    ):
        with pytest.raises(ConfigError, match=words):
            train(tmp_path, **wrong)
    with pytest.raises(ConfigError, match=r"length_bonus was 0\.5 and is 0\.25"):
        train(tmp_path, resume=True, length_bonus=0.25)
