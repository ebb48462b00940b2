"""Memory policies: strategies that cut logical work into plans, and what a plan may ask for. Pure functions.

A policy of one's own is a subclass with two methods::

    @dataclass(frozen=True)
    class OneRowAtATime(MemoryPolicy):
        def before_rollout(self, work, memory):
            return RolloutPlan(rows_in_flight=1)

        def before_update(self, work, memory):
            return UpdatePlan(micro_batch_tokens=1, checkpointing=True)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from numbers import Real
from typing import Any

from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.budget import AUTO_SHARE
from memsafe_rl.memory.planning.estimator import (
    full_speed_packed_tokens,
    full_speed_rows,
    full_speed_tile,
    full_speed_tokens,
    rollout_time,
    update_time,
)
from memsafe_rl.memory.planning.search import (
    LOSSLESS,
    Fallback,
    Plan,
    Room,
    fallbacks_named,
    fastest_with_weights_away,
    first_that_fits,
    leaner,
    next_plan,
    with_prediction,
)
from memsafe_rl.micro_batches import measure_slices, packing_saves
from memsafe_rl.types import (
    COMPILE_MODES,
    MemoryFailure,
    MemoryState,
    ModelGeometry,
    Phase,
    RolloutPlan,
    RolloutWork,
    UpdatePlan,
    UpdateWork,
)

_GIB = 2**30
_OF_A_ROLLOUT = (Phase.ROLLOUT, Phase.SCORE, Phase.REWARD)


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
        """Returns the next plan to try after one failed, or None to give up.

        Args:
            plan: the plan that failed twice.
            failure: what failed.

        Returns:
            A leaner plan, or None; this class always gives up.
        """
        return None


@dataclass(frozen=True)
class FixedPolicy(MemoryPolicy):
    """Always the plans the user wrote; a failure that outlives its retry is final.

    Args:
        rollout: plan of every rollout.
        update: plan of every optimizer step.

    Raises:
        ConfigError: A plan cannot be carried out.
    """

    rollout: RolloutPlan = field(default_factory=RolloutPlan)
    update: UpdatePlan = field(default_factory=UpdatePlan)

    def __post_init__(self) -> None:
        check_plan(self.rollout, RolloutPlan)
        check_plan(self.update, UpdatePlan)

    def before_rollout(self, work: RolloutWork, memory: MemoryState) -> RolloutPlan:
        """Returns the fixed rollout plan, with what it is predicted to hold."""
        return with_prediction(self.rollout, work, memory)

    def before_update(self, work: UpdateWork, memory: MemoryState) -> UpdatePlan:
        """Returns the fixed update plan, with what it is predicted to hold."""
        return with_prediction(self.update, work, memory)


@dataclass(frozen=True)
class AdaptivePolicy(MemoryPolicy):
    """Chooses the cut from the budget: the leanest within a tenth of the fastest, or the fastest that fits.

    Estimates are multiplied by what measurements of earlier plans say. A failure takes as many fallbacks down as its
    estimate asks for, those that change no bit first; later plans stay below what failed, and after 8 steps without
    trouble they grow by a notch again, after twice as many if that fails.

    Args:
        checkpointing: True or False to insist, None to let the budget decide.
        trajectory_device: "device" or "host": where the trajectory waits between micro-batches.
        pack_prompts: whether completions share one copy of their prompt, where they can; None for yes where it spares
            a tenth of the tokens, which then costs neither bytes nor time.
        compile: mode of `torch.compile` for decoding steps and blocks; None for none.
        offload_activations: True to insist on activations in host memory, False to let the budget decide.
    """

    checkpointing: bool | None = None
    trajectory_device: str = "host"
    pack_prompts: bool | None = None
    compile: str | None = None
    offload_activations: bool = False

    def __post_init__(self) -> None:
        _check_fields(self)

    def before_rollout(self, work: RolloutWork, memory: MemoryState) -> RolloutPlan:
        """Decodes and scores as many rows together as are fast, or as fit: one row in flight when nothing fits."""
        rows = full_speed_rows(memory.device, work)
        tokens = full_speed_tokens(memory.device, work.geometry)
        plan = fast = RolloutPlan(
            rows_in_flight=rows,
            prefill_tokens=tokens,
            score_tokens=tokens,
            reward_rows=rows,
            kept_kv_bytes=work.kept_bytes,
            compile=self.compile,
        )
        for phase in _OF_A_ROLLOUT:
            time = partial(rollout_time, phase, work, fastest=fast)
            plan = fastest_with_weights_away(plan, self._fallbacks(phase, memory), Room(phase, work, memory), time)
        return with_prediction(plan, work, memory)

    def before_update(self, work: UpdateWork, memory: MemoryState) -> UpdatePlan:
        """Takes the largest micro-batch worth its memory, and the fastest plan that fits, else the smallest."""
        packs = _packs(self.pack_prompts, work)
        fast = UpdatePlan(
            micro_batch_tokens=full_speed_packed_tokens(memory.device, work)
            if packs
            else max(work.least_tokens, min(full_speed_tokens(memory.device, work.geometry), sum(work.row_tokens))),
            logprob_tile=full_speed_tile(memory.device, work),
            checkpointing=bool(self.checkpointing),
            offload_activations=self.offload_activations,
            pack_prompts=packs,
            trajectory_device=self.trajectory_device,
            reduce_each=not work.whole_gradient_bytes,
            resident_blocks=_reference_away(work.geometry, memory),
            compile=self.compile,
        )
        fallbacks, room = self._fallbacks(Phase.UPDATE, memory), Room(Phase.UPDATE, work, memory)
        alone = measure_slices(work, fast.micro_batch_tokens, packed=packs).number == 1
        time = partial(update_time, memory.device, work, fastest=replace(fast, reduce_each=alone))
        return with_prediction(fastest_with_weights_away(fast, fallbacks, room, time), work, memory)

    def after_oom(self, plan: Plan, failure: MemoryFailure) -> Plan | None:
        """Goes down the lossless fallbacks, as far as the estimate asks for; None when there is none."""
        return next_plan(plan, failure, fallbacks_named(self._names(), failure.phase))

    def _names(self) -> tuple[str, ...]:
        return tuple(name for name in LOSSLESS if name != "checkpointing" or self.checkpointing is None)

    def _fallbacks(self, phase: Phase, memory: MemoryState) -> tuple[Fallback, ...]:
        """Returns the fallbacks worth planning with; waves shrink prompts too; only known state can be offloaded."""
        left_out = {"prefill_tokens", "resident_blocks"} | (set() if memory.optimizer_bytes else {"park_optimizer"})
        names = [name for name in self._names() if name not in left_out]
        return tuple(replace(found, step=found.fine_step or found.step) for found in fallbacks_named(names, phase))


@dataclass(frozen=True)
class LadderPolicy(MemoryPolicy):
    """Starts at the user's plans and goes down fallback by fallback, until the estimate fits and after each failure.

    Where it stands is read from the last plans in ``memory``, so that a resumed run stands where it stood.

    Args:
        fallbacks: names of lossless fallbacks, in order; each is taken to its bottom before the next.
        rollout: the rollout plan at the top.
        update: the update plan at the top.
        climbs: False never goes up again. True starts at the top each time, but stays below what failed until 8 steps
            went without trouble, and twice as many after each further failure.
        pack_prompts: whether completions share one copy of their prompt, where they can; None for yes where the plan
            at the top says so, or where it spares a tenth of the tokens, which then costs neither bytes nor time.
    """

    fallbacks: tuple[str, ...] = LOSSLESS
    rollout: RolloutPlan = field(default_factory=RolloutPlan)
    update: UpdatePlan = field(default_factory=UpdatePlan)
    climbs: bool = False
    pack_prompts: bool | None = None

    def __post_init__(self) -> None:
        check_plan(self.rollout, RolloutPlan)
        check_plan(self.update, UpdatePlan)
        _check_fields(self)
        fallbacks_named(self.fallbacks, Phase.UPDATE)

    def before_rollout(self, work: RolloutWork, memory: MemoryState) -> RolloutPlan:
        """Goes down from the top, or from the last plan, to the first plan that fits, else to the ladder's bottom."""
        return self._descended(self.rollout, memory.last_rollout_plan, _OF_A_ROLLOUT, work, memory)

    def before_update(self, work: UpdateWork, memory: MemoryState) -> UpdatePlan:
        """Goes down from the top, or from the last plan, to the first plan that fits, else to the ladder's bottom."""
        wanted = (self.update.pack_prompts or None) if self.pack_prompts is None else self.pack_prompts
        top = replace(self.update, pack_prompts=_packs(wanted, work))
        return self._descended(top, memory.last_update_plan, (Phase.UPDATE,), work, memory)

    def after_oom(self, plan: Plan, failure: MemoryFailure) -> Plan | None:
        """Goes down as many fallbacks as the estimate asks for, at least one; None at the bottom of the ladder."""
        return next_plan(plan, failure, fallbacks_named(self.fallbacks, failure.phase))

    def _descended(
        self, top: Plan, last: Plan | None, phases: Sequence[Phase], work: RolloutWork | UpdateWork, memory: MemoryState
    ) -> Plan:
        """Goes down from the top, or from the last plan, until each phase fits or its fallbacks are used up."""
        plan = top if last is None or self.climbs else leaner(top, last)
        for phase in phases:
            plan = first_that_fits(plan, fallbacks_named(self.fallbacks, phase), Room(phase, work, memory))
        return with_prediction(plan, work, memory)


@dataclass(frozen=True)
class WithinBudget(MemoryPolicy):
    """Another policy's plans, made for a budget of at most so many bytes; an example of how policies compose."""

    policy: MemoryPolicy  # makes the plans
    budget_bytes: int  # bytes; a smaller budget of the run still counts

    def __post_init__(self) -> None:
        if not isinstance(self.policy, MemoryPolicy):
            raise ConfigError(f"WithinBudget.policy is {self.policy!r}; pass a MemoryPolicy, such as AdaptivePolicy().")
        size: Any = self.budget_bytes
        if isinstance(size, bool) or not isinstance(size, Real) or size <= 0:
            raise ConfigError(f"WithinBudget.budget_bytes is {size!r}; it must be a number of bytes above 0.")

    def before_rollout(self, work: RolloutWork, memory: MemoryState) -> RolloutPlan:
        """Asks the other policy with the smaller budget."""
        return self.policy.before_rollout(work, self._bounded(memory))

    def before_update(self, work: UpdateWork, memory: MemoryState) -> UpdatePlan:
        """Asks the other policy with the smaller budget."""
        return self.policy.before_update(work, self._bounded(memory))

    def after_oom(self, plan: Plan, failure: MemoryFailure) -> Plan | None:
        """Asks the other policy, with the smaller budget in the failure."""
        return self.policy.after_oom(plan, replace(failure, budget_bytes=min(failure.budget_bytes, self.budget_bytes)))

    def _bounded(self, memory: MemoryState) -> MemoryState:
        return replace(memory, budget_bytes=min(memory.budget_bytes, self.budget_bytes))


def _reference_away(geometry: ModelGeometry, memory: MemoryState) -> int | None:
    """Returns the blocks on the device where a reference's are all away, which an update need not bring back."""
    away = memory.resident_blocks is not None and memory.resident_blocks <= geometry.model_blocks
    return geometry.model_blocks if away and geometry.reference_blocks else None


def _packs(wanted: bool | None, work: UpdateWork) -> bool:
    """Whether a plan packs prompts: where it can, as the user wants it, or where it is worth while."""
    return bool(work.prompts) and (packing_saves(work) if wanted is None else wanted)


_MAY_BE_ZERO = ("kept_kv_bytes", "resident_blocks")
_CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "cache_dtype": (None, "int8"),
    "trajectory_device": ("device", "host"),
    "compile": (None, *COMPILE_MODES),
}


def check_packing(plan: UpdatePlan, work: UpdateWork) -> None:
    """Refuses a plan that packs what cannot be packed."""
    if plan.pack_prompts and work.row_tokens and not work.prompts:
        raise ConfigError(
            f"UpdatePlan.pack_prompts is True, but these {len(work.row_tokens)} rows cannot share their prompts: the "
            "network gives packed rows other log-probs (logged at level info), has a balance loss on experts "
            "(router_aux_loss_coef), or learns under dropout (disable_dropout=False). Leave pack_prompts out, or set "
            "it only where work.prompts is not empty."
        )


def check_plan(plan: Any, kind: type[RolloutPlan | UpdatePlan]) -> None:
    """Refuses what is no plan of a kind, and counts, switches, predictions and choices that cannot be meant."""
    if type(plan) is not kind:  # by which plans are kept and resumed
        raise ConfigError(f"The memory policy answered {plan!r} where it must give a {kind.__name__} itself.")
    _check_fields(plan)
    called, predicted = type(plan).__name__, plan.predicted_bytes
    if not isinstance(predicted, Mapping):
        raise ConfigError(
            f"{called}.predicted_bytes is {predicted!r}; it must be a mapping of phase to bytes. Leave it out."
        )
    for name, size in predicted.items():
        known: Any = name
        if not isinstance(known, str):
            raise ConfigError(f"{called}.predicted_bytes has a key {name!r}; it must be the name of a phase.")
        if isinstance(size, bool) or not isinstance(size, (int, float)) or not math.isfinite(size):
            raise ConfigError(f"{called}.predicted_bytes[{name!r}] is {size!r}; it must be bytes.")
    if plan.compile is not None and plan.resident_blocks is not None:
        raise ConfigError(
            f"{called} has compile={plan.compile!r} and resident_blocks={plan.resident_blocks}, but weights that come "
            "and go cannot be compiled in. Leave one of the two None."
        )


def _check_fields(plan: Any) -> None:
    """Refuses a count, a switch or a choice of a plan or a policy that cannot be meant."""
    for entry in fields(plan):
        where, kind, value = f"{type(plan).__name__}.{entry.name}", str(entry.type), getattr(plan, entry.name)
        if value is None and kind.endswith("None"):
            continue
        if kind.startswith("int") and isinstance(plan, (RolloutPlan, UpdatePlan)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{where} is {value!r}; it must be a whole number, without quotes.")
            if value < (least := 0 if entry.name in _MAY_BE_ZERO else 1):
                raise ConfigError(f"{where} is {value}; it must be at least {least}.")
        if kind.startswith("bool") and not isinstance(value, bool):
            raise ConfigError(f"{where} is {value!r}; write True or False.")
        if value not in (known := _CHOICES.get(entry.name, (value,))):
            raise ConfigError(f"{where} is {value!r}; write one of {', '.join(map(repr, known))}.")


_GIB_OF = {"12-24GB": 12, "8-12GB": 8, "under-8GB": 6}
PRESETS: Mapping[str, MemoryPolicy] = {
    "24GB+": AdaptivePolicy(),
    **{name: WithinBudget(AdaptivePolicy(), int(AUTO_SHARE * gib * _GIB)) for name, gib in _GIB_OF.items()},
}
"""Policies by kind of card, the same plans on each of a kind; the largest takes what there is. Group size, epochs,
lengths and effective batch are not theirs to change. A smaller budget of the run still counts, as on a card of 4 GB."""


def preset(name: str) -> MemoryPolicy:
    """Returns the policy for a kind of card."""
    if name not in PRESETS:
        raise ConfigError(f"There is no preset {name!r} of memory policies; write one of {', '.join(PRESETS)}.")
    return PRESETS[name]
