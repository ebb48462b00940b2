"""Gaussian log-probs, entropies and KL against torch.distributions; noise against any other batch."""

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from memsafe_rl.errors import ConfigError
from memsafe_rl.ops.gaussian import gaussian_entropies, gaussian_kl, gaussian_logprobs, normal_noise
from memsafe_rl.types import GaussianDistribution

SHAPE = (3, 4)


def distribution(reduction="mean", dtype=torch.float64, elements=None, stds=(0.3, 0.0, 1.7, 0.05)):
    generator = torch.Generator().manual_seed(1)
    means, noise, others = (torch.randn(len(stds), *SHAPE, generator=generator, dtype=dtype) for _ in range(3))
    stds_M = torch.tensor(stds, dtype=dtype)
    taken = means + stds_M[:, None, None] * noise
    return GaussianDistribution(
        means=means.requires_grad_(),
        stds_M=stds_M,
        taken=taken,
        lengths=(2, 2),
        reduction=reduction,
        elements=elements,
        reference_means=means.detach() + 0.1 * others,
    )


def naive(values, one, elements):
    """Reduces (M, ...) entry by entry; a step without noise is no choice."""
    found = []
    for entry, std in enumerate(one.stds_M.tolist()):
        kept = values[entry] if elements is None else values[entry][elements[entry].expand(SHAPE) != 0]
        total = kept.mean() if one.reduction == "mean" else kept.sum()
        found.append(total if std > 0 else torch.zeros(()))
    return torch.stack(found)


def masks():
    elements = torch.ones(4, 1, SHAPE[1])
    elements[0, :, 2:] = 0
    elements[3, :, :3] = 0
    return elements


@pytest.mark.parametrize("elements", [None, masks()], ids=["all", "masked"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_equals_torch_distributions(reduction, elements):
    one = distribution(reduction, elements=elements)
    safe = torch.where(one.stds_M > 0, one.stds_M, 1)[:, None, None].expand_as(one.means)
    normal, reference = Normal(one.means, safe), Normal(one.reference_means, safe)
    expected = naive(normal.log_prob(one.taken), one, elements)
    torch.testing.assert_close(gaussian_logprobs(one), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        gaussian_entropies(one), naive(normal.entropy(), one, elements), rtol=1e-12, atol=1e-12, check_dtype=False
    )
    kl = naive(kl_divergence(normal, reference), one, elements)
    torch.testing.assert_close(gaussian_kl(one), kl, rtol=1e-12, atol=1e-12)
    for ours, theirs in ((gaussian_logprobs(one), expected), (gaussian_kl(one), kl)):
        mine, other = (torch.autograd.grad(value.sum(), one.means, retain_graph=True)[0] for value in (ours, theirs))
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-12)
        assert bool((mine[1] == 0).all())


def test_what_does_not_count_may_be_anything():
    one = distribution("sum", elements=masks())
    with torch.no_grad():
        one.taken[0, :, 2:] = math.inf
        one.reference_means[0, :, 2:] = math.nan
    total = gaussian_logprobs(one).sum() + gaussian_kl(one).sum()
    (gradient,) = torch.autograd.grad(total, one.means)
    assert bool(total.isfinite())
    assert bool(gradient.isfinite().all())
    assert bool((gradient[0, :, 2:] == 0).all())


def test_an_empty_mask_counts_nothing():
    one = distribution("mean", elements=torch.zeros(4, 1, 1))
    for values in (gaussian_logprobs(one), gaussian_kl(one), gaussian_entropies(one)):
        assert bool((values == 0).all())


def test_a_ratio_of_large_states_is_known_although_its_log_probs_are_large():
    """Two sums over 51,548 elements in float32 are known to their spacing, 0.004 at 5e4, and so is their difference."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(1, 263, 1, 196, generator=generator)
    taken = means + 0.1 * torch.randn(means.shape, generator=generator)
    moved = means + 1e-6 * torch.randn(means.shape, generator=generator)

    def logprob(of):
        return gaussian_logprobs(GaussianDistribution(of, torch.tensor([0.1]), taken, (1,), "sum"))[0]

    expected = Normal(moved.double(), 0.1).log_prob(taken.double()) - Normal(means.double(), 0.1).log_prob(
        taken.double()
    )
    assert abs(logprob(moved) - logprob(means) - expected.sum()) < 3e-4
    assert logprob(means).abs() > 3e4
    single = Normal(moved, 0.1).log_prob(taken).sum() - Normal(means, 0.1).log_prob(taken).sum()
    assert abs(single - expected.sum()) > 1e-3


def test_a_kl_without_a_reference_is_refused():
    one = distribution()
    with pytest.raises(ConfigError, match=r"no reference means.*set beta=0"):
        gaussian_kl(GaussianDistribution(one.means, one.stds_M, one.taken, one.lengths, "mean"))
    with pytest.raises(ConfigError, match=r"`reduction` is 'max'\. Set it to one of mean, sum\."):
        gaussian_logprobs(GaussianDistribution(one.means, one.stds_M, one.taken, one.lengths, "max"))


def test_noise_is_normal_and_its_rows_independent():
    keys = torch.tensor([[0, 0, 0, sample] for sample in range(8)])
    noise = normal_noise(keys, torch.arange(8), (300, 200)).flatten(1)
    count = noise.shape[1]
    assert bool((noise.mean(1).abs() < 4 / count**0.5).all())
    assert bool((noise.var(1) - 1).abs().max() < 4 * (2 / count) ** 0.5)
    assert abs((noise**4).mean() - 3) < 4 * (96 / noise.numel()) ** 0.5
    together = noise @ noise.T / count - torch.eye(8)
    assert float((together - together.diag().diag()).abs().max()) < 5 / count**0.5
    following = (noise[:, 1:] * noise[:, :-1]).mean(1)
    assert bool((following.abs() < 4 / count**0.5).all())


def test_noise_does_not_depend_on_the_batch(monkeypatch):
    keys = torch.tensor([[3, -1, prompt, sample] for prompt in range(2) for sample in range(3)])
    positions = torch.tensor([0, 1, 2, 50, 51, 52])
    whole = normal_noise(keys, positions, (7, 3))
    for row in range(6):
        assert torch.equal(normal_noise(keys[row : row + 1], positions[row : row + 1], (7, 3))[0], whole[row])
    monkeypatch.setattr("memsafe_rl.ops.gaussian._TILE_ELEMENTS", 12)
    assert torch.equal(normal_noise(keys, positions, (7, 3)), whole)
