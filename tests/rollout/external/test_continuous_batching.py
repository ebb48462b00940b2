"""transformers' continuous batching as an engine: its log-probs, its bytes, and its failures made errors again."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.generation.continuous_batching import cache as cb_cache
from transformers.generation.continuous_batching import model_runner

from memsafe_rl.errors import ConfigError, DataError, MemsafeError
from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.rollout.engine import RolloutEngine
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings
from tests.rollout.external.common import (
    EOS,
    adapter_of,
    engine_of,
    gap,
    keys_of,
    nudge,
    prompts_of,
    settings_of,
    small_model,
)

LENGTHS = (5, 9, 40)
PLAN = RolloutPlan(rows_in_flight=16)
BLOCK = 2 * 4 * 32 * 2 * 32
"""Bytes of a block: keys and values, float32, one head 32 wide, two layers, 32 tokens."""


def engine_for(model: Any, room: int = 1 << 33, **options: Any) -> RolloutEngine:
    return engine_of("continuous", adapter_of(model), room=room, **options)


def draw(
    engine: RolloutEngine, settings: SamplingSettings, plan: RolloutPlan = PLAN, group: int = 3
) -> list[Completion]:
    return engine.generate(prompts_of(*LENGTHS), keys_of(len(LENGTHS), group), settings, under(plan))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen3", "gpt2", "gemma3"])
def test_logprobs_are_the_models_own(arch: str) -> None:
    model, settings = small_model(arch), settings_of(temperature=0.8)
    engine = engine_for(model)
    before = model.config._attn_implementation
    for _ in range(2):
        rows = draw(engine, settings)
        assert gap(model, prompts_of(*LENGTHS), rows, settings, group=3) < 1e-4  # float32
        assert all(row.finished == (int(row.ids[-1]) == EOS) for row in rows)
        nudge(model)
    assert model.config._attn_implementation == before


@pytest.mark.slow
def test_an_adapter_takes_part() -> None:
    model = get_peft_model(small_model(), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)).eval()
    model.train()
    rows = draw(engine_for(model), settings_of())
    assert model.training
    assert gap(model.eval(), prompts_of(*LENGTHS), rows, settings_of(), group=3) < 1e-4


@pytest.mark.slow
def test_greedy_tokens_are_generates() -> None:
    model = small_model()
    rows = draw(engine_for(model), settings_of(temperature=0.0), group=1)
    for prompt, row in zip(prompts_of(*LENGTHS), rows, strict=True):
        own = model.generate(prompt[None], max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        assert row.ids.tolist() == own[: len(row.ids)].tolist()


@pytest.mark.slow
def test_a_rollout_repeats_and_moves_no_random_state() -> None:
    engine = engine_for(small_model())
    torch.manual_seed(4)
    wanted = torch.rand(3)
    torch.manual_seed(4)
    first = draw(engine, settings_of())
    assert torch.equal(torch.rand(3), wanted)
    second = draw(engine, settings_of())
    assert [row.ids.tolist() for row in first] == [row.ids.tolist() for row in second]
    other = engine.generate(prompts_of(*LENGTHS), keys_of(3, 3, rollout=1), settings_of(), under(PLAN))
    assert [row.ids.tolist() for row in other] != [row.ids.tolist() for row in first]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "room", "blocks"),
    [
        (RolloutPlan(rows_in_flight=9), 1 << 33, 9 * 2),  # 52 tokens a row at most
        (RolloutPlan(rows_in_flight=4), 1 << 33, 4 * 2),
        (RolloutPlan(rows_in_flight=9, kv_bytes=10 * BLOCK), 1 << 33, 8),  # two are for padding
        (RolloutPlan(rows_in_flight=9), 9 * BLOCK, 7),
        (RolloutPlan(rows_in_flight=9, kv_bytes=1), 1 << 33, 2),  # one row in any case
    ],
)
def test_the_cache_follows_plan_and_budget(
    plan: RolloutPlan, room: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    built = cb_cache.PagedAttentionCache.__init__

    def noted(self: Any, *arguments: Any, **named: Any) -> None:
        built(self, *arguments, **named)
        sizes.append(self.cache_tensor.nbytes)

    monkeypatch.setattr(cb_cache.PagedAttentionCache, "__init__", noted)
    rows = draw(engine_for(small_model(), room), settings_of(), plan)
    assert sizes == [(blocks + 2) * BLOCK]
    assert all(row.finished or len(row.ids) == 12 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), torch.OutOfMemoryError),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you"
                      " tried to allocate 8 bytes."), torch.OutOfMemoryError),
        (RuntimeError("a kernel broke"), MemsafeError),
        (KeyError("a table"), MemsafeError),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_failure_in_its_thread_is_raised_here(
    error: Exception, seen: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model()
    engine = engine_for(model)
    wanted = draw(engine, settings_of())
    alive = set(threading.enumerate())
    sample, calls = model_runner.ModelRunner._sample, []

    def failing(self: Any, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise error
        sample(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(model_runner.ModelRunner, "_sample", failing)
        with pytest.raises(seen, match="continuous batching failed") as caught:
            draw(engine, settings_of())
    assert error.args[0] in str(caught.value)
    assert error.__traceback__ is None
    assert set(threading.enumerate()) <= alive
    again = draw(engine, settings_of())
    assert [row.ids.tolist() for row in again] == [row.ids.tolist() for row in wanted]


@pytest.mark.slow
def test_a_cache_that_cannot_be_had_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()

    def refused(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB")

    alive, engine = set(threading.enumerate()), engine_for(model)
    with monkeypatch.context() as patched:
        patched.setattr(cb_cache.torch, "zeros", refused)
        with pytest.raises(torch.OutOfMemoryError, match="continuous batching failed: CUDA out of memory"):
            draw(engine, settings_of())
    assert set(threading.enumerate()) <= alive
    assert len(draw(engine_for(model), settings_of())) == 9


@pytest.mark.slow
def test_an_interrupt_does_not_wait_for_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = set(threading.enumerate())

    def interrupted(*_: int) -> None:
        raise KeyboardInterrupt

    engine = engine_for(small_model())
    with pytest.raises(KeyboardInterrupt):
        engine.generate(
            prompts_of(5, 9), keys_of(2, 4), settings_of(100), under(RolloutPlan(rows_in_flight=1)), interrupted
        )
    assert set(threading.enumerate()) <= alive


def test_what_it_would_drop_is_refused() -> None:
    engine = engine_for(small_model())
    with pytest.raises(DataError, match=r"Prompt 1 has 0 tokens"):
        engine.generate(prompts_of(4, 0), keys_of(2, 1), settings_of(), under(PLAN))
    engine.check(settings_of(temperature=0.5, top_k=4, top_p=0.9))
    for name, value in (("min_p", 0.1), ("repetition_penalty", 1.2)):
        with pytest.raises(ConfigError, match=rf"{name} is {value}, which the rollout engine 'continuous'"):
            engine.check(settings_of(**{name: value}))
    with pytest.raises(ConfigError, match=r"num_blocks=4, but sizes follow the memory plan"):
        engine_for(small_model(), num_blocks=4)
    with pytest.raises(ConfigError, match=r"return_logprobs=True, which follows from the run"):
        engine_for(small_model(), return_logprobs=True)
    with pytest.raises(ConfigError, match=r"page_sise=4, which this transformers does not have"):
        engine_for(small_model(), page_sise=4)
