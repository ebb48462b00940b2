"""How losses of actions become the loss of an optimizer step; every denominator is the whole step's.

Axes: ``B`` rows, ``T`` columns; (B, T|1) is (B, 1) where a row has one loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from memsafe_rl.types import Denominators


@dataclass(frozen=True)
class ActionLosses:
    """The losses of a micro-batch's actions, and what the step divides them by.

    Args:
        values: (B, T|1).
        mask_BT: (B, T), 1 where an action counts.
        counts_B: (B,), counted actions of each whole row.
        denominators: counts over the whole step and all ranks.
        slots: actions that a row has room for.
    """

    values: Tensor
    mask_BT: Tensor
    counts_B: Tensor
    denominators: Denominators
    slots: int


def token_mean(losses: ActionLosses) -> Tensor:
    """Averages over all actions of the step: ``sum l / N_tokens``.

    DAPO, arXiv:2503.14476, eq. 8. BNPO, which divides by the tokens of its own batch, is the same over a step.

    Args:
        losses: of the micro-batch.

    Returns:
        Scalar.
    """
    return (losses.values * losses.mask_BT).sum() / max(losses.denominators.tokens, 1)


def sequence_mean_of_token_means(losses: ActionLosses) -> Tensor:
    """Averages each row over its actions, then rows: ``sum_b (1 / |o_b|) sum_t l / N_rows``.

    GRPO, arXiv:2402.03300, eq. 3.

    Args:
        losses: of the micro-batch.

    Returns:
        Scalar.
    """
    return row_mean(losses.values, losses.mask_BT, losses.counts_B).sum() / max(losses.denominators.rows, 1)


def sequence_mean_of_token_sums(losses: ActionLosses) -> Tensor:
    """Sums each row, then averages rows: ``sum l / N_rows``.

    LUSPO, arXiv:2602.05261: a row of one ratio weighs by its length.

    Args:
        losses: of the micro-batch.

    Returns:
        Scalar.
    """
    return (losses.values * losses.mask_BT).sum() / max(losses.denominators.rows, 1)


def sequence_mean_over_slots(losses: ActionLosses) -> Tensor:
    """Divides by a constant: ``sum l / (N_rows · max_completion_length)``.

    Dr. GRPO, arXiv:2503.20783.

    Args:
        losses: of the micro-batch.

    Returns:
        Scalar.
    """
    return (losses.values * losses.mask_BT).sum() / (max(losses.denominators.rows, 1) * losses.slots)


AGGREGATIONS: Mapping[str, Callable[[ActionLosses], Tensor]] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": sequence_mean_of_token_means,
    "seq-mean-token-sum": sequence_mean_of_token_sums,
    "seq-mean-token-sum-norm": sequence_mean_over_slots,
}
"""Every way to average, by the name that verl gives it: a micro-batch's share of the step's loss, a scalar."""


def row_mean(values: Tensor, mask_BT: Tensor, counts_B: Tensor | None = None) -> Tensor:
    """Averages each row over its counted actions.

    Args:
        values: (B, T|1).
        mask_BT: (B, T), 1 where an action counts.
        counts_B: (B,), counted actions of each whole row; None where these columns are all of them.

    Returns:
        (B,); 0 for a row without counted actions.
    """
    counts_B = mask_BT.sum(1) if counts_B is None else counts_B
    return (values * mask_BT).sum(1) / counts_B.clamp(min=1)


def total(values: Tensor, mask_BT: Tensor) -> Tensor:
    """Sums over counted actions, or over rows where a row has one value.

    Args:
        values: (B, T|1).
        mask_BT: (B, T), 1 where an action counts.

    Returns:
        Scalar.
    """
    return values.sum() if values.shape[1] == 1 else (values * mask_BT).sum()
