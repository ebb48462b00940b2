"""What does it save that turns which episodes share are run once: seconds and bytes of an optimizer step's gradient?

    python -m benchmarks.unique_tokens [--repeats 3] [--turns 2 4 8 16]

Writes ``benchmarks/results/unique_tokens.json``. Four episodes of one prompt (128 tokens) become a sequence for each
turn: what the agent wrote (48 tokens of thought, 16 said) and 64 tokens of answer follow one another. Templates extend
the conversation, or rewrite it: later turns see earlier ones without their thoughts. A random Qwen3 (width 128, 4
layers, vocabulary 4,096, fp32) accumulates the gradient of all turns, in micro-batches of 4,096 tokens, in three ways:
sequences padded, packed behind whole prompts only, and packed with all that they share run once; and then in
micro-batches as long as the longest sequence, where the tree is walked depth first. Seconds are the processor's, of one
thread, in turns; ratios are medians over neighbours. "needed" is the share of products with weights that is left:
blocks run for unique tokens, but the head for every completion token. Bytes are the peak above weights and gradients,
by an allocator that sees every allocation, beside that of the longest sequence alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks.machine import describe_machine
from benchmarks.small import small_qwen3
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.models.language.causal_lm import CausalLMAdapter, check_head
from memsafe_rl.prefix_tree import sort_by_tokens
from memsafe_rl.training.gradient import StepTerms, accumulate_gradient
from memsafe_rl.types import Denominators, LossSettings, Ragged, Trajectory, UpdatePlan, UpdateWork

RESULTS = Path(__file__).parent / "results" / "unique_tokens.json"
VOCABULARY = 4096
EPISODES, PROMPT, THOUGHT, SAID, ANSWER = 4, 128, 48, 16, 64
ROOM, TILE = 4096, 256


def build_rows(turns: int, *, rewrites: bool) -> Trajectory:
    """Makes the sequences of all episodes.

    Args:
        turns: of each episode.
        rewrites: whether later turns see earlier ones without their thoughts.

    Returns:
        A row for each turn, in random order, with what they share.
    """
    generator = torch.Generator().manual_seed(turns)

    def words(count: int) -> Tensor:
        return torch.randint(2, VOCABULARY, (count,), generator=generator)

    start, rows = words(PROMPT), []
    for _ in range(EPISODES):
        context = start
        for _ in range(turns):
            thought, said = words(THOUGHT), words(SAID)
            rows.append((context, torch.cat([thought, said])))
            context = torch.cat([context, *([] if rewrites else [thought]), said, words(ANSWER)])
    random.Random(turns).shuffle(rows)
    return lay_out(rows)


def lay_out(rows: Sequence[tuple[Tensor, Tensor]]) -> Trajectory:
    """Stores rows that learn different amounts.

    Args:
        rows: of each, prompt and completion, (length,) int64.

    Returns:
        The rows of one group, with what they share.
    """
    actions = Ragged.from_rows([own for _, own in rows])
    return Trajectory(
        conditions=Ragged.from_rows([prompt for prompt, _ in rows]),
        condition_of_row=tuple(range(len(rows))),
        actions=actions,
        loss_mask=Ragged(torch.ones(len(actions.flat)), actions.lengths),
        sampling_logprobs=None,
        advantages=torch.linspace(-1, 1, len(rows)),
        group_of_row=(0,) * len(rows),
        finished=(True,) * len(rows),
        has_old=(False,) * len(rows),
        sample_of_row=tuple(range(len(rows))),
        prefixes=sort_by_tokens([torch.cat(row) for row in rows]),
    )


def build_adapter(dtype: torch.dtype = torch.float32) -> CausalLMAdapter:
    """Makes the network, the same each time."""
    model = small_qwen3(VOCABULARY, hidden=128, layers=4, head_dim=32, max_position_embeddings=4096).to(dtype)
    adapter = CausalLMAdapter(model.eval(), pad_token_id=0)
    check_head(adapter)
    return adapter


def learn(adapter: CausalLMAdapter, trajectory: Trajectory, plan: UpdatePlan, rows: Sequence[int]) -> int:
    """Accumulates the gradient of some rows; gives the tokens that were run."""
    tokens = sum(trajectory.action_lengths(rows))
    terms = StepTerms(LossSettings(), Denominators(len(rows), tokens, tokens), temperature=1.0, with_entropy=True)
    return accumulate_gradient(
        adapter, trajectory, rows, plan, terms, autocast=nullcontext, scale=lambda loss: loss
    ).tokens


def gradient(adapter: CausalLMAdapter, trajectory: Trajectory, plan: UpdatePlan) -> Tensor:
    """Returns the gradient of all rows."""
    adapter.model.zero_grad(set_to_none=True)
    learn(adapter, trajectory, plan, range(len(trajectory)))
    return torch.cat([one.grad.flatten() for one in adapter.model.parameters() if one.grad is not None])


def peak_bytes(adapter: CausalLMAdapter, trajectory: Trajectory, plan: UpdatePlan, rows: Sequence[int]) -> int:
    """Counts what a step adds at most to weights and gradients."""
    for weight in adapter.model.parameters():
        weight.grad = torch.zeros_like(weight)
    with SimulatedMemory() as memory:
        learn(adapter, trajectory, plan, rows)
    return memory.peak_bytes


def needed_share(adapter: CausalLMAdapter, work: UpdateWork) -> float:
    """Returns the products with weights that unique tokens need, beside those of all tokens, padding left out."""
    sizes = {name: weight.numel() for name, weight in adapter.model.named_parameters()}
    blocks = sum(size for name, size in sizes.items() if ".layers." in name)
    head = sum(work.action_tokens) * sizes["model.embed_tokens.weight"]  # tied
    return (work.packed_tokens * blocks + head) / (sum(work.row_tokens) * blocks + head)


def compare(turns: int, *, rewrites: bool, repeats: int) -> dict[str, Any]:
    """Measures all ways of one shape."""
    adapter, trajectory = build_adapter(), build_rows(turns, rewrites=rewrites)
    rows = range(len(trajectory))
    work = adapter.work(trajectory, rows)
    longest = max(rows, key=work.row_tokens.__getitem__)
    path = UpdatePlan(micro_batch_tokens=work.row_tokens[longest], logprob_tile=TILE, pack_prompts=True)
    ways = {
        "padded": (trajectory, replace(path, micro_batch_tokens=ROOM, pack_prompts=False)),
        "prompts": (replace(trajectory, prefixes=()), replace(path, micro_batch_tokens=ROOM)),
        "shared": (trajectory, replace(path, micro_batch_tokens=ROOM)),
        "walked": (trajectory, path),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    tokens = {}
    for _ in range(repeats):
        for name, (stored, plan) in ways.items():
            adapter.model.zero_grad(set_to_none=True)
            gc.collect()
            begun = time.process_time()
            tokens[name] = learn(adapter, stored, plan, rows)
            seconds[name].append(time.process_time() - begun)
    ratios = {
        name: statistics.median(one / other for one, other in zip(seconds[name], seconds["padded"], strict=True))
        for name in ways
    }
    wanted = gradient(adapter, *ways["padded"])
    distances = {
        name: float((gradient(adapter, *ways[name]) - wanted).norm() / wanted.norm()) for name in ("shared", "walked")
    }
    alone = peak_bytes(adapter, trajectory, path, [longest])
    return {
        "turns": turns,
        "rewrites": rewrites,
        "tokens": {"all": sum(work.row_tokens), "unique": work.packed_tokens, "longest": work.row_tokens[longest]},
        "run": tokens,
        "needed": needed_share(adapter, work),
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "of_padded": ratios,
        "gradients": distances,
        "longest_bytes": alone,
        "walked_bytes": peak_bytes(adapter, trajectory, path, rows),
        "shared_bytes": peak_bytes(adapter, *ways["shared"], rows),
        "padded_bytes": peak_bytes(adapter, *ways["padded"], rows),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all shapes.

    Args:
        arguments: command line, None for the process's own.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="times that each way is measured")
    parser.add_argument("--turns", type=int, nargs="*", default=[2, 4, 8, 16], help="turns of an episode")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the figures go")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    shapes = [(turns, rewrites) for rewrites in (False, True) for turns in chosen.turns]
    found = [
        compare(turns, rewrites=rewrites, repeats=chosen.repeats)
        for turns, rewrites in track(shapes, "Measuring", transient=True)
    ]
    table = Table(
        "template",
        "turns",
        "tokens",
        "unique",
        "needed",
        "time of padded",
        "packed",
        "walked",
        "bytes / longest",
        "gradient",
    )
    for one in found:
        counts = one["tokens"]
        table.add_row(
            "rewrites" if one["rewrites"] else "extends",
            str(one["turns"]),
            f"{counts['all']:,}",
            f"{counts['unique'] / counts['all']:.2f}",
            f"{one['needed']:.2f}",
            f"{one['of_padded']['shared']:.2f}",
            f"{one['of_padded']['prompts']:.2f}",
            f"{one['of_padded']['walked']:.2f}",
            f"{one['walked_bytes'] / one['longest_bytes']:.2f}",
            f"{max(one['gradients'].values()):.1e}",
        )
    Console().print(table)
    chosen.out.write_text(json.dumps({"machine": describe_machine(), "shapes": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
