"""How rows are cut into slices by tokens: row by row, or with one copy of a prompt for all its completions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from memsafe_rl.types import UpdateWork

_WORTHWHILE = 0.9
"""Share of the tokens of separate rows that packed ones may have and still be packed by default: a few copies of short
prompts are not worth the extra pieces of attention."""


class Slices(NamedTuple):
    """What cutting rows by tokens gives.

    Args:
        tokens: tokens of the largest slice, padding included.
        actions: most completion tokens of a slice.
        number: how many slices there are.
        total: tokens of all slices.
    """

    tokens: int
    actions: int
    number: int
    total: int


def cut_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Cuts rows into slices of like length, the longest rows first, as many rows to a slice as the budget holds.

    Args:
        lengths: tokens of each row.
        budget: tokens of a slice, padding included: rows times the longest of them; a longer row goes alone.

    Returns:
        Slices of indices into ``lengths``; every index once; the same for the same arguments.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    slices = []
    while order:
        count = max(1, budget // max(1, lengths[order[0]]))
        slices.append(order[:count])
        order = order[count:]
    return slices


def cut_by_prompt(work: UpdateWork, budget: int) -> list[list[int]]:
    """Cuts rows into slices in which a prompt counts once; rows of a prompt stay together as far as they fit.

    A prompt whose rows do not fit comes again with the next of them. Slices are filled first fit, the largest pieces
    first (Johnson 1973, "Near-optimal bin packing algorithms").

    Args:
        work: the rows, with their prompts.
        budget: tokens of a slice: each of its prompts once, and its completions; a longer row goes alone.

    Returns:
        Slices of indices of rows, those of a prompt next to each other; every index once; the same for the same
        arguments.
    """
    pieces = sorted(_pieces(work, budget), key=lambda piece: -piece[0])
    slices: list[list[int]] = []
    room: list[int] = []
    for tokens, rows in pieces:
        place = next((place for place, free in enumerate(room) if free >= tokens), None)
        if place is None:
            slices.append(rows)
            room.append(budget - tokens)
        else:
            slices[place].extend(rows)
            room[place] -= tokens
    return slices


def cut_work(work: UpdateWork, budget: int, *, packed: bool) -> list[list[int]]:
    """Cuts rows into slices, packed if they can be.

    Args:
        work: the rows.
        budget: tokens of a slice.
        packed: whether a prompt counts once for all its rows in a slice; without effect where ``work.prompts`` is
            empty.

    Returns:
        Slices of indices of rows, every index once.
    """
    return cut_by_prompt(work, budget) if packed and work.prompts else cut_by_tokens(work.row_tokens, budget)


def packing_saves(work: UpdateWork) -> bool:
    """Whether rows share enough of their prompts that packing them is worth while.

    Args:
        work: the rows; those that cannot be packed have no ``prompts``.

    Returns:
        Whether one copy of each prompt leaves at most nine tenths of the tokens.
    """
    return bool(work.prompts) and packed_tokens(work, range(len(work.prompts))) <= _WORTHWHILE * sum(work.row_tokens)


def packed_tokens(work: UpdateWork, rows: Sequence[int]) -> int:
    """Counts the tokens of rows behind one copy of each of their prompts.

    Args:
        work: the rows, with their prompts.
        rows: indices of the rows wanted.

    Returns:
        Tokens.
    """
    prompts = {work.prompts[row]: work.row_tokens[row] - work.action_tokens[row] for row in rows}
    return sum(prompts.values()) + sum(work.action_tokens[row] for row in rows)


def measure_slices(work: UpdateWork, budget: int, *, packed: bool) -> Slices:
    """Measures the slices into which rows are cut.

    Args:
        work: the rows.
        budget: tokens of a slice.
        packed: whether a prompt counts once for all its rows in a slice.

    Returns:
        The largest slice and the number of slices; one empty slice when there are no rows.
    """
    return _measured(work.row_tokens, work.action_tokens, work.prompts if packed else (), budget)


@lru_cache(maxsize=256)
def _measured(
    row_tokens: tuple[int, ...], action_tokens: tuple[int, ...], prompts: tuple[int, ...], budget: int
) -> Slices:
    work = UpdateWork(row_tokens, action_tokens, None, prompts)  # type: ignore[arg-type]
    slices = cut_work(work, budget, packed=True)
    if prompts:
        tokens = [packed_tokens(work, rows) for rows in slices]
    else:
        tokens = [len(rows) * max(row_tokens[row] for row in rows) for rows in slices]
    actions = [sum(action_tokens[row] for row in rows) for rows in slices]
    found = max(tokens, default=1), max(actions, default=1), len(slices), sum(tokens)
    return Slices(*(max(1, count) for count in found))


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
