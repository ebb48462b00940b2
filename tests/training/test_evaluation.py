"""Evaluations of several completions a prompt: what is logged, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import TrainerCallback

from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.ops.evaluation import best_at_k, pass_at_k
from tests.trainers.helpers import PROMPTS, make_trainer

TWO = Dataset.from_dict({"prompt": PROMPTS[:2]})


class Scripted:
    """Gives the first prompt's samples 1, 0, 1, 0, ... and the second's 0, 0, 0, 0.5."""

    __name__ = "scripted"

    def __call__(self, prompts: list[str], **_: Any) -> list[float]:
        counts: dict[str, int] = {}
        rewards = []
        for prompt in prompts:
            place = counts[prompt] = counts.get(prompt, -1) + 1
            first = prompt == PROMPTS[0]
            rewards.append(float(place % 2 == 0) if first else 0.5 * (place == 3))
        return rewards


def always(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def evaluated(tmp_path: Path, **settings: Any) -> dict[str, float]:
    given = {"reward_funcs": [Scripted()], "num_generations_eval": 4, "eval_dataset": TWO}
    return make_trainer(tmp_path, **{**given, **settings}).evaluate()


def test_pass_and_best_at_k_of_an_evaluation(tmp_path: Path) -> None:
    metrics = evaluated(tmp_path)
    for k in (1, 2, 4):
        assert metrics[f"eval_pass@{k}"] == pytest.approx((pass_at_k(2, 4, k) + 0) / 2)
    for k in (2, 4):
        best = (best_at_k([1, 0, 1, 0], k) + best_at_k([0, 0, 0, 0.5], k)) / 2
        assert metrics[f"eval_best@{k}"] == pytest.approx(best)
    assert metrics["eval_mean@4"] == pytest.approx(1 / 4)
    assert metrics["eval_reward"] == pytest.approx((2 + 0.5) / 8)
    assert metrics["eval_runtime"] > 0
    assert metrics["eval_samples_per_second"] > 0
    assert metrics["epoch"] == 0


class Phased:
    """Logs 1 in a rollout and 1,000 in an evaluation."""

    __name__ = "phased"
    evaluating = False

    def __call__(self, completions: list[str], log_metric: Any, **_: Any) -> list[float]:
        log_metric("which", 1000.0 if self.evaluating else 1.0)
        return [float(len(text) % 3) for text in completions]


@pytest.mark.slow
def test_what_rewards_log_in_an_evaluation_is_the_evaluations(tmp_path: Path) -> None:
    """It was averaged with the next step's."""
    paid = Phased()
    settings = {"max_steps": 3, "logging_steps": 1, "reward_funcs": [paid], "eval_dataset": TWO}
    trainer = make_trainer(tmp_path, **settings)

    class Evaluates(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            paid.evaluating = True
            assert trainer.evaluate()["eval_which"] == 1000.0
            paid.evaluating = False

    trainer.add_callback(Evaluates())
    trainer.train()
    records = trainer.state.log_history
    assert {record["which"] for record in records if "which" in record} == {1.0}
    evaluations = [record for record in records if "eval_reward" in record]
    assert [record["eval_which"] for record in evaluations] == [1000.0] * 3
    assert all(record["eval_time/reward/phased_seconds"] >= 0 for record in evaluations)


def test_the_user_says_which_k_what_passes_and_which_function_decides(tmp_path: Path) -> None:
    metrics = evaluated(tmp_path, eval_pass_at=[3], eval_pass_threshold=0.5)
    assert metrics["eval_pass@3"] == pytest.approx((1.0 + 3 / 4) / 2)
    assert "eval_pass@1" not in metrics
    both = {"reward_funcs": [always, Scripted()], "eval_pass_at": "1,2"}
    assert evaluated(tmp_path, **both)["eval_pass@1"] == 1.0
    assert evaluated(tmp_path, **both, eval_pass_reward="scripted")["eval_pass@1"] == pytest.approx(1 / 4)


def test_one_completion_a_prompt_has_no_pass_at_k_unless_asked_for(tmp_path: Path) -> None:
    assert not [name for name in evaluated(tmp_path, num_generations_eval=1) if "@" in name]
    assert evaluated(tmp_path, num_generations_eval=1, eval_pass_at=[1])["eval_pass@1"] == 0.5


def test_the_best_checkpoint_can_be_that_of_the_highest_pass_at_k(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        reward_funcs=[Scripted()],
        num_generations_eval=4,
        eval_dataset=TWO,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="best",
        metric_for_best_model="pass@2",
        max_steps=1,
    )
    trainer.train()
    assert trainer.state.best_metric == pytest.approx(pass_at_k(2, 4, 2) / 2)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval_pass_at has 8, but an evaluation draws 4 completion\(s\) a prompt"):
        evaluated(tmp_path, eval_pass_at=[1, 8])
    with pytest.raises(ConfigError, match="eval_pass_reward is 'other', and there is no such reward function"):
        evaluated(tmp_path, eval_pass_reward="other")


def test_a_stream_of_prompts_is_evaluated_as_its_dataset_is(tmp_path: Path) -> None:
    dataset = Dataset.from_dict({"prompt": PROMPTS[:4]})
    found = []
    for name, given in (("dataset", dataset), ("stream", dataset.to_iterable_dataset())):
        trainer = make_trainer(tmp_path / name, eval_dataset=given, max_steps=1)
        assert trainer.eval_dataset is given
        found.append(trainer.evaluate())
    assert found[0]["eval_reward"] == found[1]["eval_reward"]
    assert found[0]["eval_loss"] == found[1]["eval_loss"]


def test_other_prompts_are_read_as_the_trainers_own_are(tmp_path: Path) -> None:
    """They were neither filtered nor given the prompts that environments make."""
    long = [{"prompt": PROMPTS[0]}, {"prompt": "9" * 40}]
    trainer = make_trainer(tmp_path, max_prompt_length=20, overlong_prompts="filter")
    trainer.eval_dataset = long
    assert trainer.eval_dataset is long
    assert trainer.evaluate()["eval_reward"] == trainer.evaluate(long[:1])["eval_reward"]
    with pytest.raises(DataError, match="eval_dataset is empty"):
        trainer.evaluate([])
