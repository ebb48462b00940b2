"""Turns that episodes share are run once; trees of rows, whole or walked depth first, learn what rows learn."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.unique_tokens import lay_out
from memsafe_rl.memory.runtime.recovery import flush_autograd
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.micro_batches import Walk, cut_trees, measure_slices, packed_tokens, pieces_of, token_work
from memsafe_rl.models.language.causal_lm import CausalLMAdapter
from memsafe_rl.models.language.packing import pack_rows
from memsafe_rl.prefix_tree import MOST_LEVELS
from memsafe_rl.preflight.worst_rows import tried_places
from memsafe_rl.training.gradient import StepGradient, StepTerms, accumulate_gradient
from memsafe_rl.types import Denominators, LossSettings, Trajectory, UpdatePlan
from tests.models.language.test_packing import InDouble, adapter_of, distance, model_of

FAMILIES = ("qwen3", "gpt2", "gemma2", "gemma3", "qwen3_moe", "gpt_oss", "deepseek")


def episodes(
    seed: int, count: int = 3, turns: int = 4, *, rewrites: bool, least: int = 16, most: int = 28
) -> Trajectory:
    """Rows of turns behind one prompt: a later turn sees earlier ones whole, or rewritten, without their first part."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def words() -> Tensor:
        return torch.randint(2, 258, (rng.randint(least, most),), generator=generator)

    start, rows = words(), []
    for _ in range(count):
        context = start
        for _ in range(rng.randint(1, turns)):
            thought, said = words(), words()
            rows.append((context, torch.cat([thought, said])))
            context = torch.cat([context, *([] if rewrites else [thought]), said, words()])
    rng.shuffle(rows)
    return lay_out(rows)


def terms_of(trajectory: Trajectory, level: str = "token") -> StepTerms:
    tokens = sum(trajectory.counted_actions)
    settings = LossSettings(importance_sampling_level=level)
    return StepTerms(settings, Denominators(len(trajectory), tokens, tokens), 1.0, True, entropy_coef=0.1)


def learn(
    adapter: CausalLMAdapter, trajectory: Trajectory, plan: UpdatePlan, level: str = "token"
) -> tuple[StepGradient, Tensor]:
    """What a step leaves, and its gradient."""
    adapter.model.zero_grad()
    rows, terms = range(len(trajectory)), terms_of(trajectory, level)
    step = accumulate_gradient(
        adapter, trajectory, rows, plan, terms, autocast=nullcontext, scale=lambda loss: 3.0 * loss
    )
    return step, torch.cat([one.grad.flatten() for one in adapter.model.parameters() if one.grad is not None])


def plans(trajectory: Trajectory, adapter: CausalLMAdapter) -> list[int]:
    """Budgets: all at once, one path and a row beside it, and in between."""
    work = adapter.work(trajectory, range(len(trajectory)))
    longest, all_tokens = max(work.row_tokens), work.packed_tokens
    assert any(isinstance(part, Walk) for part in cut_trees(work, longest))
    return [all_tokens, longest, longest + 40, (longest + all_tokens) // 2]


PLAIN = UpdatePlan(micro_batch_tokens=400)


@pytest.mark.slow
@pytest.mark.parametrize("rewrites", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_in_double_nothing_but_rounding_differs(family: str, rewrites: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memsafe_rl.micro_batches._LEAST_TRUNK", 8)
    trajectory = episodes(len(family), rewrites=rewrites)
    with InDouble():
        adapter = adapter_of(model_of(family, torch.float64))
        plain, wanted = learn(adapter, trajectory, PLAIN)
        for tokens in plans(trajectory, adapter):
            plan = UpdatePlan(micro_batch_tokens=tokens, pack_prompts=True, logprob_tile=32)
            step, found = learn(adapter, trajectory, plan)
            assert distance(found, wanted) < 1e-12, tokens
            drawn = torch.cat([plain.logprobs[row] for row in step.logprobs])
            assert distance(torch.cat([*step.logprobs.values()]), drawn) < 1e-12
            assert float(step.loss) == pytest.approx(float(plain.loss), rel=1e-11, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("window", [2, 7, 20, 33, 64, 100])
def test_a_window_counts_positions_across_trunks(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memsafe_rl.micro_batches._LEAST_TRUNK", 8)
    trajectory = episodes(window, rewrites=True)
    adapter = adapter_of(model_of("gemma3", window=window, layers=3))
    _, wanted = learn(adapter, trajectory, PLAIN)
    for tokens in plans(trajectory, adapter):
        _, found = learn(adapter, trajectory, UpdatePlan(micro_batch_tokens=tokens, pack_prompts=True))
        assert distance(found, wanted) < 3e-6


@pytest.mark.slow
@pytest.mark.parametrize("rewrites", [True, False])
@pytest.mark.parametrize("how", ["checkpointing", "offload_activations"])
def test_activations_made_anew_or_moved_change_no_bit(
    how: str, rewrites: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memsafe_rl.micro_batches._LEAST_TRUNK", 8)
    trajectory, adapter = episodes(5, rewrites=rewrites), adapter_of(model_of("qwen3"))
    for tokens in plans(trajectory, adapter):
        plan = UpdatePlan(micro_batch_tokens=tokens, pack_prompts=True)
        _, wanted = learn(adapter, trajectory, plan)
        _, found = learn(adapter, trajectory, replace(plan, **{how: True}))
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("seed", range(6))
def test_random_trees_are_cut_into_passes_that_fit(seed: int) -> None:
    """Every row in one pass, what is held and run within the budget, and nothing run twice that is held."""
    rng = random.Random(seed)
    trajectory = episodes(seed, count=rng.randint(1, 6), turns=8, rewrites=bool(seed % 2), least=4, most=90)
    geometry = adapter_of(model_of("qwen3")).geometry
    rows = rng.sample(range(len(trajectory)), rng.randint(1, len(trajectory)))
    work = token_work(trajectory, rows, geometry, packs=True)
    assert work.packed_tokens == packed_tokens(work, range(len(rows)))
    for budget in (1, 100, 300, 800, 10**6):
        pieces = pieces_of(cut_trees(work, budget))
        assert sorted(row for piece in pieces for row in piece.rows) == list(range(len(rows)))
        for piece in pieces:
            assert packed_tokens(work, piece.rows) <= piece.tokens
            assert piece.tokens <= budget or len(piece.rows) == 1
        measured = measure_slices(work, budget, packed=True)
        assert work.packed_tokens <= measured.total <= sum(piece.tokens for piece in pieces)


@pytest.mark.slow
def test_a_walk_that_fails_leaves_nothing_behind() -> None:
    trajectory, adapter = episodes(3, 2, rewrites=True, least=64, most=80), adapter_of(model_of("qwen3"))
    longest = max(trajectory.row_lengths(range(len(trajectory))))
    plan = UpdatePlan(micro_batch_tokens=longest, pack_prompts=True, checkpointing=True)
    with SimulatedMemory(exact=False) as memory:
        _, wanted = learn(adapter, trajectory, plan)
    rng = random.Random(7)
    for fail_at in sorted(rng.sample(range(memory.allocations), 12)):
        with SimulatedMemory(fail_at=fail_at, exact=False) as failing:
            with pytest.raises(torch.OutOfMemoryError):
                learn(adapter, trajectory, plan)
            flush_autograd()
            adapter.model.zero_grad()
            gc.collect()
            assert failing.live_bytes < 1000, fail_at
        _, found = learn(adapter, trajectory, plan)
        assert torch.equal(found, wanted), fail_at


@pytest.mark.slow
def test_what_is_held_is_one_path_and_a_pass() -> None:
    """A tree many times as large as its longest row is walked in what that row takes, and runs each token once."""
    trajectory = episodes(11, turns=8, rewrites=True, least=100, most=100)
    adapter = adapter_of(model_of("qwen3", layers=4))
    rows, work = range(len(trajectory)), adapter.work(trajectory, range(len(trajectory)))
    longest = max(rows, key=work.row_tokens.__getitem__)
    assert work.packed_tokens > 2.5 * work.row_tokens[longest]
    plan = UpdatePlan(micro_batch_tokens=work.row_tokens[longest], pack_prompts=True, logprob_tile=64)

    def peak(chosen: Sequence[int]) -> tuple[int, int]:
        for weight in adapter.model.parameters():
            weight.grad = torch.zeros_like(weight)
        with SimulatedMemory() as memory:
            step = accumulate_gradient(
                adapter, trajectory, chosen, plan, terms_of(trajectory), autocast=nullcontext, scale=lambda loss: loss
            )
        return memory.peak_bytes, step.tokens

    (alone, _), (walked, tokens) = peak([longest]), peak(rows)
    assert tokens == work.packed_tokens
    assert walked <= 1.1 * alone


def test_a_dry_run_holds_what_the_walk_holds() -> None:
    """Of a walk, a dry run runs the largest pass and one beside it, so that a trunk is held for both."""
    trajectory, adapter = episodes(2, turns=8, rewrites=True, least=64, most=120), adapter_of(model_of("qwen3"))
    rows, work = range(len(trajectory)), adapter.work(trajectory, range(len(trajectory)))
    plan = UpdatePlan(micro_batch_tokens=max(work.row_tokens), pack_prompts=True, logprob_tile=64)
    chosen = tried_places(work, plan, 2)
    assert len(chosen) < len(rows)

    def peak(places: Sequence[int]) -> int:
        for weight in adapter.model.parameters():
            weight.grad = torch.zeros_like(weight)
        with SimulatedMemory() as memory:
            accumulate_gradient(
                adapter, trajectory, places, plan, terms_of(trajectory), autocast=nullcontext, scale=lambda loss: loss
            )
        return memory.peak_bytes

    assert peak(chosen) == pytest.approx(peak(rows), rel=0.01)


@pytest.mark.parametrize("own", [(1, 1, 1), (0, 1, 2, 1), (1,) * 6])
def test_rows_may_have_nothing_to_read_behind_what_they_share(own: Sequence[int]) -> None:
    """The last token of a completion predicts nothing, so that a pass of such rows runs no network of its own."""
    prompt = torch.arange(2, 102)
    rows = [(prompt, torch.full((length,), 7 + number)) for number, length in enumerate(own)]
    trajectory, adapter = lay_out(rows), adapter_of(model_of("qwen3"))
    _, wanted = learn(adapter, trajectory, PLAIN)
    for tokens in (100, 102, 400):
        _, found = learn(adapter, trajectory, UpdatePlan(micro_batch_tokens=tokens, pack_prompts=True))
        assert distance(found, wanted) < 2e-6, tokens


@pytest.mark.slow
def test_many_passes_round_no_more_than_one() -> None:
    """Under autocast, what hundreds of passes give a trunk is added up in float32."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(2, 258, (100,), generator=generator)
    rows = [(prompt, torch.randint(2, 258, (8,), generator=generator)) for _ in range(256)]
    trajectory, adapter = lay_out(rows), adapter_of(model_of("qwen3"))
    terms, errors = terms_of(trajectory), []
    _, exact = learn(adapter, trajectory, PLAIN)
    for tokens in (100_000, 108):
        adapter.model.zero_grad()
        accumulate_gradient(
            adapter,
            trajectory,
            range(len(trajectory)),
            UpdatePlan(micro_batch_tokens=tokens, pack_prompts=True),
            terms,
            autocast=lambda: torch.autocast("cpu", torch.bfloat16),
            scale=lambda loss: 3.0 * loss,
        )
        found = torch.cat([one.grad.flatten() for one in adapter.model.parameters() if one.grad is not None])
        errors.append(distance(found, exact))
    assert errors[1] < 1.1 * errors[0]


@pytest.mark.slow
def test_a_conversation_of_hundreds_of_turns_is_no_deeper_than_can_be_walked() -> None:
    trajectory = episodes(1, count=1, turns=700, rewrites=True, least=16, most=16)
    geometry = adapter_of(model_of("qwen3")).geometry
    rows = range(len(trajectory))
    assert len(rows) > MOST_LEVELS + 50
    work = token_work(trajectory, rows, geometry, packs=True)
    for budget in (max(work.row_tokens), 10**9):
        pieces = pieces_of(cut_trees(work, budget))
        assert sorted(row for piece in pieces for row in piece.rows) == list(rows)
    assert pack_rows(trajectory, rows, (None,), torch.device("cpu")).ids.shape[1] < work.packed_tokens + 1
