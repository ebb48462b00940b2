"""How large everything is on a card and in rehearsal, and what the parts share."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks.small import EOS_ID, PAD_ID
from memsafe_rl.memory.runtime.meters import MemoryMeter, meter_for
from memsafe_rl.memory.runtime.recovery import prepare_device
from memsafe_rl.preflight.fake.families import config_for

Record = dict[str, Any]
Rows = Iterator[tuple[str, Record]]

DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Case:
    """A run whose peak is forecast.

    Args:
        model: a name that the library knows.
        lora: rank of the adapter that is trained; None for all weights.
        group: completions a prompt, of which there are four.
        new_tokens: tokens of every completion.
    """

    model: str
    lora: int | None
    group: int = 8
    new_tokens: int = 32

    def __str__(self) -> str:
        what = "full" if self.lora is None else f"LoRA {self.lora}"
        return f"{self.model}, {what}, G={self.group}, {self.new_tokens} tokens"


@dataclass(frozen=True)
class Size:
    """How large everything is.

    Args:
        dtype: in which networks of `forecast`, `rollout` and `step` compute.
        width: of the small networks of `prove` and `budget`.
        layers: blocks of them.
        head_dim: of a head of them.
        vocab_size: of the small networks.
        new_tokens: longest completion of the small networks, in tokens.
        cases: of `forecast`.
        beside: the network of `rollout` and `step`, a name that the library knows.
        shrunk: whether networks of real size (`forecast`, `rollout`, `step`, `launches`) keep their family only.
        rollout_tokens: tokens of every completion of `rollout` and `step`.
        prompt_tokens: of every prompt of `rollout`, `step` and `forecast`.
        scenes: of `storm`, by name.
        random_runs: of `random`.
        families: of `invariance`.
        sampled_tokens: of each of them.
    """

    dtype: torch.dtype
    width: int
    layers: int
    head_dim: int
    vocab_size: int
    new_tokens: int
    cases: tuple[Case, ...]
    beside: str
    shrunk: bool
    rollout_tokens: int
    prompt_tokens: int
    scenes: tuple[str, ...]
    random_runs: int
    families: tuple[str, ...]
    sampled_tokens: int


CARD = Size(
    dtype=torch.bfloat16,
    width=512,
    layers=4,
    head_dim=64,
    vocab_size=32_000,
    new_tokens=48,
    cases=(
        Case("Qwen/Qwen3-0.6B", None),
        Case("meta-llama/Llama-3.1-8B", 16, group=4),
        Case("Qwen/Qwen3-4B", 16),
    ),
    beside="Qwen/Qwen3-0.6B",
    shrunk=False,
    rollout_tokens=32,
    prompt_tokens=200,
    scenes=(
        "full",
        "LoRA, recomputed, leaner plans",
        "full, everything on the host, leaner plans",
        "PPO, critic of its own, on the host",
        "T5, KL to a copy",
        "denoiser, KL to a copy",
    ),
    random_runs=5,
    families=("qwen3", "gemma3", "gpt2", "t5", "moe"),
    sampled_tokens=1_280,
)
REHEARSAL = Size(
    dtype=torch.float32,
    width=64,
    layers=2,
    head_dim=16,
    vocab_size=8192,
    new_tokens=32,
    cases=(Case("Qwen/Qwen3-0.6B", None, 4, 12),),
    beside="Qwen/Qwen3-0.6B",
    shrunk=True,
    rollout_tokens=12,
    prompt_tokens=24,
    scenes=("LoRA, recomputed, leaner plans",),
    random_runs=1,
    families=("qwen3",),
    sampled_tokens=640,
)


@contextmanager
def counted() -> Iterator[MemoryMeter]:
    """Counts what is held on the device; the meter's peak begins here, with what CUDA's libraries take early."""
    gc.collect()
    prepare_device(DEVICE)
    meter = meter_for(DEVICE)
    torch.cuda.empty_cache()
    meter.reset_peak()
    yield meter


def clock() -> float:
    """Reads the clock when the device has done all that it was given, in seconds."""
    torch.cuda.synchronize()
    return time.perf_counter()


def real_config(name: str, size: Size) -> PretrainedConfig:
    """Returns a network's config; of a rehearsal, the same family in small."""
    config = config_for(name)
    if size.shrunk:
        small = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        config.update({**small, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16})
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: config.num_hidden_layers]
    config.update({"pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "bos_token_id": None})
    return config


def random_network(config: PretrainedConfig, size: Size) -> Any:
    """Makes a network with random weights where they are wanted, in the type that they are trained in."""
    torch.manual_seed(0)
    with DEVICE:
        return AutoModelForCausalLM.from_config(config, dtype=size.dtype)


def settings(folder: str, **more: Any) -> Record:
    """Returns settings that every run has."""
    return {
        "output_dir": folder,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "optim": "adamw_torch_fused",
        **more,
    }


def prompts(count: int, tokens: int) -> Dataset:
    """Returns prompts of one byte a token."""
    return Dataset.from_dict({"prompt": [f"{index:03d}".ljust(tokens, ".") for index in range(count)]})


def highest(trainer: Any, metric: str) -> int:
    """Returns a metric's highest value in any step, such as "memory/peak_bytes": phases restart the meter's peak."""
    return int(max(step[metric] for step in trainer.history))


def failures(trainer: Any) -> int:
    """Counts allocations that failed, and what had to be done about them."""
    return sum(event["event"] in ("retry", "failure", "fallback") for event in trainer.memory_events)


class Spread:
    """Pays every completion by its own ids, and keeps them."""

    __name__ = "spread"

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """Rewards completions."""
        self.seen += [list(map(int, ids)) for ids in completion_ids]
        return [float(sum((7919 * int(token)) % 1009 for token in ids) % 997) / 997 for ids in completion_ids]


class Timed(Spread):
    """Notes besides when each rollout is paid."""

    def __init__(self) -> None:
        super().__init__()
        self._ends: list[float] = []

    def __call__(self, completion_ids: Sequence[Sequence[int]], **others: Any) -> list[float]:
        """Rewards completions."""
        self._ends.append(clock())
        return super().__call__(completion_ids, **others)

    def step_seconds(self) -> float:
        """Returns the shortest time from one rollout's rewards to the next one's: one update and one rollout."""
        return min(after - before for before, after in itertools.pairwise(self._ends))
