"""What a rollout is asked for and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class SequenceKey(NamedTuple):
    """Names one sampled sequence for the counter-based random stream; all that its draws depend on.

    Args:
        seed: the run's seed.
        rollout: index of the rollout in the run (evaluations count apart, see the trainer).
        prompt: index of the prompt in the rollout.
        sample: index of the sample in the prompt's group.
    """

    seed: int
    rollout: int
    prompt: int
    sample: int


@dataclass(frozen=True)
class TextStops:
    """Strings that end a completion as soon as its text holds one of them; equal where the strings are.

    Args:
        strings: the strings; the token that completes one is part of the completion.
        ends: takes the last ``window`` tokens of rows, prompt and completion, as (B, window) int64 on the host, and
            tells by (B,) bool which of them end with a token that completes a string. A row with fewer tokens is
            filled up on the left with `TextStops.filler`.
        window: tokens at the end of a row that can matter.
    """

    strings: tuple[str, ...]
    ends: Callable[[torch.Tensor], torch.Tensor] = field(compare=False, repr=False)
    window: int = field(compare=False, repr=False)

    filler = torch.iinfo(torch.int64).max
    """A token that is in no vocabulary."""


@dataclass(frozen=True)
class SamplingSettings:
    """How completions are drawn; fields have the names and meanings of TRL and of transformers' `GenerationConfig`.

    Lists are tuples here, so that settings can be compared, hashed and sent to another process.

    Args:
        max_new_tokens: longest completion, in tokens.
        eos_token_ids: ids that end a completion; the one drawn is part of it.
        temperature: divides the logits; 0 means greedy.
        top_p: nucleus mass in (0, 1].
        top_k: number of tokens kept, 0 for all.
        min_p: least probability relative to the most likely token, None for none.
        repetition_penalty: 1.0 for none.
        top_h: share of the entropy that the kept tokens may hold, None for all.
        typical_p: mass kept of the tokens that are about as surprising as the average one, 1.0 for all.
        epsilon_cutoff: least probability of a token, 0.0 for none.
        eta_cutoff: least probability, lowered where the distribution is flat, 0.0 for none.
        sequence_bias: pairs of a token sequence and what is added to the logit of its last token where the others
            have just been drawn, nats.
        bad_words_ids: token sequences that never occur.
        encoder_repetition_penalty: above 1.0 favours the tokens of the prompt, 1.0 for neither.
        no_repeat_ngram_size: tokens of a sequence that may occur once only, 0 for no limit.
        encoder_no_repeat_ngram_size: tokens of a sequence of the prompt that may not occur again, 0 for no limit.
        min_length: least tokens of prompt and completion before an eos may be drawn.
        min_new_tokens: least tokens of the completion before an eos may be drawn.
        forced_bos_token_id: the token drawn after a prompt of one token, None for no force.
        forced_eos_token_ids: the tokens one of which is drawn last at ``max_new_tokens``, empty for no force.
        remove_invalid_values: replace NaN and infinite logits by finite ones before drawing.
        exponential_decay_length_penalty: completion tokens after which the logit of an eos grows, and the factor by
            which it grows each token; None for never.
        suppress_tokens: tokens that are never drawn.
        begin_suppress_tokens: tokens that are not drawn first.
        logits_processor: further processors, called as transformers calls them, ``(input_ids, scores) -> scores``;
            each must treat a row as if it were alone.
        stops: strings that end a completion, None for none.
        max_step_tokens: most tokens drawn of a completion in one call, so that it may be gone on with later; None for
            no limit.
    """

    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    top_h: float | None = None
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    encoder_repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    min_length: int = 0
    min_new_tokens: int = 0
    forced_bos_token_id: int | None = None
    forced_eos_token_ids: tuple[int, ...] = ()
    remove_invalid_values: bool = False
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    logits_processor: tuple[Any, ...] = ()
    stops: TextStops | None = None
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
