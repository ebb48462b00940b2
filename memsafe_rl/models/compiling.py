"""Runs what a plan compiles through `torch.compile`, and as it is where that fails."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor import list_mode_options
from torch._inductor.exc import InductorError
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memsafe_rl.accounting import holding
from memsafe_rl.models.blocks import find_blocks
from memsafe_rl.models.module_state import replaced
from memsafe_rl.types import COMPILE_MODES

logger = logging.getLogger(__name__)

MODE: ContextVar[str | None] = ContextVar("mode of torch.compile that a plan asks for; None for none", default=None)

FORMS = 8
"""Most compiled forms of a function (one row, many; adapters on, off; two kinds of layer); then it runs as it is."""

_BOUND = {"recompile_limit": FORMS, "isolate_recompiles": True}
if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
    _BOUND = {}  # PyTorch's own bound, 8 forms, for all networks of a class together

_blocks: WeakKeyDictionary[nn.Module, dict[type, Compiled]] = WeakKeyDictionary()


def compiling(mode: str | None) -> AbstractContextManager[None]:
    """Has what can be compiled run compiled inside."""
    return holding(MODE, mode)


def mode_in_force() -> str | None:
    """Returns the mode in force; operators on fake tensors, or under Python's counts, run as they are."""
    others = [mode for mode in _get_current_dispatch_mode_stack() if not mode.ignore_compile_internals()]
    return None if others else MODE.get()


def compiled_blocks(network: nn.Module, mode: str) -> AbstractContextManager[None]:
    """Has the repeated blocks of a network run compiled, one form for all that are alike; hooked ones as they are."""
    with compiling(mode):
        allowed = mode_in_force() is not None
    blocks = [block for block in find_blocks(network) if "forward" not in vars(block)] if allowed else []
    made = _blocks.setdefault(blocks[0], {}) if blocks else {}
    for kind in {type(block) for block in blocks} - set(made):
        made[kind] = Compiled(kind.forward, kind.__name__, in_one=False)
    return replaced([(block, "forward", partial(made[type(block)].run, mode, block)) for block in blocks])


class Compiled:
    """A function compiled once a mode, for tensors of any size; what cannot be compiled runs as it is, and says so."""

    def __init__(
        self, function: Callable[..., Any], name: str, obstacle: str | None = None, *, in_one: bool = True
    ) -> None:
        """Wraps a function; one that is not to be compiled ``in_one`` may have calls that run as they are."""
        self._function, self._name, self._obstacle, self._in_one = function, name, obstacle, in_one
        self._made: dict[str, Callable[..., Any]] = {}

    def run(self, mode: str, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        run, failure = self._run(mode), None
        try:
            return run(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit, InductorError) as error:
            failure = _refused_allocation(error)
            self._obstacle = f"{type(error).__name__}: {' '.join(str(error).split()[:40])}"
        if failure is not None:
            self._obstacle = None
            raise failure
        return self._run(mode)(*args, **kwargs)

    def _run(self, mode: str) -> Callable[..., Any]:
        if self._obstacle is not None:
            logger.warning("%s runs without torch.compile: %s", self._name, self._obstacle)
            self._made, self._obstacle = dict.fromkeys(COMPILE_MODES, self._function), None
        if mode not in self._made:
            # As many roundings as the function itself has, so that half precision stays near to what it would be.
            options = {**list_mode_options(mode), "emulate_precision_casts": True, "size_asserts": False}
            how: dict[str, Any] = {"fullgraph": self._in_one, "dynamic": True, "options": options, **_BOUND}
            self._made[mode] = torch.compile(self._function, **how)
        return self._made[mode]


def _refused_allocation(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """Finds a refused allocation behind a failure to compile, which recovery repeats like any other."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return error
