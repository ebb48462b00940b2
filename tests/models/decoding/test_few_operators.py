"""What shortens a decoded token: norms, rotations and kernels that give what the network's own give, in fewer steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gptj import modeling_gptj
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNormGated
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from benchmarks.launches import Operators, counted, ours, per_token, prompts_of, sampler_operators
from benchmarks.small import small_qwen3, small_t5
from memsafe_rl.models.decoding import shared_prefix_attention
from memsafe_rl.models.decoding.few_operators import (
    norms_of,
    rotates_halves,
    rotations_of,
    short_norms,
    short_rotations,
)
from memsafe_rl.models.language.factory import adapter_for, check_adapter
from memsafe_rl.ops.fixed_tiles import fixed_tiles


@pytest.mark.parametrize("kind", [Qwen3RMSNorm, T5LayerNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_short_norm_is_the_networks_own(kind: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = kind(48, eps=1e-3).to(dtype)
    nn.init.uniform_(norm.weight, 0.5, 2.0, generator=generator)
    hidden = (torch.randn(3, 5, 48, generator=generator) * 4).to(dtype)
    expected, constants = norm(hidden), {}
    with torch.no_grad(), short_norms(norms_of(nn.ModuleList([norm])), constants):
        assert "forward" in norm.__dict__
        found = norm(hidden)
    torch.testing.assert_close(found, expected, rtol=1e-6 if dtype is torch.float32 else 8e-3, atol=1e-6)
    assert found.dtype == dtype
    assert "forward" not in norm.__dict__


def test_a_norm_with_a_gate_is_left_alone() -> None:
    assert norms_of(NemotronHRMSNormGated(8, 4)) == ()


def test_norms_of_another_form_are_left_alone() -> None:
    hooked = Qwen3RMSNorm(8, eps=1e-6)
    hooked.register_forward_hook(lambda _module, _inputs, output: 2 * output)
    assert norms_of(nn.ModuleList([GemmaRMSNorm(8), nn.LayerNorm(8), nn.Linear(8, 8)])) == ()
    with short_norms(norms_of(nn.ModuleList([hooked])), {}):
        assert "forward" not in hooked.__dict__


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_rotations_are_the_networks_own(dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(0)
    q, k = (torch.randn(3, heads, 2, 16, generator=dice).to(dtype) for heads in (4, 2))
    cos, sin = (torch.rand(3, 2, 16, generator=dice).to(dtype) for _ in range(2))
    own = modeling_qwen3.apply_rotary_pos_emb
    files = rotations_of(small_qwen3(64))
    assert files == (modeling_qwen3,)
    with short_rotations(files):
        assert modeling_qwen3.apply_rotary_pos_emb is not own
        found = modeling_qwen3.apply_rotary_pos_emb(q, k, cos, sin)
        narrow = modeling_qwen3.apply_rotary_pos_emb
        with pytest.raises(RuntimeError):  # widths that differ are the network's own business
            narrow(q, k, cos[..., :8], sin[..., :8])
    assert modeling_qwen3.apply_rotary_pos_emb is own
    for part, expected in zip(found, own(q, k, cos, sin), strict=True):
        tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(part, expected, **tolerance)


@pytest.mark.parametrize(("dtype", "tiled"), [(torch.bfloat16, False), (torch.float16, True), (torch.float32, True)])
def test_where_bits_count_short_rotations_round_as_the_network_does(dtype: torch.dtype, tiled: bool) -> None:
    dice = torch.Generator().manual_seed(0)
    q, k = (torch.randn(64, heads, 1, 16, generator=dice).to(dtype) for heads in (4, 2))
    cos, sin = (torch.rand(64, 1, 16, generator=dice).to(dtype) for _ in range(2))

    def rotate() -> tuple[list[torch.Tensor], int]:
        operators = Operators()
        with operators:
            return list(modeling_qwen3.apply_rotary_pos_emb(q, k, cos, sin)), operators.counts.total()

    own, most = rotate()
    with short_rotations((modeling_qwen3,)), fixed_tiles(tiled):
        rotate_once, _ = rotate()  # the sines are turned round once for all layers
        again, count = rotate()
    assert count < most
    for part, once, expected in zip(again, rotate_once, own, strict=True):
        assert torch.equal(part, expected)
        assert torch.equal(once, expected)


def test_rotations_of_neighbours_are_left_alone() -> None:
    assert not rotates_halves(modeling_gptj.apply_rotary_pos_emb)


@pytest.mark.parametrize("build", [small_qwen3, small_t5])
def test_with_and_without_kernels_logits_are_the_same(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of unlike lengths, rows out of order, and rows of two blocks at unlike lengths."""

    def decoded() -> torch.Tensor:
        adapter = adapter_for(build(64, layers=2).eval(), pad_token_id=0)
        check_adapter(adapter)
        prompts = [prompt[: 5 + 3 * place] % 60 + 2 for place, prompt in enumerate(prompts_of(3))]
        _, state = adapter.prefill(prompts[:2])
        state = state.select([1, 0, 0, 1, 0])
        for token in range(3):
            adapter.decode_step(state, torch.tensor([7, 8, 9, 10, 11]) + token)
        _, other = adapter.prefill(prompts[2:])
        state = state.join(other.select([0, 0]))
        for token in range(3):
            logits = adapter.decode_step(state, torch.tensor([7, 8, 9, 10, 11, 12, 13]) + token)
        return logits

    by_kernels = decoded()
    monkeypatch.setattr(shared_prefix_attention, "_has_kernel", lambda *_: False)
    torch.testing.assert_close(decoded(), by_kernels, rtol=1e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("build", "a_layer"), [(small_qwen3, 32), (small_t5, 26)])
def test_a_decoded_token_takes_few_operators_no_upload_and_one_read(build: Any, a_layer: float) -> None:
    found = []
    for layers in (1, 3):
        adapter = adapter_for(build(4096, layers=layers).eval(), pad_token_id=0)
        check_adapter(adapter)
        found.append(per_token(lambda length, adapter=adapter: ours(adapter, prompts_of(2), 4, length), 8))
    assert (found[1]["operators"] - found[0]["operators"]) / 2 <= a_layer
    assert all(entry["uploads"] <= 1 and entry["read_backs"] == 1 for entry in found)


def test_the_sampler_takes_at_most_25_operators() -> None:
    assert sampler_operators(8, 32_128, 96) <= 25


def test_rows_of_unlike_length_upload_nothing_more() -> None:
    """Masks and places come from counters on the device."""
    adapter = adapter_for(small_qwen3(64, layers=1).eval(), pad_token_id=0)
    check_adapter(adapter)
    prompts = [prompt[: 5 + 3 * place] % 60 + 2 for place, prompt in enumerate(prompts_of(2))]
    _, first = adapter.prefill(prompts[:1])
    adapter.decode_step(first, torch.tensor([5]))
    _, second = adapter.prefill(prompts[1:])
    state = first.join(second)
    adapter.decode_step(state, torch.tensor([6, 7]))
    tokens = torch.tensor([8, 9])
    with counted() as (_, traffic):
        adapter.decode_step(state, tokens)
    assert (traffic.uploads, traffic.reads) == (0, 0)
