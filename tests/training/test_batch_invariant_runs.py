"""Whole runs in half precision whose plan changes nothing, and a mask by entropy that no plan can move."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memsafe_rl.memory.planning.policies import FixedPolicy
from memsafe_rl.training.optim.optimizer import Committer
from memsafe_rl.types import RolloutPlan, UpdatePlan
from tests.tiny import tiny_model
from tests.trainers.helpers import make_trainer
from tests.trainers.test_encoder_decoder import tiny_t5


def plan(rows: int, tokens: int) -> FixedPolicy:
    """Few rows in flight and short slices, or many and long ones."""
    return FixedPolicy(
        rollout=RolloutPlan(rows_in_flight=rows, prefill_tokens=tokens, score_tokens=tokens),
        update=UpdatePlan(micro_batch_tokens=tokens),
    )


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


def test_no_plan_moves_the_mask_by_entropy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[torch.Tensor] = []
    own = Committer.measure

    def watched(committer: Committer) -> torch.Tensor:
        norm = own(committer)
        found.append(torch.cat([each.grad.double().flatten() for each in committer.parameters]))
        return norm

    monkeypatch.setattr(Committer, "measure", watched)
    for name, policy in (("wide", plan(64, 4096)), ("narrow", plan(64, 9))):
        model = tiny_t5(feed_forward_proj="gated-gelu")
        settings = {"top_entropy_quantile": 0.5, "max_steps": 1, "max_grad_norm": 0.0}
        make_trainer(tmp_path / name, model=model, policy=policy, **settings).train()
    wide, narrow = found
    assert (wide - narrow).norm() < 1e-6 * wide.norm()
