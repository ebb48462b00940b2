"""What an optimizer steps on, and its state.

State is made before the first step, parked on the host, and copied there so that a step can be undone. An optimizer
steps on the trained weights themselves, on a rank's parts of divided ones, or on float32 numbers in place of halves.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from memsafe_rl.accounting import charge, host_memory, local_part
from memsafe_rl.memory.runtime.host_memory import to_device, to_host
from memsafe_rl.memory.runtime.recovery import capture_random_state, set_random_state
from memsafe_rl.models.module_state import DividedPart, local_slice
from memsafe_rl.types import Component

if TYPE_CHECKING:
    from memsafe_rl.training.optim.half_weights import MasterCopies, StochasticRounding

ClipFactors = Mapping[tuple[torch.device, torch.dtype], Tensor]
"""Scalars that clip a gradient, by its device and type; empty for no clipping."""

Group = Mapping[str, Any]
Makers = dict[str, Callable[[], Tensor]]
Restore = Callable[[], Any]

_KEEP_GRADIENTS = frozenset({"torch", "transformers", "bitsandbytes"})
"""Libraries whose optimizers read gradients and never write to them."""

_KNOWN = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers with a step that allocates nothing: exactly these, since a child may differ."""

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

_ALIGNMENT = 64
"""Elements; where a tensor may begin in a buffer, so that vectorised kernels cut it as they cut a tensor of its own."""

_LEAST_BYTES = 4096
"""Bytes under which a tensor, such as a count of steps or a table of 256 numbers, is not worth a transfer."""


def make_missing_state(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Makes the state that the first step of a known fused optimizer would make, all at once, and moves nothing."""
    trained = {id(parameter) for parameter in parameters}
    made: list[tuple[nn.Parameter, dict[str, Tensor]]] = []
    for group, parameter in _grouped(optimizer):
        # With dampening, the first step of SGD weighs the gradient unlike all later ones: no buffer equals that.
        if id(parameter) in trained and _is_fused(group) and not group.get("dampening"):
            missing = _missing(optimizer, group, parameter)
            if missing:
                made.append((parameter, {name: make() for name, make in missing.items()}))
    for parameter, entries in made:
        optimizer.state[parameter].update(entries)


def steps_without_allocating(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether the next step allocates nothing on the device, as with PyTorch's fused optimizers that have state."""
    if type(optimizer) not in _KNOWN or any(getattr(optimizer, name, None) for name in _HOOKS):
        return False
    settings = tree_leaves([{**group, "params": None} for group in optimizer.param_groups])
    if not all(map(_is_fused, optimizer.param_groups)) or any(isinstance(part, Tensor) for part in settings):
        return False  # a setting that is a tensor may have to move to another device
    trained = {id(parameter) for parameter in parameters}
    return not any(
        id(parameter) in trained and _missing(optimizer, group, parameter) for group, parameter in _grouped(optimizer)
    )


def ready_scalars(parameters: Iterable[nn.Parameter], one: Tensor) -> AbstractContextManager[object]:
    """Lets fused optimizers count steps without allocating: on a CPU, numbers that meet tensors become tensors."""
    return ReadyScalars(one) if any(parameter.device.type == "cpu" for parameter in parameters) else nullcontext()


class ReadyScalars(TorchFunctionMode):
    """Adds a ready tensor where optimizers count their steps on the CPU."""

    def __init__(self, one: Tensor) -> None:
        super().__init__()
        self._one = one

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Adds the ready 1 in place of the number 1."""
        if function is torch._foreach_add_ and not kwargs and len(args) == 2 and type(args[1]) is int and args[1] == 1:
            steps = args[0]
            if all(step.is_cpu and step.dtype == self._one.dtype for step in steps):
                return function(steps, [self._one] * len(steps))
        return function(*args, **(kwargs or {}))


def _grouped(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Group, nn.Parameter]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield group, parameter


def _is_fused(group: Group) -> bool:
    return bool(group.get("fused")) and not group.get("differentiable")


def _missing(optimizer: torch.optim.Optimizer, group: Group, parameter: nn.Parameter) -> Makers:
    """Makers of the entries of a parameter's state that are not there yet; none for an unknown optimizer."""
    state, kind = optimizer.state.get(parameter, {}), type(optimizer)
    zeros = partial(torch.zeros_like, parameter, memory_format=torch.preserve_format)
    if kind in (torch.optim.Adam, torch.optim.AdamW) and not state:
        names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
        step = partial(torch.zeros, (), dtype=torch.float32, device=parameter.device)
        return {"step": step, **dict.fromkeys(names, zeros)}
    if kind is torch.optim.SGD and group["momentum"] != 0 and state.get("momentum_buffer") is None:
        return {"momentum_buffer": zeros}
    return {}


class _Moved(NamedTuple):
    """Where a parked tensor stands in the state, and the device it came from."""

    places: tuple[tuple[dict[str, Any], str], ...]
    device: torch.device

    def put(self, tensor: Tensor) -> None:
        for state, name in self.places:
            state[name] = tensor


class OptimizerOffload:
    """Moves an optimizer's state to host memory and back, one tensor after another; small and managed ones stay."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parked: list[_Moved] = []

    def park(self) -> None:
        """Moves to the host what is not there yet; a call that failed may be repeated."""
        there = {id(state[name]) for moved in self._parked for state, name in moved.places[:1]}
        places: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for state, name in self._places():
            if id(state[name]) not in there:
                places.setdefault(id(state[name]), []).append((state, name))
        for shared in places.values():
            state, name = shared[0]
            moved = _Moved(tuple(shared), state[name].device)
            moved.put(to_host(state[name]))
            self._parked.append(moved)

    def unpark(self) -> None:
        """Moves everything back to where it came from; a call that failed may be repeated."""
        with charge(Component.OPTIMIZER):
            while self._parked:
                moved = self._parked[-1]
                state, name = moved.places[0]
                moved.put(to_device(state[name], moved.device))
                self._parked.pop()

    def forget(self) -> None:
        """Forgets what was parked, once other state has taken its place."""
        self._parked.clear()

    def _places(self) -> Iterator[tuple[dict[str, Any], str]]:
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.nbytes >= _LEAST_BYTES and not getattr(value, "is_paged", False):
                    yield state, name


class Snapshot:
    """Holds weights, whatever an optimizer's attributes reach, schedule, random generators and gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any, parameters: Sequence[nn.Parameter]) -> None:
        holds_gradients = type(optimizer).__module__.partition(".")[0] not in _KEEP_GRADIENTS
        self._scheduler = scheduler
        with host_memory():
            self._random = capture_random_state()
            seen: dict[int, Restore] = {}
            # the weights too, where the optimizer holds others in their place
            self._stepped = remember([optimizer, list(parameters)], seen)
            self._schedule = remember(scheduler.state_dict(), seen)
            gradients = [(parameter, parameter.grad) for parameter in parameters]
            self._gradients = [
                (parameter, remember(gradient, seen) if holds_gradients else _constant(gradient))
                for parameter, gradient in gradients
            ]

    def restore(self) -> None:
        """Puts everything back bit for bit, in place; allocates nothing on the device and may be repeated."""
        self._stepped()
        self._scheduler.load_state_dict(self._schedule())
        for parameter, gradient in self._gradients:
            parameter.grad = gradient()
        set_random_state(self._random)


def remember(value: Any, seen: dict[int, Restore]) -> Restore:
    """Copies a value and all that it holds to the host."""
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = _constant(value)  # for what holds itself
    if isinstance(value, Tensor):
        seen[id(value)] = _remember_tensor(value)
    elif isinstance(value, torch.Generator):
        state = value.get_state()
        seen[id(value)] = lambda: value.set_state(state)
    elif isinstance(value, np.ndarray) and value.flags.writeable:
        seen[id(value)] = _remember_array(value)
    elif isinstance(value, (dict, list, tuple, deque, set)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        seen[id(value)] = _remember_parts(value, {key: remember(part, seen) for key, part in items})
    elif isinstance(value, torch.optim.Optimizer) or _is_plain(value):
        remembered = remember(vars(value), seen)
        seen[id(value)] = lambda: (remembered(), value)[1]
    return seen[id(value)]


def _is_plain(value: Any) -> bool:
    """Whether an object is of a user's own, whose attributes say all of it."""
    home = type(value).__module__.partition(".")[0]
    own = isinstance(value, SimpleNamespace) or home not in sys.stdlib_module_names | {"torch", "numpy"}
    return own and hasattr(value, "__dict__") and not callable(value)


def _constant(value: Any) -> Restore:
    return lambda: value


def _remember_tensor(value: Tensor) -> Restore:
    if isinstance(value, nn.Parameter) and not value.requires_grad:
        return _constant(value)
    storage = value.detach()
    copy = storage.to("cpu", copy=True)

    def restore() -> Tensor:
        with torch.no_grad():
            if type(value) in (Tensor, nn.Parameter) and value.data_ptr() != storage.data_ptr():
                value.data = storage
            storage.copy_(copy)
        return value

    return restore


def _remember_array(value: Any) -> Restore:
    copied = value.copy()

    def restore() -> Any:
        if value.shape != copied.shape:  # resized in place
            return copied.copy()
        value[...] = copied
        return value

    return restore


def _remember_parts(value: Any, parts: Mapping[Any, Restore]) -> Restore:
    def restore() -> Any:
        items = {key: part() for key, part in parts.items()}
        if isinstance(value, dict):
            value.clear()
            value.update(items)
        elif not isinstance(value, tuple):
            value.clear()
            add = value.update if isinstance(value, set) else value.extend
            add(items.values())
        return value

    return restore


Change = Callable[[Any, nn.Parameter], Any]
"""What is made of a value that is kept for a part."""


class LocalParts:
    """The trained weights as an optimizer steps on them: their parts where they are divided, else themselves."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self.parameters = [_part_of(weight) for weight in weights]
        pairs = list(zip(weights, self.parameters, strict=True))
        self.whole = [part for weight, part in pairs if part is weight]  # those that no other rank has a part of
        self._divided = [(weight, part) for weight, part in pairs if part is not weight]
        self._part_of = {id(weight): part for weight, part in self._divided}
        self._weight_of = {id(part): weight for weight, part in self._divided}

    def of(self, weight: nn.Parameter) -> nn.Parameter:
        """Returns what stands for a weight."""
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


@dataclass(frozen=True)
class Layout:
    """Which tensors are stepped together, and where they lie in a buffer that is used again by each chunk."""

    chunks: tuple[range, ...]  # tensors of each chunk, by place
    offsets: tuple[int, ...]  # where each tensor begins, in elements
    elements: int  # of the buffer: as many as the largest tensor has

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Layout:
        """Fills chunks in order, each as far as the largest tensor reaches."""
        room = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        most, starts, offsets, used = max(room, default=0), [0], list[int](), 0
        for place, size in enumerate(room):
            if used + size > most:
                starts.append(place)
                used = 0
            offsets.append(used)
            used += size
        chunks = zip(starts, [*starts[1:], len(room)], strict=True) if room else ()
        return cls(tuple(range(start, stop) for start, stop in chunks), tuple(offsets), most)

    def views(self, buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Cuts a buffer into the tensors' shapes; those of different chunks overlap."""
        return [
            buffer[start : start + tensor.numel()].view(tensor.shape)
            for start, tensor in zip(self.offsets, tensors, strict=True)
        ]


class SteppedWeights:
    """Steps an optimizer, on float32 numbers where weights are held in half precision and such were asked for."""

    def __init__(
        self,
        parts: LocalParts,
        half: Sequence[nn.Parameter] = (),  # those of them that are stepped on by stand-ins
        wide: MasterCopies | StochasticRounding | None = None,  # which hold these; None where there are none
    ) -> None:
        self.parts = parts
        self._half, self._wide = list(half), wide
        self.wide = () if wide is None else (wide,)  # to be parked and told of commits
        pairs = [] if wide is None else list(zip(half, wide.parameters, strict=True))
        self._parts = {id(other): weight for weight, other in pairs}
        self._stand_ins = {id(weight): other for weight, other in pairs}
        self.plain = [weight for weight in parts.parameters if id(weight) not in self._stand_ins]  # stepped on directly
        self._layout = Layout.of([weight.numel() for weight in half])
        self._buffer: Tensor | None = None

    @property
    def replaces_any(self) -> bool:
        """Whether the optimizer holds other parameters than the model."""
        return bool(self._half)

    @property
    def scratch_bytes(self) -> int:
        """Bytes that a step takes besides, but for a few."""
        return 0 if self._wide is None else self._layout.elements * self._wide.scratch_bytes

    def stepped(self, weight: nn.Parameter) -> nn.Parameter:
        """Returns what the optimizer holds for a weight."""
        part = self.parts.of(weight)
        return self._stand_ins.get(id(part), part)

    def part_of(self, stepped: nn.Parameter) -> nn.Parameter:
        """Returns the part of a weight for which the optimizer holds a parameter."""
        return self._parts.get(id(stepped), stepped)

    def open(self) -> None:
        """Takes what a step needs besides, so that the step itself allocates nothing; may be repeated."""
        if self._wide is not None:
            with charge(Component.OPTIMIZER):
                self._buffer = torch.empty(self._layout.elements, dtype=torch.float32, device=self._half[0].device)
                self._wide.open(self._layout)

    def step(self, optimizer: torch.optim.Optimizer, factors: ClipFactors) -> None:
        """Moves all weights by gradients, some at a time: an optimizer's steps must not depend on other parameters."""
        wide = self._wide
        if self.plain or wide is None:
            optimizer.step()
        if wide is None:
            return
        assert self._buffer is not None, "nothing was opened for the step"
        for weight in self.plain:
            weight.grad = None  # stepped on already
        factor = factors.get((self._buffer.device, torch.float32))
        gradients = self._layout.views(self._buffer, self._half)
        for chunk in self._layout.chunks:
            wide.load(chunk)
            for place in chunk:
                if (given := self._half[place].grad) is None:
                    continue  # frozen since
                gradients[place].copy_(given)
                if factor is not None:
                    gradients[place].mul_(factor)
                wide.parameters[place].grad = gradients[place]
            optimizer.step()
            for place in chunk:
                wide.parameters[place].grad = None
            wide.write(chunk)

    def undone(self) -> None:
        """Notes that a step was undone, in whichever chunk it broke off."""
        if self._wide is not None:
            for parameter in self._wide.parameters:
                parameter.grad = None
            self._wide.undone()

    def close(self) -> None:
        """Gives back what `open` took; may be repeated."""
        self._buffer = None
        if self._wide is not None:
            self._wide.close()

    def tensors(self) -> list[Tensor]:
        """Returns what is held for the stand-ins now."""
        held = [] if self._wide is None else self._wide.tensors()
        return held if self._buffer is None else [*held, self._buffer]

    def state_dict(self) -> dict[str, Any]:
        """Returns an entry for checkpoints; none where every weight is stepped on directly."""
        if self._wide is None:
            return {}
        state = self._wide.state_dict()
        return {"master_weights": {**state, **self._copies(state, self.parts.marked)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave, once the weights are what they were; may be repeated."""
        if self._wide is not None:
            saved = state.get("master_weights", {})
            self._wide.load_state_dict({**saved, **self._copies(saved, self.parts.cut)})

    def _copies(self, state: Mapping[str, Any], change: Callable[[Any, nn.Parameter], Any]) -> dict[str, Any]:
        """Changes the float32 copies in a state, where it has any."""
        copies = zip(state["copies"], self._half, strict=True) if "copies" in state else None
        return {} if copies is None else {"copies": [change(copied, part) for copied, part in copies]}
