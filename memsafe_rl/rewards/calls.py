"""One call of a rollout's reward functions: what they are given, what they log, and how long they are waited for."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from memsafe_rl.accounting import host_memory
from memsafe_rl.errors import MemsafeError, RewardTimeoutError
from memsafe_rl.rewards.background import BackgroundLoop
from memsafe_rl.rewards.refusals import refusal, unusable

Result = TypeVar("Result")

RewardFunction = Callable[..., Any]
"""Called with ``prompts``, ``completions``, ``completion_ids``, the dataset's columns and more, all by keyword; gives
one number or None for each completion, or a coroutine of them."""

GRACE_SECONDS = 5.0
"""Time beyond all timeouts after which a function must be holding up its event loop, where nothing can stop it."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TimeoutPolicy:
    """How long async reward functions are waited for.

    Args:
        timeout_seconds: longest call, in seconds; None for as long as it takes.
        retries: further calls of a function that took longer.
        gives_none: whether a function that always took longer leaves its rows without its reward; else the run ends.

    Raises:
        ConfigError: the timeout is no number, or the retries are no whole one of at least 0.
    """

    timeout_seconds: float | None = None
    retries: int = 0
    gives_none: bool = False

    def __post_init__(self) -> None:
        if self.timeout_seconds is not None and not isinstance(self.timeout_seconds, (int, float)):
            raise refusal("timeout_seconds", timeout_seconds=self.timeout_seconds)
        refusal.when(not isinstance(self.retries, int) or self.retries < 0, "retries", retries=self.retries)

    @property
    def deadline_seconds(self) -> float | None:
        """Seconds after which every function must have ended, whatever it does; None for never."""
        return None if self.timeout_seconds is None else self.timeout_seconds * (1 + self.retries) + GRACE_SECONDS


Patience = TimeoutPolicy
"""The name of `TimeoutPolicy` before 0.2."""


Begun = tuple[RewardFunction, Coroutine[Any, Any, Any]]
"""An async function, for further tries, and the coroutine of its first call, not yet started."""


class Pending(NamedTuple, Generic[Result]):
    """What async functions may still be working on."""

    result: Callable[[], Result]  # waits for it
    cancel: Callable[[], object] = lambda: None


class Calls:
    """What all functions are given for one rollout, and what they log."""

    def __init__(self, given: Mapping[str, Any], rows: int, patience: TimeoutPolicy) -> None:
        self.rows = rows
        self.seconds: dict[str, float] = {}
        self.timeouts: Counter[str] = Counter()
        self._given = given
        self._patience = patience
        self._extras: dict[str, dict[str, list[Any]]] = {}
        self._metrics: dict[str, list[tuple[str, float]]] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measures the wall time of a block for a function."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def first(self, name: str, function: RewardFunction) -> Any:
        """Calls a function; returns what it returns, a coroutine if it is async."""
        with self.timed(name):
            output = self._output(name, function)
        limit = self._patience.timeout_seconds
        if limit is not None and self.seconds[name] > limit and not inspect.iscoroutine(output):
            logger.warning(
                "Reward function %r took %.1f seconds, longer than reward_timeout_seconds %g. It is not async, so that "
                "nothing could stop it: make it `async def`, and call what blocks by `await asyncio.to_thread(...)`.",
                name,
                self.seconds[name],
                limit,
            )
        return output

    def await_together(self, begun: Mapping[str, Begun], loop: BackgroundLoop) -> Pending[dict[str, Any]]:
        """Has async functions run together, beside whatever the caller does next; returns their outputs by name."""
        if not begun:
            return Pending(dict)
        started, answered = time.monotonic(), set[str]()
        running = loop.start([self._answer(name, call, answered) for name, call in begun.items()])

        def result() -> dict[str, Any]:
            limit = self._patience.deadline_seconds
            if not running.ended(None if limit is None else max(0.0, started + limit - time.monotonic())):
                loop.abandon()
                silent = ", ".join(repr(name) for name in begun if name not in answered)
                raise RewardTimeoutError(
                    f"Reward function(s) {silent} did not answer within {limit:g} seconds and could not be stopped: "
                    "something in an async function blocks its event loop. Call what blocks by "
                    "`await asyncio.to_thread(...)`."
                )
            try:
                return dict(zip(begun, running.result(), strict=True))
            except asyncio.CancelledError as error:
                raise _cancelled([name for name in begun if name not in answered] or list(begun)) from error

        return Pending(result, running.cancel)

    async def _answer(self, name: str, begun: Begun, answered: set[str]) -> Any:
        """Waits for an async function, and calls it again while it takes too long and may be."""
        patience, (function, coroutine) = self._patience, begun
        with self.timed(name):
            for left in reversed(range(patience.retries + 1)):
                try:
                    async with asyncio.timeout(patience.timeout_seconds) as timer:
                        output = await _uncancelled(name, coroutine)
                    answered.add(name)
                    return output
                except TimeoutError:
                    if not timer.expired():
                        raise
                self.timeouts[name] += 1
                then = "It is called again." if left else "It is not called again."
                if not left and patience.gives_none:
                    then = f"Its rewards of {self.rows} completions are None."
                told = "Reward function %r did not answer within %g seconds. %s"
                logger.warning(told, name, patience.timeout_seconds, then)
                coroutine = self._output(name, function) if left else coroutine
        answered.add(name)
        if patience.gives_none:
            return [None] * self.rows
        raise RewardTimeoutError(
            f"Reward function {name!r} did not answer for {self.rows} completions within {patience.timeout_seconds:g} "
            f"seconds (reward_timeout_seconds), called {patience.retries + 1} time(s). Raise reward_timeout_seconds or "
            "reward_retries, or set reward_timeout_result='none' to continue without its rewards."
        )

    def _output(self, name: str, function: RewardFunction) -> Any:
        """Calls a function with its keywords, all or those it names; what an earlier call of it logged is forgotten."""
        extras: dict[str, list[Any]] = {}
        metrics: list[tuple[str, float]] = []
        self._extras[name], self._metrics[name] = extras, metrics
        available = {key: _copied(value) for key, value in self._given.items()}
        available["log_extra"] = lambda column, values: extras.setdefault(column, []).extend(
            _listed(name, column, values)
        )
        available["log_metric"] = lambda metric, value: metrics.append((metric, _as_float(name, metric, value)))
        accepted = accepted_names(function)
        return function(**{key: available[key] for key in available if accepted is None or key in accepted})

    def joined_metrics(self) -> dict[str, list[float]]:
        """Joins the numbers that all functions logged, by name."""
        joined: dict[str, list[float]] = {}
        for logged in self._metrics.values():
            for metric, value in logged:
                joined.setdefault(metric, []).append(value)
        return joined

    def joined_extras(self) -> dict[str, list[Any]]:
        """Joins the columns of all functions; a name used for different values gets its function's name in front."""
        joined: dict[str, list[Any]] = {}
        for name, extras in self._extras.items():
            for column, values in extras.items():
                if len(values) != self.rows:
                    raise unusable("logged/count", name=name, count=len(values), column=column, rows=self.rows)
                joined[f"{name}/{column}" if (column in joined and joined[column] != values) else column] = values
        return joined


async def _uncancelled(name: str, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Waits for a function; one that raises CancelledError though nobody cancelled it is named."""
    try:
        return await coroutine
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise _cancelled([name]) from error


def _cancelled(names: Sequence[str]) -> MemsafeError:
    return MemsafeError(
        f"Reward function(s) {', '.join(map(repr, names))} ended in asyncio.CancelledError, which nothing outside had "
        "asked for. Catch it where a task is cancelled inside the function, or raise another exception."
    )


def _as_float(name: str, metric: str, value: Any) -> float:
    wrong = unusable("logged/number", name=name, value=value, kind=type(value).__name__, metric=metric)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise wrong
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise wrong from error


def _listed(name: str, column: str, values: Any) -> Iterable[Any]:
    if not isinstance(values, Iterable):
        raise unusable("logged/list", name=name, values=values, kind=type(values).__name__, column=column)
    return values


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def function_name(function: Any) -> str:
    """Returns a function's own name, or that of its class."""
    function = _unwrapped(function)
    return str(getattr(function, "__name__", type(function).__name__))


def is_async(function: Any) -> bool:
    """Whether a function says that it returns a coroutine."""
    function = _unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _names_any(function: Any) -> bool:
    """Whether a function names what it takes, but for what it can do without by keyword."""
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    unnamed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    extra = [one for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is not one.empty]
    return any(one.kind not in unnamed and one not in extra for one in parameters)


def _parameters(function: RewardFunction) -> list[inspect.Parameter] | None:
    try:
        # a decorator that names none passes on what it is given; methods and partials are not to be looked through
        called = inspect.unwrap(function, stop=lambda one: not inspect.isfunction(one) or _names_any(one))
        return list(inspect.signature(called, follow_wrapped=not _names_any(called)).parameters.values())
    except ValueError:  # compiled functions may not say what they take
        return None


def accepted_names(function: RewardFunction) -> set[str] | None:
    """Names a function takes by keyword; None if it takes any."""
    parameters = _parameters(function)
    if parameters is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def required_names(function: RewardFunction) -> set[str]:
    """Names of the keywords that a function cannot do without."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name for p in (_parameters(function) or []) if p.kind in named and p.default is inspect.Parameter.empty}


def _copied(value: Any) -> Any:
    """Copies a list, so that a function that sorts, pops or computes in place does not disturb the next one."""
    if not isinstance(value, list):
        return value
    with host_memory():
        return [_own(entry) for entry in value]


def _own(entry: Any) -> Any:
    if isinstance(entry, Tensor):
        return entry.clone()
    return entry.copy() if isinstance(entry, np.ndarray) else entry
