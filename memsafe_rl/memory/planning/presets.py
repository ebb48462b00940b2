"""Policies for kinds of cards, by name: plans solved from the bytes of the smallest card of a kind."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.budget import AUTO_SHARE
from memsafe_rl.memory.planning.policies import AdaptivePolicy, MemoryPolicy, WithinBudget

_GIB = 2**30


def _for_cards_of(gib: int) -> MemoryPolicy:
    return WithinBudget(AdaptivePolicy(), int(AUTO_SHARE * gib * _GIB))


PRESETS: Mapping[str, MemoryPolicy] = MappingProxyType(
    {
        "24GB+": AdaptivePolicy(),
        "12-24GB": _for_cards_of(12),
        "8-12GB": _for_cards_of(8),
        "under-8GB": _for_cards_of(6),
    }
)
"""Policies by kind of card, the same plans on each of a kind; the largest takes what there is. Group size, epochs,
lengths and effective batch are not theirs to change. A smaller budget of the run still counts, as on a card of 4 GB."""


def preset(name: str) -> MemoryPolicy:
    """Gives the policy for a kind of card."""
    if name not in PRESETS:
        raise ConfigError(f"There is no preset {name!r} of memory policies; write one of {', '.join(PRESETS)}.")
    return PRESETS[name]
