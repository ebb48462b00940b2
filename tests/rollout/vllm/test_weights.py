"""Weights for another engine: a checkpoint's names, adapters merged, the base untouched to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from memsafe_rl.errors import ConfigError
from memsafe_rl.rollout.external.vllm_weights import named_weights, refuse_unmergeable
from tests.tiny import tiny_model


def with_adapter(model: Any, **settings: Any) -> Any:
    peft = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **settings))
    return peft.eval()


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("arch", ["qwen3", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_plain_model_gives_every_weight_once_without_a_copy(arch: str, tied: bool) -> None:
    model = tiny_model(arch, tied=tied)
    given = dict(named_weights(model))
    known = dict(model.named_parameters())
    assert given.keys() == known.keys()
    assert all(given[name].data_ptr() == known[name].data_ptr() for name in known)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": "all-linear", "use_dora": True},
        {"target_modules": ["k_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["lora", "dora", "saved-head"],
)
def test_merged_weights_in_a_plain_model_compute_what_the_adapter_does(settings: dict[str, Any]) -> None:
    model = with_adapter(tiny_model("qwen3", tied=False), **settings)
    if "modules_to_save" in settings:
        model.base_model.model.lm_head.modules_to_save["default"].weight.data.mul_(1.5)
    before = {name: (tensor.clone(), tensor.data_ptr()) for name, tensor in model.state_dict().items()}
    ids = torch.arange(2, 14)[None]
    wanted = logits_of(model, ids)

    plain = tiny_model("qwen3", tied=False, seed=9)
    plain.load_state_dict(dict(named_weights(model)))
    # two ways to sum W x + B A x in float32, logits up to some tens
    torch.testing.assert_close(logits_of(plain, ids), wanted, rtol=1e-4, atol=2e-4)

    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, (tensor, address) in before.items():
        assert torch.equal(after[name], tensor)
        assert after[name].data_ptr() == address
    assert torch.equal(logits_of(model, ids), wanted)


def test_giving_up_half_way_leaves_the_base_as_it_was() -> None:
    model = with_adapter(tiny_model("qwen3"), target_modules=["q_proj", "v_proj"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = named_weights(model)
    for _ in range(6):
        next(weights)
    weights.close()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(getattr(module, "merged", False) for module in model.modules())


def test_a_switched_off_adapter_is_not_merged() -> None:
    plain = tiny_model("qwen3")
    wanted = {name: tensor.clone() for name, tensor in plain.named_parameters()}
    model = with_adapter(plain, target_modules=["q_proj"])
    with model.disable_adapter():
        given = dict(named_weights(model))
    assert given.keys() == wanted.keys()
    assert all(torch.equal(given[name], wanted[name]) for name in wanted)


def test_what_cannot_be_merged_by_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"changes lm_head.*ties"):
        refuse_unmergeable(with_adapter(tiny_model("qwen3"), target_modules=["lm_head"]))
    with pytest.raises(ConfigError, match="cannot be merged by itself"):
        refuse_unmergeable(with_adapter(tiny_model("qwen3"), target_parameters=["q_proj.weight"], target_modules=[]))
    quantised = tiny_model("qwen3")
    layer = quantised.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.data.to(torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match=r"up_proj\.weight is stored as torch\.int8"):
        refuse_unmergeable(quantised)
    refuse_unmergeable(with_adapter(tiny_model("qwen3"), target_modules="all-linear"))
