"""Merges by hand, by brute force, and by what their papers promise of them."""

import itertools
import math

import pytest
import torch

from memsafe_rl.errors import ConfigError
from memsafe_rl.ops.merging import (
    MERGES,
    add_up,
    cagrad_weights,
    cosines,
    gram_matrix,
    merge_weights,
    pcgrad_weights,
    simplex_minimum,
)


def vectors(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def drawn(count, width, seed, conflict=0.0):
    """Random gradients; with conflict, each partly the opposite of the one before."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(count, width, dtype=torch.float64, generator=generator)
    for row in range(1, count):
        found[row] -= conflict * found[row - 1]
    return found * torch.logspace(0, 1, count, dtype=torch.float64)[:, None]


def gram(gradients_KN):
    return gradients_KN @ gradients_KN.T


def as_lists(gradients_KN, shapes, dtype=torch.float64):
    sizes = [math.prod(shape) for shape in shapes]
    return [
        [part.view(shape).to(dtype, copy=True) for part, shape in zip(row.split(sizes), shapes, strict=True)]
        for row in gradients_KN
    ]


def test_the_gram_matrix_is_that_of_the_gradients_laid_end_to_end(monkeypatch):
    gradients = drawn(3, 30, seed=0)
    lists = as_lists(gradients, [(2, 5), (20,)])
    lists[0][0] = lists[0][0].t().contiguous().t()  # laid out otherwise
    torch.testing.assert_close(gram_matrix(lists), gram(gradients), rtol=1e-14, atol=0)
    monkeypatch.setattr("memsafe_rl.ops.merging._BLOCK", 7)
    torch.testing.assert_close(gram_matrix(lists), gram(gradients), rtol=1e-14, atol=0)


def test_dot_products_of_narrow_gradients_are_taken_in_float64():
    many = torch.full((100_000,), 0.1, dtype=torch.bfloat16)
    found = gram_matrix([[many], [-many]])
    expected = 100_000 * float(many[0]) ** 2
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, vectors((expected, -expected), (-expected, expected)), rtol=1e-12, atol=0)


def test_the_sum_is_weighted():
    assert merge_weights(gram(drawn(2, 4, 0)), "sum", (1.0, 0.25)) == (1.0, 0.25)


def test_pcgrad_by_hand():
    # g1 = (2, 0), g2 = (-1, 1): <g1, g2> = -2. g1 loses -2/2 g2 and becomes (1, 1), g2 loses -2/4 g1: (0, 1).
    gradients = vectors((2, 0), (-1, 1))
    weights = pcgrad_weights(gram(gradients))
    torch.testing.assert_close(weights, torch.tensor([1.5, 2.0], dtype=torch.float64))
    torch.testing.assert_close(weights @ gradients, vectors((1, 2))[0])


def test_pcgrad_leaves_gradients_alone_that_do_not_conflict():
    assert pcgrad_weights(gram(vectors((2, 0), (0, 1)))).tolist() == [1, 1]
    assert pcgrad_weights(gram(vectors((2, 0), (0, 0)))).tolist() == [1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_pcgrad_of_two_conflicts_with_neither(seed):
    gradients = drawn(2, 5, seed, conflict=1.0)
    merged = pcgrad_weights(gram(gradients)) @ gradients
    assert (gradients @ merged >= -1e-12).all()


def naive_pcgrad(gradients, orders):
    """Algorithm 1 on the vectors themselves."""
    merged = torch.zeros_like(gradients[0])
    for i, order in enumerate(orders):
        projected = gradients[i].clone()
        for j in order:
            dot = projected @ gradients[j]
            if j != i and dot < 0:
                projected -= dot / gradients[j].square().sum() * gradients[j]
        merged += projected
    return merged


@pytest.mark.parametrize("seed", range(10))
def test_pcgrad_of_several_is_the_papers_algorithm_in_any_order(seed):
    gradients = drawn(4, 6, seed, conflict=0.8)
    orders = [torch.randperm(4, generator=torch.Generator().manual_seed(seed + k)).tolist() for k in range(4)]
    merged = pcgrad_weights(gram(gradients), orders) @ gradients
    torch.testing.assert_close(merged, naive_pcgrad(gradients, orders), rtol=1e-12, atol=1e-12)


def test_cagrad_by_hand():
    # g1 = (1, 1), g2 = (-1, 1): g0 = (0, 1), and g_w = (2x - 1, 1) is shortest, and <g_w, g0> = 1, at x = 1/2.
    # d = g0 + c (0, 1).
    gradients = vectors((1, 1), (-1, 1))
    merged = cagrad_weights(gram(gradients), 0.5) @ gradients
    torch.testing.assert_close(merged, vectors((0, 1.5))[0])


def test_cagrad_by_hand_where_one_objective_needs_all_the_help():
    # g1 = (4, 0), g2 = (0, 1), g0 = (2, 1/2). F falls towards g2, so w = (0, 1), and d = g0 + c |g0| (0, 1).
    gradients = vectors((4, 0), (0, 1))
    merged = cagrad_weights(gram(gradients), 0.1) @ gradients
    torch.testing.assert_close(merged, vectors((2, 0.5 + 0.1 * math.hypot(2, 0.5)))[0])


def value(weights, matrix, slopes, radius):
    return float(weights @ slopes + radius * (weights @ matrix @ weights).clamp(min=0).sqrt())


def grid(count, steps):
    for cuts in itertools.combinations_with_replacement(range(steps + 1), count - 1):
        edges = (0, *cuts, steps)
        yield torch.tensor([b - a for a, b in itertools.pairwise(edges)], dtype=torch.float64) / steps


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
@pytest.mark.parametrize(("count", "width", "steps"), [(2, 4, 2000), (3, 4, 60), (3, 2, 60), (4, 6, 20)])
def test_no_point_of_a_grid_is_below_the_minimum_over_the_simplex(count, width, steps, seed):
    gradients = drawn(count, width, seed, conflict=0.9)
    matrix = gram(gradients)
    slopes, radius = matrix.mean(1), 0.4 * float(gradients.mean(0).norm())
    weights = simplex_minimum(matrix, slopes, radius)
    assert (weights >= 0).all()
    assert float(weights.sum()) == pytest.approx(1, abs=1e-12)
    least = min(value(point, matrix, slopes, radius) for point in grid(count, steps))
    found = value(weights, matrix, slopes, radius)
    scale = float(matrix.diagonal().max())
    assert found <= least + 1e-10 * scale
    if count == 2:
        assert found >= least - 1e-5 * scale


@pytest.mark.parametrize("c", [0.0, 0.2, 0.9])
@pytest.mark.parametrize(("count", "width"), [(2, 3), (3, 5), (5, 40), (8, 9)])
@pytest.mark.parametrize("seed", range(5))
def test_cagrad_stays_near_the_mean_and_no_nearby_step_serves_the_worst_off_better(count, width, seed, c):
    gradients = drawn(count, width, seed, conflict=0.7)
    mean = gradients.mean(0)
    merged = cagrad_weights(gram(gradients), c) @ gradients
    assert (merged - mean).norm() <= (c + 1e-9) * mean.norm()
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(4000, width, dtype=torch.float64, generator=generator)
    others = mean + c * mean.norm() * directions / directions.norm(dim=1, keepdim=True)
    worst = (gradients @ merged).min()
    assert worst >= (others @ gradients.T).amin(1).max() - 1e-12 * gradients.square().sum()


@pytest.mark.parametrize("seed", range(5))
def test_the_worst_gain_under_cagrad_is_what_the_dual_promises(seed):
    """Strong duality: an exact answer has no gap."""
    gradients = drawn(3, 7, seed, conflict=0.5)
    matrix, radius = gram(gradients), 0.3 * float(gradients.mean(0).norm())
    weights = simplex_minimum(matrix, matrix.mean(1), radius)
    merged = cagrad_weights(matrix, 0.3) @ gradients
    assert float((gradients @ merged).min()) == pytest.approx(value(weights, matrix, matrix.mean(1), radius), rel=1e-9)


@pytest.mark.parametrize(
    "gradients",
    [
        vectors((1, 2), (1, 2)),
        vectors((1, 2), (2, 4), (3, 6)),
        vectors((1, 2), (-1, -2)),
        vectors((0, 0), (3, 1)),
        vectors((0, 0), (0, 0)),
        vectors((1, 0), (0, 1), (1, 1), (1, -1)),
        vectors((1e-20, 0), (0, 1e20)),
    ],
)
@pytest.mark.parametrize("method", MERGES)
def test_gradients_that_depend_on_each_other_or_vanish_are_merged_too(gradients, method):
    matrix = gram(gradients)
    merged = torch.tensor(merge_weights(matrix, method, [1.0] * len(gradients)), dtype=torch.float64) @ gradients
    assert merged.isfinite().all()
    mean = gradients.mean(0)
    if method == "cagrad":
        assert (merged - mean).norm() <= 0.2 * mean.norm() * (1 + 1e-9)


@pytest.mark.parametrize("method", ["pcgrad", "cagrad"])
def test_a_weight_multiplies_a_gradient_before_the_merge(method):
    gradients = drawn(3, 5, seed=2, conflict=0.8)
    factors = torch.tensor([1.0, 0.3, 2.5], dtype=torch.float64)
    weighted = torch.tensor(merge_weights(gram(gradients), method, factors.tolist()), dtype=torch.float64) @ gradients
    scaled = gradients * factors[:, None]
    plain = torch.tensor(merge_weights(gram(scaled), method, [1.0] * 3), dtype=torch.float64) @ scaled
    torch.testing.assert_close(weighted, plain)


@pytest.mark.parametrize("method", MERGES)
def test_who_is_not_there_leaves_the_merge_to_the_others(method):
    gradients, factors = drawn(4, 5, seed=3, conflict=1.2), [1.0, 0.3, 2.5, 0.7]
    there, others = [True, False, True, True], [0, 2, 3]
    orders = [[3, 2, 1, 0], [0, 1, 2, 3], [1, 3, 0, 2], [2, 1, 0, 3]]
    among = [[2, 1, 0], [2, 0, 1], [1, 0, 2]]  # the same orders without the second, counted anew
    found = merge_weights(gram(gradients), method, factors, orders=orders, there=there)
    alone = merge_weights(gram(gradients[others]), method, [factors[k] for k in others], orders=among)
    assert [found[k] for k in others] == pytest.approx(alone)
    assert found[1] == 0
    assert merge_weights(gram(gradients), method, factors, there=[False] * 4) == (0.0,) * 4


@pytest.mark.parametrize("method", MERGES)
@pytest.mark.parametrize("noise", [1e-6, -1e-6])
def test_the_direction_of_rounding_decides_nothing(method, noise):
    gradients, weights = vectors([1.0, 0.5, 0.0], [0.2, -1.0, 0.3], [0.0, 0.0, 0.0]), [1.0, 2.0, 0.5]
    expected = merge_weights(gram(gradients), method, weights)
    gradients[2] += noise
    assert merge_weights(gram(gradients), method, weights) == pytest.approx(expected, abs=1e-12)
    gradients[2] *= 1e2  # it is a gradient now
    conflicts = method != "sum"
    assert (merge_weights(gram(gradients), method, weights) != pytest.approx(expected, abs=1e-6)) == conflicts


@pytest.mark.parametrize("method", MERGES)
def test_one_scale_of_all_gradients_is_the_scale_of_the_merge(method):
    """So that a loss scale for fp16 may be divided out afterwards."""
    gradients = drawn(2, 5, seed=4, conflict=1.2)
    plain, scaled = (merge_weights(gram(factor * gradients), method, (1.0, 0.5)) for factor in (1.0, 2.0**16))
    assert scaled == pytest.approx(plain, rel=1e-9)


@pytest.mark.parametrize("method", MERGES)
def test_an_overflow_stays_to_be_seen(method):
    matrix = gram(vectors((1, math.inf), (2, 1)))
    assert merge_weights(matrix, method, (1.0, 0.5)) == (1.0, 0.5)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_adding_up_is_the_linear_combination_in_place_of_the_last(dtype, bound):
    gradients, shapes = drawn(3, 30, seed=1), [(2, 5), (20,)]
    lists = as_lists(gradients, shapes, dtype)
    last = lists[2][0]
    add_up(lists, (0.5, -1.0, 2.0))
    merged = torch.cat([part.flatten().double() for part in lists[2]])
    expected = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64) @ gradients
    assert (merged - expected).norm() < bound * expected.norm()
    assert lists[2][0] is last
    assert torch.equal(lists[0][1], as_lists(gradients, shapes, dtype)[0][1]), "the others are left alone"


def test_cosines_by_hand():
    found = cosines(gram(vectors((1, 0), (1, 1), (-2, 0), (0, 0))).tolist())
    assert found[0, 1] == pytest.approx(math.sqrt(0.5))
    assert found[0, 2] == -1
    assert math.isnan(found[0, 3])


def test_unknown_merges_and_too_many_objectives_are_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"'mean', which is not known\. Set it to one of sum, pcgrad, cagrad"):
        merge_weights(torch.eye(2), "mean", (1, 1))
    with pytest.raises(ConfigError, match=r"'cagrad' with 9 objectives; at most 8 .* set it to 'pcgrad'"):
        merge_weights(torch.eye(9, dtype=torch.float64), "cagrad", [1.0] * 9)
