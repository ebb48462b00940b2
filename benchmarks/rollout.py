"""What does a rollout cost, here, with transformers' `generate`, and with its continuous batching?

    python -m benchmarks.rollout [--families qwen3 gpt2] [--rows 4x16-short-ragged] [--repeats 3] [--quick]

Writes ``benchmarks/results/rollout.json`` and ``docs/figures/kv_bound.png``. Small random networks of five families
sample for prompts x completions, short and long prompts, ragged and even lengths: a bias on the eos ends one token in
48, or none; so all engines draw from one distribution of lengths, and what is compared is time per token. Every engine
has a process of its own for each family; they take turns row by row, so that a busy machine slows all alike. Peaks are
bytes above the weights, by an allocator that sees every thread, continuous batching's too.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers.generation import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.draws import keys_of, lengths_by_generate
from benchmarks.machine import describe_machine
from benchmarks.turns import Record, Referee, Side, counted, median_of
from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.models.language.factory import adapter_for
from memsafe_rl.rollout.native.running_batch import generate
from memsafe_rl.types import Component, RolloutPlan, SamplingSettings

RESULTS = Path(__file__).parent / "results" / "rollout.json"
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "kv_bound.png"
MEGABYTE = 1_000_000
PAD_ID, EOS_ID = 0, 1
VOCAB_SIZE = 4096
MEAN_TOKENS = 48
"""One token in so many ends a ragged completion; cut at 160 tokens that makes 46 on average."""


@dataclass(frozen=True)
class Row:
    """One rollout, the same for every engine.

    Args:
        prompts: unique prompts.
        group_size: completions of each.
        prompt_tokens: shortest and longest prompt, in tokens.
        new_tokens: longest completion, in tokens.
        ragged: whether an eos may end a completion.
    """

    prompts: int
    group_size: int
    prompt_tokens: tuple[int, int]
    new_tokens: int
    ragged: bool

    @property
    def rows(self) -> int:
        """Completions."""
        return self.prompts * self.group_size


SIZES = {"4x16": (4, 16), "16x8": (16, 8), "1x64": (1, 64)}
PROMPTS = {"short": (16, 48), "long": (192, 320)}
LENGTHS = {"ragged": (160, True), "even": (64, False)}
ROWS = {
    f"{size}-{prompt}-{length}": Row(*SIZES[size], PROMPTS[prompt], *LENGTHS[length])
    for size in SIZES
    for prompt in PROMPTS
    for length in LENGTHS
}
FEW_ROWS = ("4x16-short-ragged", "4x16-short-even", "4x16-long-ragged")
"""Rows of the families beside Qwen3."""


# ------------------------------------------------------------------ networks


def build_model(family: str, ragged: bool) -> Any:
    """Makes a random network whose eos ends one token in `MEAN_TOKENS`, or none.

    Args:
        family: a name of `FAMILIES`.
        ragged: whether an eos may be drawn.

    Returns:
        The network, fp32, in eval mode.
    """
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    head = model.get_output_embeddings()
    bias_V = torch.zeros(VOCAB_SIZE)
    with torch.no_grad():
        # Rows of unit length over normalised states give logits of unit deviation, and exp(1 / 2) is their mean weight.
        weight_VD = head.weight / head.weight.norm(dim=1, keepdim=True)
        weight_VD[[PAD_ID, EOS_ID]] = 0
        bias_V[PAD_ID] = -30.0
        bias_V[EOS_ID] = math.log(VOCAB_SIZE / MEAN_TOKENS) + 0.5 if ragged else -30.0
    head.weight, head.bias = torch.nn.Parameter(weight_VD), torch.nn.Parameter(bias_V)
    return model.requires_grad_(False)


def _common(width: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "bos_token_id": None,
    }


def _qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_common(512, 8, 8, 4)))


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=256,
        n_layer=4,
        n_head=4,
        n_positions=2048,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
    )
    return transformers.GPT2LMHeadModel(config)


def _t5() -> Any:
    config = transformers.T5Config(
        vocab_size=VOCAB_SIZE,
        d_model=256,
        d_kv=64,
        d_ff=768,
        num_layers=4,
        num_decoder_layers=4,
        num_heads=4,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        decoder_start_token_id=PAD_ID,
    )
    return transformers.T5ForConditionalGeneration(config)


def _gemma3() -> Any:
    kinds = ["full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(4)]
    config = transformers.Gemma3TextConfig(
        **_common(256, 4, 4, 2), sliding_window=64, layer_types=kinds, query_pre_attn_scalar=64
    )
    return transformers.Gemma3ForCausalLM(config)


def _qwen3_moe() -> Any:
    config = transformers.Qwen3MoeConfig(
        **_common(256, 4, 4, 2), num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256
    )
    return transformers.Qwen3MoeForCausalLM(config)


FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "t5": _t5,
    "gemma3": _gemma3,
    "qwen3-moe": _qwen3_moe,
}


def build_prompts(row: Row) -> list[Tensor]:
    """Draws the prompts of a row, the same for every engine.

    Args:
        row: the rollout.

    Returns:
        Token ids, (length,) int64 each.
    """
    dice = torch.Generator().manual_seed(1)
    shortest, longest = row.prompt_tokens
    lengths = torch.randint(shortest, longest + 1, (row.prompts,), generator=dice).tolist()
    return [torch.randint(2, VOCAB_SIZE, (length,), generator=dice) for length in lengths]


# ------------------------------------------------------------------ engines


def sample_here(model: Any, prompts: Sequence[Tensor], row: Row, seed: int) -> int:
    """Samples with the library.

    Args:
        model: the network.
        prompts: token ids.
        row: the rollout.
        seed: of the draws.

    Returns:
        Tokens drawn.
    """
    keys = keys_of(row.prompts, row.group_size, seed=seed)
    settings = SamplingSettings(max_new_tokens=row.new_tokens, eos_token_ids=(EOS_ID,))
    plan = RolloutPlan(rows_in_flight=row.rows)
    drawn = generate(adapter_for(model, pad_token_id=PAD_ID), prompts, keys, settings, attempt=under(plan))
    return sum(len(completion.ids) for completion in drawn)


def sample_with_generate(model: Any, prompts: Sequence[Tensor], row: Row, seed: int) -> int:
    """Samples with transformers' `generate`."""
    return sum(lengths_by_generate(model, prompts, row.group_size, row.new_tokens, (EOS_ID,), PAD_ID, seed))


_PAGE = 32


def sample_continuously(model: Any, prompts: Sequence[Tensor], row: Row, seed: int) -> int:
    """Samples with transformers' continuous batching, its cache as large as the rollout can need."""
    torch.manual_seed(seed)
    kept = 2 * MEAN_TOKENS if row.ragged else row.new_tokens
    pages = sum(math.ceil((len(prompt) + min(kept, row.new_tokens)) / _PAGE) + 1 for prompt in prompts)
    results = model.generate_batch(
        [prompt.tolist() for prompt in prompts],
        generation_config=GenerationConfig(
            do_sample=True,
            top_k=0,
            max_new_tokens=row.new_tokens,
            num_return_sequences=row.group_size,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=pages * row.group_size,
            max_batch_tokens=max(row.rows, 512),
            max_requests_per_batch=row.rows,
            use_async_batching=False,
        ),
        progress_bar=False,
    )
    failed = [result.error for result in results.values() if result.error]
    if failed or len(results) != row.rows:
        raise RuntimeError(f"{len(results)} of {row.rows} sequences came back; {failed[:1]}")
    return sum(len(result.generated_tokens) for result in results.values())


ENGINES: dict[str, Callable[[Any, Sequence[Tensor], Row, int], int]] = {
    "memsafe_rl": sample_here,
    "generate": sample_with_generate,
    "continuous batching": sample_continuously,
}


def play(referee: Referee, family: str, engine: str) -> None:
    """Samples one row a turn; the order of a turn is the row and a seed.

    Args:
        referee: calls the turns.
        family: the network.
        engine: a name of `ENGINES`.
    """
    models = {ragged: build_model(family, ragged) for ragged in (True, False)}
    warm = Row(2, 2, (4, 8), 4, ragged=False)
    ENGINES[engine](models[False], build_prompts(warm), warm, 0)
    while referee.wait():
        row, seed = referee.order
        with counted() as count:
            tokens = ENGINES[engine](models[row.ragged], build_prompts(row), row, seed)
            peak = count.peak_bytes if count else 0
        referee.report(tokens=tokens, peak_bytes=peak)


# ------------------------------------------------------------------ measuring


def measure(
    family: str, names: Sequence[str], rows: dict[str, Row], repeats: int, threads: int, tick: Callable[[], None]
) -> Record:
    """Lets all engines take turns, row by row.

    Args:
        family: the network.
        names: engines.
        rows: rollouts by name.
        repeats: turns of every engine at every row.
        threads: of PyTorch.
        tick: called after every turn.

    Returns:
        Figures by row and engine.
    """
    sides = {name: Side(play, threads, family=family, engine=name) for name in names}
    records: dict[str, dict[str, list[Record]]] = {row: {name: [] for name in names} for row in rows}
    try:
        for repeat in range(repeats):
            for row, order in rows.items():
                for name in list(sides)[:: 1 if repeat % 2 == 0 else -1]:
                    records[row][name].append(sides[name].turn((order, repeat)))
                    tick()
    finally:
        for side in sides.values():
            side.close()
    return {row: beside({name: summary(turns) for name, turns in found.items()}) for row, found in records.items()}


def summary(turns: Sequence[Record]) -> Record:
    """Reduces an engine's turns at a row to medians."""
    failed = [turn for turn in turns if "error" in turn]
    if failed:
        return failed[0]
    speeds = [
        {"tokens_per_second": t["tokens"] / t["seconds"], "cpu_ms_per_token": 1000 * t["cpu_seconds"] / t["tokens"]}
        for t in turns
    ]
    return {
        "tokens_per_second": median_of(speeds, "tokens_per_second"),
        "cpu_ms_per_token": median_of(speeds, "cpu_ms_per_token"),
        "seconds": [round(turn["seconds"], 3) for turn in turns],
        "tokens": [turn["tokens"] for turn in turns],
        "peak_bytes": max(turn["peak_bytes"] for turn in turns),
    }


def beside(engines: Record) -> Record:
    """Adds how many times faster we are than each engine, and our share of its peak."""
    ours = engines.get("memsafe_rl", {"error": ""})
    for name, entry in engines.items():
        if name != "memsafe_rl" and "error" not in entry and "error" not in ours:
            entry["our_speed"] = ours["tokens_per_second"] / entry["tokens_per_second"]
            entry["our_cpu_speed"] = entry["cpu_ms_per_token"] / ours["cpu_ms_per_token"]
            entry["our_peak"] = ours["peak_bytes"] / entry["peak_bytes"]
    return engines


def show(results: dict[str, Record]) -> None:
    """Prints a table."""
    table = Table(title="Rollouts")
    for column in ("family", "row", "engine", "tokens/s", "CPU ms a token", "peak MB", "our speed", "our peak"):
        table.add_column(column, justify="left" if column in ("family", "row", "engine") else "right")
    for family, rows in results.items():
        for row, engines in rows.items():
            for name, entry in engines.items():
                if "error" in entry:
                    table.add_row(family, row, name, entry["error"][:40])
                    continue
                table.add_row(
                    family,
                    row,
                    name,
                    f"{entry['tokens_per_second']:.0f}",
                    f"{entry['cpu_ms_per_token']:.2f}",
                    f"{entry['peak_bytes'] / MEGABYTE:.1f}",
                    f"{entry['our_speed']:.2f} ({entry['our_cpu_speed']:.2f})" if "our_speed" in entry else "",
                    f"{entry['our_peak']:.2f}" if "our_peak" in entry else "",
                )
    Console(width=130).print(table)


# ------------------------------------------------------------------ cache bytes against the bound


def kv_peak(model: Any, row: Row) -> int:
    """Counts the most bytes that keys and values hold in a rollout, at the end of any step.

    Args:
        model: the network.
        row: the rollout.

    Returns:
        int, bytes.
    """
    adapter, most = adapter_for(model, pad_token_id=PAD_ID), 0
    step = adapter.decode_step
    with SimulatedMemory() as memory:

        def watched(*args: Any, **kwargs: Any) -> Any:
            nonlocal most
            logits = step(*args, **kwargs)
            most = max(most, memory.live_by_component().get(Component.KV_CACHE, 0))
            return logits

        adapter.decode_step = watched
        keys = keys_of(row.prompts, row.group_size)
        settings = SamplingSettings(max_new_tokens=row.new_tokens, eos_token_ids=(EOS_ID,))
        generate(adapter, build_prompts(row), keys, settings, attempt=under(RolloutPlan(rows_in_flight=row.rows)))
    return most


def kv_bounds(model: Any, row: Row) -> dict[str, int]:
    """Counts what keys and values can take at most: with one copy of each prompt, and with one a completion.

    Args:
        model: the network.
        row: the rollout.

    Returns:
        int, bytes: "shared" is ``sum over prompts of kv(P) + B kv(T)``, T in whole blocks and one tensor twice, because
        it grows by copying; "copied" is ``sum over rows of kv(P + T)``.
    """
    geometry = adapter_for(model, pad_token_id=PAD_ID).geometry
    lengths = [len(prompt) for prompt in build_prompts(row)]
    prompt_bytes = sum(map(geometry.kv_bytes, lengths))
    return {
        "shared": geometry.batch_kv_bytes(prompt_bytes, row.rows, row.new_tokens),
        "copied": row.group_size * sum(geometry.kv_bytes(length + row.new_tokens) for length in lengths),
    }


def growth(start: Row, axes: dict[str, Sequence[Any]], tick: Callable[[], None]) -> dict[str, list[Record]]:
    """Counts cache bytes while one size of a rollout grows.

    Args:
        start: the rollout that grows.
        axes: per field of `Row`, its values.
        tick: called after every rollout.

    Returns:
        Per field, its values with peak and bounds.
    """
    model = build_model("gemma3", ragged=False)
    plain = build_model("qwen3", ragged=False)
    found: dict[str, list[Record]] = {}
    for field, values in axes.items():
        for name, network in (("Qwen3", plain), ("Gemma-3", model)):
            for value in values:
                row = replace(start, **{field: value})
                shown = value[1] if isinstance(value, tuple) else value
                record = {"network": name, "value": shown, "peak": kv_peak(network, row), **kv_bounds(network, row)}
                found.setdefault(field, []).append(record)
                tick()
    return found


AXES: dict[str, Sequence[Any]] = {
    "group_size": (1, 2, 4, 8, 16),
    "prompts": (1, 2, 4, 8),
    "prompt_tokens": ((16, 16), (64, 64), (128, 128), (256, 256)),
    "new_tokens": (16, 32, 64, 96),
}
LABELS = {"group_size": "samples a prompt", "prompts": "prompts", "prompt_tokens": "prompt tokens"}


def draw(found: dict[str, list[Record]], path: Path) -> None:
    """Draws cache bytes against the bounds.

    Args:
        found: of `growth`.
        path: picture to write.
    """
    mpl.use("Agg")
    figure, axes = plt.subplots(1, len(found), figsize=(4 * len(found), 3.6), layout="constrained", squeeze=False)
    for (field, records), axis in zip(found.items(), axes[0], strict=True):
        for color, network in enumerate(dict.fromkeys(record["network"] for record in records)):
            mine = [record for record in records if record["network"] == network]
            values = [record["value"] for record in mine]
            for kind, style, label in (("peak", "o", "held"), ("shared", "-", "bound"), ("copied", ":", "copies")):
                sizes = [record[kind] / MEGABYTE for record in mine]
                axis.plot(values, sizes, style, color=f"C{color}", label=f"{network}, {label}")
        axis.set(xlabel=LABELS.get(field, "new tokens"), ylabel="keys and values, MB", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


# ------------------------------------------------------------------ the command


def main(arguments: Sequence[str] | None = None) -> dict[str, Record]:
    """Runs the benchmark from a command line.

    Args:
        arguments: command line, None for the process's own.

    Returns:
        Figures by family, row and engine.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--rows", nargs="+", choices=ROWS, help="rollouts (default: all for Qwen3, three for others)")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--repeats", type=int, default=3, help="turns of every engine at every row")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each engine")
    parser.add_argument("--no-figure", action="store_true", help="leave the figure of the cache as it is")
    parser.add_argument("--quick", action="store_true", help="under a minute: one small row, nothing written")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the figures go; rows left out stay")
    options = parser.parse_args(arguments)
    if options.quick:
        return quick(options.threads)
    results: dict[str, Record] = {}
    with Progress(console=Console(stderr=True)) as progress:
        for family in options.families:
            names = options.rows or (ROWS if family == "qwen3" else FEW_ROWS)
            rows = {name: ROWS[name] for name in names}
            task = progress.add_task(family, total=len(rows) * len(options.engines) * options.repeats)
            tick = partial(progress.advance, task)
            results[family] = measure(family, options.engines, rows, options.repeats, options.threads, tick)
            write(options.out, results={family: results[family]}, repeats=options.repeats, threads=options.threads)
        if not options.no_figure:
            task = progress.add_task("cache", total=2 * sum(map(len, AXES.values())))
            start = Row(2, 4, (32, 32), 32, ragged=False)
            found = growth(start, AXES, partial(progress.advance, task))
            draw(found, FIGURE)
            write(options.out, results={}, kv_growth=found)
    show(results)
    return results


def quick(threads: int) -> dict[str, Record]:
    """Runs every engine once on one small row of a small family."""
    row = Row(2, 4, (8, 16), 16, ragged=True)
    results = {"gpt2": measure("gpt2", list(ENGINES), {"quick": row}, 1, threads, lambda: None)}
    show(results)
    return results


def write(path: Path, results: dict[str, Record], **others: Any) -> None:
    """Puts rows that were measured into the results file, and leaves the others there."""
    known = json.loads(path.read_text()) if path.exists() else {}
    for family, rows in results.items():
        known.setdefault("results", {}).setdefault(family, {}).update(rows)
    report = {**known, "machine": describe_machine(), "rows": {n: asdict(r) for n, r in ROWS.items()}, **others}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
