"""The policy loss of a micro-batch, whichever loss is chosen: ratios, masks, KL, bonus and measures.

Axes: ``B`` rows, ``T`` columns. Shapes written (B, T|1) are (B, 1) when a row has one ratio
(``importance_sampling_level="sequence"``) and (B, T) otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memsafe_rl.errors import ConfigError
from memsafe_rl.ops.losses.base import LEVELS, LOSSES, Loss, Measures, Ratios, aggregate, row_mean
from memsafe_rl.ops.registry import check_answer
from memsafe_rl.types import Denominators, LossInputs, LossResult, LossSettings


def policy_loss(inputs: LossInputs, settings: LossSettings, denominators: Denominators) -> LossResult:
    """Gives a micro-batch's share of an optimizer step's loss; the shares of any split add up to the same loss.

    ``loss = aggregate(f(ratio, A) · keep · uncertain · w + beta · KL) - c · sum(H · mask · uncertain) / N_H``: f is the
    chosen loss, ``keep`` the off-policy mask, ``uncertain`` the entropy mask, w the importance weights, and

    - ``ratio = exp(log pi - log pi_old)`` per token, or exp of its mean over a row (GSPO, arXiv:2507.18071, eq. 7);
    - ``KL = exp(d) - d - 1``, ``d = log pi_ref - log pi`` (k3, Schulman 2020, "Approximating KL Divergence"),
      multiplied by the ratio under ``use_bias_correction_kl`` (DeepSeek-V3.2, arXiv:2512.02556).

    Departure from the papers and TRL: every denominator is the optimizer step's, given from outside.

    ``sums`` has, summed over counted actions: ``log_ratio`` (nats), ``approx_kl`` (``exp(r) - 1 - r`` of the log-ratio
    r: k3 of KL(old || current) where the old network sampled, nats), ``kl`` to the reference as the loss counts it,
    ``entropy``; summed over rows: ``log_ratio_rows`` (a row's mean log-ratio) and ``approx_kl_rows`` (k3 of a row's
    summed log-ratio); ``active_entropy`` over the actions that the bonus sees; ``policy_loss``, the share without the
    bonus; and what the loss itself measures. -``log_ratio`` over actions is k1 per action, over rows k1 per trajectory.

    Args:
        inputs: the micro-batch.
        settings: the configuration.
        denominators: counts over the whole optimizer step and all ranks.

    Returns:
        The share and its measures.

    Raises:
        ConfigError: If the loss or the ratio level is unknown, a tensor that the settings need is missing, or the loss
            gives anything but one number with gradient for each action, or for each ratio.
    """
    loss = LOSSES[settings.loss_type]
    ratios = _ratios(inputs, settings)
    losses = _losses(loss, ratios)
    if settings.off_policy_mask_threshold is not None:
        losses = losses * off_policy_mask(inputs, ratios, settings.off_policy_mask_threshold)
    if inputs.entropy_mask_BT is not None:
        losses = losses * inputs.entropy_mask_BT
    if inputs.importance_weights_BT is not None and not loss.traits.weighs_sampler:
        losses = losses * inputs.importance_weights_BT
    kl_BT = reference_kl(inputs, ratios) if settings.beta != 0.0 else None
    if kl_BT is not None:
        losses = losses + settings.beta * kl_BT
    how, slots = loss.traits.aggregation, settings.max_completion_length
    policy_share = aggregate(how, losses, inputs.mask_BT, _row_counts(inputs), denominators, slots)
    share = policy_share
    if inputs.entropy_coef != 0.0:
        share = share - inputs.entropy_coef * entropy_bonus(inputs, denominators)
    with torch.no_grad():
        measures = loss.measure(ratios)
        if not isinstance(measures, Measures):
            raise ConfigError(
                f"measure of loss {loss.name!r} gave a {type(measures).__name__}. Return Measures({{...}})."
            )
        sums = {"policy_loss": policy_share.detach(), **_common_sums(inputs, ratios, kl_BT), **measures.sums}
    return LossResult(share, sums, measures.lows, measures.highs)


def needs_whole_rows(settings: LossSettings) -> list[str]:
    """Names the settings that weigh or mask an action by the other columns of its row.

    Args:
        settings: the configuration.

    Returns:
        The names; none where the columns of a row may be learnt one by one.

    Raises:
        ConfigError: If the loss is unknown.
    """
    whole = {
        "importance_sampling_level": settings.importance_sampling_level == "sequence",
        "loss_type": not LOSSES[settings.loss_type].traits.separable,
        "off_policy_mask_threshold": settings.off_policy_mask_threshold is not None,
    }
    return [name for name, is_needed in whole.items() if is_needed]


def reference_kl(inputs: LossInputs, ratios: Ratios) -> Tensor:
    """Gives the KL to the reference per action, (B, T), nats: k3, times the ratio under ``use_bias_correction_kl``.

    ``exp(d) - d - 1`` with ``d = log pi_ref - log pi`` (Schulman 2020, "Approximating KL Divergence"); the ratio makes
    it and its gradient unbiased when the old network sampled (DeepSeek-V3.2, arXiv:2512.02556). A KL in closed form
    is an expectation already, so that it takes the place of both as it is.

    Args:
        inputs: the micro-batch.
        ratios: its ratios.

    Returns:
        (B, T), nats, with gradient.

    Raises:
        ConfigError: If there are neither reference log-probs nor a KL in closed form.
    """
    if inputs.kl_BT is not None:
        return inputs.kl_BT
    if inputs.ref_logprobs_BT is None:
        beta = ratios.settings.beta
        raise ConfigError(f"`beta` is {beta} but there are no reference log-probs. Score the reference, or set beta=0.")
    gap_BT = inputs.ref_logprobs_BT - inputs.logprobs_BT
    kl_BT = gap_BT.exp() - gap_BT - 1
    return kl_BT * ratios.ratio if ratios.settings.use_bias_correction_kl else kl_BT


def off_policy_mask(inputs: LossInputs, ratios: Ratios, threshold: float) -> Tensor:
    """Drops rows of negative advantage that the model has moved away from (DeepSeek-V3.2, arXiv:2512.02556).

    ``keep = A >= 0 or mean_t(log pi_sampler - log pi) <= threshold``. A NaN log-prob of the sampler counts as no
    difference.

    Args:
        inputs: the micro-batch; without the sampler's log-probs the old ones serve.
        ratios: its ratios.
        threshold: nats per action.

    Returns:
        (B, 1) or (B, T) like the advantages, 1 where kept.
    """
    if inputs.sampling_logprobs_BT is None:
        gap_BT = -ratios.log_ratio_BT.detach()
    else:
        gap_BT = (inputs.sampling_logprobs_BT - inputs.logprobs_BT.detach()).nan_to_num(nan=0.0)
    moved_B1 = row_mean(gap_BT, inputs.mask_BT)[:, None]
    return ((ratios.advantages >= 0) | (moved_B1 <= threshold)).to(gap_BT.dtype)


def _ratios(inputs: LossInputs, settings: LossSettings) -> Ratios:
    level = settings.importance_sampling_level
    if level not in LEVELS:
        known = ", ".join(LEVELS)
        raise ConfigError(f"`importance_sampling_level` is {level!r}, which is not known. Set it to one of {known}.")
    logprobs_BT, advantages = inputs.logprobs_BT, inputs.advantages_B
    # Without old log-probs they are the current ones: the ratio is exactly 1 and still carries the gradient.
    old_BT = logprobs_BT.detach() if inputs.old_logprobs_BT is None else inputs.old_logprobs_BT
    log_ratio_BT = logprobs_BT - old_BT
    log_ratio = log_ratio_BT if level == "token" else row_mean(log_ratio_BT, inputs.mask_BT)[:, None]
    return Ratios(
        logprobs_BT,
        log_ratio_BT,
        log_ratio.exp(),
        advantages[:, None] if advantages.dim() == 1 else advantages,
        inputs.mask_BT,
        inputs.importance_weights_BT,
        settings,
    )


def _losses(loss: Loss, ratios: Ratios) -> Tensor:
    """Gives the loss of each action or ratio."""
    told = f"loss_type {loss.name!r}"
    shapes = list(dict.fromkeys((tuple(ratios.logprobs_BT.shape), tuple(ratios.ratio.shape))))
    remedy = (
        "Return one number for each action or ratio, such as -ratios.ratio * ratios.advantages, without a sum or a "
        "mean; `aggregation` of its LossTraits averages."
    )
    losses = check_answer(told, loss.function(ratios), shapes, remedy)
    if torch.is_grad_enabled() and ratios.logprobs_BT.requires_grad and not losses.requires_grad:
        raise ConfigError(
            f"{told} gave a tensor without gradient. Compute it from ratio, log_ratio_BT or logprobs_BT of its Ratios, "
            "and do not detach it."
        )
    return losses


def _common_sums(inputs: LossInputs, ratios: Ratios, kl_BT: Tensor | None) -> dict[str, Tensor]:
    mask_BT = inputs.mask_BT
    log_ratio_BT = ratios.log_ratio_BT.detach() * mask_BT
    log_ratio_B = log_ratio_BT.sum(1)
    sums = {
        "log_ratio": log_ratio_B.sum(),
        "log_ratio_rows": row_mean(log_ratio_BT, mask_BT, _row_counts(inputs)).sum(),
        "approx_kl": (log_ratio_BT.expm1() - log_ratio_BT).sum(),
        "approx_kl_rows": (log_ratio_B.expm1() - log_ratio_B).sum(),
    }
    if kl_BT is not None:
        sums["kl"] = (kl_BT.detach() * mask_BT).sum()
    if inputs.entropies_BT is not None:
        entropies_BT = inputs.entropies_BT.detach()
        sums["entropy"] = (entropies_BT * mask_BT).sum()
        sums["active_entropy"] = (entropies_BT * active_mask(inputs)).sum()
    return sums


def _row_counts(inputs: LossInputs) -> Tensor:
    """Gives the counted actions of each whole row, (B,)."""
    return inputs.mask_BT.sum(1) if inputs.row_counts_B is None else inputs.row_counts_B


def entropy_bonus(inputs: LossInputs, denominators: Denominators) -> Tensor:
    """Gives a micro-batch's share of the step's mean entropy over the actions that the policy loss acts on.

    Args:
        inputs: the micro-batch, with entropies.
        denominators: counts over the whole step.

    Returns:
        Scalar, nats, with gradient.

    Raises:
        ConfigError: If there are no entropies.
    """
    if inputs.entropies_BT is None:
        raise ConfigError(
            f"`entropy_coef` is {inputs.entropy_coef} but entropies were not computed. Compute them, or set it to 0."
        )
    return (inputs.entropies_BT * active_mask(inputs)).sum() / max(denominators.entropy_tokens, 1)


def active_mask(inputs: LossInputs) -> Tensor:
    """Marks, (B, T), the actions that count and, under an entropy mask, are among the most uncertain."""
    return inputs.mask_BT if inputs.entropy_mask_BT is None else inputs.mask_BT * inputs.entropy_mask_BT
