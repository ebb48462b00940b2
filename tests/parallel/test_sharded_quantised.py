"""A bitsandbytes base under LoRA, shared by two ranks: what one process learns, with half the bytes a rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from tests.parallel.test_ranks import PATIENCE_SECONDS, Pulse, outcome_of, run_ranks, set_up_rank
from tests.parallel.test_sharded_training import ranks_now, saving, sharding, the_last_step, train
from tests.tiny import tiny_model
from tests.trainers.helpers import cut, make_trainer, relative

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.slow

STORED = (torch.float32, torch.bfloat16)
"""Types that weights in 4 bits are packed as, which FSDP2 divides."""


def quantised(base: Path, stored: torch.dtype, folder: Path, rank: int | None) -> Any:
    kept = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=stored,
    )
    return make_trainer(
        folder,
        model=str(base),
        model_init_kwargs={"quantization_config": kept},
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
        per_device_train_batch_size=12 // ranks_now(),
        policy=cut(20 if rank == 1 else 60),
        num_iterations=2,
        beta=0.1,
        max_steps=4,
        **sharding(rank),
    )


def train_rank(base: Path, rank: int, port: int, folder: str) -> None:
    set_up_rank(rank, port)
    pulse, found = Pulse(Path(folder), rank), {}
    for stored in STORED:
        pulse()
        place, make = Path(folder) / str(stored), partial(quantised, base, stored)
        found[stored] = train(saving(make, place, rank))
        resumed = saving(make, Path(folder) / f"{stored} on", rank, resume_from_checkpoint=str(place / "checkpoint-3"))
        found[stored]["resumed"] = the_last_step(resumed)
    found["bytes"] = outcome_of(partial(quantised, base, torch.uint8, Path(folder) / "bytes", rank))
    torch.save(found, Path(folder) / f"{rank}.pt")


def test_two_ranks_divide_a_base_in_4_bits_that_is_packed_as_floats(tmp_path: Path) -> None:
    base, shared = tmp_path / "base", tmp_path / "shared"
    tiny_model(hidden=128, tied=False, scale=1.0).save_pretrained(base)
    shared.mkdir()
    ranks = run_ranks(partial(train_rank, base), shared, PATIENCE_SECONDS)
    for stored in STORED:
        one = train(saving(partial(quantised, base, stored), tmp_path / f"alone {stored}", None))
        for found in (rank[stored] for rank in ranks):
            for mine, known in zip(found["steps"], one["steps"], strict=True):
                assert torch.equal(mine[0], known[0])
            assert relative(found["steps"][0][1], one["steps"][0][1]) < 1e-6
            assert (found["end"] - one["end"]).norm() < 2e-5 * (one["end"] - one["start"]).norm()
            assert torch.equal(found["resumed"], found["end"])
            assert found["held"] < 0.6 * one["held"]
    for refused in (rank["bytes"] for rank in ranks):
        assert refused.startswith("ConfigError: fsdp divides language models, and PeftModelForCausalLM has quantised")
        assert "bnb_4bit_quant_storage=torch.bfloat16" in refused
