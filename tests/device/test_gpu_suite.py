"""Parts of the suite for cards, rehearsed: what they measure is what they say; the others run in `--rehearse` only."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_parts import budgets, exactness, forecasts, speed
from benchmarks.gpu_parts.sizes import REHEARSAL
from tests.device.pretend import Pretend


@pytest.mark.parametrize("name", budgets.KINDS)
def test_budgets_of_reserved_bytes_are_kept_with_the_same_tokens_and_weights(name: str, cuda: Pretend) -> None:
    shares = budgets.KINDS[name].shares
    free, *limited = dict(budgets.beside(name, REHEARSAL, shares)).values()
    above_state = free["reserved_bytes"] - free["state_bytes"]
    assert 0.4 in shares
    for share, run in zip(shares, limited, strict=True):
        assert run["budget_bytes"] == pytest.approx(free["state_bytes"] + share * above_state, abs=1)
        assert run["reserved_bytes"] <= run["budget_bytes"] < free["peak_bytes"]
        assert run["failures"] == 0 or share < 0.4
        assert run["same_tokens"]
        assert run["weights_apart"] < 1e-4
        assert run["passed"]
    peaks = [run["peak_bytes"] for run in (free, *limited)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0] / 2


def test_a_forecast_is_what_the_run_holds_and_reserves(cuda: Pretend) -> None:
    found = forecasts.foreseen(REHEARSAL.cases[0], REHEARSAL)
    assert found["passed"]
    assert abs(found["error"]) < 0.01
    assert abs(found["reserved_error"]) < 0.1
    assert found["failures"] == 0


def test_a_rollout_draws_every_token_on_both_sides(cuda: Pretend) -> None:
    found = dict(speed.rollout(REHEARSAL))
    ours, theirs = found["memsafe_rl"], found["generate"]
    assert 0 < ours["above_weights_bytes"] < theirs["above_weights_bytes"]


def test_an_operator_is_refused_by_the_allocator_in_forward_and_backward(cuda: Pretend) -> None:
    weight = torch.randn(8, 8, device="cuda", requires_grad=True)
    with exactness.Refusals() as device:
        (weight @ weight).exp().sum().backward()
        forward_and_backward = device.allocations
    failed_in = []
    for place in range(1, forward_and_backward + 1):
        weight.grad = None
        with exactness.Refusals() as device:
            device.fail_after(place)
            try:
                total = (weight @ weight).exp().sum()
            except torch.OutOfMemoryError:
                failed_in.append("forward")
                continue
            with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
                total.backward()
            failed_in.append("backward")
            assert device.refusals == 1
    assert failed_in.count("forward") == 3
    assert failed_in.count("backward") >= 3
