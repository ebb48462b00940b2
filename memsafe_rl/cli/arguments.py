"""What a user may write in a run file and after `memsafe-rl train`; nothing heavy is imported, so that help is fast."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import yaml

from memsafe_rl.config.declaring import Declared, declare, read, setting
from memsafe_rl.config.settings import DECLARED
from memsafe_rl.config.unsupported import ALIASES, REFUSED, REFUSED_ENTRIES, admit
from memsafe_rl.errors import ConfigError, DataError, Refusals
from memsafe_rl.memory.budget import check_budget

refusal, unusable = Refusals(__file__), Refusals(__file__, DataError)
"""What a run file or a command cannot be, and prompts that cannot be read."""

TRUTH_WORDS = ("true", "false", "yes", "no", "on", "off", "1", "0")
FILE_TYPES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
"""Types of files of prompts, and their names in `datasets`."""


@declare()
class RunFields(Declared):
    """What a run needs beside the settings of the trainer."""

    trainer: str = setting(
        "grpo", "What trains: 'grpo', 'rloo' or 'ppo', each with settings of its own.", choices=("grpo", "rloo", "ppo")
    )
    model: str | None = setting(None, "Model to train: a folder, or a name where a hub is reachable.")
    dataset: str | None = setting(
        None, "File of prompts (.json, .jsonl, .csv, .parquet; column 'prompt'), or a folder that datasets saved."
    )
    dataset_name: str | None = setting(None, "Instead of a file: name of a dataset where a hub is reachable.")
    dataset_config: str | None = setting(None, "Configuration of that dataset.")
    dataset_split: str = setting("train", "Split to train on, where the dataset has splits.")
    eval_dataset: str | None = setting(None, "File or folder of prompts to evaluate on.")
    eval_dataset_split: str | None = setting(None, "Instead of a file: split of the dataset to evaluate on.")
    reward_funcs: list[Any] | str | None = setting(
        None,
        "Rewards, comma-separated or a list: ready-made ones by name, 'package.module:function', or a reward model's "
        "folder; {name: settings} calls one that is made from settings.",
    )
    peft: dict[str, Any] | str | None = setting(
        None, "Train an adapter only: 'lora:16' for LoRA of rank 16 on all linear layers, or fields of LoraConfig."
    )
    quantization: dict[str, Any] | str | None = setting(
        None, "Load the base model as '4bit' or '8bit' (needs peft), or fields of BitsAndBytesConfig."
    )
    critic: str | None = setting(
        None,
        "With 'trainer: ppo': a critic's folder or name, or 'adapter' for a second adapter on the model (needs peft); "
        "not set: a head on the model itself.",
    )
    memory_policy: str | None = setting(
        None,
        "Who plans: 'adaptive' (the default), 'ladder' (from large plans down, one fallback at a time), or a card: "
        "24GB+, 12-24GB, 8-12GB or under-8GB.",
    )


RUN_NAMES = tuple(RunFields.declared)
_DECLARED = {**RunFields.declared, **DECLARED}


@dataclass(frozen=True)
class RunRequest:
    """A run as the user asked for it, names checked."""

    run: Mapping[str, Any]  # entries of `RunFields`, read
    settings: Mapping[str, Any]  # settings of the trainer, read


def read_request(tokens: Sequence[str]) -> RunRequest:
    """Reads a command line: a run file, if any, and flags that override it."""
    file, flags = parse_flags(tokens)
    known, refused = tuple(_DECLARED), REFUSED | REFUSED_ENTRIES
    written = admit(read_run_file(Path(file)), known, refused) if file is not None else {}
    merged = written | admit(flags, known, refused)
    # Read and checked before torch is imported, which takes seconds.
    run = {name: _entry(name, value) for name, value in merged.items() if name in RUN_NAMES}
    settings = {name: _DECLARED[name].read(value) for name, value in merged.items() if name not in RUN_NAMES}
    if run.get("critic") is not None and (trainer := run.get("trainer", "grpo")) != "ppo":
        raise refusal("critic/trainer", run=run, trainer=trainer)
    if isinstance(peft := run.get("peft"), str):
        lora_rank(peft)
    if settings.get("memory_budget") is not None:
        check_budget(settings["memory_budget"])
    return RunRequest(run, settings)


def _entry(name: str, value: Any) -> Any:
    if name in ("peft", "quantization") and isinstance(value, str) and not value.lstrip().startswith("{"):
        return read(name, value, str | None)  # 'lora:16' and '4bit' are words, though these entries may be mappings
    return RunFields.declared[name].read(value)


def lora_rank(word: str) -> int:
    """Reads the rank in ``lora:16``."""
    kind, _, rank = word.partition(":")
    refusal.when(kind != "lora" or not (rank or "16").isdigit() or int(rank or 16) == 0, "peft", word=word)
    return int(rank or 16)


def check_quantization(given: Any, peft: Any) -> None:
    """Refuses an unknown word, and a quantised base without an adapter."""
    refusal.when(isinstance(given, str) and given not in ("4bit", "8bit"), "quantization/word", given=given)
    if given is not None and peft is None:
        base = {"4bit": "A 4-bit", "8bit": "An 8-bit"}.get(str(given), "A quantised")
        raise refusal("quantization/adapter", base=base)


def require(request: RunRequest) -> None:
    """Refuses a request that lacks what every run needs."""
    for name in ("model", "reward_funcs"):
        refusal.when(not request.run.get(name), "missing", name=name, flag=name.replace("_", "-"))
    check_quantization(request.run.get("quantization"), request.run.get("peft"))
    _check_files(request)


def _check_files(request: RunRequest) -> None:
    """Refuses prompts and checkpoints that are not there."""
    for name in ("dataset", "eval_dataset"):
        source = request.run.get(name)
        if source is None or (path := Path(source).expanduser()).is_dir():
            continue
        unusable.when(not path.is_file(), "dataset/file", what=name.replace("_", " "), source=source)
        if path.suffix not in FILE_TYPES:
            raise unusable("dataset/type", name=name, source=source, known=", ".join(FILE_TYPES))
    resume = request.settings.get("resume_from_checkpoint")
    if resume is not None and resume.lower() not in ("auto", *TRUTH_WORDS) and not Path(resume).is_dir():
        raise refusal("resume_from_checkpoint", resume=resume)


def of_a_plan(request: RunRequest, *, load_in_4bit: bool, servers: bool = False) -> RunRequest:
    """Returns a request as `plan` takes it; refuses one without a model, or of two minds about its quantization."""
    refusal.when(not request.run.get("model"), "plan/model")
    refusal.when(load_in_4bit and request.run.get("quantization") not in (None, "4bit"), "plan/quantization")
    _check_files(request)
    request = replace(request, run={**request.run, "quantization": "4bit"}) if load_in_4bit else request
    check_quantization(request.run.get("quantization"), request.run.get("peft"))
    on_servers = {"use_vllm": True, "vllm_mode": "server"} if servers else {}
    return replace(request, settings={**request.settings, **on_servers})


def read_run_file(path: Path) -> dict[str, Any]:
    """Reads a run file."""
    refusal.when(not path.is_file(), "run_file/missing", path=str(path))
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_RunFileLoader)
        json.dumps(content, default=str)  # or it holds itself
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: {mark.get_snippet(0).splitlines()[0]!r}"
        raise refusal("run_file/line", path=path, error=error, where=where) from None
    except ConfigError:
        raise
    except (OSError, yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise refusal("run_file/text", path=path, reason=" ".join(str(error).split())) from None
    refusal.when(not isinstance(content, dict), "run_file/mapping", path=path, kind=type(content).__name__)
    return {str(name).replace("-", "_"): value for name, value in content.items()}


class _RunFileLoader(yaml.SafeLoader):
    """Safe YAML in which no name may stand twice, of which one value would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value).replace("-", "_")
            refusal.when(name in seen and name != "<<", "run_file/twice", name=name, line=key.start_mark.line + 1)
            seen.add(name)
        return super().construct_mapping(node, deep)


def parse_flags(tokens: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
    """Splits a command line into a run file and flags.

    ``--name value``, ``--name=value`` and, for truth values, ``--name`` and ``--no-name``; a hyphen may be an
    underscore; a list takes every word up to the next flag.
    """
    file: str | None = None
    flags: dict[str, Any] = {}
    waiting = list(tokens)
    while waiting:
        token = waiting.pop(0)
        if token.startswith("--"):
            name, value = _flag(token[2:], waiting)
            flags[name] = value
        elif file is None:
            file = token
        else:
            raise refusal("flags/alone", token=token, file=file)
    return file, flags


def _kinds(name: str) -> tuple[Any, ...]:
    hint = _DECLARED[name].hint if name in _DECLARED else None
    return () if hint is None else (hint, *get_args(hint))


def _flag(word: str, waiting: list[str]) -> tuple[str, Any]:
    written, equals, value = word.partition("=")
    name = written.replace("-", "_")
    if equals:
        return name, value
    kinds = _kinds(ALIASES.get(name, name))
    if bool in kinds:
        return name, waiting.pop(0) if waiting and waiting[0].lower() in TRUTH_WORDS else True
    if not kinds and bool in _kinds(name.removeprefix("no_")):
        return name.removeprefix("no_"), False
    values = [waiting.pop(0)] if waiting and not waiting[0].startswith("--") else []
    while name in ("reward_funcs", "reward_weights", "report_to") and waiting and not waiting[0].startswith("--"):
        values.append(waiting.pop(0))
    refusal.when(kinds and not values, "flags/value", written=written)
    return name, values[0] if len(values) == 1 else (values or True)
