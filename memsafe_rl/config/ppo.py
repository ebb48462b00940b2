"""The configuration of a PPO run."""

from __future__ import annotations

from typing import ClassVar

from memsafe_rl.config import refusal
from memsafe_rl.config.base import TrainerConfig, configuration
from memsafe_rl.config.settings import PPOSettings


@configuration
class PPOConfig(PPOSettings, TrainerConfig):
    """Settings of `PPOTrainer`: those of `GRPOConfig` where the concept is the same, and those of a critic.

    The KL to the reference may stand in the reward of every action (`kl_coef`), in the loss (`beta`), or in both;
    `kl_target` steers what is there. Earlier names of TRL's PPO are understood: `num_ppo_epochs`, `cliprange`,
    `cliprange_value`, `lam`, `response_length`.
    """

    algorithm: ClassVar[str] = "PPO"
    least_group: ClassVar[int] = 1  # the critic needs no group to compare with
    every_row_learns: ClassVar[bool] = True  # the critic learns from rows whose advantages are 0 too

    @property
    def has_reference(self) -> bool:
        """Whether a reference is needed: for a KL in the loss or in the rewards of actions."""
        return self.loss_has_kl or self.kl_coef != 0

    def advantage_settings(self) -> dict[str, str]:
        """Returns how rewards are compared for the log; a row's advantages come from its actions' own."""
        return {"estimator": "dr_grpo"}

    def check_algorithm(self) -> None:
        """Checks that there is a KL to steer, a group to replace, and nothing that moves the policy in a warm-up."""
        movers = ("beta", "entropy_coef", "use_adaptive_entropy", "weight_decay")
        moving = [name for name in movers if getattr(self, name)]
        if self.critic_warmup_rollouts and moving:
            raise refusal("critic_warmup_rollouts", config=self, name=moving[0], value=getattr(self, moving[0]))
        refusal.when(self.kl_target is not None and not self.has_reference, "kl_target", target=self.kl_target)
        least = 0.2 * self.rollout_rows  # below which the coefficient would change its sign
        refusal.when(self.kl_target is not None and self.kl_horizon <= least, "kl_horizon", config=self, least=least)
        refusal.when(self.dynamic_sampling and self.num_generations < 2, "dynamic_sampling", group=self.num_generations)
