"""The estimates against the allocator's count, on networks of several kinds, trained whole and by LoRA."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from benchmarks.small import small_t5
from memsafe_rl.memory.planning.estimator import rollout_parts, score_parts, update_parts, wave_rows
from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.micro_batches import cut_by_tokens, measure_slices
from memsafe_rl.models.language.base import LanguageAdapter
from memsafe_rl.models.language.causal_lm import CausalLMAdapter
from memsafe_rl.models.language.factory import adapter_for
from memsafe_rl.rollout.native.running_batch import generate
from memsafe_rl.rollout.native.sequences import Candidate, admit
from memsafe_rl.rollout.scoring import score_all
from memsafe_rl.training.gradient import StepTerms, accumulate_gradient
from memsafe_rl.types import (
    Component,
    Denominators,
    LossSettings,
    ModelGeometry,
    Ragged,
    RolloutPlan,
    RolloutWork,
    SamplingSettings,
    SequenceKey,
    Trajectory,
    UpdatePlan,
    UpdateWork,
)
from tests.tiny import tiny_model

LEAST, MOST = 0.6, 1.7
"""What the estimator's docstring promises, estimate over measurement."""
LEAST_OF_T5, MOST_OF_T5 = 0.45, 1.9

PROMPTS, COMPLETIONS = (40, 60), (20, 100, 30, 60)


def network(arch: str, layers: int, hidden: int, vocab: int, *, lora: str | list[str] | None, dtype: str) -> Any:
    model = tiny_model(
        arch, layers=layers, hidden=hidden, vocab_size=vocab, dtype=getattr(torch, dtype), scale=1.0, positions=512
    )
    return model if lora is None else get_peft_model(model, LoraConfig(r=8, target_modules=lora)).eval()


NETWORKS = {
    "qwen3": lambda: network("qwen3", 4, 96, 2000, lora=None, dtype="float32"),
    "qwen3-bf16": lambda: network("qwen3", 3, 96, 500, lora=None, dtype="bfloat16"),
    "qwen2-bf16-lora-everywhere": lambda: network("qwen2", 3, 96, 500, lora="all-linear", dtype="bfloat16"),
    "llama-lora": lambda: network("llama", 4, 96, 1000, lora=["q_proj", "v_proj"], dtype="float32"),
    "t5": lambda: small_t5(2000, hidden=96, layers=3),
    "t5-lora": lambda: get_peft_model(
        small_t5(1000, hidden=96, layers=3), LoraConfig(r=8, target_modules=["q", "v"])
    ).eval(),
    "gpt2": lambda: network("gpt2", 2, 64, 4000, lora=None, dtype="float32"),
}


@pytest.fixture(scope="module", params=list(NETWORKS))
def adapter(request: pytest.FixtureRequest) -> LanguageAdapter:
    return adapter_for(NETWORKS[request.param](), pad_token_id=0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products are slowed down by a second thread, and its scratch would count."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trajectory(
    vocab: int, prompts: tuple[int, ...] = PROMPTS, completions: tuple[int, ...] = COMPLETIONS
) -> Trajectory:
    generator = torch.Generator().manual_seed(0)

    def drawn(lengths: tuple[int, ...]) -> Ragged:
        return Ragged.from_rows([torch.randint(2, vocab, (length,), generator=generator) for length in lengths])

    actions, rows = drawn(completions), len(completions)
    return Trajectory(
        conditions=drawn(prompts),
        condition_of_row=tuple(row * len(prompts) // rows for row in range(rows)),
        actions=actions,
        loss_mask=Ragged(torch.ones_like(actions.flat, dtype=torch.uint8), actions.lengths),
        sampling_logprobs=None,
        advantages=torch.linspace(-1, 1, rows) + 0.1,
        group_of_row=(0,) * rows,
        finished=(True,) * rows,
    )


def measured_update(
    adapter: LanguageAdapter, plan: UpdatePlan, store: Trajectory | None = None
) -> tuple[int, UpdateWork]:
    store = trajectory(adapter.geometry.vocab_size) if store is None else store
    rows, tokens = range(len(store)), sum(store.actions.lengths)
    terms = StepTerms(LossSettings(), Denominators(len(store), tokens, tokens), temperature=1.0, with_entropy=True)
    with SimulatedMemory() as memory:
        accumulate_gradient(adapter, store, rows, plan, terms, autocast=nullcontext, scale=lambda loss: loss)
    adapter.model.zero_grad(set_to_none=True)
    return memory.peak_bytes, adapter.work(store, rows, packable=False)


def assert_near(adapter: LanguageAdapter, ratio: float) -> None:
    least, most = (LEAST, MOST) if isinstance(adapter, CausalLMAdapter) else (LEAST_OF_T5, MOST_OF_T5)
    assert least <= ratio <= most


@pytest.mark.slow_after(10)
@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("tokens", "tile"), [(100_000, 512), (160, 16)])
def test_an_update_holds_what_was_estimated(
    adapter: LanguageAdapter, tokens: int, tile: int, checkpointing: bool, offload: bool
) -> None:
    plan = UpdatePlan(tokens, tile, checkpointing=checkpointing, offload_activations=offload)
    peak, work = measured_update(adapter, plan)
    assert_near(adapter, sum(update_parts(work, plan).values()) / peak)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "t5-lora"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lengths", [(8, 400), (400, 8), (300, 300)])
def test_scores_of_long_rows_with_a_bias_were_estimated(
    name: str, checkpointing: bool, lengths: tuple[int, int]
) -> None:
    adapter, (prompt, completion) = adapter_for(NETWORKS[name](), pad_token_id=0), lengths
    store = trajectory(500, (prompt, prompt - 1), (completion,) * 4)
    plan = UpdatePlan(100_000, 64, checkpointing=checkpointing)
    peak, work = measured_update(adapter, plan, store)
    assert_near(adapter, sum(update_parts(work, plan).values()) / peak)


@pytest.mark.parametrize(("tokens", "tile"), [(100_000, 512), (50, 64)])
def test_scoring_holds_what_was_estimated(adapter: LanguageAdapter, tokens: int, tile: int) -> None:
    store, plan = trajectory(adapter.geometry.vocab_size), RolloutPlan(score_tokens=tokens)
    with SimulatedMemory() as memory:
        score_all(adapter, store, range(len(store)), temperature=1.0, attempt=under(plan), tile=tile)
    work = adapter.work(store, range(len(store)), packable=False)
    assert_near(adapter, sum(score_parts(work, plan, tile).values()) / memory.peak_bytes)


@pytest.mark.slow_after(6)
@pytest.mark.parametrize(
    ("prompts", "group", "new", "rows"), [((64, 64), 8, 12, 64), ((30, 50), 2, 12, 2), ((100,), 2, 4, 64)]
)
@pytest.mark.parametrize("in_8_bits", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rollout_holds_what_was_estimated(
    adapter: LanguageAdapter, prompts: tuple[int, ...], group: int, new: int, rows: int, in_8_bits: bool
) -> None:
    adapter.cache_in_8_bits(in_8_bits)
    ids = [torch.full((length,), 7) for length in prompts]
    keys = [[SequenceKey(0, 0, prompt, sample) for sample in range(group)] for prompt in range(len(prompts))]
    plan = RolloutPlan(rows_in_flight=rows)
    with SimulatedMemory() as memory:
        generate(adapter, ids, keys, SamplingSettings(new, ()), under(plan))
    work = RolloutWork(prompts, group, new, adapter.geometry)
    assert_near(adapter, sum(rollout_parts(work, plan).values()) / memory.peak_bytes)


GEOMETRY = ModelGeometry(4, 64, 128, 4, 2, 16, 1000, 2048, (None, None, None, 32), 10**6, 10**6, 4, 4)


def test_slices_are_those_that_rows_are_cut_into() -> None:
    lengths, actions = (100, 30, 70, 40, 30, 20, 90), (50, 5, 20, 10, 30, 1, 45)
    for budget in (1, 60, 100, 150, 230, 1000):
        slices = cut_by_tokens(lengths, budget)
        measured = measure_slices(UpdateWork(lengths, actions, GEOMETRY), budget, packed=False)
        assert measured.number == len(slices)
        assert measured.tokens == max(len(part) * max(lengths[row] for row in part) for part in slices)
        assert measured.actions == max(sum(actions[row] for row in part) for part in slices)
        assert measured.total == sum(len(part) * max(lengths[row] for row in part) for part in slices)
    assert measure_slices(UpdateWork((), (), GEOMETRY), 10, packed=True) == (1, 1, 1, 1)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("plan", [RolloutPlan(rows) for rows in (1, 2, 5, 8, 24, 100)])
def test_rows_are_those_that_a_rollout_takes_in(plan: RolloutPlan, shares: bool) -> None:
    work = RolloutWork((30, 25, 20), 8, 10, replace(GEOMETRY, shares_prompts=shares))
    caps = (3 * work.geometry.kv_bytes(40), work.geometry.batch_kv_bytes(2 * work.geometry.kv_bytes(30), 12, 10))
    for full in (plan, *(RolloutPlan(plan.rows_in_flight, kv_bytes=cap, prefill_tokens=60) for cap in caps)):
        waiting = [Candidate(prompt, work.prompt_tokens[prompt], 0, 10) for prompt in range(3) for _ in range(8)]
        inside: list[Candidate] = []
        while count := admit(
            waiting, full, work.geometry, rows=len(inside), prompt_bytes=held_bytes(work, inside) if shares else 0
        ):
            inside, waiting = [*inside, *waiting[:count]], waiting[count:]
            if not waiting or not shares:
                break
        rows, prompts = wave_rows(work, full)
        assert len(inside) <= rows
        assert len({one.prompt for one in inside}) <= prompts + 1


def held_bytes(work: RolloutWork, rows: list[Candidate]) -> int:
    return sum(work.geometry.kv_bytes(work.prompt_tokens[prompt]) for prompt in {one.prompt for one in rows})


def test_gradients_and_the_heads_own_are_counted() -> None:
    work = UpdateWork((10, 10), (5, 5), GEOMETRY)
    parts = update_parts(work, UpdatePlan(micro_batch_tokens=10, logprob_tile=1))
    # The second micro-batch starts with all gradients there and makes the head's once more, in float32.
    assert parts[Component.GRADIENTS] == GEOMETRY.trainable_bytes + 4 * 1000 * 64
    assert sum(update_parts(work, UpdatePlan(20, 1)).values()) <= sum(parts.values()) + 10 * 10_000


@pytest.mark.parametrize(
    "lower",
    [
        lambda plan: UpdatePlan(plan.micro_batch_tokens // 2, plan.logprob_tile),
        lambda plan: UpdatePlan(plan.micro_batch_tokens, plan.logprob_tile // 2),
        lambda plan: UpdatePlan(plan.micro_batch_tokens, plan.logprob_tile, checkpointing=True),
        lambda plan: UpdatePlan(plan.micro_batch_tokens, plan.logprob_tile, offload_activations=True),
    ],
)
def test_every_fallback_of_an_update_lowers_its_estimate(lower: Callable[[UpdatePlan], UpdatePlan]) -> None:
    work = UpdateWork((400,) * 64, (200,) * 64, GEOMETRY)
    plan = UpdatePlan(6400, 3200, trajectory_device="device")
    assert sum(update_parts(work, lower(plan)).values()) < sum(update_parts(work, plan).values())
