"""Scores stored rows under a network, in slices by tokens; the slices never change a log-prob beyond rounding.

Axes: ``B`` rows, ``T`` completion tokens, ``M`` completion tokens of several rows laid end to end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.ops.logprobs import token_logprobs
from memsafe_rl.ops.masking import pad_rows
from memsafe_rl.rollout.generation import eval_mode
from memsafe_rl.types import TokenScores, Trajectory


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
    score_tokens: int,
    tile: int,
) -> list[Tensor]:
    """Scores the actions of any number of rows without gradient, in eval mode, a slice at a time.

    Args:
        adapter: the network.
        trajectory: the store.
        rows: indices of the rows wanted.
        temperature: divides the logits, as in the rollout.
        score_tokens: tokens (prompt and completion, padding included) of one forward; a longer row goes alone.
        tile: completion tokens whose logits exist at the same time.

    Returns:
        Log-probs of each row's own actions, (T,) on the host, nats, in the order of ``rows``.
    """
    prompts, actions = trajectory.condition_lengths(rows), trajectory.action_lengths(rows)
    scores: dict[int, Tensor] = {}
    with torch.no_grad(), eval_mode(adapter.model):
        for places in cut_by_tokens([sum(pair) for pair in zip(prompts, actions, strict=True)], score_tokens):
            slice_scores = _score_slice(adapter, trajectory, [rows[place] for place in places], temperature, tile)
            scores.update(zip(places, slice_scores, strict=True))
    return [scores[place] for place in range(len(rows))]


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
    adapter: ModelAdapter, trajectory: Trajectory, rows: Sequence[int], temperature: float, tile: int
) -> tuple[Tensor, ...]:
    """Scores one slice; a function of its own, so that its hidden states are gone before the next slice's forward."""
    distribution = adapter.distribution(trajectory, rows)
    logprobs_M, _ = token_logprobs(distribution, temperature=temperature, tile=tile, with_entropy=False)
    return torch.split(logprobs_M.cpu(), list(distribution.lengths))
