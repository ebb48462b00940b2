"""A script of TRL's last PPO here: its arguments, its datasets of token ids, and the names of its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import Qwen3Config, Qwen3ForSequenceClassification, TrainerCallback

from memsafe_rl import ConfigError, GRPOConfig, PPOConfig, PPOTrainer
from memsafe_rl.models.critic import OwnModel, SharedTrunk
from tests.models.test_routing import mixture
from tests.tiny import tiny_config, tiny_model, tiny_tokenizer
from tests.trainers.helpers import PROMPTS, count_digits, relative, weights
from tests.trainers.test_ppo import make_ppo

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_ppo_epochs": 2,
    "response_length": 6,
    "lam": 0.9,
    "cliprange": 0.1,
    "cliprange_value": 0.3,
    "missing_eos_penalty": 1.0,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "local_rollout_forward_batch_size": 64,
    "stop_token": "eos",
    "num_mini_batches": 1,
    "logging_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
    "alarms": False,
}


def classifier(seed: int) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(**{**tiny_config().to_dict(), "num_labels": 1})
    return Qwen3ForSequenceClassification(config).eval()


@pytest.mark.slow
def test_trls_last_example_runs_with_its_own_arguments(tmp_path: Path) -> None:
    tokenizer, seen = tiny_tokenizer(), []
    dataset = Dataset.from_dict({"prompt": PROMPTS}).map(
        lambda rows: {"input_ids": tokenizer(rows["prompt"], padding=False)["input_ids"]},
        batched=True,
        remove_columns=["prompt"],
    )
    value_model, reward_model, reference = classifier(1), classifier(2), tiny_model(seed=7)
    first = value_model.score.weight.detach().clone()
    trainer = PPOTrainer(
        args=PPOConfig(str(tmp_path), **SETTINGS),
        processing_class=tokenizer,
        model=tiny_model(),
        ref_model=reference,
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=dataset,
    )
    assert isinstance(trainer.critic, OwnModel)
    assert torch.equal(trainer.critic.head.weight, first[0])
    assert trainer.ref_model is reference
    assert trainer.reward_funcs == [reward_model]
    hidden = torch.tensor([tokenizer(PROMPTS[0])["input_ids"]])
    expected = value_model.score(value_model.model(hidden).last_hidden_state)[0, :, 0]
    states = trainer.critic.network.model.base_model(hidden).last_hidden_state[0]
    torch.testing.assert_close(trainer.critic.head(states), expected)
    before = value_model.model.embed_tokens.weight.detach().clone()
    trainer.rewards.calculate = noting(trainer.rewards.calculate, seen)
    trainer.train()
    assert trainer.history[0]["objective/kl"] != 0.0  # the reference is another network
    assert relative(value_model.model.embed_tokens.weight.detach(), before) > 1e-4
    assert torch.equal(value_model.score.weight[0], trainer.critic.head.weight)  # the user's object is what was trained
    assert not torch.equal(value_model.score.weight, first)
    assert set(seen) <= set(PROMPTS)


def noting(calculate: Any, seen: list[str]) -> Any:
    def call(prompts: Any, *others: Any) -> Any:
        seen.extend(prompts)
        return calculate(prompts, *others)

    return call


@pytest.mark.slow
def test_token_ids_as_prompts_train_as_their_text_does(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    ids = Dataset.from_dict({"input_ids": tokenizer(PROMPTS)["input_ids"]})
    trained = []
    for name, dataset in (("ids", ids), ("text", Dataset.from_dict({"prompt": PROMPTS}))):
        config = PPOConfig(str(tmp_path / name), **SETTINGS)
        trainer = PPOTrainer(tiny_model(), count_digits, config, dataset, processing_class=tokenizer)
        assert isinstance(trainer.critic, SharedTrunk)
        trainer.train()
        trained.append(weights(trainer))
    assert torch.equal(*trained)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"total_episodes": 1000}, "Set max_steps"),
        ({"num_mini_batches": 2}, "steps_per_generation"),
        ({"mini_batch_size": 8}, "gradient_accumulation_steps"),
        ({"sft_model_path": "a"}, "Pass it as model"),
        ({"reward_model_path": "a"}, "reward_funcs or reward_model"),
        ({"stop_token_id": 3}, "eos_token_id"),
        ({"ref_adapter_name": "old"}, "set_adapter"),
        ({"world_size": 2}, "it follows from"),
    ],
)
def test_other_names_of_trls_ppo_say_what_takes_their_place(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        PPOConfig(use_cpu=True, **given)


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    config, data = PPOConfig(str(tmp_path), **SETTINGS), Dataset.from_dict({"prompt": PROMPTS})

    def make(**more: Any) -> PPOTrainer:
        return PPOTrainer(args=config, train_dataset=data, processing_class=tiny_tokenizer(), **more)

    model = tiny_model()
    with pytest.raises(ConfigError, match="reward_model is another name of reward_funcs"):
        make(model=model, reward_funcs=count_digits, reward_model=classifier(1))
    with pytest.raises(ConfigError, match="ref_model is the model itself"):
        make(model=model, reward_funcs=count_digits, ref_model=model)
    with pytest.raises(ConfigError, match="ref_model knows 300 tokens"):
        make(model=model, reward_funcs=count_digits, ref_model=tiny_model(vocab_size=300))
    with pytest.raises(ConfigError, match="setting of PPO alone"):
        GRPOConfig(critic_warmup_rollouts=1, use_cpu=True)


@pytest.mark.slow
def test_the_critic_learns_alone_while_it_warms_up(tmp_path: Path) -> None:
    """Two rollouts of four steps each; the policy moves in the third, after a resume too."""
    settings = {"critic_warmup_rollouts": 2, "max_steps": 9, "save_strategy": "steps", "save_steps": 6}
    settings |= {"kl_coef": 0.05, "kl_target": 1.0, "kl_horizon": 100.0}
    trainer = make_ppo(tmp_path / "run", "model", **settings)
    moved: list[bool] = []
    start, critic = weights(trainer), trainer.critic.head.weight.detach().clone()

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            moved.append(not torch.equal(weights(trainer), start))

    trainer.add_callback(Watch())
    trainer.train()
    assert moved == [False] * 8 + [True]
    assert [record["kl_coef"] for record in trainer.history if "kl_coef" in record] == [0.05] * 3  # there is no KL yet
    assert not torch.equal(trainer.critic.head.weight, critic)
    again = make_ppo(tmp_path / "run", "model", **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-6"))
    assert torch.equal(weights(again), weights(trainer))


def test_a_warm_up_that_would_move_the_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Pass critic='adapter' or a model"):
        make_ppo(tmp_path, "trunk", critic_warmup_rollouts=1)
    with pytest.raises(ConfigError, match=r"weight_decay is 0\.1, which moves the policy"):
        PPOConfig(use_cpu=True, critic_warmup_rollouts=1, weight_decay=0.1)
    with pytest.raises(ConfigError, match="loss on routers, which does not go with critic_warmup_rollouts"):
        make_ppo(tmp_path, "model", model=mixture("mixtral"), critic_warmup_rollouts=1)


def test_a_classifier_that_is_named_keeps_its_last_layer(tmp_path: Path) -> None:
    saved = classifier(1)
    saved.score = nn.Linear(saved.score.in_features, 1)
    saved.score.bias.data.fill_(0.5)
    for given in (saved, str(tmp_path / "critic")):
        if given is not saved:
            classifier(1).save_pretrained(given)
        trainer = PPOTrainer(
            args=PPOConfig(str(tmp_path / "run"), **SETTINGS),
            processing_class=tiny_tokenizer(),
            model=tiny_model(),
            reward_funcs=count_digits,
            value_model=given,
            train_dataset=[{"prompt": prompt} for prompt in PROMPTS],
        )
        wanted = saved.score.weight if given is saved else classifier(1).score.weight
        assert torch.equal(trainer.critic.head.weight, wanted[0])
        assert trainer.critic.head.bias.item() == (0.5 if given is saved else 0.0)


@pytest.mark.slow
def test_returns_have_a_lambda_of_their_own(tmp_path: Path) -> None:
    """At lambda 1 and no discount a return is the sum of what follows; advantages keep the policy's lambda."""

    def collected(**more: Any) -> Any:
        trainer = make_ppo(tmp_path, whiten_advantages=False, kl_coef=0.0, gae_lambda=0.5, **more)
        trainer.loop.begin(None)
        trainer.loop.files.folder.release()
        return trainer.loop.collect()

    plain, own = collected(), collected(gae_lambda_critic=1.0)
    torch.testing.assert_close(plain.trajectory.action_advantages.flat, own.trajectory.action_advantages.flat)
    rewards = torch.tensor([row["count_digits"] for row in own.table])
    for returns, reward in zip(own.trajectory.returns.rows(), rewards, strict=True):
        torch.testing.assert_close(returns, reward.expand(returns.shape))
    assert not torch.equal(plain.trajectory.returns.flat, own.trajectory.returns.flat)
