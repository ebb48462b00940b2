"""What `generation_kwargs` may hold, under the names of transformers' `GenerationConfig`, and what is refused there."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memsafe_rl.config.refusals import Refusal, admit
from memsafe_rl.config.values import check_range, read
from memsafe_rl.errors import ConfigError
from memsafe_rl.rollout.native.processors import processors_of
from memsafe_rl.types import SamplingSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Option:
    """One key that is honoured.

    Args:
        field: the field of `SamplingSettings` it sets.
        read: takes the key and what the user wrote, and gives the field's value.
    """

    field: str
    read: Callable[[str, Any], Any]


def generation_fields(given: Mapping[str, Any], declared: Any = None) -> dict[str, Any]:
    """Turns keys of transformers' `GenerationConfig` into fields of `SamplingSettings`.

    A key that is None or missing is taken from the model's own generation config, as TRL's `generate` does it, and
    where that has none either it is off.
    """
    known = admit(given, [*OPTIONS, *APART, *HARMLESS], REFUSED_OPTIONS, "key of generation_kwargs")
    fields: dict[str, Any] = {}
    for key, option in OPTIONS.items():
        own = getattr(declared, key, None)
        value = own if known.get(key) is None else known[key]
        if value is not None:
            fields[option.field] = option.read(key, value)
    # Built once here, so that a wrong value is found before anything is loaded.
    processors_of(SamplingSettings(max_new_tokens=1, eos_token_ids=(0,), **fields))
    return fields


def stop_strings(given: Mapping[str, Any], declared: Any = None) -> list[str]:
    """Reads the strings that end a completion."""
    asked = given.get("stop_strings")
    value = getattr(declared, "stop_strings", None) if asked is None else asked
    strings = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(strings, Iterable) or not all(isinstance(string, str) and string for string in strings):
        raise ConfigError(f"stop_strings is {value!r}; it must hold strings of at least one character.")
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
    asked = {key: getattr(declared, key, None) for key in _TOKENS_DIFFER}
    ignored = [key for key, value in asked.items() if not REFUSED_OPTIONS[key].admits(value)]
    if ignored:
        wishes = ", ".join(f"{key}={asked[key]!r}" for key in ignored)
        logger.warning(f"The model's generation_config has {wishes}, which rollouts leave out: they sample.")


def _number(hint: Any) -> Callable[[str, Any], Any]:
    def read_number(key: str, value: Any) -> Any:
        number = read(key, value, hint)
        check_range(key, number)
        return float(number) if hint is float else number

    return read_number


def _tokens(key: str, value: Any) -> tuple[int, ...]:
    listed = [value] if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(listed, (str, Sequence)):
        raise ConfigError(f"{key} is {value!r}; it must be a whole number or a list of them.")
    tokens = tuple(read(key, listed, list[int]))
    if any(token < 0 for token in tokens):
        raise ConfigError(f"{key} is {value!r}; ids of tokens are at least 0.")
    return tokens


def _words(key: str, value: Any) -> tuple[tuple[int, ...], ...]:
    words = tuple(_tokens(key, word) for word in read(key, value, list[Any]))
    if not all(words):
        raise ConfigError(f"{key} is {value!r}; each word must have at least one token.")
    return words


def _biases(key: str, value: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
    pairs = list(value.items()) if isinstance(value, Mapping) else read(key, value, list[Any])
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not isinstance(pair[0], (list, tuple)):
            raise ConfigError(f"{key} holds {pair!r}; write pairs of ids and a bias, such as [[[12, 7], -2.0]].")
    biases = tuple((_words(key, [ids])[0], float(read(key, bias, float))) for ids, bias in pairs)
    for ids, bias in biases:
        if not bias < math.inf:
            raise ConfigError(
                f"{key} adds {bias} to the logit of {list(ids)}; write a finite number, or -inf for a sequence that "
                "must never occur."
            )
    return biases


def _decay(key: str, value: Any) -> tuple[int, float]:
    pair = read(key, value, list[float])
    if len(pair) != 2 or pair[0] < 0 or not float(pair[0]).is_integer() or not 0 < pair[1] < math.inf:
        raise ConfigError(
            f"{key} is {value!r}; write the token after which it starts and a finite factor above 0, such as [20, 1.1]."
        )
    return int(pair[0]), float(pair[1])


def _callables(value: Any) -> tuple[Any, ...]:
    """Takes one processor, a list of them, or transformers' `LogitsProcessorList`, which is both."""
    return tuple(value) if isinstance(value, Iterable) else (value,)


OPTIONS: dict[str, Option] = {
    **{key: Option(key, _number(float)) for key in ("top_p", "min_p", "repetition_penalty", "top_h", "typical_p")},
    **{key: Option(key, _number(float)) for key in ("epsilon_cutoff", "eta_cutoff", "encoder_repetition_penalty")},
    **{key: Option(key, _number(int)) for key in ("top_k", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size")},
    **{key: Option(key, _number(int)) for key in ("min_length", "min_new_tokens", "forced_bos_token_id")},
    "remove_invalid_values": Option("remove_invalid_values", lambda key, value: read(key, value, bool)),
    "forced_eos_token_id": Option("forced_eos_token_ids", _tokens),
    "suppress_tokens": Option("suppress_tokens", _tokens),
    "begin_suppress_tokens": Option("begin_suppress_tokens", _tokens),
    "bad_words_ids": Option("bad_words_ids", _words),
    "sequence_bias": Option("sequence_bias", _biases),
    "exponential_decay_length_penalty": Option("exponential_decay_length_penalty", _decay),
    "logits_processor": Option("logits_processor", lambda _, value: _callables(value)),
}
"""Keys that set one field of `SamplingSettings`."""

APART = ("eos_token_id", "stop_strings")
"""Keys that need the tokenizer or the model as well."""

HARMLESS = ("pad_token_id", "bos_token_id", "renormalize_logits", "disable_compile", "compile_config")
"""Keys that change no token and no log-prob: rows are not padded, and log-probs are normalised in any case."""


def _refused(reason: str, remedy: str, **off: Any) -> dict[str, Refusal]:
    """Refuses several keys for one reason; each keyword names one, with its off value or a tuple of them."""
    return {
        key: Refusal(reason, remedy, values if isinstance(values, tuple) else (None, values))
        for key, values in off.items()
    }


_BEAMS = _refused(
    "a search over beams is no sample of the model, so that the loss would have no probability of it to work with",
    "Leave it out; lower temperature or top_p for likelier completions.",
    num_beams=1,
    num_beam_groups=1,
    diversity_penalty=0.0,
    early_stopping=False,
    length_penalty=1.0,
    constraints=None,
    force_words_ids=None,
)
_OTHER_SEARCHES = _refused(
    "such a search is no sample of the model, so that the loss would have no probability of it to work with",
    "Leave it out; lower temperature or top_p for likelier completions.",
    penalty_alpha=0.0,
    dola_layers=None,
    custom_generate=None,
)
_TWO_FORWARDS = _refused(
    "it mixes in a second forward pass without the prompt, which the engine's cache has no rows for",
    "Leave it out, or draw the completions yourself in rollout_func.",
    guidance_scale=(None, 1, 1.0),
    negative_prompt_ids=None,
    negative_prompt_attention_mask=None,
)
_WATERMARK = _refused(
    "a watermark is a pattern that training would teach the model",
    "Leave it out; watermark the trained model's texts.",
    watermarking_config=None,
)
_TIME = _refused(
    "a limit in seconds would make completions depend on how busy the machine is",
    "Leave it out; set max_completion_length.",
    max_time=None,
)
_HEALING = _refused(
    "it rewrites the end of the prompt, whose ids the reward functions and the update already hold",
    "Leave it out; end prompts where a token ends.",
    token_healing=False,
)

REFUSED_OPTIONS: dict[str, Refusal] = {
    **_BEAMS,
    **_OTHER_SEARCHES,
    **_TWO_FORWARDS,
    **_WATERMARK,
    **_TIME,
    **_HEALING,
    **_refused(
        "one field sets the longest completion for the memory plan and the loss alike",
        "Set max_completion_length.",
        max_length=None,
        max_new_tokens=None,
    ),
    **_refused(
        "greedy decoding would make all completions of a prompt the same, without anything to learn from",
        "Leave it out; lower temperature.",
        do_sample=(None, True),
    ),
    **_refused("num_generations says how many", "Leave it out; set num_generations.", num_return_sequences=1),
    **_refused(
        "the engine keeps a cache of its own, within the memory budget",
        "Leave it out; the plan decides, see memory_budget.",
        use_cache=True,
        cache_config=None,
        max_cache_len=None,
        low_memory=False,
        prefill_chunk_size=None,
        continuous_batching_config=None,
        past_key_values=None,
    ),
    **_refused(
        "drafted tokens give the same distribution by other random numbers, and need a cache that can go back",
        "Leave it out.",
        use_mtp=False,
        is_assistant=False,
        assistant_model=None,
        assistant_tokenizer=None,
        num_assistant_tokens=(None, 20),
        num_assistant_tokens_schedule=(None, "constant"),
        assistant_confidence_threshold=(None, 0.4),
        assistant_early_exit=None,
        assistant_lookbehind=(None, 10),
        assistant_ensemble_weight=None,
        target_lookbehind=(None, 10),
        prompt_lookup_num_tokens=None,
        max_matching_ngram_size=None,
        speculation_type=None,
    ),
    **_refused(
        "completions come with ids, log-probs and what the trainer records of them, nothing else",
        "Leave it out; look at trainer.history.",
        output_attentions=False,
        output_hidden_states=False,
        output_scores=False,
        output_logits=False,
        return_dict_in_generate=(None, False, True),
        streamer=None,
    ),
    **_refused(
        "only eos tokens and stop strings are asked after every token",
        "Use stop_strings or eos_token_id.",
        stopping_criteria=None,
    ),
    **_refused(
        "rows of one prompt are not numbered the way it expects",
        "Pass transformers' PrefixConstrainedLogitsProcessor(function, 1) in logits_processor.",
        prefix_allowed_tokens_fn=None,
    ),
    **_refused("a causal model starts from its prompt", "Leave it out.", decoder_start_token_id=None),
    **_refused("its keys may be given one by one", "Write them in generation_kwargs.", generation_config=None),
    **_refused("ranks decode on their own", "Leave it out.", synced_gpus=(None, False)),
}
"""Keys of transformers' `generate` that are not honoured, each with the reason and the nearest way."""

_TOKENS_DIFFER = (*_BEAMS, *_OTHER_SEARCHES, *_TWO_FORWARDS, *_WATERMARK, *_TIME, *_HEALING)
