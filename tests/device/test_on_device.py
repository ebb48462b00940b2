"""Starts the tests of this folder in processes of their own: the device must be there before torch is.

There are two, for as many workers; each spends seven seconds of processor time on imports before it tests anything.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import build

ROOT = Path(__file__).parents[2]
FILES = sorted(path for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__))
PROCESSES = 2
PATIENCE = 1800
"""Seconds that one of them may take: alone it is done in a sixth of it."""


@pytest.fixture(scope="module")
def _device() -> None:
    reason = build.missing()
    if reason is None:
        build.built()
    elif os.environ.get("CI"):
        pytest.fail(f"{reason}; CI may not do without it")
    else:
        pytest.skip(reason)


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE)  # of so many tests; the process below is given up before
@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize("part", range(PROCESSES))
def test_on_the_pretend_device(part: int) -> None:
    files = [str(path) for path in FILES[part::PROCESSES]]
    options = ["-p", "tests.device.plugin", "-p", "no:cacheprovider", "-n", "0", "--color=no", "--tb=short"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=ROOT,
        env={**inherited, "OMP_NUM_THREADS": "1", "PRETEND_DEVICES": "2"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, f"on the pretend device:\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
