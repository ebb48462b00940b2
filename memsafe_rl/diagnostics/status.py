"""The files in which a run reports its status: names, formats, and an index of live runs.

Nothing here needs torch, so that `memsafe-rl monitor` starts at once.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from memsafe_rl.records import plain, read_json

METRICS_FILE = "metrics.jsonl"
"""What was logged, averaged over `logging_steps`, evaluations and totals included."""
MEMORY_FILE = "memory.jsonl"
"""Plans, failures, alarms and the forecast."""
STEPS_FILE = "steps.jsonl"
"""One line per optimizer step: its metrics, and which component held the bytes at each phase's peak."""
STATUS_FILE = "monitor.json"
"""The run's current status, rewritten while it trains; further ranks have their number in the name."""

_OWN_FOLDER_ONLY = 0o700
_VERSIONS_OF = ("memsafe-rl", "torch", "transformers", "peft", "accelerate", "bitsandbytes", "vllm")


def status_file(rank: int = 0) -> str:
    """Names the status file of a rank."""
    return STATUS_FILE if rank == 0 else f"monitor-{rank}.json"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces a file by JSON atomically, so that readers never see it half written."""
    replace_text(path, json.dumps(plain(content)))


def replace_text(path: Path, text: str) -> None:
    """Replaces a file atomically."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text)
        os.replace(beside, path)
    except OSError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def plain_number(value: Any) -> Any:
    """Returns numbers of numpy and torch, one or many, as Python's own, for JSON."""
    plain = getattr(value, "tolist", None)
    return plain() if callable(plain) else str(value)


@cache
def versions() -> dict[str, str]:
    """Returns the versions of the libraries that a result may depend on."""
    return {name: found for name in _VERSIONS_OF if (found := version_of(name)) is not None}


def version_of(package: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def process_started(pid: int) -> float | None:
    """Returns a process's start time, which with its number identifies it; None if it is not running."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None


def index_folder(*, make: bool = False) -> Path | None:
    """Returns the folder in which this user's runs register."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"memsafe_rl-{user}"
    try:
        if make:
            folder.mkdir(mode=_OWN_FOLDER_ONLY, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    return folder if (stat.S_ISDIR(found.st_mode) and (not hasattr(os, "getuid") or found.st_uid == user)) else None


def enter_index(run_dir: Path) -> Path | None:
    """Registers where this process writes, and removes the entries of dead processes."""
    folder = index_folder(make=True)
    if folder is None:
        return None
    list(runs_alive())
    entry = folder / f"{os.getpid()}.json"
    try:
        write_json(entry, {"run_dir": str(run_dir.resolve()), "process_started": process_started(os.getpid())})
    except OSError:
        return None
    return entry


def runs_alive() -> Iterator[tuple[int, Path]]:
    """Yields this user's live runs as process number and folder, oldest first, and removes dead entries."""
    folder = index_folder()
    if folder is None:
        return
    found: list[tuple[float, int, Path]] = []
    for entry in folder.glob("*.json"):
        content = read_json(entry)
        began = process_started(int(entry.stem)) if entry.stem.isdigit() else None
        if content is None or began is None or content.get("process_started") != began:
            entry.unlink(missing_ok=True)
        else:
            found.append((began, int(entry.stem), Path(str(content.get("run_dir")))))
    for _, pid, run_dir in sorted(found):
        yield pid, run_dir


def run_of(pid: int) -> Path | None:
    """Finds the folder of a run by its process."""
    for known, run_dir in runs_alive():
        if known == pid:
            return run_dir
    try:
        working = Path(psutil.Process(pid).cwd())
    except (psutil.Error, OSError):
        return None
    content = read_json(working / STATUS_FILE)
    return working if content is not None and content.get("pid") == pid else None
