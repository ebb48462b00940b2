"""What networks give to the equations (states and a head, not `[B, T, V]` logits), and what losses take and give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

LogitsHead = Callable[[Tensor], Tensor]
"""Maps hidden states ``[M, D]`` to logits ``[M, V]``, for a head that is more than one linear map."""

ValueHead = Callable[[Tensor], Tensor]
"""Maps hidden states ``[M, D]`` to values ``[M]`` of the states in which the next actions are taken."""


@dataclass(frozen=True)
class LinearHead:
    """An output head whose logits are ``cap · tanh(scale · (h Wᵀ + b) / cap)``, without the cap if it is None."""

    weight_VD: Tensor  # (V, D), any float type; the weight itself, tied to the embedding or not
    bias_V: Tensor | None = None  # (V,) or None
    scale: float = 1.0  # factor on the logits (Cohere multiplies, Granite divides, a tied T5 head has D**-0.5)
    soft_cap: float | None = None  # Gemma's logit soft-cap, in logits; None for none
    # type of the matrix product, None for the wider of hidden states and weight
    compute_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class TokenDistribution:
    """The distribution over the next token at every completion position of some rows, not yet as logits."""

    hidden_MD: Tensor  # (M, D), hidden states that predict the tokens, rows laid end to end, no padding
    tokens_M: Tensor  # (M,) int64, the tokens that were taken there
    lengths: tuple[int, ...]  # completion tokens of each row; their sum is M
    head: LinearHead | LogitsHead  # a linear head, or any function from hidden states to logits
    fixed_tiles: bool = False  # whether the head too computes each row as if it were alone


@dataclass(frozen=True)
class GaussianDistribution:
    """The distribution over the next state at some denoising steps of some rows, and the states that were taken.

    One entry is one (row, column) pair. The entries of a row lie next to each other, columns ascending; ``...`` stands
    for the axes of a state. A step without noise has deviation 0: its next state was no choice, so that its log-prob,
    entropy and KL are 0.
    """

    means: Tensor  # (M, ...), at least float32, means of the next states, with graph if gradients are enabled
    stds_M: Tensor  # (M,), of the type of ``means``, the standard deviation of every element of an entry
    taken: Tensor  # (M, ...), of the type of ``means``, the next states that were taken
    lengths: tuple[int, ...]  # entries of each row; their sum is M
    reduction: str  # "mean" or "sum" over the elements of a state, for log-probs, entropies and KL alike
    # broadcastable to ``means``, 1 where an element counts and 0 elsewhere; None where all count
    elements: Tensor | None = None
    # like ``means``, of the reference, without graph; None where it was not asked
    reference_means: Tensor | None = None


@dataclass(frozen=True)
class StateFeatures:
    """What a critic's network makes of the states before some denoising steps of some rows; it draws nothing."""

    hidden_MD: Tensor  # (M, D), entries ordered as in `GaussianDistribution`, with graph if gradients are enabled
    lengths: tuple[int, ...]  # entries of each row; their sum is M


Distribution = TokenDistribution | GaussianDistribution | StateFeatures
"""What a network says of the actions of some rows, or of the states in which they are taken."""


@dataclass(frozen=True)
class TokenScores:
    """Log-probs, and entropies and values if asked for, of taken actions."""

    logprobs_BT: Tensor  # (B, T) at least float32, nats; 0 in padding
    entropies_BT: Tensor | None = None  # (B, T) at least float32, nats; 0 in padding; None if not asked for
    # (B, T) at least float32, nats; the KL to the reference in closed form; None if there is none, or not asked for
    kl_BT: Tensor | None = None
    # (B, T) at least float32, a critic's values from the same forward; 0 in padding; None without one
    values_BT: Tensor | None = None


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
    # like ``logprobs_BT``, without gradient; None for the current ones, as on the first update after a rollout
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
