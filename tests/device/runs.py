"""Runs of the storms' scenes on the pretend device, calm or under faults."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import TrainerCallback

from tests.faults.scenes import Reward, Scene, make_trainer
from tests.faults.storms import NEVER, WEIGHT_TOLERANCE, Findings, Storm


class Refusing(Protocol):
    """A device that refuses an allocation on demand, such as `tests.device.pretend.PretendDevice`."""

    allocations: int  # asked for so far
    refusals: int  # of these, refused

    def fail_after(self, more: int) -> None:
        """Refuses the `more`-th allocation from now on."""


@dataclass(frozen=True)
class Run:
    """What a run came to.

    Args:
        weights: trained, end to end, float64, on the host.
        start: the same before training.
        reward_calls: arguments of every call of the reward.
        events: memory events.
        device: that it ran on.
        allocations: asked for on the device while it trained.
        refused: allocations that were refused meanwhile.
        random: states of the host's and the devices' generators at the end.
    """

    weights: torch.Tensor
    start: torch.Tensor
    reward_calls: list[Any]
    events: list[dict[str, Any]]
    device: str
    allocations: int
    refused: int
    random: list[bytes]


@dataclass
class Tally:
    """What a storm did to a device, and found.

    Args:
        runs: under faults.
        findings: as those of other storms.
        pinned_bytes: most that a failed attempt left behind when the retry began.
    """

    runs: int = 0
    findings: Findings = field(default_factory=Findings)
    pinned_bytes: int = 0


def train(
    scene: Scene,
    output_dir: Path,
    device: Refusing | None = None,
    first: int | None = None,
    seed: int = 0,
    **settings: Any,
) -> Run:
    """Trains a scene for two steps; with `first`, under a burst of faults from that allocation of training on."""
    gc.collect()  # what an earlier run leaves in cycles would be freed in the middle of this one
    torch.manual_seed(0)
    reward = Reward()
    named = {"max_steps": 2, "use_cpu": False, **settings}
    trainer = make_trainer(scene, output_dir, reward, TrainerCallback(), named)
    start = _weights(trainer)
    before = (0, 0) if device is None else (device.allocations, device.refusals)
    if device is None or first is None:
        trainer.train()
    else:
        storm = Storm(device, trainer.setup.memory, seed)  # type: ignore[arg-type]
        with storm.over(first, scene.burst, near=50, far=NEVER):
            trainer.train()
    after = (0, 0) if device is None else (device.allocations, device.refusals)
    states = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    return Run(
        weights=_weights(trainer),
        start=start,
        reward_calls=reward.calls,
        events=list(trainer.memory_events),
        device=next(trainer.model.parameters()).device.type,
        allocations=after[0] - before[0],
        refused=after[1] - before[1],
        random=[state.numpy().tobytes() for state in states],
    )


def storm(scene: Scene, device: Refusing, runs: int, seed: int, output_dir: Path) -> Tally:
    """Trains a scene under faults at random places, again and again, and compares each run with a calm one."""
    tally, rng = Tally(), random.Random(seed)
    train(scene, output_dir, device)  # some things are made once in a process
    calm = train(scene, output_dir, device)
    for number in range(runs):
        rough = train(scene, output_dir, device, rng.randint(1, calm.allocations), seed=seed + number)
        _compare(scene, calm, rough, tally)
    return tally


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the norm of a difference over that of the second."""
    return float((a - b).norm() / b.norm())


def _compare(scene: Scene, calm: Run, rough: Run, tally: Tally) -> None:
    findings = tally.findings
    tally.runs += 1
    findings.note_failures(scene, rough.events, rough.refused)
    failures = [event for event in rough.events if event["event"] == "failure"]
    tally.pinned_bytes = max([tally.pinned_bytes, *(event["pinned_bytes"] for event in failures)])
    findings.require(calm.reward_calls == rough.reward_calls, f"other tokens after {failures}")
    findings.require(calm.random == rough.random, f"other random states after {failures}")
    moved = float((rough.weights - calm.weights).norm() / (calm.weights - calm.start).norm())
    findings.weights = max(findings.weights, moved)
    tolerance = 0.0 if scene.is_bitwise else WEIGHT_TOLERANCE
    findings.require(moved <= tolerance, f"weights differ by {moved:.1e} of the distance after {failures}")


def _weights(trainer: Any) -> torch.Tensor:
    trained = [weight for weight in trainer.setup.trained.parameters() if weight.requires_grad]
    return torch.cat([weight.detach().cpu().double().flatten() for weight in trained])
