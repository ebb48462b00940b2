"""A user's own advantage estimator trains a model, and no cut of a step changes its gradient."""

from pathlib import Path

import torch
from torch import Tensor

from memsafe_rl import AdvantageEstimator, GRPOConfig
from tests.trainers.helpers import cut, gradient_of, make_trainer, relative


def against_the_best(rewards_PG: Tensor) -> Tensor:
    return rewards_PG - rewards_PG.amax(-1, keepdim=True)


def test_an_estimator_passed_from_outside_is_exact_under_any_cut(tmp_path: Path) -> None:
    for mine in (against_the_best, AdvantageEstimator("best", against_the_best, least_group=1)):
        whole, *others = (
            gradient_of(make_trainer(tmp_path, advantage_estimator=mine, policy=cut(tokens)))
            for tokens in (8192, 1, 30)
        )
        assert all(relative(other, whole) < 1e-6 for other in others)
    config = GRPOConfig(advantage_estimator=mine, num_generations=1)  # type: ignore[arg-type]
    assert GRPOConfig(**config.to_dict()) == config
    trainer = make_trainer(tmp_path, advantage_estimator="best")
    assert trainer.train().global_step == 2
    assert bool(torch.tensor([entry["reward"] for entry in trainer.history]).isfinite().all())
