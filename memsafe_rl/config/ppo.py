"""The configuration of a PPO run."""

from __future__ import annotations

from typing import ClassVar

from memsafe_rl.config.base import TrainerConfig, configuration
from memsafe_rl.config.settings import PPOSettings
from memsafe_rl.errors import ConfigError


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
        """Gives how rewards are compared for the log; a row's advantages come from its actions' own."""
        return {"estimator": "dr_grpo"}

    def check_algorithm(self) -> None:
        """Checks that there is a KL to steer, a group to replace, and nothing that moves the policy in a warm-up."""
        movers = ("beta", "entropy_coef", "use_adaptive_entropy", "weight_decay")
        moving = [name for name in movers if getattr(self, name)]
        if self.critic_warmup_rollouts and moving:
            raise ConfigError(
                f"critic_warmup_rollouts is {self.critic_warmup_rollouts}, but {moving[0]} is "
                f"{getattr(self, moving[0])}, which moves the policy whatever its advantages. Leave one of the two out."
            )
        if self.kl_target is not None and not self.has_reference:
            raise ConfigError(
                f"kl_target is {self.kl_target} nats a row, but kl_coef and beta are 0, so that there is nothing to "
                "steer. Set kl_coef=0.05, or kl_target=None."
            )
        if self.dynamic_sampling and self.num_generations < 2:
            raise ConfigError(
                f"dynamic_sampling replaces groups of equal rewards, but num_generations is {self.num_generations}: a "
                "completion alone equals itself. Set num_generations to 2 or more, or dynamic_sampling=False."
            )
