"""Rollouts that a user's function draws, read with care: what is wrong with one is said by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memsafe_rl.data import unusable
from memsafe_rl.memory.runtime.failures import is_out_of_memory
from memsafe_rl.rollout.multi_turn.episode import Segment
from memsafe_rl.types import Completion, ModelGeometry

RolloutFunction = Callable[[list[Any], Any], dict[str, Any]]
"""Called with prompts (each repeated for its group) and the trainer; gives "prompt_ids", "completion_ids", "logprobs",
optionally "env_mask", and anything else for the reward functions; one entry a prompt."""

_ROUNDING = 1e-3  # most that rounding lifts the log-prob of a certain token above 0, in nats: half precision's
_NEEDED = ("prompt_ids", "completion_ids", "logprobs")


@dataclass(frozen=True)
class ExternalRollout:
    """Completions of some rows, whoever drew them."""

    conditions: list[Tensor]  # prompt ids of each row, (length,) int64
    completions: list[Completion]  # one a row
    # per row, 1 where the model itself chose the token, uint8; None when it chose all
    masks: list[Tensor] | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # further columns for the reward functions
    external: bool = False  # whether the sampler's own log-probs came with them
    # the sequences that each completion is learnt from; None where each is one
    pieces: list[tuple[Segment, ...]] | None = None
    prompts: list[Any] | None = None  # per row, what the reward functions see of the prompt; None for the dataset's
    # per row, what the reward functions see of the completion; None for its tokens as text
    texts: list[Any] | None = None
    counts: list[dict[str, int]] | None = None  # per row, what its episode did; None where there are no episodes


def read_rollout(output: Any, *, rows: int, vocab_size: int, ends: Collection[int]) -> ExternalRollout:
    """Reads what a `rollout_func` returned."""
    if not isinstance(output, Mapping):
        raise unusable("rollout_func/dict", kind=type(output).__name__, needed=", ".join(_NEEDED))
    extra = dict(output)
    missing = sorted(set(_NEEDED) - extra.keys())
    unusable.when(missing, "rollout_func/missing", missing=missing)
    prompts, completions, logprobs = (extra.pop(name) for name in _NEEDED)
    masks = extra.pop("env_mask", None)
    for name, values in zip((*_NEEDED, "env_mask"), (prompts, completions, logprobs, masks), strict=True):
        count = len(values) if isinstance(values, Sized) else f"a {type(values).__name__} of no"
        if values is not None and count != rows:
            raise unusable("rollout_func/count", count=count, name=name, rows=rows)
    ids = [_ids("completion_ids", row, tokens, vocab_size) for row, tokens in enumerate(completions)]
    scores = [_logprobs(row, None if logprobs is None else logprobs[row], len(ids[row])) for row in range(rows)]
    drawn = [
        Completion(tokens, known, known, finished=int(tokens[-1]) in ends)
        for tokens, known in zip(ids, scores, strict=True)
    ]
    return ExternalRollout(
        conditions=[_ids("prompt_ids", row, tokens, vocab_size) for row, tokens in enumerate(prompts)],
        completions=drawn,
        masks=None if masks is None else [_mask(row, mask, len(ids[row])) for row, mask in enumerate(masks)],
        extra=extra,
        external=logprobs is not None,
    )


def check_contexts(given: ExternalRollout, readers: Mapping[str, ModelGeometry]) -> None:
    """Refuses rows that do not fit the context of a network that is to read them."""
    for whose, geometry in readers.items():
        for row, (prompt, completion) in enumerate(zip(given.conditions, given.completions, strict=True)):
            room = geometry.room_for_prompt(len(completion.ids))
            if room is not None and (room <= 0 or len(prompt) > room):
                lengths = f"a prompt of {len(prompt)} and a completion of {len(completion.ids)} tokens"
                raise unusable("rollout_func/context", row=row, lengths=lengths, whose=whose, geometry=geometry)


def _ids(name: str, row: int, tokens: Sequence[int], vocab_size: int) -> Tensor:
    try:
        ids = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise unusable("rollout_func/ids", name=name, row=row, tokens=tokens) from None
    if ids.ndim != 1 or len(ids) == 0 or ids.is_floating_point():
        raise unusable("rollout_func/token", name=name, row=row, shape=tuple(ids.shape), ids=ids)
    if (outside := ids[(ids < 0) | (ids >= vocab_size)]).numel():
        raise unusable("rollout_func/vocabulary", name=name, row=row, id=int(outside[0]), last=vocab_size - 1)
    return ids.to(dtype=torch.int64, device="cpu")


def _logprobs(row: int, values: Sequence[float | None] | None, length: int) -> Tensor:
    known: list[Any] = [None] * length if values is None else list(values)
    numbers = _numbers(math.nan if value is None else value for value in known)
    if numbers is None or len(numbers) != length:
        raise unusable("rollout_func/logprobs", row=row, length=length, count=len(known), first=known[:1])
    for place, number in enumerate(numbers):
        if not (math.isnan(number) and known[place] is None) and not -math.inf < number <= _ROUNDING:
            raise unusable("rollout_func/logprob", row=row, place=place, value=number)
    return torch.tensor(numbers, dtype=torch.float32)


def _mask(row: int, values: Sequence[int], length: int) -> Tensor:
    entries = _numbers(values)
    if entries is None or len(entries) != length or any(value not in (0.0, 1.0) for value in entries):
        count, first = (0, values) if entries is None else (len(entries), entries[:8])
        raise unusable("rollout_func/env_mask", row=row, length=length, count=count, first=first)
    return torch.tensor(entries, dtype=torch.uint8)


def _numbers(values: Any) -> list[float] | None:
    """Reads values as numbers; None where they are none."""
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError):
        return None
