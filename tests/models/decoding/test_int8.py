"""A cache in 8 bits: a quarter of the bytes, the distribution of the network whose keys and values are rounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from memsafe_rl.config.grpo import GRPOConfig
from memsafe_rl.errors import ConfigError, MemoryBudgetError
from memsafe_rl.memory.planning.policies import FixedPolicy
from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.models.decoding.shared_prefix_cache import as_floats, from_int8, to_int8
from memsafe_rl.models.language.causal_lm import CausalLMAdapter, check_head
from memsafe_rl.models.language.factory import adapter_for, check_adapter
from memsafe_rl.rollout.native.running_batch import generate
from memsafe_rl.types import Completion, MemoryFailure, Phase, RolloutPlan, SamplingSettings, UpdatePlan
from tests.models.language.test_seq2seq import BUILDERS
from tests.rollout.native.test_kv_bound import GROUP, NEW, formula, keys_of, peaks, prompts_of
from tests.tiny import tiny_model
from tests.trainers.helpers import make_trainer
from tests.training.test_by_transformers import mamba

GREEDY = SamplingSettings(20, (), temperature=0.0)


def adapter_of(arch: str, *, in_8_bits: bool) -> CausalLMAdapter:
    adapter = CausalLMAdapter(tiny_model(arch, layers=2), pad_token_id=0)
    check_head(adapter)
    adapter.cache_in_8_bits(in_8_bits)
    return adapter


def test_a_vector_becomes_whole_multiples_of_a_127th_of_its_largest_element() -> None:
    values = torch.tensor([[1.27, -0.504, 0.0, 0.006], [0.0, 0.0, 0.0, 0.0]])
    kept = to_int8(values)
    assert kept.shape == (2, 8)
    assert kept[0, :4].tolist() == [127, -50, 0, 1]
    torch.testing.assert_close(from_int8(kept, torch.float32)[0], torch.tensor([1.27, -0.5, 0.0, 0.01]))
    assert from_int8(kept, torch.float32)[1].tolist() == [0.0] * 4
    assert as_floats(values, torch.float32) is values


@pytest.mark.parametrize(("dtype", "more"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_no_element_moves_by_more_than_half_a_step(dtype: torch.dtype, more: float) -> None:
    values = (torch.randn(3, 2, 50, 24, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
    largest = values.float().abs().amax(-1, keepdim=True)
    moved = (from_int8(to_int8(values), dtype).float() - values.float()).abs()
    assert (moved <= largest * (0.5 / 127 + more)).all()
    shifted = to_int8(values)[:, :, 7:, :]  # a view whose scales are not aligned with its start
    assert torch.equal(from_int8(shifted, dtype), from_int8(to_int8(values), dtype)[:, :, 7:])


@contextmanager
def rounding_caches() -> Iterator[None]:
    """Has transformers' own cache round what goes in, vector by vector."""

    def rounded(vectors: torch.Tensor) -> torch.Tensor:
        step = vectors.abs().amax(-1, keepdim=True) / 127
        return torch.where(step > 0, torch.round(vectors / step) * step, vectors)

    kinds = (DynamicLayer, DynamicSlidingWindowLayer)
    originals = [kind.update for kind in kinds]

    def rounds(original: Any) -> Any:
        return lambda self, keys, values, *rest, **named: original(self, rounded(keys), rounded(values), *rest, **named)

    try:
        for kind, original in zip(kinds, originals, strict=True):
            kind.update = rounds(original)
        yield
    finally:
        for kind, original in zip(kinds, originals, strict=True):
            kind.update = original


@pytest.mark.parametrize("arch", ["qwen3", "gemma3", "gpt2"])
def test_it_draws_from_the_network_whose_keys_and_values_are_rounded(arch: str) -> None:
    adapter = adapter_of(arch, in_8_bits=True)
    prompts = prompts_of((30, 9))
    rows = generate(adapter, prompts, keys_of(2, 1), GREEDY, under(RolloutPlan()))
    plain = generate(adapter_of(arch, in_8_bits=False), prompts, keys_of(2, 1), GREEDY, under(RolloutPlan()))
    for prompt, row in zip(prompts, rows, strict=True):
        with torch.no_grad(), rounding_caches():
            ids = torch.cat([prompt, row.ids])[None]
            logits = adapter.model(input_ids=ids, use_cache=True).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, row.ids[:, None])[:, 0]
        torch.testing.assert_close(row.logprobs, expected, rtol=0, atol=2e-5)
    assert max(float((a.logprobs[:3] - b.logprobs[:3]).abs().max()) for a, b in zip(rows, plain, strict=True)) > 1e-4


def same(first: list[Completion], second: list[Completion]) -> bool:
    return [row.ids.tolist() for row in first] == [row.ids.tolist() for row in second]


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [RolloutPlan(rows_in_flight=3), RolloutPlan(prefill_tokens=7), RolloutPlan(kv_bytes=40_000)],
    ids=["few rows", "chunks", "cap"],
)
def test_plans_draw_alike(plan: RolloutPlan) -> None:
    adapter, prompts, keys = adapter_of("qwen3", in_8_bits=True), prompts_of((40, 17, 9)), keys_of(3, 4)
    settings = SamplingSettings(50, tuple(range(2, 9)))
    expected = generate(adapter, prompts, keys, settings, under(RolloutPlan()))
    assert same(generate(adapter, prompts, keys, settings, under(plan)), expected)


def test_what_was_drawn_before_is_read_back_as_it_was() -> None:
    adapter, prompts, keys = adapter_of("qwen3", in_8_bits=True), prompts_of((40, 17)), keys_of(2, 3)
    settings = SamplingSettings(40, ())
    expected = generate(adapter, prompts, keys, settings, under(RolloutPlan()))
    begun = [
        [Completion(row.ids[:11], row.logprobs[:11], row.model_logprobs[:11], finished=False) for row in group]
        for group in (expected[:3], expected[3:])
    ]
    assert same(generate(adapter, prompts, keys, settings, under(RolloutPlan()), begun=begun), expected)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen3", "gemma3"])
def test_its_bytes_are_the_formulas_and_about_a_quarter(arch: str) -> None:
    lengths, plan = (50, 49, 20), RolloutPlan(rows_in_flight=100)
    small, full = adapter_of(arch, in_8_bits=True), adapter_of(arch, in_8_bits=False)
    most, left, _ = peaks(small, lengths, plan, ())
    whole, _, _ = peaks(full, lengths, plan, ())
    bound = formula(small.geometry, lengths, GROUP * len(lengths))
    assert left == 0
    assert 0.8 * bound <= most <= bound
    width = full.geometry.head_dim
    assert most / whole == pytest.approx((width + 4) / (4 * width), rel=0.02)
    assert small.geometry.kv_bytes(1) == 2 * small.geometry.layers * small.geometry.kv_heads * (width + 4)
    cap = bound // 2
    assert peaks(small, lengths, RolloutPlan(kv_bytes=cap), ())[0] <= cap


@pytest.mark.slow
def test_an_encoder_decoders_cross_attention_is_kept_in_8_bits_too() -> None:
    adapter = adapter_for(BUILDERS["t5"](), pad_token_id=0)
    check_adapter(adapter)
    settings, prompts, keys = SamplingSettings(NEW, (), temperature=0.0), prompts_of((30, 12)), keys_of(2, 2)
    full = adapter.geometry
    plain = generate(adapter, prompts, keys, settings, under(RolloutPlan()))
    adapter.cache_in_8_bits(True)
    rows = generate(adapter, prompts, keys, settings, under(RolloutPlan()))
    assert full.source_bytes is not None
    assert adapter.geometry.source_bytes == full.source_bytes * (full.head_dim + 4) // (4 * full.head_dim)
    moved = [float((a.logprobs[:4] - b.logprobs[:4]).abs().max()) for a, b in zip(rows, plain, strict=True)]
    assert 0 < max(moved) < 0.1


class TestTraining:
    """The trainer corrects what it learns from a rounded cache."""

    @pytest.mark.slow
    @pytest.mark.parametrize("filters", [{}, {"top_k": 20}, {"top_p": 0.8}])
    def test_the_loss_is_corrected_by_importance_weights(self, tmp_path: Path, filters: dict[str, Any]) -> None:
        """For what is rounded, not for what filters leave out: a run with top_k=20 learned nothing."""
        settings: dict[str, Any] = {"cache_implementation": "quantized", "max_steps": 1, "max_completion_length": 30}
        trainer = make_trainer(tmp_path, **settings, **filters)
        experience = trainer.loop.collect()
        store = experience.trajectory
        assert experience.external
        assert store.importance_weights is not None
        assert store.old_logprobs is not None
        assert store.sampling_logprobs is not None
        weights, ratio = store.importance_weights.flat, store.old_logprobs.flat - store.sampling_logprobs.flat
        assert 0 < float(ratio.abs().max()) < 0.1
        assert 0.8 < float(weights.min()) <= float(weights.max()) < 1.25
        assert trainer.setup.memory.rollout_plan.cache_dtype == "int8"
        trainer.train()
        assert trainer.state.global_step == 1

    def test_it_is_taken_where_rollouts_do_not_fit_and_it_is_listed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer = make_trainer(tmp_path, max_steps=2, allow_lossy=["cache_implementation"])
        steps, made = trainer.loop.step, list[int]()

        def fails_once() -> None:
            if not made:
                made.append(1)
                raise MemoryBudgetError("does not fit", failure=MemoryFailure(Phase.ROLLOUT, 1, 1, ""))
            steps()

        monkeypatch.setattr(trainer.loop, "step", fails_once)
        trainer.train()
        told = [event for event in trainer.memory_events if event["event"] == "degradation"]
        assert [event["changes"] for event in told] == [{"cache_implementation": (None, "quantized")}]
        planned = [event["cache_dtype"] for event in trainer.memory_events if event.get("kind") == "rollout"]
        assert planned == ["int8", "int8"]

    def test_a_policy_alone_cannot_choose_it(self, tmp_path: Path) -> None:
        policy = FixedPolicy(RolloutPlan(cache_dtype="int8"), UpdatePlan())
        with pytest.raises(ConfigError, match=r"asks for a cache of 'int8'.*cache_implementation='quantized'"):
            make_trainer(tmp_path, policy=policy).train()

    def test_networks_that_transformers_decodes_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"cache_implementation='quantized', but .* transformers' own cache"):
            make_trainer(tmp_path, model=mamba(), cache_implementation="quantized")

    @pytest.mark.parametrize(
        ("settings", "told"),
        [
            ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching, which keeps its"),
            ({"verify_plan": True}, "with verify_plan"),
            ({"partial_rollout_tokens": 8}, "partial_rollout_tokens=8"),
        ],
    )
    def test_what_does_not_go_with_it_is_named(self, tmp_path: Path, settings: dict[str, Any], told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            GRPOConfig(str(tmp_path), cache_implementation="quantized", report_to="none", **settings)
