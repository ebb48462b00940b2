"""The command line: `memsafe-rl`."""

from memsafe_rl.cli.app import app

__all__ = ["app"]
