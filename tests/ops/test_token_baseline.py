"""The optimal token baseline by loops, by hand, and its squared norms by autograd."""

import math

import torch

from memsafe_rl.ops.advantages import optimal_token_advantages, squared_score_norms


def test_squared_norms_are_those_of_the_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    for temperature in (0.7, 1.0):
        logits = (4 * torch.randn(5, 11, generator=generator, dtype=torch.float64)).requires_grad_()
        tokens = torch.randint(0, 11, (5,), generator=generator)
        scaled = logits / temperature
        logprobs = scaled.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        slopes = torch.autograd.grad(logprobs.sum(), scaled, retain_graph=True)[0]
        sharper = (2 * scaled).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        found = squared_score_norms(logprobs.detach(), sharper.detach())
        torch.testing.assert_close(found, slopes.square().sum(1), rtol=1e-12, atol=1e-12)


def test_advantages_equal_loops() -> None:
    generator = torch.Generator().manual_seed(1)
    rewards = torch.tensor([1.0, 0.0, 0.25, math.nan, 0.5], dtype=torch.float64)
    norms = 2 * torch.rand(5, 7, generator=generator, dtype=torch.float64)
    mask = (torch.arange(7) < torch.tensor([7, 4, 5, 6, 2])[:, None]).double()
    mask[0, 2] = 0
    found = optimal_token_advantages(rewards, norms, mask)
    for row in range(5):
        for column in range(7):
            rows = [other for other in range(5) if mask[other, column] and not rewards[other].isnan()]
            weights = {
                other: sum(float(norms[other, before]) for before in range(column + 1) if mask[other, before])
                for other in rows
            }
            wanted = 0.0
            if row in rows and len(rows) > 1:
                baseline = sum(weights[one] * float(rewards[one]) for one in rows) / sum(weights.values())
                wanted = float(rewards[row]) - baseline
            assert abs(float(found[row, column]) - wanted) < 1e-12


def test_by_hand_and_equal_rewards_give_exactly_nothing() -> None:
    norms = torch.tensor([[1.0, 1.0], [3.0, 0.0]], dtype=torch.float64)
    mask = torch.ones(2, 2)
    found = optimal_token_advantages(torch.tensor([1.0, 0.0], dtype=torch.float64), norms, mask)
    assert found.tolist() == [[0.75, 0.6], [-0.25, -0.4]]
    assert not optimal_token_advantages(torch.tensor([0.1, 0.1], dtype=torch.float64), norms, mask).any()
