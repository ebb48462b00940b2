"""What may change a row's logits before a token is drawn, in the order in which transformers' `generate` applies it.

Each processor gives a row what it would give it alone, without padding, whatever other rows share the batch. Those of
transformers that look at one row of logits only are called on all rows at once, and rare ones that look at the tokens
so far on rows of one length together. Written here are those that look at a position, for rows of different lengths;
repetition penalties, for speed; and filters whose counterpart in transformers reads tensors of the device.

Axes: ``B`` rows, ``V`` vocabulary, ``L`` tokens so far, ``K`` listed tokens.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as theirs

from memsafe_rl.accounting import device_type_of
from memsafe_rl.errors import ConfigError
from memsafe_rl.rollout import refusal
from memsafe_rl.types import SamplingSettings

_CERTAIN = 1e18
"""What is added to a score at most, nats: it leaves nothing to other tokens, and stays finite in float32."""
_LIKELIEST = 1024  # tokens among which a nucleus is looked for before all are sorted


@dataclass(frozen=True)
class Rows:
    """Where the rows of a batch stand."""

    positions_B: Tensor  # (B,) int64 on the device, index of the token to be drawn in its completion
    # tokens of each row's prompt, or 1 for a decoder's start token; empty if no processor asks for it
    prompt_lengths: Sequence[int]
    # per row the prompt (or a decoder's start token) and completion tokens so far, (length,) int64 on the host; empty
    # if no processor asks for them
    histories: Sequence[Tensor]
    # what an encoder read for each row, (length,) int64 on the host; None where histories begin with the prompts
    sources: Sequence[Tensor] | None = None

    @classmethod
    def of_decoder(
        cls, positions_B: Tensor, prompt_lengths: Sequence[int], histories: Sequence[Tensor], start_token_id: int
    ) -> Rows:
        """Returns rows as `generate` shows them where an encoder reads the prompts and a decoder begins by itself."""
        start_1 = torch.tensor([start_token_id])
        pairs = list(zip(histories, prompt_lengths, strict=False))
        drawn = [torch.cat([start_1, history[length:]]) for history, length in pairs]
        return cls(positions_B, [1] * len(prompt_lengths), drawn, [history[:length] for history, length in pairs])

    def prompts(self) -> list[Tensor]:
        """Returns the tokens of each row's prompt, (length,) int64 on the host."""
        if self.sources is not None:
            return list(self.sources)
        return [history[:length] for history, length in zip(self.histories, self.prompt_lengths, strict=True)]

    def so_far(self) -> Tensor:
        """Returns the tokens of prompt and completion so far, (B,) int64 on the device."""
        prompts_B = torch.tensor(self.prompt_lengths, dtype=torch.int64)
        return self.positions_B + prompts_B.to(self.positions_B.device, non_blocking=True)


@dataclass(frozen=True)
class Processor:
    """One step from the model's logits to the scores that are sampled from."""

    # takes scores (B, V) float32 and their rows; gives scores, the given ones changed in place or new ones
    apply: Callable[[Tensor, Rows], Tensor]
    # transformers' class that does the same in `generate`; a user's own processor of this class replaces it
    kind: type | None = None
    in_place: bool = True  # whether it writes to the scores it is given
    needs_history: bool = False  # whether it reads the tokens so far
    needs_lengths: bool = False  # whether it reads the prompts' lengths


def processors_of(settings: SamplingSettings) -> tuple[Processor, ...]:
    """Builds the processors of some settings in `generate`'s order; the temperature not where it is the only one."""
    chosen = [*_history(settings), *_ends(settings), *_forced(settings), *_suppressed(settings)]
    chosen = _with_own(chosen, settings.logits_processor)
    if settings.temperature == 0:
        return tuple(chosen)
    narrowing = list(_narrowing(settings))
    if (chosen or narrowing) and settings.temperature != 1.0:
        chosen.append(_theirs(theirs.TemperatureLogitsWarper, float(settings.temperature)))
    return (*chosen, *narrowing)


def _history(settings: SamplingSettings) -> Iterable[Processor]:
    if settings.sequence_bias:
        yield _bias(dict(settings.sequence_bias), theirs.SequenceBiasLogitsProcessor)
    if settings.encoder_repetition_penalty != 1.0:
        penalty = 1 / _positive("encoder_repetition_penalty", settings.encoder_repetition_penalty)
        yield Processor(
            lambda scores_BV, rows: _penalise(scores_BV, rows.prompts(), penalty),
            theirs.EncoderRepetitionPenaltyLogitsProcessor,
            needs_history=True,
            needs_lengths=True,
        )
    if settings.repetition_penalty != 1.0:
        factor = _positive("repetition_penalty", settings.repetition_penalty)
        yield Processor(
            lambda scores_BV, rows: _penalise(scores_BV, rows.histories, factor),
            theirs.RepetitionPenaltyLogitsProcessor,
            needs_history=True,
        )
    if settings.no_repeat_ngram_size > 0:
        kind: type = theirs.NoRepeatNGramLogitsProcessor
        yield Processor(partial(_on_tokens, _built(kind, settings.no_repeat_ngram_size)), kind, needs_history=True)
    if settings.encoder_no_repeat_ngram_size > 0:
        kind = theirs.EncoderNoRepeatNGramLogitsProcessor
        ban = partial(_on_prompts, partial(kind, settings.encoder_no_repeat_ngram_size))
        yield Processor(ban, kind, needs_history=True, needs_lengths=True)
    bad = {word: -math.inf for word in settings.bad_words_ids if word not in {(eos,) for eos in settings.eos_token_ids}}
    if bad:
        yield _bias(bad, theirs.NoBadWordsLogitsProcessor)


def _ends(settings: SamplingSettings) -> Iterable[Processor]:
    eos = _Listed(settings.eos_token_ids)
    # Without an eos there is nothing that could come too early, as in `generate`.
    if settings.min_length > 0 and settings.eos_token_ids:
        yield Processor(
            lambda scores_BV, rows: eos.fill(scores_BV, rows.so_far() < settings.min_length, -math.inf),
            theirs.MinLengthLogitsProcessor,
            needs_lengths=True,
        )
    if settings.min_new_tokens > 0 and settings.eos_token_ids:
        yield Processor(
            lambda scores_BV, rows: eos.fill(scores_BV, rows.positions_B < settings.min_new_tokens, -math.inf),
            theirs.MinNewTokensLengthLogitsProcessor,
        )


def _forced(settings: SamplingSettings) -> Iterable[Processor]:
    if settings.forced_bos_token_id is not None:
        bos = _Listed((settings.forced_bos_token_id,))
        yield Processor(
            lambda scores_BV, rows: bos.force(scores_BV, rows.so_far() == 1),
            theirs.ForcedBOSTokenLogitsProcessor,
            needs_lengths=True,
        )
    if settings.forced_eos_token_ids:
        eos, last = _Listed(settings.forced_eos_token_ids), settings.max_new_tokens - 1
        yield Processor(
            lambda scores_BV, rows: eos.force(scores_BV, rows.positions_B == last), theirs.ForcedEOSTokenLogitsProcessor
        )
    if settings.remove_invalid_values:
        yield _theirs(theirs.InfNanRemoveLogitsProcessor)
    if settings.exponential_decay_length_penalty is not None and settings.eos_token_ids:
        start, factor = settings.exponential_decay_length_penalty
        ends = _Listed(settings.eos_token_ids)
        yield Processor(
            lambda scores_BV, rows: ends.grow(scores_BV, rows.positions_B - start, factor),
            theirs.ExponentialDecayLengthPenalty,
        )


def _suppressed(settings: SamplingSettings) -> Iterable[Processor]:
    if settings.suppress_tokens:
        yield _theirs(theirs.SuppressTokensLogitsProcessor, settings.suppress_tokens)
    if settings.begin_suppress_tokens:
        first = _Listed(settings.begin_suppress_tokens)
        forced = settings.forced_bos_token_id is not None

        def suppress(scores_BV: Tensor, rows: Rows) -> Tensor:
            # After a lone prompt token the first one drawn is the forced bos, and the second the first that is free.
            late_B = rows.so_far() - rows.positions_B == 1 if forced else rows.positions_B < 0
            return first.fill(scores_BV, rows.positions_B == late_B.long(), -math.inf)

        yield Processor(suppress, theirs.SuppressTokensAtBeginLogitsProcessor, needs_lengths=forced)


def _narrowing(settings: SamplingSettings) -> Iterable[Processor]:
    """Builds the filters of sampling; greedy decoding has none of them."""
    if settings.top_h is not None:
        yield _top_h(settings.top_h)
    if settings.top_k:
        yield _theirs(theirs.TopKLogitsWarper, settings.top_k)
    if settings.top_p < 1.0:
        yield _top_p(settings.top_p)
    if settings.min_p is not None:
        yield _theirs(theirs.MinPLogitsWarper, settings.min_p)
    if settings.typical_p < 1.0:
        yield _theirs(theirs.TypicalLogitsWarper, settings.typical_p)
    if settings.epsilon_cutoff > 0.0:
        yield _theirs(theirs.EpsilonLogitsWarper, settings.epsilon_cutoff)
    if settings.eta_cutoff > 0.0:
        yield _eta(settings.eta_cutoff)


def _with_own(chosen: list[Processor], given: Sequence[Callable[..., Tensor]]) -> list[Processor]:
    """Adds the user's processors; one of a class that the settings ask for as well takes the place of the latter."""
    own = [(type(processor), _own(processor)) for processor in given]
    merged, placed = [], set()
    for processor in chosen:
        place = next((index for index, (kind, _) in enumerate(own) if kind is processor.kind), None)
        merged.append(processor if place is None else own[place][1])
        placed.add(place)
    return merged + [processor for index, (_, processor) in enumerate(own) if index not in placed]


def _own(processor: Callable[..., Tensor]) -> Processor:
    refusal.when(not callable(processor), "logits_processor/object", given=processor)
    _check_parameters(processor)
    return Processor(partial(_on_tokens, processor), type(processor), needs_history=True)


def _on_tokens(processor: Callable[..., Tensor], scores_BV: Tensor, rows: Rows) -> Tensor:
    """Calls a processor on rows of one length together, with their exact tokens."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, history in enumerate(rows.histories):
        places[len(history)].append(place)
    for alike in places.values():
        ids = torch.stack([rows.histories[place] for place in alike]).to(scores_BV.device, non_blocking=True)
        if len(places) == 1:
            return _checked(processor, processor(ids, scores_BV), scores_BV.shape).to(scores_BV.dtype)
        index = torch.tensor(alike).to(scores_BV.device, non_blocking=True)
        part = scores_BV[index]
        scores_BV.index_copy_(0, index, _checked(processor, processor(ids, part), part.shape).to(scores_BV.dtype))
    return scores_BV


def _on_prompts(build: Callable[[Tensor], Callable[..., Tensor]], scores_BV: Tensor, rows: Rows) -> Tensor:
    """Calls on each row a processor that is built from the row's prompt, and that reads tokens on the host."""
    together = zip(rows.prompts(), rows.histories, torch.split(scores_BV, 1), strict=True)
    return torch.cat([build(prompt[None])(history[None], scores_1V) for prompt, history, scores_1V in together])


def _check_parameters(processor: Callable[..., Tensor]) -> None:
    name = getattr(processor, "__name__", type(processor).__name__)
    try:
        signature = inspect.signature(processor)
    except ValueError:  # compiled functions may not say what they take
        return
    parameters = list(signature.parameters.values())
    open_ended = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    wanted = [each.name for each in parameters[2:] if each.default is each.empty and each.kind not in open_ended]
    refusal.when(wanted, "logits_processor/more", name=name, wanted=", ".join(wanted))
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise refusal("logits_processor/signature", name=name, signature=signature, error=error) from None


def _checked(processor: Callable[..., Tensor], scores: Tensor, shape: torch.Size) -> Tensor:
    if isinstance(scores, Tensor) and scores.shape == shape:
        return scores
    got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    raise refusal("logits_processor/scores", name=type(processor).__name__, got=got, shape=tuple(shape))


def _built(kind: type, *values: Any) -> Any:
    """Builds one of transformers', whose complaints are about the settings."""
    try:
        return kind(*values)
    except ValueError as error:
        raise ConfigError(f"Sampling cannot be set up: {error}.") from None


def _theirs(kind: type, *values: Any) -> Processor:
    """Wraps one of transformers' that looks at one row of scores alone and returns new scores."""
    warper, nobody = _built(kind, *values), torch.empty(0, dtype=torch.int64)
    return Processor(lambda scores_BV, _: warper(nobody, scores_BV), kind, in_place=False)


class _Listed:
    """Some tokens of the vocabulary, and what is done to their columns; those outside the vocabulary are left out."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tuple(dict.fromkeys(tokens))
        self._on_device: dict[tuple[int, torch.device], Tensor] = {}

    def _columns(self, scores_BV: Tensor) -> Tensor:
        key = scores_BV.shape[1], scores_BV.device
        if key not in self._on_device:
            inside = [token for token in self.tokens if 0 <= token < scores_BV.shape[1]]
            self._on_device[key] = torch.tensor(inside, dtype=torch.int64).to(scores_BV.device)
        return self._on_device[key]

    def fill(self, scores_BV: Tensor, where_B: Tensor, value: float) -> Tensor:
        """Sets the columns of some rows to one value, in place."""
        columns_K = self._columns(scores_BV)
        return scores_BV.index_copy_(
            1, columns_K, scores_BV.index_select(1, columns_K).masked_fill_(where_B[:, None], value)
        )

    def force(self, scores_BV: Tensor, where_B: Tensor) -> Tensor:
        """Leaves some rows these tokens alone, all equally likely, in place."""
        return self.fill(scores_BV.masked_fill_(where_B[:, None], -math.inf), where_B, 0.0)

    def grow(self, scores_BV: Tensor, late_B: Tensor, factor: float) -> Tensor:
        """Adds ``|z| (factor^late - 1)`` to finite scores of rows that are late by more than 0 tokens, in place."""
        columns_K = self._columns(scores_BV)
        scores_BK = scores_BV.index_select(1, columns_K)
        grown_B = torch.pow(factor, late_B.clamp(min=0).double()) - 1
        growth_B1 = grown_B.clamp(max=_CERTAIN).to(scores_BV.dtype)[:, None]
        added_BK = (scores_BK.abs() * growth_B1).masked_fill_(~scores_BK.isfinite(), 0.0)
        return scores_BV.index_copy_(1, columns_K, scores_BK + added_BK)


def _penalise(scores_BV: Tensor, seen: Sequence[Tensor], penalty: float) -> Tensor:
    """Divides the positive scores of the tokens seen, and multiplies the negative ones, in place."""
    widest = max(len(tokens) for tokens in seen)
    # A row's own first token fills it up: a token seen twice is penalised once.
    filled = [torch.cat([tokens, tokens[:1].expand(widest - len(tokens))]) for tokens in seen]
    seen_BL = torch.stack(filled).to(scores_BV.device, non_blocking=True)
    scores_BL = scores_BV.gather(1, seen_BL)
    return scores_BV.scatter_(1, seen_BL, torch.where(scores_BL < 0, scores_BL * penalty, scores_BL / penalty))


def _bias(sequences: dict[tuple[int, ...], float], kind: type) -> Processor:
    """Adds a bias to the last token of a sequence wherever the row ends with the tokens before it."""
    biases = {sequence: min(float(bias), _CERTAIN) for sequence, bias in sequences.items()}
    processor, nobody = _built(theirs.SequenceBiasLogitsProcessor, biases), torch.empty(0, dtype=torch.int64)
    longest = max(max(sequence) for sequence in sequences)
    needs_history = any(len(sequence) > 1 for sequence in sequences)

    def apply(scores_BV: Tensor, rows: Rows) -> Tensor:
        vocab = scores_BV.shape[1]
        refusal.when(longest >= vocab, "sequence_bias", token=longest, vocab=vocab)
        return _on_tokens(processor, scores_BV, rows) if needs_history else processor(nobody, scores_BV)

    return Processor(apply, kind, needs_history=needs_history)


def _top_h(share: float) -> Processor:
    """Keeps the likeliest tokens while their entropy is at most a share of that of the 100 likeliest."""
    refusal.when(not 0 < share <= 1, "top_h", value=share)

    def apply(scores_BV: Tensor, _: Rows) -> Tensor:
        best_BK, tokens_BK = scores_BV.topk(min(100, scores_BV.shape[1]), dim=1)
        logprobs_BK = best_BK.log_softmax(1)
        terms_BK = -logprobs_BK.exp() * logprobs_BK
        # A token at -inf adds 0 * inf: its sum is no number, and no number is at most the bound, so it is dropped.
        kept_BK = terms_BK.cumsum(1) <= terms_BK.nansum(1, keepdim=True) * share
        kept_BK[:, 0] = True
        return torch.full_like(scores_BV, -math.inf).scatter_(1, tokens_BK, best_BK.masked_fill(~kept_BK, -math.inf))

    return Processor(apply, theirs.TopHLogitsWarper, in_place=False)


def _top_p(mass: float) -> Processor:
    """Keeps the likeliest tokens that hold a mass (Holtzman et al. 2019, eq. 2), as transformers does."""
    sorting = _theirs(theirs.TopPLogitsWarper, mass)
    # On a CPU a whole sort takes longer than the network's step: rows whose nucleus lies among their likeliest tokens,
    # nearly all, are cut there. Elsewhere asking which those are would cost a trip to the host.

    def apply(scores_BV: Tensor, rows: Rows) -> Tensor:
        if device_type_of(scores_BV) != "cpu" or scores_BV.shape[1] <= _LIKELIEST:
            return sorting.apply(scores_BV, rows)
        best_BK, tokens_BK = scores_BV.topk(_LIKELIEST, dim=1)
        probs_BK = (best_BK - scores_BV.logsumexp(1, keepdim=True)).double().exp()
        kept_BK = probs_BK.cumsum(1) - probs_BK < mass
        kept_BK[:, 0] = True
        cut_BV = torch.full_like(scores_BV, -math.inf).scatter_(1, tokens_BK, best_BK.masked_fill(~kept_BK, -math.inf))
        flat_B = kept_BK.all(1).logical_or_(probs_BK.isnan().any(1)).int()
        flat_N1 = flat_B.topk(int(flat_B.sum())).indices[:, None]  # one row, where forecasts compute no number
        for flat_1 in flat_N1:  # alone, for sorting holds several times what is sorted
            cut_BV[flat_1] = sorting.apply(scores_BV[flat_1], rows)
        return cut_BV

    return Processor(apply, theirs.TopPLogitsWarper, in_place=False)


def _eta(epsilon: float) -> Processor:
    """Keeps tokens of probability at least ``min(e, sqrt(e) exp(-entropy))`` (Hewitt et al. 2022, eq. 4), or one."""
    refusal.when(not 0 < epsilon < 1, "eta_cutoff", value=epsilon)

    def apply(scores_BV: Tensor, _: Rows) -> Tensor:
        logprobs_BV = scores_BV.log_softmax(1)
        probs_BV = logprobs_BV.exp()
        entropy_B1 = -(probs_BV * logprobs_BV.clamp(min=torch.finfo(logprobs_BV.dtype).min)).sum(1, keepdim=True)
        eta_B1 = (math.sqrt(epsilon) * torch.exp(-entropy_B1)).clamp(max=epsilon)
        dropped_BV = (probs_BV < eta_B1) & (scores_BV < scores_BV.amax(1, keepdim=True))
        return scores_BV.masked_fill(dropped_BV, -math.inf)

    return Processor(apply, theirs.EtaLogitsWarper, in_place=False)


def _positive(name: str, value: float) -> float:
    refusal.when(not value > 0, "positive", name=name, value=value)
    return float(value)
