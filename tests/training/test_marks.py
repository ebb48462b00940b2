"""Losses that mark tokens of a whole step: no cut, fault or resume moves a mark, or the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from memsafe_rl.errors import ConfigError
from memsafe_rl.ops.losses import LOSSES, Loss
from memsafe_rl.training import learner
from tests.tiny import tiny_model
from tests.trainers.helpers import cut, make_trainer, relative, weights

MARKING: dict[str, dict[str, Any]] = {
    "clip_cov": {"loss_type": "clip_cov", "cov_fraction": 0.3, "clip_cov_low": 0.0, "clip_cov_high": 50.0},
    "kl_cov": {"loss_type": "kl_cov", "cov_fraction": 0.3, "kl_cov_coef": 3.0},
}
LONGER: dict[str, Any] = {"num_iterations": 2, "max_steps": 4, "steps_per_generation": 2, "optim": "sgd"}


def noted(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, list[float]]]:
    """Notes the marks of each step."""
    own, found = learner.loss_marks, []

    def watched(*arguments: Any) -> Any:
        marks = own(*arguments)
        found.append({row: mark.tolist() for row, mark in marks.items()})
        return marks

    monkeypatch.setattr(learner, "loss_marks", watched)
    return found


# In float32 four steps round the weights too; `test_no_cut_changes_the_gradient` has a single gradient.
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name", MARKING)
def test_no_cut_moves_a_mark_or_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, bound: float
) -> None:
    found = noted(monkeypatch)

    def run(policy: Any, **settings: Any) -> torch.Tensor:
        model = tiny_model(dtype=dtype)
        before = torch.cat([weight.detach().flatten().double() for weight in model.parameters()])
        batches = {"per_device_train_batch_size": 4, "learning_rate": 1e-1, **LONGER, **MARKING[name], **settings}
        trainer = make_trainer(tmp_path, model=model, policy=policy, overwrite_output_dir=True, **batches)
        trainer.train()
        return weights(trainer) - before

    whole, count = run(cut()), len(found)
    assert any(0 < sum(map(sum, step.values())) < sum(map(len, step.values())) for step in found)
    unmarked = run(cut(), cov_fraction=1e-9, **({"kl_cov_coef": 0.0} if name == "kl_cov" else {"clip_cov_low": 49.0}))
    assert relative(unmarked, whole) > 1e-3  # the marks have an effect
    del found[count:]
    for policy in (cut(1), cut(30), cut(17, rows_in_flight=3), cut(30, checkpointing=True, logprob_tile=3)):
        assert relative(run(policy), whole) < bound
        assert found[-count:] == found[:count]
    assert relative(run(cut(), per_device_train_batch_size=1, gradient_accumulation_steps=4,
                        steps_per_generation=8), whole) < bound  # fmt: skip


@pytest.mark.slow
def test_rounding_does_not_push_tokens_that_have_not_moved(tmp_path: Path) -> None:
    """Behind a first step of a warm-up, which moves nothing, log-ratios are rounding, whose sign plans change."""
    warm = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 1, "steps_per_generation": 2, "optim": "sgd"}

    def run(folder: str, policy: Any) -> torch.Tensor:
        trainer = make_trainer(
            tmp_path / folder, model=tiny_model("gpt2", dtype=torch.float64), policy=policy, **MARKING["kl_cov"], **warm
        )
        before = weights(trainer)
        trainer.train()
        return weights(trainer) - before

    assert relative(run("cut", cut(17)), run("whole", cut())) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", MARKING)
def test_a_failed_attempt_and_a_resume_leave_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def run(folder: Path, resume: Any = None, **settings: Any) -> torch.Tensor:
        batches = {"per_device_train_batch_size": 4, **LONGER, **MARKING[name], **settings}
        trainer = make_trainer(folder, policy=cut(30), **batches)
        trainer.train(resume_from_checkpoint=resume)
        return weights(trainer)

    calm = run(tmp_path / "calm", save_strategy="steps", save_steps=3)
    assert torch.equal(run(tmp_path / "calm", str(tmp_path / "calm" / "checkpoint-3")), calm)
    own, calls = learner.loss_marks, iter(range(100))

    def failing(*arguments: Any) -> Any:
        if next(calls) in (0, 3):
            raise torch.OutOfMemoryError("out of memory")
        return own(*arguments)

    monkeypatch.setattr(learner, "loss_marks", failing)
    assert torch.equal(run(tmp_path / "failing"), calm)


def test_rows_without_advantage_are_run_where_their_tokens_pay(tmp_path: Path) -> None:
    learns = {name: make_trainer(tmp_path / name, **own).args.every_row_learns for name, own in MARKING.items()}
    assert learns == {"clip_cov": False, "kl_cov": True}


def test_a_loss_of_ones_own_that_marks_wrongly_is_told(tmp_path: Path) -> None:
    loss = Loss("marks_floats", LOSSES["dapo"].function, mark=lambda tokens, _: tokens.logprobs_M)
    trainer = make_trainer(tmp_path, loss_type=loss)
    with pytest.raises(
        ConfigError, match=r"mark of loss 'marks_floats' gave torch.float64 of \(\d+,\)\. Return a bool"
    ):
        trainer.train()
