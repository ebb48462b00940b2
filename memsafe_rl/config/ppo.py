"""The configuration of a PPO run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memsafe_rl.config.base import TrainerConfig, named
from memsafe_rl.config.fields import PPOFields
from memsafe_rl.config.refusals import RefusedFields
from memsafe_rl.errors import ConfigError
from memsafe_rl.types import LossSettings


@named
@dataclass
class PPOConfig(RefusedFields, PPOFields, TrainerConfig):
    """Settings of `PPOTrainer`: those of `GRPOConfig` where the concept is the same, and those of a critic.

    The KL to the reference may stand in the reward of every action (`kl_coef`), in the loss (`beta`), or in both;
    `kl_target` steers what is there. Earlier names of TRL's PPO are understood: `num_ppo_epochs`, `cliprange`,
    `cliprange_value`, `lam`, `response_length`.
    """

    algorithm: ClassVar[str] = "PPO"

    def _check_algorithm(self) -> None:
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

    @property
    def has_reference(self) -> bool:
        """Whether a reference is needed."""
        return self.beta != 0 or self.kl_coef != 0

    @property
    def every_row_learns(self) -> bool:
        """True: the critic learns from rows whose advantages are 0 too."""
        return True

    def advantage_settings(self) -> dict[str, str]:
        """Gives how rewards are compared for the log; a row's advantages come from its actions' own."""
        return {"estimator": "dr_grpo"}

    def loss_settings(self) -> LossSettings:
        """Gives what the policy's loss reads: PPO's clipped ratio, averaged over the step's tokens."""
        return LossSettings(
            loss_type="dapo",
            epsilon_low=self.epsilon,
            epsilon_high=self.epsilon if self.epsilon_high is None else self.epsilon_high,
            delta=self.delta,
            beta=self.beta,
            use_bias_correction_kl=self.use_bias_correction_kl,
            max_completion_length=self.max_completion_length,
        )
