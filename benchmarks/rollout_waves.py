"""Does the wave a sequence rides in change its tokens, and what does a wave cost beside `generate`?

    python -m benchmarks.rollout_waves [--rows 64] [--new-tokens 280]

Writes ``benchmarks/results/rollout_waves.json``. Part one samples the same sequences in waves of several sizes, for
three vocabularies and once with top-k and top-p, and compares each with the largest wave, token by token up to the
first difference. Part two samples completions of ragged length once here and once with transformers' `generate`:
seconds, and peak bytes above the weights.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.draws import keys_of, lengths_by_generate
from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.memory.simulated.counting import CountingAllocator
from memsafe_rl.models.language.causal_lm import CausalLMAdapter
from memsafe_rl.rollout.native.running_batch import generate
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings

RESULTS = Path(__file__).parent / "results" / "rollout_waves.json"
VOCABULARIES = (4096, 32_000, 151_936)
WAVES = (1, 7, 32, 64)
LOGPROB_TOLERANCE = 5e-5


def build_model(vocab: int, hidden: int, layers: int, scale: float = 1.0) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    return model


def build_prompts(count: int, vocab: int, longest: int) -> list[Tensor]:
    lengths = torch.randint(longest // 4, longest + 1, (count,)).tolist()
    return [torch.randint(2, vocab, (length,)) for length in lengths]


def compare(ours: list[Completion], theirs: list[Completion]) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """Compares up to the first difference of each sequence: after it they are different texts.

    Returns:
        Counts, and (row, position) of each difference.
    """
    agreed, gap, flips = 0, 0.0, []
    for row, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        length = min(len(one.ids), len(other.ids))
        different = (one.ids[:length] != other.ids[:length]).nonzero()
        end = int(different[0]) if len(different) else length
        agreed += end
        if len(different):
            flips.append((row, end))
        if end:
            gap = max(gap, float((one.logprobs[:end] - other.logprobs[:end]).abs().max()))
    return {"tokens": agreed, "flips": len(flips), "max_logprob_difference": gap}, flips


def tied_at(draw: Callable[[int, int], Completion], row: int, position: int) -> bool:
    """Samples one sequence again, alone, to and past a position: did the draw there count as a tie?"""
    before = draw(row, position).ties if position else 0
    return draw(row, position + 1).ties > before


def waves_part(vocab: int, rows: int, new_tokens: int, **filters: Any) -> dict[str, Any]:
    # A random head this much larger gives entropies of a few nats, like a language model's, and logits up to about 20.
    model = build_model(vocab, hidden=64, layers=2, scale=25.0)
    adapter = CausalLMAdapter(model, pad_token_id=0)
    prompts, keys = build_prompts(rows // 8, vocab, 24), keys_of(rows // 8, 8, seed=11)
    settings = SamplingSettings(max_new_tokens=new_tokens, eos_token_ids=(1,), **filters)

    def draw_alone(row: int, new_tokens: int) -> Completion:
        prompt, sample = divmod(row, 8)
        short = replace(settings, max_new_tokens=new_tokens)
        return generate(adapter, [prompts[prompt]], [[keys[prompt][sample]]], short, under(RolloutPlan()))[0]

    runs: dict[int, list[Completion]] = {}
    result: dict[str, Any] = {"vocabulary": vocab, **filters, "waves": {}}
    for wave in sorted(WAVES, reverse=True):
        start = time.process_time()
        runs[wave] = generate(adapter, prompts, keys, settings, under(RolloutPlan(rows_in_flight=wave)))
        seconds = time.process_time() - start
        reference = runs[max(WAVES)]
        counts, flips = compare(runs[wave], reference)
        certified = sum(tied_at(draw_alone, *flip) for flip in flips)
        result["waves"][wave] = {"cpu_seconds": round(seconds, 1), **counts, "certified_ties": certified}
        print(vocab, wave, result["waves"][wave], flush=True)
    result["sampled_tokens"] = sum(len(row.ids) for row in reference)
    result["ties"] = sum(row.ties for row in reference)
    result["mean_nats"] = -float(torch.cat([row.logprobs for row in reference]).mean())
    return result


def measured(run: Callable[[], Any]) -> tuple[Any, float, int]:
    """Runs once for the clock (of one thread's work, whatever else the machine does) and once for the bytes."""
    start = time.process_time()
    output = run()
    seconds = time.process_time() - start
    with CountingAllocator() as counter:
        run()
    return output, seconds, counter.peak_bytes


def generate_part(prompt_count: int = 4, group: int = 16, new_tokens: int = 160) -> dict[str, Any]:
    model = build_model(4096, hidden=512, layers=8)
    weight_VD, bias_V = model.lm_head.weight.detach(), torch.zeros(4096)
    # Rows of unit length over normalised hidden states give logits of unit deviation; the eos has a constant one:
    # exp(4.9) / (4096 exp(0.5)), one token in about fifty, ends a completion.
    weight_VD.div_(weight_VD.norm(dim=1, keepdim=True))
    weight_VD[1], bias_V[1] = 0, 4.9
    model.lm_head.bias = torch.nn.Parameter(bias_V)
    prompts = build_prompts(prompt_count, 4096, 128)
    adapter = CausalLMAdapter(model, pad_token_id=0)
    settings = SamplingSettings(max_new_tokens=new_tokens, eos_token_ids=(1,))
    plan = RolloutPlan(rows_in_flight=prompt_count * group)
    ours, seconds, peak = measured(
        lambda: generate(adapter, prompts, keys_of(prompt_count, group, seed=11), settings, under(plan))
    )

    theirs, their_seconds, their_peak = measured(
        lambda: lengths_by_generate(model, prompts, group, new_tokens, (1,), 0, seed=1)
    )
    return {
        "sequences": prompt_count * group,
        "here": {"cpu_seconds": round(seconds, 2), "peak_bytes": peak, "tokens": sum(len(row.ids) for row in ours)},
        "generate": {
            "cpu_seconds": round(their_seconds, 2),
            "peak_bytes": their_peak,
            "tokens": sum(theirs),
        },
        "longest": [max(len(row.ids) for row in ours), max(theirs)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=280)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    beside = generate_part()
    print(beside, flush=True)
    parts = [waves_part(vocab, arguments.rows, arguments.new_tokens) for vocab in VOCABULARIES]
    filtered = waves_part(32_000, arguments.rows, arguments.new_tokens, top_k=50, top_p=0.9, temperature=0.8)
    compared = [wave for part in parts for wave in part["waves"].values()]
    summary = {
        "sampled_tokens": sum(part["sampled_tokens"] for part in parts),
        "compared_tokens": sum(
            wave["tokens"] for part in parts for size, wave in part["waves"].items() if size != max(WAVES)
        ),
        "flips": sum(wave["flips"] for wave in compared),
        "flips_without_a_tie": sum(wave["flips"] - wave["certified_ties"] for wave in compared),
        "ties": sum(part["ties"] for part in parts),
        "max_logprob_difference": max(wave["max_logprob_difference"] for wave in compared),
        "logprob_tolerance": LOGPROB_TOLERANCE,
    }
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    report = {
        "summary": summary,
        "vocabularies": parts,
        "filtered": filtered,
        "beside_generate": beside,
        "versions": versions,
    }
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
