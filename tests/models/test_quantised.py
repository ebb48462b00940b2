"""A bitsandbytes base under LoRA, on the CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from memsafe_rl.errors import ConfigError
from memsafe_rl.models.geometry import weight_bytes
from memsafe_rl.models.language.base import ModuleHead, naive_logits
from memsafe_rl.models.language.causal_lm import CausalLMAdapter, Route, check_head
from memsafe_rl.models.loading import load_model
from tests.models.helpers import PAD, assert_close, logprobs_of, make_rows, naive_row_logits
from tests.tiny import tiny_model

pytest.importorskip("bitsandbytes")

HIDDEN = 128
CONFIGS: dict[str, Any] = {
    "nf4": BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    ),
    "int8": BitsAndBytesConfig(load_in_8bit=True),
    "nf4-head": BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, llm_int8_skip_modules=["none"]
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("qwen3", hidden=HIDDEN, tied=False).save_pretrained(path)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_lora_on_a_quantised_base(folder: str, kind: str) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    loaded = load_model(folder, quantization_config=CONFIGS[kind], peft_config=config, with_reference=True)
    assert loaded.reference_model is None
    adapter, trajectory, rows = CausalLMAdapter(loaded.model, pad_token_id=PAD), make_rows(), [0, 1, 2]
    check_head(adapter)
    assert adapter.path.route is Route.LEAN
    distribution = adapter.distribution(trajectory, rows)
    assert isinstance(distribution.head, ModuleHead) is (kind == "nf4-head")
    with adapter.recompute(True):
        distribution = adapter.distribution(trajectory, rows)
    logprobs_of(distribution).sum().backward()
    trained = {name: weight for name, weight in loaded.model.named_parameters() if weight.requires_grad}
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    assert all("lora_" in name for name in trained)
    assert all(weight.grad is not None and bool(weight.grad.isfinite().all()) for weight in trained.values())
    assert any(bool(weight.grad.any()) for weight in trained.values() if weight.grad is not None)

    # The naive form: the same adapter on the weights that the quantised ones stand for.
    naive = load_model(unquantised(loaded.model, folder), peft_config=copy.deepcopy(config)).model
    naive.load_state_dict(dict(trained.items()), strict=False)
    logits = naive_row_logits(naive, trajectory, rows)
    logits.log_softmax(-1).gather(-1, distribution.tokens_M[:, None]).sum().backward()
    tolerance = 5e-2 if kind == "int8" else 1e-4  # 8-bit layers round their inputs too
    wanted_grads = {name: weight.grad for name, weight in naive.named_parameters() if weight.requires_grad}
    got = torch.cat([weight.grad.flatten() for weight in trained.values()])  # type: ignore[union-attr]
    wanted = torch.cat([wanted_grads[name].flatten() for name in trained])  # type: ignore[union-attr]
    assert float(wanted.abs().max()) > 0.1
    assert float((got - wanted).norm() / wanted.norm()) < tolerance

    with torch.no_grad():
        for weight in trained.values():
            weight.add_(0.1)
        with adapter.reference() as reference:
            off = naive_logits(reference.distribution(trajectory, rows))
        with naive.disable_adapter():
            assert_close(off, naive_row_logits(naive, trajectory, rows), tolerance)
        on = naive_logits(adapter.distribution(trajectory, rows))
    assert float((on - off).abs().max()) > 0.1


@pytest.mark.slow
def test_a_4bit_base_beyond_the_room_begins_on_the_host_and_learns_the_same_bits(folder: str) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])

    def passed(room_bytes: int | None, resident: int | None) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        loaded = load_model(folder, quantization_config=CONFIGS["nf4"], peft_config=config, room_bytes=room_bytes)
        adapter = CausalLMAdapter(loaded.model, pad_token_id=PAD)
        host = adapter.host_weights.resident
        assert host == (0 if room_bytes else 2)
        check_head(adapter)
        adapter.host_weights.place(resident, adapter.device)
        adapter.host_weights.place(resident, adapter.device)
        with torch.no_grad():  # as a rollout: where a CPU has bf16 instructions, layers may pack their weights
            loaded.model(torch.tensor([[3, 4, 5]]))
        with adapter.recompute(True):
            found = logprobs_of(adapter.distribution(make_rows(), [0, 1, 2]))
        found.sum().backward()
        return found.detach(), *(weight.grad for weight in loaded.model.parameters() if weight.requires_grad)

    whole = passed(None, None)
    for resident in (0, 1, None):
        assert all(map(torch.equal, passed(1, resident), whole))


def unquantised(model: Any, folder: str) -> Any:
    """A plain model with the numbers that a quantised base stands for."""
    import bitsandbytes.functional as bnb

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    modules = dict(model.get_base_model().named_modules())
    with torch.no_grad():
        for name, module in plain.named_modules():
            source = modules.get(name)
            source = getattr(source, "base_layer", source)
            if not isinstance(module, torch.nn.Linear):
                continue
            weight, scales = source.weight, getattr(getattr(source, "state", None), "SCB", None)
            if getattr(weight, "quant_state", None) is not None:
                module.weight.copy_(bnb.dequantize_4bit(weight.data, weight.quant_state))
            elif scales is not None:
                module.weight.copy_(bnb.int8_vectorwise_dequant(weight.data, scales))
            else:
                module.weight.copy_(weight)
    return plain


def test_a_4bit_layer_packed_for_inference_is_unpacked(folder: str) -> None:
    """Where a CPU has bf16 instructions, an eval forward before us has packed the weights already."""
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    loaded = load_model(folder, quantization_config=CONFIGS["nf4"], peft_config=config)
    with torch.no_grad():
        loaded.model(torch.tensor([[3, 4, 5]]))
    adapter = CausalLMAdapter(loaded.model, pad_token_id=PAD)
    logprobs_of(adapter.distribution(make_rows(), [0])).sum().backward()
    for name, weight in loaded.model.named_parameters():
        assert weight.grad is not None or not weight.requires_grad, name


def test_bytes_of_quantised_weights(folder: str) -> None:
    """Blocks hold 2 · (q 128·64, k and v 128·32, o 64·128, three of 128·256) weights, 4 or 8 bits each."""
    elements = 2 * (2 * HIDDEN * 64 + 2 * HIDDEN * 32 + 3 * HIDDEN * 256)
    config = LoraConfig(r=4, target_modules=["q_proj"])
    plain = weight_bytes(tiny_model("qwen3", hidden=HIDDEN, tied=False)) - 4 * elements
    for kind, low, high in (("nf4", 0.5, 0.6), ("int8", 1.0, 1.05)):
        loaded = load_model(folder, quantization_config=CONFIGS[kind], peft_config=config)
        adapter = CausalLMAdapter(loaded.model, pad_token_id=PAD)
        for _ in range(2):  # the first forward moves 8-bit scales to another place
            blocks = adapter.geometry.parameter_bytes - adapter.geometry.trainable_bytes - plain
            assert low * elements < blocks < high * elements, (kind, blocks / elements)
            with torch.no_grad():
                adapter.distribution(make_rows(), [0])


def test_a_quantised_base_alone_cannot_be_trained(folder: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=CONFIGS["nf4"], device_map={"": "cpu"}, dtype=torch.float32
    )
    with pytest.raises(ConfigError, match="Pass a peft_config"):
        load_model(base)
    loaded = load_model(base, peft_config=LoraConfig(r=4, target_modules=["q_proj"]))
    assert sum(weight.requires_grad for weight in loaded.model.parameters()) == 4


def test_a_quantised_checkpoint_is_refused_after_loading(folder: str, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=CONFIGS["nf4"], device_map={"": "cpu"}, dtype=torch.float32
    )
    base.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is quantised and its weights cannot be trained"):
        load_model(str(tmp_path))
