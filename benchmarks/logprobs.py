"""What do log-probs cost at a large vocabulary: peak bytes over the weights and seconds, here, in TRL and naively?

    python -m benchmarks.logprobs [--repeats 5] [--tiles 64 256]

Writes ``benchmarks/results/logprobs.json``. A random Qwen3 (tied head, fp32) scores and learns from two rows; a repeat
is one forward and one backward of the whole network, so peaks hold its activations and gradients too. "Frozen" leaves
the tied embedding without gradient, as LoRA does. Our form and TRL's give entropies as well, as their trainers ask;
the naive form does not, which favours it. Methods take turns in every repeat, so that a busy machine slows all alike;
compare their ratios. Bytes are counted by an allocator of our own that sees temporaries inside kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from benchmarks.machine import describe_machine
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.ops.logprobs import token_logprobs
from memsafe_rl.types import LinearHead, TokenDistribution

RESULTS = Path(__file__).parent / "results" / "logprobs.json"
MEGABYTE = 1_000_000

Method = Callable[[Any, Tensor], Tensor]


def build_model(vocab: int, width: int, trained_head: bool) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=2,
        num_attention_heads=max(1, width // 64),
        num_key_value_heads=max(1, width // 128),
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.lm_head.weight.requires_grad_(trained_head)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def naive(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).flatten()


def trl(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.flatten()


def ours(tile: int) -> Method:
    def score(model: Any, ids: Tensor) -> Tensor:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        lengths = (ids.shape[1] - 1,) * len(ids)
        distribution = TokenDistribution(hidden, ids[:, 1:].flatten(), lengths, LinearHead(model.lm_head.weight))
        return token_logprobs(distribution, temperature=1.0, tile=tile, with_entropy=True)[0]

    return score


def run_once(method: Method, model: Any, ids: Tensor) -> tuple[float, Tensor]:
    """Returns seconds of a forward and a backward, and the log-probs."""
    started = time.perf_counter()
    logprobs = method(model, ids)
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return time.perf_counter() - started, logprobs.detach()


def take_gradient(model: Any) -> Tensor:
    """Moves the gradients of a model into one vector."""
    found = torch.cat([value.grad.flatten() for value in model.parameters() if value.grad is not None])
    model.zero_grad(set_to_none=True)
    return found


def measure(methods: dict[str, Method], model: Any, ids: Tensor, repeats: int) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    reference: tuple[Tensor, Tensor] | None = None
    for name, method in methods.items():
        model.zero_grad(set_to_none=True)
        with SimulatedMemory() as memory:
            _, logprobs = run_once(method, model, ids)
            peak = memory.peak_bytes
        gradient = take_gradient(model)
        reference = reference or (logprobs, gradient)
        results[name] = {
            "peak_bytes": peak,
            "logprob_difference": float((logprobs - reference[0]).abs().max()),
            "gradient_difference": float((gradient - reference[1]).norm() / reference[1].norm()),
        }
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, method in methods.items():
            seconds[name].append(run_once(method, model, ids)[0])
            model.zero_grad(set_to_none=True)
    for name, values in seconds.items():
        results[name] |= {"seconds_median": statistics.median(values), "seconds_least": min(values)}
    return results


def print_table(heads: dict[str, dict[str, dict[str, float]]]) -> None:
    table = Table(title="Forward and backward, peak over weights")
    for column in ("head", "method", "peak MB", "median s", "of TRL's", "least s", "Δ log-prob", "Δ gradient"):
        table.add_column(column, justify="left" if column in ("head", "method") else "right")
    for head, rows in heads.items():
        for name, row in rows.items():
            table.add_row(
                head,
                name,
                f"{row['peak_bytes'] / MEGABYTE:.0f}",
                f"{row['seconds_median']:.2f}",
                f"{row['seconds_median'] / rows['TRL']['seconds_median']:.2f}",
                f"{row['seconds_least']:.2f}",
                f"{row['logprob_difference']:.0e}",
                f"{row['gradient_difference']:.0e}",
            )
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936, help="rows of the head")
    parser.add_argument("--width", type=int, default=256, help="hidden width")
    parser.add_argument("--tokens", type=int, default=510, help="tokens scored, in two rows")
    parser.add_argument(
        "--tiles", type=int, nargs="+", default=[64, 256], help="tokens whose logits coexist, each tried"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats of every method")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the figures go")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ids = torch.randint(options.vocab, (2, options.tokens // 2 + 1), generator=torch.Generator().manual_seed(0))
    methods = {"naive": naive, "TRL": trl} | {f"memsafe_rl, tile {tile}": ours(tile) for tile in options.tiles}
    heads = {}
    for head, trained in (("frozen", False), ("trained, tied", True)):
        heads[head] = measure(methods, build_model(options.vocab, options.width, trained), ids, options.repeats)
    print_table(heads)
    shown = {key: value for key, value in vars(options).items() if key != "output"}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({"machine": describe_machine(), **shown, "heads": heads}, indent=2) + "\n")


if __name__ == "__main__":
    main()
