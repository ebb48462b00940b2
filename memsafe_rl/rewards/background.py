"""One event loop in a thread, for async reward functions."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Sequence
from typing import Any


class BackgroundLoop:
    """An event loop that lives as long as the run, in its own thread.

    One loop for the whole run, because network clients that users keep between calls belong to the loop that made
    them; its own thread, because a notebook already runs a loop in this one.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: weakref.finalize[..., BackgroundLoop] | None = None

    def gather(self, awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
        """Runs awaitables together and waits for all.

        Args:
            awaitables: what to run.

        Returns:
            Their results, in order.

        Raises:
            BaseException: the first that one of them raised; the others are cancelled first.
        """
        future = asyncio.run_coroutine_threadsafe(_together(awaitables), self._started())
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Stops the loop and its thread; the next `gather` starts another."""
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


async def _together(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join()
