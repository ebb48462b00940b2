"""How fast: launches a token, tokens a second, seconds a step, beside transformers and TRL."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from benchmarks import launches as counts
from benchmarks.draws import keys_of, lengths_by_generate
from benchmarks.gpu_parts.sizes import (
    DEVICE,
    Record,
    Rows,
    Size,
    Timed,
    clock,
    counted,
    highest,
    prompts,
    random_network,
    real_config,
    settings,
)
from benchmarks.small import PAD_ID, filled_tokenizer
from memsafe_rl import GRPOConfig, GRPOTrainer, RolloutPlan
from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.models.language.factory import adapter_for
from memsafe_rl.rollout.native.running_batch import generate
from memsafe_rl.types import SamplingSettings

_GROUP = 8
_MOST_OPERATORS = 0.75
"""Of `generate`'s operators a token, ours, in networks of full depth."""


def launches(size: Size) -> Rows:
    """Counts operators, uploads and read-backs of a decoded token, beside `generate`, and times both."""
    for name, build in counts.networks(size.layers if size.shrunk else None).items():
        with counted():
            model = build(counts.VOCABULARIES[name]).to(DEVICE).eval()
            sides = counts.decoding(model, _GROUP, 16, 3)
        ours, share = sides["memsafe_rl"], sides["our_share"]
        yield (
            name,
            {
                "operators": ours["operators"],
                "of_generate": share["operators"],
                "uploads": ours["uploads"],
                "read_backs": ours["read_backs"],
                "ms": ours["ms"],
                "of_its_ms": share["ms"],
                "passed": max(ours["uploads"], ours["read_backs"]) <= 1
                and (share["operators"] <= _MOST_OPERATORS or size.shrunk),
            },
        )


def rollout(size: Size) -> Rows:
    """Draws a rollout of completions of full length here and with transformers' `generate`."""
    config = real_config(size.beside, size)
    found: Record = {}
    dice = torch.Generator().manual_seed(1)
    asked = [torch.randint(2, config.vocab_size, (size.prompt_tokens,), generator=dice) for _ in range(4)]
    with counted() as meter:
        network = random_network(config, size).eval().requires_grad_(False)
        network.generation_config.eos_token_id = None
        network.config.eos_token_id = None
        for name, draw in (("memsafe_rl", _drawn_here), ("generate", _drawn_by_generate)):
            draw(network, asked, min(8, size.rollout_tokens), 0)
            held = meter.live_bytes()
            meter.reset_peak()
            began = clock()
            tokens = draw(network, asked, size.rollout_tokens, 1)
            seconds = clock() - began
            found[name] = {"tokens_per_second": tokens / seconds, "above_weights_bytes": meter.peak_bytes() - held}
            yield name, found[name]
        del network
    ours, theirs = found["memsafe_rl"], found["generate"]
    yield (
        "ratio",
        {
            "tokens_per_second": ours["tokens_per_second"] / theirs["tokens_per_second"],
            "above_weights_bytes": ours["above_weights_bytes"] / max(1, theirs["above_weights_bytes"]),
        },
    )


def _drawn_here(network: Any, asked: Sequence[Tensor], longest: int, seed: int) -> int:
    adapter = adapter_for(network, pad_token_id=PAD_ID)
    drawn = generate(
        adapter,
        asked,
        keys_of(len(asked), _GROUP, seed=seed),
        SamplingSettings(max_new_tokens=longest, eos_token_ids=()),
        attempt=under(RolloutPlan(rows_in_flight=len(asked) * _GROUP)),
    )
    return sum(len(completion.ids) for completion in drawn)


def _drawn_by_generate(network: Any, asked: Sequence[Tensor], longest: int, seed: int) -> int:
    return sum(lengths_by_generate(network, asked, _GROUP, longest, (), PAD_ID, seed))


def step(size: Size) -> Rows:
    """Times a rollout and its optimizer step here and in TRL, LoRA and all weights, and here under TRL's peak.

    TRL trains weights in half precision without copies of them in float32; under its peak, so is done here.
    """
    kinds, peaks = {"LoRA": True, "full": False}, dict[str, int]()
    for kind, lora in kinds.items():
        yield f"memsafe_rl, {kind}", _stepped("memsafe_rl", lora, size)
        if importlib.util.find_spec("trl"):
            beside = _stepped("TRL", lora, size)
            peaks[kind] = beside["peak_bytes"]
            yield f"TRL, {kind}", beside
    for kind, peak in peaks.items():
        yield (
            f"memsafe_rl, {kind}, TRL's peak as budget",
            _stepped("memsafe_rl", kinds[kind], size, peak, master_weights=False),
        )


def _stepped(side: str, lora: bool, size: Size, budget: int | str = "auto", **own_settings: Any) -> Record:
    config = real_config(size.beside, size)
    rows, steps = 4 * _GROUP, 3
    reward = Timed()

    with tempfile.TemporaryDirectory() as folder, counted() as meter:
        shared = settings(
            folder,
            bf16=size.dtype.itemsize == 2,
            num_generations=_GROUP,
            max_completion_length=size.rollout_tokens,
            max_steps=steps,
            logging_steps=100,
            generation_kwargs={"min_new_tokens": size.rollout_tokens},
        )
        given: Record = {
            "train_dataset": prompts(32, size.prompt_tokens),
            "processing_class": filled_tokenizer(config.vocab_size),
            "peft_config": LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
            if lora
            else None,
        }
        network = random_network(config, size)
        if side == "TRL":
            import trl  # may be absent on the machine that is measured

            args = trl.GRPOConfig(**shared, per_device_train_batch_size=8, gradient_accumulation_steps=rows // 8)
            trainer: Any = trl.GRPOTrainer(network, reward, args=args, **given)
        else:
            own = GRPOConfig(**shared, per_device_train_batch_size=rows, memory_budget=budget, **own_settings)
            trainer = GRPOTrainer(network, reward, args=own, **given)
        meter.reset_peak()
        trainer.train()
        peak = meter.peak_bytes() if side == "TRL" else highest(trainer, "memory/peak_bytes")
        del trainer, network
    return {"seconds_per_step": reward.step_seconds(), "peak_bytes": peak, "steps": steps}
