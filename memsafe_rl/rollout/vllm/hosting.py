"""Runs vLLM inside the training process: builds it, hands weights over, and leaves the process as it was."""

from __future__ import annotations

import copy
import gc
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memsafe_rl.errors import MemsafeError
from memsafe_rl.memory.runtime.failures import is_out_of_memory
from memsafe_rl.memory.runtime.recovery import capture_random_state, set_random_state
from memsafe_rl.rollout import refusal
from memsafe_rl.rollout.external.function_engine import Pool
from memsafe_rl.rollout.external.sampling_support import quiet

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
    on_cpu = {"enforce_eager": True, "block_size": hosted.pool.block_tokens} if device.type == "cpu" else {}
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
        **on_cpu,
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
