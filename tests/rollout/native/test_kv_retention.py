"""Caches kept between turns: the same tokens as without, fewer of them read, and never more bytes than allowed."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from memsafe_rl.accounting import host_memory
from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.models.language.causal_lm import CausalLMAdapter, check_head
from memsafe_rl.rollout.multi_turn.episode import turn_key
from memsafe_rl.rollout.multi_turn.roles import ModelRoles
from memsafe_rl.rollout.native import running_batch as native
from memsafe_rl.rollout.native.kv_retention import KeptCaches
from memsafe_rl.rollout.native.running_batch import generate
from memsafe_rl.rollout.native.sequences import admit
from memsafe_rl.types import Completion, Component, RolloutPlan, SamplingSettings, SequenceKey
from tests.rollout.native.test_kv_bound import _Watch
from tests.tiny import ARCHS, tiny_model

GROUP, PROMPTS, TURN, TOLD = 3, 2, 12, 5
ROOMY = RolloutPlan(kept_kv_bytes=2**30)
ENDS = tuple(range(2, 12))
"""So many tokens end a turn that the rows of a batch leave it at different times."""


def adapter_of(arch: str = "qwen3", **given: Any) -> CausalLMAdapter:
    adapter = CausalLMAdapter(tiny_model(arch, **given), pad_token_id=0)
    check_head(adapter)
    return adapter


class Reads:
    """Counts the tokens that an adapter reads."""

    def __init__(self, adapter: CausalLMAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens = 0
        for name in ("prefill", "extend"):
            monkeypatch.setattr(adapter, name, self._noting(getattr(adapter, name), 0 if name == "prefill" else 1))

    def _noting(self, function: Any, place: int) -> Any:
        def noted(*given: Any) -> Any:
            self.tokens += sum(len(row) for row in given[place])
            return function(*given)

        return noted


def ids_of(count: int, seed: int) -> list[int]:
    with host_memory():
        return torch.randint(20, 258, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def converse(
    adapter: Any, attempt: Any, kept: KeptCaches | None, turns: int = 3, *, cut: int = 0, skips: bool = False
) -> list[Completion]:
    """Draws some turns of a few episodes; each context holds the one before, but for its last `cut` drawn tokens."""
    contexts = {(p, s): ids_of(30 + 11 * p, p) for p in range(PROMPTS) for s in range(GROUP)}
    drawn: list[Completion] = []
    for turn in range(turns):
        asked: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for name, context in contexts.items():
            if not (skips and turn == 1 and name[1] == 1):
                asked.setdefault(tuple(context), []).append(name)
        keys = [[turn_key(SequenceKey(5, 0, *name), turn) for name in names] for names in asked.values()]
        with host_memory():
            prompts = [torch.tensor(context) for context in asked]
        rows = generate(adapter, prompts, keys, SamplingSettings(TURN, ENDS), attempt, kept=kept)
        drawn += rows
        for name, row in zip([name for names in asked.values() for name in names], rows, strict=True):
            mine = row.ids.tolist()
            contexts[name] = contexts[name] + mine[: max(1, len(mine) - cut)] + ids_of(TOLD, turn + 7 * name[1])
    return drawn


def assert_same(mine: Sequence[Completion], others: Sequence[Completion]) -> None:
    for one, other in zip(mine, others, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("cut", [0, 3])
def test_kept_caches_change_no_token(arch: str, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, kept = adapter_of(arch), KeptCaches()
    reads = Reads(adapter, monkeypatch)
    expected = converse(adapter, under(RolloutPlan()), KeptCaches(), cut=cut)
    dropped, reads.tokens = reads.tokens, 0
    assert_same(converse(adapter, under(ROOMY), kept, cut=cut), expected)
    assert kept.nbytes() > 0
    if cut == 0 or not any(adapter.geometry.windows):  # a window that has moved on cannot go back
        assert reads.tokens < 0.5 * dropped


PLANS = (
    replace(ROOMY, rows_in_flight=2),
    replace(ROOMY, rows_in_flight=5, prefill_tokens=16),
    replace(ROOMY, prefill_tokens=1),
    RolloutPlan(kept_kv_bytes=1),
)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("arch", ["qwen3", "gemma3"])
def test_plans_draw_alike(arch: str, plan: RolloutPlan) -> None:
    adapter = adapter_of(arch)
    expected = converse(adapter, under(RolloutPlan()), None, skips=True)
    assert_same(converse(adapter, under(plan), KeptCaches(), skips=True), expected)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen3", "gemma2"])
@pytest.mark.parametrize(("share", "cut"), [(1.0, 0), (0.7, 3), (0.5, 0), (0.3, 3)])
def test_the_cap_holds_for_what_waits_too(arch: str, share: float, cut: int) -> None:
    adapter = adapter_of(arch)
    geometry = adapter.geometry
    rows, longest = GROUP * PROMPTS, 41 + 3 * (TURN + TOLD)
    expected = converse(adapter, under(RolloutPlan()), None, cut=cut)
    cap = int(share * geometry.batch_kv_bytes(PROMPTS * geometry.prompt_kv_bytes(41), rows, longest - 41))
    cap = max(cap, geometry.batch_kv_bytes(geometry.prompt_kv_bytes(longest), 1, TURN))
    with SimulatedMemory() as memory:
        kept = KeptCaches()
        gc.collect()
        before = memory.live_bytes
        with _Watch(memory) as watch:
            rows_drawn = converse(adapter, under(RolloutPlan(kv_bytes=cap, kept_kv_bytes=2**30)), kept, cut=cut)
        assert kept.nbytes() == memory.live_by_component().get(Component.KV_CACHE, 0)
        assert watch.most <= cap
        if share == 1.0:
            assert kept.nbytes() > 0
        kept.clear()
        assert memory.live_bytes == before
    assert_same(rows_drawn, expected)


def with_lora() -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_model(), config)
    model.add_adapter("customer", config)
    return model


@pytest.mark.slow
def test_a_cache_is_read_under_the_adapters_that_made_it_and_no_others() -> None:
    """Three roles of one network take turns at the same episodes; each draws what it draws alone."""
    adapter = CausalLMAdapter(with_lora(), pad_token_id=0)
    check_head(adapter)
    hub, kept = ModelRoles(adapter), KeptCaches()
    alone = {}
    for role in ("agent", "base", "customer"):
        with hub.acting(role) as acting:
            alone[role] = converse(acting, under(RolloutPlan()), None, 2)
    for role in ("agent", "base", "customer", "default", "agent"):
        with hub.acting(role) as acting:
            assert_same(converse(acting, under(ROOMY), kept, 2), alone["agent" if role == "default" else role])
    own = []
    for role in ("agent", "base", "customer"):
        with hub.acting(role) as acting:
            found = kept.of(acting)
            assert found is not None
            own.append(found.take([(0, 0, 0)])[0])
    assert len({id(row) for row in own}) == 3


@pytest.mark.parametrize("replaced", [False, True])
def test_weights_that_moved_are_not_read_with_what_was_kept(replaced: bool) -> None:
    adapter, kept = adapter_of(), KeptCaches()
    converse(adapter, under(ROOMY), kept, 1)
    assert kept.nbytes() > 0
    weight = next(adapter.model.parameters())
    with torch.no_grad():
        if replaced:
            weight.data = weight.data * 1.5
        else:
            weight.mul_(1.5)
    expected = converse(adapter, under(RolloutPlan()), None, 1)
    found = kept.of(adapter)
    assert found is not None
    assert kept.nbytes() == 0
    assert_same(converse(adapter, under(ROOMY), kept, 1), expected)


@pytest.mark.slow
def test_caches_in_8_bits_are_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapter_of()
    adapter.cache_in_8_bits(True)
    reads = Reads(adapter, monkeypatch)
    expected = converse(adapter, under(RolloutPlan()), None)
    dropped, reads.tokens = reads.tokens, 0
    assert [row.ids.tolist() for row in converse(adapter, under(ROOMY), KeptCaches())] == [
        row.ids.tolist() for row in expected
    ]
    assert reads.tokens < 0.5 * dropped


def test_caches_of_transformers_own_are_dropped() -> None:
    adapter, kept = adapter_of(), KeptCaches()
    expected = converse(adapter, under(RolloutPlan()), None, 2)
    adapter.joins = False
    assert_same(converse(adapter, under(ROOMY), kept, 2), expected)
    assert kept.nbytes() == 0


def test_rows_of_episodes_that_are_over_go_first() -> None:
    adapter = adapter_of()
    over: set[tuple[int, int, int]] = set()
    names = [(0, prompt, sample) for prompt in range(PROMPTS) for sample in range(GROUP)]
    kept = KeptCaches(lambda: [SequenceKey(0, *name) for name in names if name not in over])
    converse(adapter, under(ROOMY), kept, 2)
    found = kept.of(adapter)
    assert found is not None
    over |= {(0, 0, 1), (0, 1, 1)}
    kept.shrink(kept.nbytes() - 1, ())
    assert [name for name in names if name in found.rows] == [name for name in names if name[2] != 1]
    kept.shrink(0, ())
    assert kept.nbytes() == 0


@pytest.mark.slow
def test_every_refused_allocation_leaves_the_same_tokens() -> None:
    """A failure gives up all that was kept, and later turns read again."""
    adapter = adapter_of()
    expected = converse(adapter, under(RolloutPlan()), None, 2)
    with SimulatedMemory() as memory:
        converse(adapter, under(ROOMY), KeptCaches(), 2)
        allocations = memory.allocations
    for place in range(5, allocations, allocations // 25):
        kept = KeptCaches()
        with SimulatedMemory(fail_at=place) as memory:
            drawn = converse(adapter, twice, kept, 2)
            assert memory.refusals == 1
            kept.clear()
            assert memory.live_by_component().get(Component.KV_CACHE, 0) == 0
        assert_same(drawn, expected)


def twice(unit: Any, undo: Any) -> Any:
    """Runs a unit again after its first failure."""
    try:
        return unit(ROOMY)
    except torch.OutOfMemoryError:
        pass
    undo()
    return unit(ROOMY)


@pytest.mark.parametrize("kept_kv_bytes", [1, 60_000])
def test_rows_that_end_with_their_first_token_wait_within_the_limit_too(kept_kv_bytes: int) -> None:
    """Each turn may be over before its rows have joined the batch."""
    adapter, kept = adapter_of(), KeptCaches()
    plan = RolloutPlan(rows_in_flight=2, prefill_tokens=7, kept_kv_bytes=kept_kv_bytes)
    with host_memory():
        prompts = [torch.tensor(ids_of(40, seed)) for seed in range(6)]
    keys = [[SequenceKey(5, 0, prompt, 0)] for prompt in range(6)]
    generate(adapter, prompts, keys, SamplingSettings(1, ENDS), under(plan), kept=kept)
    assert kept.nbytes() <= kept_kv_bytes
    assert (kept.nbytes() > 0) == (kept_kv_bytes > 1)


def test_a_row_that_is_read_anew_counts_as_one_that_was_never_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept of it is gone after a failure, so that its whole context lies in a block of prompts again."""
    adapter, kept = adapter_of(), KeptCaches()
    key = SequenceKey(5, 0, 0, 0)
    with host_memory():
        short, long = (torch.tensor(ids_of(count, 1)) for count in (8, 80))
    generate(adapter, [short], [[key]], SamplingSettings(1, ENDS), under(ROOMY), kept=kept)
    assert kept.nbytes() > 0
    asked, step = [], adapter.decode_step

    def noted(found: Any, *given: Any, **named: Any) -> int:
        asked.append(found)
        return admit(found, *given, **named)

    monkeypatch.setattr(native, "admit", noted)

    def failing(*given: Any) -> Any:
        monkeypatch.setattr(adapter, "decode_step", step)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(adapter, "decode_step", failing)
    generate(adapter, [long], [[key]], SamplingSettings(4, ()), twice, kept=kept)
    kept_row, read_anew = (found[0] for found in asked)
    assert (kept_row.is_kept, read_anew.is_kept) == (True, False)
    assert kept_row.max_new_tokens == 80 - 8 + 4
    assert read_anew.max_new_tokens == 4
