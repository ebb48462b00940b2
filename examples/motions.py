"""Walking figures for `examples.motion_grpo`: gaits from a few sines, in the 263 features a frame of HumanML3D.

Axes: ``F`` frames, ``J`` joints.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from torch import Tensor

FEATURES = 263
FRAMES = 196
FRAMES_PER_SECOND = 20
SPEEDS = {"stand still": 0.0, "walk slowly": 0.7, "walk": 1.4, "jog": 2.4, "run": 3.6}
"""Metres a second that each command asks for."""

FORWARD = 2
"""The feature that holds the root's velocity forwards, in metres a frame."""
_JOINTS = slice(4, 67)
_CHAINS = (
    (0, 1, 4, 7, 10),
    (0, 2, 5, 8, 11),
    (0, 3, 6, 9, 12, 15),
    (9, 13, 16, 18, 20),
    (9, 14, 17, 19, 21),
)
"""Joints that bones connect, in the order of SMPL: legs, spine and head, arms."""
_THIGH, _SHIN, _ARM, _FOREARM = 0.42, 0.42, 0.28, 0.26


@dataclass(frozen=True)
class Motions:
    """Motions as a denoiser sees them.

    Args:
        states: (N, 263, 1, 196), normalised; 0 after a motion's end.
        frames: frames of each motion.
        commands: what each motion is, a key of `SPEEDS`.
        means: (263,), of the features.
        deviations: (263,), of the features.
    """

    states: Tensor
    frames: tuple[int, ...]
    commands: tuple[str, ...]
    means: Tensor
    deviations: Tensor


def command(prompt: str) -> tuple[str, int]:
    """Takes a prompt apart.

    Args:
        prompt: such as "walk slowly for 120 frames".

    Returns:
        The command, a key of `SPEEDS`, and the frames.
    """
    words, frames = prompt.removesuffix(" frames").rsplit(" for ", 1)
    return words, int(frames)


def gait(speed: float, frames: int, phase: float) -> Tensor:
    """Makes a figure walk.

    Args:
        speed: metres a second.
        frames: how long.
        phase: where in its stride it begins, radians.

    Returns:
        (F, 263) features.
    """
    swing = min(0.75, 0.04 + 0.32 * math.sqrt(speed)) if speed > 0.05 else 0.0
    pace = 2 * math.pi * (0.55 + 0.3 * math.sqrt(speed)) / FRAMES_PER_SECOND
    phases_F = phase + pace * torch.arange(frames + 1)
    angles = {side: swing * torch.sin(phases_F + turn) for side, turn in ((0, 0.0), (1, math.pi))}
    bends = {side: 0.1 + swing * (1 + torch.cos(phases_F + turn)) / 1.5 for side, turn in ((0, 0.0), (1, math.pi))}
    height_F = 0.93 - 0.12 * swing**2 + 0.03 * swing * torch.sin(2 * phases_F)
    joints, turns = _pose(angles, bends, height_F, swing)
    travelled_F = speed / FRAMES_PER_SECOND * torch.arange(frames + 1)
    placed = joints + torch.stack([0 * travelled_F, 0 * travelled_F, travelled_F], 1)[:, None]
    velocities = placed[1:] - placed[:-1]
    rotations = torch.stack([torch.ones_like(turns), 0 * turns, 0 * turns, 0 * turns, turns.cos(), turns.sin()], -1)
    contacts = (velocities[:, [7, 10, 8, 11]].norm(dim=-1) < 0.02).float()
    root = torch.stack([0 * height_F, 0 * height_F, torch.full_like(height_F, speed / FRAMES_PER_SECOND), height_F], 1)
    parts = (root[:-1], joints[:-1, 1:].flatten(1), rotations[:-1, 1:].flatten(1), velocities.flatten(1), contacts)
    return torch.cat(parts, 1)


def _pose(angles: dict[int, Tensor], bends: dict[int, Tensor], height_F: Tensor, swing: float) -> tuple[Tensor, Tensor]:
    """Returns joints (F, 22, 3) around the root's place on the ground, and how far each is turned forwards (F, 22)."""
    joints, turns = torch.zeros(len(height_F), 22, 3), torch.zeros(len(height_F), 22)

    def put(joint: int, parent: int | None, across: float, up: Tensor | float, along: Tensor | float) -> None:
        start = torch.zeros(len(height_F), 3) if parent is None else joints[:, parent]
        moved = torch.stack([torch.zeros_like(height_F) + part for part in (across, up, along)], 1)
        joints[:, joint] = start + moved

    put(0, None, 0.0, height_F, 0.0)
    for side, sign in ((0, 1.0), (1, -1.0)):
        hip, knee, ankle, foot = 1 + side, 4 + side, 7 + side, 10 + side
        thigh, shin = angles[side], angles[side] - bends[side]
        put(hip, 0, 0.09 * sign, -0.05, 0.0)
        put(knee, hip, 0.0, -_THIGH * thigh.cos(), _THIGH * thigh.sin())
        put(ankle, knee, 0.0, -_SHIN * shin.cos(), _SHIN * shin.sin())
        put(foot, ankle, 0.0, -0.04, 0.13)
        turns[:, hip], turns[:, knee] = thigh, -bends[side]
    for joint, parent, up in ((3, 0, 0.12), (6, 3, 0.13), (9, 6, 0.06), (12, 9, 0.2), (15, 12, 0.12)):
        put(joint, parent, 0.0, up, 0.05 * swing)
    for side, sign in ((0, 1.0), (1, -1.0)):
        collar, shoulder, elbow, wrist = 13 + side, 16 + side, 18 + side, 20 + side
        upper = -0.9 * angles[side]
        lower = upper + 0.25 + 1.2 * swing
        put(collar, 9, 0.07 * sign, 0.11, 0.0)
        put(shoulder, collar, 0.11 * sign, 0.03, 0.0)
        put(elbow, shoulder, 0.03 * sign, -_ARM * upper.cos(), _ARM * upper.sin())
        put(wrist, elbow, 0.0, -_FOREARM * lower.cos(), _FOREARM * lower.sin())
        turns[:, shoulder], turns[:, elbow] = upper, lower - upper
    return joints, turns


def make_motions(count: int, seed: int) -> Motions:
    """Makes motions of all speeds and lengths.

    Args:
        count: N.
        seed: of speeds, lengths and phases.

    Returns:
        The motions.
    """
    drawn = random.Random(seed)
    lengths = [drawn.randint(60, FRAMES) for _ in range(count)]
    commands = [drawn.choice(list(SPEEDS)) for _ in range(count)]
    raw = [
        gait(max(0.0, SPEEDS[words] + drawn.gauss(0, 0.1)), length, drawn.uniform(0, 2 * math.pi))
        for words, length in zip(commands, lengths, strict=True)
    ]
    every = torch.cat(raw)
    means, deviations = every.mean(0), every.std(0).clamp(min=0.01)
    states = torch.zeros(count, FEATURES, 1, FRAMES)
    for place, (one, length) in enumerate(zip(raw, lengths, strict=True)):
        states[place, :, 0, :length] = ((one - means) / deviations).T
    return Motions(states, tuple(lengths), tuple(commands), means, deviations)


def speed_of(motion: Tensor, frames: int) -> float:
    """Measures how fast a figure travels.

    Args:
        motion: (263, 1, 196) features, not normalised.
        frames: how many of them count.

    Returns:
        Metres a second.
    """
    return float(motion[FORWARD, 0, :frames].mean()) * FRAMES_PER_SECOND


def draw_figures(rows: Sequence[tuple[str, Sequence[Tensor]]], prompts: Sequence[str], file: Path) -> None:
    """Draws motions from the side, a figure every half second, and how fast they travel.

    Args:
        rows: names, and for each prompt a motion (263, 1, 196), not normalised.
        prompts: what was asked for.
        file: a PNG file to write.
    """
    mpl.use("Agg")
    figure, axes = plt.subplots(
        len(prompts), len(rows), figsize=(7 * len(rows), 1.5 * len(prompts)), squeeze=False, sharex=True
    )
    for column, (name, motions) in enumerate(rows):
        for place, (prompt, motion) in enumerate(zip(prompts, motions, strict=True)):
            words, frames = command(prompt)
            _draw_figure(axes[place][column], motion[:, 0, :frames])
            told = f"{name}: {words!r} ({SPEEDS[words]:.1f} m/s), {speed_of(motion, frames):.2f} m/s"
            axes[place][column].set_title(told, fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("metres")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _draw_figure(axis: Any, motion: Tensor) -> None:
    """Draws the bones of every tenth frame where the root has travelled to."""
    travelled = motion[FORWARD].cumsum(0)
    for frame in range(0, motion.shape[1], FRAMES_PER_SECOND // 2):
        joints = torch.zeros(22, 3)
        joints[0, 1] = motion[3, frame]
        joints[1:] = motion[_JOINTS, frame].view(21, 3)
        shade = 0.25 + 0.75 * frame / motion.shape[1]
        for chain, colour in zip(_CHAINS, ("C0", "C1", "black", "C0", "C1"), strict=True):
            points = joints[list(chain)]
            axis.plot(points[:, 2] + travelled[frame], points[:, 1], color=colour, alpha=shade, linewidth=1)
    axis.set_aspect("equal")
    axis.set_ylim(-0.1, 1.9)
