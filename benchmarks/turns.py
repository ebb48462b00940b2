"""Lets several sides take turns, each in a fresh process of its own, so that a busy machine slows all of them alike.

No side sees another's allocator, caches or threads; only one works at a time, the others wait.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing.connection import Connection
from typing import Any

import torch

from memsafe_rl.memory.simulated.counting import CountingAllocator, compiler_available

Record = dict[str, Any]
Player = Callable[..., None]
"""A module-level function of a `Referee` and the arguments it was given; calls `Referee.wait` before every turn."""

_GO, _STOP = "go", "stop"


class Referee:
    """What a side sees of the others: its turn begins and ends.

    Attributes:
        order: what this turn is about, as `Side.turn` was told.

    Args:
        line: to the process that calls the turns.
    """

    def __init__(self, line: Connection) -> None:
        self._line = line
        self._wall = self._processor = 0.0
        self.order: Any = None

    def wait(self) -> bool:
        """Waits for the next turn and starts its clock.

        Returns:
            False when there is none.
        """
        word, self.order = self._line.recv()
        if word == _STOP:
            return False
        self._wall, self._processor = time.perf_counter(), time.process_time()
        return True

    def report(self, **figures: Any) -> None:
        """Ends the turn and stops its clock.

        Args:
            figures: what else was measured, plain values.
        """
        seconds, processor = time.perf_counter() - self._wall, time.process_time() - self._processor
        self._line.send({"seconds": seconds, "cpu_seconds": processor, **figures})


def counted(wanted: bool = True) -> AbstractContextManager[CountingAllocator | None]:
    """Counts bytes by the C++ allocator where there is a compiler.

    Args:
        wanted: False counts nothing.

    Returns:
        A context that gives the count, or None.
    """
    return CountingAllocator() if wanted and compiler_available() else nullcontext()


def _play(player: Player, line: Connection, threads: int, arguments: Mapping[str, Any]) -> None:
    torch.set_num_threads(threads)
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    try:
        player(Referee(line), **arguments)
    except Exception as error:
        line.send({"error": f"{type(error).__name__}: {error}"})


class Side:
    """One process that waits for its turns.

    Args:
        player: a module-level function.
        threads: of PyTorch.
        arguments: the player's, plain values.
    """

    def __init__(self, player: Player, threads: int, **arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_play, args=(player, theirs, threads, arguments), daemon=True)
        self._failed: Record | None = None
        with _environment(OMP_NUM_THREADS=str(threads)):
            self._process.start()
        theirs.close()

    def turn(self, order: Any = None) -> Record:
        """Lets it work once.

        Args:
            order: what the turn is about, where that differs from turn to turn.

        Returns:
            What it reported, or its "error", which is final.
        """
        if self._failed is None:
            try:
                self._line.send((_GO, order))
                record: Record = self._line.recv()
            except (EOFError, BrokenPipeError):
                self._process.join()
                record = {"error": f"the process ended with code {self._process.exitcode}"}
            if "error" not in record:
                return record
            self._failed = record
        return self._failed

    def close(self) -> None:
        """Ends the process."""
        if self._failed is None:
            self._line.send((_STOP, None))
        self._process.join(60)
        if self._process.is_alive():
            self._process.terminate()


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def take_turns(
    sides: Mapping[str, Callable[[], Side]], turns: int, *, warm_ups: int = 1, tick: Callable[[], None] = lambda: None
) -> dict[str, list[Record]]:
    """Lets sides take turns, in an order that is turned round every time.

    Args:
        sides: start the processes, by name.
        turns: turns of each that count.
        warm_ups: turns of each before them that do not.
        tick: called after every turn.

    Returns:
        What each reported in its turns; one record with an "error" for a side that failed.
    """
    running = {name: start() for name, start in sides.items()}
    records: dict[str, list[Record]] = {name: [] for name in sides}
    try:
        for number in range(warm_ups + turns):
            for name in list(running)[:: 1 if number % 2 == 0 else -1]:
                record = running[name].turn()
                if number >= warm_ups or "error" in record:
                    records[name].append(record)
                tick()
    finally:
        for side in running.values():
            side.close()
    return {name: [r for r in found if "error" in r][:1] or found for name, found in records.items()}


def median_of(records: Sequence[Record], name: str) -> float:
    """Returns the median of one figure.

    Args:
        records: of one side.
        name: of the figure.

    Returns:
        Its median.
    """
    return float(statistics.median(record[name] for record in records))
