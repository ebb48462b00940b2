"""Rewards for the shape of a completion: its format, its length, its repetitions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from memsafe_rl.errors import ConfigError

_ONE_THOUGHT = re.compile(r"<think>(?!.*<think>).*?</think>", re.DOTALL)


def first_text(completion: Any) -> str:
    """Gives the text that ready-made rewards judge."""
    if isinstance(completion, str):
        return completion
    content = completion[0]["content"] if completion else ""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def think_format_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """Gives 1 where the completion begins with one ``<think>`` block that is closed, else 0."""
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
            raise ConfigError(
                f"soft_punish_cache is {self.soft_punish_cache} tokens; give 0 to max_completion_len "
                f"({self.max_completion_len})."
            )

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
        if self.ngram_size < 1:
            raise ConfigError(f"ngram_size is {self.ngram_size} tokens; give at least 1.")
        if self.max_penalty > 0:
            raise ConfigError(f"max_penalty is {self.max_penalty}; a penalty is 0 or negative, such as -1.0.")

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
