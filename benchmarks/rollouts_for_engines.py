"""One rollout behind every engine, for `benchmarks.vllm_engine`; runs in the environment that has vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor

from benchmarks.draws import keys_of, lengths_by_generate
from benchmarks.small import PAD_ID, small_qwen3
from memsafe_rl.config.grpo import GRPOConfig
from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.models.language.causal_lm import CausalLMAdapter
from memsafe_rl.rollout.engine import EngineContext, RolloutEngine
from memsafe_rl.rollout.engines import ENGINES
from memsafe_rl.types import RolloutPlan, SamplingSettings

Draw = Callable[[Sequence[Tensor], int, int], list[int]]
"""Takes prompts, samples of each and the rollout's index; gives the completions' lengths."""

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def random_model(vocab_size: int) -> Any:
    """Makes a Qwen3 of 11 million parameters whose tokens are nearly equally likely.

    Args:
        vocab_size: rows of its tied embedding.

    Returns:
        The model, fp32.
    """
    return small_qwen3(
        vocab_size,
        hidden=256,
        layers=4,
        head_dim=32,
        intermediate_size=768,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=None,
    ).eval()


def drawer_of(engine: str, model: Any, ends: tuple[int, ...], longest: int) -> Draw:
    """Returns what draws a rollout with an engine.

    Args:
        engine: its name, or "generate" for transformers' `generate`.
        model: the network.
        ends: ids that end a completion.
        longest: longest completion, in tokens.

    Returns:
        Draws.
    """
    if engine == "generate":
        return lambda prompts, group, rollout: lengths_by_generate(
            model, prompts, group, longest, ends, PAD_ID, rollout
        )
    drawer, plan = _engine(engine, model), RolloutPlan(rows_in_flight=64)
    settings = SamplingSettings(longest, ends)
    drawer.synchronise(0)

    def draw(prompts: Sequence[Tensor], group: int, rollout: int) -> list[int]:
        keys = keys_of(len(prompts), group, rollout=rollout)
        return [len(row.ids) for row in drawer.generate(prompts, keys, settings, under(plan))]

    return draw


def _engine(name: str, model: Any) -> RolloutEngine:
    adapter = CausalLMAdapter(model, pad_token_id=PAD_ID)
    plenty = psutil.virtual_memory().total
    config = GRPOConfig(use_cpu=True, report_to="none")
    return ENGINES[name].function(EngineContext(name, adapter, config, plenty, lambda: plenty))


def resident_bytes(*, peak: bool = False) -> int:
    """Reads the process's resident memory.

    Args:
        peak: the most since `start_peak`.
    """
    name = "VmHWM" if peak else "VmRSS"
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def start_peak() -> None:
    """Starts a new peak."""
    _RESET.write_text("5")
