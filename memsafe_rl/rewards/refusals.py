"""The errors that rewards make; not in the room's own file, which imports all of the room."""

from memsafe_rl.errors import DataError, Refusals

refusal = Refusals(__file__)
"""Reward functions, models and settings that cannot be used."""

unusable = Refusals(__file__, DataError)
"""Rewards, and what rewards are given, that do not have the form they must have."""
