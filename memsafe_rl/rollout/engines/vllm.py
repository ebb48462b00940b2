"""vLLM inside the training process: builds it, hands weights over, draws, and leaves the process as it was."""

from __future__ import annotations

import copy
import gc
import logging
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memsafe_rl.errors import MemsafeError, quiet
from memsafe_rl.memory.runtime.failures import is_out_of_memory
from memsafe_rl.memory.runtime.recovery import capture_random_state, set_random_state
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.models.language.causal_lm import causal_lm_of
from memsafe_rl.models.module_state import eval_mode
from memsafe_rl.rollout import failure, refusal, unusable
from memsafe_rl.rollout.engine import Engine, EngineCapabilities, EngineContext, register_engine
from memsafe_rl.rollout.external.function_engine import (
    LIMITS,
    EngineRequest,
    ExternalEngine,
    Pool,
    Row,
    pool_for,
    seed_of,
)
from memsafe_rl.rollout.external.sampling_support import (
    FILTERS,
    completion_of,
    refuse_missing_vllm,
    refuse_other_networks,
    vllm_sampling,
)
from memsafe_rl.rollout.external.vllm_weights import named_weights, refuse_unmergeable
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings, SequenceKey

logger = logging.getLogger(__name__)

PACKAGE = "vllm"

_OURS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
"""In this process, so that weights pass by reference and no process can be left behind; and quiet."""
_UNSET = ("VLLM_CPU_KVCACHE_SPACE",)  # variables that would overrule the plan
_TOO_SMALL = re.compile(
    r"No available memory for the cache blocks|less than (?:desired|requested)[^\n]*memory"
    r"|(?:larger|more) than the available KV cache memory|KV cache is needed"
)
"""How vLLM says that its pool does not fit."""


@dataclass(frozen=True)
class VLLMSettings:
    """What is fixed for a whole run."""

    dtype: str  # type of the engine's weights, such as "bfloat16"
    memory_share: float = 0.3  # share of the device that its weights and its pool may fill
    sleeps: bool = False  # whether it gives its bytes back between two rollouts
    max_model_length: int | None = None  # longest sequence, in tokens; None for what the network and the pool hold


@dataclass(frozen=True)
class Hosted:
    """What a vLLM engine is built with."""

    pool: Pool  # its key/value pool
    max_model_len: int  # longest sequence, in tokens
    rows: int  # sequences that it decodes together
    batch_tokens: int  # tokens that it reads in one forward
    settings: VLLMSettings  # what is fixed for the whole run


def build(model: Any, hosted: Hosted, device: torch.device) -> Any:
    """Builds vLLM's engine for a network, with weights that mean nothing yet."""
    refusal.when(torch.distributed.is_available() and torch.distributed.is_initialized(), "use_vllm/ranks")
    with contained(), tempfile.TemporaryDirectory() as folder, failures_named("could not be started"):
        from vllm import EngineArgs, LLMEngine

        config = copy.deepcopy(model.config)
        config.architectures = config.architectures or [type(model).__name__]  # by which vLLM finds its own form of it
        config.save_pretrained(folder)
        return LLMEngine.from_engine_args(EngineArgs(model=folder, **_arguments(hosted, device)))


def _arguments(hosted: Hosted, device: torch.device) -> dict[str, Any]:
    return {
        "runner": "generate",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": hosted.settings.dtype,
        "kv_cache_memory_bytes": hosted.pool.bytes,
        "gpu_memory_utilization": hosted.settings.memory_share,
        "max_model_len": hosted.max_model_len,
        "max_num_seqs": hosted.rows,
        "max_num_batched_tokens": hosted.batch_tokens,
        "enable_prefix_caching": True,
        "enable_sleep_mode": hosted.settings.sleeps,
        # of the distribution drawn from, as the correction of importance needs them
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "seed": 0,
        **({"enforce_eager": True, "block_size": hosted.pool.block_tokens} if device.type == "cpu" else {}),
    }


def hand_over(engine: Any, weights: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
    """Puts weights in the place of those that vLLM has, and forgets the prompts it read with those."""
    with quiet(PACKAGE, logging.ERROR), failures_named("did not take the model's weights"):
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        if device.type == "cpu":
            engine.apply_model(_repack)
        engine.reset_prefix_cache()


def _repack(model: nn.Module) -> None:
    """Packs weights for the kernels of vLLM's CPU build where reloading does not: tied output heads, and experts."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if type(module).__name__ == "ParallelLMHead" and method is not None:
            method.process_weights_after_loading(module)
        experts: Any = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if experts is not None:
            experts.process_weights_after_loading(module)


def shut_down(engine: Any) -> None:
    """Ends an engine and gives back what it holds."""
    with contained():
        engine.engine_core.shutdown()
        end_renderer = getattr(getattr(engine, "renderer", None), "shutdown", None)
        if end_renderer is not None:
            end_renderer()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def contained() -> Iterator[None]:
    """Undoes what vLLM does to a process that it takes for its own: variables, threads, seeds, log, collection."""
    variables, set_threads, threads = dict(os.environ), torch.set_num_threads, torch.get_num_threads()
    random, default = capture_random_state(), torch.get_default_dtype()
    os.environ.update(_OURS)
    for name in _UNSET:
        os.environ.pop(name, None)
    try:
        # of what is meant here: no tokenizer, weights that are tied, thread counts
        with quiet(PACKAGE, logging.ERROR):
            yield
    finally:
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:
            set_threads(threads)
        torch.set_default_dtype(default)
        set_random_state(random)
        gc.unfreeze()


@contextmanager
def failures_named(what: str) -> Iterator[None]:
    """Turns vLLM's errors into ours, and a pool that does not fit into a failed allocation."""
    try:
        yield
    except MemsafeError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if _TOO_SMALL.search(str(error)):
            raise torch.OutOfMemoryError(f"vLLM {what}: {error}") from None
        raise MemsafeError(
            f"vLLM {what}: {type(error).__name__}: {error}. Leave use_vllm out to decode with the library's own engine."
        ) from error


HONOURED = frozenset({"max_new_tokens", "eos_token_ids", "temperature", *FILTERS, LIMITS})
"""Sampling settings that vLLM has with the same meaning."""

_BLOCK_TOKENS = {"cpu": 32}  # tokens of a block of the pool, by kind of device; 16 elsewhere, as in vLLM
_SPARE_BLOCKS = 1  # blocks that vLLM never gives to a sequence
_TOLERANCE = {"float32": 1e-3}  # nats by which log-probs may differ from the model's own; coarser types: 0.3
_CHECKED_TOKENS = 8
_GROWTH = 2
"""How many times its size a rollout may ask for before a larger engine is worth the seconds it takes to build."""


class VLLMEngine(ExternalEngine):
    """Draws completions with vLLM; the engine is built at the first rollout, whose plan says how large its pool is."""

    name = "vllm"
    supports = EngineCapabilities(is_external=True, compares_filtered=True)
    _honours = HONOURED

    def __init__(
        self, adapter: ModelAdapter, settings: VLLMSettings, *, total_bytes: int, room: Callable[[], int]
    ) -> None:
        refuse_missing_vllm()
        refuse_unmergeable(adapter.model)
        device = adapter.device.type
        refusal.when(settings.sleeps and device != "cuda", "vllm_enable_sleep_mode", device=device)
        self._adapter = adapter
        self._settings = settings
        self._total_bytes = total_bytes
        self._room = room
        self._engine: Any = None
        self._hosted: Hosted | None = None
        self._asked_bytes = 0
        self._version: int | None = None
        self._asleep = False
        self._unchecked = False

    def synchronise(self, version: int) -> None:
        """Hands the weights over if they have moved; a later `generate` does it where nothing is built or awake."""
        if version == self._version:
            return
        self._version = None
        if self._engine is not None and not self._asleep:
            try:
                self._push()
            except BaseException:
                self._end()  # with some weights new and some old; a later rollout builds it anew
                raise
        self._version = version

    def release(self) -> None:
        """Puts vLLM to sleep where the run asks for it: weights and pool leave the device; otherwise they stay."""
        if self._settings.sleeps and self._engine is not None and not self._asleep:
            with failures_named("could not be put to sleep"):
                self._engine.sleep(level=2)
            self._asleep = True

    def close(self) -> None:
        """Ends vLLM; a later `generate` would build it anew, with the weights of that moment."""
        self._end()
        self._version = None

    def draw_rows(self, request: EngineRequest, plan: RolloutPlan) -> list[Completion]:
        """Draws a completion for each row; a failure ends the engine, which the next attempt builds again."""
        random = capture_random_state()  # which vLLM draws from, though every sequence has its own seed
        try:
            with failures_named("failed while it drew completions"):
                self._prepare(plan, request.row_tokens, len(request.rows))
                self._check_weights(request.prompts[0])
                ended = _Run(self._engine, request, plan).completions()
                return [ended[row] for row in request.rows]
        except BaseException:
            self._end()
            raise
        finally:
            set_random_state(random)

    def _prepare(self, plan: RolloutPlan, row_tokens: int, rows: int) -> None:
        """Sees that an engine of the right size is there, awake, with the weights of the last `synchronise`."""
        limit = self._settings.max_model_length
        unusable.when(limit is not None and row_tokens > limit, "prompts/vllm", tokens=row_tokens, limit=limit)
        rows = min(rows, max(1, plan.rows_in_flight))
        if self._hosted is not None and not self._serves(self._hosted, plan, row_tokens, rows):
            self._end()
        if self._engine is None:
            self._start(plan, row_tokens, rows)
        elif self._asleep:
            self._engine.wake_up(tags=["weights"])
            self._push()
            self._engine.wake_up(tags=["kv_cache"])
            self._asleep = False

    def _serves(self, hosted: Hosted, plan: RolloutPlan, row_tokens: int, rows: int) -> bool:
        """Returns whether the engine that is there is within the plan, and not far smaller than the work asks for."""
        wanted = self._pool(row_tokens, rows, plan)
        too_large = plan.kv_bytes is not None and hosted.pool.bytes > max(plan.kv_bytes, wanted.bytes)
        return row_tokens <= hosted.max_model_len and not too_large and wanted.bytes <= _GROWTH * self._asked_bytes

    def _start(self, plan: RolloutPlan, row_tokens: int, rows: int) -> None:
        pool = self._pool(row_tokens, rows, plan, bounded=True)
        limits = (self._settings.max_model_length, self._adapter.geometry.max_positions, pool.tokens)
        hosted = Hosted(
            pool=pool,
            max_model_len=min(limit for limit in limits if limit is not None),
            rows=rows,
            batch_tokens=max(plan.prefill_tokens, rows),
            settings=self._settings,
        )
        self._engine = build(causal_lm_of(self._adapter.model), hosted, self._adapter.device)
        self._hosted, self._asleep = hosted, False
        self._asked_bytes = self._pool(row_tokens, rows, plan).bytes
        logger.info("vLLM is up: %d rows, %d tokens of cache in %d bytes", rows, pool.tokens, pool.bytes)
        self._push()

    def _push(self) -> None:
        hand_over(self._engine, named_weights(self._adapter.model), self._adapter.device)
        self._unchecked = True

    def _pool(self, row_tokens: int, rows: int, plan: RolloutPlan, *, bounded: bool = False) -> Pool:
        """Sizes the pool by the plan; ``bounded``: by what the run may still hold as well."""
        element_bytes = getattr(torch, self._settings.dtype).itemsize
        known = [] if plan.kv_bytes is None else [plan.kv_bytes]
        if bounded:  # by what share and budget leave once the copy of the weights is there
            copied = element_bytes * sum(weight.numel() for _, weight in self._adapter.model.named_parameters())
            known += (int(self._settings.memory_share * self._total_bytes) - copied, self._room() - copied)
        return pool_for(
            self._adapter.geometry,
            element_bytes=element_bytes,
            block_tokens=_BLOCK_TOKENS.get(self._adapter.device.type, 16),
            spare=_SPARE_BLOCKS,
            row_tokens=row_tokens,
            rows=rows,
            kv_bytes=max(0, min(known)) if known else None,
        )

    def _end(self) -> None:
        engine, self._engine, self._hosted, self._asleep = self._engine, None, None, False
        if engine is None:
            return
        try:
            shut_down(engine)
        except Exception as error:
            logger.warning("vLLM did not end cleanly: %s", error)

    def _check_weights(self, prompt: Sequence[int]) -> None:
        """Compares the first token's log-probs with the model's own, once after every hand-over."""
        if not self._unchecked:
            return
        from vllm import SamplingParams

        start = list(prompt[: _CHECKED_TOKENS * 2])
        params = SamplingParams(temperature=1.0, max_tokens=1, logprobs=_CHECKED_TOKENS, seed=0, detokenize=False)
        self._engine.add_request("check", {"prompt_token_ids": start}, params)
        outputs = [output for _ in iter(self._engine.has_unfinished_requests, False) for output in self._engine.step()]
        given = outputs[-1].outputs[0].logprobs[0]
        with torch.no_grad(), eval_mode(self._adapter.model):
            model = causal_lm_of(self._adapter.model)
            ids = torch.tensor([start], device=self._adapter.device)
            own_V = model(input_ids=ids, use_cache=False).logits[0, -1].float().log_softmax(-1)
        gap = max(abs(entry.logprob - float(own_V[token])) for token, entry in given.items())
        close = gap <= _TOLERANCE.get(self._settings.dtype, 0.3)
        failure.when(not close, "vllm/weights", gap=gap, model=type(model).__name__)
        self._unchecked = False


class _Run:
    """One rollout on an engine: requests enter as rows become free, the first of each prompt ahead of its group."""

    def __init__(self, engine: Any, asked: EngineRequest, plan: RolloutPlan) -> None:
        self._engine, self._request, self._rows = engine, asked, max(1, plan.rows_in_flight)
        self._settings = asked.limited
        self._waiting: list[Row] = sorted(asked.rows, key=lambda row: (-len(asked.ids[row[0]]), row))
        self._running: dict[str, Row] = {}
        self._read: set[int] = set()
        self._ended: dict[Row, Completion] = {}

    def completions(self) -> dict[Row, Completion]:
        """Steps until every sequence has ended."""
        total = len(self._waiting)
        patience = self._patience()
        while self._waiting or self._running:
            failure.when(patience == 0, "vllm/endless", running=len(self._running))
            patience -= 1
            self._admit()
            finished = [output for output in self._engine.step() if output.finished]
            # a group's prompt is in the prefix cache from now on
            self._read.update(prompt for prompt, _ in self._running.values())
            for output in finished:
                self._ended[self._running.pop(output.request_id)] = self._completion(output.outputs[0])
            if finished:
                patience = self._patience()
                if self._request.progress is not None:
                    self._request.progress(len(self._ended), total)
        return self._ended

    def _patience(self) -> int:
        """Steps within which a sequence must end, however often others push it aside and it is read again."""
        return 1000 + 4 * self._request.row_tokens * self._rows

    def _admit(self) -> None:
        reading = {prompt for prompt, _ in self._running.values()} - self._read
        for row in list(self._waiting):
            if len(self._running) >= self._rows:
                return
            prompt, sample = row
            if prompt in reading:
                continue
            if prompt not in self._read:
                reading.add(prompt)
            name, params = f"{prompt}-{sample}", _sampling(self._settings[row], self._request.key(row))
            self._engine.add_request(name, {"prompt_token_ids": self._request.ids[prompt]}, params)
            self._running[name] = row
            self._waiting.remove(row)

    def _completion(self, output: Any) -> Completion:
        tokens = list(output.token_ids)
        logprobs = [entry[token].logprob for token, entry in zip(tokens, output.logprobs, strict=True)]
        failure.when(not all(map(math.isfinite, logprobs)), "vllm/logprobs")
        return completion_of(tokens, logprobs, self._request.settings, finished=output.finish_reason == "stop")


def _sampling(settings: SamplingSettings, key: SequenceKey) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(**vllm_sampling(settings, seed_of(key)), output_kind=RequestOutputKind.FINAL_ONLY)


def vllm_engine(context: EngineContext) -> VLLMEngine:
    """Makes the engine that the configuration describes."""
    refuse_other_networks(context)
    config, weights = context.config, next(context.adapter.model.parameters())
    computes_in = "bfloat16" if config.bf16 else "float16" if config.fp16 else str(weights.dtype).removeprefix("torch.")
    share, sleeps = config.vllm_gpu_memory_utilization, config.vllm_enable_sleep_mode
    settings = VLLMSettings(computes_in, share, sleeps, config.vllm_max_model_length)
    return VLLMEngine(context.adapter, settings, total_bytes=context.total_bytes, room=context.room)


register_engine(Engine(VLLMEngine.name, vllm_engine))
