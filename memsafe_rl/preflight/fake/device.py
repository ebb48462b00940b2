"""Tensors without bytes on a device that only counts: what CUDA and a memo of operators say of them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from memsafe_rl.accounting import among_ourselves, host_memory, only_bytes_matter, standing_for
from memsafe_rl.errors import quiet
from memsafe_rl.memory.simulated.caching_allocator import AllocatorSettings, CachingAllocator
from memsafe_rl.memory.simulated.counting import measured_inside
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.memory.simulated.ledger import DEVICE_OF, StorageLedger, tensors_in
from memsafe_rl.memory.simulated.workspaces import WORKSPACES, cast_bytes, is_measured, reduction_bytes, sort_bytes
from memsafe_rl.models.language.kernels import Kernel, kernel_for

_HALF = (torch.float16, torch.bfloat16)
_MASK_ALIGNED = 16
"""Keys to whose whole multiples PyTorch pads masks."""


_IN_FLOAT32 = {
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "norm", "pow", "__pow__",
    "reciprocal", "rsqrt", "sinh", "tan", "dist", "layer_norm", "group_norm", "renorm", "cosine_similarity",
    "binary_cross_entropy_with_logits", "kl_div", "l1_loss", "smooth_l1_loss", "softplus",
}  # fmt: skip
_INTO_FLOAT32 = {"cumprod", "cumsum", "log_softmax", "prod", "softmax", "sum"}
"""Functions that autocast computes in float32 on CUDA and not on a CPU, and those that give float32 unless told a type
(PyTorch's ``autocast_mode.h``)."""


class CudaFunctions(TorchFunctionMode):
    """Has functions that CUDA computes otherwise than the CPU hold what they hold there."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs attention by CUDA's kernels, and under autocast in CUDA's types; everything else as it is."""
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        if func is torch.addmm and "out_dtype" in kwargs:
            return kwargs["out"]  # PyTorch 2.11 has no stand-in for it
        if func is torch.autograd.backward:
            with self:  # for blocks that are recomputed; edges do not come here again, as tensors would
                return func(tuple(map(get_gradient_edge, args[0])), *args[1:], **kwargs)
        if func is torch.tensor and args and kwargs.get("device") in (None, "cpu") and type(args[0]) in (int, float):
            with host_memory():  # such as an optimizer's count of a weight's steps
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if (name in _IN_FLOAT32 or name in _INTO_FLOAT32) and torch.is_autocast_enabled("cpu"):
            if name in _IN_FLOAT32:
                args, kwargs = tree_map(_wide, (args, kwargs))
            elif isinstance(args[0], Tensor) and args[0].dtype in _HALF:
                kwargs = {"dtype": torch.float32, **kwargs}
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    parts, head, seen = [part.to(kind) for part in (query, key, value)], query.shape[-1], key.shape[-2]
    kernel = kernel_for("cuda", kind, head, value.shape[-1], masked=attn_mask is not None)
    own_heads, aligned = query.shape[1] == key.shape[1], 16 // kind.itemsize
    if query.dim() == 4 and not (is_causal and query.shape[-2] != seen):
        if kernel is Kernel.FLASH and (own_heads or enable_gqa):
            scale = head**-0.5 if scale is None else scale
            padded = (pad(part, (0, -head % aligned)) if head % aligned else part for part in parts)
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(*padded, dropout_p, is_causal, scale=scale)[0][..., :head]  # type: ignore[no-any-return]
        if kernel is not Kernel.BLOCKS and own_heads and not (head % aligned or value.shape[-1] % aligned):
            mask = None if attn_mask is None else _padded(attn_mask, parts[0]).expand(*query.shape[:3], seen)
            graded = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
            efficient = torch.ops.aten._scaled_dot_product_efficient_attention
            return efficient(*parts, mask, graded, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def _padded(mask: Tensor, like: Tensor) -> Tensor:
    """Returns a mask in floats whose rows begin at multiples of 16."""
    seen = mask.shape[-1]
    mask = torch.where(mask, 0.0, -torch.inf).to(like.dtype) if mask.dtype is torch.bool else mask.to(like.dtype)
    return pad(mask, (0, -seen % _MASK_ALIGNED))[..., :seen] if seen % _MASK_ALIGNED else mask


_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Types of arguments that say all about themselves."""

_MOST_RECIPES = 50_000
"""Recipes after which a process begins anew; a forecast needs some thousands."""


class _Unknown(Exception):  # noqa: N818 - no error: the question is passed on
    """An argument that does not say all about itself, such as a number that stands for a symbol."""


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How a result follows from arguments of these shapes."""

    place: int | None  # index of the argument that shares its storage; None for storage of its own
    same: bool  # whether the result is that argument itself
    shape: torch.Size  # of the result
    stride: tuple[int, ...]  # of the result, in elements
    offset: int  # of the result in its storage, in elements
    dtype: torch.dtype  # of the result
    device: torch.device  # of the result, as it says
    about: Mapping[str, Any]  # what a fake tensor knows besides, its mode left out


class Memo:
    """Makes again what operators gave for fake arguments of the same shapes; later forecasts ask much the same."""

    def __init__(self) -> None:
        self._recipes: dict[Hashable, tuple[type, list[_Recipe]] | None] = {}
        self.inside: dict[Hashable | None, int] = {}  # bytes that a CPU kernel holds besides

    def key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
        """Returns what the shape of a result depends on."""
        try:
            return func, _known(args), tuple(kwargs), _known(tuple(kwargs.values())), torch.get_default_dtype()
        except _Unknown:
            return None

    def answer(self, key: Hashable, args: Sequence[Any], mode: Any, ledger: StorageLedger) -> Any:
        """Makes results as they were made before, and has them counted; None where nobody knows how."""
        if (known := self._recipes.get(key)) is None:
            return None
        made = [self._made(recipe, args, mode) for recipe in known[1]]
        for recipe, one in zip(known[1], made, strict=True):
            ledger.see(one, is_new=recipe.place is None)
        return made[0] if known[0] is FakeTensor else known[0](made)

    def _made(self, recipe: _Recipe, args: Sequence[Any], mode: Any) -> Tensor:
        if recipe.same and recipe.place is not None:
            return cast(Tensor, args[recipe.place])
        with torch._C._DisableTorchDispatch():
            if recipe.place is None:
                hollow = torch.empty_strided(recipe.shape, recipe.stride, dtype=recipe.dtype, device="meta")
            else:
                hollow = torch.empty(0, dtype=recipe.dtype, device="meta")
                hollow.set_(args[recipe.place].untyped_storage(), recipe.offset, recipe.shape, recipe.stride)
            made = Tensor._make_subclass(
                FakeTensor, hollow, False, dispatch_device=True, device_for_backend_keys=recipe.device
            )
            torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(recipe.about, fake_mode=mode)
        return made

    def remember(self, key: Hashable, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Learns how a result was made."""
        if key not in self._recipes:
            if len(self._recipes) >= _MOST_RECIPES:
                self._recipes.clear()
                self.inside.clear()
            results = result if type(result) in (tuple, list) else [result]
            given = (*args, [*kwargs.values()])
            held = [{one.untyped_storage()._cdata for one in tensors_in((value,))} for value in given]
            recipes = [recipe for one in results if (recipe := _recipe(func, args, held, one)) is not None]
            self._recipes[key] = (type(result), recipes) if 0 < len(recipes) == len(results) else None


def _known(values: Sequence[Any]) -> tuple[Hashable, ...]:
    """Describes arguments; equal descriptions give equal shapes."""
    found: list[Hashable] = []
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.fake_mode.in_kernel_invocation:
                raise _Unknown
            found.append((value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device))
        elif kind in _PLAIN:
            found.append((kind, value))
        elif kind is list or kind is tuple:
            found.append((kind, _known(value)))
        else:
            raise _Unknown
    return tuple(found)


def _recipe(func: Any, args: Sequence[Any], held: Sequence[set[int]], result: Any) -> _Recipe | None:
    """Says how to make a result again, of the storages that each argument holds; None where it cannot be told."""
    if type(result) is not FakeTensor or func.name() in WORKSPACES or torch.Tag.inplace_view in func.tags:
        return None
    if result.layout is not torch.strided or result.is_conj() or result.is_neg() or result.constant is not None:
        return None
    storage = result.untyped_storage()
    given = [value for value, storages in zip((*args, None), held, strict=True) if storage._cdata in storages]
    place = next((index for index, value in enumerate(args) if value is result), None)
    if place is None and given:
        if not isinstance(given[0], Tensor):
            return None  # into a list, or an argument by name
        place = next(index for index, value in enumerate(args) if value is given[0])
    own, same = place is None, place is not None and args[place] is result
    if result.requires_grad and not same:
        return None
    with torch._C._DisableTorchDispatch():
        like = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
    if own and (result.storage_offset() or storage.nbytes() != like.untyped_storage().nbytes()):
        return None
    return _Recipe(
        place=place,
        same=same,
        shape=result.shape,
        stride=result.stride(),
        offset=cast(int, result.storage_offset()),
        dtype=result.dtype,
        device=result.fake_device,
        about={name: value for name, value in result.__dict__.items() if name != "fake_mode"},
    )


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
_COMPOSED = ("bitsandbytes::optimizer_update_32bit", "bitsandbytes::optimizer_update_8bit_blockwise")
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
        card: Any = None,  # its properties, which decide what its sums hold
        holders: list[tuple[int, int, int]] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._number, self._composed, self._memory = number, composed, memory
        self._holders = holders  # where to note how often what autograd adds to is held; None to make use of it
        self._sole_holder = _sole_holder() if holders is None else None
        self._card = card

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nobody compiles fake tensors, and the guard against it costs as much as an operator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is DEVICE_OF and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
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
        brought = (one.fake_mode for one in args if type(one) is FakeTensor)
        mode = torch._C._get_dispatch_mode(_FAKE) or next(brought, None)
        if self._memory is None or mode is None:
            return func(*args, **kwargs)  # true numbers are asked for
        key = _MEMO.key(func, args, kwargs)
        result = None if key is None else _MEMO.answer(key, args, mode, self._memory.ledger)
        if result is None:
            result = func(*args, **kwargs)
            if func in _VIEWS and result.is_contiguous() and 1 in result.shape:
                # Its stand-in has other strides on axes of length 1, for which a product would copy its weights.
                result = result.as_strided(result.shape, make_contiguous_strides_for(result.shape))
            if key is not None:
                _MEMO.remember(key, func, args, kwargs, result)
        if self._memory.allocator is None:  # else CPU kernels stand for others
            if key is None or key not in _MEMO.inside:
                measured = is_measured(func.name(), args)
                _MEMO.inside[key] = measured_inside(func, args, kwargs) if measured else cast_bytes(func, args, result)
            self._memory.ledger.see_workspace(_MEMO.inside[key])
        else:
            self._memory.ledger.see_workspace(sort_bytes(func, args) or reduction_bytes(func, args, result, self._card))
        return result


def _grouped_product(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Returns what experts make of their tokens, however many each gets; PyTorch's own stand-in knows bfloat16 only."""
    del bias  # refused by the operator itself
    groups: tuple[int, ...] = ()
    if left.dim() == right.dim():
        groups = (left.shape[0] if offs is None else offs.shape[0],)
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]), dtype=out_dtype or left.dtype)


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
def fake_device(
    capacity_bytes: int | None = None, *, stands_for: str = "cpu", card: Any = None
) -> Iterator[SimulatedMemory]:
    """Has all tensors made inside be fake ones on a simulated device.

    To PyTorch they are CPU tensors, since its CPU builds cannot differentiate fake CUDA ones; this library branches as
    on the device stood for, and a table has the temporaries of its kernels (`memsafe_rl.memory.simulated.workspaces`).
    """
    silent = quiet("torch._subclasses.fake_tensor", logging.CRITICAL)  # which prints what it also raises
    allocator = CachingAllocator(AllocatorSettings.read(os.environ)) if stands_for == "cuda" else None
    memory = SimulatedMemory(capacity_bytes, exact=False, allocator=allocator)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    fake.cache_enabled = False  # the memo has looked before it is asked
    answers = _Answers(composed=stands_for != "cuda", memory=memory, card=card)
    functions = CudaFunctions() if stands_for == "cuda" else nullcontext()
    with among_ourselves(), only_bytes_matter(), standing_for(stands_for), functions, fake, memory, answers, silent:
        yield memory


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
    """Returns an empty tensor of the same kind: a parameter where it is one."""
    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
