"""One training step: collect a rollout, compute its gradient, commit it; and the loop around it."""

from memsafe_rl.errors import DataError, MemsafeError, Refusals

refusal = Refusals(__file__)
"""What cannot be put together to a run, or trained."""

unusable = Refusals(__file__, DataError)
"""Datasets that do not have the form they must have."""

failure = Refusals(__file__, MemsafeError)
"""What goes wrong in a step."""
