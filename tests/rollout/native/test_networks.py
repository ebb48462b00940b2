"""The rollout over real networks: waves, compaction and padding against single rows and transformers' `generate`."""

from typing import Any

import pytest
import torch

from memsafe_rl.models.language.causal_lm import CausalLMAdapter
from memsafe_rl.types import Completion, Ragged, RolloutPlan, SamplingSettings, SequenceKey, Trajectory
from tests.rollout.plainly import generate, score_all
from tests.tiny import EOS_ID, PAD_ID, tiny_model


def adapter_of(arch: str = "qwen3", vocab: int = 258, **config: Any) -> CausalLMAdapter:
    return CausalLMAdapter(tiny_model(arch, vocab, **config), pad_token_id=PAD_ID)


def prompts_of(count: int, vocab: int = 258) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 20, (count,), generator=generator).tolist()
    return [torch.randint(2, vocab, (length,), generator=generator) for length in lengths]


def keys_of(count: int, group: int) -> list[list[SequenceKey]]:
    return [[SequenceKey(3, 1, prompt, sample) for sample in range(group)] for prompt in range(count)]


def untied_difference(ours: list[Completion], theirs: list[Completion]) -> float:
    """Greatest log-prob difference; fails at a different token in rows without a tie."""
    gap = 0.0
    for one, other in zip(ours, theirs, strict=True):
        if one.ids.tolist() != other.ids.tolist():
            assert one.ties or other.ties
            continue
        gap = max(gap, float((one.logprobs - other.logprobs).abs().max()))
    return gap


@pytest.mark.slow
@pytest.mark.parametrize(("vocab", "tokens"), [(4096, 40), (32_000, 24), (151_936, 12)])
def test_wave_size_changes_no_token(vocab: int, tokens: int) -> None:
    adapter = adapter_of(vocab=vocab)
    prompts, keys = prompts_of(4, vocab), keys_of(4, 2)
    settings = SamplingSettings(tokens, (EOS_ID, 7), temperature=2.0)
    whole = generate(adapter, prompts, keys, settings, RolloutPlan(rows_in_flight=8))
    for rows in (1, 3):
        part = generate(adapter, prompts, keys, settings, RolloutPlan(rows_in_flight=rows))
        assert untied_difference(part, whole) < 5e-5
    assert sum(len(row.ids) for row in whole) > 4 * tokens


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen2", "llama", "gemma3", "gpt2"])
def test_compaction_and_padding_change_no_token(arch: str) -> None:
    adapter = adapter_of(arch)
    prompts, keys = prompts_of(5), keys_of(5, 3)
    ends = tuple(range(2, 20))  # ended early and often, so that rows leave at many steps
    settings = SamplingSettings(40, ends, temperature=1.5)
    whole = generate(adapter, prompts, keys, settings, RolloutPlan())
    alone = generate(adapter, prompts, keys, settings, RolloutPlan(rows_in_flight=1))
    assert untied_difference(alone, whole) < 5e-5
    assert len({len(row.ids) for row in whole}) > 4


@pytest.mark.slow
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_equals_generate(penalty: float) -> None:
    adapter, prompts = adapter_of(), prompts_of(6)
    settings = SamplingSettings(30, (EOS_ID, 5, 9), temperature=0.0, repetition_penalty=penalty)
    ours = generate(adapter, prompts, keys_of(6, 1), settings, RolloutPlan())
    for prompt, row in zip(prompts, ours, strict=True):
        theirs = adapter.model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            do_sample=False,
            max_new_tokens=30,
            eos_token_id=[EOS_ID, 5, 9],
            repetition_penalty=penalty,
        )
        assert row.ids.tolist() == theirs[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_noted_logprobs_are_what_scoring_finds(temperature: float) -> None:
    adapter, prompts = adapter_of(), prompts_of(4)
    settings = SamplingSettings(25, (EOS_ID, 5, 9), temperature=temperature, top_p=0.9)
    rows = generate(adapter, prompts, keys_of(4, 3), settings, RolloutPlan(rows_in_flight=5))
    actions = Ragged.from_rows([row.ids for row in rows])
    trajectory = Trajectory(
        conditions=Ragged.from_rows(prompts),
        condition_of_row=tuple(row // 3 for row in range(12)),
        actions=actions,
        loss_mask=Ragged(torch.ones(len(actions.flat)), actions.lengths),
        sampling_logprobs=None,
        advantages=torch.zeros(12),
        group_of_row=(0,) * 12,
        finished=(True,) * 12,
    )
    for score_tokens in (1, 100, 10_000):
        scores = score_all(adapter, trajectory, range(12), temperature=temperature, score_tokens=score_tokens, tile=16)
        for row, logprobs in zip(rows, scores, strict=True):
            # Decoding with a cache and one pass over the row add in different orders (float32).
            torch.testing.assert_close(row.model_logprobs, logprobs, rtol=0, atol=5e-5)


def test_half_precision_rows_sample_and_score() -> None:
    adapter, prompts = adapter_of(dtype=torch.bfloat16), prompts_of(3)
    rows = generate(adapter, prompts, keys_of(3, 2), SamplingSettings(10, (EOS_ID,)), RolloutPlan(rows_in_flight=4))
    assert all(row.logprobs.dtype == torch.float32 and bool(row.logprobs.isfinite().all()) for row in rows)
