"""The library's own engine: it decodes with the trained weights themselves, in a running batch that fits the plan."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial

from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.rollout.engine import Engine, EngineCapabilities, LiveKeys, RolloutScope, register_engine
from memsafe_rl.rollout.native.running_batch import generate, opened
from memsafe_rl.types import SamplingSettings


class NativeEngine:
    """Runs `memsafe_rl.rollout.native.running_batch.generate`; what lasts from call to call belongs to its scopes."""

    name = "native"

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter
        self.generate = partial(generate, adapter)

    @property
    def supports(self) -> EngineCapabilities:
        """What the engine can do; a rounded cache makes its log-probs another sampler's."""
        keeps = self._adapter.kv_retention
        return EngineCapabilities(
            is_external=self.cache_dtype is not None, kv_retention=keeps, int8_cache=keeps, resumes_completions=True
        )

    @property
    def cache_dtype(self) -> str | None:
        """Element type of the cache, as in `RolloutPlan.cache_dtype`."""
        return "int8" if self._adapter.in_8_bits else None

    def round_cache(self) -> None:
        """Keeps the caches to come in 8 bits."""
        self._adapter.cache_in_8_bits(True)

    def check(self, settings: SamplingSettings) -> None:
        """Finds nothing to refuse: this engine has every setting."""

    def synchronise(self, version: int) -> None:
        """Does nothing: the weights are the trained ones."""

    def open(self, live_keys: LiveKeys | None = None) -> AbstractContextManager[RolloutScope]:
        """Opens a scope whose bytes for waiting caches the agent and all other roles share."""
        return opened(live_keys, lambda kept: partial(generate, self._adapter, kept=kept))

    def release(self) -> None:
        """Does nothing: every wave gives its bytes back."""

    def close(self) -> None:
        """Does nothing."""


register_engine(Engine(NativeEngine.name, lambda context: NativeEngine(context.adapter)))
