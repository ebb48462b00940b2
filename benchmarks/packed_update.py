"""What does one copy of a prompt for all its completions save: seconds and bytes of an optimizer step's gradient?

    python -m benchmarks.packed_update [--repeats 3] [--layers 30]

Writes ``benchmarks/results/packed_update.json``. A random Llama of SmolLM2-135M's shape (width 576, 9 heads over 3 for
keys, vocabulary 49,152, fp32) accumulates the gradient of groups of completions, row by row and packed, in turns; the
ratio is the median over neighbours. Seconds are the processor's, of one thread, in micro-batches of 2,048 tokens,
beyond which rows get no faster here. Bytes are taken of two layers and of four and carried on to all, with all rows in
one micro-batch: the peak above weights and gradients, counted by an allocator that sees every allocation. The last
column is the distance between both gradients, relative to their norm.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import describe_machine
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.models.language.causal_lm import CausalLMAdapter, check_head
from memsafe_rl.training.gradient import StepTerms, accumulate_gradient
from memsafe_rl.types import Denominators, LossSettings, Ragged, Trajectory, UpdatePlan

RESULTS = Path(__file__).parent / "results" / "packed_update.json"
TILE = 128


class Shape(NamedTuple):
    """Prompts of P tokens with G completions of R tokens, or of 1 to R."""

    prompts: int
    P: int
    G: int
    R: int
    ragged: bool = False

    def __str__(self) -> str:
        longest = f"1 to {self.R}" if self.ragged else str(self.R)
        return f"{self.prompts} x P={self.P}, G={self.G}, R={longest}"


SHAPES = (
    Shape(1, 512, 16, 64),
    Shape(1, 512, 16, 64, ragged=True),
    Shape(4, 80, 8, 12),
)


def build_adapter(layers: int) -> CausalLMAdapter:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    adapter = CausalLMAdapter(LlamaForCausalLM(config).eval(), pad_token_id=0)
    check_head(adapter)
    return adapter


def build_rows(shape: Shape) -> Trajectory:
    generator = torch.Generator().manual_seed(1)
    rows = shape.prompts * shape.G
    lengths = torch.randint(1, shape.R + 1, (rows,), generator=generator).tolist() if shape.ragged else [shape.R] * rows
    actions = Ragged(torch.randint(2, 49152, (sum(lengths),), generator=generator), tuple(lengths))
    groups = tuple(row // shape.G for row in range(rows))
    return Trajectory(
        conditions=Ragged(
            torch.randint(2, 49152, (shape.prompts * shape.P,), generator=generator), (shape.P,) * shape.prompts
        ),
        condition_of_row=groups,
        actions=actions,
        loss_mask=Ragged(torch.ones(sum(lengths)), actions.lengths),
        sampling_logprobs=None,
        advantages=torch.linspace(-1, 1, rows) if rows > 1 else torch.ones(1),
        group_of_row=groups,
        finished=(True,) * rows,
        has_old=(False,) * rows,
    )


def learn(adapter: CausalLMAdapter, trajectory: Trajectory, plan: UpdatePlan) -> None:
    rows = range(len(trajectory))
    tokens = len(trajectory.actions.flat)
    terms = StepTerms(
        settings=LossSettings(loss_type="dapo"),
        denominators=Denominators(rows=len(rows), tokens=tokens, entropy_tokens=tokens),
        temperature=1.0,
        with_entropy=True,
    )
    accumulate_gradient(adapter, trajectory, rows, plan, terms, autocast=nullcontext, scale=lambda loss: loss)


def gradient(adapter: CausalLMAdapter) -> Tensor:
    return torch.cat([weight.grad.flatten() for weight in adapter.model.parameters() if weight.grad is not None])


def seconds(adapter: CausalLMAdapter, trajectory: Trajectory, plan: UpdatePlan) -> float:
    adapter.model.zero_grad(set_to_none=True)
    gc.collect()
    start = time.process_time()
    learn(adapter, trajectory, plan)
    return time.process_time() - start


def peak_bytes(trajectory: Trajectory, plan: UpdatePlan, layers: int) -> int:
    adapter = build_adapter(layers)
    for weight in adapter.model.parameters():
        weight.grad = torch.zeros_like(weight)
    with SimulatedMemory() as memory:
        learn(adapter, trajectory, plan)
    return memory.peak_bytes


def bytes_of_all_layers(trajectory: Trajectory, plan: UpdatePlan, layers: int) -> int:
    """The peak of two and of four layers, carried on to all of them: every layer adds the same."""
    two, four = (peak_bytes(trajectory, plan, some) for some in (2, 4))
    return two + (four - two) // 2 * (layers - 2)


def compare(adapter: CausalLMAdapter, shape: Shape, repeats: int, layers: int) -> dict[str, Any]:
    trajectory = build_rows(shape)
    row_plan = UpdatePlan(micro_batch_tokens=2048, logprob_tile=TILE)
    packed_plan = UpdatePlan(micro_batch_tokens=2048, logprob_tile=TILE, pack_prompts=True)
    taken: list[tuple[float, float]] = []
    difference = 0.0
    for _ in range(repeats):
        by_rows = seconds(adapter, trajectory, row_plan)
        wanted = gradient(adapter)
        packed = seconds(adapter, trajectory, packed_plan)
        difference = float((gradient(adapter) - wanted).norm() / wanted.norm())
        taken.append((by_rows, packed))
        del wanted
    whole = UpdatePlan(micro_batch_tokens=10**6, logprob_tile=TILE)
    sizes = [
        bytes_of_all_layers(trajectory, plan, layers)
        for plan in (whole, UpdatePlan(micro_batch_tokens=10**6, logprob_tile=TILE, pack_prompts=True))
    ]
    return {
        "row_seconds": statistics.median(pair[0] for pair in taken),
        "packed_seconds": statistics.median(pair[1] for pair in taken),
        "time_ratio": statistics.median(pair[1] / pair[0] for pair in taken),
        "row_bytes": sizes[0],
        "packed_bytes": sizes[1],
        "bytes_ratio": sizes[1] / sizes[0],
        "gradient_difference": difference,
    }


def show(console: Console, found: dict[str, dict[str, Any]]) -> None:
    table = Table("rows", "s, row by row", "s, packed", "ratio", "MB, row by row", "MB, packed", "ratio", "gradient")
    for name, row in found.items():
        table.add_row(
            name,
            f"{row['row_seconds']:.2f}",
            f"{row['packed_seconds']:.2f}",
            f"{row['time_ratio']:.2f}",
            f"{row['row_bytes'] / 1e6:,.0f}",
            f"{row['packed_bytes'] / 1e6:,.0f}",
            f"{row['bytes_ratio']:.2f}",
            f"{row['gradient_difference']:.1e}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    adapter = build_adapter(arguments.layers)
    result: dict[str, Any] = {"machine": describe_machine(), "layers": arguments.layers, "repeats": arguments.repeats}
    result["rows"] = {}
    for shape in SHAPES:
        result["rows"][str(shape)] = compare(adapter, shape, arguments.repeats, arguments.layers)
        RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    show(Console(width=160), result["rows"])


if __name__ == "__main__":
    main()
