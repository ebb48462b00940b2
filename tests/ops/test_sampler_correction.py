"""Which actions of another sampler are accepted, against loops over tokens."""

import math

import pytest
import torch

from memsafe_rl.ops.sampler_correction import accepted


def naive(old, sampled, mask, criterion, limit):
    level, estimator = criterion.split("_")
    found = []
    for new, drawn, counts in zip(old, sampled, mask, strict=True):
        gap = 0.0 if math.isnan(drawn) or not counts else new - drawn
        found.append(gap if estimator == "k1" else math.exp(gap) - 1 - gap)
    if level == "sequence":
        found = [sum(found) / max(1, sum(mask))] * len(found)
    return [float(abs(one) <= limit) for one in found]


@pytest.mark.parametrize("criterion", ["token_k1", "token_k3", "sequence_k1", "sequence_k3"])
def test_tokens_and_sequences_within_the_limit_are_accepted(criterion):
    generator, seen = torch.Generator().manual_seed(2), set()
    for length in range(1, 40):
        old, gaps = torch.randn(2, length, generator=generator, dtype=torch.float64)
        mask = (torch.rand(length, generator=generator) > 0.2).double()
        sampled = torch.where(torch.rand(length, generator=generator) > 0.1, old - 0.5 * gaps, math.nan)
        limit = {"token_k1": 0.4, "token_k3": 0.1, "sequence_k1": 0.08, "sequence_k3": 0.1}[criterion]
        given = accepted(old, sampled, mask, criterion=criterion, limit=limit)
        assert given.dtype == torch.float64
        assert given.tolist() == naive(old.tolist(), sampled.tolist(), mask.tolist(), criterion, limit)
        seen.update(given.tolist())
    assert seen == {0.0, 1.0}


def test_a_sequence_without_counted_actions_is_accepted():
    nothing = accepted(torch.zeros(3), torch.full((3,), -9.0), torch.zeros(3), criterion="sequence_k3", limit=0.1)
    assert nothing.tolist() == [1, 1, 1]
