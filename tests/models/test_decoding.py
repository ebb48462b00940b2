"""Sampling steps against transformers' own generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, MambaConfig, MambaForCausalLM

from memsafe_rl.errors import ConfigError
from memsafe_rl.models.causal_lm import CausalLMAdapter, check_head
from tests.models.helpers import PAD, SMALL, assert_close
from tests.tiny import ARCHS, tiny_model

NEW = 12
LENGTHS = (3, 9, 1, 14)
"""Shorter and longer than Gemma's window of 6, so that windows cut prompts, padding and completions."""


def prompts_of(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(2, 258, (length,), generator=generator) for length in lengths]


def decoding_dtype(arch: str) -> torch.dtype:
    """Gemma-2's eager attention turns rows of padding into NaN in float64 (its softmax is float32), in generate too."""
    return torch.float32 if arch == "gemma2" else torch.float64


def generated(model: Any, prompt: Tensor) -> list[int]:
    """Greedy tokens of one prompt alone, by the model's generate, never ended."""
    ids = model.generate(prompt[None], do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW, pad_token_id=PAD)
    return ids[0, len(prompt) :].tolist()


def no_eos(logits: Tensor) -> Tensor:
    """What ``min_new_tokens`` does in generate."""
    return logits.index_fill(-1, torch.tensor([1]), float("-inf"))


@pytest.mark.parametrize("arch", ARCHS)
def test_greedy_tokens_equal_generates(arch: str) -> None:
    model = tiny_model(arch, dtype=decoding_dtype(arch))
    adapter, prompts = CausalLMAdapter(model, pad_token_id=PAD), prompts_of()
    logits, state = adapter.prefill(prompts)
    # Rows drop out, return in another order and double on the way: as finished rows and samples of a prompt do.
    rows, selections = [0, 1, 2, 3], {3: [3, 0, 1, 1], 5: [1, 2], 7: [0, 0, 1]}
    drawn: list[list[int]] = [[] for _ in rows]
    for step in range(NEW):
        if step in selections:
            kept = selections[step]
            logits, state = logits[kept], adapter.select(state, torch.tensor(kept))
            rows, drawn = [rows[row] for row in kept], [list(drawn[row]) for row in kept]
        assert state.rows == len(rows)
        tokens = no_eos(logits).argmax(-1)
        for row, token in enumerate(tokens.tolist()):
            drawn[row].append(token)
        logits = adapter.decode_step(state, tokens)
    assert rows == [0, 0, 1]
    assert drawn == [generated(model, prompts[row]) for row in rows]


@pytest.mark.parametrize("arch", ARCHS)
def test_logits_of_a_prefill_equal_each_prompts_own(arch: str) -> None:
    model = tiny_model(arch, dtype=decoding_dtype(arch))
    prompts = prompts_of()
    logits, _ = CausalLMAdapter(model, pad_token_id=PAD).prefill(prompts)
    assert not logits.requires_grad
    alone = torch.cat([model(prompt[None]).logits[:, -1] for prompt in prompts])
    assert_close(logits, alone, 1e-5 if arch == "gemma2" else 1e-12)


@pytest.mark.parametrize("arch", ARCHS)
def test_padding_that_all_rows_share_is_cut_off(arch: str) -> None:
    model = tiny_model(arch, dtype=decoding_dtype(arch))
    adapter = CausalLMAdapter(model, pad_token_id=PAD)
    prompts = prompts_of((3, 9, 1, 30))
    logits, state = adapter.prefill(prompts)
    logits, state = logits[[0, 1]], adapter.select(state, torch.tensor([0, 1]))
    assert state.width == 9
    assert state.pads == (6, 0)
    fresh_logits, fresh = adapter.prefill(prompts[:2])
    assert_close(logits, fresh_logits, 1e-5 if arch == "gemma2" else 1e-12)
    for _ in range(8):
        tokens = logits.argmax(-1)
        logits, fresh_logits = adapter.decode_step(state, tokens), adapter.decode_step(fresh, tokens)
        assert_close(logits, fresh_logits, 1e-5 if arch == "gemma2" else 1e-12)
        assert state.nbytes() == fresh.nbytes()


def test_equal_prompts_need_no_mask() -> None:
    model = tiny_model("qwen3")
    adapter = CausalLMAdapter(model, pad_token_id=PAD)
    seen = []
    model.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs.get("attention_mask")), with_kwargs=True)
    _, state = adapter.prefill(prompts_of((5, 5)))
    state = adapter.select(state, torch.tensor([0, 0, 1]))
    adapter.decode_step(state, torch.tensor([4, 5, 6]))
    assert seen == [None, None]


def test_bytes_of_a_cache_follow_the_geometry() -> None:
    adapter = CausalLMAdapter(tiny_model("qwen3"), pad_token_id=PAD)
    _, state = adapter.prefill(prompts_of((5, 9)))
    assert state.nbytes() == 2 * adapter.geometry.kv_bytes(9)
    state = adapter.select(state, torch.tensor([0, 1, 1]))
    assert state.nbytes() == 3 * adapter.geometry.kv_bytes(9)
    state = adapter.select(state, torch.tensor([0]))
    assert state.nbytes() == adapter.geometry.kv_bytes(5)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_measured_cache_agrees_with_the_config(arch: str) -> None:
    adapter = CausalLMAdapter(tiny_model(arch, window=16), pad_token_id=PAD)
    told = adapter.geometry
    check_head(adapter)
    assert adapter.slot_bytes == told.kv_bytes(1)
    assert adapter.geometry == told


def test_a_windowed_cache_holds_windows() -> None:
    adapter = CausalLMAdapter(tiny_model("gemma3"), pad_token_id=PAD)
    assert adapter.geometry.windows == (6, None)
    _, state = adapter.prefill(prompts_of((40,)))
    for _ in range(2):
        adapter.decode_step(state, torch.tensor([4]))
    # transformers keeps window - 1 slots, as a view into one slot more.
    assert state.nbytes() == adapter.geometry.kv_bytes(42)


def test_bytes_of_a_cache_that_the_config_does_not_tell() -> None:
    """Latent attention: what is cached depends on the version of transformers."""
    config = DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4, "first_k_dense_replace": 2, "n_routed_experts": 4, "n_group": 1},
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
    )
    adapter = CausalLMAdapter(DeepseekV3ForCausalLM(config).eval(), pad_token_id=PAD)
    check_head(adapter)
    _, state = adapter.prefill(prompts_of((5, 9)))
    assert adapter.geometry.kv_bytes(9) > 0
    assert state.nbytes() == 2 * adapter.geometry.kv_bytes(9)


def test_a_model_that_does_not_mask_padding_is_refused() -> None:
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=258, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(ConfigError, match="decoded together"):
        check_head(CausalLMAdapter(MambaForCausalLM(config).eval(), pad_token_id=2))
