"""Causal LMs and encoder-decoders of transformers: read, loaded, sampled, shown and saved, and their critics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.config.generation_options import say_what_is_left_out
from memsafe_rl.data.image_reader import ImagePromptReader
from memsafe_rl.data.prompts import PromptReader, Prompts, PromptTokenizer, hollow
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.models.batch_invariance import is_default, require
from memsafe_rl.models.critic import Critic, OwnModel, SecondAdapter, SharedTrunk
from memsafe_rl.models.language.base import language_model_of
from memsafe_rl.models.language.factory import adapter_for, check_adapter, family_of
from memsafe_rl.models.loading import (
    LoadedModel,
    ModelFacts,
    critic_named,
    eos_token_ids,
    load_model,
    load_tokenizer,
    name_of,
    read_config,
)
from memsafe_rl.models.teacher import Teacher
from memsafe_rl.models.vision.families import FAMILIES
from memsafe_rl.models.vision.image_prompts import ImagePrompts
from memsafe_rl.models.vision.processors import processor_for
from memsafe_rl.rollout.multi_turn.turn_reading import message_of
from memsafe_rl.rollout.native.sequences import check_settings
from memsafe_rl.training import refusal
from memsafe_rl.training.assembly.inputs import model_facts, prompt_reader, prompt_room, router_losses
from memsafe_rl.training.assembly.protocol import ModelFactory, ModelFamily, TrainingRequest, register_model_family
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings

_READ_PROMPTS = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "sequence_bias": (),
    "bad_words_ids": (),
    "logits_processor": (),
}
"""Settings that look at the tokens of a prompt, which stored ids do not show, and what leaves them out."""
_PATCHES = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
}
"""How an image processor and a tower's config name the same sizes."""


class LanguageModels(ModelFactory):
    """Networks that draw tokens: causal LMs and encoder-decoders of transformers, and users' own."""

    own_engine = RolloutPlan.engine

    def __init__(self, config: TrainerConfig, model: Any, processing_class: Any) -> None:
        self._config = config
        self._facts = facts = model_facts(config, model)
        self._router_losses = router_losses(config, facts)
        revision = (config.model_init_kwargs or {}).get("revision")
        where: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
        where |= {"revision": revision} if revision else {}
        processor = processor_for(name_of(model), processing_class, facts.config, **where)
        self.tokenizer = load_tokenizer(model, processing_class if processor is None else processor.tokenizer, **where)
        self.processing_class = self.tokenizer if processor is None else processor
        text = prompt_reader(config, self.tokenizer, facts)
        self._image_reader = None if processor is None else _image_reader(processor, text, facts)
        self.reader: PromptReader = self._image_reader or text

    def read_text_alone(self) -> None:
        """Reads prompts by the tokenizer alone, as if there were no image processor beside it."""
        self.processing_class, self._image_reader = self.tokenizer, None
        self.reader = prompt_reader(self._config, self.tokenizer, self._facts)

    def load(self, request: TrainingRequest, device: torch.device, room_bytes: int) -> LoadedModel:
        """Loads a model by name, or prepares a given one."""
        named, given = self._config.teacher_model_name_or_path, self._config.teacher_model_init_kwargs
        teacher = None if named is None else Teacher.named(named, dict(given or {}))
        return load_model(
            request.model,
            model_init_kwargs=self._config.model_init_kwargs,
            quantization_config=request.quantization_config,
            peft_config=request.peft_config,
            trust_remote_code=self._config.trust_remote_code,
            device=device,
            with_reference=self._config.has_reference and teacher is None,
            teacher=teacher,
            ref_model=request.ref_model,
            room_bytes=room_bytes,
            sees_images=self._image_reader is not None,
            half=self._config.autocast_dtype or torch.bfloat16,
        )

    def adapt(self, loaded: LoadedModel) -> ModelAdapter:
        """Wraps a model by its family."""
        pad = self.tokenizer.pad_token_id
        inputs = None
        if self._image_reader is not None:
            lm, copy = language_model_of(loaded.model), loaded.reference_model
            inputs = ImagePrompts(lm, dtype=self._config.autocast_dtype, reference=copy)
            self._image_reader.attach(inputs)
        adapter: ModelAdapter = adapter_for(
            loaded.model, pad_token_id=pad, reference_model=loaded.reference_model, inputs=inputs
        )
        settle_numerics(self._config, adapter)
        if self._router_losses.off:
            adapter.hear_routers(self._router_losses)
        say_what_is_left_out(getattr(language_model_of(adapter.model), "generation_config", None))
        return adapter

    def check(self, adapter: ModelAdapter) -> None:
        """Compares log-probs and decoding with the model's own logits."""
        check_adapter(adapter)
        if self._image_reader is not None:
            # else it would read stored ids itself
            refusal.when(not (adapter.joins and adapter.decodes), "images/prompts", model=type(adapter.model).__name__)
        if self._config.batch_invariant:
            require(adapter)

    def critic(self, adapter: ModelAdapter, wanted: Any, check: Callable[[Any], None]) -> Critic:
        """Makes a critic that reads tokens: a head, a second adapter, or a network of its own."""
        if wanted is None:
            return SharedTrunk(adapter)
        if isinstance(wanted, str) and wanted == "adapter":
            return SecondAdapter(adapter)
        refusal.when(self._image_reader is not None, "critic/images")
        trusted = self._config.trust_remote_code
        wanted = critic_named(wanted, trust_remote_code=trusted) if isinstance(wanted, str) else wanted
        frozen = isinstance(wanted, nn.Module) and not any(weight.requires_grad for weight in wanted.parameters())
        refusal.when(frozen, "critic/trainable", kind=type(wanted).__name__)
        loaded = load_model(wanted, trust_remote_code=trusted, device=adapter.device).model
        refusal.when(loaded.get_output_embeddings() is None, "critic/head", kind=type(loaded).__name__)
        own_weights, weights = ({id(one) for one in network.parameters()} for network in (loaded, adapter.model))
        refusal.when(own_weights & weights, "critic/shared")
        own = adapter_for(loaded, pad_token_id=self.tokenizer.pad_token_id)
        check(own)
        return OwnModel(own, vocab_size=adapter.geometry.vocab_size)

    def sampling_settings(self, adapter: ModelAdapter) -> SamplingSettings:
        """Returns how tokens are drawn; what the configuration leaves open, the model's generation config says."""
        declared = getattr(language_model_of(adapter.model), "generation_config", None)
        ends = eos_token_ids(self.tokenizer, adapter.model)
        settings = self._config.sampling_settings(ends, tokenizer=self.tokenizer, declared=declared)
        if self._image_reader is not None:
            settings = _without_image_tokens(settings, language_model_of(adapter.model).config)
        check_settings(settings, adapter.geometry.vocab_size)
        return settings

    def decoded(self, prompts: Prompts, conditions: Sequence[Tensor], completions: Sequence[Completion]) -> list[Any]:
        """Returns texts, or one message each where prompts are conversations, as the tokenizer reads its turns."""
        ids: list[list[int]] = [completion.ids.tolist() for completion in completions]
        is_chat = not isinstance(prompts.prompts[0], str)
        if is_chat and getattr(self.tokenizer, "response_template", None) is not None:
            before = [context.tolist() if self._image_reader is None else None for context in conditions]
            return [[message_of(self.tokenizer, *turn)] for turn in zip(before, ids, strict=True)]
        texts = [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in ids]
        return [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts

    def completion_ids(self, completions: Sequence[Completion]) -> list[Any]:
        """Returns token ids."""
        return [completion.ids.tolist() for completion in completions]

    def loggable(self, sample: Any) -> Any:
        """Returns texts and messages, images left out."""
        return hollow(sample)

    def run_facts(self) -> dict[str, Any]:
        """Adds nothing: all is in the configuration."""
        return {}

    def check_given(self, given: Mapping[str, Any]) -> None:
        """Refuses what a run whose prompts may hold images does not support yet."""
        if self._image_reader is None:
            return
        others = {
            "rollout_func": given["rollout_func"] is not None,
            **dict.fromkeys(self._config.engines_chosen, True),
            "partial_rollout_tokens": self._config.partial_rollout_tokens is not None,
            "teacher_model_server_url": self._config.teacher_model_server_url is not None,
            "fsdp": self._config.sharded,
            "torch_compile": self._config.compile_mode is not None,
        }
        chosen = [name for name, is_set in others.items() if is_set]
        if chosen:
            raise refusal("images/beside", name=chosen[0])
        plays = [name for name in ("tools", "environment_factory") if given[name]]
        if plays and self._config.world_size > 1:
            raise refusal("images/ranks", name=plays[0], count=self._config.world_size)

    def facts(self) -> dict[str, str]:
        """Says how long completions can become, for the start banner."""
        return {"completion length": f"at most {self._config.max_completion_length} tokens"}


def settle_numerics(config: TrainerConfig, adapter: Any) -> None:
    """Has a network compute rows as if alone where that is asked for, or the default of its device and type."""
    if not hasattr(adapter, "numerics"):
        return
    wanted, dtype = config.batch_invariant, config.autocast_dtype
    if wanted is None:
        dtype = dtype or adapter.lm.get_input_embeddings().weight.dtype
        wanted = config.compile_mode is None and config.disable_dropout and is_default(adapter.device, dtype)
    for one in (adapter, adapter.reference_adapter):
        if one is not None:
            one.batch_invariant = wanted


def bound_prompts(config: TrainerConfig, wanted: Any, reader: PromptReader) -> None:
    """Keeps prompts to the context of a critic that is a network of its own."""
    shares_base = wanted is None or (isinstance(wanted, str) and wanted == "adapter")
    if shares_base or not isinstance(reader, PromptTokenizer):
        return
    is_model = isinstance(wanted, (str, PreTrainedModel, PeftModel))
    refusal.when(not is_model, "critic", given=wanted, kind=type(wanted).__name__)
    facts = read_config(wanted, trust_remote_code=config.trust_remote_code, told="critic")
    reader.bound(*prompt_room(config, facts, "critic"))


def _image_reader(processor: Any, text: PromptTokenizer, facts: ModelFacts) -> ImagePromptReader:
    """Makes what reads prompts with images."""
    same = FAMILIES[facts.config.model_type].spelled is not None  # whatever an image's size
    counts = same or hasattr(processor.image_processor, "get_number_of_image_patches")
    refusal.when(not counts, "images/patches", processor=type(processor.image_processor).__name__)
    tower = getattr(facts.config, "vision_config", None)
    for name, known in _PATCHES.items():
        own, wanted = (getattr(owner, one, None) for owner, one in ((processor.image_processor, name), (tower, known)))
        if isinstance(own, int) and isinstance(wanted, int) and own != wanted:
            raise refusal("images/processor", name=name, own=own, known=known, wanted=wanted)
    tokenizer = text.tokenizer
    tokenizer.chat_template = getattr(processor, "chat_template", None) or tokenizer.chat_template
    return ImagePromptReader(text, processor.image_processor, facts.config)


def _without_image_tokens(settings: SamplingSettings, config: Any) -> SamplingSettings:
    """Has no placeholder of an image be drawn, which would stand for no feature, and refuses what reads prompts."""
    for name, neutral in _READ_PROMPTS.items():
        value = getattr(settings, name)
        refusal.when(value != neutral, "images/tokens", name=name, value=value, neutral=neutral)
    names = ("image_token_id", "video_token_id")
    ids = {int(getattr(config, name)) for name in names if getattr(config, name, None) is not None}
    return replace(settings, suppress_tokens=tuple(sorted({*settings.suppress_tokens, *ids})))


register_model_family(
    ModelFamily("language model", LanguageModels, lambda model: isinstance(model, str) or family_of(model) is not None)
)
