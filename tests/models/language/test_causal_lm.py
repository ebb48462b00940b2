"""A causal LM's own scoring path against the model's logits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.models.language.base import ModuleHead, naive_logits
from memsafe_rl.models.language.causal_lm import CausalLMAdapter, Route, check_head
from memsafe_rl.types import LinearHead
from tests.models.helpers import PAD, SMALL, ExactSoftmax, assert_close, logprobs_of, make_rows, naive_row_logits
from tests.tiny import ARCHS, MODEL_CLASSES, tiny_config, tiny_model


def checked(model: nn.Module) -> CausalLMAdapter:
    adapter = CausalLMAdapter(model, pad_token_id=PAD)
    check_head(adapter)
    return adapter


def lora(model: Any, seed: int = 3, **settings: Any) -> Any:
    """Wraps a model in LoRA whose B matrices are not zero."""
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **settings})
    model = get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype), alpha=0.2)
    return model


@pytest.fixture
def exact_softmax() -> Iterator[None]:
    with ExactSoftmax():
        yield


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.usefixtures("exact_softmax")
def test_scores_equal_the_models_own(arch: str, tied: bool) -> None:
    model = tiny_model(arch, tied=tied, dtype=torch.float64)
    adapter, trajectory, rows = checked(model), make_rows(), [2, 0, 1]
    adapter_is_one: ModelAdapter = adapter
    distribution = adapter_is_one.distribution(trajectory, rows)
    assert adapter.path.route is Route.LEAN
    assert isinstance(distribution.head, LinearHead)
    assert distribution.lengths == (8, 5, 2)
    assert_close(naive_logits(distribution), naive_row_logits(model, trajectory, rows), 1e-12)
    taken = torch.cat([trajectory.actions.rows()[row] for row in rows])
    torch.testing.assert_close(distribution.tokens_M, taken)


@pytest.mark.parametrize("arch", ["qwen3", "gemma2", "gemma3"])
@pytest.mark.usefixtures("exact_softmax")
def test_eager_attention_is_exact_too(arch: str) -> None:
    model = tiny_model(arch, attn="eager", dtype=torch.float64)
    adapter, trajectory = checked(model), make_rows()
    assert adapter.path.route is Route.LEAN
    distribution = adapter.distribution(trajectory, [0, 1, 2])
    assert_close(naive_logits(distribution), naive_row_logits(model, trajectory, [0, 1, 2]), 1e-12)


@pytest.mark.usefixtures("exact_softmax")
def test_layers_may_have_sizes_of_their_own() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "num_kv_shared_layers": 0}
    inputs = {
        "vocab_size": 300,
        "vocab_size_per_layer_input": 300,
        "hidden_size_per_layer_input": 8,
        "pad_token_id": PAD,
    }
    kinds = ["sliding_attention", "full_attention"]
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma4_text", layer_types=kinds, sliding_window=4, **sizes, **heads, **inputs)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    adapter, trajectory = checked(model), make_rows()
    assert adapter.geometry.head_dim == 16
    assert adapter.path.route is Route.LEAN
    assert adapter.joins
    logits = naive_logits(adapter.distribution(trajectory, [0, 1, 2]))
    assert_close(logits, naive_row_logits(model, trajectory, [0, 1, 2]), 1e-12)


@pytest.mark.parametrize("arch", ["qwen3", "gemma2"])
def test_float64_under_eager_attention_takes_the_lean_path(arch: str, caplog: pytest.LogCaptureFixture) -> None:
    model, trajectory = tiny_model(arch, attn="eager", dtype=torch.float64), make_rows((3, 19, 1), (40, 2, 5))
    with caplog.at_level(logging.INFO, "memsafe_rl"):
        adapter = checked(model)
    assert not caplog.records
    assert adapter.path.route is Route.LEAN
    assert adapter.joins
    assert adapter.packs_prompts
    for packed in (False, True):
        logits = naive_logits(adapter.distribution(trajectory, [0, 1, 2], packed=packed))
        assert_close(logits, naive_row_logits(model, trajectory, [0, 1, 2]), 1e-5)


def test_padding_under_a_window_stays_finite_in_float64() -> None:
    model, trajectory = tiny_model("gemma2", dtype=torch.float64), make_rows((3, 19, 1), (40, 2, 5))
    adapter, rows = CausalLMAdapter(model, pad_token_id=PAD), [0, 1, 2]
    adapter.path, adapter.joins = replace(adapter.path, route=Route.MASKED), False
    wanted = naive_row_logits(model, trajectory, rows)
    assert_close(naive_logits(adapter.distribution(trajectory, rows)), wanted, 1e-5)
    logits, _ = adapter.prefill([trajectory.conditions.rows()[trajectory.condition_of_row[row]] for row in rows])
    lengths = trajectory.action_lengths(rows)
    firsts = [sum(lengths[:row]) for row in rows]
    assert_close(logits, wanted[firsts], 1e-5)


@pytest.mark.usefixtures("exact_softmax")
def test_the_head_is_the_models_weight_and_gets_its_gradient() -> None:
    model = tiny_model("gemma2", dtype=torch.float64)
    trajectory = make_rows()
    adapter = checked(model)
    distribution = adapter.distribution(trajectory, [0, 1, 2])
    assert isinstance(distribution.head, LinearHead)
    assert distribution.head.weight_VD is model.lm_head.weight
    assert distribution.head.soft_cap == 3.0
    logprobs_of(distribution).sum().backward()
    got = model.lm_head.weight.grad.clone()
    model.zero_grad()
    tokens = distribution.tokens_M[:, None]
    naive_row_logits(model, trajectory, [0, 1, 2]).log_softmax(-1).gather(-1, tokens).sum().backward()
    assert_close(got, model.lm_head.weight.grad, 1e-11)


def test_lora_on_the_head_scores_through_the_module() -> None:
    model = lora(tiny_model(tied=False, dtype=torch.float64), target_modules=["q_proj", "lm_head"])
    adapter, trajectory = checked(model), make_rows()
    distribution = adapter.distribution(trajectory, [0, 1, 2])
    assert isinstance(distribution.head, ModuleHead)
    assert adapter.path.route is Route.LEAN
    assert_close(naive_logits(distribution), naive_row_logits(model, trajectory, [0, 1, 2]), 1e-12)
    logprobs_of(distribution).sum().backward()
    assert model.base_model.model.lm_head.lora_A["default"].weight.grad.abs().max() > 0


def test_a_head_in_modules_to_save_is_the_trained_copy() -> None:
    model = lora(tiny_model(tied=False, dtype=torch.float64), modules_to_save=["lm_head"])
    adapter, trajectory = checked(model), make_rows()
    distribution = adapter.distribution(trajectory, [0, 1, 2])
    wrapper = model.base_model.model.lm_head
    assert isinstance(distribution.head, LinearHead)
    assert distribution.head.weight_VD is wrapper.modules_to_save["default"].weight
    assert adapter.geometry.head_trainable
    assert_close(naive_logits(distribution), naive_row_logits(model, trajectory, [0, 1, 2]), 1e-12)
    with adapter.reference() as reference:
        head = reference.distribution(trajectory, [0]).head
    assert isinstance(head, LinearHead)
    assert head.weight_VD is wrapper.original_module.weight


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (CohereForCausalLM, CohereConfig(logit_scale=0.25, **SMALL)),
        (GraniteForCausalLM, GraniteConfig(logits_scaling=3.0, **SMALL)),
        (MistralForCausalLM, MistralConfig(sliding_window=5, **SMALL)),
    ],
)
def test_scales_and_windows_named_in_the_config(model_class: Any, config: Any) -> None:
    torch.manual_seed(0)
    model, trajectory = model_class(config).double().eval(), make_rows()
    adapter = checked(model)
    assert adapter.path.route is Route.LEAN
    distribution = adapter.distribution(trajectory, [0, 1, 2])
    assert_close(naive_logits(distribution), naive_row_logits(model, trajectory, [0, 1, 2]), 1e-12)


class MultipliesInstead(GraniteForCausalLM):  # type: ignore[misc]
    """Reads its config's scale as HyperCLOVA X does."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.config.logits_scaling**2
        return output


class Odd(Qwen3ForCausalLM):  # type: ignore[misc]
    """Does to its logits what no config names."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.clone()
        output.logits[..., 7] += 5.0
        return output


class SeesNoEmptyCache(Qwen3ForCausalLM):  # type: ignore[misc]
    """A trunk that cannot run on the empty cache."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        forward = self.model.forward

        def picky(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
            if past_key_values is not None and not kwargs.get("use_cache"):
                raise AttributeError("no such state")
            return forward(*args, past_key_values=past_key_values, **kwargs)

        self.model.forward = picky


@pytest.mark.parametrize(
    ("model_class", "config", "route"),
    [
        (MultipliesInstead, GraniteConfig(logits_scaling=3.0, **SMALL), Route.LEAN),
        (SeesNoEmptyCache, tiny_config("qwen3"), Route.MASKED),
        (Odd, tiny_config("qwen3"), Route.WHOLE),
    ],
)
def test_an_odd_model_falls_back_with_one_warning(
    model_class: Any, config: Any, route: Route, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, trajectory = model_class(config).double().train(), make_rows()
    with caplog.at_level(logging.WARNING, "memsafe_rl"):
        adapter = checked(model)
    assert adapter.path.route is route
    assert len(caplog.records) == 1
    assert model_class.__name__ in caplog.text
    assert model.training
    model.eval()
    distribution = adapter.distribution(trajectory, [0, 1, 2])
    assert_close(naive_logits(distribution), naive_row_logits(model, trajectory, [0, 1, 2]), 1e-12)
    logprobs_of(distribution).sum().backward()
    assert model.lm_head.weight.grad.abs().max() > 0


def test_a_good_model_is_checked_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "memsafe_rl"):
        for dtype in (torch.float32, torch.bfloat16):
            checked(tiny_model("gemma2", dtype=dtype))
    assert not caplog.records


class _LargestTensor(TorchDispatchMode):
    """Notes the most elements of any tensor made inside, by its last axes."""

    def __init__(self) -> None:
        super().__init__()
        self.square = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim == 4 and out.shape[-1] == out.shape[-2]:
            self.square = max(self.square, out.untyped_storage().nbytes() // out.element_size())
        return out


def test_no_mask_of_the_rows_is_built() -> None:
    adapter = checked(tiny_model("llama"))
    ledger = _LargestTensor()
    with ledger, torch.no_grad():
        adapter.distribution(make_rows((20, 9, 1), (21, 2, 5)), [0, 1, 2])
    assert ledger.square == 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_runs_on_fake_tensors(arch: str) -> None:
    with FakeTensorMode():
        model = MODEL_CLASSES[arch](tiny_config(arch)).eval()
        adapter = CausalLMAdapter(model, pad_token_id=PAD)
        trajectory = make_rows()
        with adapter.recompute(True):
            distribution = adapter.distribution(trajectory, [0, 1, 2])
        assert tuple(distribution.hidden_MD.shape) == (15, 32)
        distribution.hidden_MD.sum().backward()
        logits, state = adapter.prefill([torch.ones(3, dtype=torch.int64), torch.ones(7, dtype=torch.int64)])
        state = state.select([0, 0, 1, 1])
        logits = adapter.decode_step(state, torch.ones(4, dtype=torch.int64))
        assert tuple(logits.shape) == (4, 258)
        assert state.nbytes() > 0


def test_a_distribution_takes_whole_rows_with_a_prompt() -> None:
    adapter = CausalLMAdapter(tiny_model(), pad_token_id=PAD)
    with pytest.raises(ConfigError, match="columns"):
        adapter.distribution(make_rows(), [0], slice(0, 1))
    with pytest.raises(DataError, match="0 tokens"):
        adapter.distribution(make_rows((3, 0, 1)), [0, 1, 2])


@pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig])
def test_prompt_learning_is_refused_by_name(config: Any) -> None:
    model = get_peft_model(tiny_model(), config(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ConfigError, match=r"PROMPT_TUNING|PREFIX_TUNING"):
        CausalLMAdapter(model, pad_token_id=PAD)


def test_an_encoder_decoder_is_refused_by_name() -> None:
    model = T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(ConfigError, match="T5ForConditionalGeneration is an encoder-decoder"):
        CausalLMAdapter(model, pad_token_id=PAD)


def test_the_models_own_checkpointing_is_switched_off() -> None:
    model = tiny_model()
    model.gradient_checkpointing_enable()
    CausalLMAdapter(model, pad_token_id=PAD)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"modules_to_save": ["embed_tokens"]},
        {"trainable_token_indices": [3, 5, 7]},
        {"target_modules": "all-linear"},
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_adapters_on_the_embedding_leave_scores_the_models_own(settings: dict[str, Any], tied: bool) -> None:
    model = lora(tiny_model(tied=tied, dtype=torch.float64), **settings)
    adapter, trajectory = checked(model), make_rows()
    got = naive_logits(adapter.distribution(trajectory, [0, 1, 2]))
    assert adapter.path.route is Route.LEAN
    assert_close(got, naive_row_logits(model, trajectory, [0, 1, 2]), 1e-12)
    logits, _ = adapter.prefill([trajectory.conditions.rows()[0]])
    assert tuple(logits.shape) == (1, 258)
    assert adapter.geometry.vocab_size == 258


def test_autocast_is_checked_in_its_own_precision(caplog: pytest.LogCaptureFixture) -> None:
    model, trajectory = tiny_model("qwen3"), make_rows()
    with torch.autocast("cpu", torch.bfloat16):
        adapter = checked(model)
        got = naive_logits(adapter.distribution(trajectory, [0, 1, 2]))
        wanted = naive_row_logits(model, trajectory, [0, 1, 2])
    assert adapter.path.route is Route.LEAN
    assert not caplog.records
    assert_close(got.float(), wanted.float(), 5e-2)


def test_rope_that_reads_lengths_is_said(caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    CausalLMAdapter(MODEL_CLASSES["llama"](config), pad_token_id=PAD)
    assert "rope_type 'dynamic'" in caplog.text
