"""DPPO's masks, where they bite on both sides, against loops over tokens and against the paper's examples."""

from dataclasses import replace

import pytest
import torch

from memsafe_rl.errors import ConfigError
from memsafe_rl.ops.losses import policy_loss
from memsafe_rl.training.gradient import check_separable
from memsafe_rl.types import LossInputs, LossSettings
from tests.ops.naive_losses import counts_of, naive_loss

SETTINGS = {
    "dppo": LossSettings("dppo", epsilon_low=0.1, epsilon_high=0.15, delta=1.7),
    "dppo_kl": LossSettings("dppo_kl", epsilon_low=0.05, epsilon_high=0.08),
}


def gradient(inputs, settings):
    return torch.autograd.grad(policy_loss(inputs, settings, counts_of(inputs)).loss, inputs.logprobs_BT)[0]


def inputs_of(new, old, advantages):
    logprobs = torch.as_tensor(new, dtype=torch.float64).log().requires_grad_()
    old, advantages = (torch.as_tensor(values, dtype=torch.float64) for values in (old, advantages))
    return LossInputs(logprobs, advantages, torch.ones_like(logprobs), old.log())


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_beyond_either_bound_are_held_back_as_in_loops_over_tokens(name):
    generator = torch.Generator().manual_seed(0)
    new, old = torch.rand(2, 6, 40, generator=generator, dtype=torch.float64)
    inputs = inputs_of(new, old, torch.tensor([1.3, -0.7, 0.4, -1.1, 0.9, -0.2]))
    result = policy_loss(inputs, SETTINGS[name], counts_of(inputs))
    expected, scale = naive_loss(inputs, SETTINGS[name], counts_of(inputs))
    assert abs(result.loss - expected) <= 1e-12 * scale
    grads = [torch.autograd.grad(loss, inputs.logprobs_BT)[0] for loss in (result.loss, expected)]
    assert (grads[0] - grads[1]).norm() <= 1e-12 * grads[1].norm()
    held = {side: int(result.sums[f"clip_{side}"]) for side in ("low", "high", "region")}
    assert min(held["low"], held["high"]) > 20
    assert held["region"] == held["low"] + held["high"] == int((grads[0] == 0).sum())


@pytest.mark.parametrize("name", SETTINGS)
def test_rare_tokens_may_move_by_their_ratio_and_likely_ones_may_not(name):
    # From 1e-5 to 1e-3 the ratio is 100 and nothing has moved; from 0.99 to 0.6 it is 0.6 and much has.
    inputs = inputs_of([[1e-3, 0.6]], [[1e-5, 0.99]], [[1.0, -1.0]])
    moves = gradient(inputs, replace(SETTINGS[name], delta=None))[0]
    torch.testing.assert_close(moves, torch.tensor([-100.0, 0.0], dtype=torch.float64) / 2)
    clipped = gradient(inputs, LossSettings("dapo", epsilon_low=0.5, epsilon_high=0.5))[0]
    assert clipped[0] == 0
    assert clipped[1] != 0


@pytest.mark.parametrize("name", SETTINGS)
def test_what_has_moved_too_far_may_come_back(name):
    inputs = inputs_of([[0.1, 0.9]], [[0.9, 0.1]], [[1.0, -1.0]])
    assert gradient(inputs, SETTINGS[name]).all()
    assert not gradient(replace(inputs, advantages_B=-inputs.advantages_B), SETTINGS[name]).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kl_of_certain_tokens_is_finite_or_holds_back(dtype):
    logprobs = torch.tensor([[0.0, 0.0, -1e-12, -2.0]], dtype=dtype, requires_grad=True)
    old = torch.tensor([[0.0, -2.0, 0.0, 0.0]], dtype=dtype)
    inputs = LossInputs(logprobs, torch.tensor([[1.0, 1.0, 1.0, -1.0]], dtype=dtype), torch.ones(1, 4), old)
    moves = gradient(inputs, SETTINGS["dppo_kl"])[0]
    assert moves.isfinite().all()
    assert (moves != 0).tolist() == [True, False, True, False]


@pytest.mark.parametrize("name", SETTINGS)
def test_denoising_steps_have_no_probabilities_to_compare(name):
    with pytest.raises(
        ConfigError, match=rf"loss_type is '{name}', which compares .* are separable: .*bnpo, cispo, dapo"
    ):
        check_separable(SETTINGS[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_to_a_sure_token_holds_nothing_back(dtype):
    least = torch.finfo(dtype).eps
    new, old = torch.tensor([[0.0, -least, 0.0]], dtype=dtype), torch.tensor([[-least, -2e-4, -2.0]], dtype=dtype)
    inputs = LossInputs(new.requires_grad_(), torch.ones(1, dtype=dtype), torch.ones_like(old), old)
    held = (gradient(inputs, SETTINGS["dppo_kl"]) == 0)[0].tolist()
    assert held == [False, False, True]  # the third was no sure token before
