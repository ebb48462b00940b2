"""Steps of the loop that a user's subclass of a trainer does in its own way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memsafe_rl.training.optim.optimizer import build_scheduler


@dataclass(frozen=True)
class Hooks:
    """What is called in place of the loop's own step; None where nobody replaces it."""

    create_optimizers: Callable[[int], object] | None = None  # for so many steps; hands them to the loop itself
    create_scheduler: Callable[[torch.optim.Optimizer, Any, int], Any] = build_scheduler
    evaluate: Callable[[], Mapping[str, float]] | None = None
    log: Callable[[dict[str, Any]], object] | None = None
    save_model: Callable[[Path], object] | None = None  # writes a checkpoint's weights into a folder
