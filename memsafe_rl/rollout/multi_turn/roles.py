"""One set of weights, many roles: who speaks is a matter of which adapter is on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from peft import PeftModel
from torch import nn

from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.models.module_state import peft_adapter_on, replaced
from memsafe_rl.rollout import refusal

AGENT, BASE, REFERENCE = "agent", "base", "reference"
"""The roles that every hub has: the trained model, the same with its adapters off, and what the KL refers to."""


@dataclass(frozen=True)
class ModelKey:
    """What makes two models the same weights."""

    name: str  # of the model, or its path
    dtype: str  # of its weights
    quantization: str | None  # its method, such as "bitsandbytes/4bit"; None for none
    device: str  # where it lies


def key_of(model: nn.Module) -> ModelKey:
    """Reads a model's key."""
    inner: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    config = getattr(inner, "config", None)
    method = getattr(getattr(config, "quantization_config", None), "quant_method", None)
    bits = "4bit" if getattr(inner, "is_loaded_in_4bit", False) else "8bit"
    first = next(inner.parameters())
    return ModelKey(
        name=getattr(config, "_name_or_path", "") or f"{type(inner).__name__} at {id(inner):#x}",
        dtype=str(first.dtype).removeprefix("torch."),
        quantization=None if method is None else f"{getattr(method, 'value', method)}/{bits}",
        device=str(first.device),
    )


class ModelRoles:
    """Serves every role from as few weights as there are models; one at a time, for the state of PEFT is global."""

    def __init__(self, agent: ModelAdapter) -> None:
        self._agent = agent
        self._models: dict[ModelKey, ModelAdapter] = {key_of(agent.model): agent}
        self._roles: dict[str, ModelAdapter] = {}
        self._acting: str | None = None
        self.switches = 0

    def register(self, role: str, key: ModelKey, load: Callable[[], ModelAdapter]) -> ModelAdapter:
        """Returns a role to a model, which is loaded only if the hub has no such weights yet."""
        refusal.when(role in self.roles, "role/taken", role=role, roles=self.roles)
        if key not in self._models:
            self._models[key] = load()
        self._roles[role] = self._models[key]
        return self._models[key]

    @property
    def roles(self) -> list[str]:
        """Every role that can act."""
        return [AGENT, BASE, REFERENCE, *getattr(self._agent.model, "peft_config", {}), *self._roles]

    @property
    def models(self) -> list[nn.Module]:
        """The different models, the trained one first."""
        return [adapter.model for adapter in self._models.values()]

    @contextmanager
    def acting(self, role: str) -> Iterator[ModelAdapter]:
        """Has a role act; everything is as before afterwards, after an error too."""
        refusal.when(self._acting is not None, "role/acting", role=role, acting=self._acting)
        with replaced([(self, "_acting", role)]):
            if role == AGENT:
                yield self._agent
            elif role == REFERENCE:
                with self._agent.reference() as reference:
                    yield reference
            else:
                adapter, peft_adapter = self._found(role)
                with peft_adapter_on(adapter.model, peft_adapter):
                    self.switches += 1
                    yield adapter

    def check(self, role: str) -> None:
        """Refuses a role that cannot act."""
        with self.acting(role):
            pass

    def _found(self, role: str) -> tuple[ModelAdapter, str | None]:
        if role in self._roles:
            return self._roles[role], None
        model = self._agent.model
        if role == BASE:
            refusal.when(not isinstance(model, PeftModel), "role/base", model=type(model).__name__)
            return self._agent, None
        if role in getattr(model, "peft_config", {}):
            return self._agent, role
        raise refusal("role/unknown", role=role, roles=", ".join(self.roles))
