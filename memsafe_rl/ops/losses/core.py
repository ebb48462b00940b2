"""What a loss is, what losses share, and the policy loss of a micro-batch: ratios, masks, KL, bonus and measures.

Axes: ``B`` rows, ``T`` columns. Shapes written (B, T|1) are (B, 1) when a row has one ratio
(``importance_sampling_level`` is "sequence" or "sequence_sum") and (B, T) otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from memsafe_rl.errors import ConfigError
from memsafe_rl.ops.registry import Registry, check_part, wrong_answer
from memsafe_rl.types import Denominators, LossInputs, LossResult, LossSettings

LEVELS = ("sequence", "sequence_sum", "token")
"""What has a ratio of its own."""

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
"""Every way to average, by the name that verl gives it."""

CLIPPING_METRICS = {f"clip_ratio/{side}_mean": (f"clip_{side}", None) for side in ("low", "high", "region")}
"""The metrics that `measure_clipping` gives, as `Loss` holds them."""


def policy_loss(inputs: LossInputs, settings: LossSettings, denominators: Denominators) -> LossResult:
    """Returns a micro-batch's share of an optimizer step's loss; the shares of any split add up to the same loss.

    ``loss = aggregate(f(ratio, A) · keep · uncertain · w + beta · KL) - c · sum(H · mask · uncertain) / N_H``: f is the
    chosen loss, ``keep`` the off-policy mask, ``uncertain`` the entropy mask, w the importance weights, and

    - ``ratio = exp(log pi - log pi_old)`` per token, or exp of its mean over a row (GSPO, arXiv:2507.18071, eq. 7)
      or of its sum (RLOO, arXiv:2402.14740);
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
        losses = losses * _keeps(inputs, ratios, settings.off_policy_mask_threshold)
    if inputs.entropy_mask_BT is not None:
        losses = losses * inputs.entropy_mask_BT
    if inputs.importance_weights_BT is not None and not loss.traits.weighs_sampler:
        losses = losses * inputs.importance_weights_BT
    kl_BT = _reference_kl(inputs, ratios) if settings.beta != 0.0 else None
    if kl_BT is not None:
        losses = losses + settings.beta * kl_BT
    how, slots = loss.traits.aggregation, settings.max_completion_length
    policy_share = _aggregate(how, losses, inputs.mask_BT, _row_counts(inputs), denominators, slots)
    share = policy_share
    if inputs.entropy_coef != 0.0:
        share = share - inputs.entropy_coef * _entropy_bonus(inputs, denominators)
    with torch.no_grad():
        measures = loss.measure(ratios)
        if not isinstance(measures, Measures):
            raise ConfigError(f"measure of loss {loss.name!r} gave {measures!r:.80}. Return Measures({{...}}).")
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
        "importance_sampling_level": settings.importance_sampling_level != "token",
        "loss_type": not LOSSES[settings.loss_type].traits.separable,
        "off_policy_mask_threshold": settings.off_policy_mask_threshold is not None,
    }
    return [name for name, is_needed in whole.items() if is_needed]


def _reference_kl(inputs: LossInputs, ratios: Ratios) -> Tensor:
    """Returns the KL to the reference per action, (B, T), nats, with gradient.

    The ratio makes k3 and its gradient unbiased when the old network sampled. A KL in closed form is an expectation
    already, so that it takes the place of both as it is.
    """
    if inputs.kl_BT is not None:
        return inputs.kl_BT
    if inputs.ref_logprobs_BT is None:
        beta = ratios.settings.beta
        raise ConfigError(f"`beta` is {beta} but there are no reference log-probs. Score the reference, or set beta=0.")
    gap_BT = inputs.ref_logprobs_BT - inputs.logprobs_BT
    # where nothing else has a gradient, optimizers and merges would make whole steps of rounding
    gap_BT = gap_BT * beyond_rounding(gap_BT)
    kl_BT = gap_BT.exp() - gap_BT - 1
    return kl_BT * ratios.ratio if ratios.settings.use_bias_correction_kl else kl_BT


def beyond_rounding(gap_BT: Tensor) -> Tensor:
    """Marks log-probs that differ by more than rounding: ``|gap| > eps^0.75``, 6e-6 in float32.

    Args:
        gap_BT: (B, T), nats.

    Returns:
        (B, T) bool.
    """
    return gap_BT.detach().abs().gt(torch.finfo(gap_BT.dtype).eps ** 0.75)


def off_policy_mask(
    advantages: Tensor, logprobs_BT: Tensor, sampling_logprobs_BT: Tensor, mask_BT: Tensor, threshold: float
) -> Tensor:
    """Drops rows of negative advantage that the model has moved away from (DeepSeek-V3.2, arXiv:2512.02556).

    ``keep = A >= 0 or mean_t(log pi_sampler - log pi) <= threshold``; a NaN of the sampler counts as no difference.

    Args:
        advantages: (B, 1) or (B, T).
        logprobs_BT: (B, T), nats, of the model.
        sampling_logprobs_BT: (B, T), nats, of what drew the tokens.
        mask_BT: (B, T), 1 where an action counts.
        threshold: most that a row's mean may differ, nats.

    Returns:
        Of the advantages' shape, 1 for rows that are kept.
    """
    gap_BT = (sampling_logprobs_BT - logprobs_BT.detach()).nan_to_num(nan=0.0)
    return ((advantages >= 0) | (row_mean(gap_BT, mask_BT)[:, None] <= threshold)).to(gap_BT.dtype)


def _keeps(inputs: LossInputs, ratios: Ratios, threshold: float) -> Tensor:
    """Applies the off-policy mask; without the sampler's log-probs the old ones serve."""
    sampler_BT, log_ratio_BT = inputs.sampling_logprobs_BT, ratios.log_ratio_BT
    gaps = (log_ratio_BT, torch.zeros_like(log_ratio_BT)) if sampler_BT is None else (inputs.logprobs_BT, sampler_BT)
    return off_policy_mask(ratios.advantages, *gaps, inputs.mask_BT, threshold)


def _ratios(inputs: LossInputs, settings: LossSettings) -> Ratios:
    level = settings.importance_sampling_level
    if level not in LEVELS:
        known = ", ".join(LEVELS)
        raise ConfigError(f"`importance_sampling_level` is {level!r}, which is not known. Set it to one of {known}.")
    logprobs_BT, advantages = inputs.logprobs_BT, inputs.advantages_B
    # Without old log-probs they are the current ones: the ratio is exactly 1 and still carries the gradient.
    old_BT = logprobs_BT.detach() if inputs.old_logprobs_BT is None else inputs.old_logprobs_BT
    log_ratio_BT = logprobs_BT - old_BT
    by_level = {
        "token": lambda: log_ratio_BT,
        "sequence": lambda: row_mean(log_ratio_BT, inputs.mask_BT)[:, None],
        "sequence_sum": lambda: (log_ratio_BT * inputs.mask_BT).sum(1, keepdim=True),
    }
    return Ratios(
        logprobs_BT,
        log_ratio_BT,
        by_level[level]().exp(),
        advantages[:, None] if advantages.dim() == 1 else advantages,
        inputs.mask_BT,
        inputs.importance_weights_BT,
        settings,
        inputs.entropy_mask_BT,
        inputs.marks_BT,
    )


def _losses(loss: Loss, ratios: Ratios) -> Tensor:
    """Returns the loss of each action or ratio."""
    losses, told = loss.function(ratios), f"loss_type {loss.name!r}"
    shapes = dict.fromkeys((tuple(ratios.logprobs_BT.shape), tuple(ratios.ratio.shape)))
    if not isinstance(losses, Tensor) or tuple(losses.shape) not in shapes or not losses.is_floating_point():
        remedy = "one number for each action or ratio, without a sum or a mean; `aggregation` of LossTraits averages"
        raise wrong_answer(told, losses, shapes, remedy)
    if torch.is_grad_enabled() and ratios.logprobs_BT.requires_grad and not losses.requires_grad:
        raise ConfigError(f"{told} gave a tensor without gradient. Compute it from its Ratios, and do not detach it.")
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
    """Returns the counted actions of each whole row, (B,)."""
    return inputs.mask_BT.sum(1) if inputs.row_counts_B is None else inputs.row_counts_B


def _entropy_bonus(inputs: LossInputs, denominators: Denominators) -> Tensor:
    """Returns a micro-batch's share of the step's mean entropy, nats, over the actions that the policy loss acts on."""
    if inputs.entropies_BT is None:
        raise ConfigError(
            f"`entropy_coef` is {inputs.entropy_coef} but entropies were not computed. Compute them, or set it to 0."
        )
    return (inputs.entropies_BT * active_mask(inputs)).sum() / max(denominators.entropy_tokens, 1)


def active_mask(inputs: LossInputs) -> Tensor:
    """Marks, (B, T), the actions that count and, under an entropy mask, are among the most uncertain."""
    return inputs.mask_BT if inputs.entropy_mask_BT is None else inputs.mask_BT * inputs.entropy_mask_BT


@dataclass(frozen=True)
class Ratios:
    """What a loss sees of a micro-batch.

    Args:
        logprobs_BT: (B, T), nats, with gradient.
        log_ratio_BT: (B, T), ``log pi - log pi_old``, nats, with gradient.
        ratio: (B, T|1), importance ratio, with gradient.
        advantages: (B, 1) or (B, T).
        mask_BT: (B, T), 1 where an action counts.
        importance_weights: (B, T), (B, 1) or None, corrects another sampler.
        settings: the configuration.
        entropy_mask_BT: (B, T), 1 where an action is among the most uncertain, else no loss; None where all count.
        marks_BT: (B, T), 1 where `Loss.mark` marked an action; None where nothing is marked.
    """

    logprobs_BT: Tensor
    log_ratio_BT: Tensor
    ratio: Tensor
    advantages: Tensor
    mask_BT: Tensor
    importance_weights: Tensor | None
    settings: LossSettings
    entropy_mask_BT: Tensor | None = None
    marks_BT: Tensor | None = None


class StepTokens(NamedTuple):
    """All actions of an optimizer step over all ranks, rows laid end to end, before anything is cut.

    Args:
        logprobs_M: (M,) float64, nats, under the present weights.
        log_ratio_M: (M,) float64, ``log pi - log pi_old``, nats; 0 where the old ones are the present ones.
        advantages_M: (M,) float64.
        mask_M: (M,) bool, whether an action counts.
        uniforms_M: (M,) float64 between 0 and 1, a hash of seed, step, row and column: random, and always the same.
    """

    logprobs_M: Tensor
    log_ratio_M: Tensor
    advantages_M: Tensor
    mask_M: Tensor
    uniforms_M: Tensor


class Measures(NamedTuple):
    """Detached scalars of a micro-batch, as `LossResult` holds them."""

    sums: Mapping[str, Tensor]
    lows: Mapping[str, Tensor] = {}
    highs: Mapping[str, Tensor] = {}


@dataclass(frozen=True)
class LossTraits:
    """What the trainer must know of a loss besides its equation.

    Args:
        levels: values of ``importance_sampling_level`` that suit it, the best first; another one is warned of.
        separable: whether an action's loss depends on its own column alone, so that the columns of a row may be
            learnt one by one (denoising steps) and a row may be cut in two.
        aggregation: how losses of actions become the loss of a step, one of `AGGREGATIONS`.
        weighs_sampler: whether the loss itself uses the importance weights; if not, they multiply its result.
        tokens_only: whether it compares probabilities, which tokens have and denoising steps have not.
        every_row: False if its gradient is 0 wherever the advantage is 0; rows whose advantage is 0 are then skipped.

    Raises:
        ConfigError: If a level or the aggregation is unknown.
    """

    levels: tuple[str, ...] = ("token", "sequence")
    separable: bool = False
    aggregation: str = "token-mean"
    weighs_sampler: bool = False
    tokens_only: bool = False
    every_row: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.levels, tuple) or not self.levels or not {*self.levels} <= {*LEVELS}:
            raise ConfigError(f"levels of a loss are {self.levels!r}; write a tuple of {', '.join(LEVELS)}.")
        if self.aggregation not in AGGREGATIONS:
            known = ", ".join(AGGREGATIONS)
            raise ConfigError(f"aggregation of a loss is {self.aggregation!r}, which is not known. Set one of {known}.")

    @property
    def adds_up_over_parts(self) -> bool:
        """Whether a row cut into several rows has the same loss."""
        return self.separable and self.aggregation == "token-mean"


@dataclass(frozen=True)
class Loss:
    """A policy loss, built in or a user's own: ``GRPOConfig(loss_type=Loss("mine", my_function))``.

    Args:
        name: its name in configurations, logs and checkpoints.
        function: gives the loss of each action, (B, T) or (B, 1), from `Ratios`, before masks and KL.
        traits: what the trainer must know of it.
        measure: gives the numbers reported for it.
        metrics: by metric, the sum of ``measure`` it shows, and the sum that divides it; None for the step's ratios.
        mark: marks actions, (M,) bool, of a whole step that is scored first; ``function`` finds them in its `Ratios`.
            None for a loss that needs none.

    Raises:
        ConfigError: The name is no text, ``metrics`` no mapping, or ``function``, ``measure`` or ``mark`` no function.
    """

    name: str
    function: Callable[[Ratios], Tensor]
    traits: LossTraits = LossTraits()
    measure: Callable[[Ratios], Measures] = lambda _: Measures({})
    metrics: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    mark: Callable[[StepTokens, LossSettings], Tensor] | None = None

    def __post_init__(self) -> None:
        check_part(self)
        if not all((isinstance(self.traits, LossTraits), callable(self.measure), isinstance(self.metrics, Mapping))):
            given = f"traits {self.traits!r:.80}, measure {self.measure!r:.80} and metrics {self.metrics!r:.80}"
            raise ConfigError(f"loss {self.name!r} has {given}; give LossTraits(...), a function and a mapping.")
        if self.mark is not None and not callable(self.mark):
            raise ConfigError(f"loss {self.name!r} has mark {self.mark!r:.80}; give a function, or None.")


LOSSES: Registry[Loss] = Registry("loss_type", Loss)
"""Every loss by its name in the configuration."""

register_loss = LOSSES.add
"""Makes a loss known by name, for run files and settings read back; passing it as ``loss_type`` does so too."""


def by_sign(positive: Tensor, if_positive: float, otherwise: float, ratios: Ratios) -> Tensor:
    """Chooses one of two numbers where advantages are positive or not, of the micro-batch's type."""
    like = ratios.logprobs_BT
    return torch.where(positive, like.new_full((), if_positive), like.new_full((), otherwise))


def _aggregate(
    how: str, losses: Tensor, mask_BT: Tensor, counts_B: Tensor, denominators: Denominators, slots: int
) -> Tensor:
    """Returns a micro-batch's share of the step's loss.

    - ``token-mean``: ``sum l / N_tokens`` (DAPO, arXiv:2503.14476, eq. 8);
    - ``seq-mean-token-mean``: ``sum_b (1 / |o_b|) sum_t l / N_rows`` (GRPO, arXiv:2402.03300, eq. 3);
    - ``seq-mean-token-sum``: ``sum l / N_rows`` (LUSPO, arXiv:2602.05261: a row of one ratio weighs by its length);
    - ``seq-mean-token-sum-norm``: ``sum l / (N_rows · slots)``, slots that a row has (Dr. GRPO, arXiv:2503.20783).
    """
    rows, tokens = max(denominators.rows, 1), max(denominators.tokens, 1)
    if how == "seq-mean-token-mean":
        return row_mean(losses, mask_BT, counts_B).sum() / rows
    divisors = {"token-mean": tokens, "seq-mean-token-sum": rows, "seq-mean-token-sum-norm": rows * slots}
    return (losses * mask_BT).sum() / divisors[how]


def row_mean(values: Tensor, mask_BT: Tensor, counts_B: Tensor | None = None) -> Tensor:
    """Averages (B, T|1) over each row's counted actions, (B,), 0 where none is; given counts are of whole rows."""
    counts_B = mask_BT.sum(1) if counts_B is None else counts_B
    return (values * mask_BT).sum(1) / counts_B.clamp(min=1)


def total(values: Tensor, mask_BT: Tensor) -> Tensor:
    """Sums (B, T) over counted actions, or (B, 1) over rows."""
    return values.sum() if values.shape[1] == 1 else (values * mask_BT).sum()


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
    return -torch.min(bounded_ratio(ratios) * ratios.advantages, clipped * ratios.advantages)


def measure_clipping(ratios: Ratios) -> Measures:
    """Counts ratios that clipping holds back, under TRL's conditions, as `count_marks` does."""
    settings, bounded = ratios.settings, bounded_ratio(ratios)
    low = (bounded < 1 - settings.epsilon_low) & (ratios.advantages < 0)
    return count_marks(ratios, low, (bounded > 1 + settings.epsilon_high) & (ratios.advantages > 0))


def count_marks(ratios: Ratios, low: Tensor, high: Tensor) -> Measures:
    """Counts what a loss holds back, under the names of `CLIPPING_METRICS`.

    Args:
        ratios: the micro-batch.
        low: (B, T|1) bool, held back below the trust region.
        high: likewise above it.

    Returns:
        ``sums``: ``clip_low``, ``clip_high``, ``clip_region`` and ``ratios`` (how many there are: divide by it);
        ``lows`` and ``highs``: the least share of low marks and the greatest of high ones in a row.
    """
    sums = {
        "clip_low": total(low, ratios.mask_BT),
        "clip_high": total(high, ratios.mask_BT),
        "clip_region": total(low | high, ratios.mask_BT),
        "ratios": total(torch.ones_like(low), ratios.mask_BT),
    }
    lows = {"clip_low": _row_shares(low, ratios.mask_BT, math.inf).amin()}
    return Measures(sums, lows, {"clip_high": _row_shares(high, ratios.mask_BT, -math.inf).amax()})


def bounded_ratio(ratios: Ratios) -> Tensor:
    """Returns the ratio, (B, T|1), at most ``delta``."""
    delta = ratios.settings.delta
    return ratios.ratio if delta is None else ratios.ratio.clamp(max=delta)


def _row_shares(marks: Tensor, mask_BT: Tensor, if_empty: float) -> Tensor:
    """Returns the share of marked ratios in each row, (B,)."""
    if marks.shape[1] == 1:
        return marks[:, 0].float()
    return torch.where(mask_BT.sum(1) > 0, row_mean(marks.float(), mask_BT), if_empty)


def register_clipped_loss(name: str, traits: LossTraits) -> None:
    """Makes known a loss of PPO's clipped objective, which differs from the others by its traits alone."""
    traits = replace(traits, every_row=False)  # it is proportional to the advantage
    register_loss(Loss(name, clipped_surrogate, traits, measure_clipping, CLIPPING_METRICS))
