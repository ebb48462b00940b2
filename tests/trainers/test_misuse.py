"""What a careless script passes: each is refused by name before a weight moves, with its value and what to do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn

from memsafe_rl import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer
from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.rollout.multi_turn.protocol import Environment, Step
from tests.rollout.multi_turn.helpers import chat_tokenizer
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.helpers import PROMPTS, count_digits, make_trainer, weights
from tests.trainers.test_encoder_decoder import tiny_t5

CHAT: dict[str, Any] = {"processing_class": tiny_tokenizer(chat=True)}


def talk(*turns: dict[str, Any]) -> Dataset:
    hello = [{"role": "user", "content": "1+1="}]
    return Dataset.from_list([{"prompt": hello}] * 15 + [{"prompt": list(turns)}])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"train_dataset": talk({"content": "hello"}), **CHAT},
            DataError,
            r"^train_dataset\[15\]: message 0 is \{'content': 'hello'\}, without a 'role'\. Give it one",
        ),
        ({"train_dataset": talk({"role": "user"}), **CHAT}, DataError, r"\[15\]: message 0 is .*without a 'content'"),
        (
            {"train_dataset": [{"prompt": [1, -3]}] * 16},
            DataError,
            r"^train_dataset\[0\]: .* has token id -3, but the model",
        ),
        ({"model": tiny_model().to("meta")}, ConfigError, "model has weights without values, on the meta device"),
        ({"callbacks": 5}, ConfigError, r"callbacks has 5 \(int\), which is no callback.*TrainerCallback"),
        ({"callbacks": [dict]}, ConfigError, "callbacks has <class 'dict'>"),
        ({"optimizers": torch.optim.SGD}, ConfigError, r"optimizers is type .*SGD.*no pair\. Pass \(optimizer, sched"),
        ({"optimizers": (None, None, None)}, ConfigError, r"optimizers is tuple \(None, None, None\), and no pair"),
        ({"optimizers": (torch.optim.SGD, None)}, ConfigError, r"SGD'>, which is no torch\.optim\.Optimizer"),
        ({"optimizers": (None, "cosine")}, ConfigError, "optimizers has 'cosine', which has no get_last_lr"),
        ({"rollout_func": 5}, ConfigError, r"rollout_func is 5 \(int\)\. Give a function"),
        (
            {"peft_config": LoraConfig(target_modules=["nope"])},
            ConfigError,
            "peft_config, a LoraConfig, does not fit Qwen3ForCausalLM .*nope.*all-linear",
        ),
        ({"eval_dataset": {}}, DataError, "eval_dataset is a dict of nothing"),
        ({"eval_dataset": {"a": None}}, DataError, "eval_dataset is a dict whose 'a' is None"),
        ({"eval_strategy": "steps"}, ConfigError, "eval_strategy is 'steps', but there is no eval_dataset"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    given: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        make_trainer(tmp_path, **given)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Dataset.from_dict({"prompt": []}), "eval_dataset is empty"),
        ([], "eval_dataset is empty"),
        ("imdb", r"eval_dataset is 'imdb' \(str\)\. Pass a datasets\.Dataset"),
    ],
)
def test_evaluations_of_nothing_are_refused(dataset: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        make_trainer(tmp_path).evaluate(dataset)


# An optimizer that was made of something else


def test_an_optimizer_without_the_models_weights_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    trainer = make_trainer(tmp_path, optimizers=(foreign, None))
    before = weights(trainer)
    with pytest.raises(ConfigError, match=r"holds a SGD with none of the .* trained tensors of the model, which would"):
        trainer.train()
    assert torch.equal(weights(trainer), before)
    model = tiny_model()
    some = torch.optim.SGD(model.model.layers.parameters(), lr=1e-2)
    make_trainer(tmp_path, model=model, optimizers=(some, None), max_steps=1).train()
    assert "trained tensors of the model are in none of the optimizer's groups" in caplog.text


def test_an_optimizer_of_ppo_must_hold_the_critic_too(tmp_path: Path) -> None:
    def trainer() -> tuple[PPOTrainer, torch.optim.Optimizer]:
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        made = PPOTrainer(
            model,
            count_digits,
            PPOConfig(output_dir=str(tmp_path), max_steps=1, max_completion_length=6, use_cpu=True, disable_tqdm=True),
            Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tiny_tokenizer(),
            optimizers=(optimizer, None),
        )
        return made, optimizer

    with pytest.raises(ConfigError, match=r"none of the 2 trained tensors of the critic.*trainer\.critic\.beside"):
        trainer()[0].train()
    mended, optimizer = trainer()
    optimizer.add_param_group({"params": list(mended.critic.beside.parameters())})
    mended.train()
    assert mended.critic.head.weight.abs().sum() > 0


# First prompts of environments, which no reader has seen


class Talkative(Environment):
    """Greets with more than anybody can read, and goes on if there is an answer."""

    def reset(self, example: Any) -> str:
        return "x" * int(example["length"])

    def step(self, action: Any) -> Step:
        return Step("more", done=True)

    def reward(self) -> float:
        return 1.0


@pytest.mark.parametrize("whose", ["model", "critic", "reference"])
def test_episodes_that_nobody_can_read_end_without_a_turn(whose: str, tmp_path: Path) -> None:
    short = tiny_model("gpt2", seed=3, positions=64)
    settings: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "max_completion_length": 12,
        "max_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "alarms": False,
    }
    arguments: dict[str, Any] = {
        "reward_funcs": None,
        "train_dataset": Dataset.from_dict({"length": [2, 90] * 8}),
        "processing_class": chat_tokenizer(),
        "environment_factory": Talkative,
    }
    if whose == "reference":
        args = GRPOConfig(num_generations=4, per_device_train_batch_size=16, beta=0.1, **settings)
        trainer: Any = GRPOTrainer(short, args=args, **arguments)
    else:
        model, critic = (short, None) if whose == "model" else (tiny_model(positions=512), short)
        trainer = PPOTrainer(model, args=PPOConfig(**settings), critic=critic, **arguments)
    trainer.train()
    assert 0 < trainer.history[0]["episodes/no_room"] < 1


# A checkpoint of another network


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: tiny_model(layers=3), "11 weights differ, such as model.layers.2"),
        (lambda: tiny_model(layers=1), "11 weights differ, such as model.layers.1"),
        (tiny_t5, "weights differ, such as decoder"),
        (lambda: get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"])), "it holds no adapter"),
        (lambda: tiny_model(dtype=torch.bfloat16), r"types of weights differ: torch\.bfloat16, torch\.float32"),
    ],
    ids=["deeper", "shallower", "encoder-decoder", "adapter", "other type"],
)
def test_the_checkpoint_of_another_network_is_refused_and_leaves_the_weights_alone(
    other: Any, message: str, tmp_path: Path
) -> None:
    make_trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=1).train()
    trainer = make_trainer(tmp_path, model=other())
    before = weights(trainer)
    with pytest.raises(ConfigError, match=f"does not hold the weights of this model .*{message}"):
        trainer.train(resume_from_checkpoint=True)
    assert torch.equal(weights(trainer), before)


@pytest.mark.slow
def test_a_checkpoint_may_be_named_by_a_path_and_by_nothing_else(tmp_path: Path) -> None:
    make_trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=1).train()
    resumed = make_trainer(tmp_path, max_steps=2)
    assert resumed.train(resume_from_checkpoint=tmp_path / "checkpoint-1").global_step == 2
    with pytest.raises(ConfigError, match="resume_from_checkpoint is 5; it must be True, 'auto', or a"):
        make_trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=5)  # type: ignore[arg-type]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("name", ["trainer_state.json", "training_state.pt"])
@pytest.mark.parametrize("content", [None, b"", b"{"])
def test_a_damaged_checkpoint_is_told_before_weights_are_read(name: str, content: bytes | None, tmp_path: Path) -> None:
    make_trainer(tmp_path / "run", save_strategy="steps", save_steps=1, max_steps=1).train()
    folder = tmp_path / "copy" / "checkpoint-1"
    shutil.copytree(tmp_path / "run" / "checkpoint-1", folder)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    trainer = make_trainer(tmp_path / "copy")
    before = weights(trainer)
    with pytest.raises(ConfigError, match=r"which (is damaged|holds no loop\.json or training_state\.pt)"):
        trainer.train(resume_from_checkpoint=str(folder))
    assert torch.equal(weights(trainer), before)


class Wrapped:
    """An optimizer inside of something that is none, as some libraries have it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state


def test_optimizers_and_schedules_that_no_step_can_use_are_refused(tmp_path: Path) -> None:
    """One was stepped twice after a failed allocation, one never changed the learning rate, others ended the run."""
    model = tiny_model()
    some, other = (torch.optim.AdamW(model.parameters(), lr=1e-3) for _ in range(2))
    halved = torch.optim.lr_scheduler.LambdaLR(other, lambda step: 0.5**step)
    for given, told in (
        ((Wrapped(some), None), "which is no torch.optim.Optimizer: a step of it that runs out of memory"),
        ((torch.optim.LBFGS(model.parameters()), None), "LBFGS, whose steps need more than gradients"),
        ((some, torch.optim.lr_scheduler.ReduceLROnPlateau(some)), "ReduceLROnPlateau, whose steps need more"),
        ((some, halved), "LambdaLR that moves another optimizer's learning rate"),
        ((None, halved), "LambdaLR that moves another optimizer's learning rate"),
    ):
        with pytest.raises(ConfigError, match=told):
            make_trainer(tmp_path, model=model, optimizers=given, max_steps=1).train()
    matching = torch.optim.lr_scheduler.LambdaLR(some, lambda step: 0.5**step)
    trainer = make_trainer(tmp_path, model=model, optimizers=(some, matching), max_steps=2)
    trainer.train()
    assert [record["learning_rate"] for record in trainer.history] == [1e-3, 5e-4]
