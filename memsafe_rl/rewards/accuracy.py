"""Rewards for a right answer, decided by math-verify."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from memsafe_rl.errors import ConfigError
from memsafe_rl.rewards.shape import first_text

LogExtra = Callable[[str, list[Any]], None]

_PACKAGES = {"math_verify": "math-verify"}
_PARSING_SECONDS = 10
_VERIFYING_SECONDS = 5


_Verdict = tuple[float | None, str, str]
"""A reward, the solution as it was read, and the answer."""


def accuracy_reward(
    completions: Sequence[Any], solution: Sequence[str], log_extra: LogExtra | None = None, **_: Any
) -> list[float | None]:
    """Gives 1 where the answer in the completion equals the solution, 0 where it does not.

    The answer is the first LaTeX expression found, a boxed one before any other.
    """
    with _quiet_off_the_main_thread():
        verdicts = [_judge(first_text(text), gold) for text, gold in zip(completions, solution, strict=True)]
    return _logged(verdicts, solution, log_extra)


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: LogExtra | None = None,
    **_: Any,
) -> list[float | None]:
    """Gives 1 where the answer after the reasoning equals the solution, 0 where it does not or reasoning never ends."""
    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    verdicts: list[_Verdict] = []
    with _quiet_off_the_main_thread():
        for completion, gold in zip(completions, solution, strict=True):
            text = first_text(completion)
            delimiter = next((mark for mark in delimiters if mark in text), None)
            if delimiter is None:
                verdicts.append((0.0, "[incomplete reasoning]", "[incomplete reasoning]"))
            else:
                verdicts.append(_judge(text.rpartition(delimiter)[2], gold))
    return _logged(verdicts, solution, log_extra)


@dataclass(frozen=True)
class CosineScaledReward:
    r"""A reward that favours short right answers and long wrong ones.

    ``r = r_long + (r_short - r_long) (1 + cos(π min(|y| / L, 1))) / 2``
    (Yeo et al. 2025, "Demystifying Long Chain-of-Thought Reasoning", appendix C.1), where ``|y|`` counts the
    completion's tokens.
    """

    __name__: ClassVar[str] = "cosine_scaled_reward"
    required_packages: ClassVar[dict[str, str]] = _PACKAGES

    max_len: int
    min_value_wrong: float = -1.0
    max_value_wrong: float = -0.5
    min_value_correct: float = 0.5
    max_value_correct: float = 1.0

    def __post_init__(self) -> None:
        if self.max_len < 1:
            raise ConfigError(f"max_len is {self.max_len} tokens; give the longest completion length, at least 1.")

    def __call__(
        self, completions: Sequence[Any], solution: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any
    ) -> list[float | None]:
        """Rewards every completion."""
        judged = accuracy_reward(completions, solution)
        return [
            None if right is None else self._scaled(bool(right), len(ids))
            for right, ids in zip(judged, completion_ids, strict=True)
        ]

    def _scaled(self, right: bool, length: int) -> float:
        # Past the longest length the cosine would rise again and reward rambling.
        share = (1.0 + math.cos(min(length / self.max_len, 1.0) * math.pi)) / 2.0
        longest, shortest = (
            (self.min_value_correct, self.max_value_correct) if right else (self.max_value_wrong, self.min_value_wrong)
        )
        return float(longest + (shortest - longest) * share)


get_cosine_scaled_reward = CosineScaledReward
"""TRL's name."""


def _judge(text: str, solution: str) -> _Verdict:
    """Compares the answer in a text with the solution, within a time limit where the thread allows one."""
    extraction, parse, verify = _math_verify()
    # math-verify counts time by a signal, which only the main thread receives.
    timed = threading.current_thread() is threading.main_thread()
    parsing_seconds, verifying_seconds = (_PARSING_SECONDS, _VERIFYING_SECONDS) if timed else (None, None)
    gold = parse(str(solution), parsing_timeout=parsing_seconds)
    if not gold:
        return None, "[unparseable]", "[skipped]"
    answer = parse(text, extraction_config=[extraction], extraction_mode="first_match", parsing_timeout=parsing_seconds)
    reward = float(verify(gold, answer, timeout_seconds=verifying_seconds))
    return reward, str(gold), str(answer) if answer else "[unparseable]"


def _math_verify() -> tuple[Any, Callable[..., Any], Callable[..., Any]]:
    try:
        from latex2sympy2_extended import NormalizationConfig  # type: ignore[import-untyped,unused-ignore]
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise ConfigError(
            "Accuracy rewards need the package math-verify, which is not installed. Run `pip install math-verify`."
        ) from error
    extraction = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    return extraction, parse, verify


@contextmanager
def _quiet_off_the_main_thread() -> Iterator[None]:
    """Keeps math-verify from saying for every row that it has no time limit in this thread."""
    if threading.current_thread() is threading.main_thread():
        yield
        return
    loggers = [logging.getLogger(f"math_verify.{part}") for part in ("parser", "grader")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _logged(verdicts: list[_Verdict], solution: Sequence[str], log_extra: LogExtra | None) -> list[float | None]:
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [gold for _, gold, _ in verdicts])
        log_extra("answer_parsed", [answer for _, _, answer in verdicts])
    return [reward for reward, _, _ in verdicts]


accuracy_reward.required_packages = _PACKAGES  # type: ignore[attr-defined]
reasoning_accuracy_reward.required_packages = _PACKAGES  # type: ignore[attr-defined]
