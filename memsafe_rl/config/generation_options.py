"""What `generation_kwargs` may hold, under the names of transformers' `GenerationConfig`, and what is refused there."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memsafe_rl.config import refusal
from memsafe_rl.config.declaring import Range, check_in, read
from memsafe_rl.config.settings import DECLARED
from memsafe_rl.config.unsupported import REFUSED_OPTIONS, admit
from memsafe_rl.rollout.native.processors import processors_of
from memsafe_rl.rollout.native.sequences import check_least_tokens, text_stops
from memsafe_rl.types import SamplingSettings

if TYPE_CHECKING:
    from memsafe_rl.config.base import TrainerConfig

logger = logging.getLogger(__name__)


Reader = Callable[[str, Any], Any]
"""Takes a key and what the user wrote, and gives the value of a field of `SamplingSettings`."""


def generation_fields(given: Mapping[str, Any], declared: Any = None) -> dict[str, Any]:
    """Turns keys of `GenerationConfig` into fields; one that is None or missing is the model's own, as in TRL."""
    known = admit(given, [*OPTIONS, *APART, *HARMLESS], REFUSED_OPTIONS, "key of generation_kwargs")
    fields: dict[str, Any] = {}
    for key, read_option in OPTIONS.items():
        value = getattr(declared, key, None) if known.get(key) is None else known[key]
        if value is not None:
            fields[OTHER_FIELDS.get(key, key)] = read_option(key, value)
    # Built once here, so that a wrong value is found before anything is loaded.
    processors_of(SamplingSettings(max_new_tokens=1, eos_token_ids=(0,), **fields))
    return fields


def check_generation(config: TrainerConfig) -> None:
    """Checks `generation_kwargs` and what they must fit."""
    given = config.generation_kwargs or {}
    for key, value in given.items():
        refusal.when(key not in OPTIONS and key in config.declared, "generation_kwargs", key=key, value=value)
    check_least_tokens(_drawing_fields(config).get("min_new_tokens", 0), config.max_completion_length)
    stop_strings(given)
    eos_tokens(given, ())


def sampling_settings(
    config: TrainerConfig, eos_token_ids: Iterable[int], *, tokenizer: Any = None, declared: Any = None
) -> SamplingSettings:
    """Returns the settings by which completions are drawn."""
    given = config.generation_kwargs or {}
    strings = stop_strings(given, declared)
    settings = SamplingSettings(
        max_new_tokens=config.max_completion_length,
        eos_token_ids=eos_tokens(given, eos_token_ids),
        temperature=config.temperature,
        stops=text_stops(strings, tokenizer) if strings else None,
        **_drawing_fields(config, declared),
    )
    decay = settings.exponential_decay_length_penalty
    refusal.when(decay is not None and not settings.eos_token_ids, "exponential_decay_length_penalty", decay=decay)
    return settings


def _drawing_fields(config: TrainerConfig, declared: Any = None) -> dict[str, Any]:
    own = {key: getattr(config, key) for key in ("top_p", "top_k", "min_p", "repetition_penalty")}
    return generation_fields({**own, **(config.generation_kwargs or {})}, declared)


def stop_strings(given: Mapping[str, Any], declared: Any = None) -> list[str]:
    """Reads the strings that end a completion."""
    asked = given.get("stop_strings")
    value = getattr(declared, "stop_strings", None) if asked is None else asked
    strings = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(strings, Iterable) or not all(isinstance(string, str) and string for string in strings):
        raise refusal("stop_strings", value=value)
    return list(strings)


def eos_tokens(given: Mapping[str, Any], declared: Iterable[int]) -> tuple[int, ...]:
    """Reads the tokens that end a completion."""
    asked = given.get("eos_token_id")
    if asked is None:
        return tuple(declared)
    return _tokens("eos_token_id", int(asked) if isinstance(asked, str) and asked.isdecimal() else asked)


def say_what_is_left_out(declared: Any) -> None:
    """Warns of wishes in the model's own generation config that would draw other tokens and are not followed."""
    if declared is None:
        return
    refused = {key: refusal for key, refusal in REFUSED_OPTIONS.items() if refusal.draws_otherwise}
    asked = {key: getattr(declared, key, None) for key in refused}
    ignored = [key for key, value in asked.items() if not refused[key].admits(value)]
    if ignored:
        wishes = ", ".join(f"{key}={asked[key]!r}" for key in ignored)
        logger.warning(f"The model's generation_config has {wishes}, which rollouts leave out: they sample.")


def _numbers(kind: type[float], allowed: Range | None, *keys: str) -> dict[str, Reader]:
    """Returns keys of numbers; those without a range of their own are settings as well, and have theirs."""

    def read_number(key: str, value: Any) -> Any:
        number = read(key, value, kind)
        check_in(key, number, allowed or DECLARED[key].range or Range())
        return kind(number)

    return dict.fromkeys(keys, read_number)


def _tokens(key: str, value: Any) -> tuple[int, ...]:
    listed = [value] if isinstance(value, int) and not isinstance(value, bool) else value
    refusal.when(not isinstance(listed, (str, Sequence)), "tokens/kind", key=key, value=value)
    tokens = tuple(read(key, listed, list[int]))
    refusal.when(any(token < 0 for token in tokens), "tokens/least", key=key, value=value)
    return tokens


def _words(key: str, value: Any) -> tuple[tuple[int, ...], ...]:
    words = tuple(_tokens(key, word) for word in read(key, value, list[Any]))
    refusal.when(not all(words), "words", key=key, value=value)
    return words


def _biases(key: str, value: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
    pairs = list(value.items()) if isinstance(value, Mapping) else read(key, value, list[Any])
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not isinstance(pair[0], (list, tuple)):
            raise refusal("sequence_bias/pair", key=key, pair=pair)
    biases = tuple((_words(key, [ids])[0], float(read(key, bias, float))) for ids, bias in pairs)
    for ids, bias in biases:
        refusal.when(not bias < math.inf, "sequence_bias/finite", key=key, bias=bias, ids=list(ids))
    return biases


def _decay(key: str, value: Any) -> tuple[int, float]:
    pair = read(key, value, list[float])
    if len(pair) != 2 or pair[0] < 0 or not float(pair[0]).is_integer() or not 0 < pair[1] < math.inf:
        raise refusal("decay", key=key, value=value)
    return int(pair[0]), float(pair[1])


OPTIONS: dict[str, Reader] = {
    **_numbers(float, None, "top_p", "min_p", "repetition_penalty"),
    **_numbers(float, Range(0, 1, open_low=True), "top_h", "typical_p"),
    **_numbers(float, Range(0, 1, open_high=True), "epsilon_cutoff", "eta_cutoff"),
    **_numbers(float, Range(0, open_low=True), "encoder_repetition_penalty"),
    **_numbers(int, None, "top_k"),
    **_numbers(int, Range(0), "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    **_numbers(int, Range(0), "min_length", "min_new_tokens", "forced_bos_token_id"),
    "remove_invalid_values": lambda key, value: read(key, value, bool),
    **dict.fromkeys(("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"), _tokens),
    "bad_words_ids": _words,
    "sequence_bias": _biases,
    "exponential_decay_length_penalty": _decay,
    # one processor, a list of them, or transformers' `LogitsProcessorList`, which is both
    "logits_processor": lambda _, own: tuple(own) if isinstance(own, Iterable) else (own,),
}
"""Keys that set one field of `SamplingSettings`, which has their name unless `OTHER_FIELDS` says otherwise."""

OTHER_FIELDS = {"forced_eos_token_id": "forced_eos_token_ids"}

APART = ("eos_token_id", "stop_strings")
"""Keys that need the tokenizer or the model as well."""

HARMLESS = ("pad_token_id", "bos_token_id", "renormalize_logits", "disable_compile", "compile_config")
"""Keys that change no token and no log-prob: rows are not padded, and log-probs are normalised in any case."""
