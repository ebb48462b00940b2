"""The gradient of one optimizer step, cut into micro-batches whose shares add up exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.ops.losses import policy_loss
from memsafe_rl.rollout.scoring import cut_by_tokens, score_rows
from memsafe_rl.types import Denominators, LossInputs, LossSettings, Ragged, Trajectory, UpdatePlan


@dataclass(frozen=True)
class StepTerms:
    """What an optimizer step has fixed before its first backward.

    Args:
        settings: the loss.
        denominators: counts over the whole step and all ranks.
        temperature: divides the logits.
        with_entropy: whether entropies are wanted, for the bonus, the token mask or the log.
        entropy_coef: coefficient of the entropy bonus.
        entropy_masks: 1 where an action is among the most uncertain of the step, per row; None when all count.
    """

    settings: LossSettings
    denominators: Denominators
    temperature: float
    with_entropy: bool
    entropy_coef: float = 0.0
    entropy_masks: Mapping[int, Tensor] | None = None


@dataclass
class StepGradient:
    """What accumulating a step's gradient leaves besides the gradient itself.

    Args:
        loss: detached scalar.
        sums: scalars added over micro-batches.
        lows: scalars minimised over micro-batches.
        highs: scalars maximised over micro-batches.
        logprobs: nats, of each row that was run, on the device.
        micro_batches: how many were run.
        tokens: tokens run, padding included.
    """

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    lows: dict[str, Tensor] = field(default_factory=dict)
    highs: dict[str, Tensor] = field(default_factory=dict)
    logprobs: dict[int, Tensor] = field(default_factory=dict)
    micro_batches: int = 0
    tokens: int = 0


def accumulate_gradient(
    adapter: ModelAdapter,
    trajectory: Trajectory,
    rows: Sequence[int],
    plan: UpdatePlan,
    terms: StepTerms,
    *,
    autocast: Callable[[], AbstractContextManager[object]],
    scale: Callable[[Tensor], Tensor],
) -> StepGradient:
    """Adds the gradient of some rows of a step to the parameters' `.grad`; how they are cut leaves it unchanged.

    Args:
        adapter: the model.
        trajectory: the store.
        rows: this rank's rows of the step.
        plan: how to cut them.
        terms: what the step has fixed.
        autocast: context of the forward pass.
        scale: scales a loss before its backward.

    Returns:
        The step's loss and sums over these rows.
    """
    lengths = [sum(pair) for pair in zip(trajectory.condition_lengths(rows), trajectory.action_lengths(rows), strict=True)]
    step = StepGradient(loss=torch.zeros((), device=adapter.device))
    for places in cut_by_tokens(lengths, plan.micro_batch_tokens):
        micro = [rows[place] for place in places]
        with autocast(), held_activations(adapter, plan):
            scores = score_rows(
                adapter,
                trajectory,
                micro,
                temperature=terms.temperature,
                tile=plan.logprob_tile,
                with_entropy=terms.with_entropy,
            )
        inputs = loss_inputs(trajectory, micro, terms, scores.logprobs_BT, scores.entropies_BT)
        result = policy_loss(inputs, terms.settings, terms.denominators)
        with held_activations(adapter, plan):
            scale(result.loss).backward()
        _add(step, result.loss, result.sums, result.lows, result.highs)
        for place, row in enumerate(micro):
            step.logprobs[row] = scores.logprobs_BT[place, : trajectory.actions.lengths[row]].detach()
        step.micro_batches += 1
        step.tokens += len(micro) * max(lengths[place] for place in places)
    return step


def loss_inputs(
    trajectory: Trajectory, rows: Sequence[int], terms: StepTerms, logprobs_BT: Tensor, entropies_BT: Tensor | None
) -> LossInputs:
    """Cuts everything the loss needs for some rows out of the store.

    Args:
        trajectory: the store.
        rows: the rows of the micro-batch.
        terms: what the step has fixed.
        logprobs_BT: (B, T), current log-probs.
        entropies_BT: (B, T), current entropies, or None.

    Returns:
        The loss's view of the micro-batch, on the device of `logprobs_BT`.
    """
    device, dtype = logprobs_BT.device, logprobs_BT.dtype

    def cut(store: Ragged | None) -> Tensor | None:
        return None if store is None else store.pad(rows, 0, device).to(dtype)

    has_old = trajectory.has_old and all(trajectory.has_old[row] for row in rows)
    entropy_mask = None
    if terms.entropy_masks is not None:
        kept = Ragged.from_rows([terms.entropy_masks[row] for row in rows])
        entropy_mask = kept.pad(range(len(rows)), 0, device).to(dtype)
    return LossInputs(
        logprobs_BT=logprobs_BT,
        advantages_B=trajectory.advantages[list(rows)].to(device=device, dtype=dtype),
        mask_BT=trajectory.loss_mask.pad(rows, 0, device).to(dtype),
        old_logprobs_BT=cut(trajectory.old_logprobs) if has_old else None,
        ref_logprobs_BT=cut(trajectory.ref_logprobs),
        sampling_logprobs_BT=cut(trajectory.sampling_logprobs),
        importance_weights_BT=cut(trajectory.importance_weights),
        entropies_BT=entropies_BT,
        entropy_mask_BT=entropy_mask,
        entropy_coef=terms.entropy_coef,
    )


def held_activations(adapter: ModelAdapter, plan: UpdatePlan) -> AbstractContextManager[object]:
    """Gives the context in which a forward and its backward keep, recompute or offload activations.

    Args:
        adapter: the model.
        plan: says which.

    Returns:
        A context manager.
    """
    stack = ExitStack()
    if plan.offload_activations:
        stack.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=adapter.device.type == "cuda"))
    stack.enter_context(adapter.recompute(plan.checkpointing))
    return stack


def _add(
    step: StepGradient,
    loss: Tensor,
    sums: Mapping[str, Tensor],
    lows: Mapping[str, Tensor],
    highs: Mapping[str, Tensor],
) -> None:
    step.loss = step.loss + loss.detach()
    for name, value in sums.items():
        step.sums[name] = step.sums[name] + value if name in step.sums else value
    for name, value in lows.items():
        step.lows[name] = torch.minimum(step.lows[name], value) if name in step.lows else value
    for name, value in highs.items():
        step.highs[name] = torch.maximum(step.highs[name], value) if name in step.highs else value
