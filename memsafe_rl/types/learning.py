"""What advantages and losses take and give; denominators are fixed before anything is cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AdvantageResult:
    """Rewards and advantages of a whole rollout."""

    advantages_B: Tensor  # (B,) float32; 0 for a row that no reward function scored
    rewards_B: Tensor  # (B,) float32, the weighted sum; NaN for a row that no reward function scored
    std_B: Tensor  # (B,) float32, the deviation that scaled (or would have scaled) each row
    unscored_B: Tensor  # (B,) bool, rows whose rewards are all None
    # of each of several objectives, by its own rewards alone; empty where there is but one
    objectives: tuple[AdvantageResult, ...] = ()


@dataclass(frozen=True)
class LossSettings:
    """The part of the configuration that the loss reads; TRL's names and meanings."""

    loss_type: str = "dapo"  # name of a loss in `memsafe_rl.ops.losses`
    importance_sampling_level: str = "token"  # "token", "sequence" (GSPO) or "sequence_sum" (RLOO)
    epsilon_low: float = 0.2  # clip range below 1
    epsilon_high: float = 0.2  # clip range above 1
    delta: float | None = None  # upper bound of the unclipped ratio, None for none
    beta: float = 0.0  # coefficient of the KL to the reference, nats
    use_bias_correction_kl: bool = True  # multiply the KL by the ratio
    # nats; rows with a negative advantage and a greater mean KL are dropped; None: off
    off_policy_mask_threshold: float | None = None
    sapo_temperature_pos: float = 1.0  # SAPO gate for positive advantages
    sapo_temperature_neg: float = 1.05  # SAPO gate for the others
    vespo_k_pos: float = 2.0  # VESPO power for non-negative advantages
    vespo_lambda_pos: float = 3.0  # VESPO decay for non-negative advantages
    vespo_k_neg: float = 3.0  # VESPO power for negative advantages
    vespo_lambda_neg: float = 2.0  # VESPO decay for negative advantages
    cov_fraction: float = 2e-4  # share of a step's tokens that clip_cov and kl_cov mark
    clip_cov_low: float = 1.0  # least covariance of a token that clip_cov may mark
    clip_cov_high: float = 5.0  # greatest covariance of one
    kl_cov_coef: float = 1.0  # what kl_cov's marked tokens pay for a nat of log-ratio
    max_completion_length: int = 512  # Dr. GRPO's constant, in tokens


@dataclass(frozen=True)
class Denominators:
    """Counts over the whole optimizer step and all ranks, taken before the first backward."""

    rows: int  # sequences in the step
    tokens: int  # actions counted in the loss
    entropy_tokens: int  # actions the entropy bonus averages over


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch, as the loss sees it: rows × columns."""

    logprobs_BT: Tensor  # (B, T), at least float32, nats, with gradient
    advantages_B: Tensor  # (B,) or (B, T)
    mask_BT: Tensor  # (B, T), 1 where an action counts
    # like ``logprobs_BT``, without gradient; None on the first update after a rollout, where the old log-probs are the
    # current ones, detached
    old_logprobs_BT: Tensor | None = None
    ref_logprobs_BT: Tensor | None = None  # (B, T), nats, None without a reference
    # (B, T), nats, of the sampler, for the off-policy mask; None: the old ones serve
    sampling_logprobs_BT: Tensor | None = None
    importance_weights_BT: Tensor | None = None  # (B, T) or (B, 1), corrects another sampler; None for none
    entropies_BT: Tensor | None = None  # (B, T), nats, with gradient when a bonus is on; None if not computed
    entropy_mask_BT: Tensor | None = None  # (B, T), 1 where an action is among the most uncertain; None when all count
    entropy_coef: float = 0.0  # coefficient of the entropy bonus in this step
    marks_BT: Tensor | None = None  # (B, T), 1 where the loss marked an action of the whole step; None: it marks none
    # (B, T), nats, with gradient, the KL to the reference in closed form; it takes the place of what is estimated from
    # ``ref_logprobs_BT``
    kl_BT: Tensor | None = None
    # (B,), counted actions of each whole row, where these columns are not all of them; None: they are
    row_counts_B: Tensor | None = None


@dataclass(frozen=True)
class LossResult:
    """A micro-batch's share of the step's loss."""

    loss: Tensor  # scalar with gradient; the shares of all micro-batches add up to the step's loss
    sums: Mapping[str, Tensor]  # detached scalars that add up over micro-batches (to be divided by the step's counts)
    lows: Mapping[str, Tensor]  # detached scalars whose minimum over micro-batches is reported
    highs: Mapping[str, Tensor]  # detached scalars whose maximum over micro-batches is reported
