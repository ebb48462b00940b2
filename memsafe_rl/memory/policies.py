"""Memory policies: strategies that cut logical work into plans. Pure functions of work and memory.

A policy of one's own is a subclass with two methods::

    @dataclass(frozen=True)
    class OneRowAtATime(MemoryPolicy):
        def before_rollout(self, work, memory):
            return RolloutPlan(rows_in_flight=1)

        def before_update(self, work, memory):
            return UpdatePlan(micro_batch_tokens=1, checkpointing=True)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TypeVar

from memsafe_rl.memory.estimator import update_bytes
from memsafe_rl.types import MemoryFailure, MemoryState, ModelGeometry, RolloutPlan, RolloutWork, UpdatePlan, UpdateWork

Plan = TypeVar("Plan", RolloutPlan, UpdatePlan)

_TILE_BYTES = 32 * 2**20
"""A tile of fp32 logits of this size is large enough that a larger one is not faster."""
_FULL_SPEED_TOKENS = 16384
"""Tokens of a micro-batch beyond which no accelerator gains speed worth its memory."""
_CPU_FULL_SPEED_ELEMENTS = 2**18
"""Elements of a hidden state beyond which a CPU gains no speed worth its memory: on two cores a model of width 576 took
8.4 s for 2,048 tokens at a time (2.3 GiB) and 9.5 s for 512 (0.6 GiB)."""
_CPU_TOKENS = (256, 4096)
_FULL_SPEED_ROWS = 256
"""Sequences decoded together beyond which no device gains speed worth its memory."""
_LEAST_ROWS = 32
_CPU_ROWS_BYTES = 64 * 2**20
"""Caches and logits of the rows in flight beyond which a CPU gains no speed worth its memory."""
_ACTIVATION_SHARE = 0.8
"""Share of the free budget a plan may fill; the estimate of activations is rough."""


class MemoryPolicy(ABC):
    """Decides how logical work is cut to fit memory; never what the work is.

    Called once per rollout, once per optimizer step, and once per failure that outlives its same-plan retry.
    """

    @abstractmethod
    def before_rollout(self, work: RolloutWork, memory: MemoryState) -> RolloutPlan:
        """Plans a rollout and the scoring that follows it.

        Args:
            work: the shape of the rollout.
            memory: the device and this run's past.

        Returns:
            The plan.
        """

    @abstractmethod
    def before_update(self, work: UpdateWork, memory: MemoryState) -> UpdatePlan:
        """Plans one optimizer step.

        Args:
            work: the rows of the step.
            memory: the device and this run's past.

        Returns:
            The plan.
        """

    def after_oom(self, plan: Plan, failure: MemoryFailure) -> Plan | None:  # noqa: ARG002
        """Gives the next plan to try after one failed, or None to give up.

        Args:
            plan: the plan that failed twice.
            failure: what failed.

        Returns:
            A leaner plan, or None; this class always gives up.
        """
        return None


@dataclass(frozen=True)
class FixedPolicy(MemoryPolicy):
    """Always the plans the user wrote.

    Args:
        rollout: plan of every rollout.
        update: plan of every optimizer step.
    """

    rollout: RolloutPlan = field(default_factory=RolloutPlan)
    update: UpdatePlan = field(default_factory=UpdatePlan)

    def before_rollout(self, work: RolloutWork, memory: MemoryState) -> RolloutPlan:  # noqa: ARG002
        """Gives the fixed rollout plan."""
        return self.rollout

    def before_update(self, work: UpdateWork, memory: MemoryState) -> UpdatePlan:  # noqa: ARG002
        """Gives the fixed update plan."""
        return self.update


@dataclass(frozen=True)
class AdaptivePolicy(MemoryPolicy):
    """Chooses the cut from the budget: large enough to be fast, then as small as the budget asks.

    Args:
        checkpointing: True or False to insist, None to let the budget decide.
        trajectory_device: "device" or "host": where the trajectory waits between micro-batches.
    """

    checkpointing: bool | None = None
    trajectory_device: str = "host"

    def before_rollout(self, work: RolloutWork, memory: MemoryState) -> RolloutPlan:
        """Decodes as many rows together as are fast, or as the budget holds caches for.

        Args:
            work: the shape of the rollout.
            memory: the device and this run's past.

        Returns:
            The plan; at least one row in flight.
        """
        longest = max(work.prompt_tokens)
        row_bytes = work.geometry.kv_bytes(longest + work.max_new_tokens)
        room = _room(memory)
        worth = _FULL_SPEED_ROWS
        if memory.device == "cpu":
            worth = min(worth, max(_LEAST_ROWS, _CPU_ROWS_BYTES // (row_bytes + 4 * work.geometry.vocab_size)))
        rows = min(work.rows, worth, max(1, room // max(1, row_bytes)))
        tokens = _full_speed_tokens(memory, work.geometry)
        return RolloutPlan(rows_in_flight=rows, prefill_tokens=tokens, score_tokens=tokens, reward_rows=rows)

    def before_update(self, work: UpdateWork, memory: MemoryState) -> UpdatePlan:
        """Takes the largest micro-batch that is worth its memory and fits; checkpoints before going below one row.

        Args:
            work: the rows of the step.
            memory: the device and this run's past.

        Returns:
            The plan; when nothing fits, the smallest one: a single row, checkpointed.
        """
        longest = max(work.row_tokens, default=1)
        tile = max(64, min(sum(work.action_tokens), _TILE_BYTES // (4 * work.geometry.vocab_size)))
        fast = max(longest, min(_full_speed_tokens(memory, work.geometry), sum(work.row_tokens)))
        first = UpdatePlan(micro_batch_tokens=fast, logprob_tile=tile, trajectory_device=self.trajectory_device)
        choices = (False, True) if self.checkpointing is None else (self.checkpointing,)
        for checkpointing in choices:
            plan = _shrink_to(replace(first, checkpointing=checkpointing), longest, work, _room(memory))
            if plan is not None:
                return plan
        return replace(first, micro_batch_tokens=longest, checkpointing=choices[-1])


def _full_speed_tokens(memory: MemoryState, geometry: ModelGeometry) -> int:
    if memory.device != "cpu":
        return _FULL_SPEED_TOKENS
    least, most = _CPU_TOKENS
    return max(least, min(most, _CPU_FULL_SPEED_ELEMENTS // geometry.hidden_size))


def _room(memory: MemoryState) -> int:
    """Bytes a plan may fill: most of what the budget leaves above what is held now."""
    return max(0, int(_ACTIVATION_SHARE * (memory.budget_bytes - memory.live_bytes)))


def _shrink_to(plan: UpdatePlan, longest: int, work: UpdateWork, room_bytes: int) -> UpdatePlan | None:
    """Halves the micro-batch until it fits; None when not even the longest row does."""
    while True:
        predicted = update_bytes(work.geometry, plan)
        if predicted <= room_bytes:
            return replace(plan, predicted_bytes={"update": predicted})
        if plan.micro_batch_tokens <= longest:
            return None
        plan = replace(plan, micro_batch_tokens=max(longest, plan.micro_batch_tokens // 2))
