"""One event loop in a thread, for async reward functions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import Awaitable, Sequence
from typing import Any

Running = concurrent.futures.Future[list[Any]]
"""Awaitables that run together in another thread."""

_FIRST_STEP_SECONDS = 1.0
"""Longest wait for awaitables to have begun: requests are under way before the caller keeps the processor busy."""
_FAREWELL_SECONDS = 1.0
"""What is cancelled as its loop stops has so long to clear up."""


class BackgroundLoop:
    """An event loop that lives as long as the run, in its own thread.

    One loop for the whole run, because network clients that users keep between calls belong to the loop that made
    them; its own thread, because a notebook already runs a loop in this one.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: weakref.finalize[..., BackgroundLoop] | None = None

    def start(self, awaitables: Sequence[Awaitable[Any]]) -> Running:
        """Runs awaitables together; each has gone as far as its first wait when this returns, or for a second.

        Args:
            awaitables: what to run.

        Returns:
            Their results to come, in order, or what one of them raised first; the others are cancelled then.
        """
        begun = threading.Event()
        running = asyncio.run_coroutine_threadsafe(_together(awaitables, begun), self._started())
        begun.wait(_FIRST_STEP_SECONDS)
        return running

    def ended(self, running: Running, seconds: float | None) -> bool:
        """Waits for what was started; an exception that interrupts the wait cancels it.

        Args:
            running: what was started.
            seconds: longest wait; None for as long as it takes.

        Returns:
            Whether it has ended.
        """
        try:
            return bool(concurrent.futures.wait([running], seconds).done)
        except BaseException:
            self.stop(running)
            raise

    def stop(self, running: Running) -> None:
        """Cancels what was started, if it has not ended, without waiting for it."""
        running.cancel()

    def abandon(self) -> None:
        """Leaves a loop alone that no longer answers; its thread ends with the process, the next start has another."""
        if self._stop is not None:
            self._stop.detach()
        self._loop = self._stop = None

    def close(self) -> None:
        """Stops the loop and its thread; the next `start` starts another."""
        if self._stop is not None:
            self._stop()
        self._loop = self._stop = None

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            thread = threading.Thread(target=_run, args=(self._loop,), name="memsafe-rl-rewards", daemon=True)
            thread.start()
            self._stop = weakref.finalize(self, _stop, self._loop, thread)
        return self._loop


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


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=_FAREWELL_SECONDS))
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join()
