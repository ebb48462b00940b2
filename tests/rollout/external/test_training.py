"""GRPO through each engine that is not the library's own: it learns, it is corrected, it follows the weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from memsafe_rl.errors import ConfigError, MemsafeError
from memsafe_rl.memory.planning.policies import FixedPolicy, LadderPolicy
from memsafe_rl.rollout.engines import continuous
from memsafe_rl.rollout.engines.vllm import VLLMEngine
from memsafe_rl.training.scorer import Scorer
from memsafe_rl.types import RolloutPlan, Trajectory
from tests.rollout.external.common import small_model
from tests.trainers.helpers import PROMPTS, make_trainer

VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed; `python -m benchmarks.vllm_engine` makes an environment",
)
ENGINES = [
    pytest.param("use_transformers_continuous_batching", id="continuous"),
    pytest.param("use_vllm", id="vllm", marks=[VLLM, pytest.mark.filterwarnings("default")]),
]


@pytest.fixture
def gaps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Collects, per rollout, the largest difference of the sampler's log-probs from the trainer's own, in nats."""
    seen: list[float] = []
    corrections = Scorer._corrections

    def noted(self: Any, trajectory: Trajectory) -> Any:
        assert trajectory.old_logprobs is not None
        assert trajectory.sampling_logprobs is not None
        seen.append(float((trajectory.old_logprobs.flat - trajectory.sampling_logprobs.flat).abs().max()))
        return corrections(self, trajectory)

    monkeypatch.setattr(Scorer, "_corrections", noted)
    return seen


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(character.isdigit() for character in text) / max(1, len(text)) for text in completions]


def trainer_with(engine: str, folder: Path, **settings: Any) -> Any:
    return make_trainer(
        folder, model=small_model(), **{"reward_funcs": share_of_digits, engine: True, "max_steps": 3, **settings}
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_it_learns(engine: str, tmp_path: Path, gaps: list[float]) -> None:
    trainer = trainer_with(engine, tmp_path, max_steps=12, learning_rate=1e-2, per_device_train_batch_size=32)
    trainer.train()
    rewards = [record["reward"] for record in trainer.history]
    # digits are 10 of 258 tokens
    assert sum(rewards[:3]) / 3 < 0.15
    assert sum(rewards[-3:]) / 3 > 0.6
    assert len(gaps) == 12
    assert max(gaps) < 1e-4  # both float32
    assert trainer.setup.memory.rollout_plan.engine == trainer.setup.engine.name


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("adapted", [False, True])
def test_log_probs_agree_over_epochs_and_evaluations(
    engine: str, adapted: bool, tmp_path: Path, gaps: list[float]
) -> None:
    trainer = trainer_with(
        engine,
        tmp_path,
        max_steps=6,
        num_iterations=2,
        eval_strategy="steps",
        eval_steps=2,
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS[:2]}),
        peft_config=LoraConfig(r=4, target_modules="all-linear") if adapted else None,
    )
    trainer.train()
    assert len(gaps) == 6  # of three rollouts and three evaluations, whose loss is corrected too
    assert max(gaps) < 1e-4
    assert sum("eval_reward" in record for record in trainer.state.log_history) == 3
    assert trainer.setup.engine.name == ("vllm" if engine == "use_vllm" else "continuous")
    assert all(map(torch.isfinite, (torch.tensor(record["loss"]) for record in trainer.history)))


@VLLM
@pytest.mark.filterwarnings("default")
def test_weights_that_are_not_synchronised_show(
    tmp_path: Path, gaps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    synchronise = VLLMEngine.synchronise
    monkeypatch.setattr(VLLMEngine, "synchronise", lambda self, _: synchronise(self, 0))
    trainer_with("use_vllm", tmp_path).train()
    assert gaps[0] < 1e-4
    assert min(gaps[1:]) > 1e-2


@VLLM
@pytest.mark.filterwarnings("default")
def test_a_failing_vllm_ends_the_run_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import LLMEngine

    trainer = trainer_with("use_vllm", tmp_path)

    def broken(self: Any) -> Any:
        raise RuntimeError("a kernel broke")

    monkeypatch.setattr(LLMEngine, "step", broken)
    with pytest.raises(MemsafeError, match=r"vLLM failed while it drew completions: RuntimeError: a kernel broke"):
        trainer.train()
    assert trainer.setup.engine._engine is None
    monkeypatch.undo()
    trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_memory_that_runs_out_in_it_is_planned_around(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Any = VLLMEngine if engine == "use_vllm" else continuous._Batching
    name = "_prepare" if engine == "use_vllm" else "draw"
    real, rows = getattr(kind, name), []

    def short_of_memory(self: Any, *arguments: Any, **named: Any) -> Any:
        plan = next(value for value in arguments if isinstance(value, RolloutPlan))
        rows.append(plan.rows_in_flight)
        if plan.rows_in_flight > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return real(self, *arguments, **named)

    monkeypatch.setattr(kind, name, short_of_memory)
    trainer = trainer_with(engine, tmp_path, policy=LadderPolicy(fallbacks=("rows_in_flight",)), max_steps=1)
    trainer.train()
    assert rows[:2] == [64, 64]  # the same plan once more, then leaner ones
    assert rows[-1] <= 4
    assert len(trainer.history) == 1


def test_a_policy_cannot_ask_for_another_engine(tmp_path: Path) -> None:
    policy = FixedPolicy(RolloutPlan(engine="vllm"))
    with pytest.raises(ConfigError, match=r"asks for the engine 'vllm', but the run's is 'continuous'"):
        trainer_with("use_transformers_continuous_batching", tmp_path, policy=policy).train()


def test_settings_that_an_engine_lacks_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"min_p is 0\.1, which the rollout engine 'continuous' cannot honour"):
        trainer_with("use_transformers_continuous_batching", tmp_path, min_p=0.1)
    with pytest.raises(ConfigError, match=r"rollout_func draws the completions itself"):
        trainer_with("use_transformers_continuous_batching", tmp_path, rollout_func=lambda *_: {})
