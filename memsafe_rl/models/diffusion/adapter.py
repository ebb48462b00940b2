"""A `DiffusionPolicy` as the loops use it, behind the `ScoringAdapter` protocol.

Axes: ``B`` rows, ``M`` entries, that is (row, column) pairs laid end to end; ``...`` stands for the axes of a state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from peft import PeftModel
from torch import Tensor, nn

from memsafe_rl.models import refusal
from memsafe_rl.models.diffusion.pair_bytes import StepNetwork
from memsafe_rl.models.diffusion.policy import Condition, policy_of
from memsafe_rl.models.module_state import as_reference
from memsafe_rl.types import GaussianDistribution, Trajectory

_APART, _APART_NARROW = 1e-4, 5e-2
"""How far a denoiser's answers in two batches may lie apart, of their norm, in 32 bits and below."""


class DiffusionAdapter(StepNetwork):
    """A `DiffusionPolicy`, plain or under PEFT, as the loops use it."""

    closed_form_kl = True

    def __init__(self, model: nn.Module, *, reference_denoiser: nn.Module | None = None) -> None:
        policy = policy_of(model)
        super().__init__(model, policy.denoiser, policy, policy.state_dtype, policy, reference_denoiser)
        self.reference_denoiser = reference_denoiser

    def first_step(self, states: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
        """Gives the means of the states after the first step."""
        return self.step(states, [0] * len(states), self.condition(embeddings))[0]

    def condition(self, embeddings: Sequence[Tensor], repeats: int = 1) -> Condition:
        """Lays embedded prompts out for the denoiser."""
        longest, width = self.policy.condition_shape
        embedding_BLD = torch.zeros(len(embeddings), longest, width)
        mask_BL = torch.zeros(len(embeddings), longest, dtype=torch.bool)
        for row, embedding in enumerate(embeddings):
            embedding_BLD[row, : len(embedding)] = embedding
            mask_BL[row, : len(embedding)] = True
        elements = self.policy.count_elements(embeddings)
        return Condition(
            embedding_BLD.to(self.device, self.dtype).repeat_interleave(repeats, 0),
            mask_BL.to(self.device).repeat_interleave(repeats, 0),
            None if elements is None else elements.to(self.device, self.dtype).repeat_interleave(repeats, 0),
        )

    def step(self, states: Tensor, columns: Sequence[int], condition: Condition) -> tuple[Tensor, Tensor]:
        """Gives the Gaussian of the next states; sampling and scoring both go through here."""
        wide = torch.promote_types(torch.float32, self.dtype)
        scheduler = self.policy.scheduler
        timesteps_M = scheduler.timesteps[torch.tensor(columns)].to(self.device)
        output = self.policy.predict(self.network, states.to(self.dtype), timesteps_M, condition)
        if output.shape != states.shape:
            raise refusal("denoiser/output", shape=tuple(output.shape), shape2=tuple(states.shape))
        stds_M = torch.tensor([self.policy.stds[column] for column in columns], dtype=torch.float64)
        means = scheduler.mean(output.to(wide), columns, states.to(wide))
        if not isinstance(means, Tensor) or means.shape != states.shape:
            given = tuple(means.shape) if isinstance(means, Tensor) else f"a {type(means).__name__}"
            raise refusal("scheduler/mean", kind=type(scheduler).__name__, given=given, shape=tuple(states.shape))
        return means, stds_M.to(wide).to(self.device)

    def distribution(
        self, trajectory: Trajectory, rows: Sequence[int], columns: Sequence[int] | None = None, *, packed: bool = False
    ) -> GaussianDistribution:
        """Runs the denoiser once on the states before some steps of some rows."""
        if packed or trajectory.starts is None:
            raise refusal("packed/states", packed=packed, no="no" if trajectory.starts is None else "")
        wanted = range(trajectory.actions.lengths[0]) if columns is None else columns
        before, taken, condition = self.entries(trajectory, rows, wanted)
        means, stds_M = self.step(before, list(wanted) * len(rows), condition)
        return GaussianDistribution(
            means=means,
            stds_M=stds_M,
            taken=taken.to(means.dtype),
            lengths=(len(wanted),) * len(rows),
            reduction=self.policy.reduce,
            elements=condition.elements,
        )

    def entries(
        self, trajectory: Trajectory, rows: Sequence[int], columns: Sequence[int]
    ) -> tuple[Tensor, Tensor, Condition]:
        """Cuts some steps of some rows out of a store."""
        embeddings = trajectory.conditions.rows()
        condition = self.condition([embeddings[trajectory.condition_of_row[row]] for row in rows], len(columns))
        before, taken = _states(trajectory, rows, columns, trajectory.actions.lengths[0])
        return before.to(self.device), taken.to(self.device), condition

    @contextmanager
    def reference(self) -> Iterator[DiffusionAdapter]:
        """Gives the reference: the frozen copy, else the policy with its PEFT adapter off."""
        if self.reference_denoiser is not None:
            copied = DiffusionAdapter(self.model)
            copied.network = self.reference_denoiser
            yield copied
            return
        switched = next((part for part in (self.model, self.policy.denoiser) if isinstance(part, PeftModel)), None)
        refusal.when(switched is None, "beta/denoiser")
        with as_reference(switched):
            yield self

    def check(self) -> None:
        """Denoises states together and alone, which must come to the same: chains are cut into micro-batches.

        It also measures what a pair holds, so that nothing has to be measured where memory may run out.
        """
        _, apart = self.together_and_alone()
        refusal.when(apart > (_APART if self.width >= 4 else _APART_NARROW), "denoiser/alone", apart=apart)
        if any(weight.requires_grad for weight in self.model.parameters()) and not self.carries_gradient():
            raise refusal("denoiser/gradient")
        _ = self.geometry


def _states(trajectory: Trajectory, rows: Sequence[int], columns: Sequence[int], steps: int) -> tuple[Tensor, Tensor]:
    """Cuts out the states before and after some steps of some rows, (M, ...) each, where the store lies."""
    flat, starts = trajectory.actions.flat, cast(Tensor, trajectory.starts)
    after = torch.tensor([row * steps + column for row in rows for column in columns], device=flat.device)
    before = flat.index_select(0, (after - 1).clamp(min=0))
    first = [place * len(columns) + where for place in range(len(rows)) for where, at in enumerate(columns) if at == 0]
    if first:
        before[torch.tensor(first, device=flat.device)] = starts[torch.tensor(list(rows), device=starts.device)]
    return before, flat.index_select(0, after)
