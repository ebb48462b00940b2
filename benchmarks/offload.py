"""What does offloading save, and what does a mark cost: bytes held after a forward, peak, seconds?

    python -m benchmarks.offload [--repeats 5]

Writes ``benchmarks/results/offload.json``. A random Qwen3 (6 blocks, width 256, vocabulary 4,096, fp32) runs forward
and backward on 4 rows of 256 tokens under a simulated device, with checkpointing and offload on and off; bytes are
those above the weights. Beside the host's peak stand the bytes that `torch.autograd.graph.save_on_cpu` would move:
every tensor as often as it is saved, weights too. Last come the microseconds of a mark, heard and unheard.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import timeit
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.machine import describe_machine
from memsafe_rl.accounting import charge, claim, host_memory, in_phase
from memsafe_rl.memory.runtime.host_memory import offloaded
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.models.language.causal_lm import CausalLMAdapter
from memsafe_rl.types import Component, Phase

RESULTS = Path(__file__).parent / "results" / "offload.json"


def build_model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def forward(adapter: CausalLMAdapter, ids: Tensor, recompute: bool, hooks: AbstractContextManager[object]) -> Tensor:
    with adapter.recompute(recompute), hooks:
        loss: Tensor = adapter.model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[..., 5].sum()
    return loss


def measure(adapter: CausalLMAdapter, ids: Tensor, recompute: bool, offload: bool, repeats: int) -> dict[str, float]:
    model = adapter.model
    held, seconds = 0, []
    with SimulatedMemory() as memory:
        for repeat in range(repeats + 1):
            model.zero_grad()
            before = memory.live_bytes
            memory.reset_peak()
            start = time.perf_counter()
            weights = [*model.parameters(), *model.buffers()]
            loss = forward(adapter, ids, recompute, offloaded(weights) if offload else nullcontext())
            held = memory.live_bytes - before
            torch.autograd.backward(loss)
            if repeat:  # the first only warms up
                seconds.append(time.perf_counter() - start)
            del loss
        peak = memory.peak_bytes - before
        gradients = [float(weight.grad.double().sum()) for weight in model.parameters() if weight.grad is not None]
        model.zero_grad()
    return {
        "held_bytes": held,
        "peak_bytes": peak,
        "host_bytes": memory.host_peak_bytes,
        "seconds": statistics.median(seconds),
        "gradient_sum": sum(gradients),
    }


def bytes_of_save_on_cpu(adapter: CausalLMAdapter, ids: Tensor, recompute: bool) -> int:
    moved = []

    def pack(tensor: Tensor) -> Tensor:
        moved.append(tensor.nbytes)
        return tensor.detach()

    forward(adapter, ids, recompute, saved_tensors_hooks(pack, lambda tensor: tensor))
    return sum(moved)


def microseconds(mark: Callable[[], AbstractContextManager[None]]) -> float:
    def marked() -> None:
        with mark():
            pass

    return min(timeit.repeat(marked, number=5000, repeat=5)) / 5000 * 1e6


def mark_costs() -> dict[str, float]:
    made = torch.ones(1)

    def claimed() -> AbstractContextManager[None]:
        claim(Component.LOGITS, [made])
        return nullcontext()

    marks: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "charge": lambda: charge(Component.LOGITS),
        "host_memory": host_memory,
        "claim": claimed,
        "in_phase": lambda: in_phase(Phase.UPDATE),
    }
    unheard = {name: microseconds(mark) for name, mark in marks.items()}
    with SimulatedMemory():
        heard = {f"{name}, heard": microseconds(mark) for name, mark in marks.items()}
    return unheard | heard


def show(console: Console, rows: dict[str, dict[str, float]]) -> None:
    table = Table("plan", "held", "peak", "host", "save_on_cpu", "seconds")
    for name, row in rows.items():
        sizes = [row[key] for key in ("held_bytes", "peak_bytes", "host_bytes", "save_on_cpu_bytes")]
        table.add_row(name, *(f"{size:,.0f}" for size in sizes), f"{row['seconds']:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    adapter = CausalLMAdapter(build_model(), pad_token_id=0)
    ids = torch.randint(2, 4000, (4, 256))
    rows = {}
    for name, recompute, offload in (
        ("plain", False, False),
        ("offload", False, True),
        ("checkpointing", True, False),
        ("both", True, True),
    ):
        rows[name] = measure(adapter, ids, recompute, offload, arguments.repeats)
        rows[name]["save_on_cpu_bytes"] = bytes_of_save_on_cpu(adapter, ids, recompute)
    console = Console()
    show(console, rows)
    costs = mark_costs()
    console.print({name: round(cost, 2) for name, cost in costs.items()})
    result = {"machine": describe_machine(), "plans": rows, "mark_microseconds": costs}
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
