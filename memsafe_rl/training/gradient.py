"""The gradient of one optimizer step, cut into micro-batches whose shares add up exactly.

Axes: ``B`` rows, ``T`` completion tokens or denoising steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from memsafe_rl.accounting import host_memory, is_on_host
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.runtime.host_memory import offloaded, to_device, to_host
from memsafe_rl.micro_batches import MicroBatch, MicroBatchGroup
from memsafe_rl.models.adapter import ScoringAdapter
from memsafe_rl.models.compiling import compiled_blocks
from memsafe_rl.models.critic import Critic
from memsafe_rl.models.routing import RouterLosses
from memsafe_rl.ops.entropy import entropy_threshold, high_entropy_mask
from memsafe_rl.ops.gae import value_loss
from memsafe_rl.ops.losses import LOSSES, needs_whole_rows, policy_loss
from memsafe_rl.ops.losses.core import StepTokens
from memsafe_rl.ops.sampling import hash_fields, uniform_noise
from memsafe_rl.parallel.one_process import WHOLE
from memsafe_rl.parallel.shards import Shards
from memsafe_rl.rollout.scoring import RowScores, score_rows, value_rows
from memsafe_rl.training import refusal
from memsafe_rl.types import (
    Denominators,
    LossInputs,
    LossResult,
    LossSettings,
    Ragged,
    TokenScores,
    Trajectory,
    UpdatePlan,
)

Value = TypeVar("Value")


@dataclass(frozen=True)
class ValueTerms:
    """What an optimizer step has fixed of the critic's loss."""

    critic: Critic  # what is trained
    coef: float  # coefficient of its loss
    clip: float | None  # most a value moves away from the rollout's before the loss holds it; None for no bound


@dataclass(frozen=True)
class BalanceTerms:
    """What an optimizer step has fixed of the losses on a mixture of experts' routers."""

    losses: RouterLosses
    counts_E1: Tensor  # (E + 1,) float64, choices of each expert over the whole step and all ranks, then tokens


@dataclass(frozen=True)
class StepTerms:
    """What an optimizer step has fixed before its first backward."""

    settings: LossSettings  # the loss
    denominators: Denominators  # counts over the whole step and all ranks
    temperature: float  # divides the logits
    with_entropy: bool  # whether entropies are wanted, for the bonus, the token mask or the log
    entropy_coef: float = 0.0  # coefficient of the entropy bonus
    # 1 where an action is among the most uncertain of the step, per row; None when all count
    entropy_masks: Mapping[int, Tensor] | None = None
    # 1 where the loss marked an action of the step, per row; None where it marks none
    marks: Mapping[int, Tensor] | None = None
    # whether another sampler drew the completions, so that its log-probs differ from the old
    sampler_is_external: bool = False
    values: ValueTerms | None = None  # the critic's loss; None without a critic
    balance: BalanceTerms | None = None  # the losses on routers; None without them
    # of each of several objectives, over its own rows; empty where there is but one
    objectives: tuple[StepTerms, ...] = ()


@dataclass
class StepGradient:
    """What accumulating a step's gradient leaves besides the gradient itself."""

    loss: Tensor  # detached scalar
    run_tokens: Tensor  # scalar, counted actions of the rows that were run
    sums: dict[str, Tensor] = field(default_factory=dict)  # scalars added over micro-batches
    lows: dict[str, Tensor] = field(default_factory=dict)  # scalars minimised over micro-batches
    highs: dict[str, Tensor] = field(default_factory=dict)  # scalars maximised over micro-batches
    logprobs: dict[int, Tensor] = field(default_factory=dict)  # nats, of each row that was run, on the device
    micro_batches: int = 0  # how many were run
    tokens: int = 0  # tokens run, padding included
    objectives: tuple[StepGradient, ...] = ()  # of each of several objectives; empty where there is but one
    # what is known of the objectives' gradients and of how they were merged, by metric
    merge: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Pass:
    """What the forward and backward passes of a step share."""

    adapter: ScoringAdapter
    trajectory: Trajectory
    plan: UpdatePlan
    terms: StepTerms
    autocast: Callable[[], AbstractContextManager[object]]
    scale: Callable[[Tensor], Tensor]
    shards: Shards

    @contextmanager
    def forward(self, network: ScoringAdapter) -> Iterator[None]:
        """The context of a network's forward, whose activations stay, are made anew or move as the plan says."""
        plan = self.plan
        with self.autocast(), ExitStack() as stack:
            if plan.offload_activations:
                stack.enter_context(offloaded(network.model.parameters()))
            if plan.compile:
                stack.enter_context(compiled_blocks(network.model, plan.compile))
            stack.enter_context(network.recompute(plan.checkpointing))
            yield

    def scoring(
        self, rows: Sequence[int], columns: Sequence[int] | None = None, **wanted: Any
    ) -> Callable[[], TokenScores]:
        """Returns what scores the actions of some rows in one forward of the model, with a graph."""
        return partial(
            score_rows,
            self.adapter,
            self.trajectory,
            rows,
            columns,
            temperature=self.terms.temperature,
            tile=self.plan.logprob_tile,
            with_entropy=self.terms.with_entropy,
            **wanted,
        )

    @contextmanager
    def balanced(self) -> Iterator[Callable[[LossResult], LossResult]]:
        """Adds a micro-batch's share of the losses on routers to its loss; lasts until its backward has ended."""
        terms, routers = self.terms.balance, self.adapter.routers
        if terms is None or routers is None:
            yield as_it_is
            return
        with routers.weighing(terms.counts_E1) as shares:

            def add(result: LossResult) -> LossResult:
                balance, z = torch.stack(shares).sum(0)  # a forward repeated for the backward adds to them later
                sums = {**result.sums, "aux_loss": balance.detach(), "router_z_loss": z.detach()}
                coefs = terms.losses
                added = coefs.router_aux_loss_coef * balance + coefs.router_z_loss_coef * z
                return replace(result, loss=result.loss + added, sums=sums)

            yield add

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a loss to the parameters'."""
        torch.autograd.backward(self.scale(loss))

    def packs(self, network: ScoringAdapter) -> bool:
        """Whether completions lie behind one copy of their prompt; under dropout they would share its mask."""
        return self.plan.pack_prompts and network.packs_prompts and not network.model.training


@torch.enable_grad()  # the user's own code may have left it off
def accumulate_gradient(
    adapter: ScoringAdapter,
    trajectory: Trajectory,
    rows: Sequence[int],
    plan: UpdatePlan,
    terms: StepTerms,
    *,
    autocast: Callable[[], AbstractContextManager[object]],
    scale: Callable[[Tensor], Tensor],
    shards: Shards = WHOLE,
) -> StepGradient:
    """Adds the gradient of some rows of a step to the parameters' `.grad`; how they are cut leaves it unchanged."""
    shared = _Pass(adapter, trajectory, plan, terms, autocast, scale, shards)
    if adapter.time_separable:
        return _accumulate_columns(shared, rows)
    zero = torch.zeros((), device=adapter.device)
    step = StepGradient(loss=zero, run_tokens=zero)
    with adapter.learning(partial(shared.forward, adapter)), closing(_micro_batches(shared, rows)) as micro_batches:
        for micro in shards.rounds(micro_batches, reduce_each=plan.reduce_each):
            with shared.balanced() as balanced:
                chosen = [rows[place] for place in micro.places]
                _learn_from(step, shared, chosen, packed=micro.packed, balanced=balanced)
            step.tokens += micro.tokens
    return step


def _micro_batches(shared: _Pass, rows: Sequence[int]) -> Generator[MicroBatch]:
    """Cuts rows as the plan says; what several micro-batches read is read once, around them."""
    adapter, trajectory, plan = shared.adapter, shared.trajectory, shared.plan

    def reading(group: MicroBatchGroup) -> AbstractContextManager[None]:
        # What is read around several rounds would communicate outside of them.
        if not group.reads or shared.shards.in_rounds:
            return nullcontext()
        together = [rows[place] for place in group.places]
        return adapter.read_together(trajectory, together, partial(shared.forward, adapter))

    for group in adapter.micro_batches(trajectory, rows, plan.micro_batch_tokens, packed=shared.packs(adapter)):
        yield from group.run(reading)


def pass_once(
    adapter: ScoringAdapter,
    critics: Sequence[Critic],
    *,
    autocast: Callable[[], AbstractContextManager[object]],
    shards: Shards,
    lay: Callable[[Trajectory], Trajectory],
) -> None:
    """Runs the forward and backward of a row of two tokens, placed by ``lay``, as an update runs a micro-batch."""
    one = Ragged(torch.zeros(1, dtype=torch.int64), (1,))
    row = Trajectory(one, (0,), one, Ragged(torch.ones(1), (1,)), None, torch.zeros(1), (0,), (True,))
    row = lay(row)
    beside = next((critic.head for critic in critics if critic.shares_forward), None)
    scored = partial(score_rows, adapter, row, [0], temperature=1.0, tile=1, value_head=beside)
    with autocast():
        scores = shards.forward_of(adapter.model)(scored)
    values = 0.0 if scores.values_BT is None else scores.values_BT.sum()
    torch.autograd.backward(scores.logprobs_BT.sum() + values)
    for critic in critics:
        if not critic.shares_forward:
            with critic.running() as network, autocast():
                values = shards.forward_of(network.model)(partial(value_rows, network, row, [0], critic.head))
            torch.autograd.backward(values.sum())


def as_it_is(value: Value) -> Value:
    """Changes nothing."""
    return value


def _learn_from(
    step: StepGradient,
    shared: _Pass,
    rows: Sequence[int],
    *,
    packed: bool,
    balanced: Callable[[LossResult], LossResult],
) -> None:
    """Adds the gradient of one micro-batch, and what is measured of it; its tensors are freed on return."""
    terms, trajectory = shared.terms, shared.trajectory
    critic = None if terms.values is None else terms.values.critic
    head = critic.head if critic is not None and critic.shares_forward else None
    scored = shared.scoring(rows, packed=packed, value_head=head)
    with shared.forward(shared.adapter):
        scores: TokenScores = shared.shards.forward_of(shared.adapter.model)(scored)
    inputs = loss_inputs(trajectory, rows, terms, scores)
    result = _with_sampler_gap(policy_loss(inputs, terms.settings, terms.denominators), trajectory, rows, inputs)
    if scores.values_BT is not None:
        share = value_share(trajectory, rows, terms, scores.values_BT)
        result = replace(result, loss=result.loss + share.loss, sums={**result.sums, **share.sums})
    result = balanced(result)
    shared.backward(result.loss)
    _add(step, result, inputs.mask_BT.sum())
    for place, row in enumerate(rows):
        step.logprobs[row] = scores.logprobs_BT[place, : trajectory.actions.lengths[row]].detach()
    if critic is not None and not critic.shares_forward:
        del scores, inputs, result  # the critic's forward needs their room
        _add(step, _critic_gradient(critic, shared, rows))
    step.micro_batches += 1


def check_separable(settings: LossSettings) -> None:
    """Refuses losses that need all columns of a row at once, where a network trains on its columns one by one."""
    separable = ", ".join(one.name for one in LOSSES.values() if one.traits.separable and not one.traits.tokens_only)
    remedies = {
        "importance_sampling_level": "importance_sampling_level='token' in GRPOConfig",
        "off_policy_mask_threshold": "off_policy_mask_threshold=None",
        "loss_type": f"a loss_type whose traits are separable: {separable}",
    }
    loss = settings.loss_type
    refusal.when(LOSSES[loss].traits.tokens_only, "loss_type/tokens", value=loss, remedy=remedies["loss_type"])
    for name in needs_whole_rows(settings):
        raise refusal("loss_type/rows", name=name, value=getattr(settings, name), remedy=remedies[name])


def _accumulate_columns(shared: _Pass, rows: Sequence[int]) -> StepGradient:
    """Goes over rows × columns, a rectangle forward and backward at a time: bytes do not grow with columns."""
    terms, trajectory = shared.terms, shared.trajectory
    check_separable(terms.settings)
    with host_memory():
        step = StepGradient(loss=torch.zeros(()), run_tokens=torch.zeros(()))
    if not rows:
        return step
    found: dict[str, Tensor] = {}
    shape = len(rows), max(trajectory.action_lengths(rows))
    (group,) = shared.adapter.micro_batches(trajectory, rows, shared.plan.micro_batch_tokens)
    for places, columns, _, tokens in group.run():
        assert columns is not None, "the columns of a chain are run one by one"
        micro = [rows[place] for place in places]
        scores = _policy_gradient(shared, micro, columns)
        _collect(found, scores, places, columns, shape)
        del scores  # the critic's forward needs their room
        if terms.values is not None:
            _add(step, _critic_gradient(terms.values.critic, shared, micro, columns))
        step.micro_batches += 1
        step.tokens += tokens
    with torch.no_grad(), host_memory():
        whole = loss_inputs(trajectory, rows, terms, TokenScores(**found))
        result = policy_loss(whole, terms.settings, terms.denominators)
        _add(step, _with_sampler_gap(result, trajectory, rows, whole), whole.mask_BT.sum())
    for place, row in enumerate(rows):
        step.logprobs[row] = found["logprobs_BT"][place, : trajectory.actions.lengths[row]]
    return step


def _policy_gradient(shared: _Pass, rows: Sequence[int], columns: Sequence[int]) -> TokenScores:
    """Adds the gradient of the policy's loss over a rectangle, and gives its scores, detached."""
    terms, trajectory = shared.terms, shared.trajectory
    scored = shared.scoring(rows, columns, with_kl=terms.settings.beta != 0.0)
    with shared.forward(shared.adapter):
        scores: TokenScores = shared.shards.forward_of(shared.adapter.model)(scored)
    inputs = loss_inputs(trajectory, rows, terms, scores, columns)
    shared.backward(policy_loss(inputs, terms.settings, terms.denominators).loss)
    parts = {entry.name: getattr(scores, entry.name) for entry in fields(scores)}
    return replace(scores, **{name: part.detach() for name, part in parts.items() if part is not None})


def _collect(
    found: dict[str, Tensor], scores: TokenScores, places: Sequence[int], columns: Sequence[int], shape: tuple[int, int]
) -> None:
    """Writes what was found of a rectangle where it belongs among all rows and columns, on the host."""
    for entry in fields(scores):
        values_BT = getattr(scores, entry.name)
        if values_BT is not None:
            with host_memory():
                if entry.name not in found:
                    found[entry.name] = torch.zeros(shape, dtype=values_BT.dtype)
                found[entry.name][(torch.tensor(places)[:, None], torch.tensor(columns))] = to_host(values_BT)


@torch.no_grad()
def loss_of_scores(trajectory: Trajectory, rows: Sequence[int], terms: StepTerms, scored: Sequence[RowScores]) -> float:
    """Returns the share of some rows, which were scored, in a step's loss."""
    if not rows:
        return 0.0
    with host_memory():
        logprobs, entropies = zip(*((one.logprobs, one.entropies) for one in scored), strict=True)
        places = range(len(rows))
        scores = TokenScores(*(Ragged.from_rows(values).pad(places, 0) for values in (logprobs, entropies)))
        return float(policy_loss(loss_inputs(trajectory, rows, terms, scores), terms.settings, terms.denominators).loss)


def loss_inputs(
    trajectory: Trajectory,
    rows: Sequence[int],
    terms: StepTerms,
    scores: TokenScores,
    columns: Sequence[int] | None = None,
) -> LossInputs:
    """Cuts everything the loss needs for some rows, or some columns of them, out of the store."""
    device, dtype = scores.logprobs_BT.device, scores.logprobs_BT.dtype

    def cut(store: Ragged | None) -> Tensor | None:
        return None if store is None else cut_out(store, rows, columns, device).to(dtype)

    by_action = cut(trajectory.action_advantages)
    by_row = trajectory.advantages[list(rows)].to(device=device, dtype=dtype)
    has_old = trajectory.has_old and all(trajectory.has_old[row] for row in rows)

    def of_rows(values: Mapping[int, Tensor] | None) -> Tensor | None:
        if values is None:
            return None
        return cut_out(Ragged.from_rows([values[row] for row in rows]), range(len(rows)), columns, device).to(dtype)

    counted_B = None
    if columns is not None:
        counted_B = torch.tensor([trajectory.counted_actions[row] for row in rows], dtype=dtype, device=device)
    return LossInputs(
        logprobs_BT=scores.logprobs_BT,
        advantages_B=by_row if by_action is None else by_action,
        mask_BT=cut_out(trajectory.loss_mask, rows, columns, device).to(dtype),
        old_logprobs_BT=cut(trajectory.old_logprobs) if has_old else None,
        ref_logprobs_BT=cut(trajectory.ref_logprobs),
        sampling_logprobs_BT=cut(trajectory.sampling_logprobs) if terms.sampler_is_external else None,
        importance_weights_BT=cut(trajectory.importance_weights),
        entropies_BT=scores.entropies_BT,
        entropy_mask_BT=of_rows(terms.entropy_masks),
        entropy_coef=terms.entropy_coef,
        marks_BT=of_rows(terms.marks),
        kl_BT=scores.kl_BT,
        row_counts_B=counted_B,
    )


def cut_out(store: Ragged, rows: Sequence[int], columns: Sequence[int] | None, device: torch.device) -> Tensor:
    """Cuts some columns of some rows out of a store; only these move, so that a long row costs no more."""
    if columns is None:
        return store.pad(rows, 0, device)
    views = store.rows()
    with host_memory() if is_on_host(store.flat) else nullcontext():
        chosen = torch.tensor(columns, device=store.flat.device)
        cut_BT = torch.stack([views[row][chosen] for row in rows])
    return to_device(cut_BT, device)


def value_share(
    trajectory: Trajectory,
    rows: Sequence[int],
    terms: StepTerms,
    values_BT: Tensor,
    columns: Sequence[int] | None = None,
) -> LossResult:
    """Returns a micro-batch's share of the critic's loss, times its coefficient."""
    if terms.values is None or trajectory.values is None or trajectory.returns is None:
        raise AssertionError("a critic learns from a rollout that it has judged")
    old_BT, returns_BT, mask_BT = (
        cut_out(store, rows, columns, values_BT.device).to(values_BT.dtype)
        for store in (trajectory.values, trajectory.returns, trajectory.loss_mask)
    )
    share = value_loss(values_BT, old_BT, returns_BT, mask_BT, clip=terms.values.clip, tokens=terms.denominators.tokens)
    sums = {"value_loss": share.loss.detach(), "value_clip": share.clipped}
    return LossResult(terms.values.coef * share.loss, sums, {}, {})


def _critic_gradient(
    critic: Critic, shared: _Pass, rows: Sequence[int], columns: Sequence[int] | None = None
) -> LossResult:
    """Adds the gradient of a critic that runs by itself, over the same rows, or some columns of them."""
    with critic.running() as network:
        valued = partial(
            value_rows, network, shared.trajectory, rows, critic.head, columns, packed=shared.packs(network)
        )
        with shared.forward(network):
            values_BT = shared.shards.forward_of(network.model)(valued)
        share = value_share(shared.trajectory, rows, shared.terms, values_BT, columns)
        shared.backward(share.loss)
    return share


def entropy_masks(
    trajectory: Trajectory, rows: Sequence[int], entropies: Mapping[int, Tensor], *, top_quantile: float
) -> dict[int, Tensor]:
    """Finds the most uncertain actions of a whole step before it is cut (Wang et al. 2025, arXiv 2506.01939)."""
    counted = [mask.cpu() for mask in trajectory.loss_mask.rows()]
    flat = torch.cat([entropies[row] for row in rows])
    threshold = entropy_threshold(flat, torch.cat([counted[row] for row in rows]), top_quantile)
    return {row: high_entropy_mask(entropies[row], counted[row], threshold) for row in rows}


def loss_marks(
    trajectory: Trajectory,
    rows: Sequence[int],
    logprobs: Mapping[int, Tensor],
    settings: LossSettings,
    key: Sequence[int],
) -> dict[int, Tensor]:
    """Has the loss mark actions of a whole step before it is cut; several objectives mark by the sum of advantages."""
    loss, lengths = LOSSES[settings.loss_type], trajectory.action_lengths(rows)
    assert loss.mark is not None, "only for a loss that marks is a step scored"

    def flat(store: Ragged) -> Tensor:
        views = store.rows()
        return torch.cat([views[row].cpu() for row in rows])

    def spread(values: Sequence[Tensor]) -> Tensor:
        return torch.cat([one.expand(length, *one.shape) for one, length in zip(values, lengths, strict=True)])

    logprobs_M = torch.cat([logprobs[row] for row in rows]).double()
    old, own = trajectory.old_logprobs, trajectory.action_advantages
    has_old_M = spread([torch.tensor(old is not None and trajectory.has_old[row]) for row in rows])
    log_ratio_M = torch.zeros_like(logprobs_M) if old is None else (logprobs_M - flat(old)).masked_fill(~has_old_M, 0.0)
    advantages_M = spread([trajectory.advantages[row].cpu() for row in rows]) if own is None else flat(own)
    keys_MK = spread([torch.tensor([*key, row]) for row in rows])
    columns_M = torch.cat([torch.arange(length) for length in lengths])
    uniforms_M, mask_M = uniform_noise(hash_fields(keys_MK, columns_M), 1)[:, 0], flat(trajectory.loss_mask).bool()
    marks_M = loss.mark(StepTokens(logprobs_M, log_ratio_M, advantages_M.double(), mask_M, uniforms_M), settings)
    if not isinstance(marks_M, Tensor) or marks_M.shape != mask_M.shape or marks_M.dtype != torch.bool:
        told = f"{marks_M.dtype} of {tuple(marks_M.shape)}" if isinstance(marks_M, Tensor) else repr(marks_M)
        raise ConfigError(f"mark of loss {loss.name!r} gave {told:.80}. Return a bool for each action, (M,).")
    return dict(zip(rows, torch.split((marks_M & mask_M).float(), list(lengths)), strict=True))


def joined(parts: Sequence[StepGradient], weights: Sequence[float], merge: dict[str, float]) -> StepGradient:
    """Adds up what the gradients of several objectives have left."""
    zero = torch.zeros_like(parts[0].run_tokens)
    step = StepGradient(loss=zero, run_tokens=zero, objectives=tuple(parts), merge=merge)
    for part, weight in zip(parts, weights, strict=True):
        _add(step, LossResult(weight * part.loss, part.sums, part.lows, part.highs), part.run_tokens)
        step.logprobs |= part.logprobs
        step.micro_batches += part.micro_batches
        step.tokens += part.tokens
    return step


@torch.no_grad()
def _with_sampler_gap(
    result: LossResult, trajectory: Trajectory, rows: Sequence[int], inputs: LossInputs
) -> LossResult:
    """Adds how far the sampler's log-probs of counted actions lie from the model's before the first update."""
    if trajectory.sampling_logprobs is None:
        return result
    own_BT = inputs.logprobs_BT if inputs.old_logprobs_BT is None else inputs.old_logprobs_BT
    sampled_BT = trajectory.sampling_logprobs.pad(rows, 0, own_BT.device)
    known_BT = inputs.mask_BT.bool() & ~sampled_BT.isnan()  # another sampler may not say
    gap_BT = torch.where(known_BT, (own_BT.to(sampled_BT.dtype) - sampled_BT).abs(), 0)
    sums = {**result.sums, "sampler_gap": gap_BT.sum(), "sampler_tokens": known_BT.sum()}
    return replace(result, sums=sums, highs={**result.highs, "sampler_gap": gap_BT.max()})


def _add(step: StepGradient, result: LossResult, tokens: Tensor | None = None) -> None:
    step.loss = step.loss + result.loss.detach()
    step.run_tokens = step.run_tokens if tokens is None else step.run_tokens + tokens
    for name, value in result.sums.items():
        step.sums[name] = step.sums[name] + value if name in step.sums else value
    for name, value in result.lows.items():
        step.lows[name] = torch.minimum(step.lows[name], value) if name in step.lows else value
    for name, value in result.highs.items():
        step.highs[name] = torch.maximum(step.highs[name], value) if name in step.highs else value
