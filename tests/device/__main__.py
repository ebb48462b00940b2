"""`python -m tests.device MODULE ...`: runs a module in a process that has the pretend CUDA device."""

import runpy
import sys

from tests.device import pretend

if __name__ == "__main__":
    pretend.load()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
