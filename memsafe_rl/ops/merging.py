"""Merges the gradients of several objectives into one; every merge is a linear combination of them.

The coefficients depend on the Gram matrix alone, so that K gradients of any size are merged by K(K+1)/2 dot products
and one addition in place.

Axes: ``K`` objectives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from memsafe_rl.errors import ConfigError

MOST_CAGRAD_OBJECTIVES = 8
"""CAGrad looks at every set of objectives, of which there are 255 then."""

_BLOCK = 2**20
"""Elements that are widened to float64 at a time."""
_ROUNDING = 1e-9
"""Share of the gradients' length below which a combination of them is taken for zero."""
_NOISE = 1e-5
"""Share of the longest gradient's length below which a gradient is rounding, whose direction the plan decides."""


def gram_matrix(gradients: Sequence[Sequence[Tensor]]) -> Tensor:
    """Multiplies every gradient with every other: ``G[i, j] = <g_i, g_j>``, in float64.

    Equals ``stack(flat) @ stack(flat).T`` of the gradients end to end in float64; two blocks at a time are widened.

    Args:
        gradients: K gradients, each a list of tensors of the same shapes in the same order.

    Returns:
        (K, K) float64, symmetric, where the gradients are.
    """
    pairs = itertools.combinations_with_replacement(range(len(gradients)), 2)
    dots = {pair: _dot(gradients[pair[0]], gradients[pair[1]]) for pair in pairs}
    rows = [[dots[min(i, j), max(i, j)] for j in range(len(gradients))] for i in range(len(gradients))]
    return torch.stack([torch.stack(row) for row in rows])


def merge_weights(
    gram_KK: Tensor,
    method: str,
    weights_K: Sequence[float],
    *,
    cagrad_c: float = 0.2,
    orders: Sequence[Sequence[int]] | None = None,
    there: Sequence[bool] | None = None,
) -> tuple[float, ...]:
    """Returns the coefficients of a merge: the merged gradient is ``sum_k coefficient_k g_k``.

    Each objective's gradient is first multiplied by its weight. An objective that is not there has a coefficient of 0,
    and the others are merged as if it did not exist: the mean that CAGrad starts from is theirs. A gradient at
    most 1e-5 as long as the longest counts as zero, which conflicts with none. Where a dot product is no finite number,
    as after an overflow, the coefficients are the weights, so that what is wrong with a gradient stays to be seen.

    Args:
        gram_KK: (K, K) float64 on the host, from `gram_matrix`.
        method: "sum" (of the weighted gradients), "pcgrad" (see `pcgrad_weights`) or "cagrad" (see `cagrad_weights`).
        weights_K: weight of each objective.
        cagrad_c: how far CAGrad goes from the mean, as a share of its length.
        orders: for each objective, the order in which PCGrad looks at the others; None for theirs.
        there: whether each objective says anything; None where all do.

    Returns:
        K coefficients.

    Raises:
        ConfigError: If the method is unknown, or there are too many objectives for it.
    """
    if method not in MERGES:
        raise ConfigError(f"`gradient_merge` is {method!r}, which is not known. Set it to one of {', '.join(MERGES)}.")
    weights = torch.tensor(list(weights_K), dtype=torch.float64)
    weighted_KK = gram_KK.to(torch.float64) * weights[:, None] * weights
    if not bool(weighted_KK.isfinite().all()):
        return tuple(weights_K)
    lengths_K = gram_KK.diagonal().double().sqrt()
    weighted_KK *= torch.outer(heard_K := lengths_K > _NOISE * lengths_K.max(), heard_K)
    known = [k for k in range(len(weights)) if there is None or there[k]]
    coefficients = torch.zeros_like(weights)
    if known:
        among = None if orders is None else [[known.index(j) for j in orders[i] if j in known] for i in known]
        coefficients[known] = MERGES[method](weighted_KK[known][:, known], cagrad_c, among)
    return tuple((coefficients * weights).tolist())


def pcgrad_weights(gram_KK: Tensor, orders: Sequence[Sequence[int]] | None = None) -> Tensor:
    """Returns PCGrad's coefficients (Yu et al. 2020, arXiv:2001.06782, Algorithm 1).

    Of each gradient, one other after the other, the part that points against that other is taken away:
    ``g_i <- g_i - <g_i, g_j> / |g_j|^2 g_j`` where ``<g_i, g_j> < 0``; the merged gradient is the sum. With two
    objectives the order does not matter, and the result conflicts with neither.

    Args:
        gram_KK: (K, K) float64.
        orders: for each objective, all objectives in the order in which it looks at them; itself is left out. None for
            theirs. The paper draws them at random.

    Returns:
        (K,) float64.
    """
    count = len(gram_KK)
    projected_KK = torch.eye(count, dtype=torch.float64)
    for i, order in enumerate(orders or [range(count)] * count):
        for j in order:
            dot = projected_KK[i] @ gram_KK[:, j]
            if j != i and dot < 0:
                projected_KK[i, j] -= dot / gram_KK[j, j]
    return projected_KK.sum(0)


def cagrad_weights(gram_KK: Tensor, c: float) -> Tensor:
    """Returns CAGrad's coefficients (Liu et al. 2021, arXiv:2110.14048, eq. 2-4 and Algorithm 1).

    The merged gradient is the one nearest the mean ``g_0``, ``|d - g_0| <= c |g_0|``, under which the objective that
    gains least gains most: ``d = g_0 + c |g_0| g_w / |g_w|``, with ``g_w = sum_k w_k g_k`` and w on the simplex
    minimising ``<g_w, g_0> + c |g_0| |g_w|``. Where no direction serves all objectives (``g_w = 0``) it is ``g_0``.

    Args:
        gram_KK: (K, K) float64.
        c: from 0 (the mean) on; below 1 the mean loss goes down.

    Returns:
        (K,) float64.

    Raises:
        ConfigError: If K is above `MOST_CAGRAD_OBJECTIVES`.
    """
    count = len(gram_KK)
    if count > MOST_CAGRAD_OBJECTIVES:
        raise ConfigError(
            f"`gradient_merge` is 'cagrad' with {count} objectives; at most {MOST_CAGRAD_OBJECTIVES} can be weighed. "
            "Join some of them, or set it to 'pcgrad' or 'sum'."
        )
    mean_K = torch.full((count,), 1 / count, dtype=torch.float64)
    radius = c * _length(mean_K, gram_KK)
    weights_K = simplex_minimum(gram_KK, gram_KK @ mean_K, radius)
    length = _length(weights_K, gram_KK)
    if length <= _ROUNDING * float(gram_KK.diagonal().max().sqrt()):
        return mean_K
    return mean_K + radius / length * weights_K


def simplex_minimum(gram_KK: Tensor, slopes_K: Tensor, radius: float) -> Tensor:
    """Minimises ``F(w) = <w, b> + r sqrt(w G w)`` over ``w >= 0, sum w = 1`` exactly, looking at every face.

    On a face the minimum is where the slope is the same along every axis, ``b + r G w / |g_w| = lambda``. With M the
    inverse of the face's part of G, that is ``w ~ M (lambda - b)``, and the sum of 1 leaves
    ``a lambda = h + sqrt(h^2 - a (k - r^2))`` for ``a = 1M1, h = 1Mb, k = bMb``. F is convex, so that the least of all
    faces' minima that lie on the simplex is its minimum. A face whose gradients depend on each other has its minimum
    on a smaller face as well, and is left out.

    Args:
        gram_KK: (K, K) float64, the gradients' dot products G.
        slopes_K: (K,) float64, b.
        radius: r, at least 0.

    Returns:
        (K,) float64.
    """
    count = len(gram_KK)
    faces = itertools.chain.from_iterable(itertools.combinations(range(count), size) for size in range(1, count + 1))
    candidates = [weights for face in faces if (weights := _on_face(gram_KK, slopes_K, radius, face)) is not None]
    values = [float(weights @ slopes_K) + radius * _length(weights, gram_KK) for weights in candidates]
    return candidates[values.index(min(values))]


def exact_factors(gradient: Sequence[Tensor], coefficient: float) -> dict[torch.dtype, Tensor]:
    """Makes a number a tensor of each type that holds it as PyTorch would; it allocates one for a plain number.

    Args:
        gradient: tensors of any types.
        coefficient: the number.

    Returns:
        By type, () on the CPU; narrower types than float32 left out, where PyTorch multiplies by the unrounded number.
    """
    wide = {each.dtype for each in gradient} & {torch.float32, torch.float64}
    return {dtype: torch.tensor(coefficient, dtype=dtype) for dtype in wide}


def add_up(
    gradients: Sequence[Sequence[Tensor]],
    coefficients_K: Sequence[float],
    exact: Mapping[torch.dtype, Tensor] = MappingProxyType({}),
) -> None:
    """Puts ``sum_k coefficient_k g_k`` in place of the last gradient; allocates nothing, so that it cannot break off.

    Args:
        gradients: K gradients, each a list of tensors of the same shapes and types in the same order.
        coefficients_K: K numbers.
        exact: the last of them as `exact_factors` gives it.
    """
    *others, merged = gradients
    *factors, last = coefficients_K
    for place, gradient in enumerate(merged):
        gradient.mul_(exact.get(gradient.dtype, last))
        for other, factor in zip(others, factors, strict=True):
            gradient.add_(other[place], alpha=factor)


def cosines(gram_KK: Sequence[Sequence[float]]) -> dict[tuple[int, int], float]:
    """Returns the cosine of the angle between every two gradients; NaN where one of them is zero.

    Args:
        gram_KK: (K, K) numbers, from `gram_matrix`.

    Returns:
        Cosines by pair, the first index below the second.
    """
    lengths = [math.sqrt(row[i]) if row[i] > 0 else math.nan for i, row in enumerate(gram_KK)]
    pairs = itertools.combinations(range(len(gram_KK)), 2)
    return {(i, j): gram_KK[i][j] / (lengths[i] * lengths[j]) for i, j in pairs}


def _dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=first[0].device)
    for one, other in zip(first, second, strict=True):
        for a, b in zip(torch.split(one.flatten(), _BLOCK), torch.split(other.flatten(), _BLOCK), strict=True):
            total = total + torch.dot(a.double(), b.double()).to(total.device)
    return total


def _length(weights_K: Tensor, gram_KK: Tensor) -> float:
    """Returns the length of a combination of gradients; rounding may make its square negative."""
    return math.sqrt(max(0.0, float(weights_K @ gram_KK @ weights_K)))


def _on_face(gram_KK: Tensor, slopes_K: Tensor, radius: float, face: tuple[int, ...]) -> Tensor | None:
    """Returns the minimum over the plane through some corners of the simplex; None unless it lies between them."""
    weights_K = torch.zeros(len(gram_KK), dtype=torch.float64)
    if len(face) == 1:
        weights_K[face[0]] = 1.0
        return weights_K
    chosen = torch.tensor(face)
    part, b = gram_KK[chosen][:, chosen], slopes_K[chosen]
    solved, failed = torch.linalg.solve_ex(part, torch.stack([torch.ones_like(b), b], 1))
    ones, slopes = solved.unbind(1)
    a, h, k = float(ones.sum()), float(slopes.sum()), float(slopes @ b)
    inside = h * h - a * (k - radius * radius)
    if int(failed) or not (a > 0 and inside > 0):
        return None
    root = math.sqrt(inside)
    on_face = ((h + root) / a * ones - slopes) / root
    if not bool((on_face.isfinite() & (on_face >= 0)).all()):
        return None
    weights_K[chosen] = on_face / on_face.sum()
    return weights_K


MERGES: Mapping[str, Callable[[Tensor, float, Sequence[Sequence[int]] | None], Tensor]] = {
    "sum": lambda gram_KK, _c, _orders: torch.ones(len(gram_KK), dtype=torch.float64),
    "pcgrad": lambda gram_KK, _c, orders: pcgrad_weights(gram_KK, orders),
    "cagrad": lambda gram_KK, c, _orders: cagrad_weights(gram_KK, c),
}
"""Every merge by its name in the configuration."""
