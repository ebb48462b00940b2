"""Whole runs in half precision whose plan changes nothing, and a mask by entropy that no plan can move."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BloomForCausalLM, FalconForCausalLM

from memsafe_rl.memory.planning.policies import FixedPolicy
from memsafe_rl.ops.entropy import entropy_threshold, high_entropy_mask
from memsafe_rl.trainers.grpo import GRPOTrainer
from memsafe_rl.training import learner
from memsafe_rl.training.collector import Collector
from memsafe_rl.training.optim.optimizer import Committer
from memsafe_rl.training.setup import TrainingSetup
from memsafe_rl.types import RolloutPlan, Trajectory, UpdatePlan
from tests.tiny import tiny_model
from tests.trainers.helpers import gradient_of, make_trainer, relative
from tests.trainers.test_encoder_decoder import tiny_t5
from tests.trainers.test_episodes import trainer_of


def plan(rows: int, tokens: int) -> FixedPolicy:
    """Few rows in flight and short slices, or many and long ones."""
    return FixedPolicy(
        rollout=RolloutPlan(rows_in_flight=rows, prefill_tokens=tokens, score_tokens=tokens),
        update=UpdatePlan(micro_batch_tokens=tokens),
    )


@pytest.mark.slow
@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_rollouts_in_half_precision_are_the_plans_only_without_the_mode(
    tmp_path: Path, precision: str, invariant: bool
) -> None:
    drawn = []
    for name, policy in (("wide", plan(64, 4096)), ("narrow", plan(3, 5))):
        settings = {precision: True, "batch_invariant": invariant, "max_completion_length": 24, "num_iterations": 2}
        trainer = make_trainer(tmp_path / name, model=tiny_model(scale=4.0), policy=policy, **settings)
        trainer.loop.begin(None)
        trainer.loop.files.folder.release()
        rollout = trainer.loop.collect()
        stored = rollout.trajectory.sampling_logprobs
        drawn.append((rollout.trajectory.actions.flat, None if stored is None else stored.flat))
    (ids, logprobs), (other_ids, other) = drawn
    same = torch.equal(ids, other_ids) and logprobs is not None and torch.equal(logprobs, other)
    assert same == invariant


Marks = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Entropies and mask of each row of a step."""

GAP = "sampling/sampling_logp_difference"


def gaps(trainer: GRPOTrainer) -> list[float]:
    """Trains, and gives the mean and greatest difference of the sampler's log-probs from the trainer's, each step."""
    trainer.train()
    return [record[f"{GAP}/{name}"] for record in trainer.history for name in ("mean", "max")]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("network", ["qwen3", "gemma3", "t5"])
def test_sampler_and_trainer_agree_to_the_bit_in_the_mode(
    tmp_path: Path, network: str, precision: str, invariant: bool
) -> None:
    model = tiny_t5() if network == "t5" else tiny_model(network, scale=4.0)
    settings = {precision: True, "batch_invariant": invariant, "max_steps": 4, "max_completion_length": 12}
    policy = FixedPolicy(RolloutPlan(rows_in_flight=5), UpdatePlan(micro_batch_tokens=40, logprob_tile=7))
    found = gaps(make_trainer(tmp_path, model=model, policy=policy, num_iterations=2, **settings))
    assert len(found) == 8
    assert not any(found) if invariant else all(found)


@pytest.mark.slow
@pytest.mark.parametrize("invariant", [True, False])
def test_they_agree_over_turns_whose_caches_are_kept(tmp_path: Path, invariant: bool) -> None:
    policy = FixedPolicy(RolloutPlan(rows_in_flight=3, kept_kv_bytes=2**24), UpdatePlan(micro_batch_tokens=300))
    model = tiny_model(positions=512, scale=4.0)
    trainer = trainer_of(tmp_path, model=model, memory_policy=policy, bf16=True, batch_invariant=invariant)
    found = gaps(trainer)
    assert trainer.history[0]["episodes/mean_turns"] > 1
    assert not any(found) if invariant else all(found)


def test_another_samplers_difference_is_logged_where_it_is_known(tmp_path: Path) -> None:
    def drawn(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = trainer.processing_class(text=prompts)["input_ids"]
        completions = [[20 + place, 48 + place, 1] for place in range(len(prompts))]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[-5.0, None, -6.0] for _ in prompts]}

    trainer = make_trainer(tmp_path, rollout_func=drawn, max_steps=1, num_iterations=2)
    mean, most = gaps(trainer)
    trajectory = trainer.loop.state.rollout.trajectory
    run = [row for row in range(len(trajectory)) if trajectory.has_advantage[row]]
    own = trajectory.old_logprobs.pad(run, 0)[:, [0, 2]]
    expected = (own - torch.tensor([-5.0, -6.0])).abs()
    assert len(run) > 1
    assert mean == pytest.approx(float(expected.mean()), rel=1e-5)
    assert most == pytest.approx(float(expected.max()), rel=1e-5)


@pytest.mark.slow
def test_no_plan_moves_the_mask_by_entropy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[torch.Tensor] = []
    own = Committer.measure

    def watched(committer: Committer, known_norm: float | None) -> torch.Tensor:
        norm = own(committer, known_norm)
        found.append(torch.cat([each.grad.double().flatten() for each in committer.parameters]))
        return norm

    monkeypatch.setattr(Committer, "measure", watched)
    for name, policy in (("wide", plan(64, 4096)), ("narrow", plan(64, 9))):
        model = tiny_t5(feed_forward_proj="gated-gelu")
        settings = {"top_entropy_quantile": 0.5, "max_steps": 1, "max_grad_norm": 0.0}
        make_trainer(tmp_path / name, model=model, policy=policy, **settings).train()
    wide, narrow = found
    assert (wide - narrow).norm() < 1e-6 * wide.norm()


def marked(folder: Path, monkeypatch: pytest.MonkeyPatch, policy: FixedPolicy, network: str, **settings: Any) -> Marks:
    """Runs a step, and gives the entropies of each row that decided its mask, and the mask."""
    found: list[Marks] = []
    own = learner.entropy_masks

    def watched(trajectory: Trajectory, rows: Sequence[int], entropies: Any, **wanted: Any) -> Any:
        masks = own(trajectory, rows, entropies, **wanted)
        found.append({row: (entropies[row].cpu(), masks[row].cpu()) for row in rows})
        return masks

    monkeypatch.setattr(learner, "entropy_masks", watched)
    model = tiny_t5(feed_forward_proj="gated-gelu") if network == "t5" else tiny_model(network, scale=4.0)
    settings = {"max_steps": 1, "batch_invariant": True, **settings}  # else other tokens are drawn
    make_trainer(folder, model=model, policy=policy, **settings).train()
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_entropies_and_mask_are_the_same_bits_under_random_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chosen = random.Random(seed)
    print(f"seed {seed}")
    network, kind = chosen.choice(["t5", "qwen3", "gemma3", "gpt2"]), chosen.choice(["bf16", "fp16", "use_cpu"])
    settings = {kind: True, "top_entropy_quantile": chosen.uniform(0.1, 0.9), "max_completion_length": 16}
    wide = marked(tmp_path / "a", monkeypatch, plan(64, 4096), network, **settings)
    policy = FixedPolicy(
        RolloutPlan(rows_in_flight=chosen.randint(1, 9), score_tokens=chosen.randint(5, 60)),
        UpdatePlan(micro_batch_tokens=chosen.randint(5, 60), logprob_tile=chosen.randint(1, 9)),
    )
    narrow = marked(tmp_path / "b", monkeypatch, policy, network, **settings)
    assert wide.keys() == narrow.keys()
    for row, (entropies, mask) in wide.items():
        assert torch.equal(narrow[row][0], entropies)
        assert torch.equal(narrow[row][1], mask)
    assert 0 < sum(mask.sum() for _, mask in wide.values()) < sum(len(mask) for _, mask in wide.values())


@pytest.mark.slow
@pytest.mark.parametrize("scored", ["row_by_row", "by the plan"])
def test_scored_as_the_plan_cuts_the_mask_would_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scored: str
) -> None:
    settings = {"bf16": True, "top_entropy_quantile": 0.5, "max_completion_length": 16, "batch_invariant": False}
    monkeypatch.setattr(Collector, "draw", drawn_once(Collector.draw))  # without the mode, plans draw other tokens
    if scored == "by the plan":
        monkeypatch.setattr(TrainingSetup, "row_by_row", TrainingSetup.autocast)
    wide, narrow = (
        marked(tmp_path / name, monkeypatch, policy, "qwen3", **settings)
        for name, policy in (("wide", plan(64, 4096)), ("narrow", plan(64, 9)))
    )
    flat, other = (torch.cat([entropies for entropies, _ in marks.values()]) for marks in (wide, narrow))
    counted = torch.ones_like(flat)
    moved = 0
    for quantile in torch.linspace(0.05, 0.95, 91).tolist():
        one, two = (
            high_entropy_mask(each, counted, entropy_threshold(each, counted, quantile)) for each in (flat, other)
        )
        moved += int((one != two).sum())
    assert torch.equal(flat, other) == (scored == "row_by_row")
    assert (moved == 0) == (scored == "row_by_row")


def drawn_once(own: Any) -> Any:
    """Has later trainers learn from the samples of the first."""
    found: list[Any] = []

    def draw(collector: Collector, state: Any) -> Any:
        drawn = own(collector, state)
        found.append(drawn)
        return replace(drawn, samples=replace(drawn.samples, completions=found[0].samples.completions))

    return draw


@pytest.mark.parametrize("family", [FalconForCausalLM, BloomForCausalLM])
def test_marks_on_an_attention_of_its_own_do_not_read_padding(family: Any, tmp_path: Path) -> None:
    gradients = []
    for score_tokens in (8192, 16):
        torch.manual_seed(0)
        sizes = {"vocab_size": 258, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
        config = family.config_class(**sizes, eos_token_id=1, pad_token_id=0)
        policy = FixedPolicy(RolloutPlan(rows_in_flight=64, score_tokens=score_tokens), UpdatePlan(8192))
        model = family(config).double().eval()
        trainer = make_trainer(tmp_path / str(score_tokens), model=model, policy=policy, top_entropy_quantile=0.3)
        gradients.append(gradient_of(trainer))
    assert relative(gradients[1], gradients[0]) < 1e-12
