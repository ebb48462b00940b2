"""What every rollout engine gives to the trainer: completions under a plan, and its bytes back when asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from memsafe_rl.memory.runtime.recovery import Attempt
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.ops.registry import Registry
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings, SequenceKey

Progress = Callable[[int, int], None]
"""Receives the number of finished sequences and the number of all sequences, whenever more have finished."""

LiveKeys = Callable[[], Sequence[SequenceKey]]
"""Gives the keys of the episodes that are not over; a key stands for its episode, whatever the turn."""


class DrawsAhead(Protocol):
    """Draws completions elsewhere while the caller trains; a later `Generate` of the same keys gives them."""

    def begin(
        self,
        prompts: Sequence[Tensor],
        keys: Sequence[Sequence[SequenceKey]],
        settings: SamplingSettings,
        plan: RolloutPlan,
    ) -> None:
        """Begins to draw with the weights as they are now, and forgets what was drawn ahead before.

        Args:
            prompts: as in `Generate`.
            keys: likewise.
            settings: likewise.
            plan: how many rows may be under way at once.
        """

    def drawn(self) -> Mapping[SequenceKey, Completion]:
        """Waits for what is under way.

        Returns:
            The completions that nobody has taken yet, on the host; fewer than were begun where drawing failed.
        """

    def restore(self, drawn: Mapping[SequenceKey, Completion]) -> None:
        """Takes over what another process had drawn ahead.

        Args:
            drawn: as `drawn` gave it.
        """


@dataclass(frozen=True)
class EngineCapabilities:
    """What an engine can do; nobody asks which engine it is."""

    # whether log-probs come from other kernels, another copy of the weights or a rounded cache: the loss corrects them
    is_external: bool = False
    compares_filtered: bool = False  # whether log-probs after filters are corrected too, as TRL corrects vLLM's
    kv_retention: bool = False  # whether a scope keeps keys and values between turns; memory plans make room then
    int8_cache: bool = False  # whether `RolloutEngine.round_cache` works
    resumes_completions: bool = False  # whether `Generate` takes ``begun``
    ahead: DrawsAhead | None = None  # draws the next rollout while this one is learnt from; None: it cannot


class Generate(Protocol):
    """Draws completions."""

    def __call__(
        self,
        prompts: Sequence[Tensor],
        keys: Sequence[Sequence[SequenceKey]],
        settings: SamplingSettings,
        attempt: Attempt[RolloutPlan],
        progress: Progress | None = None,
        *,
        limits: Sequence[int] | None = None,
        begun: Sequence[Sequence[Completion | None]] | None = None,
    ) -> list[Completion]:
        """Draws one completion for every key.

        Args:
            prompts: P tensors (length,) int64, on any device.
            keys: for each prompt, one key per sample wanted.
            settings: how tokens are drawn.
            attempt: runs a piece of work under the plan in force, again or under a leaner plan when memory runs out.
            progress: receives counts of finished sequences; None for nobody.
            limits: for each prompt the longest completion, in tokens; None for that of the settings.
            begun: for each key what an earlier call drew, None for nothing; only where the
                engine `resumes_completions`.

        Returns:
            Completions on the host, prompt by prompt, samples in the order of the keys.

        Raises:
            ConfigError: ``begun`` is given, but the engine draws completions whole.
            DataError: prompts, keys or limits do not fit each other or the network.
        """


class RolloutScope(Protocol):
    """What outlives a call: the caches of episodes between two turns.

    A cache saves reading a context again and changes no token beyond rounding. So a failed attempt, inside a call or
    beside it, may drop all of it; there is no other state to restore.
    """

    @property
    def generate(self) -> Generate:
        """Draws as the engine does, with the caches of earlier turns."""

    def generate_as(
        self,
        adapter: ModelAdapter,
        prompts: Sequence[Tensor],
        keys: Sequence[Sequence[SequenceKey]],
        settings: SamplingSettings,
        attempt: Attempt[RolloutPlan],
        *,
        limits: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Draws in the role of another network of the run, such as a simulated user.

        Args:
            adapter: the network, its PEFT adapters on or off as the role has them.
            prompts: as in `Generate`.
            keys: likewise.
            settings: likewise.
            attempt: likewise.
            limits: likewise.

        Returns:
            Completions on the host, prompt by prompt, samples in the order of the keys.
        """


class RolloutEngine(Protocol):
    """Draws completions: the library's own engine, another library's, or a server behind the same calls.

    Attributes:
        name: as in `RolloutPlan.engine`.
    """

    name: str

    @property
    def supports(self) -> EngineCapabilities:
        """What the engine can do with the network as it is now."""

    @property
    def cache_dtype(self) -> str | None:
        """Element type of its cache, as in `RolloutPlan.cache_dtype`."""

    def check(self, settings: SamplingSettings) -> None:
        """Refuses sampling settings that the engine cannot honour, by name.

        Args:
            settings: how tokens are to be drawn.

        Raises:
            ConfigError: one of them cannot be honoured.
        """

    def round_cache(self) -> None:
        """Keeps the caches to come in 8 bits.

        Raises:
            ConfigError: the engine cannot, as `EngineCapabilities.int8_cache` says.
        """

    def synchronise(self, version: int) -> None:
        """Takes over the model's weights if they have moved since the last call; nothing where they are shared.

        Args:
            version: optimizer steps done; another number than last time means other weights.
        """

    def open(self, live_keys: LiveKeys | None = None) -> AbstractContextManager[RolloutScope]:
        """Opens a scope for the turns of one rollout's episodes.

        Args:
            live_keys: the episodes that are not over, so that the caches of the others can go; None if all are alive.

        Returns:
            A context; leaving it frees every cache of the scope, after an error too.
        """

    @property
    def generate(self) -> Generate:
        """Draws completions; nothing of it stays on the device but what `release` frees."""

    def release(self) -> None:
        """Gives back every byte of the device that the next `generate` can take again without being built anew."""

    def close(self) -> None:
        """Ends the engine and forgets which weights it has; a later `generate` would start it anew."""


@dataclass(frozen=True)
class EngineContext:
    """What an engine is made from."""

    name: str  # the name it was chosen by, which its ``name`` must be
    adapter: ModelAdapter  # the network, whose weights move from step to step
    config: Any  # the run's settings, to be read only
    total_bytes: int  # memory of the device
    room: Callable[[], int]  # gives the bytes that the run may still take


@dataclass(frozen=True)
class Engine:
    """A rollout engine, built in or a user's own: ``GRPOConfig(rollout_engine=Engine("mine", make))``.

    Args:
        name: its name in configurations, logs and checkpoints.
        function: makes it.
    """

    name: str
    function: Callable[[EngineContext], RolloutEngine]


ENGINES: Registry[Engine] = Registry("rollout_engine", Engine)
"""Every engine by its name in the configuration."""

register_engine = ENGINES.add
"""Makes an engine known by name, for run files and settings read back; passing it as ``rollout_engine`` does so too."""
