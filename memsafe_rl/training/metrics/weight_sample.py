"""Whether optimizer steps reach weights of half precision, or are rounded away, seen in a sample of few elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MOST_TENSORS = 16
ELEMENTS_EACH = 128
_LEAST_ELEMENTS = 64
"""Sampled elements with a gradient below which a share says nothing."""

_ROUNDS_TO_NEAREST = ("torch.optim", "bitsandbytes", "transformers")
"""Packages whose optimizers neither round at random nor keep wider copies of the weights."""


@dataclass(frozen=True)
class WeightSample:
    """What a sample of the weights was before a step."""

    tensors: tuple[nn.Parameter, ...]  # the tensors looked at
    before: tuple[list[float], ...]  # values of the sampled elements of each
    pushed: tuple[list[bool], ...]  # whether each of these elements has a gradient other than 0

    def lost_share(self) -> float | None:
        """Gives the share of elements with a gradient that are what they were; None where too few have one."""
        stayed = [
            value == known
            for tensor, old, pushed in zip(self.tensors, self.before, self.pushed, strict=True)
            for value, known, moves in zip(_sample(tensor).tolist(), old, pushed, strict=True)
            if moves
        ]
        return sum(stayed) / len(stayed) if len(stayed) >= _LEAST_ELEMENTS else None


def sample_weights(parameters: Sequence[nn.Parameter]) -> WeightSample | None:
    """Notes a sample of the trained weights of half precision, with their gradients; keeps nothing on the device."""
    half = [one for one in parameters if _is_half(one) and one.is_contiguous() and _has_flat_gradient(one)]
    matrices = [one for one in half if one.ndim > 1] or half
    if not matrices:
        return None
    chosen = tuple(matrices[:: -(-len(matrices) // MOST_TENSORS)])
    gradients = [_sample(one.grad) for one in chosen if one.grad is not None]
    return WeightSample(
        tensors=chosen,
        before=tuple(_sample(one).tolist() for one in chosen),
        pushed=tuple((gradient != 0).tolist() for gradient in gradients),
    )


def rounds_to_nearest(optimizer: torch.optim.Optimizer) -> bool:
    """Says whether what an update is less than half a unit in the last place of a weight is lost for good."""
    return type(optimizer).__module__.startswith(_ROUNDS_TO_NEAREST)


def is_due(step: int, warm_up: int, max_steps: int) -> bool:
    """Says whether a step is looked at: the first one at full learning rate, and ever rarer ones after it."""
    place = step - warm_up + 1
    early = place == 1 or 2 * place <= max_steps - warm_up
    return place > 0 and place & (place - 1) == 0 and early


def _is_half(weight: Tensor) -> bool:
    return weight.is_floating_point() and weight.element_size() < 4


def _has_flat_gradient(weight: Tensor) -> bool:
    return weight.grad is not None and weight.grad.is_contiguous()


def _sample(tensor: Tensor) -> Tensor:
    """Gives a view of elements all over a tensor, in steps that do not stay in one column."""
    stride = max(1, tensor.numel() // ELEMENTS_EACH - 1)
    return tensor.detach().view(-1)[::stride][:ELEMENTS_EACH]
