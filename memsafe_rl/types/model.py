"""What a network gives to the equations: hidden states and a head instead of `[B, T, V]` logits, or Gaussians."""

from __future__ import annotations

from collections.abc import Callable
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
    # (B, T) at least float32, nats; the KL to the reference in closed form, where there is one and it was asked for;
    # None elsewhere
    kl_BT: Tensor | None = None
    # (B, T) at least float32, a critic's values from the same forward; 0 in padding; None without one
    values_BT: Tensor | None = None
