"""Inside of a process with the pretend device, its tests; outside, the one file that starts such processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device import pretend

STARTER = "test_on_device.py"
_FILES = {path.name for path in Path(__file__).parent.glob("test_*.py")}
collect_ignore = sorted({STARTER} if pretend.is_loaded() else _FILES - {STARTER})


@pytest.fixture(autouse=True)
def _fresh_device() -> Iterator[None]:
    """Takes back what a test asked of the devices."""
    yield
    if not pretend.is_loaded():
        return
    loaded = pretend.load()
    loaded.draw_from_host(False)
    for device in loaded.devices:
        device.fail_at(pretend.NEVER)
        device.set_fraction(1.0)


@pytest.fixture
def cuda() -> pretend.Pretend:
    """The pretend devices, with counts at nothing."""
    loaded = pretend.load()
    loaded.counts.reset()
    return loaded
