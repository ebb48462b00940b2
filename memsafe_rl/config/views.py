"""Typed views of a configuration: what each part of a step reads, frozen, so that no part knows the configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from memsafe_rl.config.objectives import Objective
from memsafe_rl.config.values import check_choice, read, unknown
from memsafe_rl.errors import ConfigError
from memsafe_rl.types import LossSettings

if TYPE_CHECKING:
    from memsafe_rl.config.base import TrainerConfig
    from memsafe_rl.config.ppo import PPOConfig

View = TypeVar("View")


@dataclass(frozen=True)
class KLStop:
    """When the passes over a rollout end early."""

    target: float  # KL to the model before the first update on that rollout, in nats, above which they end
    unit: str = "token"  # "token" (mean over tokens) or "sequence" (sum over a row, mean over rows)
    estimator: str = "k3"  # "k3" or "k1" (Schulman 2020, "Approximating KL divergence")


@dataclass(frozen=True)
class ImportanceSettings:
    """How the log-probs of another sampler are corrected: whether, and how the weights are bounded."""

    correction: bool
    mode: str
    clip_min: float | None
    clip_max: float | None


@dataclass(frozen=True)
class RolloutSettings:
    """What a collector reads; each field means what the configuration's attribute of that name means."""

    num_generations: int
    prompts_per_rollout: int
    rollout_rows: int
    seed: int
    temperature: float
    max_completion_length: int
    max_turn_length: int | None
    max_episode_turns: int | None
    max_tool_calling_iterations: int | None
    partial_rollout_tokens: int | None
    dynamic_sampling: bool
    dynamic_sampling_max_rounds: int
    overlap_async_rewards: bool
    mask_truncated_completions: bool
    has_reference: bool
    every_row_learns: bool
    disable_dropout: bool
    num_iterations: int
    updates_per_epoch: int
    objective_list: tuple[Objective, ...]
    eval_tries: tuple[int, ...]
    eval_pass_reward: str | None
    eval_pass_threshold: float
    importance: ImportanceSettings

    @property
    def visits_rows_again(self) -> bool:
        """Whether a row is passed through the network more than once: by later updates, or by a reference."""
        return self.num_iterations > 1 or self.updates_per_epoch > 1 or self.has_reference


@dataclass(frozen=True)
class EntropySettings:
    """The bonus on entropy, and what adapts its coefficient."""

    entropy_coef: float
    use_adaptive_entropy: bool
    entropy_coef_min: float
    entropy_coef_max: float
    entropy_coef_delta: float
    entropy_target: float

    @property
    def gives_bonus(self) -> bool:
        """Whether the loss has, or may come to have, the bonus."""
        return self.entropy_coef != 0 or self.use_adaptive_entropy


@dataclass(frozen=True)
class UpdateSettings:
    """What a learner reads; each field means what the configuration's attribute of that name means."""

    temperature: float
    top_entropy_quantile: float
    max_grad_norm: float
    seed: int
    disable_dropout: bool
    autocast_dtype: torch.dtype | None
    fp16: bool
    every_row_learns: bool
    objective_list: tuple[Objective, ...]
    gradients_aside: int
    sync_ref_model: bool
    ref_model_mixup_alpha: float
    ref_model_sync_steps: int
    loss: LossSettings
    entropy: EntropySettings


@dataclass(frozen=True)
class StepSettings:
    """What the loop reads to order rollouts, passes and optimizer steps."""

    num_iterations: int
    updates_per_epoch: int
    step_rows: int
    rollout_rows: int
    prompts_per_rollout: int
    order_seed: int
    num_train_epochs: float
    max_steps: int
    eval_generations: int
    kl_stop_rule: KLStop | None


@dataclass(frozen=True)
class CriticSettings:
    """What PPO's critic and its rewards of actions read."""

    gamma: float
    gae_lambda: float
    vf_coef: float
    vf_clip: float | None
    whiten_advantages: bool
    whiten_rewards: bool
    kl_coef: float
    kl_estimator: str
    kl_target: float | None
    kl_horizon: float
    beta: float
    missing_eos_penalty: float | None
    has_reference: bool
    rollout_rows: int


def view(kind: type[View], config: TrainerConfig, **parts: Any) -> View:
    """Makes a view from the attributes of its fields' names; `parts` are the fields that have none."""
    own = {part.name for part in fields(kind) if part.name not in parts}  # type: ignore[arg-type]
    return kind(**{name: getattr(config, name) for name in own if hasattr(config, name)}, **parts)


def loss_settings(config: TrainerConfig) -> LossSettings:
    """Gives what the loss reads; what an algorithm has no setting for stays at its default."""
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    return view(LossSettings, config, epsilon_low=config.epsilon, epsilon_high=high)


def rollout_settings(config: TrainerConfig) -> RolloutSettings:
    """Gives what a collector reads."""
    importance = ImportanceSettings(
        config.vllm_importance_sampling_correction,
        config.vllm_importance_sampling_mode,
        config.vllm_importance_sampling_clip_min,
        config.vllm_importance_sampling_clip_max,
    )
    return view(RolloutSettings, config, importance=importance, eval_tries=tuple(config.eval_tries))


def update_settings(config: TrainerConfig) -> UpdateSettings:
    """Gives what a learner reads."""
    return view(UpdateSettings, config, loss=loss_settings(config), entropy=view(EntropySettings, config))


def step_settings(config: TrainerConfig) -> StepSettings:
    """Gives what the loop reads."""
    return view(StepSettings, config)


def critic_settings(config: PPOConfig) -> CriticSettings:
    """Gives what PPO's critic reads."""
    return view(CriticSettings, config)


def read_kl_stop(given: Any) -> KLStop | None:
    """Reads the setting `kl_stop`."""
    if given is None:
        return None
    parts: dict[str, Any] = dict(given) if isinstance(given, dict) else {"target": given}
    for key in parts:
        if key not in ("target", "unit", "estimator"):
            raise unknown(key, ("target", "unit", "estimator"), "key of kl_stop")
    if "target" not in parts:
        raise ConfigError(f"kl_stop is {given!r}, without a target. Set kl_stop={{'target': 0.02}} (nats).")
    rule = KLStop(**{**parts, "target": read("kl_stop", parts["target"], float)})
    if not rule.target > 0:
        raise ConfigError(f"kl_stop is {rule.target!r}; it must be more than 0 nats. None switches it off.")
    check_choice("unit of kl_stop", rule.unit, ("token", "sequence"))
    check_choice("estimator of kl_stop", rule.estimator, ("k3", "k1"))
    return rule
