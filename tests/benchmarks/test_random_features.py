"""Random mixes of features: drawn the same again, trained the same in four ways, and a difference is noticed."""

from pathlib import Path

import pytest
import torch

from benchmarks.random_features import Seen, _differs, check, draw_mix, train
from memsafe_rl import AdaptivePolicy


def test_a_difference_is_noticed() -> None:
    mix = draw_mix(1, 4)
    assert mix == draw_mix(1, 4)
    assert mix != draw_mix(1, 5)

    def seen(told: str, scale: float, steps: int = 1) -> Seen:
        return Seen([told], [scale * torch.ones(3, dtype=torch.float64)] * steps)

    assert [*_differs(mix, seen("a", 1.0), seen("a", 1.0 + 1e-6))] == []
    assert [*_differs(mix, seen("a", 1.0), seen("a", 1.0 + 1e-4))] == ["a gradient differs by 1.0e-04 of its norm"]
    assert [*_differs(mix, seen("a", 1.0), seen("b", 1.0))] == ["the reward function was given something else"]
    assert [*_differs(mix, seen("a", 1.0), seen("a", 1.0, 2))] == ["2 steps instead of 1"]


@pytest.mark.slow
def test_a_mix_learns_the_same_in_all_ways(tmp_path: Path) -> None:
    mix = draw_mix(1, 4)
    wrong, faults = check(mix, tmp_path, train(mix, tmp_path / "plain", AdaptivePolicy()))
    assert not wrong
    assert faults > 0
