"""Ready-made rewards, for the shape of a completion and for a right answer, and how a run file names one."""

from __future__ import annotations

import importlib
import logging
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from memsafe_rl.errors import did_you_mean, quiet
from memsafe_rl.rewards.refusals import refusal

_ONE_THOUGHT = re.compile(r"<think>(?!.*<think>).*?</think>", re.DOTALL)


def first_text(completion: Any) -> str:
    """Returns the text that ready-made rewards judge."""
    if isinstance(completion, str):
        return completion
    content = completion[0]["content"] if completion else ""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def think_format_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """Returns 1 where the completion begins with one ``<think>`` block that is closed, else 0."""
    return [1.0 if _ONE_THOUGHT.match(first_text(completion)) else 0.0 for completion in completions]


@dataclass(frozen=True)
class SoftOverlongPunishment:
    """A reward that falls from 0 to -1 over the last tokens allowed.

    ``r = 0`` up to ``L - c`` tokens, ``(L - c - |y|) / c`` up to L, -1 beyond (Yu et al. 2025, DAPO, eq. 13).
    """

    __name__: ClassVar[str] = "soft_overlong_punishment_reward"

    max_completion_len: int
    soft_punish_cache: int

    def __post_init__(self) -> None:
        if not 0 <= self.soft_punish_cache <= self.max_completion_len:
            raise refusal("soft_punish_cache", cache=self.soft_punish_cache, longest=self.max_completion_len)

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """Rewards every completion by its length."""
        free, fall = self.max_completion_len - self.soft_punish_cache, max(1, self.soft_punish_cache)
        return [max(-1.0, min(0.0, (free - len(ids)) / fall)) for ids in completion_ids]


@dataclass(frozen=True)
class RepetitionPenalty:
    """A reward that falls with the share of repeated n-grams.

    ``r = (1 - distinct n-grams / all n-grams) · max_penalty`` (Yeo et al. 2025, "Demystifying Long Chain-of-Thought
    Reasoning", appendix C.2), over token ids; 0 for a completion shorter than one n-gram.
    """

    __name__: ClassVar[str] = "repetition_penalty_reward"

    ngram_size: int = 3
    max_penalty: float = -1.0

    def __post_init__(self) -> None:
        refusal.when(self.ngram_size < 1, "ngram_size", size=self.ngram_size)
        refusal.when(self.max_penalty > 0, "max_penalty", penalty=self.max_penalty)

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """Rewards every completion by its repetitions."""
        return [self._penalty(ids) for ids in completion_ids]

    def _penalty(self, ids: Sequence[int]) -> float:
        total = len(ids) - self.ngram_size + 1
        if total < 1:
            return 0.0
        distinct = len({tuple(ids[start : start + self.ngram_size]) for start in range(total)})
        return (1 - distinct / total) * self.max_penalty if distinct < total else 0.0


get_soft_overlong_punishment, get_repetition_penalty_reward = SoftOverlongPunishment, RepetitionPenalty
"""TRL's names."""


LogExtra = Callable[[str, list[Any]], None]

_PACKAGES = {"math_verify": "math-verify"}
_PARSING_SECONDS = 10
_VERIFYING_SECONDS = 5


_Verdict = tuple[float | None, str, str]
"""A reward, the solution as it was read, and the answer."""
_INCOMPLETE: _Verdict = (0.0, "[incomplete reasoning]", "[incomplete reasoning]")


def accuracy_reward(
    completions: Sequence[Any], solution: Sequence[str], log_extra: LogExtra | None = None, **_: Any
) -> list[float | None]:
    """Returns 1 where the answer in the completion equals the solution, 0 where it does not.

    The answer is the first LaTeX expression found, a boxed one before any other.
    """
    return _compared([first_text(completion) for completion in completions], solution, log_extra)


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: LogExtra | None = None,
    **_: Any,
) -> list[float | None]:
    """Returns 1 where the answer after the reasoning equals the solution, else 0, as where reasoning never ends."""
    delimiters, texts = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters, list[str | None]()
    for text in map(first_text, completions):
        delimiter = next((mark for mark in delimiters if mark in text), None)
        texts.append(None if delimiter is None else text.rpartition(delimiter)[2])
    return _compared(texts, solution, log_extra)


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
        refusal.when(self.max_len < 1, "max_len", max_len=self.max_len)

    def __call__(
        self, completions: Sequence[Any], solution: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any
    ) -> list[float | None]:
        """Rewards every completion."""
        return [
            None if right is None else self._scaled(bool(right), len(ids))
            for right, ids in zip(accuracy_reward(completions, solution), completion_ids, strict=True)
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


def _compared(texts: Sequence[str | None], solution: Sequence[str], log_extra: LogExtra | None) -> list[float | None]:
    """Rewards texts by their answers; None stands for reasoning that never ends."""
    # math-verify counts time by a signal, which only the main thread receives, and says for every row that it does not.
    timed = threading.current_thread() is threading.main_thread()
    with nullcontext() if timed else quiet("math_verify", logging.ERROR):
        verdicts = [
            _judge(text, gold, timed=timed) if text is not None else _INCOMPLETE
            for text, gold in zip(texts, solution, strict=True)
        ]
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [gold for _, gold, _ in verdicts])
        log_extra("answer_parsed", [answer for _, _, answer in verdicts])
    return [reward for reward, _, _ in verdicts]


def _judge(text: str, solution: str, *, timed: bool) -> _Verdict:
    """Compares the answer in a text with the solution, within a time limit where the thread allows one."""
    extraction, parse, verify = _math_verify()
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
        raise refusal("package/math-verify") from error
    extraction = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    return extraction, parse, verify


accuracy_reward.required_packages = _PACKAGES  # type: ignore[attr-defined]
reasoning_accuracy_reward.required_packages = _PACKAGES  # type: ignore[attr-defined]


REWARD_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "accuracy_reward": accuracy_reward,
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
    "think_format_reward": think_format_reward,
}
"""Rewards that are ready to use."""

REWARD_FACTORIES: dict[str, Callable[..., Callable[..., Any]]] = {
    "get_cosine_scaled_reward": get_cosine_scaled_reward,
    "get_repetition_penalty_reward": get_repetition_penalty_reward,
    "get_soft_overlong_punishment": get_soft_overlong_punishment,
}
"""Functions that make a reward from settings."""


def resolve_reward(name: str, settings: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Finds a reward function by name."""
    found = REWARD_FUNCTIONS.get(name) or REWARD_FACTORIES.get(name) or _imported(name)
    if settings is None and name not in REWARD_FACTORIES:
        return found
    try:
        made = found(**(settings or {}))
    except (TypeError, ValueError) as error:
        raise refusal("reward/settings", name=name, settings=dict(settings or {}), error=error) from error
    refusal.when(not callable(made), "reward/factory", name=name, settings=dict(settings or {}), made=made)
    return made


def _imported(path: str) -> Callable[..., Any]:
    module, _, attribute = path.replace(":", ".").rpartition(".")
    if not module:
        known = [*REWARD_FUNCTIONS, *REWARD_FACTORIES]
        raise refusal("reward/unknown", path=path, hint=did_you_mean(path, known), known=", ".join(known))
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # of any kind: importing runs the user's module
        raise refusal("reward/import", path=path, kind=type(error).__name__, error=error) from error
    refusal.when(not callable(found), "reward/function", path=path, found=found)
    return found  # type: ignore[no-any-return]
