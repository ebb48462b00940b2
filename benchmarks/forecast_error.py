"""How far is a forecast from what the run then holds?

    python -m benchmarks.forecast_error [--families qwen3 gpt2] [--quick]
    python -m benchmarks.forecast_error --random 200 --seed 0 [--first 0] [--device cpu|pretend|cuda] [--rarer]

Writes ``benchmarks/results/forecast_error.json``, or of 200 or more runs drawn at random ``forecast_random.json``; with
those, the command ends with 1 where one of `Limits` is passed. Every setting is forecast on fake tensors, then really
run, under an allocator that counts every byte, on the pretend CUDA device (docs/device.md) or on a card, with
completions forced to their full length. Networks are small, so that a run takes seconds; what is left out or counted
wrongly weighs more in them than in large ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    T5Config,
)

from benchmarks.machine import describe_machine
from benchmarks.random_runs import draw_rarer, draw_run
from benchmarks.small import EOS_ID, PAD_ID, byte_tokenizer
from memsafe_rl import GRPOConfig, GRPOTrainer, SimulatedMemory
from memsafe_rl.diagnostics.run_figures import by_phase
from memsafe_rl.preflight import forecast as forecasting
from tests.device import build, pretend

RESULTS = Path(__file__).parent / "results" / "forecast_error.json"
RANDOM_RESULTS = RESULTS.with_name("forecast_random.json")
VOCAB = 16_000
PROMPT_TOKENS = 48
DEVICE_BYTES = 8 * 2**30
_PHASES = ("load", "rollout", "score", "update", "optimizer", "peak", "reserved")
_WORTH_WRITING = 200
"""Random runs from which on their figures are kept unless ``--out`` says where."""

_IDS = {"pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "bos_token_id": None}
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
_MIXED = {"sliding_window": 32, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
FAMILIES: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**_SIZES, **_IDS, tie_word_embeddings=True),
    "llama": LlamaConfig(**_SIZES, **_IDS, tie_word_embeddings=False),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=256, n_layer=4, n_head=8, n_positions=512, **_IDS),
    "gemma3": Gemma3TextConfig(**{**_SIZES, "num_hidden_layers": 3}, **_IDS, **_MIXED),
    "t5": T5Config(
        vocab_size=VOCAB,
        d_model=256,
        d_ff=768,
        d_kv=32,
        num_layers=4,
        num_heads=8,
        decoder_start_token_id=PAD_ID,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
    ),
}
"""Small networks of each family."""


@dataclass(frozen=True)
class Setting:
    """One run that is forecast and made.

    Args:
        family: one of `FAMILIES`.
        adapter: whether a LoRA adapter is trained, else all weights.
        checkpointing: whether activations are recomputed; None for what the plan decides.
        num_generations: completions a prompt.
        max_completion_length: tokens of each.
        num_iterations: passes over each rollout.
        beta: weight of the reference's KL.
        budget_share: of what the run would hold with all the room, what it may hold; None for all the room.
    """

    family: str
    adapter: bool
    checkpointing: bool | None
    num_generations: int
    max_completion_length: int
    num_iterations: int
    beta: float = 0.0
    budget_share: float | None = None

    def __str__(self) -> str:
        what = "LoRA" if self.adapter else "full"
        recomputed = {None: "free", True: "recomputed", False: "kept"}[self.checkpointing]
        parts = [self.family, what, recomputed, f"G={self.num_generations}", f"{self.max_completion_length} tokens"]
        parts += [f"K={self.num_iterations}"] + (["KL"] if self.beta else [])
        return ", ".join(parts + ([f"{self.budget_share:.0%}"] if self.budget_share else []))


def settings(families: Sequence[str]) -> list[Setting]:
    """Lists the settings of some families."""
    listed = []
    for family in families:
        listed += [
            Setting(family, False, False, 4, 64, 1),
            Setting(family, False, True, 8, 96, 2),
            Setting(family, True, False, 8, 48, 2, 0.04),
            Setting(family, True, True, 4, 128, 1),
            Setting(family, False, None, 4, 96, 2, 0.04),
            Setting(family, True, None, 8, 64, 1, 0.0, 0.6),
        ]
    return listed


def measure(setting: Setting, folder: Path) -> dict[str, Any]:
    """Forecasts a setting, and runs it.

    Args:
        setting: what is run.
        folder: of the saved network.

    Returns:
        Bytes of every phase, forecast and held, and how the run went.
    """
    budget: int | None = None
    if setting.budget_share is not None:
        plain = measure(Setting(**{**asdict(setting), "budget_share": None}), folder)
        least = plain["state_bytes"]
        budget = int(least + setting.budget_share * (plain["held_peak_bytes"] - least))
    return beside(setting, lambda: _trainer(setting, folder, budget), on_device=False)


def beside(setting: object, make: Callable[[], Any], *, on_device: bool) -> dict[str, Any]:
    """Makes a trainer, which forecasts its run, and trains; gives bytes of every phase, forecast and held.

    Args:
        setting: names the run where there was no forecast.
        make: gives the trainer.
        on_device: whether it runs on the current CUDA device, else on a simulated one.

    Returns:
        Plain values by name.
    """
    started = time.perf_counter()
    reserved: Mapping[str, int] = {}
    if on_device:
        trainer, held, reserved, state = peaks_on_device(make)
    else:
        with SimulatedMemory(DEVICE_BYTES) as memory:
            trainer = make()
            trainer.train()
            held = {phase.value: sum(parts.values()) for phase, parts in memory.phase_peaks().items()}
            state = memory.live_bytes
    forecast = trainer.forecast
    if forecast is None:
        raise SystemExit(f"{setting}: there was no forecast; see the warning above")
    failed = [event for event in trainer.memory_events if event["event"] in ("retry", "failure", "fallback")]
    foreseen = {phase.value: size for phase, size in forecast.phase_bytes.items()}
    return {
        "forecast_bytes": foreseen,
        "held_bytes": held,
        "forecast_reserved_bytes": {phase.value: size for phase, size in forecast.reserved_bytes.items()},
        "reserved_bytes": reserved,
        "forecast_peak_bytes": max(foreseen.values()),
        "held_peak_bytes": max(held.values()),
        "state_bytes": state,
        "failures": len(failed),
        "forecast_seconds": forecast.seconds,
        "seconds": time.perf_counter() - started,
    }


class OnDevice(NamedTuple):
    """A run on a CUDA device."""

    trainer: Any
    held_bytes: dict[str, int]  # by phase
    reserved_bytes: dict[str, int]  # by phase, cached ones included
    state_bytes: int  # held at the end


def peaks_on_device(make: Callable[[], Any]) -> OnDevice:
    """Makes a trainer on the current CUDA device, and trains."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    trainer = make()
    held, reserved = dict(trainer.setup.memory.phase_peaks), dict(trainer.setup.memory.reserved_peaks)
    trainer.train()
    for record in trainer.history:
        for found, name in ((held, "_peak_bytes"), (reserved, "_reserved_bytes")):
            for phase, size in by_phase(record, name).items():
                found[phase] = max(found.get(phase, 0), size)
    held = {str(phase): size - before for phase, size in held.items()}
    return OnDevice(trainer, held, {**reserved}, torch.cuda.memory_allocated() - before)


def _trainer(setting: Setting, folder: Path, budget: int | None) -> GRPOTrainer:
    rows = 4 * setting.num_generations
    config = GRPOConfig(
        str(folder / "run"),
        num_generations=setting.num_generations,
        per_device_train_batch_size=rows,
        max_completion_length=setting.max_completion_length,
        num_iterations=setting.num_iterations,
        beta=setting.beta,
        gradient_checkpointing=setting.checkpointing,
        generation_kwargs={"min_new_tokens": setting.max_completion_length},
        memory_forecast=True,
        memory_budget="auto" if budget is None else budget,
        max_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    prompts = [f"{index:02d}".ljust(PROMPT_TOKENS, ".") for index in range(16)]
    gpt2 = setting.family == "gpt2"
    modules = ["c_attn", "c_proj", "c_fc"] if gpt2 else "all-linear"
    return GRPOTrainer(
        str(folder),
        _alternating,
        config,
        Dataset.from_dict({"prompt": prompts}),
        processing_class=byte_tokenizer(),
        peft_config=LoraConfig(r=16, target_modules=modules, fan_in_fan_out=gpt2) if setting.adapter else None,
    )


def _alternating(completions: list[str], **_: Any) -> list[float]:
    """Pays neighbours differently, so that every row learns."""
    return [float(index % 2) for index in range(len(completions))]


def errors_of(found: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the relative error of every phase that was forecast, of the peak, and of reserved bytes.

    Args:
        found: what `beside` gave.

    Yields:
        Names and errors, above 0 where too much was forecast.
    """
    for phase, size in found["forecast_bytes"].items():
        if phase in found["held_bytes"]:
            yield phase, size / found["held_bytes"][phase] - 1
    yield "peak", found["forecast_peak_bytes"] / found["held_peak_bytes"] - 1
    if found["reserved_bytes"]:
        told, reserved = (max(found[name].values()) for name in ("forecast_reserved_bytes", "reserved_bytes"))
        yield "reserved", told / reserved - 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the settings and writes what was found.

    Args:
        arguments: of the command line; None for those of this process.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' of its own names
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--quick", action="store_true", help="two settings of the first family; nothing written")
    parser.add_argument("--random", type=int, metavar="N", help="runs drawn at random, in place of the settings")
    parser.add_argument("--seed", type=int, default=0, help="of the random runs")
    parser.add_argument("--first", type=int, default=0, help="number of the first random run")
    parser.add_argument("--rarer", action="store_true", help="random runs of families and features that few runs have")
    parser.add_argument("--device", choices=("cpu", "pretend", "cuda"), default="cpu", help="of random runs")
    parser.add_argument("--out", type=Path, help="where the figures go")
    given = parser.parse_args(arguments)
    if given.random is not None and given.random < 1:
        parser.error(f"--random is {given.random}; draw at least 1 run.")
    if given.device != "cpu" and given.random is None:
        parser.error(f"--device {given.device} is for random runs; write --random N too.")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device here. Use cpu or pretend.")
    if given.device == "pretend" and not pretend.is_loaded():
        if reason := build.missing():
            parser.error(f"--device pretend: {reason}. Use cpu.")
        own = sys.argv[1:] if arguments is None else arguments
        sys.exit(subprocess.call([sys.executable, "-m", "tests.device", "benchmarks.forecast_error", *own]))
    if given.random is not None:
        sys.exit(_run_random(given))
    wanted = settings(given.families[:1])[:2] if given.quick else settings(given.families)
    results: dict[str, Any] = {}
    for setting in track(wanted, "forecasting and running", console=Console(stderr=True)):
        with tempfile.TemporaryDirectory() as folder:
            save_network(FAMILIES[setting.family], folder)
            found = measure(setting, Path(folder))
        results[str(setting)] = {**found, "errors": dict(errors_of(found))}
    _show(results)
    if not given.quick:
        _write(given.out or RESULTS, results)


def save_network(config: PretrainedConfig, folder: str, dtype: torch.dtype = torch.float32) -> None:
    """Saves a network with random weights.

    Args:
        config: of the network.
        folder: where it goes.
        dtype: of its weights.
    """
    torch.manual_seed(0)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    kind.from_config(config, dtype=dtype).save_pretrained(folder)


def _write(path: Path, results: dict[str, Any]) -> None:
    path.write_text(json.dumps({"machine": describe_machine(), "results": results}, indent=1) + "\n")


# ------------------------------------------------------------------ runs drawn at random


@dataclass(frozen=True)
class Limits:
    """How far forecasts of random runs may be from what the runs hold, relative to that."""

    low: float = 0.01  # of a peak that is forecast too low
    high: float = 0.05  # of one that is forecast too high
    median: float = 0.001  # of the median of peaks, either way
    phase: float = 0.05  # of any phase of a run, either way

    def passed(self, errors: Sequence[Mapping[str, float]]) -> list[str]:
        """Says which limits some runs pass.

        Args:
            errors: of each run, of every phase and of the peak, above 0 where too much is forecast.

        Returns:
            A sentence for each limit that does not hold.
        """
        peaks = [one["peak"] for one in errors]
        median = statistics.median(map(abs, peaks))
        # Of runs as small as these, one segment of the allocator is more than a limit that could mean something.
        phases = [(abs(size), name) for one in errors for name, size in one.items() if name not in ("peak", "reserved")]
        worst, name = max(phases)
        found = [
            (-min(peaks), self.low, "a peak is forecast {:.2%} too low, and at most {:.2%} is allowed"),
            (max(peaks), self.high, "a peak is forecast {:.2%} too high, and at most {:.2%} is allowed"),
            (median, self.median, "the median error of peaks is {:.3%}, and at most {:.3%} is allowed"),
            (worst, self.phase, f"the forecast of {name} is " + "{:.2%} off, and at most {:.2%} is allowed"),
        ]
        return [said.format(error, limit) for error, limit, said in found if error > limit]


def _run_random(given: argparse.Namespace) -> int:
    """Forecasts and makes runs drawn at random; gives the exit code.

    Results are written after every run, so that a series that is cut off keeps what it found.
    """
    results: dict[str, Any] = {}
    console = Console(width=160, highlight=False)
    out = given.out or (RANDOM_RESULTS if given.random >= _WORTH_WRITING else None)
    for index in range(given.first, given.first + given.random):
        run = (draw_rarer if given.rarer else draw_run)(given.seed, index)
        with tempfile.TemporaryDirectory() as folder:
            save_network(run.network_config(), folder, run.dtype)
            on_device = given.device != "cpu"
            with patch.object(forecasting, "measured_speed", return_value=None):  # seconds are not asked for
                found = beside(run, partial(run.trainer, Path(folder), use_cpu=not on_device), on_device=on_device)
        errors = dict(errors_of(found))
        results[f"{given.seed}/{index}"] = {"setting": asdict(run), **found, "errors": errors}
        shown = ", ".join(f"{name} {100 * size:+.2f}" for name, size in errors.items())
        console.print(
            f"seed {given.seed}, run {index}: {run}\n    held {found['held_peak_bytes'] / 1e6:.1f} MB, "
            f"{found['seconds']:.0f} s; %: {shown}"
        )
        if out is not None:
            _write(out, results)
    passed = Limits().passed([one["errors"] for one in results.values()])
    _summarise(results, console)
    for sentence in passed:
        console.print(f"limit passed: {sentence}")
    return 1 if passed else 0


def _summarise(results: Mapping[str, Any], console: Console) -> None:
    """Shows the spread of each phase's errors."""
    table = Table("of", "runs", "most low, %", "median, %", "most high, %")
    for phase in _PHASES:
        errors = [100 * one["errors"][phase] for one in results.values() if phase in one["errors"]]
        if errors:
            middle = statistics.median(map(abs, errors))
            table.add_row(phase, str(len(errors)), f"{min(errors):+.2f}", f"{middle:.3f}", f"{max(errors):+.2f}")
    console.print(table)


def _show(results: dict[str, Any]) -> None:
    table = Table("setting", "held, MB", *(f"{phase}, %" for phase in _PHASES), "failures", "forecast, s")
    for name, found in results.items():
        errors = [found["errors"].get(phase) for phase in _PHASES]
        shown = ["" if error is None else f"{100 * error:+.2f}" for error in errors]
        held, seconds = found["held_peak_bytes"] / 1e6, found["forecast_seconds"]
        table.add_row(name, f"{held:.1f}", *shown, str(found["failures"]), f"{seconds:.1f}")
    peaks = [abs(found["errors"]["peak"]) for found in results.values()]
    console = Console(width=160)
    console.print(table)
    console.print(f"peak: worst {100 * max(peaks):.2f} %, median {100 * statistics.median(peaks):.3f} %")


if __name__ == "__main__":
    main()
