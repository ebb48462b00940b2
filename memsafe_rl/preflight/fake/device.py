"""A device on which operators give shapes and no numbers, and every storage counts as what it stands for."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from memsafe_rl.accounting import among_ourselves, host_memory, only_bytes_matter, standing_for
from memsafe_rl.memory.simulated.caching_allocator import AllocatorSettings, CachingAllocator
from memsafe_rl.memory.simulated.counting import measured_inside
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.memory.simulated.workspaces import cast_bytes, is_measured
from memsafe_rl.preflight.fake.cuda import CudaFunctions
from memsafe_rl.preflight.fake.memo import Memo

_COMPOSED = ("bitsandbytes::optimizer_update_32bit", "bitsandbytes::optimizer_update_8bit_blockwise")
_DEVICE_OF = torch.ops.prim.device.default
"""What a fake tensor's ``device`` asks, more often than all operators together."""
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_MEMO = Memo()
_CPU_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers whoever reads a number that nobody computed: nothing is broken, and everything is 1."""

    def __init__(
        self,
        number: float = 1.0,
        *,
        composed: bool = False,
        memory: SimulatedMemory | None = None,
        holders: list[tuple[int, int, int]] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._number, self._composed, self._memory = number, composed, memory
        self._holders = holders  # where to note how often what autograd adds to is held; None to make use of it
        self._sole_holder = _sole_holder() if holders is None else None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nobody compiles fake tensors, and the guard against it costs as much as an operator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE_OF and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device
        if func is torch.ops.aten.nonzero.default and isinstance(args[0], FakeTensor):
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        adds = func is torch.ops.aten.add.Tensor
        if adds and not torch.is_grad_enabled() and torch._C._current_graph_task_id() >= 0:  # in a backward
            holders = _holders(args[0])
            if self._holders is not None:
                self._holders.append(holders)
            elif holders == self._sole_holder:
                # Autograd adds up what two users of a tensor give it, such as a tied embedding and its head, or a layer
                # and its LoRA adapter. Of real tensors it does so in place; under a dispatch mode it does not, which
                # would count a gradient once too often.
                return torch.ops.aten.add_.Tensor(*args, **(kwargs or {}))
        if func is torch.ops.aten._grouped_mm.default:
            return _grouped_product(*args, **(kwargs or {}))
        if self._composed and func.name() in _COMPOSED:
            return func.redispatch(_CPU_KERNELS, *args, **(kwargs or {}))
        if func is not torch.ops.aten._local_scalar_dense.default or not isinstance(args[0], FakeTensor):
            return self._ask(func, args, kwargs or {})
        dtype = args[0].dtype
        if dtype == torch.bool:
            return False
        return self._number if dtype.is_floating_point else 1

    def _ask(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs an operator, or has its result made and counted as when it ran before."""
        mode = torch._C._get_dispatch_mode(_FAKE)
        if self._memory is None or mode is None:  # true numbers are asked for
            return func(*args, **kwargs)
        key = _MEMO.key(func, args, kwargs)
        found = None if key is None else _MEMO.answer(key, args, mode)
        if found is not None:
            result, is_new = found
            self._memory.ledger.see(result, is_new=is_new)
        else:
            result = func(*args, **kwargs)
            if key is not None:
                _MEMO.remember(key, func, args, kwargs, result)
        if self._memory.allocator is None:  # else CPU kernels stand for others
            measured = is_measured(func.name(), args)
            inside = measured_inside(func, args, kwargs) if measured else cast_bytes(func, args, result)
            self._memory.ledger.see_workspace(inside)
        return result


def _grouped_product(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Gives what experts make of their tokens, however many each gets; PyTorch's own stand-in knows bfloat16 only."""
    del bias  # refused by the operator itself
    groups: tuple[int, ...] = ()
    if left.dim() == right.dim():
        groups = (left.shape[0] if offs is None else offs.shape[0],)
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]), dtype=out_dtype or left.dtype)


@functools.cache
def _sole_holder() -> tuple[int, int, int]:
    """How often a gradient is held, seen from a dispatch mode, that only autograd's buffer holds; versions differ."""
    holders: list[tuple[int, int, int]] = []
    with among_ourselves(), FakeTensorMode(), _Answers(holders=holders), torch.enable_grad():
        twice_used = torch.zeros(2, requires_grad=True) * 1.0
        (twice_used.exp() + twice_used.sin()).sum().backward()  # type: ignore[no-untyped-call]
    return holders[0]


def _holders(tensor: Any) -> tuple[int, int, int]:
    """How often a tensor, its storage and its Python object are held."""
    if not isinstance(tensor, Tensor):
        return 0, 0, 0
    count: Any = getattr(tensor, "_use_count", None)  # not in every version of PyTorch
    storage: Any = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return int(count()) if count is not None else 0, int(storage), sys.getrefcount(tensor)


def nothing_differs() -> AbstractContextManager[Any]:
    """Has every difference that is read inside be 0."""
    return _Answers(0.0)


@contextmanager
def fake_device(capacity_bytes: int | None = None, *, stands_for: str = "cpu") -> Iterator[SimulatedMemory]:
    """Has all tensors made inside be fake ones on a simulated device.

    They are CPU tensors to PyTorch, whose CPU builds cannot differentiate fake CUDA tensors, so that operators choose
    the CPU's kernels. This library takes its branches for the device stood for, `CudaFunctions` PyTorch's; temporaries
    inside kernels are taken from a table (`memsafe_rl.memory.simulated.workspaces`).
    """
    told = logging.getLogger("torch._subclasses.fake_tensor")  # prints what it also raises
    level = told.level
    allocator = CachingAllocator(AllocatorSettings.read(os.environ)) if stands_for == "cuda" else None
    memory = SimulatedMemory(capacity_bytes, exact=False, allocator=allocator)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    answers = _Answers(composed=stands_for != "cuda", memory=memory)
    functions = CudaFunctions() if stands_for == "cuda" else nullcontext()
    with among_ourselves(), only_bytes_matter(), standing_for(stands_for), functions, fake, memory, answers:
        told.setLevel(logging.CRITICAL)
        try:
            yield memory
        finally:
            told.setLevel(level)


@contextmanager
def true_numbers() -> Iterator[None]:
    """Has tensors made inside be real ones on the host, whose numbers matter, as those of a random order do."""
    with host_memory(), unset_fake_temporarily():
        yield


def host_numbers() -> AbstractContextManager[None]:
    """Has operators on tensors of the host give true numbers inside; those that a fake tensor takes part in, none."""
    return cast(AbstractContextManager[None], unset_fake_temporarily())


def give_fake_weights(model: nn.Module) -> None:
    """Replaces all parameters and buffers of a network on the meta device by fake ones on the CPU, ties kept."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # the old ones are kept, lest a new one takes over the id of one
    for module in model.modules():
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for store in stores:
            for name, tensor in store.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = (tensor, empty_like(tensor, "cpu"))
                    store[name] = made[id(tensor)][1]


def empty_like(tensor: Tensor, device: str) -> Tensor:
    """Gives an empty tensor of the same kind: a parameter where it is one."""
    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
