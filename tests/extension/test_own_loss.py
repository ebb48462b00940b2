"""A user's own loss trains a model, and no cut of a step changes its gradient."""

from pathlib import Path

from torch import Tensor

from memsafe_rl import GRPOConfig, Loss, LossTraits, Ratios
from tests.trainers.helpers import cut, gradient_of, make_trainer, relative


def squared_ratio(ratios: Ratios) -> Tensor:
    return (ratios.ratio - 1).square() - ratios.ratio * ratios.advantages


def test_a_loss_passed_from_outside_is_exact_under_any_cut(tmp_path: Path) -> None:
    for mine in (squared_ratio, Loss("mine", squared_ratio, LossTraits(aggregation="seq-mean-token-mean"))):
        whole, *others = (
            gradient_of(make_trainer(tmp_path, loss_type=mine, policy=cut(tokens))) for tokens in (8192, 1, 30)
        )
        assert all(relative(other, whole) < 1e-6 for other in others)
    config = GRPOConfig(loss_type=mine)  # type: ignore[arg-type]
    assert GRPOConfig(**config.to_dict()) == config
    assert config.loss_type == "mine"
    trainer = make_trainer(tmp_path, loss_type="mine")
    assert trainer.train().global_step == 2
