"""Which share of the machine's own speed do a rollout and an update reach: needed FLOPs over seconds and GEMMs?

    python -m benchmarks.roofline [--repeats 3]

Writes ``benchmarks/results/roofline.json``. The random Qwen3 of 17 M parameters of `benchmarks.step` (V = 32,000)
draws 32 completions of 160 tokens for 4 prompts and learns from them, all weights or LoRA of rank 16, under the plans
that the default policy makes on one thread. Needed FLOPs follow from the shapes: products of weights with each token
that differs from all others (a prompt counts once, the head for completions alone), twice more for the backward (once
for frozen weights, which have no gradient of their own), and attention over the keys that a token sees; what is made
anew for a backward is left out. The machine's speed is that of products of two matrices of 1,024 x 1,024 in turn with
each measurement; seconds are the processor's, and shares medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.draws import keys_of
from benchmarks.machine import describe_machine
from benchmarks.step import Setting, random_qwen3
from memsafe_rl.memory.planning.policies import AdaptivePolicy
from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.models.language.causal_lm import CausalLMAdapter, check_head
from memsafe_rl.rollout.native.running_batch import generate
from memsafe_rl.training.gradient import StepTerms, accumulate_gradient
from memsafe_rl.types import (
    Denominators,
    LossSettings,
    MemoryState,
    Ragged,
    RolloutWork,
    SamplingSettings,
    Trajectory,
)

RESULTS = Path(__file__).parent / "results" / "roofline.json"
RANK, SIDE = 16, 1024
STATE = MemoryState(device="cpu", budget_bytes=16 * 2**30, live_bytes=0, peak_bytes=0)


def build_adapter(setting: Setting) -> CausalLMAdapter:
    """Makes the network that learns."""
    model: Any = random_qwen3(setting)
    if setting.lora:
        model = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapter = CausalLMAdapter(model.eval(), pad_token_id=0)
    check_head(adapter)
    return adapter


def needed_flops(config: Any, prompts: Sequence[int], setting: Setting, *, learns: bool) -> float:
    """Counts the operations that a rollout, or a step over it, needs.

    Args:
        config: of the network.
        prompts: tokens of each prompt.
        setting: the work.
        learns: whether a backward follows the forward.

    Returns:
        Multiplications and additions.
    """
    width, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    pairs: list[tuple[int, int]] = [
        (width, heads),
        (width, kv),
        (width, kv),
        (heads, width),
        *[(width, config.intermediate_size)] * 3,
    ]
    own, group = setting.new_tokens, setting.group_size
    tokens = sum(prompt + group * own for prompt in prompts)
    seen = sum(prompt * (prompt + 1) / 2 + group * own * (prompt + (own + 1) / 2) for prompt in prompts)
    weights = 2 * tokens * config.num_hidden_layers * sum(one * other for one, other in pairs)
    adapters = 2 * tokens * config.num_hidden_layers * RANK * sum(map(sum, pairs)) if setting.lora else 0
    head = 2 * group * own * len(prompts) * width * config.vocab_size
    attention = 4 * seen * config.num_hidden_layers * heads
    if not learns:
        return float(weights + adapters + head + attention)
    return float((2 if setting.lora else 3) * (weights + head) + 3 * (adapters + attention))


def gemm_speed() -> float:
    """Measures operations a second of a product of two matrices."""
    one = torch.randn(SIDE, SIDE)
    one @ one
    begun = time.process_time()
    for _ in range(5):
        one @ one
    return 5 * 2 * SIDE**3 / (time.process_time() - begun)


def share_of(run: Callable[[], object], flops: float, repeats: int) -> dict[str, float]:
    """Measures seconds, and the share of the machine's speed, of some work that needs so many operations."""
    run()
    seconds, shares = [], []
    for _ in range(repeats):
        speed = gemm_speed()
        begun = time.process_time()
        run()
        seconds.append(time.process_time() - begun)
        shares.append(flops / seconds[-1] / statistics.mean((speed, gemm_speed())))
    return {"gflop": flops / 1e9, "seconds": statistics.median(seconds), "share": statistics.median(shares)}


def where_time_goes(run: Callable[[], object], most: int = 8) -> dict[str, float]:
    """Returns the shares of processor time of the operators that take most of it."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run()
    events = sorted(found.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    return {event.key: round(event.self_cpu_time_total / total, 3) for event in events[:most]}


def stored(prompts: Sequence[Tensor], setting: Setting) -> Trajectory:
    """Lays out random completions."""
    dice, rows = torch.Generator().manual_seed(2), setting.rows
    actions = Ragged(
        torch.randint(2, setting.vocab_size, (rows * setting.new_tokens,), generator=dice), (setting.new_tokens,) * rows
    )
    owners = tuple(row // setting.group_size for row in range(rows))
    return Trajectory(
        conditions=Ragged.from_rows(prompts),
        condition_of_row=owners,
        actions=actions,
        loss_mask=Ragged(torch.ones(len(actions.flat)), actions.lengths),
        sampling_logprobs=None,
        advantages=torch.linspace(-1, 1, rows),
        group_of_row=owners,
        finished=(True,) * rows,
        has_old=(False,) * rows,
    )


def measure(setting: Setting, repeats: int) -> dict[str, Any]:
    """Measures a rollout and the gradient of a step."""
    adapter, policy = build_adapter(setting), AdaptivePolicy()
    dice = torch.Generator().manual_seed(1)
    shortest, longest = setting.prompt_tokens
    lengths = torch.randint(shortest, longest + 1, (setting.prompts,), generator=dice).tolist()
    prompts = [torch.randint(2, setting.vocab_size, (length,), generator=dice) for length in lengths]
    trajectory, rows = stored(prompts, setting), range(setting.rows)
    work = RolloutWork(tuple(lengths), setting.group_size, setting.new_tokens, adapter.geometry)
    rollout_plan = policy.before_rollout(work, STATE)
    update_plan = policy.before_update(adapter.work(trajectory, rows), STATE)
    tokens = len(trajectory.actions.flat)
    terms = StepTerms(LossSettings(), Denominators(len(rows), tokens, tokens), 1.0, True)
    keys, config = keys_of(setting.prompts, setting.group_size), adapter.lm.config
    sampling = SamplingSettings(setting.new_tokens, (1,))

    def roll_out() -> None:
        drawn = generate(adapter, prompts, keys, sampling, attempt=under(rollout_plan))
        assert all(len(one.ids) == setting.new_tokens for one in drawn), "no completion may end by itself"

    def learn() -> None:
        adapter.model.zero_grad()
        accumulate_gradient(
            adapter, trajectory, rows, update_plan, terms, autocast=nullcontext, scale=lambda loss: loss
        )

    found: dict[str, Any] = {}
    for name, run in (("rollout", roll_out), ("update", learn)):
        flops = needed_flops(config, lengths, setting, learns=run is learn)
        found[name] = {**share_of(run, flops, repeats), "operators": where_time_goes(run)}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures full training and LoRA.

    Args:
        arguments: command line, None for the process's own.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="times that each is measured")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the figures go")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    settings = {"all weights": Setting(lora=False), "LoRA": Setting()}
    found = {name: measure(setting, chosen.repeats) for name, setting in track(settings.items(), "Measuring")}
    table = Table("training", "phase", "GFLOP", "s", "of GEMM", "where the time goes")
    for name, phases in found.items():
        for phase, one in phases.items():
            largest = list(one["operators"].items())[:4]
            most = ", ".join(f"{key.removeprefix('aten::')} {share:.2f}" for key, share in largest)
            table.add_row(name, phase, f"{one['gflop']:.0f}", f"{one['seconds']:.2f}", f"{one['share']:.2f}", most)
    Console().print(table)
    chosen.out.write_text(json.dumps({"machine": describe_machine(), "training": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
