"""Forecasts of networks whose operators choose by numbers or keep a state: experts and state-space models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MambaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
    XGLMConfig,
)

from memsafe_rl.preflight.fake.device import fake_device
from tests.preflight.beside import run, saved

_COMMON: dict[str, Any] = {"vocab_size": 2000, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 1}
_ATTENTION: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
_COMMON["bos_token_id"] = None


def qwen3_moe() -> PretrainedConfig:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "head_dim": 32}
    return Qwen3MoeConfig(num_experts=8, num_experts_per_tok=2, **sizes, **_COMMON, **_ATTENTION)


def gpt_oss() -> PretrainedConfig:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2}
    return GptOssConfig(head_dim=32, **sizes, **_COMMON, **_ATTENTION)


def mixtral() -> PretrainedConfig:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralConfig(**sizes, **_COMMON, **_ATTENTION)


def mamba() -> PretrainedConfig:
    return MambaConfig(hidden_size=128, state_size=8, **_COMMON)


def xglm() -> PretrainedConfig:
    """A network whose attention is its own: no group shares a prompt, which no tensor without numbers can show."""
    return XGLMConfig(d_model=128, ffn_dim=256, num_layers=2, attention_heads=4, max_position_embeddings=256, **_COMMON)


@pytest.mark.parametrize(
    ("config", "settings", "near"),
    [
        (qwen3_moe, {"router_z_loss_coef": 0.01}, 0.01),
        (gpt_oss, {"router_z_loss_coef": 0.01}, 0.01),
        (mixtral, {"router_aux_loss_coef": 0.0}, 0.01),
        (xglm, {}, 0.01),
        (
            mamba,
            {"max_completion_length": 12},
            0.07,
        ),  # autograd adds the steps' gradients in place, and not under the count on fake tensors
    ],
)
@pytest.mark.slow
def test_a_forecast_is_what_the_run_then_holds(
    config: Any, settings: dict[str, Any], near: float, tmp_path: Path
) -> None:
    folder = saved(config(), AutoModelForCausalLM, tmp_path)
    trainer, held = run(folder, **settings)
    assert trainer.forecast is not None
    assert trainer.forecast.peak_bytes == pytest.approx(max(held.values()), rel=near)
    for phase, size in trainer.forecast.phase_bytes.items():
        assert size == pytest.approx(held[phase], rel=max(0.03, near)), phase


@pytest.mark.parametrize(
    "shapes", [((24, 16), (3, 16, 8)), ((3, 24, 16), (16, 24)), ((24, 48), (48, 16)), ((3, 24, 16), (3, 16, 8))]
)
def test_products_of_experts_have_the_shapes_of_real_ones(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    left, right = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    both_3d = left.dim() == right.dim() == 3
    splits = 48 if left.dim() == right.dim() == 2 else 24
    offs = None if both_3d else torch.tensor([splits // 3, splits // 2, splits], dtype=torch.int32)
    real = torch.nn.functional.grouped_mm(left, right, offs=offs)
    with fake_device():
        fake = torch.nn.functional.grouped_mm(
            torch.empty(shapes[0]), torch.empty(shapes[1]), offs=None if offs is None else torch.empty(3).int()
        )
        assert fake.shape == real.shape
        assert fake.dtype == torch.float32
