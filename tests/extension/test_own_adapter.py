"""A user's own network, which is none of transformers', has the gradient of plain loops."""

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memsafe_rl import Adapter, ConfigError, FunctionAdapter, register_adapter
from tests.tiny import VOCAB_SIZE
from tests.trainers.helpers import cut, gradient_of, make_trainer, relative


class TinyGRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.gru = nn.Embedding(VOCAB_SIZE, 16), nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, VOCAB_SIZE)

    def forward(self, ids_BL: Tensor) -> Tensor:
        states_BLD: Tensor = self.gru(self.embed(ids_BL))[0]
        return states_BLD


def tiny_gru(model: nn.Module, **options: Any) -> FunctionAdapter:
    return FunctionAdapter(model, TinyGRU.forward, attrgetter("head"), **options)


register_adapter(Adapter("tiny GRU", tiny_gru, matches=lambda model: isinstance(model, TinyGRU)))


def naive_gradient(trainer: Any) -> Tensor:
    """The first update of DAPO's loss, row by row: the ratio is 1, so the loss is -A log pi over all tokens."""
    model, trajectory, loss = trainer.model, trainer.loop.state.rollout.trajectory, torch.zeros(())
    for row, ids in enumerate(trajectory.actions.rows()):
        prompt = trajectory.conditions.rows()[trajectory.condition_of_row[row]]
        states = model(torch.cat([prompt, ids])[None])[0, len(prompt) - 1 : -1]
        logprobs = model.head(states).log_softmax(-1).gather(1, ids[:, None])
        loss = loss - trajectory.advantages[row] * logprobs.sum() / sum(trajectory.actions.lengths)
    return torch.cat([grad.flatten().double() for grad in torch.autograd.grad(loss, list(model.parameters()))])


def test_a_network_from_outside_has_the_plain_gradient_under_any_cut(tmp_path: Path) -> None:
    for policy in (cut(8192), cut(1), cut(30, checkpointing=True)):
        trainer = make_trainer(tmp_path, model=TinyGRU(), policy=policy)
        assert relative(gradient_of(trainer), naive_gradient(trainer)) < 1e-5
    trainer = make_trainer(tmp_path, model=TinyGRU(), beta=0.1, verify_plan=True)
    before = trainer.model.head.weight.clone()
    assert trainer.train().global_step == 2
    assert not torch.equal(trainer.model.head.weight, before)


@pytest.mark.parametrize(
    "chosen", [{"use_transformers_continuous_batching": True}, {"rollout_engine": "continuous"}, {"use_vllm": True}]
)
def test_engines_that_know_transformers_models_only_refuse_it(chosen: dict[str, Any], tmp_path: Path) -> None:
    ((setting, value),) = chosen.items()
    with pytest.raises(ConfigError, match=f"{setting} is {value!r}, but TinyGRU is no causal language model of transf"):
        make_trainer(tmp_path, model=TinyGRU(), **chosen, **({"vllm_mode": "server"} if "use_vllm" in chosen else {}))
