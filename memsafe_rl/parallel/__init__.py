"""Everything that knows of several processes; with one process it is the identity."""

from memsafe_rl.errors import MemsafeError, Refusals

refusal, failure = Refusals(__file__), Refusals(__file__, MemsafeError)
"""What several ranks cannot be asked for, and what ends them while they run."""
