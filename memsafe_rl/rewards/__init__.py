"""Rewards: prompts and completions in, one number a completion out; never the trained model."""

from memsafe_rl.rewards.calls import RewardFunction as RewardFunction
from memsafe_rl.rewards.paid import Ask as Ask
from memsafe_rl.rewards.paid import PaidReward as PaidReward
from memsafe_rl.rewards.registry import REWARD_FACTORIES as REWARD_FACTORIES
from memsafe_rl.rewards.registry import REWARD_FUNCTIONS as REWARD_FUNCTIONS
from memsafe_rl.rewards.registry import accuracy_reward as accuracy_reward
from memsafe_rl.rewards.registry import get_cosine_scaled_reward as get_cosine_scaled_reward
from memsafe_rl.rewards.registry import get_repetition_penalty_reward as get_repetition_penalty_reward
from memsafe_rl.rewards.registry import get_soft_overlong_punishment as get_soft_overlong_punishment
from memsafe_rl.rewards.registry import reasoning_accuracy_reward as reasoning_accuracy_reward
from memsafe_rl.rewards.registry import resolve_reward as resolve_reward
from memsafe_rl.rewards.registry import think_format_reward as think_format_reward
from memsafe_rl.rewards.runner import RewardRunner as RewardRunner
from memsafe_rl.rewards.runner import RewardScores as RewardScores
from memsafe_rl.rewards.runner import RewardSource as RewardSource
from memsafe_rl.rewards.scoring import RewardModel as RewardModel
