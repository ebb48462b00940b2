"""Runs under the optimal token baseline: advantages from the model's own distributions, whatever the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from memsafe_rl.config.grpo import GRPOConfig
from memsafe_rl.errors import ConfigError
from memsafe_rl.ops.advantages import optimal_token_advantages
from tests.tiny import tiny_model
from tests.trainers.helpers import cut, gradient_of, gradient_under, make_trainer, relative, weights


def test_advantages_are_those_of_the_whole_distributions(tmp_path: Path) -> None:
    settings = {"advantage_estimator": "otb", "temperature": 0.8, "max_completion_length": 24}
    trainer = make_trainer(tmp_path, model=tiny_model(dtype=torch.float64), **settings)
    trainer.loop.begin(None)
    trainer.loop.files.folder.release()
    rollout = trainer.loop.collect()
    stored = rollout.trajectory
    rewards = torch.tensor([row["count_digits"] for row in rollout.table], dtype=torch.float64)
    norms = torch.zeros(len(stored), max(stored.actions.lengths), dtype=torch.float64)
    for row in range(len(stored)):
        prompt, actions = stored.conditions.rows()[stored.condition_of_row[row]], stored.actions.rows()[row]
        ids = torch.cat([prompt, actions])[None]
        with torch.no_grad():
            logits = trainer.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double() / 0.8
        slopes = torch.nn.functional.one_hot(actions, logits.shape[1]) - logits.softmax(-1)
        norms[row, : len(actions)] = slopes.square().sum(1)
    mask = stored.loss_mask.pad(range(len(stored)), 0)
    for first in range(0, len(stored), 4):
        part = slice(first, first + 4)
        wanted = optimal_token_advantages(rewards[part], norms[part], mask[part])
        found = stored.action_advantages.pad(range(first, first + 4), 0).double()
        torch.testing.assert_close(found, wanted[:, : found.shape[1]], rtol=1e-5, atol=1e-6)
    assert stored.sharper_logprobs is None
    moved = stored.action_advantages.pad(range(len(stored)), 0) - stored.advantages[:, None] * mask
    assert moved.abs().max() > 1e-2


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_no_cut_changes_the_gradient(tmp_path: Path, dtype: torch.dtype, bound: float) -> None:
    def run(policy: Any, estimator: str = "otb") -> tuple[Any, torch.Tensor]:
        settings = {"advantage_estimator": estimator, "max_completion_length": 24, "overwrite_output_dir": True}
        trainer = make_trainer(tmp_path, model=tiny_model(dtype=dtype), policy=policy, **settings)
        return trainer, gradient_of(trainer)

    trainer, whole = run(cut())
    for policy in (cut(1), cut(30, checkpointing=True, logprob_tile=3)):
        assert relative(gradient_under(trainer, policy), whole) < bound
    assert relative(run(cut(30, rows_in_flight=3))[1], whole) < bound
    assert relative(run(cut(), "dr_grpo")[1], whole) > 1e-2


@pytest.mark.slow
def test_a_resume_leaves_no_trace(tmp_path: Path) -> None:
    settings = {"advantage_estimator": "otb", "num_iterations": 2, "max_steps": 4}
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=3, **settings)
    trainer.train()
    again = make_trainer(tmp_path, save_strategy="steps", save_steps=3, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert torch.equal(weights(again), weights(trainer))


@pytest.mark.parametrize("other", [{"loss_type": "gmpo"}, {"importance_sampling_level": "sequence"}])
def test_what_knows_no_advantage_of_a_token_is_refused(tmp_path: Path, other: Any) -> None:
    name, value = next(iter(other.items()))
    with pytest.raises(ConfigError, match=f"{name} is '{value}' with advantage_estimator='otb'"):
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, advantage_estimator="otb", **other)
