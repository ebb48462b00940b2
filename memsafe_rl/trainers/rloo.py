"""RLOO: a completion's advantage is its reward, less the mean of the others of its prompt."""

from __future__ import annotations

from memsafe_rl.config.grpo import RLOOConfig
from memsafe_rl.trainers.policy_trainer import PolicyTrainer


class RLOOTrainer(PolicyTrainer):
    """Trains a model with REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740), with TRL 1.16's meanings.

    Rewards pay for the KL to the reference (`beta`), and ratios are of whole completions, clipped as in PPO. Everything
    else, from the arguments and errors to what happens when memory runs out, is as in `GRPOTrainer`.
    """

    config_class = RLOOConfig
