"""Trainers on a simulated device whose allocations are refused at random, and what may not change for it."""

from __future__ import annotations

import gc
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memsafe_rl import SimulatedMemory
from memsafe_rl.accounting import listen, stop_listening
from memsafe_rl.types import Completion
from tests.faults.scenes import Scene
from tests.faults.watched import RunRecord, Standing, StepRecord, Watched, end_to_end

NEVER = 10**12
"""An allocation that is never reached."""

LOGPROB_TOLERANCE = 1e-5
"""Nats; what two orders of the same float32 sums may move a log-prob by."""

GRADIENT_TOLERANCE = 1e-6
"""Global norm of a gradient's difference over its norm, fp32: other cuts add the same terms in another order."""

WEIGHT_TOLERANCE = 1e-4
"""Distance between final weights over the distance travelled: Adam divides by the square root of tiny numbers."""

STEP_TOLERANCE = 1e-2
"""The same for one step alone: Adam's first steps are nearly signs, and the sign of a sum that cancels is rounding."""


class Storm:
    """Refuses allocations in bursts: as soon as a failure was cleared away, the next one is chosen.

    Some of a burst hit the retry, so that it takes a leaner plan to go on. Between bursts there is time to go on: a
    fault that returned for ever, whatever the plan, would be no lack of memory.

    Args:
        device: refuses.
        tracker: tells of failures.
        seed: of the choices.
    """

    def __init__(self, device: SimulatedMemory, tracker: Any, seed: int) -> None:
        self.random = random.Random(seed)
        self.device = device
        self._burst = self._left = 0
        self._near = self._far = NEVER
        record = tracker.record

        def heard(event: str, **details: Any) -> None:
            record(event, **details)
            if event == "failure":
                self._choose_next()

        tracker.record = heard

    @contextmanager
    def over(self, first: int, burst: int, near: int, far: int) -> Iterator[None]:
        """Lets faults fall on what runs inside.

        Args:
            first: the first allocation refused, from 1.
            burst: most faults in a row.
            near: most allocations from one fault of a burst to the next.
            far: least allocations from one burst to the next.
        """
        self._burst, self._near, self._far = burst, near, far
        self._left = self.random.randint(1, burst)
        self.device.fail_after(first)
        try:
            yield
        finally:
            self._near = self._far = NEVER
            self.device.fail_after(NEVER)

    def _choose_next(self) -> None:
        self._left -= 1
        if self._left > 0:
            self.device.fail_after(self.random.randint(1, self._near))
        else:
            self._left = self.random.randint(1, self._burst)
            self.device.fail_after(self.random.randint(self._far, 2 * self._far))


class _PhaseLog:
    """Notes which allocations belong to which phase."""

    def __init__(self, device: SimulatedMemory) -> None:
        self._device = device
        self._start = device.allocations
        self._open: list[str] = ["between"]
        self._since = self._start
        self.spans: list[tuple[str, int, int]] = []

    def enter_phase(self, phase: str) -> None:
        self._close()
        self._open.append(str(phase))

    def leave_phase(self) -> None:
        self._close()
        self._open.pop()

    def _close(self) -> None:
        now = self._device.allocations
        if now > self._since:
            self.spans.append((self._open[-1], self._since - self._start, now - self._start))
        self._since = now


@contextmanager
def phases_of(device: SimulatedMemory) -> Iterator[list[tuple[str, int, int]]]:
    """Notes the allocations of each phase of what runs inside.

    Args:
        device: counts them.

    Yields:
        (phase, first, last) of stretches of allocations, counted from 1; complete at the end.
    """
    log = _PhaseLog(device)
    listen(log)
    try:
        yield log.spans
    finally:
        stop_listening(log)
        log._close()
    log.spans[:] = [(phase, start + 1, stop) for phase, start, stop in log.spans]


def draw_fault(spans: Sequence[tuple[str, int, int]], rng: random.Random) -> int:
    """Draws an allocation: half the time any one, else any one of a phase that was drawn first.

    Most allocations belong to sampling, and few phases would be hit otherwise.

    Args:
        spans: the phases' stretches, from `phases_of`.
        rng: draws.

    Returns:
        The allocation, from 1.
    """
    phases = sorted({phase for phase, _, _ in spans})
    chosen = phases if rng.random() < 0.5 else [rng.choice(phases)]
    allocations = [place for phase, first, last in spans if phase in chosen for place in range(first, last + 1)]
    return rng.choice(allocations)


def spread(spans: Sequence[tuple[str, int, int]], most: int) -> list[int]:
    """Chooses allocations of every phase, evenly spread.

    Args:
        spans: the phases' stretches, from `phases_of`.
        most: how many of each phase.

    Returns:
        The allocations, from 1, in order.
    """
    chosen: list[int] = []
    for phase in sorted({phase for phase, _, _ in spans}):
        places = [place for name, first, last in spans if name == phase for place in range(first, last + 1)]
        chosen += places[:: math.ceil(len(places) / most)]
    return sorted(chosen)


@dataclass
class Findings:
    """What storms over one scene did and found.

    Args:
        faults: allocations refused.
        by_phase: failures by phase.
        fallbacks: leaner plans taken.
        steps: optimizer steps done under faults.
        runs: whole runs done under faults.
        compared_steps: steps compared one by one.
        bitwise_steps: of these, those with the very same gradient, weights and stores.
        gradient: largest relative difference of a step's gradient.
        weights: largest difference of final weights over the distance travelled.
        tokens: sampled under faults.
        excused_ties: rows that differ after a certified tie.
        seconds_lost: wall time of attempts that failed.
        violations: whatever may not be.
    """

    faults: int = 0
    by_phase: Counter[str] = field(default_factory=Counter)
    fallbacks: int = 0
    steps: int = 0
    runs: int = 0
    compared_steps: int = 0
    bitwise_steps: int = 0
    gradient: float = 0.0
    weights: float = 0.0
    tokens: int = 0
    excused_ties: int = 0
    seconds_lost: float = 0.0
    violations: list[str] = field(default_factory=list)

    def require(self, holds: bool, what: str) -> None:
        """Notes what does not hold."""
        if not holds:
            self.violations.append(what)

    def note_failures(self, scene: Scene, events: Sequence[Mapping[str, Any]], faults: int) -> None:
        """Counts the failures of a step or a run, and holds them to the faults there were."""
        failures = [event for event in events if event["event"] == "failure"]
        self.faults += faults
        self.by_phase.update(str(event["phase"]) for event in failures)
        self.fallbacks += sum(event["event"] == "fallback" for event in events)
        self.seconds_lost += sum(event["seconds_lost"] for event in failures)
        self.require(len(failures) == faults, f"{faults} faults gave {len(failures)} failures")
        for event in failures:
            # A rollout gives its running batch up, and any phase the frozen weights that only passed by, so that less
            # may be held than before the span that failed.
            gives_up = event["phase"] in ("rollout", "evaluate") or scene.passes
            given_up = gives_up and event["pinned_bytes"] < 0
            nothing = abs(event["pinned_bytes"]) <= scene.most_features_bytes
            self.require(scene.parks or given_up or nothing, f"bytes stay after a failure: {event}")


def storm_over(
    scene: Scene, faults: int, seed: int, output_dir: Path, told: Callable[[int], None] = lambda _: None
) -> Findings:
    """Sends faults over a scene until there were enough: over whole runs, and at least one step by itself.

    Args:
        scene: the configuration.
        faults: how many at least.
        seed: of the choices.
        output_dir: where the trainer writes.
        told: hears of faults as they happen.

    Returns:
        What was found.
    """
    findings = Findings()
    with SimulatedMemory(exact=True) as device:
        watched = Watched(scene, device, output_dir)
        storm = Storm(device, watched.trainer.setup.memory, seed)
        for fallen in _storms(watched, storm, findings):
            told(fallen)
            if findings.violations or (findings.faults >= faults and findings.compared_steps):
                break
    del watched, storm
    gc.collect()
    return findings


def _storms(watched: Watched, storm: Storm, findings: Findings) -> Iterator[int]:
    """Alternates a whole run and a run step by step, for ever; gives the faults as they fall."""
    while True:
        before = findings.faults
        storm_over_run(watched, storm, findings)
        yield findings.faults - before
        yield from storm_over_steps(watched, storm, findings)


def storm_over_run(watched: Watched, storm: Storm, findings: Findings) -> None:
    """Trains from start to end twice, once under faults, and compares what came out."""
    calm = watched.run()
    per_step = calm.allocations // calm.steps
    refusals = watched.device.refusals
    burst, first = watched.scene.burst, storm.random.randint(1, 2 * per_step)
    with storm.over(first, burst, near=per_step // 2, far=3 * per_step):
        rough = watched.run()
    findings.note_failures(watched.scene, rough.events, watched.device.refusals - refusals)
    compare_runs(watched, calm, rough, 0.0 if watched.scene.is_bitwise else WEIGHT_TOLERANCE, findings)


def sweep(scene: Scene, most: int, output_dir: Path, **settings: Any) -> Findings:
    """Refuses the allocations of a whole run one by one, in a run each: not one may be outside of what is guarded.

    A single fault never changes a plan, so every run must come out bit for bit.

    Args:
        scene: the configuration; runs are short.
        most: how many of each phase, evenly spread.
        output_dir: where the trainer writes.
        settings: further fields of `GRPOConfig`.

    Returns:
        What was found.
    """
    findings = Findings()
    short = {"max_steps": 2, "max_completion_length": 3, **settings}
    with SimulatedMemory(exact=True) as device:
        watched = Watched(scene, device, output_dir, **short)
        watched.run()  # some things are made once in a process
        with phases_of(device) as spans:
            calm = watched.run()
        for place in spread(spans, most):
            refusals = device.refusals
            device.fail_after(place)
            rough = watched.run()
            device.fail_after(NEVER)
            findings.require(device.refusals - refusals == 1, f"allocation {place} was not refused")
            findings.note_failures(scene, rough.events, device.refusals - refusals)
            compare_runs(watched, calm, rough, 0.0, findings)
    del watched
    gc.collect()
    return findings


def compare_runs(watched: Watched, calm: RunRecord, rough: RunRecord, tolerance: float, findings: Findings) -> None:
    """Holds a run under faults to the same run without."""
    findings.runs += 1
    findings.steps += rough.steps
    findings.require(rough.steps == calm.steps, f"{calm.steps - rough.steps} steps lost in a run")
    findings.require(len(calm.reward_calls) == len(rough.reward_calls), "a reward function was called too often")
    if not compare_tokens(calm.completions, rough.completions, findings):
        return
    findings.require(calm.reward_calls == rough.reward_calls, "a reward function was given something else in a run")
    live = f"live bytes at the ends of steps: {calm.live_bytes}, under faults {rough.live_bytes}"
    findings.require(calm.live_bytes == rough.live_bytes, live)
    apart = _relative(rough.weights - calm.weights, calm.weights - watched.start)
    findings.weights = max(findings.weights, apart)
    failures = [event for event in rough.events if event["event"] == "failure"]
    findings.require(apart <= tolerance, f"final weights differ by {apart:.1e} of the distance: {failures}")


def storm_over_steps(watched: Watched, storm: Storm, findings: Findings, repeats: int = 3) -> Iterator[int]:
    """Goes through a run step by step; every step runs untroubled, then from the same standing under faults.

    Yields:
        Faults of each step that ran under faults.
    """
    trainer, device = watched.trainer, watched.device
    watched.begin()
    while trainer.state.global_step < trainer.state.max_steps:
        standing = Standing(watched)
        with phases_of(device) as spans:
            calm = watched.step()
        for _ in range(repeats):
            standing.restore()
            refusals, first = device.refusals, draw_fault(spans, storm.random)
            with storm.over(first, watched.scene.burst, near=max(2, calm.allocations // 2), far=NEVER):
                rough = watched.step()
            faults = device.refusals - refusals
            findings.note_failures(watched.scene, rough.events, faults)
            compare_steps(standing, calm, rough, findings)
            yield faults
    for weight in watched._weights():
        weight.grad = None


def compare_steps(standing: Standing, calm: StepRecord, rough: StepRecord, findings: Findings) -> None:
    """Holds a step under faults to the same step without."""
    findings.steps += 1
    replanned = rough.count("fallback") > 0
    findings.require(len(calm.reward_calls) == len(rough.reward_calls), "a reward function was called too often")
    if not compare_tokens(calm.completions, rough.completions, findings):
        return
    findings.require(calm.reward_calls == rough.reward_calls, "a reward function was given something else")
    findings.require(
        calm.live_bytes == rough.live_bytes, f"{rough.live_bytes - calm.live_bytes} live bytes more after a step"
    )
    before = end_to_end([value for _, value in standing._weights])
    apart = _relative(rough.gradient - calm.gradient, calm.gradient)
    moved = _relative(rough.weights - calm.weights, calm.weights - before)
    same_stores = calm.stores.keys() == rough.stores.keys() and all(
        _same_store(name, calm.stores[name], rough) for name in calm.stores
    )
    findings.compared_steps += 1
    findings.gradient = max(findings.gradient, apart)
    findings.bitwise_steps += apart == 0.0 and moved == 0.0 and same_stores
    findings.require(apart <= GRADIENT_TOLERANCE, f"a gradient differs by {apart:.1e} of its norm: {rough.events}")
    findings.require(moved <= STEP_TOLERANCE, f"a step's weights differ by {moved:.1e} of its distance")
    if not replanned:
        same = apart == 0.0 and moved == 0.0 and same_stores and calm.loss == rough.loss
        findings.require(same, f"a step under the same plans is not bitwise the same: {rough.events}")


def _same_store(name: str, calm: Tensor, rough: StepRecord) -> bool:
    """Whether a store is the very same; log-probs drawn after a batch was read back in one forward may be rounded.

    Training does not read those of its own rollouts: it scores the tokens itself.
    """
    read_back = any(event["event"] == "failure" and event["phase"] == "rollout" for event in rough.events)
    if name == "sampling_logprobs" and read_back:
        return torch.allclose(calm, rough.stores[name], rtol=0, atol=LOGPROB_TOLERANCE)
    return torch.allclose(calm, rough.stores[name], rtol=0, atol=0, equal_nan=True)


def compare_tokens(calm: Sequence[Completion], rough: Sequence[Completion], findings: Findings) -> bool:
    """Compares samples row by row; a row that differs must have had a tie.

    Returns:
        Whether all are the same.
    """
    findings.require(len(calm) == len(rough), f"{len(rough)} completions instead of {len(calm)}")
    findings.tokens += sum(len(row.ids) for row in rough)
    differing = [(a, b) for a, b in zip(calm, rough, strict=False) if not _same_sample(a.ids, b.ids)]
    for ours, theirs in differing:
        findings.require(ours.ties + theirs.ties > 0, "a sampled token differs without a tie")
    findings.excused_ties += len(differing)
    return not differing


def _same_sample(ours: Tensor, theirs: Tensor) -> bool:
    """Whether samples are the same: tokens exactly, float64 states up to what other waves round."""
    return torch.equal(ours, theirs) or (ours.is_floating_point() and torch.allclose(ours, theirs, rtol=0, atol=1e-9))


def _relative(difference: Tensor, whole: Tensor) -> float:
    """Returns a norm over another one; 0 where both vanish."""
    apart = float(difference.norm())
    return apart / float(whole.norm()) if apart else 0.0
