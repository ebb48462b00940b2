"""Rows that begin with the same tokens, as a tree: a prompt that completions share, or turns that later ones repeat.

In depth-first order, rows of a subtree follow one another, and how many tokens each shares with the row before it says
all there is to know of the tree (Kasai et al. 2001, "Linear-time longest-common-prefix computation").
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from memsafe_rl.types import Trajectory

LEAST_SHARED = 16
"""Tokens below which a stretch is run again with each row: attention takes every stretch by itself."""

MOST_LEVELS = 200
"""Stretches that follow one another in a tree at most; what is shared beyond them is run again with each row."""

Branch = tuple[int, int]
"""A row in depth-first order, and the tokens that it shares with the row before it."""


@dataclass(frozen=True)
class Node:
    """A stretch of tokens that all rows below it share; of a leaf, what a row has for itself, perhaps nothing."""

    row: int  # one whose tokens it holds
    start: int  # tokens of that row before it
    end: int  # tokens of that row up to its end
    children: tuple[Node, ...] = ()  # what follows; none for a leaf

    def walk(self) -> Iterator[Node]:
        """Yields this node and all below it, depth first."""
        yield self
        for child in self.children:
            yield from child.walk()


def sort_by_tokens(rows: Sequence[Tensor]) -> tuple[Branch, ...]:
    """Returns each row's place in depth-first order, and the tokens (on the host) shared with the one before."""
    tokens = [row.numpy() for row in rows]
    order = sorted(range(len(rows)), key=lambda row: tokens[row].astype(">i8").tobytes())
    shared = [0] * len(rows)
    for place in range(1, len(order)):
        one, other = tokens[order[place - 1]], tokens[order[place]]
        width = min(len(one), len(other))
        differing = (one[:width] != other[:width]).nonzero()[0]
        shared[place] = int(differing[0]) if len(differing) else width
    waiting = [(0, len(order), 0, 0)]
    while waiting:
        first, last, above, level = waiting.pop()
        if last - first < 2:
            continue
        depth = min(shared[first + 1 : last])
        forks = [place for place in range(first + 1, last) if shared[place] == depth]
        begins = depth - above >= LEAST_SHARED and level < MOST_LEVELS
        kept = depth if begins else above  # what begins no stretch counts as not shared
        for place in forks:
            shared[place] = kept
        waiting += [(one, other, kept, level + begins) for one, other in pairwise([first, *forks, last])]
    places = {row: place for place, row in enumerate(order)}
    return tuple((places[row], shared[places[row]]) for row in range(len(rows)))


def branches_of(trajectory: Trajectory, rows: Collection[int]) -> list[Branch]:
    """Puts stored rows into depth-first order, each with the tokens it shares with the one before it among them."""
    if trajectory.prefixes:
        return depth_first(trajectory.branches, rows)
    members: dict[int, list[int]] = {}
    for row in rows:
        members.setdefault(trajectory.condition_of_row[row], []).append(row)
    lengths = trajectory.conditions.lengths
    return [(row, lengths[one] if place else 0) for one, group in members.items() for place, row in enumerate(group)]


def depth_first(branches: Sequence[Branch], rows: Collection[int]) -> list[Branch]:
    """Picks some of all rows in depth-first order, each with the tokens it shares with the one before it among them."""
    wanted, found = set(rows), list[Branch]()
    least = 0
    for row, shared in branches:
        least = min(least, shared)
        if row in wanted:
            found.append((row, least))
            least = sys.maxsize
    return found


def fork(branches: Sequence[Branch]) -> tuple[int, list[Sequence[Branch]]]:
    """Finds how many tokens two rows or more share, all of them, and which go on together from there, in order."""
    depth = min(shared for _, shared in branches[1:])
    bounds = [0, *(place for place, (_, shared) in enumerate(branches) if place and shared == depth), len(branches)]
    return depth, [branches[one:other] for one, other in pairwise(bounds)]


def grow(branches: Sequence[Branch], lengths: Mapping[int, int], start: int = 0) -> tuple[Node, ...]:
    """Grows the trees of rows of such lengths, without the first tokens, which all share; with a leaf for each row."""
    before = branches[0][0]
    held = []
    for row, shared in branches:
        held.append((row, min(shared, lengths[row], lengths[before])))
        before = row
    return _grow(held, lengths, start)


def _grow(branches: Sequence[Branch], lengths: Mapping[int, int], start: int) -> tuple[Node, ...]:
    row = branches[0][0]
    if len(branches) == 1:
        return (Node(row, start, max(start, lengths[row])),)
    depth, parts = fork(branches)
    depth = max(start, depth)
    below = tuple(node for part in parts for node in _grow(part, lengths, depth))
    return below if depth == start else (Node(row, start, depth, below),)
