"""Advantages by hand, and what equal, missing or single rewards must give."""

import math

import pytest
import torch

from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.ops.advantages import (
    ESTIMATORS,
    AdvantageEstimator,
    estimated_advantages,
    zero_spread_groups,
)

NAN = math.nan
ONE = torch.ones(1)


def column(*rewards):
    return torch.tensor(rewards)[:, None]


def advantages(rewards, group_size=2, scale="group", weights=ONE, aggregation="sum_then_normalize"):
    return estimated_advantages(rewards, weights, group_size, scale_rewards=scale, aggregation=aggregation)


def test_by_hand_over_groups():
    result = advantages(column(1.0, 3.0, 0.0, 0.0))
    std = math.sqrt(2)
    torch.testing.assert_close(result.advantages_B, torch.tensor([-1 / (std + 1e-4), 1 / (std + 1e-4), 0, 0]))
    torch.testing.assert_close(result.std_B, torch.tensor([std, std, 0, 0]))
    assert result.rewards_B.tolist() == [1, 3, 0, 0]
    assert result.advantages_B.dtype == result.rewards_B.dtype == result.std_B.dtype == torch.float32


def test_by_hand_over_the_batch():
    result = advantages(column(1.0, 3.0, 0.0, 0.0), scale="batch")
    std = math.sqrt(2)  # mean 1, squares 0 + 4 + 1 + 1, over 3
    torch.testing.assert_close(result.advantages_B, torch.tensor([-1 / (std + 1e-4), 1 / (std + 1e-4), 0, 0]))
    torch.testing.assert_close(result.std_B, torch.full((4,), std))


def test_by_hand_unscaled():
    result = advantages(column(1.0, 3.0, 0.0, 0.5), scale="none")
    assert result.advantages_B.tolist() == [-1, 1, -0.25, 0.25]


def test_by_hand_normalised_first():
    rewards = torch.tensor([[1.0, 10.0], [3.0, 10.0], [0.0, 0.0], [0.0, 4.0]])
    result = advantages(rewards, weights=torch.tensor([1.0, 2.0]), aggregation="normalize_then_sum")
    first, second = 1 / (math.sqrt(2) + 1e-4), 2 / (math.sqrt(8) + 1e-4)
    sums = torch.tensor([-first, first, -2 * second, 2 * second], dtype=torch.float64)
    torch.testing.assert_close(result.advantages_B.double(), sums / (sums.std() + 1e-4), rtol=1e-6, atol=0)
    assert result.rewards_B.tolist() == [21, 23, 0, 8]


def test_missing_scores_are_left_out():
    rewards = torch.tensor([[1.0, NAN], [NAN, NAN], [NAN, 2.0], [4.0, 1.0]])
    result = advantages(rewards, group_size=4, weights=torch.tensor([1.0, 0.5]))
    scored = torch.tensor([1.0, 1.0, 4.5], dtype=torch.float64)
    expected = ((scored - scored.mean()) / (scored.std() + 1e-4)).float()
    torch.testing.assert_close(result.advantages_B, torch.stack([expected[0], expected.new_zeros(()), *expected[1:]]))
    assert result.unscored_B.tolist() == [False, True, False, False]
    assert result.rewards_B.isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_row_scored_alone_has_no_advantage(scale, aggregation):
    rewards = column(1.0, NAN, NAN, NAN)
    result = advantages(rewards, scale=scale, aggregation=aggregation)
    assert not result.advantages_B.any()
    assert result.unscored_B.tolist() == [False, True, True, True]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(scale):
    rewards = torch.cat([torch.full((7, 1), 0.1), torch.full((7, 1), 1 / 3)]).double()
    result = advantages(rewards, group_size=7, scale=scale, weights=torch.tensor([0.7]))
    assert not result.advantages_B.any()


def test_an_equal_group_stays_at_exactly_zero_beside_others_normalised_first():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        others = torch.rand(8, 2, generator=generator)
        rewards = torch.cat([others, torch.tensor([[0.1, 1 / 3]]).expand(4, 2)])
        result = advantages(rewards, group_size=4, weights=torch.tensor([0.7, 0.2]), aggregation="normalize_then_sum")
        assert result.advantages_B[:8].all()
        assert not result.advantages_B[8:].any()


def test_groups_of_one():
    result = advantages(column(1.0, 3.0), group_size=1)
    assert not result.advantages_B.any()
    assert not result.std_B.any()


def test_zero_spread_groups():
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, NAN, 2.0, NAN, NAN, 3.0, NAN])
    assert zero_spread_groups(rewards, 2).tolist() == [True, False, True, True, True]
    columns = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, NAN], [0.0, 1.0]])
    assert zero_spread_groups(columns, 2).tolist() == [False, True]
    assert zero_spread_groups(columns[:, :1], 2).tolist() == [True, True]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"scale": "row"}, ConfigError, "'row'.*group, batch, none"),
        ({"aggregation": "mean"}, ConfigError, "'mean'.*sum_then_normalize"),
        ({"group_size": 3}, DataError, "4 rewarded rows.*groups of 3"),
    ],
)
def test_what_cannot_work_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        advantages(column(1.0, 3.0, 0.0, 0.0), **change)


def estimated(rewards, estimator, group_size=2, weights=ONE):
    return estimated_advantages(rewards, weights, group_size, estimator=estimator)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("rloo", [-1.5, 0.0, 1.5, 0.0, 0.0, 0.0]),  # 1 - mean(2, 3), 2 - mean(1, 3), 3 - mean(1, 2)
        ("dr_grpo", [-1.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
        ("reinforce++", [(r - 1.0) / (math.sqrt(1.6) + 1e-4) for r in (1, 2, 3, 0, 0, 0)]),
        ("reinforce++-baseline", [r / (math.sqrt(0.4) + 1e-4) for r in (-1, 0, 1, 0, 0, 0)]),
        ("maxrl", [-0.5, 0.0, 0.5, 0.0, 0.0, 0.0]),  # a group of mean 0 learns nothing
        ("opo", [-1.0, 0.0, 1.0, 0.0, 0.0, 0.0]),  # lengths that are not known are the same
    ],
)
def test_estimators_by_hand(estimator, expected):
    result = estimated(column(1.0, 2.0, 3.0, 0.0, 0.0, 0.0), estimator, group_size=3)
    torch.testing.assert_close(result.advantages_B, torch.tensor(expected))
    assert result.advantages_B.dtype == torch.float32
    assert result.std_B.tolist() == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimators_leave_rows_out_that_no_function_scored(estimator):
    missing = estimated(torch.tensor([[1.0, 4.0], [NAN, NAN], [NAN, 2.0], [3.0, 0.0]]), estimator, 4, torch.ones(2))
    without = estimated(column(5.0, 2.0, 3.0), estimator, 3)
    torch.testing.assert_close(missing.advantages_B[[0, 2, 3]], without.advantages_B)
    assert missing.advantages_B[1] == 0
    assert missing.unscored_B.tolist() == [False, True, False, False]
    alone = estimated(column(1.0, NAN), estimator)
    assert not alone.advantages_B.any()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimators_give_exactly_zero_for_equal_rewards(estimator):
    assert not estimated(torch.full((14, 1), 1 / 3).double(), estimator, 7, torch.tensor([0.7])).advantages_B.any()


def test_the_estimator_named_group_is_what_there_was():
    rewards = torch.rand(12, 2, generator=torch.Generator().manual_seed(0))
    for scale in ("group", "batch", "none"):
        given = estimated_advantages(rewards, torch.ones(2), 4, scale_rewards=scale)
        assert torch.equal(given.advantages_B, advantages(rewards, 4, scale, torch.ones(2)).advantages_B)
    assert torch.equal(
        estimated(rewards, "dr_grpo", 4, torch.ones(2)).advantages_B,
        advantages(rewards, 4, "none", torch.ones(2)).advantages_B,
    )


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ConfigError, match=r"'gae'.*group, rloo, dr_grpo"):
        estimated(column(1.0, 2.0), "gae")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            lambda rewards: rewards.T,
            r"float64 of shape \(3, 2\)\. Return a floating-point tensor of shape \(2, 3\): one",
        ),
        (lambda rewards: rewards.reshape(3, 2), r"of shape \(3, 2\)"),
        (lambda rewards: rewards.flatten(), r"of shape \(6,\).*: one advantage for each completion"),
        (lambda rewards: torch.cat([rewards, rewards]), r"of shape \(4, 3\)"),
        (lambda rewards: rewards[:1], r"of shape \(1, 3\)"),
        (lambda rewards: rewards[:, :1], r"of shape \(2, 1\)"),
        (lambda rewards: rewards.mean(), r"of shape \(\)"),
        (lambda rewards: rewards.long(), r"torch.int64 of shape \(2, 3\)"),
        (lambda rewards: rewards.numpy(), "a ndarray"),
        (lambda _: None, "a NoneType"),
        (lambda rewards: rewards / 0, "an infinite advantage. Bound it, or give NaN"),
    ],
)
def test_an_estimator_gives_one_finite_advantage_for_each_row(function, words, monkeypatch):
    monkeypatch.setitem(ESTIMATORS, "odd", AdvantageEstimator("odd", function))
    with pytest.raises(ConfigError, match=f"advantage_estimator 'odd' gave .*{words}"):
        estimated(column(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), "odd", group_size=3)


def test_an_estimator_that_writes_to_its_argument_leaves_the_rewards_alone(monkeypatch):
    monkeypatch.setitem(ESTIMATORS, "odd", AdvantageEstimator("odd", lambda rewards: rewards.sub_(1.0)))
    result = estimated(column(1.0, 2.0), "odd")
    assert result.advantages_B.tolist() == [0.0, 1.0]
    assert result.rewards_B.tolist() == [1.0, 2.0]


def test_the_optimal_baseline_weighs_rewards_by_lengths():
    rewards, lengths = torch.rand(2, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rewards[5], lengths = NAN, (30 * lengths).round()
    given = ESTIMATORS["opo"].function(rewards.view(3, 4), lengths.view(3, 4)).flatten()
    for row in (row for row in range(12) if row != 5):
        group = [other for other in range(row // 4 * 4, row // 4 * 4 + 4) if other != 5]
        baseline = sum(float(lengths[i] * rewards[i]) for i in group) / sum(float(lengths[i]) for i in group)
        assert float(given[row]) == pytest.approx(float(rewards[row]) - baseline, abs=1e-12)
    estimates = estimated_advantages(rewards[:, None], ONE, 4, estimator="opo", lengths_B=lengths).advantages_B
    torch.testing.assert_close(estimates, given.nan_to_num(nan=0.0).float())
    nothing = estimated_advantages(column(1.0, 2.0), ONE, 2, estimator="opo", lengths_B=torch.zeros(2))
    assert nothing.advantages_B.tolist() == [0, 0]


def test_the_gradient_of_the_log_of_success_is_cut_off_one_term_before_the_group_ends():
    # log p = -sum_k (1 - p)^k / k; its gradient, cut off after n terms, is sum_{k < n} (1 - p)^k times grad p. Taking
    # (r - mean) / mean gives n = G - 1: the last term is what the baseline would earn in groups without success.
    size, success = 5, 0.3
    expected = 0.0
    for wins in range(size + 1):
        chance = math.comb(size, wins) * success**wins * (1 - success) ** (size - wins)
        rewards = torch.tensor([[1.0] * wins + [0.0] * (size - wins)], dtype=torch.float64)
        # The score of a success is 1 / p, of a failure -1 / (1 - p), in units of grad p.
        scores = rewards / success - (1 - rewards) / (1 - success)
        expected += chance * float((ESTIMATORS["maxrl"].function(rewards) * scores).mean())
    assert expected == pytest.approx(sum((1 - success) ** k for k in range(size - 1)), abs=1e-12)


def test_negative_rewards_are_refused_where_they_would_be_divided_by():
    with pytest.raises(DataError, match=r"'maxrl' divides by .* a reward is -0\.5\. Give rewards of at least 0"):
        estimated(column(1.0, -0.5, NAN, 0.0), "maxrl")
