"""The memory of a run: what was measured and planned so far, phase by phase, and one event for each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from memsafe_rl.memory.checks import check_rollout_plan, check_update_plan
from memsafe_rl.memory.monitor import MemoryMeter
from memsafe_rl.types import MemoryState, Phase, RolloutPlan, UpdatePlan


class MemoryTracker:
    """Measures phases, remembers plans, and gives policies their view of the past.

    Args:
        device: the device's type.
        meter: reads the bytes held.
        budget_bytes: int, bytes the run may hold.
    """

    def __init__(self, device: str, meter: MemoryMeter, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.events: list[dict[str, Any]] = []
        self.phase_peaks: dict[str, int] = {}
        self.phase_seconds: dict[str, float] = {}
        self._device = device
        self._meter = meter
        self._peak_bytes = 0
        self._rollout_plan: RolloutPlan | None = None
        self._update_plan: UpdatePlan | None = None

    def state(self) -> MemoryState:
        """Gives a policy's view of the device and of this run's past."""
        return MemoryState(
            device=self._device,
            budget_bytes=self.budget_bytes,
            live_bytes=self._meter.live_bytes(),
            peak_bytes=max(self._peak_bytes, self._meter.peak_bytes()),
            last_rollout_plan=self._rollout_plan,
            last_update_plan=self._update_plan,
        )

    @property
    def rollout_plan(self) -> RolloutPlan:
        """The plan of the last rollout; the defaults before the first."""
        return self._rollout_plan or RolloutPlan()

    @property
    def update_plan(self) -> UpdatePlan:
        """The plan of the last optimizer step; the defaults before the first."""
        return self._update_plan or UpdatePlan()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Measures the peak bytes and the seconds of what runs inside, and adds them to the phase's.

        Args:
            phase: what runs inside.
        """
        self._meter.reset_peak()
        start = time.perf_counter()
        try:
            yield
        finally:
            peak = self._meter.peak_bytes()
            self._peak_bytes = max(self._peak_bytes, peak)
            self.phase_peaks[phase] = max(self.phase_peaks.get(phase, 0), peak)
            self.phase_seconds[phase] = self.phase_seconds.get(phase, 0.0) + time.perf_counter() - start

    def adopt(self, plan: RolloutPlan | UpdatePlan, *, step: int) -> None:
        """Checks a plan, remembers it and records its event.

        Args:
            plan: what the policy answered.
            step: optimizer steps done so far.

        Raises:
            ConfigError: the plan cannot be carried out.
        """
        if isinstance(plan, RolloutPlan):
            check_rollout_plan(plan)
            self._rollout_plan = plan
        else:
            check_update_plan(plan)
            self._update_plan = plan
        kind = "rollout" if isinstance(plan, RolloutPlan) else "update"
        details = {**asdict(plan), "predicted_bytes": dict(plan.predicted_bytes)}
        self.events.append({"event": "plan", "step": step, "kind": kind, **details})

    def drain(self) -> dict[str, float]:
        """Gives peak bytes and seconds of every phase since the last call, under `memory/*` and `time/*`."""
        metrics = {f"memory/{name}_peak_bytes": float(peak) for name, peak in self.phase_peaks.items()}
        metrics |= {f"time/{name}_seconds": seconds for name, seconds in self.phase_seconds.items()}
        metrics["memory/peak_bytes"] = float(max(self.phase_peaks.values(), default=self._meter.peak_bytes()))
        metrics["memory/budget_bytes"] = float(self.budget_bytes)
        self.phase_peaks.clear()
        self.phase_seconds.clear()
        return metrics
