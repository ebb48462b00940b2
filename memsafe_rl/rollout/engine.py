"""What every rollout engine gives to the trainer: completions under a plan, and its bytes back when asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from memsafe_rl.memory.runtime.recovery import Attempt
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings, SequenceKey

Progress = Callable[[int, int], None]
"""Told the sequences that have ended and the sequences there are, whenever more have ended."""


class RolloutEngine(Protocol):
    """Draws completions; the library's own one or another library behind the same call.

    Attributes:
        name: as in `RolloutPlan.engine`.
    """

    name: str

    @property
    def is_external(self) -> bool:
        """Whether its log-probs come from other kernels, another copy of the weights or a rounded cache.

        The loss must then correct for the difference.
        """

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

    def synchronise(self, version: int) -> None:
        """Takes over the model's weights if they have moved since the last call; nothing where they are shared.

        Args:
            version: optimizer steps done; another number than last time means other weights.
        """

    def generate(
        self,
        prompts: Sequence[Tensor],
        keys: Sequence[Sequence[SequenceKey]],
        settings: SamplingSettings,
        attempt: Attempt[RolloutPlan],
        progress: Progress | None = None,
    ) -> list[Completion]:
        """Draws one completion for every key.

        Args:
            prompts: P tensors (length,) int64, on any device.
            keys: for each prompt, one key per sample wanted.
            settings: how tokens are drawn.
            attempt: runs a piece of work under the plan in force, again or under a leaner plan when memory runs out.
            progress: told of sequences that ended; None for nobody.

        Returns:
            Completions on the host, prompt by prompt, samples in the order of the keys.
        """

    def release(self) -> None:
        """Gives back every byte of the device that the next `generate` can take again without being built anew."""

    def close(self) -> None:
        """Ends the engine and forgets which weights it has; a later `generate` would start it anew."""
