"""Processes of a run that are hit by signals, at moments that were drawn, and what has to hold afterwards."""

from __future__ import annotations

import functools
import logging
import multiprocessing as mp
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from tqdm import tqdm
from transformers import TrainerCallback

from memsafe_rl.checkpoint.store import check_files, checkpoint_folder, checkpoints, read_manifest
from memsafe_rl.errors import INTERRUPTED_CODE, DamagedCheckpointError
from memsafe_rl.records import read_lines
from tests.parallel.test_ranks import free_port, set_up_rank
from tests.trainers.helpers import make_trainer

STEPS = 60
CALLS = {"os.rename": 1, "os.replace": 1, "os.fsync": 14, "os.write": 3, "os.unlink": 8, "os.rmdir": 1, "torch.save": 1}
"""What blows are aimed at, and about how often a step calls it."""
MOMENTS = ("before", "halfway", "after")
PATIENCE_SECONDS = 120.0
"""Far above what a start, a step or an end takes on a busy machine."""
LAUNCHER_SECONDS = 20.0
"""After these, what has not begun to train since another rank is gone is ended, as torchrun does at once."""
_FAILED = 1

tqdm.set_lock(threading.RLock())  # its own is shared by all processes, and one that is killed may hold it


@dataclass(frozen=True)
class Scene:
    """A configuration that is killed.

    Args:
        name: what it is called.
        share: of all blows.
        ranks: processes that train together.
        settings: of the trainer, besides those of all scenes.
    """

    name: str
    share: float
    ranks: int = 1
    settings: dict[str, Any] = field(default_factory=dict)


SCENES = (
    Scene("one process", 0.25),
    Scene("old checkpoints deleted", 0.25, settings={"save_total_limit": 2}),
    Scene("saved in the background", 0.25, settings={"save_in_background": True, "save_total_limit": 3}),
    Scene("two ranks", 0.1, ranks=2),
    Scene("two sharded ranks", 0.15, ranks=2, settings={"fsdp": "full_shard"}),
)


@dataclass(frozen=True)
class Blow:
    """How one process of a run ends.

    Args:
        number: the signal.
        steps: steps that go before; 0 for the start.
        delay: seconds after those.
        call: a function whose call it falls on in place of a time; empty for none.
        count: which of its calls.
        moment: one of `MOMENTS`.
        rank: which process.
    """

    number: signal.Signals
    steps: int = 0
    delay: float = 0.0
    call: str = ""
    count: int = 0
    moment: str = ""
    rank: int = 0


@dataclass
class Found:
    """What came of a scene; the slowest end is from the first rank's to the last one's, the launcher left out."""

    blows: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    starts: int = 0
    steps_redone: int = 0
    passed_over: int = 0
    ended_by_launcher: int = 0
    slowest_end_seconds: float = 0.0
    violations: list[str] = field(default_factory=list)


class _Tells(TrainerCallback):  # type: ignore[misc]
    """Tells the watcher which step has begun."""

    def __init__(self, watcher: Connection) -> None:
        self._watcher = watcher

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Sends how many steps are done."""
        self._watcher.send(state.global_step)


def train(folder: str, scene: Scene, steps: int, blow: Blow | None, rank: int, port: int, watcher: Connection) -> None:
    """Trains in a process of its own, until it is hit; resumes where there is something to resume from."""
    torch.set_num_threads(1)
    with Path(f"{folder}.log").open("a") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    logging.getLogger("memsafe_rl").addHandler(_PassedOver(watcher))
    if scene.ranks > 1:
        set_up_rank(rank, port, scene.ranks)
    trainer = make_trainer(
        Path(folder),
        **{"max_steps": steps, "num_iterations": 2, "save_strategy": "steps", "save_steps": 1, **scene.settings},
        resume_from_checkpoint="auto",
        callbacks=[_Tells(watcher)],
    )
    if blow is not None and blow.call and blow.rank == rank:
        aim(blow)
    trainer.train()
    watcher.send("done")


class _PassedOver(logging.Handler):
    """Tells the watcher of checkpoints that were found damaged."""

    def __init__(self, watcher: Connection) -> None:
        super().__init__()
        self._watcher = watcher

    def emit(self, record: logging.LogRecord) -> None:
        """Sends what concerns a checkpoint."""
        if "is damaged" in record.getMessage():
            self._watcher.send(record.getMessage())


def aim(blow: Blow) -> None:
    """Has this process hit itself at a call."""
    module = {"os": os, "torch": torch}[blow.call.partition(".")[0]]
    name = blow.call.partition(".")[2]
    original, left, lock = getattr(module, name), [blow.count], threading.Lock()

    @functools.wraps(original)
    def called(*arguments: Any, **named: Any) -> Any:
        with lock:
            left[0] -= 1
            hit = left[0] == 0
        if hit and blow.moment == "halfway" and name == "write":
            original(arguments[0], arguments[1][: len(arguments[1]) // 2])
        elif hit and blow.moment == "halfway" and name == "save":
            original(*arguments, **named)
            os.truncate(arguments[1], os.path.getsize(arguments[1]) // 2)
        elif not hit or blow.moment == "after":
            given = original(*arguments, **named)
            if not hit:
                return given
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(module, name, called)


def draw_blows(draw: random.Random, scene: Scene, kills: int, terms: int) -> list[Blow]:
    """Draws how a scene's processes end, in random order; every third SIGKILL is aimed."""
    blows = []
    for number in range(kills + terms):
        killed, rank = number < kills, draw.randrange(scene.ranks)
        if killed and number % 3 == 2:
            deletes = "save_total_limit" in scene.settings
            call = draw.choice([name for name in CALLS if deletes or name not in ("os.unlink", "os.rmdir")])
            count = draw.randint(1, 8 * CALLS[call])
            blows.append(Blow(signal.SIGKILL, call=call, count=count, moment=draw.choice(MOMENTS)))
        else:
            name = signal.SIGKILL if killed else signal.SIGTERM
            steps = draw.randrange(0 if killed else 1, 9)  # a process that only starts has no handler yet
            blows.append(Blow(name, steps=steps, delay=draw.uniform(0, 0.25), rank=rank))
    draw.shuffle(blows)
    return blows


class Watcher:
    """Starts the processes of a run, and hits them."""

    def __init__(self, scene: Scene, folder: Path, steps: int) -> None:
        self._scene, self.folder, self._steps = scene, folder, steps
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])

    def start(self, blow: Blow | None, found: Found) -> bool:
        """Lets a run go on until a blow falls or it is done; tells whether the blow fell."""
        port, processes, ends = free_port() if self._scene.ranks > 1 else 0, [], []
        for rank in range(self._scene.ranks):
            mine, theirs = self._context.Pipe(duplex=False)
            arguments = (str(self.folder), self._scene, self._steps, blow, rank, port, theirs)
            process = self._context.Process(target=train, args=arguments)
            process.start()
            theirs.close()
            processes.append(process)
            ends.append(mine)
        found.starts += 1
        told: list[Any] = []
        hit = self._hit(blow, processes, ends, told)
        self._join(blow, processes, ends, told, found)
        found.passed_over += sum(isinstance(message, str) and message != "done" for message in told)
        codes = [process.exitcode for process in processes]
        hit = hit or (blow is not None and -blow.number in codes)
        self._check_codes(blow if hit else None, codes, found)
        return hit

    def _hit(self, blow: Blow | None, processes: Sequence[Any], ends: Sequence[Connection], told: list[Any]) -> bool:
        """Waits for the moment of a blow that is not aimed."""
        if blow is None or blow.call:
            return False
        end, begun = ends[blow.rank], 0
        while begun < blow.steps + (blow.number == signal.SIGTERM):
            if not end.poll(PATIENCE_SECONDS):
                return False
            try:
                told.append(end.recv())
            except EOFError:
                return False
            begun += isinstance(told[-1], int)
        time.sleep(blow.delay)
        process = processes[blow.rank]
        if not process.is_alive():
            return False
        os.kill(process.pid, blow.number)
        return True

    def _join(
        self,
        blow: Blow | None,
        processes: Sequence[Any],
        ends: Sequence[Connection],
        told: list[Any],
        found: Found,
    ) -> None:
        """Waits for all, and hears what they tell; who trains with a rank that is gone has to end by itself."""
        running = time.monotonic() + PATIENCE_SECONDS + self._steps * 5
        gone, launching, ended_before = None, True, found.ended_by_launcher
        while any(process.is_alive() for process in processes):
            time.sleep(0.01)
            if gone is None and any(not process.is_alive() for process in processes):
                gone = time.monotonic()
            if gone is not None and launching and time.monotonic() > gone + LAUNCHER_SECONDS:
                launching = False
                for process, messages in zip(processes, map(_messages, ends), strict=True):
                    told += messages
                    if process.is_alive() and not messages:
                        found.ended_by_launcher += 1
                        process.terminate()
            if time.monotonic() > (running if gone is None else gone + PATIENCE_SECONDS):
                found.violations.append(f"{self.folder.name}: a process hangs after {blow}")
                for process in processes:
                    process.kill()
                    process.join()
        if gone is not None and found.ended_by_launcher == ended_before:
            found.slowest_end_seconds = max(found.slowest_end_seconds, time.monotonic() - gone)
        for end in ends:
            told += _messages(end)

    def _check_codes(self, blow: Blow | None, codes: Sequence[int | None], found: Found) -> None:
        """Compares how the processes ended with how they had to."""
        if blow is None:
            wanted: set[int | None] = {0}
        elif blow.number == signal.SIGTERM:
            wanted = {INTERRUPTED_CODE, 0, -signal.SIGTERM}  # 0, or no handler: training was over already
        else:
            wanted = {-signal.SIGKILL, 0} | ({_FAILED, -signal.SIGTERM} if self._scene.ranks > 1 else set())
        if not set(codes) <= wanted:
            last = Path(f"{self.folder}.log").read_text().strip().rpartition("\n")[2]
            found.violations.append(f"{self.folder.name}: ended with {codes} after {blow}: {last}")
        elif INTERRUPTED_CODE in codes:
            found.violations += unsaved(self.folder)


def _messages(end: Connection) -> list[Any]:
    found = []
    try:
        while end.poll():
            found.append(end.recv())
    except (EOFError, OSError):
        return found
    return found


def unsaved(folder: Path) -> list[str]:
    """Compares the last step of a run that was asked to stop with its newest checkpoint."""
    lines, saved = read_lines(folder / "steps.jsonl")[0], checkpoints(folder)
    last = lines[-1]["step"] if lines else 0
    if not last or (saved and saved[-1] == checkpoint_folder(folder, last)):
        return []
    return [f"{folder.name}: step {last} was done when SIGTERM came, but the newest checkpoint is {saved[-1:]}"]


def violations_of(folder: Path, whole: Path, steps: int) -> list[str]:
    """Compares a run that was killed and is done now with an unbroken one."""
    found = []
    for name in ("steps.jsonl", "metrics.jsonl"):
        lines = read_lines(folder / name)[0]
        counted = Counter(line["step"] for line in lines if not line.get("redone") and "train_runtime" not in line)
        if counted != Counter(range(1, steps + 1)):
            wrong = {step: counted[step] for step in {*counted, *range(1, steps + 1)} if counted[step] != 1}
            found.append(f"{name} has records by step {wrong}")
        if len({line["run_id"] for line in lines}) != 1:
            found.append(f"{name} has several runs")
    for checkpoint in checkpoints(folder):
        try:
            check_files(checkpoint, read_manifest(checkpoint))
        except DamagedCheckpointError as error:
            found.append(f"damaged: {error}")
    last, wanted = checkpoint_folder(folder, steps), checkpoint_folder(whole, steps)
    if not last.is_dir():
        return [*found, f"{last.name} is missing"]
    if (last / "model.safetensors").read_bytes() != (wanted / "model.safetensors").read_bytes():
        found.append("weights differ from the unbroken run's")
    states = [torch.load(each / "training_state.pt", weights_only=True) for each in (last, wanted)]
    if not _same(*states):
        found.append("optimizer state differs from the unbroken run's")
    strays = [path.name for pattern in (".checkpoint-*", ".*.json.*") for path in folder.glob(pattern)]
    try:
        FileLock(folder / ".run.lock", timeout=0).acquire().lock.release()
    except Timeout:
        found.append("the folder is still locked")
    return found + [f"{name} was left behind" for name in strays]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def storm_over(
    scene: Scene, blows: Sequence[Blow], folder: Path, steps: int = STEPS, fallen: Callable[[], None] = lambda: None
) -> Found:
    """Sends blows over a scene, over as many runs as they need.

    Args:
        scene: the configuration.
        blows: in the order in which they fall.
        folder: where runs write.
        steps: of a run.
        fallen: called after each blow.

    Returns:
        What came of it.
    """
    found, waiting = Found(), list(blows)
    whole = Watcher(scene, folder / "whole", steps)
    whole.start(None, found)
    while waiting and len(found.violations) < 20:
        run = Watcher(scene, folder / f"run-{found.runs}", steps)
        while True:
            blow = waiting[-1] if waiting else None
            if run.start(blow, found):
                blow = waiting.pop()
                found.blows[f"{blow.moment} {blow.call}" if blow.call else blow.number.name] += 1
                fallen()
            elif checkpoint_folder(run.folder, steps).exists() or found.violations:
                break
        found.runs += 1
        redone = [line for line in read_lines(run.folder / "steps.jsonl")[0] if line.get("redone")]
        found.steps_redone += len(redone)
        found.violations += [f"{run.folder.name}: {what}" for what in violations_of(run.folder, whole.folder, steps)]
    return found
