"""What a rollout asks of an engine of another library, as plain numbers; what could never run is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from memsafe_rl.errors import DataError
from memsafe_rl.types import ModelGeometry, SamplingSettings, SequenceKey

Row = tuple[int, int]
"""Index of a prompt, and of a sample in its group."""


@dataclass(frozen=True)
class EngineRequest:
    """The sequences of one rollout."""

    ids: list[list[int]]  # tokens of each prompt
    rows: list[Row]  # the sequences, prompt by prompt
    row_tokens: int  # the longest prompt with a completion of full length, in tokens


def request_of(
    prompts: Sequence[Tensor],
    keys: Sequence[Sequence[SequenceKey]],
    settings: SamplingSettings,
    geometry: ModelGeometry,
) -> EngineRequest:
    """Reads prompts and keys."""
    ids = [prompt.tolist() for prompt in prompts]
    for index, tokens in enumerate(ids):
        _refuse(index, len(tokens), settings.max_new_tokens, geometry.max_positions)
    rows = [(prompt, sample) for prompt, group in enumerate(keys) for sample in range(len(group))]
    return EngineRequest(ids, rows, max(map(len, ids), default=0) + settings.max_new_tokens)


def _refuse(index: int, length: int, max_new_tokens: int, max_positions: int | None) -> None:
    if length < 1:
        raise DataError(f"Prompt {index} has {length} tokens; give it at least one, such as the bos token.")
    if max_positions is not None and length + max_new_tokens > max_positions:
        raise DataError(
            f"Prompt {index} needs {length + max_new_tokens} tokens with its completion, but the network has "
            f"{max_positions} positions. Shorten it, or lower max_completion_length."
        )
