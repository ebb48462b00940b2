"""Rows that share a prompt, laid out behind one copy of it: tokens, positions, and who sees whom.

The tokens of a micro-batch lie end to end without padding: first every prompt, then the completions of each prompt. A
*segment* is a stretch of tokens that is causal in itself: a prompt, a completion, or both where a prompt has but one.

Axes: ``N`` tokens of a packed row, ``M`` completion tokens end to end, ``S`` segments of a run, ``W`` their width,
``D`` width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memsafe_rl.types import Trajectory

_LIKE = 2
"""Segments of a run differ in length by at most this factor, so that padding stays below what is computed."""


@dataclass(frozen=True)
class Run:
    """Segments of like length that attention takes together."""

    segments: int  # how many
    width: int  # tokens of the longest
    first: int | None  # first token of the first segment, where all are equally long and lie end to end; else None
    # (sum of lengths,) int64, their tokens in the packed row; None where ``first`` is known
    tokens: Tensor | None = None
    # (sum of lengths,) int64, where these lie in ``segments`` rows of ``width``; None likewise
    places: Tensor | None = None

    def take(self, packed: Tensor) -> Tensor:
        """Gives (N, heads, ...) as (S, heads, W, ...), zero where a segment has ended; a view where it can be."""
        count = self.segments * self.width
        if self.first is not None:
            rows = packed[self.first : self.first + count]
        else:
            tokens, places = self._indices()
            rows = packed.new_zeros(count, *packed.shape[1:])
            rows.index_copy_(0, places, packed.index_select(0, tokens))
        return rows.view(self.segments, self.width, *packed.shape[1:]).transpose(1, 2)

    def put(self, packed: Tensor, segments: Tensor) -> None:
        """Writes (S, heads, W, ...) to where the segments lie in (N, heads, ...)."""
        rows = segments.transpose(1, 2).flatten(0, 1)
        if self.first is not None:
            packed[self.first : self.first + self.segments * self.width] = rows
        else:
            tokens, places = self._indices()
            packed.index_copy_(0, tokens, rows.index_select(0, places))

    def _indices(self) -> tuple[Tensor, Tensor]:
        if self.tokens is None or self.places is None:
            raise AssertionError("a run is one stretch of tokens or has their indices")
        return self.tokens, self.places


@dataclass(frozen=True)
class Shared:
    """A prompt that several completions see."""

    prompt: int  # first token of the prompt
    prompt_tokens: int  # its tokens
    first: int  # first token of the first completion; the others follow end to end
    tails: tuple[int, ...]  # tokens of each completion that are read (its last one predicts nothing)

    @property
    def prompt_span(self) -> slice:
        """Tokens of the prompt."""
        return slice(self.prompt, self.prompt + self.prompt_tokens)

    @property
    def tail_span(self) -> slice:
        """Tokens of all its completions."""
        return slice(self.first, self.first + sum(self.tails))


@dataclass(frozen=True)
class Layout:
    """Who sees whom in a packed row."""

    runs: tuple[Run, ...]  # every segment, in runs of like length
    # prompts with several completions, at least one of which has tokens of its own to be read
    shared: tuple[Shared, ...]
    windows: tuple[int | None, ...]  # per layer, the attention window in tokens, None for full attention
    # additive masks by what they depend on; made once, for all layers
    masks: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def own_mask(self, width: int, window: int | None, like: Tensor) -> Tensor | None:
        """Gives the mask (1, 1, W, W) of a causal segment under a window; None where plain causality will do."""
        if window is None or window >= width:
            return None

        def visible() -> Tensor:
            places = torch.arange(width, device=like.device)
            return _visible(places, places, window)

        return self._mask(("own", width, window), visible, like)

    def prompt_mask(self, shared: Shared, window: int | None, like: Tensor) -> Tensor | None:
        """Gives the mask (1, 1, completion tokens, prompt tokens) under a window; None where all is seen."""
        if window is None or window >= shared.prompt_tokens + max(shared.tails):
            return None

        def visible() -> Tensor:
            keys = torch.arange(shared.prompt_tokens, device=like.device)
            tails = [torch.arange(tail, device=like.device) for tail in shared.tails]
            return _visible(torch.cat(tails) + shared.prompt_tokens, keys, window)

        return self._mask((shared, window), visible, like)

    def _mask(self, key: tuple[Any, ...], visible: Callable[[], Tensor], like: Tensor) -> Tensor:
        if (*key, like.dtype) not in self.masks:
            # Half of the lowest number: a score added to it stays finite, and a row that sees nothing weighs 0.
            hidden = torch.finfo(like.dtype).min / 2
            mask = torch.zeros((), dtype=like.dtype, device=like.device).where(visible(), hidden)
            self.masks[*key, like.dtype] = mask[None, None]
        return self.masks[*key, like.dtype]


@dataclass(frozen=True)
class PackedRows:
    """Stored rows as one packed row."""

    ids: Tensor  # (1, N) int64
    positions: Tensor  # (1, N) int64; a completion's continue where its prompt ends
    places: Tensor  # (M,) int64, for each completion token of the rows, in order, the token that predicts it
    layout: Layout  # who sees whom


def pack_rows(
    trajectory: Trajectory, rows: Sequence[int], windows: Sequence[int | None], device: torch.device
) -> PackedRows:
    """Lays rows out behind one copy of each of their prompts; a row with a prompt of its own stays in one piece.

    A completion's last token is left out, since nothing follows that it could predict.
    """
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(trajectory.condition_of_row[row], []).append(row)
    prompts, actions = trajectory.conditions.rows(), trajectory.actions.rows()
    tails = {row: actions[row][:-1] for row in rows}
    builder = _Builder()
    ends, first_own = {}, {}
    for condition, members in groups.items():
        alone = [tails[members[0]]] if len(members) == 1 else []
        start = builder.add(torch.cat([prompts[condition], *alone]), position=0)
        ends[condition] = start + len(prompts[condition])
        first_own[members[0]] = ends[condition]
    shared = []
    for condition, members in groups.items():
        if len(members) == 1:
            continue
        length = len(prompts[condition])
        for row in members:
            first_own[row] = builder.add(tails[row], position=length)
        lengths = tuple(len(tails[row]) for row in members)
        shared.append(Shared(ends[condition] - length, length, first_own[members[0]], lengths))
    places = [
        _predicting(ends[trajectory.condition_of_row[row]] - 1, first_own[row], len(actions[row])) for row in rows
    ]
    layout = Layout(
        _runs(builder.segments, device), tuple(group for group in shared if any(group.tails)), tuple(windows)
    )
    ids, positions = torch.cat(builder.ids), torch.cat(builder.positions)
    return PackedRows(ids[None].to(device), positions[None].to(device), torch.cat(places).to(device), layout)


class _Builder:
    """Collects segments end to end."""

    def __init__(self) -> None:
        self.ids: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.segments: list[tuple[int, int]] = []
        self._tokens = 0

    def add(self, ids: Tensor, *, position: int) -> int:
        """Appends a segment whose first token has a position; gives the place of that token."""
        start = self._tokens
        self.ids.append(ids)
        self.positions.append(torch.arange(position, position + len(ids)))
        self.segments.append((start, len(ids)))
        self._tokens += len(ids)
        return start


def _predicting(last_of_prompt: int, first: int, length: int) -> Tensor:
    """Indices of the tokens that predict a completion: its prompt's last, then its own but the last."""
    own = torch.arange(first, first + max(0, length - 1))
    return torch.cat([torch.full((min(1, length),), last_of_prompt), own])


def _visible(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Gives which positions see which: themselves, and those at most ``window - 1`` before them."""
    distance = queries[:, None] - keys[None]
    return (distance >= 0) & (distance < window)


def _runs(segments: Iterable[tuple[int, int]], device: torch.device) -> tuple[Run, ...]:
    """Sorts segments (first token, tokens) into runs of like length, the longest first."""
    order = sorted((segment for segment in segments if segment[1]), key=lambda segment: (-segment[1], segment[0]))
    runs: list[list[tuple[int, int]]] = []
    for segment in order:
        if runs and runs[-1][0][1] <= _LIKE * segment[1]:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return tuple(_run(members, device) for members in runs)


def _run(members: Sequence[tuple[int, int]], device: torch.device) -> Run:
    first, width = members[0]
    if all(member == (first + index * width, width) for index, member in enumerate(members)):
        return Run(len(members), width, first)
    tokens = torch.cat([torch.arange(start, start + length) for start, length in members])
    places = torch.cat([torch.arange(length) + index * width for index, (_, length) in enumerate(members)])
    return Run(len(members), width, None, tokens.to(device), places.to(device))
