"""Networks that compute each row as if it were alone, to the bit: fixed tiles, and attention with fixed splits."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from memsafe_rl.models import refusal
from memsafe_rl.models.decoding.fixed_split_attention import NAME
from memsafe_rl.models.language.packing import attention_again
from memsafe_rl.models.module_state import implementation, replaced
from memsafe_rl.ops.fixed_tiles import fixed_tiles

_here = threading.local()

STEP_COST: dict[tuple[str, str], float] = {
    ("cpu", "float32"): 2.51,
    ("cpu", "bfloat16"): 2.26,
    ("cpu", "float16"): 2.95,
}
"""Time of a step with the mode over that of a step without, by device and type, of the dearest of five families in
`benchmarks/results/batch_invariance.json`, where it has been measured."""

_CHEAP = 1.1
"""Cost under which the mode is on where nothing is set."""


def is_default(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether networks compute rows as if alone where nothing is set."""
    return STEP_COST.get((device.type, str(dtype).removeprefix("torch.")), math.inf) < _CHEAP


def require(adapter: Any) -> None:
    """Refuses to promise bits that a network's own way of decoding or scoring decides."""
    if not hasattr(adapter, "numerics") or not adapter.kv_retention:
        raise refusal("batch_invariant", kind=type(adapter.model).__name__)


@contextmanager
def batch_invariant(configs: Iterable[Any]) -> Iterator[None]:
    """Has networks of these configs compute every row as if it were alone, in what is run inside, on this thread."""
    known = tuple(configs)
    with replaced([(_here, "configs", known)]), implementation(known, NAME), fixed_tiles():
        yield


def computed_again() -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
    """Returns what torch's checkpointing needs to compute in a recomputation as in the forward pass now running."""
    configs, attending = getattr(_here, "configs", None), attention_again()
    if configs is None:
        return attending

    @contextmanager
    def again() -> Iterator[None]:
        with batch_invariant(configs), attending()[1]:
            yield

    return lambda: (nullcontext(), again())
