"""Networks of fake weights: built from a config, with the adapters and the quantised base of a real one."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AutoModelForSequenceClassification, PretrainedConfig

from memsafe_rl.accounting import device_type_of
from memsafe_rl.models.language.base import is_encoder_decoder
from memsafe_rl.models.loading import auto_class_of, layers_in_4_bits
from memsafe_rl.models.module_state import quiet_peft
from memsafe_rl.models.vision.processors import freeze_unused_tower
from memsafe_rl.preflight import refusal
from memsafe_rl.preflight.fake.device import empty_like, give_fake_weights, true_numbers

_BLOCK = 64
"""Weights that share a scale in bitsandbytes' 4-bit formats."""
_DEPTHS = ("num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
"""What an encoder-decoder's config calls the blocks of its stacks."""
_SCALES_BLOCK = 256
"""Scales that share a scale of their own under double quantisation."""


def fake_language_model(
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    peft_config: PeftConfig | None = None,
    quantization_config: Any = None,
    trust_remote_code: bool = False,
    frozen: bool = False,
    beside: Callable[[PeftModel], None] | None = None,
    sees_images: bool = False,
) -> Any:
    """Builds a language model of fake weights inside `fake_device`; ``beside`` puts another adapter beside its own."""
    if quantization_config is not None and not getattr(quantization_config, "load_in_4bit", False):
        raise refusal("quantization/bits")
    kind = auto_class_of(config)
    # Not of fake tensors yet: after a deep copy of some, as PEFT's `modules_to_save` makes, PyTorch 2.13 frees twice.
    with true_numbers(), torch.device("meta"):
        model = _built(kind, config, "be trained as a language model", dtype, trust_remote_code)
        skipped = getattr(quantization_config, "llm_int8_skip_modules", None)
        layers = [] if quantization_config is None else layers_in_4_bits(model, skipped)
        freeze_unused_tower(model, sees_images=sees_images)
        if frozen or peft_config is not None:
            model.requires_grad_(False)
        if peft_config is not None:
            with quiet_peft():
                model = get_peft_model(model, copy.deepcopy(peft_config))  # PEFT writes into it what it found
                if beside is not None:
                    beside(model)
                if frozen:
                    model.requires_grad_(False)
        for layer in layers:
            _quantise(layer, quantization_config)
        for module in model.modules():
            if hasattr(getattr(module, "base_layer", None), "W_q") and hasattr(module, "_cast_input_dtype"):
                _take_as_autocast_does(module)
    give_fake_weights(model)
    return model.eval()


def fake_reward_model(config: PretrainedConfig, *, name: str, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """Builds a sequence classifier with one output, of fake weights, to be called inside `fake_device`."""
    config = copy.deepcopy(config)
    config.num_labels, config.name_or_path = 1, name
    with torch.device("meta"):
        model = _built(AutoModelForSequenceClassification, config, "score completions", dtype, trust_remote_code)
        model.requires_grad_(False)
    give_fake_weights(model)
    return model.eval()


def _built(kind: Any, config: PretrainedConfig, use: str, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """Builds a network of a kind; transformers' word for a type that has none is a page long."""
    try:
        model = kind.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise refusal("network/use", config=config, use=use, name=kind.__name__) from None
    # what loading keeps in float32, which making does not
    wide = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]
    for name, weight in model.named_parameters():
        if any(re.search(pattern, name) for pattern in wide):
            weight.data = weight.data.float()
    return model


def hollow_copy(model: nn.Module) -> Any:
    """Copies any network with weights on the meta device in place of its own, to be called inside `fake_device`."""
    fakes = {id(tensor): empty_like(tensor, "meta") for tensor in (*model.parameters(), *model.buffers())}
    with true_numbers():  # what is neither weight nor buffer, such as a schedule, stays real
        hollow = copy.deepcopy(model, cast(Any, fakes))
    for name, layer in model.named_modules():
        # of bitsandbytes, whose weights no fake tensor can be
        if hasattr(layer, "compute_dtype") and getattr(layer.weight, "quant_state", None) is not None:
            hollow.set_submodule(name, _packed_like(layer))
    return hollow


def _packed_like(layer: Any) -> nn.Linear:
    """Returns what stands for a layer of bitsandbytes, on the meta device."""
    state, sizes = layer.weight.quant_state, (layer.in_features, layer.out_features)
    own = {"bnb_4bit_compute_dtype": layer.compute_dtype, "bnb_4bit_use_double_quant": state.nested}
    with torch.device("meta"):
        packed = nn.Linear(*sizes, bias=layer.bias is not None, dtype=state.dtype)
        _quantise(packed, SimpleNamespace(**own))
    return packed.requires_grad_(False)


def shallow_copy(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the config of the same network with two blocks, or one of each kind where blocks differ."""
    shallow = copy.deepcopy(config)
    if is_encoder_decoder(shallow):
        for name in _DEPTHS:
            if getattr(shallow, name, None) is not None:
                setattr(shallow, name, min(2, getattr(shallow, name) or 2))
        return shallow
    text = shallow.get_text_config(decoder=True)
    if text.num_hidden_layers in (1, 2):
        return shallow
    kinds = getattr(text, "layer_types", None)
    chosen = list(dict.fromkeys(kinds)) if kinds else []
    chosen += chosen[-1:] if len(chosen) == 1 else []
    text.num_hidden_layers = len(chosen) or 2
    if chosen:
        with suppress(AttributeError):  # where it follows from the number of blocks
            text.layer_types = chosen
    return shallow


class _FourBitProduct(torch.autograd.Function):
    """A product with weights that are unpacked for it, and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, packed: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        ctx.shape, ctx.dtype, ctx.given = shape, dtype, inputs.dtype
        ctx.save_for_backward(packed)
        return (inputs.to(dtype) @ packed.new_empty(shape, dtype=dtype).t()).to(inputs.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        return (grad.to(ctx.dtype) @ packed.new_empty(ctx.shape, dtype=ctx.dtype)).to(ctx.given), None, None, None


def _quantise(layer: nn.Linear, settings: Any) -> None:
    """Has a layer on the meta device hold what bitsandbytes holds of a 4-bit one, and unpack it where it is used."""
    shape, elements = (layer.out_features, layer.in_features), layer.weight.numel()
    compute_dtype, bias, plain = settings.bnb_4bit_compute_dtype, layer.bias, layer.weight.dtype
    layer.weight = nn.Parameter(torch.empty((elements + 1) // 2, 1, dtype=torch.uint8), requires_grad=False)
    scales = -(-elements // _BLOCK)
    layer.register_buffer("code", torch.empty(16))
    if settings.bnb_4bit_use_double_quant:
        layer.register_buffer("absmax", torch.empty(scales, dtype=torch.uint8))
        layer.register_buffer("absmax_scales", torch.empty(-(-scales // _SCALES_BLOCK)))
        layer.register_buffer("absmax_code", torch.empty(256))
        layer.register_buffer("absmax_offset", torch.empty(1))
    else:
        layer.register_buffer("absmax", torch.empty(scales))

    def forward(inputs: Tensor) -> Tensor:
        dtype = compute_dtype or inputs.dtype
        product: Tensor = _FourBitProduct.apply(inputs, layer.weight, shape, dtype)  # type: ignore[no-untyped-call]
        return product if bias is None else product + layer.bias.to(product.dtype)

    layer.forward = forward  # type: ignore[method-assign, assignment]
    # as of a layer that unpacks its own weight, for which a DoRA asks
    vars(layer).update(W_q=layer.weight, dequantize=lambda: layer.weight.new_empty(shape, dtype=plain))


def _take_as_autocast_does(adapter: Any) -> None:
    """Has an adapter of a 4-bit layer leave inputs to CUDA's autocast, as PEFT's does (it never asks a CPU's)."""
    cast = adapter._cast_input_dtype

    def take(inputs: Tensor, dtype: torch.dtype) -> Tensor:
        leaves = device_type_of(inputs) == "cuda" and torch.is_autocast_enabled("cpu")
        return inputs if leaves else cast(inputs, dtype)

    adapter._cast_input_dtype = take
