"""What advantages and losses take and give; denominators are fixed before anything is cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AdvantageResult:
    """Rewards and advantages of a whole rollout.

    Args:
        advantages_B: (B,) float32; 0 for a row that no reward function scored.
        rewards_B: (B,) float32, the weighted sum; NaN for a row that no reward function scored.
        std_B: (B,) float32, the deviation that scaled (or would have scaled) each row.
        unscored_B: (B,) bool, rows whose rewards are all None.
        objectives: of each of several objectives, by its own rewards alone; empty where there is but one.
    """

    advantages_B: Tensor
    rewards_B: Tensor
    std_B: Tensor
    unscored_B: Tensor
    objectives: tuple[AdvantageResult, ...] = ()


@dataclass(frozen=True)
class LossSettings:
    """The part of the configuration that the loss reads; TRL's names and meanings.

    Args:
        loss_type: name of a loss in `memsafe_rl.ops.losses`.
        importance_sampling_level: "token" or "sequence" (GSPO).
        epsilon_low: clip range below 1.
        epsilon_high: clip range above 1.
        delta: upper bound of the unclipped ratio, None for none.
        beta: coefficient of the KL to the reference, nats.
        use_bias_correction_kl: multiply the KL by the ratio.
        off_policy_mask_threshold: nats; rows with a negative advantage and a greater mean KL are dropped; None: off.
        sapo_temperature_pos: SAPO gate for positive advantages.
        sapo_temperature_neg: SAPO gate for the others.
        vespo_k_pos: VESPO power for non-negative advantages.
        vespo_lambda_pos: VESPO decay for non-negative advantages.
        vespo_k_neg: VESPO power for negative advantages.
        vespo_lambda_neg: VESPO decay for negative advantages.
        max_completion_length: Dr. GRPO's constant, in tokens.
    """

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    off_policy_mask_threshold: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    max_completion_length: int = 512


@dataclass(frozen=True)
class Denominators:
    """Counts over the whole optimizer step and all ranks, taken before the first backward.

    Args:
        rows: sequences in the step.
        tokens: actions counted in the loss.
        entropy_tokens: actions the entropy bonus averages over.
    """

    rows: int
    tokens: int
    entropy_tokens: int


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch, as the loss sees it: rows × columns.

    Args:
        logprobs_BT: (B, T), at least float32, nats, with gradient.
        old_logprobs_BT: like ``logprobs_BT``, without gradient; None on the first update after a rollout, where the
            old log-probs are the current ones, detached.
        advantages_B: (B,) or (B, T).
        mask_BT: (B, T), 1 where an action counts.
        ref_logprobs_BT: (B, T), nats, None without a reference.
        sampling_logprobs_BT: (B, T), nats, of the sampler, for the off-policy mask; None: the old ones serve.
        importance_weights_BT: (B, T) or (B, 1), corrects another sampler; None for none.
        entropies_BT: (B, T), nats, with gradient when a bonus is on; None if not computed.
        entropy_mask_BT: (B, T), 1 where an action is among the most uncertain; None when all count.
        entropy_coef: coefficient of the entropy bonus in this step.
        kl_BT: (B, T), nats, with gradient, the KL to the reference in closed form; it takes the place of what is
            estimated from ``ref_logprobs_BT``.
        row_counts_B: (B,), counted actions of each whole row, where these columns are not all of them; None: they are.
    """

    logprobs_BT: Tensor
    advantages_B: Tensor
    mask_BT: Tensor
    old_logprobs_BT: Tensor | None = None
    ref_logprobs_BT: Tensor | None = None
    sampling_logprobs_BT: Tensor | None = None
    importance_weights_BT: Tensor | None = None
    entropies_BT: Tensor | None = None
    entropy_mask_BT: Tensor | None = None
    entropy_coef: float = 0.0
    kl_BT: Tensor | None = None
    row_counts_B: Tensor | None = None


@dataclass(frozen=True)
class LossResult:
    """A micro-batch's share of the step's loss.

    Args:
        loss: scalar with gradient; the shares of all micro-batches add up to the step's loss.
        sums: detached scalars that add up over micro-batches (to be divided by the step's counts).
        lows: detached scalars whose minimum over micro-batches is reported.
        highs: detached scalars whose maximum over micro-batches is reported.
    """

    loss: Tensor
    sums: Mapping[str, Tensor]
    lows: Mapping[str, Tensor]
    highs: Mapping[str, Tensor]
