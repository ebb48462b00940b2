"""Which rollouts and optimizer steps of a run are tried: its own, as far as its prompts and their order are known.

Plans follow from the lengths of prompts, and shorter ones may get a plan under which more is held. What a run will
hold is thus only found among its own rollouts, not in one of the longest prompts there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest

from memsafe_rl.data.prompts import prompt_of
from memsafe_rl.micro_batches import packing_saves
from memsafe_rl.preflight.fake.device import true_numbers
from memsafe_rl.preflight.worst_case import Longest, Probe
from memsafe_rl.preflight.worst_rows import PlannedStep, Step, largest_slices, planned, steps_of
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
        """Returns a rollout of these rows."""
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
    """Returns a run's rollouts, or such as may come; the longest prompts stand for those that nobody knows."""
    config, source = setup.config, setup.source
    if not longest.longest_prompts or source.prompts_per_epoch is None or setup.environments is not None:
        return [longest]
    moves_on = config.dynamic_sampling or config.partial_rollout_tokens is not None
    count, most = config.prompts_per_rollout, setup.models.reader.limit
    per_rollout = 1 if config.kl_stop is not None else config.steps_per_rollout
    wanted = -(-source.prompts_per_epoch // count) if moves_on else -(-setup.planned_steps // per_rollout)
    known = max(1, _PROMPTS // count)
    with true_numbers():
        taken = [source.take(place * count, count) for place in range(min(wanted, known))]
        read = [setup.models.reader.ids([prompt_of(example) for example in examples]) for examples in taken]
    lengths = {place: tuple(min(len(ids), most or len(ids)) for ids in rows) for place, rows in enumerate(read)}
    kept = {0}.union(
        *(nlargest(_ROLLOUTS // 2, lengths, key=lambda place: size(lengths[place])) for size in (max, sum))
    )
    if moves_on:  # any prompts can meet: the longest may be one among short ones, or none of them long
        ordered = sorted(size for sizes in lengths.values() for size in sizes)
        mixed = {(*ordered[: count - long], *ordered[len(ordered) - long :]) for long in (0, 1, -(-count // 2))}
        met = sorted(mixed | {lengths[place] for place in kept})
        return [longest, *(replace(longest.of_rollout(0, sizes), rollout=None) for sizes in met)]
    found = [longest.of_rollout(place, lengths[place]) for place in sorted(kept)]
    return found if wanted <= known else [*found, longest]


def candidates(setup: TrainingSetup, longest: Longest) -> list[Candidate]:
    """Returns the rollouts of a run with their optimizer steps."""
    return [Candidate.of(setup, one) for one in own_rollouts(setup, longest)]


def worst_trials(setup: TrainingSetup, among: Sequence[Candidate], *, grows: bool) -> list[Trial]:
    """Chooses the rollouts and steps that the policy expects to hold most, the largest step last."""
    planned = [_Planned.of(setup, one) for one in among]
    if not grows:
        return _worst_of(planned, planned)
    first, after = planned[0].parted(setup)  # the first step alone: the optimizer makes its state in it
    others = [one for one in (after, *planned[1:]) if one.steps]
    drawn = [one for one in others if one is not after or one.longest.rollout is None]
    return [*_worst_of([first], [first]), *(_worst_of(drawn, others) if others else [])]


def _worst_of(drawn: Sequence[_Planned], learnt: Sequence[_Planned]) -> list[Trial]:
    """Chooses what holds most among rollouts that are drawn and scored, and among those that are learnt from."""
    widest = [one for phase in (Phase.ROLLOUT, Phase.SCORE) for one in nlargest(1, drawn, key=_sizes_in(phase))]
    steps = [(one, step) for one in learnt for step in one.steps]
    sizes = [step.sizes for _, step in steps]
    ranks = [[(one[kind], *one) for one in sizes] for kind in range(len(sizes[0]))]  # alike in one, all decide
    chosen = [steps[rank.index(max(rank))] for rank in ranks]
    # The first one is scored too: its tile is that of no plan, so that another may hold more in larger ones.
    later = [one for one in drawn[1:] if one.largest.plan.logprob_tile > UpdatePlan.logprob_tile]
    later = nlargest(1, later, key=_sizes_in(Phase.SCORE))
    scored = [*drawn[:1], *widest, *later]
    owners = {id(owner) for owner, _ in chosen}
    # What is only scored in larger tiles comes after all others: it finds what they left cached too small.
    among = {id(one): one for one in (*drawn, *learnt)}.values()
    return [
        Trial(
            one.longest,
            draws=one in widest,
            scores=one in scored,
            steps=tuple({id(step): step.step for owner, step in chosen if owner is one}.values()),
            plans=(one.plan, one.largest.plan),
        )
        for one in sorted(among, key=lambda one: (one in later and id(one) not in owners, one is chosen[0][0]))
        if one in scored or id(one) in owners
    ]


@dataclass(frozen=True)
class _Planned:
    """A rollout, and what the policy would make of it."""

    longest: Longest
    plan: RolloutPlan
    steps: tuple[PlannedStep, ...]
    scored: tuple[int, ...]  # tokens of its largest slices as they are scored

    @classmethod
    def of(cls, setup: TrainingSetup, one: Candidate) -> _Planned:
        plan = served_by(setup.engine, setup.memory_policy.before_rollout(one.work, setup.memory_state()))
        steps = tuple(planned(setup, one.steps))
        scored = largest_slices(one.rows, plan.score_tokens, packed=packing_saves(one.rows))
        return cls(one.longest, plan, steps, scored)

    @property
    def largest(self) -> PlannedStep:
        """The step that the policy expects to hold most."""
        return max(self.steps, key=lambda step: step.sizes)

    def parted(self, setup: TrainingSetup) -> tuple[_Planned, _Planned]:
        """Parts the first step from the others, some of which may be of its shape."""
        others = self.steps if (self.steps[0].step.times > 1 and setup.planned_steps > 1) else self.steps[1:]
        return replace(self, steps=self.steps[:1]), replace(self, steps=others)


def _sizes_in(phase: Phase) -> Callable[[_Planned], tuple[int, ...]]:
    """Compares rollouts by the bytes that the policy expects of a phase, and where these are alike, by tokens."""
    return lambda one: (one.plan.predicted_bytes.get(phase, 0), *one.scored)
