"""Rewards: prompts and completions in, one number a completion out; never the trained model."""

from memsafe_rl.rewards.accuracy import accuracy_reward, get_cosine_scaled_reward, reasoning_accuracy_reward
from memsafe_rl.rewards.base import RewardRunner, RewardScores, RewardSource
from memsafe_rl.rewards.calls import RewardFunction
from memsafe_rl.rewards.registry import REWARD_FACTORIES, REWARD_FUNCTIONS, resolve_reward
from memsafe_rl.rewards.scoring import RewardModel
from memsafe_rl.rewards.shape import get_repetition_penalty_reward, get_soft_overlong_punishment, think_format_reward

__all__ = [
    "REWARD_FACTORIES",
    "REWARD_FUNCTIONS",
    "RewardFunction",
    "RewardModel",
    "RewardRunner",
    "RewardScores",
    "RewardSource",
    "accuracy_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "reasoning_accuracy_reward",
    "resolve_reward",
    "think_format_reward",
]
