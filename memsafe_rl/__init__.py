"""Train language models with GRPO, RLOO and PPO inside a memory budget, without changing what is learnt."""

from __future__ import annotations

import ast
import logging
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.2.0"

logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # warns of kernels that no plan uses
_HOMES = {
    alias.name: str(node.module)
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""Where a public name is from, which is imported when it is first used."""

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used, so that the command line answers before torch is imported."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
