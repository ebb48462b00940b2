"""Signals that ask a run to stop: the step ends or is abandoned, never half committed, and what was learnt is saved."""

from __future__ import annotations

import _thread
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from memsafe_rl.errors import TrainingInterrupted

logger = logging.getLogger(__name__)

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
"""Handlers that a run takes over for as long as it trains; one of the script's own stays."""


class StopRequest:
    """A wish to stop: the first signal lets the step end, the second (or time) abandons it, the third leaves."""

    def __init__(self, grace_seconds: float = 0.0) -> None:
        self.reason = ""
        self._heard = 0
        self._saving = False
        self._grace_seconds = grace_seconds
        self._timer: threading.Timer | None = None

    @property
    def leaves_at_once(self) -> bool:
        """Whether a third signal was heard, after which nothing more is saved."""
        return self._heard >= 3

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hears signals inside."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.getsignal(number) for number in SIGNALS if signal.getsignal(number) in _DEFAULTS}
        try:
            for number in previous:
                signal.signal(number, self._hear)
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            if self._timer is not None:
                self._timer.cancel()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Lets a checkpoint be written whole although a second signal arrives."""
        outer, self._saving = self._saving, True
        try:
            yield
        finally:
            self._saving = outer

    def _hear(self, number: int, _: FrameType | None) -> None:
        self._heard += 1
        first, self.reason = not self.reason, self.reason or signal.Signals(number).name
        if self.leaves_at_once or (not self._saving and (self._heard == 2 or not self._grace_seconds)):
            raise TrainingInterrupted(self.reason)
        if self._saving:
            logger.warning("%s: a checkpoint is being written; the run ends after it", self.reason)
        elif first:
            logger.warning(
                "%s: the run ends after this step, or in %g s without it; a second signal ends it now",
                self.reason,
                self._grace_seconds,
            )
            self._timer = threading.Timer(self._grace_seconds, self._lose_patience, (number,))
            self._timer.daemon = True
            self._timer.start()

    def _lose_patience(self, number: int) -> None:
        if self._heard == 1 and not self._saving:
            wake = getattr(signal, "pthread_kill", None)  # ends what the main thread waits for; Windows has none
            wake(threading.main_thread().ident, number) if wake else _thread.interrupt_main(signal.Signals(number))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defers signals until the block is done, so that a step is never half committed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Those of a run, of the script's own, and of a run that this one runs in: all may raise.
    handlers = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}
    caught: list[int] = []  # without the frames they came in, which hold tensors and, through the caller, this list
    deferring = True

    def catch(number: int, frame: FrameType | None) -> None:
        if deferring:
            caught.append(number)
        else:  # the block is done, and this signal's handler not yet restored
            handlers[number](number, frame)

    try:
        for number in handlers:
            signal.signal(number, catch)
        yield
    finally:
        deferring = False
        for number, handler in handlers.items():
            signal.signal(number, handler)
        with ExitStack() as each:  # though one of them raises
            for number in reversed(caught):
                each.callback(handlers[number], number, None)
