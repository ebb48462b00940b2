"""The machine's cards and the processes on them, as the driver reports them.

Read through NVML if nvidia-ml-py is installed, else through ``nvidia-smi``. Neither creates a context on a card, which
would take hundreds of megabytes from the run being watched.
"""

from __future__ import annotations

import csv
import importlib
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_MIB = 2**20
_SECONDS = 10
_CARD_FIELDS = "index,uuid,name,compute_cap,memory.total,memory.used,memory.free,utilization.gpu"
_PROCESS_FIELDS = "gpu_uuid,pid,process_name,used_memory"


@dataclass(frozen=True)
class CardProcess:
    """A process on a card."""

    pid: int
    name: str
    used_bytes: int | None  # bytes it holds there, context included; None where the driver does not tell


@dataclass(frozen=True)
class Card:
    """A card as its driver reports it."""

    index: int  # the driver's number
    uuid: str
    name: str
    capability: str | None  # its compute capability, such as "9.0"; None where the driver does not tell
    total_bytes: int
    used_bytes: int  # held by all processes and the driver
    free_bytes: int  # held by nobody
    utilization: int | None  # percent of time in which it computed; None where the driver does not tell
    processes: tuple[CardProcess, ...] = ()


@dataclass(frozen=True)
class CardsRead:
    """The cards of this machine."""

    cards: tuple[Card, ...]
    source: str  # "nvidia-ml-py", "nvidia-smi", or why there are none


def read_cards() -> CardsRead:
    """Reads the cards of this machine and the processes on them."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return _by_command()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return CardsRead((), f"no NVIDIA driver answers ({error})")
    try:
        count = int(nvml.nvmlDeviceGetCount())
        return CardsRead(tuple(_by_nvml(nvml, index) for index in range(count)), "nvidia-ml-py")
    except nvml.NVMLError as error:
        return CardsRead((), f"the NVIDIA driver did not answer ({error})")
    finally:
        nvml.nvmlShutdown()


def _by_nvml(nvml: Any, index: int) -> Card:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    running = _known(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return Card(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        capability=_known(nvml, lambda: "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(handle))),
        total_bytes=int(memory.total),
        used_bytes=int(memory.used),
        free_bytes=int(memory.free),
        utilization=_known(nvml, lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
        processes=tuple(_process(nvml, found) for found in running or ()),
    )


def _process(nvml: Any, found: Any) -> CardProcess:
    name = _known(nvml, lambda: _text(nvml.nvmlSystemGetProcessName(found.pid)))
    return CardProcess(int(found.pid), name or "", None if found.usedGpuMemory is None else int(found.usedGpuMemory))


def _known(nvml: Any, ask: Callable[[], Any]) -> Any:
    """Returns the driver's answer; None if it has none or may not give it."""
    try:
        return ask()
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _by_command() -> CardsRead:
    program = shutil.which("nvidia-smi")
    if program is None:
        return CardsRead((), "there is no NVIDIA driver on this machine (neither nvidia-ml-py nor nvidia-smi)")
    found = _ask(program, f"--query-gpu={_CARD_FIELDS}")
    if isinstance(found, str):
        return CardsRead((), found)
    running = _ask(program, f"--query-compute-apps={_PROCESS_FIELDS}")
    processes: dict[str, list[CardProcess]] = defaultdict(list)
    for row in [] if isinstance(running, str) else running:
        if len(row) == len(_PROCESS_FIELDS.split(",")) and row[1].isdigit():
            processes[row[0]].append(CardProcess(int(row[1]), row[2], _mebibytes(row[3])))
    rows = [row for row in found if len(row) == len(_CARD_FIELDS.split(","))]
    return CardsRead(tuple(_of_row(row, processes[row[1]]) for row in rows), "nvidia-smi")


def _ask(program: str, query: str) -> list[list[str]] | str:
    """Returns the rows that nvidia-smi prints, or why it fails."""
    command = [program, query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi did not answer ({error})"
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().split("\n")[0]
        return f"nvidia-smi failed ({said})"
    return [[cell.strip() for cell in row] for row in csv.reader(done.stdout.split("\n")) if row]


def _of_row(row: Sequence[str], processes: Sequence[CardProcess]) -> Card:
    index, uuid, name, capability, total, used, free, utilization = row
    return Card(
        index=int(index),
        uuid=uuid,
        name=name,
        capability=capability if capability[:1].isdigit() else None,
        total_bytes=_mebibytes(total) or 0,
        used_bytes=_mebibytes(used) or 0,
        free_bytes=_mebibytes(free) or 0,
        utilization=int(utilization) if utilization.isdigit() else None,
        processes=tuple(processes),
    )


def _mebibytes(text: str) -> int | None:
    return int(text) * _MIB if text.isdigit() else None
