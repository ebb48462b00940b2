"""How adapters shape and cut stored rows: rows of tokens, or rows × columns of a chain whose columns stand alone."""

from __future__ import annotations

from collections.abc import Sequence

from memsafe_rl.accounting import host_memory
from memsafe_rl.slices import MicroBatch, MicroBatchGroup, cut_columns, cut_groups, packed_tokens, telling
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


def token_micro_batches(work: UpdateWork, tokens: int) -> list[MicroBatchGroup]:
    """Cuts rows by tokens, packed if the work says that they can be."""

    def micro_batch(places: Sequence[int]) -> MicroBatch:
        padded = len(places) * max(work.row_tokens[place] for place in places)
        run = packed_tokens(work, places) if work.prompts else padded
        return MicroBatch(tuple(places), None, bool(work.prompts), run)

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
