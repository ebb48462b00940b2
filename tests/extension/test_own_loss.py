"""A user's own loss trains a model, and no cut of a step changes its gradient."""

from pathlib import Path
from typing import Any

from torch import Tensor

from memsafe_rl import GRPOConfig, Loss, LossTraits, Ratios
from tests.trainers.helpers import count_digits, cut, gradient_of, make_trainer, relative


def squared_ratio(ratios: Ratios) -> Tensor:
    return (ratios.ratio - 1).square() - ratios.ratio * ratios.advantages


def push_all(ratios: Ratios) -> Tensor:
    return -ratios.ratio


def test_rows_without_advantage_reach_a_loss_that_does_not_say_it_has_no_gradient_there(tmp_path: Path) -> None:
    def same_for_all(completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    compared, flat = (
        gradient_of(make_trainer(tmp_path, loss_type=push_all, reward_funcs=rewards))
        for rewards in (count_digits, same_for_all)
    )
    assert relative(flat, compared) < 1e-6
    skipping = Loss("skipping", push_all, LossTraits(every_row=False))
    assert not gradient_of(make_trainer(tmp_path, loss_type=skipping, reward_funcs=same_for_all)).any()


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
