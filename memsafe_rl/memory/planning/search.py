"""Finds plans: what a plan is predicted to hold, how much it may hold, and the way down after a failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from memsafe_rl.memory.planning.costs import BAND
from memsafe_rl.memory.planning.estimator import Parts, rollout_parts, score_parts, update_parts
from memsafe_rl.memory.planning.fallbacks import LOSSLESS, Fallback, Plan, Work, fallbacks_named, reachable, walk
from memsafe_rl.types import MemoryFailure, MemoryState, Phase, RolloutPlan, RolloutWork, UpdatePlan, UpdateWork

_SHARE = 0.8
"""Share of what is free that an estimate may fill while it has not been compared with a measurement."""
_MEASURED_SHARE = 0.9
"""The same once it has been."""
_FLOOR_SLACK = 0.05
"""Plans whose estimate exceeds the leanest one's by this share count as leanest, so that speed decides among them."""
_UNTROUBLED_STEPS = 8
"""Steps without a failure before a plan as large as the failed one is tried again; doubled by each repeated failure."""
_STRIDE = 0.9
"""A plan after a failure holds at most this share of the failed one's estimate, where there is such a plan."""


def extra_bytes(
    phase: Phase, work: Work, plan: RolloutPlan | UpdatePlan, tile: int = UpdatePlan.logprob_tile
) -> int | None:
    """Estimates what a phase adds under a plan to what is held before it."""
    if phase is Phase.REWARD and isinstance(plan, RolloutPlan):
        return plan.reward_rows
    parts = _parts(phase, work, plan, tile)
    return None if parts is None else sum(parts.values())


def with_prediction(plan: Plan, work: Work, memory: MemoryState) -> Plan:
    """Writes into a plan the peaks it is predicted to reach."""
    phases = (Phase.UPDATE,) if isinstance(plan, UpdatePlan) else (Phase.ROLLOUT, Phase.SCORE)
    predicted: dict[str, int] = {}
    for phase in phases:
        parts = _parts(phase, work, plan, _tile(memory)) or {}
        factor = _correction(phase, memory)
        scaled = {component: int(factor * size) for component, size in parts.items()}
        predicted[phase.value] = memory.live_bytes + _moved_bytes(plan, memory) + sum(scaled.values())
        predicted |= {f"{phase}/{component}": size for component, size in scaled.items() if size}
    return replace(plan, predicted_bytes=predicted)


class Room:
    """How much a phase may hold now, and whether a plan stays below it.

    A failure puts a ceiling on the estimates of later plans: strictly below the leanest plan of the last step in which
    one failed. After 8 untroubled steps that plan may come again, after 8 more twice its estimate, and so on; each
    further step that failed doubles the wait.
    """

    def __init__(self, phase: Phase, work: RolloutWork | UpdateWork, memory: MemoryState) -> None:
        self.work = work
        self._phase, self._memory = phase, memory
        self._free = memory.budget_bytes - memory.live_bytes
        share = _MEASURED_SHARE if phase.value in memory.corrections else _SHARE
        self._factor = 0.0 if phase is Phase.REWARD else _correction(phase, memory) / share
        self._tile = _tile(memory)
        self._ceiling = _ceiling(phase, work, memory)

    def extra_bytes(self, plan: Plan) -> int:
        """Estimates what the phase adds under a plan, before any correction."""
        return extra_bytes(self._phase, self.work, plan, self._tile) or 0

    def demand(self, plan: Plan, extra: int | None = None) -> float:
        """Bytes that must be free for a plan: its corrected estimate with a margin, and the state it moves."""
        return self._factor * (self.extra_bytes(plan) if extra is None else extra) + _moved_bytes(plan, self._memory)

    def fits(self, plan: Plan) -> bool:
        """Whether a plan stays within what the budget leaves and below what failed."""
        extra = self.extra_bytes(plan)
        return extra <= self._ceiling and self.demand(plan, extra) <= self._free

    def fitting(self, plans: Sequence[Plan]) -> list[tuple[Plan, int]]:
        """Gives the plans that fit, with their estimates; where little or none does, those about as lean as can be."""
        sized = [(plan, extra, self.demand(plan, extra)) for plan in plans for extra in (self.extra_bytes(plan),)]
        _, least_extra, least = min(sized, key=lambda entry: entry[2])
        nearly = least + _FLOOR_SLACK * self._factor * least_extra
        lean = [(plan, extra) for plan, extra, demand in sized if demand <= max(nearly, self._free)]
        below = [(plan, extra) for plan, extra in lean if extra <= self._ceiling]
        return below or [(plan, extra) for plan, extra, demand in sized if demand <= nearly]


def first_that_fits(start: Plan, fallbacks: Sequence[Fallback], room: Room) -> Plan:
    """Goes down a ladder to the first plan that fits."""
    if room.fits(start):
        return start
    plans: list[Plan] = [start]
    plans.extend(walk(start, room.work, fallbacks))
    return room.fitting(plans)[0][0]


def fastest_that_fits(start: Plan, fallbacks: Sequence[Fallback], room: Room, time: Callable[[Plan], float]) -> Plan:
    """Takes the leanest plan within a tenth of the fastest if it fits, else the fastest that fits."""
    quick = reachable(start, room.work, fallbacks, lambda plan: time(plan) <= BAND)
    lean = min(quick, key=lambda plan: (room.extra_bytes(plan), time(plan)))
    if room.fits(lean):
        return lean
    fitting = room.fitting(list(reachable(start, room.work, fallbacks)))
    return min(fitting, key=lambda entry: (time(entry[0]), entry[1]))[0]


def next_plan(plan: Plan, failure: MemoryFailure, fallbacks: Sequence[Fallback]) -> Plan | None:
    """Goes down a ladder after a failure: as many fallbacks as the estimate asks for, at least one.

    The next plan is the first whose estimate is a tenth below the failed one's and within what was free. Where no
    fallback saves that much, the bottom of the ladder is the last thing to try.
    """
    lower = [replace(step, predicted_bytes={}) for step in walk(plan, failure.work, fallbacks)]
    if not lower:
        return None
    estimate = extra_bytes(failure.phase, failure.work, plan)
    if estimate is None or failure.phase is Phase.REWARD:
        return lower[0]
    target = _STRIDE * estimate
    free = failure.budget_bytes - failure.live_bytes
    if failure.budget_bytes and free > 0:
        target = min(target, free)
    return next((step for step in lower if (extra_bytes(failure.phase, failure.work, step) or 0) <= target), lower[-1])


def floor(work: RolloutWork | UpdateWork, memory: MemoryState) -> dict[str, int]:
    """Says what the leanest lossless plan is predicted to hold, and who holds it."""
    if isinstance(work, UpdateWork):
        return _floor(UpdatePlan(), Phase.UPDATE, work, memory)
    return _floor(RolloutPlan(), Phase.ROLLOUT, work, memory)


def _floor(start: Plan, phase: Phase, work: RolloutWork | UpdateWork, memory: MemoryState) -> dict[str, int]:
    room = Room(phase, work, memory)
    leanest = min(reachable(start, work, fallbacks_named(LOSSLESS, phase)), key=lambda plan: room.demand(plan))
    predicted = with_prediction(leanest, work, memory).predicted_bytes
    found = {name: size for name, size in predicted.items() if name.split("/")[0] == phase}
    return {"held": memory.live_bytes + _moved_bytes(leanest, memory), **found}


def _parts(phase: Phase, work: Work, plan: RolloutPlan | UpdatePlan, tile: int) -> Parts | None:
    if isinstance(plan, UpdatePlan):
        return update_parts(work, plan) if isinstance(work, UpdateWork) else None
    if phase is Phase.SCORE:
        return None if work is None else score_parts(work, plan, tile)
    return rollout_parts(work, plan) if isinstance(work, RolloutWork) else None


def _moved_bytes(plan: RolloutPlan | UpdatePlan, memory: MemoryState) -> int:
    """Bytes of optimizer state that a plan brings to the device, or (below 0) takes away."""
    return memory.parked_bytes - memory.optimizer_bytes if plan.park_optimizer else memory.parked_bytes


def _correction(phase: Phase, memory: MemoryState) -> float:
    return memory.corrections.get(phase.value, 1.0)


def _tile(memory: MemoryState) -> int:
    """The tile that scoring takes over from the last update plan."""
    return (memory.last_update_plan or UpdatePlan()).logprob_tile


def _ceiling(phase: Phase, work: Work, memory: MemoryState) -> float:
    alike = {Phase.ROLLOUT, Phase.EVALUATE} if phase is Phase.ROLLOUT else {phase}
    failures = [failure for failure in memory.failures if failure.phase in alike]
    if not failures:
        return float("inf")
    last = max(failure.step for failure in failures)
    wait = _UNTROUBLED_STEPS * 2 ** (len({failure.step for failure in failures}) - 1)
    estimates = [
        extra_bytes(failure.phase, failure.work or work, failure.plan, _tile(memory))
        for failure in failures
        if failure.step == last and failure.plan is not None
    ]
    known = [estimate for estimate in estimates if estimate is not None]
    if not known:
        return float("inf")
    waits = max(0, memory.step - last - 1) // wait
    return min(known) - 1 if waits == 0 else float(min(known) * 2 ** min(waits - 1, 64))
