"""One event loop in a thread, for async reward functions."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from memsafe_rl.errors import MemsafeError

_FIRST_STEP_SECONDS = 1.0
"""Longest wait for awaitables to have begun: requests are under way before the caller keeps the processor busy."""
_FAREWELL_SECONDS = 1.0  # what is cancelled as its loop stops has so long to clear up

logger = logging.getLogger(__name__)


class Running:
    """Awaitables that run together in another thread."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self._ended = threading.Event()
        self._results: list[Any] = []
        self._error: BaseException | None = None
        self.cancel: Callable[[], object] = lambda: None  # if it has not ended, without waiting for it

    def settle(self, results: Sequence[Any] = (), error: BaseException | None = None) -> None:
        """Notes how it ended; the first to say so is believed."""
        if not self._ended.is_set():
            self._results, self._error = list(results), error
            self._ended.set()
            self.begun.set()

    def ended(self, seconds: float | None) -> bool:
        """Waits until it has ended; an exception that interrupts the wait cancels it."""
        try:
            return self._ended.wait(None if seconds is None else min(seconds, threading.TIMEOUT_MAX))
        except BaseException:
            self.cancel()
            raise

    def result(self) -> list[Any]:
        """Returns the results in order, or raises what one of the awaitables raised first; it must have ended."""
        if self._error is not None:
            raise self._error
        return self._results


class BackgroundLoop:
    """An event loop in a thread, as long as the run: clients that users keep belong to the loop they began in."""

    def __init__(self) -> None:
        self._thread: _Thread | None = None
        self._stop: weakref.finalize[..., BackgroundLoop] | None = None

    def start(self, awaitables: Sequence[Awaitable[Any]]) -> Running:
        """Runs awaitables together; each has gone as far as its first wait when this returns, or for a second."""
        if self._thread is not None and self._thread.over:
            self.close()
        if self._thread is None:
            self._thread = _Thread()
            self._stop = weakref.finalize(self, self._thread.stop)
        running = self._thread.run(awaitables)
        running.begun.wait(_FIRST_STEP_SECONDS)
        return running

    def abandon(self) -> None:
        """Leaves a loop alone that no longer answers; its thread ends with the process, the next start has another."""
        if self._stop is not None:
            self._stop.detach()
        self._thread = self._stop = None

    def close(self) -> None:
        """Stops the loop and its thread; the next `start` starts another."""
        if self._stop is not None:
            self._stop()
        self._thread = self._stop = None


class _Thread:
    """A thread with an event loop, until it is told to stop or something that runs in it ends the loop."""

    def __init__(self) -> None:
        self.over = False
        self._asked_to_stop = False
        self._under_way: set[Running] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name="memsafe-rl-rewards", daemon=True)
        self._thread.start()

    def run(self, awaitables: Sequence[Awaitable[Any]]) -> Running:
        """Has awaitables run together."""
        running = Running()
        self._under_way.add(running)
        running.cancel = asyncio.run_coroutine_threadsafe(self._settled(running, awaitables), self._loop).cancel
        return running

    def stop(self) -> None:
        """Ends the loop, and waits until it has."""
        with contextlib.suppress(RuntimeError):  # a loop that ended by itself is closed
            self._loop.call_soon_threadsafe(self._end)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _end(self) -> None:
        self._asked_to_stop = True
        self._loop.stop()

    async def _settled(self, running: Running, awaitables: Sequence[Awaitable[Any]]) -> None:
        try:
            running.settle(await _together(awaitables, running.begun))
        except BaseException as error:  # told to the thread that waits
            running.settle(error=error)
        finally:
            self._under_way.discard(running)

    def _live(self) -> None:
        asyncio.set_event_loop(self._loop)
        error = _raised_by(self._loop.run_forever)
        self.over = True
        if error is None and not self._asked_to_stop:
            error = MemsafeError("An async reward function stopped its event loop. Leave the loop to the trainer.")
        if error is not None and not self._under_way:
            logger.error("The event loop of async reward functions has ended between two rollouts.", exc_info=error)
        self._settle_all(error)
        self._clear_up()
        self._loop.close()
        self._settle_all(error)  # what was started while this one ended

    def _settle_all(self, error: BaseException | None) -> None:
        if error is not None:
            for running in list(self._under_way):
                running.settle(error=error)

    def _clear_up(self) -> None:
        """Cancels what is left and lets it clear up; another exit on the way does not keep the others from it."""
        last, told = time.monotonic() + _FAREWELL_SECONDS, set[asyncio.Task[Any]]()
        while (left := asyncio.all_tasks(self._loop)) and (seconds := last - time.monotonic()) > 0:
            for task in left - told:
                task.cancel()
            told |= left
            _raised_by(functools.partial(self._loop.run_until_complete, asyncio.wait(left, timeout=seconds)))


def _raised_by(work: Callable[[], object]) -> BaseException | None:
    """Runs a loop; returns what came out of it, as SystemExit and KeyboardInterrupt do from any of its tasks."""
    try:
        work()
    except BaseException as error:
        return error
    return None


async def _together(awaitables: Sequence[Awaitable[Any]], begun: threading.Event) -> list[Any]:
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.sleep(0)
        begun.set()
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
