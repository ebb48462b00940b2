"""vLLM itself, not a stand-in: runs where vLLM can be imported, such as the environment of `benchmarks.vllm_engine`."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model

pytest.importorskip("vllm", reason="vLLM is not installed; `python -m benchmarks.vllm_engine` makes an environment")

from memsafe_rl.errors import ConfigError, DataError, MemsafeError
from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.rollout.engines import vllm as engine_module
from memsafe_rl.rollout.engines.vllm import VLLMEngine, VLLMSettings
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings
from tests.rollout.external.common import adapter_of, gap, keys_of, nudge, prompts_of, settings_of, small_model

pytestmark = pytest.mark.filterwarnings("default")  # vLLM and what it imports warn of themselves

LENGTHS = (5, 9, 40)
PLAN = RolloutPlan(rows_in_flight=16)
AGREEMENT = 1e-4
"""Nats; what the log-probs of engine and trainer may differ by, both in float32."""


def engine_for(model: Any, *, room: int = 1 << 34, **settings: Any) -> VLLMEngine:
    return VLLMEngine(
        adapter_of(model), VLLMSettings(dtype="float32", **settings), total_bytes=1 << 35, room=lambda: room
    )


def draw(
    engine: VLLMEngine,
    settings: SamplingSettings,
    *,
    group: int = 3,
    plan: RolloutPlan = PLAN,
    lengths: tuple[int, ...] = LENGTHS,
) -> list[Completion]:
    return engine.generate(prompts_of(*lengths), keys_of(len(lengths), group), settings, under(plan))


@pytest.fixture
def engines() -> Iterator[list[VLLMEngine]]:
    made: list[VLLMEngine] = []
    yield made
    for engine in made:
        engine.close()


@pytest.mark.parametrize(
    ("arch", "tied"), [("qwen3", True), ("qwen3", False), ("gpt2", True), ("gemma3", True), ("moe", False)]
)
def test_logprobs_agree_after_every_synchronisation(arch: str, tied: bool, engines: list[VLLMEngine]) -> None:
    model, settings = small_model(arch, tied=tied), settings_of(temperature=0.8)
    engines.append(engine := engine_for(model))
    for version in range(3):
        engine.synchronise(version)
        rows = draw(engine, settings)
        assert gap(model, prompts_of(*LENGTHS), rows, settings, group=3) < AGREEMENT
        nudge(model, seed=version)
    stale = draw(engine, settings)  # not told of the last step
    assert gap(model, prompts_of(*LENGTHS), stale, settings, group=3) > 100 * AGREEMENT


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_reach_vllm_merged_and_the_base_stays_to_the_bit(dora: bool, engines: list[VLLMEngine]) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False, use_dora=dora)
    model = get_peft_model(small_model(), lora).eval()
    base = {name: tensor.clone() for name, tensor in model.state_dict().items() if "lora" not in name}
    engines.append(engine := engine_for(model))
    settings = settings_of()
    for version in range(2):
        engine.synchronise(version)
        assert gap(model, prompts_of(*LENGTHS), draw(engine, settings), settings, group=3) < AGREEMENT
        nudge(model)
    now = model.state_dict()
    assert all(torch.equal(now[name], tensor) for name, tensor in base.items() if "magnitude" not in name)


def test_weights_that_do_not_arrive_are_noticed(engines: list[VLLMEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    engines.append(engine := engine_for(model))
    engine.synchronise(0)
    draw(engine, settings_of())
    monkeypatch.setattr(engine_module, "hand_over", lambda *_: None)
    nudge(model)
    engine.synchronise(1)
    with pytest.raises(MemsafeError, match=r"nats from the model's after its weights were handed over"):
        draw(engine, settings_of())


def test_a_network_that_vllm_computes_otherwise_is_named(
    engines: list[VLLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    # without it, the CPU build goes on with the output head that it packed before any weight was handed over
    monkeypatch.setattr(engine_module, "_repack", lambda _: None)
    engines.append(engine := engine_for(small_model()))
    engine.synchronise(0)
    with pytest.raises(MemsafeError, match=r"does not compute what Qwen3ForCausalLM does"):
        draw(engine, settings_of())
    assert engine._engine is None


def test_sequences_depend_on_their_keys_and_not_on_what_runs_beside_them(engines: list[VLLMEngine]) -> None:
    model, settings = small_model(), settings_of(16)
    engines.append(engine := engine_for(model))
    engine.synchronise(0)
    whole = draw(engine, settings, group=4)
    few = draw(engine, settings, group=4, plan=RolloutPlan(rows_in_flight=2, prefill_tokens=8))
    assert [row.ids.tolist() for row in few] == [row.ids.tolist() for row in whole]
    assert len({tuple(row.ids.tolist()) for row in whole}) == len(whole)
    other = engine.generate(prompts_of(*LENGTHS), keys_of(3, 4, rollout=1), settings, under(PLAN))
    assert [row.ids.tolist() for row in other] != [row.ids.tolist() for row in whole]


def test_greedy_tokens_are_the_models(engines: list[VLLMEngine]) -> None:
    model, settings = small_model(), settings_of(temperature=0.0)
    engines.append(engine := engine_for(model))
    engine.synchronise(0)
    for prompt, row in zip(prompts_of(*LENGTHS), draw(engine, settings, group=1), strict=True):
        own = model.generate(prompt[None], max_new_tokens=12, do_sample=False, use_cache=True)[0, len(prompt) :]
        assert row.ids.tolist() == own[: len(row.ids)].tolist()


def test_only_the_runs_own_eos_ends_a_sequence(engines: list[VLLMEngine]) -> None:
    engines.append(engine := engine_for(small_model()))
    engine.synchronise(0)
    ends = tuple(range(2, 130))
    rows = draw(engine, SamplingSettings(12, ends), group=8)
    assert any(row.finished for row in rows)
    for row in rows:
        hits = [token in ends for token in row.ids.tolist()]
        assert hits[:-1] == [False] * (len(hits) - 1)
        assert row.finished == hits[-1]
        assert row.finished or len(row.ids) == 12


@pytest.mark.parametrize("kept", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}])
def test_logprobs_are_of_the_distribution_drawn_from(kept: dict[str, Any], engines: list[VLLMEngine]) -> None:
    model = small_model()
    engines.append(engine := engine_for(model))
    engine.synchronise(0)
    prompt = prompts_of(9)[0]
    rows = draw(engine, settings_of(1, temperature=0.7, **kept), group=64, lengths=(9,))
    with torch.no_grad():
        logits = model(input_ids=prompt[None]).logits[0, -1] / 0.7
    probs = logits.softmax(-1)
    order = probs.argsort(descending=True)
    if "top_k" in kept:
        stays = order[:3]
    elif "top_p" in kept:
        stays = order[: int((probs[order].cumsum(0) < 0.5).sum()) + 1]
    else:
        stays = (probs >= 0.3 * probs.max()).nonzero()[:, 0]
    wanted = torch.full_like(logits, float("-inf"))
    wanted[stays] = logits[stays]
    own = wanted.log_softmax(-1)
    for row in rows:
        assert abs(float(own[row.ids[0]]) - float(row.logprobs[0])) < AGREEMENT
        assert bool(row.model_logprobs.isnan().all())


def test_the_pool_follows_the_plan(engines: list[VLLMEngine]) -> None:
    engines.append(engine := engine_for(small_model()))
    engine.synchronise(0)
    # 2 x 4 bytes x 1 head x 32 wide x 2 layers x 32 tokens
    block = 2 * 4 * 32 * 2 * 32
    draw(engine, settings_of(), plan=RolloutPlan(rows_in_flight=9))
    assert held(engine) == (1 + 9 * 2) * block  # 52 tokens a row: 2 blocks; one that vLLM keeps
    draw(engine, settings_of(), plan=RolloutPlan(rows_in_flight=9, kv_bytes=8 * block))
    assert held(engine) == 8 * block
    draw(engine, settings_of(), plan=RolloutPlan(rows_in_flight=9, kv_bytes=1))
    assert held(engine) == (1 + 2) * block  # one row in any case
    rows = draw(engine, settings_of(), plan=RolloutPlan(rows_in_flight=9, kv_bytes=20 * block))
    assert held(engine) == 19 * block
    assert all(len(row.ids) == 12 or row.finished for row in rows)


def held(engine: VLLMEngine) -> int:
    """Bytes of vLLM's own cache tensors."""
    storages: dict[int, int] = {}
    for cache in engine._engine.model_executor.driver_worker.worker.model_runner.kv_caches:
        storages[cache.untyped_storage().data_ptr()] = cache.untyped_storage().nbytes()
    return sum(storages.values())


def test_a_pool_stays_for_rollouts_that_it_serves(engines: list[VLLMEngine]) -> None:
    engines.append(engine := engine_for(small_model()))
    engine.synchronise(0)
    draw(engine, settings_of())
    first = engine._engine
    draw(engine, settings_of(), lengths=(5, 9))
    assert engine._engine is first
    draw(engine, settings_of(), lengths=(200,), group=8)  # 8 x 7 blocks where 9 x 2 were asked for
    assert engine._engine is not first


def test_a_failure_ends_it_and_the_next_rollout_starts_anew(
    engines: list[VLLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, settings = small_model(), settings_of()
    engines.append(engine := engine_for(model))
    engine.synchronise(0)
    wanted = draw(engine, settings)
    before = children()
    for error, seen in (
        (RuntimeError("a kernel broke"), MemsafeError),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), torch.OutOfMemoryError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(type(engine._engine), "step", failing(error, after=4))
            with pytest.raises(seen) as caught:
                draw(engine, settings)
        assert engine._engine is None
        if seen is MemsafeError:
            assert "vLLM failed while it drew completions: RuntimeError: a kernel broke" in str(caught.value)
        del caught
        again = draw(engine, settings)
        assert [row.ids.tolist() for row in again] == [row.ids.tolist() for row in wanted]
    assert children() == before


def failing(error: BaseException, after: int) -> Any:
    from vllm import LLMEngine

    step, calls = LLMEngine.step, []

    def failing_step(self: Any) -> Any:
        calls.append(1)
        if len(calls) > after:
            raise error
        return step(self)

    return failing_step


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_closing_leaves_the_process_as_it_was() -> None:
    torch.manual_seed(1)
    wanted = torch.rand(3)
    variables, set_threads = dict(os.environ), torch.set_num_threads
    threads, alive = torch.get_num_threads(), threading.active_count()
    torch.manual_seed(1)
    engine = engine_for(small_model())
    engine.synchronise(0)
    draw(engine, settings_of())
    size, address = held(engine), pool_address(engine)
    engine.close()
    gc.collect()
    assert size > 0
    assert address not in {
        found.untyped_storage().data_ptr() for found in gc.get_objects() if type(found) is torch.Tensor
    }
    assert torch.equal(torch.rand(3), wanted)
    assert dict(os.environ) == variables
    assert torch.set_num_threads is set_threads
    assert torch.get_num_threads() == threads
    assert threading.active_count() <= alive + 1
    assert not torch.distributed.is_initialized()


def pool_address(engine: VLLMEngine) -> int:
    caches = engine._engine.model_executor.driver_worker.worker.model_runner.kv_caches
    return int(caches[0].untyped_storage().data_ptr())


def test_what_it_cannot_do_is_refused() -> None:
    engine = engine_for(small_model(), max_model_length=40)
    with pytest.raises(DataError, match=r"Prompt 0 has 0 tokens"):
        draw(engine, settings_of(), lengths=(0,))
    with pytest.raises(DataError, match=r"needs 268 tokens with its completion.*256"):
        draw(engine_for(small_model()), settings_of(), lengths=(256,))
    with pytest.raises(DataError, match=r"needs 52 tokens with its completion, but vllm_max_model_length is 40"):
        draw(engine, settings_of())
    with pytest.raises(ConfigError, match=r"vllm_enable_sleep_mode is True, but vLLM cannot sleep.*'cpu'"):
        engine_for(small_model(), sleeps=True)
    engine.check(settings_of(temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1))


def test_paths_of_temporary_files_are_gone(engines: list[VLLMEngine], tmp_path: Path) -> None:
    engines.append(engine := engine_for(small_model()))
    engine.synchronise(0)
    draw(engine, settings_of())
    assert not Path(engine._engine.model_config.model).exists()
