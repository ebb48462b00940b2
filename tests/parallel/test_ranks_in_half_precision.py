"""With `batch_invariant`, two ranks draw in bf16 what one process draws, to the bit, and get its gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState

from memsafe_rl.memory.planning.policies import FixedPolicy
from memsafe_rl.training.optim.optimizer import Committer
from memsafe_rl.types import RolloutPlan, UpdatePlan
from tests.parallel.test_ranks import PATIENCE_SECONDS, run_ranks, set_up_rank
from tests.tiny import tiny_model
from tests.trainers.helpers import make_trainer

SETTINGS: dict[str, Any] = {"bf16": True, "max_steps": 1, "top_entropy_quantile": 0.7, "num_iterations": 2}
SETTINGS |= {"max_completion_length": 16, "max_grad_norm": 0.0}


def learn(folder: Path, rows: int, *, invariant: bool) -> dict[str, Any]:
    """Makes one step, and gives what was drawn and the gradient; one copy of a prompt would round its sum otherwise."""
    policy = FixedPolicy(RolloutPlan(), UpdatePlan(pack_prompts=False))
    model = tiny_model(scale=4.0)
    trainer = make_trainer(
        folder, model=model, policy=policy, per_device_train_batch_size=rows, batch_invariant=invariant, **SETTINGS
    )
    gradients, own = [], Committer.measure

    def watched(committer: Committer, known_norm: float | None) -> torch.Tensor:
        gradients.append(torch.cat([each.grad.double().flatten() for each in committer.parameters]))
        return own(committer, known_norm)

    with patch.object(Committer, "measure", watched):
        trainer.train()
    trajectory = trainer.loop.state.rollout.trajectory
    drawn = trajectory.actions.flat, trajectory.sampling_logprobs.flat
    gap = trainer.history[0]["sampling/sampling_logp_difference/max"]
    return {"gradient": gradients[0], "drawn": drawn, "gap": gap}


def learn_as_rank(rank: int, port: int, folder: str) -> None:
    set_up_rank(rank, port)
    found = {invariant: learn(Path(folder) / f"two {invariant}", 6, invariant=invariant) for invariant in (True, False)}
    torch.save(found, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_draw_and_learn_what_one_does(tmp_path: Path) -> None:
    ranks = run_ranks(learn_as_rank, tmp_path, PATIENCE_SECONDS)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    for invariant in (True, False):
        one = learn(tmp_path / f"one {invariant}", 12, invariant=invariant)
        for rank in ranks:
            two = rank[invariant]
            apart = float((two["gradient"] - one["gradient"]).norm() / one["gradient"].norm())
            if not invariant:
                assert apart > 1e-5
                continue
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(two["drawn"], one["drawn"], strict=True))
            assert two["gap"] == 0
            assert apart < 1e-6
