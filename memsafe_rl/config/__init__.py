"""Settings: their declaration, and the checks, help and refusals that follow from it."""

from memsafe_rl.errors import Refusals

refusal = Refusals(__file__)
"""What settings cannot be, alone or together."""
