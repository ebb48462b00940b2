"""What a run is, written once when it begins."""

from __future__ import annotations

import logging
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from memsafe_rl.diagnostics.status import versions, write_json
from memsafe_rl.memory.runtime.device_readings import device_facts
from memsafe_rl.memory.runtime.tracker import MemoryTracker
from memsafe_rl.records import RUN_FILE, read_json

logger = logging.getLogger(__name__)


class RunRecord(TrainerCallback):  # type: ignore[misc]
    """Writes what a run is to `run.json`."""

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

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Writes down what the run is, beside whose it is."""
        if not state.is_world_process_zero:
            return
        known = read_json(self._output_dir / RUN_FILE) or {}
        now = {"began": time.time(), "first_step": state.global_step, "command": " ".join(sys.argv)}
        content = {
            **known,
            **now,
            "starts": [*known.get("starts", ()), {"start": known.get("start", 0), **now}],
            "max_steps": state.max_steps,
            "device": asdict(device_facts(self._tracker.meter, self._device)),
            "budget_bytes": self._tracker.budget_bytes,
            "counts_tensors": self._tracker.meter.is_exact,
            "versions": {"python": platform.python_version(), **versions()},
            "config": args.to_sanitized_dict(),
            **self._facts(),
        }
        try:
            write_json(self._output_dir / RUN_FILE, content)
        except OSError as error:
            logger.warning("%s cannot be written (%s)", self._output_dir / RUN_FILE, error.strerror)
