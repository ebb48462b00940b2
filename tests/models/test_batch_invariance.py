"""Half precision with `batch_invariant`: the same bits in every wave, slice, packing and turn; without it, others."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional

from benchmarks.batch_invariance import (
    FAMILIES,
    FORMS,
    RESULTS,
    adapter_of,
    compare,
    converse,
    draw,
    gradient,
    make,
    narrowed,
    prompts_of,
    rows_of,
    score,
)
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.models.batch_invariance import STEP_COST, is_default, require
from memsafe_rl.models.decoding.fixed_split_attention import Sight, attend
from memsafe_rl.ops.fixed_tiles import TILE_ROWS, fixed_tiles
from memsafe_rl.rollout.native.kv_retention import KeptCaches
from memsafe_rl.rollout.scoring import score_all
from memsafe_rl.types import RolloutPlan

HALVES = (torch.bfloat16, torch.float16)
NEW = 9


def differences(family: str, dtype: torch.dtype, form: str, *, invariant: bool) -> int:
    """Counts the tokens and log-probs that depend on the wave, or on whether they are drawn or scored."""
    model = make(family, dtype if form == "weights" else torch.float32)
    adapter, prompts, found = adapter_of(model, invariant=invariant), prompts_of(5), 0
    with narrowed(dtype if form == "autocast" else None):
        drawn = draw(adapter, prompts, NEW, 64)
        for wave in (3, 7):
            counts = compare(draw(adapter, prompts, NEW, wave, prefill=9), drawn)
            found += counts["tokens_after_a_difference"] + counts["logprobs_that_differ"]
        told = torch.cat([row.logprobs for row in drawn])
        for cut in (2**20, 1, 90):
            found += int((score(adapter, rows_of(prompts, drawn), cut) != told).sum())
    return found


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("dtype", "form"), [*((torch.bfloat16, form) for form in FORMS), (torch.float16, FORMS[0])], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_bit_depends_on_the_wave_and_sampler_and_trainer_agree(family: str, dtype: torch.dtype, form: str) -> None:
    assert differences(family, dtype, form, invariant=True) == 0


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_mode_bits_depend_on_the_wave(family: str, form: str) -> None:
    assert differences(family, torch.bfloat16, form, invariant=False) > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2", "moe"])
def test_turns_with_kept_caches_are_those_read_again(family: str) -> None:
    adapter, prompts = adapter_of(make(family, torch.bfloat16), invariant=True), prompts_of(3)
    kept = KeptCaches()
    said = converse(adapter, prompts, 6, 64, None)
    counts = compare(converse(adapter, prompts, 6, 5, kept), said)
    assert kept.nbytes() > 0
    assert counts["tokens_after_a_difference"] == counts["logprobs_that_differ"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_cut_of_an_update_changes_a_logprob(family: str) -> None:
    adapter, prompts = adapter_of(make(family, torch.bfloat16), invariant=True), prompts_of(3)
    drawn = draw(adapter, prompts, NEW, 64)
    trajectory = rows_of(prompts, drawn)
    cuts = [(1, False), (5, False)] + [(12, True), (5, True)] * adapter.packs_prompts
    whole, slope = gradient(adapter, trajectory, 12, packed=False)
    assert torch.equal(whole, torch.cat([row.logprobs for row in drawn]))
    assert torch.equal(gradient(adapter, trajectory, 12, packed=False)[1], slope)
    for cut, packed in cuts:
        assert torch.equal(gradient(adapter, trajectory, cut, packed=packed)[0], whole)


@pytest.mark.slow
@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_weights_under_autocast_get_one_gradient_from_all_cuts(family: str, invariant: bool) -> None:
    adapter, prompts, kind = adapter_of(make(family, torch.float32), invariant=invariant), prompts_of(3), torch.bfloat16
    with narrowed(kind):
        trajectory = rows_of(prompts, draw(adapter, prompts, NEW, 64))
    _, whole = gradient(adapter, trajectory, 12, packed=False, kind=kind)
    # Whole groups, for what an encoder reads once for several rows gets one rounded gradient of all.
    _, slope = gradient(adapter, trajectory, 4, packed=False, kind=kind)
    apart = float((slope - whole).norm() / whole.norm())
    assert apart < 1e-6 if invariant else apart > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.bfloat16, None], ids=["autocast", "as they are"])
def test_adapters_on_a_half_precision_base_get_one_gradient_from_all_cuts(kind: torch.dtype | None) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(make("qwen3", torch.bfloat16), lora)
    adapter, prompts = adapter_of(model, invariant=True), prompts_of(3)
    with narrowed(kind):
        drawn = draw(adapter, prompts, NEW, 64)
    trajectory = rows_of(prompts, drawn)
    logprobs, whole = gradient(adapter, trajectory, 12, packed=False, kind=kind)
    again, slope = gradient(adapter, trajectory, 1, packed=False, kind=kind)
    assert torch.equal(logprobs, torch.cat([row.logprobs for row in drawn]))
    assert torch.equal(again, logprobs)
    assert {weight.dtype for weight in model.parameters() if weight.requires_grad} == {torch.float32}
    assert (slope - whole).norm() < 1e-6 * whole.norm()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_gradients_are_those_without_the_mode(family: str, recomputes: bool) -> None:
    model = make(family, torch.float32 if family == "moe" else torch.float64)  # torch groups no float64 products
    bound = 1e-4 if family == "moe" else 1e-6
    adapter, prompts = adapter_of(model, invariant=False), prompts_of(3)
    trajectory = rows_of(prompts, draw(adapter, prompts, NEW, 64))
    logprobs, slope = gradient(adapter, trajectory, 12, packed=False)
    adapter.batch_invariant = True
    for packed in (False, True)[: 1 + adapter.packs_prompts]:
        with adapter.recompute(recomputes):
            ours, other = gradient(adapter, trajectory, 12, packed=packed)
        assert (ours - logprobs).abs().max() < bound  # log-probs of a draw are kept in float32
        assert (other - slope).norm() < bound * slope.norm()


@pytest.mark.slow
def test_entropies_are_the_same_bits_in_every_slice() -> None:
    adapter, prompts = adapter_of(make("t5", torch.float32), invariant=False), prompts_of(4)
    trajectory = rows_of(prompts, draw(adapter, prompts, NEW, 64))

    def entropies(tokens: int) -> torch.Tensor:
        score_in = partial(score_all, adapter, trajectory, range(len(trajectory)), temperature=1.0, with_entropy=True)
        with adapter.numerics(invariant=True):
            found = score_in(attempt=under(RolloutPlan(score_tokens=tokens)), tile=tokens)
        return torch.cat([row.entropies for row in found if row.entropies is not None])

    whole = entropies(4096)
    assert torch.equal(entropies(1), whole)
    assert torch.equal(entropies(37), whole)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_rows_of_a_linear_map_are_those_of_the_row_alone(dtype: torch.dtype) -> None:
    rows, weight, bias = torch.randn(3 * TILE_ROWS + 1, 97).to(dtype), torch.randn(130, 97).to(dtype), torch.randn(130)
    bias = bias.to(dtype)
    with fixed_tiles():
        whole = functional.linear(rows, weight, bias)
        alone = torch.cat([functional.linear(row[None], weight, bias) for row in rows])
    assert torch.equal(whole, alone)
    assert torch.allclose(whole, functional.linear(rows, weight, bias), rtol=0.02, atol=0.05)


def test_autocast_narrows_a_weight_once_for_all_tiles_and_calls() -> None:
    rows, weight = torch.randn(3 * TILE_ROWS, 32), torch.randn(8, 32, requires_grad=True)
    with torch.profiler.profile(record_shapes=True) as profile, narrowed(torch.bfloat16), fixed_tiles():
        for _ in range(2):
            functional.linear(rows, weight)
    copies = [event for event in profile.events() if event.name == "aten::_to_copy"]
    assert [event.input_shapes[0] for event in copies].count([8, 32]) == 1


def test_float32_rows_depend_on_their_number_without_tiles() -> None:
    rows, weight = torch.randn(64, 97), torch.randn(130, 97)
    alone = torch.cat([functional.linear(row[None], weight) for row in rows])
    assert not torch.equal(functional.linear(rows, weight), alone)


@pytest.mark.parametrize("shape", [(1, 40), (7, 33), (40, 40)])
def test_attention_is_softmax_attention(shape: tuple[int, int]) -> None:
    tokens, slots = shape
    query, key, value = torch.randn(2, 4, tokens, 8), torch.randn(2, 2, slots, 8), torch.randn(2, 2, slots, 8)
    wide = [part.double().requires_grad_() for part in (query, key, value)]
    ours = attend(*wide, Sight(0.3, first=slots - tokens))
    hidden = torch.arange(slots)[None] > torch.arange(tokens)[:, None] + slots - tokens
    scores = (wide[0] @ wide[1].repeat_interleave(2, 1).mT * 0.3).masked_fill(hidden, -torch.inf)
    plain = scores.softmax(3) @ wide[2].repeat_interleave(2, 1)
    slope = torch.randn_like(plain)
    assert (ours - plain).abs().max() < 1e-12
    for one, other in zip(torch.autograd.grad(ours, wide, slope), torch.autograd.grad(plain, wide, slope), strict=True):
        assert (one - other).abs().max() < 1e-12


def test_the_mode_is_on_by_default_where_the_committed_measurement_says_that_it_is_cheap() -> None:
    measured = json.loads(RESULTS.read_text())["summary"]["step_ratio"]
    for kind, ratio in measured.items():
        assert STEP_COST["cpu", kind] == ratio
        assert is_default(torch.device("cpu"), getattr(torch, kind)) == (ratio < 1.1)
        assert not is_default(torch.device("cuda"), getattr(torch, kind))  # not yet measured
    assert {kind for device, kind in STEP_COST if device == "cpu"} == measured.keys()
    whole = json.loads(RESULTS.read_text())["summary"]["invariant"]
    assert whole["tokens_drawn"] >= 50_000
    assert whole["tokens_after_a_difference"] == whole["logprobs_that_differ"] == 0


def test_networks_that_pad_rows_beside_each_other_are_refused() -> None:
    adapter: Any = adapter_of(make("qwen3", torch.float32), invariant=False)
    require(adapter)
    adapter.joins = False
    with pytest.raises(ConfigError, match=r"batch_invariant=True.*Set batch_invariant=False"):
        require(adapter)
