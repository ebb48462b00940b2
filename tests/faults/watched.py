"""A trainer that is put back and run again, and a record of all that a step or a run did."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from memsafe_rl import SimulatedMemory
from memsafe_rl.accounting import host_memory
from memsafe_rl.memory.runtime.recovery import capture_random_state, set_random_state
from memsafe_rl.types import Completion
from tests.faults.scenes import Reward, Scene, make_trainer
from tests.trainers.helpers import rewire


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


class StepEnds(TrainerCallback):  # type: ignore[misc]
    """Notes the bytes held at the end of every step, and can be told to break off."""

    def __init__(self, device: SimulatedMemory) -> None:
        self._device = device
        self.live_bytes: list[int] = []
        self.upset: Callable[[int], None] | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
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
        self.trainer = make_trainer(scene, output_dir, self.reward, self.ends, settings)
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
        """Returns the trained weights end to end, float64, where no limit binds."""
        return end_to_end(self._weights())

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
        self.trainer.memory_events.clear()
        allocations = self.device.allocations
        self.trainer.train()
        allocations = self.device.allocations - allocations
        return RunRecord(
            completions=list(self.sampled),
            weights=self.weights(),
            live_bytes=list(self.ends.live_bytes),
            reward_calls=list(self.reward.calls),
            events=list(self.trainer.memory_events),
            allocations=allocations,
            steps=self.trainer.state.global_step,
        )

    def begin(self) -> None:
        """Begins a run whose steps are called one by one."""
        self.put_back()
        self.trainer.loop.begin(None)
        self.trainer.loop.files.folder.release()
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
                gradients.append(end_to_end([weight.grad for weight in weights]))
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
            self._half = copy.deepcopy(trainer.setup.committed.half.state_dict())
            self._random = capture_random_state()
            self._pending = copy.deepcopy(dict(trainer.loop.report.pending))
        self._rates = [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups]
        self._schedule = copy.deepcopy(trainer.lr_scheduler.state_dict())
        self._facts = {name: getattr(trainer.loop.state, name) for name in _FACTS}
        self._copied = {name: copy.deepcopy(getattr(trainer.loop.state, name)) for name in ("progress",)}
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
        with host_memory():
            trainer.setup.committed.half.load_state_dict(copy.deepcopy(self._half))
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


def end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    with host_memory():
        return torch.cat([tensor.detach().flatten().double() for tensor in tensors])
