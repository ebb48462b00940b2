"""pass@k and best@k, by hand, by going through all subsets, and where rewards are missing."""

import itertools
import math

import pytest
import torch

from memsafe_rl.ops.evaluation import best_at_k, pass_at_k, sample_metrics


@pytest.mark.parametrize(
    ("passed", "samples", "k", "expected"),
    [
        (0, 4, 2, 0.0),
        (4, 4, 2, 1.0),
        (1, 4, 1, 1 / 4),
        (1, 4, 2, 1 / 2),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (2, 5, 3, 9 / 10),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (3, 5, 3, 1.0),  # two failures cannot fill three places
        (1, 1, 1, 1.0),
    ],
)
def test_pass_at_k_by_hand(passed: int, samples: int, k: int, expected: float) -> None:
    assert pass_at_k(passed, samples, k) == pytest.approx(expected, abs=1e-15)


def test_pass_and_best_at_k_are_means_over_all_subsets() -> None:
    rewards = [0.0, 1.0, 0.25, 1.0, -2.0, 0.25]
    for k in range(1, 7):
        subsets = list(itertools.combinations(rewards, k))
        best = sum(map(max, subsets)) / len(subsets)
        assert best_at_k(rewards, k) == pytest.approx(best, abs=1e-12)
        share = sum(any(reward >= 1 for reward in subset) for subset in subsets) / len(subsets)
        assert pass_at_k(2, 6, k) == pytest.approx(share, abs=1e-12)


def test_thousands_of_samples_do_not_overflow() -> None:
    # The product form of the paper's appendix: 1 - prod_{i=n-c+1..n} (1 - k/i).
    product = math.prod(1 - 1000 / i for i in range(5000 - 3 + 1, 5000 + 1))
    assert pass_at_k(3, 5000, 1000) == pytest.approx(1 - product, abs=1e-12)


@pytest.mark.parametrize(("passed", "samples", "k"), [(1, 4, 5), (1, 4, 0), (5, 4, 1), (-1, 4, 1)])
def test_what_cannot_be_estimated_is_refused(passed: int, samples: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {passed} passed out of {samples} samples"):
        pass_at_k(passed, samples, k)
    if not 1 <= k <= samples:
        with pytest.raises(ValueError, match=f"best@{k} of {samples} samples"):
            best_at_k([0.0] * samples, k)


def test_metrics_average_over_prompts() -> None:
    rewards_PG = torch.tensor([[1.0, 0.0, 0.5, 0.0], [0.0, 0.25, 0.0, 0.0]])
    metrics = sample_metrics(rewards_PG, [1, 2, 4], threshold=0.5)
    # Of the first prompt 2 of 4 pass, of the second none.
    assert metrics == pytest.approx(
        {
            "mean@4": 1 / 4,
            "pass@1": 1 / 4,
            "pass@2": (1 - 1 / 6) / 2,
            "pass@4": 1 / 2,
            "best@2": ((3 * 1.0 + 2 * 0.5) / 6 + (3 * 0.25) / 6) / 2,
            "best@4": (1.0 + 0.25) / 2,
        }
    )


def test_samples_without_a_reward_are_left_out() -> None:
    nan = math.nan
    rewards_PG = torch.tensor([[1.0, nan, 0.0], [nan, nan, 1.0], [nan, nan, nan]])
    metrics = sample_metrics(rewards_PG, [1, 2, 3], threshold=1.0)
    assert metrics["mean@3"] == metrics["pass@1"] == pytest.approx((1 / 2 + 1) / 2)
    assert (metrics["pass@2"], metrics["best@2"]) == (1.0, 1.0)
    assert math.isnan(metrics["pass@3"])
    assert math.isnan(metrics["best@3"])


def test_a_sum_of_rewards_that_rounding_keeps_below_the_threshold_passes() -> None:
    third = torch.tensor([0.1, 0.7, 0.2])
    total = third.sum()
    nearly = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))
    assert abs(total - 1) < 1e-6
    assert sample_metrics(torch.stack([total, nearly]).unsqueeze(0), [1], threshold=1.0)["pass@1"] == 1.0
