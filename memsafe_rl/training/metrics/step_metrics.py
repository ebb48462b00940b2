"""Turns a step's sums into metrics under TRL's names; the one place where the update reads tensor values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memsafe_rl.ops.losses import LOSSES
from memsafe_rl.parallel.protocol import Parallel
from memsafe_rl.training.gradient import StepGradient, StepTerms


class StepNumbers(NamedTuple):
    """An optimizer step's numbers of one rank, on the host."""

    sums: dict[str, float]  # added over ranks
    lows: dict[str, float]  # minimised over ranks
    highs: dict[str, float]  # maximised over ranks
    grad_norm: float  # the gradient's norm before clipping, the same on every rank


def read_step(gradient: StepGradient, norm: Tensor) -> StepNumbers:
    """Reads an optimizer step's numbers from the device."""
    sums = _read({"loss": gradient.loss, "norm": norm, "run_tokens": gradient.run_tokens, **gradient.sums})
    return StepNumbers(sums, _read(gradient.lows), _read(gradient.highs), sums.pop("norm"))


def step_metrics(numbers: StepNumbers, terms: StepTerms, parallel: Parallel) -> dict[str, float]:
    """Joins an optimizer step's numbers of all ranks and divides sums by the step's counts.

    Clipping, KL and ratio statistics are over all counted actions of the step: a row that was skipped because its
    advantage is zero has ratio 1 on the first pass and cannot be clipped. Entropy is over the rows that were run.
    """
    parts = parallel.gather([numbers])
    totals = _merged([part.sums for part in parts], sum)
    tokens, rows = max(1, terms.denominators.tokens), max(1, terms.denominators.rows)
    run_tokens = max(1.0, totals["run_tokens"])
    metrics = {
        "loss": totals["loss"],
        "grad_norm": numbers.grad_norm,
        "entropy": totals.get("entropy", math.nan) / run_tokens,
        "approx_kl/k3_token": totals.get("approx_kl", 0.0) / tokens,
        "approx_kl/k1_token": -totals.get("log_ratio", 0.0) / tokens,
        "approx_kl/k3_sequence": totals.get("approx_kl_rows", 0.0) / rows,
        "approx_kl/k1_sequence": -totals.get("log_ratio", 0.0) / rows,
    }
    if "kl" in totals:
        metrics["kl"] = totals["kl"] / tokens
    if terms.entropy_masks is not None:
        metrics["active_entropy"] = totals.get("active_entropy", math.nan) / max(1, terms.denominators.entropy_tokens)
    if terms.values is not None:
        metrics["value_loss"] = totals.get("value_loss", 0.0)
        metrics["clip_ratio/value"] = totals.get("value_clip", 0.0) / tokens
    if terms.entropy_coef or terms.values is not None:
        metrics["policy_loss"] = totals.get("policy_loss", 0.0)
    ratios = tokens if terms.settings.importance_sampling_level == "token" else rows
    for name, (key, count) in LOSSES[terms.settings.loss_type].metrics.items():
        if key in totals:
            metrics[name] = totals[key] / (ratios if count is None else max(1.0, totals[count]))
    for name, value in _merged([part.lows for part in parts], min).items():
        metrics[f"{name.replace('clip_', 'clip_ratio/')}_min"] = value
    for name, value in _merged([part.highs for part in parts], max).items():
        metrics[f"{name.replace('clip_', 'clip_ratio/')}_max"] = value
    return metrics


def averages(pending: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    """Averages each metric over the steps that had it, leaving NaN out."""
    means: dict[str, float | None] = {}
    for name, values in pending.items():
        known = [value for value in values if not math.isnan(value)]
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
