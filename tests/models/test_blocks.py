"""Recomputation of blocks: bytes held after forward, and gradients bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.simulated.ledger import StorageLedger
from memsafe_rl.models.blocks import find_blocks, recomputed
from memsafe_rl.models.language.causal_lm import CausalLMAdapter
from tests.models.helpers import PAD, logprobs_of, make_rows
from tests.tiny import ARCHS, tiny_model

LAYERS = 6
PROMPTS, COMPLETIONS, WIDTH = (20, 28), (40, 32), 60


def step(adapter: CausalLMAdapter, enabled: bool) -> tuple[int, list[Tensor | None]]:
    """One forward and backward: bytes held after the forward, block inputs included, and all gradients."""
    adapter.model.zero_grad()
    with StorageLedger() as ledger:
        before_bytes = ledger.live_bytes
        with adapter.recompute(enabled):
            distribution = adapter.distribution(make_rows(PROMPTS, COMPLETIONS), [0, 1])
        held_bytes = ledger.live_bytes - before_bytes
    logprobs_of(distribution).square().sum().backward()
    return held_bytes, [weight.grad for weight in adapter.model.parameters()]


def same(first: list[Tensor | None], second: list[Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("arch", ARCHS)
def test_eval_mode_holds_block_inputs_alone_and_gradients_are_bitwise_equal(arch: str, lora: bool) -> None:
    model: Any = tiny_model(arch, layers=LAYERS)
    if lora:
        targets = ["c_attn"] if arch == "gpt2" else ["q_proj", "v_proj"]
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).eval()
    adapter = CausalLMAdapter(model, pad_token_id=PAD)
    plain_bytes, plain = step(adapter, enabled=False)
    lean_bytes, lean = step(adapter, enabled=True)
    assert same(plain, lean)
    assert any(gradient is not None and bool(gradient.any()) for gradient in lean)
    # Held: each block's input and the last output, what the mask and the ends keep; of the blocks' inside nothing.
    inputs_bytes = (LAYERS + 1) * 2 * WIDTH * 32 * 4
    assert inputs_bytes < lean_bytes < inputs_bytes + 0.1 * plain_bytes, (lean_bytes, inputs_bytes, plain_bytes)


def test_train_mode_with_dropout_draws_the_same_masks() -> None:
    model = tiny_model("gpt2", layers=3)
    model.train()
    adapter = CausalLMAdapter(model, pad_token_id=PAD)
    torch.manual_seed(5)
    _, plain = step(adapter, enabled=False)
    torch.manual_seed(5)
    _, lean = step(adapter, enabled=True)
    assert same(plain, lean)


def test_forward_is_put_back_on_any_exit() -> None:
    model = tiny_model("qwen3", layers=3)
    adapter, blocks = CausalLMAdapter(model, pad_token_id=PAD), find_blocks(model)
    assert list(blocks) == list(model.model.layers)

    def hooked(*args: Any, **kwargs: Any) -> Any:
        return type(blocks[0]).forward(blocks[0], *args, **kwargs)

    blocks[0].forward = hooked
    inside = []

    def fail() -> None:
        with adapter.recompute(True):
            inside.append("forward" in blocks[1].__dict__)
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        fail()
    assert inside == [True]
    assert blocks[0].__dict__["forward"] is hooked
    assert "forward" not in blocks[1].__dict__
    with adapter.recompute(False):
        assert "forward" not in blocks[1].__dict__


class Foreign(nn.Module):
    """A network that knows nothing of transformers' layers."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(4, 4)])
        self.stack = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.stack:
            x = block(x)
        return x


def test_a_foreign_network_is_recomputed_along_its_longest_list() -> None:
    model = Foreign()
    blocks = find_blocks(model)
    assert list(blocks) == list(model.stack)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    (plain,) = torch.autograd.grad(model(x).sum(), model.stack[0][0].weight)
    with recomputed(blocks):
        loss = model(x).sum()
    (lean,) = torch.autograd.grad(loss, model.stack[0][0].weight)
    assert torch.equal(plain, lean)


def test_a_network_without_blocks_says_so() -> None:
    with pytest.raises(ConfigError, match="gradient_checkpointing=False"):
        find_blocks(nn.Linear(2, 2))
