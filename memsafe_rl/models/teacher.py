"""A teacher for on-policy distillation: a network of its own, or an adapter on the base that is trained."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers.utils.peft_utils import find_adapter_config_file

from memsafe_rl.errors import first_line
from memsafe_rl.hub import places_for
from memsafe_rl.models import refusal
from memsafe_rl.models.language.base import refuse_prompt_learning
from memsafe_rl.models.module_state import (
    REFERENCE_ADAPTER,
    adapter_weights,
    kept_trainable,
    quiet_peft,
    refuse_trained_bias,
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
            raise refusal("teacher/adapter", name=name, reason=first_line(error)) from error
        refuse_prompt_learning(adapter)
        refusal.when(not adapter.base_model_name_or_path, "teacher/base", name=name)
        rest = {key: value for key, value in arguments.items() if key not in _PLACES or key in _SHARED}
        return cls(name, str(adapter.base_model_name_or_path), rest, adapter, places)

    def is_on(self, model: str) -> bool:
        """Whether it is an adapter on a named network."""
        here, there = Path(model), Path(self.base)
        same = model == self.base or (here.exists() and there.exists() and here.samefile(there))
        return self.adapter is not None and same

    def join(self, model: PeftModel, *, fake: bool = False) -> None:
        """Puts its adapter, or one of its shape, beside that of a model on the same base, frozen, as the reference."""
        assert self.adapter is not None, "only an adapter is put on another's base"
        refuse_trained_bias([self.adapter, *model.peft_config.values()])
        refusal.when(REFERENCE_ADAPTER in model.peft_config, "teacher/taken", name=self.name)
        with kept_trainable(model):
            if fake:
                model.add_adapter(REFERENCE_ADAPTER, copy.deepcopy(self.adapter))
            else:
                self._loaded(partial(model.load_adapter, adapter_name=REFERENCE_ADAPTER, torch_device="cpu"))
        for weight in adapter_weights(model, REFERENCE_ADAPTER).values():
            weight.requires_grad_(False)

    def over(self, base: nn.Module) -> nn.Module:
        """Gives its network, from the base of that name, frozen."""
        network = base
        if self.adapter is not None:
            network = self._loaded(partial(PeftModel.from_pretrained, base, torch_device="cpu"))
        return network.requires_grad_(False).eval()

    def _loaded(self, load: Any) -> Any:
        try:
            with quiet_peft():
                return load(self.name, **self.places)
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
            raise refusal("teacher/adapter", name=self.name, reason=first_line(error)) from error
