"""Makes the critic of a network that draws tokens: a head on the model, a second adapter, or another model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.data.prompts import PromptReader, PromptTokenizer
from memsafe_rl.errors import ConfigError
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.models.critic import Critic, OwnModel, SecondAdapter, SharedTrunk
from memsafe_rl.models.language.factory import adapter_for
from memsafe_rl.models.loading import load_model, read_config
from memsafe_rl.training.assembly.inputs import prompt_room


def bound_prompts(config: TrainerConfig, wanted: Any, reader: PromptReader) -> None:
    """Keeps prompts to the context of a critic that is a network of its own."""
    shares_base = wanted is None or (isinstance(wanted, str) and wanted == "adapter")
    if shares_base or not isinstance(reader, PromptTokenizer):
        return
    if not isinstance(wanted, (str, PreTrainedModel, PeftModel)):
        raise ConfigError(
            f"critic is {wanted!r:.100} ({type(wanted).__name__}). Give None for a head on the model's own hidden "
            "states, 'adapter', or another model: its name, its path, or the model itself."
        )
    facts = read_config(wanted, trust_remote_code=config.trust_remote_code, told="critic")
    reader.bound(*prompt_room(config, facts, "critic"))


def make_critic(
    config: TrainerConfig,
    adapter: ModelAdapter,
    wanted: Any,
    device: torch.device,
    check: Callable[[Any], None],
    *,
    pad_token_id: int,
) -> Critic:
    """Makes the critic that the user wants for a network that draws tokens."""
    if wanted is None:
        return SharedTrunk(adapter)
    if wanted == "adapter":
        return SecondAdapter(adapter)
    loaded = load_model(wanted, trust_remote_code=config.trust_remote_code, device=device).model
    if loaded.get_output_embeddings() is None:
        raise ConfigError(
            f"critic is a {type(loaded).__name__}, which has no language-model head. Pass the same network as "
            "AutoModelForCausalLM (or AutoModelForSeq2SeqLM); its value head is made here."
        )
    if {id(weight) for weight in loaded.parameters()} & {id(weight) for weight in adapter.model.parameters()}:
        raise ConfigError(
            "critic shares weights with the model. Leave critic out for a head on the model's own hidden states, "
            "set critic='adapter', or give a copy (copy.deepcopy)."
        )
    own = adapter_for(loaded, pad_token_id=pad_token_id)
    check(own)
    return OwnModel(own, vocab_size=adapter.geometry.vocab_size)
