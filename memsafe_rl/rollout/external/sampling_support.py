"""What an engine of another library can do with the sampling settings; what it cannot is refused by name."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Any, NoReturn

import torch
from transformers import ContinuousBatchingConfig

from memsafe_rl.errors import ConfigError
from memsafe_rl.rollout.engine import EngineContext
from memsafe_rl.types import Completion, SamplingSettings

FILTERS = frozenset({"top_p", "top_k", "min_p", "repetition_penalty"})
"""Settings after which the distribution drawn from is no longer the model's."""


def refuse_missing_vllm() -> None:
    """Refuses `use_vllm` where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "use_vllm is True, but the package vllm is not installed. Install it with `pip install vllm`, or, for a "
            "trial on a CPU, let `python -m benchmarks.vllm_engine` make an environment; or leave use_vllm out."
        )


_SIZES = frozenset({"num_blocks", "max_batch_tokens", "max_requests_per_batch", "max_memory_percent"})
_FIXED = frozenset({"return_logprobs", "seed", "per_request_processors", "drop_unsupported_processors"})


def check_options(given: Mapping[str, Any]) -> None:
    """Refuses arguments of transformers' `ContinuousBatchingConfig` that follow from the run or do not exist."""
    known = {field.name for field in fields(ContinuousBatchingConfig)}
    for name, value in given.items():
        if name in _SIZES:
            raise ConfigError(
                f"transformers_continuous_batching_config has {name}={value!r}, but sizes follow the memory plan. "
                "Leave it out and set memory_budget, or return a RolloutPlan of your own."
            )
        if name in _FIXED or name not in known:
            raise ConfigError(
                f"transformers_continuous_batching_config has {name}={value!r}, which "
                f"{'follows from the run' if name in _FIXED else 'this transformers does not have'}. Leave it out."
            )


def refuse_settings(engine: str, settings: SamplingSettings, honoured: Collection[str]) -> None:
    """Refuses settings that differ from their defaults and that an engine would drop."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if field.name not in honoured and value != default:
            raise ConfigError(
                f"{field.name} is {value!r}, which the rollout engine {engine!r} cannot honour. Leave it out, or leave "
                "the choice of the engine out: the library's own has every sampling setting."
            )


def refuse_encoder(context: EngineContext, setting: str) -> None:
    """Refuses encoder-decoders, where an engine knows causal language models only."""
    if context.adapter.geometry.source_bytes is not None:
        raise ConfigError(
            f"{setting} is True, but {type(context.adapter.model).__name__} is an encoder-decoder, "
            "which only this library's own engine samples. Leave it out."
        )


def refuse_begun(engine: str, begun: object) -> None:
    """Refuses completions that another call has begun, where an engine draws them whole."""
    if begun is not None:
        raise ConfigError(
            f"The rollout engine {engine!r} draws completions whole and cannot resume them. Leave "
            "partial_rollout_tokens out, or leave the choice of the engine out: the library's own resumes completions."
        )


def refuse_rounding(engine: str) -> NoReturn:
    """Refuses a cache in 8 bits, where an engine keeps one of its own."""
    raise ConfigError(
        f"cache_implementation='quantized' with the engine {engine!r}, which keeps its own cache. Leave one of the two "
        "out."
    )


@contextmanager
def quiet(logger: str, level: int) -> Iterator[None]:
    """Keeps another library from logging what is below a level."""
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)


def is_filtered(settings: SamplingSettings) -> bool:
    """Tells whether tokens are drawn from another distribution than the model's at the run's temperature."""
    plain = SamplingSettings(settings.max_new_tokens, settings.eos_token_ids)
    return any(getattr(settings, name) != getattr(plain, name) for name in FILTERS)


def completion_of(
    tokens: Sequence[int], logprobs: Sequence[float], settings: SamplingSettings, *, finished: bool
) -> Completion:
    """Makes a completion of plain numbers; the model's own log-probs are unknown where settings filter tokens."""
    drawn = torch.tensor(logprobs, dtype=torch.float32)
    own = torch.full_like(drawn, math.nan) if is_filtered(settings) else drawn
    return Completion(torch.tensor(tokens, dtype=torch.int64), drawn, own, finished)


def vllm_sampling(settings: SamplingSettings, seed: int) -> dict[str, Any]:
    """Writes settings as vLLM's; eos ids as stop tokens, so that none but the run's own end a sequence."""
    return {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "min_p": settings.min_p or 0.0,
        "repetition_penalty": settings.repetition_penalty,
        "max_tokens": settings.max_new_tokens,
        "stop_token_ids": list(settings.eos_token_ids),
        "ignore_eos": True,
        "seed": seed,
        "logprobs": 0,
        "detokenize": False,
    }
