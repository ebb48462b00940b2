"""Prompts by position, and rollouts that users draw themselves."""

from memsafe_rl.errors import DataError, Refusals

refusal = Refusals(__file__)
"""What prompts cannot be drawn for, or read by."""

unusable = Refusals(__file__, DataError)
"""Datasets, prompts and rollouts that do not have the form they must have."""
