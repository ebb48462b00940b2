"""What a step needs (`TrainingSetup`), and where a run stands (`RunState`)."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import TrainerState

from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.config.degradation import Degradation
from memsafe_rl.config.objectives import Objective
from memsafe_rl.data.environments import EnvironmentPool
from memsafe_rl.data.partial_rollouts import OpenGroup
from memsafe_rl.data.prompts import PromptSource
from memsafe_rl.errors import ConfigError, MemoryBudgetError
from memsafe_rl.memory.planning.policies import MemoryPolicy
from memsafe_rl.memory.runtime.recovery import RandomState, Recovery, capture_random_state
from memsafe_rl.memory.runtime.stages import Stage
from memsafe_rl.memory.runtime.tracker import Holdings, MemoryTracker
from memsafe_rl.micro_batches import Cursor
from memsafe_rl.models.adapter import Context
from memsafe_rl.models.language.causal_lm import autocast
from memsafe_rl.parallel.one_process import WHOLE, OneProcess
from memsafe_rl.parallel.replicas import Parallel
from memsafe_rl.parallel.shards import Shards
from memsafe_rl.records import RecordLog
from memsafe_rl.rewards.runner import RewardRunner, RewardScores
from memsafe_rl.rollout.engine import RolloutEngine
from memsafe_rl.rollout.multi_turn.roles import ModelRoles
from memsafe_rl.training.algorithms.advantages import Advantages
from memsafe_rl.training.algorithms.objectives import Combiner, Controllers
from memsafe_rl.training.assembly.protocol import ModelFactory
from memsafe_rl.training.metrics.alarms import AlarmWatch
from memsafe_rl.training.optim.optimizer import Committer, trained_parameters
from memsafe_rl.training.samples import Rollout
from memsafe_rl.types import (
    LossSettings,
    MemoryState,
    ModelGeometry,
    RolloutPlan,
    SamplingSettings,
    Trajectory,
    UpdatePlan,
)

logger = logging.getLogger(__name__)


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
    rank_randoms: list[RandomState] = field(default_factory=list)  # those of all ranks, as last heard of
    ending: Ending | None = None  # what still follows the step just done; None where nothing does

    @classmethod
    def at_start(cls, config: TrainerConfig, *, is_main: bool) -> RunState:
        """Returns where a run begins."""
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

    def note_random(self, setup: TrainingSetup) -> None:
        """Notes where the random generators of all ranks stand, since the main rank may come to save alone."""
        self.random = setup.recovery.repeat(Stage.PREPARE, capture_random_state)
        self.rank_randoms = setup.parallel.gather([self.random])

    def advance(self, config: TrainerConfig, *, stop: bool = False) -> Rollout | None:
        """Moves on by a step, past the rest of the rollout on `stop`; returns the rollout that is used up with it."""
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
    """Returns a step's numbers as they were logged, from its line in `steps.jsonl`."""
    numbers = {name: value for name, value in line.items() if name not in ("seconds", "held_at_peak")}
    numbers = {name: math.nan if value is None else value for name, value in numbers.items()}
    return numbers | {"step": float(line["step"])}


DrawRollout = Callable[[list[Any]], Mapping[str, Any]]
"""A user's `rollout_func`, its trainer given already."""


def nothing(*_: Any) -> None:
    """Does nothing where somebody could be told, or make room."""


@dataclass(frozen=True)
class StepSettings:
    """What follows from the configuration and is asked at each step; worked out once, when the parts are built."""

    rollout_rows: int  # completions of a rollout, over all ranks
    step_rows: int  # completions of an optimizer step, over all ranks
    prompts_per_rollout: int
    updates_per_epoch: int
    order_seed: int  # of every order of prompts and rows
    has_reference: bool  # whether a reference is scored
    every_row_learns: bool  # whether rows without advantage move weights too
    marks_tokens: bool  # whether a step marks tokens by scores of all its rows, before it is cut
    gives_entropy_bonus: bool
    autocast_dtype: torch.dtype | None  # None for the weights' own
    loss: LossSettings
    objectives: tuple[Objective, ...]  # empty where there is but the weighted sum of all rewards
    advantages: Mapping[str, str]  # how a group's rewards are compared
    watches_updates: bool  # whether it is seen if half-precision weights stop moving

    @classmethod
    def of(cls, config: TrainerConfig) -> StepSettings:
        """Works them out."""
        own: dict[str, Any] = {
            "loss": config.loss_settings(),
            "objectives": config.objective_list,
            "advantages": config.advantage_settings(),
            "watches_updates": config.alarm_rules.lost_updates is not None,
        }
        return cls(**own, **{entry.name: getattr(config, entry.name) for entry in fields(cls) if entry.name not in own})


@dataclass(frozen=True)
class TrainingSetup:
    """The parts of a training step; none of them knows of the loop, or of the trainer that owns it."""

    config: TrainerConfig  # the run's settings
    adapter: Any  # the model
    # a frozen copy for the reference; None where there is none, or an adapter is switched off
    reference_model: nn.Module | None
    models: ModelFactory  # reads prompts, shows samples and writes weights of this kind of model
    engine: RolloutEngine  # draws completions
    sampling: SamplingSettings  # how they are drawn
    rewards: RewardRunner  # the reward functions
    memory_policy: MemoryPolicy  # makes the plans
    recovery: Recovery  # repeats stages that run out of memory, and tracks the run's memory
    holdings: Holdings  # what the run is known to hold
    parallel: Parallel  # the processes of the run
    advantages: Advantages  # turns rewards into advantages
    combiner: Combiner  # makes one gradient of the objectives'
    source: PromptSource  # the prompts by position
    dataset: Any  # the prompts as a dataset
    roles: ModelRoles  # the model under its adapters, as users of episodes
    shards: Shards = WHOLE  # where the weights lie: whole on every rank, or divided
    environments: EnvironmentPool | None = None  # where episodes are played; None where a completion is one turn
    draw_rollout: DrawRollout | None = None  # draws completions in place of the engine; None for the engine
    committer: Committer | None = None  # moves the weights; None before training begins
    on_sampling: Callable[[int, int], None] = nothing  # told how many completions have ended, of how many
    on_rewards: Callable[[RewardScores], None] = nothing  # told what one call of all reward functions gave
    # takes what a plan wants elsewhere from the device before the gradient is accumulated
    make_room: Callable[[UpdatePlan], None] = nothing

    @cached_property
    def settings(self) -> StepSettings:
        """What follows from the configuration as it was when these parts were put together."""
        return StepSettings.of(self.config)

    def contributing(self, trajectory: Trajectory, rows: Sequence[int]) -> list[int]:
        """Returns the rows that can move a weight; without advantage only by another term, as of KL or experts."""
        every_row = self.settings.every_row_learns or self.adapter.routers is not None
        counted = [row for row in rows if trajectory.counted_actions[row] > 0]
        return counted if every_row else [row for row in counted if trajectory.has_advantage[row]]

    @property
    def memory(self) -> MemoryTracker:
        """The run's memory: budget, plans, peaks and events."""
        return self.recovery.tracker

    @property
    def model(self) -> nn.Module:
        """The network that is trained."""
        model: nn.Module = self.adapter.model
        return model

    @property
    def committed(self) -> Committer:
        """What moves the weights, once training has begun."""
        assert self.committer is not None, "training has not begun"
        return self.committer

    @property
    def can_save_alone(self) -> bool:
        """Whether a rank by itself can save its weights: all of them, as after the last step that was counted."""
        return not self.shards.divided and self.committer is not None and not self.committer.uncounted

    @property
    def beside(self) -> dict[str, nn.Module]:
        """What is trained beside the model: the weights of a critic that are no part of it."""
        return dict(zip(["critic"], (one.beside for one in self.advantages.critics), strict=False))

    @property
    def trained(self) -> nn.Module:
        """The module of all that is trained."""
        return nn.ModuleDict({"model": self.model, **self.beside}) if self.beside else self.model

    @property
    def whole_gradient_bytes(self) -> int:
        """Bytes of whole gradients as ranks add them up, in float32 or wider; 0 where each holds its own whole."""
        trained = trained_parameters(self.trained) if self.shards.in_rounds else ()
        return sum(weight.numel() * max(4, weight.itemsize) for weight in trained)

    @property
    def networks(self) -> tuple[nn.Module, ...]:
        """Every network whose weights lie on the device."""
        reference = () if self.reference_model is None else (self.reference_model,)
        return (self.model, *reference, *self.beside.values(), *self.rewards.models)

    @property
    def readers(self) -> dict[str, ModelGeometry]:
        """Sizes of the networks that read whole rows, by what they are called."""
        own = (one.own_geometry for one in self.advantages.critics if one.own_geometry is not None)
        return dict(zip(["model", "critic"], [self.adapter.geometry, *own], strict=False))

    def drawing_as_told(self) -> TrainingSetup:
        """Returns a setup that draws as the configuration says now."""
        sampling = self.models.sampling_settings(self.adapter)
        self.engine.check(sampling)
        return replace(self, sampling=sampling)

    @property
    def planned_steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self.config.max_steps > 0:
            return self.config.max_steps
        if self.steps_per_epoch is None:
            raise ConfigError("max_steps is -1 but the dataset is a stream of unknown length. Set max_steps.")
        return math.ceil(self.config.num_train_epochs * self.steps_per_epoch)

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of one pass over the prompts; None for a stream."""
        config, per_epoch = self.config, self.source.prompts_per_epoch
        return None if per_epoch is None else per_epoch // config.prompts_per_rollout * config.steps_per_rollout

    def memory_state(self) -> MemoryState:
        """Returns what a policy may know of the device, on which no frozen weights are left that only passed by."""
        self.adapter.host_weights.release()
        return self.memory.state()

    def return_weights(self) -> None:
        """Brings the model's frozen weights to the device; without room, leaves them on the host as plain tensors."""
        try:
            self.recovery.repeat(Stage.PREPARE, self.adapter.host_weights.bring_back, self.adapter.device)
        except MemoryBudgetError:
            self.adapter.host_weights.settle_on_host()
            logger.warning(
                "Frozen weights stay in host memory, since the device has no room for all of them. Move the model "
                "there (trainer.model.cpu()) before you merge its adapter or run it outside of the trainer."
            )

    def gathered(self, network: nn.Module | None = None) -> AbstractContextManager[None]:
        """The context of passes of a network (None: the model) without gradient: its weights lie whole."""
        return self.shards.gathered(self.recovery.repeat, network or self.model)

    @contextmanager
    def under(self, plan: RolloutPlan | UpdatePlan, enter: Context) -> Iterator[None]:
        """A unit of work's context: state and frozen weights lie where its plan wants them, none that only passed."""
        if plan.park_optimizer and self.committer is not None:
            self.committer.park()
        try:
            self.adapter.host_weights.place(plan.resident_blocks, self.adapter.device)
            with enter():
                yield
        finally:
            self.adapter.host_weights.release()

    @contextmanager
    def row_by_row(self) -> Iterator[None]:
        """The context of a forward whose numbers for a row must not depend, to the bit, on how rows are cut."""
        exact = getattr(self.adapter, "numerics", None)
        with self.autocast(), nullcontext() if exact is None else exact(invariant=True):
            yield

    def autocast(self) -> torch.autocast:
        """Returns the context of a forward pass; left after each, so that its weight cache never outlives one."""
        return autocast(self.adapter.device, self.settings.autocast_dtype)

    def dry(self, memory_policy: MemoryPolicy | None = None, *, step: int = 0, **other: Any) -> TrainingSetup:
        """Returns a setup whose steps leave this one's plans, events, metrics and ranks alone; ``other`` parts differ.

        It shares model, optimizer and device, runs alone, without dropout, and informs nobody.
        """
        memory, policy = self.memory.fork(), memory_policy or self.memory_policy
        memory.step = step
        config = copy.copy(self.config)
        config.disable_dropout = True
        parts: dict[str, Any] = {
            "config": config,
            "memory_policy": policy,
            "recovery": Recovery(memory, policy),
            "parallel": OneProcess(),
            "on_sampling": nothing,
            "on_rewards": nothing,
        }
        return replace(self, **(parts | other))
