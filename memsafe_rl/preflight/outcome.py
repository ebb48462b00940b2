"""What a forecast says: peaks by phase and component, their plans, how long a step takes, and what was assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor

from memsafe_rl.accounting import every_turn
from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.memory.runtime.stages import Stage
from memsafe_rl.memory.runtime.tracker import plain_plan
from memsafe_rl.memory.simulated.caching_allocator import Reserved
from memsafe_rl.micro_batches import measure_slices
from memsafe_rl.models.adapter import DecodeState, ModelAdapter
from memsafe_rl.preflight.speed import DeviceSpeed, Work, WorkCounter
from memsafe_rl.preflight.what_fits import Job
from memsafe_rl.preflight.worst_case import Longest, Probe
from memsafe_rl.preflight.worst_rows import tried_places, widest_slices, worst_step
from memsafe_rl.rollout.native.running_batch import generate
from memsafe_rl.training.setup import TrainingSetup
from memsafe_rl.types import Component, MemoryFailure, Phase, RolloutPlan, UpdatePlan, UpdateWork
from memsafe_rl.units import format_bytes, format_seconds

_COMPILING, _COMPILING_A_LAYER, _COMPILING_BLOCKS = 12.0, 3.1, 25.0
"""Seconds of a CPU core for one form of a decoding step, for each of its layers, and for the blocks of an update:
measured with networks of 2 and 28 layers (``benchmarks/results/launches.json``), on another machine an estimate."""


def compile_seconds(layers: int) -> float:
    """Estimates what `torch.compile` takes once, nothing cached: steps of many rows and of one, and blocks."""
    return 2 * (_COMPILING + _COMPILING_A_LAYER * layers) + _COMPILING_BLOCKS


@dataclass(frozen=True)
class StepSeconds:
    """How long an optimizer step is expected to take."""

    phases: Mapping[Phase, float]  # seconds by phase, a rollout's shared by the steps that train on it
    steps: int | None  # optimizer steps of the run; None where they depend on a dataset that is not known
    speed: DeviceSpeed  # the device's speed that they are taken from
    compiling: float = 0.0  # seconds that `torch.compile` takes once; 0 where nothing is compiled

    @property
    def step(self) -> float:
        """float, seconds of a step."""
        return sum(self.phases.values())

    @property
    def run(self) -> float | None:
        """float, seconds of the run, rewards and evaluations left out; None where nobody knows its steps."""
        return None if self.steps is None else self.step * self.steps + self.compiling

    def plain(self) -> dict[str, Any]:
        """Returns the estimate in plain values, ready for JSON."""
        return {
            "seconds": {phase.value: round(seconds, 4) for phase, seconds in self.phases.items()},
            "step_seconds": round(self.step, 4),
            "run_seconds": None if self.run is None else round(self.run, 1),
            "compile_seconds": round(self.compiling, 1),
            "device": self.speed.name,
            "source": self.speed.source,
        }

    def sentence(self) -> str:
        """Says in one sentence how long a step and the run take."""
        parts = ", ".join(f"{phase.value} {format_seconds(seconds)}" for phase, seconds in self.phases.items())
        run = "" if self.run is None else f", the run of {self.steps:,} steps about {format_seconds(self.run)}"
        once = f", after about {format_seconds(self.compiling)} of compiling" if self.compiling else ""
        return (
            f"a step takes about {format_seconds(self.step)} ({parts}){run}{once}, if every completion is as long "
            f"as it may become; rewards and evaluations come on top ({self.speed.name}: {self.speed.source})"
        )


class _Laps:
    """An adapter whose second decoding step stands for all: rows are as long then as in the middle of a rollout."""

    def __init__(self, adapter: ModelAdapter, counter: WorkCounter, drawn: int) -> None:
        self._adapter, self._counter, self._drawn = adapter, counter, drawn
        self.laps: list[Work] = []

    def __getattr__(self, name: str) -> Any:
        """Returns everything else as the adapter does."""
        return getattr(self._adapter, name)

    def decode_step(self, state: DecodeState, tokens_B: Tensor) -> Tensor:
        """Appends one token to every row, before the second time of a longer row."""
        self.laps.append(self._counter.lap())
        if len(self.laps) == 1:
            state.stretch(self._drawn)
        return self._adapter.decode_step(state, tokens_B)


def count_step(setup: TrainingSetup, longest: Longest) -> dict[Phase, list[tuple[float, Work]]]:
    """Counts the kernels of a step on fake weights, by phase: pieces of work, and how often each is done in it."""
    probe, served = Probe(setup, longest), setup.config.steps_per_rollout
    with every_turn():
        of_rollout = {Phase.ROLLOUT: _rollout(probe), Phase.SCORE: _scoring(probe)}
        update = _update(probe)
    pieces = {phase: [(times / served, work) for times, work in parts] for phase, parts in of_rollout.items()}
    return {**pieces, Phase.UPDATE: update}


def _rollout(probe: Probe) -> list[tuple[float, Work]]:
    """Counts reading the prompts of a wave, and a decoding step in its middle."""
    setup, tokens = probe.setup, probe.longest.completion_tokens
    adapter, plan = setup.adapter, setup.memory.rollout_plan
    samples, first, rows = probe.wave()
    settings = replace(setup.sampling, max_step_tokens=3, eos_token_ids=(), min_new_tokens=0, stops=None)
    counter = WorkCounter()
    adapter.host_weights.place(plan.resident_blocks, adapter.device)
    with counter, setup.memory.phase(Phase.ROLLOUT):
        laps = _Laps(adapter, counter, max(0, tokens // 2 - 2))
        generate(cast(ModelAdapter, laps), *samples, settings, under(plan))
        step = counter.lap()
    waves = rows / first
    return [(waves, laps.laps[0]), (waves * (tokens - 1), step)]


def _scoring(probe: Probe) -> list[tuple[float, Work]]:
    """Counts the passes that precede updates, by the slices that hold most; nothing where a run has none."""
    trajectory, counter, memory = probe.rows(), WorkCounter(), probe.setup.memory
    slices = widest_slices(probe.setup, trajectory, [range(len(trajectory))], memory.rollout_plan.score_tokens)
    with counter:
        probe.score(trajectory, memory.update_plan.logprob_tile)
    return [(len(trajectory) / sum(len(one.rows) for one in slices), counter.lap())] if counter.work.launches else []


def _update(probe: Probe) -> list[tuple[float, Work]]:
    """Counts a micro-batch, and what moves the weights."""
    setup, learner, trajectory = probe.setup, probe.learner, probe.rows()
    plan, committer = setup.memory.update_plan, setup.committed
    rows = worst_step(setup, trajectory, probe.longest.rollout)
    work = learner.work(trajectory, rows)
    tried = [rows[place] for place in tried_places(work, plan, 1)]
    rollout, terms = probe.rollout(trajectory), probe.terms(trajectory, tried)
    counter = WorkCounter()
    with setup.memory.phase(Phase.UPDATE), counter:
        learner.gradient(rollout, tried, terms, step=setup.memory.step)
        piece = counter.lap()
        committer.measure()
        committer.clip()
        committer.prepare_commit()
        setup.recovery.once(Stage.COMMIT, committer.commit)
    share = _run_tokens(work, plan) / _run_tokens(learner.work(trajectory, tried), plan)
    return [(share, piece), (1.0, counter.lap())]


def _run_tokens(work: UpdateWork, plan: UpdatePlan) -> int:
    return measure_slices(work, plan.micro_batch_tokens, packed=plan.pack_prompts).total


@dataclass(frozen=True)
class MemoryForecast:
    """The peaks of a run, before it starts."""

    # for every phase that was tried, bytes of every component at its peak
    phases: Mapping[Phase, Mapping[Component, int]]
    budget_bytes: int  # bytes that the run may hold
    device_bytes: int  # bytes of the device
    rollout_plan: RolloutPlan  # how rollouts are cut
    update_plan: UpdatePlan  # how optimizer steps are cut
    # per phase, forecast over estimated bytes above what was held before it, as a run would learn them
    corrections: Mapping[str, float]
    job: Job  # the sizes of the run that decide what it holds
    assumptions: tuple[str, ...] = ()  # what was taken for granted, in plain sentences
    refusal: str | None = None  # why the run cannot fit, in plain words; None where it fits
    seconds: float = 0.0  # time the forecast took
    ranks: int = 1  # ranks of the run, of which this is one
    sharding: str = "none"  # what they share, see `memsafe_rl.preflight.fake.sharding.Sharding`
    reserved: Mapping[Phase, Reserved] = field(default_factory=dict)  # what a card's allocator holds; empty on a CPU
    failures: tuple[MemoryFailure, ...] = ()  # of plans that were given up, so that the run does not try them again
    # of the host's memory for a copy of what a checkpoint holds, where checkpoints are written in the background
    host_bytes: int = 0
    step_seconds: StepSeconds | None = None  # how long a step takes; None where nobody knows how fast the device is

    @property
    def fits(self) -> bool:
        """Whether the run stays within its budget, which counts once it is loaded, and loads on its device."""
        peaks = self.phase_bytes
        load = peaks.pop(Phase.LOAD, 0)
        within = max(peaks.values(), default=0) <= self.budget_bytes
        return self.refusal is None and within and load <= self.device_bytes

    @property
    def phase_bytes(self) -> dict[Phase, int]:
        """int, bytes: the peak of every phase."""
        return {phase: sum(parts.values()) for phase, parts in self.phases.items()}

    @property
    def reserved_bytes(self) -> dict[Phase, int]:
        """int, bytes: most that PyTorch's allocator reserves in every phase, cached ones included; empty on a CPU."""
        held = self.phase_bytes  # what the check at start holds is not in the model
        return {phase: max(highest.reserved, held.get(phase, 0)) for phase, highest in self.reserved.items()}

    @property
    def reserved_peak_bytes(self) -> int | None:
        """int, bytes: the highest of them; None on a CPU."""
        return max(self.reserved_bytes.values(), default=None)

    @property
    def stranded_bytes(self) -> dict[str, int]:
        """int, bytes: what the allocator cannot do without beside live tensors, in every phase."""
        return {phase.value: highest.needed - highest.allocated for phase, highest in self.reserved.items()}

    @property
    def peak_bytes(self) -> int:
        """int, bytes: the highest peak of all phases."""
        return max(self.phase_bytes.values(), default=0)

    @property
    def peak_phase(self) -> Phase:
        """The phase that holds most."""
        return max(peaks := self.phase_bytes, key=peaks.__getitem__, default=Phase.LOAD)

    def plain(self) -> dict[str, Any]:
        """Returns the forecast in plain values, ready for JSON; the peak as ``predicted_peak_bytes``."""
        return {
            "predicted_peak_bytes": self.peak_bytes,
            "peak_phase": self.peak_phase.value,
            "fits": self.fits,
            "refusal": self.refusal,
            "budget_bytes": self.budget_bytes,
            "device_bytes": self.device_bytes,
            "phases": {phase.value: size for phase, size in self.phase_bytes.items()},
            "reserved_peak_bytes": self.reserved_peak_bytes,
            "reserved_bytes": {phase.value: size for phase, size in self.reserved_bytes.items()},
            "components": {
                phase.value: {part.value: size for part, size in parts.items() if size}
                for phase, parts in self.phases.items()
            },
            "rollout_plan": plain_plan(self.rollout_plan),
            "update_plan": plain_plan(self.update_plan),
            "corrections": dict(self.corrections),
            "prompt_tokens": self.job.prompt_tokens,
            "completion_tokens": self.job.completion_tokens,
            "ranks": self.ranks,
            "sharding": self.sharding,
            "host_bytes": self.host_bytes,
            "step_seconds": None if self.step_seconds is None else self.step_seconds.plain(),
            "assumptions": list(self.assumptions),
            "seconds": round(self.seconds, 2),
        }

    def sentence(self) -> str:
        """Says in one sentence whether the run fits."""
        if self.refusal is not None:
            return f"does not fit into {format_bytes(self.budget_bytes)}: {self.refusal}"
        verdict = "fits" if self.fits else "does not fit"
        reserved = self.reserved_peak_bytes
        return (
            f"{verdict}: a peak of {format_bytes(self.peak_bytes)} in {self.peak_phase.value}"
            + ("" if reserved is None else f" ({format_bytes(reserved)} reserved by PyTorch's allocator)")
            + f", of a budget of {format_bytes(self.budget_bytes)}{self._placement()}"
        )

    def _placement(self) -> str:
        """Says how many blocks' frozen weights stay on the device, where not all of them do."""
        plans = {"rollouts": self.rollout_plan.resident_blocks, "updates": self.update_plan.resident_blocks}
        if all(own is None for own in plans.values()):
            return ""
        blocks = len(self.job.geometry.frozen_block_bytes)
        counts = [f"{blocks if own is None else min(own, blocks)} in {phase}" for phase, own in plans.items()]
        return f"; of {blocks} blocks, so many have their frozen weights on the device: {', '.join(counts)}"

    def facts(self) -> dict[str, str]:
        """Returns what a run's banner says of it."""
        timed = {} if self.step_seconds is None else {"estimated time": self.step_seconds.sentence()}
        return {"forecast": self.sentence(), **timed}
