"""PPO: a step by hand, however it is cut, interrupted, or resumed, for every kind of critic."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from benchmarks.ppo_layouts import LAYOUTS, measure
from benchmarks.small import small_t5
from memsafe_rl import GRPOConfig, PPOConfig, PPOTrainer
from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.models.critic import OwnModel, SecondAdapter, SharedTrunk
from tests.models.language.test_packing import InDouble
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.helpers import PROMPTS, count_digits, cut, gradient_of, gradient_under, relative, trained

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
CRITICS = ("trunk", "adapter", "model")
KINDS = {"trunk": SharedTrunk, "adapter": SecondAdapter, "model": OwnModel}


def make_ppo(
    output_dir: Path, critic: Any = "trunk", *, policy: Any = None, dtype: torch.dtype = torch.float32, **settings: Any
) -> PPOTrainer:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "alarms": False,
    }
    own = tiny_model("llama", seed=3, layers=1, hidden=16, tied=False, dtype=dtype)
    given = (
        {"trunk": None, "adapter": "adapter", "model": own}.get(critic, critic) if isinstance(critic, str) else critic
    )
    arguments = {name: settings.pop(name) for name in ("peft_config", "reward_funcs", "model") if name in settings}
    trainer = PPOTrainer(
        arguments.get("model", tiny_model(dtype=dtype)),
        arguments.get("reward_funcs", count_digits),
        PPOConfig(output_dir=str(output_dir), **{**defaults, **settings}),
        Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tiny_tokenizer(),
        peft_config=arguments.get("peft_config", LORA if critic == "adapter" else None),
        memory_policy=policy,
        critic=given,
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # a head of zeros would hide its trunk's gradient
        trainer.critic.head.weight.copy_(torch.randn(trainer.critic.head.weight.shape, generator=generator) / 10)
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("critic", CRITICS)
def test_a_run_learns_and_reports(critic: str, tmp_path: Path) -> None:
    trainer = make_ppo(tmp_path, critic, kl_target=1.0)
    assert type(trainer.critic) is KINDS[critic]
    before = trained(trainer)
    trainer.train()
    assert relative(trained(trainer), before) > 1e-3
    first, second = trainer.history[:2]
    for name in ("value_loss", "policy_loss", "clip_ratio/value", "clip_ratio/region_mean", "approx_kl/k3_token"):
        assert name in first, name
    for name in ("returns/mean", "values/mean", "explained_variance", "objective/kl", "kl_coef", "reward"):
        assert name in first, name
        assert name not in second, name
    assert "frac_reward_zero_std" not in first  # a prompt's only completion equals itself
    assert first["loss"] == pytest.approx(first["policy_loss"] + 0.1 * first["value_loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("critic", CRITICS)
def test_the_first_ratio_is_1(critic: str, tmp_path: Path) -> None:
    """Old log-probs are the first update's own, though all rows are scored before it; the second has moved."""
    trainer = make_ppo(tmp_path, critic)
    trainer.train()
    first, second = trainer.history[:2]
    assert first["approx_kl/k3_token"] == 0.0
    assert first["clip_ratio/region_mean"] == 0.0
    assert second["approx_kl/k3_token"] > 0.0


PLANS = {
    "rows alone": {"micro_batch_tokens": 1},
    "small, in tiles": {"micro_batch_tokens": 40, "logprob_tile": 3},
    "recomputed": {"micro_batch_tokens": 40, "checkpointing": True},
}


# float64 tells a wrong term from rounding; float32 is what most runs learn in.
@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("dtype", "tolerance", "critic"),
    [(torch.float32, 1e-6, "trunk"), *((torch.float64, 1e-12, critic) for critic in CRITICS)],
)
def test_the_gradient_does_not_depend_on_the_cut(
    critic: str, dtype: torch.dtype, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64 the third step's: of a later pass, whose old log-probs, values and returns are stored ones."""
    settings: dict[str, Any] = {"num_generations": 2, "learning_rate": 1e-2, "kl_coef": 0.1, "optim": "sgd"}
    steps = 3 if dtype is torch.float64 else 1

    def cut_from_the_start(**plan: Any) -> tuple[PPOTrainer, torch.Tensor]:
        trainer = make_ppo(tmp_path, critic, policy=cut(**plan), dtype=dtype, **settings)
        return trainer, gradient_of(trainer, steps)

    trainer, whole = cut_from_the_start()
    for name, plan in PLANS.items():
        assert relative(gradient_under(trainer, cut(**plan)), whole) < tolerance, name
    assert relative(cut_from_the_start(micro_batch_tokens=1)[1], whole) < tolerance
    with InDouble() if dtype is torch.float64 else nullcontext():  # norms that go through float32 see packed rows
        trainer, apart = cut_from_the_start() if dtype is torch.float64 else (trainer, whole)
        assert relative(gradient_under(trainer, cut(40, pack_prompts=True)), apart) < tolerance
        monkeypatch.setattr("memsafe_rl.micro_batches._LEAST_TRUNK", 1)  # a prompt is run before its completions
        assert relative(cut_from_the_start(micro_batch_tokens=1, pack_prompts=True)[1], apart) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("critic", CRITICS)
def test_values_do_not_depend_on_the_cut(critic: str, tmp_path: Path) -> None:
    stores = []
    for score_tokens in (8192, 20):
        policy = cut()
        policy = type(policy)(type(policy.rollout)(rows_in_flight=64, score_tokens=score_tokens), policy.update)
        trainer = make_ppo(tmp_path, critic, policy=policy, dtype=torch.float64)
        trainer.loop.begin(None)
        trainer.loop.files.folder.release()
        stores.append(trainer.loop.collect().trajectory)
    for name in ("values", "returns", "action_advantages", "ref_logprobs"):
        one, other = (getattr(store, name).flat for store in stores)
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_a_step_by_hand(tmp_path: Path) -> None:
    """The second update on a rollout, from full logits and loops over tokens, under plain SGD."""
    settings: dict[str, Any] = {
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-2,
        "gamma": 0.9,
        "gae_lambda": 0.8,
        "kl_coef": 0.2,
        "vf_coef": 0.5,
        "steps_per_generation": 1,
        "missing_eos_penalty": 0.3,
        "temperature": 0.8,
        "vf_clip": 0.01,
    }
    trainer = make_ppo(tmp_path, dtype=torch.float64, **settings)
    reference = tiny_model(dtype=torch.float64)
    trainer.loop.begin(None)
    trainer.loop.files.folder.release()
    trainer.loop.step()
    assert trainer.loop.state.rollout is not None
    trajectory = trainer.loop.state.rollout.trajectory
    rewards = [row["count_digits"] for row in trainer.loop.state.rollout.table]
    state = {name: weight.detach().clone() for name, weight in trainer.setup.trained.named_parameters()}

    def scores(model: Any, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        prompt, actions = trajectory.conditions.rows()[trajectory.condition_of_row[row]], trajectory.actions.rows()[row]
        output = model(torch.cat([prompt, actions])[None], output_hidden_states=True)
        places = slice(len(prompt) - 1, len(prompt) + len(actions) - 1)
        logprobs = (output.logits[0, places] / 0.8).log_softmax(-1).gather(1, actions[:, None])[:, 0]
        return logprobs, output.hidden_states[-1][0, places]

    start, first = tiny_model(dtype=torch.float64), torch.Generator().manual_seed(5)
    head = torch.randn(trainer.critic.head.weight.shape, generator=first).div(10).double()
    advantages, returns, olds, old_values = [], [], [], []
    for row in range(8):
        with torch.no_grad():
            old, hidden = scores(start, row)
            gap = old - scores(reference, row)[0]
            values = hidden @ head
        gained = (-0.2 * gap).tolist()
        gained[-1] += rewards[row] - 0.3 * (not trajectory.finished[row])
        foreseen, carried, found = [*values.tolist(), 0.0], 0.0, []
        for t in reversed(range(len(gained))):
            carried = gained[t] + 0.9 * foreseen[t + 1] - foreseen[t] + 0.9 * 0.8 * carried
            found.append(carried)
        advantages.append(torch.tensor(found[::-1], dtype=torch.float64))
        returns.append(advantages[-1] + values)
        olds.append(old)
        old_values.append(values)
    every = torch.cat(advantages)
    white = [(row - every.mean()) / (every.var() + 1e-8).sqrt() for row in advantages]
    for row in range(8):
        torch.testing.assert_close(trajectory.action_advantages.rows()[row], white[row], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(trajectory.returns.rows()[row], returns[row], rtol=1e-9, atol=1e-9)

    loss, count = torch.zeros((), dtype=torch.float64), len(every)
    for row in range(8):
        now, hidden = scores(trainer.model, row)
        values = trainer.critic.head(hidden)
        ratio = (now - olds[row]).exp()
        policy = torch.max(-ratio * white[row], -ratio.clamp(0.8, 1.2) * white[row])
        bounded = values.clamp(old_values[row] - 0.01, old_values[row] + 0.01)
        squares = torch.max((values - returns[row]) ** 2, (bounded - returns[row]) ** 2)
        loss = loss + (policy + 0.5 * 0.5 * squares).sum() / count
    parameters = dict(trainer.setup.trained.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    trainer.loop.step()
    assert trainer.history[1]["loss"] == pytest.approx(loss.item(), rel=1e-9)
    assert trainer.history[1]["clip_ratio/value"] > 0
    for (name, weight), gradient in zip(parameters.items(), gradients, strict=True):
        torch.testing.assert_close(weight.detach(), state[name] - 1e-2 * gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_every_critic_gives_the_policy_the_same_first_step(tmp_path: Path) -> None:
    """While critics say 0 of everything, they differ in nothing that the policy sees: no adapter leaks into it."""
    gradients = []
    for critic in (*CRITICS, "trunk"):
        trainer = make_ppo(tmp_path, critic, peft_config=LORA)
        with torch.no_grad():
            trainer.critic.head.weight.zero_()
        gradient_of(trainer)
        named = dict(trainer.model.named_parameters())
        gradients.append(
            torch.cat([w.grad.flatten() for n, w in named.items() if w.grad is not None and ".default." in n])
        )
        assert trainer.loop.state.rollout is not None
        assert not (trainer.loop.state.rollout.metrics["objective/kl"])
    for gradient in gradients[1:]:
        assert relative(gradient, gradients[0]) < 1e-6


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("critic", CRITICS)
def test_a_resumed_run_goes_on_bit_for_bit(critic: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 7, "kl_target": 0.5, "kl_horizon": 50.0}
    whole = make_ppo(tmp_path / "a", critic, **settings)
    whole.train()
    first = make_ppo(tmp_path / "b", critic, **settings, save_strategy="steps", save_steps=3)
    first.train()
    for step in (3, 6):
        second = make_ppo(tmp_path / "b", critic, **settings)
        with torch.no_grad():
            second.critic.head.weight.fill_(7.0)
        second.train(resume_from_checkpoint=str(tmp_path / "b" / f"checkpoint-{step}"))
        assert torch.equal(trained(second), trained(whole))
        for name in ("loss", "value_loss", "grad_norm"):
            assert [record[name] for record in second.history] == [record[name] for record in whole.history]
        scales = [trainer.setup.advantages.state_dict()["kl_scale"] for trainer in (second, whole)]
        assert scales[0] == scales[1] != 1.0


@pytest.mark.slow
def test_a_checkpoint_of_another_critic_is_refused(tmp_path: Path) -> None:
    make_ppo(tmp_path, "trunk", max_steps=1, save_strategy="steps", save_steps=1).train()
    with pytest.raises(ConfigError, match="weights of the critic differ"):
        make_ppo(tmp_path, "model", max_steps=2).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_the_coefficient_of_the_kl_follows_its_target(tmp_path: Path) -> None:
    """A rollout's KL under its target lowers the coefficient of the next, by a tenth of the bounded error."""
    trainer = make_ppo(tmp_path, kl_target=100.0, kl_horizon=160.0, max_steps=12)
    trainer.train()
    coefs = [record["kl_coef"] for record in trainer.history if "kl_coef" in record]
    assert coefs == pytest.approx([0.05, 0.05 * 0.98, 0.05 * 0.98**2])


@pytest.mark.slow
def test_the_kl_stands_in_the_reward_or_in_the_loss(tmp_path: Path) -> None:
    """In the loss, the reward is the score alone; the first KL is 0, the second has grown."""
    trainer = make_ppo(tmp_path, kl_coef=0.0, beta=0.5, max_steps=5)
    trainer.train()
    assert [record["objective/non_score_reward"] for record in trainer.history if "objective/kl" in record] == [0, 0]
    assert trainer.history[0]["kl"] == 0
    assert trainer.history[1]["kl"] > 0
    alone = make_ppo(tmp_path, kl_coef=0.0, max_steps=1)
    alone.train()
    assert "objective/kl" not in alone.history[0]
    assert alone.setup.reference_model is None


def test_rows_that_nobody_scored_teach_nothing(tmp_path: Path) -> None:
    def pay(completions: list[str], **_: Any) -> list[float | None]:
        return [None if place % 4 == 1 else float(len(text)) for place, text in enumerate(completions)]

    trainer = make_ppo(tmp_path, reward_funcs=pay)
    trainer.loop.begin(None)
    trainer.loop.files.folder.release()
    trajectory = trainer.loop.collect().trajectory
    assert trajectory.action_advantages is not None
    assert trajectory.returns is not None
    for row, values in enumerate(trajectory.action_advantages.rows()):
        assert values.any() == (row % 4 != 1)
    assert trajectory.has_advantage == tuple(row % 4 != 1 for row in range(16))


def test_advantages_are_white_over_the_rollout(tmp_path: Path) -> None:
    trainer = make_ppo(tmp_path)
    trainer.loop.begin(None)
    trainer.loop.files.folder.release()
    trajectory = trainer.loop.collect().trajectory
    assert trajectory.action_advantages is not None
    flat = trajectory.action_advantages.flat
    assert float(flat.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(flat.std()) == pytest.approx(1.0, rel=1e-4)


def test_the_critic_is_planned_for(tmp_path: Path) -> None:
    trainer = make_ppo(tmp_path, "model")
    trainer.loop.begin(None)
    trainer.loop.files.folder.release()
    work = trainer.loop.learner.work(trainer.loop.collect().trajectory, range(4))
    assert work.geometry.trainable_bytes == sum(p.nbytes for p in trainer.setup.trained.parameters() if p.requires_grad)
    assert trainer.critic.beside_bytes in (work.geometry.trainable_bytes - trainer.adapter.geometry.trainable_bytes,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("critic", "settings"),
    [
        ("trunk", {"verify_plan": True, "policy": cut(40, checkpointing=True)}),
        ("adapter", {"verify_plan": True, "policy": cut(40, checkpointing=True)}),
        ("model", {"probe_worst_case": True}),
        ("adapter", {"probe_worst_case": True}),
        ("trunk", {"partial_rollout_tokens": 3}),
        ("model", {"partial_rollout_tokens": 3, "kl_coef": 0.0}),
        ("trunk", {"cache_implementation": "quantized"}),
        ("trunk", {"num_generations": 4, "dynamic_sampling": True, "top_entropy_quantile": 0.5, "kl_stop": 0.01}),
        ("adapter", {"bf16": True, "disable_dropout": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_the_loop_can_do_it_does_with_a_critic(critic: str, settings: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_ppo(tmp_path, critic, max_steps=3, **settings)
    before = trained(trainer)
    trainer.train()
    assert trainer.state.global_step == 3
    assert trained(trainer).isfinite().all()
    assert relative(trained(trainer), before) > 1e-4
    assert [event for event in trainer.memory_events if event["event"] in ("failure", "retry")] == []


@pytest.mark.slow
def test_a_shared_trunk_holds_less_than_several_models() -> None:
    """A critic of its own costs its weights, their gradients and two moments; a base that three share, next to none."""
    apart, head, shared = (measure(LAYOUTS[place], hidden=128, layers=2) for place in (0, 1, 4))
    model = apart.weights_bytes
    assert apart.peak_bytes - head.peak_bytes == pytest.approx(4 * model, rel=0.1)
    assert shared.peak_bytes < 0.25 * apart.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("critic", CRITICS)
def test_a_critic_learns_what_a_prompt_tells(critic: str, tmp_path: Path) -> None:
    """The reward is the prompt's alone; what cannot be foreseen is nothing, and soon little of it is not."""

    def pay(prompts: list[str], **_: Any) -> list[float]:
        return [float(int(prompt[0]) > 1) for prompt in prompts]

    settings = {"reward_funcs": pay, "max_steps": 40, "steps_per_generation": 2, "num_iterations": 4, "kl_coef": 0.0}
    trainer = make_ppo(tmp_path, critic, **settings, vf_coef=1.0, vf_clip=None, lr_scheduler_type="constant")
    trainer.train()
    explained = [record["explained_variance"] for record in trainer.history if "explained_variance" in record]
    assert explained[0] < 0.2
    assert explained[-1] > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("critic", ["trunk", "adapter"])
def test_encoder_decoders_learn_by_ppo(critic: str, tmp_path: Path) -> None:
    lora = LoraConfig(r=4, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM") if critic == "adapter" else None
    gradients = []
    for tokens in (8192, 16):
        model = small_t5(258, hidden=32)
        trainer = make_ppo(tmp_path, critic, model=model, peft_config=lora, policy=cut(tokens))
        gradients.append(gradient_of(trainer))
    assert relative(*gradients) < 1e-6
    before = trained(trainer)
    trainer.train()
    assert trainer.history[0]["approx_kl/k3_token"] == 0.0
    assert relative(trained(trainer), before) > 1e-3


@pytest.mark.slow
def test_prompts_are_kept_to_the_context_of_a_critic_of_its_own(tmp_path: Path) -> None:
    longest = max(map(len, PROMPTS))
    for arch in ("gpt2", "llama"):
        critic = tiny_model(arch, seed=3, positions=longest + 5)
        told = (
            rf"longer than {longest - 1} tokens \(the longest has {longest}\), which is what the critic's context of "
        )
        with pytest.raises(DataError, match=rf"{told}{longest + 5} tokens leaves beside max_completion_length 6\. Set"):
            make_ppo(tmp_path, critic)
    make_ppo(tmp_path, critic, overlong_prompts="truncate", max_steps=1).train()
    make_ppo(tmp_path, tiny_model("gpt2", seed=3, positions=longest + 6), max_steps=1).train()
    with pytest.raises(ConfigError, match="max_completion_length is 6 but the critic's context is 4 tokens"):
        make_ppo(tmp_path, tiny_model("gpt2", seed=3, positions=4))


def test_rollouts_of_a_user_are_kept_to_the_contexts_of_model_and_critic(tmp_path: Path) -> None:
    def long(prompts: list[str], _trainer: Any) -> dict[str, Any]:
        return {"prompt_ids": [[5] * 8] * len(prompts), "completion_ids": [[6] * 9] * len(prompts), "logprobs": None}

    for model, critic, whose in (
        (tiny_model(), tiny_model("gpt2", seed=3, positions=16), "critic"),
        (tiny_model("gpt2", positions=16), None, "model"),
    ):
        trainer = PPOTrainer(
            model,
            count_digits,
            PPOConfig(output_dir=str(tmp_path), max_completion_length=6, max_steps=1, use_cpu=True, disable_tqdm=True),
            Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tiny_tokenizer(),
            rollout_func=long,
            critic=critic,
        )
        with pytest.raises(
            DataError, match=f"prompt of 8 and a completion of 9 tokens, but the {whose}'s context is 16"
        ):
            trainer.train()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"critic": "adapter", "peft_config": None}, "no first one.*peft_config"),
        ({"critic": tiny_model("llama").requires_grad_(False)}, "critic is a LlamaForCausalLM without a trainable"),
        ({"critic": 5}, r"critic is 5 \(int\)\. Give None for a head on the model's own hidden states"),
        ({"critic": tiny_model("gpt2").transformer}, "critic is a GPT2Model, which has no head"),
        ({"critic": tiny_model("llama", vocab_size=20)}, "20 tokens and the model's 258"),
        ({"kl_coef": 0.0, "kl_target": 1.0}, "nothing to steer"),
        ({"kl_target": 1.0, "kl_horizon": 3.0}, "kl_horizon is 3.0 and a rollout has 16.*Set kl_horizon above 3.2"),
        ({"dynamic_sampling": True}, "equals itself"),
        ({"gamma": 1.5}, "gamma is 1.5"),
        ({"scale_rewards": "group"}, "scale_rewards is 'group', but it is a setting of GRPO alone"),
    ],
)
def test_what_cannot_work_is_refused(arguments: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        make_ppo(tmp_path, **arguments)


def test_earlier_names_are_understood() -> None:
    config = PPOConfig(num_ppo_epochs=2, cliprange=0.1, cliprange_value=0.3, lam=0.9, response_length=7)
    assert (config.num_iterations, config.epsilon, config.vf_clip) == (2, 0.1, 0.3)
    assert (config.gae_lambda, config.max_completion_length, config.num_generations) == (0.9, 7, 1)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (
            PPOConfig,
            {"cliprange": 0.1, "epsilon": 0.2},
            r"epsilon is 0\.2, but cliprange, another name of the same setting, is 0\.1\. Set one only",
        ),
        (
            PPOConfig,
            {"epsilon": 0.2, "cliprange": 0.1},
            r"cliprange is 0\.1, but epsilon, another name of the same setting, is 0\.2\. Set one only",
        ),
        (
            PPOConfig,
            {"objectives": {"a": {"rewards": ["x"]}}},
            "objectives is .* a setting of GRPO alone. Use GRPOConfig with GRPOTrainer, or leave objectives out",
        ),
        (GRPOConfig, {"lam": 0.9}, r"lam is 0\.9, but it is a setting of PPO alone\. Use PPOConfig with PPOTrainer"),
    ],
)
def test_settings_of_two_names_and_of_the_other_algorithm_are_told_by_name(
    kind: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        kind(**settings)


def test_a_critic_of_its_own_may_be_given_to_a_second_trainer(tmp_path: Path) -> None:
    own = tiny_model("llama", seed=3, layers=1, hidden=16, tied=False)
    for folder in ("a", "b"):
        make_ppo(tmp_path / folder, own, max_steps=1).train()
