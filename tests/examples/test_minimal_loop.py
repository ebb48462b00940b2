"""A loop of one's own on the public parts ends with the trainer's weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples import minimal_loop
from examples.quickstart import WarmUp, small_parts
from examples.tasks import exact
from memsafe_rl import GRPOTrainer

STEPS = 4


@pytest.mark.slow
def test_the_loop_ends_with_the_trainers_weights(tmp_path: Path) -> None:
    warming = WarmUp(right_steps=10, wrong_steps=5)
    mine, theirs = (small_parts(tmp_path / name, 0, STEPS, warming) for name in ("mine", "theirs"))
    state = minimal_loop.train(mine)
    assert state.step == STEPS
    theirs.config.eval_strategy, theirs.config.eval_on_start, theirs.config.save_strategy = "no", False, "no"
    trainer = GRPOTrainer(
        theirs.model, exact, args=theirs.config, train_dataset=theirs.train, processing_class=theirs.tokenizer
    )
    trainer.train()
    pairs = zip(mine.model.parameters(), theirs.model.parameters(), strict=True)
    assert all(torch.equal(own, other) for own, other in pairs)
