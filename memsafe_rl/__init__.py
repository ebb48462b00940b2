"""Train language models with GRPO and PPO inside a memory budget, without changing what is learnt."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memsafe_rl.errors import ConfigError, DataError, MemoryBudgetError, MemsafeError
    from memsafe_rl.memory.budget import MemoryBudget
    from memsafe_rl.memory.policies import AdaptivePolicy, FixedPolicy, LadderPolicy, MemoryPolicy
    from memsafe_rl.memory.simulated import SimulatedMemory
    from memsafe_rl.models.diffusion import Condition, DiffusionPolicy, TrainedSteps
    from memsafe_rl.models.schedulers import DDIMScheduler, DDPMScheduler, DiffusersScheduler, FlowSDEScheduler
    from memsafe_rl.rewards.calls import Patience
    from memsafe_rl.rollout.engines.denoising import draw_samples
    from memsafe_rl.rollout.episodes.adapters import GymEnvironment, HalfDuplex
    from memsafe_rl.rollout.episodes.protocol import Action, Environment, Step, ToolCall
    from memsafe_rl.rollout.episodes.tools import ToolEnvironment
    from memsafe_rl.rollout.episodes.users import CallableUser, ModelUser
    from memsafe_rl.trainers.config import GRPOConfig
    from memsafe_rl.trainers.forecast_memory import forecast_memory
    from memsafe_rl.trainers.grpo import GRPOTrainer
    from memsafe_rl.trainers.ppo import PPOTrainer
    from memsafe_rl.trainers.ppo_config import PPOConfig
    from memsafe_rl.types import RolloutPlan, UpdatePlan

__version__ = "0.1.0.dev0"

_HOMES = {
    "Action": "memsafe_rl.rollout.episodes.protocol",
    "AdaptivePolicy": "memsafe_rl.memory.policies",
    "CallableUser": "memsafe_rl.rollout.episodes.users",
    "Condition": "memsafe_rl.models.diffusion",
    "ConfigError": "memsafe_rl.errors",
    "DDIMScheduler": "memsafe_rl.models.schedulers",
    "DDPMScheduler": "memsafe_rl.models.schedulers",
    "DataError": "memsafe_rl.errors",
    "Environment": "memsafe_rl.rollout.episodes.protocol",
    "DiffusersScheduler": "memsafe_rl.models.schedulers",
    "DiffusionPolicy": "memsafe_rl.models.diffusion",
    "FixedPolicy": "memsafe_rl.memory.policies",
    "FlowSDEScheduler": "memsafe_rl.models.schedulers",
    "GRPOConfig": "memsafe_rl.trainers.config",
    "GRPOTrainer": "memsafe_rl.trainers.grpo",
    "GymEnvironment": "memsafe_rl.rollout.episodes.adapters",
    "HalfDuplex": "memsafe_rl.rollout.episodes.adapters",
    "LadderPolicy": "memsafe_rl.memory.policies",
    "MemoryBudget": "memsafe_rl.memory.budget",
    "MemoryBudgetError": "memsafe_rl.errors",
    "MemoryPolicy": "memsafe_rl.memory.policies",
    "MemsafeError": "memsafe_rl.errors",
    "ModelUser": "memsafe_rl.rollout.episodes.users",
    "PPOConfig": "memsafe_rl.trainers.ppo_config",
    "PPOTrainer": "memsafe_rl.trainers.ppo",
    "Patience": "memsafe_rl.rewards.calls",
    "RolloutPlan": "memsafe_rl.types",
    "SimulatedMemory": "memsafe_rl.memory.simulated",
    "Step": "memsafe_rl.rollout.episodes.protocol",
    "ToolCall": "memsafe_rl.rollout.episodes.protocol",
    "TrainedSteps": "memsafe_rl.models.diffusion",
    "ToolEnvironment": "memsafe_rl.rollout.episodes.tools",
    "UpdatePlan": "memsafe_rl.types",
    "draw_samples": "memsafe_rl.rollout.engines.denoising",
    "forecast_memory": "memsafe_rl.trainers.forecast_memory",
}

__all__ = [
    "Action",
    "AdaptivePolicy",
    "CallableUser",
    "Condition",
    "ConfigError",
    "DDIMScheduler",
    "DDPMScheduler",
    "DataError",
    "DiffusersScheduler",
    "DiffusionPolicy",
    "Environment",
    "FixedPolicy",
    "FlowSDEScheduler",
    "GRPOConfig",
    "GRPOTrainer",
    "GymEnvironment",
    "HalfDuplex",
    "LadderPolicy",
    "MemoryBudget",
    "MemoryBudgetError",
    "MemoryPolicy",
    "MemsafeError",
    "ModelUser",
    "PPOConfig",
    "PPOTrainer",
    "Patience",
    "RolloutPlan",
    "SimulatedMemory",
    "Step",
    "ToolCall",
    "ToolEnvironment",
    "TrainedSteps",
    "UpdatePlan",
    "draw_samples",
    "forecast_memory",
]


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used, so that the command line answers before torch is imported."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
