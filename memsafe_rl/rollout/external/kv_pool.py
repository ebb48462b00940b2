"""The key/value pool of an engine that allocates it once: how many blocks a plan and a rollout ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memsafe_rl.types import ModelGeometry


@dataclass(frozen=True)
class Pool:
    """A key/value cache cut into blocks of equal size."""

    blocks: int  # blocks, those that the engine keeps for itself included
    spare: int  # blocks that the engine keeps for itself
    block_tokens: int  # tokens of a block
    block_bytes: int  # bytes of a block, over all layers

    @property
    def bytes(self) -> int:
        """Bytes of all blocks."""
        return self.blocks * self.block_bytes

    @property
    def tokens(self) -> int:
        """Tokens that sequences can hold in it together."""
        return (self.blocks - self.spare) * self.block_tokens


def pool_for(
    geometry: ModelGeometry,
    *,
    element_bytes: int,
    block_tokens: int,
    spare: int,
    row_tokens: int,
    rows: int,
    kv_bytes: int | None,
) -> Pool:
    """Sizes a pool: as many rows as may be in flight, within the plan's bytes, and one row in any case."""
    # A window of attention is not counted on: engines differ in what they free behind it.
    token_bytes = 2 * element_bytes * geometry.kv_heads * geometry.head_dim * geometry.layers
    block_bytes = token_bytes * block_tokens
    row_blocks = math.ceil(row_tokens / block_tokens)
    wanted = spare + rows * row_blocks
    allowed = wanted if kv_bytes is None else min(wanted, kv_bytes // block_bytes)
    return Pool(max(allowed, spare + row_blocks), spare, block_tokens, block_bytes)
