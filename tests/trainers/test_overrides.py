"""Methods of TRL's trainer that a subclass replaces: each is called where TRL calls it, or refused by name."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset

from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.trainers.grpo import GRPOTrainer
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.helpers import PROMPTS, count_digits, make_trainer, weights

CALLED_BY_TRAINING = {
    "create_optimizer",
    "create_scheduler",
    "create_optimizer_and_scheduler",
    "_calculate_rewards",
    "log",
    "evaluate",
    "save_model",
}
CALLED_BY_SCRIPTS = {
    "add_callback",
    "end",
    "is_local_process_zero",
    "is_world_process_zero",
    "log_metrics",
    "pop_callback",
    "push_to_hub",
    "remove_callback",
    "save_metrics",
    "save_state",
    "train",
}
METADATA = {"_send_telemetry"}
THEIRS = sorted(
    {name for cls in (trl.GRPOTrainer, trl.RLOOTrainer) for name, _ in inspect.getmembers(cls, inspect.isroutine)}
    - {name for name in dir(object) if not name.startswith("_get")}
    - CALLED_BY_SCRIPTS
    - METADATA
    - {"__init__", "__weakref__"}
)


def of_class(cls: type[GRPOTrainer], output_dir: Path, **settings: Any) -> GRPOTrainer:
    made = make_trainer(output_dir, max_steps=4, **settings)
    return cls(
        tiny_model(),
        settings.get("reward_funcs", count_digits),
        args=made.args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        eval_dataset=settings.get("eval_dataset"),
        processing_class=tiny_tokenizer(),
    )


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("name", THEIRS)
def test_each_method_of_trls_trainer_is_called_or_refused(name: str, tmp_path: Path) -> None:
    def base(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return getattr(super(made[0], self), name)(*args, **kwargs)

    calls: list[str] = []
    made: list[type[GRPOTrainer]] = []
    if name not in CALLED_BY_TRAINING:
        with pytest.raises(TypeError, match=rf"Mine.{name} would never be called: \w+"):
            type("Mine", (GRPOTrainer,), {name: base})
        with pytest.raises(TypeError, match=rf"Mine.{name} would never be called"):
            type("Mine", (type("Mixin", (), {name: base}), GRPOTrainer), {})
        return
    made.append(type("Mine", (GRPOTrainer,), {name: base}))
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    settings["eval_dataset"] = Dataset.from_dict({"prompt": PROMPTS[:2]})
    trainer = of_class(made[0], tmp_path / "mine", **settings)
    trainer.train()
    assert calls
    plain = of_class(GRPOTrainer, tmp_path / "plain", **settings)
    plain.train()
    assert torch.equal(weights(trainer), weights(plain))
    ours, theirs = ([{**line, "x": 0} for line in t.state.log_history] for t in (trainer, plain))
    assert [line.get("reward") for line in ours] == [line.get("reward") for line in theirs]
    assert [line.get("eval_reward") for line in ours] == [line.get("eval_reward") for line in theirs]


@pytest.mark.slow
def test_an_own_optimizer_and_schedule_move_the_weights(tmp_path: Path) -> None:
    class Mine(GRPOTrainer):
        def create_optimizer(self) -> None:  # type: ignore[override]
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            assert (num_training_steps, optimizer) == (4, self.optimizer)
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    trainer = of_class(Mine, tmp_path / "mine")
    for _ in range(2):  # each call of train() makes them anew
        trainer.train()
        assert isinstance(trainer.optimizer, torch.optim.SGD)
        assert [step["learning_rate"] for step in trainer.history] == [0.5, 0.25, 0.125, 0.0625]


@pytest.mark.slow
def test_own_rewards_are_what_is_learnt_from(tmp_path: Path) -> None:
    class Mine(GRPOTrainer):
        def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
            assert [row["prompt"] for row in inputs] == list(prompts)
            found = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            return -3 * found

    def logging(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
        log_metric("texts", len(completions))
        return count_digits(completions)

    mine, plain = (of_class(c, tmp_path / c.__name__, reward_funcs=logging) for c in (Mine, GRPOTrainer))
    mine.train()
    plain.train()
    first, theirs = mine.state.log_history[0], plain.state.log_history[0]
    assert first["rewards/logging/mean"] == pytest.approx(-3 * theirs["rewards/logging/mean"])
    assert first["texts"] == theirs["texts"] == 8
    assert not torch.equal(weights(mine), weights(plain))


def test_own_rewards_of_another_shape_are_refused(tmp_path: Path) -> None:
    class Mine(GRPOTrainer):
        def _calculate_rewards(self, *_: Any) -> Any:
            return torch.zeros(8)

    with pytest.raises(DataError, match=r"returned \(8,\) for 8 completions and 1 reward functions"):
        of_class(Mine, tmp_path).train()


def test_own_rewards_without_bound_are_refused(tmp_path: Path) -> None:
    class Mine(GRPOTrainer):
        def _calculate_rewards(self, *given: Any) -> Any:
            rewards = super()._calculate_rewards(*given)
            rewards[3] = -torch.inf
            return rewards

    with pytest.raises(DataError, match=r"_calculate_rewards returned \[-inf\] for row 3 of 8"):
        of_class(Mine, tmp_path).train()


@pytest.mark.parametrize(
    ("method", "given", "told"),
    [
        ("create_optimizer", None, r"Mine.create_optimizer makes nothing. Return .* or set self.optimizer"),
        ("create_scheduler", None, r"Mine.create_scheduler makes nothing. Return .* or set self.lr_scheduler"),
        ("create_scheduler", 3, "3, which has no get_last_lr"),
    ],
)
def test_optimizers_and_schedules_that_are_none_are_refused(method: str, given: Any, told: str, tmp_path: Path) -> None:
    mine = type("Mine", (GRPOTrainer,), {method: lambda *_, **__: given})
    with pytest.raises(ConfigError, match=told):
        of_class(mine, tmp_path).train()


@pytest.mark.slow
def test_an_own_log_adds_to_every_record(tmp_path: Path) -> None:
    class Mine(GRPOTrainer):
        def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
            super().log({**logs, "mine": 1.0}, start_time)

    trainer = of_class(Mine, tmp_path)
    trainer.train()
    assert [line["mine"] for line in trainer.state.log_history] == [1.0] * 5
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["mine"] == 1.0 for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("writes", [True, False], ids=["writes weights", "leaves weights out"])
def test_an_own_save_model_fills_checkpoints_that_resume(writes: bool, tmp_path: Path) -> None:
    class Mine(GRPOTrainer):
        def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
            (Path(output_dir) / "mine.txt").write_text("mine")
            if writes:
                super().save_model(output_dir, _internal_call)

    settings = {"save_strategy": "steps", "save_steps": 2}
    trainer = of_class(Mine, tmp_path, **settings)
    trainer.train()
    assert (tmp_path / "checkpoint-2" / "mine.txt").read_text() == "mine"
    again = of_class(Mine, tmp_path, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(weights(again), weights(trainer))


def test_what_is_refused_says_what_to_do_instead() -> None:
    with pytest.raises(TypeError, match="_compute_loss would never be called: pass the loss as loss_type"):
        type("Mine", (GRPOTrainer,), {"_compute_loss": count_digits})
    type("Mine", (GRPOTrainer,), {"_tag_names": ["mine"], "helper": count_digits, "config": 3})


def test_what_scripts_read_of_a_trainer_has_trls_names(tmp_path: Path) -> None:
    def longer(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    trainer = of_class(
        GRPOTrainer, tmp_path, reward_funcs=[count_digits, longer], reward_weights=[1.0, 0.5], entropy_coef=0.1
    )
    assert trainer.reward_funcs == [count_digits, longer]
    assert trainer.reward_func_names == ["count_digits", "longer"]
    assert trainer.reward_weights.tolist() == [1.0, 0.5]
    assert trainer.reward_processing_classes == [None, None]
    assert trainer.ref_model is None
    assert (trainer.tools, trainer.environments, trainer.entropy_coef) == ([], None, 0.1)


def test_steps_that_no_record_holds_yet_are_in_the_last_one(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=3, logging_steps=2)
    trainer.train()
    first, last = trainer.state.log_history
    assert first["reward"] == pytest.approx(sum(step["reward"] for step in trainer.history[:2]) / 2)
    assert last["reward"] == trainer.history[2]["reward"]
    assert {"train_runtime", "train_loss", "train_steps_per_second", "loss", "reward_std"} <= set(last)
    assert last["train_samples_per_second"] == pytest.approx(last["train_steps_per_second"] * trainer.args.step_rows)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
def test_the_loss_of_an_evaluation_is_that_of_an_update_on_its_completions(loss_type: str, tmp_path: Path) -> None:
    """Before weights move, an evaluation on the training prompts draws rows whose update has the loss it reports."""
    prompts = Dataset.from_dict({"prompt": PROMPTS[:2]})
    settings = {"loss_type": loss_type, "beta": 0.1, "entropy_coef": 0.01, "max_steps": 1, "num_generations": 4}
    trainer = make_trainer(tmp_path / "a", **settings, eval_dataset=prompts)
    with torch.no_grad():  # moved away from its reference, so that the KL counts
        for parameter in trainer.model.parameters():
            parameter.mul_(1.05)
    found = trainer.evaluate()["eval_loss"]
    samples = trainer.loop.collector
    _, rollout = samples.evaluate(list(prompts), trainer.loop.state)
    assert rollout is not None
    trainer.loop.state.rollout = rollout
    trainer.loop.make_optimizer()
    expected = trainer.loop.learner.step(trainer.loop.state).metrics["loss"]
    assert found == pytest.approx(expected, rel=1e-5)
    assert found != 0


@pytest.mark.slow
def test_the_best_model_may_be_chosen_by_its_loss(tmp_path: Path) -> None:
    sets = {"easy": Dataset.from_dict({"prompt": PROMPTS[:2]}), "hard": Dataset.from_dict({"prompt": PROMPTS[2:3]})}
    settings: dict[str, Any] = {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 1, "beta": 0.1}
    trainer = make_trainer(
        tmp_path, eval_dataset=sets["easy"], metric_for_best_model="eval_loss", greater_is_better=False, **settings
    )
    trainer.train()
    losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert trainer.state.best_metric == min(losses)
    assert {"eval_easy_loss", "eval_hard_loss"} <= set(trainer.evaluate(sets))


def test_trls_masks_answer_by_their_names_and_may_not_be_replaced(tmp_path: Path) -> None:
    keep = GRPOTrainer.get_off_policy_mask
    advantages, logprobs = torch.tensor([[1.0], [-1.0], [-1.0]]), torch.tensor([[-2.0], [-0.5], [-2.0]]).expand(3, 4)
    assert keep(advantages, logprobs, torch.zeros(3, 4), torch.ones(3, 4), 1.0).tolist() == [[1.0], [1.0], [0.0]]
    entropies, mask = torch.tensor([[0.1, 0.4, 0.3], [0.2, 0.5, 9.0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    marked = make_trainer(tmp_path).get_high_entropy_mask(entropies, mask, 0.75)
    assert marked.tolist() == [[False, True, False], [False, True, False]]
    with pytest.raises(TypeError, match="get_high_entropy_mask would never be called"):
        type("Mine", (GRPOTrainer,), {"get_high_entropy_mask": lambda *_: None})


def test_what_trls_trainer_has_as_attributes_is_read_and_what_nobody_would_read_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, temperature=0.7)
    assert (trainer.temperature, trainer.num_generations, trainer.beta) == (0.7, 4, 0.0)
    for name, told in (("beta", "set it in the configuration"), ("compute_loss", "pass the loss as loss_type")):
        with pytest.raises(AttributeError, match=f"GRPOTrainer.{name} cannot be set: {told}"):
            setattr(trainer, name, 0.1)


def test_prompts_and_reward_weights_that_are_set_take_the_place_of_the_first(tmp_path: Path) -> None:
    seen: list[str] = []

    def paid(prompts: list[str], **_: Any) -> list[float]:
        seen.extend(prompts)
        return [float(place) for place in range(len(prompts))]

    trainer = make_trainer(tmp_path, reward_funcs=paid, max_steps=1)
    trainer.train()
    trainer.train_dataset = [{"prompt": "9+9="}, {"prompt": "8+8="}]
    trainer.reward_weights = torch.tensor([0.5])
    assert trainer.train_dataset["prompt"] == ["9+9=", "8+8="]
    assert seen[0] in PROMPTS
    trainer.train()
    assert set(seen[8:]) == {"9+9=", "8+8="}
    assert trainer.history[-1]["reward"] == pytest.approx(0.5 * 3.5)
    with pytest.raises(ConfigError, match="reward_weights has 2 entries for 1 reward functions"):
        trainer.reward_weights = [1.0, 1.0]
    with pytest.raises(DataError, match="no 'prompt'"):
        trainer.train_dataset = [{"text": "9+9="}]
