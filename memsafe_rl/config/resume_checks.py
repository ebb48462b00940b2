"""What a resumed run must share with the run that wrote its checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from memsafe_rl.config import refusal
from memsafe_rl.config.base import TrainerConfig


def run_facts(config: TrainerConfig, examples: Sequence[Mapping[str, Any]], prompts: int | None) -> dict[str, Any]:
    """Returns everything that decides what a run computes, as plain values."""
    written = config.to_dict()
    kept = {name: written[name] for name, one in config.declared.items() if one.resume == "must agree"}
    text = json.dumps([example.get("prompt") for example in examples], sort_keys=True, default=_written)
    facts = {
        **kept,
        "algorithm": config.algorithm,
        # how rows are laid out over ranks and accumulation steps may change; these may not
        "rows of an optimizer step": config.step_rows,
        "rows of a rollout": config.rollout_rows,
        "prompts of an epoch": prompts,
        "first prompts of train_dataset": hashlib.sha256(text.encode()).hexdigest()[:16],
    }
    return dict(json.loads(json.dumps(facts, default=_named)))


def _written(value: Any) -> str:
    """Writes a value of a prompt, an image by its pixels."""
    return hashlib.sha256(value.tobytes()).hexdigest() if hasattr(value, "tobytes") else str(value)


def _named(value: Any) -> str:
    """Writes a value that JSON has no form for; what is called by name, as its address differs from run to run."""
    if not callable(value):
        return str(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


_NEWER = ("algorithm", "means of the policy", "null_condition of the policy")
"""What earlier versions did not write."""


def check_same_run(saved: Mapping[str, Any], now: Mapping[str, Any], config: TrainerConfig) -> None:
    """Refuses settings that would make it another run; a setting newer than the checkpoint counts as its default."""
    declared, known = config.declared, config.declared.keys() & now.keys()  # the others of `declared` may change
    assumed = {name: now[name] if config.left_open(name) else declared[name].default for name in known}
    assumed |= {name: now.get(name) for name in _NEWER}
    saved = {**assumed, **{name: value for name, value in saved.items() if name in known or name not in declared}}
    differing = [name for name in sorted({*saved, *now}) if saved.get(name) != now.get(name)]
    differing = ["algorithm"] if "algorithm" in differing else differing  # with which settings come and go
    if differing:
        present = {name: f"is {now[name]!r}" if name in now else "is no setting of this run" for name in differing}
        told = "; ".join(f"{name} was {saved.get(name)!r} and {present[name]}" for name in differing[:4])
        more = f" (and {len(differing) - 4} more)" if len(differing) > 4 else ""
        raise refusal("resume_from_checkpoint", told=told, more=more)
