"""What a rollout asks of an engine of another library, as plain numbers; what could never run is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from memsafe_rl.errors import DataError
from memsafe_rl.rollout.engine import Progress
from memsafe_rl.types import ModelGeometry, SamplingSettings, SequenceKey

Row = tuple[int, int]
"""Index of a prompt, and of a sample in its group."""


@dataclass(frozen=True)
class EngineRequest:
    """The sequences of one rollout.

    Args:
        ids: token ids of each prompt.
        rows: the sequences wanted, prompt by prompt.
        keys: of each prompt's sequences; equal keys must draw alike.
        settings: how tokens are drawn.
        row_tokens: the longest prompt with a completion of full length, in tokens.
        progress: receives counts of finished sequences; None for nobody.
    """

    ids: list[list[int]]
    rows: list[Row]
    keys: Sequence[Sequence[SequenceKey]]
    settings: SamplingSettings
    row_tokens: int
    progress: Progress | None = None

    @property
    def prompts(self) -> list[list[int]]:
        """The prompt of each sequence wanted, as token ids."""
        return [self.ids[prompt] for prompt, _ in self.rows]

    @property
    def seeds(self) -> list[int]:
        """A seed for each sequence wanted, the same in every attempt."""
        return [seed_of(self.keys[prompt][sample]) for prompt, sample in self.rows]


def request_of(
    prompts: Sequence[Tensor],
    keys: Sequence[Sequence[SequenceKey]],
    settings: SamplingSettings,
    geometry: ModelGeometry,
    progress: Progress | None = None,
) -> EngineRequest:
    """Reads prompts and keys."""
    ids, limit = [prompt.tolist() for prompt in prompts], geometry.max_positions
    for index, tokens in enumerate(ids):
        whole = len(tokens) + settings.max_new_tokens
        if not tokens:
            raise DataError(f"Prompt {index} has 0 tokens; give it at least one, such as the bos token.")
        if limit is not None and whole > limit:
            raise DataError(
                f"Prompt {index} needs {whole} tokens with its completion, but the network has {limit} positions. "
                "Shorten it, or lower max_completion_length."
            )
    rows = [(prompt, sample) for prompt, group in enumerate(keys) for sample in range(len(group))]
    row_tokens = max(map(len, ids), default=0) + settings.max_new_tokens
    return EngineRequest(ids, rows, keys, settings, row_tokens, progress)


def seed_of(key: SequenceKey) -> int:
    """Turns a sequence's key into a seed."""
    digest = hashlib.blake2b(repr(tuple(key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
