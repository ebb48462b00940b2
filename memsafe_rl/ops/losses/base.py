"""What a loss is: a function of importance ratios, and the traits by which the trainer treats it.

Axes: ``B`` rows, ``T`` columns. Shapes written (B, T|1) are (B, 1) when a row has one ratio
(``importance_sampling_level="sequence"``) and (B, T) otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from memsafe_rl.errors import ConfigError
from memsafe_rl.ops.losses.aggregation import AGGREGATIONS
from memsafe_rl.ops.registry import Registry
from memsafe_rl.types import LossSettings


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
    """

    levels: tuple[str, ...] = ("token", "sequence")
    separable: bool = False
    aggregation: str = "token-mean"
    weighs_sampler: bool = False

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
        ConfigError: If the traits name an unknown aggregation.
    """

    name: str
    function: Callable[[Ratios], Tensor]
    traits: LossTraits = LossTraits()
    measure: Callable[[Ratios], Measures] = lambda _: Measures({})
    metrics: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.traits.aggregation not in AGGREGATIONS:
            raise ConfigError(
                f"aggregation of loss {self.name!r} is {self.traits.aggregation!r}, which is not known. Set it to one "
                f"of {', '.join(AGGREGATIONS)}."
            )


LOSSES: Registry[Loss] = Registry("loss_type", Loss)
"""Every loss by its name in the configuration."""

register_loss = LOSSES.add
"""Makes a loss known by name, for run files and settings read back; passing it as ``loss_type`` does so too."""


def by_sign(positive: Tensor, if_positive: float, otherwise: float, ratios: Ratios) -> Tensor:
    """Chooses one of two numbers where advantages are positive or not, of the micro-batch's type."""
    like = ratios.logprobs_BT
    return torch.where(positive, like.new_full((), if_positive), like.new_full((), otherwise))
