"""`memsafe-rl monitor`: what a run tells of itself reaches whoever watches it, and dead runs are known as such."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from memsafe_rl.callbacks.status_file import StatusFile
from memsafe_rl.cli import app
from memsafe_rl.cli import monitor as monitoring_module
from memsafe_rl.cli.monitor import Liveness, Sighting, View, advice, as_json, look, render
from memsafe_rl.diagnostics import status as status_module
from memsafe_rl.diagnostics.status import STATUS_FILE, process_started, runs_alive, write_json
from memsafe_rl.memory.runtime import cards as cards_module
from memsafe_rl.memory.runtime.cards import Card, CardProcess, CardsRead, read_cards
from memsafe_rl.memory.runtime.meters import SimulatedMeter
from memsafe_rl.memory.runtime.tracker import MemoryTracker
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.records import read_json
from memsafe_rl.types import Phase, UpdatePlan
from memsafe_rl.units import format_bytes
from tests.processes import started
from tests.trainers.helpers import make_trainer

RUNNER = CliRunner()
GIB = 2**30
TRAINING = """
import sys, tempfile, time
from pathlib import Path
from memsafe_rl import SimulatedMemory
from tests.trainers.helpers import count_digits, make_trainer

calls = []
tempfile.tempdir = sys.argv[2]

def slow(completions, **columns):
    calls.append(None)
    (Path(sys.argv[1]) / f"rewarding-{len(calls)}").touch()
    while not (Path(sys.argv[1]) / f"go-{len(calls)}").exists():
        time.sleep(0.02)
    return count_digits(completions)

with SimulatedMemory(2**24, exact=False):
    make_trainer(Path(sys.argv[1]) / "run", reward_funcs=slow, max_steps=3).train()
"""


@pytest.fixture(autouse=True)
def no_index_of_others(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("index")))


def invoke(*words: object) -> Any:
    return RUNNER.invoke(app, ["monitor", *(str(word) for word in words)], env={"COLUMNS": "120"})


def wait_for(condition: Any, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def alive_status(**changed: Any) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "process_started": process_started(os.getpid()),
        "host": socket.gethostname(),
        "run_dir": "/runs/one",
        "state": "training",
        "written": time.time(),
        "step": 3,
        "max_steps": 9,
        "phase": "update",
        "device": {"kind": "cuda", "name": "H100", "capability": "9.0", "uuid": "abc", "total_bytes": 80 * GIB},
        "budget_bytes": 70 * GIB,
        "allocated_bytes": 20 * GIB,
        "reserved_bytes": 24 * GIB,
        "peak_bytes": 50 * GIB,
        "phase_peak_bytes": {"update": 50 * GIB, "rollout": 30 * GIB},
        "last_step_peak_bytes": {"update": 48 * GIB},
        "predicted_bytes": {"update": 49 * GIB},
        "allocator_retries": 0,
        "allocator_ooms": 0,
        "failures": 0,
        "retries": 0,
        "counts_tensors": True,
        "metrics": {"reward": 0.25, "step_time": 1.5},
        **changed,
    }


def seen(liveness: Liveness = Liveness.ALIVE, age: float = 0.0, **changed: Any) -> Sighting:
    return Sighting(alive_status(**changed), age, liveness)


def card(*processes: CardProcess) -> Card:
    return Card(0, "GPU-abc", "H100", "9.0", 80 * GIB, 60 * GIB, 20 * GIB, 97, processes)


def shown(view: View) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(render(view))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# ------------------------------------------------------------------ a live run


@pytest.fixture
def live_run(tmp_path: Path) -> Iterator[tuple[Path, BaseProcess]]:
    """A run in a process of its own that waits in the reward function of step n until there is a file `go-n`."""
    process = started(TRAINING, tmp_path, tempfile.gettempdir(), log=tmp_path / "log")
    try:
        yield tmp_path, process
    finally:
        process.kill()
        process.join()


@pytest.mark.slow
def test_a_live_run_is_found_and_shows_its_own_numbers(live_run: tuple[Path, BaseProcess]) -> None:
    folder, process = live_run
    run_dir = folder / "run"
    steps = run_dir / "steps.jsonl"
    (folder / "go-1").touch()
    wait_for(lambda: (folder / "rewarding-2").exists())

    def attached() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(invoke("--pid", process.pid, "--json").stdout)
        return found

    wait_for(lambda: attached()["run"]["step"] == 1 and attached()["run"]["phase"] == "reward")
    found = attached()
    run = found["run"]
    assert (run["pid"], run["liveness"], run["state"]) == (process.pid, "alive", "training")
    assert Path(run["run_dir"]) == run_dir
    assert run["device"] == {
        "kind": "simulated",
        "name": "simulated device in host memory",
        "capability": None,
        "uuid": None,
        "total_bytes": 2**24,
    }
    assert run["allocated_bytes"] > 0
    assert found["band"] == "safe"
    assert invoke("--run", run_dir, "--json").exit_code == 0
    assert str(process.pid) in invoke().stdout

    (folder / "go-2").touch()
    (folder / "go-3").touch()
    process.join(60)
    assert process.exitcode == 0, (folder / "log").read_text()
    logged = {line["step"]: line for line in map(json.loads, steps.read_text().splitlines())}
    of_step = {
        name.removeprefix("memory/").removesuffix("_peak_bytes"): value
        for name, value in logged[run["step"]].items()
        if name.startswith("memory/") and name.endswith("_peak_bytes")
    }
    assert run["last_step_peak_bytes"] == of_step
    assert run["metrics"]["reward"] == logged[run["step"]]["reward"]
    assert run["budget_bytes"] == logged[run["step"]]["memory/budget_bytes"]

    ended = json.loads(invoke("--run", run_dir, "--json").stdout)
    assert (ended["run"]["liveness"], ended["run"]["state"], ended["run"]["step"]) == ("ended", "finished", 3)
    assert invoke("--pid", process.pid).exit_code == 2
    assert list(runs_alive()) == []


@pytest.mark.slow
def test_a_killed_run_is_gone(live_run: tuple[Path, BaseProcess]) -> None:
    folder, process = live_run
    wait_for(lambda: (folder / "rewarding-1").exists())
    process.kill()
    process.join()
    found = invoke("--run", folder / "run")
    assert found.exit_code == 0
    assert "process gone" in found.stdout
    assert "dmesg" in found.stdout


# ------------------------------------------------------------------ what a run writes


def test_a_run_that_fails_says_by_what(tmp_path: Path) -> None:
    def broken(completions: list[str], **_: Any) -> list[float]:
        raise KeyError("judge")

    with pytest.raises(KeyError):
        make_trainer(tmp_path, reward_funcs=broken).train()
    found = read_json(tmp_path / STATUS_FILE)
    assert found is not None
    assert found["state"] == "stopped"
    assert "judge" in found["ended_by"]
    assert "stopped by KeyError" in invoke("--run", tmp_path).stdout.replace("\n", " ")


def test_host_memory_is_said_to_be_host_memory(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=1).train()
    told = invoke("--run", tmp_path).stdout
    assert "no card" in told
    assert "the whole process, Python and libraries included" in told
    assert "update" in told


def tracked(meter: Any = None) -> MemoryTracker:
    return MemoryTracker("cpu", meter or SimulatedMeter(SimulatedMemory(2**24, exact=False)), 2**23)


def test_a_phase_that_lasts_is_seen_while_it_lasts(tmp_path: Path) -> None:
    with SimulatedMemory(2**24, exact=False) as device:
        tracker = tracked(SimulatedMeter(device))
        status = StatusFile(tmp_path, tracker, every_seconds=0.02)
        status.on_train_begin(None, SimpleNamespace(max_steps=7, global_step=2), None)
        tracker.adopt(UpdatePlan(predicted_bytes={"update": 5000, "update/logits": 10}), UpdatePlan)
        with tracker.phase(Phase.UPDATE):
            kept = torch.zeros(1000)
            tracker.record("failure", phase=Phase.UPDATE)
            status.on_sampling(3, 8)
            wait_for(lambda: (read_json(tmp_path / STATUS_FILE) or {})["phase"] == "update", 5)
            wait_for(lambda: (read_json(tmp_path / STATUS_FILE) or {})["allocated_bytes"] == 4000, 5)
            found = read_json(tmp_path / STATUS_FILE) or {}
        status.on_run_closed()
    assert kept.numel() == 1000
    assert found["sampling"] == [3, 8]
    assert (found["step"], found["max_steps"], found["failures"]) == (2, 7, 1)
    assert found["predicted_bytes"] == {"update": 5000}
    assert found["budget_bytes"] == 2**23
    assert read_json(tmp_path / STATUS_FILE) != found


def test_a_trainer_that_nobody_closes_is_not_kept_by_its_status(tmp_path: Path) -> None:
    status = StatusFile(tmp_path, tracked(), every_seconds=0.01)
    status.on_train_begin(None, SimpleNamespace(max_steps=1, global_step=0), None)
    thread = status._thread
    assert thread is not None
    del status
    thread.join(5)
    assert not thread.is_alive()


def test_a_folder_that_vanishes_ends_the_status_and_not_the_run(tmp_path: Path) -> None:
    status = StatusFile(tmp_path / "run", tracked(), every_seconds=0.01)
    status.on_train_begin(None, SimpleNamespace(max_steps=1, global_step=0), None)
    assert status._thread is not None
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    status._thread.join(5)
    assert not status._thread.is_alive()
    status.on_progress(1, {"reward": 1.0})
    status.on_run_closed()


def test_refusals_of_a_simulated_device_count_as_out_of_memory_errors(tmp_path: Path) -> None:
    with SimulatedMemory(1000, exact=False) as device:
        status = StatusFile(tmp_path, tracked(SimulatedMeter(device)))
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1000)
        assert status.snapshot()["allocator_ooms"] == 1


def test_the_index_forgets_the_dead_and_trusts_no_folder_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    entry = status_module.enter_index(tmp_path / "run")
    assert entry is not None
    assert list(runs_alive()) == [(os.getpid(), tmp_path / "run")]
    assert status_module.run_of(os.getpid()) == tmp_path / "run"
    write_json(entry, {"run_dir": "x", "process_started": 1.0})  # the number now names another process
    assert list(runs_alive()) == []
    assert not entry.exists()
    entry.parent.rmdir()
    entry.parent.symlink_to(tmp_path)
    assert status_module.enter_index(tmp_path / "run") is None


# ------------------------------------------------------------------ judging


@pytest.mark.parametrize(
    ("changed", "liveness"),
    [
        ({}, Liveness.ALIVE),
        ({"state": "finished"}, Liveness.ENDED),
        ({"state": "stopped"}, Liveness.ENDED),
        ({"process_started": 1.0}, Liveness.GONE),
        ({"pid": 2**22 + 5}, Liveness.GONE),
        ({"written": time.time() - 60}, Liveness.SILENT),
        ({"host": "elsewhere", "pid": 1}, Liveness.ALIVE),
        ({"host": "elsewhere", "written": 5.0}, Liveness.SILENT),
    ],
)
def test_life_is_told_by_process_and_age(tmp_path: Path, changed: dict[str, Any], liveness: Liveness) -> None:
    write_json(tmp_path / STATUS_FILE, alive_status(**changed))
    found = look(tmp_path).run
    assert found is not None
    assert found.liveness is liveness


def test_a_run_folder_that_was_moved_is_resumed_from_where_it_is(tmp_path: Path) -> None:
    write_json(tmp_path / STATUS_FILE, alive_status(state="stopped"))
    (tmp_path / "checkpoint-3").mkdir()
    found = look(tmp_path).run
    assert found is not None
    assert found.status["run_dir"] == str(tmp_path)
    assert "checkpoint-3 is there" in advice(found, ())


@pytest.mark.parametrize(
    ("sighting", "processes", "words"),
    [
        (seen(), (), "nothing needs to be done"),
        (seen(Liveness.GONE), (), "died without an error"),
        (seen(Liveness.SILENT, 300.0), (), "has written no status for 5 min"),
        (seen(Liveness.ENDED, state="finished"), (), "has finished"),
        (
            seen(Liveness.ENDED, state="stopped", ended_by="MemoryBudgetError: no\nmore"),
            (),
            "by MemoryBudgetError: no. It left no checkpoint",
        ),
        (seen(), (CardProcess(7, "notebook", 10 * GIB),), "Other processes hold 10.00 GiB of this card"),
        (seen(), (CardProcess(os.getpid(), "python", 60 * GIB),), "nothing needs to be done"),
        (seen(allocator_retries=4), (), "emptied its cache 4 times"),
        (
            seen(last_step_peak_bytes={"update": 66 * GIB}, reserved_bytes=70 * GIB, allocated_bytes=30 * GIB),
            (),
            "40.00 GiB are reserved but hold no tensor",
        ),
        (seen(last_step_peak_bytes={"update": 66 * GIB}), (), "came close to the budget"),
        (seen(last_step_peak_bytes={"update": 61 * GIB}), (), "Little room is left"),
        (seen(failures=3), (), "3 allocations failed and their work was repeated"),
        (seen(step=0, last_step_peak_bytes={}, peak_bytes=GIB), (), "No step is done yet"),
        (seen(last_step_peak_bytes={"update": 10 * GIB}), (), "49.50 GiB are free before it gets tight"),
    ],
)
def test_advice_is_one_sentence_on_what_matters_most(
    sighting: Sighting, processes: tuple[CardProcess, ...], words: str
) -> None:
    told = advice(sighting, (card(*processes),))
    assert words in told
    assert told.endswith(".")
    assert "\n" not in told


def test_a_view_shows_card_neighbours_ranks_and_peaks() -> None:
    other = seen(rank=1, pid=77, last_step_peak_bytes={"update": 65 * GIB})
    view = View(CardsRead((card(CardProcess(9, "notebook", GIB)),), "nvidia-smi"), (seen(allocator_ooms=2), other))
    told = shown(view)
    for words in ("capability 9.0", "70.00 GiB", "68.6%", "safe", "24.00 GiB", "process 9 notebook, 1.00 GiB"):
        assert words in told
    for words in ("0 *", "97 %", "2 out-of-memory errors", "danger", "77", "update", "49.00 GiB", "in update"):
        assert words in told
    assert other.band == "danger"
    written = json.loads(as_json(view))
    assert written["ranks"][0]["pid"] == 77
    assert written["neighbours"] == [{"pid": 9, "name": "notebook", "used_bytes": GIB}]
    assert written["cards"][0]["capability"] == "9.0"
    assert written["advice"] == advice(view.ranks[0], view.cards.cards)


def test_several_runs_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = [(11, tmp_path / "a"), (12, tmp_path / "b")]
    monkeypatch.setattr(monitoring_module, "runs_alive", lambda: iter(runs))
    told = invoke()
    assert told.exit_code == 0
    assert "--pid 11" in told.stdout
    assert "--pid 12" in told.stdout
    assert [run["pid"] for run in json.loads(invoke("--json").stdout)["runs"]] == [11, 12]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--run", "nowhere"], "no such folder"),
        (["--run", "."], "no readable monitor.json"),
        (["--pid", 2**22 + 5], "no such process"),
        (["--pid", os.getpid()], "has registered no run"),
        (["--pid", 1, "--run", "."], "Give one of them"),
    ],
)
def test_a_run_that_cannot_be_found_is_an_error_with_a_remedy(
    words: list[object], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = invoke(*words)
    assert found.exit_code == 2
    assert told in found.stderr


def test_watching_goes_on_until_interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_json(tmp_path / STATUS_FILE, alive_status())
    left = [None, None]

    def sleep(seconds: float) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()

    monkeypatch.setattr(monitoring_module.time, "sleep", sleep)
    found = invoke("--run", tmp_path, "--watch", "--json")
    assert found.exit_code == 0
    assert len([json.loads(line) for line in found.stdout.splitlines()]) == 3
    left.append(None)
    found = invoke("--run", tmp_path, "--watch")
    assert found.exit_code == 0
    assert "step 3 of 9" in found.stdout


# ------------------------------------------------------------------ the driver


def test_without_a_driver_there_are_no_cards_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(cards_module.shutil, "which", lambda _: None)
    assert read_cards().cards == ()
    assert "no NVIDIA driver" in read_cards().source


SMI = """#!/bin/sh
case "$1" in
  --query-gpu*) echo '0, GPU-abc, NVIDIA H100 80GB HBM3, 9.0, 81559, 1024, 80535, 97'
                echo '1, GPU-def, NVIDIA T4, [N/A], 15360, 0, 15360, [N/A]' ;;
  *) echo 'GPU-abc, 4711, /usr/bin/python3, 900'
     echo 'GPU-abc, 4712, [Not Found], [N/A]' ;;
esac
"""


def test_nvidia_smi_is_read_where_there_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(cards_module.shutil, "which", lambda _: str(program))
    found = read_cards()
    first, second = found.cards
    assert (first.name, first.capability, first.total_bytes) == ("NVIDIA H100 80GB HBM3", "9.0", 81559 * 2**20)
    assert first.processes == (
        CardProcess(4711, "/usr/bin/python3", 900 * 2**20),
        CardProcess(4712, "[Not Found]", None),
    )
    assert (second.capability, second.utilization, second.processes) == (None, None, ())
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2\nexit 9\n")
    assert read_cards() == CardsRead((), "nvidia-smi failed (NVIDIA-SMI has failed)")


def test_the_library_is_read_and_what_it_does_not_know_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def unknown(*_: Any) -> Any:
        raise NVMLError("Not Supported")

    fake = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=100, used=30, free=70),
        nvmlDeviceGetUUID=lambda _: b"GPU-abc",
        nvmlDeviceGetName=lambda _: "L4",
        nvmlDeviceGetCudaComputeCapability=lambda _: (8, 9),
        nvmlDeviceGetUtilizationRates=unknown,
        nvmlDeviceGetComputeRunningProcesses=lambda _: [SimpleNamespace(pid=5, usedGpuMemory=None)],
        nvmlSystemGetProcessName=unknown,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    (found,) = read_cards().cards
    assert found == Card(0, "GPU-abc", "L4", "8.9", 100, 30, 70, None, (CardProcess(5, "", None),))
    fake.nvmlInit = unknown
    assert read_cards() == CardsRead((), "no NVIDIA driver answers (Not Supported)")


def test_bytes_are_set_with_units() -> None:
    assert format_bytes(50 * GIB) in shown(View(CardsRead((), "none"), (seen(),)))


def test_a_process_has_a_number_above_0() -> None:
    found = RUNNER.invoke(app, ["monitor", "--pid", "-1"])
    assert found.exit_code == 2
    assert "--pid" in found.stderr


def test_a_metric_that_is_no_number_leaves_valid_json_and_a_readable_screen(tmp_path: Path) -> None:
    """Rewards that nobody gave are NaN, which JSON does not know."""
    write_json(tmp_path / "monitor.json", alive_status(metrics={"reward": float("nan"), "step_time": 1.5}))
    text = (tmp_path / "monitor.json").read_text()
    assert "NaN" not in text
    assert json.loads(text)["metrics"] == {"reward": None, "step_time": 1.5}
    assert "step 3 of 9" in shown(View(CardsRead((), "none"), (Sighting(json.loads(text), 0.0, Liveness.ALIVE),)))
