"""Refused allocations on the device; at length: `python -m benchmarks.device_storm`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device.pretend import Pretend
from tests.device.runs import storm
from tests.faults.scenes import SCENES

NAMED = {scene.name: scene for scene in SCENES}


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("full", 3),
        ("LoRA, recomputed, leaner plans", 4),
        ("full, everything on the host, leaner plans", 3),
        ("PPO, critic of its own, on the host", 2),
        ("T5, KL to a copy", 2),
        ("denoiser, KL to a copy", 2),
        ("images, KL to a copy", 3),
    ],
)
def test_faults_leave_no_trace_on_the_device(name: str, runs: int, tmp_path: Path, cuda: Pretend) -> None:
    tally = storm(NAMED[name], cuda.devices[0], runs, seed=1, output_dir=tmp_path)
    assert tally.findings.violations == []
    assert tally.findings.faults >= runs
    assert tally.pinned_bytes <= 0 or NAMED[name].parks
