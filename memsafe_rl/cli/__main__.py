"""The command line as a process of its own: `memsafe-rl`, and `python -m memsafe_rl.cli`."""

from __future__ import annotations

import gc

from memsafe_rl.cli.app import app


def main() -> None:
    """Runs a command; what it imports is not searched for garbage, which takes a third of a short command's time."""
    gc.disable()
    app()


if __name__ == "__main__":
    main()
