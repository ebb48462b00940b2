"""Log-probs, entropies and KL of denoising steps, and noise that batching does not change.

Axes: ``B`` rows, ``M`` entries, that is (row, column) pairs laid end to end, ``N`` elements of a state; ``...`` stands
for the axes of a state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from memsafe_rl.errors import ConfigError
from memsafe_rl.ops.sampling import hash_fields, uniform_noise
from memsafe_rl.types import GaussianDistribution

REDUCTIONS = ("mean", "sum")
"""What may be done over the elements of a state."""

_LOG_TWO_PI = math.log(2 * math.pi)
_TILE_ELEMENTS = 1 << 19
"""Elements of noise made together; their integers and float64 temporaries take about 40 bytes each."""


def gaussian_logprobs(distribution: GaussianDistribution) -> Tensor:
    """Returns the log-prob of the states that were taken.

    ``sum_i log N(x'_i; mu_i, sigma^2) = sum_i [-(x'_i - mu_i)^2 / (2 sigma^2) - log sigma - log(2 pi) / 2]`` over the
    elements that count, or its mean (Black et al. 2023, DDPO, arXiv:2305.13301, sec. 4).
    Equals ``torch.distributions.Normal(mu, sigma).log_prob(x')``, reduced; 0 where sigma is 0.

    Squared errors are taken in the type of the means and added up in float64: a sum over 50,000 elements in float32 is
    known to 4e-3 only, and a ratio is the exponential of the difference of two of them.

    Args:
        distribution: M entries.

    Returns:
        (M,) float64 (float32 on a device without it), nats, with the means' graph.
    """
    variances_M = _safe(distribution.stds_M).square()
    errors_M, counts_M = _squared_errors(distribution, distribution.taken)
    per_element_M = variances_M.log() / 2 + _LOG_TWO_PI / 2
    logprobs_M = -errors_M / (2 * variances_M) - per_element_M * counts_M
    return _reduced(logprobs_M, counts_M, distribution)


def gaussian_entropies(distribution: GaussianDistribution) -> Tensor:
    """Returns the entropy of each entry, which no weight can change: ``log sigma + (1 + log(2 pi)) / 2`` an element.

    Args:
        distribution: M entries.

    Returns:
        (M,) float64 (float32 on a device without it), nats, without graph; 0 where sigma is 0.
    """
    counts_M = _counts(distribution)
    entropies_M = (_safe(distribution.stds_M).log() + (1 + _LOG_TWO_PI) / 2) * counts_M
    return _reduced(entropies_M, counts_M, distribution)


def gaussian_kl(distribution: GaussianDistribution) -> Tensor:
    """Returns ``KL(current || reference)`` of each entry in closed form: ``||mu - mu_ref||^2 / (2 sigma^2)``.

    Fan et al. 2023, DPOK, arXiv:2305.16381, sec. 4: both steps have the scheduler's variance. For rectified flow as an
    SDE it is ``dt / 2 · (s (1 - t) / (2 t) + 1 / s)^2 · ||v - v_ref||^2`` with ``sigma = s · sqrt(dt)`` (Liu et al.
    2025, Flow-GRPO, arXiv:2505.05470, sec. 4). Equals `torch.distributions.kl_divergence`, reduced; 0 if sigma is 0.

    Args:
        distribution: M entries, with ``reference_means``.

    Returns:
        (M,) float64 (float32 on a device without it), nats, with the means' graph.

    Raises:
        ConfigError: there are no reference means.
    """
    if distribution.reference_means is None:
        raise ConfigError("A KL is asked for, but there are no reference means. Score the reference, or set beta=0.")
    errors_M, counts_M = _squared_errors(distribution, distribution.reference_means)
    return _reduced(errors_M / (2 * _safe(distribution.stds_M).square()), counts_M, distribution)


def normal_noise(keys_BK: Tensor, positions_B: Tensor, shape: Sequence[int]) -> Tensor:
    """Draws standard normal noise for each row, a function of its key and position alone.

    ``z = Phi^-1(u) = sqrt(2) erf^-1(2 u - 1)`` of the uniforms that `uniform_noise` gives: any batch, and any
    repetition, draws the same.

    Args:
        keys_BK: (B, K) int64, names of the rows' streams.
        positions_B: (B,) int64, index of the draw in its row.
        shape: axes of a state.

    Returns:
        (B, ...) float32.
    """
    words_B, elements = hash_fields(keys_BK, positions_B), math.prod(shape)
    noise_BN = torch.empty(len(words_B), elements, device=words_B.device)
    width = max(1, _TILE_ELEMENTS // max(1, len(words_B)))
    for first in range(0, elements, width):
        tile_BN = noise_BN[:, first : first + width]
        uniforms_BN = uniform_noise(words_B, tile_BN.shape[1], first=first)
        tile_BN.copy_(uniforms_BN.mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2)))
    return noise_BN.view(len(words_B), *shape)


def _squared_errors(distribution: GaussianDistribution, others: Tensor) -> tuple[Tensor, Tensor]:
    """Sums squared distances of the means over the elements that count, (M,), beside the number of those."""
    errors = distribution.means - others
    if distribution.elements is not None:
        # Not a product, and before the square: what does not count may be anything, even not finite.
        errors = torch.where(distribution.elements != 0, errors, 0)
    return errors.square().flatten(1).sum(1, dtype=_wide(errors.device)), _counts(distribution)


def _counts(distribution: GaussianDistribution) -> Tensor:
    """Counts the elements of each entry that count, (M,)."""
    means, elements = distribution.means, distribution.elements
    wide = _wide(means.device)
    if elements is None:
        return torch.full((len(means),), float(math.prod(means.shape[1:])), dtype=wide, device=means.device)
    return (elements != 0).expand(means.shape).flatten(1).sum(1, dtype=wide)


def _reduced(sums_M: Tensor, counts_M: Tensor, distribution: GaussianDistribution) -> Tensor:
    """Divides sums by counts if asked to, and leaves out steps without noise."""
    if distribution.reduction not in REDUCTIONS:
        raise ConfigError(f"`reduction` is {distribution.reduction!r}. Set it to one of {', '.join(REDUCTIONS)}.")
    values_M = sums_M / counts_M.clamp(min=1) if distribution.reduction == "mean" else sums_M
    return torch.where(distribution.stds_M > 0, values_M, 0)


def _safe(stds_M: Tensor) -> Tensor:
    """Puts 1 where a step has no noise, so that neither value nor gradient is infinite."""
    return torch.where(stds_M > 0, stds_M, 1).to(_wide(stds_M.device))


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
