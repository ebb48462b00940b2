"""A teacher for on-policy distillation: a network of its own, or an adapter on the base that is trained."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from peft import PeftConfig, PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers.utils.peft_utils import find_adapter_config_file

from memsafe_rl.hub import places_for
from memsafe_rl.models import refusal
from memsafe_rl.models.module_state import (
    REFERENCE_ADAPTER,
    adapter_weights,
    kept_trainable,
    quiet_peft,
    refuse_trained_bias,
    rewrites_base,
)

_SHARED = ("cache_dir", "token", "local_files_only")
"""Loading arguments that hold for the files of an adapter and of its base alike."""
_PLACES = (*_SHARED, "revision", "subfolder")


@dataclass(frozen=True)
class Teacher:
    """What a teacher's name stands for."""

    name: str
    base: str  # the name of its network: its own, or that of the one under its adapter
    arguments: Mapping[str, Any]  # of the network's `from_pretrained`
    adapter: PeftConfig | None
    places: Mapping[str, Any]  # where the adapter's files are

    @classmethod
    def named(cls, name: str, arguments: Mapping[str, Any]) -> Teacher:
        """Looks whether a name is that of an adapter; no weight is loaded."""
        places = places_for(name, **{key: value for key, value in arguments.items() if key in _PLACES})
        if find_adapter_config_file(name, **places) is None:
            return cls(name, name, arguments, None, {})
        try:
            adapter = PeftConfig.from_pretrained(name, **places)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise refusal("teacher/adapter", name=name, reason=_reason(error)) from error
        learns_prompt = f"{adapter.peft_type} learns a prompt" if adapter.is_prompt_learning else None
        refusal.when(learns_prompt, "teacher/adapter", name=name, reason=learns_prompt)
        refusal.when(not adapter.base_model_name_or_path, "teacher/base", name=name)
        rest = {key: value for key, value in arguments.items() if key not in _PLACES or key in _SHARED}
        return cls(name, str(adapter.base_model_name_or_path), rest, adapter, places)

    def joins(self, model: Any, peft_config: PeftConfig | None) -> bool:
        """Whether it is an adapter that can lie beside a new one on a named network: on the same, of the same kind."""
        if self.adapter is None or peft_config is None or not isinstance(model, str):
            return False  # of a network that was passed nobody knows whether its weights are those of its name
        here, there = Path(model), Path(self.base)
        same = model == self.base or (here.exists() and there.exists() and here.samefile(there))
        alone = any(getattr(self.adapter, name, None) for name in ("trainable_token_indices", "target_parameters"))
        alone = alone or any(rewrites_base(config) is not None for config in (self.adapter, peft_config))
        return same and not alone and self.adapter.peft_type == peft_config.peft_type

    def join(self, model: PeftModel, *, fake: bool = False) -> None:
        """Puts its adapter, or one of its shape, beside that of a model on the same base, frozen, as the reference."""
        refuse_trained_bias([self.adapter, *model.peft_config.values()])
        others = ", ".join(name for name in self.arguments if name not in _SHARED)
        refusal.when(others, "teacher/arguments", names=others, name=self.name)
        with kept_trainable(model):
            if fake:
                model.add_adapter(REFERENCE_ADAPTER, copy.deepcopy(self.adapter))
            else:
                self._load_into(model, REFERENCE_ADAPTER)
        for weight in adapter_weights(model, REFERENCE_ADAPTER).values():
            weight.requires_grad_(False)

    def over(self, base: Any) -> nn.Module:
        """Returns its network, from the base of that name, frozen."""
        if self.adapter is not None:
            with quiet_peft():
                base = PeftModel(base, copy.deepcopy(self.adapter))
            self._load_into(base, "default")
        return cast(nn.Module, base.requires_grad_(False).eval())

    def _load_into(self, model: PeftModel, adapter: str) -> None:
        """Reads the adapter's weights; all that it has and no others."""
        try:
            with quiet_peft():
                found = model.load_adapter(self.name, adapter, torch_device="cpu", **self.places)
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
            raise refusal("teacher/adapter", name=self.name, reason=_reason(error)) from error
        wrong = [*found.missing_keys, *found.unexpected_keys]
        reason = f"{len(wrong)} weights are missing or belong to no layer, such as {wrong[0]}" if wrong else None
        refusal.when(reason, "teacher/adapter", name=self.name, reason=reason)


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1]).rstrip(".")
