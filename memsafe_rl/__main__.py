"""The command line, as `python -m memsafe_rl`."""

from memsafe_rl.cli.__main__ import main

if __name__ == "__main__":
    main()
