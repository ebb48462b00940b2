"""Sampling steps against transformers' own generate."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, MambaConfig, MambaForCausalLM

from memsafe_rl.errors import MemsafeError
from memsafe_rl.models.language.causal_lm import CausalLMAdapter, check_head
from tests.models.helpers import PAD, SMALL, ExactSoftmax, assert_close
from tests.tiny import ARCHS, tiny_model

NEW = 12
LENGTHS = (3, 9, 1, 14)
"""Shorter and longer than Gemma's window of 6, so that windows cut prompts, padding and completions."""


def prompts_of(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(2, 258, (length,), generator=generator) for length in lengths]


@pytest.fixture(autouse=True)
def _exact_softmax() -> Iterator[None]:
    with ExactSoftmax():
        yield


def generated(model: Any, prompt: Tensor) -> list[int]:
    """Greedy tokens of one prompt alone, by the model's generate, never ended."""
    ids = model.generate(prompt[None], do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW, pad_token_id=PAD)
    return ids[0, len(prompt) :].tolist()


def no_eos(logits: Tensor) -> Tensor:
    """What ``min_new_tokens`` does in generate."""
    return logits.index_fill(-1, torch.tensor([1]), float("-inf"))


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("arch", ARCHS)
def test_greedy_tokens_equal_generates(arch: str) -> None:
    model = tiny_model(arch, dtype=torch.float64)
    adapter, prompts = CausalLMAdapter(model, pad_token_id=PAD), prompts_of()
    logits, state = adapter.prefill(prompts)
    # Rows drop out, return in another order and double on the way: as finished rows and samples of a prompt do.
    rows, selections = [0, 1, 2, 3], {3: [3, 0, 1, 1], 5: [1, 2], 7: [0, 0, 1]}
    drawn: list[list[int]] = [[] for _ in rows]
    for step in range(NEW):
        if step in selections:
            kept = selections[step]
            logits, state = logits[kept], state.select(kept)
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
    model = tiny_model(arch, dtype=torch.float64)
    prompts = prompts_of()
    logits, _ = CausalLMAdapter(model, pad_token_id=PAD).prefill(prompts)
    assert not logits.requires_grad
    alone = torch.cat([model(prompt[None]).logits[:, -1] for prompt in prompts])
    assert_close(logits, alone, 1e-12)


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("joins", [False, True])
def test_either_cache_gives_the_same_logits(arch: str, joins: bool) -> None:
    model = tiny_model(arch, dtype=torch.float64)
    adapter, prompts = CausalLMAdapter(model, pad_token_id=PAD), prompts_of((3, 9, 1, 30))
    assert adapter.joins
    adapter.joins = joins
    logits, state = adapter.prefill(prompts)
    logits, state = logits[[0, 1]], state.select([0, 1])
    fresh_logits, fresh = adapter.prefill(prompts[:2])
    assert_close(logits, fresh_logits, 1e-12)
    for _ in range(8):
        tokens = logits.argmax(-1)
        logits, fresh_logits = adapter.decode_step(state, tokens), adapter.decode_step(fresh, tokens)
        assert_close(logits, fresh_logits, 1e-12)
    if not joins:  # padding that all rows share is cut off
        assert state.nbytes() == fresh.nbytes()
        assert state.pads == (6, 0)


def alone(model: Any, prompt: Tensor, tokens: list[int]) -> Tensor:
    """Logits after a prompt and some tokens, by the model itself."""
    return model(torch.cat([prompt, torch.tensor(tokens, dtype=torch.int64)])[None]).logits[0, -1]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "window"), [*((arch, 6) for arch in ARCHS), ("gemma2", 40), ("gemma3", 40)])
def test_rows_join_at_any_length(arch: str, window: int) -> None:
    """Rows of four prompts, of which two come later and one is read in chunks and has drawn tokens before."""
    model = tiny_model(arch, dtype=torch.float64, window=window)
    adapter, prompts = CausalLMAdapter(model, pad_token_id=PAD), prompts_of((3, 9, 45, 14))
    drawn: list[list[int]] = [[], [], []]
    owners = [0, 1, 1]
    _, state = adapter.prefill(prompts[:2])
    state = state.select(owners)

    def step(wanted: int) -> None:
        for _ in range(wanted):
            tokens = [(7 * len(row) + 31 * place) % 250 + 2 for place, row in enumerate(drawn)]
            logits = adapter.decode_step(state, torch.tensor(tokens))
            for row, token in zip(drawn, tokens, strict=True):
                row.append(token)
        for place, owner in enumerate(owners):
            assert_close(logits[place], alone(model, prompts[owner], drawn[place]), 1e-12)

    step(5)
    logits, later = adapter.prefill([prompts[2]], chunk_tokens=11)
    assert_close(logits[0], alone(model, prompts[2], []), 1e-12)
    later = later.select([0, 0])
    before = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [14]]
    logits = adapter.extend(later, [torch.tensor(row) for row in before], chunk_tokens=8)
    for place, row in enumerate(before):
        assert_close(logits[place], alone(model, prompts[2], row), 1e-12)
    state, owners = state.join(later), [*owners, 2, 2]
    drawn += before
    step(30)  # past the first block of slots
    kept = [4, 0, 2]
    state, owners, drawn = (
        state.select(kept),
        [owners[k] for k in kept],
        [drawn[k] for k in kept],
    )
    step(3)
    _, fresh = adapter.prefill([prompts[3], prompts[0]])
    state, owners, drawn = state.join(fresh), [*owners, 3, 0], [*drawn, [], []]
    step(36)


def test_a_prompt_is_kept_once_for_its_group() -> None:
    adapter = CausalLMAdapter(tiny_model("qwen3"), pad_token_id=PAD)
    _, state = adapter.prefill(prompts_of((5, 9)))
    prompt_bytes = 2 * adapter.geometry.kv_bytes(9)
    assert state.nbytes() == sum(block.nbytes() for block in state.prompt_blocks()) == prompt_bytes
    state = state.select([0, 1, 1])
    assert state.nbytes() == prompt_bytes
    adapter.decode_step(state, torch.tensor([4, 5, 6]))
    assert state.nbytes() == prompt_bytes + 3 * adapter.geometry.kv_bytes(32)
    state = state.select([0])  # the other prompt goes with its rows
    assert state.nbytes() == adapter.geometry.kv_bytes(9) + adapter.geometry.kv_bytes(32)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_measured_cache_agrees_with_the_config(arch: str) -> None:
    adapter = CausalLMAdapter(tiny_model(arch, window=16), pad_token_id=PAD)
    told = adapter.geometry
    check_head(adapter)
    assert adapter.slot_bytes == told.kv_bytes(1)
    assert adapter.geometry == told


@pytest.mark.parametrize("joins", [False, True])
def test_a_windowed_cache_holds_windows(joins: bool) -> None:
    adapter = CausalLMAdapter(tiny_model("gemma3"), pad_token_id=PAD)
    assert adapter.geometry.windows == (6, None)
    adapter.joins = joins
    _, state = adapter.prefill(prompts_of((40,)))
    slot = 2 * 4 * adapter.geometry.kv_heads * adapter.geometry.head_dim
    for _ in range(2):
        adapter.decode_step(state, torch.tensor([4]))
    # The last window - 1 tokens of a prompt; transformers keeps them as a view into one slot more.
    assert state.nbytes() == slot * ((5 + 6 + 40 + 32) if joins else (6 + 42))
    for _ in range(31):
        adapter.decode_step(state, torch.tensor([4]))
    # As its rows go on, a prompt leaves the window.
    assert state.nbytes() == slot * ((1 + 6 + 40 + 64) if joins else (6 + 73))


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


def test_a_model_that_does_not_mask_padding_is_decoded_by_transformers(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=258, hidden_size=32, num_hidden_layers=2, state_size=4)
    adapter = CausalLMAdapter(MambaForCausalLM(config).eval(), pad_token_id=2)
    assert adapter.path.decodes
    check_head(adapter)
    assert not adapter.path.decodes
    assert adapter.path.caches
    assert "Rollouts run transformers' generate" in caplog.text


def test_a_forward_beside_another_threads_is_refused() -> None:
    model, prompts = tiny_model("qwen3"), prompts_of((5, 9))
    adapter = CausalLMAdapter(model, pad_token_id=PAD)
    logits, state = adapter.prefill(prompts)
    inside, done = threading.Event(), threading.Event()

    def stop(*_: Any) -> None:
        inside.set()
        assert done.wait(20)

    handle = model.model.register_forward_pre_hook(stop)
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(adapter.decode_step, state, logits.argmax(-1))
        assert inside.wait(20)
        handle.remove()
        with pytest.raises(MemsafeError, match=r"another thread draws completions .* copy of the config"):
            model(prompts[0][None])
        done.set()
        assert step.result().isfinite().all()
    assert model.config._attn_implementation == "sdpa"
    assert model(prompts[0][None]).logits.isfinite().all()
