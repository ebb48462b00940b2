"""Scores stored rows under a network, in slices by tokens; the slices never change a log-prob beyond rounding.

Axes: ``B`` rows, ``T`` completion tokens, ``M`` completion tokens of several rows laid end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memsafe_rl.memory.recovery import Attempt
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.ops.logprobs import token_logprobs
from memsafe_rl.ops.masking import pad_rows
from memsafe_rl.rollout.generation import eval_mode
from memsafe_rl.types import RolloutPlan, TokenScores, Trajectory


class RowScores(NamedTuple):
    """Scores of one row's actions, on the host.

    Args:
        logprobs: (T,), nats.
        entropies: (T,), nats; None unless wanted.
    """

    logprobs: Tensor
    entropies: Tensor | None


def score_rows(
    adapter: ModelAdapter,
    trajectory: Trajectory,
    rows: Sequence[int],
    *,
    temperature: float,
    tile: int,
    with_entropy: bool = False,
) -> TokenScores:
    """Scores the actions of some rows in one forward; carries a graph if gradients are enabled.

    Equals log-softmax over full ``[B, T, V]`` logits divided by the temperature, gathered at the actions.

    Args:
        adapter: the network.
        trajectory: the store.
        rows: indices of the rows wanted.
        temperature: divides the logits, as in the rollout.
        tile: completion tokens whose logits exist at the same time.
        with_entropy: whether entropies are wanted.

    Returns:
        Log-probs and entropies, padded with 0 to the longest of these rows.
    """
    distribution = adapter.distribution(trajectory, rows)
    logprobs_M, entropies_M = token_logprobs(
        distribution, temperature=temperature, tile=tile, with_entropy=with_entropy
    )
    lengths = distribution.lengths
    entropies_BT = None if entropies_M is None else pad_rows(entropies_M, lengths, 0.0)
    return TokenScores(pad_rows(logprobs_M, lengths, 0.0), entropies_BT)


def score_all(
    adapter: ModelAdapter,
    trajectory: Trajectory,
    rows: Sequence[int],
    *,
    temperature: float,
    attempt: Attempt[RolloutPlan],
    tile: int,
    with_entropy: bool = False,
) -> list[RowScores]:
    """Scores the actions of any number of rows without gradient, in eval mode, a slice at a time.

    A slice is what is repeated when memory runs out; earlier slices are kept, on the host.

    Args:
        adapter: the network.
        trajectory: the store.
        rows: indices of the rows wanted.
        temperature: divides the logits, as in the rollout.
        attempt: runs a slice under the plan in force: its ``score_tokens`` (prompt and completion, padding included)
            are the tokens of one forward; a longer row goes alone.
        tile: completion tokens whose logits exist at the same time; never more than ``score_tokens``, so that a plan
            can go on shrinking when a row is alone.
        with_entropy: whether entropies are wanted.

    Returns:
        Scores of each row's own actions, on the host, in the order of ``rows``.
    """
    lengths = row_lengths(trajectory, rows)
    scores: dict[int, RowScores] = {}
    waiting = list(range(len(rows)))

    def score_next(plan: RolloutPlan) -> dict[int, RowScores]:
        chosen = cut_by_tokens([lengths[place] for place in waiting], plan.score_tokens)[0]
        places = [waiting[index] for index in chosen]
        found = _score_slice(
            adapter, trajectory, [rows[p] for p in places], temperature, min(tile, plan.score_tokens), with_entropy
        )
        return dict(zip(places, found, strict=True))

    with torch.no_grad(), eval_mode(adapter.model):
        while waiting:
            scores |= attempt(score_next)
            waiting = [place for place in waiting if place not in scores]
    return [scores[place] for place in range(len(rows))]


def row_lengths(trajectory: Trajectory, rows: Sequence[int]) -> list[int]:
    """Gives prompt plus completion tokens of each row."""
    pairs = zip(trajectory.condition_lengths(rows), trajectory.action_lengths(rows), strict=True)
    return [prompt + completion for prompt, completion in pairs]


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


def _score_slice(
    adapter: ModelAdapter,
    trajectory: Trajectory,
    rows: Sequence[int],
    temperature: float,
    tile: int,
    with_entropy: bool,
) -> list[RowScores]:
    """Scores one slice; a function of its own, so that its hidden states are gone before the next slice's forward."""
    distribution = adapter.distribution(trajectory, rows)
    logprobs_M, entropies_M = token_logprobs(
        distribution, temperature=temperature, tile=tile, with_entropy=with_entropy
    )
    lengths = list(distribution.lengths)
    logprobs = torch.split(logprobs_M.cpu(), lengths)
    entropies = [None] * len(lengths) if entropies_M is None else torch.split(entropies_M.cpu(), lengths)
    return [RowScores(*pair) for pair in zip(logprobs, entropies, strict=True)]
