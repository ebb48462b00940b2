"""Two ranks share a run folder: one writes, a signal on one ends both, and what one refuses ends both."""

import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from memsafe_rl.checkpoint.store import checkpoints
from memsafe_rl.errors import MemsafeError, TrainingInterrupted
from memsafe_rl.records import read_lines
from tests.parallel.test_ranks import PATIENCE_SECONDS, run_ranks, set_up_rank
from tests.tiny import dropping_model
from tests.trainers.helpers import make_trainer, weights
from tests.training.test_interrupts import At

BREAKS: set[int] = set()
"""Steps behind which this rank's rewards raise, once."""


def noisy(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    """Draws random numbers, as many as the texts say, so that the ranks' generators part."""
    if trainer_state.global_step in BREAKS:
        BREAKS.clear()
        raise ZeroDivisionError("the judge is away")
    return [sum(random.random() for _ in range(1 + len(text) % 3)) for text in completions]


SETTINGS: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": 4, "save_strategy": "steps", "save_steps": 9}
SETTINGS |= {"reward_funcs": noisy}


def end_of(trainer: Any, resume: bool = False) -> str:
    try:
        trainer.train(resume_from_checkpoint=resume)
    except (TrainingInterrupted, MemsafeError, ZeroDivisionError) as ended:
        return f"{type(ended).__name__}: {ended}"
    return "finished"


def go_through_it(rank: int, port: int, folder: str) -> None:
    set_up_rank(rank, port)
    whole = make_trainer(Path(folder) / "whole", **SETTINGS)
    found = {"whole": end_of(whole)}
    asked = [At("on_step_end", 2, lambda: signal.raise_signal(signal.SIGTERM))] if rank == 1 else []
    found["stopped"] = end_of(make_trainer(Path(folder) / "run", callbacks=asked, **SETTINGS))
    found["refused"] = end_of(make_trainer(Path(folder) / "run", **SETTINGS))
    resumed = make_trainer(Path(folder) / "run", **SETTINGS, save_in_background=True)
    found["resumed"] = end_of(resumed, resume=True)
    found["steps"] = [record["step"] for record in resumed.history]
    found["logged"] = [record["step"] for record in resumed.state.log_history]
    found["same"] = torch.equal(weights(resumed), weights(whole))
    BREAKS.update([2] if rank == 1 else [])
    found["broken"] = end_of(make_trainer(Path(folder) / "broken", **SETTINGS))
    mended = make_trainer(Path(folder) / "broken", **SETTINGS)
    found["mended"] = end_of(mended, resume=True)
    found["same after an error"] = torch.equal(weights(mended), weights(whole))
    drops = {**SETTINGS, "disable_dropout": False}
    untroubled = make_trainer(Path(folder) / "dropout", model=dropping_model(), **drops)
    untroubled.train()
    fails = [At("on_step_end", 2, lambda: 1 / 0)] if rank == 1 else []
    found["dropped"] = end_of(make_trainer(Path(folder) / "dropped", model=dropping_model(), callbacks=fails, **drops))
    again = make_trainer(Path(folder) / "dropped", model=dropping_model(), **drops)
    end_of(again, resume=True)
    found["same after an update that drew"] = torch.equal(weights(again), weights(untroubled))
    torch.save(found, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_ranks_stop_resume_and_are_refused_together(tmp_path: Path) -> None:
    ranks = run_ranks(go_through_it, tmp_path, PATIENCE_SECONDS)
    for found in ranks:
        assert found["whole"] == found["resumed"] == "finished"
        assert found["stopped"] == "TrainingInterrupted: SIGTERM"
        assert found["steps"] == [1, 2, 3, 4]
        assert found["logged"] == [1, 2, 3, 4, 4]
        assert found["same"]
        assert found["mended"] == "finished"
        assert found["same after an error"]
        assert found["same after an update that drew"]
    assert ranks[1]["broken"] == "ZeroDivisionError: the judge is away"
    assert "checkpoint-2" in [path.name for path in checkpoints(tmp_path / "broken")]
    assert "which holds checkpoint-2 of an earlier run" in ranks[0]["refused"]
    assert "Rank 0 ended the run: ConfigError: output_dir is" in ranks[1]["refused"]
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-2", "checkpoint-4"]
    lines = read_lines(tmp_path / "run" / "steps.jsonl")[0]
    assert [(line["step"], line["start"]) for line in lines] == [(1, 0), (2, 0), (3, 1), (4, 1)]
