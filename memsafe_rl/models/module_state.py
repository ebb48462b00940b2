"""What a context changes of a network and puts back: mode, PEFT adapter, what is trained, attention."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from memsafe_rl.accounting import local_part
from memsafe_rl.models import refusal

REFERENCE_ADAPTER = "ref"
"""Name of the PEFT adapter that holds the reference, where there is one."""

_switch = threading.RLock()
_ABSENT = object()


def tensor_place(tensor: Tensor) -> tuple[Any, ...]:
    """Tells where a tensor's values lie, which tied weights share."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


class DividedPart(NamedTuple):
    """This rank's part of a tensor that lies on all ranks together, cut along its first dimension."""

    part: Tensor


def local_slice(whole: Tensor, like: Tensor) -> Tensor:
    """Cuts out of a whole tensor what this rank holds of one that FSDP2 divides; all of it, where it does not."""
    local, mesh = local_part(like), getattr(like, "device_mesh", None)
    if mesh is None:
        return whole
    rows = -(-like.shape[0] // mesh.size())
    return whole.narrow(0, min(mesh.get_local_rank() * rows, like.shape[0]), local.shape[0])


@torch.no_grad()
def copy_into(target: Tensor, whole: Tensor) -> None:
    """Copies whole values into a tensor that may be divided among ranks, in place and bit for bit."""
    local_part(target).copy_(local_slice(whole, target))


@contextmanager
def replaced(values: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Has objects, modules and files hold other values under some names; each holds what it held afterwards."""
    known = [(owner, name, value, vars(owner).get(name, _ABSENT)) for owner, name, value in values]
    try:
        for owner, name, value, _ in known:
            vars(owner)[name] = value
        yield
    finally:
        for owner, name, _, earlier in known:
            vars(owner).pop(name, None)
            if earlier is not _ABSENT:
                vars(owner)[name] = earlier


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switches every module to eval mode, and each back to its own mode at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def kept_trainable(model: nn.Module) -> Iterator[None]:
    """Keeps which weights are trained, whatever PEFT makes of it inside; it freezes every adapter but the active."""
    flags = [(weight, weight.requires_grad) for weight in model.parameters()]
    try:
        yield
    finally:
        for weight, requires_grad in flags:
            weight.requires_grad_(requires_grad)


@contextmanager
def peft_adapter_on(model: nn.Module, name: str | None) -> Iterator[None]:
    """Switches a PEFT adapter on, or all off; active adapter and ``requires_grad`` are as before afterwards."""
    if not isinstance(model, PeftModel):
        refusal.when(name is not None, "peft_adapter/none", kind=type(model).__name__, name=name)
        yield
        return
    refuse_trained_bias(model.peft_config.values())
    if name is not None and name not in model.peft_config:
        raise refusal("peft_adapter/unknown", name=name, known=", ".join(model.peft_config))
    with kept_trainable(model):
        if name is None:
            with model.disable_adapter():
                yield
            return
        active = model.active_adapter
        try:
            with kept_trainable(model):  # inside too: a critic learns beside the adapter that it takes the place of
                model.set_adapter(name)
            yield
        finally:
            model.set_adapter(active)


def peft_adapters_on(model: nn.Module) -> tuple[str, ...]:
    """Names the PEFT adapters that take part in a forward pass now."""
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            return () if module.disable_adapters else tuple(module.active_adapters)
    return ()


def weights_mark(model: nn.Module) -> int:
    """Returns a number that differs once a weight was written to, or replaced."""
    weights = list(model.parameters())
    versions = [-1 if weight.is_inference() else weight._version for weight in weights]
    return hash((*versions, *(weight.untyped_storage()._cdata for weight in weights)))


def cache_name(accepted: Container[str]) -> str:
    """Returns what a forward calls a cache, or its length: transformers 5.24 renamed both."""
    return "cache" if "cache" in accepted or "cache_length" in accepted else "past_key_values"


def is_hooked(module: nn.Module) -> bool:
    """Whether calling a module does more than its class's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def adapter_weights(model: nn.Module, name: str) -> dict[str, Tensor]:
    """Names the weights of one PEFT adapter of a model, those of tied layers once."""
    return {key: weight for key, weight in model.named_parameters() if f".{name}." in key or key.endswith(f".{name}")}


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Keeps to itself what PEFT says that is no business of the user's, such as asking transformers by an old name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*save_embedding_layers", UserWarning)
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        yield


def as_reference(model: Any) -> AbstractContextManager[None]:
    """Makes a model under PEFT its own reference: by its adapter named "ref", else with adapters off."""
    return peft_adapter_on(model, REFERENCE_ADAPTER if REFERENCE_ADAPTER in model.peft_config else None)


def refuse_trained_bias(configs: Any) -> None:
    """Refuses, where a reference is wanted, PEFT adapters that train the base's own biases."""
    for config in configs:
        bias = getattr(config, "bias", "none")
        refusal.when(bias not in ("none", False), "peft_config/bias", bias=bias)


def rewrites_base(config: Any) -> str | None:
    """Names the setting by which making an adapter changes its base; None where none does."""
    start = getattr(config, "init_lora_weights", None)
    if isinstance(start, str) and start.startswith(("pissa", "olora", "corda", "loftq")):
        return f"init_lora_weights={start!r}"
    return "layer_replication" if getattr(config, "layer_replication", None) else None


def config_like(config: Any) -> Any:
    """Copies an adapter's config for a second one of its shape, which leaves the base as the first has made it."""
    config = copy.deepcopy(config)
    if rewrites_base(config) is not None:
        config.init_lora_weights, config.layer_replication = True, None
    return config


def attention_configs(model: nn.Module) -> tuple[Any, ...]:
    """Finds every config from which a module of a network reads its kind of attention; walks all modules."""
    configs = (getattr(module, "config", None) for module in model.modules())
    found = {id(config): config for config in configs if hasattr(config, "_attn_implementation_internal")}
    return tuple(found.values())


def biased_modules(network: nn.Module) -> tuple[Any, ...]:
    """Finds the attention modules of T5's that have a learned bias for each distance."""
    return tuple(module for module in network.modules() if is_biased(module))


def is_biased(module: nn.Module) -> bool:
    """Whether a module is an attention of T5's with a learned bias for each distance."""
    return bool(getattr(module, "has_relative_attention_bias", False))


def mend_attention() -> None:
    """Mends transformers' eager and sdpa attention, for every network of this process."""
    ALL_MASK_ATTENTION_FUNCTIONS.register("eager", _finite_eager_mask)
    ALL_ATTENTION_FUNCTIONS.register("sdpa", _attention_with_lean_bias)


def _finite_eager_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Bounds float64's masks by float32's lowest number: softmax in float32 makes NaN of rows that see nothing."""
    mask: Tensor | None = eager_mask(*args, **kwargs)
    if mask is None or mask.dtype is not torch.float64:
        return mask
    return mask.clamp_(min=torch.finfo(torch.float32).min)


@contextmanager
def implementation(configs: Iterable[Any], name: str) -> Iterator[None]:
    """Has networks take an attention implementation meanwhile, in one thread at a time: copies may share a config."""
    # Not through the public setter, which writes to the configs of parts of the model too, and would not give back.
    with _switch, replaced([(config, "_attn_implementation_internal", name) for config in configs]):
        yield


def _attention_with_lean_bias(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> Any:
    """Attends by sdpa, where T5 would otherwise hold a bias for every layer, row and head.

    Its cross-attention adds zeros, which are left out. A bias that is not trained is joined with its mask once, where
    transformers does so in every layer, and of one query and one key it lies densely: T5 makes it with heads innermost,
    which then passes for channels-last; PyTorch pads it for CUDA's efficient attention with heads innermost too, and
    the kernel refuses it ("last dimension must be contiguous").
    """
    bias = options.get("position_bias")
    if bias is not None and _adds_zeros(module):
        options["position_bias"] = None
    elif bias is not None and bias.shape[-2:] == (1, 1):
        options["position_bias"] = bias.clone(memory_format=torch.contiguous_format)
    elif bias is not None and not bias.requires_grad and not torch.compiler.is_compiling():
        attention_mask = _masked(bias, attention_mask, query.shape[2] > 1 and getattr(module, "is_causal", True))
        options["position_bias"] = None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def _adds_zeros(module: Any) -> bool:
    """Whether a T5's attention reads the encoder's output, whose distances have no bias."""
    return getattr(module, "has_relative_attention_bias", None) is False and module.is_decoder and not module.is_causal


def _masked(bias: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Returns a bias (1, H, N, K) under a mask; layers share both, and what is made of them as long as one keeps it."""
    known, made = getattr(bias, "masked", (None, lambda: None))
    masked: Tensor | None = made() if known is mask else None
    if masked is None:
        seen = mask
        if seen is None and causal:
            seen = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
        if seen is None:
            masked = bias.contiguous()
        else:  # written once, as it will lie: the bias has its heads innermost, which kernels would copy, each time
            kind = bias.dtype if seen.dtype is torch.bool else torch.result_type(bias, seen)
            masked = bias.new_empty((seen.shape[0] if seen.dim() == bias.dim() else 1, *bias.shape[1:]), dtype=kind)
            if seen.dtype is torch.bool:
                torch.where(seen, bias, bias.new_full((), torch.finfo(kind).min), out=masked)
            else:
                torch.add(bias, seen, out=masked)
        bias.masked = mask, TensorWeakRef(masked)  # type: ignore[attr-defined]
    return masked
