"""Checkpoints: what a resumed run needs, written whole or not at all."""

from memsafe_rl.errors import Refusals

refusal = Refusals(__file__)
"""What cannot be written, resumed from or uploaded."""
