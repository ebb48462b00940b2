"""Which rows make the peaks of a run: its own first shuffles, cut as its plans would cut them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from typing import NamedTuple

from memsafe_rl.memory.planning.estimator import update_parts
from memsafe_rl.memory.simulated.workspaces import QUERIES
from memsafe_rl.micro_batches import (
    Cursor,
    attention_runs,
    companions,
    cut_groups,
    cut_trees,
    cut_work,
    measure_slices,
    measure_sources,
    packing_saves,
    rows_of_step,
    slice_tokens,
    telling,
    widest,
)
from memsafe_rl.preflight.fake.device import true_numbers
from memsafe_rl.training.learner import Learner
from memsafe_rl.training.setup import TrainingSetup
from memsafe_rl.types import Phase, Trajectory, UpdatePlan, UpdateWork

_STEPS = 64
"""Optimizer steps whose rows are looked at; which rows of a prompt a later step has is as much chance as in these."""


def worst_step(setup: TrainingSetup, trajectory: Trajectory, rollout: int | None = None) -> Sequence[int]:
    """Finds the optimizer step that is expected to hold most, or where nothing is expected, of large slices."""
    return max(planned(setup, steps_of(setup, trajectory, rollout)), key=lambda one: one.sizes).step.rows


class Step(NamedTuple):
    """An optimizer step of a run."""

    rows: Sequence[int]  # this rank's rows of the rollout
    work: UpdateWork  # their shape
    times: int  # how many steps have this shape


@dataclass(frozen=True)
class PlannedStep:
    """An optimizer step, and what the policy would make of it."""

    step: Step
    plan: UpdatePlan

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """What a step may hold most of: bytes, as the policy and each slice let expect, then sizes of its slices."""
        work, tokens, packed = self.step.work, self.plan.micro_batch_tokens, self.plan.pack_prompts
        slices = [] if work.geometry.unit is not None else cut_work(work, tokens, packed=packed)
        alone = _cut(work, self.plan) if work.sources else slices
        held = max((self._bytes_of(rows, meets=place > 0) for place, rows in enumerate(alone)), default=0)
        # of those that meet the gradients of others
        meeting = max((slice_tokens(work, rows, packed=packed) for rows in slices[1:]), default=0)
        runs = [run for rows in slices for run in attention_runs(work, rows, packed=packed)]
        padded = max((count * width for count, width in runs), default=0)
        blocks = max((count * -(-width // QUERIES) for count, width in runs), default=0)
        expected = self.plan.predicted_bytes.get(Phase.UPDATE, 0)
        return expected, held, *largest_slices(work, tokens, packed=packed), meeting, padded, blocks

    def _bytes_of(self, rows: Sequence[int], *, meets: bool) -> int:
        """Estimates what a slice or a group holds by its own tokens and actions, not the step's most of each."""
        work, packed = self.step.work, self.plan.pack_prompts
        if work.sources:
            row_tokens, action_tokens, sources = (
                tuple(each[row] for row in rows) for each in (work.row_tokens, work.action_tokens, work.sources)
            )
        else:
            action_tokens, sources = (sum(work.action_tokens[row] for row in rows),), ()
            row_tokens = (max(slice_tokens(work, rows, packed=packed), *action_tokens),)
        alone = UpdateWork(row_tokens, action_tokens, work.geometry, gradients_aside=int(meets), sources=sources)
        return sum(update_parts(alone, self.plan).values())


def planned(setup: TrainingSetup, steps: Sequence[Step]) -> list[PlannedStep]:
    """Asks the policy for the plan of each step."""
    state = setup.memory_state()
    return [PlannedStep(step, setup.memory_policy.before_update(step.work, state)) for step in steps]


def largest_slices(work: UpdateWork, budget: int, *, packed: bool) -> tuple[int, ...]:
    """Measures the largest slices of some rows."""
    return measure_sources(work, budget)[:-1] if work.sources else measure_slices(work, budget, packed=packed)[:2]


def steps_of(setup: TrainingSetup, trajectory: Trajectory, rollout: int | None = None) -> list[Step]:
    """Returns optimizer steps that differ in their shape: a rollout's own, or those of the run's first rollouts."""
    config, learner, cursors = setup.config, Learner(setup), list(islice(_cursors(setup, rollout), _STEPS))
    if config.step_rows >= config.rollout_rows or setup.adapter.time_separable:
        rows: Sequence[int] = range(0, config.step_rows, config.world_size)
        return [Step(rows, learner.work(trajectory, rows), len(cursors))]
    found: dict[object, Step] = {}
    # How many rows of a step share a prompt is chance where they are shuffled, but follows from the run's seed.
    for cursor in cursors:
        rows = _rows(setup, cursor)[:: config.world_size]
        work = learner.work(trajectory, rows)
        owners = Counter(zip(work.prompts or work.sources or work.row_tokens, work.row_tokens, strict=True))
        shape = tuple(sorted((tokens, count) for (_, tokens), count in owners.items()))
        alike = found.get(shape, Step(rows, work, 0))
        found[shape] = alike._replace(times=alike.times + 1)
    return list(found.values())


def later_samples(setup: TrainingSetup, rollout: int | None = None) -> list[list[int]]:
    """Returns the rows of rollouts that are not learnt from in their first step, but after weights have moved."""
    config = setup.config
    if config.updates_per_epoch < 2:
        return []
    cursors = (cursor for cursor in islice(_cursors(setup, rollout), _STEPS) if cursor.starts_rollout)
    firsts = (set(_rows(setup, cursor)) for cursor in cursors)
    return [[row for row in range(config.rollout_rows) if row not in rows][:: config.world_size] for rows in firsts]


class WideSlice(NamedTuple):
    """Rows of a slice, and whether they are packed, which all rows that are scored together decide."""

    rows: list[int]
    packed: bool


def widest_slices(
    setup: TrainingSetup, trajectory: Trajectory, sets: Sequence[Sequence[int]], budget: int
) -> list[WideSlice]:
    """Cuts rows that are scored together, and gives the slices that may hold most."""
    if setup.adapter.time_separable:
        return [WideSlice(max(map(list, sets), key=len), packed=False)]
    slices: list[WideSlice] = []
    for rows in sets:
        work = setup.adapter.work(trajectory, rows)
        packed = packing_saves(work)
        slices += [WideSlice([rows[place] for place in part], packed) for part in cut_work(work, budget, packed=packed)]
    whole = setup.adapter.work(trajectory, range(len(trajectory)))
    return [slices[index] for index in widest(whole, [one.rows for one in slices], packed=packing_saves(whole))]


def tried_places(work: UpdateWork, plan: UpdatePlan, micro_batches: int) -> list[int]:
    """Chooses the rows of a step that are run in place of all: those of the micro-batches that may hold most."""
    if work.geometry.unit is not None:
        return list(range(len(work.row_tokens)))
    groups, chosen = _cut(work, plan), set(_telling(work, plan))
    if micro_batches > 1 and work.sources:
        chosen.add(0)
    elif micro_batches > 1:
        # The first leaves the gradients that others meet; what is larger than all before finds too little cached.
        sizes = [slice_tokens(work, rows, packed=plan.pack_prompts) for rows in groups]
        chosen |= {number for number, size in enumerate(sizes) if size > max(sizes[:number], default=0)}
    if plan.pack_prompts and work.prompts and not work.sources:
        beside = companions(cut_trees(work, plan.micro_batch_tokens))  # without which nothing is run for both
        chosen |= {beside[number] for number in chosen if number in beside}
    if not work.sources:
        others = [number for number in range(len(groups)) if number not in chosen]
        chosen |= set(others[: max(0, micro_batches - len(chosen))])
    return [place for number in sorted(chosen) for place in groups[number]]


def _cut(work: UpdateWork, plan: UpdatePlan) -> list[list[int]]:
    """Cuts a step into micro-batches, or into groups of these whose prompts an encoder reads together."""
    groups = cut_groups(work, plan.micro_batch_tokens, packed=plan.pack_prompts)
    return [[place for part in group for place in part] for group in groups] if work.sources else groups[0]


def _telling(work: UpdateWork, plan: UpdatePlan) -> list[int]:
    """Numbers the micro-batches or groups that may hold most; where the first is one, those that meet gradients too."""
    parts = _cut(work, plan)
    if not work.sources:
        return telling(work, parts, packed=plan.pack_prompts)
    read = [sorted({work.sources.index(work.sources[row]) for row in rows}) for rows in parts]
    groups = cut_groups(work, plan.micro_batch_tokens, packed=False)
    held_by = [number for number, group in enumerate(groups) for _ in group]
    found = {held_by[index] for index in widest(work, [part for group in groups for part in group])}
    found |= set(widest(work, read))
    return sorted({*found, len(parts) - 1} if 0 in found else found)


def _rows(setup: TrainingSetup, cursor: Cursor) -> list[int]:
    """Returns the rows of a step as the run will draw them."""
    with true_numbers():
        return rows_of_step(cursor, setup.config.rollout_rows, setup.config.step_rows, setup.config.order_seed)


def _cursors(setup: TrainingSetup, rollout: int | None) -> Iterator[Cursor]:
    """Yields the steps of a rollout as far as the run goes, or of any first rollouts, in order."""
    config = setup.config
    each = list(product(range(config.num_iterations), range(config.updates_per_epoch)))
    for number in range(_STEPS) if rollout is None else [rollout]:
        begun = number * len(each)
        # Where epochs may be cut short, a rollout may come at any step.
        known = rollout is not None and config.kl_stop is None
        for epoch, step in each[: max(1, setup.planned_steps - begun)] if known else each:
            yield Cursor(number, epoch, step)
