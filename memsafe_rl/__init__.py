"""Train language models with GRPO and PPO inside a memory budget, without changing what is learnt."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memsafe_rl.config.grpo import GRPOConfig
    from memsafe_rl.config.ppo import PPOConfig
    from memsafe_rl.errors import ConfigError, DataError, MemoryBudgetError, MemsafeError
    from memsafe_rl.memory.budget import MemoryBudget
    from memsafe_rl.memory.planning.policies import AdaptivePolicy, FixedPolicy, LadderPolicy, MemoryPolicy
    from memsafe_rl.memory.simulated.device import SimulatedMemory
    from memsafe_rl.models.adapter import Adapter, register_adapter
    from memsafe_rl.models.diffusion.policy import Condition, DiffusionPolicy, TrainedSteps
    from memsafe_rl.models.diffusion.schedulers import (
        DDIMScheduler,
        DDPMScheduler,
        DiffusersScheduler,
        FlowSDEScheduler,
    )
    from memsafe_rl.models.language.function_adapter import FunctionAdapter
    from memsafe_rl.ops.advantages import AdvantageEstimator, register_advantage_estimator
    from memsafe_rl.ops.losses import Loss, LossTraits, Ratios, register_loss
    from memsafe_rl.preflight.forecast import forecast_memory
    from memsafe_rl.rewards.calls import Patience, TimeoutPolicy
    from memsafe_rl.rollout.engine import Engine, EngineContext, register_engine
    from memsafe_rl.rollout.engines.denoising import draw_samples
    from memsafe_rl.rollout.external.function_engine import FunctionEngine
    from memsafe_rl.rollout.external.request import EngineRequest
    from memsafe_rl.rollout.multi_turn.other_libraries import GymEnvironment, HalfDuplex
    from memsafe_rl.rollout.multi_turn.protocol import Action, Environment, Step, ToolCall
    from memsafe_rl.rollout.multi_turn.tools import ToolEnvironment
    from memsafe_rl.rollout.multi_turn.users import CallableUser, ModelUser
    from memsafe_rl.trainers.grpo import GRPOTrainer
    from memsafe_rl.trainers.ppo import PPOTrainer
    from memsafe_rl.training.assembly.factory import TrainingRequest, prepare
    from memsafe_rl.training.collector import Collector
    from memsafe_rl.training.learner import Learner
    from memsafe_rl.training.loop import collect
    from memsafe_rl.training.setup import TrainingSetup
    from memsafe_rl.training.state import RunState
    from memsafe_rl.types import Completion, RolloutPlan, UpdatePlan

__version__ = "0.1.0.dev0"

_HOMES = {
    "prepare": "memsafe_rl.training.assembly.factory",
    "collect": "memsafe_rl.training.loop",
    "Learner": "memsafe_rl.training.learner",
    "Collector": "memsafe_rl.training.collector",
    "RunState": "memsafe_rl.training.state",
    "TrainingSetup": "memsafe_rl.training.setup",
    "TrainingRequest": "memsafe_rl.training.assembly.factory",
    "Adapter": "memsafe_rl.models.adapter",
    "Completion": "memsafe_rl.types",
    "Engine": "memsafe_rl.rollout.engine",
    "EngineContext": "memsafe_rl.rollout.engine",
    "EngineRequest": "memsafe_rl.rollout.external.request",
    "FunctionAdapter": "memsafe_rl.models.language.function_adapter",
    "FunctionEngine": "memsafe_rl.rollout.external.function_engine",
    "register_adapter": "memsafe_rl.models.adapter",
    "register_engine": "memsafe_rl.rollout.engine",
    "Action": "memsafe_rl.rollout.multi_turn.protocol",
    "AdvantageEstimator": "memsafe_rl.ops.advantages",
    "AdaptivePolicy": "memsafe_rl.memory.planning.policies",
    "CallableUser": "memsafe_rl.rollout.multi_turn.users",
    "Condition": "memsafe_rl.models.diffusion.policy",
    "ConfigError": "memsafe_rl.errors",
    "DDIMScheduler": "memsafe_rl.models.diffusion.schedulers",
    "DDPMScheduler": "memsafe_rl.models.diffusion.schedulers",
    "DataError": "memsafe_rl.errors",
    "Environment": "memsafe_rl.rollout.multi_turn.protocol",
    "DiffusersScheduler": "memsafe_rl.models.diffusion.schedulers",
    "DiffusionPolicy": "memsafe_rl.models.diffusion.policy",
    "FixedPolicy": "memsafe_rl.memory.planning.policies",
    "FlowSDEScheduler": "memsafe_rl.models.diffusion.schedulers",
    "GRPOConfig": "memsafe_rl.config.grpo",
    "GRPOTrainer": "memsafe_rl.trainers.grpo",
    "GymEnvironment": "memsafe_rl.rollout.multi_turn.other_libraries",
    "HalfDuplex": "memsafe_rl.rollout.multi_turn.other_libraries",
    "LadderPolicy": "memsafe_rl.memory.planning.policies",
    "Loss": "memsafe_rl.ops.losses",
    "LossTraits": "memsafe_rl.ops.losses",
    "MemoryBudget": "memsafe_rl.memory.budget",
    "MemoryBudgetError": "memsafe_rl.errors",
    "MemoryPolicy": "memsafe_rl.memory.planning.policies",
    "MemsafeError": "memsafe_rl.errors",
    "ModelUser": "memsafe_rl.rollout.multi_turn.users",
    "PPOConfig": "memsafe_rl.config.ppo",
    "PPOTrainer": "memsafe_rl.trainers.ppo",
    "Patience": "memsafe_rl.rewards.calls",
    "TimeoutPolicy": "memsafe_rl.rewards.calls",
    "Ratios": "memsafe_rl.ops.losses",
    "RolloutPlan": "memsafe_rl.types",
    "SimulatedMemory": "memsafe_rl.memory.simulated.device",
    "Step": "memsafe_rl.rollout.multi_turn.protocol",
    "ToolCall": "memsafe_rl.rollout.multi_turn.protocol",
    "TrainedSteps": "memsafe_rl.models.diffusion.policy",
    "ToolEnvironment": "memsafe_rl.rollout.multi_turn.tools",
    "UpdatePlan": "memsafe_rl.types",
    "draw_samples": "memsafe_rl.rollout.engines.denoising",
    "forecast_memory": "memsafe_rl.preflight.forecast",
    "register_advantage_estimator": "memsafe_rl.ops.advantages",
    "register_loss": "memsafe_rl.ops.losses",
}

__all__ = [
    "Action",
    "Adapter",
    "AdaptivePolicy",
    "AdvantageEstimator",
    "CallableUser",
    "Collector",
    "Completion",
    "Condition",
    "ConfigError",
    "DDIMScheduler",
    "DDPMScheduler",
    "DataError",
    "DiffusersScheduler",
    "DiffusionPolicy",
    "Engine",
    "EngineContext",
    "EngineRequest",
    "Environment",
    "FixedPolicy",
    "FlowSDEScheduler",
    "FunctionAdapter",
    "FunctionEngine",
    "GRPOConfig",
    "GRPOTrainer",
    "GymEnvironment",
    "HalfDuplex",
    "LadderPolicy",
    "Learner",
    "Loss",
    "LossTraits",
    "MemoryBudget",
    "MemoryBudgetError",
    "MemoryPolicy",
    "MemsafeError",
    "ModelUser",
    "PPOConfig",
    "PPOTrainer",
    "Patience",
    "Ratios",
    "RolloutPlan",
    "RunState",
    "SimulatedMemory",
    "Step",
    "TimeoutPolicy",
    "ToolCall",
    "ToolEnvironment",
    "TrainedSteps",
    "TrainingRequest",
    "TrainingSetup",
    "UpdatePlan",
    "collect",
    "draw_samples",
    "forecast_memory",
    "prepare",
    "register_adapter",
    "register_advantage_estimator",
    "register_engine",
    "register_loss",
]


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used, so that the command line answers before torch is imported."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
