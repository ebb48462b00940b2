"""What ends a run in the middle of a storm comes out as it is, leaves nothing behind, and can be gone on from."""

from __future__ import annotations

import gc
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.utils._python_dispatch import TorchDispatchMode

from memsafe_rl import MemoryBudgetError, SimulatedMemory
from memsafe_rl.accounting import host_memory
from memsafe_rl.errors import TrainingInterrupted
from memsafe_rl.memory.runtime.recovery import capture_random_state, plain_random_state
from tests.faults.scenes import Scene
from tests.faults.storms import NEVER, WEIGHT_TOLERANCE, Storm
from tests.faults.watched import Watched

UPSETS = (
    "a reward that raises",
    "a reward that runs out of memory",
    "a callback that raises",
    "Ctrl+C",
    "memory that never suffices",
)
SELF_SAVING = ("Ctrl+C", "memory that never suffices")
"""After these a run saves where it stands, as it was before the step; after any other, what was saved before serves."""

_SMALL_BYTES = 16 * 1024
"""Bytes that may stay after an error: a rollout and random states. A graph of the tiny model has many times as many."""

_LEFT_BYTES = 2000
"""Bytes that are left to a run whose memory never suffices: no step of the tiny model can do with them."""


class UsersError(Exception):
    """An error of the user's own."""


_AT_ONCE = {"interrupt_grace_seconds": 0.0}
"""A step is abandoned wherever it stands, which is what can go wrong."""


class CtrlC(TorchDispatchMode):
    """Presses Ctrl+C when a given operator is about to run.

    Args:
        operator: which one, from 1; 0 for none.
    """

    def __init__(self, operator: int) -> None:
        super().__init__()
        self.operators = 0
        self._operator = operator

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts, presses, and runs the operator."""
        self.operators += 1
        if self.operators == self._operator:
            signal.raise_signal(signal.SIGINT)
        return function(*args, **(kwargs or {}))


@dataclass
class _Plot:
    """What is going to go wrong.

    Args:
        expected: the error that has to come out, or its class.
        around: entered around the run.
        random: state of the random generators when a reward function raised.
        calls: the call of the reward function that ends the run; None where something else does.
    """

    expected: BaseException | type[BaseException]
    around: AbstractContextManager[Any] = field(default_factory=nullcontext)
    random: dict[str, Any] | None = None
    calls: int | None = None


def upset(scene: Scene, kind: str, seed: int, output_dir: Path) -> list[str]:
    """Breaks a stormy run off once, looks at what is left, and goes on from the checkpoint.

    Args:
        scene: the configuration.
        kind: one of `UPSETS`.
        seed: of the place, and of the storm.
        output_dir: where the trainer writes; emptied.

    Returns:
        What may not be.
    """
    shutil.rmtree(output_dir, ignore_errors=True)
    with SimulatedMemory(exact=True) as device, _heard_interrupts():
        every = NEVER if kind in SELF_SAVING else 1
        watched = Watched(scene, device, output_dir, max_steps=4, save_strategy="steps", save_steps=every, **_AT_ONCE)
        found = _upset(watched, Storm(device, watched.trainer.setup.memory, seed), kind, output_dir)
        del watched
    gc.collect()
    return [f"{scene.name}, {kind}, seed {seed}: {what}" for what in found]


def _upset(watched: Watched, storm: Storm, kind: str, output_dir: Path) -> list[str]:
    trainer, device = watched.trainer, watched.device
    watched.put_back()
    allocations = device.allocations
    with CtrlC(0) as counted:
        trainer.train()
    shutil.rmtree(output_dir)
    calm, per_step = watched.weights(), (device.allocations - allocations) // trainer.state.max_steps
    # After a run frozen weights are back on the device, where a plan had sent them to the host.
    live_bytes = max(*watched.ends.live_bytes, device.live_bytes)
    manner, rollouts = _manner(watched), len(watched.reward.calls)

    watched.put_back()
    surely = counted.operators * 9 // 10  # under the storm's plans a run may take some operators fewer
    most = {"Ctrl+C": surely, "a callback that raises": trainer.state.max_steps}.get(kind, rollouts)
    plot = _plot(watched, kind, storm.random.randint(1, most))
    with storm.over(storm.random.randint(1, 2 * per_step), 1, near=1, far=3 * per_step), plot.around:
        wrong = _run_into(trainer.train, plot)
    calls = len(watched.reward.calls)
    watched.reward.upset = watched.ends.upset = None
    device.set_capacity(None)
    wrong += _left_behind(watched, manner, live_bytes)
    if plot.random is not None and plot.random != plain_random_state(capture_random_state()):
        wrong.append("random numbers do not go on from where the reward function left them")

    saved = any(output_dir.glob("checkpoint-*"))
    if not saved:
        watched.put_back()
    trainer.train(resume_from_checkpoint=saved)
    apart = float((watched.weights() - calm).norm() / (calm - watched.start).norm())
    if apart > (0.0 if watched.scene.is_bitwise else WEIGHT_TOLERANCE):
        wrong.append(f"going on (from a checkpoint: {saved}) ends {apart:.1e} of the distance away")
    if plot.calls is not None and calls != plot.calls:
        wrong.append(f"the reward function was called {calls} times, though call {plot.calls} ended the run")
    return wrong


def _plot(watched: Watched, kind: str, at: int) -> _Plot:
    """Prepares what goes wrong, at an operator, a step or a rollout, counted from 1."""
    if kind == "Ctrl+C":
        return _Plot(TrainingInterrupted, around=CtrlC(at))
    error: BaseException = UsersError("the user's own")
    if kind == "a reward that runs out of memory":
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
    plot = _Plot(MemoryBudgetError if kind == "memory that never suffices" else error)

    def end_callback(step: int) -> None:
        if step == at:
            raise error

    def end_reward(call: int) -> None:
        if call == at and plot.expected is error:
            with host_memory():
                plot.random = plain_random_state(capture_random_state())
            raise error
        if call == at:
            watched.device.set_capacity(watched.device.live_bytes + _LEFT_BYTES)

    if kind == "a callback that raises":
        watched.ends.upset = end_callback
    else:
        watched.reward.upset, plot.calls = end_reward, at
    return plot


def _run_into(train: Callable[[], Any], plot: _Plot) -> list[str]:
    """Trains until the error comes out; nothing of it is left when this returns."""
    try:
        train()
    except BaseException as error:
        if error is not plot.expected and type(error) is not plot.expected:
            return [f"{type(error).__name__} came out instead: {error}"]
        error.__traceback__ = None  # which holds frames
        return []
    return ["the error was swallowed"]


def _left_behind(watched: Watched, manner: dict[str, Any], live_bytes: int) -> list[str]:
    """Compares the state after an error with the one after an untroubled run."""
    more = watched.device.live_bytes - live_bytes
    wrong = [f"{more} bytes more are held: {watched.device.live_by_component()}"] if more > _SMALL_BYTES else []
    now = _manner(watched)
    return wrong + [f"{name}: {now[name]}, was {manner[name]}" for name in manner if now[name] != manner[name]]


def _manner(watched: Watched) -> dict[str, Any]:
    """What a step changes for a while and must leave as it was."""
    model = watched.trainer.model
    modules, weights = list(model.modules()), list(model.parameters())
    adapters = [module for module in modules if isinstance(module, BaseTunerLayer)]
    return {
        "gradients": sum(weight.grad is not None for weight in weights),
        "training modules": sum(module.training for module in modules),
        "trained weights": [weight.requires_grad for weight in weights],
        "wrapped forwards": sum("forward" in vars(module) for module in modules),
        "adapters": [(module.disable_adapters, list(module.active_adapters)) for module in adapters],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules],
        "gradient mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "phase": str(watched.trainer.setup.memory.phase_now),
        "interrupt handler": signal.getsignal(signal.SIGINT),
    }


@contextmanager
def _heard_interrupts() -> Iterator[None]:
    """Has Ctrl+C raise `KeyboardInterrupt`, also in a process that was started without a terminal."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
