"""Seeds for engines whose random numbers are their own."""

from __future__ import annotations

import hashlib

from memsafe_rl.types import SequenceKey


def seed_of(key: SequenceKey) -> int:
    """Turns a sequence's key into a seed."""
    digest = hashlib.blake2b(repr(tuple(key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
