"""What every engine answers alike: limits by prompt, completions that others began, scopes of caches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.models.language.causal_lm import CausalLMAdapter, check_head
from memsafe_rl.rollout.engine import EngineCapabilities, RolloutEngine
from memsafe_rl.rollout.external.function_engine import drawn_by_limit
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings, SequenceKey
from tests.rollout.external.common import engine_of
from tests.tiny import PAD_ID, tiny_model

PROMPTS = [torch.tensor([5, 6, 7]), torch.tensor([8, 9]), torch.tensor([10])]
KEYS = [[SequenceKey(0, 0, prompt, sample) for sample in range(2)] for prompt in range(3)]
LIMITS = [4, 2, 4]


def engines() -> list[RolloutEngine]:
    adapter = CausalLMAdapter(tiny_model("qwen3"), pad_token_id=PAD_ID)
    check_head(adapter)
    return [engine_of(name, adapter) for name in ("native", "continuous")]


def test_an_engine_of_one_limit_a_call_gives_completions_in_the_order_of_the_prompts() -> None:
    calls: list[int] = []

    def draw(some: Sequence[Tensor], keys: Sequence[Sequence[SequenceKey]], own: SamplingSettings) -> list[Completion]:
        calls.append(own.max_new_tokens)
        ids = [torch.cat([prompt, torch.tensor(key[2:])]) for prompt, of in zip(some, keys, strict=True) for key in of]
        return [Completion(row, torch.zeros(len(row)), torch.zeros(len(row)), finished=True) for row in ids]

    drawn = drawn_by_limit(draw, PROMPTS, KEYS, SamplingSettings(4, ()), LIMITS)
    assert calls == [2, 4]
    assert [tuple(row.ids.tolist()[-2:]) for row in drawn] == [key[2:] for of in KEYS for key in of]
    drawn_by_limit(draw, PROMPTS, KEYS, SamplingSettings(4, ()), None)
    assert calls == [2, 4, 4]
    with pytest.raises(DataError, match="from 1 to max_new_tokens"):
        drawn_by_limit(draw, PROMPTS, KEYS, SamplingSettings(3, ()), LIMITS)


def test_the_collector_goes_by_capabilities() -> None:
    native, other = engines()
    assert native.supports == EngineCapabilities(kv_retention=True, int8_cache=True, resumes_completions=True)
    assert other.supports == EngineCapabilities(is_external=True)
    with pytest.raises(ConfigError, match="keeps its own cache"):
        other.round_cache()
    with pytest.raises(ConfigError, match="cannot resume them"):
        other.generate(PROMPTS, KEYS, SamplingSettings(4, ()), under(RolloutPlan()), begun=[[None] * 2] * 3)
    native.round_cache()
    assert (native.supports.is_external, native.cache_dtype) == (True, "int8")


def test_a_scope_draws_as_its_engine_does() -> None:
    native, settings = engines()[0], SamplingSettings(4, ())
    plan = under(RolloutPlan(kept_kv_bytes=1 << 20))
    expected = native.generate(PROMPTS, KEYS, settings, plan, limits=LIMITS)
    with native.open() as scope:
        drawn = scope.generate(PROMPTS, KEYS, settings, plan, limits=LIMITS)
        again = scope.generate_as(native._adapter, PROMPTS, KEYS, settings, plan, limits=LIMITS)  # type: ignore[attr-defined]
    for found in (drawn, again):
        assert [row.ids.tolist() for row in found] == [row.ids.tolist() for row in expected]
    assert [len(row.ids) for row in expected] == [limit for limit in LIMITS for _ in range(2)]
