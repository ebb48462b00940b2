"""Calls what users wrote, of many episodes together: in order, on one event loop, or in threads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from memsafe_rl.rewards.background import BackgroundLoop

_THREADS = 32  # blocking calls at the same time


@dataclass(frozen=True)
class Call:
    """One call to be made once."""

    function: Callable[[], Any]  # takes nothing; may give a coroutine
    blocking: bool = False  # whether it goes into a thread


class Caller:
    """Makes calls, each exactly once; results come in the order of the calls, however they were made."""

    def __init__(self) -> None:
        self._loop = BackgroundLoop()
        self._pool: ThreadPoolExecutor | None = None

    def __call__(self, calls: Sequence[Call]) -> list[Any]:
        """Makes the blocking calls in threads, the others in order, and waits for coroutines together."""
        begun = {place: self._submit(call) for place, call in enumerate(calls) if call.blocking}
        try:
            results = {place: call.function() for place, call in enumerate(calls) if not call.blocking}
        finally:
            for future in begun.values():
                future.exception()
        results |= {place: future.result() for place, future in begun.items()}
        if waiting := {place: value for place, value in results.items() if inspect.isawaitable(value)}:
            running = self._loop.start(list(waiting.values()))
            self._loop.ended(running, None)
            results |= dict(zip(waiting, running.result(), strict=True))
        return [results[place] for place in range(len(calls))]

    def close(self) -> None:
        """Ends the threads; a later call starts others."""
        self._loop.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _submit(self, call: Call) -> Future[Any]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="memsafe-rl-episodes")
        return self._pool.submit(call.function)
