"""How an engine that takes one longest completion a call draws prompts that each have their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from memsafe_rl.rollout.native.sequences import checked_limits
from memsafe_rl.types import Completion, SamplingSettings, SequenceKey

Draw = Callable[[Sequence[Tensor], Sequence[Sequence[SequenceKey]], SamplingSettings], list[Completion]]
"""Takes prompts, for each its keys, and settings; draws one completion a key, in their order."""


def drawn_by_limit(
    draw: Draw,
    prompts: Sequence[Tensor],
    keys: Sequence[Sequence[SequenceKey]],
    settings: SamplingSettings,
    limits: Sequence[int] | None,
) -> list[Completion]:
    """Draws one call for each different limit, and gives completions in the order of the prompts."""
    limits = checked_limits(limits, len(prompts), settings.max_new_tokens)
    found: dict[int, list[Completion]] = {}
    for limit in sorted(set(limits)):
        places = [place for place, own in enumerate(limits) if own == limit]
        own = replace(settings, max_new_tokens=limit)
        drawn = iter(draw([prompts[place] for place in places], [keys[place] for place in places], own))
        found |= {place: [next(drawn) for _ in keys[place]] for place in places}
    return [completion for place in range(len(prompts)) for completion in found[place]]
