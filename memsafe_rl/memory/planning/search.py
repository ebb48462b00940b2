"""Fallbacks, which make a plan leaner in the field whose name they bear; and the search among them.

Steps are pure: plan and work in, a leaner plan out, or None at the bottom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice, takewhile
from typing import Any, TypeVar

from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.planning.estimator import (
    BAND,
    Parts,
    kept_bytes,
    read_tokens,
    rollout_parts,
    score_parts,
    update_parts,
    wave_rows,
)
from memsafe_rl.micro_batches import measure_slices
from memsafe_rl.types import (
    Component,
    MemoryFailure,
    MemoryState,
    Phase,
    RolloutPlan,
    RolloutWork,
    UpdatePlan,
    UpdateWork,
)

Plan = TypeVar("Plan", RolloutPlan, UpdatePlan)
Work = RolloutWork | UpdateWork | None
"""The work that is cut; None where its shape is not known."""
Step = Callable[[Any, Any], Any]

SAMPLING = frozenset({Phase.ROLLOUT, Phase.EVALUATE})
EVERYWHERE = frozenset({Phase.ROLLOUT, Phase.REWARD, Phase.SCORE, Phase.EVALUATE, Phase.UPDATE})

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


@dataclass(frozen=True)
class Fallback:
    """One lossless way to hold less: tokens and gradients stay the same up to floating-point order."""

    name: str  # the field of the plan that it changes
    about: str  # what it changes and what it saves, in one sentence
    phases: frozenset[Phase]  # where it helps
    step: Step  # gives a leaner plan for (plan, work), or None at the bottom
    # a shorter one where a plan is chosen: three quarters of a micro-batch may fit where half overshoots. After a
    # failure, when nobody knows how far the estimate is off, halving finds a fit sooner.
    fine_step: Step | None = None


def _set(name: str, value: Any) -> Step:
    """Returns the step that sets a field, from which none leads further down."""

    def step(plan: Any, work: Work) -> Any:  # noqa: ARG001
        return None if getattr(plan, name) == value else replace(plan, **{name: value})

    return step


def _halved(plan: Plan, name: str, size: int) -> Plan | None:
    """Returns a plan half of a size, down to one."""
    half: Any = {name: size // 2}
    return replace(plan, **half) if size > 1 else None


def _reduced_at_once(plan: UpdatePlan, work: Work) -> UpdatePlan | None:
    holds_whole = not plan.reduce_each and isinstance(work, UpdateWork) and work.whole_gradient_bytes
    return replace(plan, reduce_each=True) if holds_whole else None


def _smaller_tile(plan: UpdatePlan, work: Work) -> UpdatePlan | None:
    most = plan.logprob_tile
    if isinstance(work, UpdateWork):
        if work.geometry.unit is not None:
            return None  # there are no logits
        most = min(most, measure_slices(work, plan.micro_batch_tokens, packed=plan.pack_prompts).actions)
    return _halved(plan, "logprob_tile", most)


def _smaller_micro_batch(plan: UpdatePlan, work: Work, share: float = 0.5) -> UpdatePlan | None:
    least, tokens = 1, plan.micro_batch_tokens
    if isinstance(work, UpdateWork) and work.row_tokens:
        least = work.least_tokens
        tokens = min(tokens, max(work.row_tokens) * len(work.row_tokens))
        if plan.pack_prompts and work.prompts:
            tokens = min(tokens, max(least, work.packed_tokens))
    return replace(plan, micro_batch_tokens=max(least, int(share * tokens))) if tokens > least else None


def _smaller_waves(plan: RolloutPlan, work: Work) -> RolloutPlan | None:
    rows = wave_rows(work, plan)[0] if isinstance(work, RolloutWork) else plan.rows_in_flight
    return _halved(plan, "rows_in_flight", rows)


def _keep_half(plan: RolloutPlan, work: RolloutWork) -> RolloutPlan | None:
    if not plan.kept_kv_bytes:
        return None
    alone = replace(plan, kept_kv_bytes=0)
    half = kept_bytes(work, plan) // 2
    # Less than the rows in flight hold by themselves would keep next to nothing.
    return replace(plan, kept_kv_bytes=half) if half > rollout_parts(work, alone)[Component.KV_CACHE] else alone


def _fewer_prompts(plan: RolloutPlan, work: Work) -> RolloutPlan | None:
    if not isinstance(work, RolloutWork):
        return _halved(plan, "prefill_tokens", plan.prefill_tokens)
    if work.geometry.unit is not None:
        return None  # its prompts are no tokens
    longest = max(work.prompt_tokens, default=1)
    prompts = -(-read_tokens(work, plan) // longest)
    if prompts > 1:
        return replace(plan, prefill_tokens=prompts // 2 * longest)
    return _halved(plan, "prefill_tokens", min(plan.prefill_tokens, longest)) if work.geometry.shares_prompts else None


def _fewer_scored(plan: RolloutPlan, work: Work) -> RolloutPlan | None:
    most = 0  # tokens, or pairs, of all rows as long as the longest
    if isinstance(work, RolloutWork):
        prompt = 0 if work.geometry.unit is not None else max(work.prompt_tokens, default=0)
        most = work.rows * (prompt + work.max_new_tokens)
    elif work is not None:
        most = len(work.row_tokens) * max(work.row_tokens, default=0)
    return _halved(plan, "score_tokens", min(plan.score_tokens, most or plan.score_tokens))


def _fewer_rewarded(plan: RolloutPlan, work: Work) -> RolloutPlan | None:
    rows = min(plan.reward_rows, work.rows) if isinstance(work, RolloutWork) else plan.reward_rows
    return _halved(plan, "reward_rows", rows)


def _fewer_resident(plan: Any, work: Work) -> Any:
    sizes = () if work is None else work.geometry.frozen_block_bytes
    staying = len(sizes) if plan.resident_blocks is None else min(plan.resident_blocks, len(sizes))
    others = 0 if work is None else work.geometry.model_blocks
    fewer = others if staying > others else staying // 2  # a reference leaves as a whole, and first
    # what comes and goes cannot be traced
    return replace(plan, resident_blocks=fewer, compile=None) if staying and any(sizes) else None


RESIDENT = Fallback(
    "resident_blocks",
    "frozen weights of blocks wait in host memory and come while their block runs: saves all but two blocks of them, "
    "costs a transfer a pass; bitwise",
    EVERYWHERE,
    _fewer_resident,
)

FALLBACKS: tuple[Fallback, ...] = (
    Fallback(
        "kept_kv_bytes",
        "caches of episodes are dropped between turns: saves those of all rows but the ones in flight, costs reading "
        "each turn's context again; same tokens",
        SAMPLING,
        _set("kept_kv_bytes", 0),
        _keep_half,
    ),
    Fallback(
        "reduce_each",
        "ranks add up their gradients after each micro-batch: saves those of the other ranks' parts, costs traffic; up "
        "to rounding",
        frozenset({Phase.UPDATE}),
        _reduced_at_once,
    ),
    Fallback(
        "checkpointing",
        "each block runs again in the backward pass: saves its activations, costs a third; bitwise",
        frozenset({Phase.UPDATE}),
        _set("checkpointing", True),
    ),
    Fallback(
        "offload_activations",
        "saved activations wait in host memory: saves nearly all of them, costs transfers; bitwise",
        frozenset({Phase.UPDATE}),
        _set("offload_activations", True),
    ),
    Fallback(
        "logprob_tile",
        "fewer logits exist at a time: halves them, costs passes over the head's weights; up to rounding",
        frozenset({Phase.UPDATE}),
        _smaller_tile,
    ),
    Fallback(
        "micro_batch_tokens",
        "fewer rows a forward and backward, down to one: halves activations, costs speed; up to rounding",
        frozenset({Phase.UPDATE}),
        _smaller_micro_batch,
        partial(_smaller_micro_batch, share=0.75),
    ),
    Fallback(
        "trajectory_device",
        "the rollout waits in host memory: saves its few bytes a token; bitwise",
        frozenset({Phase.UPDATE}),
        _set("trajectory_device", "host"),
    ),
    Fallback(
        "park_optimizer",
        "the optimizer state waits in host memory outside the commit: saves all, costs two transfers a step; bitwise",
        EVERYWHERE,
        _set("park_optimizer", True),
    ),
    RESIDENT,
    Fallback(
        "rows_in_flight",
        "fewer sequences are decoded together, down to one: halves caches and logits, costs speed; same tokens",
        SAMPLING,
        _smaller_waves,
    ),
    Fallback(
        "prefill_tokens",
        "fewer prompts are read at a time, then fewer tokens of one, where the cache allows it; same tokens",
        SAMPLING,
        _fewer_prompts,
    ),
    Fallback(
        "score_tokens",
        "fewer tokens are scored at a time; below the longest row, fewer of its logits exist together",
        frozenset({Phase.SCORE}),
        _fewer_scored,
    ),
    Fallback(
        "reward_rows",
        "fewer completions go through a reward model together, down to one",
        frozenset({Phase.REWARD, Phase.EVALUATE}),
        _fewer_rewarded,
    ),
)
"""All fallbacks, in the order in which a failure takes them: what is only kept for later, then what a phase needs."""

LOSSLESS = tuple(fallback.name for fallback in FALLBACKS)
"""Their names."""
LOSSY = ("max_completion_length", "num_iterations", "num_generations", "cache_implementation", "optim")
"""Settings whose change changes the task: never a plan's to take, only the trainer's (`config.degradation`), and only
when `allow_lossy` names it."""


def fallbacks_named(names: Sequence[str], phase: Phase) -> tuple[Fallback, ...]:
    """Picks the fallbacks of a phase, in the order of the names."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigError(f"fallbacks is {names!r}; give a tuple of names, such as ({LOSSLESS[0]!r},).")
    for name in names:
        if name in LOSSY:
            raise ConfigError(f"Fallback {name!r} changes the task, which no plan can; list it in allow_lossy instead.")
        if name not in LOSSLESS:
            raise ConfigError(f"There is no fallback {name!r}; write some of {', '.join(LOSSLESS)}.")
    found = {fallback.name: fallback for fallback in FALLBACKS if phase in fallback.phases}
    return tuple(found[name] for name in names if name in found)


def walk(plan: Plan, work: Work, fallbacks: Sequence[Fallback]) -> Iterator[Plan]:
    """Goes down a ladder step by step, each fallback to its bottom before the next."""
    for fallback in fallbacks:
        for plan in _down(fallback, plan, work):  # noqa: B020
            yield plan


def reachable(
    plan: Plan, work: Work, fallbacks: Sequence[Fallback], time: Callable[[Plan], float] | None = None
) -> list[Plan]:
    """Returns every plan that some of the fallbacks make of one, each gone down as far as it likes, or as is fast."""
    plans = [plan]
    for fallback in fallbacks:
        further: list[Plan] = []
        for known in plans:
            lower: Iterator[Plan] = _down(fallback, known, work)
            further.append(known)
            further.extend(lower if time is None else takewhile(lambda one: time(one) <= BAND, lower))
        plans = further
    return plans


def leaner(first: Plan, second: Plan) -> Plan:
    """Takes of each field of two plans the value that holds less."""
    picked: dict[str, Any] = {}
    for name in (entry.name for entry in fields(first) if entry.name in LOSSLESS):
        mine, other = getattr(first, name), getattr(second, name)
        if isinstance(mine, bool):
            picked[name] = mine or other
        elif isinstance(mine, str):
            picked[name] = "host" if "host" in (mine, other) else mine
        else:
            picked[name] = min((value for value in (mine, other) if value is not None), default=None)
    return replace(first, **picked, predicted_bytes={})


def _down(fallback: Fallback, plan: Plan, work: Work) -> Iterator[Plan]:
    """Takes one fallback again and again, down to its bottom."""
    lower: Plan | None = fallback.step(plan, work)
    while lower is not None:
        yield lower
        lower = fallback.step(lower, work)


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
        predicted[phase.value] = memory.live_bytes + _moved_bytes(plan, work, memory) + sum(scaled.values())
        predicted |= {f"{phase}/{component}": size for component, size in scaled.items() if size}
    return replace(plan, predicted_bytes=predicted)


class Room:
    """How much a phase may hold now, and whether a plan stays below it and below what failed lately."""

    def __init__(self, phase: Phase, work: RolloutWork | UpdateWork, memory: MemoryState) -> None:
        self.work = work
        self._phase, self._memory = phase, memory
        self._free = memory.budget_bytes - memory.live_bytes - memory.stranded_bytes.get(phase.value, 0)
        share = _MEASURED_SHARE if phase.value in memory.corrections else _SHARE
        self._factor = 0.0 if phase is Phase.REWARD else _correction(phase, memory) / share
        self._tile = _tile(memory)
        self._ceiling = _ceiling(phase, work, memory)

    def extra_bytes(self, plan: Plan) -> int:
        """Estimates what the phase adds under a plan, before any correction."""
        return extra_bytes(self._phase, self.work, plan, self._tile) or 0

    def demand(self, plan: Plan, extra: int) -> float:
        """Bytes that must be free for a plan: its corrected estimate with a margin, and the state it moves."""
        return self._factor * extra + _moved_bytes(plan, self.work, self._memory)

    def fits(self, plan: Plan) -> bool:
        """Whether a plan stays within what the budget leaves and below what failed."""
        extra = self.extra_bytes(plan)
        return extra <= self._ceiling and self.demand(plan, extra) <= self._free

    def fitting(self, plans: Sequence[Plan]) -> list[tuple[Plan, int]]:
        """Returns the plans that fit, with their estimates; where few or none do, about the leanest ones."""
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
    lean = min(reachable(start, room.work, fallbacks, time), key=lambda plan: (room.extra_bytes(plan), time(plan)))
    if room.fits(lean):
        return lean
    return min(room.fitting(reachable(start, room.work, fallbacks)), key=lambda entry: (time(entry[0]), entry[1]))[0]


def fastest_with_weights_away(
    start: Plan, fallbacks: Sequence[Fallback], room: Room, time: Callable[[Plan], float]
) -> Plan:
    """Takes the fastest plan that fits, if need be with ever more weights on the host, a reference's even for speed."""
    plan, copied = fastest_that_fits(start, fallbacks, room, time), room.work.geometry.reference_blocks
    fits = room.fits(plan)
    if fits and (not copied or start.resident_blocks is not None or time(plan) <= BAND):
        return plan
    away = islice(_down(RESIDENT, start, room.work), 1 if fits else None)
    plans: list[Plan] = [plan]
    plans.extend(fastest_that_fits(lower, fallbacks, room, time) for lower in away)
    return min((plan for plan in plans if room.fits(plan)), key=time, default=plans[-1])


def next_plan(plan: Plan, failure: MemoryFailure, fallbacks: Sequence[Fallback]) -> Plan | None:
    """Goes down a ladder to a plan a tenth below the failed estimate and within what was free, else to the last."""
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
    held = frozen_bytes(failure.work, plan.resident_blocks)
    for step in lower:
        sent = held - frozen_bytes(failure.work, step.resident_blocks)  # to the host
        if (extra_bytes(failure.phase, failure.work, step) or 0) - sent <= target:
            return step
    return lower[-1]


def _parts(phase: Phase, work: Work, plan: RolloutPlan | UpdatePlan, tile: int) -> Parts | None:
    if isinstance(plan, UpdatePlan):
        return update_parts(work, plan) if isinstance(work, UpdateWork) else None
    if phase is Phase.SCORE:
        return None if work is None else score_parts(work, plan, tile)
    return rollout_parts(work, plan) if isinstance(work, RolloutWork) else None


def _moved_bytes(plan: RolloutPlan | UpdatePlan, work: Work, memory: MemoryState) -> int:
    """Bytes of optimizer state and frozen weights that a plan brings to the device, or (below 0) takes away."""
    state = memory.parked_bytes - memory.optimizer_bytes if plan.park_optimizer else memory.parked_bytes
    return state + frozen_bytes(work, plan.resident_blocks) - frozen_bytes(work, memory.resident_blocks, running=False)


def frozen_bytes(work: Work, resident: int | None, *, running: bool = True) -> int:
    """Counts the frozen weights of blocks on the device; while blocks run, those of two that wait on the host too."""
    scores = isinstance(work, RolloutWork)
    stay, passing = (0, 0) if work is None else work.geometry.frozen_bytes(resident, scores=scores)
    return stay + passing if running else stay


def _correction(phase: Phase, memory: MemoryState) -> float:
    return memory.corrections.get(phase.value, 1.0)


def _tile(memory: MemoryState) -> int:
    """The tile that scoring takes over from the last update plan."""
    return (memory.last_update_plan or UpdatePlan()).logprob_tile


def _ceiling(phase: Phase, work: Work, memory: MemoryState) -> float:
    """Returns what a plan may be estimated to take: less than what failed, as long as that is known to fail again."""
    alike = {Phase.ROLLOUT, Phase.EVALUATE} if phase is Phase.ROLLOUT else {phase}
    failures = [failure for failure in memory.failures if failure.phase in alike]

    def least(failed: Sequence[MemoryFailure]) -> float:
        """What the leanest of some plans that failed was estimated to take."""
        estimates = (
            extra_bytes(one.phase, one.work or work, one.plan, _tile(memory))
            if one.plan is not None and one.estimated_bytes is None
            else one.estimated_bytes
            for one in failed
        )
        return min((estimate for estimate in estimates if estimate is not None), default=float("inf"))

    foreseen, own = least([one for one in failures if one.foreseen]), [one for one in failures if not one.foreseen]
    if not own:
        return foreseen - 1  # which fails all run long
    steps = {failure.step for failure in own}
    known = least([failure for failure in own if failure.step == max(steps)])
    # It may have been chance: after some untroubled steps as much is tried again, after as many more twice as much.
    waits = max(0, memory.step - max(steps) - 1) // (_UNTROUBLED_STEPS * 2 ** (len(steps) - 1))
    return min(foreseen - 1, known - 1 if waits == 0 else known * 2 ** min(waits - 1, 64))
