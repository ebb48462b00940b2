"""The errors a user can meet, one base and few children.

Every message states what failed, the value that failed with its unit, and what to change.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

INTERRUPTED_CODE = 75
"""Exit code of a run that was asked to stop and can be resumed: EX_TEMPFAIL of sysexits.h."""


class MemsafeError(Exception):
    """Base of every error this library raises on purpose."""


class ConfigError(MemsafeError, ValueError):
    """A setting is unknown, contradicts another one, or has a value that cannot work."""


class DataError(MemsafeError, ValueError):
    """A dataset, a prompt, a completion or a reward does not have the form it must have."""


class DamagedCheckpointError(ConfigError):
    """A checkpoint's files are not those that were written."""


class SaveError(MemsafeError, OSError):
    """A checkpoint or a log cannot be written; what was saved before it is intact."""


class TrainingInterrupted(SystemExit, KeyboardInterrupt):
    """A signal or a stop file has ended training; left alone, the process ends with code 75 ("try again later")."""

    def __init__(self, reason: str) -> None:
        super().__init__(INTERRUPTED_CODE)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class RewardTimeoutError(MemsafeError, TimeoutError):
    """A reward function took longer than the run allows."""


class PeerOutOfMemoryError(MemsafeError):
    """Another rank ran out of memory in work that ranks share, so that all of them repeat it."""


class MemoryBudgetError(MemsafeError, MemoryError):
    """The work does not fit in the memory budget, even with the leanest plan allowed.

    Args:
        message: what was asked, what is held by whom, what was tried, what to change.
        failure: the last failure, a `MemoryFailure`; None where nothing was allocated yet.
        held_bytes: bytes by component when nothing of the failed work was left.
    """

    def __init__(self, message: str, *, failure: Any = None, held_bytes: Mapping[str, int] | None = None) -> None:
        super().__init__(message)
        self.failure = failure
        self.held_bytes = dict(held_bytes or {})


def do_each(*acts: Callable[[], object]) -> None:
    """Does each act whatever another raises, and raises the first error, which keeps the one that it came upon."""
    first: BaseException | None = None
    try:
        for act in acts:
            try:
                act()
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first
    finally:
        del first  # which holds this frame


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message; its kind where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def kind_and_line(error: BaseException) -> str:
    """Returns an error's kind and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


@contextmanager
def quiet(logger: str, level: int) -> Iterator[None]:
    """Keeps another library from logging what is below a level."""
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Asks, behind another sentence, for the name that a word looks like; empty where it looks like none."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


@lru_cache
def texts_beside(module: str, name: str) -> Any:
    """Reads a table of messages, in YAML, from the folder of a module's file."""
    text = (Path(module).parent / name).read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


class Refusals:
    """The errors of one class that a package raises, with texts from `refusals.yaml` beside a module."""

    def __init__(self, module: str, kind: type[MemsafeError] = ConfigError) -> None:
        self._texts: Mapping[str, str] = texts_beside(module, "refusals.yaml")
        self._kind = kind

    def __call__(self, case: str, /, **values: object) -> MemsafeError:
        """Makes an error."""
        return self._kind(self._texts[case].format(**values))

    def when(self, broken: object, case: str, /, **values: object) -> None:
        """Refuses where a rule is broken."""
        if broken:
            raise self(case, **values)
