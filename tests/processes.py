"""Scripts in processes of their own, where how an interpreter begins and ends is no matter."""

from __future__ import annotations

import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.multiprocessing as mp


def started(script: str, *arguments: object, log: Path) -> BaseProcess:
    """Starts a script in a fork of the process that ranks are forks of: imports are most of what a script costs.

    Args:
        script: its text.
        arguments: what it finds in ``sys.argv``, behind its name.
        log: where what it prints goes, errors too.

    Returns:
        The process.
    """
    mp.set_forkserver_preload(["tests.parallel.test_ranks"])
    given = script, [str(one) for one in arguments], str(log)
    process: BaseProcess = mp.get_context("forkserver").Process(target=_run, args=given, daemon=True)
    process.start()
    return process


def _run(script: str, arguments: list[str], log: str) -> None:
    with Path(log).open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = ["-c", *arguments]
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
