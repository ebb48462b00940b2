"""Output heads of transformers language models, as `LinearHead` where they are one linear map, else as a function.

Axes: ``M`` tokens laid end to end, ``D`` hidden width, ``V`` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memsafe_rl.types import LinearHead, TokenDistribution


@dataclass(frozen=True)
class LogitMap:
    """What a model does to the output of its head: ``cap · tanh(scale · z / cap)``."""

    scale: float = 1.0  # factor on the logits
    soft_cap: float | None = None  # bound of the logits, None for none

    def __call__(self, logits_MV: Tensor) -> Tensor:
        """Applies the map, in float32 at least if it does anything."""
        if self.scale == 1.0 and self.soft_cap is None:
            return logits_MV
        logits_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)) * self.scale
        return logits_MV if self.soft_cap is None else torch.tanh(logits_MV / self.soft_cap) * self.soft_cap


@dataclass(frozen=True)
class ModuleHead:
    """A head that is more than one linear map (LoRA, quantised, hooked): the module itself, then the model's map."""

    module: nn.Module  # maps hidden states (M, D) to (M, V)
    logit_map: LogitMap  # what the model does afterwards
    bias_V: Tensor | None = None  # (V,) that the model adds to the module's output, or None

    def __call__(self, hidden_MD: Tensor) -> Tensor:
        """Gives logits (M, V)."""
        logits_MV: Tensor = self.module(hidden_MD)
        return self.logit_map(logits_MV if self.bias_V is None else logits_MV + self.bias_V)


def given_logits(logits_MV: Tensor) -> Tensor:
    """The head of a distribution whose hidden states are already the model's logits."""
    return logits_MV


def logit_maps(config: Any) -> tuple[LogitMap, ...]:
    """Guesses from a config what its model does to logits; the check at start picks the one that holds.

    Cohere multiplies by ``logit_scale``, Falcon-H1 by ``lm_head_multiplier``; Granite divides by ``logits_scaling``
    and HyperCLOVA X multiplies by it; T5 with a tied head multiplies by D**-0.5; Gemma caps at
    ``final_logit_softcapping``.
    """
    text = config.get_text_config(decoder=True)
    factor = _number(text, "logit_scale") * _number(text, "lm_head_multiplier")
    scaling = _number(text, "logits_scaling")
    scales = dict.fromkeys((factor / scaling, factor * scaling, 1.0))
    if getattr(config, "is_encoder_decoder", False):
        tied = text.hidden_size**-0.5
        scaled = getattr(config, "scale_decoder_outputs", config.model_type in ("umt5", "switch_transformers"))
        scales = dict.fromkeys((tied, 1.0) if scaled else (1.0, tied))
    caps = dict.fromkeys((getattr(text, "final_logit_softcapping", None) or None, None))
    return tuple(LogitMap(scale, cap) for cap in caps for scale in scales)


def head_of(module: nn.Module, logit_map: LogitMap, bias_V: Tensor | None = None) -> LinearHead | ModuleHead:
    """Describes an output head as it is now (PEFT's adapters on or off)."""
    linear = _active(module)
    if type(linear) is nn.Linear and not _hooked(module) and not _hooked(linear):
        both = linear.bias if bias_V is None else bias_V if linear.bias is None else linear.bias + bias_V
        return LinearHead(linear.weight, both, logit_map.scale, logit_map.soft_cap)
    return ModuleHead(module, logit_map, bias_V)


def naive_logits(distribution: TokenDistribution) -> Tensor:
    """Gives all logits of a distribution, as the check at start compares them: the naive form of what `ops` does."""
    head, hidden_MD = distribution.head, distribution.hidden_MD
    if not isinstance(head, LinearHead):
        return head(hidden_MD)
    dtype = torch.promote_types(hidden_MD.dtype, head.weight_VD.dtype)
    bias_V = None if head.bias_V is None else head.bias_V.to(dtype)
    logits_MV = functional.linear(hidden_MD.to(dtype), head.weight_VD.to(dtype), bias_V)
    return LogitMap(head.scale, head.soft_cap)(logits_MV)


def _number(config: Any, name: str) -> float:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, (int, float)) and value else 1.0


def _active(module: Any) -> Any:
    """Looks through PEFT's wrapper of a fully trained module."""
    if not hasattr(module, "modules_to_save") or not hasattr(module, "original_module"):
        return module
    trained = [name for name in module.active_adapters if name in module.modules_to_save]
    if module.disable_adapters or not trained:
        return module.original_module
    return module.modules_to_save[trained[0]]


def _hooked(module: nn.Module) -> bool:
    """Whether calling a module does more than its class's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)
