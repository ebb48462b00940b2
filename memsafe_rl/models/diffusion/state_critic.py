"""Critics of denoising chains: networks that map a state, its timestep and its condition to one number.

A chain is a Markov decision process whose states are (x_t, t, condition) and whose actions are the next states (Ren et
al. 2024, DPPO, arXiv:2409.00588). A critic of it is a network of its own beside the denoiser.

Axes: ``B`` rows, ``M`` entries, that is (row, column) pairs laid end to end, ``D`` hidden width, ``L`` vectors of a
condition; ``...`` stands for the axes of a state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from memsafe_rl.accounting import charge, hold, weights_of
from memsafe_rl.models import refusal
from memsafe_rl.models.critic import Critic, ValueLayer
from memsafe_rl.models.diffusion.adapter import DiffusionAdapter, StepNetwork
from memsafe_rl.models.diffusion.policy import Condition, placed
from memsafe_rl.types import Component, StateFeatures, Trajectory

_WIDTH = 128
"""Hidden width of the built-in critic."""
_READ_WHOLE = 1024
"""Elements up to which the built-in critic reads a state as it is; of larger ones, means and deviations."""
_WAVES = 8
"""Frequencies by which a timestep is told."""
_APART = 1e-3
"""How far values of states that are shown together and alone may lie apart, of their norm."""


class StateEncoder(nn.Module):
    """The built-in critic but for its last layer; it reads large states' mean and deviation, and conditions' mean."""

    def __init__(
        self,
        shape: Sequence[int],
        condition_width: int,
        largest_timestep: float,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        placed: dict[str, Any] = {"dtype": dtype, "device": device}
        size = math.prod(shape)
        self._pools = size > _READ_WHOLE
        self._largest = largest_timestep
        self.state = nn.Linear(2 * shape[0] if self._pools else size, _WIDTH, **placed)
        self.told = nn.Linear(2 * _WAVES + condition_width, _WIDTH, **placed)
        # One norm each: a state has hundreds of numbers, and would drown what is told.
        self.state_norm, self.told_norm = nn.LayerNorm(_WIDTH, **placed), nn.LayerNorm(_WIDTH, **placed)
        self.inner = nn.Linear(_WIDTH, _WIDTH, **placed)

    def forward(self, x: Tensor, timesteps: Tensor, condition: Condition) -> Tensor:
        """Returns hidden states (M, D) of states (M, ...), timesteps (M,) and their condition."""
        # What does not count is 0, whatever stands there.
        state = x if condition.elements is None else torch.where(condition.elements != 0, x, 0)
        features = _pooled(state, condition.elements) if self._pools else state.flatten(1)
        mask_ML1 = condition.mask_ML[..., None]
        prompt = (condition.embedding_MLD * mask_ML1).sum(1) / mask_ML1.sum(1).clamp(min=1)
        times = (timesteps.to(x.dtype) / self._largest)[:, None]
        waves = times * math.pi * 2.0 ** torch.arange(_WAVES, device=x.device, dtype=x.dtype)
        told = torch.cat([waves.sin(), waves.cos(), prompt], 1)
        hidden = self.state_norm(self.state(features)) + self.told_norm(self.told(told))
        mixed: Tensor = hidden + nn.functional.gelu(self.inner(hidden))
        return mixed


class _AsItIs(nn.Module):
    """The head of a critic whose network gives values already."""

    def forward(self, hidden_MD: Tensor) -> Tensor:
        """Returns values (M,), in float32 at least, of (M, 1)."""
        return hidden_MD[:, 0].to(torch.promote_types(hidden_MD.dtype, torch.float32))


class StateNetwork(StepNetwork):
    """A critic's network behind the `ScoringAdapter` protocol: it scores states, and draws none."""

    def __init__(self, adapter: DiffusionAdapter, model: nn.Module) -> None:
        dtype = next(weight.dtype for weight in model.parameters() if weight.is_floating_point())
        super().__init__(model, model, adapter.policy, dtype, model)
        self.adapter = adapter

    def first_step(self, states: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
        """Returns hidden states, or values, of states before the first step."""
        return self.features(states, [0] * len(states), self.adapter.condition(embeddings))

    def check(self) -> None:
        """Values states together and alone, which must come to the same: chains are cut into rectangles."""
        together, apart = self.together_and_alone()
        values = together[:, 0].tolist()
        if not isinstance(self.model, StateEncoder) and not all(map(math.isfinite, values)):
            raise refusal("critic/finite", values=values)
        refusal.when(apart > (_APART if self.width >= 4 else 50 * _APART), "critic/alone", apart=apart)
        refusal.when(not self.carries_gradient(), "critic/gradient")
        _ = self.geometry

    def features(self, states: Tensor, columns: Sequence[int], condition: Condition) -> Tensor:
        """Runs the network on states."""
        timesteps_M = self.policy.scheduler.timesteps[torch.tensor(columns)].to(self.device)
        elements = None if condition.elements is None else condition.elements.to(self.dtype)
        condition = replace(condition, embedding_MLD=condition.embedding_MLD.to(self.dtype), elements=elements)
        found: Any = self.model(states.to(self.dtype), timesteps_M, condition)
        if isinstance(found, Tensor) and isinstance(self.model, StateEncoder):
            return found
        if not isinstance(found, Tensor) or found.shape != states.shape[:1]:
            given = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise refusal("critic/output", given=given, count=len(states))
        refusal.when(not found.is_floating_point(), "critic/dtype", found=found)
        return found[:, None]

    def distribution(
        self,
        trajectory: Trajectory,
        rows: Sequence[int],
        columns: Sequence[int] | None = None,
        *,
        packed: bool = False,  # noqa: ARG002
    ) -> StateFeatures:
        """Runs the network once on the states before some steps of some rows."""
        wanted = range(trajectory.actions.lengths[0]) if columns is None else columns
        before, _, condition = self.adapter.entries(trajectory, rows, wanted)
        return StateFeatures(self.features(before, list(wanted) * len(rows), condition), (len(wanted),) * len(rows))

    def reference(self) -> AbstractContextManager[StateNetwork]:
        """Returns the network itself: a critic has no reference."""
        return nullcontext(self)


class StateCritic(Critic):
    """A network of its own that foresees, in every state of a denoising chain, what its sample will be paid."""

    def __init__(self, adapter: DiffusionAdapter, network: nn.Module | None) -> None:
        """Puts a critic beside a policy."""
        policy = adapter.policy
        with charge(Component.WEIGHTS):
            if network is None:
                wide = torch.promote_types(adapter.dtype, torch.float32)
                largest = max(float(policy.scheduler.timesteps.abs().max()), torch.finfo(torch.float32).tiny)
                shape, (_, width) = policy.sample_shape, policy.condition_shape
                trunk: nn.Module = StateEncoder(shape, width, largest, wide, adapter.device)
                head: nn.Module = ValueLayer(_WIDTH, wide, adapter.device)
            else:
                _refuse_useless(network, adapter)
                trunk, head = placed(network, adapter.device), _AsItIs()
        hold(Component.WEIGHTS, weights_of(trunk, head))
        # The other steps are the environment's part of a chain.
        columns = policy.trained_steps.learnable(policy.stds)
        super().__init__(head, StateNetwork(adapter, trunk.eval()), is_own=True, judged_columns=columns)


def _refuse_useless(network: Any, adapter: DiffusionAdapter) -> None:
    if not any(weight.requires_grad for weight in network.parameters()):
        raise refusal("critic/trainable", kind=type(network).__name__)
    if any(tensor.is_meta for tensor in (*network.parameters(), *network.buffers())):
        raise refusal("critic/meta", kind=type(network).__name__)
    if {id(weight) for weight in network.parameters()} & {id(weight) for weight in adapter.model.parameters()}:
        raise refusal("critic/shared")


def _pooled(x: Tensor, elements: Tensor | None) -> Tensor:
    """Returns mean and deviation over all axes but the first of a state, of the elements that count, (M, 2 C)."""
    if x.dim() == 2:
        x, elements = x[..., None], None if elements is None else elements[..., None]
    axes = tuple(range(2, x.dim()))
    if elements is None:
        count: Tensor | float = float(math.prod(x.shape[2:]))
        counted = torch.ones((), dtype=x.dtype, device=x.device)
    else:
        counted = (elements != 0).to(x.dtype)
        count = counted.expand_as(x).sum(axes).clamp(min=1)
    mean_MC = x.sum(axes) / count
    spread = (x - mean_MC.view(*mean_MC.shape, *(1,) * len(axes))) * counted
    variance_MC = spread.square().sum(axes) / count
    return torch.cat([mean_MC, (variance_MC + torch.finfo(torch.float16).tiny).sqrt()], 1)
