"""Rows packed behind one copy of their prompt score and learn as they do row by row."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from memsafe_rl.accounting import standing_for
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.runtime.host_memory import offloaded
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.models.language import kernels
from memsafe_rl.models.language.causal_lm import CausalLMAdapter, check_head
from memsafe_rl.models.language.packing import pack_rows
from memsafe_rl.models.module_state import attention_configs
from memsafe_rl.types import Ragged, Trajectory
from tests.models.helpers import PAD, SMALL, logprobs_of
from tests.models.language.cuda_kernels import cuda_kernels
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


@pytest.mark.slow_after(4)
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


@pytest.mark.parametrize("window", [2, 3, 6, 11, 12, 40])
def test_a_window_counts_positions(window: int) -> None:
    """Shorter than a completion, ending inside the prompt, just as long as a row, and longer than all."""
    adapter, trajectory = adapter_of(tiny_model("gemma3", window=window, layers=3)), grouped_rows()
    rows = range(len(trajectory))
    logprobs, gradient = learn(adapter, trajectory, rows, packed=False)
    packed_logprobs, packed_gradient = learn(adapter, trajectory, rows, packed=True)
    assert distance(packed_logprobs, logprobs) < 1e-6
    assert distance(packed_gradient, gradient) < 2e-6


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "gpt_oss"])
def test_without_a_kernel_matrices_do(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form that devices without a kernel take, a few scores at a time."""
    adapter, trajectory = adapter_of(model_of(family)), grouped_rows()
    rows = range(len(trajectory))
    logprobs, gradient = learn(adapter, trajectory, rows, packed=True)
    monkeypatch.setattr(kernels, "_SCORES", 100)
    with standing_for("mps"):
        plain_logprobs, plain_gradient = learn(adapter, trajectory, rows, packed=True)
    assert distance(plain_logprobs, logprobs) < 1e-6
    assert distance(plain_gradient, gradient) < 2e-6


class NothingSquare(TorchDispatchMode):
    """Refuses tensors over all tokens twice, as masks and scores are; a mask that is stretched over heads too."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.largest = tokens, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.dim() > 1:
                found = min(leaf.shape[-2:])
                assert found < self.tokens, f"{func.name()} made {tuple(leaf.shape)}"
                self.largest = max(self.largest, found)
        return result


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "gpt_oss"])
def test_no_plan_holds_a_mask_or_scores_of_all_tokens(
    family: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 300 and 270 tokens, completions of up to 280; gemma2 caps its scores, three have windows."""
    monkeypatch.setattr(kernels, "_HALF", (torch.float32,))  # flash where no mask is needed
    monkeypatch.setattr(kernels, "_MOST_BLOCK", 128)
    adapter = adapter_of(model_of(family, **({"positions": 1024} if family in ARCHS else {})))
    trajectory = grouped_rows((300, 270), ((280, 265), (260,)))
    rows = range(len(trajectory))
    with standing_for(device), cuda_kernels() as ran, NothingSquare(260):
        for packed in (False, True):
            learn(adapter, trajectory, rows, packed=packed)
            learn(adapter, trajectory, rows, packed=packed, recompute=True)
            with torch.no_grad():
                adapter.distribution(trajectory, rows, packed=packed)
        _, state = adapter.prefill(trajectory.conditions.rows())
        with torch.no_grad():
            adapter.decode_step(state.select([0, 0, 1]), torch.tensor([3, 4, 5]))
        adapter.prefill(trajectory.conditions.rows()[:1], chunk_tokens=100)
    assert bool(ran) is (device == "cuda" and family != "gemma2")


def test_some_rows_of_a_group_in_any_order() -> None:
    adapter, trajectory = adapter_of(tiny_model("qwen3")), grouped_rows()
    for rows in ([7, 2, 5], [0], [9, 8, 1, 3, 0]):
        logprobs, gradient = learn(adapter, trajectory, rows, packed=False)
        packed_logprobs, packed_gradient = learn(adapter, trajectory, rows, packed=True)
        assert distance(packed_logprobs, logprobs) < 1e-6
        assert distance(packed_gradient, gradient) < 2e-6


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_checkpointing_and_offload_change_no_bit(family: str) -> None:
    adapter, trajectory = adapter_of(model_of(family)), grouped_rows()
    rows = range(len(trajectory))
    _, gradient = learn(adapter, trajectory, rows, packed=True)
    _, recomputed = learn(adapter, trajectory, rows, packed=True, recompute=True)
    with SimulatedMemory(), offloaded(adapter.model.parameters()):
        _, moved = learn(adapter, trajectory, rows, packed=True)
        _, both = learn(adapter, trajectory, rows, packed=True, recompute=True)
    for other in (recomputed, moved, both):
        assert torch.equal(other, gradient)
    assert {config._attn_implementation for config in attention_configs(adapter.model)} == {"sdpa"}


def test_lora_and_its_reference() -> None:
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=4, target_modules="all-linear")).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.1)
    adapter, trajectory = adapter_of(model), grouped_rows()
    rows = range(len(trajectory))
    logprobs, gradient = learn(adapter, trajectory, rows, packed=False)
    packed_logprobs, packed_gradient = learn(adapter, trajectory, rows, packed=True)
    assert distance(packed_logprobs, logprobs) < 1e-6
    assert distance(packed_gradient, gradient) < 2e-6
    with torch.no_grad(), adapter.reference() as reference:
        of_rows = logprobs_of(reference.distribution(trajectory, rows))
        assert distance(logprobs_of(reference.distribution(trajectory, rows, packed=True)), of_rows) < 1e-6
        assert distance(of_rows, logprobs) > 1e-3


def test_a_frozen_reference_packs_as_its_model_does() -> None:
    adapter = CausalLMAdapter(tiny_model("qwen3"), pad_token_id=PAD, reference_model=tiny_model("qwen3", seed=1))
    check_head(adapter)
    trajectory = grouped_rows()
    with torch.no_grad(), adapter.reference() as reference:
        of_rows = logprobs_of(reference.distribution(trajectory, range(10)))
        assert distance(logprobs_of(reference.distribution(trajectory, range(10), packed=True)), of_rows) < 1e-6


@pytest.mark.parametrize("autocast", [False, True])
def test_in_bfloat16_packed_rows_are_no_less_exact(autocast: bool) -> None:
    exact, trajectory = adapter_of(tiny_model("qwen3", scale=3.0)), grouped_rows()
    rows = range(len(trajectory))
    wanted, gradient = learn(exact, trajectory, rows, packed=False)
    adapter = adapter_of(tiny_model("qwen3", scale=3.0, dtype=torch.float32 if autocast else torch.bfloat16))
    found = []
    for packed in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(learn(adapter, trajectory, rows, packed=packed))
    (of_rows, rows_gradient), (of_packed, packed_gradient) = found
    assert distance(of_packed, wanted) < 1.5 * distance(of_rows, wanted)
    assert distance(packed_gradient, gradient) < 1.5 * distance(rows_gradient, gradient)


def test_a_prompt_is_read_once_and_a_last_token_never() -> None:
    trajectory = grouped_rows()
    rows = range(len(trajectory))
    packed = pack_rows(trajectory, rows, (None,), torch.device("cpu"))
    tails = sum(trajectory.actions.lengths) - len(trajectory)
    assert packed.ids.shape == packed.positions.shape == (1, sum(PROMPTS) + tails)
    assert len(packed.layout.shared) == 3
    alone = trajectory.condition_of_row.index(2)
    assert pack_rows(trajectory, [alone], (None,), torch.device("cpu")).ids.shape == (1, 9 + 6 - 1)


def test_packed_rows_hold_less() -> None:
    adapter = adapter_of(tiny_model("llama", layers=4, hidden=64, positions=512, scale=1.0))
    trajectory = grouped_rows((200,), ((20,) * 8,))
    peaks = []
    for packed in (False, True):
        for weight in adapter.model.parameters():
            weight.grad = torch.zeros_like(weight)
        with SimulatedMemory() as memory:
            learned = logprobs_of(adapter.distribution(trajectory, range(8), packed=packed)).sum()
            torch.autograd.backward(learned)
        peaks.append(memory.peak_bytes)
        del learned
    assert peaks[1] < 0.35 * peaks[0]  # 352 of 1,760 tokens


def test_recurrent_layers_do_not_pack(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    sizes = {"conv_L_cache": 3, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    adapter = CausalLMAdapter(Lfm2ForCausalLM(Lfm2Config(**SMALL, **sizes)).eval(), pad_token_id=PAD)
    with caplog.at_level(logging.INFO, "memsafe_rl"):
        check_head(adapter)
    assert not adapter.packs_prompts
    assert "its own copy of the prompt" in caplog.text
    with pytest.raises(ConfigError, match="gives packed rows other log-probs"):
        adapter.distribution(grouped_rows(), [0, 1], packed=True)


def test_attention_of_a_models_own_does_not_pack() -> None:
    """Bloom adds biases by distance to its scores and takes no positions."""
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=258, hidden_size=32, n_layer=2, n_head=4, pad_token_id=PAD, eos_token_id=1)
    adapter = CausalLMAdapter(BloomForCausalLM(config).eval(), pad_token_id=PAD)
    check_head(adapter)
    assert not adapter.packs_prompts
