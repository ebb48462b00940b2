"""Float32 numbers that an optimizer steps on in place of weights in half precision.

bfloat16 has 8 significant bits: an update below 1/512 of a weight is lost when the sum is rounded to nearest, in every
step anew. So the optimizer holds float32 numbers in the weights' place: either copies that last (mixed-precision
training, Micikevicius et al. 2018, section 3.1), or a copy made for the step alone, which is then rounded up or down at
random, so that the mean is exact (Zamirai et al. 2020, arXiv 2010.06192, section 4).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memsafe_rl.accounting import charge
from memsafe_rl.config.settings import OPTIMIZERS
from memsafe_rl.errors import MemoryBudgetError
from memsafe_rl.memory.runtime.host_memory import to_device, to_host
from memsafe_rl.training import refusal
from memsafe_rl.training.optim.state import Layout, LocalParts, SteppedWeights
from memsafe_rl.types import Component
from memsafe_rl.units import format_bytes

logger = logging.getLogger(__name__)

STOCHASTIC = "stochastic_rounding"

HALF = (torch.bfloat16, torch.float16)

_MOST_NOISE = 2**20
"""Random numbers drawn at once."""


class MasterCopies:
    """Float32 copies that last; a weight is its copy, rounded to nearest."""

    scratch_bytes = 4  # per element of the largest chunk in a step: the gradient

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self._weights = list(weights)
        rows = torch.contiguous_format  # in which the gradients lie that are stepped by
        with charge(Component.OPTIMIZER):
            wide = [weight.detach().to(torch.float32, copy=True, memory_format=rows) for weight in weights]
            self.parameters = [nn.Parameter(copied) for copied in wide]
        self._parked: list[tuple[nn.Parameter, torch.device]] = []
        self._versions = [weight._version for weight in weights]

    def open(self, layout: Layout) -> None:  # noqa: ARG002
        """Takes over the weights that somebody wrote to since the last step; may be repeated."""
        written = [place for place, weight in enumerate(self._weights) if weight._version != self._versions[place]]
        if written and self._take_over(written):
            logger.warning("weights were written to between two steps; their float32 copies are made of them anew.")
        self.committed()

    def load(self, chunk: range) -> None:
        """Does nothing: the copies are there."""

    @torch.no_grad()
    def write(self, chunk: range) -> None:
        """Rounds the copies of a chunk to nearest into its weights; allocates nothing."""
        torch._foreach_copy_([self._weights[place] for place in chunk], [self.parameters[place] for place in chunk])

    def committed(self) -> None:
        """Notes the weights as those that the copies give."""
        self._versions = [weight._version for weight in self._weights]

    undone = committed

    def close(self) -> None:
        """Does nothing: the copies last."""

    def park(self) -> None:
        """Moves the copies to the host; may be repeated."""
        for parameter in self.parameters[len(self._parked) :]:
            device, parameter.data = parameter.device, to_host(parameter.data)
            self._parked.append((parameter, device))

    def unpark(self) -> None:
        """Moves the copies back; may be repeated."""
        with charge(Component.OPTIMIZER):
            while self._parked:
                parameter, device = self._parked[-1]
                parameter.data = to_device(parameter.data, device)
                self._parked.pop()

    def tensors(self) -> list[Tensor]:
        """Returns the copies."""
        return list(self.parameters)

    def state_dict(self) -> dict[str, Any]:
        """Returns the copies, bit for bit."""
        return {"copies": [parameter.detach() for parameter in self.parameters]}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes saved copies, or makes them of the weights where a checkpoint has none; may be repeated."""
        self.unpark()
        for parameter, saved in zip(self.parameters, state.get("copies", self._weights), strict=True):
            parameter.copy_(saved)
        if "copies" not in state:
            logger.warning("the checkpoint has no float32 copies of the weights; they are made of its rounded weights.")
        elif self._take_over(range(len(self._weights))):
            logger.warning("the checkpoint's weights are not its float32 copies, rounded; the weights are used.")
        self.committed()

    @torch.no_grad()
    def _take_over(self, places: Iterable[int]) -> int:
        """Copies those weights that are not what their copies give, and counts them."""
        count = 0
        for weight, parameter in ((self._weights[place], self.parameters[place]) for place in places):
            if not torch.equal(parameter.to(weight.dtype), weight):
                parameter.copy_(weight)
                count += 1
        return count


class StochasticRounding:
    """Copies that last for a step; a sum is rounded up or down at random, with the odds of how near either is.

    A random number of 16 bits is added to those that bfloat16 drops, and then they are cut off: the mean is exact. The
    numbers depend on seed, step and tensor alone, so that a repeated step, a resumed run and every rank draw the same.
    """

    scratch_bytes = 8  # per element, likewise: the gradient and the weight; the random numbers are few

    def __init__(self, weights: Sequence[nn.Parameter], seed: int) -> None:
        self._weights, self._seed, self._steps = list(weights), seed, 0
        device = weights[0].device
        self._generator = torch.Generator(device)
        # Between steps a parameter has its shape, for who makes state by it, and no bytes.
        self._nothing = torch.zeros((), dtype=torch.float32, device=device)
        self._kept_bits = torch.full((), -(2**16), dtype=torch.int32, device=device)
        self.parameters = [nn.Parameter(self._rest(weight), requires_grad=False) for weight in weights]
        self._buffers: list[Tensor] = []

    def open(self, layout: Layout) -> None:
        """Makes room for a chunk and for random numbers; may be repeated."""
        device = self._nothing.device
        numbers = torch.empty(layout.elements, dtype=torch.float32, device=device)
        self._buffers = [numbers, torch.empty(min(layout.elements, _MOST_NOISE), dtype=torch.int32, device=device)]
        for parameter, view in zip(self.parameters, layout.views(numbers, self.parameters), strict=True):
            parameter.data = view

    @torch.no_grad()
    def load(self, chunk: range) -> None:
        """Copies the weights of a chunk, which float32 holds exactly; allocates nothing."""
        torch._foreach_copy_([self.parameters[place] for place in chunk], [self._weights[place] for place in chunk])

    @torch.no_grad()
    def write(self, chunk: range) -> None:
        """Rounds the numbers of a chunk at random into its weights; allocates nothing."""
        noise = self._buffers[1]
        for place in chunk:
            key = repr((self._seed, self._steps, place)).encode()
            self._generator.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big"))
            for bits in torch.split(self.parameters[place].data.view(-1).view(torch.int32), len(noise)):
                bits.add_(noise[: len(bits)].random_(0, 2**16, generator=self._generator))
                bits.bitwise_and_(self._kept_bits)
        torch._foreach_copy_([self._weights[place] for place in chunk], [self.parameters[place] for place in chunk])

    def committed(self) -> None:
        """Counts the step."""
        self._steps += 1

    def undone(self) -> None:
        """Does nothing: the step was not counted."""

    def close(self) -> None:
        """Gives the buffers back."""
        if self._buffers:
            for parameter, weight in zip(self.parameters, self._weights, strict=True):
                parameter.data = self._rest(weight)
            self._buffers = []

    def park(self) -> None:
        """Does nothing: nothing lasts."""

    def unpark(self) -> None:
        """Does nothing: nothing was moved."""

    def tensors(self) -> list[Tensor]:
        """Returns the buffers of a step under way."""
        return list(self._buffers)

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of steps, which the random numbers follow from."""
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on at a step."""
        self._steps = int(state.get("steps", 0))

    def _rest(self, weight: Tensor) -> Tensor:
        return self._nothing.expand(weight.shape)


def half_weights_of(model: nn.Module, choice: str | None, given: torch.optim.Optimizer | None) -> list[nn.Parameter]:
    """Lists the trained weights that `master_weights` has an optimizer step on in float32; none for a user's own."""
    if given is not None or choice == "off":
        return []
    return [weight for weight in model.parameters() if weight.requires_grad and weight.dtype in HALF]


def half_weights_for(model: nn.Module, config: Any, given: torch.optim.Optimizer | None) -> SteppedWeights:
    """Decides, as `master_weights` says, what an optimizer steps on; a user's own holds the weights themselves."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    choice, optim = config.master_weights, str(getattr(config.optim, "value", config.optim))
    if given is not None and choice in ("on", STOCHASTIC) and half_weights_of(model, choice, None):
        raise refusal("master_weights/given", choice=choice, kind=type(given).__name__)
    parts = LocalParts(trained)
    half = [parts.of(weight) for weight in half_weights_of(model, choice, given)]
    if not half:
        return SteppedWeights(parts)
    if choice == STOCHASTIC:
        refusal.when(OPTIMIZERS.get(optim) == "torchao", "master_weights/compiled", choice=choice, optim=optim)
        return SteppedWeights(parts, half, StochasticRounding(half, config.seed))
    made = SteppedWeights(parts, half, MasterCopies(half))
    if choice is None:
        logger.warning(
            "%d trained weights are held in %s, which rounds small updates away: the optimizer steps on float32 copies "
            "of them, %s more (master_weights=True). master_weights='stochastic_rounding' does without the copies, "
            "False without either.",
            len(half),
            str(half[0].dtype).removeprefix("torch."),
            format_bytes(4 * sum(weight.numel() for weight in half)),
        )
    return made


@contextmanager
def remedies_named(stepped_in_float32: bool, choice: str | None) -> Iterator[None]:
    """Adds to a `MemoryBudgetError` what makes room for an optimizer that steps in float32."""
    try:
        yield
    except MemoryBudgetError as error:
        if not stepped_in_float32:
            raise
        leaner = "" if choice == STOCHASTIC else "set master_weights='stochastic_rounding' (no copies), "
        raise MemoryBudgetError(
            f"{error} The trained weights are in half precision, and their optimizer steps in float32 "
            f"(master_weights): train an adapter (peft_config), {leaner}name an optimizer with less state "
            "(optim='adamw_bnb_8bit'), or set master_weights=False, under which small updates are rounded away (alarm "
            "lost_updates).",
            failure=error.failure,
            held_bytes=error.held_bytes,
        ) from None
