"""Models that engines of other libraries can run, and rollouts for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from memsafe_rl import GRPOConfig
from memsafe_rl.models.language.causal_lm import CausalLMAdapter
from memsafe_rl.rollout.engine import EngineContext, RolloutEngine
from memsafe_rl.rollout.engines import ENGINES
from memsafe_rl.types import Completion, SamplingSettings, SequenceKey

PAD, EOS, VOCAB = 0, 1, 258
CLASSES: dict[str, tuple[type[Any], type[PreTrainedModel]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}


def engine_of(name: str, adapter: CausalLMAdapter, *, room: int = 1 << 33, **options: Any) -> RolloutEngine:
    """Makes an engine as a run would, with options of continuous batching."""
    config = GRPOConfig(use_cpu=True, report_to="none")
    config.transformers_continuous_batching_config = options
    return ENGINES[name].function(EngineContext(name, adapter, config, total_bytes=1 << 35, room=lambda: room))


def small_model(arch: str = "qwen3", *, tied: bool = True, positions: int = 256, seed: int = 0) -> Any:
    """Builds a random causal LM whose heads are 32 wide, the least that vLLM's kernels know on a CPU."""
    ids = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None, "tie_word_embeddings": tied}
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": positions,
    }
    if arch == "gemma3":
        common |= {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    if arch == "moe":
        common |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if arch == "gpt2":
            config = GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=2, n_positions=positions, **ids)
            model: Any = GPT2LMHeadModel(config)
        else:
            config_class, model_class = CLASSES[arch]
            model = model_class(config_class(**common, **ids))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4)  # far from uniform
    return model.eval()


def adapter_of(model: Any) -> CausalLMAdapter:
    return CausalLMAdapter(model, pad_token_id=PAD)


def prompts_of(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCAB, (length,), generator=generator) for length in lengths]


def keys_of(prompts: int, group: int, rollout: int = 0) -> list[list[SequenceKey]]:
    return [[SequenceKey(7, rollout, prompt, sample) for sample in range(group)] for prompt in range(prompts)]


def settings_of(max_new_tokens: int = 12, **settings: Any) -> SamplingSettings:
    return SamplingSettings(max_new_tokens, (EOS,), **settings)


def nudge(model: Any, seed: int = 5) -> None:
    """Moves every trained weight a little, as an optimizer step does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def gap(
    model: Any, prompts: Sequence[Tensor], rows: Sequence[Completion], settings: SamplingSettings, group: int
) -> float:
    """Largest difference, in nats, between the rows' log-probs and the model's own at their temperature."""
    worst = 0.0
    for index, row in enumerate(rows):
        prompt = prompts[index // group]
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompt, row.ids])[None]).logits[0, len(prompt) - 1 : -1]
        own = (logits / (settings.temperature or 1.0)).log_softmax(-1).gather(1, row.ids[:, None])[:, 0]
        worst = max(worst, float((own - row.logprobs).abs().max()))
    return worst
