"""The errors a user can meet, one base and few children.

Every message states what failed, the value that failed with its unit, and what to change.
"""

from __future__ import annotations


class MemsafeError(Exception):
    """Base of every error this library raises on purpose."""


class ConfigError(MemsafeError, ValueError):
    """A setting is unknown, contradicts another one, or has a value that cannot work."""


class DataError(MemsafeError, ValueError):
    """A dataset, a prompt, a completion or a reward does not have the form it must have."""


class MemoryBudgetError(MemsafeError, MemoryError):
    """The work does not fit in the memory budget, even with the leanest plan allowed."""
