"""GRPO trains an image tower too: gradients of the network's own forward on pixels, however memory is cut."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memsafe_rl import SimulatedMemory
from tests.images import FAMILIES, IMAGE, VIDEO, picture, rows, small
from tests.models.language.test_packing import InDouble
from tests.trainers.helpers import cut, gradient_of, relative, weights
from tests.trainers.test_images import GROUP, make, own_logits

CUTS = {
    "row by row": {"micro_batch_tokens": 1, "pack_prompts": False},
    "pairs of rows": {"micro_batch_tokens": 50, "pack_prompts": False},
    "whole, padded": {"micro_batch_tokens": 8192, "pack_prompts": False},
    "packed": {"micro_batch_tokens": 8192, "pack_prompts": True},
    "packed, behind trunks": {"micro_batch_tokens": 30, "pack_prompts": True},
}


def learner(family: str = "qwen2_vl", dtype: torch.dtype = torch.float32) -> Any:
    """Makes a network whose tower learns."""
    return small(family, dtype).requires_grad_(True)


def shown() -> list[dict[str, Any]]:
    """Gives rows two of which show the same image, and one of which shows none."""
    return [*rows()[:3], {**rows()[3], "images": rows()[0]["images"]}]


def logprobs_of(model: Any, row: dict[str, Any], ids: Tensor) -> Tensor:
    """Gives log-probs of a completion by the model's own forward on pixels."""
    return own_logits(model, row, ids.tolist())[:-1].log_softmax(-1).gather(1, ids[:, None])[:, 0]


def naive_gradient(model: Any, data: list[dict[str, Any]], trainer: Any, reference: Any, beta: float) -> Tensor:
    """Differentiates the plain loss of a rollout, each row by a forward of its own."""
    trajectory = trainer.loop.state.rollout.trajectory
    model.zero_grad()
    actions, total = trajectory.actions.rows(), len(trajectory.actions.flat)
    for place, ids in enumerate(actions):
        row, advantage = data[place // GROUP], trajectory.advantages[place].double()
        own = logprobs_of(model, row, ids)
        old = trajectory.old_logprobs.rows()[place].double() if trajectory.has_old[place] else own.detach()
        ratio = (own - old).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        if beta:
            with torch.no_grad():
                gap = logprobs_of(reference, row, ids)
            loss = loss + beta * ((gap - own).exp() - (gap - own) - 1) * ratio
        (loss.sum() / total).backward()
    return torch.cat([weight.grad.flatten().double() for weight in model.parameters()])


def made(tmp_path: Path, model: Any, **more: Any) -> Any:
    """Makes a trainer of a copy of a network."""
    return make(tmp_path, model=copy.deepcopy(model), **{"train_dataset": shown(), **more})


@pytest.mark.parametrize(("beta", "steps"), [(0.0, 1), (0.5, 1), (0.5, 2), (0.0, 3)])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cut_as", CUTS)
def test_a_step_has_the_gradient_of_forwards_on_pixels(
    tmp_path: Path, cut_as: str, family: str, beta: float, steps: int
) -> None:
    """In the second step weights have moved since the rollout; the third has a rollout of its own."""
    with InDouble():
        start = learner(family, torch.float64)
        trainer = made(
            tmp_path, start, policy=cut(**CUTS[cut_as]), num_iterations=2, beta=beta, max_steps=4, learning_rate=1e-3
        )
        found = gradient_of(trainer, steps)
        wanted = naive_gradient(copy.deepcopy(trainer.model), shown(), trainer, start, beta)
    towers = torch.cat([torch.full((weight.numel(),), "visual" in name) for name, weight in start.named_parameters()])
    assert wanted[towers].norm() > wanted.norm() / 100
    assert relative(found[towers], wanted[towers]) < 1e-12
    assert relative(found, wanted) < 1e-12


def test_recomputed_blocks_give_the_same_gradient(tmp_path: Path) -> None:
    start = learner()
    found = [gradient_of(made(tmp_path / str(wanted), start, policy=cut(40, checkpointing=wanted))) for wanted in (False, True)]
    assert torch.equal(*found)


def test_tokens_are_those_of_the_network_as_it_has_become(tmp_path: Path) -> None:
    trainer = made(tmp_path, learner(), max_steps=2, learning_rate=1e-2)
    trainer.loop.begin(None)
    trainer.loop.step()
    moved = copy.deepcopy(trainer.model)
    trainer.loop.state.rollout = None
    trajectory = trainer.loop.collect().trajectory
    for place, ids in enumerate(trajectory.actions.rows()):
        logits_TV = own_logits(moved, shown()[place // GROUP], ids.tolist())[:-1]
        logits_TV[:, [IMAGE, VIDEO]] = -torch.inf
        own = logits_TV.log_softmax(-1).gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(trajectory.sampling_logprobs.rows()[place], own.float(), rtol=0, atol=1e-5)
