"""What a rollout asks of an engine of another library, as plain numbers; what could never run is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from memsafe_rl.errors import DataError
from memsafe_rl.rollout.engine import Progress
from memsafe_rl.rollout.external.seeds import seed_of
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
    ids = [prompt.tolist() for prompt in prompts]
    for index, tokens in enumerate(ids):
        _refuse(index, len(tokens), settings.max_new_tokens, geometry.max_positions)
    rows = [(prompt, sample) for prompt, group in enumerate(keys) for sample in range(len(group))]
    row_tokens = max(map(len, ids), default=0) + settings.max_new_tokens
    return EngineRequest(ids, rows, keys, settings, row_tokens, progress)


def _refuse(index: int, length: int, max_new_tokens: int, max_positions: int | None) -> None:
    if length < 1:
        raise DataError(f"Prompt {index} has {length} tokens; give it at least one, such as the bos token.")
    if max_positions is not None and length + max_new_tokens > max_positions:
        raise DataError(
            f"Prompt {index} needs {length + max_new_tokens} tokens with its completion, but the network has "
            f"{max_positions} positions. Shorten it, or lower max_completion_length."
        )
