"""An environment of verifiers 0.4 drives a run unchanged: its harness, its runtime and its rewards, our tokens.

Runs where verifiers can be imported: `pip install verifiers uv` in an environment of its own, beside this package.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

vf = pytest.importorskip("verifiers.v1", reason="verifiers is not installed; it needs an environment of its own")

from memsafe_rl import AgentClient, AgentHarness  # noqa: E402
from tests.rollout.multi_turn.test_harness import chat  # noqa: E402
from tests.trainers.helpers import weights  # noqa: E402
from tests.trainers.test_episodes import trainer_of  # noqa: E402

TASKSET = """
import verifiers.v1 as vf

__all__ = ["Sayings"]


class Saying(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def digits(self, trace: vf.Trace) -> float:
        return sum(character.isdigit() for character in trace.last_reply) / 4 + len(trace.last_reply) / 50


class Sayings(vf.Taskset[Saying, vf.TasksetConfig]):
    def load(self):
        for number in range(8):
            yield Saying(vf.TaskData(prompt=f"say {number}"), self.config.task)
"""
ROWS = [{"prompt": [{"role": "user", "content": f"say {number}"}], "number": number} for number in range(8)]
KEY = "KEY_OF_THE_ENDPOINT"


@pytest.fixture
def run() -> Iterator[Callable[[Any], Any]]:
    """Runs coroutines on one event loop: verifiers holds locks that all episodes share."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result(timeout=300)
    loop.call_soon_threadsafe(loop.stop)


def trained(folder: Path, agent: Callable[[Mapping[str, Any], AgentClient], float]) -> Any:
    harness = AgentHarness(agent, timeout_seconds=120)
    trainer = trainer_of(folder, environment_factory=harness, train_dataset=Dataset.from_list(ROWS))
    trainer.train()
    return trainer


def by_hand(example: Mapping[str, Any], client: AgentClient) -> float:
    said = chat(client, [{"role": "user", "content": f"say {example['number']}"}])["choices"][0]["message"]["content"]
    return sum(character.isdigit() for character in said) / 4 + len(said) / 50


def test_its_environment_learns_what_plain_requests_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[[Any], Any]
) -> None:
    (tmp_path / "sayings.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # where uv lies
    seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    settings = {"taskset": {"id": "sayings"}, "agent": seat}
    environment = vf.load_environment(vf.env_config_type("sayings", "").model_validate(settings))
    tasks = list(environment.taskset)

    async def played(number: int, client: AgentClient) -> float:
        endpoint = vf.EvalClientConfig(base_url=client.base_url, api_key_var=KEY)
        context = vf.ModelContext(model=client.model, client=endpoint)
        episode = await environment.run_slot(environment.slots(tasks[number])[0], context)
        assert episode.ok, [error.message for trace in episode.traces for error in trace.errors]
        return float(episode.traces[0].reward)

    def agent(example: Mapping[str, Any], client: AgentClient) -> float:
        monkeypatch.setenv(KEY, client.api_key)
        return float(run(played(example["number"], client)))

    serving = environment.serving()
    run(serving.__aenter__())
    theirs = trained(tmp_path / "theirs", agent)
    run(serving.__aexit__(None, None, None))
    ours = trained(tmp_path / "ours", by_hand)
    rewards = [[one["reward"] for one in trainer.state.log_history if "reward" in one] for trainer in (theirs, ours)]
    assert rewards[0] == rewards[1]
    assert min(rewards[0]) > 0
    assert torch.equal(weights(theirs.model), weights(ours.model))
