"""What may change the task: only what is listed, in that order, told, kept in checkpoints, and as if asked for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from memsafe_rl.config.degradation import LOSSY_REMEDIES, Degradation, next_degradation
from memsafe_rl.config.grpo import GRPOConfig
from memsafe_rl.errors import ConfigError, MemoryBudgetError
from memsafe_rl.memory.planning.policies import FixedPolicy
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.trainers.grpo import GRPOTrainer
from memsafe_rl.types import MemoryFailure, Phase, RolloutPlan, UpdatePlan
from tests.tiny import tiny_model
from tests.trainers.helpers import make_trainer, weights

LEAN = FixedPolicy(
    RolloutPlan(rows_in_flight=1, prefill_tokens=1, score_tokens=8),
    UpdatePlan(micro_batch_tokens=1, logprob_tile=8, checkpointing=True),
)
SETTINGS: dict[str, Any] = {
    "max_completion_length": 64,
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "policy": LEAN,
}


def build(folder: Path, capacity_bytes: int | None = None, **settings: Any) -> tuple[GRPOTrainer, SimulatedMemory]:
    """Trains on a simulated device; the model is part of it."""
    with SimulatedMemory(capacity_bytes) as memory:
        trainer = make_trainer(folder, model=tiny_model(), **{**SETTINGS, **settings})
        trainer.train()
    return trainer, memory


def peak_of(memory: SimulatedMemory) -> int:
    return max(sum(split.values()) for split in memory.phase_peaks().values())


@pytest.fixture(scope="module")
def too_small(tmp_path_factory: pytest.TempPathFactory) -> int:
    """A capacity in which completions of 16 tokens fit and those of 32 do not."""
    folder = tmp_path_factory.mktemp("measure")
    fits = peak_of(build(folder, max_completion_length=16)[1])
    does_not = peak_of(build(folder, max_completion_length=32)[1])
    assert fits < 0.97 * does_not
    return (fits + does_not) // 2


def failure(phase: Phase = Phase.UPDATE) -> MemoryFailure:
    return MemoryFailure(phase, 1, 1, "")


def evaluations(trainer: GRPOTrainer, no_room: int) -> list[tuple[int, int]]:
    """Notes step and longest completion of every evaluation, of which the one of that number does not fit."""
    asked: list[tuple[int, int]] = []

    def evaluate() -> dict[str, float]:
        asked.append((trainer.state.global_step, trainer.args.max_completion_length))
        if len(asked) == no_room:
            raise MemoryBudgetError("no room", failure=failure(Phase.EVALUATE))
        return trainer.loop.evaluate()

    trainer.loop.hooks = replace(trainer.loop.hooks, evaluate=evaluate)
    return asked


@pytest.mark.slow
def test_without_leave_the_error_comes_out_and_the_task_stays(tmp_path: Path, too_small: int) -> None:
    with SimulatedMemory(too_small):
        trainer = make_trainer(tmp_path, model=tiny_model(), **SETTINGS)
        with pytest.raises(MemoryBudgetError):
            trainer.train()
    assert trainer.args.max_completion_length == 64
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


@pytest.mark.slow
def test_completions_are_halved_until_they_fit_and_learnt_as_if_asked_for(tmp_path: Path, too_small: int) -> None:
    trainer, _ = build(tmp_path / "a", too_small, allow_lossy=["max_completion_length"])
    told = [event for event in trainer.memory_events if event["event"] == "degradation"]
    assert [event["changes"]["max_completion_length"] for event in told] == [(64, 32), (32, 16)]
    assert trainer.state.global_step == 2
    asked, _ = build(tmp_path / "b", max_completion_length=16)
    assert torch.equal(weights(trainer), weights(asked))


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_changed_task(tmp_path: Path, too_small: int) -> None:
    whole, _ = build(tmp_path / "a", too_small, allow_lossy=["max_completion_length"])
    build(
        tmp_path / "b",
        too_small,
        allow_lossy=["max_completion_length"],
        max_steps=1,
        save_strategy="steps",
        save_steps=1,
    )
    second = make_trainer(tmp_path / "b", model=tiny_model(), **SETTINGS, allow_lossy=["max_completion_length"])
    second.train(resume_from_checkpoint=True)
    assert second.args.max_completion_length == 16
    assert torch.equal(weights(second), weights(whole))


def test_an_evaluation_that_does_not_fit_is_made_again_under_the_changed_task(tmp_path: Path) -> None:
    """The step before it stays, and is saved; passes over a rollout are not what an evaluation lacks room for."""
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 2,
        "num_iterations": 2,
    }
    data = Dataset.from_dict({"prompt": ["4+4=", "5+5="]})
    allowed = ["num_iterations", "max_completion_length"]
    trainer = make_trainer(tmp_path, eval_dataset=data, allow_lossy=allowed, max_completion_length=32, **settings)
    asked = evaluations(trainer, no_room=2)
    trainer.train()
    assert [longest for _, longest in asked] == [32, 32, 16]
    assert (trainer.args.num_iterations, trainer.state.global_step) == (2, 2)
    assert (tmp_path / "checkpoint-2").is_dir()
    evaluated = [record["step"] for record in trainer.state.log_history if "eval_reward" in record]
    assert evaluated == [1, 2]


def test_an_evaluation_that_degrades_the_last_rollout_still_ends_in_a_checkpoint(tmp_path: Path) -> None:
    """What is left of the rollout is dropped, so that the step before it was the last one."""
    data, few = (Dataset.from_dict({"prompt": prompts}) for prompts in (["4+4="], ["1+1=", "2+2=", "3+3=", "4+4="]))
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 100}
    settings |= {"num_iterations": 2, "max_steps": -1, "num_train_epochs": 1, "allow_lossy": ["max_completion_length"]}
    trainer = make_trainer(tmp_path, train_dataset=few, eval_dataset=data, max_completion_length=32, **settings)
    asked = evaluations(trainer, no_room=3)
    trainer.train()
    assert [step for step, _ in asked] == [1, 2, 3, 3]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


def test_a_second_training_goes_on_with_the_changed_task(tmp_path: Path) -> None:
    model = tiny_model()
    model.generation_config.min_new_tokens = 5  # more than completions may have later
    trainer = make_trainer(tmp_path, model=model, max_steps=1)
    trainer.train()
    trainer.loop.apply(Degradation("max_completion_length", {"max_completion_length": (6, 4)}))
    trainer.train()
    assert trainer.history[-1]["completions/max_length"] == 4


def test_remedies_come_in_the_users_order_and_each_is_used_up_first(tmp_path: Path) -> None:
    config = GRPOConfig(
        str(tmp_path),
        max_completion_length=30,
        num_iterations=2,
        num_generations=8,
        optim="adamw_torch",
        report_to="none",
    )
    allowed = ["num_iterations", "max_completion_length", "num_generations", "optim"]
    taken = []
    while (degradation := next_degradation(config, allowed, failure())) is not None:
        taken.append((degradation.name, dict(degradation.changes)))
        for name, (_, value) in degradation.changes.items():
            setattr(config, name, value)
        config.validate()
    assert taken == [
        ("num_iterations", {"num_iterations": (2, 1)}),
        ("max_completion_length", {"max_completion_length": (30, 16)}),
        (
            "num_generations",
            {"num_generations": (8, 4), "per_device_train_batch_size": (8, 4), "generation_batch_size": (8, 4)},
        ),
        ("optim", {"optim": ("adamw_torch", "adamw_8bit")}),
    ]


def test_what_cannot_help_is_not_taken(tmp_path: Path) -> None:
    config = GRPOConfig(str(tmp_path), num_iterations=2, report_to="none")
    listed = list(LOSSY_REMEDIES)
    assert next_degradation(config, listed, failure(Phase.CHECKPOINT)).name == "optim"
    assert next_degradation(config, listed[:3], failure(Phase.OPTIMIZER)) is None
    assert next_degradation(config, [], failure()) is None


def test_an_unknown_remedy_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"allow_lossy.*lora_rank"):
        GRPOConfig(str(tmp_path), allow_lossy=["lora_rank"])


@pytest.mark.slow
def test_a_lean_optimizer_takes_the_place_of_one_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, max_steps=4, allow_lossy=["optim"], lr_scheduler_type="linear")
    steps, made = trainer.loop.step, []

    def fails_once() -> None:
        if trainer.state.global_step == 2 and not made:
            made.append(1)
            raise MemoryBudgetError("does not fit", failure=failure(Phase.OPTIMIZER))
        steps()

    monkeypatch.setattr(trainer.loop, "step", fails_once)
    trainer.train()
    assert type(trainer.optimizer).__module__.startswith("bitsandbytes")
    rates = [record["learning_rate"] for record in trainer.history]
    assert rates == pytest.approx([1e-2, 0.75e-2, 0.5e-2, 0.25e-2])


def test_a_smaller_group_takes_pass_at_k_down_with_it(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "eval_pass_at": [1, 4, 8]}
    config = GRPOConfig(**settings, num_generations=8)
    smaller = next_degradation(config, ["num_generations"], failure())
    assert smaller is not None
    assert smaller.changes["eval_pass_at"] == ([1, 4, 8], [1, 4])
    own = GRPOConfig(**settings, num_generations=8, num_generations_eval=8)
    kept = next_degradation(own, ["num_generations"], failure())
    assert kept is not None
    assert "eval_pass_at" not in kept.changes


def test_completions_are_not_cut_below_their_least_length(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "max_completion_length": 64}
    config = GRPOConfig(**settings, generation_kwargs={"min_new_tokens": 40})
    shorter = next_degradation(config, ["max_completion_length"], failure())
    assert shorter is not None
    assert shorter.changes == {"max_completion_length": (64, 40)}
    config.max_completion_length = 40
    config.validate()
    assert next_degradation(config, ["max_completion_length"], failure()) is None


@pytest.mark.slow
def test_a_least_length_that_the_model_declares_comes_down_with_the_longest(tmp_path: Path, too_small: int) -> None:
    model = tiny_model()
    model.generation_config.min_new_tokens = 20
    with SimulatedMemory(too_small):
        trainer = make_trainer(tmp_path, model=model, **SETTINGS, allow_lossy=["max_completion_length"])
        trainer.train()
    assert trainer.args.max_completion_length == 16
