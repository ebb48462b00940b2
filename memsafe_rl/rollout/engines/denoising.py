"""Draws samples of a diffusion policy in waves that fit the plan; the company of a chain never changes it.

Axes: ``B`` rows of a wave, ``S`` denoising steps; ``...`` stands for the axes of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memsafe_rl.accounting import host_memory, worth_running
from memsafe_rl.memory.planning.policies import check_plan
from memsafe_rl.memory.runtime.recovery import Attempt, under
from memsafe_rl.models.diffusion.adapter import DiffusionAdapter
from memsafe_rl.models.diffusion.policy import Condition
from memsafe_rl.models.module_state import eval_mode
from memsafe_rl.ops.gaussian import gaussian_logprobs, normal_noise
from memsafe_rl.ops.sampling import hash_fields, uniform_noise
from memsafe_rl.rollout import failure, refusal, unusable
from memsafe_rl.rollout.engine import Engine, EngineCapabilities, EngineContext, Progress, register_engine
from memsafe_rl.rollout.external.sampling_support import refuse_begun
from memsafe_rl.rollout.native.running_batch import WholeEngine
from memsafe_rl.rollout.native.sequences import key_tensor
from memsafe_rl.types import Completion, GaussianDistribution, RolloutPlan, SamplingSettings, SequenceKey

_GROUP_SAMPLE = -1  # stands for a sample's index in the key of noise that a whole group begins with
_CHOICE_POSITION = -1  # position in a rollout's stream that chooses the steps to train on; no step of a chain has it


class _Row(NamedTuple):
    """A chain to be drawn."""

    prompt: Tensor
    key: SequenceKey


class DenoisingEngine(WholeEngine):
    """Draws chains with the trained denoiser; noise follows from key and step alone, so any wave draws the same."""

    name = "denoising"
    supports = EngineCapabilities()

    def __init__(self, adapter: DiffusionAdapter) -> None:
        self._adapter = adapter

    def check(self, settings: SamplingSettings) -> None:
        """Refuses settings that only tokens know."""
        for name, value in settings.chosen().items():
            raise refusal("denoising", name=name, value=value)

    def synchronise(self, version: int) -> None:
        """Does nothing: the weights are the trained ones."""

    def generate(
        self,
        prompts: Sequence[Tensor],
        keys: Sequence[Sequence[SequenceKey]],
        settings: SamplingSettings,  # noqa: ARG002
        attempt: Attempt[RolloutPlan],
        progress: Progress | None = None,
        *,
        limits: Sequence[int] | None = None,
        begun: Sequence[Sequence[Completion | None]] | None = None,
    ) -> list[Completion]:
        """Draws one chain for every key; all chains have the scheduler's number of steps."""
        refuse_begun(self.name, begun)
        refusal.when(limits is not None, "limits/chain", limits=limits and list(limits))
        unusable.when(len(prompts) != len(keys), "prompts/keys", prompts=len(prompts), keys=len(keys))
        rows = [_Row(prompt, key) for prompt, of_prompt in zip(prompts, keys, strict=True) for key in of_prompt]
        drawn: list[Completion] = []

        def draw_next(plan: RolloutPlan) -> list[Completion]:
            check_plan(plan, RolloutPlan)
            return self._draw(rows[len(drawn) : len(drawn) + plan.rows_in_flight])

        with torch.no_grad(), eval_mode(self._adapter.model):
            while len(drawn) < len(rows):
                drawn.extend(attempt(draw_next))
                if progress is not None:
                    progress(len(drawn), len(rows))
        return drawn

    def release(self) -> None:
        """Does nothing: every wave gives its bytes back."""

    def close(self) -> None:
        """Does nothing."""

    def _draw(self, rows: Sequence[_Row]) -> list[Completion]:
        adapter, policy = self._adapter, self._adapter.policy
        device, steps = adapter.device, policy.num_inference_steps
        condition = adapter.condition([row.prompt for row in rows])
        keys_B4 = key_tensor([row.key for row in rows]).to(device)
        state = self._start(rows).to(policy.state_dtype)
        with host_memory():
            starts = torch.empty(state.shape, dtype=state.dtype).copy_(state)
            states = torch.empty(len(rows), steps, *policy.sample_shape, dtype=state.dtype)
            logprobs_BS = torch.zeros(len(rows), steps)
        for column in worth_running(range(steps)):
            state, logprobs_B = self._step(state, column, condition, keys_B4)
            states[:, column] = state
            logprobs_BS[:, column] = logprobs_B
        self._refuse_broken(states, rows)
        with host_memory():
            masks = {row.key[:2]: self._mask(row.key) for row in rows}
            noted = logprobs_BS.unbind()
        return [
            Completion(ids, logprobs_S, logprobs_S, finished=True, start=start, mask=masks[row.key[:2]])
            for row, ids, logprobs_S, start in zip(rows, states, noted, starts, strict=True)
        ]

    def _start(self, rows: Sequence[_Row]) -> Tensor:
        """Draws the noise that chains begin with, (B, ...) float32 on the device."""
        shared = self._adapter.policy.shared_noise
        named = [row.key._replace(sample=_GROUP_SAMPLE) if shared else row.key for row in rows]
        keys_B4 = key_tensor(named).to(self._adapter.device)
        return normal_noise(keys_B4, torch.zeros_like(keys_B4[:, 0]), self._adapter.policy.sample_shape)

    def _step(self, state: Tensor, column: int, condition: Condition, keys_B4: Tensor) -> tuple[Tensor, Tensor]:
        """Draws the next states, rounded as they are stored, and gives their log-probs (B,)."""
        policy = self._adapter.policy
        means, stds_B = self._adapter.step(state, [column] * len(state), condition)
        if policy.stds[column] > 0:
            noise = normal_noise(keys_B4, torch.full_like(keys_B4[:, 0], column + 1), policy.sample_shape)
            drawn = noise.to(means.dtype).mul_(policy.stds[column]).add_(means).to(policy.state_dtype)
        else:
            drawn = means.to(policy.state_dtype)
        distribution = GaussianDistribution(
            means=means,
            stds_M=stds_B,
            taken=drawn.to(means.dtype),
            lengths=(1,) * len(state),
            reduction=policy.reduce,
            elements=condition.elements,
        )
        return drawn, gaussian_logprobs(distribution)

    def _mask(self, key: SequenceKey) -> Tensor:
        """Chooses the steps of a rollout that are trained on, (S,) uint8."""
        policy = self._adapter.policy
        candidates = policy.trained_steps.candidates(policy.stds)
        wanted = policy.trained_steps.count(len(candidates))
        if policy.trained_steps.random:
            words_1 = hash_fields(key_tensor([key])[:, :2], torch.tensor([_CHOICE_POSITION]))
            order = uniform_noise(words_1, len(candidates))[0].argsort().tolist()
        else:
            order = list(range(len(candidates)))
        mask_S = torch.zeros(policy.num_inference_steps, dtype=torch.uint8)
        mask_S[[candidates[place] for place in order[:wanted]]] = 1
        return mask_S

    def _refuse_broken(self, states: Tensor, rows: Sequence[_Row]) -> None:
        elements = self._adapter.policy.count_elements([row.prompt for row in rows])
        with host_memory():
            broken = ~states[:, -1].isfinite()
            broken = broken if elements is None else broken & (elements != 0)
            places = broken.flatten(1).any(1).nonzero()[:, 0].tolist()
        if places:
            key = rows[places[0]].key
            raise failure("broken/chain", prompt=key.prompt, sample=key.sample, broken=len(places), rows=len(rows))


def draw_samples(model: nn.Module, prompts: Sequence[Any], *, seed: int = 0, rows_in_flight: int = 64) -> list[Any]:
    """Draws one sample a prompt, from the same noise whatever the weights and however many are drawn together.

    Args:
        model: a `DiffusionPolicy`, or a `PeftModel` around one.
        prompts: what its ``embed`` takes.
        seed: of the noise.
        rows_in_flight: samples drawn together.

    Returns:
        What the policy's ``decode`` gives of each.
    """
    adapter = DiffusionAdapter(model)
    policy = adapter.policy
    keys = [[SequenceKey(seed, 0, place, 0)] for place in range(len(prompts))]
    settings, plan = SamplingSettings(policy.num_inference_steps, ()), RolloutPlan(rows_in_flight=rows_in_flight)
    drawn = DenoisingEngine(adapter).generate(policy.embed(prompts), keys, settings, under(plan))
    return [policy.decode(one.ids[-1]) for one in drawn]


def denoising_engine(context: EngineContext) -> DenoisingEngine:
    """Makes the engine of a denoiser."""
    adapter: Any = context.adapter
    draws_tokens, model = not adapter.time_separable, type(adapter.model).__name__
    refusal.when(draws_tokens, "rollout_engine", name=context.name, model=model)
    return DenoisingEngine(adapter)


register_engine(Engine(DenoisingEngine.name, denoising_engine))
