"""What a context changes of a network and puts back: train or eval mode, the active PEFT adapter, what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftModel
from torch import nn

from memsafe_rl.errors import ConfigError

REFERENCE_ADAPTER = "ref"
"""Name of the PEFT adapter that holds the reference, where there is one."""


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
        if name is not None:
            raise ConfigError(f"{type(model).__name__} has no PEFT adapter {name!r}. Leave peft_adapter out.")
        yield
        return
    refuse_trained_bias(model.peft_config.values())
    if name is not None and name not in model.peft_config:
        raise ConfigError(f"There is no PEFT adapter {name!r}. Use one of {', '.join(model.peft_config)}.")
    with kept_trainable(model):
        if name is None:
            with model.disable_adapter():
                yield
            return
        active = model.active_adapter
        model.set_adapter(name)
        try:
            yield
        finally:
            model.set_adapter(active)


@contextmanager
def as_reference(model: Any) -> Iterator[None]:
    """Makes a model under PEFT its own reference: by its adapter named "ref", else with adapters off."""
    with peft_adapter_on(model, REFERENCE_ADAPTER if REFERENCE_ADAPTER in model.peft_config else None):
        yield


def refuse_trained_bias(configs: Any) -> None:
    """Refuses, where a reference is wanted, PEFT adapters that train the base's own biases."""
    for config in configs:
        bias = getattr(config, "bias", "none")
        if bias not in ("none", False):
            raise ConfigError(
                f"peft_config.bias is {bias!r}: the base's biases are trained, so switching the adapter off does not "
                "give the reference. Set bias='none', or beta=0."
            )
