"""Every scene of the storms on the device and on the CPU: the same rewards are asked for, the same weights come out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device.pretend import Pretend
from tests.device.runs import relative, train
from tests.faults.scenes import SCENES, Scene

FLOAT32, BFLOAT16 = 1e-6, 5e-3
"""Most that weights may differ by, of their norm; in bfloat16, CUDA's products are summed in another order."""


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_a_scene_comes_to_the_same_as_on_the_cpu(scene: Scene, tmp_path: Path, cuda: Pretend) -> None:
    cuda.draw_from_host(True)  # dropout and new weights
    there = train(scene, tmp_path / "device")
    here = train(scene, tmp_path / "cpu", use_cpu=True)
    assert (there.device, here.device) == ("cuda", "cpu")
    assert there.reward_calls == here.reward_calls
    assert relative(there.weights, here.weights) <= (BFLOAT16 if scene.half else FLOAT32)
