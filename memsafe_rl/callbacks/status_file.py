"""What a run is, written once when it begins, and how it stands, written once a second for `memsafe-rl monitor`."""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from memsafe_rl.diagnostics.run_figures import by_phase
from memsafe_rl.diagnostics.status import enter_index, process_started, status_file, versions, write_json
from memsafe_rl.memory.runtime.tracker import MemoryTracker
from memsafe_rl.records import RUN_FILE, read_json, run_id_of, still_ours

logger = logging.getLogger(__name__)
_ERROR_CHARACTERS = 4000
_SHOWN_METRICS = (
    *("reward", "kl", "entropy", "completions/mean_length", "completions/clipped_ratio", "step_time", "num_tokens"),
)
"""Metrics of the last step that a status file repeats."""


@dataclass(eq=False)
class RunRecord(TrainerCallback):  # type: ignore[misc]
    """Writes what a run is to `run.json`."""

    output_dir: Path
    tracker: MemoryTracker
    facts: Callable[[], Mapping[str, Any]] = dict  # further facts

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Writes down what the run is, beside whose it is."""
        if not state.is_world_process_zero:
            return
        path = self.output_dir / RUN_FILE
        known = read_json(path) or {}
        now = {"began": time.time(), "first_step": state.global_step, "command": " ".join(sys.argv)}
        content = {
            **known,
            **now,
            "starts": [*known.get("starts", ()), {"start": known.get("start", 0), **now}],
            "max_steps": state.max_steps,
            "device": asdict(self.tracker.meter.facts()),
            "budget_bytes": self.tracker.budget_bytes,
            "counts_tensors": self.tracker.meter.is_exact,
            "versions": {"python": platform.python_version(), **versions()},
            "config": args.to_sanitized_dict(),
            **self.facts(),
        }
        try:
            write_json(path, content)
        except OSError as error:
            logger.warning("%s cannot be written (%s)", path, error.strerror)


class StatusFile(TrainerCallback):  # type: ignore[misc]
    """Writes the run's status to `monitor.json` once a second while it trains, in a thread, so that no phase waits."""

    def __init__(
        self,
        output_dir: Path,
        tracker: MemoryTracker,
        *,
        rank: int = 0,
        world_size: int = 1,
        every_seconds: float = 1.0,
    ) -> None:
        self._path = output_dir / status_file(rank)
        self._tracker = tracker
        self._every_seconds = every_seconds
        self._fixed: dict[str, Any] = {"rank": rank, "world_size": world_size}
        self._now: dict[str, Any] = {"metrics": {}}
        self._peaks: dict[str, int] = {}
        self._counted: Counter[str] = Counter()
        self._seen = 0
        self._run_id = ""
        self._queried = -self._every_seconds
        self._entry: Path | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Starts writing."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._run_id = run_id_of(self._path.parent)
        self._fixed |= {
            "pid": os.getpid(),
            "process_started": process_started(os.getpid()),
            "host": socket.gethostname(),
            "run_dir": str(self._path.parent.resolve()),
            "began": time.time(),
            "max_steps": state.max_steps,
            "device": asdict(self._tracker.meter.facts()),
            "counts_tensors": self._tracker.meter.is_exact,
        }
        self._now = {"state": "training", "step": state.global_step, "sampling": None, "metrics": {}}
        self._peaks, self._seen, self._queried = {}, 0, -self._every_seconds
        self._counted.clear()
        self._query_driver()
        if not self.write():
            return
        self._entry = enter_index(self._path.parent) if self._fixed["rank"] == 0 else None
        self._over.clear()
        # By weak reference, so that a trainer whose run was never closed is not kept for good.
        watched = (weakref.ref(self), self._over, self._every_seconds)
        self._thread = threading.Thread(target=_keep_writing, args=watched, name="memsafe_rl status", daemon=True)
        self._thread.start()

    def on_progress(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes a step's metrics; called by the trainer after every optimizer step."""
        shown = {name: metrics[name] for name in _SHOWN_METRICS if name in metrics}
        last = by_phase(metrics)
        for name, peak in last.items():
            self._peaks[name] = max(self._peaks.get(name, 0), peak)
        self._now = {
            **self._now,
            "step": step,
            "sampling": None,
            "last_step_peak_bytes": last,
            "metrics": {**self._now["metrics"], **shown},  # later passes over a rollout have no reward of their own
        }
        self._query_driver()

    def on_sampling(self, ended: int, total: int) -> None:
        """Takes the progress of a rollout."""
        self._now = {**self._now, "sampling": [ended, total]}

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Records that the run finished, which `on_run_closed` cannot know."""
        self._now = {**self._now, "state": "finished", "ended_by": ""}
        self.write()

    def on_run_closed(self) -> None:
        """Stops writing, also after an error, which it names."""
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()
        self._thread = None
        error = sys.exc_info()[1]
        if self._now.get("state") == "training":
            reason = "" if error is None else f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
            self._now = {**self._now, "state": "stopped", "ended_by": reason}
        self.write()
        if self._entry is not None:
            self._entry.unlink(missing_ok=True)

    def write(self) -> bool:
        """Writes the file."""
        try:
            if not still_ours(self._path.parent, self._run_id):
                raise OSError(f"{self._path.parent} is another run's now")
            write_json(self._path, self.snapshot())
        except OSError as error:
            logger.warning("memsafe-rl monitor can no longer follow this run: %s", error)
            return False
        return True

    def _query_driver(self) -> None:
        # In this thread and between phases: a query while another thread captures a CUDA graph breaks the capture.
        if time.monotonic() - self._queried < self._every_seconds:
            return
        self._queried = time.monotonic()
        self._now = {**self._now, "free_bytes": self._tracker.meter.unheld_bytes()}

    def snapshot(self) -> dict[str, Any]:
        """Returns the run's status in plain values."""
        tracker, meter, live_bytes = self._tracker, self._tracker.meter, self._tracker.meter.live_bytes()
        peaks = dict(self._peaks)
        for name, peak in dict(tracker.phase_peaks).items():
            peaks[str(name)] = max(peaks.get(name, 0), peak)
        plans = (tracker.rollout_plan, tracker.update_plan)
        predicted = {name: size for plan in plans for name, size in plan.predicted_bytes.items() if "/" not in name}
        events, end = tracker.events, len(tracker.events)
        self._counted.update(event["event"] for event in events[self._seen : end])
        self._seen = end
        return {
            **self._fixed,
            **self._now,
            "written": time.time(),
            "phase": str(tracker.phase_now),
            "budget_bytes": tracker.budget_bytes,
            "allocated_bytes": live_bytes,
            "reserved_bytes": meter.reserved_bytes(),
            "phase_peak_bytes": peaks,
            "peak_bytes": max(peaks.values(), default=live_bytes),
            "predicted_bytes": predicted,
            "allocator_retries": meter.allocator_retries(),
            "allocator_ooms": meter.refusals(),
            "failures": self._counted["failure"],
            "retries": self._counted["retry"],
        }


def _keep_writing(watched: weakref.ref[StatusFile], over: threading.Event, every_seconds: float) -> None:
    while not over.wait(every_seconds):
        status = watched()
        if status is None or not status.write():
            return
        del status
