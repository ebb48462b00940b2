"""transformers' continuous batching as the rollout engine: the trained weights themselves, a paged cache per rollout.

It decodes in a thread of its own that catches its errors and hands out failed requests. Here a failure becomes an error
again: an out-of-memory one for the recovery loop, any other a `MemsafeError`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from memsafe_rl.errors import MemsafeError, quiet
from memsafe_rl.memory.runtime.failures import is_out_of_memory
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.models.language.causal_lm import causal_lm_of
from memsafe_rl.rollout import failure
from memsafe_rl.rollout.engine import Engine, EngineContext, Progress, register_engine
from memsafe_rl.rollout.external.function_engine import LIMITS, EngineRequest, FunctionEngine, pool_for
from memsafe_rl.rollout.external.sampling_support import check_options, completion_of, refuse_other_networks
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings

HONOURED = frozenset({"max_new_tokens", "eos_token_ids", "temperature", "top_p", "top_k", LIMITS})
"""Sampling settings that continuous batching has; it drops the processors of others without a word."""

_PAGE = "page_size" if "page_size" in ContinuousBatchingConfig.__dataclass_fields__ else "block_size"  # its older name
_PAGE_TOKENS = 32
_SPARE_BLOCKS = 2  # blocks that the cache allocates for padding
_BATCH_TOKENS = 1024
"""Tokens read in one forward at most: its attention masks have this many rows, each as wide as the cache."""
_WAIT_SECONDS = 1.0
_LOG = "ContinuousBatchingLogger"


def continuous_engine(context: EngineContext) -> FunctionEngine:
    """Makes an engine for continuous batching; what failed is drawn again whole, lest short completions be favoured."""
    refuse_other_networks(context)
    options = context.config.transformers_continuous_batching_config or {}
    check_options(options)
    batching = _Batching(context.adapter, {_PAGE: _PAGE_TOKENS, **options}, context.room)
    return FunctionEngine(context, batching.draw, honours=HONOURED)


@dataclass(frozen=True)
class _Batching:
    adapter: ModelAdapter  # the network
    options: Mapping[str, Any]  # arguments of transformers' `ContinuousBatchingConfig`
    room: Callable[[], int]  # gives the bytes that the run may still take

    def draw(self, asked: EngineRequest, plan: RolloutPlan) -> list[Completion]:
        """Draws one completion for every row."""
        model, settings = causal_lm_of(self.adapter.model), asked.settings
        generation, batching = _generation(settings), self._batching(asked, plan)
        with _plain_attention(model), quiet(_LOG, logging.CRITICAL):  # failures are raised here
            outputs = _run(model, asked, generation, batching)
        if isinstance(outputs, _Failed):
            # a fresh error, whose traceback holds nothing of what failed
            kind = torch.OutOfMemoryError if outputs.out_of_memory else MemsafeError
            raise kind(f"transformers' continuous batching failed: {outputs.message}")
        return [_completion(output, settings) for output in outputs]

    def _batching(self, asked: EngineRequest, plan: RolloutPlan) -> Any:
        """Sizes the cache by the plan, and by what the run may still hold."""
        weights = next(self.adapter.model.parameters())
        rows, room = min(len(asked.rows), max(1, plan.rows_in_flight)), self.room()
        pool = pool_for(
            self.adapter.geometry,
            element_bytes=weights.element_size(),
            block_tokens=int(self.options[_PAGE]),
            spare=_SPARE_BLOCKS,
            row_tokens=asked.row_tokens,
            rows=rows,
            kv_bytes=max(0, room if plan.kv_bytes is None else min(room, plan.kv_bytes)),
        )
        return ContinuousBatchingConfig(
            num_blocks=pool.blocks - pool.spare,
            max_batch_tokens=max(rows, min(plan.prefill_tokens, _BATCH_TOKENS)),
            max_requests_per_batch=rows,
            # the sizes above are the limit; this share is only compared with them
            max_memory_percent=1.0,
            return_logprobs=True,
            seed=asked.seeds[0] % 2**31,
            **self.options,
        )


def _generation(settings: SamplingSettings) -> Any:
    sampled = settings.temperature > 0
    return GenerationConfig(
        do_sample=sampled,
        max_new_tokens=settings.max_new_tokens,
        eos_token_id=list(settings.eos_token_ids) or -1,
        pad_token_id=0,  # named only so that none is looked for; nothing is padded
        **({"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k} if sampled else {}),
    )


@dataclass(frozen=True)
class _Failed:
    """What is kept of a failure: words, nothing that could hold a tensor."""

    message: str
    out_of_memory: bool


def _run(model: Any, asked: EngineRequest, generation: Any, batching: Any) -> list[Any] | _Failed:
    manager, finished = None, False
    try:
        manager = model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=batching, workload_hints=None
        )
        manager.warmup()
        manager.start()
        names: dict[int, str] = {}
        for limit in sorted(set(asked.limits)):
            places = [place for place, own in enumerate(asked.limits) if own == limit]
            ids = [asked.prompts[place] for place in places]
            names |= zip(places, manager.add_requests(inputs=ids, max_new_tokens=limit), strict=True)
        ended = _collect(manager, len(names), asked.progress)
        finished = all(name in ended and ended[name].error is None for name in names.values())
        if finished:
            return [ended[names[place]] for place in range(len(names))]
        told = next((output.error for output in ended.values() if output.error is not None), "its thread ended early")
    except Exception as error:
        return _failed(error, str(error))
    finally:
        if manager is not None:
            manager.stop(block=True, hard_stop=not finished)
            manager.batch_processor = None  # which has the cache
            manager.destroy()
    return _failed(manager.background_thread_status.fatal_error, told)


def _collect(manager: Any, total: int, progress: Progress | None) -> dict[str, Any]:
    ended: dict[str, Any] = {}
    while len(ended) < total:
        output = manager.get_result(timeout=_WAIT_SECONDS)
        if output is None and not manager.is_running():
            break
        if output is None or not output.is_finished():
            continue
        ended[output.request_id] = output
        if output.error is not None:
            break
        if progress is not None:
            progress(len(ended), total)
    return ended


def _failed(error: BaseException | None, told: str) -> _Failed:
    """Reads a failure, and frees the frames that it holds."""
    out_of_memory = isinstance(error, MemoryError) or is_out_of_memory(error or RuntimeError(told))
    link = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return _Failed(told, out_of_memory)


def _completion(output: Any, settings: SamplingSettings) -> Completion:
    tokens, logprobs = output.generated_tokens, output.logprobs
    failure.when(len(tokens) != len(logprobs) or not all(map(math.isfinite, logprobs)), "broken/batching")
    return completion_of(tokens, logprobs, settings, finished=int(tokens[-1]) in settings.eos_token_ids)


@contextmanager
def _plain_attention(model: Any) -> Iterator[None]:
    """Puts back the attention that continuous batching may have put another in place of."""
    before = model.config._attn_implementation
    try:
        yield
    finally:
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)


register_engine(Engine("continuous", continuous_engine))
