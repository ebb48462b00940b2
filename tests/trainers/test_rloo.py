"""RLOO: TRL's weights from the same rollouts, one gradient however it is cut, and the budget that GRPO keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset

from memsafe_rl import ConfigError, RLOOConfig, RLOOTrainer, SimulatedMemory
from memsafe_rl.training.algorithms.advantages import leave_one_out_advantages
from memsafe_rl.types import Ragged, Trajectory
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer
from tests.trainers.helpers import PROMPTS, count_digits, cut, gradient_of, relative, trained, weights

LONGEST = 8
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "num_iterations": 2,
    "max_completion_length": LONGEST,
    "learning_rate": 0.05,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "shuffle_dataset": False,
}


def make_rloo(output_dir: Path, *, model: Any = None, policy: Any = None, rollout: Any = None, **more: Any) -> Any:
    return RLOOTrainer(
        model or tiny_model(),
        more.pop("reward_funcs", count_digits),
        RLOOConfig(output_dir=str(output_dir), **{**SETTINGS, "max_steps": 4, **more}),
        Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tiny_tokenizer(),
        rollout_func=rollout,
        memory_policy=policy,
    )


class Draws:
    """Random completions that depend on the call alone, some of them cut off, for both trainers."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, rows: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self._calls)
        self._calls += 1
        lengths = torch.randint(2, LONGEST + 1, (rows,), generator=generator).tolist()
        drawn = [torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
        return [ids if len(ids) == LONGEST else [*ids[:-1], tiny_tokenizer().eos_token_id] for ids in drawn]


def pay(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [sum(token < VOCAB_SIZE // 2 for token in ids) / 2 for ids in completion_ids]


def by_trl(folder: Path, output_dir: Path, **more: Any) -> torch.Tensor:
    trainer = trl.RLOOTrainer(
        str(folder),
        pay,
        trl.RLOOConfig(output_dir=str(output_dir), **{**SETTINGS, "gradient_checkpointing": False, **more}),
        Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tiny_tokenizer(),
    )
    draws = Draws()

    def generate(prompts: list[str]) -> tuple[Any, ...]:
        drawn = draws(len(prompts))
        return trainer.processing_class(text=prompts)["input_ids"], drawn, trainer.processing_class.batch_decode(drawn)

    trainer._generate = generate
    trainer.train()
    return weights(trainer)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TRL's own
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"normalize_advantages": True, "reward_clip_range": (0.5, 1.5), "epsilon": 1e-3, "epsilon_high": 2e-3},
        {"beta": 0.0, "mask_truncated_completions": True},
    ],
    ids=["defaults", "clipped", "no KL"],
)
def test_the_same_rollouts_give_the_weights_of_trl(settings: dict[str, Any], tmp_path: Path) -> None:
    """Twenty steps, two passes over each of ten rollouts; a row without a reward is in TRL's mean, and not in ours."""
    folder, draws = tmp_path / "model", Draws()
    model = tiny_model()
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    start = torch.cat([p.detach().flatten().double() for p in model.parameters()])

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        drawn = draws(len(prompts))
        ids = trainer.processing_class(text=prompts)["input_ids"]
        return {"prompt_ids": ids, "completion_ids": drawn, "logprobs": [[0.0] * len(ids) for ids in drawn]}

    settings = {"max_steps": 20, "vllm_importance_sampling_correction": False, **settings}
    trainer = make_rloo(tmp_path / "ours", model=str(folder), rollout=rollout, reward_funcs=pay, **settings)
    trainer.train()
    settings.pop("vllm_importance_sampling_correction")
    theirs = by_trl(folder, tmp_path / "theirs", **settings)
    distance = float((theirs - start).norm())
    assert distance > 1e-3
    assert float((weights(trainer) - theirs).norm()) < 1e-4 * distance


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_the_gradient_does_not_depend_on_the_cut(dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    """In float64 the second pass's, whose ratios are of stored log-probs, on both sides of the clip range."""
    steps = 2 if dtype is torch.float64 else 1

    def gradient(**plan: Any) -> torch.Tensor:
        model = tiny_model(dtype=dtype)
        return gradient_of(make_rloo(tmp_path, model=model, policy=cut(**plan), epsilon=0.05), steps)

    whole = gradient()
    for plan in ({"micro_batch_tokens": 1}, {"micro_batch_tokens": 60, "checkpointing": True, "logprob_tile": 3}):
        assert relative(gradient(**plan), whole) < tolerance, plan


@pytest.mark.slow
def test_rewards_pay_for_the_kl_and_the_first_ratio_is_1(tmp_path: Path) -> None:
    trainer = make_rloo(tmp_path, normalize_advantages=True, epsilon=1e-3, max_steps=4)
    trainer.train()
    first, second, third = trainer.history[:3]
    assert first["clip_ratio/region_mean"] == first["approx_kl/k3_token"] == 0.0 < second["clip_ratio/region_mean"]
    assert "kl" not in second  # of a rollout, at its first step
    assert first["kl"] == first["objective/kl"] == 0.0 != third["kl"]


def ragged(*rows: list[float]) -> Ragged:
    return Ragged.from_rows([torch.tensor(row) for row in rows])


def test_advantages_by_hand(tmp_path: Path) -> None:
    """Three rows of one group: bounded rewards, 0.5 a nat of KL over counted tokens, an unscored row left out."""
    config = RLOOConfig(str(tmp_path), num_generations=3, beta=0.5, reward_clip_range=(-1, 2), **BATCH)
    actions = ragged([1, 2], [3], [4])
    trajectory = Trajectory(
        conditions=ragged([7.0]),
        condition_of_row=(0, 0, 0),
        actions=actions,
        loss_mask=ragged([1, 1], [1], [0]),
        sampling_logprobs=None,
        advantages=torch.zeros(3),
        group_of_row=(0, 0, -1),
        finished=(True,) * 3,
        old_logprobs=ragged([-1.0, -2.0], [-1.0], [-1.0]),
        ref_logprobs=ragged([-1.5, -2.25], [-0.5], [9.0]),
    )
    found, metrics = leave_one_out_advantages(config).assign(trajectory, torch.tensor([5.0, 1.0, math.nan]), 3)
    scores = 2 - 0.5 * 0.75, 1 + 0.5 * 0.5
    assert found.advantages.tolist() == pytest.approx([scores[0] - scores[1], scores[1] - scores[0], 0.0])
    assert metrics["kl"] == pytest.approx((0.75 - 0.5) / 3)
    assert metrics["frac_reward_zero_std"] == 0.0
    free = replace(trajectory, ref_logprobs=None)  # 5 and 2 are both 2 within the bounds: nothing is to be learnt
    metrics = leave_one_out_advantages(config).assign(free, torch.tensor([5.0, 2.0, 3.0]), 3)[1]
    assert metrics["frac_reward_zero_std"] == 1.0


BATCH: dict[str, Any] = {"per_device_train_batch_size": 3, "use_cpu": True}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"reward_clip_range": (1.0, -1.0)}, "reward_clip_range is .* the lower one first"),
        ({"use_bias_correction_kl": False}, "use_bias_correction_kl is False in RLOO, whose KL stands in the rewards"),
        ({"num_generations": 1}, "num_generations is 1"),
        ({"loss_type": "grpo"}, "loss_type is 'grpo', but it is a setting of GRPO alone. Use GRPOConfig with"),
        ({"kl_coef": 0.1}, "setting of PPO alone"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        RLOOConfig(str(tmp_path), use_cpu=True, **settings)


@pytest.mark.slow
def test_a_budget_is_kept_and_the_forecast_is_what_the_run_holds(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_model(vocab_size=2000).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    more = {"generation_kwargs": {"min_new_tokens": LONGEST}, "memory_forecast": True, "max_steps": 2, "alarms": False}

    def run(room: int) -> tuple[Any, int]:
        with SimulatedMemory(room, exact=True) as memory:
            trainer = make_rloo(tmp_path / "run", model=str(folder), **more, overwrite_output_dir=True)
            trainer.train()
        return trainer, max(sum(parts.values()) for parts in memory.phase_peaks().values())

    roomy, most = run(2**30)
    assert roomy.forecast.peak_bytes == pytest.approx(most, rel=0.01)
    tight, least = run(int(most * 0.9))
    assert least <= most * 0.9
    assert relative(trained(tight), trained(roomy)) < 1e-5
