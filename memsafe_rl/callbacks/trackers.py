"""Logs passed on to the trackers that accelerate knows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate.tracking import get_available_trackers
from transformers import TrainerCallback
from transformers.integrations.integration_utils import rewrite_logs

from memsafe_rl.errors import ConfigError, kind_and_line


def check_installed(trackers: Sequence[str]) -> None:
    """Refuses trackers that are not installed, of which accelerate only warns."""
    installed = {str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()}
    missing = [name for name in trackers if name not in installed]
    if missing:
        raise ConfigError(f"report_to has {missing[0]!r}, which is not installed. Install it, or leave it out.")


class Trackers(TrainerCallback):  # type: ignore[misc]
    """Passes logs to the trackers that accelerate knows (wandb, tensorboard, trackio ...)."""

    def __init__(self, accelerator: Any, *, project: str, run_name: str | None) -> None:
        self._accelerator = accelerator
        self._project = project
        self._run_name = run_name
        self._is_open = False

    def open(self, args: Any) -> None:
        """Opens the trackers with the run's configuration, before hours are spent on a run that none can follow."""
        options: dict[str, dict[str, Any]] = {"wandb": {"name": self._run_name}} if self._run_name else {}
        if args.trackio_space_id:
            options["trackio"] = {"space_id": args.trackio_space_id}
        try:
            project = os.environ.get("WANDB_PROJECT", self._project) if "wandb" in args.trackers else self._project
            self._accelerator.init_trackers(project, config=args.to_sanitized_dict(), init_kwargs=options)
        except Exception as error:
            told = kind_and_line(error)
            named = ", ".join(args.trackers)
            raise ConfigError(
                f"report_to is {named}, which cannot be opened ({told}). Log in to it, or leave it out."
            ) from error
        self._is_open = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Opens the trackers again for a second run of the same trainer."""
        if not self._is_open:
            self.open(args)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:  # noqa: ARG002
        """Passes one log on, as train/... or eval/...; one that follows training opens the trackers again."""
        if not self._is_open:
            self.open(args)
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, (int, float))}
        self._accelerator.log(rewrite_logs(numbers), step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Closes the trackers but wandb's run, which goes on as with transformers: it may be the user's own."""
        for tracker in self._accelerator.trackers:  # not by `end_training`, which would end the process group too
            if tracker.name != "wandb":
                tracker.finish()
        self._is_open = False
