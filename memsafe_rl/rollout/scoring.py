"""Scores stored rows under a network, in slices by tokens; the slices never change a log-prob beyond rounding.

Axes: ``B`` rows, ``T`` completion tokens, ``M`` completion tokens of several rows laid end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memsafe_rl.memory.recovery import Attempt
from memsafe_rl.memory.slices import cut_work, packing_saves
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.ops.logprobs import token_logprobs
from memsafe_rl.ops.masking import pad_rows
from memsafe_rl.rollout.generation import eval_mode
from memsafe_rl.types import RolloutPlan, TokenDistribution, TokenScores, Trajectory, UpdateWork


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
    packed: bool = False,
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
        packed: whether rows lie behind one copy of each of their prompts; only where the network can.

    Returns:
        Log-probs and entropies, padded with 0 to the longest of these rows.
    """
    distribution = _distribution(adapter, trajectory, rows, packed)
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

    A slice is what is repeated when memory runs out; earlier slices are kept, on the host. Rows are packed behind one
    copy of each of their prompts where the network can and they share enough of them.

    Args:
        adapter: the network.
        trajectory: the store.
        rows: indices of the rows wanted.
        temperature: divides the logits, as in the rollout.
        attempt: runs a slice under the plan in force: its ``score_tokens`` (prompt and completion, padding included)
            are the tokens of one forward, packed ones where rows are packed; a longer row goes alone.
        tile: completion tokens whose logits exist at the same time; never more than ``score_tokens``, so that a plan
            can go on shrinking when a row is alone.
        with_entropy: whether entropies are wanted.

    Returns:
        Scores of each row's own actions, on the host, in the order of ``rows``.
    """
    packed = packing_saves(update_work(adapter, trajectory, rows))
    scores: dict[int, RowScores] = {}
    waiting = list(range(len(rows)))

    def score_next(plan: RolloutPlan) -> dict[int, RowScores]:
        work = update_work(adapter, trajectory, [rows[place] for place in waiting])
        places = [waiting[index] for index in cut_work(work, plan.score_tokens, packed=packed)[0]]
        chosen, least = [rows[place] for place in places], min(tile, plan.score_tokens)
        found = _score_slice(adapter, trajectory, chosen, temperature, least, with_entropy, packed)
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


def update_work(
    adapter: ModelAdapter, trajectory: Trajectory, rows: Sequence[int], *, packable: bool = True
) -> UpdateWork:
    """Gives the shape of rows, as a memory policy may know it.

    Args:
        adapter: the network.
        trajectory: the store.
        rows: indices of the rows.
        packable: whether rows may share their prompts, where the network can.

    Returns:
        Their lengths, and who shares a prompt with whom.
    """
    shares = packable and adapter.packs_prompts
    return UpdateWork(
        row_tokens=tuple(row_lengths(trajectory, rows)),
        action_tokens=trajectory.action_lengths(rows),
        geometry=adapter.geometry,
        prompts=tuple(trajectory.condition_of_row[row] for row in rows) if shares else (),
    )


def _distribution(
    adapter: ModelAdapter, trajectory: Trajectory, rows: Sequence[int], packed: bool
) -> TokenDistribution:
    return adapter.distribution(trajectory, rows, packed=True) if packed else adapter.distribution(trajectory, rows)


def _score_slice(
    adapter: ModelAdapter,
    trajectory: Trajectory,
    rows: Sequence[int],
    temperature: float,
    tile: int,
    with_entropy: bool,
    packed: bool,
) -> list[RowScores]:
    """Scores one slice; a function of its own, so that its hidden states are gone before the next slice's forward."""
    distribution = _distribution(adapter, trajectory, rows, packed)
    logprobs_M, entropies_M = token_logprobs(
        distribution, temperature=temperature, tile=tile, with_entropy=with_entropy
    )
    lengths = list(distribution.lengths)
    logprobs = torch.split(logprobs_M.cpu(), lengths)
    entropies = [None] * len(lengths) if entropies_M is None else torch.split(entropies_M.cpu(), lengths)
    return [RowScores(*pair) for pair in zip(logprobs, entropies, strict=True)]
