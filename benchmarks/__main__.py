"""Measures what the README's front page shows, beside TRL, and writes its table and picture from the result files.

    python -m benchmarks [--quick] [--page]

The step beside TRL (`benchmarks.step`) takes about an hour on two quiet cores, the run on ever smaller devices
(`benchmarks.capacity_sweep`) some minutes. ``--quick`` tries both on small settings and writes nothing; ``--page``
measures nothing and writes the page from the files that are there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks import capacity_sweep, front_page, step


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, then writes.

    Args:
        arguments: command line, None for the process's own.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="try it in two minutes, and write nothing")
    parser.add_argument("--page", action="store_true", help="measure nothing, and write the page")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        step.main(["--quick"])
        return
    if not chosen.page:
        step.main([])
        capacity_sweep.main([])
    front_page.main()


if __name__ == "__main__":
    main()
