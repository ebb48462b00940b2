"""What a rank holds of weights that FSDP2 divides, as plain parameters: all that an optimizer and its helpers know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from memsafe_rl.accounting import local_part
from memsafe_rl.models.module_state import DividedPart, local_slice

Change = Callable[[Any, nn.Parameter], Any]
"""What is made of a value that is kept for a part."""


class LocalParts:
    """The trained weights as an optimizer steps on them: their parts where they are divided, else themselves.

    Kernels, float32 copies and copies on the host take plain tensors; a part shares its memory with its weight.
    """

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self.parameters = [_part_of(weight) for weight in weights]
        pairs = list(zip(weights, self.parameters, strict=True))
        self.whole = [part for weight, part in pairs if part is weight]  # those that no other rank has a part of
        self._divided = [(weight, part) for weight, part in pairs if part is not weight]
        self._part_of = {id(weight): part for weight, part in self._divided}
        self._weight_of = {id(part): weight for weight, part in self._divided}

    def of(self, weight: nn.Parameter) -> nn.Parameter:
        """Gives what stands for a weight."""
        return self._part_of.get(id(weight), weight)

    def take_gradients(self) -> None:
        """Gives the parts their gradients, which lie in the weights; may be repeated."""
        for weight, part in self._divided:
            part.grad = None if weight.grad is None else local_part(weight.grad)

    def drop_gradients(self) -> None:
        """Frees all gradients."""
        for weight, part in self._divided:
            weight.grad = part.grad = None
        for weight in self.whole:
            weight.grad = None

    def marked(self, value: Any, part: nn.Parameter) -> Any:
        """Marks what is kept for a part, element by element, as the part of something whole."""
        divided = id(part) in self._weight_of and isinstance(value, Tensor) and value.shape == part.shape
        return DividedPart(value) if divided else value

    def cut(self, value: Any, part: nn.Parameter) -> Any:
        """Cuts out of what is kept for a whole weight what this rank holds of it."""
        weight = self._weight_of.get(id(part))
        fits = weight is not None and isinstance(value, Tensor) and value.shape == weight.shape
        return local_slice(value, weight) if weight is not None and fits else value

    def each(self, state: Mapping[str, Any], parts: Sequence[nn.Parameter], change: Change) -> dict[str, Any]:
        """Marks or cuts, by `marked` or `cut`, an optimizer's state of these parts in its order."""
        kept = {
            index: {name: change(value, parts[index]) for name, value in entries.items()}
            for index, entries in state["state"].items()
        }
        return {**state, "state": kept}


def _part_of(weight: nn.Parameter) -> nn.Parameter:
    local = local_part(weight)
    return weight if local is weight else nn.Parameter(local, requires_grad=weight.requires_grad)
