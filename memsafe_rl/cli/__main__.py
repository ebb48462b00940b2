"""The command line, as `python -m memsafe_rl.cli`."""

from memsafe_rl.cli import app

if __name__ == "__main__":
    app()
