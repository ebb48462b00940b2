"""Gradients in half precision are added up in float32 over ranks and micro-batches: by hand."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from memsafe_rl.accounting import local_part
from memsafe_rl.parallel.replicas import Replicas, connect, open_accelerator
from memsafe_rl.parallel.shards import ShardedWeights
from tests.parallel.test_ranks import PATIENCE_SECONDS, run_ranks, set_up_rank
from tests.tiny import tiny_model

pytestmark = pytest.mark.slow

# bfloat16 has 2^-7 above 1, and rounds 1 + 2^-9 and 1 + 2^-8 to 1. All together make 1 + 2^-7.
GRADIENTS = ((1.0, 2**-9, 2**-9), (2**-9, 2**-9))
"""Of each rank's micro-batches."""


def add_up(rank: int, port: int, folder: str) -> None:
    set_up_rank(rank, port)
    ranks = connect(open_accelerator(use_cpu=True), sharded=True, timeout_seconds=1800)
    model = tiny_model(dtype=torch.bfloat16)
    assert isinstance(ranks, Replicas)
    shards, weight = ShardedWeights([model], ranks, torch.device("cpu")), model.model.norm.weight

    def learn(gradient: float) -> None:
        def loss() -> Any:
            logits = model(input_ids=torch.ones(1, 3, dtype=torch.int64), use_cache=False).logits
            return 0 * logits.sum() + gradient * model.model.norm.weight.sum()

        shards.forward_of(model)(loss).backward()

    shards.learn_order(partial(learn, 1.0))
    model.zero_grad()
    for gradient in shards.rounds(GRADIENTS[rank], reduce_each=False):
        learn(gradient)
    torch.save(local_part(weight.grad), Path(folder) / f"{rank}.pt")


def test_what_bfloat16_rounds_away_is_added_up(tmp_path: Path) -> None:
    for part in run_ranks(add_up, tmp_path, PATIENCE_SECONDS):
        assert part.dtype is torch.bfloat16
        assert part.unique().tolist() == [1 + 2**-7]
