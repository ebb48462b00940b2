"""Caches of rows that wait for their next turn: the one place where keys and values outlive a call that draws.

A row is found again by its place in the rollout, and is read on from the last token that its new context has in common
with what was kept. Rows belong to the network and the adapters under which they were read, and to the weights as they
were: under any others they are not there. It never exceeds the bytes that a plan allows; a failed attempt frees it all.
How many rows are drawn at once is `sequences.admit`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from memsafe_rl.accounting import host_memory
from memsafe_rl.models.adapter import DecodeState, ModelAdapter
from memsafe_rl.models.decoding.shared_prefix_cache import PromptBlock, RowCache, SharedPrefixState
from memsafe_rl.models.module_state import peft_adapters_on, weights_mark
from memsafe_rl.rollout.engine import LiveKeys
from memsafe_rl.types import SequenceKey

_WORTH = 2
"""A kept row is used again only if at least one token in this many agrees with the new context."""

RowName = tuple[int, int, int]
"""Rollout, prompt and sample of an episode: what its turns have in common."""


def name_of(key: SequenceKey) -> RowName:
    """Names the episode that a turn belongs to."""
    return key.rollout, key.prompt, key.sample


@dataclass(eq=False)
class _Waiting:
    """A row that waits."""

    ids: Tensor  # (tokens,) int64 on the host, whose keys and values it has
    cache: RowCache  # the keys and values


_Reader = tuple[ModelAdapter, tuple[str, ...]]
"""Who can read a row on: a network, and the names of its PEFT adapters that are on."""


class KeptCaches:
    """Rows of all roles that wait; empty between rollouts."""

    def __init__(self, live_keys: LiveKeys | None = None) -> None:
        self._live_keys = live_keys
        self._rows: dict[_Reader, dict[RowName, _Waiting]] = {}
        self._weights: dict[_Reader, int] = {}

    def clear(self) -> None:
        """Frees everything."""
        for rows in self._rows.values():
            rows.clear()

    def of(self, adapter: ModelAdapter) -> KeptRows | None:
        """Returns the rows that a network can resume as it is now, and frees those of episodes that are over."""
        if not adapter.kv_retention:
            return None
        reader, weights = (adapter, peft_adapters_on(adapter.model)), weights_mark(adapter.model)
        if self._weights.get(reader) != weights:
            self._rows.setdefault(reader, {}).clear()
        self._weights[reader] = weights
        self._give_up_ended()
        return KeptRows(adapter, self._rows.setdefault(reader, {}))

    def nbytes(self, in_flight: Sequence[PromptBlock] = ()) -> int:
        """Counts the keys and values of rows that wait."""
        counted = {id(block) for block in in_flight}
        blocks = {id(row.cache.block): row.cache.block for row in self._all() if id(row.cache.block) not in counted}
        return sum(row.cache.nbytes() for row in self._all()) + sum(block.nbytes() for block in blocks.values())

    def shrink(self, most_bytes: int, in_flight: Sequence[PromptBlock]) -> None:
        """Frees rows until the others hold at most so many bytes: of episodes that are over, then the longest."""
        if self.nbytes(in_flight) > max(0, most_bytes):
            self._give_up_ended()
        while self.nbytes(in_flight) > max(0, most_bytes):
            found = [(rows, name) for rows in self._rows.values() for name in rows]
            if not found:
                return
            # The longest, to leave the fewest to be read anew; the oldest would go all in turn, since turns go round.
            rows, name = max(found, key=lambda one: one[0][one[1]].cache.tokens)
            del rows[name]

    def _give_up_ended(self) -> None:
        if self._live_keys is None:
            return
        live = {name_of(key) for key in self._live_keys()}
        for rows in self._rows.values():
            for name in [name for name in rows if name not in live]:
                del rows[name]

    def _all(self) -> Iterator[_Waiting]:
        for rows in self._rows.values():
            yield from rows.values()


@dataclass(frozen=True)
class KeptRows:
    """Rows of one role."""

    adapter: ModelAdapter  # the network that read them
    rows: dict[RowName, _Waiting]  # those that wait

    def common(self, name: RowName, ids: Tensor) -> int:
        """Counts the tokens of a context that need not be read; frees a row that is of no use."""
        row = self.rows.get(name)
        if row is None:
            return 0
        shorter = min(len(row.ids), len(ids) - 1)
        with host_memory():
            differing = (row.ids[:shorter] != ids[:shorter]).nonzero()
            shared = int(differing[0]) if len(differing) else shorter
        if shared * _WORTH < len(row.ids) or shared < 1 or not self._goes_back(row.cache.tokens, shared):
            del self.rows[name]
            return 0
        return shared

    def take(self, names: Sequence[RowName]) -> list[RowCache]:
        """Takes rows out."""
        return [self.rows.pop(name).cache for name in names]

    def set_aside(
        self, state: DecodeState, leaving: Sequence[tuple[int, RowName, Tensor]], staying: Sequence[int]
    ) -> DecodeState:
        """Takes rows that have ended out of a state, and keeps them if they can be read on."""
        rows = cast(SharedPrefixState, state)  # as of every adapter with `kv_retention`
        positions, wanted = rows.positions, dict[int, int]()
        for row, _, ids in leaving:
            tokens = min(positions[row], len(ids))
            if self._goes_back(positions[row], tokens):
                wanted[row] = tokens - rows.bases[row]
        rest, caches = rows.set_aside(wanted, staying)
        told = {row: (name, ids) for row, name, ids in leaving}
        for row, cache in zip(wanted, caches, strict=True):
            name, ids = told[row]
            self.rows[name] = _Waiting(ids[: cache.tokens], cache)
        return rest

    def _goes_back(self, held: int, tokens: int) -> bool:
        """Returns whether a row that holds so many tokens could be read on from an earlier one."""
        moved_on = any(window is not None and held >= window for window in self.adapter.geometry.windows)
        return tokens == held or not moved_on
