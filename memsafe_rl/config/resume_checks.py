"""What a resumed run must share with the run that wrote its checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.errors import ConfigError

_FREE = frozenset(
    {
        "output_dir",
        "max_steps",
        "num_train_epochs",
        "resume_from_checkpoint",
        "do_train",
        "do_eval",
        "run_name",
        "project",
        "report_to",
        "disable_tqdm",
        "use_cpu",
        "per_device_eval_batch_size",
        "num_generations_eval",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "memory_budget",
        "allow_lossy",
        "trajectory_device",
        "auto_find_batch_size",
        "torch_empty_cache_steps",
        "cache_implementation",
        "pad_to_multiple_of",
        "memory_forecast",
        "verify_plan",
        "probe_worst_case",
        "reward_timeout_seconds",
        "reward_retries",
        "reward_timeout_result",
        "overlap_async_rewards",
        "num_completions_to_print",
        "trust_remote_code",
        "alarms",
    }
)
_FREE_BEGINNINGS = ("log_", "logging_", "save_", "eval_", "gradient_checkpointing")
_BATCHES = frozenset(
    {
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "steps_per_generation",
        "generation_batch_size",
    }
)
"""How rows are laid out over ranks and accumulation steps may change; `step_rows` and `rollout_rows` may not."""


def run_facts(config: TrainerConfig, examples: Sequence[Mapping[str, Any]], prompts: int | None) -> dict[str, Any]:
    """Gives everything that decides what a run computes, as plain values."""
    kept = {
        name: value
        for name, value in config.to_dict().items()
        if name not in _FREE and name not in _BATCHES and not name.startswith(_FREE_BEGINNINGS)
    }
    text = json.dumps([example.get("prompt") for example in examples], sort_keys=True, default=str)
    facts = {
        **kept,
        "rows of an optimizer step": config.step_rows,
        "rows of a rollout": config.rollout_rows,
        "prompts of an epoch": prompts,
        "first prompts of train_dataset": hashlib.sha256(text.encode()).hexdigest()[:16],
    }
    plain: dict[str, Any] = json.loads(json.dumps(facts, default=_named))
    return plain


def _named(value: Any) -> str:
    """Writes a value that JSON has no form for; what is called by name, as its address differs from run to run."""
    if not callable(value):
        return str(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def check_same_run(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses to go on with settings that would make another run of it."""
    differing = [name for name in sorted({*saved, *now}) if saved.get(name) != now.get(name)]
    if differing:
        told = "; ".join(f"{name} was {saved.get(name)!r} and is {now.get(name)!r}" for name in differing[:4])
        more = f" (and {len(differing) - 4} more)" if len(differing) > 4 else ""
        raise ConfigError(
            f"the checkpoint belongs to another run: {told}{more}. Set it back, or start without "
            "resume_from_checkpoint."
        )
