"""A network behind `FunctionAdapter`: with LoRA, a critic, a cut of its rollouts, and saved weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from memsafe_rl import PPOConfig, PPOTrainer
from tests.extension.test_own_adapter import TinyGRU
from tests.tiny import tiny_tokenizer
from tests.trainers.helpers import PROMPTS, count_digits, cut, make_trainer, weights


def test_cuts_of_a_rollout_change_no_weight(tmp_path: Path) -> None:
    trained = []
    for rows in (64, 3):
        trainer = make_trainer(tmp_path, model=TinyGRU(), policy=cut(rows_in_flight=rows), num_iterations=2)
        trainer.train()
        trained.append(weights(trainer))
    assert torch.allclose(*trained, atol=1e-6)


def test_an_adapter_of_peft_learns_against_its_base(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model=TinyGRU(), beta=0.1, peft_config=LoraConfig(r=2, target_modules=["head"]))
    inner = trainer.model.get_base_model()
    base, before = inner.head.base_layer.weight.clone(), weights(trainer)
    trainer.train()
    assert torch.equal(inner.head.base_layer.weight, base)
    assert not torch.equal(weights(trainer), before)
    assert trainer.history[0]["kl"] == 0
    assert trainer.history[1]["kl"] > 0


@pytest.mark.slow
def test_a_run_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole", model=TinyGRU(), max_steps=4)
    whole.train()
    make_trainer(tmp_path / "parts", model=TinyGRU(), max_steps=2, save_strategy="steps", save_steps=2).train()
    rest = make_trainer(tmp_path / "parts", model=TinyGRU(), max_steps=4)
    rest.train(resume_from_checkpoint=True)
    assert torch.equal(weights(rest), weights(whole))


def test_ppo_has_a_head_on_its_hidden_states(tmp_path: Path) -> None:
    config = PPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        max_completion_length=4,
        max_steps=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = PPOTrainer(
        TinyGRU(),
        count_digits,
        config,
        Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tiny_tokenizer(),
    )
    assert trainer.train().global_step == 2
