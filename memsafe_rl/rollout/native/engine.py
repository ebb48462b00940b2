"""The library's own engine: it decodes with the trained weights themselves, in waves that fit the plan."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.runtime.recovery import Attempt
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.models.language.base import LanguageAdapter
from memsafe_rl.rollout.engine import Progress
from memsafe_rl.rollout.native.generation import generate
from memsafe_rl.rollout.native.kv_retention import KeptCaches
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings, SequenceKey


class NativeEngine:
    """Runs `memsafe_rl.rollout.native.generation.generate`; holds nothing between two calls."""

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
        """Keeps the caches to come in 8 bits."""
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
        """Draws one completion for every key, as `RolloutEngine.generate` says."""
        return generate(self._adapter, prompts, keys, settings, attempt, progress, limits=limits, kept=kept)

    def release(self) -> None:
        """Does nothing: every wave gives its bytes back."""

    def close(self) -> None:
        """Does nothing."""
