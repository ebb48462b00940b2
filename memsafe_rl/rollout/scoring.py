"""Scores stored rows under a network, in slices; the slices never change a log-prob beyond rounding.

The adapter says how rows are cut: rows of tokens by tokens, chains of denoising steps into rows × columns.

Axes: ``B`` rows, ``T`` completion tokens or denoising steps, ``M`` those of several rows laid end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from memsafe_rl.accounting import host_memory
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.runtime.host_memory import to_host
from memsafe_rl.memory.runtime.recovery import Attempt
from memsafe_rl.micro_batches import MicroBatch, cut_by_tokens, packing_saves
from memsafe_rl.models.adapter import ModelAdapter, ScoringAdapter
from memsafe_rl.models.module_state import eval_mode
from memsafe_rl.ops.gaussian import gaussian_entropies, gaussian_kl, gaussian_logprobs
from memsafe_rl.ops.logprobs import choice_logprobs, pad_rows, token_logprobs
from memsafe_rl.types import (
    Distribution,
    GaussianDistribution,
    Ragged,
    RolloutPlan,
    StateFeatures,
    TokenDistribution,
    TokenScores,
    Trajectory,
    ValueHead,
)

Numbers = dict[str, Tensor]
"""Numbers of actions, (M,) or one row's (T,), by what they are called in `RowScores`."""

Choices = int | Mapping[int, Tensor]
"""Further tokens that are scored: so many of the likeliest ones at every place, or each row's, (T, K) int64."""

Run = Callable[[Sequence[int], MicroBatch, RolloutPlan], tuple[Numbers, Sequence[int]]]
"""Takes rows, how they are run, and a plan; gives numbers (M,), and how many each row has."""


class RowScores(NamedTuple):
    """Scores of one row's actions, on the host."""

    logprobs: Tensor  # (T,), nats; 0 in columns that were not wanted
    entropies: Tensor | None = None  # (T,), nats; likewise; None unless wanted
    values: Tensor | None = None  # (T,), a critic's; None unless wanted
    kl: Tensor | None = None  # (T,), nats, to the reference in closed form; likewise; None unless wanted
    choices: Tensor | None = None  # (T, K) int64, the likeliest tokens, or those asked for; None unless wanted
    choice_logprobs: Tensor | None = None  # (T, K), nats, theirs


def score_rows(
    adapter: ScoringAdapter,
    trajectory: Trajectory,
    rows: Sequence[int],
    columns: Sequence[int] | None = None,
    *,
    temperature: float,
    tile: int,
    with_entropy: bool = False,
    with_kl: bool = False,
    packed: bool = False,
    value_head: ValueHead | None = None,
) -> TokenScores:
    """Scores the actions of some rows in one forward; carries a graph if gradients are enabled."""
    numbers, lengths = _scored(
        adapter, trajectory, rows, columns, packed, temperature, tile, with_entropy, with_kl, value_head
    )
    return TokenScores(**{f"{kind}_BT": pad_rows(each_M, lengths, 0.0) for kind, each_M in numbers.items()})


def value_rows(
    network: ScoringAdapter,
    trajectory: Trajectory,
    rows: Sequence[int],
    value_head: ValueHead,
    columns: Sequence[int] | None = None,
    *,
    packed: bool = False,
) -> Tensor:
    """Returns a critic's values of some rows' actions in one forward; carries a graph if gradients are enabled."""
    distribution = network.distribution(trajectory, rows, columns, packed=packed)
    return pad_rows(_values(distribution, value_head), distribution.lengths, 0.0)


def score_all(
    adapter: ScoringAdapter,
    trajectory: Trajectory,
    rows: Sequence[int],
    *,
    temperature: float,
    attempt: Attempt[RolloutPlan],
    tile: int,
    with_entropy: bool = False,
    with_kl: bool = False,
    columns: Sequence[int] | None = None,
    value_head: ValueHead | None = None,
    packed: bool | None = None,
    choices: Choices | None = None,
) -> list[RowScores]:
    """Scores the actions of any rows without gradient, a slice at a time, packed where that saves enough or as told."""

    def score(chosen: Sequence[int], micro: MicroBatch, plan: RolloutPlan) -> tuple[Numbers, Sequence[int]]:
        least, how = min(tile, plan.score_tokens), (with_entropy, with_kl, value_head, choices)
        return _scored(adapter, trajectory, chosen, micro.columns, micro.packed, temperature, least, *how)

    wanted = {"logprobs": True, "entropies": with_entropy, "kl": with_kl, "values": value_head is not None}
    kinds = [kind for kind, is_wanted in wanted.items() if is_wanted]
    return [RowScores(**one) for one in _in_slices(adapter, trajectory, rows, columns, attempt, score, kinds, packed)]


def value_all(
    network: ScoringAdapter,
    trajectory: Trajectory,
    rows: Sequence[int],
    value_head: ValueHead,
    *,
    attempt: Attempt[RolloutPlan],
    columns: Sequence[int] | None = None,
    packed: bool | None = None,
) -> list[Tensor]:
    """Returns a critic's values of any number of rows without gradient, in eval mode, a slice at a time."""

    def value(chosen: Sequence[int], micro: MicroBatch, plan: RolloutPlan) -> tuple[Numbers, Sequence[int]]:  # noqa: ARG001
        distribution = network.distribution(trajectory, chosen, micro.columns, packed=micro.packed)
        return {"values": _values(distribution, value_head)}, distribution.lengths

    return [one["values"] for one in _in_slices(network, trajectory, rows, columns, attempt, value, ["values"], packed)]


def read_sources(adapter: ModelAdapter, trajectory: Trajectory, attempt: Attempt[RolloutPlan]) -> Ragged:
    """Has a frozen encoder read every prompt of a rollout once, a few at a time, without gradient, in eval mode."""
    prompts = trajectory.conditions.rows()
    found: dict[int, Tensor] = {}

    def read_next(plan: RolloutPlan) -> dict[int, Tensor]:
        waiting = [place for place in range(len(prompts)) if place not in found]
        lengths = [len(prompts[place]) for place in waiting]
        chosen = [waiting[index] for index in cut_by_tokens(lengths, plan.score_tokens)[0]]
        read = adapter.read_sources([prompts[place] for place in chosen])
        return {place: to_host(hidden_LD) for place, hidden_LD in zip(chosen, read, strict=True)}

    with eval_mode(adapter.model):
        while len(found) < len(prompts):
            found |= attempt(read_next)
    with host_memory():
        return Ragged.from_rows([found[place] for place in range(len(prompts))])


def _in_slices(
    adapter: ScoringAdapter,
    trajectory: Trajectory,
    rows: Sequence[int],
    columns: Sequence[int] | None,
    attempt: Attempt[RolloutPlan],
    run: Run,
    kinds: Sequence[str],
    packed: bool | None,
) -> list[Numbers]:
    """Runs rows without gradient, in eval mode, a slice at a time; columns that were not wanted have 0."""
    packed = packing_saves(adapter.work(trajectory, rows)) if packed is None else packed
    found: list[Numbers] = [{} for _ in rows]
    waiting: list[MicroBatch] = []
    cut_for = 0

    def cut(places: Sequence[int], columns: Sequence[int] | None, tokens: int) -> list[MicroBatch]:
        chosen = [rows[place] for place in places]
        groups = adapter.micro_batches(trajectory, chosen, tokens, columns=columns, packed=packed)
        slices = [micro for group in groups for micro in group.batches]
        return [micro._replace(places=tuple(places[place] for place in micro.places)) for micro in slices]

    def run_next(plan: RolloutPlan) -> tuple[MicroBatch, dict[str, tuple[Tensor, ...]]] | None:
        nonlocal waiting, cut_for
        if plan.score_tokens != cut_for:
            # A leaner plan cuts what is left anew.
            left = _merged(waiting) if cut_for else [(list(range(len(rows))), columns)]
            waiting = [one for piece in left for one in cut(*piece, plan.score_tokens)]
            cut_for = plan.score_tokens
        if not waiting:
            return None
        numbers, lengths = run([rows[place] for place in waiting[0].places], waiting[0], plan)
        there = {kind: each_M.cpu() if each_M.dim() == 1 else to_host(each_M) for kind, each_M in numbers.items()}
        return waiting[0], {kind: torch.split(each_M, list(lengths)) for kind, each_M in there.items()}

    lengths = trajectory.action_lengths(rows)
    with torch.no_grad(), eval_mode(adapter.model):
        while rows and (waiting or not cut_for):
            done = attempt(run_next)
            if done is not None:
                _note(found, *done, lengths)
                del waiting[0]
    with host_memory():
        for numbers, length in zip(found, lengths, strict=True):
            if not numbers:  # no column of any row is wanted
                numbers |= dict.fromkeys(kinds, torch.zeros(length, dtype=torch.float64))
    return found


def _merged(waiting: Sequence[MicroBatch]) -> list[tuple[list[int], Sequence[int] | None]]:
    """Joins slices of the same columns, so that they can be cut anew."""
    places: dict[Sequence[int] | None, list[int]] = {}
    for micro in waiting:
        places.setdefault(micro.columns, []).extend(micro.places)
    return [(sorted(together), columns) for columns, together in places.items()]


def _note(
    found: Sequence[Numbers], micro: MicroBatch, numbers: dict[str, tuple[Tensor, ...]], lengths: Sequence[int]
) -> None:
    """Writes down what a slice gave; of some columns only, among all columns of its rows."""
    for kind, parts in numbers.items():
        for place, part in zip(micro.places, parts, strict=True):
            if micro.columns is None:
                found[place][kind] = part
                continue
            with host_memory():
                if kind not in found[place]:
                    found[place][kind] = torch.zeros(lengths[place], dtype=torch.float64)
                found[place][kind][list(micro.columns)] = part.double()


def _scored(
    adapter: ScoringAdapter,
    trajectory: Trajectory,
    rows: Sequence[int],
    columns: Sequence[int] | None,
    packed: bool,
    temperature: float,
    tile: int,
    with_entropy: bool,
    with_kl: bool,
    value_head: ValueHead | None,
    choices: Choices | None = None,
) -> tuple[Numbers, Sequence[int]]:
    """Scores rows in one forward; a function of its own, so that its hidden states are gone before the next one."""
    means = _reference_means(adapter, trajectory, rows, columns) if with_kl else None
    distribution = adapter.distribution(trajectory, rows, columns, packed=packed)
    if means is not None and isinstance(distribution, GaussianDistribution):
        distribution = replace(distribution, reference_means=means)
    logprobs_M, entropies_M = _logprobs(distribution, temperature, tile, with_entropy)
    numbers = {"logprobs": logprobs_M}
    if entropies_M is not None:
        numbers["entropies"] = entropies_M
    if means is not None and isinstance(distribution, GaussianDistribution):
        numbers["kl"] = gaussian_kl(distribution)
    if value_head is not None:
        numbers["values"] = _values(distribution, value_head)
    if choices is not None and isinstance(distribution, TokenDistribution):
        device = distribution.hidden_MD.device
        given = choices if isinstance(choices, int) else torch.cat([choices[row] for row in rows]).to(device)
        ids_MK, chances_MK = choice_logprobs(distribution, given, temperature=temperature, tile=tile)
        numbers |= {"choices": ids_MK, "choice_logprobs": chances_MK}
    return numbers, distribution.lengths


def _values(distribution: Distribution, value_head: ValueHead) -> Tensor:
    """Returns values (M,) of the hidden states from which actions are drawn."""
    assert not isinstance(distribution, GaussianDistribution), "a denoiser's critic is a network of its own"
    return value_head(distribution.hidden_MD)


def _reference_means(
    adapter: ScoringAdapter, trajectory: Trajectory, rows: Sequence[int], columns: Sequence[int] | None
) -> Tensor:
    with torch.no_grad(), adapter.reference() as reference:
        distribution = reference.distribution(trajectory, rows, columns)
    if not isinstance(distribution, GaussianDistribution):
        raise ConfigError("A KL in closed form is asked for, but tokens have none. Score the reference's log-probs.")
    # Autocast keeps weights that it has cast, and without gradient it has cast them without a graph.
    torch.clear_autocast_cache()
    return distribution.means


def _logprobs(
    distribution: Distribution, temperature: float, tile: int, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    if isinstance(distribution, GaussianDistribution):
        return gaussian_logprobs(distribution), gaussian_entropies(distribution) if with_entropy else None
    assert not isinstance(distribution, StateFeatures), "a critic draws nothing"
    return token_logprobs(distribution, temperature=temperature, tile=tile, with_entropy=with_entropy)
