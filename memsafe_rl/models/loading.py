"""Loads language models, their references and tokenizers, and what a config says before any weight is read."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from memsafe_rl.accounting import charge
from memsafe_rl.errors import first_line
from memsafe_rl.hub import loading_places_for, places_for, read_tokenizer
from memsafe_rl.models import refusal
from memsafe_rl.models.critic import critic_of
from memsafe_rl.models.geometry import max_positions
from memsafe_rl.models.host_weights import put_on
from memsafe_rl.models.language.base import is_encoder_decoder, language_model_of, refuse_peft_method
from memsafe_rl.models.language.factory import adapter_for, family_of
from memsafe_rl.models.module_state import (
    REFERENCE_ADAPTER,
    adapter_weights,
    config_like,
    kept_trainable,
    quiet_peft,
    refuse_trained_bias,
    rewrites_base,
)
from memsafe_rl.models.routing import RouterLosses
from memsafe_rl.models.teacher import Teacher
from memsafe_rl.models.vision.processors import freeze_unused_tower, reads_images, share_tower
from memsafe_rl.types import Component, room_for_prompt

logger = logging.getLogger(__name__)

_INSTEAD = {"critic": "; for a head on the model itself leave critic out, for a second adapter write 'adapter'"}
"""What else an argument of a trainer may be than a model, by its name."""

_OF_WEIGHTS = ("dtype", "torch_dtype", "device_map", "quantization_config")
"""Loading arguments that say how weights are stored, not what the network is."""


@dataclass(frozen=True)
class ModelFacts:
    """What a config says of a network."""

    config: Any  # transformers config; None where the network has none
    max_positions: int | None  # longest sequence the network accepts, in tokens; None if unbounded
    vocab_size: int  # rows of the embedding
    router_losses: RouterLosses  # that a mixture of experts declares

    def room_for_prompt(self, new_tokens: int) -> int | None:
        """Counts the tokens of the longest prompt that the network accepts."""
        return room_for_prompt(self.max_positions, new_tokens, encoded=is_encoder_decoder(self.config))


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be trained."""

    model: Any  # the network, a `PeftModel` where there is an adapter; in eval mode
    reference_model: Any  # frozen network for the reference; None where none is wanted or an adapter is switched
    copied: bool = True  # whether the reference begins as the model itself, not as another network


def read_config(
    model: str | nn.Module,
    *,
    trust_remote_code: bool = False,
    model_init_kwargs: Mapping[str, Any] | None = None,
    told: str = "model",
) -> ModelFacts:
    """Reads a model's config; no weight is loaded."""
    _check_kind(model, told)
    arguments = dict(model_init_kwargs or {})
    if not isinstance(model, str) and not isinstance(language_model_of(model), PreTrainedModel):
        sizes = adapter_for(model, pad_token_id=0).geometry
        return ModelFacts(None, sizes.max_positions, sizes.vocab_size, RouterLosses())
    if not isinstance(model, str):
        config = language_model_of(model).config
    elif arguments.get("config") is not None:
        config = arguments["config"]
    else:
        given = {key: value for key, value in arguments.items() if key not in _OF_WEIGHTS}  # may change the config
        given.setdefault("trust_remote_code", trust_remote_code)
        try:
            config = AutoConfig.from_pretrained(model, **places_for(model, **given))
        except (OSError, ValueError) as error:
            instead = _INSTEAD.get(told, "")
            raise refusal("config/read", told=told, model=model, reason=first_line(error), instead=instead) from error
    text = config.get_text_config(decoder=True)
    if getattr(text, "vocab_size", None) is None:
        raise refusal("config/vocab_size", told=told, name=name_of(model), kind=type(config).__name__)
    trained = _has_routers(text) or is_encoder_decoder(config)  # others declare coefficients without any router
    names = [one.name for one in fields(RouterLosses)] if trained else []
    declared = RouterLosses(*(float(getattr(text, name, None) or 0.0) for name in names))
    return ModelFacts(config, max_positions(config), int(text.vocab_size), declared)


def _has_routers(text: Any) -> bool:
    """Whether a config asks for routers: a family with experts may have members without (Doge, Granite 4, Jamba)."""
    counts = [getattr(text, name) for name in ("num_experts", "num_local_experts") if hasattr(text, name)]
    dense = not getattr(text, "is_moe", True) or (counts and all(count in (None, 0, 1) for count in counts))
    return hasattr(text, "output_router_logits") and not dense


def load_model(
    model: str | nn.Module,
    *,
    model_init_kwargs: Mapping[str, Any] | None = None,
    quantization_config: Any = None,
    peft_config: Any = None,
    trust_remote_code: bool = False,
    device: torch.device | str = "cpu",
    with_reference: bool = False,
    ref_model: str | nn.Module | None = None,
    teacher: Teacher | None = None,
    room_bytes: int | None = None,
    sees_images: bool = False,
    half: torch.dtype = torch.bfloat16,
) -> LoadedModel:
    """Loads what is trained and, if wanted, what answers for the reference.

    Weights of a named model that stay frozen (the base under an adapter, the reference) are ``half`` on CUDA, trained
    ones fp32; all are fp32 elsewhere; ``model_init_kwargs["dtype"]`` overrides both. Weights of a new adapter are
    fp32. A model object keeps its types. The reference costs no second copy of the base under an adapter: a new
    adapter is switched off; one that came with the model is copied, as it is now, to a frozen adapter "ref". Without an
    adapter ``ref_model`` may take the place of a copy: it is frozen in place, and stands aside where no reference is
    wanted. A ``teacher`` is the reference beside any model; one that is an adapter on the model's base joins it there.
    Where frozen weights take more than ``room_bytes``, blocks of them stay in host memory. The image tower of a named
    model learns where it ``sees_images``.
    """
    arguments = dict(model_init_kwargs or {})
    if quantization_config is not None:
        refusal.when(arguments.get("quantization_config") is not None, "quantization_config/twice")
        arguments["quantization_config"] = quantization_config
    _refuse_contradictions(model, arguments, peft_config, with_reference)
    _check_reference(model, peft_config, ref_model)
    facts = read_config(model, trust_remote_code=trust_remote_code, model_init_kwargs=arguments)
    device = torch.device(device)
    frozen_dtype = half if device.type == "cuda" else torch.float32

    def load(name: Any, frozen: bool) -> Any:
        given, room = arguments, None if peft_config is None else room_bytes
        if room is not None and _bytes_in_4_bits(facts.config, arguments, trust_remote_code=trust_remote_code) > room:
            given = {"device_map": {"": "cpu"}, **arguments}  # quantised there, since the device has no room
        dtype = frozen_dtype if frozen else torch.float32
        return _from_name(name, facts.config, given, trust_remote_code, device, dtype=dtype)

    with charge(Component.WEIGHTS):
        base: Any = load(model, frozen=peft_config is not None) if isinstance(model, str) else model
        if isinstance(model, str):
            freeze_unused_tower(base, sees_images=sees_images)
        for module in base.modules():
            if hasattr(module, "create_weight"):  # sinusoidal positions: transformers freezes its own alone
                module.requires_grad_(False)
        trained, reference = base, None
        if peft_config is not None:
            try:
                with quiet_peft():
                    trained = get_peft_model(base, copy.copy(peft_config), revision=arguments.get("revision"))
            except (ValueError, TypeError, LookupError, AttributeError, ImportError, NotImplementedError) as error:
                kind, reason = type(peft_config).__name__, first_line(error)
                raise refusal("peft_config/fit", kind=kind, model=type(base).__name__, reason=reason) from error
        elif isinstance(base, PeftModel):
            if with_reference:
                _copy_reference_adapter(base)
        elif getattr(base, "is_quantized", False):
            raise refusal("quantization_config/trained", name=name_of(model))
        elif with_reference:
            source = model if ref_model is None else ref_model
            taken = load(source, frozen=True) if isinstance(source, str) else source
            reference = (copy.deepcopy(base) if taken is model else taken).requires_grad_(False).eval()
        is_copy = teacher is None and ref_model in (None, model)
        share_tower(language_model_of(trained), reference if is_copy else None)
        if teacher is not None:
            given, trusted = teacher.arguments, trust_remote_code
            own = read_config(teacher.base, told="teacher", trust_remote_code=trusted, model_init_kwargs=given)
            check_teacher(teacher.name, own.config, facts.config)
            if teacher.joins(model, peft_config):
                teacher.join(trained)
            else:
                loaded = _from_name(teacher.base, own.config, given, trusted, device, dtype=frozen_dtype)
                reference = teacher.over(loaded)
        copied = None if reference is None else language_model_of(reference)
        put_on(language_model_of(trained), device, room_bytes, copied)
    if not any(weight.requires_grad for weight in trained.parameters()):
        raise refusal("model/trainable", name=name_of(model))
    return LoadedModel(trained.eval(), reference, is_copy)


def critic_named(name: str, *, trust_remote_code: bool) -> Any:
    """Loads a critic that was saved as a classifier of sequences, with its last layer; returns other names as given."""
    config = read_config(name, trust_remote_code=trust_remote_code, told="critic").config
    if not any(kind.endswith("ForSequenceClassification") for kind in config.architectures or ()):
        return name
    places = loading_places_for(name, trust_remote_code=trust_remote_code)
    with charge(Component.WEIGHTS):
        return critic_of(AutoModelForSequenceClassification.from_pretrained(name, dtype=torch.float32, **places))


def load_tokenizer(
    model: str | nn.Module, processing_class: Any = None, *, trust_remote_code: bool = False, **places: Any
) -> Any:
    """Returns the tokenizer, able to pad, on the left; a missing pad token becomes the eos token."""
    _check_kind(model)
    tokenizer = processing_class
    if tokenizer is None:
        name = name_of(model)
        try:
            tokenizer = read_tokenizer(name, trust_remote_code=trust_remote_code, **places)
        except (OSError, ValueError, ImportError) as error:
            read_config(model, trust_remote_code=trust_remote_code, model_init_kwargs=places)  # or the model is missing
            raise refusal("tokenizer/load", name=name, reason=first_line(error)) from error
    if isinstance(tokenizer, ProcessorMixin) or not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise refusal("processing_class", kind=type(tokenizer).__name__)
    if tokenizer.pad_token_id is None:
        refusal.when(tokenizer.eos_token_id is None, "tokenizer/pad", name=name_of(model))
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return tokenizer


def eos_token_ids(tokenizer: Any, model: nn.Module) -> tuple[int, ...]:
    """Returns every id that ends a completion: the tokenizer's, then those the model's generation config declares."""
    declared = getattr(getattr(language_model_of(model), "generation_config", None), "eos_token_id", None)
    listed = declared if isinstance(declared, (list, tuple)) else [declared]
    ids = tuple(dict.fromkeys(int(token) for token in (tokenizer.eos_token_id, *listed) if token is not None))
    if not ids:
        logger.warning("Neither tokenizer nor model declares an eos token: every completion runs to its full length.")
    return ids


def _refuse_contradictions(
    model: str | nn.Module, arguments: Mapping[str, Any], peft_config: Any, with_reference: bool
) -> None:
    """Refuses what can be refused before anything is loaded."""
    _check_kind(model)
    refusal.when(not isinstance(model, str) and arguments, "arguments/loaded", arguments=", ".join(sorted(arguments)))
    if peft_config is not None and not isinstance(peft_config, PeftConfig):
        raise refusal("peft_config/kind", peft_config=peft_config, kind=type(peft_config).__name__)
    refusal.when(getattr(model, "_hf_peft_config_loaded", False), "model/add_adapter")
    if isinstance(model, PeftModel):
        refusal.when(peft_config is not None, "peft_config/model")
        refusal.when(len(model.active_adapters) != 1, "adapters/active", count=len(model.active_adapters))
        refusal.when(any(getattr(module, "merged", False) for module in model.modules()), "adapters/merged")
    refusal.when(arguments.get("quantization_config") is not None and peft_config is None, "quantization_config/loaded")
    configs = [peft_config] if peft_config is not None else list(getattr(model, "peft_config", {}).values())
    for config in configs:
        refuse_peft_method(config)
    if with_reference:
        refuse_trained_bias(configs)
        told = None if peft_config is None else rewrites_base(peft_config)
        refusal.when(told, "peft_config/base", told=told)


def _check_reference(model: Any, peft_config: Any, ref_model: Any) -> None:
    """Refuses a reference that is the model, that an adapter makes needless, or that has other tokens."""
    if ref_model is None:
        return
    refusal.when(ref_model is model and not isinstance(model, str), "ref_model/itself")
    refusal.when(peft_config is not None or isinstance(model, PeftModel), "ref_model/adapter")
    sizes = [read_config(one, told=told).vocab_size for one, told in ((model, "model"), (ref_model, "ref_model"))]
    refusal.when(sizes[0] != sizes[1], "ref_model/vocabulary", sizes=sizes)


def check_teacher(name: str, teacher: Any, student: Any) -> None:
    """Refuses a teacher of another family or vocabulary, whose tokens mean something else."""
    kinds = [(one.model_type, one.get_text_config(decoder=True).vocab_size) for one in (teacher, student) if one]
    if len({*kinds}) != 1 or len(kinds) != 2:
        known = " and the model a ".join(f"{kind} of {size} tokens" for kind, size in kinds)
        raise refusal("teacher_model_name_or_path", name=name, kind=known)


def _check_kind(model: Any, told: str = "model") -> None:
    """Refuses a network of no known family, that reads something else than tokens, or has no head that gives them."""
    if isinstance(model, str):
        return
    lm = language_model_of(model)
    refusal.when(family_of(lm) is None, "model/kind", told=told, kind=type(lm).__name__)
    if not isinstance(lm, PreTrainedModel):
        return
    refusal.when(any(weight.is_meta for weight in lm.parameters()), "model/meta", told=told)
    kind, reads = type(lm).__name__, str(getattr(lm, "main_input_name", "input_ids"))
    refusal.when(reads != "input_ids", "model/reads", told=told, kind=kind, reads=reads)
    refusal.when(not lm.can_generate() and lm.get_output_embeddings() is None, "model/head", told=told, kind=kind)


def _from_name(
    name: str,
    config: Any,
    arguments: Mapping[str, Any],
    trust_remote_code: bool,
    device: torch.device,
    *,
    dtype: torch.dtype,
) -> Any:
    """Loads a model into host memory, in a type unless one is asked for; a quantised one to where it is told."""
    settings = {"trust_remote_code": trust_remote_code, **arguments}
    if "dtype" not in settings:
        settings["dtype"] = settings.pop("torch_dtype", dtype)
    # bitsandbytes quantises on the way to the device, so weights must be told at once where they go.
    if settings.get("quantization_config") is not None:
        settings.setdefault("device_map", {"": device})
    kind = auto_class_of(config)
    try:
        model = kind.from_pretrained(name, **loading_places_for(name, **settings))
    except (OSError, ValueError, TypeError, ImportError, AttributeError) as error:
        raise refusal("model/load", name=name, kind=kind.__name__, reason=first_line(error).rstrip(".")) from error
    places = getattr(model, "hf_device_map", None) or {}
    if len(set(places.values())) > 1:
        raise refusal("device_map", name=name, devices=", ".join(map(str, dict.fromkeys(places.values()))))
    return model


def auto_class_of(config: Any) -> Any:
    """Returns the class of transformers that makes a network from its config."""
    if reads_images(config):
        return AutoModelForImageTextToText
    return AutoModelForSeq2SeqLM if is_encoder_decoder(config) else AutoModelForCausalLM


def _bytes_in_4_bits(config: Any, arguments: Mapping[str, Any], *, trust_remote_code: bool) -> int:
    """Counts the bytes of a base that bitsandbytes has in 4 bits, scales included; 0 for any other base."""
    settings = arguments.get("quantization_config") or getattr(config, "quantization_config", None)
    read = settings.get if isinstance(settings, Mapping) else partial(getattr, settings)
    if not read("load_in_4bit", False):
        return 0
    with torch.device("meta"):
        network = auto_class_of(config).from_config(config, dtype=torch.bfloat16, trust_remote_code=trust_remote_code)
    packed: int = sum(layer.weight.numel() for layer in layers_in_4_bits(network, read("llm_int8_skip_modules", None)))
    whole: int = sum(weight.nbytes for weight in network.parameters())
    return whole - 2 * packed + packed // 2 + packed // 16


def layers_in_4_bits(model: Any, skipped: list[str] | None) -> list[nn.Linear]:
    """Lists the layers that transformers would have in 4 bits, GPT-2's as the linear ones that they become."""
    kept = HfQuantizer.get_modules_to_not_convert(model, skipped, model._keep_in_fp32_modules)
    named = {name: layer for name, layer in model.named_modules() if should_convert_module(name, kept)}
    for name, layer in named.items():
        if isinstance(layer, Conv1D):
            takes, gives = layer.weight.shape
            model.set_submodule(name, nn.Linear(takes, gives, dtype=layer.weight.dtype))
    return [layer for name in named if type(layer := model.get_submodule(name)) is nn.Linear]


def _copy_reference_adapter(model: Any) -> None:
    """Copies the active adapter, as it is now, to a frozen one named "ref"; one of that name is taken as it is."""
    if REFERENCE_ADAPTER not in model.peft_config:
        active = model.active_adapters[0]
        with kept_trainable(model):
            model.add_adapter(REFERENCE_ADAPTER, config_like(model.peft_config[active]))
        weights = dict(model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, weight in weights.items():
                if f".{active}." in name or name.endswith(f".{active}"):
                    head, _, tail = f"{name}.".rpartition(f".{active}.")
                    weights[f"{head}.{REFERENCE_ADAPTER}.{tail}"[:-1]].copy_(weight)
    for weight in adapter_weights(model, REFERENCE_ADAPTER).values():
        weight.requires_grad_(False)


def name_of(model: str | nn.Module) -> str:
    """Returns the name or folder that a model was loaded from, else its class."""
    if isinstance(model, str):
        return model
    return str(getattr(getattr(language_model_of(model), "config", None), "_name_or_path", "") or type(model).__name__)
