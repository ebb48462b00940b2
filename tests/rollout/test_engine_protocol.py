"""What every engine answers alike: limits by prompt, completions that others began, scopes of caches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from memsafe_rl import GRPOConfig
from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.models.language.causal_lm import CausalLMAdapter, check_head
from memsafe_rl.rollout.engine import EngineCapabilities, EngineContext, RolloutEngine
from memsafe_rl.rollout.engines import continuous
from memsafe_rl.rollout.external.function_engine import LIMITS as ROW_LIMITS
from memsafe_rl.rollout.external.function_engine import EngineRequest, FunctionEngine, drawn_by_limit
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


@pytest.mark.parametrize("honours", [(), (ROW_LIMITS,)])
def test_rows_of_different_limits_are_one_call_of_an_engine_that_honours_them(honours: tuple[str, ...]) -> None:
    calls: list[tuple[int, list[int], int]] = []

    def draw(request: EngineRequest, _: RolloutPlan) -> list[Completion]:
        calls.append((request.settings.max_new_tokens, request.limits, request.row_tokens))
        zeros = [torch.zeros(limit) for limit in request.limits]
        return [Completion(row.long(), row, row, finished=False) for row in zeros]

    adapter = CausalLMAdapter(tiny_model("qwen3"), pad_token_id=PAD_ID)
    config = GRPOConfig(use_cpu=True, report_to="none")
    context = EngineContext("own", adapter, config, total_bytes=1 << 35, room=lambda: 1 << 33)
    engine, settings = FunctionEngine(context, draw, honours=honours), SamplingSettings(9, ())
    drawn = engine.generate(PROMPTS, KEYS, settings, under(RolloutPlan()), limits=LIMITS)
    assert [len(row.ids) for row in drawn] == [limit for limit in LIMITS for _ in range(2)]
    apart = [(2, [2, 2], 4), (4, [4] * 4, 7)]
    assert calls == ([(4, [4, 4, 2, 2, 4, 4], 7)] if honours else apart)


def test_continuous_batching_keeps_to_each_rows_limit_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, settings = engines()[1], SamplingSettings(6, (), temperature=0.0)
    whole = engine.generate(PROMPTS, KEYS, settings, under(RolloutPlan()))
    calls: list[int] = []
    drawn_in = continuous._run
    monkeypatch.setattr(continuous, "_run", lambda *given: (calls.append(1), drawn_in(*given))[1])
    cut = engine.generate(PROMPTS, KEYS, settings, under(RolloutPlan()), limits=LIMITS)
    limits = [limit for limit in LIMITS for _ in range(2)]
    wanted = [row.ids[:limit].tolist() for row, limit in zip(whole, limits, strict=True)]
    assert [row.ids.tolist() for row in cut] == wanted
    assert calls == [1]


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
