"""Several objectives: each gradient is that of a run of its own, they are merged once a step, and nothing is lost."""

from __future__ import annotations

import asyncio
import gc
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from peft import LoraConfig

from memsafe_rl import GRPOConfig, GRPOTrainer, forecast_memory
from memsafe_rl.config.objectives import Objective, read_objectives
from memsafe_rl.errors import ConfigError, MemoryBudgetError
from memsafe_rl.memory.planning.estimator import update_parts
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.ops.advantages import estimated_advantages
from memsafe_rl.ops.merging import MERGES, merge_weights
from memsafe_rl.rewards import calls
from memsafe_rl.training import gradient as update
from memsafe_rl.training import learner
from memsafe_rl.training.algorithms.advantages import advantages_by_objective, objective_advantages
from memsafe_rl.training.algorithms.objectives import BetaControl, as_seen_by, steered
from memsafe_rl.types import Component, Phase, UpdatePlan, UpdateWork
from tests.models.diffusion.small import PROMPTS as DIFFUSION_PROMPTS
from tests.models.diffusion.small import make_policy as make_diffusion_policy
from tests.models.helpers import exact_norms
from tests.parallel.test_ranks import PATIENCE_SECONDS, run_ranks, set_up_rank
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.helpers import count_digits, cut, gradient_under, make_trainer, relative, weights
from tests.trainers.test_encoder_decoder import tiny_t5
from tests.training.test_training import StopAt, gradient_of

LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
BETA, WEIGHT = 0.1, 0.5


def digits(completions: list[str], **_: Any) -> list[float]:
    return count_digits(completions)


def few_digits(completions: list[str], **_: Any) -> list[float | None]:
    """Wants the opposite of `digits`, and has no opinion of some rows."""
    pairs = zip(count_digits(completions), completions, strict=True)
    return [None if len(text) % 3 == 2 else 0.2 * len(set(text)) - reward for reward, text in pairs]


def by_thirteen(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Pays every row something else, so that none is left out of the update."""
    return [sum(ids) % 13 + sum(ids) / 1000 for ids in completion_ids]


def by_seven(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) % 7 + sum(ids) / 1000 for ids in completion_ids]


def by_five(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) % 5 + sum(ids) / 1000 for ids in completion_ids]


OBJECTIVES: dict[str, Any] = {
    "many": {"rewards": ["digits"], "beta": BETA},
    "few": {"rewards": ["few_digits"], "weight": WEIGHT},
}
TWO: dict[str, Any] = {"reward_funcs": [digits, few_digits], "objectives": OBJECTIVES, "alarms": False}


def of_one(tmp_path: Path, reward: Any, beta: float, **settings: Any) -> torch.Tensor:
    """Returns the gradient of a run that has but this reward, and knows nothing of objectives."""
    return gradient_of(make_trainer(tmp_path, reward_funcs=reward, beta=beta, alarms=False, **settings))


def merged(gradients: Sequence[torch.Tensor], factors: Sequence[float], method: str, c: float = 0.2) -> torch.Tensor:
    """Merges whole gradients as they are, end to end."""
    stacked = torch.stack(list(gradients))
    coefficients = merge_weights(stacked @ stacked.T, method, factors, cagrad_c=c)
    return torch.tensor(coefficients, dtype=torch.float64) @ stacked


# The gradient: of the full batch, whatever the plan


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("method", MERGES)
def test_accumulating_then_merging_is_merging_what_runs_of_their_own_accumulate(
    tmp_path: Path, method: str, dtype: torch.dtype, bound: float
) -> None:
    model: dict[str, Any] = {"per_device_train_batch_size": 12, "loss_type": "dapo"}

    def made(policy: Any) -> Any:
        return make_trainer(
            tmp_path, model=tiny_model(dtype=dtype), policy=policy, gradient_merge=method, **TWO, **model
        )

    alone = [
        of_one(tmp_path, reward, beta, model=tiny_model(dtype=dtype), policy=cut(), **model)
        for reward, beta in ((digits, BETA), (few_digits, 0.0))
    ]
    assert alone[0] @ alone[1] < 0, "the objectives are in conflict"
    expected = merged(alone, (1.0, WEIGHT), method)
    leaner = cut(checkpointing=True, logprob_tile=3), cut(30, offload_activations=True, trajectory_device="device")
    # How micro-batches are cut knows nothing of the merge that follows: all the ways of cutting under one merge.
    others = (cut(1), *leaner) if method == "cagrad" else ()
    trainer = made(cut())
    assert relative(gradient_of(trainer), expected) < bound
    for policy in (cut(30), *others):
        assert relative(gradient_under(trainer, policy), expected) < bound
    if method == "cagrad":
        assert relative(gradient_of(made(cut(17, rows_in_flight=3))), expected) < bound
    if dtype is torch.float32:  # packed rows are attended to in float32
        assert relative(gradient_under(trainer, cut(17, pack_prompts=True)), expected) < bound


def as_good(completions: list[str], **_: Any) -> list[float]:
    """Finds all completions equally good, so that nothing but a KL has a gradient; at the reference not even that."""
    return [1.0] * len(completions)


@pytest.mark.slow
@pytest.mark.parametrize("method", [pytest.param("sum", marks=pytest.mark.slow), "pcgrad", "cagrad"])
def test_the_rounding_of_an_objective_that_has_no_gradient_decides_no_merge(tmp_path: Path, method: str) -> None:
    model: dict[str, Any] = {"model": tiny_model(), "max_completion_length": 12, "gradient_merge": method}
    two = {"right": {"rewards": ["digits"]}, "format": {"rewards": ["as_good"], "beta": BETA}}
    trainer = make_trainer(
        tmp_path, policy=cut(), reward_funcs=[digits, as_good], objectives=two, alarms=False, **model
    )
    whole = gradient_of(trainer)
    for policy in (cut(pack_prompts=True), cut(1, logprob_tile=1)):
        assert relative(gradient_under(trainer, policy), whole) < 2e-6


@pytest.mark.parametrize("policy", [cut(), cut(pack_prompts=True), cut(1, logprob_tile=1)])
def test_a_first_step_without_any_gradient_moves_no_weight_under_any_plan(tmp_path: Path, policy: Any) -> None:
    trainer = make_trainer(tmp_path, policy=policy, reward_funcs=as_good, beta=BETA, max_steps=1, alarms=False)
    before = weights(trainer)
    trainer.train()
    assert torch.equal(weights(trainer), before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"top_entropy_quantile": 0.6, "entropy_coef": 0.01},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "delta": 1.5},
        {"advantage_estimator": "rloo", "loss_type": "dr_grpo", "steps_per_generation": 2},
        {"dynamic_sampling": True, "scale_rewards": "batch", "loss_type": "bnpo"},
    ],
)
def test_other_settings_hold_for_every_objective_and_no_cut_changes_them(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    def run(policy: Any) -> torch.Tensor:
        return gradient_of(make_trainer(tmp_path, policy=policy, gradient_merge="cagrad", **TWO, **settings))

    whole = run(cut())
    assert whole.norm() > 0
    assert relative(run(cut(20)), whole) < 1e-6


def bright(completions: list[torch.Tensor], **_: Any) -> list[float]:
    return [float(sample.mean()) for sample in completions]


def dark_edges(completions: list[torch.Tensor], **_: Any) -> list[float | None]:
    return [None if row % 4 == 3 else -float(sample[0].mean()) for row, sample in enumerate(completions)]


def diffusion_trainer(folder: Path, reward_funcs: Any, policy: Any, **settings: Any) -> GRPOTrainer:
    usual: dict[str, Any] = {"per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 1, "epsilon": 1e-3}
    usual |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "alarms": False, "save_strategy": "no"}
    prompts = Dataset.from_dict({"prompt": list(DIFFUSION_PROMPTS) * 2})
    return GRPOTrainer(
        make_diffusion_policy(dtype=torch.float64, state_dtype=torch.float64),
        reward_funcs,
        GRPOConfig(str(folder), **{**usual, **settings}),
        prompts,
        memory_policy=policy,
    )


@pytest.mark.slow
def test_denoisers_have_several_objectives_too(tmp_path: Path) -> None:
    alone = [
        gradient_of(diffusion_trainer(tmp_path, reward, cut(), beta=beta))
        for reward, beta in ((bright, BETA), (dark_edges, 0.0))
    ]
    objectives = {"a": {"rewards": ["bright"], "beta": BETA}, "b": {"rewards": ["dark_edges"], "weight": WEIGHT}}
    expected = merged(alone, (1.0, WEIGHT), "cagrad")
    for policy in (cut(), cut(1), cut(7)):
        trainer = diffusion_trainer(
            tmp_path, [bright, dark_edges], policy, objectives=objectives, gradient_merge="cagrad"
        )
        assert relative(gradient_of(trainer), expected) < 1e-12


@pytest.mark.slow
def test_encoder_decoders_have_several_objectives_too(tmp_path: Path) -> None:
    def of(reward: Any, policy: Any, **settings: Any) -> torch.Tensor:
        model = tiny_t5().double()
        exact_norms(model)
        arguments = {"reward_funcs": reward, "policy": policy, "alarms": False, **settings}
        return gradient_of(make_trainer(tmp_path, model=model, **arguments))

    alone = [of(reward, cut(), beta=beta) for reward, beta in ((digits, BETA), (few_digits, 0.0))]
    expected = merged(alone, (1.0, WEIGHT), "pcgrad")
    both: dict[str, Any] = {"objectives": OBJECTIVES, "gradient_merge": "pcgrad"}
    for policy in (cut(), cut(1), cut(30)):
        assert relative(of([digits, few_digits], policy, **both), expected) < 1e-12


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("method", MERGES)
def test_a_gradient_that_is_overwritten_by_each_micro_batch_would_be_seen(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug of a real project: KL 0.000, since each micro-batch's gradient took the place of the last one's."""

    def run() -> torch.Tensor:
        trainer = make_trainer(tmp_path, policy=cut(30), gradient_merge=method, **TWO)
        owner.append(trainer)
        return gradient_of(trainer)

    owner: list[GRPOTrainer] = []
    right = run()
    backward = torch.autograd.backward

    def planted(loss: torch.Tensor) -> None:
        owner[-1].setup.committed.drop_gradients()
        backward(loss)

    monkeypatch.setattr(update.torch.autograd, "backward", planted)
    assert relative(run(), right) > 1e-2


def test_merging_every_micro_batch_is_another_thing(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, policy=cut(), gradient_merge="cagrad", **TWO)
    whole = gradient_of(trainer)
    assert trainer.loop.state.rollout is not None
    rows = trainer.loop.learner.step_samples(trainer.loop.state.cursor)
    terms = trainer.loop.learner.terms(trainer.loop.state.rollout, rows, trainer.loop.state.controllers)

    def of(chosen: Sequence[int], index: int) -> torch.Tensor:
        trainer.setup.committed.drop_gradients()
        own = [
            row for row in chosen if not math.isnan(trainer.loop.state.rollout.trajectory.objective_values[index][row])
        ]
        trainer.loop.learner.gradient(
            trainer.loop.state.rollout,
            own,
            terms.objectives[index],
            step=0,
            view=partial(as_seen_by, index=index),
            gradients_aside=1 - index,
        )
        return torch.cat([p.grad.flatten().double() for p in trainer.setup.committed.parameters])

    halves = [[of(half, index) for index in (0, 1)] for half in (rows[:4], rows[4:])]
    summed = [first + second for first, second in zip(*halves, strict=True)]
    assert relative(merged(summed, (1.0, WEIGHT), "cagrad"), whole) < 1e-6
    piecemeal = sum(merged(half, (1.0, WEIGHT), "cagrad") for half in halves)
    assert relative(piecemeal, whole) > 1e-2


def test_an_objective_alone_is_a_run_without_objectives(tmp_path: Path) -> None:
    one = make_trainer(tmp_path, objectives={"all": {"rewards": ["count_digits"]}}, beta=BETA, num_iterations=2)
    plain = make_trainer(tmp_path, beta=BETA, num_iterations=2)
    for trainer in (one, plain):
        trainer.train()
    assert torch.equal(weights(one), weights(plain))
    for mine, theirs in zip(one.history, plain.history, strict=True):
        for name in ("loss", "kl", "grad_norm", "entropy", "approx_kl/k3_token", "clip_ratio/region_mean"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-6), name


@pytest.mark.slow
def test_an_objective_that_scored_no_row_of_a_step_leaves_the_others_be(tmp_path: Path) -> None:
    def silent(completions: list[str], **_: Any) -> list[None]:
        return [None] * len(completions)

    objectives = {"many": {"rewards": ["digits"], "beta": BETA}, "silent": {"rewards": ["silent"], "beta": BETA}}
    for method in MERGES:
        trainer = make_trainer(
            tmp_path, reward_funcs=[digits, silent], objectives=objectives, gradient_merge=method, alarms=False
        )
        trainer.train()
        step = trainer.history[0]
        assert step["objectives/silent/grad_norm"] == step["objectives/silent/coefficient"] == 0
        assert math.isnan(step["objectives/silent/reward"])
        alone = 1.2 if method == "cagrad" else 1  # of one objective, CAGrad goes from its gradient further along it
        assert step["objectives/many/coefficient"] == pytest.approx(alone)
        assert step["grad_norm"] == pytest.approx(step["objectives/many/grad_norm"] * alone, rel=1e-6)


# A failed attempt leaves no trace


def test_an_objective_that_runs_out_of_memory_is_begun_again_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = gradient_of(make_trainer(tmp_path, policy=cut(30), gradient_merge="pcgrad", **TWO))
    honest, begun = learner.accumulate_gradient, []

    def failing(adapter: Any, trajectory: Any, rows: Any, *others: Any, **named: Any) -> Any:
        begun.append(tuple(rows))
        found = honest(adapter, trajectory, rows, *others, **named)
        if len(begun) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return found

    monkeypatch.setattr(learner, "accumulate_gradient", failing)
    assert torch.equal(gradient_of(make_trainer(tmp_path, policy=cut(30), gradient_merge="pcgrad", **TWO)), calm)
    first, failed, again = begun
    assert failed == again != first


@pytest.mark.slow
def test_what_was_set_aside_goes_when_a_run_ends_in_the_midst_of_a_step(tmp_path: Path) -> None:
    gc.collect()
    with SimulatedMemory() as device:
        trainer = make_trainer(tmp_path, policy=cut(30), peft_config=LORA, max_steps=1, **TWO)
        trainer.train()
        held = device.live_by_component()[Component.GRADIENTS]
        honest = trainer.setup.combiner.merge

        def upset(*_: Any) -> Any:
            raise MemoryBudgetError("no plan fits")

        trainer.setup.combiner.merge = upset  # type: ignore[method-assign]
        with pytest.raises(MemoryBudgetError) as caught:
            trainer.train()
        assert device.live_by_component()[Component.GRADIENTS] == held == 0, "even while the error is at hand"
        assert caught.value is not None
        trainer.setup.combiner.merge = honest  # type: ignore[method-assign]


# Peak bytes


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_each_further_objective_holds_one_more_copy_of_the_trained_gradients(tmp_path: Path, count: int) -> None:
    alone, one = most_held(tmp_path, 1)
    whole, several = most_held(tmp_path, count)
    trained = one[Component.GRADIENTS]
    assert several[Component.GRADIENTS] == count * trained
    # A few scalars and log-probs of each objective are kept until the step is over.
    assert 0 <= whole - alone - (count - 1) * trained < 0.2 * trained


def most_held(tmp_path: Path, count: int) -> tuple[int, dict[Component, int]]:
    """Trains a step of objectives that score all rows; gives the update's peak, and what is held before the merge."""
    names = ("by_thirteen", "by_seven", "by_five")[:count]
    gc.collect()
    with SimulatedMemory() as device:
        trainer = make_trainer(
            tmp_path,
            model=tiny_model(layers=4, hidden=64),
            policy=cut(60),
            peft_config=LORA,
            max_steps=1,
            reward_funcs=[by_thirteen, by_seven, by_five][:count],
            objectives={name: {"rewards": [name]} for name in names},
            gradient_merge="cagrad",
            alarms=False,
        )
        honest, held = trainer.setup.combiner.merge, []

        def noted(*arguments: Any) -> Any:
            held.append(device.live_by_component())
            return honest(*arguments)

        trainer.setup.combiner.merge = noted  # type: ignore[method-assign]
        trainer.train()
        trained = sum(weight.nbytes for weight in trainer.model.parameters() if weight.requires_grad)
        assert trained == trainer.adapter.geometry.trainable_bytes
        assert held[0][Component.GRADIENTS] == count * trained
        return sum(device.phase_peaks()[Phase.UPDATE].values()), held[0]


def test_the_planner_counts_the_gradients_that_wait(tmp_path: Path) -> None:
    asked: list[UpdateWork] = []

    class Noting(type(cut())):  # type: ignore[misc]
        def before_update(self, work: UpdateWork, memory: Any) -> UpdatePlan:
            asked.append(work)
            return super().before_update(work, memory)

    trainer = make_trainer(tmp_path, policy=Noting(*vars(cut(30)).values()), max_steps=1, **TWO)
    trainer.train()
    (work,) = asked
    alone = UpdateWork(work.row_tokens, work.action_tokens, work.geometry, work.prompts)
    assert work.gradients_aside == 1
    for plan in (UpdatePlan(), UpdatePlan(micro_batch_tokens=30, checkpointing=True)):
        more, less = (update_parts(shape, plan)[Component.GRADIENTS] for shape in (work, alone))
        assert more == less + work.geometry.trainable_bytes


@pytest.mark.slow
def test_a_forecast_calls_no_reward_and_needs_no_weights_for_them(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    settings = GRPOConfig(
        str(tmp_path), reward_weights=[1.0, 2.0], num_generations=4, max_completion_length=8, max_steps=1, use_cpu=True
    )
    assert forecast_memory(str(tmp_path), settings, device="cpu", device_bytes=2**30, prompt_tokens=8).fits


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.slow
def test_a_forecast_knows_them(tmp_path: Path, count: int) -> None:
    """Within a percent of the run, and by one copy of the gradients more for each further objective."""
    folder = tmp_path / "model"
    tiny_model("qwen3", vocab_size=1000, layers=4, hidden=128).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    rewards = [by_thirteen, by_seven, by_five]
    settings = GRPOConfig(
        str(tmp_path),
        num_generations=4,
        per_device_train_batch_size=16,
        max_completion_length=40,
        generation_kwargs={"min_new_tokens": 40},
        memory_forecast=False,
        max_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        alarms=False,
        objectives={reward.__name__: {"rewards": [reward.__name__]} for reward in rewards[:count]},
    )
    prompts = Dataset.from_dict({"prompt": [f"{index:02d}".ljust(20, ".") for index in range(8)]})
    given: dict[str, Any] = {"train_dataset": prompts, "processing_class": tiny_tokenizer()}
    found = forecast_memory(str(folder), settings, device="cpu", device_bytes=2**30, **given)
    gc.collect()
    with SimulatedMemory(2**30) as device:
        trainer = GRPOTrainer(str(folder), rewards[:count], settings, **given)
        trainer.train()
        measured = device.phase_peaks()[Phase.UPDATE]
    assert found.phases[Phase.UPDATE][Component.GRADIENTS] == measured[Component.GRADIENTS]
    assert measured[Component.GRADIENTS] >= (count - 1) * trainer.adapter.geometry.trainable_bytes
    assert sum(found.phases[Phase.UPDATE].values()) == pytest.approx(sum(measured.values()), rel=0.01)


# Resume, ranks, rehearsals


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_resuming_is_bitwise_and_beta_goes_on_where_it_was(tmp_path: Path, stop: int) -> None:
    steered_objectives = {
        "many": {**OBJECTIVES["many"], "kl_band": [0.01, 0.02], "adaptive_beta": True, "beta_window": 2},
        "few": OBJECTIVES["few"],
    }
    settings: dict[str, Any] = {
        **TWO,
        "objectives": steered_objectives,
        "gradient_merge": "cagrad",
        "num_iterations": 2,
        "steps_per_generation": 2,
        "per_device_train_batch_size": 4,
    }
    whole = make_trainer(tmp_path / "whole", max_steps=6, **settings)
    whole.train()
    betas = [step["objectives/many/beta"] for step in whole.history]
    assert len(set(betas)) > 2
    first = make_trainer(tmp_path / "parts", max_steps=6, save_strategy="steps", save_steps=stop, **settings)
    first.add_callback(StopAt(stop))
    first.train()
    second = make_trainer(tmp_path / "parts", max_steps=6, **settings)
    second.train(resume_from_checkpoint=True)
    assert torch.equal(weights(second), weights(whole))
    assert [step["objectives/many/beta"] for step in second.history] == betas
    for name in ("loss", "objectives/many/kl", "objectives/few/grad_norm", "objectives/cosine/many/few"):
        assert [step[name] for step in second.history] == [step[name] for step in whole.history]


def test_a_checkpoint_belongs_to_its_objectives(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, **TWO).train()
    other = {"many": OBJECTIVES["many"], "few": {"rewards": ["few_digits"], "weight": 2.0}}
    with pytest.raises(ConfigError, match="the checkpoint belongs to another run: objectives was"):
        make_trainer(tmp_path, max_steps=2, **{**TWO, "objectives": other}).train(resume_from_checkpoint=True)


RANKED: dict[str, Any] = {"gradient_merge": "cagrad", "num_generations": 4, "num_iterations": 2, "max_steps": 4}


def train_rank(rank: int, port: int, folder: str) -> None:
    set_up_rank(rank, port)
    trainer = make_trainer(Path(folder) / "two", per_device_train_batch_size=6, **RANKED, **TWO)
    trainer.train()
    torch.save({"weights": weights(trainer), "history": trainer.history}, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(tmp_path: Path) -> None:
    ranks = run_ranks(train_rank, tmp_path, PATIENCE_SECONDS)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    one = make_trainer(tmp_path / "one", per_device_train_batch_size=12, **RANKED, **TWO)
    one.train()
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    start = make_trainer(tmp_path / "start", per_device_train_batch_size=12, **RANKED, **TWO)
    travelled = (weights(one) - weights(start)).norm()
    assert (ranks[0]["weights"] - weights(one)).norm() < 1e-4 * travelled
    for mine, theirs in zip(ranks[0]["history"], one.history, strict=True):
        for name in ("loss", "objectives/many/kl", "objectives/few/grad_norm", "objectives/cosine/many/few"):
            assert abs(mine[name] - theirs[name]) <= 1e-4 * max(1e-3, abs(theirs[name])), name


@pytest.mark.slow
def test_a_run_with_objectives_is_probed_and_verified(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, probe_worst_case=True, verify_plan=True, max_steps=1, **TWO)
    trainer.train()
    kinds = {event["event"] for event in trainer.memory_events}
    assert {"probe", "verify"} <= kinds
    plain = make_trainer(tmp_path, max_steps=1, **TWO)
    plain.train()
    assert torch.equal(weights(trainer), weights(plain)), "rehearsals leave everything as it was"


# Rows, advantages and what is logged


def test_each_objective_is_judged_by_its_own_rewards_over_the_rows_that_they_scored() -> None:
    nan = math.nan
    rewards = torch.tensor([[1.0, nan, 2.0], [3.0, nan, nan], [nan, 5.0, 0.0], [nan, 7.0, nan]])
    objectives = [Objective("a", ("x", "z")), Objective("b", ("y",), weight=2.0)]

    def estimate(columns: torch.Tensor, factors: torch.Tensor) -> Any:
        return estimated_advantages(columns, factors, 2, scale_rewards="none")

    found = advantages_by_objective(rewards, ("x", "y", "z"), torch.tensor([1.0, 1.0, 0.5]), objectives, estimate)
    assert found.rewards_B.tolist() == [2.0, 3.0, 5.0, 7.0]
    a, b = found.objectives
    assert a.advantages_B.tolist() == [-0.5, 0.5, 0, 0]  # 1 + 0.5 · 2 against 3; a row alone in its group
    assert b.advantages_B.tolist() == [0, 0, -1, 1]
    assert found.advantages_B.tolist() == [-0.5, 0.5, -2, 2]
    columns = objective_advantages(found)
    assert columns is not None
    expected = torch.tensor([[-0.5, nan], [0.5, nan], [0.0, -1.0], [nan, 1.0]])
    torch.testing.assert_close(columns, expected, equal_nan=True)


def test_denominators_are_each_objectives_own_over_the_whole_step(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **TWO)
    gradient_of(trainer)
    assert trainer.loop.state.rollout is not None
    trajectory, rows = (
        trainer.loop.state.rollout.trajectory,
        trainer.loop.learner.step_samples(trainer.loop.state.cursor),
    )
    terms = trainer.loop.learner.terms(trainer.loop.state.rollout, rows, trainer.loop.state.controllers)
    texts = trainer.processing_class.batch_decode(
        [ids.tolist() for ids in trajectory.actions.rows()], skip_special_tokens=True
    )
    scored = [row for row in rows if len(texts[row]) % 3 != 2]
    assert 0 < len(scored) < len(rows)
    counts = trajectory.counted_actions
    many, few = terms.objectives
    assert (many.denominators.rows, many.denominators.tokens) == (8, sum(counts))
    assert (few.denominators.rows, few.denominators.tokens) == (len(scored), sum(counts[row] for row in scored))
    assert terms.denominators.tokens == many.denominators.tokens + few.denominators.tokens
    assert (many.settings.beta, few.settings.beta) == (BETA, 0.0)


def test_what_is_logged_of_each_objective(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, max_steps=2, num_iterations=2, eval_dataset=[{"prompt": "1+1="}], eval_on_start=True, **TWO
    )
    trainer.train()
    first, second = trainer.history
    names = {name.removeprefix("objectives/many/") for name in second if name.startswith("objectives/many/")}
    assert names == {"loss", "beta", "kl", "grad_norm", "coefficient"}
    assert {"objectives/many/reward", "objectives/few/reward", "objectives/few/scored"} <= first.keys()
    assert "objectives/few/kl" not in second
    assert "kl" not in second, "it would be that of some rows only"
    assert first["objectives/many/reward"] == pytest.approx(first["rewards/digits/mean"])
    assert first["objectives/many/kl"] == 0 < second["objectives/many/kl"]
    assert first["objectives/few/scored"] < 1
    assert "eval_objectives/few/reward" in trainer.state.log_history[0]
    # The coefficients of a sum are the weights; the merged gradient's length follows from the Gram matrix.
    a, b, cosine = (second[f"objectives/{name}"] for name in ("many/grad_norm", "few/grad_norm", "cosine/many/few"))
    assert (second["objectives/many/coefficient"], second["objectives/few/coefficient"]) == (1, WEIGHT)
    assert second["grad_norm"] == pytest.approx(math.sqrt(a * a + (WEIGHT * b) ** 2 + 2 * WEIGHT * a * b * cosine))
    assert second["loss"] == pytest.approx(second["objectives/many/loss"] + WEIGHT * second["objectives/few/loss"])


# Beta


def steered_through(objective: Objective, kls: Sequence[float]) -> list[float]:
    control, betas = BetaControl(objective.beta), []
    for kl in kls:
        control = BetaControl(*json.loads(json.dumps(control)))  # as through a checkpoint
        control = steered(control._replace(recent=tuple(control.recent)), objective, kl)
        betas.append(control.beta)
    return betas


FAIR = Objective("fair", ("unbiased",), beta=0.1, kl_band=(0.02, 0.06), adaptive_beta=True)


def test_beta_follows_the_median_of_a_window_and_waits_for_the_next() -> None:
    high = steered_through(FAIR, [0.07] * 40)
    assert high[:19] == [0.1] * 19
    assert high[19:39] == [pytest.approx(0.115)] * 20
    assert high[39] == pytest.approx(0.115 * 1.15)
    assert steered_through(FAIR, [0.01] * 20)[-1] == pytest.approx(0.085)
    assert steered_through(FAIR, [0.04] * 100) == [0.1] * 100
    # Nine outliers of twenty do not move a median; steps without a row of the objective do not count.
    assert steered_through(FAIR, [9.0] * 9 + [0.04] * 11)[-1] == 0.1
    assert steered_through(FAIR, [0.07] * 19 + [math.nan] * 5)[-1] == 0.1


def test_beta_stays_within_its_bounds() -> None:
    bound = Objective(**{**vars(FAIR), "beta_bounds": (0.09, 0.12), "beta_window": 1})
    assert steered_through(bound, [0.5] * 3) == [pytest.approx(0.115), 0.12, 0.12]
    assert steered_through(bound, [0.0] * 3) == [0.09, 0.09, 0.09]
    assert Objective(**{**vars(FAIR), "beta": 0.2}).bounds == (pytest.approx(0.02), 2.0)


def test_without_steering_beta_stays() -> None:
    still = Objective(**{**vars(FAIR), "adaptive_beta": False})
    assert steered_through(still, [9.0] * 50) == [0.1] * 50


# Alarms


@pytest.mark.slow
def test_bands_of_two_objectives_a_slow_judge_and_truncation_speak_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checklist of the fairness/hallucination case: KL 0.02-0.06 and 0.08-0.15, judge < 6 s, truncation < 5 %."""
    clock = {"seconds": 0.0}
    monkeypatch.setattr(calls, "time", SimpleNamespace(perf_counter=lambda: clock["seconds"]))

    def judge_of_bias(completions: list[str], **_: Any) -> list[float]:
        clock["seconds"] += 6.5  # a scripted judge, whose answer takes that long
        return count_digits(completions)

    trainer = make_trainer(
        tmp_path,
        reward_funcs=[judge_of_bias, few_digits],
        objectives={
            "fairness": {"rewards": ["judge_of_bias"], "beta": 0.1, "kl_band": [0.02, 0.06]},
            "hallucination": {"rewards": ["few_digits"], "beta": 0.3, "kl_band": [0.08, 0.15]},
        },
        alarms={"equal_rewards": None, "throughput_drop": None},
        gradient_merge="cagrad",
        learning_rate=3e-2,
        num_iterations=2,
        max_steps=6,
    )
    trainer.train()
    told = [event for event in trainer.memory_events if event["event"] == "alarm"]
    assert max(step["objectives/fairness/kl"] for step in trainer.history) > 0.06
    assert max(step["objectives/hallucination/kl"] for step in trainer.history) > 0.15
    assert sorted((event["kind"], event.get("objective", "")) for event in told) == [
        ("judge_seconds", ""),
        ("objective_kl", "fairness"),
        ("objective_kl", "hallucination"),
        ("truncation", ""),
    ]
    slow = next(event for event in told if event["kind"] == "judge_seconds")
    assert (slow["reward"], slow["step"]) == ("judge_of_bias", 1)
    assert slow["value"] == pytest.approx(6.5)


def test_a_judge_that_does_not_answer_leaves_its_rows_to_the_objectives_other_reward(tmp_path: Path) -> None:
    async def judge_of_bias(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(60)
        return [9.0] * len(completions)

    trainer = make_trainer(
        tmp_path,
        reward_funcs=[judge_of_bias, few_digits, digits],
        objectives={
            "fairness": {"rewards": ["judge_of_bias", "few_digits"]},
            "hallucination": {"rewards": ["digits"]},
            "judged": {"rewards": ["judge_of_bias"]},
        },
        reward_timeout_seconds=0.1,
        reward_timeout_result="none",
        max_steps=1,
        alarms=False,
    )
    trainer.train()
    (step,) = trainer.history
    assert step["objectives/fairness/reward"] == pytest.approx(step["rewards/few_digits/mean"])
    assert 0 < step["objectives/fairness/scored"] < 1
    assert (step["objectives/hallucination/scored"], step["objectives/judged/scored"]) == (1, 0)
    assert step["objectives/fairness/grad_norm"] > 0 == step["objectives/judged/grad_norm"]


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "objectives is {}, which names none. Write objectives="),
        ({"a": "digits"}, "objectives['a'] is 'digits'; it must be a mapping, as in objectives="),
        ({"a/b": {"rewards": ["digits"]}}, "objectives['a/b']: a name is text without '/'"),
        ({"a": {}}, "objectives['a'] has no reward functions. Name at least one"),
        ({"a": {"reward": ["digits"]}}, "There is no key of objectives['a'] 'reward'. Did you mean 'rewards'?"),
        ({"a": {"rewards": ["digits"], "weight": 0}}, "objectives['a']['weight'] is 0; it must be more than 0."),
        (
            {"a": {"rewards": ["digits"], "weight": math.inf}},
            "objectives['a']['weight'] is inf; it must be finite, and more than 0.",
        ),
        (
            {"a": {"rewards": ["digits"], "beta": math.nan}},
            "objectives['a']['beta'] is nan; it must be finite, and at least 0.",
        ),
        ({"a": Objective("a", ("digits",))}, "objectives['a'] is an Objective; write its settings as a mapping"),
        (
            {"a": {"rewards": ["digits", "shape", "digits"]}},
            "objectives['a']['rewards'] names 'digits' more than once, which would count it as often.",
        ),
        (
            {"a": {"rewards": ["digits", "shape"]}, "b": {"rewards": ["shape", "digits"], "beta": 0.1}},
            "objectives['b'] has the same rewards as objectives['a'], ['shape', 'digits'], so that both would learn",
        ),
        ({"a": {"rewards": ["digits"], "beta": -1}}, "objectives['a']['beta'] is -1; it must be at least 0."),
        (
            {"a": {"rewards": ["digits"], "beta": 0.1, "kl_band": [0.06, 0.02]}},
            "objectives['a']['kl_band'] is [0.06, 0.02]; it must be [low, high] in nats per token, such as [0.02, ",
        ),
        (
            {"a": {"rewards": ["digits"], "kl_band": [0.02, 0.06]}},
            "objectives['a']['kl_band'] is [0.02, 0.06], but its beta is 0, so that its KL to the reference is not "
            "measured. Set objectives['a']['beta'] above 0, or leave kl_band out.",
        ),
        (
            {"a": {"rewards": ["digits"], "beta": 0.1, "adaptive_beta": True}},
            "objectives['a']['adaptive_beta'] is True without a band to steer to. Set objectives['a']['kl_band']",
        ),
        (
            {
                "a": {
                    "rewards": ["digits"],
                    "beta": 0.5,
                    "kl_band": [0.02, 0.06],
                    "adaptive_beta": True,
                    "beta_bounds": [0.1, 0.4],
                }
            },
            "objectives['a']['beta_bounds'] is [0.1, 0.4]; it must begin above 0 and hold beta, which is 0.5.",
        ),
        (
            {"a": {"rewards": ["digits"], "beta_factors": [1.2, 1.5]}},
            "objectives['a']['beta_factors'] is [1.2, 1.5]; it must be [lower, raise] around 1, such as [0.85, 1.15].",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_value_and_the_remedy(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(objectives=settings)
    assert str(caught.value).startswith(message)


def test_merges_without_objectives_and_too_many_for_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="gradient_merge is 'cagrad' without objectives"):
        GRPOConfig(gradient_merge="cagrad")
    with pytest.raises(ConfigError, match=r"cagrad_c is 0\.4 without objectives"):
        GRPOConfig(cagrad_c=0.4)
    with pytest.raises(ConfigError, match=r"gradient_merge is 'cagrat'; .* Did you mean 'cagrad'"):
        GRPOConfig(gradient_merge="cagrat", objectives=OBJECTIVES)
    nine = {str(place): {"rewards": ["digits", str(place)]} for place in range(9)}
    with pytest.raises(ConfigError, match=r"with 9 objectives; it weighs at most 8.*gradient_merge='pcgrad'"):
        GRPOConfig(gradient_merge="cagrad", objectives=nine)
    assert GRPOConfig.declared["gradient_merge"].choices == tuple(MERGES)
    for c, told in ((1.0, "at least 0 and less than 1"), (math.inf, "finite, and at least 0 and less than 1")):
        with pytest.raises(ConfigError, match=f"cagrad_c is {c}; it must be {told}"):
            GRPOConfig(objectives=OBJECTIVES, gradient_merge="cagrad", cagrad_c=c)


def test_objectives_and_reward_functions_must_fit(tmp_path: Path) -> None:
    for objectives, message in (
        ({"a": {"rewards": ["digit"]}}, "reward function of objectives\\['a'\\] 'digit'. Did you mean 'digits'"),
        (
            {"a": {"rewards": ["digits"]}},
            "no objective uses the reward function 'few_digits', so the model would not learn from it.*leave it out: "
            "of reward_funcs, or of the environment whose reward",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            make_trainer(tmp_path, **{**TWO, "objectives": objectives})


def test_settings_are_read_from_text_and_written_back() -> None:
    text = json.dumps(
        {"a": {"rewards": ["x"], "kl_band": [0.02, 0.06], "adaptive_beta": "true"}, "b": {"rewards": "y"}}
    )
    config = GRPOConfig(objectives=text, beta=0.1, gradient_merge="pcgrad")
    assert config.objective_list[0] == Objective("a", ("x",), beta=0.1, kl_band=(0.02, 0.06), adaptive_beta=True)
    assert config.objective_list[1] == Objective("b", ("y",), beta=0.1)
    assert GRPOConfig(**config.to_dict()).objective_list == config.objective_list
    assert read_objectives(None, beta=0.1) == ()


def test_the_reference_is_there_if_an_objective_needs_it(tmp_path: Path) -> None:
    assert GRPOConfig(objectives=OBJECTIVES).has_reference
    assert not GRPOConfig(objectives={"a": {"rewards": ["x"], "beta": 0}}, beta=0.1).has_reference
    assert not GRPOConfig(objectives={"a": {"rewards": ["x"]}}).has_reference
