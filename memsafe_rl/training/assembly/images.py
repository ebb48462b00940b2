"""What prompts with images need beside text, and what a run with them cannot do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.data.image_reader import ImagePromptReader
from memsafe_rl.data.prompts import PromptTokenizer
from memsafe_rl.errors import ConfigError
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.models.loading import ModelFacts
from memsafe_rl.types import SamplingSettings

_TEXT = "If no prompt holds an image, pass the processor's tokenizer as processing_class."

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


def image_reader(processor: Any, text: PromptTokenizer, facts: ModelFacts) -> ImagePromptReader:
    """Makes what reads prompts with images."""
    if not hasattr(processor.image_processor, "get_number_of_image_patches"):
        raise ConfigError(
            f"{type(processor.image_processor).__name__} does not say how many patches an image has. Pass the model's "
            "own processor."
        )
    tokenizer = text.tokenizer
    if tokenizer.chat_template is None:
        tokenizer.chat_template = getattr(processor, "chat_template", None)
    return ImagePromptReader(text, processor.image_processor, int(facts.config.image_token_id))


def refuse_beside_images(config: TrainerConfig, given: Mapping[str, Any]) -> None:
    """Refuses what a run whose prompts may hold images does not support yet."""
    others = {
        **{name: value is not None for name, value in given.items()},
        **dict.fromkeys(config.engines_chosen, True),
        "partial_rollout_tokens": config.partial_rollout_tokens is not None,
        "fsdp": config.sharded,
        "torch_compile": config.compile_mode is not None,
    }
    chosen = [name for name, is_set in others.items() if is_set]
    if chosen:
        raise ConfigError(
            f"{chosen[0]} is set, which is not supported beside prompts with images: their rollouts run on this "
            f"library's own engine, one process a copy of the weights. Leave it out. {_TEXT}"
        )


def require_shared_prompts(adapter: ModelAdapter) -> None:
    """Refuses a network that took a path on which it would read stored ids itself."""
    if not (adapter.joins and adapter.decodes and adapter.packs_prompts):
        raise ConfigError(
            f"{type(adapter.model).__name__} gives other logits behind a shared prompt (the log says which), and there "
            f"is no other way for prompts with images yet. {_TEXT}"
        )


def without_image_tokens(settings: SamplingSettings, config: Any) -> SamplingSettings:
    """Has no placeholder of an image be drawn, which would stand for no feature, and refuses what reads prompts."""
    for name, neutral in _READ_PROMPTS.items():
        if getattr(settings, name) != neutral:
            raise ConfigError(
                f"{name} is {getattr(settings, name)!r}, which reads the tokens of a prompt; prompts with images show "
                f"none. Set it to {neutral!r}. {_TEXT}"
            )
    names = ("image_token_id", "video_token_id")
    ids = {int(getattr(config, name)) for name in names if getattr(config, name, None) is not None}
    return replace(settings, suppress_tokens=tuple(sorted({*settings.suppress_tokens, *ids})))
