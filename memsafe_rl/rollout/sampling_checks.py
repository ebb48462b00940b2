"""What may be asked of a rollout, before a token is drawn: a value that cannot work is named, with what to change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.types import SamplingSettings


def check_settings(settings: SamplingSettings, vocab_size: int) -> None:
    """Refuses sampling settings that a network cannot follow."""
    if settings.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {settings.max_new_tokens}; a completion needs at least 1 token.")
    if settings.max_step_tokens is not None and settings.max_step_tokens < 1:
        raise ConfigError(
            f"max_step_tokens is {settings.max_step_tokens}, by which no completion would ever grow. Set it to at "
            "least 1 token, or to None for no limit."
        )
    if not settings.temperature >= 0:
        raise ConfigError(f"temperature is {settings.temperature}; use 0 for greedy decoding or a positive number.")
    check_least_tokens(settings.min_new_tokens, settings.max_new_tokens)
    for name, ids in _listed(settings):
        beyond = [token for token in ids if not 0 <= token < vocab_size]
        if beyond:
            raise ConfigError(
                f"{name} holds the id {beyond[0]}, but the model draws from {vocab_size} tokens (0 to "
                f"{vocab_size - 1}). Set {name} in generation_kwargs to ids of its vocabulary, or to [] for none; "
                "where it is not set there, it comes from the tokenizer or the model's generation_config."
            )


def checked_limits(limits: Sequence[int] | None, prompts: int, max_new_tokens: int) -> Sequence[int]:
    """Gives each prompt's longest completion; refuses limits that the settings do not allow."""
    if limits is None:
        return [max_new_tokens] * prompts
    if len(limits) != prompts or not all(1 <= limit <= max_new_tokens for limit in limits):
        raise DataError(
            f"limits {list(limits)} for {prompts} prompts; give each one from 1 to max_new_tokens ({max_new_tokens})."
        )
    return limits


def check_least_tokens(least: int, most: int) -> None:
    """Refuses a shortest completion that is longer than the longest."""
    if least > most:
        raise ConfigError(
            f"min_new_tokens is {least}, but the longest completion has {most} tokens, so that none could ever end. "
            f"Lower min_new_tokens (generation_kwargs) to at most {most}, or raise max_completion_length."
        )


def _listed(settings: SamplingSettings) -> Iterator[tuple[str, Iterable[int]]]:
    """Gives every setting that names tokens, as `generation_kwargs` calls it, with its ids."""
    yield "eos_token_id", settings.eos_token_ids
    yield "suppress_tokens", settings.suppress_tokens
    yield "begin_suppress_tokens", settings.begin_suppress_tokens
    yield "forced_bos_token_id", () if settings.forced_bos_token_id is None else (settings.forced_bos_token_id,)
    yield "forced_eos_token_id", settings.forced_eos_token_ids
    yield "bad_words_ids", (token for word in settings.bad_words_ids for token in word)
    yield "sequence_bias", (token for word, _ in settings.sequence_bias for token in word)
