"""How losses of actions become the loss of an optimizer step; every denominator is the whole step's.

Axes: ``B`` rows, ``T`` columns; (B, T|1) is (B, 1) where a row has one value.
"""

from __future__ import annotations

from torch import Tensor

from memsafe_rl.types import Denominators

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
"""Every way to average, by the name that verl gives it."""


def aggregate(
    how: str, losses: Tensor, mask_BT: Tensor, counts_B: Tensor, denominators: Denominators, slots: int
) -> Tensor:
    """Gives a micro-batch's share of the step's loss.

    - ``token-mean``: ``sum l / N_tokens`` (DAPO, arXiv:2503.14476, eq. 8);
    - ``seq-mean-token-mean``: ``sum_b (1 / |o_b|) sum_t l / N_rows`` (GRPO, arXiv:2402.03300, eq. 3);
    - ``seq-mean-token-sum``: ``sum l / N_rows`` (LUSPO, arXiv:2602.05261: a row of one ratio weighs by its length);
    - ``seq-mean-token-sum-norm``: ``sum l / (N_rows · slots)`` (Dr. GRPO, arXiv:2503.20783).

    Args:
        how: one of `AGGREGATIONS`.
        losses: (B, T|1).
        mask_BT: (B, T), 1 where an action counts.
        counts_B: (B,), counted actions of each whole row.
        denominators: counts over the whole step and all ranks.
        slots: actions that a row has room for.

    Returns:
        Scalar.
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
