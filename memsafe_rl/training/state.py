"""Where a run stands: what a checkpoint holds beside weights and optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerState

from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.config.degradation import Degradation
from memsafe_rl.data.partial_rollouts import OpenGroup
from memsafe_rl.memory.runtime.recovery import RandomState
from memsafe_rl.records import RecordLog
from memsafe_rl.slices import Cursor
from memsafe_rl.training.algorithms.objectives import Controllers
from memsafe_rl.training.metrics.alarms import AlarmWatch
from memsafe_rl.training.samples import Rollout


@dataclass
class Ending:
    """What still follows a step that has moved the weights; one that is cut short is finished by the resume."""

    epoch_before: float  # passes over the dataset before the step
    told: list[str] = field(default_factory=list)  # which of the callbacks' events at its end are over


@dataclass
class RunState:
    """Where a run stands between two steps."""

    controllers: Controllers  # coefficients moved by the run's own measurements
    alarms: AlarmWatch  # which rules are broken
    progress: TrainerState  # steps, epochs and logs, in transformers' form
    cursor: Cursor = field(default_factory=Cursor)  # the next optimizer step, in plain integers
    rollout: Rollout | None = None  # what is being trained on; None where the next step draws anew
    waiting: tuple[OpenGroup, ...] = ()  # groups of completions that the next rollout resumes
    history: RecordLog = field(default_factory=lambda: RecordLog(_step_record))  # one record a step, of `steps.jsonl`
    degradations: list[Degradation] = field(default_factory=list)  # changes of the task, taken where no plan fitted
    random: RandomState | None = None  # of the random generators at the step's beginning; None between steps
    ending: Ending | None = None  # what still follows the step just done; None where nothing does

    @classmethod
    def at_start(cls, config: TrainerConfig, *, is_main: bool) -> RunState:
        """Gives where a run begins."""
        bands = {one.name: one.kl_band for one in config.objective_list if one.kl_band is not None}
        return cls(
            Controllers.at_start(config),
            AlarmWatch(config.alarm_rules, bands),
            TrainerState(is_world_process_zero=is_main, is_local_process_zero=is_main),
        )

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.progress.global_step)

    @property
    def consumed(self) -> int:
        """Prompts that the present rollout has taken from the source."""
        return 0 if self.rollout is None else self.rollout.consumed

    def advance(self, config: TrainerConfig, *, stop: bool = False) -> Rollout | None:
        """Moves on by a step, past the rest of the rollout on `stop`; gives the rollout that is used up with it."""
        before, rollout = self.cursor, self.rollout
        self.cursor = before.advance(
            steps=config.updates_per_epoch, epochs=config.num_iterations, consumed=self.consumed, stop=stop
        )
        self.progress.global_step += 1
        if self.cursor.rollout == before.rollout:
            return None
        self.leave_rollout()
        return rollout

    def leave_rollout(self) -> None:
        """Lets go of a rollout that is used up; its unfinished groups wait for the next one."""
        self.waiting = () if self.rollout is None else self.rollout.waiting
        self.rollout = None


def _step_record(line: dict[str, Any]) -> dict[str, Any]:
    """Gives a step's numbers as they were logged, from its line in `steps.jsonl`."""
    numbers = {name: value for name, value in line.items() if name not in ("seconds", "held_at_peak")}
    numbers = {name: math.nan if value is None else value for name, value in numbers.items()}
    return numbers | {"step": float(line["step"])}
