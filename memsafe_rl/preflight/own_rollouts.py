"""Which rollouts and optimizer steps of a run are tried: its own, as far as its prompts and their order are known.

Plans follow from the lengths of prompts, and shorter ones may get a plan under which more is held. What a run will
hold is thus only found among its own rollouts, not in one of the longest prompts there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest

from memsafe_rl.data.prompts import prompt_of
from memsafe_rl.memory.simulated.workspaces import QUERIES
from memsafe_rl.models.language.packing import like_lengths
from memsafe_rl.prefix_tree import depth_first, grow
from memsafe_rl.preflight.fake.device import true_numbers
from memsafe_rl.preflight.worst_case import Longest, Probe
from memsafe_rl.preflight.worst_rows import Step, steps_of
from memsafe_rl.slices import cut_work, measure_slices, measure_sources, packing_saves, slice_tokens
from memsafe_rl.training.collector import served_by
from memsafe_rl.training.setup import TrainingSetup
from memsafe_rl.types import Phase, RolloutPlan, RolloutWork, UpdatePlan, UpdateWork

_PROMPTS = 8192
"""Prompts that are tokenized to know a run's rollouts; of later ones, those of the longest prompts stand for all."""
_ROLLOUTS = 64
"""Rollouts for which plans are asked for; of more, those with the longest prompts and those with the most tokens."""


@dataclass(frozen=True)
class Candidate:
    """A rollout that may be the one that holds most."""

    longest: Longest  # its rows
    work: RolloutWork  # its shape
    rows: UpdateWork  # the shape of its rows, as they are scored
    steps: tuple[Step, ...]  # its optimizer steps

    @classmethod
    def of(cls, setup: TrainingSetup, longest: Longest) -> Candidate:
        """Gives a rollout of these rows."""
        probe = Probe(setup, longest)
        laid = probe.rows()
        rows = setup.adapter.work(laid, range(0, len(laid), setup.config.world_size))
        return cls(longest, probe.work, rows, tuple(steps_of(setup, laid, longest.rollout)))


@dataclass(frozen=True)
class Trial:
    """A rollout that is tried."""

    longest: Longest  # its rows
    draws: bool  # whether drawing it may hold most
    scores: bool  # whether scoring it may
    steps: tuple[Step, ...]  # its optimizer steps that may hold most
    plans: tuple[RolloutPlan, UpdatePlan]  # those of the rollout and of its largest step


def own_rollouts(setup: TrainingSetup, longest: Longest) -> list[Longest]:
    """Gives a run's rollouts in order, and one of the longest prompts where nobody can know them, or all of them."""
    config, source = setup.config, setup.source
    moves_on = config.dynamic_sampling or config.partial_rollout_tokens is not None or setup.environments is not None
    if moves_on or not longest.longest_prompts or source.prompts_per_epoch is None:
        return [longest]
    count, steps = config.prompts_per_rollout, setup.planned_steps
    per_rollout = 1 if config.kl_stop is not None else config.steps_per_rollout
    wanted, known = -(-steps // per_rollout), max(1, _PROMPTS // count)
    with true_numbers():
        taken = [source.take(place * count, count) for place in range(min(wanted, known))]
        read = [setup.models.reader.ids([prompt_of(example) for example in examples]) for examples in taken]
    most = setup.models.reader.limit
    lengths = {place: tuple(min(len(ids), most or len(ids)) for ids in rows) for place, rows in enumerate(read)}
    kept = {0}.union(
        *(nlargest(_ROLLOUTS // 2, lengths, key=lambda place: size(lengths[place])) for size in (max, sum))
    )
    found = [longest.of_rollout(place, lengths[place]) for place in sorted(kept)]
    return found if wanted <= known else [*found, longest]


def candidates(setup: TrainingSetup, longest: Longest) -> list[Candidate]:
    """Gives the rollouts of a run with their optimizer steps."""
    return [Candidate.of(setup, one) for one in own_rollouts(setup, longest)]


def worst_trials(setup: TrainingSetup, among: Sequence[Candidate], *, grows: bool) -> list[Trial]:
    """Chooses the rollouts and steps that the policy expects to hold most, the largest step last.

    The first rollout is among them, for it is scored under no update's plan. Where the run grows, for its optimizer
    makes its state in the first step, that rollout comes first, with that step alone.
    """
    planned = [_Planned.of(setup, one) for one in among]
    if not grows:
        return _worst_of(planned, planned)
    first, after = planned[0].parted(setup)
    others = [one for one in (after, *planned[1:]) if one.steps]
    drawn = [one for one in others if one is not after or one.longest.rollout is None]
    return [*_worst_of([first], [first]), *(_worst_of(drawn, others) if others else [])]


def _worst_of(drawn: Sequence[_Planned], learnt: Sequence[_Planned]) -> list[Trial]:
    """Chooses what holds most among rollouts that are drawn and scored, and among those that are learnt from."""
    widest = [one for phase in (Phase.ROLLOUT, Phase.SCORE) for one in nlargest(1, drawn, key=_sizes_in(phase))]
    steps = [(one, step) for one in learnt for step in one.steps]
    kinds = range(len(steps[0][1].sizes))
    chosen = [found for kind in kinds for found in nlargest(1, steps, key=_size_of(kind))]
    # The first one's tile is that of no plan, so that another may hold more in larger ones.
    later = [one for one in drawn[1:] if one.largest.plan.logprob_tile > UpdatePlan.logprob_tile]
    later = nlargest(1, later, key=_sizes_in(Phase.SCORE))
    scored = [*drawn[:1], *widest, *later]

    def place(one: _Planned) -> tuple[bool, bool]:
        """Puts what is only scored in larger tiles after all others: it finds what they left cached too small."""
        largest = one is chosen[0][0]
        return one in later and not any(owner is one for owner, _ in chosen), largest

    return [
        Trial(
            one.longest,
            draws=one in widest,
            scores=one in scored,
            steps=tuple({id(step): step.step for owner, step in chosen if owner is one}.values()),
            plans=(one.plan, one.largest.plan),
        )
        for one in sorted({id(one): one for one in (*drawn, *learnt)}.values(), key=place)
        if one in scored or any(owner is one for owner, _ in chosen)
    ]


@dataclass(frozen=True)
class _PlannedStep:
    """An optimizer step, and what the policy would make of it."""

    step: Step
    plan: UpdatePlan
    by_blocks: bool  # whether attention's kernels take blocks of queries

    @property
    def sizes(self) -> tuple[int, ...]:
        """What a step may hold most of: bytes as the policy expects them, then sizes of its largest slices."""
        work, tokens, packed = self.step.work, self.plan.micro_batch_tokens, self.plan.pack_prompts
        slices = [] if work.geometry.unit is not None else cut_work(work, tokens, packed=packed)
        # of those that meet the gradients of others
        meeting = max((slice_tokens(work, rows, packed=packed) for rows in slices[1:]), default=0)
        blocks = max((_blocks(work, rows, packed) for rows in slices), default=0) if self.by_blocks else 0
        expected = self.plan.predicted_bytes.get(Phase.UPDATE, 0)
        return expected, *_measured(work, tokens, packed=packed), meeting, blocks


@dataclass(frozen=True)
class _Planned:
    """A rollout, and what the policy would make of it."""

    longest: Longest
    plan: RolloutPlan
    steps: tuple[_PlannedStep, ...]
    scored: tuple[int, ...]  # tokens of its largest slices as they are scored

    @classmethod
    def of(cls, setup: TrainingSetup, one: Candidate) -> _Planned:
        policy, state = setup.memory_policy, setup.memory_state()
        plan = served_by(setup.engine, policy.before_rollout(one.work, state))
        on_cuda = state.device == "cuda"
        steps = (_PlannedStep(step, policy.before_update(step.work, state), on_cuda) for step in one.steps)
        scored = _measured(one.rows, plan.score_tokens, packed=packing_saves(one.rows))
        return cls(one.longest, plan, tuple(steps), scored)

    @property
    def largest(self) -> _PlannedStep:
        """The step that the policy expects to hold most."""
        return max(self.steps, key=lambda step: step.sizes)

    def parted(self, setup: TrainingSetup) -> tuple[_Planned, _Planned]:
        """Parts the first step from the others, which may be of its shape; a rollout that stands for all has such."""
        config, count = setup.config, setup.planned_steps
        if self.longest.rollout is not None:
            count = min(config.steps_per_rollout, count)
        others = self.steps if len(self.steps) < count else self.steps[1:]
        return replace(self, steps=self.steps[:1]), replace(self, steps=others)


def _measured(work: UpdateWork, budget: int, *, packed: bool) -> tuple[int, ...]:
    """Measures the largest slices of some rows."""
    return measure_sources(work, budget)[:-1] if work.sources else measure_slices(work, budget, packed=packed)[:2]


def _blocks(work: UpdateWork, rows: Sequence[int], packed: bool) -> int:
    """Counts the blocks of queries that CUDA's attention takes at a time, at most: each segment has one or more."""
    together = packed and bool(work.prompts)
    lengths = _segments(work, rows) if together else [max(work.row_tokens[row] for row in rows)] * len(rows)
    return max((len(run) * -(-lengths[run[0]] // QUERIES) for run in like_lengths(lengths)), default=0)


def _segments(work: UpdateWork, rows: Sequence[int]) -> list[int]:
    """Gives the tokens of the stretches that attention takes by themselves."""
    lengths = {row: work.row_tokens[row] - 1 for row in rows}  # nothing follows the last one
    roots = grow(depth_first(work.branches, rows), lengths)
    return [node.end - node.start for root in roots for node in root.walk()]


def _sizes_in(phase: Phase) -> Callable[[_Planned], tuple[int, ...]]:
    """Compares rollouts by the bytes that the policy expects of a phase, and where these are alike, by tokens."""
    return lambda one: (one.plan.predicted_bytes.get(phase, 0), *one.scored)


def _size_of(kind: int) -> Callable[[tuple[_Planned, _PlannedStep]], tuple[int, ...]]:
    """Compares steps by one of their sizes, and where this is alike, by all."""
    return lambda one: (one[1].sizes[kind], *one[1].sizes)
