"""What a rollout is asked for and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class SequenceKey(NamedTuple):
    """Names one sampled sequence for the counter-based random stream; all that its draws depend on."""

    seed: int  # the run's seed
    rollout: int  # index of the rollout in the run (evaluations count apart, see the trainer)
    prompt: int  # index of the prompt in the rollout
    sample: int  # index of the sample in the prompt's group


@dataclass(frozen=True)
class TextStops:
    """Strings that end a completion as soon as its text holds one of them; equal where the strings are."""

    strings: tuple[str, ...]  # the strings; the token that completes one is part of the completion
    # takes the last ``window`` tokens of rows, prompt and completion, as (B, window) int64 on the host, and tells by
    # (B,) bool which of them end with a token that completes a string. A row with fewer tokens is filled up on the left
    # with `TextStops.filler`.
    ends: Callable[[torch.Tensor], torch.Tensor] = field(compare=False, repr=False)
    window: int = field(compare=False, repr=False)  # tokens at the end of a row that can matter

    filler = torch.iinfo(torch.int64).max
    """A token that is in no vocabulary."""


@dataclass(frozen=True)
class SamplingSettings:
    """How completions are drawn; fields have the names and meanings of TRL and of transformers' `GenerationConfig`.

    Lists are tuples here, so that settings can be compared, hashed and sent to another process.
    """

    max_new_tokens: int  # longest completion, in tokens
    eos_token_ids: tuple[int, ...]  # ids that end a completion; the one drawn is part of it
    temperature: float = 1.0  # divides the logits; 0 means greedy
    top_p: float = 1.0  # nucleus mass in (0, 1]
    top_k: int = 0  # number of tokens kept, 0 for all
    min_p: float | None = None  # least probability relative to the most likely token, None for none
    repetition_penalty: float = 1.0  # 1.0 for none
    top_h: float | None = None  # share of the entropy that the kept tokens may hold, None for all
    typical_p: float = 1.0  # mass kept of the tokens that are about as surprising as the average one, 1.0 for all
    epsilon_cutoff: float = 0.0  # least probability of a token, 0.0 for none
    eta_cutoff: float = 0.0  # least probability, lowered where the distribution is flat, 0.0 for none
    # pairs of a token sequence and what is added to the logit of its last token where the others have just been drawn,
    # nats
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that never occur
    encoder_repetition_penalty: float = 1.0  # above 1.0 favours the tokens of the prompt, 1.0 for neither
    no_repeat_ngram_size: int = 0  # tokens of a sequence that may occur once only, 0 for no limit
    encoder_no_repeat_ngram_size: int = 0  # tokens of a sequence of the prompt that may not occur again, 0 for no limit
    min_length: int = 0  # least tokens of prompt and completion before an eos may be drawn
    min_new_tokens: int = 0  # least tokens of the completion before an eos may be drawn
    forced_bos_token_id: int | None = None  # the token drawn after a prompt of one token, None for no force
    # the tokens one of which is drawn last at ``max_new_tokens``, empty for no force
    forced_eos_token_ids: tuple[int, ...] = ()
    remove_invalid_values: bool = False  # replace NaN and infinite logits by finite ones before drawing
    # completion tokens after which the logit of an eos grows, and the factor by which it grows each token; None for
    # never
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: tuple[int, ...] = ()  # tokens that are never drawn
    begin_suppress_tokens: tuple[int, ...] = ()  # tokens that are not drawn first
    # further processors, called as transformers calls them, ``(input_ids, scores) -> scores``; each must treat a row as
    # if it were alone
    logits_processor: tuple[Any, ...] = ()
    stops: TextStops | None = None  # strings that end a completion, None for none
    # most tokens drawn of a completion in one call, so that it may be continued later; None for no limit
    max_step_tokens: int | None = None


@dataclass(frozen=True)
class Completion:
    """One sampled sequence, or denoising chain, on the host.

    Args:
        ids: (T,) int64, the tokens, including the eos if one was drawn; of a denoising chain (S, ...) the states after
            each step, the last of which is the sample.
        logprobs: (T,) float32, nats: of the distribution sampled from.
        model_logprobs: (T,) float32, nats: of the model's distribution at the run's temperature, before top-k, top-p,
            penalties and all other processors; the same tensor as ``logprobs`` when none of them is active.
        finished: whether an eos or a stop string was drawn (False: cut at ``max_new_tokens``).
        ties: positions whose two best perturbed logits lay closer than rounding can tell apart.
        start: (...), the noise that a denoising chain began with, of the type of ``ids``; None for tokens.
        mask: (T,) uint8, 1 where the engine says that an action counts in the loss; None where all do.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    model_logprobs: torch.Tensor
    finished: bool
    ties: int = 0
    start: torch.Tensor | None = None
    mask: torch.Tensor | None = None
