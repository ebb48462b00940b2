"""Which rows an optimizer step takes, and how they are cut: by tokens, behind one copy of a prompt, or by columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from memsafe_rl.accounting import worth_running
from memsafe_rl.prefix_tree import Branch, branches_of, depth_first, fork, grow
from memsafe_rl.types import ModelGeometry, Trajectory, UpdateWork

_WORTHWHILE = 0.9
"""Share of the tokens of separate rows that packed ones may have and still be packed by default: a few copies of short
prompts are not worth the extra pieces of attention."""

_LEAST_TRUNK, _TRUNK_SHARE = 64, 1 / 64
"""Shortest prefix, in tokens and as a share of a micro-batch, that micro-batches share in a forward pass of its own: a
pass costs about as much as fifty further tokens on a CPU, and more where launches bind."""

_LIKE = 2
"""Segments of a run differ in length by at most this factor, so that padding stays below what is computed."""

_ALIKE = 0.99  # share of the largest slice from which on another one counts as being like it

_PROMPT_STREAM = 1
_ROW_STREAM = 2
_MERGE_STREAM = 3
_MULTIPLIER = 6364136223846793005
"""Knuth's multiplier for 64-bit linear congruential generators (MMIX): keeps nearby keys apart."""


class Slices(NamedTuple):
    """What cutting rows by tokens gives."""

    tokens: int  # tokens of the largest slice, padding included
    actions: int  # most completion tokens of a slice
    number: int  # how many slices there are
    total: int  # tokens of all slices


class MicroBatch(NamedTuple):
    """What one forward pass takes of the rows that were cut."""

    places: tuple[int, ...]  # the rows, by their place among those that were cut
    columns: tuple[int, ...] | None  # the columns of each, ascending; None for all
    packed: bool  # whether rows lie behind one copy of each prompt
    # tokens run, padding included, or (row, column) pairs; what a group reads once counts in its first micro-batch
    tokens: int


@dataclass(frozen=True)
class MicroBatchGroup:
    """Micro-batches that read something together: prompts by an encoder, or the tokens that all their rows share."""

    parts: Sequence[MicroBatch | MicroBatchGroup]  # in the order in which they are run
    # finds the parts that reach the peak of all, the only ones that a dry run runs; None for the first few
    telling: Callable[[Sequence[Any]], list[int]] | None = None
    reads: bool = False  # whether there is anything that is read once, before its parts

    @property
    def batches(self) -> list[MicroBatch]:
        """All micro-batches, each complete in itself."""
        nested = [part.batches if isinstance(part, MicroBatchGroup) else [part] for part in self.parts]
        return [batch for batches in nested for batch in batches]

    @property
    def places(self) -> list[int]:
        """The rows of all of them, by their place among those that were cut."""
        return list(dict.fromkeys(place for batch in self.batches for place in batch.places))

    def run(self, reading: Callable[[Any], AbstractContextManager[Any]] = nullcontext) -> Iterator[MicroBatch]:
        """Yields what to run, all or in a dry run what tells what all hold, inside the contexts of its groups."""
        with reading(self):
            for part in worth_running(self.parts, self.telling):
                yield from part.run(reading) if isinstance(part, MicroBatchGroup) else (part,)


class Piece(NamedTuple):
    """Rows that are run in one pass."""

    tokens: int  # that it runs, besides those that are held for it
    rows: list[int]


class Walk(NamedTuple):
    """Rows whose first tokens are run once, before all else of them, and held until that is done."""

    tokens: int  # that are run once
    parts: list[Piece | Walk]


def cut_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Cuts rows into slices of like length, the longest rows first, as many rows to a slice as the budget holds."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    slices = []
    while order:
        count = max(1, budget // max(1, lengths[order[0]]))
        slices.append(order[:count])
        order = order[count:]
    return slices


@lru_cache(maxsize=256)
def cut_trees(work: UpdateWork, budget: int) -> list[Piece | Walk]:
    """Cuts rows into passes in which tokens that several rows share count once.

    A tree of rows that fits is run in one pass, beside others: first fit, the largest first (Johnson 1973,
    "Near-optimal bin packing algorithms"). Of one that does not, what all rows share is held while the rest is cut
    likewise, depth first: one path and a pass are held at most. A row longer than the budget goes alone.
    """
    return _cut(work, work.branches, 0, budget, max(_LEAST_TRUNK, int(_TRUNK_SHARE * budget)))


def _cut(work: UpdateWork, branches: Sequence[Branch], start: int, room: int, least: int) -> list[Piece | Walk]:
    """Cuts rows that share ``start`` tokens, which are held, into passes of the room beside them."""
    whole: list[Piece] = []
    walks: list[Piece | Walk] = []
    for tree in _trees(branches, start):
        tokens = _tokens(work, tree, start)
        if tokens <= room or len(tree) == 1:
            whole.append(Piece(tokens, [row for row, _ in tree]))
            continue
        depth, parts = fork(tree)
        if depth - start >= least:
            walks.append(Walk(depth - start, _cut(work, tree, depth, room - (depth - start), least)))
            continue
        large = [part for part in parts if _tokens(work, part, start) > room and len(part) > 1]
        walks += [one for part in large for one in _cut(work, part, start, room, least)]
        whole += _filled(work, [one for part in parts if part not in large for one in part], start, room)
    return [*_first_fit(whole, room), *walks]


def _trees(branches: Sequence[Branch], start: int) -> Iterator[Sequence[Branch]]:
    """Parts rows where two that follow one another share no more than what is held."""
    bounds = [place for place, (_, shared) in enumerate(branches) if place == 0 or shared <= start]
    return (branches[one:other] for one, other in pairwise([*bounds, len(branches)]))


def _tokens(work: UpdateWork, branches: Sequence[Branch], start: int) -> int:
    """Counts the tokens of rows behind those that are held."""
    first, *others = branches
    return work.row_tokens[first[0]] - start + sum(work.row_tokens[row] - shared for row, shared in others)


def _filled(work: UpdateWork, branches: Sequence[Branch], start: int, room: int) -> list[Piece]:
    """Fills passes with rows one after another; what they share comes once in each."""
    pieces: list[Piece] = []
    for row, shared in branches:
        own = work.row_tokens[row] - shared
        if pieces and shared > start and pieces[-1].tokens + own <= room:
            pieces[-1] = Piece(pieces[-1].tokens + own, [*pieces[-1].rows, row])
        else:
            pieces.append(Piece(work.row_tokens[row] - start, [row]))
    return pieces


def _first_fit(pieces: Sequence[Piece], room: int) -> list[Piece]:
    """Puts pieces together as far as they fit."""
    bins: list[Piece] = []
    place, before = 0, None
    for tokens, rows in sorted(pieces, key=lambda piece: -piece.tokens):
        first = place if tokens == before else 0  # what had no room for a piece has none for another of its size
        place = next((place for place in range(first, len(bins)) if bins[place].tokens + tokens <= room), len(bins))
        if place == len(bins):
            bins.append(Piece(0, []))
        bins[place] = Piece(bins[place].tokens + tokens, bins[place].rows + rows)
        before = tokens
    return bins


def pieces_of(parts: Iterable[Piece | Walk]) -> list[Piece]:
    """Returns passes in the order in which they are run, each with the tokens that are held for it."""
    pieces: list[Piece] = []
    for part in parts:
        if isinstance(part, Walk):
            pieces += [piece._replace(tokens=part.tokens + piece.tokens) for piece in pieces_of(part.parts)]
        else:
            pieces.append(part)
    return pieces


def companions(parts: Sequence[Piece | Walk], first: int = 0, *, walked: bool = False) -> dict[int, int]:
    """Finds for passes that follow a trunk, by their numbers, the largest other pass that follows it too."""
    firsts = list(accumulate((len(pieces_of([part])) for part in parts), initial=first))
    found: dict[int, int] = {}
    for number, part in zip(firsts, parts, strict=False):
        if isinstance(part, Walk):
            found |= companions(part.parts, number, walked=True)
        elif walked and firsts[-1] - first > 1:
            sizes = {first + place: piece.tokens for place, piece in enumerate(pieces_of(parts))}
            found[number] = max(sizes.keys() - {number}, key=sizes.__getitem__)
    return found


def _passes(parts: Sequence[Piece | Walk]) -> list[int]:
    """Lists the tokens that each pass runs, those that are held once."""
    below = [one for part in parts if isinstance(part, Walk) for one in _passes(part.parts)]
    return [*(part.tokens for part in parts), *below]


def cut_groups(work: UpdateWork, budget: int, *, packed: bool) -> list[list[list[int]]]:
    """Cuts rows into slices, in groups whose prompts an encoder reads once before their slices; without one, in one."""
    if not work.sources:
        if packed and work.prompts:
            slices = [piece.rows for piece in pieces_of(cut_trees(work, budget))]
        else:
            slices = cut_by_tokens(work.row_tokens, budget)
        return [slices] if slices else []
    rows_of: dict[int, list[int]] = {}
    for row, source in enumerate(work.sources):
        rows_of.setdefault(source, []).append(row)
    owned = list(rows_of.values())
    groups = []
    for together in cut_by_tokens([source_tokens(work, rows[0]) for rows in owned], budget):
        rows = [row for place in together for row in owned[place]]
        parts = cut_by_tokens([work.row_tokens[row] for row in rows], budget)
        groups.append([[rows[index] for index in part] for part in parts])
    return groups


def cut_work(work: UpdateWork, budget: int, *, packed: bool) -> list[list[int]]:
    """Cuts rows into slices, packed if they can be, so that tokens which several rows share count once."""
    return [part for group in cut_groups(work, budget, packed=packed) for part in group]


def cut_columns(rows: int, columns: Sequence[int], budget: int) -> list[tuple[list[int], list[int]]]:
    """Cuts rows × columns into rectangles of like size, whole columns first: 7 rows where 6 fit become 4 and 3."""
    if rows == 0:
        return []
    columns_at_once = max(1, budget // rows)
    row_pieces = _even(range(rows), -(-rows // max(1, min(rows, budget))))
    return [(piece, chosen) for chosen in _even(columns, -(-len(columns) // columns_at_once)) for piece in row_pieces]


def widest(work: UpdateWork, slices: Sequence[Sequence[int]], *, packed: bool = False) -> list[int]:
    """Finds candidates for the highest peak: the largest by tokens, by completion tokens, by what is read or copied."""
    prompts = [row - actions for row, actions in zip(work.row_tokens, work.action_tokens, strict=True)]

    def padded(lengths: Sequence[int], rows: Sequence[int]) -> int:
        return len(rows) * max(lengths[row] for row in rows)

    def sizes(rows: Sequence[int]) -> tuple[int, ...]:
        actions = sum(work.action_tokens[row] for row in rows)
        if work.sources:
            read = len({work.sources[row] for row in rows}) * max(prompts[row] for row in rows)
            return actions, padded(work.action_tokens, rows), padded(prompts, rows), read
        copied = max((count * width for count, width in attention_runs(work, rows, packed=packed)), default=0)
        return actions, slice_tokens(work, rows, packed=packed), copied

    measured = [sizes(rows) for rows in slices]
    found = set()
    for kind in range(len(measured[0]) if measured else 0):
        most = max(size[kind] for size in measured)
        alike = [place for place, size in enumerate(measured) if size[kind] >= _ALIKE * most]
        largest = max(measured[place] for place in alike)
        found.add(max(place for place in alike if sum(measured[place]) >= _ALIKE * sum(largest)))
    return sorted(found)


def telling(work: UpdateWork, slices: Sequence[Sequence[int]], *, packed: bool = False) -> list[int]:
    """Finds the slices whose peaks stand for those of all, run one after the other."""
    found = widest(work, slices, packed=packed)
    others = widest(work, slices[1:], packed=packed) if 0 in found else []
    return sorted({*found, *(1 + place for place in others)})


def packing_saves(work: UpdateWork) -> bool:
    """Whether rows share enough of their prompts that packing them is worth while."""
    return bool(work.prompts) and work.packed_tokens <= _WORTHWHILE * sum(work.row_tokens)


def packed_tokens(work: UpdateWork, rows: Sequence[int]) -> int:
    """Counts the tokens of rows, those that several share once."""
    return sum(work.row_tokens[row] - shared for row, shared in depth_first(work.branches, rows))


def slice_tokens(work: UpdateWork, rows: Sequence[int], *, packed: bool) -> int:
    """Counts the tokens that a slice runs, padding included."""
    if packed and work.prompts:
        return packed_tokens(work, rows)
    return len(rows) * max(work.row_tokens[row] for row in rows)


def like_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Sorts segments into those that attention takes together, of like length, the longest first."""
    runs: list[list[int]] = []
    for place in sorted(filter(lengths.__getitem__, range(len(lengths))), key=lambda place: -lengths[place]):
        if runs and lengths[runs[-1][0]] <= _LIKE * lengths[place]:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def attention_runs(work: UpdateWork, rows: Sequence[int], *, packed: bool) -> list[tuple[int, int]]:
    """Returns what attention takes together, and copies: how many segments of like length, and the width of each."""
    together = packed and bool(work.prompts)
    lengths = _segments(work, rows) if together else [max(work.row_tokens[row] for row in rows)] * len(rows)
    return [(len(run), lengths[run[0]]) for run in like_lengths(lengths)]


def _segments(work: UpdateWork, rows: Sequence[int]) -> list[int]:
    """Returns the tokens of the stretches that attention takes by themselves."""
    lengths = {row: work.row_tokens[row] - 1 for row in rows}  # nothing follows the last one
    return [node.end - node.start for root in grow(depth_first(work.branches, rows), lengths) for node in root.walk()]


@lru_cache(maxsize=256)
def measure_slices(work: UpdateWork, budget: int, *, packed: bool) -> Slices:
    """Measures the slices into which rows are cut."""
    if work.geometry.unit is not None:
        columns = range(max(work.row_tokens, default=0))
        tokens = [len(piece) * len(chosen) for piece, chosen in cut_columns(len(work.row_tokens), columns, budget)]
        actions = passes = tokens
    elif packed and work.prompts and not work.sources:
        parts = cut_trees(work, budget)
        pieces, passes = pieces_of(parts), _passes(parts)
        tokens = [piece.tokens for piece in pieces]
        actions = [sum(work.action_tokens[row] for row in piece.rows) for piece in pieces]
    else:
        slices = cut_work(work, budget, packed=packed)
        tokens = passes = [slice_tokens(work, rows, packed=packed) for rows in slices]
        actions = [sum(work.action_tokens[row] for row in rows) for rows in slices]
    found = max(tokens, default=1), max(actions, default=1), len(passes), sum(passes)
    return Slices(*(max(1, count) for count in found))


class SourceSlices(NamedTuple):
    """What cutting rows gives whose prompts an encoder reads."""

    read: int  # prompt tokens of the largest group, padding included
    attended: int  # prompt tokens that the rows of a slice attend to, at most, each row its own
    tokens: int  # completion tokens of the largest slice, padding included
    actions: int  # most completion tokens of a slice
    number: int  # how many slices there are


@lru_cache(maxsize=256)
def measure_sources(work: UpdateWork, budget: int) -> SourceSlices:
    """Measures the groups and slices of rows whose prompts an encoder reads."""
    read, attended, tokens, actions, number = 1, 1, 1, 1, 0
    for group in cut_groups(work, budget, packed=False):
        lengths = {work.sources[row]: source_tokens(work, row) for part in group for row in part}
        read = max(read, len(lengths) * max(lengths.values()))
        for part in group:
            attended = max(attended, len(part) * max(source_tokens(work, row) for row in part))
            tokens = max(tokens, len(part) * max(work.action_tokens[row] for row in part))
            actions = max(actions, sum(work.action_tokens[row] for row in part))
            number += 1
    return SourceSlices(read, attended, tokens, actions, max(1, number))


def source_tokens(work: UpdateWork, row: int) -> int:
    """Counts the tokens of a row's prompt, which an encoder reads."""
    return work.row_tokens[row] - work.action_tokens[row]


def _even(items: Sequence[int], pieces: int) -> list[list[int]]:
    """Cuts a sequence into so many pieces whose lengths differ by at most 1, the longer ones first."""
    length, longer = divmod(len(items), max(1, pieces))
    starts = [place * length + min(place, longer) for place in range(pieces + 1)]
    return [list(items[start:end]) for start, end in pairwise(starts)]


def token_work(trajectory: Trajectory, rows: Sequence[int], geometry: ModelGeometry, *, packs: bool) -> UpdateWork:
    """Returns the shape of rows of tokens; those of a prompt may be packed, or read by an encoder, together."""
    owners = tuple(trajectory.condition_of_row[row] for row in rows)
    order = {row: (place, shared) for place, (row, shared) in enumerate(branches_of(trajectory, rows))}
    return UpdateWork(
        row_tokens=trajectory.row_lengths(rows),
        action_tokens=trajectory.action_lengths(rows),
        geometry=geometry,
        prompts=owners if packs else (),
        sources=() if geometry.source_bytes is None else owners,
        prefixes=tuple(order[row] for row in rows) if packs and trajectory.prefixes else (),
    )


def token_micro_batches(work: UpdateWork, tokens: int) -> list[MicroBatchGroup]:
    """Cuts rows by tokens, packed if the work says that they can be."""
    if work.prompts and not work.sources:
        parts = [_micro_batch_of(part) for part in cut_trees(work, tokens)]
        return [MicroBatchGroup(parts, lambda batches: list(range(len(batches))))] if parts else []

    def micro_batch(places: Sequence[int]) -> MicroBatch:
        return MicroBatch(tuple(places), None, packed=False, tokens=slice_tokens(work, places, packed=False))

    def widest(batches: Sequence[MicroBatch]) -> list[int]:
        # Without an encoder, whose gradient waits at what it gave, a dry run chooses its rows before they are cut.
        return telling(work, [batch.places for batch in batches]) if work.sources else list(range(len(batches)))

    groups = cut_groups(work, tokens, packed=True)
    return [MicroBatchGroup([micro_batch(places) for places in group], widest, bool(work.sources)) for group in groups]


def _micro_batch_of(part: Piece | Walk, held: int = 0) -> MicroBatch | MicroBatchGroup:
    """Returns what runs a piece, or a walk, whose first micro-batch counts the tokens that are run before it."""
    if isinstance(part, Piece):
        return MicroBatch(tuple(part.rows), None, packed=True, tokens=held + part.tokens)
    first, *others = part.parts
    return MicroBatchGroup(
        [_micro_batch_of(first, held + part.tokens), *map(_micro_batch_of, others)],
        lambda batches: list(range(len(batches))),
        reads=True,
    )


@dataclass(frozen=True)
class Cursor:
    """The next optimizer step of a run."""

    rollout: int = 0  # index of the rollout it learns from
    epoch: int = 0  # pass over that rollout's rows
    step: int = 0  # optimizer step within the pass
    position: int = 0  # prompts consumed before that rollout

    @property
    def starts_rollout(self) -> bool:
        """Whether this is the first optimizer step after its rollout: the weights have not moved since."""
        return self.epoch == 0 and self.step == 0

    def advance(self, *, steps: int, epochs: int, consumed: int, stop: bool) -> Cursor:
        """Returns the step after this one."""
        if not stop and self.step + 1 < steps:
            return replace(self, step=self.step + 1)
        if not stop and self.epoch + 1 < epochs:
            return replace(self, epoch=self.epoch + 1, step=0)
        return Cursor(rollout=self.rollout + 1, position=self.position + consumed)


def permutation(size: int, *keys: int) -> list[int]:
    """Shuffles `range(size)` as a pure function of some integers."""
    mixed = 0
    for key in keys:
        mixed = (mixed * _MULTIPLIER + key + 1) % 2**63
    generator = torch.Generator()
    generator.manual_seed(mixed)
    return torch.randperm(size, generator=generator).tolist()


def prompt_order(size: int, seed: int, epoch: int, *, shuffle: bool) -> list[int]:
    """Returns the order of a dataset's prompts in one epoch."""
    return permutation(size, _PROMPT_STREAM, seed, epoch) if shuffle else list(range(size))


def merge_orders(objectives: int, seed: int, step: int) -> list[list[int]]:
    """Gives, for each objective, the order in which PCGrad holds its gradient against the others."""
    return [permutation(objectives, _MERGE_STREAM, seed, step, objective) for objective in range(objectives)]


def rows_of_step(cursor: Cursor, rows: int, step_rows: int, seed: int) -> list[int]:
    """Returns the rows of one optimizer step; rows are reshuffled in every pass over a rollout."""
    order = permutation(rows, _ROW_STREAM, seed, cursor.rollout, cursor.epoch)
    return sorted(order[cursor.step * step_rows : (cursor.step + 1) * step_rows])
