"""Completions as far as they have been drawn, which of them join the batch, and how their next tokens are drawn.

A token does not depend on the rows around it.

Axes: ``B`` rows, ``V`` vocabulary, ``L`` tokens so far.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StopStringCriteria

from memsafe_rl.accounting import host_memory
from memsafe_rl.errors import ConfigError
from memsafe_rl.ops.sampling import (
    Draw,
    greedy_tokens,
    hash_keys,
    noise_ahead,
    noise_slots,
    sample_with_noise,
    taken_logprobs,
)
from memsafe_rl.rollout import failure, refusal, unusable
from memsafe_rl.rollout.native.processors import Rows, processors_of
from memsafe_rl.types import Completion, ModelGeometry, RolloutPlan, SamplingSettings, SequenceKey, TextStops

_JOIN_SHARE = 8
"""Joining copies the cache and reads prompts for few rows: it waits until so large a share of the rows is free."""

_TILE_ELEMENTS = 1 << 21

_NOISE_STEPS, _NOISE_SHARE, _LEAST_NOISE_BYTES = 16, 2, 1 << 16
"""Most draws whose noise is made together; the share of float32 logits that it may take, or else so many bytes."""


@dataclass
class LiveSequence:
    """One completion as far as it has been drawn, on the host."""

    prompt: int  # index of the prompt
    prompt_ids: Tensor  # (length,) int64, on the host
    key: SequenceKey  # name of its random stream
    limit: int  # longest completion, in tokens
    until: int  # tokens at which this call ends it
    base: int  # tokens of its prompt that lie in a block of prompts
    ids: array[int] = field(default_factory=lambda: array("q"))  # tokens drawn
    logprobs: array[float] = field(default_factory=lambda: array("d"))  # nats, of the distribution sampled from
    model_logprobs: array[float] = field(default_factory=lambda: array("d"))  # nats, of the model's own
    ties: int = 0  # draws that rounding may change
    idle: int = 0  # steps it has taken part in after its end
    ended: bool = False  # whether nothing more is drawn in this call
    finished: bool = False  # whether an eos or a stop string was drawn

    @property
    def tokens(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_ids) + len(self.ids)

    @property
    def suffix(self) -> int:
        """Most tokens that it may have behind its block of prompts."""
        return len(self.prompt_ids) + self.limit - self.base

    def history(self, window: int = 0, *, with_prompt: bool = True) -> Tensor:
        """Returns prompt and completion, or the last tokens of them, (length,) int64 on the host."""
        drawn = torch.tensor(self.ids[-window:], dtype=torch.int64)
        if not with_prompt or (window and len(drawn) >= window):
            return drawn
        return torch.cat([self.prompt_ids[-(window - len(drawn)) :] if window else self.prompt_ids, drawn])

    def completion(self, keeps_model_logprobs: bool) -> Completion:
        """Returns what was drawn."""
        logprobs = torch.tensor(self.logprobs, dtype=torch.float32)
        own = torch.tensor(self.model_logprobs, dtype=torch.float32) if keeps_model_logprobs else logprobs
        return Completion(torch.tensor(self.ids, dtype=torch.int64), logprobs, own, self.finished, self.ties)

    def note(self, token: int, logprob: float, model_logprob: float, *, tied: bool, eos: Collection[int]) -> None:
        """Notes a token, and whether the sequence ends with it."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.model_logprobs.append(model_logprob)
        self.ties += tied
        self.finished = token in eos
        self.ended = self.finished or len(self.ids) >= self.until


def begin_sequences(
    prompts: Sequence[Tensor],
    keys: Sequence[Sequence[SequenceKey]],
    settings: SamplingSettings,
    begun: Sequence[Sequence[Completion | None]] | None,
    limits: Sequence[int],
) -> list[LiveSequence]:
    """Lists all samples, prompt by prompt, with what an earlier call has drawn of them."""
    most = settings.max_new_tokens if settings.max_step_tokens is None else settings.max_step_tokens
    sequences = []
    for index, prompt in enumerate(prompts):
        prompt_ids = prompt.cpu()
        for sample, key in enumerate(keys[index]):
            earlier = None if begun is None else begun[index][sample]
            until = min(limits[index], most + (0 if earlier is None else len(earlier.ids)))
            one = LiveSequence(index, prompt_ids, key, limits[index], until, len(prompt_ids))
            if earlier is not None:
                one.ids.extend(earlier.ids.tolist())
                one.logprobs.extend(earlier.logprobs.tolist())
                one.model_logprobs.extend(earlier.model_logprobs.tolist())
                one.ties, one.finished = earlier.ties, earlier.finished
                one.ended = one.finished or len(one.ids) >= one.limit
            sequences.append(one)
    return sequences


class Noise(NamedTuple):
    """What a draw needs beside logits."""

    noise_BS: Tensor  # (B, S) float64, nats
    columns_S: Tensor | None = None  # 0, 1, … on the device; None to be counted anew


class Streams:
    """The random streams of rows that draw together: where each stands, and its noise of several draws to come."""

    def __init__(self, keys_B4: Tensor, positions_B: Tensor, draws: int | None = None) -> None:
        self.keys_B4, self._positions_B, self._draws = keys_B4, positions_B, draws
        self._words_B: Tensor | None = None
        self._columns_S: Tensor | None = None
        self._ahead: Tensor | None = None
        self._used = 0

    @classmethod
    def of(cls, rows: Sequence[LiveSequence], device: torch.device, draws: int | None = None) -> Streams:
        """Returns the streams of rows as far as they have drawn; noise is made for so many draws, None for several."""
        with host_memory():
            named = torch.cat(
                [key_tensor([one.key for one in rows]), torch.tensor([[len(one.ids)] for one in rows])], 1
            )
        named_B5 = named.to(device, non_blocking=True)
        return cls(named_B5[:, :4], named_B5[:, 4], draws)

    def positions(self) -> Tensor:
        """Index of each row's next token in its completion, (B,) int64."""
        return self._positions_B + self._used if self._used else self._positions_B

    def noise(self, vocab: int) -> Noise:
        """Returns what the next draw needs beside logits."""
        if self._ahead is None or self._used == len(self._ahead):
            self._positions_B, self._used, self._ahead = self.positions(), 0, None  # not there beside what is made now
            if self._words_B is None:
                self._words_B = hash_keys(self.keys_B4)
                self._columns_S = torch.arange(noise_slots(vocab), device=self.keys_B4.device)
            draws = self._draws or noise_steps(len(self.keys_B4), vocab)
            self._ahead = noise_ahead(self._words_B, self._positions_B, vocab, draws)
        return Noise(self._ahead[self._used], self._columns_S)

    def advance(self) -> None:
        """Counts a draw."""
        self._used += 1


def noise_steps(rows: int, vocab: int) -> int:
    """Counts the draws whose noise is made together."""
    step_bytes, most_bytes = 8 * noise_slots(vocab) * rows, max(_LEAST_NOISE_BYTES, 4 * vocab * rows // _NOISE_SHARE)
    return max(1, min(_NOISE_STEPS, most_bytes // step_bytes))


def draw_next(draw: Drawer, logits_BV: Tensor, rows: Sequence[LiveSequence], streams: Streams) -> Tensor:
    """Draws a token of every row (B,), notes it for those that go on: the one place that reads values, all at once."""
    positions = [len(one.ids) for one in rows]
    histories = None
    if draw.needs_history:
        with host_memory():
            histories = [one.history() for one in rows]
    lengths = [len(one.prompt_ids) for one in rows] if draw.needs_prompt_lengths else None
    positions_B = streams.positions()
    noise = streams.noise(logits_BV.shape[1]) if draw.draws else None
    tokens_B, values_4B = draw(logits_BV, positions_B, noise, histories, lengths)
    streams.advance()
    with host_memory():
        values_4B = values_4B.cpu()
        values = values_4B.tolist()
        if not all(math.isfinite(logprob) for logprobs in values[1:3] for logprob in logprobs):
            going = [place for place, one in enumerate(rows) if not one.ended]
            keys = [rows[place].key for place in going]
            refuse_broken(values_4B[:, torch.tensor(going)], keys, [positions[place] for place in going])
    for one, token, logprob, own, tied in zip(rows, *values, strict=True):
        if one.ended:
            one.idle += 1
        else:
            one.note(int(token), logprob, own, tied=bool(tied), eos=draw.eos)
    if draw.stops_by_text:
        with host_memory():
            running = [one for one in rows if not one.finished]
            tails = [one.history(draw.text_window, with_prompt=draw.reads_on) for one in running]
            for one, end in zip(running, draw.ends_by_text(tails), strict=True):
                one.finished, one.ended = end, one.ended or end
    return tokens_B


class Candidate(NamedTuple):
    """A sequence that waits."""

    prompt: int  # index of its prompt; samples of a prompt stand side by side
    prompt_tokens: int  # length of the prompt
    drawn_tokens: int  # tokens it has drawn before
    # most tokens it may draw; where prompts are shared, the most that any row of the batch may draw, since rows are as
    # wide as the widest; what is read behind a prompt that was kept in part counts too
    max_new_tokens: int
    is_kept: bool = False  # whether its prompt's cache was kept, whose bytes count with those of the batch's prompts


def admit(
    waiting: Sequence[Candidate], plan: RolloutPlan, geometry: ModelGeometry, *, rows: int, prompt_bytes: int
) -> int:
    """Counts how many of the first candidates may join, each as long as it can become, so that none has to leave."""
    most = _most_rows(waiting, plan, geometry, rows, prompt_bytes)
    if most < 1:
        return 0 if rows or waiting[0].is_kept else 1
    if rows and most < min(len(waiting), -(-plan.rows_in_flight // _JOIN_SHARE)):
        return 0
    if waiting[0].is_kept:
        return most
    if waiting[0].drawn_tokens and not geometry.shares_prompts:
        return min(most, max(1, plan.prefill_tokens // max(one.prompt_tokens + one.drawn_tokens for one in waiting)))
    per_prompt = max(1, plan.prefill_tokens // waiting[0].prompt_tokens)
    prompts = list(dict.fromkeys(one.prompt for one in waiting[:most]))[:per_prompt]
    chosen = [one for one in waiting[:most] if one.prompt in prompts]
    if geometry.shares_prompts and len(prompts) > 1 and len(chosen) < len(waiting):
        following = waiting[len(chosen)].prompt
        return len([one for one in chosen if one.prompt != following]) or len(chosen)
    return len(chosen)


def _most_rows(
    waiting: Sequence[Candidate], plan: RolloutPlan, geometry: ModelGeometry, rows: int, prompt_bytes: int
) -> int:
    """Candidates for which there are rows and bytes."""
    free = plan.rows_in_flight - rows
    if not geometry.shares_prompts:
        waves = math.ceil(len(waiting) / max(1, plan.rows_in_flight))
        free = min(free, math.ceil(len(waiting) / waves))  # even waves take as many steps, at a lower peak
    most = min(free, len(waiting))
    if plan.kv_bytes is None:
        return most
    if not geometry.shares_prompts:  # each row keeps its own prompt
        longest = max(one.prompt_tokens + one.max_new_tokens for one in waiting)
        return min(most, plan.kv_bytes // max(1, geometry.kv_bytes(longest)))
    prompts: dict[int, int] = {}
    for count, one in enumerate(waiting[:most]):
        prompts.setdefault(one.prompt, 0 if one.is_kept else geometry.prompt_kv_bytes(waiting[0].prompt_tokens))
        held = prompt_bytes + sum(prompts.values())
        if geometry.batch_kv_bytes(held, rows + count + 1, one.max_new_tokens) > plan.kv_bytes:
            return count
    return most


class Drawer:
    """Turns logits into tokens as the settings say, a few rows at a time, each as if it were alone."""

    def __init__(self, settings: SamplingSettings, start_token_id: int | None = None) -> None:
        self._start_token_id = start_token_id
        self.reads_on = start_token_id is None
        greedy = settings.temperature == 0
        self.draws = not greedy
        self._temperature = 1.0 if greedy else float(settings.temperature)
        self._processors = processors_of(settings)
        self._stops = settings.stops
        self.needs_history = any(processor.needs_history for processor in self._processors)
        asked = any(processor.needs_lengths for processor in self._processors)
        self.needs_prompt_lengths = asked or (self.needs_history and not self.reads_on)
        self.stops_by_text = settings.stops is not None
        self.text_window = 0 if settings.stops is None else settings.stops.window
        self.keeps_model_logprobs = bool(self._processors)
        self.eos = frozenset(settings.eos_token_ids)

    def __call__(
        self,
        logits_BV: Tensor,
        positions_B: Tensor,
        noise: Noise | None,
        histories: Sequence[Tensor] | None = None,
        prompt_lengths: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draws a token a row, with the noise of `Streams`, or takes the likeliest where `draws` is False."""
        if not self._processors:
            drawn = _choose(logits_BV, noise, self._temperature)
            return drawn.tokens_B, _columns(drawn, drawn.logprobs_B)
        size = max(1, _TILE_ELEMENTS // logits_BV.shape[1])
        parts = [
            self._draw_processed(
                logits_BV[tile],
                None if noise is None else noise._replace(noise_BS=noise.noise_BS[tile]),
                self._rows(positions_B[tile], (prompt_lengths or ())[tile], (histories or ())[tile]),
            )
            for tile in [slice(start, start + size) for start in range(0, len(logits_BV), size)]
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([tokens for tokens, _ in parts]), torch.cat([values for _, values in parts], 1)

    def ends_by_text(self, histories: Sequence[Tensor]) -> list[bool]:
        """Tells which rows' last token completed a stop string, which may begin in the prompt, as in `generate`."""
        if self._stops is None or not histories:
            return [False] * len(histories)
        tails = [history[-self._stops.window :] for history in histories]
        window_BL = torch.full((len(tails), self._stops.window), TextStops.filler, dtype=torch.int64)
        for row_L, tail in zip(window_BL, tails, strict=True):
            row_L[len(row_L) - len(tail) :] = tail
        return [bool(ended) for ended in self._stops.ends(window_BL).tolist()]

    def _rows(self, positions_B: Tensor, prompt_lengths: Sequence[int], histories: Sequence[Tensor]) -> Rows:
        if self._start_token_id is None:
            return Rows(positions_B, prompt_lengths, histories)
        return Rows.of_decoder(positions_B, prompt_lengths, histories, self._start_token_id)

    def _process(self, logits_BV: Tensor, rows: Rows) -> Tensor:
        scores_BV = logits_BV.to(torch.float32, copy=any(processor.in_place for processor in self._processors))
        for processor in self._processors:
            scores_BV = processor.apply(scores_BV, rows)
        return scores_BV

    def _draw_processed(self, logits_BV: Tensor, noise: Noise | None, rows: Rows) -> tuple[Tensor, Tensor]:
        drawn = _choose(self._process(logits_BV, rows), noise, 1.0)
        return drawn.tokens_B, _columns(drawn, taken_logprobs(logits_BV, drawn.tokens_B, temperature=self._temperature))


def _choose(scores_BV: Tensor, noise: Noise | None, temperature: float) -> Draw:
    """Draws with noise, or takes the most likely tokens where there is none."""
    if noise is None:
        return greedy_tokens(scores_BV, temperature=temperature)
    return sample_with_noise(scores_BV, noise.noise_BS, temperature=temperature, columns_W=noise.columns_S)


def _columns(drawn: Draw, model_logprobs_B: Tensor) -> Tensor:
    """Returns all that the host wants to know, (4, B) float64, in one piece."""
    columns = (drawn.tokens_B[None], drawn.logprobs_B[None], model_logprobs_B[None], drawn.tied_B[None])
    return torch.cat(columns)  # unlike a stack, it widens types on the way


def key_tensor(keys: Sequence[SequenceKey]) -> Tensor:
    """Stacks the names of rows' random streams."""
    half = 1 << 63
    return torch.tensor([[(value + half) % (2 * half) - half for value in key] for key in keys])


def refuse_broken(values_4B: Tensor, keys: Sequence[SequenceKey], positions: Sequence[int]) -> None:
    """Refuses rows for which no token could be drawn, and says whether the network or a processor is to blame."""
    broken_B = ~values_4B[1:3].isfinite().all(0)
    if not broken_B.any():
        return
    first = int(broken_B.nonzero()[0, 0])
    raise failure(
        "broken/processors" if bool(values_4B[2, first].isfinite()) else "broken/logits",
        position=positions[first],
        prompt=keys[first].prompt,
        sample=keys[first].sample,
        broken=int(broken_B.sum()),
        rows=len(keys),
    )


def text_stops(strings: Sequence[str], tokenizer: Any) -> TextStops:
    """Prepares strings that end a completion, the way transformers' `generate` finds them."""
    usable = bool(strings) and all(isinstance(string, str) and string for string in strings)
    refusal.when(not usable, "stop_strings", strings=list(strings))
    try:
        criteria = StopStringCriteria(tokenizer, list(strings))
    except ValueError as error:
        told = f"which transformers cannot look for among the tokens of {type(tokenizer).__name__} ({error})"
        raise ConfigError(f"stop_strings is {list(strings)!r}, {told}. Leave it out.") from None
    return TextStops(tuple(strings), partial(criteria, scores=None), criteria.maximum_token_len)


def check_settings(settings: SamplingSettings, vocab_size: int) -> None:
    """Refuses sampling settings that a network cannot follow."""
    most, step = settings.max_new_tokens, settings.max_step_tokens
    refusal.when(most < 1, "max_new_tokens", value=most)
    refusal.when(step is not None and step < 1, "max_step_tokens", value=step)
    refusal.when(not settings.temperature >= 0, "temperature", value=settings.temperature)
    check_least_tokens(settings.min_new_tokens, settings.max_new_tokens)
    for name, ids in _listed(settings):
        beyond = [token for token in ids if not 0 <= token < vocab_size]
        if beyond:
            raise refusal("token_ids", name=name, token=beyond[0], vocab=vocab_size, last=vocab_size - 1)


def checked_limits(limits: Sequence[int] | None, prompts: int, max_new_tokens: int) -> Sequence[int]:
    """Returns each prompt's longest completion; refuses limits that the settings do not allow."""
    if limits is None:
        return [max_new_tokens] * prompts
    fit = len(limits) == prompts and all(1 <= limit <= max_new_tokens for limit in limits)
    unusable.when(not fit, "limits", limits=list(limits), prompts=prompts, most=max_new_tokens)
    return limits


def check_least_tokens(least: int, most: int) -> None:
    """Refuses a shortest completion that is longer than the longest."""
    refusal.when(least > most, "min_new_tokens", least=least, most=most)


def _listed(settings: SamplingSettings) -> Iterator[tuple[str, Iterable[int]]]:
    """Yields every setting that names tokens, as `generation_kwargs` calls it, with its ids."""
    yield "eos_token_id", settings.eos_token_ids
    yield "suppress_tokens", settings.suppress_tokens
    yield "begin_suppress_tokens", settings.begin_suppress_tokens
    yield "forced_bos_token_id", () if settings.forced_bos_token_id is None else (settings.forced_bos_token_id,)
    yield "forced_eos_token_id", settings.forced_eos_token_ids
    yield "bad_words_ids", (token for word in settings.bad_words_ids for token in word)
    yield "sequence_bias", (token for word, _ in settings.sequence_bias for token in word)
