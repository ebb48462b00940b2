"""The logs a run writes: metrics, memory events, every step, and what the run is."""

from __future__ import annotations

import json
import math
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from memsafe_rl.diagnostics.status import MEMORY_FILE, METRICS_FILE, RUN_FILE, STEPS_FILE, write_json
from memsafe_rl.memory.runtime.device_readings import device_facts
from memsafe_rl.memory.runtime.tracker import MemoryTracker

_VERSIONS_OF = ("memsafe-rl", "torch", "transformers", "peft", "accelerate", "bitsandbytes", "vllm")


class MetricsLog(TrainerCallback):  # type: ignore[misc]
    """Appends every log to `metrics.jsonl` and every memory event to `memory.jsonl` in the run's folder."""

    def __init__(self, output_dir: Path, events: Sequence[Mapping[str, Any]]) -> None:
        self._output_dir = output_dir
        self._events = events
        self._written = 0
        self._is_main = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Opens the logs; a resume drops the lines of steps that run again."""
        if not state.is_world_process_zero:
            return
        self._is_main = True
        self._output_dir.mkdir(parents=True, exist_ok=True)
        _keep_lines(self._output_dir / METRICS_FILE, state.global_step)
        _keep_lines(self._output_dir / MEMORY_FILE, state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:  # noqa: ARG002
        """Writes one line of metrics."""
        if state.is_world_process_zero and logs is not None and self._output_dir.exists():
            _append(self._output_dir / METRICS_FILE, [{"step": state.global_step, **logs}])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Writes the memory events of the step."""
        self._is_main = bool(state.is_world_process_zero)
        self._write_events()

    def close(self) -> None:
        """Writes the events of an unfinished step."""
        self._write_events()

    def _write_events(self) -> None:
        if self._is_main and self._output_dir.exists():
            _append(self._output_dir / MEMORY_FILE, self._events[self._written :])
            self._written = len(self._events)


class RunRecord(TrainerCallback):  # type: ignore[misc]
    """Writes what a run is to `run.json`, and every step, logged or not, to `steps.jsonl`."""

    def __init__(
        self,
        output_dir: Path,
        tracker: MemoryTracker,
        device: torch.device,
        facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._output_dir = output_dir
        self._tracker = tracker
        self._device = device
        self._facts = facts
        self._is_main = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Writes down what the run is; a resume drops the lines of steps that run again."""
        if not state.is_world_process_zero:
            return
        self._is_main = True
        self._output_dir.mkdir(parents=True, exist_ok=True)
        _keep_lines(self._output_dir / STEPS_FILE, state.global_step)
        content = {
            "began": time.time(),
            "first_step": state.global_step,
            "max_steps": state.max_steps,
            "device": asdict(device_facts(self._tracker.meter, self._device)),
            "budget_bytes": self._tracker.budget_bytes,
            "counts_tensors": self._tracker.meter.is_exact,
            "versions": {"python": platform.python_version(), **_versions()},
            "command": " ".join(sys.argv),
            "config": args.to_sanitized_dict(),
            **self._facts(),
        }
        write_json(self._output_dir / RUN_FILE, content)

    def on_progress(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one line; called by the trainer after every optimizer step."""
        if not self._is_main or not self._output_dir.exists():
            return
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = {"step": step, "seconds": time.time(), **finite, "held_at_peak": self._tracker.step_parts}
        _append(self._output_dir / STEPS_FILE, [line])


def _append(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record, default=str) + "\n" for record in records)


def _keep_lines(path: Path, last_step: int) -> None:
    """Keeps a log's lines up to a step; none where a run begins."""
    lines = path.read_text().splitlines() if path.exists() and last_step > 0 else []
    kept = [line for line in lines if json.loads(line)["step"] <= last_step]
    path.write_text("".join(line + "\n" for line in kept))


@cache
def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONS_OF:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
