"""A rollout's cache, by the allocator's own count, never passes what the plan and the formula allow."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.models.language.causal_lm import CausalLMAdapter, check_head
from memsafe_rl.rollout.native.running_batch import generate
from memsafe_rl.types import Completion, Component, ModelGeometry, RolloutPlan, SamplingSettings, SequenceKey
from tests.tiny import ARCHS, tiny_model

GROUP = 4
NEW = 40


def prompts_of(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, 258, (length,), generator=generator) for length in lengths]


def keys_of(count: int, group: int) -> list[list[SequenceKey]]:
    return [[SequenceKey(1, 0, prompt, sample) for sample in range(group)] for prompt in range(count)]


class _Watch(TorchFunctionMode):
    """Reads the allocator's count of the cache after every call that makes or fills a large tensor; keeps the highest.

    Every operator would take ten times as long, and the smallest tensor of a cache here has more elements than `LARGE`.
    """

    LARGE = 500

    def __init__(self, memory: SimulatedMemory) -> None:
        super().__init__()
        self.memory, self.most = memory, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        touched = result if isinstance(result, torch.Tensor) else args[0] if args else None
        if isinstance(touched, torch.Tensor) and touched.nelement() > self.LARGE:
            self.most = max(self.most, self.memory.live_by_component().get(Component.KV_CACHE, 0))
        return result


def peaks(
    adapter: CausalLMAdapter, lengths: tuple[int, ...], plan: RolloutPlan, eos: tuple[int, ...]
) -> tuple[int, int, list[Completion]]:
    """Most bytes of the cache at any moment, what is left afterwards, and the completions."""
    settings = SamplingSettings(NEW, eos)
    with SimulatedMemory() as memory:
        gc.collect()
        before = memory.live_bytes
        with _Watch(memory) as watch:
            rows = generate(adapter, prompts_of(lengths), keys_of(len(lengths), GROUP), settings, under(plan))
        assert memory.live_bytes == before  # completions lie on the host
        return watch.most, memory.live_by_component().get(Component.KV_CACHE, 0), rows


def formula(geometry: ModelGeometry, lengths: tuple[int, ...], rows: int) -> int:
    """Prompts once, completions for the rows in flight, in whole blocks, one tensor of a layer twice while it grows."""
    prompts = len(lengths) * geometry.kv_bytes(max(lengths))
    return geometry.batch_kv_bytes(prompts, rows, NEW)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "eos"), [*((arch, ()) for arch in ARCHS), *((arch, tuple(range(2, 9))) for arch in ("qwen3", "gemma3"))]
)
def test_a_cache_stays_below_the_formula(arch: str, eos: tuple[int, ...]) -> None:
    adapter = CausalLMAdapter(tiny_model(arch, layers=2), pad_token_id=0)
    check_head(adapter)
    lengths = (50, 49, 20)
    for rows in (12, 6):
        most, left, _ = peaks(adapter, lengths, RolloutPlan(rows_in_flight=rows), eos)
        assert left == 0
        assert most <= formula(adapter.geometry, lengths, rows)
        if not eos and rows == 12:
            assert most >= 0.8 * formula(adapter.geometry, lengths, rows)


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("arch", ["qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("prefill_tokens", [512, 64, 5])
def test_reading_long_prompts_keeps_to_the_cap_of_one_row(arch: str, prefill_tokens: int) -> None:
    """Windowed layers hand in whole prompts; pieces of a prompt lie beside the longer one."""
    adapter = CausalLMAdapter(tiny_model(arch, layers=2), pad_token_id=0)
    check_head(adapter)
    prompts, keys, settings = prompts_of((120, 120)), keys_of(2, 1), SamplingSettings(3, ())
    expected = generate(adapter, prompts, keys, settings, under(RolloutPlan()))
    cap = adapter.geometry.batch_kv_bytes(adapter.geometry.prompt_kv_bytes(120), 1, 3)
    with SimulatedMemory() as memory, _Watch(memory) as watch:
        plan = under(RolloutPlan(kv_bytes=cap, prefill_tokens=prefill_tokens))
        rows = generate(adapter, prompts, keys, settings, plan)
    assert 0 < watch.most <= cap
    assert [row.ids.tolist() for row in rows] == [row.ids.tolist() for row in expected]


@pytest.mark.slow
def test_one_row_of_many_leaves_within_the_cap() -> None:
    adapter = CausalLMAdapter(tiny_model("qwen3", layers=2), pad_token_id=0)
    check_head(adapter)
    prompts, keys, begun = prompts_of((3,)), keys_of(1, 8), [5] * 7 + [30]
    whole = generate(adapter, prompts, keys, SamplingSettings(NEW, ()), under(RolloutPlan()))
    earlier = [[part_of(row, drawn) for row, drawn in zip(whole, begun, strict=True)]]
    cap = adapter.geometry.batch_kv_bytes(adapter.geometry.prompt_kv_bytes(3), 8, NEW)
    with SimulatedMemory() as memory, _Watch(memory) as watch:
        plan = under(RolloutPlan(kv_bytes=cap))
        rows = generate(adapter, prompts, keys, SamplingSettings(NEW, ()), plan, begun=earlier)
    assert watch.most <= cap
    assert [row.ids.tolist() for row in rows] == [row.ids.tolist() for row in whole]


def part_of(row: Completion, drawn: int) -> Completion:
    return Completion(row.ids[:drawn], row.logprobs[:drawn], row.model_logprobs[:drawn], finished=False)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen3", "gemma3"])
def test_a_cap_on_the_cache_is_never_passed(arch: str) -> None:
    adapter = CausalLMAdapter(tiny_model(arch, layers=2), pad_token_id=0)
    check_head(adapter)
    lengths, eos = (50, 49, 20, 33), tuple(range(2, 9))
    whole, _, expected = peaks(adapter, lengths, RolloutPlan(rows_in_flight=100), eos)
    for share in (0.9, 0.5, 0.2):
        cap = int(share * formula(adapter.geometry, lengths, 16))
        most, left, rows = peaks(adapter, lengths, RolloutPlan(rows_in_flight=100, kv_bytes=cap), eos)
        assert most <= min(cap, whole), share
        assert left == 0
        assert [row.ids.tolist() for row in rows] == [row.ids.tolist() for row in expected], share


@pytest.mark.slow
def test_a_prompt_is_paid_for_once_however_many_follow_it() -> None:
    adapter = CausalLMAdapter(tiny_model("qwen3", layers=2), pad_token_id=0)
    one, _, _ = peaks(adapter, (160,), RolloutPlan(rows_in_flight=1), ())
    all_of_them, _, _ = peaks(adapter, (160,), RolloutPlan(rows_in_flight=GROUP), ())
    slots = adapter.geometry.kv_bytes(96)
    assert all_of_them - one <= (GROUP - 1) * slots * (1 + 1 / 8)
