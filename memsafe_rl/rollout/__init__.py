"""Drawing and scoring of completions; uses adapters and plans, knows no losses or optimizers."""

from memsafe_rl.errors import DataError, MemsafeError, Refusals

refusal = Refusals(__file__)
"""What a rollout cannot be drawn with."""

unusable = Refusals(__file__, DataError)
"""Prompts, completions and conversations that do not have the form they must have."""

failure = Refusals(__file__, MemsafeError)
"""What goes wrong while completions are drawn."""
