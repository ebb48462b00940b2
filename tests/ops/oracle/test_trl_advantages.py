"""TRL 1.16's own advantages, taken from its trainer, against ours."""

import functools
import math
import warnings

import pytest
import torch

from memsafe_rl.ops.advantages import estimated_advantages
from tests.ops.oracle.trl_trainer import LENGTHS, trl_trainer

ROWS = len(LENGTHS)
NAN = math.nan
REWARDS = {
    "spread": [[0.1, 1.0], [0.9, 0.0], [0.4, 3.0], [0.4, -1.0], [0.0, 0.5], [1.0, 0.5]],
    "missing": [[0.1, NAN], [0.9, 0.0], [NAN, NAN], [0.4, -1.0], [NAN, 0.5], [1.0, 0.25]],
    "equal": [[1.0, 0.5], [1.0, 0.5], [0.0, 0.5], [1.0, 0.5], [0.25, 0.0], [0.25, 0.0]],
}


@functools.cache
def shared_trainer():
    trainer = trl_trainer()
    ids = [[5, 1]] * ROWS
    trainer._generate = lambda _: (ids, ids, None, ["a"] * ROWS, None, {}, None, None)
    return trainer


def trl_advantages(rewards, weights, group_size, scale, aggregation):
    trainer = shared_trainer()
    trainer._calculate_rewards = lambda *_: rewards.clone()
    trainer.reward_funcs, trainer.reward_func_names = [None] * rewards.shape[1], ["first", "second"]
    trainer.num_generations, trainer.scale_rewards = group_size, scale
    trainer.multi_objective_aggregation, trainer.reward_weights = aggregation, weights
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trainer._generate_and_score_completions([{"prompt": "a"}] * ROWS)["advantages"]


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("group_size", [2, 3, 6])
@pytest.mark.parametrize("rewards", REWARDS.values(), ids=REWARDS)
def test_advantages_agree(rewards, group_size, scale, aggregation):
    rewards, weights = torch.tensor(rewards), torch.tensor([1.0, 0.5])
    expected = trl_advantages(rewards, weights, group_size, scale, aggregation)
    actual = estimated_advantages(
        rewards, weights, group_size, scale_rewards=scale, aggregation=aggregation
    ).advantages_B
    # float32 in TRL: rounding of rewards near 1 (6e-8) over deviations of at least 0.1.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
