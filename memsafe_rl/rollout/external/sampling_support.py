"""What an engine of another library can do with the sampling settings; what it cannot is refused by name."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, PreTrainedModel

from memsafe_rl.models.language.base import language_model_of
from memsafe_rl.rollout import refusal
from memsafe_rl.rollout.engine import EngineContext
from memsafe_rl.types import Completion, SamplingSettings

FILTERS = frozenset({"top_p", "top_k", "min_p", "repetition_penalty"})
"""Settings after which the distribution drawn from is no longer the model's."""


def refuse_missing_vllm() -> None:
    """Refuses `use_vllm` where vLLM is not installed."""
    refusal.when(importlib.util.find_spec("vllm") is None, "use_vllm/package")


_SIZES = frozenset({"num_blocks", "max_batch_tokens", "max_requests_per_batch", "max_memory_percent"})
_FIXED = frozenset({"return_logprobs", "seed", "per_request_processors", "drop_unsupported_processors"})


def check_options(given: Mapping[str, Any]) -> None:
    """Refuses arguments of transformers' `ContinuousBatchingConfig` that follow from the run or do not exist."""
    known = {field.name for field in fields(ContinuousBatchingConfig)}
    for name, value in given.items():
        refusal.when(name in _SIZES, "transformers_continuous_batching_config/size", name=name, value=value)
        why = "follows from the run" if name in _FIXED else None if name in known else "this transformers does not have"
        refusal.when(why, "transformers_continuous_batching_config/name", name=name, value=value, why=why)


def refuse_other_networks(context: EngineContext) -> None:
    """Refuses networks other than transformers' causal language models, where an engine knows no others."""
    network, config = language_model_of(context.adapter.model), context.config
    if not isinstance(network, PreTrainedModel) or network.config.is_encoder_decoder:
        setting = next(iter(config.engines_chosen))
        raise refusal("engine/network", setting=setting, value=getattr(config, setting), kind=type(network).__name__)


def refuse_begun(engine: str, begun: object) -> None:
    """Refuses completions that another call has begun, where an engine draws them whole."""
    refusal.when(begun is not None, "engine/begun", engine=engine)


def completion_of(
    tokens: Sequence[int], logprobs: Sequence[float], settings: SamplingSettings, *, finished: bool
) -> Completion:
    """Makes a completion of plain numbers; the model's own log-probs are unknown where settings filter tokens."""
    drawn = torch.tensor(logprobs, dtype=torch.float32)
    own = torch.full_like(drawn, math.nan) if FILTERS & settings.chosen().keys() else drawn
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
