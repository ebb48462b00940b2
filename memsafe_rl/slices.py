"""How rows are cut into slices: by tokens, behind one copy of each prompt, or rows × columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from memsafe_rl.accounting import host_memory, worth_running
from memsafe_rl.types import ModelGeometry, Trajectory, UpdateWork

_WORTHWHILE = 0.9
"""Share of the tokens of separate rows that packed ones may have and still be packed by default: a few copies of short
prompts are not worth the extra pieces of attention."""

_LIKE = 2
"""Segments of a run differ in length by at most this factor, so that padding stays below what is computed."""

_ALIKE = 0.99  # share of the largest slice from which on another one counts as being like it


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
    tokens: int  # tokens that are run, padding included, or (row, column) pairs


class MicroBatchGroup(NamedTuple):
    """Micro-batches whose prompts are read together."""

    batches: list[MicroBatch]  # all of them
    # finds those that tell what all hold, which are all that a dry run runs; None for the first few
    telling: Callable[[Sequence[MicroBatch]], list[int]] | None

    @property
    def places(self) -> list[int]:
        """The rows of all of them, by their place among those that were cut."""
        return list(dict.fromkeys(place for batch in self.batches for place in batch.places))

    def to_run(self) -> Iterator[MicroBatch]:
        """Gives the micro-batches to run: all, or in a dry run those that tell what all hold."""
        return worth_running(self.batches, self.telling)


def cut_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Cuts rows into slices of like length, the longest rows first, as many rows to a slice as the budget holds."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    slices = []
    while order:
        count = max(1, budget // max(1, lengths[order[0]]))
        slices.append(order[:count])
        order = order[count:]
    return slices


def cut_by_prompt(work: UpdateWork, budget: int) -> list[list[int]]:
    """Cuts rows into slices in which a prompt counts once; rows of a prompt stay together as far as they fit.

    Slices are filled first fit, the largest pieces first (Johnson 1973, "Near-optimal bin packing algorithms").
    """
    pieces = sorted(_pieces(work, budget), key=lambda piece: -piece[0])
    slices: list[list[int]] = []
    room: list[int] = []
    place, before = 0, None
    for tokens, rows in pieces:
        first = place if tokens == before else 0  # what had no room for a piece has none for another of its size
        place = next((place for place in range(first, len(room)) if room[place] >= tokens), len(room))
        if place == len(room):
            slices.append([])
            room.append(budget)
        slices[place].extend(rows)
        room[place] -= tokens
        before = tokens
    return slices


def cut_groups(work: UpdateWork, budget: int, *, packed: bool) -> list[list[list[int]]]:
    """Cuts rows into slices, in groups whose prompts an encoder reads together before their slices are run.

    Rows that share a prompt are in one group, so that it is read once. Without an encoder there is one group.
    """
    if not work.sources:
        slices = cut_work(work, budget, packed=packed)
        return [slices] if slices else []
    rows_of: dict[int, list[int]] = {}
    for row, source in enumerate(work.sources):
        rows_of.setdefault(source, []).append(row)
    owned = list(rows_of.values())
    groups = []
    for together in cut_by_tokens([_source_tokens(work, rows[0]) for rows in owned], budget):
        rows = [row for place in together for row in owned[place]]
        parts = cut_by_tokens([work.row_tokens[row] for row in rows], budget)
        groups.append([[rows[index] for index in part] for part in parts])
    return groups


def cut_work(work: UpdateWork, budget: int, *, packed: bool) -> list[list[int]]:
    """Cuts rows into slices, packed if they can be."""
    if work.sources:
        return [part for group in cut_groups(work, budget, packed=False) for part in group]
    return cut_by_prompt(work, budget) if packed and work.prompts else cut_by_tokens(work.row_tokens, budget)


def cut_columns(rows: int, columns: Sequence[int], budget: int) -> list[tuple[list[int], list[int]]]:
    """Cuts rows × columns into rectangles, whole columns first, so that a column's rows stay together where they fit.

    Rectangles are of like size: 7 rows of which 6 would fit are cut into 4 and 3.
    """
    if rows == 0:
        return []
    columns_at_once = max(1, budget // rows)
    row_pieces = _even(range(rows), -(-rows // max(1, min(rows, budget))))
    column_pieces = _even(columns, -(-len(columns) // columns_at_once))
    return [(piece, chosen) for chosen in column_pieces for piece in row_pieces]


def widest(work: UpdateWork, slices: Sequence[Sequence[int]], *, packed: bool = False) -> list[int]:
    """Finds the slices of which one holds most, by tokens, completion tokens, or what is read or copied at once."""

    prompts = [row - actions for row, actions in zip(work.row_tokens, work.action_tokens, strict=True)]

    def padded(lengths: Sequence[int], rows: Sequence[int]) -> int:
        return len(rows) * max(lengths[row] for row in rows)

    def sizes(rows: Sequence[int]) -> tuple[int, ...]:
        actions = sum(work.action_tokens[row] for row in rows)
        if work.sources:
            return actions, padded(work.action_tokens, rows), padded(prompts, rows)
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
    """Finds the slices that tell what all hold that are run one after the other."""
    found = widest(work, slices, packed=packed)
    others = widest(work, slices[1:], packed=packed) if 0 in found else []
    return sorted({*found, *(1 + place for place in others)})


def packing_saves(work: UpdateWork) -> bool:
    """Whether rows share enough of their prompts that packing them is worth while."""
    return bool(work.prompts) and work.packed_tokens <= _WORTHWHILE * sum(work.row_tokens)


def packed_tokens(work: UpdateWork, rows: Sequence[int]) -> int:
    """Counts the tokens of rows behind one copy of each of their prompts."""
    prompts = {work.prompts[row]: work.row_tokens[row] - work.action_tokens[row] for row in rows}
    return sum(prompts.values()) + sum(work.action_tokens[row] for row in rows)


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
    """Gives what attention takes together, and copies: how many segments of like length, and the width of each."""
    together = packed and bool(work.prompts)
    lengths = _segments(work, rows) if together else [max(work.row_tokens[row] for row in rows)] * len(rows)
    return [(len(run), lengths[run[0]]) for run in like_lengths(lengths)]


def _segments(work: UpdateWork, rows: Sequence[int]) -> list[int]:
    """Gives the tokens of prompts and of what follows them; a row whose prompt nobody shares is in one piece."""
    shared = Counter(work.prompts[row] for row in rows)
    own = {row: work.action_tokens[row] - 1 for row in rows}  # nothing follows the last one
    prompts = {work.prompts[row]: work.row_tokens[row] - work.action_tokens[row] for row in rows}
    alone = [prompts[work.prompts[row]] + own[row] for row in rows if shared[work.prompts[row]] == 1]
    together = [tokens for prompt, tokens in prompts.items() if shared[prompt] > 1]
    return [*alone, *together, *(own[row] for row in rows if shared[work.prompts[row]] > 1)]


@lru_cache(maxsize=256)
def measure_slices(work: UpdateWork, budget: int, *, packed: bool) -> Slices:
    """Measures the slices into which rows are cut."""
    if work.geometry.unit is not None:
        columns = range(max(work.row_tokens, default=0))
        tokens = [len(piece) * len(chosen) for piece, chosen in cut_columns(len(work.row_tokens), columns, budget)]
        actions = tokens
    else:
        slices = cut_work(work, budget, packed=packed)
        tokens = [slice_tokens(work, rows, packed=packed) for rows in slices]
        actions = [sum(work.action_tokens[row] for row in rows) for rows in slices]
    found = max(tokens, default=1), max(actions, default=1), len(tokens), sum(tokens)
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
        lengths = {work.sources[row]: _source_tokens(work, row) for part in group for row in part}
        read = max(read, len(lengths) * max(lengths.values()))
        for part in group:
            attended = max(attended, len(part) * max(_source_tokens(work, row) for row in part))
            tokens = max(tokens, len(part) * max(work.action_tokens[row] for row in part))
            actions = max(actions, sum(work.action_tokens[row] for row in part))
            number += 1
    return SourceSlices(read, attended, tokens, actions, max(1, number))


def _source_tokens(work: UpdateWork, row: int) -> int:
    return work.row_tokens[row] - work.action_tokens[row]


def _even(items: Sequence[int], pieces: int) -> list[list[int]]:
    """Cuts a sequence into so many pieces whose lengths differ by at most 1, the longer ones first."""
    length, longer = divmod(len(items), max(1, pieces))
    starts = [place * length + min(place, longer) for place in range(pieces + 1)]
    return [list(items[start:end]) for start, end in pairwise(starts)]


def _pieces(work: UpdateWork, budget: int) -> list[tuple[int, list[int]]]:
    """Gives tokens and rows of every piece of a prompt's rows that fits, the longest completions first."""
    groups: dict[int, list[int]] = {}
    for row in sorted(range(len(work.prompts)), key=lambda row: -work.action_tokens[row]):
        groups.setdefault(work.prompts[row], []).append(row)
    pieces: list[tuple[int, list[int]]] = []
    for rows in groups.values():
        prompt = work.row_tokens[rows[0]] - work.action_tokens[rows[0]]
        held = prompt
        piece: list[int] = []
        for row in rows:
            if piece and held + work.action_tokens[row] > budget:
                pieces.append((held, piece))
                held, piece = prompt, []
            held += work.action_tokens[row]
            piece.append(row)
        pieces.append((held, piece))
    return pieces


# ------------------------------------------------------------------ stored rows


def token_work(trajectory: Trajectory, rows: Sequence[int], geometry: ModelGeometry, *, packs: bool) -> UpdateWork:
    """Gives the shape of rows of tokens; those of a prompt may be packed, or read by an encoder, together."""
    owners = tuple(trajectory.condition_of_row[row] for row in rows)
    return UpdateWork(
        row_tokens=trajectory.row_lengths(rows),
        action_tokens=trajectory.action_lengths(rows),
        geometry=geometry,
        prompts=owners if packs else (),
        sources=() if geometry.source_bytes is None else owners,
    )


def token_micro_batches(work: UpdateWork, tokens: int) -> list[MicroBatchGroup]:
    """Cuts rows by tokens, packed if the work says that they can be."""

    def micro_batch(places: Sequence[int]) -> MicroBatch:
        return MicroBatch(tuple(places), None, bool(work.prompts), slice_tokens(work, places, packed=True))

    def widest(batches: Sequence[MicroBatch]) -> list[int]:
        # Without an encoder, whose gradient waits at what it gave, a dry run chooses its rows before they are cut.
        return telling(work, [batch.places for batch in batches]) if work.sources else list(range(len(batches)))

    groups = cut_groups(work, tokens, packed=True)
    return [MicroBatchGroup([micro_batch(places) for places in group], widest) for group in groups]


def step_work(trajectory: Trajectory, rows: Sequence[int], geometry: ModelGeometry) -> UpdateWork:
    """Gives the shape of rows whose columns are run one by one."""
    with host_memory():
        columns = (len(trajectory.counted_columns),) * len(rows)
    return UpdateWork(columns, columns, geometry)


def step_micro_batches(
    trajectory: Trajectory, rows: Sequence[int], tokens: int, columns: Sequence[int] | None
) -> list[MicroBatchGroup]:
    """Cuts rows × columns into rectangles."""
    wanted = trajectory.counted_columns if columns is None else columns
    batches = [
        MicroBatch(tuple(places), tuple(chosen), packed=False, tokens=len(places) * len(chosen))
        for places, chosen in cut_columns(len(rows), wanted, tokens)
    ]
    return [MicroBatchGroup(batches, None)] if batches else []
