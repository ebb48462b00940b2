"""Turns a step's sums into metrics under TRL's names, and sees whether half-precision weights move."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from memsafe_rl.ops.losses import LOSSES
from memsafe_rl.parallel.replicas import Parallel
from memsafe_rl.training.gradient import StepGradient, StepTerms

MOST_TENSORS = 16
ELEMENTS_EACH = 128
_LEAST_ELEMENTS = 64
"""Sampled elements with a gradient below which a share says nothing."""

_ROUNDS_TO_NEAREST = ("torch.optim", "bitsandbytes", "transformers")
"""Packages whose optimizers neither round at random nor keep wider copies of the weights."""


class StepNumbers(NamedTuple):
    """An optimizer step's numbers of one rank, on the host."""

    sums: dict[str, float]  # added over ranks
    lows: dict[str, float]  # minimised over ranks
    highs: dict[str, float]  # maximised over ranks
    grad_norm: float  # the gradient's norm before clipping, the same on every rank


def read_step(gradient: StepGradient, norm: Tensor) -> StepNumbers:
    """Reads an optimizer step's numbers from the device."""
    sums = _read({"loss": gradient.loss, "norm": norm, "run_tokens": gradient.run_tokens, **gradient.sums})
    sums["run_rows"] = sum(len(part.logprobs) for part in gradient.objectives or (gradient,))
    return StepNumbers(sums, _read(gradient.lows), _read(gradient.highs), sums.pop("norm"))


def step_metrics(numbers: StepNumbers, terms: StepTerms, parallel: Parallel) -> dict[str, float]:
    """Joins a step's numbers of all ranks, and divides sums by counts of its rows, KL and entropy by those run."""
    parts = parallel.gather([numbers])
    totals = _merged([part.sums for part in parts], sum)
    tokens, rows = max(1, terms.denominators.tokens), max(1, terms.denominators.rows)
    run_tokens, run_rows = max(1.0, totals["run_tokens"]), max(1.0, totals["run_rows"])
    metrics = {
        "loss": totals["loss"],
        "grad_norm": numbers.grad_norm,
        "approx_kl/k3_token": totals.get("approx_kl", 0.0) / run_tokens,
        "approx_kl/k1_token": -totals.get("log_ratio", 0.0) / run_tokens,
        "approx_kl/k3_sequence": totals.get("approx_kl_rows", 0.0) / run_rows,
        "approx_kl/k1_sequence": -totals.get("log_ratio", 0.0) / run_rows,
    }
    if "entropy" in totals:  # no token is run where all rewards are equal
        metrics["entropy"] = totals["entropy"] / run_tokens
    if "kl" in totals:
        metrics["kl"] = totals["kl"] / tokens
    if terms.entropy_masks is not None:
        metrics["active_entropy"] = totals.get("active_entropy", math.nan) / max(1, terms.denominators.entropy_tokens)
    if terms.values is not None:
        metrics["value_loss"] = totals.get("value_loss", 0.0)
        metrics["clip_ratio/value"] = totals.get("value_clip", 0.0) / tokens
    if terms.balance is not None:
        metrics["aux_loss"] = totals.get("aux_loss", 0.0)
        if terms.balance.losses.router_z_loss_coef:
            metrics["router_z_loss"] = totals.get("router_z_loss", 0.0)
    if terms.entropy_coef or terms.values is not None:
        metrics["policy_loss"] = totals.get("policy_loss", 0.0)
    ratios = tokens if terms.settings.importance_sampling_level == "token" else rows
    for name, (key, count) in LOSSES[terms.settings.loss_type].metrics.items():
        if key in totals:
            metrics[name] = totals[key] / (ratios if count is None else max(1.0, totals[count]))
    highs = _merged([part.highs for part in parts], max)
    widest = highs.pop("sampler_gap", math.nan)
    if totals.get("sampler_tokens"):  # a sampler may not say its log-probs
        metrics["sampling/sampling_logp_difference/mean"] = totals["sampler_gap"] / totals["sampler_tokens"]
        metrics["sampling/sampling_logp_difference/max"] = widest
    for name, value in _merged([part.lows for part in parts], min).items():
        metrics[f"{name.replace('clip_', 'clip_ratio/')}_min"] = value
    for name, value in highs.items():
        metrics[f"{name.replace('clip_', 'clip_ratio/')}_max"] = value
    return metrics


_LAST = ("num_tokens", "grad_norm", "learning_rate")


def averages(pending: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    """Averages each metric over the steps that had it, leaving NaN out; of some, the last, as in transformers."""
    means: dict[str, float | None] = {}
    for name, values in pending.items():
        known = [value for value in values if not math.isnan(value)][-1 if name in _LAST else 0 :]
        means[name] = sum(known) / len(known) if known else None
    return means


def _read(scalars: Mapping[str, Tensor]) -> dict[str, float]:
    """Brings scalars to the host in one transfer."""
    if not scalars:
        return {}
    device = next(iter(scalars.values())).device
    stacked = torch.stack([value.detach().to(device=device, dtype=torch.float64) for value in scalars.values()])
    return dict(zip(scalars, stacked.tolist(), strict=True))


def _merged(parts: Sequence[Mapping[str, float]], combine: object) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: combine(part[name] for part in parts if name in part) for name in names}  # type: ignore[operator]


@dataclass(frozen=True)
class WeightSample:
    """A sample of the weights as they were before a step."""

    tensors: tuple[nn.Parameter, ...]  # the tensors looked at
    before: tuple[list[float], ...]  # values of the sampled elements of each
    pushed: tuple[list[bool], ...]  # whether each of these elements has a gradient other than 0

    def lost_share(self) -> float | None:
        """Returns the share of elements with a gradient that the step left unchanged; None where too few have one."""
        stayed = [
            value == known
            for tensor, old, pushed in zip(self.tensors, self.before, self.pushed, strict=True)
            for value, known, moves in zip(_sample(tensor).tolist(), old, pushed, strict=True)
            if moves
        ]
        return sum(stayed) / len(stayed) if len(stayed) >= _LEAST_ELEMENTS else None


def sample_weights(parameters: Sequence[nn.Parameter]) -> WeightSample | None:
    """Notes a sample of the trained weights of half precision, with their gradients; keeps nothing on the device."""
    half = [
        one
        for one in parameters
        if one.is_floating_point() and one.element_size() < 4 and one.is_contiguous()
        if one.grad is not None and one.grad.is_contiguous()
    ]
    matrices = [one for one in half if one.ndim > 1] or half
    if not matrices:
        return None
    chosen = tuple(matrices[:: -(-len(matrices) // MOST_TENSORS)])
    gradients = [_sample(one.grad) for one in chosen if one.grad is not None]
    return WeightSample(
        tensors=chosen,
        before=tuple(_sample(one).tolist() for one in chosen),
        pushed=tuple((gradient != 0).tolist() for gradient in gradients),
    )


def rounds_to_nearest(optimizer: torch.optim.Optimizer) -> bool:
    """Says whether an update under half a unit in the last place of its weight is lost for good."""
    return type(optimizer).__module__.startswith(_ROUNDS_TO_NEAREST)


def is_due(step: int, warm_up: int, max_steps: int) -> bool:
    """Says whether a step is watched: the first at full learning rate, then ever fewer."""
    place = step - warm_up + 1
    return place > 0 and place & (place - 1) == 0 and (place == 1 or 2 * place <= max_steps - warm_up)


def _sample(tensor: Tensor) -> Tensor:
    """Returns a view of elements spread over a tensor, with a stride that does not stay in one column."""
    return tensor.detach().view(-1)[:: max(1, tensor.numel() // ELEMENTS_EACH - 1)][:ELEMENTS_EACH]
