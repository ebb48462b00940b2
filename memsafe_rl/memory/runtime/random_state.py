"""The state of every random generator that a unit of work may draw from: taken before it, put back before a retry."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes


class RandomState(NamedTuple):
    """The state of every random generator a user's code may draw from; holds no tensor, and so no byte of a device."""

    python: tuple[Any, ...]  # of `random`
    numpy: tuple[Any, ...]  # of `numpy.random`
    torch: bytes  # of the CPU
    cuda: tuple[bytes, ...]  # of every CUDA device


def capture_random_state() -> RandomState:
    """Takes the present state; cheap enough for every step."""
    with _disable_current_modes():  # generators have real states, where all other tensors are fake too
        cuda = map(_bytes_of, torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else ()
        own = _bytes_of(torch.get_rng_state())
        return RandomState(random.getstate(), tuple(np.random.get_state()), own, tuple(cuda))


def set_random_state(state: RandomState) -> None:
    """Puts back what `capture_random_state` took."""
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    with _disable_current_modes():
        torch.set_rng_state(_tensor_of(state.torch))
        if state.cuda:
            torch.cuda.set_rng_state_all([_tensor_of(device) for device in state.cuda])


def plain_random_state(state: RandomState) -> dict[str, Any]:
    """Writes a state in plain values, ready for JSON."""
    algorithm, words, position, has_gauss, gauss = state.numpy
    return {
        "python": state.python,
        "numpy": [algorithm, np.asarray(words).tolist(), position, has_gauss, gauss],
        "torch": list(state.torch),
        "cuda": [list(device) for device in state.cuda],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restores what `plain_random_state` wrote."""
    version, words, gauss = state["python"]
    algorithm, numbers, position, has_gauss, cached = state["numpy"]
    set_random_state(
        RandomState(
            (version, tuple(words), gauss),
            (algorithm, np.array(numbers, dtype=np.uint32), position, has_gauss, cached),
            bytes(state["torch"]),
            tuple(map(bytes, state["cuda"])) if torch.cuda.is_available() else (),
        )
    )


def _bytes_of(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor_of(state: bytes) -> torch.Tensor:
    """Lends bytes to a tensor, without an allocation that could fail."""
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
