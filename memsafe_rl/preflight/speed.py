"""How fast a device is: measured in some seconds where it is at hand, taken from its data sheet where it is not."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import Qwen3Config, Qwen3ForCausalLM

from memsafe_rl.accounting import is_on_host
from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.memory.simulated.ledger import DEVICE_OF, storages_of, tensors_in
from memsafe_rl.models.language.factory import adapter_for, check_adapter
from memsafe_rl.preflight.cards import DATA_SHEETS, data_sheet
from memsafe_rl.rollout.native.running_batch import generate
from memsafe_rl.types import Phase, RolloutPlan, SamplingSettings, SequenceKey

_WIDTHS = (1, 4, 16, 64, 256)
"""Narrowest sides of the products that are timed; a wide product is as fast as the widest of them."""
_SIDES, _ELEMENTS, _LEAST_MATRICES = (256, 1024, 4096), 24 * 2**20, 4
"""Sides of the matrices that are timed, and elements of all: more than caches hold, since each token reads all."""
_TIMED_SECONDS = 0.15
_LONG_SECONDS = 0.05
"""After products as long as this, those of the largest matrices are left out: launches hide no speed."""
_MOVED_ELEMENTS = 2**22
_NARROW, _DRAWN_TOKENS = 32, 16
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
    brought_bytes: int = 0  # copied between host and device

    @property
    def launches(self) -> int:
        """How many kernels there are."""
        return sum(self.kernels.values())


@dataclass(frozen=True)
class DeviceSpeed:
    """What a device does in a second."""

    name: str  # of the device
    source: str  # how its figures are known, for people
    # operations a second of products, by the side of a square matrix and their narrowest side, ascending
    flops: Mapping[int, Mapping[int, float]]
    bytes_per_second: float  # read and written by kernels that are no products
    launch_seconds: Mapping[Phase, float]  # from one kernel to the next where both do nearly nothing, in each phase
    waits: bool  # whether a kernel starts when the one before has ended, as on a CPU; else launches and work overlap
    # copied between host and device, beside the kernels where they do not wait
    bus_bytes_per_second: float = math.inf

    def seconds(self, work: Work, phase: Phase) -> float:
        """Estimates how long work takes: every kernel computes, moves bytes or is launched, whatever takes longest."""
        launched = self.launch_seconds[phase] * work.launches
        worked = sum(count * self._busy(kernel) for kernel, count in work.kernels.items())
        brought = work.brought_bytes / self.bus_bytes_per_second
        return launched + worked + brought if self.waits else max(launched, worked, brought)

    def _busy(self, kernel: Kernel) -> float:
        rates = [np.interp(kernel.width, [*known], [*known.values()]) for known in self.flops.values()]
        side = math.sqrt(kernel.flops / 2 / max(1, kernel.width))
        computed = kernel.flops / float(np.interp(side, [*self.flops], rates))
        return max(computed, kernel.moved_bytes / self.bytes_per_second)


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the kernels that run inside it, on real tensors or fake ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()

    def lap(self) -> Work:
        """Returns what was counted since the last lap."""
        done, self.work = self.work, Work()
        return done

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operator and notes what it did."""
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and is_on_host(args[0]) != is_on_host(args[1]):
            self.work.brought_bytes += int(args[0].nbytes)
        elif _computes(func):
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
    return not any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)


def _kernel(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Kernel:
    given = [*tensors_in((*args, *kwargs.values()))]
    tensors = (*given, *tensors_in((result,)))  # the bytes of an expanded one lie in memory once
    moved = sum(min(int(one.nbytes), sum(held.nbytes() for held in storages_of(one))) for one in tensors)
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return Kernel(0, 0, moved)
    heads = args[0].shape[1:2] if "attention" in func._schema.name else ()  # of queries; 2.11 knows no shared keys
    shapes = ((*one.shape[:1], *heads, *one.shape[2:]) if heads and isinstance(one, Tensor) else one for one in args)
    shaped = [one for one in shapes if not isinstance(one, torch.dtype)]  # PyTorch's counts know no type of results
    flops = int(count(*shaped, **kwargs, out_val=result))
    matrices = [tensor.shape[-2:] for tensor in given if tensor.dim() > 1]
    return Kernel(min((side for shape in matrices[-2:] for side in shape), default=1), flops, moved)


@functools.cache
def measured_speed(
    device: torch.device, dtype: torch.dtype, clock: Callable[[], float] = time.perf_counter
) -> DeviceSpeed:
    """Times products of a type, copies and small kernels, once a process, by a clock that other work does not move."""
    found = _measure(device, dtype, clock)
    clear_device_cache(garbage_collection=True)  # of bytes that the run would find reserved, and no forecast counts
    return found


def _measure(device: torch.device, dtype: torch.dtype, clock: Callable[[], float]) -> DeviceSpeed:
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.inference_mode(mode=False):
        rates, taken = dict[int, dict[int, float]](), 0.0
        for side in _SIDES:
            if side == _SIDES[-1] and taken > _LONG_SECONDS:
                break
            weights = torch.ones(max(_LEAST_MATRICES, _ELEMENTS // side**2), side, side, device=device, dtype=dtype)
            rates[side] = {}
            for width in _WIDTHS:
                rows = torch.ones(width, side, device=device, dtype=dtype)
                taken = _time(functools.partial(_multiply, rows, weights.unbind()), device, clock)
                rates[side][width] = 2 * width * weights.numel() / taken
        one, other = (torch.ones(_MOVED_ELEMENTS, device=device) for _ in range(2))
        moved = 3 * one.nbytes / _time(functools.partial(torch.add, one, other), device, clock)
        there = torch.ones(_MOVED_ELEMENTS, pin_memory=device.type == "cuda")
        brought = there.nbytes / _time(functools.partial(one.copy_, there, non_blocking=True), device, clock)
        launch = _launch_seconds(device, clock)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    return DeviceSpeed(name, "measured here", rates, moved, launch, device.type == "cpu", brought)


def _multiply(rows: Tensor, weights: Sequence[Tensor]) -> None:
    """Does what the linear layers of a network do."""
    for weight in weights:
        functional.linear(rows, weight)


def _launch_seconds(device: torch.device, clock: Callable[[], float]) -> dict[Phase, float]:
    """Times a network of next to no numbers, per kernel: what takes time is the Python that stands around kernels."""
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": _NARROW // 2}
    ids = {"vocab_size": _NARROW, "pad_token_id": 0}
    config = Qwen3Config(hidden_size=_NARROW, intermediate_size=2 * _NARROW, **shape, **ids)
    network = Qwen3ForCausalLM(config).to(device)
    adapter, prompt = adapter_for(network, pad_token_id=0), torch.arange(8)
    check_adapter(adapter)
    settings = SamplingSettings(_DRAWN_TOKENS, eos_token_ids=())

    def draw() -> None:
        generate(adapter, [prompt], [[SequenceKey(0, 0, 0, 0)]], settings, under(RolloutPlan()))

    def learn() -> None:
        network(prompt[None].to(device), use_cache=False).logits.sum().backward()

    found = {}
    for phase, done in ((Phase.ROLLOUT, draw), (Phase.UPDATE, learn)):
        counter = WorkCounter()
        with counter:
            done()
        found[phase] = _time(done, device, clock) / counter.work.launches
    return {**found, Phase.SCORE: found[Phase.UPDATE]}


def _time(function: Callable[[], Any], device: torch.device, clock: Callable[[], float]) -> float:
    """Returns the seconds of a call: the median of its spans, each long enough to be timed."""
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


def speed_of_card(name: str, dtype: torch.dtype) -> DeviceSpeed:
    """Estimates a card's speed for a type of products, as `cards.yaml` states shares of its data sheet's peaks."""
    sheet, assumed = data_sheet(name), DATA_SHEETS["assumed"]
    bus = assumed["bus_gigabytes_per_second"]
    peak = sheet["half_teraflops" if dtype.itemsize == 2 else "single_teraflops"] * _TERA
    return DeviceSpeed(
        name=sheet["name"],
        source=f"an estimate from its data sheet and a bus of {bus} GB/s, not measured",
        flops={0: {width: peak * share for width, share in assumed["share_of_peak_by_width"].items()}},
        bytes_per_second=sheet["gigabytes_per_second"] * _GIGA * assumed["share_of_bandwidth"],
        launch_seconds=dict.fromkeys(Phase, assumed["launch_microseconds"] * 1e-6),
        waits=False,
        bus_bytes_per_second=bus * _GIGA,
    )
