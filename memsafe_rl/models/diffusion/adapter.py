"""Runs a `DiffusionPolicy` over (row, column) pairs, gives the Gaussian of each, and measures the memory of a pair.

Axes: ``B`` rows, ``M`` entries, that is (row, column) pairs laid end to end; ``...`` stands for the axes of a state.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memsafe_rl.accounting import autocast_bytes, host_memory
from memsafe_rl.micro_batches import MicroBatch, MicroBatchGroup, cut_columns
from memsafe_rl.models import refusal
from memsafe_rl.models.adapter import ScoringAdapter
from memsafe_rl.models.blocks import blocks_of, recomputed
from memsafe_rl.models.diffusion.policy import Condition, DiffusionPolicy, policy_of
from memsafe_rl.models.geometry import weight_bytes
from memsafe_rl.models.module_state import as_reference
from memsafe_rl.types import GaussianDistribution, ModelGeometry, Trajectory, UnitBytes, UpdateWork


class StepNetwork(ScoringAdapter, ABC):
    """A network that reads states of denoising chains: a denoiser, or a critic."""

    time_separable = True

    def __init__(
        self,
        model: nn.Module,
        network: nn.Module,
        policy: DiffusionPolicy,
        state_dtype: torch.dtype,
        *weights: nn.Module | None,
    ) -> None:
        """Takes the module that reads states, and what holds weights: first what may be trained, then a frozen copy."""
        self.model = model
        self.network = network
        self.policy = policy
        self._weights = [held for held in weights if held is not None]
        self._state_bytes = state_dtype.itemsize * math.prod(policy.sample_shape)

    @abstractmethod
    def first_step(self, states: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
        """Runs the network on states before the first step, each after an embedded prompt."""

    @property
    def device(self) -> torch.device:
        """Where the network computes."""
        return next(self.network.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the network's weights, and of the states that it is given."""
        return next(weight.dtype for weight in self.network.parameters() if weight.is_floating_point())

    @property
    def width(self) -> int:
        """Bytes of an activation's element."""
        return autocast_bytes(self.device) or self.dtype.itemsize

    @cached_property
    def geometry(self) -> ModelGeometry:
        """Sizes from which bytes are counted; what a pair holds is measured for the first who asks."""
        own, blocks = self._weights[0], step_blocks(self.network)
        weights = {weight.untyped_storage()._cdata for weight in (*own.parameters(), *own.buffers())}
        kept, inputs = _kept_bytes(self.one_pair, weights, blocks, recompute=False)
        outside, again = _kept_bytes(self.one_pair, weights, blocks, recompute=True)
        widest = max(inputs, default=0)
        elements = max(1, widest // self.width)  # of the widest block's input
        return ModelGeometry(
            layers=len(blocks),
            hidden_size=elements,
            intermediate_size=elements,
            heads=1,
            kv_heads=0,
            head_dim=0,
            vocab_size=1,
            max_positions=None,
            windows=(),
            parameter_bytes=weight_bytes(*self._weights),
            trainable_bytes=sum(weight.nbytes for weight in own.parameters() if weight.requires_grad),
            compute_bytes=self.width,
            cache_bytes=0,
            head_trainable=False,
            unit=UnitBytes(
                kept=kept,
                recomputed=min(kept, outside + sum(again)),
                forward=max(2 * widest, kept // max(1, len(inputs))),
                state=self._state_bytes,
            ),
        )

    def one_pair(self) -> Tensor:
        """Runs the network on one state of zeros."""
        state = torch.zeros(1, *self.policy.sample_shape, device=self.device)
        return self.first_step(state, [torch.zeros(self.policy.condition_shape)])

    def carries_gradient(self) -> bool:
        """Whether the network's answer has a graph."""
        torch.clear_autocast_cache()  # it keeps weights that were cast before, perhaps without a graph
        with torch.random.fork_rng(devices=[], enabled=self.device.type == "cpu"), torch.enable_grad():
            return self.one_pair().requires_grad

    @torch.no_grad()
    def together_and_alone(self) -> tuple[Tensor, float]:
        """Returns the answers to three noisy states, and how far from them answers to each alone lie, relatively."""
        with torch.random.fork_rng(devices=[]), host_memory():
            noise = torch.randn((3, *self.policy.sample_shape), generator=torch.Generator().manual_seed(0))
            embedded = [torch.zeros(1, self.policy.condition_shape[1])] * len(noise)
        with torch.random.fork_rng(devices=[], enabled=self.device.type == "cpu"):
            together = self.first_step(noise.to(self.device), embedded)
            alone = torch.cat([self.first_step(one[None].to(self.device), embedded[:1]) for one in noise])
        return together, float((alone - together).norm() / together.norm().clamp(min=torch.finfo().tiny))

    def work(self, trajectory: Trajectory, rows: Sequence[int], *, packable: bool = True) -> UpdateWork:  # noqa: ARG002
        """Returns the shape of rows, as a memory policy may know it."""
        with host_memory():
            columns = (len(trajectory.counted_columns),) * len(rows)
        return UpdateWork(columns, columns, self.geometry)

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
        wanted = trajectory.counted_columns if columns is None else columns
        batches = [
            MicroBatch(tuple(places), tuple(chosen), packed=False, tokens=len(places) * len(chosen))
            for places, chosen in cut_columns(len(rows), wanted, tokens)
        ]
        return [MicroBatchGroup(batches, None)] if batches else []

    def recompute(self, enabled: bool) -> AbstractContextManager[None]:
        """Recomputes each block's activations in the backward pass of what is run inside, in any mode."""
        return recomputed(step_blocks(self.network)) if enabled else nullcontext()


def step_blocks(network: nn.Module) -> tuple[nn.Module, ...]:
    """Returns the repeated blocks of a network, or the network itself where it has none."""
    inner = cast(nn.Module, network.get_base_model() if isinstance(network, PeftModel) else network)
    return blocks_of(inner) or (inner,)


def _kept_bytes(
    forward: Callable[[], Tensor], weights: set[int], blocks: Sequence[nn.Module], *, recompute: bool
) -> tuple[int, list[int]]:
    """Counts what autograd saves of one pair besides weights, and the bytes of each block's input."""
    saved: dict[int, int] = {}
    inputs: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    def note(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors = [value for value in (*arguments, *named.values()) if isinstance(value, Tensor)]
        inputs.append(max((value.nbytes for value in tensors), default=0))

    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(saved_tensors_hooks(keep, lambda tensor: tensor))
        if recompute:
            stack.enter_context(recomputed(blocks))
        for block in blocks:
            stack.callback(block.register_forward_pre_hook(note, with_kwargs=True).remove)
        _graph = forward()  # it holds what is saved, so that no address comes twice
    return sum(saved.values()), inputs


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
        """Returns the means of the states after the first step."""
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
        """Returns the Gaussian of the next states; sampling and scoring both go through here."""
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
        """Denoises states together and alone, which must agree, and measures what a pair holds while there is room."""
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
