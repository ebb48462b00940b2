"""The motion example's parts and, in miniature, the example itself at its true size of states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examples import motion_grpo, motions
from examples.motions import FEATURES, FRAMES, SPEEDS, command, gait, make_motions, speed_of


@pytest.fixture(autouse=True)
def keep_threads() -> Any:
    """The example sets the number of threads of its process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_figures_travel_as_fast_as_they_are_told() -> None:
    for speed in SPEEDS.values():
        made = gait(speed, 90, phase=0.3)
        assert made.shape == (90, FEATURES)
        assert speed_of(made.T[:, None], 90) == pytest.approx(speed, abs=1e-5)


def test_feet_stand_on_the_ground_and_legs_keep_their_length() -> None:
    joints = gait(1.4, 60, phase=0.0)[:, motions._JOINTS].view(60, 21, 3)
    hip, knee, ankle = (joints[:, index - 1] for index in (1, 4, 7))
    assert torch.allclose((hip - knee).norm(dim=1), torch.tensor(motions._THIGH))
    assert torch.allclose((knee - ankle).norm(dim=1), torch.tensor(motions._SHIN))
    assert float(joints[:, [9, 10], 1].amin(1).abs().max()) < 0.12


def test_motions_are_normalised_and_end_in_zeros() -> None:
    made = make_motions(8, seed=1)
    assert made.states.shape == (8, FEATURES, 1, FRAMES)
    counted = torch.cat([state[:, 0, :end] for state, end in zip(made.states, made.frames, strict=True)], 1)
    assert float(counted.mean(1).abs().max()) < 1e-3
    assert all(bool((state[:, :, end:] == 0).all()) for state, end in zip(made.states, made.frames, strict=True))


def test_prompts_and_rewards() -> None:
    assert command("walk slowly for 120 frames") == ("walk slowly", 120)
    embedded = motion_grpo.embed("jog for 98 frames")
    assert embedded.tolist() == [0, 0, 0, 1, 0, 0.5]
    assert motion_grpo.counted_frames(embedded[None]).sum() == 98
    walking = torch.nn.functional.pad(gait(1.4, 80, 0.0).T[:, None], (0, FRAMES - 80))
    found = motion_grpo.near_command(["walk for 80 frames", "run for 80 frames"], [walking, walking])
    assert found == pytest.approx([0.0, -2.2], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("ppo", [False, True], ids=["GRPO", "PPO"])
def test_the_example_in_miniature(ppo: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(motion_grpo, "STEPS", 4)
    monkeypatch.setattr(motion_grpo, "_TRIES", 1)
    monkeypatch.setattr(motion_grpo, "make_motions", lambda _, seed: make_motions(16, seed))
    size = motion_grpo.Size(width=8, pretraining=2, updates=3, prompts=1)
    found = motion_grpo.run(tmp_path, size, seed=0, ppo=ppo)
    assert found["before"] < 0
    assert found["gain"] == pytest.approx(found["after"] - found["before"], abs=1e-5)
    assert (tmp_path / "motions.png").stat().st_size > 10_000
    assert (tmp_path / "metrics.jsonl").exists()
