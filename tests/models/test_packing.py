"""Rows packed behind one copy of their prompt score and learn as they do row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from memsafe_rl.models.causal_lm import CausalLMAdapter, check_head
from memsafe_rl.types import Ragged, Trajectory
from tests.models.helpers import PAD, SMALL, logprobs_of
from tests.tiny import ARCHS, tiny_model

FAMILIES = ("qwen3", "llama", "gpt2", "gemma2", "gemma3", "qwen2", "qwen3_moe", "gpt_oss", "deepseek")
RAGGED = ((4, 9, 2, 1), (3, 1), (6,), (2, 2, 2))
PROMPTS = (7, 5, 9, 3)


class InDouble(TorchFunctionMode):
    """Keeps a float64 network in float64: norms of transformers go to float32 and back, which rounds to 1e-7."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].to(torch.float64)
        arguments = [torch.float64 if argument is torch.float32 else argument for argument in args]
        named = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*arguments, **named)


def config_of(family: str) -> tuple[Any, Any]:
    """Networks that `tiny_model` does not have: mixtures of experts, attention sinks, latent attention."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    if family == "qwen3_moe":
        return Qwen3MoeForCausalLM, Qwen3MoeConfig(**SMALL, **experts, moe_intermediate_size=16, head_dim=8)
    if family == "gpt_oss":
        local = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 6}
        return GptOssForCausalLM, GptOssConfig(**SMALL, **local)
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
    sizes = {**SMALL, "num_key_value_heads": 4, "first_k_dense_replace": 2, **latent}
    return DeepseekV3ForCausalLM, DeepseekV3Config(**sizes)


def model_of(family: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    if family in ARCHS:
        return tiny_model(family, dtype=dtype, **settings)
    kind, config = config_of(family)
    config._experts_implementation = "eager"  # the default has no float64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(config).to(dtype).eval()


def adapter_of(model: Any) -> CausalLMAdapter:
    adapter = CausalLMAdapter(model, pad_token_id=PAD)
    check_head(adapter)
    assert adapter.packs_prompts
    return adapter


def grouped_rows(
    prompts: Sequence[int] = PROMPTS, completions: Sequence[Sequence[int]] = RAGGED, seed: int = 0
) -> Trajectory:
    """Groups of ragged completions whose rows are shuffled, so that a prompt's rows lie apart."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> Tensor:
        return torch.randint(2, 258, (length,), generator=generator)

    conditions = Ragged.from_rows([ids(length) for length in prompts])
    rows = [(group, ids(length)) for group, lengths in enumerate(completions) for length in lengths]
    rows = [rows[place] for place in torch.randperm(len(rows), generator=generator).tolist()]
    groups = tuple(group for group, _ in rows)
    actions = Ragged.from_rows([tokens for _, tokens in rows])
    return Trajectory(
        conditions=conditions,
        condition_of_row=groups,
        actions=actions,
        loss_mask=Ragged(torch.ones(len(actions.flat)), actions.lengths),
        sampling_logprobs=None,
        advantages=torch.ones(len(rows)),
        group_of_row=groups,
        finished=(True,) * len(rows),
    )


def learn(
    adapter: CausalLMAdapter, trajectory: Trajectory, rows: Sequence[int], *, packed: bool, recompute: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probs of rows, and the gradient of a sum of them with weights that differ."""
    adapter.model.zero_grad()
    with adapter.recompute(recompute):
        logprobs_M = logprobs_of(adapter.distribution(trajectory, rows, packed=packed))
    torch.autograd.backward((logprobs_M * torch.linspace(-1, 1, len(logprobs_M)).to(logprobs_M)).sum())
    found = [weight.grad.flatten() for weight in adapter.model.parameters() if weight.grad is not None]
    return logprobs_M.detach(), torch.cat(found)


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_learn_what_rows_learn(family: str) -> None:
    adapter, trajectory = adapter_of(model_of(family)), grouped_rows()
    rows = range(len(trajectory))
    logprobs, gradient = learn(adapter, trajectory, rows, packed=False)
    packed_logprobs, packed_gradient = learn(adapter, trajectory, rows, packed=True)
    assert distance(packed_logprobs, logprobs) < 1e-6
    assert distance(packed_gradient, gradient) < 2e-6  # 10 rows' gradients, summed in another order


@pytest.mark.parametrize("family", FAMILIES)
def test_in_double_nothing_but_rounding_differs(family: str) -> None:
    trajectory = grouped_rows()
    with InDouble():
        adapter = adapter_of(model_of(family, torch.float64))
        rows = range(len(trajectory))
        logprobs, gradient = learn(adapter, trajectory, rows, packed=False)
        packed_logprobs, packed_gradient = learn(adapter, trajectory, rows, packed=True)
    assert distance(packed_logprobs, logprobs) < 1e-12
    assert distance(packed_gradient, gradient) < 1e-12
