"""`memsafe-rl train` and `verify`: from a request to a trainer, to a trained model on disk, or to a proved plan."""

from __future__ import annotations

import importlib.util
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset, DatasetDict, disable_progress_bars, load_dataset, load_from_disk
from datasets import config as datasets_config
from datasets.exceptions import DatasetsError
from peft import LoraConfig, PeftModel
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from transformers import BitsAndBytesConfig
from transformers.utils import logging as transformers_logging

from memsafe_rl.checkpoint.run_folder import check_earlier, check_writable, refuse_taken
from memsafe_rl.cli.arguments import FILE_TYPES, RunFields, RunRequest, check_quantization, lora_rank, refusal, unusable
from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.config.declaring import check_known, unknown
from memsafe_rl.errors import ConfigError, DataError, first_line
from memsafe_rl.hub import places_for
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.models.loading import auto_class_of
from memsafe_rl.preflight.verify import PlanRun, Verification, verify_plan
from memsafe_rl.rewards import REWARD_FACTORIES, REWARD_FUNCTIONS, resolve_reward
from memsafe_rl.trainers.grpo import GRPOTrainer, RLOOTrainer
from memsafe_rl.trainers.policy_trainer import PolicyTrainer
from memsafe_rl.trainers.ppo import PPOTrainer
from memsafe_rl.training.assembly.inputs import chosen_policy
from memsafe_rl.types import Component, Phase
from memsafe_rl.units import bytes_or_dash, format_bytes, parse_bytes

TRAINERS: dict[str, type[PolicyTrainer]] = {"grpo": GRPOTrainer, "rloo": RLOOTrainer, "ppo": PPOTrainer}
"""Trainers by their name in a run file."""


@dataclass(frozen=True)
class Run:
    """A run, checked as far as possible before anything is loaded."""

    fields: RunFields  # what to train, and on which data
    config: TrainerConfig
    simulated_bytes: int | None = None  # size of the simulated device; None for a real one


def prepare(request: RunRequest, simulate: str | None = None) -> Run:
    """Checks a request and fills in every setting."""
    if not sys.stderr.isatty():  # in a log, bars of loaders are noise
        disable_progress_bars()
        transformers_logging.disable_progress_bar()
    size = None if simulate is None else _simulated_bytes(simulate)
    settings = dict(request.settings) if size is None else {**request.settings, "use_cpu": True}
    run = RunFields(**request.run)
    config: TrainerConfig = TRAINERS[run.trainer].config_class(**settings)
    return Run(run, config, size)


def _simulated_bytes(text: str) -> int:
    try:
        size = parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"--simulate: {error}") from None
    refusal.when(size < 1 or text.strip().isdigit(), "simulate", text=text)
    return size


def written(run: Run) -> str:
    """Writes a run as a run file with every setting resolved."""
    given = {name: value for name, value in asdict(run.fields).items() if value is not None}
    return yaml.safe_dump(given | run.config.to_dict(), sort_keys=False, allow_unicode=True)


def train(run: Run, console: Console) -> None:
    """Trains, and writes the model into `output_dir`."""
    given, named = ingredients(run), run.config.output_dir
    check_writable(Path(named))
    refuse_taken(Path(named))
    check_earlier(Path(named), overwrite=run.config.overwrite_output_dir or bool(run.config.resume_from_checkpoint))
    with device_of(run, console):
        trainer = TRAINERS[run.fields.trainer](**given)
        result = trainer.train()
        trainer.save_model(run.config.output_dir)
    if run.config.should_log:
        done = f"{result.global_step} optimizer steps done; the model is in {named}"
        for line in (done, *how_to_load(trainer.model, named)):
            console.print(line, soft_wrap=True, highlight=False, markup=False)


def how_to_load(model: Any, folder: str) -> list[str]:
    """Says how to load a trained model, and how to merge its adapter where it has one."""
    kind = auto_class_of(model.config).__name__
    if not isinstance(model, PeftModel):
        return [f"load: {kind}.from_pretrained({folder!r})"]
    config = model.peft_config[model.active_adapter]
    base = repr(config.base_model_name_or_path) + (f", revision={config.revision!r}" if config.revision else "")
    loaded = f"PeftModel.from_pretrained({kind}.from_pretrained({base}), {folder!r})"
    return [f"load: {loaded}", f"merge: {shlex.join(['memsafe-rl', 'export', folder, folder + '/merged'])}"]


def ingredients(run: Run) -> dict[str, Any]:
    """Finds or loads everything a run names except the model."""
    chosen, config = run.fields, run.config
    given: dict[str, Any] = {
        "memory_policy": chosen_policy(chosen.memory_policy, config),
        "reward_funcs": [reward(entry) for entry in chosen.reward_funcs or ()],
        "peft_config": adapter(chosen.peft),
        "quantization_config": quantization(chosen.quantization, bf16=bool(config.bf16), sharded=config.sharded),
    }
    given["train_dataset"], given["eval_dataset"] = prompts(chosen)
    critic = {"critic": chosen.critic} if chosen.trainer == "ppo" else {}
    return {"model": chosen.model, "args": config, **given, **critic}


@contextmanager
def device_of(run: Run, console: Console) -> Iterator[None]:
    """Enters a run's simulated device, if any, and prints what it held, also after an error."""
    if run.simulated_bytes is None:
        yield
        return
    device = SimulatedMemory(run.simulated_bytes)
    try:
        with device:
            yield
    finally:
        if run.config.should_log:
            show_simulation(device, console)


def reward(entry: Any) -> Any:
    """Finds a reward."""
    # A console script does not search the working directory, where a user's own rewards are.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if isinstance(entry, Mapping):
        ((name, settings),) = entry.items() if len(entry) == 1 else [("", 0)]
        if not isinstance(settings, (Mapping, type(None))):
            raise refusal("reward_funcs", entry=dict(entry))
        return resolve_reward(str(name), settings or {})
    name = str(entry)
    if Path(name).is_dir() or "/" in name:
        return name
    if "." not in name and ":" not in name and name not in (*REWARD_FUNCTIONS, *REWARD_FACTORIES):
        raise unknown(name, (*REWARD_FUNCTIONS, *REWARD_FACTORIES), "reward")
    return resolve_reward(name)


def adapter(given: Any) -> LoraConfig | None:
    """Makes the adapter that is trained."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        check_known(given, [field.name for field in fields(LoraConfig)], "field of peft")
        try:
            return LoraConfig(**({"task_type": "CAUSAL_LM"} | dict(given)))
        except (ValueError, TypeError, ImportError) as error:
            raise refusal("peft/values", given=dict(given), reason=first_line(error)) from error
    r = lora_rank(str(given))
    return LoraConfig(r=r, lora_alpha=2 * r, target_modules="all-linear", task_type="CAUSAL_LM")


def quantization(given: Any, *, bf16: bool, sharded: bool = False) -> BitsAndBytesConfig | None:
    """Makes the configuration that quantises the base model as it loads; FSDP2 divides what is packed as floats."""
    if given is None:
        return None
    refusal.when(importlib.util.find_spec("bitsandbytes") is None, "quantization/bitsandbytes", given=given)
    if isinstance(given, Mapping):
        check_known(given, inspect.signature(BitsAndBytesConfig).parameters, "field of quantization")
        return BitsAndBytesConfig(**given)
    check_quantization(given, "lora")
    if given == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    dtype = torch.bfloat16 if bf16 else torch.float32
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype if sharded else None,
    )


def prompts(chosen: RunFields) -> tuple[Dataset, Dataset | None]:
    """Loads the prompts to train on and those to evaluate on."""
    refusal.when((chosen.dataset is None) == (chosen.dataset_name is None), "dataset/source")
    source = chosen.dataset or chosen.dataset_name
    refusal.when(chosen.dataset is None and Path(str(source)).suffix in FILE_TYPES, "dataset_name", source=source)
    train_dataset, split = _loaded(source, chosen.dataset_split, chosen), chosen.eval_dataset_split
    evaluated = source if chosen.eval_dataset is None and split is not None else chosen.eval_dataset
    return train_dataset, None if evaluated is None else _loaded(evaluated, split, chosen)


def _loaded(source: Any, split: str | None, chosen: RunFields) -> Dataset:
    try:
        if source == chosen.dataset_name:
            # Without a hub the client would try again for half a minute.
            datasets_config.HF_HUB_OFFLINE |= "local_files_only" in places_for(source)
            return load_dataset(source, chosen.dataset_config, split=split)
        path = Path(source).expanduser()
        if path.is_dir():
            saved, wanted = load_from_disk(str(path)), split or "train"
            if not isinstance(saved, DatasetDict):
                unusable.when(wanted != "train", "dataset/splits", source=source, split=wanted)
                return saved
            if wanted not in saved:
                raise unusable("dataset/split", source=source, there=", ".join(map(repr, saved)), split=wanted)
            return saved[wanted]
        return load_dataset(FILE_TYPES[path.suffix], data_files=str(path), split=split or "train")
    except (DatasetsError, OSError, ValueError, KeyError, StopIteration) as error:
        if isinstance(error, DataError):
            raise
        reason = " ".join(str(error.__cause__ or error).split()).rstrip(".") or "it is empty"
        remedy = "Repair or replace it." if split in (None, "train") else "Correct the split, or repair the dataset."
        if source == chosen.dataset_name:
            remedy = "Check its name and configuration, or give a file or a folder as dataset."
        raise unusable("dataset/read", source=source, reason=reason, remedy=remedy) from error


_LEAST_SHARE = 0.01  # share of a peak below which a component is not listed


def show_simulation(device: SimulatedMemory, console: Console) -> None:
    """Prints what a simulated device held: its peak, the host's, and the highest moment of every phase."""
    peaks = device.phase_peaks()
    # The trainer resets the peak in every phase, so the device's own is the last phase's.
    highest = max((sum(parts.values()) for parts in peaks.values()), default=device.peak_bytes)
    capacity = device.capacity_bytes
    of_all = "" if not capacity else f" of {format_bytes(capacity)} ({highest / capacity:.0%})"
    console.print(
        f"Simulated device: at most {format_bytes(highest)}{of_all} held, {device.refusals} allocations refused; "
        f"host memory at most {format_bytes(device.host_peak_bytes)}.",
        highlight=False,
    )
    if not device.exact:
        console.print(
            "Without a C++ compiler, bytes are counted after each operator: a kernel's own workspace is missed."
        )
    console.print(_table(device, peaks))


def _table(device: SimulatedMemory, peaks: Mapping[Phase, Mapping[Component, int]]) -> Table:
    """Returns each phase's passes, seconds and peak, and what held at least a hundredth of it, largest first."""
    figures = (Column(title, justify="right", no_wrap=True) for title in ("times", "seconds", "peak"))
    table = Table(Column("phase", no_wrap=True), *figures, "held by", box=None, padding=(0, 2, 0, 0))
    for phase, parts in peaks.items():
        records = [record for record in device.timeline if record.phase is phase]
        seconds, peak = sum(record.end_seconds - record.start_seconds for record in records), sum(parts.values())
        shares = sorted(((size / max(1, peak), part.value) for part, size in parts.items()), reverse=True)
        holders = (f"{name.replace('_', ' ')} {share:.0%}" for share, name in shares if share >= _LEAST_SHARE)
        table.add_row(phase.value, str(len(records)), f"{seconds:.1f}", format_bytes(peak), ", ".join(holders))
    return table


_TITLES = {"plain": "plain plan", "halved": "half the plan", "chosen": "chosen plan", "failures": "with two failures"}

_WHOLE_PROCESS = "Bytes are those of the whole process, libraries included; --simulate SIZE counts only tensors."


def verify(run: Run, console: Console) -> bool:
    """Verifies on the run's own model that its plan changes nothing, and prints the comparison."""
    given = ingredients(run)
    with device_of(run, console):
        found = verify_plan(TRAINERS[run.fields.trainer](**given).loop)
    if run.config.should_log:
        console.print(comparison(found))
        for note in (*found.notes, *(() if found.exact_bytes else (_WHOLE_PROCESS,))):
            console.print(note, highlight=False, style="dim")
        console.print(Text(found.sentence(), style="bold green" if found.passed else "bold red"))
    return found.passed


def comparison(found: Verification) -> Table:
    """Lays the three steps side by side."""
    table = Table(title=f"One probe step of {found.rows} completions", title_justify="left")
    table.add_column("", no_wrap=True)
    for arm in found.arms:
        table.add_column(_TITLES[arm.name], justify="right")

    def row(name: str, cell: Callable[[PlanRun], str], *, ends: bool = False) -> None:
        table.add_row(name, *(cell(arm) for arm in found.arms), end_section=ends)

    row("rows in flight", lambda arm: f"{min(arm.rollout_plan.rows_in_flight, found.rows):,}")
    row("micro-batches", lambda arm: f"{arm.micro_batches:,}")
    row("log-prob tile, tokens", lambda arm: f"{arm.update_plan.logprob_tile:,}")
    row("activations", _activations)
    row("trajectory", lambda arm: f"on the {arm.update_plan.trajectory_device}")
    row("failures recovered from", lambda arm: f"{arm.failures:,}", ends=True)
    row("sampled tokens equal", _tokens)
    row("gradient difference", lambda arm: "-" if (off := arm.gradient_difference) is None else f"{off:.1e}")
    row("equal bit for bit", lambda arm: "yes" if arm.same_bits else "no", ends=True)
    for phase in found.plain.phase_peaks:
        row(f"peak in {phase}", lambda arm, phase=phase: bytes_or_dash(arm.phase_peaks.get(phase)))  # type: ignore[misc]
    row("peak" if found.exact_bytes else "peak of the process", lambda arm: format_bytes(arm.peak_bytes))
    if found.plain.name == "plain":
        row("saved", lambda arm: _saved(arm, found))
    row("seconds", lambda arm: f"{arm.seconds:.1f}")
    return table


def _activations(arm: PlanRun) -> str:
    plan = arm.update_plan
    return "offloaded" if plan.offload_activations else "recomputed" if plan.checkpointing else "kept"


def _tokens(arm: PlanRun) -> str:
    """Counts the tokens equal to the chosen plan's, and the differing rows that are certified ties."""
    equal = f"{arm.tokens_equal:,} of {arm.tokens:,}"
    return f"{equal}; {arm.rows_excused} of {arm.rows_differing} rows tied" if arm.rows_differing else equal


def _saved(arm: PlanRun, found: Verification) -> str:
    if arm is found.plain:
        return "-"
    saved = found.plain.peak_bytes - arm.peak_bytes
    return f"{format_bytes(saved)} ({saved / found.plain.peak_bytes:.0%})" if saved > 0 else "nothing"
