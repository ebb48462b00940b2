"""Completions as far as they have been drawn, on the host, and the draw of their next tokens.

Axes: ``B`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from memsafe_rl.accounting import host_memory
from memsafe_rl.rollout.native.drawing import Drawer, refuse_broken
from memsafe_rl.types import Completion, SamplingSettings, SequenceKey


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
        """Gives prompt and completion, or the last tokens of them, (length,) int64 on the host."""
        drawn = torch.tensor(self.ids[-window:], dtype=torch.int64)
        if not with_prompt or (window and len(drawn) >= window):
            return drawn
        return torch.cat([self.prompt_ids[-(window - len(drawn)) :] if window else self.prompt_ids, drawn])

    def completion(self, keeps_model_logprobs: bool) -> Completion:
        """Gives what was drawn."""
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


def draw_next(
    draw: Drawer, logits_BV: Tensor, rows: Sequence[LiveSequence], keys_B4: Tensor, eos: Collection[int]
) -> Tensor:
    """Draws a token of every row (B,), and notes it for those that have not ended.

    The one place where a rollout reads tensor values.
    """
    positions = [len(one.ids) for one in rows]
    with host_memory():
        positions_B = torch.tensor(positions)
        histories = [one.history() for one in rows] if draw.needs_history else None
    lengths = [len(one.prompt_ids) for one in rows] if draw.needs_prompt_lengths else None
    tokens_B, values_4B = draw(logits_BV, keys_B4, positions_B.to(keys_B4.device), histories, lengths)
    with host_memory():
        values_4B = values_4B.cpu()
        going = [place for place, one in enumerate(rows) if not one.ended]
        keys = [rows[place].key for place in going]
        refuse_broken(values_4B[:, torch.tensor(going)], keys, [positions[place] for place in going])
        values = values_4B.tolist()
    for one, token, logprob, own, tied in zip(rows, *values, strict=True):
        if one.ended:
            one.idle += 1
        else:
            one.note(int(token), logprob, own, tied=bool(tied), eos=eos)
    if draw.stops_by_text:
        with host_memory():
            running = [one for one in rows if not one.finished]
            tails = [one.history(draw.text_window, with_prompt=draw.reads_on) for one in running]
            for one, end in zip(running, draw.ends_by_text(tails), strict=True):
                one.finished, one.ended = end, one.ended or end
    return tokens_B
