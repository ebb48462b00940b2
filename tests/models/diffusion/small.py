"""Small denoisers, policies and trajectories for tests of diffusion policies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.models.diffusion.adapter import DiffusionAdapter
from memsafe_rl.models.diffusion.policy import Condition, DiffusionPolicy
from memsafe_rl.models.diffusion.schedulers import DDIMScheduler
from memsafe_rl.rollout.engines.denoising import DenoisingEngine
from memsafe_rl.types import Completion, Ragged, RolloutPlan, SamplingSettings, SequenceKey, Trajectory

SHAPE = (3, 5)
WIDTH = 4
PROMPTS = ([0.1, 0.2, 0.3, 2.0], [-1.0, 0.5, 0.0, 5.0])
"""The last number is how many of the five frames count, where a policy masks."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.3)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(self.down(torch.tanh(self.up(hidden))))


class Denoiser(nn.Module):
    """A network that mixes the elements of a state, and counts what it is asked."""

    def __init__(self, shape: tuple[int, ...] = SHAPE, width: int = 16, blocks: int = 2) -> None:
        super().__init__()
        size = int(torch.tensor(shape).prod())
        self.read, self.write = nn.Linear(size + WIDTH + 1, width), nn.Linear(width, size)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.calls: list[tuple[list[float], int]] = []

    def forward(self, x: Tensor, timesteps: Tensor, condition: Condition) -> Tensor:
        self.calls.append((sorted(set(timesteps.tolist())), len(x)))
        prompt = (condition.embedding_MLD * condition.mask_ML[..., None]).sum(1)
        time = timesteps.to(x.dtype)[:, None] / 1000
        hidden = self.read(torch.cat([x.flatten(1), prompt, time], 1))
        for block in self.blocks:
            hidden = block(hidden)
        return self.write(hidden).view_as(x)


def frames(embedding_LD: Tensor) -> Tensor:
    return torch.arange(SHAPE[-1]) < embedding_LD[0, -1]


def make_policy(steps: int = 6, dtype: torch.dtype = torch.float32, **options: Any) -> DiffusionPolicy:
    torch.manual_seed(0)
    options = {
        "scheduler": DDIMScheduler(prediction_type="sample", timestep_spacing="trailing"),
        "denoiser": Denoiser(),
        **options,
    }
    policy = DiffusionPolicy(sample_shape=SHAPE, condition_shape=(2, WIDTH), num_inference_steps=steps, **options)
    return policy.to(dtype)


def keys_of(prompts: int, group: int, rollout: int = 0) -> list[list[SequenceKey]]:
    return [[SequenceKey(7, rollout, prompt, sample) for sample in range(group)] for prompt in range(prompts)]


def draw(adapter: DiffusionAdapter, group: int = 3, rows_in_flight: int = 64, rollout: int = 0) -> list[Completion]:
    embedded = adapter.policy.embed(PROMPTS)
    settings = SamplingSettings(adapter.policy.num_inference_steps, ())
    plan = RolloutPlan(rows_in_flight=rows_in_flight)
    keys = keys_of(len(embedded), group, rollout)
    return DenoisingEngine(adapter).generate(embedded, keys, settings, under(plan))


def lay_down(adapter: DiffusionAdapter, drawn: list[Completion], group: int = 3) -> Trajectory:
    rows = len(drawn)
    advantages = torch.linspace(-1.5, 1.2, rows)
    return Trajectory(
        conditions=Ragged.from_rows(adapter.policy.embed(PROMPTS)),
        condition_of_row=tuple(row // group for row in range(rows)),
        actions=Ragged.from_rows([one.ids for one in drawn]),
        loss_mask=Ragged.from_rows([one.mask for one in drawn]),
        sampling_logprobs=Ragged.from_rows([one.logprobs for one in drawn]),
        advantages=advantages,
        group_of_row=tuple(row // group for row in range(rows)),
        finished=(True,) * rows,
        has_old=(False,) * rows,
        starts=torch.stack([one.start for one in drawn]),
    )


def gradient_of(adapter: DiffusionAdapter) -> Tensor:
    found = [weight.grad for weight in adapter.model.parameters() if weight.requires_grad]
    gradient = torch.cat([torch.zeros(1) if grad is None else grad.flatten() for grad in found])
    adapter.model.zero_grad(set_to_none=True)
    return gradient


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())
