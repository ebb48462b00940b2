"""Configs of common networks by name, so that a forecast needs neither a hub nor a file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from memsafe_rl.errors import ConfigError
from memsafe_rl.hub import places_for


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": tied,
    }


def _plain(
    model_type: str, sizes: Sequence[int], *, vocab: int, positions: int, tied: bool, **more: Any
) -> dict[str, Any]:
    """A network without ``head_dim`` of its own: hidden and inner width, layers, heads, key/value heads."""
    hidden, inner, layers, heads, kv_heads = sizes
    return {
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
        **more,
    }


def _qwen2(*sizes: int, vocab: int = 151_936, tied: bool) -> dict[str, Any]:
    return _plain("qwen2", sizes, vocab=vocab, positions=32_768, tied=tied)


def _llama(*sizes: int, vocab: int, positions: int, tied: bool, **more: Any) -> dict[str, Any]:
    return _plain("llama", sizes, vocab=vocab, positions=positions, tied=tied, **more)


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads}


def _gemma3(hidden: int, inner: int, layers: int) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
    }


def _t5(width: int, inner: int, layers: int, heads: int, *, head_dim: int = 64, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "t5",
        "d_model": width,
        "d_kv": head_dim,
        "d_ff": inner,
        "num_layers": layers,
        "num_heads": heads,
        "vocab_size": 32_128,
        "decoder_start_token_id": 0,
        **more,
    }


def _flan_t5(width: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return _t5(width, inner, layers, heads, feed_forward_proj="gated-gelu", tie_word_embeddings=False, **more)


def _bart(width: int, layers: int, heads: int) -> dict[str, Any]:
    stacks = {
        f"{stack}_{name}": value
        for stack in ("encoder", "decoder")
        for name, value in {"layers": layers, "attention_heads": heads, "ffn_dim": 4 * width}.items()
    }
    return {"model_type": "bart", "d_model": width, "vocab_size": 50_265, "decoder_start_token_id": 2, **stacks}


FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12_288, 36, 32, tied=False),
    "Qwen/Qwen3-14B": _qwen3(5120, 17_408, 40, 40, tied=False),
    "Qwen/Qwen3-32B": _qwen3(5120, 25_600, 64, 64, tied=False),
    "Qwen/Qwen2.5-0.5B": _qwen2(896, 4864, 24, 14, 2, tied=True),
    "Qwen/Qwen2.5-1.5B": _qwen2(1536, 8960, 28, 12, 2, tied=True),
    "Qwen/Qwen2.5-3B": _qwen2(2048, 11_008, 36, 16, 2, tied=True),
    "Qwen/Qwen2.5-7B": _qwen2(3584, 18_944, 28, 28, 4, vocab=152_064, tied=False),
    "Qwen/Qwen2.5-14B": _qwen2(5120, 13_824, 48, 40, 8, vocab=152_064, tied=False),
    "Qwen/Qwen2.5-32B": _qwen2(5120, 27_648, 64, 40, 8, vocab=152_064, tied=False),
    "meta-llama/Llama-3.2-1B": _llama(2048, 8192, 16, 32, 8, vocab=128_256, positions=131_072, tied=True, head_dim=64),
    "meta-llama/Llama-3.2-3B": _llama(3072, 8192, 28, 24, 8, vocab=128_256, positions=131_072, tied=True),
    "meta-llama/Llama-3.1-8B": _llama(4096, 14_336, 32, 32, 8, vocab=128_256, positions=131_072, tied=False),
    "meta-llama/Llama-3.3-70B": _llama(8192, 28_672, 80, 64, 8, vocab=128_256, positions=131_072, tied=False),
    "mistralai/Mistral-7B-v0.3": _plain(
        "mistral", (4096, 14_336, 32, 32, 8), vocab=32_768, positions=32_768, tied=False, sliding_window=None
    ),
    "HuggingFaceTB/SmolLM2-135M": _llama(576, 1536, 30, 9, 3, vocab=49_152, positions=8192, tied=True),
    "HuggingFaceTB/SmolLM2-360M": _llama(960, 2560, 32, 15, 5, vocab=49_152, positions=8192, tied=True),
    "HuggingFaceTB/SmolLM2-1.7B": _llama(2048, 8192, 24, 32, 32, vocab=49_152, positions=8192, tied=True),
    "google/gemma-3-270m": _gemma3(640, 2048, 18),
    "google/gemma-3-1b": _gemma3(1152, 6912, 26),
    "openai-community/gpt2": _gpt2(768, 12, 12),
    "openai-community/gpt2-medium": _gpt2(1024, 24, 16),
    "openai-community/gpt2-large": _gpt2(1280, 36, 20),
    "openai-community/gpt2-xl": _gpt2(1600, 48, 25),
    "google-t5/t5-small": _t5(512, 2048, 6, 8),
    "google-t5/t5-base": _t5(768, 3072, 12, 12),
    "google-t5/t5-large": _t5(1024, 4096, 24, 16),
    "google-t5/t5-3b": _t5(1024, 16_384, 24, 32, head_dim=128),
    "google/flan-t5-small": _flan_t5(512, 1024, 8, 6),
    "google/flan-t5-base": _flan_t5(768, 2048, 12, 12),
    "google/flan-t5-large": _flan_t5(1024, 2816, 24, 16),
    "google/flan-t5-xl": _flan_t5(2048, 5120, 24, 32),
    "google/flan-t5-xxl": _flan_t5(4096, 10_240, 24, 64),
    "google/mt5-small": _flan_t5(512, 1024, 8, 6, vocab_size=250_112),
    "google/mt5-base": _flan_t5(768, 2048, 12, 12, vocab_size=250_112),
    "facebook/bart-base": _bart(768, 6, 12),
    "facebook/bart-large": _bart(1024, 12, 16),
}
"""What the publishers' own ``config.json`` say of sizes; other fields are transformers' defaults."""

_IN_BFLOAT16 = ("qwen2", "qwen3", "llama", "mistral", "gemma3_text")
"""Families whose weights are published in bfloat16, which decides where nobody chooses a type (reward models)."""

_UNREADABLE = (OSError, ValueError, TypeError, AttributeError, LookupError, StrictDataclassError)
"""What transformers raises of a config that is missing, no JSON, of an unknown kind, or whose fields are not right."""

_TUNED = ("-instruct", "-base", "-it", "-pt", "-instruct-2507", "-thinking-2507")
"""Endings under which the same network is published with other weights."""


def known_config(name: str) -> PretrainedConfig | None:
    """Gives the config of a network that is known by name."""
    wanted = _short(name)
    for known, sizes in FAMILIES.items():
        if _short(known) == wanted:
            settings = dict(sizes)
            config = AutoConfig.for_model(settings.pop("model_type"), **settings)
            config.dtype = torch.bfloat16 if config.model_type in _IN_BFLOAT16 else torch.float32
            return config
    return None


def config_for(model: str, role: str = "model", *, trust_remote_code: bool = False, **places: Any) -> PretrainedConfig:
    """Gives the config of a network: from a folder or a ``config.json``, from the names known here, or from a hub."""
    known = None if Path(model).exists() else known_config(model)
    if known is not None:
        return known
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            model, trust_remote_code=trust_remote_code, **places_for(model, **places)
        )
    except _UNREADABLE as error:
        raise _no_config(model, role, error) from error
    return config


def _no_config(model: str, role: str, error: Exception) -> ConfigError:
    """Makes the error for a network whose config cannot be had: what is wrong with it, or which names are near."""
    if model and Path(model).exists():
        reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        return ConfigError(
            f"{role}={model!r} is there, but its config.json cannot be read ({type(error).__name__}: {reason}). Give a "
            "folder with the config.json that the network was saved with, or mend it."
        )
    near = [known for known in FAMILIES if _short(known) in _near(model)]
    known = f"; near to it are {', '.join(near)}" if near else f": {', '.join(FAMILIES)}"
    return ConfigError(
        f"{role}={model!r} is neither a folder with a config.json, nor a name on a hub that can be reached, nor one "
        f"of those known without it{known}. Write one of these, or save its config.json and give its folder."
    )


def _near(name: str) -> list[str]:
    return difflib.get_close_matches(_short(name), [_short(known) for known in FAMILIES], n=3, cutoff=0.75)


def _short(name: str) -> str:
    short = name.rsplit("/", 1)[-1].lower()
    for ending in sorted(_TUNED, key=len, reverse=True):
        short = short.removesuffix(ending)
    return short
