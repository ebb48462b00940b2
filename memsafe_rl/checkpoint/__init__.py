"""Folders of checkpoints and runs: written whole or not at all, checked, found, exported."""

from memsafe_rl.errors import Refusals

refusal = Refusals(__file__)
"""What cannot be written, resumed from or uploaded."""
