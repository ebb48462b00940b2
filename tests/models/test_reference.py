"""The reference: which weights answer, what they cost, and that nothing of the switch remains."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from memsafe_rl.errors import ConfigError
from memsafe_rl.models.critic import add_critic_adapter
from memsafe_rl.models.geometry import weight_bytes
from memsafe_rl.models.language.base import naive_logits
from memsafe_rl.models.language.causal_lm import CausalLMAdapter, check_head
from memsafe_rl.models.loading import load_model
from tests.models.helpers import PAD, assert_close, make_rows, naive_row_logits
from tests.tiny import tiny_model

ROWS = [0, 1, 2]


def storages(*models: Any) -> set[int]:
    return {weight.untyped_storage().data_ptr() for model in models for weight in model.parameters()}


def move(model: Any, names: str = "") -> None:
    """Changes every trainable weight, as updates would."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad and names in name:
                weight.add_(0.05 * torch.ones_like(weight).cumsum(-1).cos())


def adapter_of(loaded: Any) -> CausalLMAdapter:
    adapter = CausalLMAdapter(loaded.model, pad_token_id=PAD, reference_model=loaded.reference_model)
    check_head(adapter)
    return adapter


def reference_logits(adapter: CausalLMAdapter) -> Tensor:
    with torch.no_grad(), adapter.reference() as reference:
        return naive_logits(reference.distribution(make_rows(), ROWS))


LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    "settings",
    [{}, {"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}],
)
def test_a_new_adapter_off_is_the_untouched_base(settings: dict[str, Any]) -> None:
    base = tiny_model(tied=False, dtype=torch.float64)
    base_storages = storages(base)
    wanted = naive_row_logits(base, make_rows(), ROWS).detach()
    loaded = load_model(base, peft_config=LoraConfig(**{**LORA, **settings}), with_reference=True)
    assert loaded.reference_model is None
    assert base_storages <= storages(loaded.model)
    frozen = {weight.data_ptr() for weight in loaded.model.parameters() if not weight.requires_grad}
    assert base_storages == frozen
    adapter = adapter_of(loaded)
    move(loaded.model)
    assert_close(reference_logits(adapter), wanted, 1e-12)
    own = naive_logits(adapter.distribution(make_rows(), ROWS))
    assert_close(own, naive_row_logits(loaded.model, make_rows(), ROWS), 1e-12)
    assert (own - wanted).abs().max() > 1e-3


@pytest.mark.parametrize(
    "settings",
    [{"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}, {"layer_replication": [[0, 2], [1, 2]]}],
)
def test_a_base_that_an_adapter_changed_is_not_changed_by_its_copy(settings: dict[str, Any]) -> None:
    model = get_peft_model(tiny_model("llama", tied=False), LoraConfig(**LORA, **settings)).eval()
    move(model)
    wanted = naive_row_logits(model, make_rows(), ROWS).detach()
    loaded = load_model(model, with_reference=True)
    add_critic_adapter(loaded.model)
    assert_close(naive_row_logits(loaded.model, make_rows(), ROWS), wanted, 1e-6)
    adapter = adapter_of(loaded)
    move(loaded.model)
    assert_close(reference_logits(adapter), wanted, 1e-5)
    told = next(iter(settings))
    with pytest.raises(ConfigError, match=rf"peft_config has {told}.*, which changes the base.*Set beta=0"):
        load_model(tiny_model("llama"), peft_config=LoraConfig(**LORA, **settings), with_reference=True)


def test_a_name_that_begins_another_part_of_a_path_is_an_adapters_too() -> None:
    model = get_peft_model(tiny_model(dtype=torch.float64), LoraConfig(**LORA), "w")
    move(model)
    wanted = naive_row_logits(model.eval(), make_rows(), ROWS).detach()
    adapter = adapter_of(load_model(model, with_reference=True))
    move(model, names=".w.")
    assert_close(reference_logits(adapter), wanted, 1e-12)


def test_an_adapter_that_came_with_the_model_is_copied() -> None:
    model = get_peft_model(
        tiny_model(tied=False, dtype=torch.float64), LoraConfig(**LORA, modules_to_save=["lm_head"]), "learnt"
    )
    move(model)
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    base_bytes = weight_bytes(model)
    wanted = naive_row_logits(model.eval(), make_rows(), ROWS).detach()
    loaded = load_model(model, with_reference=True)
    assert loaded.reference_model is None
    assert {name for name, weight in model.named_parameters() if weight.requires_grad} == trainable
    assert weight_bytes(model) - base_bytes == sum(p.nbytes for p in model.parameters() if p.requires_grad)
    adapter = adapter_of(loaded)
    move(model)
    assert_close(reference_logits(adapter), wanted, 1e-12)
    assert model.active_adapters == ["learnt"]
    moved = naive_row_logits(model, make_rows(), ROWS)
    assert (moved - wanted).abs().max() > 1e-3
    assert_close(naive_logits(adapter.distribution(make_rows(), ROWS)), moved, 1e-12)


def test_without_a_reference_no_adapter_is_added() -> None:
    model = get_peft_model(tiny_model(), LoraConfig(**LORA))
    assert list(load_model(model).model.peft_config) == ["default"]


def test_full_training_has_one_frozen_copy() -> None:
    model = tiny_model("gemma2")
    wanted = naive_row_logits(model, make_rows(), ROWS).detach()
    loaded = load_model(model, with_reference=True)
    assert loaded.model is model
    assert not storages(model) & storages(loaded.reference_model)
    assert not any(weight.requires_grad for weight in loaded.reference_model.parameters())
    assert not loaded.reference_model.training
    adapter = adapter_of(loaded)
    assert adapter.geometry.parameter_bytes == weight_bytes(model) * 2
    move(model)
    assert_close(reference_logits(adapter), wanted, 1e-5)
    assert load_model(model).reference_model is None


@pytest.mark.parametrize("with_copy", [False, True])
def test_the_switch_leaves_no_trace_after_an_error(with_copy: bool) -> None:
    model = get_peft_model(tiny_model(), LoraConfig(**LORA))
    next(weight for weight in model.parameters() if weight.requires_grad).requires_grad_(False)
    adapter = adapter_of(load_model(model, with_reference=with_copy))
    move(model)
    flags = [weight.requires_grad for weight in model.parameters()]
    before = naive_logits(adapter.distribution(make_rows(), ROWS))
    with pytest.raises(torch.OutOfMemoryError), adapter.reference():
        raise torch.OutOfMemoryError
    assert [weight.requires_grad for weight in model.parameters()] == flags
    assert torch.equal(naive_logits(adapter.distribution(make_rows(), ROWS)), before)


def test_no_reference_is_an_error_with_a_remedy() -> None:
    adapter = CausalLMAdapter(tiny_model(), pad_token_id=PAD)
    with pytest.raises(ConfigError, match="beta=0"), adapter.reference():
        pass


def test_trained_biases_cannot_be_switched_off() -> None:
    config = LoraConfig(**LORA, bias="all")
    with pytest.raises(ConfigError, match="bias"):
        load_model(tiny_model("qwen2"), peft_config=config, with_reference=True)
    adapter = adapter_of(load_model(tiny_model("qwen2"), peft_config=copy.deepcopy(config)))
    with pytest.raises(ConfigError, match="bias"), adapter.reference():
        pass
