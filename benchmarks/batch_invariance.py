"""Do tokens, log-probs or gradients depend on how work is cut, in half precision, and what does it cost that not?

    python -m benchmarks.batch_invariance [--tokens 50000] [--models qwen3 gpt2] [--quick] [--resume]

Writes ``benchmarks/results/batch_invariance.json``, a piece at a time; `--resume` keeps the pieces it holds. Pieces are
tiny random models in bf16 and fp16, as weights and by autocast, with `batch_invariant` and, on fewer tokens, without:
the same sequences in waves of 1, 7, 32 and 64, in three turns with and without kept caches, scored as a whole, row by
row, in slices of a budget, and packed. Each counts the tokens and log-probs that differ from those of the widest wave,
and takes the gradients of several cuts apart. Pieces of cost time a rollout and an update of wider networks with the
mode and without, turn by turn, in seconds of processor time, and count their bytes.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
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
LENGTH = 40
FAMILIES = ("qwen3", "gemma3", "gpt2", "t5", "moe")
FORMS = ("weights", "autocast")
"""Whether the weights themselves are in half precision, or float32 and narrowed by autocast."""
IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}


def make(family: str, dtype: torch.dtype, hidden: int = 64, vocab: int = 512) -> Any:
    """Returns a tiny random network of two layers, whose tokens have entropies like a language model's."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden + 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
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
        sizes = {"d_model": hidden, "d_kv": hidden // 4, "d_ff": 3 * hidden, "num_layers": 2, "num_heads": 4}
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
    """Returns random prompts of unlike length."""
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


def narrowed(kind: torch.dtype | None) -> torch.autocast:
    """Returns the context of a forward pass, by autocast in a type or without."""
    return torch.autocast("cpu", kind, enabled=kind is not None)


def gradient(
    adapter: Any, trajectory: Trajectory, cut: int, *, packed: bool, kind: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Returns log-probs and the gradient of a loss over rows, a few of them in each micro-batch, sums in float32."""
    total: dict[str, Tensor] = {}
    found, rows = [], list(range(len(trajectory)))
    for start in range(0, len(rows), cut):
        some = rows[start : start + cut]
        adapter.model.zero_grad()
        with narrowed(kind):
            scores = score_rows(adapter, trajectory, some, temperature=1.0, tile=48, packed=packed)
        weights = trajectory.advantages[some][:, None]
        (scores.logprobs_BT * weights).sum().backward()
        lengths = trajectory.action_lengths(some)
        found += [row[:length].detach() for row, length in zip(scores.logprobs_BT, lengths, strict=True)]
        for name, weight in adapter.model.named_parameters():
            if weight.grad is not None:
                total[name] = total[name] + weight.grad.float() if name in total else weight.grad.float()
    return torch.cat(found), torch.cat([share.flatten() for share in total.values()])


def gradients(adapter: Any, trajectory: Trajectory, kind: torch.dtype | None) -> dict[str, Any]:
    """Compares the gradient of several cuts with the whole one's, and repeats the whole."""
    logprobs, whole = gradient(adapter, trajectory, len(trajectory), packed=False, kind=kind)
    _, again = gradient(adapter, trajectory, len(trajectory), packed=False, kind=kind)
    result: dict[str, Any] = {"bitwise_when_repeated": torch.equal(whole, again), "cuts": {}}
    cuts = [("per row", 1, False), ("8 rows", 8, False)]
    if adapter.packs_prompts:
        cuts.append(("packed", len(trajectory), True))
    for name, cut, packed in cuts:
        other, grads = gradient(adapter, trajectory, cut, packed=packed, kind=kind)
        result["cuts"][name] = {
            "logprobs_that_differ": int((other != logprobs).sum()),
            "relative_difference": float((grads - whole).norm() / whole.norm()),
        }
    return result


def measure(family: str, dtype: torch.dtype, form: str, *, invariant: bool, tokens: int) -> dict[str, Any]:
    """Runs one network in one type, with the mode or without, and counts what differs."""
    model = make(family, dtype if form == "weights" else torch.float32)
    adapter, kind = adapter_of(model, invariant=invariant), dtype if form == "autocast" else None
    prompts = prompts_of(max(4, -(-tokens // (GROUP * LENGTH))))
    alone = prompts[: max(2, len(prompts) // 16)]  # by itself, a row takes as long as a full wave
    result: dict[str, Any] = {"waves": {}, "scores": {}, "turns": {}}
    with narrowed(kind):
        base = draw(adapter, prompts, LENGTH, WAVES[0])
        for wave in WAVES[1:]:
            some = alone if wave == 1 else prompts
            ours = draw(adapter, some, LENGTH, wave, prefill=7 + wave)
            result["waves"][wave] = compare(ours, base[: len(ours)])
        trajectory, drawn = rows_of(prompts, base), torch.cat([row.logprobs for row in base])
        for name, cut in CUTS.items():
            result["scores"][name] = int((score(adapter, trajectory, cut).float() != drawn).sum())
        said = converse(adapter, alone, LENGTH // 2, WAVES[0], None)
        if adapter.kv_retention and family != "t5":  # an encoder reads a longer prompt anew, so that agents take none
            result["turns"]["kept"] = compare(converse(adapter, alone, LENGTH // 2, 7, KeptCaches()), said)
        result["turns"]["read again"] = compare(converse(adapter, alone, LENGTH // 2, 7, None), said)
    result["tokens"] = len(drawn)
    result["gradients"] = gradients(adapter, rows_of(prompts[:8], base[: 8 * GROUP]), kind)
    return result


def cost(family: str, dtype: torch.dtype, *, repeats: int, hidden: int = 256, vocab: int = 4096) -> dict[str, Any]:
    """Times a rollout and an update with the mode and without, turn by turn, and counts the bytes of both."""
    kind = None if dtype is torch.float32 else dtype
    adapter, prompts = adapter_of(make(family, torch.float32, hidden, vocab), invariant=False), prompts_of(8, vocab)
    with narrowed(kind):
        trajectory = rows_of(prompts, draw(adapter, prompts, LENGTH, 32))

    def rollout() -> None:
        with narrowed(kind):
            draw(adapter, prompts, LENGTH, 32)

    def update() -> None:
        gradient(adapter, trajectory, 8, packed=adapter.packs_prompts, kind=kind)

    result: dict[str, Any] = {}
    for name, run in (("rollout", rollout), ("update", update)):
        seconds: dict[bool, list[float]] = {True: [], False: []}
        found = result[name] = {}
        for _, adapter.batch_invariant in product(range(repeats + 1), (False, True)):
            start = time.process_time()
            run()
            seconds[adapter.batch_invariant].append(time.process_time() - start)
        for mode, adapter.batch_invariant in (("plain", False), ("invariant", True)):
            found[f"{mode}_seconds"] = round(statistics.median(seconds[adapter.batch_invariant][1:]), 3)
            with CountingAllocator() as counter:
                run()
            found[f"{mode}_bytes"] = counter.peak_bytes
    took = {mode: sum(part[f"{mode}_seconds"] for part in result.values()) for mode in ("plain", "invariant")}
    return {**result, "step_ratio": round(took["invariant"] / took["plain"], 2)}


# ------------------------------------------------------------------ a run


def pieces(args: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """Names what there is to measure, the cheap first."""
    cells = list(product(args.models, args.dtypes, FORMS))
    share = -(-args.tokens // len(cells)) * 21 // 20  # some sequences end early
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for family, kind in product(args.models, ("float32", *args.dtypes)):
        found[f"cost {family} {kind}"] = partial(cost, family, getattr(torch, kind), repeats=args.repeats)
    for (family, kind, form), invariant in product(cells, (False, True)):
        # Without the mode, few tokens tell that some differ.
        tokens, mode = (share, "invariant") if invariant else (min(share, 600), "plain")
        run = partial(measure, family, getattr(torch, kind), form, invariant=invariant, tokens=tokens)
        found[f"{mode} {family} {kind} {form}"] = run
    return found


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Adds up what differs, with the mode and without, and gives the worst of costs and gradients."""
    result: dict[str, Any] = {}
    for mode in ("plain", "invariant"):
        cells = [piece for name, piece in found.items() if name.startswith(mode)]
        compared = [part for cell in cells for group in ("waves", "turns") for part in cell[group].values()]
        apart: dict[str, dict[str, float]] = {}
        for name, cell in found.items():
            if name.startswith(mode):
                furthest = apart.setdefault(name.split()[-1], {})
                for cut, part in cell["gradients"]["cuts"].items():
                    furthest[cut] = max(furthest.get(cut, 0.0), part["relative_difference"])
        result[mode] = {
            "tokens_drawn": sum(cell["tokens"] for cell in cells),
            "tokens_compared": sum(part["tokens"] for part in compared),
            "tokens_after_a_difference": sum(part["tokens_after_a_difference"] for part in compared),
            "logprobs_that_differ": sum(part["logprobs_that_differ"] for part in compared),
            "scores_compared": sum(len(cell["scores"]) * cell["tokens"] for cell in cells),
            "scores_that_differ_from_the_samplers": sum(sum(cell["scores"].values()) for cell in cells),
            "updates_logprobs_that_differ": sum(
                part["logprobs_that_differ"] for cell in cells for part in cell["gradients"]["cuts"].values()
            ),
            "gradients_bitwise_when_repeated": all(cell["gradients"]["bitwise_when_repeated"] for cell in cells),
            "gradients_furthest_apart": apart,
        }
    costs = {name: piece for name, piece in found.items() if name.startswith("cost")}
    kinds = dict.fromkeys(name.split()[-1] for name in costs)
    result["step_ratio"] = {
        kind: max(piece["step_ratio"] for name, piece in costs.items() if name.endswith(kind)) for kind in kinds
    }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=50_000, help="drawn with the mode, over all models and types")
    parser.add_argument("--models", nargs="+", default=FAMILIES)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument("--repeats", type=int, default=2, help="timed turns")
    parser.add_argument("--quick", action="store_true", help="a tenth of the tokens, one timed turn")
    parser.add_argument("--resume", action="store_true", help="keep the pieces that the output holds")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.repeats = args.tokens // 10, 1
    torch.set_num_threads(1)  # processor time is then that of the work
    about = {"tokens": args.tokens, "torch": torch.__version__, "machine": platform.machine()}
    known = json.loads(args.output.read_text()) if args.resume and args.output.exists() else {}
    found = known.get("pieces", {}) if known.get("about") == about else {}
    for name, run in tqdm(pieces(args).items(), unit="piece"):
        if name not in found:
            start = time.process_time()
            found[name] = run()
            found[name]["processor_seconds"] = round(time.process_time() - start, 1)
            args.output.write_text(json.dumps({"about": about, "pieces": found}, indent=1) + "\n")
    whole = {"about": about, "summary": summary(found), "pieces": found}
    args.output.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(whole["summary"], indent=1))
    if broken := whole["summary"]["invariant"]["tokens_after_a_difference"]:
        raise SystemExit(f"{broken} tokens depend on how they were drawn")


if __name__ == "__main__":
    main()
