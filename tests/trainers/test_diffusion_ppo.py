"""PPO on diffusion policies: a denoising chain as a decision process, every step an action, the reward at the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor, nn

from memsafe_rl import FixedPolicy, RolloutPlan, UpdatePlan
from memsafe_rl.config.ppo import PPOConfig
from memsafe_rl.errors import ConfigError, MemsafeError
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.models.diffusion.policy import Condition, TrainedSteps
from memsafe_rl.models.diffusion.state_critic import StateCritic, StateEncoder
from memsafe_rl.preflight.forecast import forecast_memory
from memsafe_rl.trainers.ppo import PPOTrainer
from tests.models.diffusion.small import PROMPTS, WIDTH, Denoiser, frames, make_policy
from tests.tiny import tiny_model
from tests.trainers.helpers import cut, gradient_of, relative, trained

LORA = {"r": 2, "target_modules": ["up", "down"]}


class Judge(nn.Module):
    """A user's own critic."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(15 + WIDTH + 1, width), nn.Linear(width, 1)

    def forward(self, x: Tensor, timesteps: Tensor, condition: Condition) -> Tensor:
        told = (condition.embedding_MLD * condition.mask_ML[..., None]).sum(1)
        time = timesteps.to(x.dtype)[:, None] / 1000
        return self.write(torch.tanh(self.read(torch.cat([x.flatten(1), told, time], 1))))[:, 0]


def bright(completions: list[Tensor], **_: Any) -> list[float]:
    return [float(sample.mean()) for sample in completions]


def make_trainer(
    folder: Path, critic: Any = None, *, policy: Any = None, plan: Any = None, peft: Any = None, **settings: Any
) -> PPOTrainer:
    usual: dict[str, Any] = {"per_device_train_batch_size": 8, "num_iterations": 2, "learning_rate": 1e-2}
    usual |= {"max_steps": 4, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True}
    usual |= {"disable_tqdm": True, "lr_scheduler_type": "constant", "epsilon": 1e-3, "alarms": False}
    reward = settings.pop("reward", bright)
    trainer = PPOTrainer(
        make_policy() if policy is None else policy,
        reward,
        PPOConfig(str(folder), **{**usual, **settings}),
        Dataset.from_dict({"prompt": list(PROMPTS) * 8}),
        peft_config=None if peft is None else LoraConfig(**peft),
        memory_policy=plan,
        critic=critic,
    )
    if critic is None:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():  # a head of zeros would hide its trunk's gradient
            weight = trainer.critic.head.weight
            weight.copy_(torch.randn(weight.shape, generator=generator) / 10)
    return trainer


@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("own", [False, True], ids=["small", "own"])
def test_a_run_learns_and_reports(own: bool, peft: Any, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Judge() if own else None, peft=peft, kl_target=1.0)
    assert isinstance(trainer.critic, StateCritic)
    before = trained(trainer)
    trainer.train()
    assert relative(trained(trainer), before) > 1e-3
    first, second = trainer.history[:2]
    assert first["approx_kl/k3_token"] == 0.0
    assert first["clip_ratio/region_mean"] == 0.0
    assert second["approx_kl/k3_token"] > 0.0
    for name in ("returns/mean", "values/mean", "explained_variance", "objective/kl", "kl_coef", "value_loss"):
        assert name in first, name
    assert first["loss"] == pytest.approx(first["policy_loss"] + 0.1 * first["value_loss"], rel=1e-5)


PLANS = {
    "one pair": cut(1),
    "few": cut(7),
    "recomputed": cut(6, checkpointing=True),
    "host": cut(5, offload_activations=True, trajectory_device="device"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("own", [False, True], ids=["small", "own"])
def test_no_cut_changes_the_gradient(own: bool, dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    """In float64 that of a later pass, whose old log-probs, values and returns are stored ones."""
    settings: dict[str, Any] = {"optim": "sgd", "beta": 0.1, "kl_coef": 0.1, "vf_coef": 1.0}

    def gradient(plan: Any) -> Tensor:
        torch.manual_seed(0)
        judge = Judge().to(dtype) if own else None
        policy = make_policy(dtype=dtype, state_dtype=dtype, elements=frames, trained_steps=TrainedSteps(0.6, True))
        trainer = make_trainer(tmp_path, judge, policy=policy, plan=plan, **settings)
        return gradient_of(trainer, 3 if dtype is torch.float64 else 1)

    whole = gradient(cut())
    assert whole.norm() > 0
    for name, plan in PLANS.items():
        assert relative(gradient(plan), whole) < tolerance, name


def by_hand(rewards: list[float], values: list[float], gamma: float, gae_lambda: float) -> list[float]:
    """Sums what is left of every error of a chain, step by step."""
    after = [*values[1:], 0.0]
    errors = [reward + gamma * later - now for reward, later, now in zip(rewards, after, values, strict=True)]
    return [sum((gamma * gae_lambda) ** (k - t) * errors[k] for k in range(t, len(errors))) for t in range(len(errors))]


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("steps", "judged"),
    [
        (None, [0, 1, 2, 3, 4]),
        (TrainedSteps(window=(1, 4)), [1, 2, 3]),
        (TrainedSteps(fraction=0.5), [0, 1]),
        (TrainedSteps(fraction=0.5, random=True), [0, 1, 2, 3, 4]),
        (TrainedSteps(fraction=0.5, random=True, window=(1, 5)), [1, 2, 3, 4]),
    ],
    ids=["all with noise", "window", "first half", "half at random", "half of a window at random"],
)
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_advantages_by_hand(steps: Any, judged: list[int], kl_coef: float, tmp_path: Path) -> None:
    """The last of six steps has no noise; the critic judges the steps that some rollout may learn from."""
    policy = make_policy(dtype=torch.float64, state_dtype=torch.float64, trained_steps=steps)
    settings: dict[str, Any] = {"gamma": 0.9, "gae_lambda": 0.8, "kl_coef": kl_coef, "whiten_advantages": False}
    trainer = make_trainer(tmp_path, policy=policy, **settings, steps_per_generation=1, num_iterations=1)
    trainer.loop.begin(None)
    trainer.loop.files.folder.release()
    trainer.loop.step()  # moves the policy away from its reference
    trajectory = trainer.loop.collect().trajectory
    counted = [column for column, mark in enumerate(trajectory.loss_mask.rows()[0].tolist()) if mark]
    assert set(counted) <= set(judged)
    reference = trainer.setup.reference_model
    conditions = trajectory.conditions.rows()
    for row in range(8):
        chain = [trajectory.starts[row], *trajectory.actions.rows()[row]]
        condition = trainer.adapter.condition([conditions[trajectory.condition_of_row[row]]])
        values, costs = [], []
        with torch.no_grad():
            for column in judged:
                state, time = chain[column][None], trainer.adapter.policy.scheduler.timesteps[[column]]
                values.append(float(trainer.critic.head(trainer.critic.network.model(state, time, condition))))
                ours, std = trainer.adapter.step(state, [column], condition)
                theirs = ours
                if reference is not None:
                    output = reference(state, time, condition)
                    theirs = trainer.adapter.policy.scheduler.mean(output, [column], state)
                costs.append(kl_coef * float(((ours - theirs) ** 2).mean() / (2 * std**2)))
        rewards = [-cost for cost in costs]
        rewards[-1] += bright([chain[-1].float()])[0]
        found = by_hand(rewards, values, 0.9, 0.8)
        for place, column in enumerate(judged):
            kept = column in counted
            advantage, returned = (
                store.rows()[row][column] for store in (trajectory.action_advantages, trajectory.returns)
            )
            assert float(advantage) == pytest.approx(found[place] if kept else 0.0, rel=1e-6, abs=1e-9)
            if kept:
                assert float(returned) == pytest.approx(found[place] + values[place], rel=1e-6, abs=1e-9)
    assert (trajectory.kl is not None) == (kl_coef > 0)


def test_half_of_the_steps_at_random_are_learnt_from_in_part(tmp_path: Path) -> None:
    policy = make_policy(trained_steps=TrainedSteps(fraction=0.5, random=True))
    trainer = make_trainer(tmp_path, policy=policy, plan=cut(64), max_steps=1)
    policy.denoiser.calls.clear()
    trainer.train()
    assert trainer.history[0]["clip_ratio/value"] >= 0
    trajectory_rows = trainer.history[0]["plan/micro_batches"]
    assert trajectory_rows == 1


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True], ids=["small", "own"])
def test_a_resumed_run_goes_on_bit_for_bit(own: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 5, "kl_target": 0.5, "kl_horizon": 50.0, "kl_coef": 0.1}

    def make(folder: str, **others: Any) -> PPOTrainer:
        torch.manual_seed(0)
        policy = make_policy(trained_steps=TrainedSteps(0.6, random=True))
        torch.manual_seed(1)
        return make_trainer(tmp_path / folder, Judge() if own else None, policy=policy, **settings, **others)

    whole = make("a")
    whole.train()
    make("b", save_strategy="steps", save_steps=1).train()
    for step in (2, 3):
        second = make("b")
        with torch.no_grad():
            for weight in second.critic.beside.parameters():
                weight.fill_(7.0)
        second.train(resume_from_checkpoint=str(tmp_path / "b" / f"checkpoint-{step}"))
        assert torch.equal(trained(second), trained(whole))
        for name in ("loss", "value_loss", "grad_norm"):
            assert [record[name] for record in second.history] == [record[name] for record in whole.history]
        scales = [trainer.setup.advantages.state_dict()["kl_scale"] for trainer in (second, whole)]
        assert scales[0] == scales[1] != 1.0


def peak_of(steps: int, tmp_path: Path) -> dict[Any, int]:
    policy = make_policy(steps=steps, denoiser=Denoiser(width=64))
    plan = FixedPolicy(RolloutPlan(rows_in_flight=2, score_tokens=4), UpdatePlan(micro_batch_tokens=4))
    with SimulatedMemory(2**30) as memory:
        trainer = make_trainer(tmp_path / str(steps), policy=policy, plan=plan, max_steps=1, num_iterations=1)
        trainer.train()
        return {phase: sum(parts.values()) for phase, parts in memory.phase_peaks().items()}


@pytest.mark.slow
def test_peaks_do_not_grow_with_the_steps(tmp_path: Path) -> None:
    few, many = peak_of(5, tmp_path), peak_of(80, tmp_path)
    for phase in ("rollout", "score", "update"):
        assert many[phase] == pytest.approx(few[phase], rel=0.01), phase


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True], ids=["small", "own"])
def test_a_critic_learns_what_a_prompt_tells(own: bool, tmp_path: Path) -> None:
    """The reward is the prompt's alone; the critic foresees it in every state of a chain."""

    def pay(prompts: list[Any], **_: Any) -> list[float]:
        return [float(prompt[0] > 0) for prompt in prompts]

    # A network of the user's own begins with random weights, and takes longer from some of them than from others.
    steps = 48 if own else 24
    settings: dict[str, Any] = {"reward": pay, "max_steps": steps, "num_iterations": 4, "kl_coef": 0.0, "vf_clip": None}
    trainer = make_trainer(tmp_path, Judge() if own else None, vf_coef=1.0, **settings)
    trainer.train()
    explained = [record["explained_variance"] for record in trainer.history if "explained_variance" in record]
    assert explained[0] < 0.3
    assert explained[-1] > 0.6


def test_evaluation_needs_no_critic(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    metrics = trainer.evaluate([{"prompt": PROMPTS[0]}])
    assert "eval_reward" in metrics


class Mixing(Judge):
    def forward(self, x: Tensor, timesteps: Tensor, condition: Condition) -> Tensor:
        values = super().forward(x, timesteps, condition)
        return values - values.mean()


class Wide(Judge):
    def forward(self, x: Tensor, timesteps: Tensor, condition: Condition) -> Tensor:
        return super().forward(x, timesteps, condition)[:, None]


class Detached(Judge):
    def forward(self, x: Tensor, timesteps: Tensor, condition: Condition) -> Tensor:
        return super().forward(x, timesteps, condition).detach()


class Odd(Judge):
    """Gives what a function makes of a critic's values."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor, timesteps: Tensor, condition: Condition) -> Tensor:
        return self.change(super().forward(x, timesteps, condition))


@pytest.mark.parametrize(
    ("critic", "words"),
    [
        (Odd(lambda values: values.round().long()), r"values of type torch.int64.*float type"),
        (Odd(lambda values: values > 0), r"values of type torch.bool.*float type"),
        (Odd(lambda values: values + 0j), r"values of type torch.complex64.*float type"),
        (Odd(lambda values: values * float("nan")), r"the values \[nan, nan, nan\].*Look at"),
        (Odd(lambda values: values / 0), r"the values \[-?inf.*Look at"),
        (Judge().to("meta"), "on the meta device.*to_empty"),
        ("adapter", r"critic is 'adapter' and the model a DiffusionPolicy.*critic\(x, t, condition\)"),
        (tiny_model(), r"critic is a Qwen3ForCausalLM, which reads tokens.*critic\(x, t, condition\)"),
        (Mixing(), "other values than alone"),
        (Wide(), r"gave a tensor of shape \(3, 1\).*shape \(rows,\)"),
        (Detached(), "carry no gradient"),
        (Judge().requires_grad_(False), "without a trainable weight"),
    ],
)
def test_a_critic_that_cannot_work_is_refused(critic: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        make_trainer(tmp_path, critic)


def test_values_that_are_not_finite_end_a_run_before_a_weight_moves(tmp_path: Path) -> None:
    judge = Judge()
    trainer = make_trainer(tmp_path, judge)
    with torch.no_grad():
        judge.write.bias.fill_(float("inf"))
    before = trained(trainer)[:-1]
    with pytest.raises(MemsafeError, match=r"value of row 0, action 0 is inf \(40 of 40 are.*vf_coef"):
        trainer.train()
    assert torch.equal(trained(trainer)[:-1], before)


def test_a_critic_has_weights_of_its_own(tmp_path: Path) -> None:
    policy, judge = make_policy(), Judge()
    judge.trunk = policy.denoiser
    with pytest.raises(ConfigError, match="shares weights with the model"):
        make_trainer(tmp_path, judge, policy=policy)


@pytest.mark.parametrize(("name", "value"), [("kl_estimator", "k3"), ("missing_eos_penalty", 1.0)])
def test_settings_of_tokens_are_refused(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value!r}.*Leave it out"):
        make_trainer(tmp_path, **{name: value})


def test_large_states_without_places_are_read_number_by_number() -> None:
    torch.manual_seed(0)
    encoder = StateEncoder((2048,), 2, 1000.0).requires_grad_(False)
    condition = Condition(torch.zeros(2, 1, 2), torch.ones(2, 1, dtype=torch.bool), None)
    states, times = torch.randn(2, 2048), torch.tensor([5, 9])
    first = encoder(states, times, condition)
    states[1] += torch.randn(2048)
    again = encoder(states, times, condition)
    assert torch.equal(again[0], first[0])
    assert relative(again[1], first[1]) > 1e-2


def test_large_states_are_pooled_over_what_counts() -> None:
    torch.manual_seed(0)
    encoder = StateEncoder((3, 500), 2, 1000.0).requires_grad_(False)
    condition = Condition(
        torch.zeros(2, 1, 2), torch.ones(2, 1, dtype=torch.bool), (torch.arange(500) < 40)[None, None]
    )
    states = torch.randn(2, 3, 500)
    first = encoder(states, torch.tensor([5, 9]), condition)
    states[:, :, 40:] = float("nan")
    assert torch.equal(encoder(states, torch.tensor([5, 9]), condition), first)
    states[:, :, :40] += 1.0
    assert relative(encoder(states, torch.tensor([5, 9]), condition), first) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "options", "peft", "own"),
    [
        ({}, {}, None, False),
        ({"beta": 0.1, "kl_coef": 0.0}, {"guidance_scale": 2.0}, None, True),
        (
            {"steps_per_generation": 2, "per_device_train_batch_size": 4},
            {"trained_steps": TrainedSteps(0.5)},
            None,
            False,
        ),
    ],
    ids=["KL in the reward", "guided, KL in the loss, own critic", "scored ahead, half of the steps"],
)
def test_a_run_holds_what_was_forecast(settings: Any, options: Any, peft: Any, own: bool, tmp_path: Path) -> None:
    def policy() -> Any:
        return make_policy(steps=12, denoiser=Denoiser(width=256, blocks=3), **options)

    critic = Judge(512) if own else None
    config = make_trainer(tmp_path / "config", **settings).args
    adapter = None if peft is None else LoraConfig(**peft)
    forecast = forecast_memory(policy(), config, device_bytes=2**30, device="cpu", peft_config=adapter, critic=critic)
    with SimulatedMemory(2**30) as memory:
        trainer = make_trainer(tmp_path / "run", Judge(512) if own else None, policy=policy(), peft=peft, **settings)
        trainer.train()
    held = {phase: sum(parts.values()) for phase, parts in memory.phase_peaks().items()}
    assert forecast.fits
    assert forecast.peak_bytes == pytest.approx(max(held.values()), rel=0.01)
    for phase in ("rollout", "score", "update", "optimizer"):
        assert forecast.phase_bytes[phase] == pytest.approx(held[phase], rel=0.03), phase
