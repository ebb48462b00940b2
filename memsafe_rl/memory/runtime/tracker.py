"""The memory of a run: what it holds, and what was measured, planned and lost so far, with one event for each."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from memsafe_rl.accounting import claim, in_phase, is_on_host, listened_to, local_part, weights_of
from memsafe_rl.memory.planning.policies import check_plan
from memsafe_rl.memory.planning.search import extra_bytes
from memsafe_rl.memory.runtime.headroom import HeadroomWatch
from memsafe_rl.memory.runtime.leaks import LeakWatch
from memsafe_rl.memory.runtime.meters import MemoryMeter
from memsafe_rl.memory.simulated.ledger import storages_of
from memsafe_rl.records import RecordLog
from memsafe_rl.types import Component, MemoryFailure, MemoryState, Phase, RolloutPlan, UpdatePlan

logger = logging.getLogger(__name__)

_FADING = 0.9
"""Share of an old correction that outlives a phase which needed less."""
_PLAUSIBLE = (0.5, 10.0)
"""Bounds of a correction: beyond them something else was measured, such as a rollout whose completions ended early, on
which the next plan must not count."""


@dataclass
class Holdings:
    """The long-lived tensors of a run."""

    device: torch.device  # where the model computes
    networks: tuple[nn.Module, ...] = ()  # the model, and every network beside it
    optimizer: Callable[[], list[Tensor]] = list  # gives what is held to move the weights
    trajectory: Callable[[], list[Tensor]] = list  # gives the tensors of the stored rollout
    optimizer_parts: int = 1  # ranks that share the optimizer's state
    resident_blocks: Callable[[], int | None] = lambda: None  # gives the blocks whose frozen weights are on the device

    def by_component(self) -> dict[Component, int]:
        """Counts the bytes on the device by what they are for; nothing while the model is still being loaded."""
        if not self.networks:
            return {}
        return held_by(
            self.device,
            weights=list(weights_of(*self.networks)),
            optimizer=self.optimizer(),
            trajectory=self.trajectory(),
        )

    def optimizer_bytes(self) -> tuple[int, int]:
        """Counts the bytes of the optimizer's state, and of it those offloaded to host memory."""
        held = self.optimizer()
        offloaded = [tensor for tensor in held if is_on_host(tensor) or tensor.device != self.device]
        parts = self.optimizer_parts
        return sum(tensor.nbytes for tensor in held) // parts, sum(tensor.nbytes for tensor in offloaded) // parts

    def tensors(self) -> list[Tensor]:
        """Returns the tensors that may outlive a step."""
        return [*map(local_part, weights_of(*self.networks)), *self.optimizer(), *self.trajectory()]


class MemoryTracker:
    """Measures phases, remembers plans and failures, and gives policies their view of the past."""

    def __init__(
        self,
        device: str,
        meter: MemoryMeter,
        budget_bytes: int,
        holdings: Holdings | None = None,
        process_bytes: int = 0,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.meter = meter
        self.events = RecordLog()
        self.step = 0
        self.phase_now = Phase.LOAD
        self.phase_peaks: dict[str, int] = {}
        self.phase_seconds: dict[str, float] = {}
        self.reserved_peaks: dict[str, int] = {}
        self.step_parts: dict[str, dict[str, int]] = {}
        self._parts: dict[str, Mapping[Component, int]] = {}
        self._device = device
        self._process_bytes = process_bytes  # what a meter that counts the whole process saw before the run
        self._peak_bytes = 0
        self._plans: dict[type, Any] = {}
        self._planned_at: dict[type, int] = {}
        self._corrections: dict[str, float] = {}
        self._stranded: dict[str, int] = {}
        self._failures: tuple[MemoryFailure, ...] = ()
        self._enforced = False
        self._holdings = holdings or Holdings(torch.device(device))
        self._bands = HeadroomWatch()
        self._leaks = LeakWatch(torch.device(device))

    def fork(self) -> MemoryTracker:
        """Returns a tracker of the same device that knows the same past and records its own future."""
        fork = copy.copy(self)
        fork.events, fork.phase_peaks, fork.phase_seconds = RecordLog(), {}, {}
        fork.reserved_peaks, fork._stranded = {}, dict(self._stranded)
        fork._plans, fork._planned_at = dict(self._plans), dict(self._planned_at)
        fork._corrections = dict(self._corrections)
        return fork

    def state(self) -> MemoryState:
        """Returns a policy's view of the device and of this run's past."""
        optimizer_bytes, parked_bytes = self._holdings.optimizer_bytes()
        return MemoryState(
            device=self._device,
            budget_bytes=self.budget_bytes,
            live_bytes=self.meter.live_bytes(),
            peak_bytes=max(self._peak_bytes, self.meter.peak_bytes()),
            step=self.step,
            corrections=dict(self._corrections),
            last_rollout_plan=self._plans.get(RolloutPlan),
            last_update_plan=self._plans.get(UpdatePlan),
            failures=self._failures,
            optimizer_bytes=optimizer_bytes,
            parked_bytes=parked_bytes,
            resident_blocks=self._holdings.resident_blocks(),
            stranded_bytes=dict(self._stranded),
        )

    @property
    def limit_bytes(self) -> int:
        """Bytes at which an allocation is refused: the device's own, unless it is held to the budget."""
        return self.budget_bytes if self._enforced else self.meter.total_bytes()

    def enforce(self) -> None:
        """Holds the device to the budget, where it can be held, until `release`."""
        self.meter.enforce(self.budget_bytes)
        self._enforced = True

    def release(self) -> None:
        """Takes the limit back."""
        self.meter.release()
        self._enforced = False

    @property
    def rollout_plan(self) -> RolloutPlan:
        """The plan of the last rollout; the defaults before the first."""
        plan: RolloutPlan = self._plans.get(RolloutPlan, RolloutPlan())
        return plan

    @property
    def update_plan(self) -> UpdatePlan:
        """The plan of the last optimizer step; the defaults before the first."""
        plan: UpdatePlan = self._plans.get(UpdatePlan, UpdatePlan())
        return plan

    @contextmanager
    def phase(self, phase: Phase, *, compared: bool = True) -> Iterator[None]:
        """Measures the peak bytes and the seconds of what runs inside, and adds them to the phase's."""
        self.meter.reset_peak()
        before, self.phase_now = self.phase_now, phase
        plan, start = self._plan_of(phase), time.perf_counter()
        held = self.meter.live_bytes() - (0 if plan is None else self._to_be_parked(plan))
        try:
            with in_phase(phase):
                yield
        finally:
            self.phase_now = before
            peak = self.meter.peak_bytes()
            self._peak_bytes = max(self._peak_bytes, peak)
            if peak >= self.phase_peaks.get(phase, 0):
                self._parts[phase] = self.meter.peak_by_component()
            self.phase_peaks[phase] = max(self.phase_peaks.get(phase, 0), peak)
            self.phase_seconds[phase] = self.phase_seconds.get(phase, 0.0) + time.perf_counter() - start
            if compared and plan is not None and plan is self._plan_of(phase):
                self._correct(phase, plan, peak - held)
            self._note_reserved(phase, peak)

    def _note_reserved(self, phase: Phase, peak_bytes: int) -> None:
        """Notes what the allocator reserved, and corrects what it is known to need beside live tensors."""
        reserved, stranded = self.meter.reserved_peak_bytes(), self.meter.stranded_bytes()
        if reserved is None:
            return
        self.reserved_peaks[phase] = max(self.reserved_peaks.get(phase, 0), reserved)
        if stranded is None:
            # Reserved bytes bound it from above only: what earlier phases left in the cache is among them.
            stranded = min(self._stranded.get(phase, 0), reserved - peak_bytes)
        self._stranded[phase] = max(0, stranded)

    def adopt(self, plan: Any, kind: type[RolloutPlan | UpdatePlan]) -> None:
        """Checks a plan, remembers it and records its event."""
        check_plan(plan, RolloutPlan if kind is RolloutPlan else UpdatePlan)
        self._plans[type(plan)] = plan
        self._planned_at[type(plan)] = self.meter.live_bytes() - self._to_be_parked(plan)
        self.record("plan", kind="rollout" if kind is RolloutPlan else "update", **plain_plan(plan))

    def _to_be_parked(self, plan: RolloutPlan | UpdatePlan) -> int:
        """Counts the bytes that a plan will take from the device before its work begins."""
        if not plan.park_optimizer:
            return 0
        optimizer_bytes, parked_bytes = self._holdings.optimizer_bytes()
        return optimizer_bytes - parked_bytes

    def expect(
        self,
        corrections: Mapping[str, float],
        stranded_bytes: Mapping[str, int] | None = None,
        failures: Iterable[MemoryFailure] = (),
    ) -> None:
        """Begins with what a forecast has learnt of estimates, allocator and plans that fail, as if a step had."""
        self._corrections.update(corrections)
        self._stranded.update(stranded_bytes or {})
        self._failures = (*self._failures, *(replace(failure, foreseen=True) for failure in failures))

    def record(self, event: str, **details: Any) -> None:
        """Adds an event."""
        self.events.append({"event": event, "step": self.step, **details})

    def remember(self, failure: MemoryFailure) -> None:
        """Remembers a failure for later plans, and of its work what was estimated for it."""
        plan, tile = failure.plan, self.update_plan.logprob_tile
        estimate = None if plan is None else extra_bytes(failure.phase, failure.work, plan, tile)
        self._failures = (*self._failures, replace(failure, work=None, estimated_bytes=estimate))

    def drain(self) -> dict[str, float]:
        """Returns peak bytes and seconds of every phase since the last call; who held them then is in `step_parts`."""
        self.step_parts = self._divide_peaks()
        metrics = {f"memory/{name}_peak_bytes": float(peak) for name, peak in self.phase_peaks.items()}
        metrics |= {f"time/{name}_seconds": seconds for name, seconds in self.phase_seconds.items()}
        peak = max(self.phase_peaks.values(), default=self.meter.peak_bytes())
        metrics["memory/peak_bytes"] = float(peak)
        metrics["memory/budget_bytes"] = float(self.budget_bytes)
        metrics |= {f"memory/{name}_reserved_bytes": float(size) for name, size in self.reserved_peaks.items()}
        if self.reserved_peaks:
            metrics["memory/reserved_bytes"] = float(max(self.reserved_peaks.values()))
        for name in self.phase_peaks:
            plan = self._plan_of(Phase(name))
            if plan is not None and name in plan.predicted_bytes:
                metrics[f"memory/{name}_predicted_bytes"] = float(plan.predicted_bytes[name])
        for counted in (self.phase_peaks, self.reserved_peaks, self.phase_seconds, self._parts):
            counted.clear()
        # Said when the peak enters another band of the budget, or the allocator had to tidy up.
        self._warn(self._bands.observe(self.step, peak, self.budget_bytes, self.meter.allocator_retries()))
        return metrics

    def held_bytes(self) -> dict[Component, int]:
        """Returns the bytes held now by component: the meter's own count, else what is known and the rest."""
        counted = self.meter.live_by_component()
        if counted:
            return dict(counted)
        held = self._holdings.by_component()
        if self.meter.is_exact:
            held[Component.OTHER] = max(0, self.meter.live_bytes() - sum(held.values()))
        return held

    def end_step(self, known: Callable[[], Iterable[Tensor]], *, steps_per_rollout: int = 1) -> None:
        """Compares what is held now with the ends of earlier steps, and names a component that keeps growing."""
        if not self.meter.is_exact:
            return  # what known owners hold does not leak, and a resident size tells nothing of the rest
        self._warn(self._leaks.observe(self.step + 1, self.held_bytes(), known, steps_per_rollout=steps_per_rollout))

    def _warn(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            self.events.append(event)
            logger.warning("%s", event["sentence"])

    def _divide_peaks(self) -> dict[str, dict[str, int]]:
        """Divides each phase's peak by component, as the meter counted it or else as is known and planned."""
        known: Mapping[Component, int] | None = None
        divided = {}
        for name, peak in self.phase_peaks.items():
            parts = {str(part): size for part, size in self._parts.get(name, {}).items()}
            if not parts:  # known owners, the process itself, what the phase's plan expects, and the rest
                known = self._holdings.by_component() if known is None else known
                plan, start = self._plan_of(Phase(name)), f"{name}/"
                planned = {} if plan is None else plan.predicted_bytes
                expected = {one.removeprefix(start): size for one, size in planned.items() if one.startswith(start)}
                before = {str(part): size for part, size in known.items()} | {"process": self._process_bytes}
                for part, size in (before | expected).items():
                    parts[part] = min(size, peak - sum(parts.values()))
                parts["other"] = peak - sum(parts.values())
            divided[str(name)] = {part: size for part, size in parts.items() if size > 0}
        return divided

    def state_dict(self) -> dict[str, Any]:
        """Gives, in plain values, what later plans depend on."""
        return {
            "budget_bytes": self.budget_bytes,
            "corrections": dict(self._corrections),
            "stranded_bytes": dict(self._stranded),
            "plans": [_named(plan) for plan in self._plans.values()],
            "failures": [{**asdict(failure), "plan": _named(failure.plan), "work": None} for failure in self._failures],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave; the budget is the caller's to set."""
        self._corrections = dict(state["corrections"])
        self._stranded = dict(state.get("stranded_bytes", {}))
        self._plans = {type(plan): plan for plan in [_plan_from(plain) for plain in state["plans"]] if plan is not None}
        self._failures = tuple(
            MemoryFailure(**{**plain, "phase": Phase(plain["phase"]), "plan": _plan_from(plain["plan"])})
            for plain in state["failures"]
        )

    def _plan_of(self, phase: Phase) -> RolloutPlan | UpdatePlan | None:
        return self._plans.get(UpdatePlan if phase is Phase.UPDATE else RolloutPlan)

    def _correct(self, phase: Phase, plan: RolloutPlan | UpdatePlan, measured_bytes: int) -> None:
        """Compares what a phase needed with what its plan predicted; rises at once and fades slowly."""
        predicted = plan.predicted_bytes.get(phase, 0) - self._planned_at.get(type(plan), 0)
        if not self.meter.is_exact or phase not in plan.predicted_bytes or predicted <= 0 or measured_bytes <= 0:
            return
        known = self._corrections.get(phase, 1.0)
        least, most = _PLAUSIBLE
        found = min(most, max(least, known * measured_bytes / predicted))
        faded = _FADING * known + (1 - _FADING) * found
        self._corrections[phase] = found if phase not in self._corrections else max(found, faded)


def plain_plan(plan: RolloutPlan | UpdatePlan) -> dict[str, Any]:
    """Writes a plan in plain values."""
    return {**asdict(plan), "predicted_bytes": dict(plan.predicted_bytes)}


def _named(plan: RolloutPlan | UpdatePlan | None) -> dict[str, Any] | None:
    return None if plan is None else {"kind": type(plan).__name__, **plain_plan(plan)}


def _plan_from(plain: Mapping[str, Any] | None) -> RolloutPlan | UpdatePlan | None:
    if plain is None:
        return None
    values = {name: value for name, value in plain.items() if name != "kind"}
    return RolloutPlan(**values) if plain["kind"] == "RolloutPlan" else UpdatePlan(**values)


def watch_gradients(parameters: Iterable[Tensor]) -> ExitStack:
    """Claims gradients for their component as soon as a backward has made them, until it is closed."""
    hooks = ExitStack()
    for weight in parameters if listened_to() else ():
        if weight.requires_grad:
            hook = weight.register_post_accumulate_grad_hook(_claim_gradient)  # type: ignore[no-untyped-call]
            hooks.callback(hook.remove)
    return hooks


def held_by(
    device: torch.device | str,
    *,
    weights: Iterable[Tensor],
    optimizer: Iterable[Tensor] = (),
    trajectory: Iterable[Tensor] = (),
) -> dict[Component, int]:
    """Counts the bytes that known owners hold on a device, each storage once, whole, for the first of them below."""
    tensors = list(weights)
    owned: dict[Component, Iterable[Tensor]] = {
        Component.WEIGHTS: tensors,
        Component.GRADIENTS: [tensor.grad for tensor in tensors if tensor.grad is not None],
        Component.OPTIMIZER: optimizer,
        Component.TRAJECTORY: trajectory,
    }
    place, seen = torch.device(device), set[int]()
    return {
        component: sum(storage.nbytes() for storage in _new_storages(found, place, seen))
        for component, found in owned.items()
    }


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the tensors of an optimizer's state."""
    values = [list(entries.values()) for entries in optimizer.state.values()]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _claim_gradient(weight: Tensor) -> None:
    if weight.grad is not None:
        claim(Component.GRADIENTS, [weight.grad])


def _new_storages(tensors: Iterable[Tensor], device: torch.device, seen: set[int]) -> Iterator[torch.UntypedStorage]:
    simulated = listened_to()
    for tensor in tensors:
        if simulated and is_on_host(tensor):
            continue
        for storage in storages_of(tensor):
            lies_there = storage.device.type == device.type and device.index in (None, storage.device.index)
            if lies_there and storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage
