"""Rewards that cost money or minutes: asked once for each answer, retried, bounded, and kept on disk."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import logging
import math
import numbers
import random
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memsafe_rl.errors import MemsafeError
from memsafe_rl.rewards.calls import RewardFunction, accepted_names, function_name, is_async
from memsafe_rl.rewards.refusals import refusal, unusable

Answer = tuple[float | None, float]
"""A reward, None for none, and what it cost."""

_OWN = ("prompt", "completion")  # what a judge is given besides columns of the dataset
_SCHEMA = "CREATE TABLE IF NOT EXISTS answers (question TEXT PRIMARY KEY, reward REAL, cost REAL NOT NULL)"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ask:
    """How a judge is asked.

    Args:
        retries: further calls after one that failed or took too long.
        backoff_seconds: longest pause before the first further call, twice as long before each one after it; the pause
            itself is drawn between 0 and that (full jitter), so that calls that failed together return apart.
        timeout_seconds: longest call, in seconds; None for no limit.
        concurrency: most calls at a time.
        fallback: reward of a completion whose calls all failed, None for none; "error" ends the run. Never kept.

    Raises:
        ConfigError: a number is out of its range.
    """

    retries: int = 4
    backoff_seconds: float = 1.0
    timeout_seconds: float | None = 60.0
    concurrency: int = 8
    fallback: float | str | None = "error"

    def __post_init__(self) -> None:
        for name, least in (("retries", 0), ("concurrency", 1)):
            if not isinstance(value := getattr(self, name), int) or value < least:
                raise refusal("paid/whole", name=name, value=value, least=least)
        for name, instead, others in (
            ("backoff_seconds", "seconds of at least 0", ()),
            ("timeout_seconds", "seconds, or None for no limit", (None,)),
            ("fallback", "a number, None, or 'error'", (None, "error")),
        ):
            given: Any = getattr(self, name)
            number = isinstance(given, (int, float)) and math.isfinite(given) and (given >= 0 or name == "fallback")
            refusal.when(given not in others and not number, "paid/number", name=name, given=given, instead=instead)


class _Round:
    """What one rollout's questions share: the calls that may run at a time, and what became of them."""

    def __init__(self, ask: Ask) -> None:
        self.slots = asyncio.Semaphore(ask.concurrency)
        self.threads = ThreadPoolExecutor(ask.concurrency * (ask.retries + 1))  # those that are late hold up no other
        self.failure: Exception | None = None
        self.count: dict[str, float] = dict.fromkeys(("asked", "calls", "fell_back", "cost", "seconds_per_call"), 0)


class PaidReward:
    """A reward function that asks a judge about one completion at a time and never asks about the same one twice.

    Answers lie in a SQLite file, each written when it arrives, so that a run that failed, was killed or resumed, an
    evaluation, or another run finds them there. Completions that occur twice in a rollout are asked about once.

    Args:
        judge: called with ``prompt``, ``completion`` and those columns of the dataset that it names, by keyword; gives
            a number, None for no reward, or a pair of one of these and what the call cost. Async, or run in threads.
        cache: the file of answers; several processes may share it. None keeps them for this object only.
        version: belongs to the question. Change it with the judge's model or instructions, so that all is asked anew.
        ask: how the judge is asked.

    Raises:
        ConfigError: the cache is no file that answers can be kept in.
    """

    def __init__(
        self, judge: Callable[..., Any], cache: str | Path | None, *, version: str = "", ask: Ask | None = None
    ) -> None:
        self.__name__ = function_name(judge)
        self._judge, self._version, self._ask = judge, version, ask or Ask()
        self._names = accepted_names(judge)
        self.__signature__ = _signature(judge)
        self._memory: dict[str, Answer] = {}
        self._path = None if cache is None else Path(cache)
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._connect()) as file:
                file.execute(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise refusal("paid/cache", cache=str(cache), error=error) from error

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_metric: Callable[[str, float], object],
        **columns: Any,
    ) -> list[float | None]:
        """Returns one reward a completion."""
        rows = [self._row(prompts, completions, columns, row) for row in range(len(prompts))]
        questions = [self._question(row, given) for row, given in enumerate(rows)]
        known = self._known(set(questions))
        asked = {question: given for question, given in zip(questions, rows, strict=True) if question not in known}
        call = _Round(self._ask)
        try:
            given = await asyncio.gather(*(self._answer(question, row, call) for question, row in asked.items()))
        finally:
            call.threads.shutdown(wait=False, cancel_futures=True)
        if call.failure is not None:
            raise call.failure
        answers = known | dict(zip(asked, given, strict=True))
        call.count["seconds_per_call"] /= max(call.count["calls"], 1)
        for metric, value in call.count.items():
            log_metric(f"{self.__name__}/{metric}", value)
        return [answers[question][0] for question in questions]

    def _row(self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any], row: int) -> Any:
        lists = {key: values for key, values in columns.items() if isinstance(values, (list, tuple))}
        given = {key: values[row] for key, values in lists.items() if key != "completion_ids"}
        given |= {"prompt": prompts[row], "completion": completions[row]}
        return given if self._names is None else {key: given[key] for key in given if key in self._names}

    def _question(self, row: int, given: Mapping[str, Any]) -> str:
        try:
            text = json.dumps([self.__name__, self._version, given], sort_keys=True)
        except TypeError as error:
            raise unusable("paid/question", row=row, name=self.__name__, error=error) from error
        return hashlib.sha256(text.encode()).hexdigest()

    async def _answer(self, question: str, given: Mapping[str, Any], call: _Round) -> Answer:
        """Asks about one completion until there is an answer, and keeps it; nothing new is asked after a failure."""
        async with call.slots:  # held during pauses too: a judge in trouble is asked less
            for attempt in range(self._ask.retries + 1):
                if call.failure is not None:
                    break
                try:
                    late = self._known({question}) if attempt else {}
                    answer = late.get(question) or await self._timed(question, given, call)
                except Exception as error:
                    self._note(error, attempt, call)
                else:
                    call.count["asked"] += 1
                    call.count["cost"] += answer[1]
                    return answer
                if attempt < self._ask.retries:
                    await asyncio.sleep(random.uniform(0, self._ask.backoff_seconds * 2**attempt))
        fallback: Any = self._ask.fallback
        call.count["fell_back"] += 1
        return fallback, 0.0

    def _note(self, error: Exception, attempt: int, call: _Round) -> None:
        """Says that a call failed; what a further call cannot mend, or none is left for, ends the rollout's rewards."""
        wrong = isinstance(error, MemsafeError)  # an answer that is no reward, which another call would pay for again
        left = 0 if wrong else self._ask.retries - attempt
        if wrong or (not left and self._ask.fallback == "error"):
            call.failure = call.failure or error
        then = "It is called again." if left else "It is not called again."
        logger.warning("Judge %r failed in call %d: %.300r. %s", self.__name__, attempt + 1, error, then)

    async def _timed(self, question: str, given: Mapping[str, Any], call: _Round) -> Answer:
        """Calls the judge once."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self._ask.timeout_seconds):
                if is_async(self._judge):
                    return self._keep(question, await self._judge(**given))
                loop = asyncio.get_running_loop()
                # what comes late is kept too
                return await loop.run_in_executor(call.threads, lambda: self._keep(question, self._judge(**given)))
        finally:
            call.count["calls"] += 1
            call.count["seconds_per_call"] += time.perf_counter() - began

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path or "", timeout=60, isolation_level=None)

    def _known(self, questions: set[str]) -> dict[str, Answer]:
        held = {question: self._memory[question] for question in questions & self._memory.keys()}
        if self._path is None:
            return held
        with closing(self._connect()) as file:
            select = "SELECT reward, cost FROM answers WHERE question = ?"
            found = {question: file.execute(select, (question,)).fetchone() for question in questions}
        return held | {question: answer for question, answer in found.items() if answer is not None}

    def _keep(self, question: str, output: Any) -> Answer:
        """Reads what the judge returned, and keeps it."""
        answer = _read(self.__name__, output)
        self._memory[question] = answer
        if self._path is not None:
            try:
                with closing(self._connect()) as file:
                    file.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", (question, *answer))
                self._memory.pop(question, None)
            except sqlite3.Error as error:  # a full disk, say: the answer is paid for all the same
                logger.warning("%s cannot be written (%s): answers are kept for this run only.", self._path, error)
        return answer


def _read(name: str, output: Any) -> Answer:
    """Takes a reward, or a pair of a reward and a cost, apart."""
    reward, cost = output if isinstance(output, tuple) and len(output) == 2 else (output, 0.0)
    numeric = isinstance(reward, (numbers.Real, type(None))) and isinstance(cost, numbers.Real)
    if not numeric or not math.isfinite(cost) or abs(reward or 0.0) > torch.finfo(torch.float32).max:
        raise unusable("paid/answer", name=name, output=output, kind=type(output).__name__)
    return None if reward is None or math.isnan(reward) else float(reward), float(cost)


def _signature(judge: RewardFunction) -> inspect.Signature:
    """What a reward function takes, so that a column which the judge cannot do without is missed at the start."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    given = [inspect.Parameter(name, keyword) for name in ("prompts", "completions", "log_metric")]
    columns = [parameter for name, parameter in inspect.signature(judge).parameters.items() if name not in _OWN]
    named = [
        column.replace(kind=keyword) for column in columns if column.kind in (column.POSITIONAL_OR_KEYWORD, keyword)
    ]
    return inspect.Signature([*given, *named, *(column for column in columns if column.kind is column.VAR_KEYWORD)])
