"""Trainers on a simulated device whose allocations are refused at random, and what may not change for it."""

from __future__ import annotations

import copy
import gc
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import TrainerCallback

from benchmarks.small import byte_tokenizer, small_policy, small_qwen3, small_t5
from memsafe_rl import (
    AdaptivePolicy,
    FixedPolicy,
    GRPOConfig,
    GRPOTrainer,
    MemoryPolicy,
    PPOConfig,
    PPOTrainer,
    RolloutPlan,
    SimulatedMemory,
    UpdatePlan,
)
from memsafe_rl.accounting import host_memory, listen, stop_listening
from memsafe_rl.memory.runtime.random_state import capture_random_state, set_random_state
from memsafe_rl.types import Completion, MemoryFailure
from tests.trainers.helpers import rewire

VOCAB_SIZE = 258
GROUP_SIZE = 4
NEVER = 10**12
"""An allocation that is never reached."""

LOGPROB_TOLERANCE = 1e-5
"""Nats; what two orders of the same float32 sums may move a log-prob by."""
GRADIENT_TOLERANCE = 1e-6
"""Global norm of a gradient's difference over its norm, fp32: other cuts add the same terms in another order."""
WEIGHT_TOLERANCE = 1e-4
"""Distance between final weights over the distance travelled: Adam divides by the square root of tiny numbers."""

STEP_TOLERANCE = 1e-2
"""The same for one step alone: Adam's first steps are nearly signs, and the sign of a sum that cancels is rounding."""


@dataclass(frozen=True)
class HalvingPolicy(FixedPolicy):
    """Starts with the plans it is given; halves every cut of a plan that failed."""

    def after_oom(self, plan: Any, failure: MemoryFailure) -> Any:  # noqa: ARG002
        """Gives the plan with everything halved, None once nothing can be."""
        names = ("rows_in_flight", "prefill_tokens", "score_tokens", "micro_batch_tokens", "logprob_tile")
        leaner = replace(plan, **{name: max(1, getattr(plan, name) // 2) for name in names if hasattr(plan, name)})
        return None if leaner == plan else leaner


@dataclass(frozen=True)
class Scene:
    """A configuration that storms go over.

    Args:
        name: for people.
        policy: cuts the work; one that knows no leaner plan meets a fault at a time.
        encodes: whether an encoder reads the prompts (a T5), else a Qwen3 is trained.
        lora: whether an adapter is trained.
        dropout: rate of dropout in the update; 0 for none.
        settings: fields of `GRPOConfig` or `PPOConfig`.
        denoises: whether a diffusion policy is trained.
        critic: "trunk", "adapter", "model" or, of a denoiser, "states", what foresees rewards in PPO; None for GRPO.
    """

    name: str
    policy: MemoryPolicy
    encodes: bool = False
    lora: bool = False
    dropout: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    critic: str | None = None
    denoises: bool = False

    @property
    def burst(self) -> int:
        """Faults in a row: one where there is no leaner plan, since two in one unit would end the run."""
        return 1 if self.is_bitwise else 4 if isinstance(self.policy, FixedPolicy) else 2

    @property
    def is_bitwise(self) -> bool:
        """Whether the plan can never change."""
        return type(self.policy) is FixedPolicy

    @property
    def parks(self) -> bool:
        """Whether optimizer state may move to the host and back: what has been moved stays, whatever fails later."""
        return not isinstance(self.policy, FixedPolicy) or self.policy.update.park_optimizer


TWO_OBJECTIVES: dict[str, Any] = {
    "sums": {"rewards": ["pay"], "beta": 0.05, "kl_band": [0.001, 0.002], "adaptive_beta": True, "beta_window": 1},
    "brevity": {"rewards": ["pay_for_brevity"], "weight": 0.5},
}
"""The second has no opinion of every other prompt; the beta of the first is moved in nearly every step."""


def _plans(rows: int, tokens: int, **update: Any) -> tuple[RolloutPlan, UpdatePlan]:
    rollout = RolloutPlan(rows_in_flight=rows, score_tokens=tokens)
    return rollout, UpdatePlan(micro_batch_tokens=tokens, logprob_tile=32, **update)


SCENES = (
    Scene("full", FixedPolicy(*_plans(8, 64))),
    Scene("full, leaner plans", HalvingPolicy(*_plans(8, 128))),
    Scene("full, KL to a copy, leaner plans", HalvingPolicy(*_plans(4, 96)), settings={"beta": 0.05}),
    Scene(
        "full, recomputed, dropout",
        FixedPolicy(*_plans(8, 64, checkpointing=True)),
        dropout=0.1,
        settings={"disable_dropout": False},
    ),
    Scene(
        "LoRA, dropout, KL to the base",
        FixedPolicy(*_plans(4, 64)),
        lora=True,
        dropout=0.1,
        settings={"disable_dropout": False, "beta": 0.05},
    ),
    Scene("LoRA, recomputed, leaner plans", HalvingPolicy(*_plans(8, 128, checkpointing=True)), lora=True),
    Scene(
        "full, everything on the host, leaner plans",
        HalvingPolicy(
            *_plans(8, 96, offload_activations=True, trajectory_device="device", park_optimizer=True),
        ),
        settings={"steps_per_generation": 2, "per_device_train_batch_size": 4},
    ),
    Scene("full, AdaptivePolicy", AdaptivePolicy()),
    Scene("AdamW that allocates as it steps", FixedPolicy(*_plans(8, 64)), settings={"optim": "adamw_torch"}),
    Scene(
        "SGD without clipping, leaner plans",
        HalvingPolicy(*_plans(8, 128)),
        settings={"optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 0.1},
    ),
    Scene("PPO, head on the trunk, KL to a copy", FixedPolicy(*_plans(8, 64)), critic="trunk"),
    Scene(
        "PPO, second adapter, recomputed, leaner plans",
        HalvingPolicy(*_plans(8, 128, checkpointing=True)),
        lora=True,
        critic="adapter",
    ),
    Scene(
        "PPO, critic of its own, on the host",
        FixedPolicy(*_plans(8, 96, offload_activations=True, park_optimizer=True)),
        critic="model",
        settings={"kl_coef": 0.0, "steps_per_generation": 2, "per_device_train_batch_size": 4},
    ),
    Scene("T5, KL to a copy", FixedPolicy(*_plans(8, 64)), encodes=True, settings={"beta": 0.05}),
    Scene("T5, LoRA, recomputed, leaner plans", HalvingPolicy(*_plans(8, 128, checkpointing=True)), True, lora=True),
    Scene("denoiser, KL to a copy", FixedPolicy(*_plans(8, 16)), denoises=True, settings={"beta": 0.05}),
    Scene(
        "denoiser, LoRA, recomputed, leaner plans",
        HalvingPolicy(*_plans(8, 16, checkpointing=True)),
        lora=True,
        denoises=True,
        settings={"beta": 0.05, "epsilon": 1e-3},
    ),
    Scene("denoiser, PPO", FixedPolicy(*_plans(8, 16)), denoises=True, critic="states"),
    Scene(
        "denoiser, PPO with LoRA, recomputed, leaner plans",
        HalvingPolicy(*_plans(8, 16, checkpointing=True)),
        lora=True,
        denoises=True,
        critic="states",
        settings={"beta": 0.05, "epsilon": 1e-3},
    ),
    Scene(
        "LoRA, two objectives",
        FixedPolicy(*_plans(8, 64)),
        lora=True,
        settings={"objectives": TWO_OBJECTIVES, "gradient_merge": "cagrad"},
    ),
    Scene(
        "full, two objectives, leaner plans",
        HalvingPolicy(*_plans(8, 96)),
        settings={"objectives": TWO_OBJECTIVES, "gradient_merge": "pcgrad"},
    ),
)


def pay(completion_ids: Sequence[Sequence[int]]) -> list[float]:
    """Pays by token ids (states) alone, so that any difference in sampling changes what is learnt."""
    if isinstance(completion_ids[0], Tensor):
        return [float(state.sin().sum()) for state in completion_ids]
    return [sum(ids) % 11 / 11 + len(ids) / 50 for ids in completion_ids]


def pay_for_brevity(prompts: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
    """Pays for short completions of prompts of even length, and knows nothing of the others."""
    pairs = zip(prompts, completion_ids, strict=True)
    return [None if len(prompt) % 2 else sum(ids) % 7 / 7 - len(ids) / 20 for prompt, ids in pairs]


def _noted(values: list[Any]) -> list[Any]:
    """Gives what can be compared: states as numbers without their last digits, which other waves may round."""
    if not isinstance(values[0], Tensor):
        return values
    return [value.double().flatten().round(decimals=9).tolist() for value in values]


class Reward:
    """A reward function that notes what it is given, and can be told to break off."""

    __name__ = "pay"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.upset: Callable[[int], None] | None = None

    def __call__(self, prompts: list[str], completions: list[str], completion_ids: list[list[int]]) -> list[float]:
        """Pays, or breaks off."""
        with host_memory():  # where samples are
            self.calls.append((prompts, _noted(completions), _noted(completion_ids)))
            paid = pay(completion_ids)
        if self.upset is not None:
            self.upset(len(self.calls))
        return paid


@dataclass
class StepRecord:
    """What an optimizer step did.

    Args:
        completions: what it sampled; empty where it learns from an earlier rollout.
        stores: what it learnt from, and what later steps will.
        gradient: all of it end to end, before clipping, float64; as it was when weights were about to move.
        weights: after it, float64.
        loss: its loss.
        live_bytes: held after it.
        reward_calls: arguments of every call.
        events: memory events.
        allocations: asked for on the device.
        seconds: wall time.
    """

    completions: list[Completion]
    stores: dict[str, Tensor]
    gradient: Tensor
    weights: Tensor
    loss: float
    live_bytes: int
    reward_calls: list[tuple[Any, ...]]
    events: list[dict[str, Any]]
    allocations: int
    seconds: float

    def count(self, kind: str) -> int:
        """Counts memory events of a kind."""
        return sum(event["event"] == kind for event in self.events)


@dataclass
class RunRecord:
    """What a whole run did.

    Args:
        completions: what it sampled.
        weights: after it, float64.
        live_bytes: held at the end of every step.
        reward_calls: arguments of every call.
        events: memory events.
        allocations: asked for on the device.
        steps: optimizer steps done.
    """

    completions: list[Completion]
    weights: Tensor
    live_bytes: list[int]
    reward_calls: list[tuple[Any, ...]]
    events: list[dict[str, Any]]
    allocations: int
    steps: int


class Storm:
    """Refuses allocations in bursts: as soon as a failure was cleared away, the next one is chosen.

    Some of a burst hit the retry, so that it takes a leaner plan to go on. Between bursts there is time to go on: a
    fault that returned for ever, whatever the plan, would be no lack of memory.

    Args:
        device: refuses.
        tracker: tells of failures.
        seed: of the choices.
    """

    def __init__(self, device: SimulatedMemory, tracker: Any, seed: int) -> None:
        self.random = random.Random(seed)
        self.device = device
        self._burst = self._left = 0
        self._near = self._far = NEVER
        record = tracker.record

        def heard(event: str, **details: Any) -> None:
            record(event, **details)
            if event == "failure":
                self._choose_next()

        tracker.record = heard

    @contextmanager
    def over(self, first: int, burst: int, near: int, far: int) -> Iterator[None]:
        """Lets faults fall on what runs inside.

        Args:
            first: the first allocation refused, from 1.
            burst: most faults in a row.
            near: most allocations from one fault of a burst to the next.
            far: least allocations from one burst to the next.
        """
        self._burst, self._near, self._far = burst, near, far
        self._left = self.random.randint(1, burst)
        self.device.fail_after(first)
        try:
            yield
        finally:
            self._near = self._far = NEVER
            self.device.fail_after(NEVER)

    def _choose_next(self) -> None:
        self._left -= 1
        if self._left > 0:
            self.device.fail_after(self.random.randint(1, self._near))
        else:
            self._left = self.random.randint(1, self._burst)
            self.device.fail_after(self.random.randint(self._far, 2 * self._far))


class _PhaseLog:
    """Notes which allocations belong to which phase."""

    def __init__(self, device: SimulatedMemory) -> None:
        self._device = device
        self._start = device.allocations
        self._open: list[str] = ["between"]
        self._since = self._start
        self.spans: list[tuple[str, int, int]] = []

    def enter_phase(self, phase: str) -> None:
        self._close()
        self._open.append(str(phase))

    def leave_phase(self) -> None:
        self._close()
        self._open.pop()

    def _close(self) -> None:
        now = self._device.allocations
        if now > self._since:
            self.spans.append((self._open[-1], self._since - self._start, now - self._start))
        self._since = now

    def mark_component(self, component: Any) -> None: ...
    def mark_host(self, on_host: bool) -> bool:  # noqa: ARG002
        return False

    def claim(self, component: Any, tensors: Any) -> None: ...
    def hold(self, component: Any, tensors: Any) -> None: ...
    def is_on_host(self, tensor: Tensor) -> bool:  # noqa: ARG002
        return False


@contextmanager
def phases_of(device: SimulatedMemory) -> Iterator[list[tuple[str, int, int]]]:
    """Notes the allocations of each phase of what runs inside.

    Args:
        device: counts them.

    Yields:
        (phase, first, last) of stretches of allocations, counted from 1; complete at the end.
    """
    log = _PhaseLog(device)
    listen(log)
    try:
        yield log.spans
    finally:
        stop_listening(log)
        log._close()
    log.spans[:] = [(phase, start + 1, stop) for phase, start, stop in log.spans]


def draw_fault(spans: Sequence[tuple[str, int, int]], rng: random.Random) -> int:
    """Draws an allocation: half the time any one, else any one of a phase that was drawn first.

    Most allocations belong to sampling, and few phases would be hit otherwise.

    Args:
        spans: the phases' stretches, from `phases_of`.
        rng: draws.

    Returns:
        The allocation, from 1.
    """
    phases = sorted({phase for phase, _, _ in spans})
    chosen = phases if rng.random() < 0.5 else [rng.choice(phases)]
    allocations = [place for phase, first, last in spans if phase in chosen for place in range(first, last + 1)]
    return rng.choice(allocations)


def spread(spans: Sequence[tuple[str, int, int]], most: int) -> list[int]:
    """Chooses allocations of every phase, evenly spread.

    Args:
        spans: the phases' stretches, from `phases_of`.
        most: how many of each phase.

    Returns:
        The allocations, from 1, in order.
    """
    chosen: list[int] = []
    for phase in sorted({phase for phase, _, _ in spans}):
        places = [place for name, first, last in spans if name == phase for place in range(first, last + 1)]
        chosen += places[:: math.ceil(len(places) / most)]
    return sorted(chosen)


def build_model(scene: Scene) -> Any:
    """Makes a tiny network whose logits are far from uniform, or a tiny denoiser in float64."""
    if scene.denoises:
        return small_policy()
    model = (small_t5 if scene.encodes else small_qwen3)(VOCAB_SIZE, hidden=32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(2.0 if scene.encodes else 3.0)
    for layer in [] if scene.encodes else model.model.layers:
        layer.self_attn.attention_dropout = scene.dropout
    return model


class StepEnds(TrainerCallback):  # type: ignore[misc]
    """Notes the bytes held at the end of every step, and can be told to break off."""

    def __init__(self, device: SimulatedMemory) -> None:
        self._device = device
        self.live_bytes: list[int] = []
        self.upset: Callable[[int], None] | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Notes them."""
        self.live_bytes.append(self._device.live_bytes)
        if self.upset is not None:
            self.upset(state.global_step)


class Watched:
    """A trainer on a simulated device, put back and run again as often as wanted.

    Args:
        scene: its configuration.
        device: a simulated device in force, exact.
        output_dir: where it writes.
        settings: further fields of `GRPOConfig`.
    """

    def __init__(self, scene: Scene, device: SimulatedMemory, output_dir: Path, **settings: Any) -> None:
        self.scene, self.device = scene, device
        self.reward, self.ends = Reward(), StepEnds(device)
        self.trainer = _make_trainer(scene, output_dir, self.reward, self.ends, settings)
        self.sampled: list[Completion] = []
        self._gradients: list[Tensor] = []

        def noted(generate: Any, *arguments: Any, **named: Any) -> list[Completion]:
            completions: list[Completion] = generate(*arguments, **named)
            with host_memory():
                self.sampled += copy.deepcopy(completions)
            return completions

        rewire(self.trainer, "collector", "generate", lambda generate: partial(noted, generate))
        with host_memory():
            self._start_weights = [weight.detach().clone() for weight in self._weights()]
            self._start_random = capture_random_state()
            self.start = self.weights()

    def weights(self) -> Tensor:
        """Gives the trained weights end to end, float64, where no limit binds."""
        return _end_to_end(self._weights())

    def put_back(self) -> None:
        """Goes back to the weights and random numbers from before any training."""
        with torch.no_grad():
            for weight, value in zip(self._weights(), self._start_weights, strict=True):
                weight.copy_(value)
        set_random_state(self._start_random)
        self.reward.calls.clear()
        self.sampled.clear()
        self.ends.live_bytes.clear()

    def run(self) -> RunRecord:
        """Trains from start to end and notes what the run did; a fault may have been chosen before."""
        self.put_back()
        allocations, events = self.device.allocations, len(self.trainer.memory_events)
        self.trainer.train()
        allocations = self.device.allocations - allocations
        return RunRecord(
            completions=list(self.sampled),
            weights=self.weights(),
            live_bytes=list(self.ends.live_bytes),
            reward_calls=list(self.reward.calls),
            events=self.trainer.memory_events[events:],
            allocations=allocations,
            steps=self.trainer.state.global_step,
        )

    def begin(self) -> None:
        """Begins a run whose steps are called one by one."""
        self.put_back()
        self.trainer.loop.begin(None)
        self._listen_to_commits()

    def step(self) -> StepRecord:
        """Runs one optimizer step and notes what it did."""
        trainer, tracker = self.trainer, self.trainer.setup.memory
        before = len(tracker.events)
        for noted in (self.reward.calls, self.sampled, self._gradients):
            noted.clear()
        learnt_from = trainer.loop.state.rollout
        allocations, began = self.device.allocations, time.perf_counter()
        trainer.loop.step()
        seconds, allocations = time.perf_counter() - began, self.device.allocations - allocations
        live_bytes = self.device.live_bytes
        with host_memory():
            return StepRecord(
                completions=list(self.sampled),
                stores=_stores(trainer.loop.state.rollout or learnt_from),
                gradient=self._gradients[0],
                weights=self.weights(),
                loss=trainer.history[-1]["loss"],
                live_bytes=live_bytes,
                reward_calls=list(self.reward.calls),
                events=tracker.events[before:],
                allocations=allocations,
                seconds=seconds,
            )

    def _weights(self) -> list[Tensor]:
        return [weight for weight in self.trainer.setup.trained.parameters() if weight.requires_grad]

    def _listen_to_commits(self) -> None:
        """Notes gradients as commits begin; a subclass, since a wrapper on the committer would keep it alive."""
        gradients, weights = self._gradients, self._weights()
        committer = self.trainer.setup.committer
        kind = type(committer)

        class Noted(kind):  # type: ignore[misc, valid-type]
            def commit(self) -> None:
                gradients.append(_end_to_end([weight.grad for weight in weights]))
                super().commit()

        committer.__class__ = Noted


class Standing:
    """All that an optimizer step reads or moves, copied to where no limit binds.

    Args:
        watched: the trainer, between two steps.
    """

    def __init__(self, watched: Watched) -> None:
        trainer = watched.trainer
        self._watched = watched
        with host_memory():
            self._weights = [(weight, weight.detach().clone()) for weight in watched._weights()]
            optimizer = trainer.optimizer
            self._moments = [
                (owner, {name: copy.deepcopy(value) for name, value in state.items()})
                for owner, state in optimizer.state.items()
            ]
            self._random = capture_random_state()
            self._pending = copy.deepcopy(dict(trainer.loop.report.pending))
        self._rates = [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups]
        self._schedule = copy.deepcopy(trainer.lr_scheduler.state_dict())
        self._facts = {name: getattr(trainer.loop.state, name) for name in _FACTS}
        self._copied = {name: copy.deepcopy(getattr(trainer.loop.state, name)) for name in ("progress", "history")}
        self._control = copy.deepcopy(trainer.control)
        self._memory = trainer.setup.memory.state_dict()

    def restore(self) -> None:
        """Puts everything back, bit for bit."""
        trainer = self._watched.trainer
        optimizer = trainer.optimizer
        with torch.no_grad():
            for weight, value in self._weights:
                weight.copy_(value)
                weight.grad = None
        known = {id(owner) for owner, _ in self._moments}
        for owner in [owner for owner in optimizer.state if id(owner) not in known]:
            del optimizer.state[owner]
        for owner, moments in self._moments:
            _put_back(optimizer.state[owner], moments)
        for group, rates in zip(optimizer.param_groups, self._rates, strict=True):
            group.update(rates)
        trainer.lr_scheduler.load_state_dict(copy.deepcopy(self._schedule))
        for name, value in self._facts.items():
            setattr(trainer.loop.state, name, value)
        for name, value in self._copied.items():
            setattr(trainer.loop.state, name, copy.deepcopy(value))
        trainer.loop.report.control = copy.deepcopy(self._control)
        trainer.loop.report.pending.clear()
        trainer.loop.report.pending.update(copy.deepcopy(self._pending))
        trainer.setup.memory.load_state_dict(self._memory)
        set_random_state(self._random)


_FACTS = ("cursor", "rollout", "controllers", "random")


@dataclass
class Findings:
    """What storms over one scene did and found.

    Args:
        faults: allocations refused.
        by_phase: failures by phase.
        fallbacks: leaner plans taken.
        steps: optimizer steps done under faults.
        runs: whole runs done under faults.
        compared_steps: steps compared one by one.
        bitwise_steps: of these, those with the very same gradient, weights and stores.
        gradient: largest relative difference of a step's gradient.
        weights: largest difference of final weights over the distance travelled.
        tokens: sampled under faults.
        excused_ties: rows that differ after a certified tie.
        seconds_lost: wall time of attempts that failed.
        violations: whatever may not be.
    """

    faults: int = 0
    by_phase: Counter[str] = field(default_factory=Counter)
    fallbacks: int = 0
    steps: int = 0
    runs: int = 0
    compared_steps: int = 0
    bitwise_steps: int = 0
    gradient: float = 0.0
    weights: float = 0.0
    tokens: int = 0
    excused_ties: int = 0
    seconds_lost: float = 0.0
    violations: list[str] = field(default_factory=list)

    def require(self, holds: bool, what: str) -> None:
        """Notes what does not hold."""
        if not holds:
            self.violations.append(what)

    def note_failures(self, scene: Scene, events: Sequence[Mapping[str, Any]], faults: int) -> None:
        """Counts the failures of a step or a run, and holds them to the faults there were."""
        failures = [event for event in events if event["event"] == "failure"]
        self.faults += faults
        self.by_phase.update(str(event["phase"]) for event in failures)
        self.fallbacks += sum(event["event"] == "fallback" for event in events)
        self.seconds_lost += sum(event["seconds_lost"] for event in failures)
        self.require(len(failures) == faults, f"{faults} faults gave {len(failures)} failures")
        for event in failures:
            # A rollout gives its running batch up, so that less may be held than before the span that failed.
            given_up = event["phase"] in ("rollout", "evaluate") and event["pinned_bytes"] < 0
            self.require(scene.parks or given_up or event["pinned_bytes"] == 0, f"bytes stay after a failure: {event}")


def storm_over(
    scene: Scene, faults: int, seed: int, output_dir: Path, told: Callable[[int], None] = lambda _: None
) -> Findings:
    """Sends faults over a scene until there were enough: over whole runs, then over steps one by one.

    Args:
        scene: the configuration.
        faults: how many at least.
        seed: of the choices.
        output_dir: where the trainer writes.
        told: hears of faults as they happen.

    Returns:
        What was found.
    """
    findings = Findings()
    with SimulatedMemory(exact=True) as device:
        watched = Watched(scene, device, output_dir)
        storm = Storm(device, watched.trainer.setup.memory, seed)
        for fallen in _storms(watched, storm, findings):
            told(fallen)
            if findings.faults >= faults or findings.violations:
                break
    del watched, storm
    gc.collect()
    return findings


def _storms(watched: Watched, storm: Storm, findings: Findings) -> Iterator[int]:
    """Alternates a whole run and a run step by step, for ever; gives the faults as they fall."""
    while True:
        before = findings.faults
        storm_over_run(watched, storm, findings)
        yield findings.faults - before
        yield from storm_over_steps(watched, storm, findings)


def storm_over_run(watched: Watched, storm: Storm, findings: Findings) -> None:
    """Trains from start to end twice, once under faults, and compares what came out."""
    calm = watched.run()
    per_step = calm.allocations // calm.steps
    refusals = watched.device.refusals
    burst, first = watched.scene.burst, storm.random.randint(1, 2 * per_step)
    with storm.over(first, burst, near=per_step // 2, far=3 * per_step):
        rough = watched.run()
    findings.note_failures(watched.scene, rough.events, watched.device.refusals - refusals)
    compare_runs(watched, calm, rough, 0.0 if watched.scene.is_bitwise else WEIGHT_TOLERANCE, findings)


def sweep(scene: Scene, most: int, output_dir: Path, **settings: Any) -> Findings:
    """Refuses the allocations of a whole run one by one, in a run each: not one may be outside of what is guarded.

    A single fault never changes a plan, so every run must come out bit for bit.

    Args:
        scene: the configuration; runs are short.
        most: how many of each phase, evenly spread.
        output_dir: where the trainer writes.
        settings: further fields of `GRPOConfig`.

    Returns:
        What was found.
    """
    findings = Findings()
    short = {"max_steps": 2, "max_completion_length": 3, **settings}
    with SimulatedMemory(exact=True) as device:
        watched = Watched(scene, device, output_dir, **short)
        watched.run()  # some things are made once in a process
        with phases_of(device) as spans:
            calm = watched.run()
        for place in spread(spans, most):
            refusals = device.refusals
            device.fail_after(place)
            rough = watched.run()
            device.fail_after(NEVER)
            findings.require(device.refusals - refusals == 1, f"allocation {place} was not refused")
            findings.note_failures(scene, rough.events, device.refusals - refusals)
            compare_runs(watched, calm, rough, 0.0, findings)
    del watched
    gc.collect()
    return findings


def compare_runs(watched: Watched, calm: RunRecord, rough: RunRecord, tolerance: float, findings: Findings) -> None:
    """Holds a run under faults to the same run without."""
    findings.runs += 1
    findings.steps += rough.steps
    findings.require(rough.steps == calm.steps, f"{calm.steps - rough.steps} steps lost in a run")
    findings.require(len(calm.reward_calls) == len(rough.reward_calls), "a reward function was called too often")
    if not compare_tokens(calm.completions, rough.completions, findings):
        return
    findings.require(calm.reward_calls == rough.reward_calls, "a reward function was given something else in a run")
    live = f"live bytes at the ends of steps: {calm.live_bytes}, under faults {rough.live_bytes}"
    findings.require(calm.live_bytes == rough.live_bytes, live)
    apart = _relative(rough.weights - calm.weights, calm.weights - watched.start)
    findings.weights = max(findings.weights, apart)
    failures = [event for event in rough.events if event["event"] == "failure"]
    findings.require(apart <= tolerance, f"final weights differ by {apart:.1e} of the distance: {failures}")


def storm_over_steps(watched: Watched, storm: Storm, findings: Findings, repeats: int = 3) -> Iterator[int]:
    """Goes through a run step by step; every step runs untroubled, then from the same standing under faults.

    Yields:
        Faults of each step that ran under faults.
    """
    trainer, device = watched.trainer, watched.device
    watched.begin()
    while trainer.state.global_step < trainer.state.max_steps:
        standing = Standing(watched)
        with phases_of(device) as spans:
            calm = watched.step()
        for _ in range(repeats):
            standing.restore()
            refusals, first = device.refusals, draw_fault(spans, storm.random)
            with storm.over(first, watched.scene.burst, near=max(2, calm.allocations // 2), far=NEVER):
                rough = watched.step()
            faults = device.refusals - refusals
            findings.note_failures(watched.scene, rough.events, faults)
            compare_steps(standing, calm, rough, findings)
            yield faults
    for weight in watched._weights():
        weight.grad = None


def compare_steps(standing: Standing, calm: StepRecord, rough: StepRecord, findings: Findings) -> None:
    """Holds a step under faults to the same step without."""
    findings.steps += 1
    replanned = rough.count("fallback") > 0
    findings.require(len(calm.reward_calls) == len(rough.reward_calls), "a reward function was called too often")
    if not compare_tokens(calm.completions, rough.completions, findings):
        return
    findings.require(calm.reward_calls == rough.reward_calls, "a reward function was given something else")
    findings.require(
        calm.live_bytes == rough.live_bytes, f"{rough.live_bytes - calm.live_bytes} live bytes more after a step"
    )
    before = _end_to_end([value for _, value in standing._weights])
    apart = _relative(rough.gradient - calm.gradient, calm.gradient)
    moved = _relative(rough.weights - calm.weights, calm.weights - before)
    same_stores = calm.stores.keys() == rough.stores.keys() and all(
        _same_store(name, calm.stores[name], rough) for name in calm.stores
    )
    findings.compared_steps += 1
    findings.gradient = max(findings.gradient, apart)
    findings.bitwise_steps += apart == 0.0 and moved == 0.0 and same_stores
    findings.require(apart <= GRADIENT_TOLERANCE, f"a gradient differs by {apart:.1e} of its norm: {rough.events}")
    findings.require(moved <= STEP_TOLERANCE, f"a step's weights differ by {moved:.1e} of its distance")
    if not replanned:
        same = apart == 0.0 and moved == 0.0 and same_stores and calm.loss == rough.loss
        findings.require(same, f"a step under the same plans is not bitwise the same: {rough.events}")


def _same_store(name: str, calm: Tensor, rough: StepRecord) -> bool:
    """Whether a store is the very same; log-probs drawn after a batch was read back in one forward may be rounded.

    Training does not read those of its own rollouts: it scores the tokens itself.
    """
    read_back = any(event["event"] == "failure" and event["phase"] == "rollout" for event in rough.events)
    if name == "sampling_logprobs" and read_back:
        return torch.allclose(calm, rough.stores[name], rtol=0, atol=LOGPROB_TOLERANCE)
    return torch.allclose(calm, rough.stores[name], rtol=0, atol=0, equal_nan=True)


def compare_tokens(calm: Sequence[Completion], rough: Sequence[Completion], findings: Findings) -> bool:
    """Compares samples row by row; a row that differs must have had a tie.

    Returns:
        Whether all are the same.
    """
    findings.require(len(calm) == len(rough), f"{len(rough)} completions instead of {len(calm)}")
    findings.tokens += sum(len(row.ids) for row in rough)
    differing = [(a, b) for a, b in zip(calm, rough, strict=False) if not _same_sample(a.ids, b.ids)]
    for ours, theirs in differing:
        findings.require(ours.ties + theirs.ties > 0, "a sampled token differs without a tie")
    findings.excused_ties += len(differing)
    return not differing


def _same_sample(ours: Tensor, theirs: Tensor) -> bool:
    """Whether samples are the same: tokens exactly, float64 states up to what other waves round."""
    return torch.equal(ours, theirs) or (ours.is_floating_point() and torch.allclose(ours, theirs, rtol=0, atol=1e-9))


def _make_trainer(
    scene: Scene, output_dir: Path, reward: Reward, callback: TrainerCallback, settings: Mapping[str, Any]
) -> GRPOTrainer | PPOTrainer:
    usual: dict[str, Any] = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 8,
        "num_generations": GROUP_SIZE,
        "num_iterations": 2,
        "max_completion_length": 6,
        "max_steps": 6,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "log_level": "error",
    }
    prompts = [f"{n}+{n % 7}=" + " " * (n % 5) for n in range(24)]
    targets = ["q", "v", "wo"] if scene.encodes else ["q_proj", "v_proj", "down_proj"]
    kind = "SEQ_2_SEQ_LM" if scene.encodes else "CAUSAL_LM"
    if scene.denoises:
        targets, kind = ["up", "down"], None
    adapter = LoraConfig(r=4, lora_dropout=scene.dropout, target_modules=targets, task_type=kind)
    named = {**usual, **scene.settings, **settings}
    if scene.critic is None:
        make: Any = partial(GRPOTrainer, args=GRPOConfig(**named))
    else:
        small = small_qwen3(VOCAB_SIZE, hidden=32) if scene.critic == "model" else None
        critic = {"trunk": None, "states": None, "adapter": "adapter", "model": small}[scene.critic]
        make = partial(PPOTrainer, args=PPOConfig(**{"kl_coef": 0.1, **named}), critic=critic)
    trainer: GRPOTrainer | PPOTrainer = make(
        build_model(scene),
        [reward, pay_for_brevity] if "objectives" in scene.settings else reward,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        eval_dataset=Dataset.from_dict({"prompt": prompts[:2]}),
        processing_class=None if scene.denoises else byte_tokenizer(),
        peft_config=adapter if scene.lora else None,
        memory_policy=scene.policy,
        callbacks=[callback],
    )
    return trainer


def _stores(experience: Any) -> dict[str, Tensor]:
    """Copies what a rollout left for the update."""
    if experience is None:
        return {}
    stores = vars(experience.trajectory)
    flat = {name: getattr(store, "flat", store) for name, store in stores.items()}
    return {name: store.clone() for name, store in flat.items() if isinstance(store, Tensor)}


def _put_back(state: dict[Any, Any], moments: Mapping[Any, Any]) -> None:
    for name in [name for name in state if name not in moments]:
        del state[name]
    for name, value in moments.items():
        if isinstance(value, Tensor):
            state[name].copy_(value)
        else:
            state[name] = copy.deepcopy(value)


def _end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    with host_memory():
        return torch.cat([tensor.detach().flatten().double() for tensor in tensors])


def _relative(difference: Tensor, whole: Tensor) -> float:
    """Gives a norm over another one; 0 where both vanish."""
    apart = float(difference.norm())
    return apart / float(whole.norm()) if apart else 0.0
