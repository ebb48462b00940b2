"""Writes docs/trl-settings.md: every argument and setting of TRL's GRPO and RLOO, and what it is here.

    python -m benchmarks.trl_page

What is honoured, refused or taken is read from the declarations of settings and `config/unsupported.yaml`; only the
notes stand here. `tests/config/test_trl_page.py` holds the page to what this gives.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trl

import memsafe_rl
from memsafe_rl.config.settings import ALGORITHMS
from memsafe_rl.config.unsupported import ALIASES, REFUSED

PAGE = Path(__file__).parents[1] / "docs" / "trl-settings.md"
ALGORITHMS_OF_TRL = ("GRPO", "RLOO")

HINTS = (
    *("auto_find_batch_size", "cache_implementation", "gradient_checkpointing", "gradient_checkpointing_kwargs"),
    "pad_to_multiple_of",
)
"""Settings whose own help is what differs."""
_STEP = "taken over the whole optimizer step and all ranks, TRL's over a micro-batch"
NOTES = {
    **dict.fromkeys(("top_entropy_quantile", "entropy_coef", "router_aux_loss_coef"), _STEP),
    "per_device_train_batch_size": "fixes the effective batch alone; the plan decides what is in memory at once",
    "gradient_accumulation_steps": "fixes the effective batch alone; the plan decides what is in memory at once",
    "per_device_eval_batch_size": "need not be a multiple of the group, and never changes a result",
    "steps_per_generation": "a multiple of gradient_accumulation_steps, or a divisor of it with num_iterations=1",
    "num_iterations": "rows are reshuffled in every pass; TRL repeats their order",
    "seed": "draws depend on it, never on how work is cut; they are other draws than TRL's",
    "shuffle_dataset": "another order than TRL's from the same seed",
    "disable_dropout": "a batch that is cut otherwise would draw other masks",
    "bf16": "on where the device has it, else off with a line in the log",
    "generation_kwargs": "every key that sampling has, stop strings and processors too; others are refused by name",
    "loss_type": "TRL's eight, 'rloo', and a loss of your own; token means are over the step's own tokens",
    "lr_scheduler_type": "the schedules of transformers that need no metric",
    "optim": "those that a failed attempt can be undone for (`memsafe-rl train --help` lists them)",
    "resume_from_checkpoint": "also 'auto'; resumes inside a rollout, bit for bit",
    "torch_compile": "decoding steps and blocks are compiled, same tokens and gradients up to rounding",
    "torch_compile_backend": "'inductor' only",
    "use_vllm": "vLLM's log-probs correct importance, and are never the old ones",
    "vllm_gpu_memory_utilization": "the plan and memory_budget hold as well",
}
"""What to know of a setting that is honoured."""

ARGUMENTS = {
    "model": "same; encoder-decoders and `DiffusionPolicy` too",
    "reward_funcs": "same; also names of ready-made rewards and of reward models, and None where environments reward",
    "train_dataset": "same, a list of dicts too; images with [some families](images.md#families)",
    "eval_dataset": "same, as loss, rewards, lengths and pass@k; images as in training",
    "processing_class": "same; tokenizers",
    "rollout_func": "same; its `logprobs` serve importance correction alone",
    "tools": "same, in [episodes](agents.md) with limits and recovery",
    "environment_factory": "same, with users and several turns ([agents](agents.md))",
    "callbacks": "same, but for `on_substep_end` and `control.should_epoch_stop`; in `on_optimizer_step` gradients are "
    "gone and the step is counted",
}
"""What to know of a trainer's argument; all others are the same without a word."""


def row(name: str, algorithms: str, here: str) -> str:
    """Writes a row of a table."""
    return f"| `{name}`{algorithms} | {' '.join(here.split()).replace('|', chr(92) + '|')} |"


def arguments() -> Iterator[str]:
    """Yields a row for each argument of TRL's trainers."""
    theirs = {name: list(inspect.signature(getattr(trl, f"{name}Trainer")).parameters) for name in ALGORITHMS_OF_TRL}
    for name in dict.fromkeys(name for names in theirs.values() for name in names):
        for algorithm in ALGORITHMS_OF_TRL:
            known = inspect.signature(getattr(memsafe_rl, f"{algorithm}Trainer")).parameters
            if name not in known:
                raise AssertionError(f"{algorithm}Trainer has no argument {name}")
        yield row(name, _beside(name, theirs), ARGUMENTS.get(name, "same"))


def settings() -> Iterator[str]:
    """Yields a row for each setting of TRL's configurations."""
    configs = {name: dataclasses.fields(getattr(trl, f"{name}Config")) for name in ALGORITHMS_OF_TRL}
    theirs = {name: [field.name for field in fields] for name, fields in configs.items()}
    defaults = {name: {field.name: _default(field) for field in fields} for name, fields in configs.items()}
    names = sorted({name for known in theirs.values() for name in known})
    if unknown := NOTES.keys() - set(names):
        raise AssertionError(f"notes of no setting of TRL: {sorted(unknown)}")
    for name in names:
        owners = {algorithm: defaults[algorithm][name] for algorithm in theirs if name in theirs[algorithm]}
        yield row(name, _beside(name, theirs), _here(name, owners))


def _here(name: str, defaults: dict[str, Any]) -> str:
    """Says what a setting of TRL is here, by the algorithms that have it with TRL's defaults."""
    if name in REFUSED:
        refusal = REFUSED[name]
        told = f"{refusal.reason}. {refusal.remedy}".strip()
        return f"accepted, changes nothing: {refusal.reason}" if refusal.taken else f"**refused**: {told}"
    target = ALIASES.get(name, name)
    notes = [] if target == name else [f"as `{target}`"]
    for algorithm, default in defaults.items():
        ours = ALGORITHMS[algorithm].declared[target].default
        if target == name and ours != default:
            notes.append(f"default {ours!r} here, {default!r} there")
    notes += [ALGORITHMS["GRPO"].declared[name].help] if name in HINTS else []
    notes += [NOTES[name]] if name in NOTES else []
    return f"same: {'; '.join(dict.fromkeys(notes))}" if notes else "same"


def _beside(name: str, theirs: dict[str, list[str]]) -> str:
    owners = [algorithm for algorithm, names in theirs.items() if name in names]
    return "" if len(owners) == len(theirs) else f" ({', '.join(owners)})"


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]


def page() -> str:
    """Returns the whole page."""
    rows = list(settings())
    refused = sum("**refused**" in line for line in rows)
    accepted = sum("accepted, changes nothing" in line for line in rows)
    counts = f"{len(rows) - refused - accepted} honoured, {accepted} accepted without effect, {refused} refused"
    head = ["| TRL 1.16 | here |", "|---|---|"]
    lines = [
        "# TRL's arguments and settings, one by one",
        "",
        *INTRODUCTION.splitlines(),
        "",
        "## Arguments of the trainers",
        "",
        *head,
        *arguments(),
        "",
        f"## Settings: {counts}",
        "",
        *head,
        *rows,
    ]
    return "\n".join(lines) + "\n"


INTRODUCTION = """\
Written by `python -m benchmarks.trl_page` from the declarations of settings and `memsafe_rl/config/unsupported.yaml`; a
test holds it to them. A name without brackets is of both GRPO and RLOO. A refused setting is accepted at its off value.
What differs in how a run works is in [What differs from TRL](trl.md)."""


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
