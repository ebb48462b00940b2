"""Entropy of the model's choices: the controller of its bonus, and the mask that keeps the most uncertain actions.

Axes: ``B`` rows, ``T`` columns, ``M`` entries of all rows laid end to end.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_TIE_NATS = 1e-4
"""Entropies closer than this may be equal: far above the rounding of another batch shape, far below what matters."""


def entropy_threshold(entropies_M: Tensor, mask_M: Tensor, top_entropy_quantile: float) -> Tensor:
    """Returns the entropy above which the given share of a whole step's counted actions lies.

    The ``1 - top_entropy_quantile`` quantile, interpolated between neighbours ("Beyond the 80/20 Rule",
    arXiv:2506.01939). Reads no value on the host. Departure from TRL: over the whole optimizer step.

    Args:
        entropies_M: (M,), nats, of all actions of the step.
        mask_M: (M,), 1 where an action counts.
        top_entropy_quantile: share of actions kept, in [0, 1].

    Returns:
        Scalar of the entropies' type, float32 at least, nats; +inf if no action counts.
    """
    counted_M = mask_M.bool()
    wide = torch.promote_types(entropies_M.dtype, torch.float32)
    sorted_M = torch.where(counted_M, entropies_M.detach().to(wide), math.inf).sort().values
    sorted_M = torch.cat([sorted_M, sorted_M.new_full((1,), math.inf)])
    last = (counted_M.sum() - 1).clamp(min=0)
    # Rounded, so that 0.2 · 10 = 2.0000000000000004 does not ask for a value above the third.
    rank = ((1 - top_entropy_quantile) * last.double()).mul(1e9).round().div(1e9)
    below = rank.floor().long()
    low, high = sorted_M.take(torch.stack([below, torch.minimum(below + 1, last)])).unbind()
    return torch.where(rank == below, low, torch.lerp(low, high, (rank - below).to(wide)))


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
        entropy: nats, mean over the actions that the bonus saw, over the whole step and all ranks; NaN where there was
            none, which changes nothing.
        target: nats.
        delta: size of a move.
        minimum: least coefficient.
        maximum: greatest coefficient.

    Returns:
        The state after; `applied_entropy_coef` says what the next step uses.
    """
    if math.isnan(entropy):
        return control
    coef = min(control.coef + delta, maximum) if entropy <= target else max(control.coef - delta, minimum)
    return EntropyControl(coef, entropy)


def applied_entropy_coef(control: EntropyControl, target: float) -> float:
    """Returns the coefficient of the next step: the controller's at or under the target, otherwise 0.

    Args:
        control: the state after the last step.
        target: nats.

    Returns:
        The coefficient.
    """
    return control.coef if control.last_entropy <= target else 0.0
