"""Scores stored rows under a network, in slices; the slices never change a log-prob beyond rounding.

Rows of tokens are cut by tokens, rows of denoising steps into rows × columns.

Axes: ``B`` rows, ``T`` completion tokens or denoising steps, ``M`` those of several rows laid end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from memsafe_rl.accounting import host_memory
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.planning.slices import cut_by_tokens, cut_columns, cut_work, packing_saves
from memsafe_rl.memory.runtime.host_memory import to_host
from memsafe_rl.memory.runtime.recovery import Attempt
from memsafe_rl.models.adapter import ScoringAdapter
from memsafe_rl.models.language.seq2seq import Seq2SeqAdapter
from memsafe_rl.ops.gaussian import gaussian_entropies, gaussian_kl, gaussian_logprobs
from memsafe_rl.ops.logprobs import token_logprobs
from memsafe_rl.ops.masking import pad_rows
from memsafe_rl.rollout.native.generation import eval_mode
from memsafe_rl.types import (
    Distribution,
    GaussianDistribution,
    Ragged,
    RolloutPlan,
    StateFeatures,
    TokenScores,
    Trajectory,
    UpdateWork,
    ValueHead,
)

Found = TypeVar("Found")

_KINDS = ("logprobs_BT", "entropies_BT", "kl_BT")
"""What a rectangle of a chain's steps is scored for."""


class RowScores(NamedTuple):
    """Scores of one row's actions, on the host.

    Args:
        logprobs: (T,), nats; 0 in columns that were not wanted.
        entropies: (T,), nats; likewise; None unless wanted.
        values: (T,), a critic's; None unless wanted.
        kl: (T,), nats, to the reference in closed form; likewise; None unless wanted.
    """

    logprobs: Tensor
    entropies: Tensor | None
    values: Tensor | None = None
    kl: Tensor | None = None


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
    """Scores the actions of some rows in one forward; carries a graph if gradients are enabled.

    Equals log-softmax over full ``[B, T, V]`` logits divided by the temperature, gathered at the actions; for states of
    a denoising chain, the log-density of the scheduler's Gaussian, which knows no temperature.
    """
    means = _reference_means(adapter, trajectory, rows, columns) if with_kl else None
    distribution = adapter.distribution(trajectory, rows, columns, packed=packed)
    if means is not None and isinstance(distribution, GaussianDistribution):
        distribution = replace(distribution, reference_means=means)
    logprobs_M, entropies_M = _logprobs(distribution, temperature, tile, with_entropy)
    kl_M = gaussian_kl(distribution) if means is not None and isinstance(distribution, GaussianDistribution) else None
    lengths = distribution.lengths
    values_M = None if value_head is None else _values(distribution, value_head)
    rest = (None if each_M is None else pad_rows(each_M, lengths, 0.0) for each_M in (entropies_M, kl_M, values_M))
    return TokenScores(pad_rows(logprobs_M, lengths, 0.0), *rest)


def value_rows(
    network: ScoringAdapter,
    trajectory: Trajectory,
    rows: Sequence[int],
    value_head: ValueHead,
    columns: Sequence[int] | None = None,
    *,
    packed: bool = False,
) -> Tensor:
    """Gives a critic's values of some rows' actions in one forward; carries a graph if gradients are enabled."""
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
) -> list[RowScores]:
    """Scores the actions of any number of rows without gradient, in eval mode, a slice at a time.

    A slice is what is repeated when memory runs out; earlier slices are kept, on the host. Rows are packed behind one
    copy of each of their prompts where the network can and they share enough of them. Where columns are scored one by
    one, those in which no row counts are left out.
    """
    if adapter.time_separable:

        def rectangle(chosen: Sequence[int], some: Sequence[int]) -> Tensor:
            return _score_rectangle(adapter, trajectory, chosen, some, with_kl)

        found = _in_rectangles(adapter, trajectory, rows, columns, attempt, rectangle)
        return [RowScores(one[0], one[1] if with_entropy else None, kl=one[2] if with_kl else None) for one in found]

    def score(chosen: Sequence[int], plan: RolloutPlan, packed: bool) -> list[RowScores]:
        least = min(tile, plan.score_tokens)
        return _score_slice(adapter, trajectory, chosen, temperature, least, with_entropy, packed, value_head)

    return _in_slices(adapter, trajectory, rows, attempt, score)


def value_all(
    network: ScoringAdapter,
    trajectory: Trajectory,
    rows: Sequence[int],
    value_head: ValueHead,
    *,
    attempt: Attempt[RolloutPlan],
    columns: Sequence[int] | None = None,
) -> list[Tensor]:
    """Gives a critic's values of any number of rows without gradient, in eval mode, a slice at a time."""
    if network.time_separable:

        def rectangle(chosen: Sequence[int], some: Sequence[int]) -> Tensor:
            values_BT = value_rows(network, trajectory, chosen, value_head, some)
            return to_host(values_BT)[None]

        return [one[0] for one in _in_rectangles(network, trajectory, rows, columns, attempt, rectangle)]

    def value(chosen: Sequence[int], plan: RolloutPlan, packed: bool) -> list[Tensor]:  # noqa: ARG001
        distribution = network.distribution(trajectory, chosen, packed=packed)
        return list(torch.split(_values(distribution, value_head).cpu(), list(distribution.lengths)))

    return _in_slices(network, trajectory, rows, attempt, value)


def read_sources(adapter: Seq2SeqAdapter, trajectory: Trajectory, attempt: Attempt[RolloutPlan]) -> Ragged:
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


def row_lengths(trajectory: Trajectory, rows: Sequence[int]) -> list[int]:
    """Gives prompt plus completion tokens of each row."""
    pairs = zip(trajectory.condition_lengths(rows), trajectory.action_lengths(rows), strict=True)
    return [prompt + completion for prompt, completion in pairs]


def update_work(
    adapter: ScoringAdapter, trajectory: Trajectory, rows: Sequence[int], *, packable: bool = True
) -> UpdateWork:
    """Gives the shape of rows, as a memory policy may know it."""
    if adapter.time_separable:
        with host_memory():
            columns = (len(trajectory.counted_columns),) * len(rows)
        return UpdateWork(columns, columns, adapter.geometry)
    owners, geometry = tuple(trajectory.condition_of_row[row] for row in rows), adapter.geometry
    return UpdateWork(
        row_tokens=tuple(row_lengths(trajectory, rows)),
        action_tokens=trajectory.action_lengths(rows),
        geometry=geometry,
        prompts=owners if packable and adapter.packs_prompts else (),
        sources=() if geometry.source_bytes is None else owners,
    )


def _in_slices(
    adapter: ScoringAdapter,
    trajectory: Trajectory,
    rows: Sequence[int],
    attempt: Attempt[RolloutPlan],
    run: Callable[[Sequence[int], RolloutPlan, bool], list[Found]],
) -> list[Found]:
    """Runs rows without gradient, in eval mode, a slice at a time; ``run`` takes rows, plan and whether to pack."""
    packed = packing_saves(update_work(adapter, trajectory, rows))
    found: dict[int, Found] = {}
    waiting = list(range(len(rows)))

    def run_next(plan: RolloutPlan) -> dict[int, Found]:
        work = update_work(adapter, trajectory, [rows[place] for place in waiting])
        places = [waiting[index] for index in cut_work(work, plan.score_tokens, packed=packed)[0]]
        return dict(zip(places, run([rows[place] for place in places], plan, packed), strict=True))

    with torch.no_grad(), eval_mode(adapter.model):
        while waiting:
            found |= attempt(run_next)
            waiting = [place for place in waiting if place not in found]
    return [found[place] for place in range(len(rows))]


def _values(distribution: Distribution, value_head: ValueHead) -> Tensor:
    """Gives values (M,) of the hidden states from which actions are drawn."""
    if isinstance(distribution, GaussianDistribution):
        raise AssertionError("a denoiser shows no hidden states; its critic is a network of its own")
    return value_head(distribution.hidden_MD)


def _in_rectangles(
    adapter: ScoringAdapter,
    trajectory: Trajectory,
    rows: Sequence[int],
    columns: Sequence[int] | None,
    attempt: Attempt[RolloutPlan],
    run: Callable[[Sequence[int], Sequence[int]], Tensor],
) -> list[Tensor]:
    """Runs rows × columns without gradient, in eval mode, a rectangle at a time.

    What is left of a column piece that was cut waits before the others. ``run`` takes rows and columns and gives
    (K, B, T) numbers on the host; what comes back is (K, S) float64 for each row, 0 in columns that were not wanted.
    """
    lengths = trajectory.action_lengths(rows)
    wanted = trajectory.counted_columns if columns is None else columns
    found: list[Tensor] = []
    waiting = [(list(range(len(rows))), list(wanted))]

    def run_next(plan: RolloutPlan) -> tuple[list[int], list[int], Tensor]:
        places, left = waiting[0]
        piece, chosen = cut_columns(len(places), left, plan.score_tokens)[0]
        numbers = run([rows[places[index]] for index in piece], chosen)
        return [places[index] for index in piece], chosen, numbers

    with torch.no_grad(), eval_mode(adapter.model):
        while waiting:
            if not all(waiting[0]):
                waiting.pop(0)
                continue
            done, chosen, numbers_KBT = attempt(run_next)
            with host_memory():
                found = found or [torch.zeros(len(numbers_KBT), length, dtype=torch.float64) for length in lengths]
                for index, place in enumerate(done):
                    found[place][:, chosen] = numbers_KBT[:, index].double()
            places, left = waiting.pop(0)
            rest = [place for place in places if place not in set(done)]
            waiting[:0] = [(rest, chosen), (places, [column for column in left if column not in set(chosen)])]
    with host_memory():
        return found or [torch.zeros(len(_KINDS), length, dtype=torch.float64) for length in lengths]


def _score_rectangle(
    adapter: ScoringAdapter, trajectory: Trajectory, rows: Sequence[int], columns: Sequence[int], with_kl: bool
) -> Tensor:
    """Gives log-probs, entropies and, if wanted, the KL of some rows and columns, (K, B, T) on the host."""
    scores = score_rows(adapter, trajectory, rows, columns, temperature=1.0, tile=1, with_entropy=True, with_kl=with_kl)
    kinds = [getattr(scores, name) for name in _KINDS]
    return to_host(torch.stack([each_BT for each_BT in kinds if each_BT is not None]))


def _reference_means(
    adapter: ScoringAdapter, trajectory: Trajectory, rows: Sequence[int], columns: Sequence[int] | None
) -> Tensor:
    """Runs the reference on the same states, without gradient."""
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
    if isinstance(distribution, StateFeatures):
        raise AssertionError("a critic draws nothing")
    return token_logprobs(distribution, temperature=temperature, tile=tile, with_entropy=with_entropy)


def _score_slice(
    adapter: ScoringAdapter,
    trajectory: Trajectory,
    rows: Sequence[int],
    temperature: float,
    tile: int,
    with_entropy: bool,
    packed: bool,
    value_head: ValueHead | None,
) -> list[RowScores]:
    """Scores one slice; a function of its own, so that its hidden states are gone before the next slice's forward."""
    distribution = adapter.distribution(trajectory, rows, packed=packed)
    logprobs_M, entropies_M = _logprobs(distribution, temperature, tile, with_entropy)
    lengths = list(distribution.lengths)
    logprobs = torch.split(logprobs_M.cpu(), lengths)
    nothing = [None] * len(lengths)
    entropies = nothing if entropies_M is None else torch.split(entropies_M.cpu(), lengths)
    values = nothing if value_head is None else torch.split(_values(distribution, value_head).cpu(), lengths)
    return [RowScores(*parts) for parts in zip(logprobs, entropies, values, strict=True)]
