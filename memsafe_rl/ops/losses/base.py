"""What a loss is: a function of importance ratios, the traits by which the trainer treats it, and what losses share.

Axes: ``B`` rows, ``T`` columns. Shapes written (B, T|1) are (B, 1) when a row has one ratio
(``importance_sampling_level="sequence"``) and (B, T) otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from memsafe_rl.errors import ConfigError
from memsafe_rl.ops.registry import Registry, check_part
from memsafe_rl.types import Denominators, LossSettings

LEVELS = ("sequence", "token")
"""What has a ratio of its own."""

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
"""Every way to average, by the name that verl gives it."""

CLIPPING_METRICS = {f"clip_ratio/{side}_mean": (f"clip_{side}", None) for side in ("low", "high", "region")}
"""The metrics that `measure_clipping` gives, as `Loss` holds them."""


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
class LossTraits:
    """What the trainer must know of a loss besides its equation.

    Args:
        levels: values of ``importance_sampling_level`` that suit it, the best first; another one is warned of.
        separable: whether an action's loss depends on its own column alone, so that the columns of a row may be
            learnt one by one (denoising steps) and a row may be cut in two.
        aggregation: how losses of actions become the loss of a step, a key of `AGGREGATIONS`.
        weighs_sampler: whether the loss itself uses the importance weights; if not, they multiply its result.

    Raises:
        ConfigError: If a level or the aggregation is unknown.
    """

    levels: tuple[str, ...] = ("token", "sequence")
    separable: bool = False
    aggregation: str = "token-mean"
    weighs_sampler: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.levels, tuple) or not self.levels or not {*self.levels} <= {*LEVELS}:
            raise ConfigError(
                f"levels of a loss are {self.levels!r}; write a tuple of {' and '.join(map(repr, LEVELS))}."
            )
        if self.aggregation not in AGGREGATIONS:
            raise ConfigError(
                f"aggregation of a loss is {self.aggregation!r}, which is not known. Set it to one of "
                f"{', '.join(AGGREGATIONS)}."
            )

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

    Raises:
        ConfigError: If the name is no text, ``function`` or ``measure`` is no function, or ``metrics`` is no mapping.
    """

    name: str
    function: Callable[[Ratios], Tensor]
    traits: LossTraits = LossTraits()
    measure: Callable[[Ratios], Measures] = lambda _: Measures({})
    metrics: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_part(self)
        for field_name, right, wanted in (
            ("traits", isinstance(self.traits, LossTraits), "LossTraits(...)"),
            ("measure", callable(self.measure), "a function from Ratios to Measures"),
            ("metrics", isinstance(self.metrics, Mapping), "a mapping of metrics to sums"),
        ):
            if not right:
                value = getattr(self, field_name)
                raise ConfigError(
                    f"{field_name} of loss {self.name!r} is {value!r:.100}. Give {wanted}, or leave it out."
                )


LOSSES: Registry[Loss] = Registry("loss_type", Loss)
"""Every loss by its name in the configuration."""

register_loss = LOSSES.add
"""Makes a loss known by name, for run files and settings read back; passing it as ``loss_type`` does so too."""


def by_sign(positive: Tensor, if_positive: float, otherwise: float, ratios: Ratios) -> Tensor:
    """Chooses one of two numbers where advantages are positive or not, of the micro-batch's type."""
    like = ratios.logprobs_BT
    return torch.where(positive, like.new_full((), if_positive), like.new_full((), otherwise))


# ------------------------------------------------------------------ aggregation


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


# ------------------------------------------------------------------ PPO's clipped objective


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


def measure_clipping(ratios: Ratios) -> Measures:
    """Counts ratios that clipping holds back, under TRL's conditions.

    ``sums``: ``clip_low``, ``clip_high``, ``clip_region`` and ``ratios`` (how many there are: divide by it); ``lows``
    and ``highs``: the least share of low-clipped and the greatest of high-clipped ratios in a row.
    """
    settings, advantages = ratios.settings, ratios.advantages
    bounded = _bounded(ratios)
    low = (bounded < 1 - settings.epsilon_low) & (advantages < 0)
    high = (bounded > 1 + settings.epsilon_high) & (advantages > 0)
    sums = {
        "clip_low": total(low, ratios.mask_BT),
        "clip_high": total(high, ratios.mask_BT),
        "clip_region": total(low | high, ratios.mask_BT),
        "ratios": total(torch.ones_like(low), ratios.mask_BT),
    }
    lows = {"clip_low": _row_shares(low, ratios.mask_BT, math.inf).amin()}
    return Measures(sums, lows, {"clip_high": _row_shares(high, ratios.mask_BT, -math.inf).amax()})


def _bounded(ratios: Ratios) -> Tensor:
    delta = ratios.settings.delta
    return ratios.ratio if delta is None else ratios.ratio.clamp(max=delta)


def _row_shares(marks: Tensor, mask_BT: Tensor, if_empty: float) -> Tensor:
    """Gives the share of marked ratios in each row, (B,)."""
    if marks.shape[1] == 1:
        return marks[:, 0].float()
    return torch.where(mask_BT.sum(1) > 0, row_mean(marks.float(), mask_BT), if_empty)
