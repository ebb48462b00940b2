"""Whole rollouts of every attention family: against `generate`, under other plans, and under faults."""

from __future__ import annotations

import gc
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.models.language.causal_lm import CausalLMAdapter, check_head
from memsafe_rl.rollout.native import running_batch as native
from memsafe_rl.rollout.native import sequences
from memsafe_rl.rollout.native.running_batch import generate
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings, SequenceKey
from tests.ops.test_sampling import chi_square
from tests.tiny import tiny_model

NEW, EOS, VOCABULARY = 24, 1, 258
FAMILIES = ["llama", "qwen3", "gpt2", "gemma2", "gemma3", "moe", "gpt_oss", "opt", "mqa"]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def model_of(family: str) -> Any:
    """A tiny network whose greedy completions end at different lengths."""
    torch.manual_seed(11)
    grouped = {**SIZES, "vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 8}
    if family == "moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**grouped, **experts))
    elif family == "gpt_oss":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
        rope = {"rope_type": "default", "rope_theta": 10_000.0}
        model = GptOssForCausalLM(GptOssConfig(**grouped, **experts, rope_parameters=rope))
    elif family == "opt":
        opt = {"vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2}
        model = OPTForCausalLM(
            OPTConfig(**opt, num_attention_heads=4, word_embed_proj_dim=32, max_position_embeddings=256)
        )
    elif family == "mqa":
        model = LlamaForCausalLM(LlamaConfig(**{**grouped, "num_key_value_heads": 1}))
    else:
        model = tiny_model(family)
    return model.eval()


def greedy(model: Any, prompt: Tensor) -> list[int]:
    """Greedy tokens of one prompt alone, by the model's generate, whatever would end them."""
    ids = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        do_sample=False,
        max_new_tokens=NEW,
        eos_token_id=None,
        pad_token_id=0,
    )
    return ids[0, len(prompt) :].tolist()


def prompts_of(lengths: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in lengths]


def keys_of(count: int, group: int) -> list[list[SequenceKey]]:
    return [[SequenceKey(9, 0, prompt, sample) for sample in range(group)] for prompt in range(count)]


def ids_of(rows: list[Completion]) -> list[list[int]]:
    return [row.ids.tolist() for row in rows]


LENGTHS = (3, 17, 1, 30, 17, 9, 22, 5)


EVERY_THRESHOLD = ["llama", "gemma3", "gpt_oss"]
"""One network each with a cache of one kind, with a sliding window, and with experts and sinks."""


@pytest.fixture
def threshold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Shares at which rows leave and join: 1 as late as possible, 8 as usual, 1000 at once."""
    monkeypatch.setattr(native, "_COMPACT_SHARE", request.param)
    monkeypatch.setattr(sequences, "_JOIN_SHARE", request.param)
    return int(request.param)


AT_THRESHOLDS = pytest.mark.parametrize(
    ("family", "threshold"),
    [
        *((family, 8) for family in FAMILIES),
        *(pytest.param(family, share, marks=pytest.mark.slow) for family in EVERY_THRESHOLD for share in (1, 1000)),
    ],
    indirect=["threshold"],
)


@cache
def greedy_of_all(family: str) -> tuple[tuple[int, ...], list[list[int]]]:
    """Tokens that end completions, and the greedy tokens of every prompt, by the model's generate."""
    model, prompts = model_of(family), prompts_of(LENGTHS)
    endless = [greedy(model, prompt) for prompt in prompts]
    # Tokens that some rows reach early, some late, some never.
    firsts = {token: min(ids.index(token) if token in ids else NEW for ids in endless) for token in range(VOCABULARY)}
    eos = tuple(token for token, first in firsts.items() if 4 <= first < NEW)[::2]
    ends = [next((place + 1 for place, token in enumerate(ids) if token in eos), NEW) for ids in endless]
    return eos, [ids[:end] for ids, end in zip(endless, ends, strict=True)]


@pytest.mark.slow_after(1)
@AT_THRESHOLDS
def test_greedy_tokens_are_generates(family: str, threshold: int) -> None:
    model, prompts = model_of(family), prompts_of(LENGTHS)
    eos, expected = greedy_of_all(family)
    assert len({len(ids) for ids in expected}) > 1
    settings = SamplingSettings(NEW, eos, temperature=0.0)
    for joins in (True, False):
        adapter = CausalLMAdapter(model, pad_token_id=0)
        check_head(adapter)
        assert adapter.joins
        adapter.joins = joins
        for plan in (RolloutPlan(), RolloutPlan(rows_in_flight=3), RolloutPlan(rows_in_flight=5, prefill_tokens=7)):
            rows = generate(adapter, prompts, keys_of(len(prompts), 1), settings, under(plan))
            for row, ids in zip(rows, expected, strict=True):
                assert row.ids.tolist() == ids or row.ties


@pytest.mark.slow_after(1)
@AT_THRESHOLDS
def test_sampled_tokens_are_the_same_under_any_plan(family: str, threshold: int) -> None:
    adapter = CausalLMAdapter(model_of(family), pad_token_id=0)
    check_head(adapter)
    prompts, keys, settings = prompts_of(LENGTHS[:4]), keys_of(4, 3), SamplingSettings(NEW, tuple(range(2, 20)))
    whole = generate(adapter, prompts, keys, settings, under(RolloutPlan()))
    assert len({len(row.ids) for row in whole}) > 5
    cap = adapter.geometry.batch_kv_bytes(adapter.geometry.kv_bytes(30), 4, NEW)
    for plan in (
        RolloutPlan(rows_in_flight=1),
        RolloutPlan(rows_in_flight=5),
        RolloutPlan(rows_in_flight=12, kv_bytes=cap, prefill_tokens=11),
    ):
        again = generate(adapter, prompts, keys, settings, under(plan))
        for one, other in zip(whole, again, strict=True):
            assert one.ids.tolist() == other.ids.tolist() or one.ties
            if not one.ties:
                torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=2e-5)


class _Refusing:
    """Repeats spans that run out of memory, as a run does; most attempts have an allocation refused on their way."""

    def __init__(self, memory: SimulatedMemory) -> None:
        self.memory, self.refused, self.rows, self.tried = memory, 0, 8, 0

    def __call__(self, unit: Any, undo: Any = None) -> Any:
        for attempt in count():
            self.tried += 1  # moves on by every attempt: the chosen allocation may lie behind a span's last one
            self.memory.fail_after(10**9 if attempt % 3 == 2 else 1 + (self.tried * 997) % 3001)
            try:
                return unit(RolloutPlan(rows_in_flight=self.rows, prefill_tokens=20))
            except torch.OutOfMemoryError:
                self.refused += 1
            finally:
                self.memory.fail_after(10**9)
            undo()
            self.rows = 3 + self.refused % 9
        raise AssertionError("counting never ends")


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.slow
def test_two_hundred_refused_allocations_change_no_token(family: str) -> None:
    adapter = CausalLMAdapter(model_of(family), pad_token_id=0)
    check_head(adapter)
    prompts, keys, settings = prompts_of(LENGTHS[:4]), keys_of(4, 4), SamplingSettings(NEW, tuple(range(2, 9)))
    with SimulatedMemory() as memory:
        whole = generate(adapter, prompts, keys, settings, under(RolloutPlan()))
        gc.collect()
        held, refusing = memory.live_bytes, _Refusing(memory)
        while refusing.refused < 200:
            rows = generate(adapter, prompts, keys, settings, refusing)
            for one, other in zip(whole, rows, strict=True):
                assert one.ids.tolist() == other.ids.tolist() or one.ties
            del rows
            assert memory.live_bytes == held


@pytest.mark.slow
def test_draws_follow_the_models_distribution() -> None:
    """First and second tokens of many samples, a chi-square test each; the seed is fixed, so the verdict is too."""
    torch.manual_seed(2)
    model = tiny_model("qwen3", vocab_size=24)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(4)
    adapter, samples = CausalLMAdapter(model, pad_token_id=0), 4000
    prompt = torch.tensor([5, 9, 3])
    keys = [[SequenceKey(1, 0, 0, sample) for sample in range(samples)]]
    rows = generate(adapter, [prompt], keys, SamplingSettings(2, ()), under(RolloutPlan(rows_in_flight=700)))
    drawn = torch.stack([row.ids for row in rows])
    firsts = torch.bincount(drawn[:, 0], minlength=24)
    with torch.no_grad():
        expected = model(prompt[None]).logits[0, -1].double().softmax(0)
        assert abs(chi_square(firsts, expected * samples)) < 4.5
        common = int(firsts.argmax())
        after = drawn[drawn[:, 0] == common, 1]
        logits = model(torch.cat([prompt, torch.tensor([common])])[None]).logits[0, -1]
        assert abs(chi_square(torch.bincount(after, minlength=24), logits.double().softmax(0) * len(after))) < 4.5
