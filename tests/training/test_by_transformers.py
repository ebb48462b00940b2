"""Whole runs of a network that only transformers' `generate` can decode."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.rollout.native import by_transformers
from tests.tiny import EOS_ID, PAD_ID, VOCAB_SIZE, tiny_model
from tests.trainers.helpers import cut, make_trainer, relative, weights


def mamba() -> Any:
    ids = {"pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "bos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MambaForCausalLM(
            MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, state_size=4, **ids)
        )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("check", ["probe_worst_case", "verify_plan"])
def test_a_run_passes_its_checks_and_says_once_how_it_decodes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, check: str
) -> None:
    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(tmp_path, model=mamba(), policy=cut(128, 8), **{check: True})
        trainer.train()
    assert sum("Rollouts run transformers' generate" in record.getMessage() for record in caplog.records) == 1
    assert trainer.state.global_step == 2


@pytest.mark.slow
def test_failures_anywhere_change_nothing(tmp_path: Path) -> None:
    ends, phases, allocations = [], set(), 0
    for share in (None, 0.3, 0.6, 0.9):
        fault = None if share is None else int(share * allocations)
        with SimulatedMemory(fail_at=fault) as memory:
            trainer = make_trainer(tmp_path / str(fault), model=mamba(), max_steps=1)
            trainer.train()
            ends.append(weights(trainer))
            allocations = allocations or memory.allocations
        retries = [event for event in trainer.memory_events if event["event"] == "retry"]
        assert len(retries) == (fault is not None)
        phases |= {str(event["phase"]) for event in retries}
    assert all(relative(end, ends[0]) < 1e-6 for end in ends[1:])  # float32, in another order at most
    assert any("rollout" in phase for phase in phases)


def test_a_generate_in_transformers_place_is_said_once_and_has_no_gap_to_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    by_transformers._say_once.cache_clear()
    model = tiny_model()
    rows: list[int] = []

    def own(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        rows.append(len(input_ids))
        return torch.cat([input_ids, torch.arange(5, 5 + len(input_ids))[:, None].expand(-1, 4)], 1)

    model.generate = own
    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(tmp_path, model=model, max_steps=2)
        trainer.train()
    assert len(rows) >= 2
    assert sum("generate is not transformers' own" in record.getMessage() for record in caplog.records) == 1
    assert not any("sampling_logp_difference" in name for record in trainer.history for name in record)
