"""Reads the sizes of a transformers language model from its config and its weights."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from memsafe_rl.accounting import autocast_bytes, weights_of
from memsafe_rl.models import refusal
from memsafe_rl.models.module_state import biased_modules, tensor_place
from memsafe_rl.types import ModelGeometry


def read_geometry(lm: Any, *, copies: tuple[nn.Module, ...] = (), slot_bytes: int | None = None) -> ModelGeometry:
    """Reads the sizes of a network."""
    own = decoder_config(lm)
    config = own.get_text_config(decoder=True)
    heads = int(_first(config, "num_attention_heads", default=1))
    lacking = [name for name in ("hidden_size", "num_hidden_layers") if not hasattr(config, name)]
    refusal.when(lacking, "config/sizes", kind=type(config).__name__, names=" or ".join(lacking))
    hidden = int(config.hidden_size)
    windows = cache_windows(own)
    head = lm.get_output_embeddings()
    # that of an element between layers: the embedding's, which is not quantised
    width = next((weight.element_size() for weight in lm.parameters() if weight.is_floating_point()), 4)
    kv_heads = int(_first(config, "num_key_value_heads", "num_kv_heads", default=heads))
    head_dim = int(_first(config, "head_dim", default=hidden // heads))
    if slot_bytes not in (None, 2 * width * kv_heads * head_dim * len(windows)):
        kv_heads, head_dim = 1, -(-slot_bytes // (2 * width * len(windows)))  # a measured cache of another size
    encoded, encoder_layers = lm.config.is_encoder_decoder, 0
    if encoded and any(weight.requires_grad for weight in lm.get_encoder().parameters()):
        encoder_layers = int(_first(lm.config, "encoder_layers", "num_layers", "num_hidden_layers", default=1))
    biased = biased_modules(lm)
    inner = ("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "d_ff")
    return ModelGeometry(
        layers=len(windows),
        hidden_size=hidden,
        intermediate_size=int(_first(config, *inner, default=4 * hidden)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=int(_first(head, "out_features", default=config.vocab_size)),
        max_positions=max_positions(lm.config),
        windows=windows,
        parameter_bytes=weight_bytes(lm, *copies),
        trainable_bytes=sum(weight.nbytes for weight in lm.parameters() if weight.requires_grad),
        compute_bytes=autocast_bytes(next(lm.parameters()).device) or width,
        cache_bytes=width,
        head_trainable=head is not None and any(weight.requires_grad for weight in head.parameters()),
        encoder_layers=encoder_layers,
        bias_heads=heads if biased else 0,
        bias_trained=any(module.relative_attention_bias.weight.requires_grad for module in biased),
        source_bytes=2 * width * kv_heads * head_dim * len(windows) if encoded else None,
    )


def decoder_config(lm: Any) -> Any:
    """Returns the config of what draws tokens: of an encoder-decoder, the decoder's."""
    return lm.get_decoder().config if lm.config.is_encoder_decoder else lm.config


def max_positions(config: Any) -> int | None:
    """Returns the longest sequence a network accepts."""
    limit = _first(config.get_text_config(decoder=True), "max_position_embeddings", "max_seq_len", default=None)
    return None if limit is None or limit < 1 else int(limit)


def cache_windows(config: Any) -> tuple[int | None, ...]:
    """Returns each layer's attention window as transformers' cache sees it."""
    return tuple(_window(layer) for layer in DynamicCache(config=config).layers)


def layer_windows(config: Any) -> tuple[int | None, ...] | None:
    """Returns each layer's window, if all layers are plain or windowed attention."""
    return cache_windows(config) if is_trimmable(DynamicCache(config=config)) else None


def is_trimmable(cache: Any) -> bool:
    """Returns whether slots can be cut off the front of a cache."""
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    return bool(cache.layers) and all(type(layer) in plain for layer in cache.layers)


def weight_bytes(*modules: nn.Module) -> int:
    """Counts the bytes of all weights and buffers, each once, with the state of bitsandbytes' quantised weights."""
    return sum({tensor_place(weight): weight.nbytes for weight in weights_of(*modules)}.values())


def _window(layer: Any) -> int | None:
    if not isinstance(layer, CacheLayerMixin):
        return 0
    return int(layer.sliding_window) if getattr(layer, "is_sliding", False) else None


def _first(source: Any, *names: str, default: Any) -> Any:
    differing = getattr(source, "per_layer_attributes", None) or ()  # of Gemma 4, whose layers have sizes of their own
    for name in names:
        layers = source.per_layer_config if name in differing else None
        value = getattr(source, name, None) if layers is None else [getattr(layer, name) for layer in layers]
        if isinstance(value, (list, tuple)) and value:
            value = max(value)
        if value is not None:
            return value
    return default
