"""How adapters shape and cut stored rows: rows of tokens, or rows × columns of a chain whose columns stand alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from memsafe_rl.accounting import host_memory, worth_running
from memsafe_rl.slices import MicroBatch, cut_columns, cut_groups, packed_tokens, telling
from memsafe_rl.types import ModelGeometry, Trajectory, UpdateWork


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


def token_micro_batches(work: UpdateWork, tokens: int) -> list[list[MicroBatch]]:
    """Cuts rows by tokens, packed if the work says that they can be."""

    def micro_batch(places: Sequence[int]) -> MicroBatch:
        padded = len(places) * max(work.row_tokens[place] for place in places)
        return MicroBatch(
            tuple(places), None, bool(work.prompts), packed_tokens(work, places) if work.prompts else padded
        )

    groups = cut_groups(work, tokens, packed=True)
    if work.sources:
        # Gradients wait at what an encoder gave, so a dry run needs all of a group's rows to be there; without an
        # encoder it chooses rows beforehand.
        groups = [list(worth_running(group, partial(telling, work))) for group in groups]
    return [[micro_batch(places) for places in group] for group in groups]


def step_work(trajectory: Trajectory, rows: Sequence[int], geometry: ModelGeometry) -> UpdateWork:
    """Gives the shape of rows whose columns are run one by one."""
    with host_memory():
        columns = (len(trajectory.counted_columns),) * len(rows)
    return UpdateWork(columns, columns, geometry)


def step_micro_batches(
    trajectory: Trajectory, rows: Sequence[int], tokens: int, columns: Sequence[int] | None
) -> list[list[MicroBatch]]:
    """Cuts rows × columns into rectangles."""
    wanted = trajectory.counted_columns if columns is None else columns
    pieces = worth_running(cut_columns(len(rows), wanted, tokens))
    batches = [
        MicroBatch(tuple(places), tuple(chosen), packed=False, tokens=len(places) * len(chosen))
        for places, chosen in pieces
    ]
    return [batches] if batches else []
