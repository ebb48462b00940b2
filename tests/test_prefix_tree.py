"""Trees of rows that begin alike, by hand."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from memsafe_rl.prefix_tree import LEAST_SHARED, Node, depth_first, fork, grow, sort_by_tokens


def row(*parts: int) -> Tensor:
    """Tokens: of each part, twenty times its number."""
    return torch.tensor([part for part in parts for _ in range(20)])


def test_rows_are_sorted_and_know_what_they_share() -> None:
    rows = [row(1, 3), row(1, 2, 5), row(2), row(1, 2, 4)]
    assert sort_by_tokens(rows) == ((2, 20), (1, 40), (3, 0), (0, 0))
    branches = [(3, 0), (1, 40), (0, 20), (2, 0)]
    assert depth_first(branches, [0, 1]) == [(1, 0), (0, 20)]
    assert depth_first(branches, [3, 0, 2]) == [(3, 0), (0, 20), (2, 0)]  # what lies between two counts for both
    assert fork(branches[:3]) == (20, [branches[:2], branches[2:3]])
    below = (Node(3, 20, 40, (Node(3, 40, 60), Node(1, 40, 60))), Node(0, 20, 40))
    lengths = {0: 40, 1: 60, 2: 20, 3: 60}
    assert grow(branches, lengths) == (Node(3, 0, 20, below), Node(2, 0, 20))
    assert grow(branches[:3], lengths, 20) == below
    assert [node.row for node in grow(branches, lengths)[0].walk()] == [3, 3, 3, 1, 0]


def test_a_row_that_another_one_continues_has_a_leaf_of_nothing() -> None:
    rows = [row(1, 2), row(1, 2), row(1, 2, 3)]
    branches = sorted((place, number, shared) for number, (place, shared) in enumerate(sort_by_tokens(rows)))
    tree = grow([(number, shared) for _, number, shared in branches], {0: 39, 1: 39, 2: 59})
    (root,) = tree
    assert (root.start, root.end) == (0, 39)
    leaves = sorted((node.row, node.end - node.start) for node in root.walk() if not node.children)
    assert leaves == [(0, 0), (1, 0), (2, 20)]


def test_short_stretches_are_not_shared() -> None:
    start = torch.arange(100, 100 + LEAST_SHARED)
    near = [torch.cat([start, torch.tensor([1] * few + [2 + number])]) for number, few in enumerate((3, 3, 0))]
    assert {shared for _, shared in sort_by_tokens(near)} == {0, LEAST_SHARED}
    assert sort_by_tokens([one[1:] for one in near]) == ((0, 0), (1, LEAST_SHARED + 2), (2, 0))


@pytest.mark.parametrize("seed", range(5))
def test_what_is_shared_is_what_two_rows_have_in_common(seed: int) -> None:
    """Of any two rows, the least between them in the tree's order is a common prefix, and none much longer is."""
    rng = random.Random(seed)
    parts = [[rng.randint(0, 3) for _ in range(rng.randint(1, 5))] for _ in range(30)]
    rows = [row(*one) for one in parts]
    order = sorted((place, number, shared) for number, (place, shared) in enumerate(sort_by_tokens(rows)))
    for _ in range(100):
        one, other = sorted(rng.sample(range(len(order)), 2))
        shared = min(entry[2] for entry in order[one + 1 : other + 1])
        first, second = (rows[order[place][1]] for place in (one, other))
        width = min(len(first), len(second))
        differing = (first[:width] != second[:width]).nonzero().flatten().tolist()
        assert shared == (differing[0] if differing else width)
