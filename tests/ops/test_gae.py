"""PPO's arithmetic by hand, by naive loops, and against the numbers of published implementations.

`REFERENCE` holds what TRL 0.11.4 (the last with `PPOTrainer.compute_advantages` and `loss` as functions of plain
tensors) and torchtune 0.6.1 (`rlhf.get_rewards_ppo`, `rlhf.estimate_advantages`) give, in float64, for the tensors
below with gamma 0.9, lambda 0.8 and both clip ranges 0.2; whitened rewards with 0 in padding, where TRL 0.11.4 left the
mean, which later versions of it mended.
"""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.launches import Operators
from memsafe_rl.ops.gae import (
    adaptive_kl_coef,
    explained_variance,
    generalized_advantages,
    kl_estimates,
    token_rewards,
    value_loss,
    whiten,
)
from memsafe_rl.ops.losses import policy_loss
from memsafe_rl.types import Denominators, LossInputs, LossSettings


def wide(rows):
    return torch.tensor(rows, dtype=torch.float64)


VALUES = wide([[0.5, -0.2, 0.1, 0.4], [0.3, 0.7, 0.0, 0.0], [-0.4, 0.2, 0.6, 0.0]])
REWARDS = wide([[-0.1, 0.05, 0.02, 1.0], [0.0, 2.0, 0.0, 0.0], [0.1, -0.3, -1.0, 0.0]])
MASK = wide([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
LOGPROBS = wide([[-1.0, -0.5, -2.0, -0.1], [-0.7, -1.2, 0, 0], [-0.3, -0.9, -1.1, 0]])
OLD = LOGPROBS + wide([[0.3, -0.1, 0.05, -0.4], [0.1, 0.35, 0, 0], [-0.2, 0.0, 0.25, 0]])
NEW_VALUES = VALUES + wide([[0.1, -0.3, 0.25, 0.0], [0.5, -0.1, 0, 0], [-0.25, 0.15, 0.3, 0]])

REFERENCE = {
    "returns": wide([[0.3339008, 0.65264, 0.812, 1.0], [1.566, 2.0, 0.0, 0.0], [-0.52064, -0.912, -1.0, 0.0]]),
    "advantages": wide(
        [
            [-0.3500565272836122, 0.6445985876382619, 0.507283467769887, 0.3979312676471765],
            [1.0481863148054371, 1.0813825184141168, 0.0, 0.0],
            [-0.30567203142809174, -1.2735952199428258, -1.7500583776203498, 0.0],
        ]
    ),
    "returns of whitened rewards": wide(
        [
            [0.2993633693476452, 0.678022407967009, 0.883516790608025, 1.1430098451421675],
            [1.762131178491242, 2.3210303992610486, 0.0, 0.0],
            [-0.7119442105064933, -1.1537993846412056, -1.2130312630955942, 0.0],
        ]
    ),
    "advantages of whitened rewards": wide(
        [
            [-0.3335260717976783, 0.5623849403314964, 0.4838906059138738, 0.4502464076906538],
            [1.0475331299426518, 1.1795114072383472, 0.0, 0.0],
            [-0.4259757551122589, -1.2913182684849471, -1.672746395722139, 0.0],
        ]
    ),
    "rewards": wide([[0.015, -0.005, 0.0025, 0.98], [0.005, 2.0175, 0.0, 0.0], [-0.01, 0.0, -0.9875, 0.0]]),
    "policy loss": -0.006210207654830824,
    "value loss": 0.5742925424133688,
    "values clipped": 2,
}


def naive_advantages(rewards, values, mask, gamma, gae_lambda):
    """Equation 16 as it is written, row by row: a sum over all later errors."""
    out = [[0.0] * len(row) for row in values]
    for row, counted in enumerate(mask):
        places = [column for column, is_counted in enumerate(counted) if is_counted]
        v = [values[row][place] for place in places] + [0.0]
        errors = [rewards[row][place] + gamma * v[i + 1] - v[i] for i, place in enumerate(places)]
        for i, place in enumerate(places):
            out[row][place] = sum((gamma * gae_lambda) ** k * error for k, error in enumerate(errors[i:]))
    return wide(out)


def test_advantages_by_hand():
    """One row: errors 1 + 0.5 * 2 - 1 = 1 and 3 - 2 = 1; the first gathers 0.5 * 0.5 of the second."""
    found = generalized_advantages(
        torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 2.0]]), torch.ones(1, 2), gamma=0.5, gae_lambda=0.5
    )
    assert found.advantages_BT.tolist() == [[1.25, 1.0]]
    assert found.returns_BT.tolist() == [[2.25, 3.0]]
    assert found.advantages_BT.dtype == found.returns_BT.dtype == torch.float32


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("gae_lambda", [1.0, 0.95, 0.0])
def test_advantages_equal_the_sum_of_the_paper(gamma, gae_lambda):
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 5, 9, generator=generator, dtype=torch.float64)
    mask = torch.rand(5, 9, generator=generator) < 0.7
    mask[3] = False
    found = generalized_advantages(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda)
    expected = naive_advantages(rewards.tolist(), values.tolist(), mask.tolist(), gamma, gae_lambda)
    torch.testing.assert_close(found.advantages_BT, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.returns_BT, (expected + values) * mask, rtol=1e-12, atol=1e-12)


def test_what_stands_in_a_hole_is_not_read():
    """An environment's two tokens between an agent's: the row is worth what it is without them."""
    mask = torch.tensor([[1, 0, 0, 1, 1]])
    hole = torch.tensor([[False, True, True, False, False]])
    rewards, values = torch.tensor([[0.5, 0.0, 0.0, -0.5, 1.0]]), torch.tensor([[0.1, 0.0, 0.0, 0.3, 0.6]])
    found = generalized_advantages(
        rewards.masked_fill(hole, math.nan), values.masked_fill(hole, math.inf), mask, gamma=0.9, gae_lambda=0.8
    )
    without = generalized_advantages(
        rewards[:, [0, 3, 4]], values[:, [0, 3, 4]], torch.ones(1, 3), gamma=0.9, gae_lambda=0.8
    )
    assert torch.equal(found.advantages_BT[:, [0, 3, 4]], without.advantages_BT)
    assert found.advantages_BT[:, 1:3].eq(0).all()
    assert found.returns_BT[:, 1:3].eq(0).all()


def test_with_lambda_and_gamma_1_the_return_is_all_that_follows():
    found = generalized_advantages(REWARDS, VALUES, MASK, gamma=1.0, gae_lambda=1.0)
    expected = (REWARDS * MASK).flip(1).cumsum(1).flip(1) * MASK
    torch.testing.assert_close(found.returns_BT, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("whitened", [False, True])
def test_advantages_and_whitening_give_the_published_numbers(whitened):
    rewards = whiten(REWARDS, MASK, shift_mean=False) if whitened else REWARDS
    found = generalized_advantages(rewards, VALUES, MASK, gamma=0.9, gae_lambda=0.8)
    kind = " of whitened rewards" if whitened else ""
    torch.testing.assert_close(found.returns_BT, REFERENCE["returns" + kind], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        whiten(found.advantages_BT, MASK), REFERENCE["advantages" + kind], rtol=1e-12, atol=1e-12
    )


def test_the_losses_give_the_published_numbers():
    found = value_loss(NEW_VALUES, VALUES, REFERENCE["returns"], MASK, clip=0.2, tokens=9)
    assert found.loss.item() == pytest.approx(REFERENCE["value loss"], rel=1e-7)  # 1e-8 in its denominator
    assert found.clipped.item() == REFERENCE["values clipped"]
    inputs = LossInputs(LOGPROBS, REFERENCE["advantages"], MASK, old_logprobs_BT=OLD)
    share = policy_loss(inputs, LossSettings(), Denominators(rows=3, tokens=9, entropy_tokens=9)).loss
    assert share.item() == pytest.approx(REFERENCE["policy loss"], rel=1e-7)


def test_token_rewards_give_the_published_numbers():
    kl = kl_estimates(LOGPROBS, OLD, "k1")
    found = token_rewards(wide([1.0, 2.0, -1.0]), MASK, kl_BT=kl, kl_coef=0.05)
    torch.testing.assert_close(found, REFERENCE["rewards"], rtol=1e-12, atol=1e-12)


def test_a_score_goes_to_the_last_action_that_counts():
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]])
    found = token_rewards(torch.tensor([2.0, 5.0, -1.0]), mask, kl_BT=torch.full((3, 4), math.inf), kl_coef=0.0)
    assert token_rewards(torch.tensor([2.0, 5.0, -1.0]), mask).tolist() == [[0, 0, 2, 0], [0] * 4, [0, -1, 0, 0]]
    assert found.isnan().tolist() == mask.bool().tolist()  # inf * 0 where it counts, nothing where it does not


def test_kl_estimates_by_hand():
    gap = math.log(2.0)
    logprobs, reference = torch.tensor([gap - 3, -3.0]), torch.tensor([-3.0, gap - 3])
    torch.testing.assert_close(kl_estimates(logprobs, reference, "k1"), torch.tensor([gap, -gap]))
    torch.testing.assert_close(kl_estimates(logprobs, reference, "k3"), torch.tensor([gap - 0.5, 1 - gap]))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimates_are_unbiased(estimator):
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    expected = torch.distributions.kl_divergence(torch.distributions.Categorical(p), torch.distributions.Categorical(q))
    torch.testing.assert_close((p * kl_estimates(p.log(), q.log(), estimator)).sum(), expected)


def test_whitening_by_hand_and_its_edges():
    values, mask = torch.tensor([[1.0, math.nan, 3.0], [5.0, 7.0, 9.0]]), torch.tensor([[1, 0, 1], [1, 0, 0]])
    expected = torch.tensor([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])  # mean 3, variance (4 + 0 + 4) / 2
    torch.testing.assert_close(whiten(values, mask), expected)
    kept = torch.tensor([[2.0, 0.0, 3.0], [4.0, 0.0, 0.0]])
    torch.testing.assert_close(whiten(values, mask, shift_mean=False), kept)
    alone = torch.tensor([[0, 0, 0], [0, 1, 0]])
    assert whiten(values, alone).tolist() == [[0, 0, 0], [0, 7, 0]]
    assert whiten(values, torch.zeros(2, 3)).eq(0).all()
    equal = whiten(torch.full((1, 7), 0.1), torch.ones(1, 7))
    assert equal.abs().max() < 1e-6


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_losses_of_a_cut_step_add_up(clip):
    values = NEW_VALUES.clone().requires_grad_()
    parts = [
        value_loss(values[rows], VALUES[rows], REFERENCE["returns"][rows], MASK[rows], clip=clip, tokens=9)
        for rows in ([0], [2, 1])
    ]
    whole = value_loss(values, VALUES, REFERENCE["returns"], MASK, clip=clip, tokens=9)
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss, rtol=1e-14, atol=0)
    assert parts[0].clipped + parts[1].clipped == whole.clipped
    if clip is None:
        expected = 0.5 * ((NEW_VALUES - REFERENCE["returns"]).square() * MASK).sum() / 9
        torch.testing.assert_close(whole.loss, expected)
    gradient = torch.autograd.grad(whole.loss, values)[0]
    assert gradient[1, 2:].eq(0).all()


def test_a_clipped_value_has_no_gradient():
    """V moved from 0 to 1 towards 2, bound 0.2: the clipped error is greater, and nothing pulls it on."""
    value = torch.ones(1, 1, requires_grad=True)
    found = value_loss(value, torch.zeros(1, 1), torch.full((1, 1), 2.0), torch.ones(1, 1), clip=0.2, tokens=1)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(0.5 * 1.8**2)
    assert value.grad.item() == 0.0


def test_values_in_padding_are_not_read():
    values = torch.tensor([[1.0, math.inf]], requires_grad=True)
    found = value_loss(values, torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]), clip=None, tokens=1)
    found.loss.backward()
    assert found.loss.item() == 0.5
    assert values.grad.tolist() == [[1.0, 0.0]]


def test_explained_variance():
    returns = REFERENCE["returns"]
    assert explained_variance(returns, returns, MASK).item() == 1.0
    assert explained_variance(torch.zeros(3, 4), returns, MASK).item() == pytest.approx(0.0)
    assert explained_variance(-returns, returns, MASK).item() == pytest.approx(-3.0)
    assert math.isnan(explained_variance(VALUES, torch.ones(3, 4), MASK).item())


@pytest.mark.parametrize(
    ("kl", "expected"), [(6.0, 0.1), (6.6, 0.101), (60.0, 0.102), (0.0, 0.098), (5.4, 0.099), (math.nan, 0.1)]
)
def test_the_kl_controller(kl, expected):
    """Ziegler et al.'s gain of 0.1 a step: 1000 rows of a horizon of 10,000."""
    assert adaptive_kl_coef(0.1, kl, target=6.0, rows=1000, horizon=10_000) == pytest.approx(expected)


def test_columns_may_be_denoising_steps():
    """A chain's reward stands at its last step, and every step's advantage is what was left to come."""
    mask = torch.ones(2, 50)
    rewards = token_rewards(torch.tensor([1.0, -2.0]), mask)
    found = generalized_advantages(rewards, torch.zeros(2, 50), mask, gamma=1.0, gae_lambda=1.0)
    assert found.advantages_BT.tolist() == [[1.0] * 50, [-2.0] * 50]


def test_no_value_is_read_on_the_host():
    with FakeTensorMode():
        mask = torch.ones(2, 3)
        rewards = token_rewards(torch.ones(2), mask, kl_BT=torch.ones(2, 3), kl_coef=0.1)
        found = generalized_advantages(rewards, torch.ones(2, 3), mask, gamma=1.0, gae_lambda=0.95)
        assert whiten(found.advantages_BT, mask).shape == (2, 3)
        assert value_loss(rewards, rewards, rewards, mask, clip=0.2, tokens=6).loss.shape == ()


def test_a_long_row_takes_a_few_operators() -> None:
    def operators(columns: int) -> int:
        rewards = torch.randn(2, columns, dtype=torch.float64)
        with Operators() as counted:
            generalized_advantages(rewards, rewards, torch.ones(2, columns), gamma=0.99, gae_lambda=0.95)
        return sum(counted.counts.values())

    assert operators(4096) <= 80
    assert operators(4096) - operators(64) <= 6 * 6
    assert operators(1) > 0
