"""What a rollout is asked for, what it returns, and how it is stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


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
    """How completions are drawn, under the names of TRL and `GenerationConfig`; hashable, since lists are tuples."""

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
    # completion tokens after which the logit of an eos grows, and the factor by which it grows each token; None: never
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: tuple[int, ...] = ()  # tokens that are never drawn
    begin_suppress_tokens: tuple[int, ...] = ()  # tokens that are not drawn first
    # further processors, called as transformers calls them, ``(input_ids, scores) -> scores``, for each row by itself
    logits_processor: tuple[Any, ...] = ()
    stops: TextStops | None = None  # strings that end a completion, None for none
    # most tokens drawn of a completion in one call, so that it may be continued later; None for no limit
    max_step_tokens: int | None = None

    def chosen(self) -> dict[str, Any]:
        """Returns by name what differs from a plain draw of completions of the same length and ends."""
        plain = SamplingSettings(self.max_new_tokens, self.eos_token_ids)
        return {name: value for name, value in vars(self).items() if value != getattr(plain, name)}


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


@dataclass(frozen=True)
class Ragged:
    """Rows of unequal length laid end to end, with their lengths on the host."""

    flat: Tensor  # (sum of lengths, ...), any type; trailing axes are one action's own (none for a token)
    lengths: tuple[int, ...]  # length of each row

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor]) -> Ragged:
        """Lays rows, at least one, end to end; they differ in their first axis only."""
        return cls(torch.cat(list(rows)), tuple(int(row.shape[0]) for row in rows))

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self) -> tuple[Tensor, ...]:
        """Returns every row as a view, in order."""
        return torch.split(self.flat, list(self.lengths))

    def take(self, rows: Iterable[int]) -> Ragged:
        """Copies the given rows, in the given order."""
        views = self.rows()
        return Ragged.from_rows([views[row] for row in rows])

    def pad(self, rows: Sequence[int], fill: float | int, device: torch.device | str | None = None) -> Tensor:
        """Cuts rows out as one tensor (n, longest of these rows, ...), padded on the right."""
        views = self.rows()
        out = pad_sequence([views[row] for row in rows], batch_first=True, padding_value=fill)
        # Only on its way to a device may a copy be under way still when it is read.
        return out if device is None else out.to(device, non_blocking=out.device.type == "cpu")

    def beside(self, rows: Mapping[int, Tensor], known: Ragged | None = None) -> Ragged:
        """Lays one number per action of some rows beside those ``known``, or 0, of all others; changes neither."""
        if known is None:
            dtype = next((values.dtype for values in rows.values()), torch.float32)
            flat = torch.zeros(self.flat.shape[0], dtype=dtype)
        else:
            flat = known.flat.clone()
        store = Ragged(flat, self.lengths)
        views = store.rows()
        for row, values in rows.items():
            views[row].copy_(values)
        return store


class Turn(NamedTuple):
    """One turn of an agent, among the columns of a row."""

    start: int  # its first column; it lasts until the next turn's
    state: int  # names what the agent had seen since its turn before; the same for equal observations
    reward: float  # part of the episode's reward that it has earned itself


def in_order(prefixes: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Puts rows, each with its place and what it shares there, into the order of places."""
    return tuple((row, shared) for row, (_, shared) in sorted(enumerate(prefixes), key=lambda one: one[1]))


@dataclass(frozen=True)
class Trajectory:
    """One rollout, ready to learn from: rows × columns, whatever the kind of model."""

    conditions: Ragged  # the unique prompts, P rows: token ids, or the vectors (L, D) that a denoiser is given
    condition_of_row: tuple[int, ...]  # for each of the B rows, the index of its prompt
    actions: Ragged  # the completion tokens, or the state after each step of a denoising chain; B rows
    loss_mask: Ragged  # 1 where an action is counted in the loss; B rows like ``actions``
    # nats, of the distribution sampled from, or, where the loss corrects for the sampler, before its filters; B rows
    sampling_logprobs: Ragged | None
    advantages: Tensor  # (B,) float32, one per row
    # for each row, the index of its group; -1 for a row that no reward function scored, which counts in no denominator
    group_of_row: tuple[int, ...]
    finished: tuple[bool, ...]  # for each row, whether it ended by itself
    # nats, of the model before the first update on this rollout; B rows, None until needed
    old_logprobs: Ragged | None = None
    has_old: tuple[bool, ...] = ()  # for each row, whether ``old_logprobs`` is filled in
    ref_logprobs: Ragged | None = None  # nats, of the reference; B rows, None without a reference
    # per action, weight that corrects another sampler's distribution; None for none
    importance_weights: Ragged | None = None
    # (B, ...), the state before the first action; None where actions follow nothing but their condition. The state
    # before any later action is the action before it, so that no state is stored twice.
    starts: Tensor | None = None
    # per action, a critic's value of the state it was taken in, at the rollout; None without a critic
    values: Ragged | None = None
    returns: Ragged | None = None  # per action, what the critic should have said; None without a critic
    # nats, at half the temperature, until advantages are known; B rows, None where nobody needs them
    sharper_logprobs: Ragged | None = None
    # nats, of `expected_gaps`, until advantages are known; B rows, None where nobody needs them
    expected_gaps: Ragged | None = None
    # one advantage per action, in place of ``advantages`` in the loss; None for one per row
    action_advantages: Ragged | None = None
    # (B, K) float32, of each of K objectives; NaN where one did not score a row; None where there is but one, which
    # ``advantages`` are of
    objective_advantages: Tensor | None = None
    # for each row, the sample that it is a part of, in order; () where every row is a whole sample
    sample_of_row: tuple[int, ...] = ()
    # for each row, the turns it holds; () where nobody asks for them
    turns: tuple[tuple[Turn, ...], ...] = ()
    # for each row, its place among rows sorted by their tokens, and how many tokens it shares with the one before it
    # there; () where rows share nothing but whole prompts
    prefixes: tuple[tuple[int, int], ...] = ()
    # the columns in which actions count, where they are known beforehand; None where the mask tells
    columns: tuple[int, ...] | None = None
    # (L, D) for each of the P conditions, what a frozen encoder made of it; None where it is read anew
    sources: Ragged | None = None
    # per action, nats, the KL to the reference at the rollout in closed form, which only denoisers have; None where
    # nobody needs it, or ``ref_logprobs`` serve
    kl: Ragged | None = None

    def __len__(self) -> int:
        return len(self.actions)

    @cached_property  # every micro-batch asks
    def branches(self) -> tuple[tuple[int, int], ...]:
        """Rows sorted by their tokens, each with the tokens that it shares with the one before it; () as `prefixes`."""
        return in_order(self.prefixes)

    @cached_property
    def counted_actions(self) -> tuple[int, ...]:
        """How many actions of each row count in the loss."""
        return tuple(torch.stack([mask.sum(dtype=torch.int64) for mask in self.loss_mask.rows()]).tolist())

    @cached_property
    def counted_columns(self) -> tuple[int, ...]:
        """The columns in which an action of any row counts in the loss, ascending."""
        if self.columns is not None:
            return self.columns
        counted_BT = Ragged(self.loss_mask.flat.cpu(), self.loss_mask.lengths).pad(range(len(self)), 0) != 0
        return tuple(counted_BT.any(0).nonzero()[:, 0].tolist())

    @cached_property
    def has_advantage(self) -> tuple[bool, ...]:
        """For each row, whether its advantage, or that of any of its actions or objectives, differs from zero."""
        if self.action_advantages is not None:
            return tuple(torch.stack([row.ne(0).any() for row in self.action_advantages.rows()]).tolist())
        if self.objective_advantages is None:
            return tuple(advantage != 0 for advantage in self.advantages.tolist())
        rows = zip(*self.objective_values, strict=True)
        return tuple(any(value != 0 and not math.isnan(value) for value in row) for row in rows)

    @cached_property
    def objective_values(self) -> tuple[tuple[float, ...], ...]:
        """For each objective, every row's advantage as a number; NaN where it did not score the row."""
        if self.objective_advantages is None:
            return ()
        return tuple(tuple(column) for column in self.objective_advantages.t().tolist())

    def rows_of(self, samples: Iterable[int]) -> list[int]:
        """Returns the rows of some samples, ascending; the same indices where every row is a whole sample."""
        if not self.sample_of_row:
            return sorted(samples)
        wanted = set(samples)
        return [row for row, sample in enumerate(self.sample_of_row) if sample in wanted]

    def condition_lengths(self, rows: Iterable[int]) -> tuple[int, ...]:
        """Prompt tokens of the given rows."""
        return tuple(self.conditions.lengths[self.condition_of_row[row]] for row in rows)

    def action_lengths(self, rows: Iterable[int]) -> tuple[int, ...]:
        """Columns (completion tokens or denoising steps) of the given rows."""
        return tuple(self.actions.lengths[row] for row in rows)

    def row_lengths(self, rows: Iterable[int]) -> tuple[int, ...]:
        """Prompt plus completion tokens of the given rows."""
        return tuple(self.conditions.lengths[self.condition_of_row[row]] + self.actions.lengths[row] for row in rows)

    def token_rows(self, rows: Sequence[int], pad_token_id: int, device: torch.device | str) -> Tensor:
        """Joins each row's prompt and completion, (n, L) int64, padded on the right to the longest of these rows."""
        prompts, completions = self.conditions.rows(), self.actions.rows()
        joined = [torch.cat([prompts[self.condition_of_row[row]], completions[row]]) for row in rows]
        return Ragged.from_rows(joined).pad(range(len(rows)), pad_token_id, device)

    def _stored(self) -> dict[str, Ragged | Tensor]:
        """Returns the fields that hold a tensor."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, (Ragged, Tensor))}

    def tensors(self) -> list[Tensor]:
        """Returns every tensor it holds."""
        return [value.flat if isinstance(value, Ragged) else value for value in self._stored().values()]

    def nbytes(self) -> dict[str, int]:
        """Bytes by field; fields that hold no tensor are left out."""
        return {name: tensor.nbytes for name, tensor in zip(self._stored(), self.tensors(), strict=True)}

    def moved(self, move: Callable[[Tensor], Tensor]) -> Trajectory:
        """Returns the same rows elsewhere."""
        stored: Any = self._stored()
        for name, value in stored.items():
            stored[name] = replace(value, flat=move(value.flat)) if isinstance(value, Ragged) else move(value)
        return replace(self, **stored)
