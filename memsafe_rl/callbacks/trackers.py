"""Logs passed on to the trackers that accelerate knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback


class Trackers(TrainerCallback):  # type: ignore[misc]
    """Passes logs to the trackers that accelerate knows (wandb, tensorboard, trackio ...)."""

    def __init__(self, accelerator: Any, *, project: str, run_name: str | None) -> None:
        self._accelerator = accelerator
        self._project = project
        self._run_name = run_name

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Opens the trackers with the run's configuration."""
        plain = {
            name: value if isinstance(value, (bool, int, float, str)) else str(value)
            for name, value in args.to_sanitized_dict().items()
        }
        named = {"wandb": {"name": self._run_name}} if self._run_name else {}
        self._accelerator.init_trackers(self._project, config=plain, init_kwargs=named)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:  # noqa: ARG002
        """Passes one log on."""
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, (int, float))}
        self._accelerator.log(numbers, step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Closes the trackers."""
        self._accelerator.end_training()
