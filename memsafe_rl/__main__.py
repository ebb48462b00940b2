"""The command line, as `python -m memsafe_rl`."""

from memsafe_rl.cli import app

if __name__ == "__main__":
    app()
