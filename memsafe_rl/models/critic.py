"""Critics: networks that foresee what is still to come of a row, one number for each action.

A critic is a head on hidden states, and says whose: those of the model's own forward, those of the model's base under
a second adapter, or those of a network of its own. Those here read tokens; `state_critic` has one for denoisers.

Axes: ``M`` actions of several rows laid end to end, ``D`` hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from memsafe_rl.accounting import charge
from memsafe_rl.models import refusal
from memsafe_rl.models.adapter import ModelAdapter, ScoringAdapter
from memsafe_rl.models.module_state import (
    adapter_weights,
    config_like,
    copy_into,
    kept_trainable,
    peft_adapter_on,
    refuse_trained_bias,
)
from memsafe_rl.types import Component, ModelGeometry

CRITIC_ADAPTER = "critic"
"""Name of the PEFT adapter of a critic on the model's own base."""
SCORE = "score"
"""Name of the layer that gives one number, in transformers' networks that classify sequences."""


class ValueLayer(nn.Module):
    """A linear map, in float32 at least, to one number that is 0 at first, so that advantages begin as the rewards."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        wide = torch.promote_types(dtype, torch.float32)
        self.weight = nn.Parameter(torch.zeros(width, dtype=wide, device=device))
        self.bias = nn.Parameter(torch.zeros((), dtype=wide, device=device))

    def forward(self, hidden_MD: Tensor) -> Tensor:
        """Returns values (M,) of hidden states (M, D), outside of any autocast."""
        with torch.autocast(hidden_MD.device.type, enabled=False):
            return hidden_MD.to(self.weight.dtype) @ self.weight + self.bias


@dataclass(eq=False)
class Critic:
    """What a trainer knows of a critic: a head on a network."""

    head: nn.Module  # gives a value of each hidden state
    network: ScoringAdapter  # whose hidden states these are: the critic's own, or the model
    is_own: bool = False  # whether the network is the critic's own
    peft_adapter: str | None = None  # the one under which the model gives them; None for those of the model itself
    shares_forward: bool = False  # whether they come from the forward that gives log-probs
    judged_columns: tuple[int, ...] | None = None  # columns that it values; None for those that count in the loss

    @cached_property
    def beside(self) -> nn.Module:
        """The modules that are no part of the model."""
        return nn.ModuleDict({"trunk": self.network.model, "head": self.head}) if self.is_own else self.head

    @property
    def own_geometry(self) -> ModelGeometry | None:
        """Sizes of a network of its own; None where it reads with the model's."""
        return self.network.geometry if self.is_own else None

    @contextmanager
    def running(self) -> Iterator[ScoringAdapter]:
        """Gives the network whose hidden states the head reads; what PEFT changes is as before afterwards."""
        name = self.peft_adapter
        with nullcontext() if name is None else peft_adapter_on(self.network.model, name):
            yield self.network

    def _trunk_weights(self) -> Mapping[str, Tensor]:
        """Names the weights that a checkpoint of the model leaves out, but for the head's."""
        if self.peft_adapter is not None:
            return adapter_weights(self.network.model, self.peft_adapter)
        named = self.network.model.named_parameters() if self.is_own else ()
        return {name: weight for name, weight in named if weight.requires_grad}

    def weights(self) -> dict[str, Tensor]:
        """Names all weights that a checkpoint of the model leaves out, those of tied layers once."""
        head = {f"head.{name}": weight for name, weight in self.head.named_parameters()}
        return {**head, **{f"trunk.{name}": weight for name, weight in self._trunk_weights().items()}}

    @torch.no_grad()
    def load_weights(self, saved: Mapping[str, Tensor]) -> None:
        """Copies weights in, bit for bit."""
        own = self.weights()
        found, wanted = ({name: tuple(w.shape) for name, w in weights.items()} for weights in (saved, own))
        if found != wanted:
            differing = sorted({name for name, _ in found.items() ^ wanted.items()})
            raise refusal("critic/saved", count=len(differing), differing=differing)
        for name, weight in own.items():
            copy_into(weight, saved[name])

    @property
    def beside_bytes(self) -> int:
        """Bytes of the trained weights that are no part of the model."""
        return sum(weight.nbytes for weight in self.beside.parameters() if weight.requires_grad)


class SharedTrunk(Critic):
    """A head on the model's own hidden states: one forward gives log-probs and values."""

    def __init__(self, adapter: ModelAdapter) -> None:
        """Puts a head on a model."""
        head = _head_on(adapter, "critic=None, a head on the model's own hidden states")
        super().__init__(head, adapter, shares_forward=True)


class SecondAdapter(Critic):
    """A second PEFT adapter on the model's base, with a head; the base's weights are there once."""

    def __init__(self, adapter: ModelAdapter) -> None:
        """Adds the adapter, made as the model's own, to the model in place."""
        model = adapter.model
        if not isinstance(model, PeftModel):
            raise refusal("critic/adapter", kind=type(model).__name__)
        super().__init__(_head_on(adapter, "critic='adapter'"), adapter, peft_adapter=CRITIC_ADAPTER)
        refuse_trained_bias(model.peft_config.values())
        if CRITIC_ADAPTER not in model.peft_config:
            add_critic_adapter(model)
        adapter.reread()
        for weight in self._trunk_weights().values():
            weight.requires_grad_(True)


class OwnModel(Critic):
    """A network of its own, perhaps a smaller one, that reads the model's tokens, with a head."""

    def __init__(self, adapter: ModelAdapter, *, vocab_size: int) -> None:
        """Puts a head on another network, in place of its output head where that has weights of its own."""
        known = adapter.geometry.vocab_size
        refusal.when(known < vocab_size, "critic/vocabulary", known=known, vocab_size=vocab_size)
        super().__init__(_head_on(adapter, "a critic of its own"), adapter, is_own=True)
        lm: Any = adapter.model
        score = getattr(lm, SCORE, None)
        if isinstance(score, nn.Linear):  # from `critic_of`
            bias = {} if score.bias is None else {"head.bias": score.bias.detach()[0]}
            self.load_weights({**self.weights(), "head.weight": score.weight.detach()[0], **bias})
            if (own := self.weights()["head.weight"]).dtype is score.weight.dtype:
                score.weight.data = own.data[None]  # trained in place, as the trunk is
            delattr(lm, SCORE)
        if getattr(lm.get_output_embeddings(), "weight", None) is not lm.get_input_embeddings().weight:
            lm.set_output_embeddings(nn.Identity())  # nothing reads its logits, and it is as large as the embedding


def critic_of(value_model: Any) -> Any:
    """Returns a network that classifies sequences with one number a critic's form, and any other value as it is."""
    score = getattr(value_model, SCORE, None)
    if not isinstance(value_model, PreTrainedModel) or not isinstance(score, nn.Linear) or score.out_features != 1:
        return value_model
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(value_model.config, dtype=value_model.dtype)
    setattr(lm, lm.base_model_prefix, value_model.base_model)
    lm.get_output_embeddings().weight = lm.get_input_embeddings().weight  # nothing reads its logits
    setattr(lm, SCORE, score)
    return lm


def add_critic_adapter(model: PeftModel) -> None:
    """Adds an adapter for a critic, made as the model's own; what is trained of the model stays as it is."""
    config = config_like(model.peft_config[model.active_adapter])
    config.modules_to_save = None  # whole copies of layers, of which only the embedding's would be read
    with kept_trainable(model):
        model.add_adapter(CRITIC_ADAPTER, config)


def _head_on(adapter: ModelAdapter, told: str) -> ValueLayer:
    """Makes a head for a network's hidden states."""
    if adapter.value_inputs is None:
        raise refusal("critic/hidden", told=told, kind=type(adapter.model).__name__)
    with charge(Component.WEIGHTS):
        return ValueLayer(*adapter.value_inputs, adapter.device)
