"""A teacher behind vLLM's standard routes, over real HTTP: the same advantages as from one that is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memsafe_rl import ConfigError, GRPOConfig, GRPOTrainer
from memsafe_rl.errors import MemsafeError
from memsafe_rl.rollout.server import teacher as served
from tests.models.language.test_seq2seq import build
from tests.rollout.server.fake_server import FakeServer
from tests.tiny import tiny_model
from tests.trainers.helpers import make_trainer, relative, weights


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(served, "_AGAIN", served._AGAIN.new(backoff_factor=0.0))
    server = FakeServer()
    server.model = tiny_model("qwen3", layers=3, hidden=64, seed=7, scale=4.0)
    yield server
    server.stop()


def taught(folder: Path, **settings: Any) -> GRPOTrainer:
    return make_trainer(folder, **{"model": tiny_model(scale=4.0), "max_steps": 3, "optim": "sgd", **settings})


@pytest.mark.slow
def test_it_teaches_what_the_same_network_teaches_here(tmp_path: Path, server: FakeServer) -> None:
    server.model.save_pretrained(tmp_path / "teacher")
    here = taught(tmp_path / "here", teacher_model_name_or_path=str(tmp_path / "teacher"))
    here.train()
    there = taught(tmp_path / "there", teacher_model_server_url=f"{server.url}/")
    assert there.setup.reference_model is None
    there.train()
    plain = taught(tmp_path / "plain")
    plain.train()
    assert relative(weights(there), weights(here)) < 1e-6
    assert relative(weights(plain), weights(here)) > 1e-4
    apart = [[step["distillation/kl"] for step in trainer.history] for trainer in (here, there)]
    assert apart[0] == pytest.approx(apart[1], rel=1e-4)


@pytest.mark.slow
def test_what_fails_is_asked_for_again_and_what_is_refused_ends_the_run(tmp_path: Path, server: FakeServer) -> None:
    server.stumbles = 4  # as often as one request is sent again: all may be its own
    taught(tmp_path / "again", teacher_model_server_url=server.url).train()
    assert server.stumbles == 0

    def spoiled(change: Any) -> str:
        server.spoil = change
        with pytest.raises(MemsafeError, match="resume the run") as raised:
            taught(tmp_path / "spoiled", teacher_model_server_url=server.url, overwrite_output_dir=True).train()
        return str(raised.value)

    def without(name: str) -> Any:
        return lambda answer: {key: value for key, value in answer.items() if key != name}

    def infinite(answer: dict[str, Any]) -> dict[str, Any]:
        last = {token: {"logprob": float("inf")} for token in answer["choices"][0]["prompt_logprobs"][-1]}
        answer["choices"][0]["prompt_logprobs"][-1] = last
        return answer

    def short(answer: dict[str, Any]) -> dict[str, Any]:
        del answer["choices"][0]["prompt_logprobs"][-1]
        return answer

    for change in (without("choices"), infinite, short):
        assert "gave no log-probs of a prompt" in spoiled(change)
    server.stop()
    assert "/v1/models: ConnectionError" in spoiled(dict)


def test_what_a_server_cannot_do_is_refused(tmp_path: Path) -> None:
    for wrong in ({"temperature": 0.7}, {"distillation_top_k": 3}, {"teacher_model_name_or_path": "other"}):
        (name,) = wrong
        with pytest.raises(ConfigError, match=f"{name} is .* with a teacher on a server"):
            GRPOConfig(str(tmp_path), teacher_model_server_url="http://there:8000", use_cpu=True, **wrong)
    with pytest.raises(ConfigError, match="T5ForConditionalGeneration, whose encoder"):
        taught(tmp_path, model=build("t5v1.1", torch.float32), teacher_model_server_url="http://there:8000")
