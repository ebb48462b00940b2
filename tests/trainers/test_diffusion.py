"""GRPO on diffusion policies: the same trainer, from prompts that are embedded to weights that are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor, nn

from memsafe_rl.config.grpo import GRPOConfig
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.models.diffusion.adapter import DiffusionAdapter
from memsafe_rl.models.diffusion.policy import Condition, TrainedSteps
from memsafe_rl.preflight.forecast import forecast_memory
from memsafe_rl.trainers.grpo import GRPOTrainer
from memsafe_rl.types import Component
from tests.models.diffusion.small import PROMPTS, SHAPE, Denoiser, frames, make_policy
from tests.trainers.helpers import cut, relative, weights

LORA = {"r": 2, "target_modules": ["up", "down"]}


def bright(completions: list[Tensor], completion_ids: list[Tensor], **_: Any) -> list[float]:
    assert all(torch.equal(shown, plain) for shown, plain in zip(completions, completion_ids, strict=True))
    assert completions[0].shape == SHAPE
    return [float(sample.mean()) for sample in completions]


def make_trainer(folder: Path, *, policy: Any = None, plan: Any = None, peft: Any = None, **settings: Any) -> Any:
    usual: dict[str, Any] = {"per_device_train_batch_size": 8, "num_generations": 4, "learning_rate": 1e-2}
    usual |= {"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True}
    usual |= {"disable_tqdm": True, "lr_scheduler_type": "constant", "epsilon": 1e-3}
    return GRPOTrainer(
        make_policy() if policy is None else policy,
        bright,
        GRPOConfig(str(folder), **{**usual, **settings}),
        Dataset.from_dict({"prompt": list(PROMPTS) * 2}),
        peft_config=None if peft is None else LoraConfig(**peft),
        memory_policy=plan,
    )


@pytest.mark.slow
@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_run_learns_and_resumes_bitwise(peft: Any, beta: float, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 4, "num_iterations": 2, "beta": beta}
    settings |= {"save_strategy": "steps", "save_steps": 1}
    torch.manual_seed(0)
    whole = make_trainer(tmp_path / "whole", peft=peft, **settings)
    assert isinstance(whole.adapter, DiffusionAdapter)
    whole.train()
    assert whole.history[0]["approx_kl/k3_token"] == 0.0
    assert whole.history[1]["approx_kl/k3_token"] > 0.0
    assert ("kl" in whole.history[0]) == (beta > 0)
    torch.manual_seed(0)
    make_trainer(tmp_path / "parts", peft=peft, **{**settings, "max_steps": 3}).train()
    second = make_trainer(tmp_path / "parts", peft=peft, **settings)
    second.train(resume_from_checkpoint=True)
    assert torch.equal(weights(second), weights(whole))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_cut_changes_the_gradient(dtype: torch.dtype, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 1, "optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 1.0}
    plans = {"one pair": cut(1), "few": cut(7), "recomputed": cut(8, checkpointing=True), "waves": cut(64, 3)}
    plans["host"] = cut(5, offload_activations=True, trajectory_device="device")

    def gradient(name: str, plan: Any) -> Tensor:
        policy = make_policy(dtype=dtype, state_dtype=dtype, elements=frames)
        trainer = make_trainer(tmp_path / name, policy=policy, plan=plan, beta=0.1, **settings)
        before = weights(trainer)
        trainer.train()
        return weights(trainer) - before

    whole = gradient("whole", cut())
    assert whole.norm() > 0
    bound = 1e-6 if dtype is torch.float32 else 1e-12
    for name, plan in plans.items():
        # Other waves round the states that are drawn, and with them what is learnt from.
        assert relative(gradient(name, plan), whole) <= (10 * bound if name == "waves" else bound), name


def test_a_saved_policy_is_restored(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    other = make_trainer(tmp_path / "other")
    assert not torch.equal(weights(other), weights(trainer))
    other.loop.checkpoints.load_weights(tmp_path / "saved")
    assert torch.equal(weights(other), weights(trainer))


def test_steps_are_learnt_from_in_part(tmp_path: Path) -> None:
    policy = make_policy(trained_steps=TrainedSteps(fraction=0.5, random=True))
    trainer = make_trainer(tmp_path, policy=policy, max_steps=1, log_completions=True)
    trainer.train()
    assert trainer.history[0]["plan/micro_batches"] == 1
    assert trainer.args.max_completion_length == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.7}, r"temperature is 0.7.*states"),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, "importance_sampling_level is 'sequence'"),
        ({"top_p": 0.9}, "top_p is 0.9"),
        ({"loss_type": "vespo"}, "loss_type is 'vespo'"),
    ],
)
def test_what_is_for_tokens_is_refused_by_name(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, **settings)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("settings", "options", "peft"),
    [
        ({}, {}, None),
        ({"beta": 0.1, "num_iterations": 2}, {"guidance_scale": 2.0}, None),
        ({"steps_per_generation": 2, "per_device_train_batch_size": 4}, {"trained_steps": TrainedSteps(0.5)}, None),
        ({"beta": 0.1}, {}, LORA),
        ({}, {"guidance_scale": 2.0}, {"r": 8, "target_modules": ["up", "down", "read"]}),
    ],
    ids=["plain", "guided, KL to a copy", "scored ahead, half of the steps", "LoRA", "guided, LoRA"],
)
def test_a_run_holds_what_was_forecast(settings: Any, options: Any, peft: Any, tmp_path: Path) -> None:
    def policy() -> Any:
        return make_policy(steps=12, denoiser=Denoiser(width=256, blocks=3), **options)

    adapter = None if peft is None else LoraConfig(**peft)
    config = make_trainer(tmp_path / "config", **settings).args
    forecast = forecast_memory(policy(), config, device_bytes=2**30, device="cpu", peft_config=adapter)
    with SimulatedMemory(2**30) as memory:
        trainer = make_trainer(tmp_path / "run", policy=policy(), peft=peft, **settings)
        trainer.train()
    held = {phase: sum(parts.values()) for phase, parts in memory.phase_peaks().items()}
    assert forecast.fits
    # An adapter's input gets a gradient from two sides, which autograd joins in place.
    assert forecast.peak_bytes == pytest.approx(max(held.values()), rel=0.01)
    for phase, size in forecast.phase_bytes.items():
        if phase in held:
            assert size == pytest.approx(held[phase], rel=0.02), phase


class Mixing(Denoiser):
    """Looks at the whole batch, as batch norm does."""

    def forward(self, x: Tensor, timesteps: Tensor, condition: Condition) -> Tensor:
        out = super().forward(x, timesteps, condition)
        return out - out.mean(0, keepdim=True)


class Drawing(Denoiser):
    """Drops conditions at random, in eval mode too."""

    def forward(self, x: Tensor, timesteps: Tensor, condition: Condition) -> Tensor:
        return super().forward(x, timesteps, condition) + nn.functional.dropout(torch.ones_like(x))


@pytest.mark.parametrize("kind", [Mixing, Drawing])
def test_a_denoiser_whose_rows_depend_on_their_company_is_refused(kind: type, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="other answers than alone"):
        make_trainer(tmp_path, policy=make_policy(denoiser=kind()))


def test_a_stored_rollout_is_the_hosts_until_a_plan_wants_it_elsewhere(tmp_path: Path) -> None:
    """64 chains of 4 states and their noise are larger than the device is."""
    stored = 64 * 5 * 15 * 4
    with SimulatedMemory(2**30) as memory:
        trainer = make_trainer(
            tmp_path,
            policy=make_policy(steps=4),
            plan=cut(4, 4),
            per_device_train_batch_size=64,
            num_generations=32,
            max_steps=1,
        )
        trainer.train()
    held = {phase: parts.get(Component.TRAJECTORY, 0) for phase, parts in memory.phase_peaks().items()}
    assert max(held.values()) < stored / 8
    assert memory.host_peak_bytes >= stored
