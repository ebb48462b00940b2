"""The losses on routers: over the whole step, whatever the cut, and as transformers computes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeHybridConfig,
    JambaConfig,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)
from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

from memsafe_rl import GRPOConfig, forecast_memory
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.trainers.grpo import GRPOTrainer
from tests.faults.audit import audited
from tests.preflight.beside import saved
from tests.tiny import EOS_ID, PAD_ID, VOCAB_SIZE
from tests.trainers.helpers import count_digits, cut, make_trainer, weights

COEF = 0.05
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def mixture(family: str, dtype: torch.dtype = torch.float32) -> Any:
    sizes: dict[str, Any] = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": PAD_ID, "eos_token_id": EOS_ID}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": COEF}
    torch.manual_seed(0)
    if family == "mixtral":
        return made(MixtralForCausalLM, MixtralConfig(**sizes, **experts), dtype)
    if family == "gpt_oss":
        return made(GptOssForCausalLM, GptOssConfig(**sizes, **experts, head_dim=8), dtype)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": COEF}
    return made(Qwen3MoeForCausalLM, Qwen3MoeConfig(**sizes, **experts, head_dim=8), dtype)


def made(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    if dtype is torch.float64:
        config._experts_implementation = "eager"  # the default has no float64
    return kind(config).to(dtype).eval()


FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss")


def gradient_of(trainer: GRPOTrainer) -> tuple[torch.Tensor, dict[str, float]]:
    loop = trainer.loop
    loop.make_optimizer()
    loop.begin_step()
    loop.state.rollout = loop.state.rollout or loop.collect()
    metrics = loop.learner.step(loop.state).metrics
    found = torch.cat([p.grad.flatten().double() for p in trainer.model.parameters() if p.requires_grad])
    return found, metrics


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_cut_changes_its_gradient(family: str, dtype: torch.dtype, limit: float, tmp_path: Path) -> None:
    found = []
    for place, policy in enumerate([cut(8192), cut(1), cut(40, checkpointing=True)]):
        made = {"model": mixture(family, dtype), "router_z_loss_coef": COEF}
        found.append(gradient_of(make_trainer(tmp_path / str(place), **made, policy=policy)))
    whole, metrics = found[0]
    for other, others in found[1:]:
        assert (other - whole).norm() <= limit * whole.norm()
        for name in ("aux_loss", "router_z_loss"):
            assert others[name] == pytest.approx(metrics[name], rel=1e-6)
    without, _ = gradient_of(make_trainer(tmp_path / "without", model=mixture(family, dtype), router_aux_loss_coef=0.0))
    assert (without - whole).norm() > 1e-4 * whole.norm()


def pay_some(completions: Sequence[str], **_: object) -> list[float | None]:
    """Pays nothing, not even 0, for the first half of the completions."""
    return [None if 2 * place < len(completions) else len(text) for place, text in enumerate(completions)]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reward", [count_digits, pytest.param(pay_some, marks=pytest.mark.slow)])
def test_it_is_what_transformers_computes_of_the_whole_step(family: str, reward: Any, tmp_path: Path) -> None:
    whole = {"reward_funcs": reward, "max_grad_norm": 0.0}  # unclipped: two gradients are subtracted
    made = {"model": mixture(family, torch.float64), "router_z_loss_coef": 2 * COEF}
    trainer = make_trainer(tmp_path, **made, policy=cut(40), **whole)
    ours, metrics = gradient_of(trainer)
    rollout = trainer.loop.state.rollout
    assert rollout is not None
    made = {"model": mixture(family, torch.float64), "router_aux_loss_coef": 0.0}
    without, _ = gradient_of(make_trainer(tmp_path / "plain", **made, **whole))

    rows = [row for row, counted in enumerate(rollout.trajectory.counted_actions) if counted]
    assert (len(rows) < len(rollout.trajectory)) is (reward is pay_some)
    ids = rollout.trajectory.token_rows(rows, PAD_ID, "cpu")
    lengths = torch.tensor(rollout.trajectory.row_lengths(rows))
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    model = mixture(family, torch.float64)
    output = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
    aux, kept = output.aux_loss, mask.flatten().bool()
    logits_LBE = torch.stack([logits.flatten(0, -2)[kept] for logits in output.router_logits])
    z = router_z_loss_func(logits_LBE)
    (COEF * aux + 2 * COEF * z).backward()
    theirs = torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten().double() for p in model.parameters()]
    )
    assert metrics["aux_loss"] == pytest.approx(aux.item(), rel=1e-6)
    assert metrics["router_z_loss"] == pytest.approx(z.item(), rel=1e-12)
    assert (ours - without - theirs).norm() <= 5e-6 * theirs.norm()  # transformers adds up in float32


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("settings", [{}, {"peft_config": LORA, "beta": 0.1}], ids=["full", "LoRA"])
def test_a_mixture_trains_by_default_and_survives_refused_allocations(settings: Any, tmp_path: Path) -> None:
    plain = make_trainer(tmp_path / "plain", model=mixture("qwen3_moe"), num_iterations=2, **settings)
    with audited() as audit:
        plain.train()
    assert audit.unguarded == []
    assert {"aux_loss"} <= set(plain.history[0])
    for fail_at in (400, 2000, 4000, 6000):
        with SimulatedMemory(fail_at=fail_at) as memory:
            again = make_trainer(tmp_path / str(fail_at), model=mixture("qwen3_moe"), num_iterations=2, **settings)
            again.train()
        assert memory.refusals == 1
        assert (weights(again) - weights(plain)).norm() <= 1e-5 * weights(plain).norm()
        assert again.history[-1]["aux_loss"] == pytest.approx(plain.history[-1]["aux_loss"], rel=1e-4)


def test_a_model_without_experts_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM does not show.* Set router_aux_loss_coef=0\.0\."):
        make_trainer(tmp_path, router_aux_loss_coef=0.1)
    with pytest.raises(ConfigError, match=r"does not go with torch_compile\. Set router_aux_loss_coef=0\.0, or leave"):
        make_trainer(tmp_path, model=mixture("mixtral"), torch_compile=True)
    sizes: dict[str, Any] = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": PAD_ID}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 0}
    with pytest.raises(ConfigError, match=r"Glm4MoeForCausalLM does not show.* Set router_z_loss_coef=0\.0\."):
        make_trainer(tmp_path, model=Glm4MoeForCausalLM(Glm4MoeConfig(**sizes, **experts)), router_z_loss_coef=0.1)


@pytest.mark.parametrize(
    ("config", "dense"),
    [
        (DogeConfig, {"is_moe": False}),
        (GraniteMoeHybridConfig, {"num_local_experts": 0, "layer_types": ["attention"], "mamba_n_heads": 8}),
        (JambaConfig, {"num_experts": 1, "attn_layer_period": 1, "attn_layer_offset": 0}),
    ],
)
def test_a_member_without_experts_of_a_family_with_them_is_trained_and_forecast(
    config: Any, dense: dict[str, Any], tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 1, "bos_token_id": None}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": PAD_ID, "eos_token_id": EOS_ID}
    made = config(**sizes, intermediate_size=64, **dense)
    assert made.router_aux_loss_coef > 0
    model = AutoModelForCausalLM.from_config(made)
    assert make_trainer(tmp_path / "run", model=model, max_steps=1).train().global_step == 1
    folder = str(saved(made, AutoModelForCausalLM, tmp_path))
    args = GRPOConfig(report_to="none", use_cpu=True, max_completion_length=8, num_generations=8)
    assert forecast_memory(folder, args, device_bytes="1GiB", device="cpu").peak_bytes > 0
    with pytest.raises(ConfigError, match=r"does not show what they choose\. Set router_aux_loss_coef=0\.0\."):
        make_trainer(tmp_path / "asked", model=model, router_aux_loss_coef=0.1)


@pytest.mark.slow
def test_losses_of_an_encoder_decoders_experts_are_never_left_out_in_silence(tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCAB_SIZE, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    ids = {"pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "decoder_start_token_id": PAD_ID}
    sparse = {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    model = SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**sizes, **ids, **sparse)).eval()
    with pytest.raises(ConfigError, match=r"Set router_aux_loss_coef=0\.0, router_z_loss_coef=0\.0\."):
        make_trainer(tmp_path, model=model)
    trainer = make_trainer(tmp_path, model=model, router_aux_loss_coef=0.0, router_z_loss_coef=0.0, max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1
