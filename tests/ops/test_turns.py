"""Credit for turns by hand, and against loops."""

import math

import torch

from memsafe_rl.ops.advantages import centred_in_group, normalised_in_group, relative_to_state, turn_returns


def test_returns_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 4.0], dtype=torch.float64)
    assert turn_returns(rewards, 0.5).tolist() == [2.0, 2.0, 4.0]
    assert turn_returns(rewards, 0.0).tolist() == [1.0, 0.0, 4.0]
    assert turn_returns(rewards[:0], 0.5).tolist() == []


def test_turns_of_one_state_are_compared_and_others_are_not() -> None:
    returns = torch.tensor([1.0, 5.0, 3.0, 8.0, math.nan, 2.0], dtype=torch.float64)
    states = [(0, "a"), (0, "b"), (0, "a"), (1, "a"), (0, "a"), (0, "c")]
    centred, met = relative_to_state(returns, states, centred_in_group)
    assert centred.tolist() == [-1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert met.tolist() == [True, False, True, False, True, False]
    scaled, _ = relative_to_state(returns, states, normalised_in_group)
    torch.testing.assert_close(scaled, centred / (math.sqrt(2) + 1e-4), rtol=1e-12, atol=0)


def test_any_states_equal_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    returns = torch.randn(60, generator=generator, dtype=torch.float64)
    states = torch.randint(0, 9, (60,), generator=generator).tolist()
    found, _ = relative_to_state(returns, states, normalised_in_group)
    for place, state in enumerate(states):
        alike = [float(value) for value, other in zip(returns, states, strict=True) if other == state]
        mean = math.fsum(alike) / len(alike)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in alike) / max(1, len(alike) - 1))
        wanted = (float(returns[place]) - mean) / (deviation + 1e-4) if len(alike) > 1 else 0.0
        assert abs(float(found[place]) - wanted) < 1e-12
