"""A `DiffusionPolicy` as the loops use it, behind the `ScoringAdapter` protocol.

Axes: ``B`` rows, ``M`` entries, that is (row, column) pairs laid end to end; ``...`` stands for the axes of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
from peft import PeftModel
from torch import Tensor, nn

from memsafe_rl.accounting import autocast_bytes, host_memory
from memsafe_rl.errors import ConfigError
from memsafe_rl.models.blocks import recomputed
from memsafe_rl.models.diffusion.pair_bytes import blocks_of, measured_pair
from memsafe_rl.models.diffusion.policy import Condition, policy_of
from memsafe_rl.models.geometry import weight_bytes
from memsafe_rl.models.module_state import as_reference
from memsafe_rl.slices import MicroBatchGroup, step_micro_batches, step_work
from memsafe_rl.types import GaussianDistribution, ModelGeometry, Trajectory, UnitBytes, UpdateWork

_APART, _APART_NARROW = 1e-4, 5e-2
"""How far a denoiser's answers in two batches may lie apart, of their norm, in 32 bits and below."""


class DiffusionAdapter:
    """A `DiffusionPolicy`, plain or under PEFT, as the loops use it."""

    time_separable = True
    closed_form_kl = True
    packs_prompts = False
    reads_alike = False

    def __init__(self, model: nn.Module, *, reference_denoiser: nn.Module | None = None) -> None:
        self.model = model
        self.policy = policy_of(model)
        self.reference_denoiser = reference_denoiser
        self._denoiser: nn.Module = self.policy.denoiser
        self._geometry: ModelGeometry | None = None

    @property
    def device(self) -> torch.device:
        """Where the network computes."""
        return next(self._denoiser.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the denoiser's weights, and of the states that it is given."""
        return next(weight.dtype for weight in self._denoiser.parameters() if weight.is_floating_point())

    @property
    def geometry(self) -> ModelGeometry:
        """Sizes from which bytes are counted; what a pair holds is measured for the first who asks."""
        if self._geometry is None:
            self._geometry = self._measure()
        return self._geometry

    def _measure(self) -> ModelGeometry:
        unit, elements = self._measured_unit()
        copies = () if self.reference_denoiser is None else (self.reference_denoiser,)
        return ModelGeometry(
            layers=len(blocks_of(self._denoiser)),
            hidden_size=elements,
            intermediate_size=elements,
            heads=1,
            kv_heads=0,
            head_dim=0,
            vocab_size=1,
            max_positions=None,
            windows=(),
            parameter_bytes=weight_bytes(self.policy, *copies),
            trainable_bytes=sum(weight.nbytes for weight in self.policy.parameters() if weight.requires_grad),
            compute_bytes=autocast_bytes(self.device) or self.dtype.itemsize,
            cache_bytes=0,
            head_trainable=False,
            unit=unit,
        )

    def _measured_unit(self) -> tuple[UnitBytes, int]:
        policy = self.policy

        def one_pair() -> Tensor:
            condition = self.condition([torch.zeros(policy.condition_shape)])
            return self.step(torch.zeros(1, *policy.sample_shape, device=self.device), [0], condition)[0]

        weights, blocks = (*policy.parameters(), *policy.buffers()), blocks_of(self._denoiser)
        width = autocast_bytes(self.device) or self.dtype.itemsize
        return measured_pair(one_pair, weights, blocks, policy.state_dtype.itemsize, width)

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
        output = self.policy.predict(self._denoiser, states.to(self.dtype), timesteps_M, condition)
        if output.shape != states.shape:
            raise ConfigError(
                f"The denoiser gave {tuple(output.shape)} for states of shape {tuple(states.shape)}. It must give one "
                "number for each of theirs; a learned variance is not supported."
            )
        stds_M = torch.tensor([self.policy.stds[column] for column in columns], dtype=torch.float64)
        means = scheduler.mean(output.to(wide), columns, states.to(wide))
        if not isinstance(means, Tensor) or means.shape != states.shape:
            given = tuple(means.shape) if isinstance(means, Tensor) else f"a {type(means).__name__}"
            raise ConfigError(
                f"mean of {type(scheduler).__name__} gave {given} for states of shape {tuple(states.shape)}. It must "
                "give the mean of each of their numbers."
            )
        return means, stds_M.to(wide).to(self.device)

    def distribution(
        self, trajectory: Trajectory, rows: Sequence[int], columns: Sequence[int] | None = None, *, packed: bool = False
    ) -> GaussianDistribution:
        """Runs the denoiser once on the states before some steps of some rows."""
        if packed or trajectory.starts is None:
            raise ConfigError(
                f"packed={packed}, and the trajectory has {'no' if trajectory.starts is None else ''} starts: a "
                "denoiser scores chains of states, one by one. Leave packed out, and take rollouts of DenoisingEngine."
            )
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

    def work(self, trajectory: Trajectory, rows: Sequence[int], *, packable: bool = True) -> UpdateWork:  # noqa: ARG002
        """Gives the shape of rows, as a memory policy may know it."""
        return step_work(trajectory, rows, self.geometry)

    def micro_batches(
        self,
        trajectory: Trajectory,
        rows: Sequence[int],
        tokens: int,
        *,
        columns: Sequence[int] | None = None,
        packed: bool = False,  # noqa: ARG002
    ) -> list[MicroBatchGroup]:
        """Cuts rows × columns into rectangles; see `ScoringAdapter.micro_batches`."""
        return step_micro_batches(trajectory, rows, tokens, columns)

    def take_sources(self) -> None:
        """Does nothing: prompts have been embedded."""

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
            copied._denoiser = self.reference_denoiser
            yield copied
            return
        switched = next((part for part in (self.model, self.policy.denoiser) if isinstance(part, PeftModel)), None)
        if switched is None:
            raise ConfigError(
                "The diffusion policy has neither a PEFT adapter nor a frozen copy, so there is no reference. Pass a "
                "peft_config, or set beta=0."
            )
        with as_reference(switched):
            yield self

    def read_together(
        self,
        trajectory: Trajectory,  # noqa: ARG002
        rows: Sequence[int],  # noqa: ARG002
        forward: Callable[[], AbstractContextManager[object]],  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        """Does nothing: prompts have been embedded; see `ScoringAdapter.read_together`."""
        return nullcontext()

    def recompute(self, enabled: bool) -> AbstractContextManager[None]:
        """Recomputes each block's activations in the backward pass of what is run inside, in any mode."""
        return recomputed(blocks_of(self._denoiser)) if enabled else nullcontext()

    def check(self) -> None:
        """Compares states that are denoised together with the same ones alone."""
        check_denoiser(self)


def check_denoiser(adapter: DiffusionAdapter) -> None:
    """Denoises states together and alone, which must come to the same: chains are cut into waves and micro-batches.

    It also measures what a pair holds, so that nothing has to be measured where memory may run out.
    """
    policy, device = adapter.policy, adapter.device
    with torch.random.fork_rng(devices=[]), torch.no_grad(), host_memory():
        generator = torch.Generator().manual_seed(0)
        states = torch.randn((3, *policy.sample_shape), generator=generator)
        embedded = [torch.zeros(1, policy.condition_shape[1])] * len(states)
    with torch.random.fork_rng(devices=[], enabled=device.type == "cpu"), torch.no_grad():
        together, _ = adapter.step(states.to(device), [0] * len(states), adapter.condition(embedded))
        alone = [adapter.step(one[None].to(device), [0], adapter.condition(embedded[:1]))[0] for one in states]
        apart = float((torch.cat(alone) - together).norm() / together.norm().clamp(min=torch.finfo().tiny))
    narrow = autocast_bytes(device) or adapter.dtype.itemsize
    if apart > (_APART if narrow >= 4 else _APART_NARROW):
        raise ConfigError(
            f"The denoiser gives states that it is shown together other answers than alone: {apart:.1e} of their norm. "
            "It mixes the rows of a batch (batch norm), or draws random numbers in eval mode. Use layers that do not."
        )
    if any(weight.requires_grad for weight in adapter.model.parameters()):
        torch.clear_autocast_cache()  # it keeps weights that were cast above, without a graph
        with torch.random.fork_rng(devices=[], enabled=device.type == "cpu"), torch.enable_grad():
            means, _ = adapter.step(states[:1].to(device), [0], adapter.condition(embedded[:1]))
        if not means.requires_grad:
            raise ConfigError(
                "The denoiser's answer carries no gradient, so that none of its weights could be trained. Remove "
                "torch.no_grad, inference_mode or detach from its forward, or from the scheduler's mean."
            )
    _ = adapter.geometry


def _states(trajectory: Trajectory, rows: Sequence[int], columns: Sequence[int], steps: int) -> tuple[Tensor, Tensor]:
    """Cuts out the states before and after some steps of some rows, (M, ...) each, where the store lies."""
    flat, starts = trajectory.actions.flat, cast(Tensor, trajectory.starts)
    after = torch.tensor([row * steps + column for row in rows for column in columns], device=flat.device)
    before = flat.index_select(0, (after - 1).clamp(min=0))
    first = [place * len(columns) + where for place in range(len(rows)) for where, at in enumerate(columns) if at == 0]
    if first:
        before[torch.tensor(first, device=flat.device)] = starts[torch.tensor(list(rows), device=starts.device)]
    return before, flat.index_select(0, after)
