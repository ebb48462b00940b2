"""The configurations of runs that compare the completions of a prompt: GRPO and RLOO."""

from __future__ import annotations

import functools
import warnings
from typing import ClassVar

from memsafe_rl.config import refusal
from memsafe_rl.config.base import TrainerConfig, configuration
from memsafe_rl.config.settings import GRPOSettings, RLOOSettings
from memsafe_rl.ops.advantages import ESTIMATORS
from memsafe_rl.ops.losses import LOSSES
from memsafe_rl.ops.merging import MOST_CAGRAD_OBJECTIVES


@configuration
class GRPOConfig(GRPOSettings, TrainerConfig):
    """Settings of `GRPOTrainer`, under TRL 1.16's names, with its defaults and meanings.

    Every setting here is honoured; any other one of TRL or transformers is refused by name when the object is made or
    changed. The object is mutable and is validated when it is made and again by the trainer.

    Differences from TRL's defaults: `disable_dropout` is True, since a batch cut otherwise would draw other masks;
    `gradient_checkpointing` is None, since the plan decides; `bf16` is False on a device without it.
    """

    algorithm: ClassVar[str] = "GRPO"

    @property
    def least_group(self) -> int:
        """Completions of a prompt that its advantages compare."""
        return ESTIMATORS[self.advantage_estimator].least_group

    @property
    def has_reference(self) -> bool:
        """Whether a reference is needed: for a KL in the loss, or as a teacher."""
        return self.loss_has_kl or self.teacher_model_name_or_path is not None

    def advantage_settings(self) -> dict[str, str]:
        """Returns the part of the configuration that advantages read."""
        return {
            "estimator": self.advantage_estimator,
            "scale_rewards": self.scale_rewards,
            "aggregation": self.multi_objective_aggregation,
        }

    def check_algorithm(self) -> None:
        """Checks objectives, estimator and level, and warns of doubtful choices."""
        _check_objectives(self)
        _check_estimator(self)
        _check_teacher(self)
        _check_by_token(self)
        low, high = self.clip_cov_low, self.clip_cov_high
        refusal.when(low >= high, "clip_cov_low", low=low, high=high)
        level, levels = self.importance_sampling_level, LOSSES[self.loss_type].traits.levels
        if level not in levels:
            _warn(
                f"importance_sampling_level is {level!r} with loss_type {self.loss_type!r}, which is defined for "
                f"{levels[0]!r}. Set importance_sampling_level={levels[0]!r}, or loss_type='grpo', which suits both."
            )


@configuration
class RLOOConfig(RLOOSettings, TrainerConfig):
    """Settings of `RLOOTrainer`, under TRL 1.16's names and meanings; its defaults differ as in `GRPOConfig`."""

    algorithm: ClassVar[str] = "RLOO"
    kl_in_rewards: ClassVar[bool] = True
    loss_type: ClassVar[str] = "rloo"
    importance_sampling_level: ClassVar[str] = "sequence_sum"
    least_group: ClassVar[int] = ESTIMATORS["rloo"].least_group

    @property
    def has_reference(self) -> bool:
        """Whether a reference is needed: for the KL that rewards pay for."""
        return self.beta != 0

    def advantage_settings(self) -> dict[str, str]:
        """Returns how rewards are compared before they pay for the KL."""
        return {"estimator": "rloo"}

    def check_algorithm(self) -> None:
        """Checks the bounds of rewards, and that no KL in the loss is spoken of."""
        bounds = self.reward_clip_range
        if bounds is not None and (len(bounds) != 2 or bounds[0] >= bounds[1]):
            raise refusal("reward_clip_range", bounds=bounds)
        _refuse_changed(self, ("use_bias_correction_kl",), "in RLOO, whose KL stands in the rewards, not in the loss")


def _check_objectives(config: GRPOConfig) -> None:
    """Refuses settings that only several objectives read, where there are none, and too many for a merge."""
    objectives = config.objective_list
    if not objectives:
        why, remedy = "without objectives, whose gradients it would merge", ", or set objectives"
        _refuse_changed(config, ("gradient_merge", "cagrad_c"), why, remedy)
    if config.gradient_merge == "cagrad" and len(objectives) > MOST_CAGRAD_OBJECTIVES:
        raise refusal("gradient_merge/cagrad", count=len(objectives), most=MOST_CAGRAD_OBJECTIVES)


def _check_estimator(config: GRPOConfig) -> None:
    """Refuses settings of the estimator "group" beside another one, which would not read them."""
    if config.advantage_estimator != "group":
        beside = f"with advantage_estimator={config.advantage_estimator!r}, which has a scale of its own"
        remedy = ", or set advantage_estimator='group'"
        _refuse_changed(config, ("scale_rewards", "multi_objective_aggregation"), beside, remedy)
    elif config.scale_rewards != "none" and config.num_generations == 2:
        _warn(
            "num_generations is 2 with scaled rewards: every advantage is then 0 or +-0.707, and the size of the "
            "rewards is lost. Set num_generations to 4 or more, or scale_rewards='none'."
        )


def _check_teacher(config: GRPOConfig) -> None:
    """Refuses settings of a teacher without one, and beside one what knows no advantage of a token."""
    loaded = ("teacher_model_init_kwargs", "distillation_top_k")
    if config.teacher_model_server_url is not None:
        there = "with a teacher on a server, which gives the drawn tokens' log-probs at a temperature of 1"
        _refuse_changed(config, ("teacher_model_name_or_path", *loaded, "temperature"), there)
    elif config.teacher_model_name_or_path is None:
        why, remedy = "without a teacher", ", or set teacher_model_name_or_path"
        _refuse_changed(config, (*loaded, "distillation_coef"), why, remedy)
        return
    why = "with a teacher, which gives every token an advantage of its own and is the only reference"
    _refuse_beside_credit(config, ("beta", "sync_ref_model", "objectives", "importance_sampling_level"), why)


def _check_by_token(config: GRPOConfig) -> None:
    """Refuses settings of turn-level credit without it, and what knows no advantage of a token beside one."""
    names = ("objectives", "importance_sampling_level", "teacher_model_name_or_path", "teacher_model_server_url")
    if config.advantage_estimator == "otb":
        why = "with advantage_estimator='otb', which gives every token an advantage of its own"
        _refuse_beside_credit(config, (*names, "turn_advantage_coef"), why)
    if not config.turn_advantage_coef:
        _refuse_changed(config, ("turn_discount",), "without turn-level credit", ", or set turn_advantage_coef")
        return
    why = "with turn_advantage_coef, which gives every turn an advantage of its own"
    _refuse_beside_credit(config, names, why)


def _refuse_beside_credit(config: GRPOConfig, names: tuple[str, ...], why: str) -> None:
    _refuse_changed(config, names, why)
    if not LOSSES[config.loss_type].traits.separable:
        fitting = ", ".join(name for name, loss in LOSSES.items() if loss.traits.separable)
        raise refusal("loss_type/separable", config=config, why=why, fitting=fitting)


def _refuse_changed(config: GRPOConfig | RLOOConfig, names: tuple[str, ...], why: str, remedy: str = "") -> None:
    for name in names:
        value = getattr(config, name)
        refusal.when(value != config.declared[name].default, "beside", name=name, value=value, why=why, remedy=remedy)


@functools.cache
def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)
