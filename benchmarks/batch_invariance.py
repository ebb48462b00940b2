"""Do tokens, log-probs or gradients depend on how work is cut, in half precision, and what does it cost that not?

    python -m benchmarks.batch_invariance [--tokens 50000] [--models qwen3 gpt2] [--dtypes bfloat16 float16]

Writes ``benchmarks/results/batch_invariance.json``. For each tiny random model, each type, with `batch_invariant` and
without: the same sequences in waves of 1, 7, 32 and 64, in three turns with and without kept caches, scored as a whole,
row by row, in slices of a budget, and packed. Counts the tokens and log-probs that differ from those of the widest
wave, takes gradients of the cuts apart, and measures seconds of processor time and bytes of both.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.memory.simulated.counting import CountingAllocator
from memsafe_rl.models.language.factory import adapter_for, check_adapter
from memsafe_rl.rollout.native.kv_retention import KeptCaches
from memsafe_rl.rollout.native.running_batch import generate
from memsafe_rl.rollout.scoring import score_all, score_rows
from memsafe_rl.types import Completion, Ragged, RolloutPlan, SamplingSettings, SequenceKey, Trajectory

RESULTS = Path(__file__).parent / "results" / "batch_invariance.json"
WAVES = (64, 1, 7, 32)
GROUP = 4
IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}


def make(family: str, dtype: torch.dtype, hidden: int = 64, vocab: int = 512) -> Any:
    """Gives a tiny random network of two layers, whose tokens have entropies like a language model's."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden + 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        **IDS,
    }
    if family == "qwen3":
        model: Any = Qwen3ForCausalLM(Qwen3Config(**shape))
    elif family == "moe":
        experts = {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": hidden,
            "decoder_sparse_step": 1,
        }
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts))
    elif family == "gemma3":
        model = Gemma3ForCausalLM(Gemma3TextConfig(**shape, sliding_window=24, layer_types=KINDS))
    elif family == "gpt2":
        sizes = {"n_embd": hidden, "n_layer": 2, "n_head": 4, "n_positions": 512}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab, **sizes, **IDS))
    else:
        sizes = {"d_model": hidden, "d_kv": 16, "d_ff": 3 * hidden, "num_layers": 2, "num_heads": 4}
        known = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
        model = T5ForConditionalGeneration(
            T5Config(vocab_size=vocab, **sizes, feed_forward_proj="gated-gelu", dropout_rate=0.0, **known)
        )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.mul_(4 if "head" in name or "embed" in name or "wte" in name or "shared" in name else 2)
    return model.to(dtype).eval()


KINDS = ["sliding_attention", "full_attention"]


def adapter_of(model: Any, *, invariant: bool) -> Any:
    """Wraps a network, checked, with the mode on or off."""
    adapter = adapter_for(model, pad_token_id=0)
    check_adapter(adapter)
    adapter.batch_invariant = invariant
    return adapter


def prompts_of(count: int, vocab: int = 512) -> list[Tensor]:
    """Gives random prompts of unlike length."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, vocab, (5 + 7 * place % 37,), generator=generator) for place in range(count)]


def rows_of(prompts: Sequence[Tensor], rows: Sequence[Completion]) -> Trajectory:
    """Stores completions, ``GROUP`` for each prompt, as a trainer reads them."""
    count = len(rows)
    return Trajectory(
        conditions=Ragged.from_rows(list(prompts)),
        condition_of_row=tuple(place // GROUP for place in range(count)),
        actions=Ragged.from_rows([row.ids for row in rows]),
        loss_mask=Ragged.from_rows([torch.ones(len(row.ids)) for row in rows]),
        sampling_logprobs=Ragged.from_rows([row.logprobs for row in rows]),
        advantages=torch.linspace(-1, 1, count),
        group_of_row=tuple(place // GROUP for place in range(count)),
        finished=(True,) * count,
    )


def draw(adapter: Any, prompts: Sequence[Tensor], tokens: int, wave: int, prefill: int = 2**20) -> list[Completion]:
    """Draws every completion in waves of so many rows."""
    keys = [[SequenceKey(0, 0, prompt, sample) for sample in range(GROUP)] for prompt in range(len(prompts))]
    plan = RolloutPlan(rows_in_flight=wave, prefill_tokens=prefill)
    return generate(adapter, prompts, keys, SamplingSettings(tokens, (1,)), under(plan))


def converse(
    adapter: Any, prompts: Sequence[Tensor], tokens: int, wave: int, kept: KeptCaches | None
) -> list[Completion]:
    """Draws three turns; each goes on behind all that was said, and a few tokens that it is told."""
    contexts = [prompt for prompt in prompts for _ in range(GROUP)]
    plan = RolloutPlan(rows_in_flight=wave, kept_kv_bytes=0 if kept is None else 2**30)
    found: list[Completion] = []
    for turn in range(3):
        keys = [[SequenceKey(turn, 0, row, 0)] for row in range(len(contexts))]
        said = generate(adapter, contexts, keys, SamplingSettings(tokens, (1,)), under(plan), kept=kept)
        found += said
        contexts = [
            torch.cat([context, row.ids, 2 + torch.arange(place % 5 + 1)])
            for place, (context, row) in enumerate(zip(contexts, said, strict=True))
        ]
    return found


def compare(ours: Sequence[Completion], theirs: Sequence[Completion]) -> dict[str, int]:
    """Counts tokens, those from the first difference of a sequence on, and log-probs that differ before it."""
    tokens = differ = bits = 0
    for one, other in zip(ours, theirs, strict=True):
        length = min(len(one.ids), len(other.ids))
        places = (one.ids[:length] != other.ids[:length]).nonzero()
        end = int(places[0]) if len(places) else length
        tokens += max(len(one.ids), len(other.ids))
        differ += max(len(one.ids), len(other.ids)) - end
        bits += int((one.logprobs[:end] != other.logprobs[:end]).sum())
    return {"tokens": tokens, "tokens_after_a_difference": differ, "logprobs_that_differ": bits}


CUTS: dict[str, int] = {"whole": 2**20, "per row": 1, "budget": 200}


def score(adapter: Any, trajectory: Trajectory, tokens: int) -> Tensor:
    """Scores rows as a trainer does, in slices of so many tokens."""
    plan = RolloutPlan(score_tokens=tokens)
    rows = range(len(trajectory))
    found = score_all(adapter, trajectory, rows, temperature=1.0, attempt=under(plan), tile=min(tokens, 64))
    return torch.cat([row.logprobs for row in found])


def gradient(adapter: Any, trajectory: Trajectory, cut: int, *, packed: bool) -> tuple[Tensor, Tensor]:
    """Gives log-probs and the gradient of a loss over rows, a few of them in each micro-batch, sums in float32."""
    total: dict[str, Tensor] = {}
    found, rows = [], list(range(len(trajectory)))
    for start in range(0, len(rows), cut):
        some = rows[start : start + cut]
        adapter.model.zero_grad()
        scores = score_rows(adapter, trajectory, some, temperature=1.0, tile=48, packed=packed)
        weights = trajectory.advantages[some][:, None]
        (scores.logprobs_BT * weights).sum().backward()
        lengths = trajectory.action_lengths(some)
        found += [row[:length].detach() for row, length in zip(scores.logprobs_BT, lengths, strict=True)]
        for name, weight in adapter.model.named_parameters():
            if weight.grad is not None:
                total[name] = total[name] + weight.grad.float() if name in total else weight.grad.float()
    return torch.cat(found), torch.cat([share.flatten() for share in total.values()])


def gradients(adapter: Any, trajectory: Trajectory) -> dict[str, Any]:
    """Compares the gradient of several cuts with the whole one's, and repeats the whole."""
    logprobs, whole = gradient(adapter, trajectory, len(trajectory), packed=False)
    _, again = gradient(adapter, trajectory, len(trajectory), packed=False)
    result: dict[str, Any] = {"bitwise_when_repeated": torch.equal(whole, again), "cuts": {}}
    cuts = [("per row", 1, False), ("8 rows", 8, False)]
    if adapter.packs_prompts:
        cuts.append(("packed", len(trajectory), True))
    for name, cut, packed in cuts:
        other, grads = gradient(adapter, trajectory, cut, packed=packed)
        result["cuts"][name] = {
            "logprobs_that_differ": int((other != logprobs).sum()),
            "relative_difference": float((grads - whole).norm() / whole.norm()),
        }
    return result


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """Gives what a call gives, and its seconds of processor time."""
    start = time.process_time()
    return (run(), time.process_time() - start)


def measure(family: str, dtype: torch.dtype, *, invariant: bool, tokens: int) -> dict[str, Any]:
    """Runs one network in one type, with the mode or without."""
    adapter = adapter_of(make(family, dtype), invariant=invariant)
    length = 40
    prompts = prompts_of(max(4, tokens // (GROUP * length)))
    base, seconds = timed(lambda: draw(adapter, prompts, length, WAVES[0]))
    result: dict[str, Any] = {"rollout_seconds": round(seconds, 2), "waves": {}, "scores": {}, "turns": {}}
    for wave in WAVES[1:]:
        count = max(4, len(prompts) // 16) if wave == 1 else len(prompts)  # alone, a row takes as long as a full wave
        ours = draw(adapter, prompts[:count], length, wave, prefill=7 + wave)
        result["waves"][wave] = compare(ours, base[: GROUP * count])
    trajectory, drawn = rows_of(prompts, base), torch.cat([row.logprobs for row in base])
    for name, cut in CUTS.items():
        scores, seconds = timed(lambda cut=cut: score(adapter, trajectory, cut))
        result["scores"][name] = {
            "differ_from_sampler": int((scores.float() != drawn).sum()),
            "seconds": round(seconds, 2),
        }
    few = prompts[: max(4, tokens // (GROUP * length * 16))]
    said = converse(adapter, few, length // 2, WAVES[0], None)
    if adapter.kv_retention:
        result["turns"]["kept"] = compare(converse(adapter, few, length // 2, 7, KeptCaches()), said)
    result["turns"]["read again"] = compare(converse(adapter, few, length // 2, 7, None), said)
    small = rows_of(prompts[:8], base[: 8 * GROUP])
    result["gradients"] = gradients(adapter, small)
    _, seconds = timed(lambda: gradient(adapter, small, 16, packed=False))
    result["update_seconds"] = round(seconds, 3)
    for name, run in (
        ("rollout_peak_bytes", lambda: draw(adapter, prompts[:16], length, 64)),
        ("update_peak_bytes", lambda: gradient(adapter, small, 16, packed=False)),
    ):
        with CountingAllocator() as counter:
            run()
        result[name] = counter.peak_bytes
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--models", nargs="+", default=["qwen3", "gemma3", "gpt2", "t5", "moe"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)  # processor time is then that of the work
    results: dict[str, Any] = {"tokens": args.tokens, "torch": torch.__version__, "machine": platform.machine()}
    for family in args.models:
        for kind in args.dtypes:
            for invariant in (True, False):
                # Without the mode, fewer tokens tell that some differ.
                tokens = args.tokens if invariant else min(args.tokens, 10_000)
                found = measure(family, getattr(torch, kind), invariant=invariant, tokens=tokens)
                results.setdefault(family, {}).setdefault(kind, {})["invariant" if invariant else "plain"] = found
                print(family, kind, invariant, json.dumps(found), flush=True)
                args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
