"""VESPO: a token's gradient weighed by a smooth function of its whole row's importance weight."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from memsafe_rl.ops.losses.core import Loss, LossTraits, Measures, Ratios, by_sign, register_loss, total

_LOG_FLOOR, _LOG_CEILING = math.log(1e-8), 20.0
"""Bounds of the log-weights, nats."""


def vespo_surrogate(ratios: Ratios) -> Tensor:
    """VESPO, ``-sg(phi(w)) A log pi``, w a whole row's importance weight (arXiv:2602.10693).

    Args:
        ratios: the micro-batch.

    Returns:
        (B, T).
    """
    return -vespo_weights(ratios) * ratios.advantages * ratios.logprobs_BT


def vespo_weights(ratios: Ratios) -> Tensor:
    """Returns ``phi(w) = e^lambda w^k e^(-lambda w)``, 1 at w = 1; k and lambda by the sign of A.

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
    power = by_sign(positive, settings.vespo_k_pos, settings.vespo_k_neg, ratios)
    decay = by_sign(positive, settings.vespo_lambda_pos, settings.vespo_lambda_neg, ratios).clamp(min=1e-4)
    log_phi = decay + power * log_weight_B1 - decay * log_weight_B1.exp()
    return log_phi.exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def measure_vespo(ratios: Ratios) -> Measures:
    """Sums VESPO's weights, ``vespo_phi`` of ``ratios``."""
    phi = vespo_weights(ratios)
    return Measures({"vespo_phi": total(phi, ratios.mask_BT), "ratios": total(torch.ones_like(phi), ratios.mask_BT)})


_TRAITS = LossTraits(("token",), weighs_sampler=True, every_row=False)
register_loss(Loss("vespo", vespo_surrogate, _TRAITS, measure_vespo, {"vespo/phi_seq_mean": ("vespo_phi", "ratios")}))
