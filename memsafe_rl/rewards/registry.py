"""Names of ready-made rewards, as a configuration file writes them."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from memsafe_rl.errors import ConfigError
from memsafe_rl.rewards.accuracy import accuracy_reward, get_cosine_scaled_reward, reasoning_accuracy_reward
from memsafe_rl.rewards.shape import get_repetition_penalty_reward, get_soft_overlong_punishment, think_format_reward

REWARD_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "accuracy_reward": accuracy_reward,
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
    "think_format_reward": think_format_reward,
}
"""Rewards that are ready to use."""

REWARD_FACTORIES: dict[str, Callable[..., Callable[..., Any]]] = {
    "get_cosine_scaled_reward": get_cosine_scaled_reward,
    "get_repetition_penalty_reward": get_repetition_penalty_reward,
    "get_soft_overlong_punishment": get_soft_overlong_punishment,
}
"""Functions that make a reward from settings."""


def resolve_reward(name: str, settings: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Finds a reward function by name."""
    found = REWARD_FUNCTIONS.get(name) or REWARD_FACTORIES.get(name) or _imported(name)
    if settings is None and name not in REWARD_FACTORIES:
        return found
    try:
        made = found(**(settings or {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Reward {name!r} cannot be made from {dict(settings or {})}: {error}. Mend them.") from error
    if not callable(made):
        raise ConfigError(
            f"Reward {name!r} was called with {dict(settings or {})} and gave {made!r:.100}. Give settings only to a "
            "function that returns a reward function."
        )
    return made


def _imported(path: str) -> Callable[..., Any]:
    module, _, attribute = path.replace(":", ".").rpartition(".")
    if not module:
        known = [*REWARD_FUNCTIONS, *REWARD_FACTORIES]
        nearest = difflib.get_close_matches(path, known, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(
            f"There is no reward {path!r}.{hint} Ready-made: {', '.join(known)}; or write an import path such as "
            "'my_package.rewards.my_reward'."
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # of any kind: importing runs the user's module
        raise ConfigError(
            f"Reward {path!r} cannot be imported ({type(error).__name__}: {error}). Check that file and name are right "
            "and that the folder is on PYTHONPATH."
        ) from error
    if not callable(found):
        raise ConfigError(f"Reward {path!r} is {found!r:.100}, which is not a function. Name a function of the module.")
    return found  # type: ignore[no-any-return]
