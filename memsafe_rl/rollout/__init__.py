"""Generation, scoring and storage of trajectories; uses adapters and plans, knows no losses or optimizers."""

from memsafe_rl.errors import Refusals

refusal = Refusals(__file__)
"""What a rollout cannot be drawn with."""
