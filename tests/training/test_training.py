import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from memsafe_rl import FunctionEngine, PPOConfig, PPOTrainer
from memsafe_rl.errors import ConfigError, DataError, MemsafeError
from memsafe_rl.memory.planning.policies import MemoryPolicy
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.trainers.grpo import GRPOTrainer
from memsafe_rl.training.loop import collect
from memsafe_rl.training.scorer import Scorer
from memsafe_rl.types import MemoryState, RolloutPlan, RolloutWork, UpdatePlan, UpdateWork
from tests.tiny import dropping_model, tiny_model, tiny_tokenizer
from tests.trainers.helpers import PROMPTS, count_digits, cut, gradient_under, make_trainer, relative, weights

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def gradient_of(trainer: GRPOTrainer) -> torch.Tensor:
    """Runs a trainer's first step up to the commit and gives its gradient."""
    trainer.loop.begin(None)
    trainer.loop.files.folder.release()
    trainer.loop.state.rollout = trainer.loop.collect()
    trajectory, rows = (
        trainer.loop.state.rollout.trajectory,
        trainer.loop.learner.step_samples(trainer.loop.state.cursor),
    )
    terms = trainer.loop.learner.terms(trainer.loop.state.rollout, rows, trainer.loop.state.controllers)
    mine = trainer.loop.learner.local_rows(trajectory, rows)
    trainer.loop.learner.plan(trajectory, mine)
    trainer.loop.learner.gradient(trainer.loop.state.rollout, mine, terms, step=trainer.state.global_step)
    return torch.cat([p.grad.flatten().double() for p in trainer.model.parameters() if p.grad is not None])


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("estimator", ["rloo", "reinforce++", "maxrl", "opo"])
def test_a_run_takes_its_advantages_from_the_estimator_it_names(estimator: str, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, advantage_estimator=estimator, per_device_train_batch_size=16, max_completion_length=40
    )
    trainer.loop.begin(None)
    trainer.loop.files.folder.release()
    experience = trainer.loop.collect()
    rewards = torch.tensor([row["count_digits"] for row in experience.table], dtype=torch.float64)
    groups = rewards.view(-1, 4)
    lengths = torch.tensor(experience.trajectory.counted_actions).view(-1, 4)
    assert (lengths != lengths[:, :1]).any()
    expected = {
        "rloo": (groups - groups.mean(1, keepdim=True)).flatten() * 4 / 3,
        "reinforce++": (rewards - rewards.mean()) / (rewards.std() + 1e-4),
        "maxrl": (groups / groups.mean(1, keepdim=True) - 1).nan_to_num(nan=0.0).flatten(),
        "opo": (groups - (groups * lengths).sum(1, keepdim=True) / lengths.sum(1, keepdim=True)).flatten(),
    }[estimator]
    torch.testing.assert_close(experience.trajectory.advantages, expected.float())


def test_a_run_learns_logs_and_reports(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=3, num_iterations=2, alarms=False)
    before = weights(trainer)
    result = trainer.train()
    assert result.global_step == 3
    assert relative(weights(trainer), before) > 1e-3
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines[:3]] == [1, 2, 3]
    for name in ("loss", "reward", "reward_std", "rewards/count_digits/mean", "completions/mean_length", "grad_norm"):
        assert name in lines[0], name
    for name in ("entropy", "clip_ratio/region_mean", "clip_ratio/low_min", "clip_ratio/high_max", "num_tokens"):
        assert name in lines[0], name
    for name in ("memory/peak_bytes", "memory/update_peak_bytes", "plan/micro_batch_tokens", "learning_rate"):
        assert name in lines[0], name
    assert "reward" not in lines[1], "the second pass over a rollout has no new rewards"
    events = [json.loads(line) for line in (tmp_path / "memory.jsonl").read_text().splitlines()]
    assert [(event["kind"], event["step"]) for event in events] == [
        ("rollout", 0),
        ("update", 0),
        ("update", 1),
        ("rollout", 2),
        ("update", 2),
    ]
    assert [record["step"] for record in trainer.history] == [1, 2, 3]
    assert trainer.state.log_history[0]["reward"] == lines[0]["reward"]


@pytest.mark.slow
def test_equal_seeds_give_equal_runs_and_others_do_not(tmp_path: Path) -> None:
    ends = []
    for seed in (1, 1, 2):
        trainer = make_trainer(tmp_path, seed=seed)
        trainer.train()
        ends.append(weights(trainer))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


# float64 tells losses apart from rounding; float32 is what most runs learn in.
@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("dtype", "bound", "loss_type"),
    [
        (torch.float32, 1e-6, "dapo"),
        (torch.float32, 1e-6, "clip_cov"),
        *((torch.float64, 1e-12, loss) for loss in ("dapo", "grpo", "vespo", "kl_cov")),
    ],
)
def test_no_cut_changes_the_gradient(tmp_path: Path, dtype: torch.dtype, bound: float, loss_type: str) -> None:
    def made(**settings: Any) -> GRPOTrainer:
        batches = {"per_device_train_batch_size": 8, **settings}
        policy = batches.pop("policy", cut())
        return make_trainer(
            tmp_path, model=tiny_model(dtype=dtype), policy=policy, loss_type=loss_type, beta=0.04, **batches
        )

    def run(**settings: Any) -> torch.Tensor:
        return gradient_of(made(**settings))

    trainer = made()
    whole = gradient_of(trainer)
    assert whole.norm() > 0
    leaner = cut(checkpointing=True, logprob_tile=3), cut(30, offload_activations=True, trajectory_device="device")
    for policy in (cut(1), cut(30), *leaner):
        assert relative(gradient_under(trainer, policy), whole) < bound
    assert relative(run(policy=cut(17, rows_in_flight=3)), whole) < bound
    for accumulation in (2, 8):
        split = {"per_device_train_batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation}
        assert relative(run(**split), whole) < bound


def test_a_denominator_per_micro_batch_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memsafe_rl.training import gradient as update

    whole = gradient_of(make_trainer(tmp_path, policy=cut()))
    honest = update.policy_loss

    def planted(inputs: Any, settings: Any, denominators: Any) -> Any:
        local = type(denominators)(len(inputs.mask_BT), int(inputs.mask_BT.sum()), int(inputs.mask_BT.sum()))
        return honest(inputs, settings, local)

    monkeypatch.setattr(update, "policy_loss", planted)
    assert relative(gradient_of(make_trainer(tmp_path, policy=cut(30))), whole) > 1e-2


RESUMED = {"num_iterations": 3, "steps_per_generation": 2, "per_device_train_batch_size": 4, "beta": 0.1}


@pytest.fixture(scope="module", params=[None, LORA], ids=["full", "lora"])
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, GRPOTrainer]:
    """An adapter's settings, or None, and a run of eight steps with them."""
    torch.manual_seed(0)
    whole = make_trainer(tmp_path_factory.mktemp("whole"), max_steps=8, peft_config=request.param, **RESUMED)
    whole.train()
    return request.param, whole


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_resuming_at_any_step_is_bitwise(tmp_path: Path, stop: int, uninterrupted: tuple[Any, GRPOTrainer]) -> None:
    (peft, whole), settings = uninterrupted, RESUMED
    first = make_trainer(
        tmp_path / "parts", max_steps=8, peft_config=peft, save_strategy="steps", save_steps=stop, **settings
    )
    first.add_callback(StopAt(stop))
    first.train()
    assert not torch.equal(weights(first), weights(whole))
    second = make_trainer(tmp_path / "parts", max_steps=8, peft_config=peft, **settings)
    second.train(resume_from_checkpoint=True)
    assert torch.equal(weights(second), weights(whole))
    for mine, theirs in zip(second.history, whole.history, strict=True):
        assert mine["loss"] == theirs["loss"]
        assert mine["num_tokens"] == theirs["num_tokens"]


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.slow
def test_the_policy_is_asked_once_a_rollout_and_once_a_step(tmp_path: Path) -> None:
    calls: list[str] = []

    class Counting(MemoryPolicy):
        def before_rollout(self, work: RolloutWork, memory: MemoryState) -> RolloutPlan:
            calls.append("rollout")
            assert work.rows == 8
            return RolloutPlan()

        def before_update(self, work: UpdateWork, memory: MemoryState) -> UpdatePlan:
            calls.append("update")
            assert memory.last_rollout_plan is not None
            return UpdatePlan()

    trainer = make_trainer(
        tmp_path,
        policy=Counting(),
        max_steps=4,
        num_iterations=2,
        beta=0.1,
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS[:2]}),
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer.train()
    assert calls == ["rollout", "update", "update", "rollout", "update", "update"]


def test_the_first_ratio_is_exactly_one_and_later_old_logprobs_are_the_first_ones(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, num_iterations=2, max_steps=2)
    trainer.train()
    assert trainer.history[0]["approx_kl/k3_token"] == 0.0
    assert trainer.history[1]["approx_kl/k3_token"] > 0.0


@pytest.mark.slow
def test_old_logprobs_scored_ahead_equal_those_kept_from_the_first_update(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "num_generations": 4, "steps_per_generation": 2}
    trainer = make_trainer(tmp_path, max_steps=1, num_iterations=2, beta=0.1, **settings)
    trainer.train()
    trajectory = trainer.loop.state.rollout.trajectory
    assert all(trajectory.has_old)
    fresh = make_trainer(tmp_path, max_steps=1, num_iterations=2, beta=0.1, **settings)
    fresh.loop.begin(None)
    fresh.loop.files.folder.release()
    experience = collect(fresh.loop.collector, fresh.loop.state, range(8))
    gap = experience.trajectory.old_logprobs.flat - trajectory.old_logprobs.flat
    assert gap.abs().max() < 1e-5


@pytest.mark.slow
def test_rows_without_advantage_are_skipped_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half_flat(completions: list[str], **_: Any) -> list[float]:
        rewards = count_digits(completions)
        return [0.0] * 4 + rewards[4:]

    skipping = make_trainer(tmp_path, reward_funcs=half_flat, policy=cut(1))
    whole = make_trainer(tmp_path, reward_funcs=half_flat, policy=cut(1))
    mine = gradient_of(skipping)
    monkeypatch.setattr(type(whole.args), "every_row_learns", property(lambda _: True))
    assert relative(mine, gradient_of(whole)) < 1e-6
    assert len(skipping.loop.learner.local_rows(skipping.loop.state.rollout.trajectory, range(8))) == 4


def test_a_step_without_any_token_to_run_logs_no_entropy(tmp_path: Path) -> None:
    """Callbacks compare what they find in a log with numbers."""
    trainer = make_trainer(tmp_path, reward_funcs=lambda completions, **_: [0.0] * len(completions), max_steps=1)
    trainer.train()
    (record,) = (one for one in trainer.state.log_history if "loss" in one)
    assert "entropy" not in record
    assert None not in record.values()


def test_a_row_that_nobody_scored_counts_for_nothing(tmp_path: Path) -> None:
    def some(completions: list[str], **_: Any) -> list[float | None]:
        rewards: list[float | None] = list(count_digits(completions))
        rewards[2] = None
        return rewards

    trainer = make_trainer(tmp_path, reward_funcs=some, loss_type="grpo", beta=0.1)
    gradient_of(trainer)
    trajectory = trainer.loop.state.rollout.trajectory
    terms = trainer.loop.learner.terms(trainer.loop.state.rollout, range(8), trainer.loop.state.controllers)
    assert terms.denominators.rows == 7
    assert terms.denominators.tokens == sum(trajectory.actions.lengths) - trajectory.actions.lengths[2]
    assert 2 not in trainer.loop.learner.local_rows(trajectory, range(8))


def test_kl_stop_ends_the_passes_over_this_rollout_only(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, num_iterations=4, max_steps=6, kl_stop=1e-9)
    trainer.train()
    assert [event["step"] for event in trainer.memory_events if event["event"] == "kl_stop"] == [2, 4, 6]
    assert [("reward" in record) for record in trainer.history] == [True, False] * 3


def test_the_kl_that_is_watched_is_that_of_the_rows_that_were_run(tmp_path: Path) -> None:
    def flat_for_some(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        rewards = count_digits(completions)
        return [one if prompt in prompts[:12] else 0.0 for prompt, one in zip(prompts, rewards, strict=True)]

    trainer = make_trainer(
        tmp_path, reward_funcs=flat_for_some, num_iterations=2, per_device_train_batch_size=16, optim="sgd"
    )
    trainer.loop.begin(None)
    trainer.loop.step()
    trajectory = trainer.loop.state.rollout.trajectory
    rows = [row for row, differs in enumerate(trajectory.has_advantage) if differs]
    assert 0 < len(rows) < len(trajectory) == 16
    mine, scored = Scorer(trainer.setup).passed(trainer.setup.adapter, trajectory, rows)
    old = trajectory.old_logprobs.pad(list(mine), 0, torch.device("cpu"))
    log_ratios = [one.logprobs - old[place, : len(one.logprobs)] for place, one in enumerate(scored)]
    trainer.loop.step()
    second = trainer.history[1]
    tokens = torch.cat(log_ratios)
    assert second["approx_kl/k3_token"] == pytest.approx(float((tokens.expm1() - tokens).mean()), rel=1e-4)
    assert second["approx_kl/k1_token"] == pytest.approx(-float(tokens.mean()), rel=1e-4)
    sums = torch.stack([log_ratio.sum() for log_ratio in log_ratios])
    assert second["approx_kl/k3_sequence"] == pytest.approx(float((sums.expm1() - sums).mean()), rel=1e-4)
    assert second["approx_kl/k1_sequence"] == pytest.approx(-float(sums.mean()), rel=1e-4)


@pytest.mark.slow
def test_dynamic_sampling_replaces_flat_groups_and_consumes_their_prompts(tmp_path: Path) -> None:
    def flat_for_zero(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        rewards = count_digits(completions)
        return [0.0 if prompt.startswith("0") else reward for prompt, reward in zip(prompts, rewards, strict=True)]

    trainer = make_trainer(
        tmp_path, reward_funcs=flat_for_zero, dynamic_sampling=True, shuffle_dataset=False, max_steps=1
    )
    trainer.train()
    assert trainer.loop.state.cursor.position > 2
    assert trainer.history[0]["frac_reward_zero_std"] == 0.0
    limited = make_trainer(
        tmp_path,
        reward_funcs=lambda completions, **_: [1.0] * len(completions),
        dynamic_sampling=True,
        dynamic_sampling_max_rounds=2,
        max_steps=1,
    )
    limited.train()
    assert limited.loop.state.cursor.position == 6


def test_dynamic_sampling_reads_rewards_that_count(tmp_path: Path) -> None:
    """A function of weight 0 is for the log alone."""
    settings = {"dynamic_sampling": True, "dynamic_sampling_max_rounds": 2, "max_steps": 1}
    judged = {"reward_funcs": [lambda completions, **_: [1.0] * len(completions), count_digits]}
    trainer = make_trainer(tmp_path, reward_weights=[1.0, 0.0], **judged, **settings)
    trainer.train()
    assert trainer.loop.state.cursor.position == 6
    with pytest.raises(ConfigError, match=r"reward_weights are \[0.0, 0.0\]: with them all groups are equal"):
        make_trainer(tmp_path / "b", reward_weights=[0.0, 0.0], **judged, **settings)


def test_lora_trains_only_the_adapter_and_its_reference_is_the_base(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, peft_config=LORA, beta=0.1, max_steps=3)
    base = {name: p.clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    assert all(torch.equal(base[name], p) for name, p in trainer.model.named_parameters() if name in base)
    assert trainer.history[0]["kl"] == pytest.approx(0.0, abs=1e-9)
    assert trainer.history[2]["kl"] > 0
    trainer.save_model(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_and_keeps_weights_wide(tmp_path: Path, precision: str) -> None:
    trainer = make_trainer(tmp_path, **{precision: True})
    before = weights(trainer)
    trainer.train()
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
    assert relative(weights(trainer), before) > 0
    assert trainer.history[0]["approx_kl/k3_token"] == 0.0


@pytest.mark.slow_after(5)
@pytest.mark.parametrize(
    "settings",
    [
        {"top_entropy_quantile": 0.5},
        {"entropy_coef": 0.01},
        {"use_adaptive_entropy": True, "entropy_target": 100.0},
        {"mask_truncated_completions": True},
        {"scale_rewards": "batch"},
        {"optim": "sgd"},
        {"off_policy_mask_threshold": 0.5},
        {"sync_ref_model": True, "beta": 0.1, "ref_model_sync_steps": 1},
        {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1},
        {"trajectory_device": "device"},
        {"disable_dropout": False},
    ],
)
def test_every_option_trains(tmp_path: Path, settings: dict[str, Any]) -> None:
    trainer = make_trainer(tmp_path, num_iterations=2, **settings)
    before = weights(trainer)
    trainer.train()
    assert torch.isfinite(weights(trainer)).all()
    assert settings.get("mask_truncated_completions") or relative(weights(trainer), before) > 0


def test_the_synced_reference_moves_by_the_mixture(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, sync_ref_model=True, beta=0.1, ref_model_sync_steps=1, ref_model_mixup_alpha=0.25, max_steps=1
    )
    before = [parameter.clone() for parameter in trainer.setup.reference_model.parameters()]
    trainer.train()
    references = before, trainer.setup.reference_model.parameters(), trainer.model.parameters()
    for old, new, model in zip(*references, strict=True):
        assert torch.allclose(new, 0.75 * old + 0.25 * model, atol=1e-6)


@pytest.mark.parametrize("given", ["a config", "an adapter"])
def test_a_reference_that_cannot_follow_is_not_to_be_synced(given: str, tmp_path: Path) -> None:
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    more = {"peft_config": lora} if given == "a config" else {"model": get_peft_model(tiny_model(), lora)}
    with pytest.raises(ConfigError, match="sync_ref_model is True, but the reference of an adapter"):
        make_trainer(tmp_path, sync_ref_model=True, beta=0.1, **more)


def test_a_reference_of_other_shapes_is_not_to_be_synced(tmp_path: Path) -> None:
    """It ended the run at the first sync."""
    with pytest.raises(ConfigError, match="the Qwen3ForCausalLM that is the reference has weights of other shapes"):
        PPOTrainer(
            tiny_model(),
            count_digits,
            PPOConfig(str(tmp_path), sync_ref_model=True, beta=0.1, use_cpu=True, max_completion_length=6),
            [{"prompt": prompt} for prompt in PROMPTS],
            processing_class=tiny_tokenizer(),
            ref_model=tiny_model(layers=1),
        )


def test_a_record_of_several_steps_has_the_last_count_of_tokens(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, logging_steps=2, max_steps=4)
    trainer.train()
    counts = {record["step"]: record["num_tokens"] for record in trainer.history if "num_tokens" in record}
    logged = [record["num_tokens"] for record in trainer.state.log_history if "num_tokens" in record]
    assert logged == [counts[2], counts[4]]
    assert counts[1] < counts[2] < counts[3] < counts[4]


def test_adaptive_entropy_steps_once_a_step(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, use_adaptive_entropy=True, entropy_target=100.0, entropy_coef=0.1, entropy_coef_delta=0.02
    )
    trainer.train()
    assert [record["entropy_coef"] for record in trainer.history] == pytest.approx([0.12, 0.14])


def test_gradients_are_clipped_to_the_norm_asked_for(tmp_path: Path) -> None:
    steps = []
    for bound in (0.0, 0.01):
        trainer = make_trainer(tmp_path, optim="sgd", max_grad_norm=bound, max_steps=1)
        before = weights(trainer)
        trainer.train()
        steps.append(float((weights(trainer) - before).norm()) / 1e-2)
    assert steps[0] == pytest.approx(trainer.history[0]["grad_norm"], rel=1e-4)
    assert steps[1] == pytest.approx(0.01, rel=1e-3)


def test_an_fp16_overflow_leaves_weights_and_schedule_alone(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, fp16=True, max_steps=2, lr_scheduler_type="linear")
    trainer.loop.begin(None)
    trainer.loop.files.folder.release()
    trainer.setup.committed.scaler.scale(torch.ones(1))
    trainer.setup.committed.scaler._scale.fill_(2.0**120)
    before = weights(trainer)
    trainer.loop.step()
    assert torch.equal(weights(trainer), before)
    assert trainer.setup.committed.learning_rate == 1e-2
    assert trainer.setup.committed.scaler.get_scale() == 2.0**119


def test_a_gradient_that_is_not_finite_moves_no_weight_and_is_told(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=3, save_strategy="steps", save_steps=1000)
    embedding = trainer.model.get_input_embeddings().weight
    backwards = itertools.count()

    def broken(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (float("nan") if next(backwards) else 1.0)

    embedding.register_hook(broken)
    with pytest.raises(MemsafeError, match=r"gradient of step 2 is not finite \(norm nan\); no weight has moved"):
        trainer.train()
    assert weights(trainer).isfinite().all()
    assert [record["step"] for record in trainer.history] == [1.0]
    assert (tmp_path / "checkpoint-1").is_dir()


def test_the_schedule_moves_once_a_step(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, lr_scheduler_type="linear", max_steps=4)
    trainer.train()
    assert [record["learning_rate"] for record in trainer.history] == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])


def test_a_step_without_any_advantage_still_moves_momentum_and_decay(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, reward_funcs=lambda completions, **_: [1.0] * len(completions), weight_decay=0.1, max_steps=1
    )
    before = trainer.model.model.layers[0].mlp.up_proj.weight.detach().clone()
    trainer.train()
    after = trainer.model.model.layers[0].mlp.up_proj.weight
    assert torch.allclose(after, before * (1 - 1e-2 * 0.1), rtol=1e-6)
    assert trainer.history[0]["grad_norm"] == 0.0


@pytest.mark.slow
def test_dropout_is_off_in_the_update_unless_asked_for(tmp_path: Path) -> None:
    quiet = [gradient_of(make_trainer(tmp_path, model=dropping_model(), policy=cut(tokens))) for tokens in (8192, 1)]
    assert relative(quiet[1], quiet[0]) < 1e-6
    noisy = gradient_of(make_trainer(tmp_path, model=dropping_model(), disable_dropout=False))
    assert relative(noisy, quiet[0]) > 1e-2


@pytest.mark.slow
def test_a_checkpointed_plan_holds_fewer_bytes_in_eval_mode(tmp_path: Path) -> None:
    peaks = []
    for checkpointing in (False, True):
        trainer = make_trainer(
            tmp_path,
            model=tiny_model(layers=8, hidden=64),
            policy=cut(checkpointing=checkpointing, logprob_tile=16),
            max_completion_length=32,
        )
        with SimulatedMemory() as memory:
            gradient_of(trainer)
            peaks.append(memory.peak_bytes)
    assert peaks[1] < 0.6 * peaks[0]


def test_unused_columns_never_reach_a_reward_when_they_are_removed(tmp_path: Path) -> None:
    seen: list[set[str]] = []

    def watching(completions: list[str], **columns: Any) -> list[float]:
        seen.append(set(columns))
        return count_digits(completions)

    dataset = Dataset.from_dict({"prompt": PROMPTS, "answer": PROMPTS})
    for remove in (False, True):
        make_trainer(
            tmp_path, reward_funcs=watching, train_dataset=dataset, remove_unused_columns=remove, max_steps=1
        ).train()
    assert "answer" in seen[0]
    assert "answer" not in seen[1]


def test_vespo_refuses_a_sequence_weight_for_every_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vllm_importance_sampling_mode is 'sequence_mask' with loss_type 'vespo'"):
        make_trainer(tmp_path, loss_type="vespo", rollout_func=lambda *_: {})


@pytest.mark.slow
def test_evaluation_changes_neither_weights_nor_samples(tmp_path: Path) -> None:
    prompts = Dataset.from_dict({"prompt": PROMPTS[:3]})
    plain = make_trainer(tmp_path)
    plain.train()
    watched = make_trainer(
        tmp_path, eval_dataset=prompts, eval_strategy="steps", eval_steps=1, num_generations_eval=2, eval_on_start=True
    )
    watched.train()
    assert torch.equal(weights(plain), weights(watched))
    evaluations = [log for log in watched.state.log_history if "eval_reward" in log]
    assert len(evaluations) == 3
    assert watched.evaluate({"a": prompts, "b": prompts})["eval_b_reward"] == evaluations[-1]["eval_reward"]
    with pytest.raises(ConfigError, match="evaluate\\(\\) needs prompts"):
        plain.evaluate()


@pytest.mark.slow
def test_a_users_rollout_is_used_and_checked(tmp_path: Path) -> None:
    def constant(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = trainer.processing_class(text=prompts)["input_ids"]
        completions = [[20 + i, 30, 1] for i in range(len(prompts))]
        masks = [[1, 0, 1] for _ in prompts]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None, "env_mask": masks}

    trainer = make_trainer(tmp_path, rollout_func=constant, max_steps=1)
    trainer.train()
    assert trainer.history[0]["completions/mean_length"] == 2
    assert trainer.history[0]["completions/clipped_ratio"] == 0.0
    wrong = make_trainer(tmp_path, rollout_func=lambda *_: {"completion_ids": []}, max_steps=1)
    with pytest.raises(DataError, match=r"rollout_func returned no \['logprobs', 'prompt_ids'\]"):
        wrong.train()


def test_a_users_logprobs_only_correct_importance(tmp_path: Path) -> None:
    def shifted(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = trainer.processing_class(text=prompts)["input_ids"]
        completions = [[20 + i, 30, 1] for i in range(len(prompts))]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[-5.0] * 3 for _ in prompts]}

    trainer = make_trainer(
        tmp_path, rollout_func=shifted, max_steps=1, vllm_importance_sampling_mode="token_truncate", num_iterations=2
    )
    trainer.train()
    trajectory = trainer.loop.state.rollout.trajectory
    expected = (trajectory.old_logprobs.flat + 5.0).exp().clamp(max=3.0)
    assert torch.allclose(trajectory.importance_weights.flat, expected)
    assert trainer.history[0]["approx_kl/k3_token"] < 1e-9


def test_a_weight_of_three_makes_three_gradients(tmp_path: Path) -> None:
    def far_off(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = trainer.processing_class(text=prompts)["input_ids"]
        completions = [[20 + i, 48, 1] for i in range(len(prompts))]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[-100.0] * 3 for _ in prompts]}

    settings: dict[str, Any] = {"rollout_func": far_off, "vllm_importance_sampling_mode": "token_truncate"}
    plain = gradient_of(make_trainer(tmp_path, vllm_importance_sampling_correction=False, **settings))
    weighted = gradient_of(make_trainer(tmp_path, vllm_importance_sampling_clip_max=3.0, **settings))
    assert plain.norm() > 0
    assert relative(weighted, 3 * plain) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("weighs", [True, False])
def test_what_the_sampler_saw_otherwise_is_rejected_and_counted(tmp_path: Path, weighs: bool) -> None:
    def drawn(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = trainer.processing_class(text=prompts)["input_ids"]
        # The middle token is as good as certain to the sampler, about 1 in 64 to the model.
        completions = [[20 + i, 48, 1] for i in range(len(prompts))]
        logprobs = [[None, -0.01, None] for _ in prompts]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs}

    settings: dict[str, Any] = {
        "rollout_func": drawn,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_correction": weighs,
        "sampler_rejection": "token_k1",
    }
    trainer = make_trainer(tmp_path, sampler_rejection_limit=1.0, max_steps=1, num_iterations=2, **settings)
    trainer.train()
    trajectory = trainer.loop.state.rollout.trajectory
    assert trajectory.importance_weights.flat.tolist() == [1, 0, 1] * len(trajectory)
    assert trainer.history[0]["sampling/rejected_tokens"] == pytest.approx(1 / 3)
    assert trainer.history[0]["sampling/rejected_rows"] == 0
    whole = make_trainer(
        tmp_path, max_steps=1, **{**settings, "sampler_rejection": "sequence_k1"}, sampler_rejection_limit=0.5
    )
    whole.train()
    assert whole.history[0]["sampling/rejected_rows"] == whole.history[0]["sampling/rejected_tokens"] == 1
    assert whole.history[0]["grad_norm"] == 0
    kept = gradient_of(make_trainer(tmp_path, sampler_rejection_limit=9.0, **settings))
    assert relative(gradient_of(make_trainer(tmp_path, sampler_rejection_limit=1.0, **settings)), kept) > 1e-3


def test_vespo_refuses_rejected_tokens_of_another_sampler(tmp_path: Path) -> None:
    rejecting: dict[str, Any] = {"sampler_rejection": "token_k3", "sampler_rejection_limit": 1.0}
    with pytest.raises(ConfigError, match="sampler_rejection is 'token_k3' with loss_type 'vespo'"):
        make_trainer(tmp_path, loss_type="vespo", rollout_func=lambda *_: {}, **rejecting)


@pytest.mark.slow
def test_a_stream_of_prompts_trains_and_resumes(tmp_path: Path) -> None:
    def stream() -> IterableDataset:
        return IterableDataset.from_generator(lambda: ({"prompt": prompt} for prompt in PROMPTS))

    whole = make_trainer(tmp_path / "a", train_dataset=stream(), max_steps=4)
    whole.train()
    first = make_trainer(tmp_path / "b", train_dataset=stream(), max_steps=4, save_strategy="steps", save_steps=2)
    first.add_callback(StopAt(2))
    first.train()
    second = make_trainer(tmp_path / "b", train_dataset=stream(), max_steps=4)
    second.train(resume_from_checkpoint=True)
    assert torch.equal(weights(second), weights(whole))
    assert [record["epoch"] for record in second.history] == [0.25, 0.5, 0.75, 1.0]  # TRL's, for want of a length


@pytest.mark.slow
def test_a_stream_may_leave_out_prompts_that_are_too_long(tmp_path: Path) -> None:
    def trained(folder: Path, *prompts: str) -> torch.Tensor:
        stream = IterableDataset.from_generator(lambda: ({"prompt": prompt} for prompt in prompts))
        limit: dict[str, Any] = {"max_prompt_length": 20, "overlong_prompts": "filter"}
        trainer = make_trainer(folder, train_dataset=stream, max_steps=3, **limit)
        trainer.train()
        return weights(trainer)

    assert torch.equal(trained(tmp_path / "a", "a", "b" * 30, "c", "d"), trained(tmp_path / "b", "a", "c", "d"))
    with pytest.raises(DataError, match="overlong_prompts leaves"):
        trained(tmp_path / "c", "b" * 30)


@pytest.mark.slow
def test_an_interrupted_run_is_saved_whole_and_goes_on_as_if_nothing_happened(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "a", max_steps=4, save_strategy="steps", save_steps=100)
    whole.train()
    calls = []

    def interrupting(completions: list[str], **_: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return count_digits(completions)

    interrupting.__name__ = "count_digits"
    first = make_trainer(tmp_path / "b", reward_funcs=interrupting, max_steps=4, save_strategy="steps", save_steps=100)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    second = make_trainer(tmp_path / "b", max_steps=4)
    second.train(resume_from_checkpoint=True)
    assert torch.equal(weights(second), weights(whole))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_dataset": None}, "train_dataset is None"),
        ({"train_dataset": Dataset.from_dict({"prompt": []})}, "train_dataset is empty"),
        ({"train_dataset": Dataset.from_dict({"question": ["a"]})}, "no 'prompt'"),
        ({"train_dataset": Dataset.from_dict({"prompt": ["a" * 400] * 4})}, "Set overlong_prompts"),
        ({"max_completion_length": 300}, "max_completion_length is 300"),
        ({"reward_funcs": []}, "reward"),
    ],
)
def test_bad_input_is_refused_in_one_line(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        make_trainer(tmp_path, **settings)
    assert "\n" not in str(caught.value)


def test_bad_input_is_refused_before_any_weight_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memsafe_rl.training.assembly import language_models
    from tests.tiny import tiny_tokenizer

    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    monkeypatch.setattr(language_models, "load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(DataError, match="empty"):
        make_trainer(tmp_path, model=str(folder), train_dataset=Dataset.from_dict({"prompt": []}))


def test_wrong_rewards_name_the_function_and_the_counts(tmp_path: Path) -> None:
    def short(completions: list[str], **_: Any) -> list[float]:
        return [1.0]

    with pytest.raises(DataError, match=r"'short'.*1.*8"):
        make_trainer(tmp_path, reward_funcs=short).train()


def test_a_tool_that_cannot_be_described_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="The tool 'len' cannot be described"):
        GRPOTrainer(
            tiny_model(),
            count_digits,
            make_trainer(tmp_path).args,
            Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tiny_tokenizer(),
            tools=[len],
        )


@pytest.mark.slow
def test_training_twice_starts_over_with_the_weights_as_they_are(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.train()
    once = weights(trainer)
    assert trainer.train().global_step == 2
    assert [record["step"] for record in trainer.history] == [1, 2]
    assert not torch.equal(weights(trainer), once)


@pytest.mark.slow
def test_completions_are_logged_with_the_log_also_after_a_resume(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_iterations": 2, "log_completions": True, "max_steps": 4}
    first = make_trainer(tmp_path, save_strategy="steps", save_steps=1, callbacks=[StopAt(1)], **settings)
    first.train()
    second = make_trainer(tmp_path, **settings)
    second.train(resume_from_checkpoint=True)
    assert sorted(path.name for path in (tmp_path / "completions").iterdir()) == [
        "completions_00001.jsonl",
        "completions_00003.jsonl",
    ]


def test_callbacks_see_the_run_in_order(tmp_path: Path) -> None:
    seen: list[str] = []

    class Watching(TrainerCallback):
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("on_"):
                return super().__getattribute__(name)
            return lambda *_, **__: seen.append(name)

    trainer = make_trainer(tmp_path, callbacks=[Watching()], max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    within = ["on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"]
    order = ["on_init_end", "on_train_begin", *within, "on_log", "on_save", "on_log", "on_train_end"]
    assert [event for event in seen if event in order] == order


@pytest.mark.parametrize(("max_steps", "epochs"), [(1, 1), (4, 1), (9, 3)])
def test_an_epoch_begins_after_the_first_evaluation_and_epochs_are_those_of_the_steps(
    max_steps: int, epochs: int, tmp_path: Path
) -> None:
    seen: list[Any] = []

    class Watching(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append("on_evaluate")

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(state.num_train_epochs)

    prompts = Dataset.from_dict({"prompt": PROMPTS[:8]})
    counted = {"max_steps": max_steps, "num_train_epochs": 7, "eval_dataset": prompts, "eval_on_start": True}
    trainer = make_trainer(tmp_path, train_dataset=prompts, callbacks=[Watching()], **counted)
    assert trainer.setup.steps_per_epoch == 4
    trainer.train()
    assert seen == ["on_evaluate"] + [epochs] * epochs


def test_callbacks_see_and_change_the_gradients_that_the_optimizer_gets(tmp_path: Path) -> None:
    """As under transformers' trainer, which clips before; noise that a callback added was scaled down with them."""
    norms, starts = list[float](), list[torch.Tensor]()

    class Adds(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            norms.append(float(torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()])))
            starts.append(weights(trainer))
            for weight in model.parameters():
                weight.grad.fill_(1.0)

    settings: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 1e-3, "max_steps": 1}
    trainer = make_trainer(tmp_path, callbacks=[Adds()], **settings)
    trainer.train()
    assert norms == pytest.approx([1e-3], rel=1e-4)
    torch.testing.assert_close(weights(trainer), starts[0] - 0.1)


@pytest.mark.parametrize("half", [False, True])
def test_weights_that_a_callback_freezes_stay_as_they_are(half: bool, tmp_path: Path) -> None:
    """Under AdamW momentum would move them on, and weight decay."""
    seen: list[Any] = []

    class Freezes(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            if state.global_step == 1:
                model.requires_grad_(False)
                model.model.layers[1].mlp.up_proj.weight.requires_grad_(True)
                seen.append({name: weight.detach().clone() for name, weight in model.named_parameters()})

    model = tiny_model().bfloat16() if half else tiny_model()
    trainer = make_trainer(tmp_path, model=model, callbacks=[Freezes()], max_steps=3, weight_decay=0.1)
    trainer.train()
    moved = {name for name, weight in trainer.model.named_parameters() if not torch.equal(weight, seen[0][name])}
    assert moved == {"model.layers.1.mlp.up_proj.weight"}


def test_what_args_say_when_training_begins_counts_in_draws_too(tmp_path: Path) -> None:
    """The loss took the new temperature, and draws the old one: a sampler that is 0.24 nats off."""
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.args.temperature = 0.5
    trainer.args.max_completion_length = 9
    trainer.train()
    other = make_trainer(tmp_path / "other", max_steps=1, temperature=0.5, max_completion_length=9)
    other.train()
    assert trainer.history[0]["completions/max_length"] == 9
    assert torch.equal(weights(trainer), weights(other))


def test_an_engine_is_asked_whether_it_draws_as_args_say_now(tmp_path: Path) -> None:
    def engine(context: Any) -> FunctionEngine:
        return FunctionEngine(context, lambda *_: [])

    trainer = make_trainer(tmp_path, rollout_engine=engine)
    trainer.args.top_k = 5
    with pytest.raises(ConfigError, match="top_k"):
        trainer.train()


def test_gradient_norm_and_rate_of_a_log_are_the_last_steps(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=2, logging_steps=2, lr_scheduler_type="linear")
    trainer.train()
    (log,) = [log for log in trainer.state.log_history if "grad_norm" in log]
    for name in ("grad_norm", "learning_rate"):
        assert log[name] == trainer.history[-1][name] != trainer.history[0][name]


@pytest.mark.slow
def test_the_best_checkpoint_is_loaded_at_the_end(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        max_steps=3,
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS[:2]}),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="reward",
        greater_is_better=True,
    )
    trainer.train()
    scores = [log["eval_reward"] for log in trainer.state.log_history if "eval_reward" in log]
    assert trainer.state.best_metric == max(scores)
    assert trainer.evaluate()["eval_reward"] == pytest.approx(max(scores))
