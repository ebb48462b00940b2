"""`memsafe-rl init`: a run file for a model, prompts and a card, each line with what it means."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
import yaml
from rich.console import Console

from memsafe_rl.cli.arguments import RUN_NAMES, RunFields, RunRequest, refusal, require
from memsafe_rl.cli.plan import Findings, longest_text, plan, wish
from memsafe_rl.cli.train import reward
from memsafe_rl.config.settings import DECLARED
from memsafe_rl.preflight.cards import NamedCard
from memsafe_rl.preflight.outcome import MemoryForecast
from memsafe_rl.units import format_bytes

_QUESTIONS = {
    "model": "Model (a folder, or a name such as Qwen/Qwen3-0.6B)",
    "dataset": "Prompts (a .jsonl, .json, .csv or .parquet file with a column 'prompt')",
    "reward_funcs": "Reward (a ready-made one by name, or module:function)",
}
_WAYS: Mapping[str, Mapping[str, Any]] = {
    "all weights": {},
    "LoRA of rank 16": {"peft": "lora:16"},
    "LoRA of rank 16 on a base in 4 bits": {"peft": "lora:16", "quantization": "4bit"},
}
"""How a model may be trained, from the largest to the smallest."""
_USUAL = {
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "max_completion_length": 512,
    "logging_steps": 1,
}
_RATES = {False: 1e-6, True: 1e-5}  # of all weights, and of an adapter


def init(request: RunRequest, card: NamedCard, output: Path, console: Console) -> None:
    """Writes a run file whose run fits a card by its forecast: all weights if they fit, else an adapter."""
    refusal.when(output.exists(), "output/exists", output=str(output))
    refusal.when(not output.absolute().parent.is_dir(), "output/folder", output=str(output))
    request = _complete(request)
    require(request)
    refusal.when(not {"dataset", "dataset_name"} & request.run.keys(), "dataset/missing")
    for name in request.run["reward_funcs"]:
        if isinstance(name, str) and ":" not in name:  # a function may still have to be written
            reward(name)
    own = {"peft", "quantization"} & request.run.keys()
    for way, fields in {"as you said": {}}.items() if own else _WAYS.items():
        asked = replace(request, run={**request.run, **fields})
        console.print(f"Forecasting {way} ...", highlight=False)
        found, more = plan(wish(asked, card=card), console if console.is_terminal else None, find=False)
        if found.fits:
            quoted = shlex.quote(str(output))
            again = f"memsafe-rl plan {quoted} --gpu {format_bytes(card.total_bytes).replace(' ', '')}"
            output.write_text("".join(_written(asked, [_headline(asked, way, found, more), again])), encoding="utf-8")
            for line in (found.sentence(), f"written: {output}", f"train: memsafe-rl train {quoted}"):
                console.print(line, soft_wrap=True, highlight=False, markup=False)  # to be copied
            return
    reason = found.sentence().partition(". ")[0]
    raise refusal("init/card", request=request, card=format_bytes(card.total_bytes), way=way, reason=reason)


def _complete(request: RunRequest) -> RunRequest:
    """Asks for what is missing where someone can answer, and fills in what most runs begin with."""
    run = dict(request.run)
    for entry, question in _QUESTIONS.items():
        if sys.stdin.isatty() and not run.get(entry) and not (entry == "dataset" and run.get("dataset_name")):
            run[entry] = typer.prompt(question)
    name = Path(str(run.get("model") or "")).name
    if run.get("reward_funcs"):
        run["reward_funcs"] = RunFields.declared["reward_funcs"].read(run["reward_funcs"])
    return RunRequest(run, {"output_dir": f"runs/{name}", **_USUAL, **request.settings})


def _headline(request: RunRequest, way: str, found: MemoryForecast, more: Findings) -> str:
    return (
        f"{request.run['model']}, {way}, on a card of {format_bytes(found.device_bytes)}. Forecast: a peak of "
        f"{format_bytes(found.peak_bytes)} in {found.peak_phase.value}, of a budget of "
        f"{format_bytes(found.budget_bytes)}. Longest completion that fits, by an estimate: "
        f"{longest_text(found, more)}. Forecast again after a change:"
    )


def _written(request: RunRequest, headlines: Iterable[str]) -> Iterator[str]:
    """Writes each entry under what its help says."""
    yield from map(_comment, headlines)
    adapted = request.run.get("peft") is not None
    settings = {**request.settings, "learning_rate": request.settings.get("learning_rate", _RATES[adapted])}
    declared = {**RunFields.declared, **DECLARED}
    for name, value in {**{name: request.run[name] for name in RUN_NAMES if name in request.run}, **settings}.items():
        text = yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=10_000)
        yield "\n" + _comment(declared[name].help) + text


def _comment(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False) + "\n"
