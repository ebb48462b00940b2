"""Two processes learn by PPO what one does: values are gathered, and whitening is over both ranks' rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState

from tests.parallel.test_ranks import PATIENCE_SECONDS, run_ranks, set_up_rank
from tests.trainers.helpers import weights
from tests.trainers.test_ppo import make_ppo, trained

SETTINGS: dict[str, Any] = {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 4, "kl_target": 1.0}


def train_rank(rank: int, port: int, folder: str) -> None:
    set_up_rank(rank, port)
    trainer = make_ppo(Path(folder) / "two", per_device_train_batch_size=4, **SETTINGS)
    trainer.train()
    torch.save({"weights": trained(trainer), "history": trainer.history}, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(tmp_path: Path) -> None:
    ranks = run_ranks(train_rank, tmp_path, PATIENCE_SECONDS)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    one = make_ppo(tmp_path / "one", per_device_train_batch_size=8, **SETTINGS)
    start = trained(one)
    one.train()
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    assert (ranks[0]["weights"] - trained(one)).norm() < 1e-4 * (trained(one) - start).norm()
    assert len(weights(one)) < len(start)  # the critic's are among them
    for mine, theirs in zip(ranks[0]["history"], one.history, strict=True):
        for name in ("loss", "value_loss", "entropy", "grad_norm", "kl_coef", "explained_variance"):
            if name in theirs:
                assert abs(mine[name] - theirs[name]) <= 1e-4 * max(1e-3, abs(theirs[name])), name
