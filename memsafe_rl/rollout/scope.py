"""The scope in which an engine of this process draws the turns of episodes, with the caches between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from memsafe_rl.memory.runtime.recovery import Attempt
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.rollout.engine import Generate, LiveKeys
from memsafe_rl.rollout.native.generation import generate
from memsafe_rl.rollout.native.kv_retention import KeptCaches
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings, SequenceKey


class LocalScope:
    """Draws the agent's turns by a given function, and those of other roles by this library's own loop."""

    def __init__(self, draw: Generate, kept: KeptCaches) -> None:
        self.generate = draw
        self._kept = kept

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
        """Draws with another network; see `RolloutScope.generate_as`."""
        return generate(adapter, prompts, keys, settings, attempt, limits=limits, kept=self._kept)

    def drop(self) -> None:
        """Frees every cache."""
        self._kept.clear()


@contextmanager
def opened(live_keys: LiveKeys | None, drawing: Callable[[KeptCaches], Generate]) -> Iterator[LocalScope]:
    """Opens a scope; ``drawing`` gives what draws the agent's turns, with the caches or, in other engines, without."""
    kept = KeptCaches(live_keys)
    try:
        yield LocalScope(drawing(kept), kept)
    finally:
        kept.clear()
