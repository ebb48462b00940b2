"""Makes the critic of a run: a head on the model, a second adapter, another model, or a network of states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.data.prompts import PromptReader, PromptTokenizer
from memsafe_rl.errors import ConfigError
from memsafe_rl.models.critic import Critic, OwnModel, SecondAdapter, SharedTrunk
from memsafe_rl.models.diffusion.adapter import DiffusionAdapter
from memsafe_rl.models.diffusion.state_critic import StateCritic
from memsafe_rl.models.language.factory import adapter_for
from memsafe_rl.models.loading import load_model, read_config
from memsafe_rl.training.assembly.inputs import prompt_room
from memsafe_rl.training.assembly.protocol import ModelFactory

Check = Callable[[TrainerConfig, ModelFactory, Any], None]


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
    config: TrainerConfig, models: ModelFactory, adapter: Any, wanted: Any, device: torch.device, check: Check
) -> Critic:
    """Makes the critic that the user wants for a model."""
    if isinstance(adapter, DiffusionAdapter):
        return _critic_of_states(config, models, adapter, wanted, check)
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
    own = adapter_for(loaded, pad_token_id=models.processing_class.pad_token_id)
    check(config, models, own)
    return OwnModel(own, vocab_size=adapter.geometry.vocab_size)


def _critic_of_states(
    config: TrainerConfig, models: ModelFactory, adapter: DiffusionAdapter, wanted: Any, check: Check
) -> StateCritic:
    if wanted is not None and not isinstance(wanted, nn.Module):
        raise ConfigError(
            f"critic is {wanted!r:.100} and the model a DiffusionPolicy, whose denoiser shows no hidden states "
            "that a head or a second adapter could read. Leave critic out for a small network of its own, or pass "
            "a torch.nn.Module called critic(x, t, condition) that gives a value for each state."
        )
    critic = StateCritic(adapter, wanted)
    check(config, models, critic.network)
    return critic
