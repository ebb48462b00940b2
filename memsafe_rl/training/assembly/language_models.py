"""Causal LMs and encoder-decoders of transformers: read, loaded, sampled, shown and saved, and their critics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from memsafe_rl.checkpoint.weights import Weights, read_weights, write_weights
from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.config.generation_options import say_what_is_left_out
from memsafe_rl.data.images import hollow
from memsafe_rl.data.prompts import PromptReader, Prompts, PromptTokenizer
from memsafe_rl.errors import ConfigError
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.models.batch_invariance import is_default, require
from memsafe_rl.models.critic import Critic, OwnModel, SecondAdapter, SharedTrunk
from memsafe_rl.models.language.base import language_model_of
from memsafe_rl.models.language.factory import adapter_for, check_adapter, family_of
from memsafe_rl.models.loading import LoadedModel, eos_token_ids, load_model, load_tokenizer, name_of, read_config
from memsafe_rl.models.vision.image_prompts import ImagePrompts
from memsafe_rl.models.vision.processors import processor_for
from memsafe_rl.rollout.native.sequences import check_settings
from memsafe_rl.training.assembly.images import (
    image_reader,
    refuse_beside_images,
    require_shared_prompts,
    without_image_tokens,
)
from memsafe_rl.training.assembly.inputs import balance_coef, model_facts, prompt_reader, prompt_room
from memsafe_rl.training.assembly.protocol import ModelFamily, register_model_family
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings


class LanguageModels:
    """Networks that draw tokens: causal LMs and encoder-decoders of transformers, and users' own."""

    own_engine = RolloutPlan.engine

    def __init__(self, config: TrainerConfig, model: Any, processing_class: Any) -> None:
        self._config = config
        facts = model_facts(config, model)
        self._balance_coef = balance_coef(config, facts)
        revision = (config.model_init_kwargs or {}).get("revision")
        where: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
        where |= {"revision": revision} if revision else {}
        processor = processor_for(name_of(model), processing_class, facts.config, **where)
        given = processing_class if processor is None else processor.tokenizer
        self.tokenizer = load_tokenizer(model, given, **where)
        self.processing_class = self.tokenizer if processor is None else processor
        text = prompt_reader(config, self.tokenizer, facts)
        self._image_reader = None if processor is None else image_reader(processor, text, facts)
        self.reader: PromptReader = self._image_reader or text

    def load(
        self,
        model: Any,
        device: torch.device,
        *,
        quantization_config: Any,
        peft_config: Any,
        ref_model: Any,
        room_bytes: int,
    ) -> LoadedModel:
        """Loads a model by name, or prepares a given one; see `ModelFactory.load`."""
        teacher = self._config.teacher_model_name_or_path
        return load_model(
            model,
            model_init_kwargs=self._config.model_init_kwargs,
            quantization_config=quantization_config,
            peft_config=peft_config,
            trust_remote_code=self._config.trust_remote_code,
            device=device,
            with_reference=self._config.has_reference and teacher is None,
            teacher=teacher,
            teacher_init_kwargs=self._config.teacher_model_init_kwargs,
            ref_model=ref_model,
            room_bytes=room_bytes,
        )

    def adapt(self, loaded: LoadedModel) -> ModelAdapter:
        """Wraps a model by its family; see `ModelFactory.adapt`."""
        pad = self.tokenizer.pad_token_id
        inputs = None
        if self._image_reader is not None:
            images = ImagePrompts(language_model_of(loaded.model), dtype=self._config.autocast_dtype)
            self._image_reader.attach(images)
            inputs = images.of
        adapter: ModelAdapter = adapter_for(
            loaded.model, pad_token_id=pad, reference_model=loaded.reference_model, inputs=inputs
        )
        self._settle_numerics(adapter)
        if self._balance_coef:
            adapter.balance_experts(self._balance_coef)
        return adapter

    def _settle_numerics(self, adapter: Any) -> None:
        """Has a network compute rows as if alone where that is asked for, or the default of its device and type."""
        if not hasattr(adapter, "numerics"):
            return
        wanted, dtype = self._config.batch_invariant, self._config.autocast_dtype
        if wanted is None:
            dtype = dtype or adapter.lm.get_input_embeddings().weight.dtype
            wanted = self._config.compile_mode is None and is_default(adapter.device, dtype)
        for one in (adapter, adapter.reference_adapter):
            if one is not None:
                one.batch_invariant = wanted

    def check(self, adapter: ModelAdapter) -> None:
        """Compares log-probs and decoding with the model's own logits; see `ModelFactory.check`."""
        check_adapter(adapter)
        if self._image_reader is not None:
            require_shared_prompts(adapter)
        if self._config.batch_invariant:
            require(adapter)

    def critic(self, adapter: ModelAdapter, wanted: Any, device: torch.device, check: Callable[[Any], None]) -> Critic:
        """Makes a critic that reads tokens; see `ModelFactory.critic`."""
        pad = self.tokenizer.pad_token_id
        if self._image_reader is not None and wanted not in (None, "adapter"):
            raise ConfigError(
                "critic is a network of its own, which reads no images. Leave critic out for a head on the model's own "
                "hidden states, or set critic='adapter'."
            )
        return make_critic(self._config, adapter, wanted, device, check, pad_token_id=pad)

    def sampling_settings(self, adapter: ModelAdapter) -> SamplingSettings:
        """Gives how tokens are drawn; what the configuration leaves open, the model's generation config says."""
        declared = getattr(language_model_of(adapter.model), "generation_config", None)
        say_what_is_left_out(declared)
        ends = eos_token_ids(self.tokenizer, adapter.model)
        settings = self._config.sampling_settings(ends, tokenizer=self.tokenizer, declared=declared)
        if self._image_reader is not None:
            settings = without_image_tokens(settings, language_model_of(adapter.model).config)
        check_settings(settings, adapter.geometry.vocab_size)
        return settings

    def shown(self, prompts: Prompts, completions: Sequence[Completion]) -> list[Any]:
        """Gives texts, or one message each where prompts are conversations."""
        ids: list[Tensor] = [completion.ids for completion in completions]
        texts = self.tokenizer.batch_decode([row.tolist() for row in ids], skip_special_tokens=True)
        if isinstance(prompts.prompts[0], str):
            return list(texts)
        return [[{"role": "assistant", "content": text}] for text in texts]

    def plain(self, completions: Sequence[Completion]) -> list[Any]:
        """Gives token ids."""
        return [completion.ids.tolist() for completion in completions]

    def told(self, shown: Any) -> Any:
        """Gives texts and messages, images left out."""
        return hollow(shown)

    def run_facts(self) -> dict[str, Any]:
        """Adds nothing: all is in the configuration."""
        return {}

    def check_given(self, given: Mapping[str, Any]) -> None:
        """Refuses what takes the place of the engine that reads images; see `ModelFactory.check_given`."""
        if self._image_reader is not None:
            refuse_beside_images(self._config, given)

    def facts(self) -> dict[str, str]:
        """Says how long completions can become, for the start banner."""
        return {"completion length": f"at most {self._config.max_completion_length} tokens"}

    def save(self, model: Any, folder: Path, weights: Weights | None = None) -> None:
        """Writes weights, or an adapter's, and the tokenizer."""
        write_weights(model, self.processing_class, folder, weights)

    def restore(self, model: Any, folder: Path) -> None:
        """Reads them back; see `ModelFactory.restore`."""
        read_weights(model, folder)


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


def _matches(model: Any) -> bool:
    return isinstance(model, str) or family_of(model) is not None


register_model_family(ModelFamily("language model", LanguageModels, _matches))
