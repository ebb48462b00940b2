"""How a token is drawn: logits, changed as the settings say, to tokens that do not depend on the rows around them.

Axes: ``B`` rows, ``V`` vocabulary, ``L`` tokens so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StopStringCriteria

from memsafe_rl.errors import ConfigError, MemsafeError
from memsafe_rl.ops.sampling import greedy_tokens, sample_tokens, taken_logprobs
from memsafe_rl.rollout.native.processors import Rows, processors_of
from memsafe_rl.types import SamplingSettings, SequenceKey, TextStops

_TILE_ELEMENTS = 1 << 21


class Drawer:
    """Turns logits into tokens as the settings say; holds no state of any row.

    A batch's rows may stand at different positions, have prompts of different lengths, and join or leave between two
    calls: what a row is given depends on its own logits, key, position and history alone. Rows are processed a few at a
    time, so that no second (B, V) tensor of all rows is ever made.
    """

    def __init__(self, settings: SamplingSettings, start_token_id: int | None = None) -> None:
        self._start_token_id = start_token_id
        self.reads_on = start_token_id is None
        self._greedy = settings.temperature == 0
        self._temperature = 1.0 if self._greedy else float(settings.temperature)
        self._processors = processors_of(settings)
        self._stops = settings.stops
        self.needs_history = any(processor.needs_history for processor in self._processors)
        asked = any(processor.needs_lengths for processor in self._processors)
        self.needs_prompt_lengths = asked or (self.needs_history and not self.reads_on)
        self.stops_by_text = settings.stops is not None
        self.text_window = 0 if settings.stops is None else settings.stops.window
        self.keeps_model_logprobs = bool(self._processors)

    def __call__(
        self,
        logits_BV: Tensor,
        keys_B4: Tensor,
        positions_B: Tensor,
        histories: Sequence[Tensor] | None = None,
        prompt_lengths: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draws a token a row."""
        if not self._processors:
            drawn = self._draw(logits_BV, keys_B4, positions_B, self._temperature)
            columns = (drawn.tokens_B.double(), drawn.logprobs_B, drawn.logprobs_B, drawn.tied_B.double())
            return drawn.tokens_B, torch.stack(columns)
        size = max(1, _TILE_ELEMENTS // logits_BV.shape[1])
        tiles = [slice(start, start + size) for start in range(0, len(logits_BV), size)]
        parts = [
            self._draw_processed(
                logits_BV[tile],
                keys_B4[tile],
                self._rows(positions_B[tile], (prompt_lengths or ())[tile], (histories or ())[tile]),
            )
            for tile in tiles
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([tokens for tokens, _ in parts]), torch.cat([values for _, values in parts], 1)

    def process(
        self,
        logits_BV: Tensor,
        positions_B: Tensor,
        histories: Sequence[Tensor] | None = None,
        prompt_lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Gives the scores whose softmax is sampled from, or, with temperature 0, whose greatest is taken."""
        if not self._processors:
            return logits_BV.float() / self._temperature
        return self._process(logits_BV, self._rows(positions_B, prompt_lengths or (), histories or ()))

    def ends_by_text(self, histories: Sequence[Tensor]) -> list[bool]:
        """Tells which rows' last token completed a stop string; eos tokens are not its concern.

        As in transformers' `generate`, a string may begin in the prompt, and the last token may reach past its end.
        """
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
        own_copy = any(processor.in_place for processor in self._processors)
        scores_BV = logits_BV.to(torch.float32, copy=own_copy)
        for processor in self._processors:
            scores_BV = processor.apply(scores_BV, rows)
        return scores_BV

    def _draw_processed(self, logits_BV: Tensor, keys_B4: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        drawn = self._draw(self._process(logits_BV, rows), keys_B4, rows.positions_B, 1.0)
        model_logprobs_B = taken_logprobs(logits_BV, drawn.tokens_B, temperature=self._temperature)
        columns = (drawn.tokens_B.double(), drawn.logprobs_B, model_logprobs_B, drawn.tied_B.double())
        return drawn.tokens_B, torch.stack(columns)

    def _draw(self, scores_BV: Tensor, keys_B4: Tensor, positions_B: Tensor, temperature: float) -> Any:
        if self._greedy:
            return greedy_tokens(scores_BV)
        return sample_tokens(scores_BV, keys_B4, positions_B, temperature=temperature)


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
    key = keys[first]
    where = (
        f"No token can be drawn at position {positions[first]} of prompt {key.prompt}, sample {key.sample} "
        f"({int(broken_B.sum())} of {len(keys)} rows): "
    )
    if bool(values_4B[2, first].isfinite()):
        raise MemsafeError(
            f"{where}the model gives a distribution, but the processors of its logits forbid every token or raise one "
            "to infinity. Look at bad_words_ids, sequence_bias, suppress_tokens, min_new_tokens, no_repeat_ngram_size, "
            "repetition penalties, forced tokens, exponential_decay_length_penalty and logits_processor."
        )
    raise MemsafeError(
        f"{where}the logits hold NaN or +inf, or every token is at -inf. The weights have probably diverged: lower the "
        "learning rate or resume from an earlier checkpoint; if the model runs in float16, use bfloat16 or float32."
    )


def text_stops(strings: Sequence[str], tokenizer: Any) -> TextStops:
    """Prepares strings that end a completion, the way transformers' `generate` finds them."""
    if not strings or not all(isinstance(string, str) and string for string in strings):
        raise ConfigError(f"stop_strings is {list(strings)!r}; it must hold strings of at least one character.")
    try:
        criteria = StopStringCriteria(tokenizer, list(strings))
    except ValueError as error:
        raise ConfigError(f"stop_strings is {list(strings)!r}: {error}") from None
    return TextStops(tuple(strings), _TextEnds(criteria), criteria.maximum_token_len)


class _TextEnds:
    """Asks transformers' criterion, which wants scores that it does not look at."""

    def __init__(self, criteria: StopStringCriteria) -> None:
        self.criteria = criteria

    def __call__(self, ids_BL: Tensor) -> Tensor:
        ended: Tensor = self.criteria(ids_BL, None)
        return ended
