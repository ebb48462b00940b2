"""Policy losses on rows × columns: what each loss does to a ratio, and what a micro-batch's share is divided by.

Axes: ``B`` rows, ``T`` columns, ``M`` entries of all rows laid end to end. Shapes written (B, T|1) are (B, 1) when a
row has one ratio (``importance_sampling_level="sequence"``) and (B, T) otherwise.

To add a loss: write its surrogate (a function of `Ratios` that gives the loss of each action), pick a reduction and a
measure, and enter the three in `LOSSES`. Nothing else names a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from memsafe_rl.errors import ConfigError
from memsafe_rl.types import Denominators, LossInputs, LossResult, LossSettings

_LOG_FLOOR, _LOG_CEILING = math.log(1e-8), 20.0
_TIE_NATS = 1e-4
"""Entropies closer than this may be equal: far above the rounding of another batch shape, far below what matters."""
"""Bounds of VESPO's log-weights, nats."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class Ratios:
    """What a surrogate sees of a micro-batch.

    Args:
        logprobs_BT: (B, T), nats, with gradient.
        log_ratio_BT: (B, T), ``log pi - log pi_old``, nats, with gradient.
        ratio: (B, T|1), importance ratio, with gradient.
        advantages: (B, 1) or (B, T).
        mask_BT: (B, T), 1 where an action counts.
        importance_weights: (B, T), (B, 1) or None, corrects another sampler.
        settings: the configuration.
    """

    logprobs_BT: Tensor
    log_ratio_BT: Tensor
    ratio: Tensor
    advantages: Tensor
    mask_BT: Tensor
    importance_weights: Tensor | None
    settings: LossSettings


class Measures(NamedTuple):
    """Detached scalars of a micro-batch, as `LossResult` holds them."""

    sums: Mapping[str, Tensor]
    lows: Mapping[str, Tensor] = {}
    highs: Mapping[str, Tensor] = {}


@dataclass(frozen=True)
class LossForm:
    """One entry of the registry.

    Args:
        surrogate: gives the loss of each action, (B, T) or (B, 1), before masks and KL.
        reduce: gives the micro-batch's share of the step's loss from the losses (B, T|1), the mask (B, T) and the
            counted actions of each whole row (B,).
        measure: gives the numbers reported for this loss.
        weighs_sampler: whether the surrogate itself uses the importance weights; if not, they multiply its result.
    """

    surrogate: Callable[[Ratios], Tensor]
    reduce: Callable[[Tensor, Tensor, Tensor, Denominators, LossSettings], Tensor]
    measure: Callable[[Ratios], Measures]
    weighs_sampler: bool = False


def policy_loss(inputs: LossInputs, settings: LossSettings, denominators: Denominators) -> LossResult:
    """Gives a micro-batch's share of an optimizer step's loss; the shares of any split add up to the same loss.

    ``loss = reduce(f(ratio, A) · keep · uncertain · w + beta · KL) - c · sum(H · mask · uncertain) / N_H``: f is the
    loss's surrogate, ``keep`` the off-policy mask, ``uncertain`` the entropy mask, w the importance weights, and

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
        ConfigError: If the loss or the ratio level is unknown, or a tensor that the settings need is missing.
    """
    form = _known(LOSSES, settings.loss_type, "loss_type")
    ratios = _ratios(inputs, settings)
    losses = form.surrogate(ratios)
    if settings.off_policy_mask_threshold is not None:
        losses = losses * off_policy_mask(inputs, ratios, settings.off_policy_mask_threshold)
    if inputs.entropy_mask_BT is not None:
        losses = losses * inputs.entropy_mask_BT
    if inputs.importance_weights_BT is not None and not form.weighs_sampler:
        losses = losses * inputs.importance_weights_BT
    kl_BT = reference_kl(inputs, ratios) if settings.beta != 0.0 else None
    if kl_BT is not None:
        losses = losses + settings.beta * kl_BT
    policy_share = form.reduce(losses, inputs.mask_BT, _row_counts(inputs), denominators, settings)
    loss = policy_share
    if inputs.entropy_coef != 0.0:
        loss = loss - inputs.entropy_coef * entropy_bonus(inputs, denominators)
    with torch.no_grad():
        measures = form.measure(ratios)
        sums = {"policy_loss": policy_share.detach(), **_common_sums(inputs, ratios, kl_BT), **measures.sums}
    return LossResult(loss, sums, measures.lows, measures.highs)


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
    moved_B1 = _row_mean(gap_BT, inputs.mask_BT)[:, None]
    return ((ratios.advantages >= 0) | (moved_B1 <= threshold)).to(gap_BT.dtype)


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
    return (inputs.entropies_BT * _active_mask(inputs)).sum() / max(denominators.entropy_tokens, 1)


def entropy_threshold(entropies_M: Tensor, mask_M: Tensor, top_entropy_quantile: float) -> Tensor:
    """Gives the entropy above which the given share of a whole step's counted actions lies.

    The ``1 - top_entropy_quantile`` quantile, interpolated between neighbours ("Beyond the 80/20 Rule",
    arXiv:2506.01939). Reads no value on the host. Departure from TRL: over the whole optimizer step.

    Args:
        entropies_M: (M,), nats, of all actions of the step.
        mask_M: (M,), 1 where an action counts.
        top_entropy_quantile: share of actions kept, in [0, 1].

    Returns:
        Scalar float32, nats; +inf if no action counts.
    """
    counted_M = mask_M.bool()
    sorted_M = torch.where(counted_M, entropies_M.detach().float(), math.inf).sort().values
    sorted_M = torch.cat([sorted_M, sorted_M.new_full((1,), math.inf)])
    last = (counted_M.sum() - 1).clamp(min=0)
    # Rounded, so that 0.2 · 10 = 2.0000000000000004 does not ask for a value above the third.
    rank = ((1 - top_entropy_quantile) * last.double()).mul(1e9).round().div(1e9)
    below = rank.floor().long()
    low, high = sorted_M.take(torch.stack([below, torch.minimum(below + 1, last)])).unbind()
    return torch.where(rank == below, low, torch.lerp(low, high, (rank - below).float()))


def high_entropy_mask(entropies_BT: Tensor, mask_BT: Tensor, threshold: Tensor) -> Tensor:
    """Marks counted actions whose entropy reaches the step's threshold, up to a tie of 1e-4 nats.

    First actions of one prompt have one entropy, which rounds differently with the batch's shape; where the threshold
    falls on it, all of them are marked. TRL marks those that happened to be rounded up.

    Args:
        entropies_BT: (B, T), nats.
        mask_BT: (B, T), 1 where an action counts.
        threshold: scalar from `entropy_threshold`, nats.

    Returns:
        (B, T), of the mask's type, 1 where marked.
    """
    return ((entropies_BT.detach() >= threshold - _TIE_NATS) & mask_BT.bool()).to(mask_BT.dtype)


class EntropyControl(NamedTuple):
    """The state of the adaptive entropy bonus between optimizer steps.

    Args:
        coef: the controller's coefficient.
        last_entropy: nats, mean over the actions of the last step; +inf before the first.
    """

    coef: float
    last_entropy: float = math.inf


def adaptive_entropy_coef(
    control: EntropyControl, entropy: float, *, target: float, delta: float, minimum: float, maximum: float
) -> EntropyControl:
    """Moves the entropy coefficient after an optimizer step: up by ``delta`` at or under the target, else down.

    The controller of Skywork-OR1 (arXiv:2505.22312).

    Args:
        control: the state before.
        entropy: nats, mean over the actions that the bonus saw, over the whole step and all ranks.
        target: nats.
        delta: size of a move.
        minimum: least coefficient.
        maximum: greatest coefficient.

    Returns:
        The state after; `applied_entropy_coef` says what the next step uses.
    """
    coef = min(control.coef + delta, maximum) if entropy <= target else max(control.coef - delta, minimum)
    return EntropyControl(coef, entropy)


def applied_entropy_coef(control: EntropyControl, target: float) -> float:
    """Gives the coefficient of the next step: the controller's at or under the target, otherwise 0.

    Args:
        control: the state after the last step.
        target: nats.

    Returns:
        The coefficient.
    """
    return control.coef if control.last_entropy <= target else 0.0


def clipped_surrogate(ratios: Ratios) -> Tensor:
    """PPO's clipped objective, ``-min(min(r, delta) A, clip(r, 1 - e_low, 1 + e_high) A)``.

    PPO, arXiv:1707.06347, eq. 7; the two ranges are DAPO's (arXiv:2503.14476, eq. 8), ``delta`` is INTELLECT-2's
    (arXiv:2505.07291).

    Args:
        ratios: the micro-batch.

    Returns:
        (B, T|1).
    """
    settings = ratios.settings
    clipped = ratios.ratio.clamp(1 - settings.epsilon_low, 1 + settings.epsilon_high)
    return -torch.min(_bounded(ratios) * ratios.advantages, clipped * ratios.advantages)


def cispo_surrogate(ratios: Ratios) -> Tensor:
    """CISPO, ``-sg(min(r, e_high)) A log pi`` (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5), the bound itself is e_high.

    Args:
        ratios: the micro-batch.

    Returns:
        (B, T).
    """
    bounded = ratios.ratio.detach().clamp(max=ratios.settings.epsilon_high)
    return -bounded * ratios.advantages * ratios.logprobs_BT


def sapo_surrogate(ratios: Ratios) -> Tensor:
    """SAPO, ``-(4 / tau) sigmoid(tau (r - 1)) A``, tau by the sign of A (arXiv:2511.20347).

    Args:
        ratios: the micro-batch.

    Returns:
        (B, T|1).
    """
    settings = ratios.settings
    tau = _by_sign(ratios.advantages > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg, ratios)
    return -(tau * (ratios.ratio - 1)).sigmoid() * 4 / tau * ratios.advantages


def vespo_surrogate(ratios: Ratios) -> Tensor:
    """VESPO, ``-sg(phi(w)) A log pi``, w a whole row's importance weight (arXiv:2602.10693).

    Args:
        ratios: the micro-batch.

    Returns:
        (B, T).
    """
    return -vespo_weights(ratios) * ratios.advantages * ratios.logprobs_BT


def vespo_weights(ratios: Ratios) -> Tensor:
    """Gives ``phi(w) = e^lambda w^k e^(-lambda w)``, 1 at w = 1; k and lambda by the sign of A.

    ``log w`` sums a row's clamped log-ratios and log importance weights; everything is done in logarithms.

    Args:
        ratios: the micro-batch.

    Returns:
        (B, 1) or (B, T) like the advantages, without gradient.
    """
    settings = ratios.settings
    log_ratio_BT = ratios.log_ratio_BT.detach().clamp(-_LOG_CEILING, _LOG_CEILING)
    log_weight_B1 = (log_ratio_BT * ratios.mask_BT).sum(1, keepdim=True)
    if ratios.importance_weights is not None:
        log_sampler = ratios.importance_weights.log().clamp(_LOG_FLOOR, _LOG_CEILING)
        # A row's single weight counts once; in padding a weight is no evidence.
        counted = log_sampler if log_sampler.shape[1] == 1 else log_sampler * ratios.mask_BT
        log_weight_B1 = log_weight_B1 + counted.sum(1, keepdim=True)
    log_weight_B1 = log_weight_B1.clamp(_LOG_FLOOR, _LOG_CEILING)
    positive = ratios.advantages >= 0
    power = _by_sign(positive, settings.vespo_k_pos, settings.vespo_k_neg, ratios)
    decay = _by_sign(positive, settings.vespo_lambda_pos, settings.vespo_lambda_neg, ratios).clamp(min=1e-4)
    log_phi = decay + power * log_weight_B1 - decay * log_weight_B1.exp()
    return log_phi.exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def mean_of_row_means(
    losses: Tensor, mask_BT: Tensor, counts_B: Tensor, denominators: Denominators, settings: LossSettings
) -> Tensor:
    """Averages each row over its actions, then rows: ``sum_b (1 / |o_b|) sum_t l / N_rows``.

    GRPO, arXiv:2402.03300, eq. 3.

    Args:
        losses: (B, T|1).
        mask_BT: (B, T), 1 where an action counts.
        counts_B: (B,), counted actions of each whole row.
        denominators: counts over the whole step.
        settings: the configuration.

    Returns:
        Scalar.
    """
    del settings
    return _row_mean(losses, mask_BT, counts_B).sum() / max(denominators.rows, 1)


def mean_of_tokens(
    losses: Tensor, mask_BT: Tensor, counts_B: Tensor, denominators: Denominators, settings: LossSettings
) -> Tensor:
    """Averages over all actions of the step: ``sum l / N_tokens``.

    DAPO, arXiv:2503.14476, eq. 8. BNPO, which divides by the tokens of its own batch, is the same over a step.

    Args:
        losses: (B, T|1).
        mask_BT: (B, T), 1 where an action counts.
        counts_B: (B,), counted actions of each whole row.
        denominators: counts over the whole step.
        settings: the configuration.

    Returns:
        Scalar.
    """
    del settings, counts_B
    return (losses * mask_BT).sum() / max(denominators.tokens, 1)


def mean_of_slots(
    losses: Tensor, mask_BT: Tensor, counts_B: Tensor, denominators: Denominators, settings: LossSettings
) -> Tensor:
    """Divides by a constant: ``sum l / (N_rows · max_completion_length)``.

    Dr. GRPO, arXiv:2503.20783.

    Args:
        losses: (B, T|1).
        mask_BT: (B, T), 1 where an action counts.
        counts_B: (B,), counted actions of each whole row.
        denominators: counts over the whole step.
        settings: the configuration.

    Returns:
        Scalar.
    """
    del counts_B
    return (losses * mask_BT).sum() / (max(denominators.rows, 1) * settings.max_completion_length)


def mean_of_row_sums(
    losses: Tensor, mask_BT: Tensor, counts_B: Tensor, denominators: Denominators, settings: LossSettings
) -> Tensor:
    """Sums each row, then averages rows: ``sum l / N_rows``.

    LUSPO, arXiv:2602.05261: a row of one ratio weighs by its length.

    Args:
        losses: (B, T|1).
        mask_BT: (B, T), 1 where an action counts.
        counts_B: (B,), counted actions of each whole row.
        denominators: counts over the whole step.
        settings: the configuration.

    Returns:
        Scalar.
    """
    del settings, counts_B
    return (losses * mask_BT).sum() / max(denominators.rows, 1)


def measure_clipping(ratios: Ratios) -> Measures:
    """Counts ratios that clipping holds back, under TRL's conditions.

    ``sums``: ``clip_low``, ``clip_high``, ``clip_region`` and ``ratios`` (how many there are: divide by it); ``lows``
    and ``highs``: the least share of low-clipped and the greatest of high-clipped ratios in a row.

    Args:
        ratios: the micro-batch.

    Returns:
        The measures.
    """
    settings, advantages = ratios.settings, ratios.advantages
    bounded = _bounded(ratios)
    low = (bounded < 1 - settings.epsilon_low) & (advantages < 0)
    high = (bounded > 1 + settings.epsilon_high) & (advantages > 0)
    sums = {
        "clip_low": _total(low, ratios.mask_BT),
        "clip_high": _total(high, ratios.mask_BT),
        "clip_region": _total(low | high, ratios.mask_BT),
        "ratios": _total(torch.ones_like(low), ratios.mask_BT),
    }
    lows = {"clip_low": _row_shares(low, ratios.mask_BT, math.inf).amin()}
    return Measures(sums, lows, {"clip_high": _row_shares(high, ratios.mask_BT, -math.inf).amax()})


def measure_cispo(ratios: Ratios) -> Measures:
    """Counts ratios over CISPO's bound with a positive advantage, ``cispo_clip`` of ``ratios``.

    Args:
        ratios: the micro-batch.

    Returns:
        The measures.
    """
    over = (ratios.ratio > ratios.settings.epsilon_high) & (ratios.advantages > 0)
    return Measures(
        {
            "cispo_clip": _total(over, ratios.mask_BT),
            "ratios": _total(torch.ones_like(over), ratios.mask_BT),
        }
    )


def measure_vespo(ratios: Ratios) -> Measures:
    """Sums VESPO's weights, ``vespo_phi`` of ``ratios``.

    Args:
        ratios: the micro-batch.

    Returns:
        The measures.
    """
    phi = vespo_weights(ratios)
    return Measures({"vespo_phi": _total(phi, ratios.mask_BT), "ratios": _total(torch.ones_like(phi), ratios.mask_BT)})


def measure_nothing(ratios: Ratios) -> Measures:
    """Reports nothing beyond what every loss does.

    Args:
        ratios: the micro-batch.

    Returns:
        The measures.
    """
    del ratios
    return Measures({})


LOSSES: dict[str, LossForm] = {
    "grpo": LossForm(clipped_surrogate, mean_of_row_means, measure_clipping),
    "dr_grpo": LossForm(clipped_surrogate, mean_of_slots, measure_clipping),
    "dapo": LossForm(clipped_surrogate, mean_of_tokens, measure_clipping),
    "bnpo": LossForm(clipped_surrogate, mean_of_tokens, measure_clipping),
    "cispo": LossForm(cispo_surrogate, mean_of_tokens, measure_cispo),
    "sapo": LossForm(sapo_surrogate, mean_of_row_means, measure_nothing),
    "luspo": LossForm(clipped_surrogate, mean_of_row_sums, measure_clipping),
    "vespo": LossForm(vespo_surrogate, mean_of_tokens, measure_vespo, weighs_sampler=True),
}
"""Every loss by its name in the configuration."""


def _token_level(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    del mask_BT
    return log_ratio_BT


def _sequence_level(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return _row_mean(log_ratio_BT, mask_BT)[:, None]


_LEVELS = {"token": _token_level, "sequence": _sequence_level}


def _ratios(inputs: LossInputs, settings: LossSettings) -> Ratios:
    logprobs_BT, advantages = inputs.logprobs_BT, inputs.advantages_B
    # Without old log-probs they are the current ones: the ratio is exactly 1 and still carries the gradient.
    old_BT = logprobs_BT.detach() if inputs.old_logprobs_BT is None else inputs.old_logprobs_BT
    log_ratio_BT = logprobs_BT - old_BT
    level = _known(_LEVELS, settings.importance_sampling_level, "importance_sampling_level")
    return Ratios(
        logprobs_BT,
        log_ratio_BT,
        level(log_ratio_BT, inputs.mask_BT).exp(),
        advantages[:, None] if advantages.dim() == 1 else advantages,
        inputs.mask_BT,
        inputs.importance_weights_BT,
        settings,
    )


def _common_sums(inputs: LossInputs, ratios: Ratios, kl_BT: Tensor | None) -> dict[str, Tensor]:
    mask_BT = inputs.mask_BT
    log_ratio_BT = ratios.log_ratio_BT.detach() * mask_BT
    log_ratio_B = log_ratio_BT.sum(1)
    sums = {
        "log_ratio": log_ratio_B.sum(),
        "log_ratio_rows": _row_mean(log_ratio_BT, mask_BT, _row_counts(inputs)).sum(),
        "approx_kl": (log_ratio_BT.expm1() - log_ratio_BT).sum(),
        "approx_kl_rows": (log_ratio_B.expm1() - log_ratio_B).sum(),
    }
    if kl_BT is not None:
        sums["kl"] = (kl_BT.detach() * mask_BT).sum()
    if inputs.entropies_BT is not None:
        entropies_BT = inputs.entropies_BT.detach()
        sums["entropy"] = (entropies_BT * mask_BT).sum()
        sums["active_entropy"] = (entropies_BT * _active_mask(inputs)).sum()
    return sums


def _active_mask(inputs: LossInputs) -> Tensor:
    return inputs.mask_BT if inputs.entropy_mask_BT is None else inputs.mask_BT * inputs.entropy_mask_BT


def _bounded(ratios: Ratios) -> Tensor:
    delta = ratios.settings.delta
    return ratios.ratio if delta is None else ratios.ratio.clamp(max=delta)


def _by_sign(positive: Tensor, if_positive: float, otherwise: float, ratios: Ratios) -> Tensor:
    like = ratios.logprobs_BT
    return torch.where(positive, like.new_full((), if_positive), like.new_full((), otherwise))


def _row_mean(values: Tensor, mask_BT: Tensor, counts_B: Tensor | None = None) -> Tensor:
    """Averages (B, T|1) over counted actions, (B,); 0 for a row without any. Given counts are those of whole rows."""
    counts_B = mask_BT.sum(1) if counts_B is None else counts_B
    return (values * mask_BT).sum(1) / counts_B.clamp(min=1)


def _row_counts(inputs: LossInputs) -> Tensor:
    """Gives the counted actions of each whole row, (B,)."""
    return inputs.mask_BT.sum(1) if inputs.row_counts_B is None else inputs.row_counts_B


def _total(values: Tensor, mask_BT: Tensor) -> Tensor:
    """Sums (B, T) over counted actions, or (B, 1) over rows."""
    return values.sum() if values.shape[1] == 1 else (values * mask_BT).sum()


def _row_shares(marks: Tensor, mask_BT: Tensor, if_empty: float) -> Tensor:
    """Gives the share of marked ratios in each row, (B,)."""
    if marks.shape[1] == 1:
        return marks[:, 0].float()
    return torch.where(mask_BT.sum(1) > 0, _row_mean(marks.float(), mask_BT), if_empty)


def _known(table: Mapping[str, Value], name: str, field: str) -> Value:
    if name not in table:
        raise ConfigError(f"`{field}` is {name!r}, which is not known. Set it to one of {', '.join(sorted(table))}.")
    return table[name]
