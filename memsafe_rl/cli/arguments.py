"""What a user may write in a run file and after `memsafe-rl train`; nothing heavy is imported, so that help is fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from memsafe_rl.config.fields import GRPOFields, PPOFields, option
from memsafe_rl.config.refusals import ALIASES, REFUSED, Refusal, admit
from memsafe_rl.errors import ConfigError

# ruff: noqa: RUF009  (`option` is `dataclasses.field` with a help text)

TRUTH_WORDS = ("true", "false", "yes", "no", "on", "off", "1", "0")


@dataclass
class RunFields:
    """What a run needs beside the settings of the trainer."""

    trainer: str = option("grpo", "What trains: 'grpo' or 'ppo', each with settings of its own.")
    model: str | None = option(None, "Model to train: a folder, or a name where a hub is reachable.")
    dataset: str | None = option(
        None, "File of prompts (.json, .jsonl, .csv, .parquet; column 'prompt'), or a folder that datasets saved."
    )
    dataset_name: str | None = option(None, "Instead of a file: name of a dataset where a hub is reachable.")
    dataset_config: str | None = option(None, "Configuration of that dataset.")
    dataset_split: str = option("train", "Split to train on, where the dataset has splits.")
    eval_dataset: str | None = option(None, "File or folder of prompts to evaluate on.")
    eval_dataset_split: str | None = option(None, "Instead of a file: split of the dataset to evaluate on.")
    reward_funcs: list[Any] | str | None = option(
        None,
        "Rewards, comma-separated or a list: ready-made ones by name, 'package.module:function', or a reward model's "
        "folder; {name: settings} calls one that is made from settings.",
    )
    peft: dict[str, Any] | str | None = option(
        None, "Train an adapter only: 'lora:16' for LoRA of rank 16 on all linear layers, or fields of LoraConfig."
    )
    quantization: dict[str, Any] | str | None = option(
        None, "Load the base model as '4bit' or '8bit' (needs peft), or fields of BitsAndBytesConfig."
    )
    critic: str | None = option(
        None,
        "With 'trainer: ppo': a critic's folder or name, or 'adapter' for a second adapter on the model (needs peft); "
        "not set: a head on the model itself.",
    )
    memory_policy: str | None = option(
        None,
        "Who plans: 'adaptive' (the default), 'ladder' (from large plans down, one fallback at a time), or a card: "
        "24GB+, 12-24GB, 8-12GB or under-8GB.",
    )


RUN_NAMES = tuple(setting.name for setting in fields(RunFields))
SETTING_NAMES = tuple(dict.fromkeys(setting.name for cls in (GRPOFields, PPOFields) for setting in fields(cls)))
_KINDS: dict[str, tuple[Any, ...]] = {
    name: (hint, *get_args(hint))
    for name, hint in (get_type_hints(RunFields) | get_type_hints(PPOFields) | get_type_hints(GRPOFields)).items()
}


def _elsewhere(reason: str, remedy: str, *names: str) -> dict[str, Refusal]:
    return {name: Refusal(reason, remedy, (None, False)) for name in names}


SCRIPT_NAMES: dict[str, Refusal] = {
    **_elsewhere("it is called model here", "Set model.", "model_name_or_path", "model_name", "model_id"),
    **_elsewhere(
        "arguments of from_pretrained stand together",
        "Set model_init_kwargs, such as {dtype: bfloat16, revision: main, attn_implementation: sdpa}.",
        "dtype",
        "torch_dtype",
        "model_revision",
        "attn_implementation",
    ),
    **_elsewhere("one entry says all of the adapter", "Write 'peft: lora:16'.", "use_peft", "peft_config", "use_lora"),
    **_elsewhere(
        "one entry says all of the adapter",
        "Set peft to 'lora:16' or to fields of LoraConfig, such as {r: 16, target_modules: all-linear}.",
        "lora_r",
        "lora_alpha",
        "lora_dropout",
        "lora_target_modules",
        "lora_target_parameters",
        "lora_modules_to_save",
        "lora_task_type",
        "use_rslora",
        "use_dora",
    ),
    **_elsewhere(
        "one entry says all of the loading", "Write 'quantization: 4bit'.", "load_in_4bit", "use_bnb_nested_quant"
    ),
    **_elsewhere("one entry says all of the loading", "Write 'quantization: 8bit'.", "load_in_8bit"),
    **_elsewhere(
        "the run file stands without a flag", "Write `memsafe-rl train CONFIG.yaml`.", "config", "config_file"
    ),
    **_elsewhere("it is a flag of the command, not a part of the run", "Write --simulate 2GiB.", "simulate"),
    **_elsewhere("it is called dataset here", "Set dataset to the file or folder.", "dataset_path", "train_dataset"),
    **_elsewhere("it is called dataset_split here", "Set dataset_split.", "dataset_train_split"),
    **_elsewhere("it is called eval_dataset_split here", "Set eval_dataset_split.", "dataset_test_split"),
    **_elsewhere(
        "rewards of all kinds stand together", "Set reward_funcs.", "reward_model_name_or_path", "reward_model"
    ),
}
"""What scripts of TRL call an entry of `RunFields`, with where it stands here."""


@dataclass(frozen=True)
class RunRequest:
    """A run as the user asked for it, names checked, values as written.

    Args:
        run: entries of `RunFields`.
        settings: settings of the trainer.
    """

    run: Mapping[str, Any]
    settings: Mapping[str, Any]


def read_request(tokens: Sequence[str]) -> RunRequest:
    """Reads a command line: a run file, if any, and flags that override it."""
    file, flags = parse_flags(tokens)
    known, refused = (*RUN_NAMES, *SETTING_NAMES), REFUSED | SCRIPT_NAMES
    written = admit(read_run_file(Path(file)), known, refused) if file is not None else {}
    merged = written | admit(flags, known, refused)
    run = {name: value for name, value in merged.items() if name in RUN_NAMES}
    return RunRequest(run, {name: value for name, value in merged.items() if name not in RUN_NAMES})


def require(request: RunRequest) -> None:
    """Refuses a request that lacks what every run needs."""
    for name in ("model", "reward_funcs"):
        if not request.run.get(name):
            raise ConfigError(f"{name} is missing. Write '{name}: ...' in the run file or --{name.replace('_', '-')}.")


def read_run_file(path: Path) -> dict[str, Any]:
    """Reads a run file."""
    if not path.is_file():
        raise ConfigError(f"There is no run file {str(path)!r}. Give the path of a YAML file.")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_RunFileLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}, not names and values. Write lines 'name: value'.")
    return {str(name).replace("-", "_"): value for name, value in content.items()}


class _RunFileLoader(yaml.SafeLoader):
    """Safe YAML in which no name may stand twice, of which one value would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value).replace("-", "_")
            if name in seen and name != "<<":
                raise ConfigError(
                    f"{name!r} stands twice in the run file, the second time in line {key.start_mark.line + 1}. "
                    "Remove one of the two."
                )
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
            raise ConfigError(f"{token!r} stands alone: the run file is {file!r} already. Write settings --name value.")
    return file, flags


def _flag(word: str, waiting: list[str]) -> tuple[str, Any]:
    written, equals, value = word.partition("=")
    name = written.replace("-", "_")
    if equals:
        return name, value
    kinds = _KINDS.get(ALIASES.get(name, name), ())
    if bool in kinds:
        return name, waiting.pop(0) if waiting and waiting[0].lower() in TRUTH_WORDS else True
    if not kinds and bool in _KINDS.get(name.removeprefix("no_"), ()):
        return name.removeprefix("no_"), False
    values = [waiting.pop(0)] if waiting and not waiting[0].startswith("--") else []
    while name in ("reward_funcs", "reward_weights", "report_to") and waiting and not waiting[0].startswith("--"):
        values.append(waiting.pop(0))
    if kinds and not values:
        raise ConfigError(f"--{written} has no value. Write --{written} VALUE.")
    return name, values[0] if len(values) == 1 else (values or True)
