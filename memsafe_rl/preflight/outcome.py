"""What a forecast says: peaks by phase and component, the plans they belong to, and what was assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memsafe_rl.memory.runtime.tracker import plain_plan
from memsafe_rl.memory.simulated.caching_allocator import Reserved
from memsafe_rl.preflight.seconds import StepSeconds
from memsafe_rl.preflight.what_fits import Job
from memsafe_rl.types import Component, MemoryFailure, Phase, RolloutPlan, UpdatePlan
from memsafe_rl.units import format_bytes


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
    prompt_tokens: int  # longest prompt, in tokens
    completion_tokens: int  # longest completion, in tokens
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
        """Gives the forecast in plain values, ready for JSON; the peak as ``predicted_peak_bytes``."""
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
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
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
        blocks = len(self.job.geometry.frozen_block_bytes)
        counts = [f"{blocks if own is None else min(own, blocks)} in {phase}" for phase, own in plans.items()]
        if all(own is None for own in plans.values()):
            return ""
        return f"; of {blocks} blocks, so many have their frozen weights on the device: {', '.join(counts)}"

    def facts(self) -> dict[str, str]:
        """Gives what a run's banner says of it."""
        timed = {} if self.step_seconds is None else {"estimated time": self.step_seconds.sentence()}
        return {"forecast": self.sentence(), **timed}
