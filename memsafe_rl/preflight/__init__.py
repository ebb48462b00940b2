"""Dry runs: the worst-case check, `verify`, and the memory forecast."""

from memsafe_rl.errors import DataError, Refusals

refusal = Refusals(__file__)
"""What cannot be forecast or tried."""

unusable = Refusals(__file__, DataError)
"""Prompts of which nothing can be tried."""
