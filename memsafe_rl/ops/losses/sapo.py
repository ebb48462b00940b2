"""SAPO: a soft gate in the place of the clip."""

from __future__ import annotations

from torch import Tensor

from memsafe_rl.ops.losses.core import Loss, LossTraits, Ratios, by_sign, register_loss


def sapo_surrogate(ratios: Ratios) -> Tensor:
    """SAPO, ``-(4 / tau) sigmoid(tau (r - 1)) A``, tau by the sign of A (arXiv:2511.20347).

    Args:
        ratios: the micro-batch.

    Returns:
        (B, T|1).
    """
    settings = ratios.settings
    tau = by_sign(ratios.advantages > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg, ratios)
    return -(tau * (ratios.ratio - 1)).sigmoid() * 4 / tau * ratios.advantages


_TRAITS = LossTraits(separable=True, aggregation="seq-mean-token-mean", every_row=False)
register_loss(Loss("sapo", sapo_surrogate, _TRAITS))
