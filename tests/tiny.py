"""Tiny random models and a real tokenizer, built offline, for tests of every room."""

from __future__ import annotations

import string
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ARCHS = ("qwen3", "qwen2", "llama", "gemma2", "gemma3", "gpt2")
PAD_TOKEN, EOS_TOKEN = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1
VOCAB_SIZE = 2 + 256
"""Smallest vocabulary of `tiny_tokenizer`: pad, eos and one token a byte."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def tiny_config(
    arch: str = "qwen3",
    vocab_size: int = VOCAB_SIZE,
    layers: int = 2,
    hidden: int = 32,
    tied: bool = True,
    positions: int = 256,
    window: int = 6,
) -> Any:
    """Returns a transformers config; Gemma-2 and Gemma-3 mix windowed (``window`` tokens) and full attention."""
    ids = {"pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "bos_token_id": None}
    if arch == "gpt2":
        return GPT2Config(
            vocab_size=vocab_size,
            n_embd=hidden,
            n_layer=layers,
            n_head=4,
            n_positions=positions,
            tie_word_embeddings=tied,
            **ids,
        )
    common = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
        **ids,
    }
    mixed = ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(layers)]
    if arch == "qwen3":
        return Qwen3Config(head_dim=16, **common)
    if arch == "qwen2":
        return Qwen2Config(**common)
    if arch == "llama":
        return LlamaConfig(**common)
    if arch == "gemma2":
        return Gemma2Config(
            head_dim=8,
            sliding_window=window,
            layer_types=mixed,
            final_logit_softcapping=3.0,
            attn_logit_softcapping=20.0,
            query_pre_attn_scalar=8,
            **common,
        )
    if arch == "gemma3":
        return Gemma3TextConfig(head_dim=8, sliding_window=window, layer_types=mixed, query_pre_attn_scalar=8, **common)
    raise ValueError(f"unknown tiny architecture {arch!r}; known: {', '.join(ARCHS)}")


MODEL_CLASSES: dict[str, type[PreTrainedModel]] = {
    "qwen3": Qwen3ForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "llama": LlamaForCausalLM,
    "gemma2": Gemma2ForCausalLM,
    "gemma3": Gemma3ForCausalLM,
    "gpt2": GPT2LMHeadModel,
}


def tiny_model(
    arch: str = "qwen3",
    vocab_size: int = VOCAB_SIZE,
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
    hidden: int = 32,
    tied: bool = True,
    seed: int = 0,
    attn: str | None = None,
    scale: float = 10.0,
    **config: Any,
) -> Any:
    """Builds a random causal LM in eval mode without touching the global random state.

    Args:
        arch: one of `ARCHS`.
        vocab_size: rows of the embedding.
        dtype: type of the weights.
        layers: blocks.
        hidden: width.
        tied: whether the output head is the embedding.
        seed: seed of the weights.
        attn: attention implementation, None for the default of the architecture.
        scale: factor on the matrices, so that logits are far from uniform.
        config: further arguments of `tiny_config`.

    Returns:
        The model.
    """
    settings = tiny_config(arch, vocab_size, layers=layers, hidden=hidden, tied=tied, **config)
    if attn is not None:
        settings._attn_implementation = attn
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODEL_CLASSES[arch](settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale)
    return model.to(dtype).eval()


def dropping_model() -> Any:
    """Builds a tiny GPT-2 that drops three of ten states while it trains.

    Returns:
        The model.
    """
    model = tiny_model("gpt2")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    return model


def tiny_tokenizer(
    vocab_size: int | None = None, chat: bool = False, pad: bool = True, eos: bool = True
) -> PreTrainedTokenizerFast:
    """Builds a byte-level tokenizer: id 0 pads, 1 ends, then one token a byte; any text survives a round trip.

    Args:
        vocab_size: size to fill up to with two-letter merges, None for `VOCAB_SIZE`; at most `VOCAB_SIZE` + 676.
        chat: whether it has a chat template.
        pad: whether it names its pad token.
        eos: whether it names its eos token.

    Returns:
        The tokenizer, padding on the left.
    """
    tokens = [PAD_TOKEN, EOS_TOKEN, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = [(first, second) for first in string.ascii_lowercase for second in string.ascii_lowercase]
    merges = pairs[: max(0, (vocab_size or VOCAB_SIZE) - VOCAB_SIZE)]
    vocabulary = {token: index for index, token in enumerate([*tokens, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": PAD_TOKEN if pad else None, "eos_token": EOS_TOKEN if eos else None}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side="left",
        model_max_length=10_000,
        **{name: token for name, token in special.items() if token},
    )
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    return fast
