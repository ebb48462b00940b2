"""What tells prompts apart in the cache of those that are embedded."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (type(None), str, bytes, int, float, bool)


def prompt_key(prompt: Any) -> Hashable | None:
    """Gives what two prompts share exactly if they are the same by value."""
    kind = type(prompt)
    if kind in _PLAIN:
        return kind.__name__, repr(prompt)
    if kind is Tensor and prompt.layout is torch.strided and not prompt.is_quantized:
        flat = prompt.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
        return "tensor", tuple(prompt.shape), str(prompt.dtype), _digest(flat.view(torch.uint8).numpy().tobytes())
    if (kind is np.ndarray or isinstance(prompt, np.generic)) and not prompt.dtype.hasobject:
        return kind.__name__, prompt.shape, str(prompt.dtype), _digest(prompt.tobytes())
    if kind in (list, tuple, dict):
        parts = [part for item in prompt.items() for part in item] if kind is dict else prompt
        keys = tuple(prompt_key(part) for part in parts)
        return None if None in keys else (kind.__name__, keys)
    return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
