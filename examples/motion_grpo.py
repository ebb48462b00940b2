"""Teaches a motion diffusion model what its prompts mean, with GRPO on a CPU: `python -m examples.motion_grpo`.

With `--ppo` it is PPO's turn: one motion a prompt instead of four, and a critic of states for each denoising step.

States have the size of text-to-motion models on HumanML3D: 263 features × 1 × 196 frames, 50 denoising steps. A small
denoiser first learns to make figures walk, from motions nearly all of whose commands are wrong: it walks well, at
nearly any speed but the one it was asked for. GRPO then sees only how far each motion's speed is from the command, and
trains a LoRA adapter on the layers that read timestep and command, so that the rest goes on walking as it learned to.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from peft import LoraConfig
from rich.progress import track
from torch import Tensor, nn

from examples.motions import FEATURES, FRAMES, SPEEDS, Motions, command, draw_figures, make_motions, speed_of
from memsafe_rl import (
    Condition,
    DDIMScheduler,
    DiffusionPolicy,
    GRPOConfig,
    GRPOTrainer,
    PPOConfig,
    PPOTrainer,
    TrainedSteps,
    draw_samples,
)

STEPS = 50
"""Denoising steps of a chain."""
_DECISIVE = 3
"""Steps that are learnt from: the mean over all frames shows through the noise after the first three, and what a later
step draws changes the speed no more, so that its gradient would be noise."""
_CONDITION = len(SPEEDS) + 1
_TRIES = 4
"""Motions drawn for each held-out prompt."""
_WRONG = 0.9
"""Share of commands in pretraining that are drawn at random."""
_LENGTHS = (80, 120, 160, 196)
_HELD_OUT_LENGTHS = (70, 100, 140, 180)


@dataclass(frozen=True)
class Size:
    """How large everything is.

    Args:
        width: of the denoiser.
        pretraining: steps of supervision.
        updates: optimizer steps.
        prompts: prompts a rollout.
    """

    width: int = 48
    pretraining: int = 300
    updates: int = 90
    prompts: int = 5


class Block(nn.Module):
    """A convolution over frames, and one over the mean of all of them, beside a residual.

    Args:
        width: channels.
        dilation: frames between two taps.
    """

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.near = nn.Conv1d(width, width, 5, padding=2 * dilation, dilation=dilation)
        self.far = nn.Linear(width, width)
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, hidden: Tensor, told: Tensor, elements: Tensor) -> Tensor:
        """Mixes frames.

        Args:
            hidden: (M, width, 196).
            told: (M, width), of timestep and condition.
            elements: (M, 1, 196), 1 where a frame counts.

        Returns:
            (M, width, 196).
        """
        inner = self.norm(hidden + told[..., None]) * elements
        mean = inner.sum(2) / elements.sum(2)
        mixed: Tensor = self.near(inner) + self.far(mean)[..., None]
        return hidden + cast(Tensor, self.out(nn.functional.gelu(mixed)))


class MotionDenoiser(nn.Module):
    """Tells clean motions from noisy ones.

    Args:
        motions: those it will learn from; the directions in which they differ begin as its first and last layer.
        width: channels inside.
        directions: how many directions.
    """

    def __init__(self, motions: Motions, width: int, directions: int = 24) -> None:
        super().__init__()
        frames = torch.cat([state[:, 0, :end].T for state, end in zip(motions.states, motions.frames, strict=True)])
        basis = torch.linalg.svd(frames[:: max(1, len(frames) // 2000)], full_matrices=False)[2][:directions]
        self.read, self.write = nn.Linear(FEATURES, directions), nn.Linear(directions, FEATURES)
        with torch.no_grad():
            self.read.weight.copy_(basis)
            self.write.weight.copy_(basis.T)
        self.first = nn.Conv1d(directions, width, 1)
        self.told = nn.Sequential(nn.Linear(16 + _CONDITION, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.blocks = nn.ModuleList(Block(width, dilation) for dilation in (1, 4, 16, 1))
        self.last = nn.Conv1d(width, directions, 1)

    def forward(self, x: Tensor, timesteps: Tensor, condition: Condition) -> Tensor:
        """Guesses clean motions.

        Args:
            x: (M, 263, 1, 196).
            timesteps: (M,), 0 to 999.
            condition: one vector a prompt: which command, and how long.

        Returns:
            (M, 263, 1, 196).
        """
        if condition.elements is None:
            raise ValueError("a motion has a length: pass elements to the policy")
        elements = condition.elements[:, 0]
        waves = timesteps[:, None] / 1000 * math.pi * 2.0 ** torch.arange(8, device=x.device)
        told = self.told(torch.cat([waves.sin(), waves.cos(), condition.embedding_MLD[:, 0]], 1))
        hidden = self.first(self.read((x[:, :, 0] * elements).transpose(1, 2)).transpose(1, 2))
        for block in self.blocks:
            hidden = block(hidden, told, elements)
        return cast(Tensor, self.write(self.last(hidden).transpose(1, 2)).transpose(1, 2)[:, :, None])


def embed(prompt: str) -> Tensor:
    """Turns a prompt into numbers; stands for a frozen text encoder.

    Args:
        prompt: such as "walk slowly for 120 frames".

    Returns:
        (6,), which of the five commands, and the share of 196 frames.
    """
    words, frames = command(prompt)
    return torch.tensor([float(words == other) for other in SPEEDS] + [frames / FRAMES])


def counted_frames(embedding: Tensor) -> Tensor:
    """Marks the frames of a motion.

    Args:
        embedding: (1, 6), from `embed`.

    Returns:
        (1, 1, 196), 1 where a frame counts.
    """
    return (torch.arange(FRAMES) < round(float(embedding[0, -1]) * FRAMES)).float()[None, None]


def make_policy(motions: Motions, width: int, seed: int) -> DiffusionPolicy:
    """Makes an untrained policy.

    Args:
        motions: say how features are normalised.
        width: of the denoiser.
        seed: of its weights.

    Returns:
        The policy.
    """
    torch.manual_seed(seed)
    means, deviations = (values[:, None, None] for values in (motions.means, motions.deviations))
    return DiffusionPolicy(
        MotionDenoiser(motions, width),
        DDIMScheduler(beta_schedule="squaredcos_cap_v2", prediction_type="sample", timestep_spacing="trailing"),
        (FEATURES, 1, FRAMES),
        condition_shape=(1, _CONDITION),
        num_inference_steps=STEPS,
        embed=embed,
        elements=counted_frames,
        decode=lambda sample: sample * deviations + means,
        trained_steps=TrainedSteps(window=(0, _DECISIVE)),
    )


def pretrain(policy: DiffusionPolicy, motions: Motions, steps: int, seed: int, batch: int = 16) -> None:
    """Teaches the denoiser to make figures walk, from prompts that tell lengths rightly and commands mostly wrongly.

    Args:
        policy: is changed in place.
        motions: to learn from.
        steps: of supervision.
        seed: of batches, timesteps, noise and wrong commands.
        batch: motions a step.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(policy.denoiser.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    scheduler = policy.scheduler
    alphas = getattr(scheduler, "alphas_cumprod").float()  # noqa: B009
    right = torch.tensor([list(SPEEDS).index(words) for words in motions.commands])
    for _ in track(range(steps), "learning to walk"):
        chosen = torch.randint(len(motions.frames), (batch,), generator=generator)
        clean, lengths = motions.states[chosen], torch.tensor(motions.frames)[chosen]
        elements = (torch.arange(FRAMES) < lengths[:, None]).float()[:, None, None]
        timesteps = torch.randint(1000, (batch,), generator=generator)
        alpha = alphas[timesteps].view(-1, 1, 1, 1)
        noisy = alpha.sqrt() * clean + (1 - alpha).sqrt() * torch.randn(clean.shape, generator=generator)
        told_wrongly = torch.rand(batch, generator=generator) < _WRONG
        others = torch.randint(len(SPEEDS), (batch,), generator=generator)
        commands = nn.functional.one_hot(torch.where(told_wrongly, others, right[chosen]), len(SPEEDS))
        told = torch.cat([commands, lengths[:, None] / FRAMES], 1)[:, None]
        guess = policy(noisy, timesteps, Condition(told, torch.ones(batch, 1, dtype=torch.bool), elements))
        loss = ((guess - clean) * elements).square().sum() / elements.sum() / FEATURES
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"loss of the last step: {float(loss.detach()):.3f}")


def near_command(prompts: Sequence[str], completions: Sequence[Tensor], **_: Any) -> list[float]:
    """Pays for the speed that was asked for: minus the difference, in metres a second.

    Args:
        prompts: the commands.
        completions: motions (263, 1, 196).

    Returns:
        One reward a motion.
    """
    rewards = []
    for prompt, motion in zip(prompts, completions, strict=True):
        words, frames = command(prompt)
        rewards.append(-abs(speed_of(motion, frames) - SPEEDS[words]))
    return rewards


def prompts_of(lengths: Sequence[int]) -> list[str]:
    """Asks for every command at every length.

    Args:
        lengths: frames.

    Returns:
        The prompts.
    """
    return [f"{words} for {frames} frames" for frames in lengths for words in SPEEDS]


def settings(output_dir: Path, size: Size, seed: int, *, ppo: bool = False) -> GRPOConfig | PPOConfig:
    """Returns the settings of the run: four motions a prompt, three passes over each rollout unless the KL ends them.

    Args:
        output_dir: folder of the run.
        size: how large everything is.
        seed: of the run.
        ppo: whether a critic takes the place of groups: as many motions a rollout, one a prompt.

    Returns:
        The configuration.
    """
    both: dict[str, Any] = {
        "output_dir": str(output_dir),
        "seed": seed,
        "max_steps": size.updates,
        "per_device_train_batch_size": 4 * size.prompts,
        "num_iterations": 3,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "epsilon": 2e-5,
        "kl_stop": {"target": 5e-6, "unit": "token", "estimator": "k1"},
        "eval_strategy": "steps",
        "eval_steps": max(1, size.updates // 3),
        "eval_on_start": True,
        "num_generations_eval": 1,
        "save_steps": size.updates,
        "overwrite_output_dir": True,
        "logging_steps": 3,
        "use_cpu": True,
        "bf16": False,
    }
    if ppo:
        # Unclipped: a norm over policy and critic together would shrink the policy's steps by the critic's gradient.
        return PPOConfig(**both, max_grad_norm=0.0, vf_coef=1.0, vf_clip=None, kl_coef=0.0)
    return GRPOConfig(**both, num_generations=4)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Averages.

    Args:
        values: numbers, at least two.

    Returns:
        Their mean, and its standard error.
    """
    numbers = torch.tensor(values)
    return float(numbers.mean()), float(numbers.std()) / math.sqrt(len(values))


def run(output_dir: Path, size: Size, seed: int, *, ppo: bool = False) -> dict[str, float]:
    """Trains, and measures before and after on motions of lengths that were never asked for in training.

    Args:
        output_dir: folder of the run.
        size: how large everything is.
        seed: of everything random.
        ppo: whether PPO trains it.

    Returns:
        Held-out rewards before and after, in metres a second, their gain and its standard error.
    """
    torch.set_num_threads(1)  # results repeat anywhere
    motions = make_motions(256, seed)
    policy = make_policy(motions, size.width, seed)
    pretrain(policy, motions, size.pretraining, seed)
    train, held_out = prompts_of(_LENGTHS), prompts_of(_HELD_OUT_LENGTHS)
    kind: Any = PPOTrainer if ppo else GRPOTrainer
    trainer = kind(
        policy,
        near_command,
        args=settings(output_dir, size, seed, ppo=ppo),
        train_dataset=Dataset.from_dict({"prompt": train}),
        eval_dataset=Dataset.from_dict({"prompt": held_out}),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=r".*told\.(0|2)"),
    )
    asked = held_out * _TRIES
    before = draw_samples(trainer.model, asked, seed=seed)
    trainer.train()
    after = draw_samples(trainer.model, asked, seed=seed)
    shown = prompts_of(_HELD_OUT_LENGTHS[1:2])
    places = [held_out.index(prompt) for prompt in shown]
    rows = [(name, [drawn[place] for place in places]) for name, drawn in (("before", before), ("after", after))]
    draw_figures(rows, shown, output_dir / "motions.png")
    paid = [near_command(asked, drawn) for drawn in (before, after)]
    gain, error = mean_and_error([later - earlier for earlier, later in zip(*paid, strict=True)])
    return {
        "before": mean_and_error(paid[0])[0],
        "after": mean_and_error(paid[1])[0],
        "gain": gain,
        "standard_error": error,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Runs the example from a command line.

    Args:
        arguments: command line, None for the process's own.

    Returns:
        Held-out rewards.
    """
    usual = Size()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default: 0)")
    parser.add_argument("--updates", type=int, default=usual.updates, help="optimizer steps of GRPO or PPO")
    parser.add_argument("--pretraining", type=int, default=usual.pretraining, help="steps of supervision before them")
    parser.add_argument("--ppo", action="store_true", help="PPO with a critic of states in place of GRPO")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/motion"), help="where files go")
    given = parser.parse_args(arguments)
    started = time.perf_counter()
    size = Size(pretraining=given.pretraining, updates=given.updates)
    rewards = run(given.output_dir, size, given.seed, ppo=given.ppo)
    print(
        f"speed beside the command, held out: {-rewards['before']:.2f} m/s before, {-rewards['after']:.2f} after; "
        f"gain {rewards['gain']:.2f}, standard error {rewards['standard_error']:.2f}"
    )
    print(f"{time.perf_counter() - started:.0f} s; motions.png and metrics.jsonl in {given.output_dir}")
    return rewards


if __name__ == "__main__":
    main()
