"""How fast a device is: measured in two seconds where it is at hand, taken from its data sheet where it is not."""

from __future__ import annotations

import functools
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.simulated.ledger import storages_of

_WIDTHS = (1, 4, 16, 64, 256)
"""Narrowest sides of the products that are timed; a wide product is as fast as the widest of them."""
_SIDE = 1024
_TIMED_SECONDS = 0.15
_MOVED_ELEMENTS = 2**20
_BLOCKS, _NARROW = 6, 32
_SPANS = 7
_TERA, _GIGA = 1e12, 1e9


class Kernel(NamedTuple):
    """What one kernel does, as far as its time depends on it."""

    width: int  # narrowest side of a product; 0 of anything else
    flops: int
    moved_bytes: int  # bytes read and written


@dataclass
class Work:
    """Kernels by what they do, views and mere allocations left out."""

    kernels: Counter[Kernel] = field(default_factory=Counter)

    @property
    def launches(self) -> int:
        """How many kernels there are."""
        return sum(self.kernels.values())


@dataclass(frozen=True)
class DeviceSpeed:
    """What a device does in a second.

    Args:
        name: of the device.
        source: how its figures are known, for people.
        flops: operations a second of products, by their narrowest side, ascending.
        bytes_per_second: read and written by kernels that are no products.
        launch_seconds: time from one kernel to the next where both do nearly nothing.
        waits: whether a kernel starts when the one before has ended, as on a CPU; else launches and work overlap.
    """

    name: str
    source: str
    flops: Mapping[int, float]
    bytes_per_second: float
    launch_seconds: float
    waits: bool

    def seconds(self, work: Work) -> float:
        """Estimates how long work takes: every kernel computes, moves bytes or is launched, whatever takes longest.

        Args:
            work: the kernels.

        Returns:
            float, seconds.
        """
        launched = self.launch_seconds * work.launches
        worked = sum(count * self._busy(kernel) for kernel, count in work.kernels.items())
        return launched + worked if self.waits else max(launched, worked)

    def _busy(self, kernel: Kernel) -> float:
        computed = kernel.flops / self._rate(kernel.width) if kernel.flops else 0.0
        return max(computed, kernel.moved_bytes / self.bytes_per_second)

    def _rate(self, width: int) -> float:
        known = sorted(self.flops.items())
        if width <= known[0][0]:
            return known[0][1]
        for (low, slow), (high, fast) in pairwise(known):
            if width <= high:
                share = (width - low) / (high - low)
                return slow + share * (fast - slow)
        return known[-1][1]


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the kernels that run inside it, on real tensors or fake ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()

    def lap(self) -> Work:
        """Gives what was counted since the last lap."""
        done, self.work = self.work, Work()
        return done

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operator and notes what it did."""
        result = func(*args, **(kwargs or {}))
        if _computes(func):
            self.work.kernels[_kernel(func, args, kwargs or {}, result)] += 1
        return result


_IDLE = frozenset(
    ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided")
)


@functools.cache
def _computes(func: Any) -> bool:
    """Whether an operator launches a kernel: neither a view nor a mere allocation nor a question."""
    if func.namespace == "prim" or func._schema.name in _IDLE or func._schema.name == "aten::detach":
        return False
    returned = [one.alias_info for one in func._schema.returns]
    return not any(info is not None and not info.is_write for info in returned)


def _kernel(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Kernel:
    given, made = list(_tensors(args)) + list(_tensors(kwargs.values())), list(_tensors((result,)))
    moved = sum(_touched(tensor) for tensor in (*given, *made))
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return Kernel(0, 0, moved)
    shaped = [value for value in args if not isinstance(value, torch.dtype)]  # PyTorch's counts know no type of results
    flops = int(count(*shaped, **kwargs, out_val=result))
    matrices = [tensor.shape[-2:] for tensor in given if tensor.dim() > 1]
    return Kernel(min((side for shape in matrices[-2:] for side in shape), default=1), flops, moved)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Walks the tensors among values and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _touched(tensor: Tensor) -> int:
    """Bytes of a tensor that lie in memory; those of an expanded one once."""
    held = sum(storage.nbytes() for storage in storages_of(tensor))
    return min(int(tensor.nbytes), held)


@functools.cache
def measured_speed(
    device: torch.device, dtype: torch.dtype, clock: Callable[[], float] = time.perf_counter
) -> DeviceSpeed:
    """Times products, copies and small kernels on a device, once in a process; takes about two seconds.

    Args:
        device: where.
        dtype: of the products.
        clock: gives seconds; another one than the wall's where a machine is busy with other work.

    Returns:
        The device's speed.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.inference_mode(mode=False):
        weights = torch.ones(_SIDE, _SIDE, device=device, dtype=dtype)
        rates = {}
        for width in _WIDTHS:
            rows = torch.ones(width, _SIDE, device=device, dtype=dtype)
            rates[width] = 2 * width * _SIDE**2 / _time(functools.partial(torch.mm, rows, weights), device, clock)
        one, other = (torch.ones(_MOVED_ELEMENTS, device=device) for _ in range(2))
        moved = 3 * one.nbytes / _time(functools.partial(torch.add, one, other), device, clock)
        launch = _launch_seconds(device, clock)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    return DeviceSpeed(name, "measured here", rates, moved, launch, waits=device.type == "cpu")


class _Block(nn.Module):
    """A norm, a product and an activation: kernels as a network has them, over next to no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.product = nn.Parameter(torch.ones(_NARROW)), nn.Linear(_NARROW, _NARROW, bias=False)

    def forward(self, given: Tensor) -> Tensor:
        """Runs the block."""
        scale = torch.rsqrt(given.pow(2).mean(-1, keepdim=True) + 1e-6)
        return nn.functional.silu(self.product(self.norm * (given * scale)))


def _launch_seconds(device: torch.device, clock: Callable[[], float]) -> float:
    """Times a small network, forward and backward, per kernel."""
    network = nn.Sequential(*(_Block() for _ in range(_BLOCKS))).to(device)
    given = torch.ones(8, _NARROW, device=device)

    def forward_and_backward() -> None:
        network(given).sum().backward()

    counter = WorkCounter()
    with counter:
        forward_and_backward()
    return _time(forward_and_backward, device, clock) / counter.work.launches


def _time(function: Callable[[], Any], device: torch.device, clock: Callable[[], float]) -> float:
    """Gives the seconds of a call: the median of its spans, each long enough to be timed."""
    spans: list[float] = []
    calls = 1
    function()
    while len(spans) < _SPANS:
        started = clock()
        for _ in range(calls):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        span: float = clock() - started
        if span < _TIMED_SECONDS / _SPANS:
            calls *= 2
        else:
            spans.append(span / calls)
    return float(statistics.median(spans))


@functools.cache
def _data_sheets() -> Mapping[str, Any]:
    sheets: Mapping[str, Any] = yaml.safe_load((files("memsafe_rl.preflight") / "cards.yaml").read_text())
    return sheets


class NamedCard(NamedTuple):
    """A card that is known by its name."""

    name: str
    total_bytes: int


def named_card(text: str) -> NamedCard | None:
    """Finds a card by its name, such as "RTX 4090" or "h100"; None where the name is not known."""
    wanted = _plain(text)
    for name, sheet in _data_sheets()["cards"].items():
        if wanted in {_plain(name), *map(_plain, sheet.get("also", ()))}:
            return NamedCard(name, int(sheet["gib"] * 2**30))
    return None


def card_names() -> list[str]:
    """Gives the names of the cards that are known."""
    return list(_data_sheets()["cards"])


def speed_of_card(name: str, dtype: torch.dtype) -> DeviceSpeed:
    """Estimates a card's speed from its data sheet.

    Args:
        name: as `named_card` gives it.
        dtype: of the products.

    Returns:
        Its speed: shares of the sheet's peaks, as `cards.yaml` states them.

    Raises:
        ConfigError: the name is not known.
    """
    card = named_card(name)
    if card is None:
        raise ConfigError(f"no card is known as {name!r}. Known are {', '.join(card_names())}.")
    sheets = _data_sheets()
    sheet, assumed = sheets["cards"][card.name], sheets["assumed"]
    peak = sheet["half_teraflops" if dtype.itemsize == 2 else "single_teraflops"] * _TERA
    return DeviceSpeed(
        name=card.name,
        source="an estimate from its data sheet, not measured",
        flops={width: peak * share for width, share in assumed["share_of_peak_by_width"].items()},
        bytes_per_second=sheet["gigabytes_per_second"] * _GIGA * assumed["share_of_bandwidth"],
        launch_seconds=assumed["launch_microseconds"] * 1e-6,
        waits=False,
    )


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce", "", text.lower())
