"""`memsafe-rl explain-oom`: reads a log and a configuration, and explains the failure."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from memsafe_rl.cli.arguments import read_run_file, refusal
from memsafe_rl.diagnostics.known_tensors import Configuration, KnownTensor
from memsafe_rl.diagnostics.oom_causes import STRANDED_SHARE, Cause, Explanation, explain_message
from memsafe_rl.diagnostics.oom_messages import OutOfMemoryMessage, Printed, find_message
from memsafe_rl.records import RUN_FILE, read_json
from memsafe_rl.units import format_bytes

DTYPES: Mapping[str, tuple[tuple[str, int], ...]] = {
    "float32": (("float32", 4),),
    "bfloat16": (("bfloat16", 2), ("float32", 4)),
    "float16": (("float16", 2), ("float32", 4)),
}
"""Element types of a run's tensors; with half precision, logits and moments may be float32."""

_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_NAMES = {
    "vocab": ("vocab_size",),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "inner": ("intermediate_size", "n_inner", "d_ff", "ffn_dim"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim", "d_kv"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
}
"""Names of the sizes in model configs."""

_MOST_SHOWN = 4  # remedies and tensors printed; --json has them all

_DEFAULT_BATCH, _DEFAULT_COMPLETION = 8, 256


def read_log(source: str) -> str:
    """Reads a log."""
    try:
        raw = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise refusal("log/read", source=source, error=error) from None
    # Windows shells write UTF-16 with a byte-order mark; a log emptied while open begins with zeros.
    encoding = "utf-16" if raw.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8"
    return raw.decode(encoding, errors="replace").replace("\x00", "")


def explain(source: str, config: str | None, dtype: str | None, sizes: Mapping[str, int | None]) -> Explanation:
    """Explains the last out-of-memory message of a log."""
    configuration = _configuration(config, dtype, sizes)
    log = read_log(source)
    message = find_message(log)
    if message is None:
        lines = log.count("\n") + (not log.endswith("\n"))
        where = "Standard input" if source == "-" else repr(source)
        raise refusal("log/message", where=where, lines=lines if log.strip() else 0)
    return explain_message(message, configuration, log)


def _configuration(config: str | None, dtype: str | None, sizes: Mapping[str, int | None]) -> Configuration:
    given: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    for name, value in given.items():
        refusal.when(value < 1, "size", name=name.replace("_", "-"), value=value)
    given |= {name: (given[name],) for name in ("batch", "seq_len") if name in given}
    known = Configuration() if config is None else _read_configuration(Path(config))
    if dtype is not None:
        refusal.when(_SHORT.get(dtype, dtype) not in DTYPES, "dtype", dtype=dtype, known=", ".join((*DTYPES, *_SHORT)))
        given["dtypes"] = DTYPES[_SHORT.get(dtype, dtype)]
    return replace(known, **given)


def _read_configuration(path: Path) -> Configuration:
    run = read_json(path / RUN_FILE) if path.is_dir() else None
    if run is not None:  # that of a run that died has weights in its checkpoints alone
        steps = sorted(path.glob("checkpoint-*/config.json"), key=lambda file: (len(file.parent.name), file))
        found = next((file for file in (path / "config.json", *reversed(steps)) if file.is_file()), None)
        network = run.get("facts", {}).get("model") if found is None else str(found.parent)
        return _of_a_run({**run.get("config", {}), "model": network})
    if path.is_dir():
        inside = [path / name for name in ("config.json", "adapter_config.json") if (path / name).is_file()]
        inside += sorted(path.glob("*.y*ml"))
        refusal.when(not inside, "config/folder", path=path)
        path = inside[0]
    if path.suffix in (".yaml", ".yml"):
        return _of_a_run(read_run_file(path))
    content = _read_json(path)
    base = content.get("base_model_name_or_path")
    return _of_a_network(content) if base is None else sizes_of_model(str(base))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refusal("config/read", path=path, error=error) from None
    except ValueError:
        raise refusal("config/json", path=path) from None
    if not isinstance(content, dict):
        raise refusal("config/kind", path=path, kind=type(content).__name__)
    return content


def _of_a_network(content: Mapping[str, Any]) -> Configuration:
    nested = content.get("text_config")
    sizes = nested if isinstance(nested, dict) else content
    found = {
        name: next((int(sizes[written]) for written in names if isinstance(sizes.get(written), int)), None)
        for name, names in _NAMES.items()
    }
    if found["inner"] is None and found["hidden"] is not None and "n_embd" in sizes:
        found["inner"] = 4 * found["hidden"]
    dtype = str(sizes.get("dtype") or sizes.get("torch_dtype") or "")
    return Configuration(**found, **({"dtypes": DTYPES[dtype]} if dtype in DTYPES else {}))  # type: ignore[arg-type]


def sizes_of_model(model: str) -> Configuration:
    """Finds the sizes of a network."""
    file = Path(model) / "config.json"
    if file.is_file():
        return _of_a_network(_read_json(file))
    # Built-in configs need transformers, which takes seconds to import.
    known = importlib.import_module("memsafe_rl.preflight.fake.families").known_config(model)
    refusal.when(known is None, "config/sizes", model=model)
    return _of_a_network(known.to_dict())


def _of_a_run(run: Mapping[str, Any]) -> Configuration:
    """Reads a run file: model, likely batch sizes, and the longest sequences."""
    network = Configuration() if run.get("model") is None else sizes_of_model(str(run["model"]))
    batch = _number(run, "per_device_train_batch_size", _DEFAULT_BATCH)
    group = _number(run, "num_generations", _DEFAULT_BATCH)
    completion = _number(run, "max_completion_length", _DEFAULT_COMPLETION)
    prompt = run.get("max_prompt_length")
    whole = (completion + int(prompt),) if isinstance(prompt, int) else ()
    return replace(network, batch=tuple(dict.fromkeys((batch, group))), seq_len=(*whole, completion))


def _number(run: Mapping[str, Any], name: str, default: int) -> int:
    value = run.get(name)
    return value if isinstance(value, int) and value > 0 else default


def as_json(found: Explanation) -> str:
    """Writes an explanation as JSON, sizes in bytes."""
    return json.dumps(found, indent=2, default=_plain)


def _plain(value: Any) -> Any:
    """Writes a figure in bytes, and all other records by name."""
    if isinstance(value, Printed):
        return value.count
    return vars(value) | ({"text": str(value)} if isinstance(value, KnownTensor) else {})


def show(found: Explanation, console: Console) -> None:
    """Prints an explanation: figures, reasons, matching tensors, and what to change."""
    message = found.message
    console.print(Text(_heading(message), style="bold"))
    if message.found > 1:
        console.print(f"The last of {message.found:,} such messages, in line {message.line:,}.", style="dim")
    console.print(_figures(found))
    console.print(Text("\nWhy", style="bold"))
    for reason in found.reasons:
        if reason.cause is Cause.TENSOR and found.tensors[0].guessed:
            continue
        style = "bold red" if reason.decisive else "red"
        table = Table.grid(padding=(0, 1))
        table.add_row(Text("•", style=style), Text(reason.sentence))
        console.print(table)
    _show_tensors(found, console)
    console.print(Text("\nWhat to change, best first", style="bold"))
    shown = found.remedies[:_MOST_SHOWN]
    for number, remedy in enumerate(shown, start=1):
        table = Table.grid(Column(no_wrap=True, justify="right", min_width=10), Column(overflow="fold"), padding=(0, 1))
        table.add_row(Text(f"{number}.", style="bold green"), Text(remedy.action, style="bold green"))
        table.add_row(Text("memsafe_rl", style="cyan"), Text(remedy.here))
        table.add_row(Text("others", style="cyan"), Text(remedy.elsewhere))
        console.print(table)
        if number < len(shown):
            console.print()


def _heading(message: OutOfMemoryMessage) -> str:
    asked = "Memory" if message.requested is None else str(message.requested)
    where = "" if message.device is None else f" on {message.device}"
    doing = "" if message.place is None else f", while in: {message.place}"
    return f"{asked} could not be allocated{where} (refused by: {message.allocator}{doing})"


def _figures(found: Explanation) -> Table:
    message = found.message
    table = Table.grid(Column(style="cyan"), Column(justify="right"), Column(style="dim"), padding=(0, 2))
    share = found.stranded_share
    judged = "" if share is None else f"{share:.1%} of what PyTorch reserved"
    if share is not None and share >= STRANDED_SHARE:
        judged += f", too much (limit {STRANDED_SHARE:.0%})"
    budget = message.held != ()
    rows = (
        ("requested", message.requested, ""),
        ("budget" if budget else "device", message.total, ""),
        ("allowed to this process", message.allowed, ""),
        ("free", message.free, "still available from the driver"),
        ("held permanently" if budget else "live tensors", message.allocated, ""),
        ("stranded", message.stranded, judged),
        ("private pools", message.private_pools, "part of the live tensors"),
    )
    for name, size, note in rows:
        if size is not None:
            table.add_row(name, str(size), note)
    for name, count in (("other processes", found.neighbours_bytes), ("outside PyTorch", found.outside_bytes)):
        if count:
            table.add_row(name, format_bytes(count), "of this process: context, libraries" if "outside" in name else "")
    for name, size in message.held:
        table.add_row(f"  {name}", str(size), "")
    return table


def _show_tensors(found: Explanation, console: Console) -> None:
    guessed = any(tensor.guessed for tensor in found.tensors)
    if len(found.tensors) < 2 and not guessed:
        return
    console.print(Text("\nGuesses: tensors of this size" if guessed else "\nTensors of this size", style="bold"))
    for tensor in found.tensors[:_MOST_SHOWN]:
        console.print(Text.assemble(("guess: " if guessed else "• ", "yellow"), str(tensor)), highlight=False)
    if guessed:
        console.print(
            "Any vocabulary fits some number of rows; these numbers are round. In bfloat16, twice the rows. To be "
            "sure, give --vocab and --batch, or --config.",
            style="dim",
        )
