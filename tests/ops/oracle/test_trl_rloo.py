"""TRL 1.16's leave-one-out advantages, taken from its RLOO trainer, against ours."""

import math
import tempfile

import pytest
import torch
from datasets import Dataset
from trl import RLOOConfig, RLOOTrainer

from memsafe_rl.ops.advantages import estimated_advantages
from tests.tiny import tiny_model, tiny_tokenizer

ROWS = 6
NAN = math.nan
REWARDS = {
    "spread": [[0.1, 1.0], [0.9, 0.0], [0.4, 3.0], [0.4, -1.0], [0.0, 0.5], [1.0, 0.5]],
    "missing": [[0.1, NAN], [0.9, 0.0], [NAN, NAN], [0.4, -1.0], [NAN, 0.5], [1.0, 0.25]],
    "equal": [[1.0, 0.5], [1.0, 0.5], [0.0, 0.5], [1.0, 0.5], [0.25, 0.0], [0.25, 0.0]],
}


@pytest.fixture(scope="module")
def trainer():
    made = RLOOTrainer(
        model=tiny_model("qwen3", hidden=16),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=RLOOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=ROWS,
            num_generations=2,
            beta=0.0,
            report_to=[],
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * ROWS}),
        processing_class=tiny_tokenizer(),
    )
    ids = [[5, 1]] * ROWS
    made.model.train()
    made._generate = lambda _: (ids, ids, ["a"] * ROWS)
    return made


@pytest.mark.parametrize("group_size", [2, 3, 6])
@pytest.mark.parametrize("rewards", REWARDS.values(), ids=REWARDS)
def test_leave_one_out_agrees(trainer, rewards, group_size):
    rewards, weights = torch.tensor(rewards), torch.tensor([1.0, 0.5])
    trainer._calculate_rewards = lambda *_: rewards.clone()
    trainer.reward_funcs, trainer.reward_func_names = [None] * 2, ["first", "second"]
    trainer.num_generations, trainer.reward_weights = group_size, weights
    expected = trainer._generate_and_score_completions([{"prompt": "a"}] * ROWS)["advantages"]
    actual = estimated_advantages(rewards, weights, group_size, estimator="rloo").advantages_B
    # float32 in TRL: rounding of rewards near 1 (6e-8).
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
