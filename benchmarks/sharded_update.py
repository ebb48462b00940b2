"""An update whose weights are divided by FSDP2, really run on two ranks of the CPU, beside what is forecast of a rank.

    python -m benchmarks.sharded_update

The run is counted by an allocator that sees every byte; the forecast runs the same loop once, on fake tensors, with the
rank's part of what is divided and what FSDP2 gathers for a while.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import distributed, multiprocessing
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen3Config

from memsafe_rl.accounting import charge, in_phase, listen, stop_listening
from memsafe_rl.memory.runtime.tracker import watch_gradients
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.models.blocks import find_blocks
from memsafe_rl.preflight.fake.device import fake_device, give_fake_weights
from memsafe_rl.preflight.fake.sharding import Gathering, Sharding, parts_of
from memsafe_rl.types import Component, Phase
from tests.parallel.test_ranks import free_port

RANKS = 2
SHAPES = {
    "head outweighs": {"vocab_size": 4000, "num_hidden_layers": 6, "rows": 2, "tokens": 48},
    "blocks outweigh": {"vocab_size": 500, "num_hidden_layers": 8, "rows": 2, "tokens": 48},
    "activations outweigh": {"vocab_size": 2000, "num_hidden_layers": 4, "rows": 8, "tokens": 128},
    "tied head": {"vocab_size": 4000, "num_hidden_layers": 4, "rows": 2, "tokens": 64, "tie_word_embeddings": True},
}
"""Networks and batches in which other things decide the peak."""


def config_of(shape: dict[str, Any]) -> Qwen3Config:
    """Returns the network of a shape."""
    sizes = {name: value for name, value in shape.items() if name not in ("rows", "tokens")}
    width = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    return Qwen3Config(**{"tie_word_embeddings": False, **width, **heads, **sizes})


def two_steps(model: Any, shape: dict[str, Any], memory: SimulatedMemory) -> int:
    """Runs two optimizer steps; gives the peak of the second, whose optimizer has its state."""
    with charge(Component.OPTIMIZER):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, 500, (shape["rows"], shape["tokens"]))
    for _ in range(2):
        memory.reset_peak()
        with in_phase(Phase.UPDATE), nullcontext() if memory.exact else watch_gradients(list(model.parameters())):
            logits = model(input_ids=ids, attention_mask={"full_attention": None}, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
            del logits
            loss.backward()
            del loss
        peak = memory.peak_bytes
        with in_phase(Phase.OPTIMIZER), charge(Component.OPTIMIZER):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return peak


def forecast(shape: dict[str, Any]) -> int:
    """Forecasts the peak of one rank."""
    with fake_device() as memory:
        memory.ledger.divide(parts_of(Sharding.FSDP, RANKS))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config_of(shape)).eval()
        with charge(Component.WEIGHTS):
            give_fake_weights(model)
        gathering = Gathering([model], RANKS)
        listen(gathering)
        try:
            return two_steps(model, shape, memory)
        finally:
            stop_listening(gathering)


def _rank(rank: int, port: int, shape: dict[str, Any], folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    mesh = distributed.init_device_mesh("cpu", (RANKS,))
    with SimulatedMemory(exact=True) as memory:
        model = AutoModelForCausalLM.from_config(config_of(shape)).eval()
        for block in find_blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        peak = two_steps(model, shape, memory)
    Path(folder, str(rank)).write_text(str(peak))
    distributed.destroy_process_group()


def measured(shape: dict[str, Any]) -> list[int]:
    """Runs it on two ranks; gives the peak of each."""
    port = free_port()
    with TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (port, shape, folder), nprocs=RANKS)
        return [int(Path(folder, str(rank)).read_text()) for rank in range(RANKS)]


def main() -> None:
    """Prints a row for every shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(SHAPES), help="one shape")
    only = parser.parse_args().only
    print("| what decides | forecast of a rank | measured | error |\n|---|---|---|---|")
    for name, shape in SHAPES.items():
        if only in (None, name):
            foreseen, found = forecast(shape), max(measured(shape))
            print(f"| {name} | {foreseen:,} B | {found:,} B | {foreseen / found - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
