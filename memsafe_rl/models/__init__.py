"""Adapters: forward passes and sampling steps of each kind of network, and its geometry; no bytes, no budgets."""

from memsafe_rl.errors import DataError, Refusals

refusal = Refusals(__file__)
"""Networks, schedulers and critics that cannot be trained or scored here, or do not go with what is set."""

unusable = Refusals(__file__, DataError)
"""Prompts and masks that do not have the form they must have."""
