"""The library's own engine: it decodes with the trained weights themselves, in waves that fit the plan."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.recovery import Attempt
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.models.language import LanguageAdapter
from memsafe_rl.rollout.engine import Progress
from memsafe_rl.rollout.generation import generate
from memsafe_rl.rollout.keeping import KeptCaches
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings, SequenceKey


class NativeEngine:
    """Runs `memsafe_rl.rollout.generation.generate`; holds nothing between two calls.

    Args:
        adapter: the network that is trained.
    """

    name = "native"

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter

    @property
    def cache_dtype(self) -> str | None:
        """Element type of the cache, as in `RolloutPlan.cache_dtype`."""
        return "int8" if isinstance(self._adapter, LanguageAdapter) and self._adapter.in_8_bits else None

    @property
    def is_external(self) -> bool:
        """Whether the cache is rounded, so that log-probs are not quite those of the network that learns."""
        return self.cache_dtype is not None

    @property
    def can_round_cache(self) -> bool:
        """Whether `round_cache` would do it."""
        return isinstance(self._adapter, LanguageAdapter) and self._adapter.can_cache_in_8_bits

    def round_cache(self) -> None:
        """Keeps the caches to come in 8 bits.

        Raises:
            ConfigError: it is not this library that keeps the network's caches.
        """
        if not isinstance(self._adapter, LanguageAdapter):
            raise ConfigError(
                f"cache_implementation='quantized', but {type(self._adapter.model).__name__} keeps no keys and values. "
                "Leave cache_implementation out."
            )
        self._adapter.cache_in_8_bits(True)

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
        *,
        limits: Sequence[int] | None = None,
        kept: KeptCaches | None = None,
    ) -> list[Completion]:
        """Draws one completion for every key, as `RolloutEngine.generate` says.

        Args:
            prompts: P tensors (length,) int64, on any device.
            keys: for each prompt, one key per sample wanted.
            settings: how tokens are drawn.
            attempt: runs a piece of work under the plan in force.
            progress: told of sequences that ended; None for nobody.
            limits: for each prompt, its longest completion, in tokens; None for ``max_new_tokens`` of all.
            kept: caches of earlier turns; None where completions are single turns.

        Returns:
            Completions on the host, prompt by prompt, samples in the order of the keys.
        """
        return generate(self._adapter, prompts, keys, settings, attempt, progress, limits=limits, kept=kept)

    def release(self) -> None:
        """Does nothing: every wave gives its bytes back."""

    def close(self) -> None:
        """Does nothing."""
