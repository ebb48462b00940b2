"""Tensors that hold no bytes, and networks made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import bitsandbytes
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from memsafe_rl.accounting import charge, worth_running
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.simulated.counting import CountingAllocator
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.preflight.fake import device
from memsafe_rl.preflight.fake.device import fake_device, host_numbers, nothing_differs
from memsafe_rl.preflight.fake.families import FAMILIES, config_for, known_config
from memsafe_rl.preflight.fake.networks import fake_language_model, shallow_copy
from memsafe_rl.types import Component
from tests.tiny import tiny_config

PUBLISHED = {  # parameters as the publishers' model cards and safetensors count them
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "openai-community/gpt2": 124_439_808,
    "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b": 999_885_952,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_known_network_has_its_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_for(name))
    assert sum(weight.numel() for weight in model.parameters()) == PUBLISHED[name]


def test_names_are_known_without_owner_and_with_the_usual_endings(tmp_path: Path) -> None:
    for name in ("qwen3-4b", "Qwen/Qwen3-4B-Base", "unsloth/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B"):
        found = known_config(name)
        assert found is not None
        assert found.hidden_size == 2560
    assert known_config("Qwen/Qwen3-5B") is None
    tiny_config("llama").save_pretrained(tmp_path)
    assert config_for(str(tmp_path)).model_type == "llama"
    with pytest.raises(ConfigError, match=r"model='no/such-model' is neither .*Qwen/Qwen3-0.6B"):
        config_for("no/such-model")
    with pytest.raises(
        ConfigError, match=r"critic='Qwen/Qwen3-5B' is neither .*; near to it are .*Qwen/Qwen3-8B"
    ) as told:
        config_for("Qwen/Qwen3-5B", "critic")
    assert "t5-small" not in str(told.value)
    assert len(FAMILIES) > 20


@pytest.mark.parametrize("arch", ["qwen3", "gpt2", "gemma3"])
def test_a_fake_network_holds_what_a_real_one_holds(arch: str) -> None:
    settings: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "fan_in_fan_out": arch == "gpt2"}
    config, lora = tiny_config(arch, layers=3), LoraConfig(**settings)
    given = str(lora.target_modules)
    with fake_device() as memory:
        fakes = [fake_language_model(config, dtype=torch.float32, peft_config=lora) for _ in range(2)]
        held = memory.live_bytes
    assert str(lora.target_modules) == given  # PEFT writes into a config what it found
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    real = get_peft_model(model, LoraConfig(**settings))
    for fake in fakes:
        assert [(name, weight.shape, weight.requires_grad) for name, weight in fake.named_parameters()] == [
            (name, weight.shape, weight.requires_grad) for name, weight in real.named_parameters()
        ]
    buffers = sum(buffer.nbytes for buffer in real.buffers())
    assert held == 2 * (sum(weight.nbytes for weight in real.parameters()) + buffers)


def test_a_4_bit_base_holds_half_a_byte_a_weight_and_its_scales() -> None:
    config = tiny_config("qwen3", layers=2, hidden=64)
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    with fake_device():
        plain = fake_language_model(config, dtype=torch.bfloat16)
        packed = fake_language_model(config, dtype=torch.bfloat16, quantization_config=settings)
        names = {name for name, weight in packed.named_parameters() if weight.dtype == torch.uint8}
        wide = dict(plain.named_parameters())
        assert {name.split(".")[-2] for name in names} == {
            *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        }
        for name, weight in packed.named_parameters():
            assert weight.numel() == (wide[name].numel() // 2 if name in names else wide[name].numel())
        scales = sum(buffer.numel() for name, buffer in packed.named_buffers() if name.endswith("absmax"))
        assert scales == sum(wide[name].numel() for name in names) // 64
        ids = torch.ones((2, 5), dtype=torch.int64)
        assert packed(input_ids=ids).logits.shape == (2, 5, config.vocab_size)
    with fake_device(), pytest.raises(ConfigError, match="Only 4-bit bases"):
        fake_language_model(config, dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(load_in_8bit=True))


@pytest.mark.parametrize(("kind", "taken"), [("cuda", torch.bfloat16), ("cpu", torch.float32)])
def test_an_adapter_of_a_4_bit_layer_leaves_its_inputs_to_cuda_autocast(
    kind: str, taken: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PEFT's own does, which asks whether CUDA's autocast is on: an update on an H200 was told 13 % too high."""
    lora, seen = LoraConfig(r=4, target_modules=["q_proj"]), list[torch.dtype]()

    def note(adapted: Any, *, autocast: bool) -> torch.dtype:
        layer = next(one for one in adapted.modules() if hasattr(one, "lora_A"))
        handle = layer.lora_A["default"].register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            layer(torch.ones(3, 64, dtype=torch.bfloat16))
        handle.remove()
        return seen.pop()

    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    with fake_device(stands_for=kind):
        fake = fake_language_model(
            tiny_config("qwen3", layers=1, hidden=64),
            dtype=torch.bfloat16,
            peft_config=lora,
            quantization_config=settings,
        )
        assert note(fake, autocast=True) is taken
        assert note(fake, autocast=False) is torch.float32
    layers = torch.nn.ModuleDict({"q_proj": bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.bfloat16)})
    layers.is_loaded_in_4bit = True  # or PEFT takes them for plain layers
    real = get_peft_model(layers.to("cpu"), lora)
    if kind == "cuda":
        asked = torch.is_autocast_enabled
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cpu": asked(device))
    assert note(real, autocast=True) is taken
    assert note(real, autocast=False) is torch.float32


def test_a_shallow_copy_has_a_block_of_each_kind() -> None:
    config = tiny_config("gemma3", layers=6)
    shallow = shallow_copy(config)
    assert shallow.layer_types == ["sliding_attention", "full_attention"]
    assert shallow.num_hidden_layers == 2
    assert config.num_hidden_layers == 6
    assert shallow_copy(tiny_config("gpt2", layers=6)).n_layer == 2


def test_whole_blocks_count_and_what_does_not_fit_is_refused() -> None:
    with fake_device(3 * 2**20, stands_for="cuda") as memory:
        one = torch.zeros(3)
        assert memory.live_bytes == 512
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(2**20)
        assert memory.live_bytes == 512
        assert one.sum().item() == 1.0  # nobody computed it
        with nothing_differs():
            assert float(one.max()) == 0.0
        assert not bool((one > 1).any())


def test_an_optimizers_counts_of_steps_are_in_host_memory_unless_it_is_fused() -> None:
    for fused, tensors in ((False, 3), (True, 4)):
        with fake_device(stands_for="cuda") as memory:
            weight = torch.nn.Parameter(torch.empty(128))
            optimizer = torch.optim.AdamW([weight], fused=fused)
            weight.grad = torch.empty(128)
            optimizer.step()
            weight.grad = None
            assert memory.live_bytes == 512 * tensors, f"fused={fused}"
            one = torch.tensor(data=1.0, device=weight.device)
            assert memory.live_bytes == 512 * (tensors + 1), one


def test_a_sum_of_halves_in_float32_makes_nothing_and_asks_no_stand_in() -> None:
    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert "addmm" not in str(func), "PyTorch 2.11 has no stand-in for it"
            return func(*args, **(kwargs or {}))

    with fake_device(stands_for="cuda") as memory:
        total, half = torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.bfloat16)
        held = memory.live_bytes
        memory.reset_peak()
        with Asked():
            assert torch.addmm(total, half, half, out_dtype=torch.float32, out=total) is total
        assert memory.live_bytes == memory.peak_bytes == held


def test_gradients_are_joined_in_place_however_often_frames_hold_their_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def peak() -> int:
        with fake_device() as memory:
            leaf = torch.zeros(1000, requires_grad=True)
            used = leaf * 1.0
            used = used * 2.0 + used * 3.0
            seed = torch.ones(1000)
            memory.reset_peak()
            used.backward(seed)
        return memory.peak_bytes

    before, count = peak(), device._holders
    # as after a compiled network has run in this process, when frames of Python hold arguments until a call returns
    monkeypatch.setattr(device, "_holders", lambda tensor: (*count(tensor)[:2], count(tensor)[2] + 1))
    assert peak() == before


def test_a_kernels_own_temporaries_count() -> None:
    def drawn(memory: SimulatedMemory) -> int:
        values = torch.zeros(32, 90, 90)
        before = memory.peak_bytes
        values.logsumexp(-1)
        return memory.peak_bytes - before

    with SimulatedMemory(exact=True) as real:
        held = drawn(real)
    with fake_device() as fake:
        assert drawn(fake) == held


def test_what_is_known_is_not_asked_again_where_host_numbers_are_read() -> None:
    with fake_device() as memory:
        tensor = torch.zeros(3, 7)
        with host_numbers():
            made = tensor * 41.0
        held = memory.live_bytes
        with host_numbers(), patch.object(FakeTensorMode, "dispatch", side_effect=AssertionError("it was asked")):
            again = tensor * 41.0
        assert memory.live_bytes - held == again.nbytes == made.nbytes


def halves(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@pytest.mark.parametrize(
    "operate",
    [
        lambda: halves(96, 560) @ halves(8, 560).T,
        lambda: torch.addmm(halves(96), halves(12, 504), halves(504, 96)),
        lambda: torch.bmm(halves(72, 1, 31), halves(72, 31, 16)),
        lambda: _flash(*(torch.zeros(3, 2, 32, 16) for _ in range(3)), 0.0, True),
        lambda: _flash(*(halves(3, 2, 32, 16) for _ in range(3)), attn_mask=halves(32, 32).expand(3, 2, 32, 32)),
        lambda: torch.ones(9, 50) * halves(9, 50),
        lambda: halves(9, 1).expand(9, 50) - torch.ones(9, 50),
        lambda: halves(9, 50).add_(torch.ones(9, 50)),
        lambda: torch.where(halves(9, 50) > 0, halves(9, 50), torch.ones(9, 50)),
        lambda: halves(9, 50).sum(-1, dtype=torch.float32),
    ],
)
def test_what_cpu_kernels_hold_inside_counts_as_an_allocator_counts_it(operate: Any) -> None:
    """What oneDNN and attention take follows from processor and threads; other kernels copy what has another type."""
    with CountingAllocator() as counted:
        operate()
    with fake_device() as seen:
        operate()
    assert seen.peak_bytes == counted.peak_bytes > 0


def test_who_counts_outside_is_not_told_of_fake_tensors() -> None:
    with SimulatedMemory() as outside:
        with fake_device(), charge(Component.WEIGHTS):
            held = [torch.zeros(1000) for _ in range(3)]
        assert outside.live_by_component()[Component.WEIGHTS] == 0
    assert len(held) == 3


def test_like_turns_are_run_twice_where_only_bytes_matter() -> None:
    with fake_device():
        assert list(worth_running(range(9))) == [0, 1]
        assert list(worth_running("abcde", lambda turns: [turns.index("d")])) == ["a", "d"]
    assert list(worth_running("abc", lambda _: [2])) == ["a", "b", "c"]
    assert list(worth_running(range(9))) == list(range(9))


def test_a_view_has_the_strides_of_a_real_one_on_axes_of_length_1() -> None:
    """Else a product with it would copy its weights for every row."""

    def strides() -> tuple[int, ...]:
        return torch.empty(16, 6, 1, 40).transpose(1, 2).contiguous().view(16, 1, 240).stride()

    real = strides()
    with fake_device(2**30):
        assert strides() == real == (240, 240, 1)
