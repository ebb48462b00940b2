"""The library's own engine: it decodes with the trained weights themselves, in waves that fit the plan."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from memsafe_rl.memory.recovery import Attempt
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.rollout.engine import Progress
from memsafe_rl.rollout.generation import generate
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings, SequenceKey


class NativeEngine:
    """Runs `memsafe_rl.rollout.generation.generate`; holds nothing between two calls.

    Args:
        adapter: the network that is trained.
    """

    name = "native"
    is_external = False

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter

    def check(self, settings: SamplingSettings) -> None:
        """Finds nothing to refuse: this engine has every setting."""

    def synchronise(self, version: int) -> None:
        """Does nothing: the weights are the trained ones."""

    def generate(
        self,
        prompts: Sequence[Tensor],
        keys: Sequence[Sequence[SequenceKey]],
        settings: SamplingSettings,
        attempt: Attempt[RolloutPlan],
        progress: Progress | None = None,
    ) -> list[Completion]:
        """Draws one completion for every key, as `RolloutEngine.generate` says."""
        return generate(self._adapter, prompts, keys, settings, attempt, progress)

    def release(self) -> None:
        """Does nothing: every wave gives its bytes back."""

    def close(self) -> None:
        """Does nothing."""
