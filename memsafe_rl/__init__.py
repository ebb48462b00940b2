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
    name: f"memsafe_rl.{module}"
    for module, names in {
        "config.grpo": "GRPOConfig",
        "config.ppo": "PPOConfig",
        "errors": "ConfigError DataError MemoryBudgetError MemsafeError",
        "memory.budget": "MemoryBudget",
        "memory.planning.policies": "AdaptivePolicy FixedPolicy LadderPolicy MemoryPolicy",
        "memory.simulated.device": "SimulatedMemory",
        "models.adapter": "Adapter register_adapter",
        "models.diffusion.policy": "Condition DiffusionPolicy TrainedSteps",
        "models.diffusion.schedulers": "DDIMScheduler DDPMScheduler DiffusersScheduler FlowSDEScheduler",
        "models.language.function_adapter": "FunctionAdapter",
        "ops.advantages": "AdvantageEstimator register_advantage_estimator",
        "ops.losses": "Loss LossTraits Ratios register_loss",
        "preflight.forecast": "forecast_memory",
        "rewards.calls": "Patience TimeoutPolicy",
        "rollout.engine": "Engine EngineContext register_engine",
        "rollout.engines.denoising": "draw_samples",
        "rollout.external.function_engine": "FunctionEngine",
        "rollout.external.request": "EngineRequest",
        "rollout.multi_turn.other_libraries": "GymEnvironment HalfDuplex",
        "rollout.multi_turn.protocol": "Action Environment Step ToolCall",
        "rollout.multi_turn.tools": "ToolEnvironment",
        "rollout.multi_turn.users": "CallableUser ModelUser",
        "trainers.grpo": "GRPOTrainer",
        "trainers.ppo": "PPOTrainer",
        "training.assembly.factory": "TrainingRequest prepare",
        "training.collector": "Collector",
        "training.learner": "Learner",
        "training.loop": "collect",
        "training.setup": "TrainingSetup",
        "training.state": "RunState",
        "types": "Completion RolloutPlan UpdatePlan",
    }.items()
    for name in names.split()
}
"""Where a public name is from, which is imported when it is first used."""

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
