"""One training step: collect a rollout, compute its gradient, commit it; and the loop around it."""

from memsafe_rl.errors import Refusals

refusal = Refusals(__file__)
"""What cannot be put together to a run, or trained."""
