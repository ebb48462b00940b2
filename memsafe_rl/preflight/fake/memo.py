"""Remembers of what shape operators made their results, so that the same question on fake tensors is worked out once.

PyTorch remembers it too, but asks in Python for every property of every argument, and builds each answer anew: where
blocks are alike, that is most of a forecast. Only bookkeeping is left out here, no tensor is.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memsafe_rl.memory.simulated.workspaces import WORKSPACES

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
    """Makes results of operators on fake tensors that were seen before with arguments of the same shapes.

    Only operators that give one tensor are remembered: a new one, a view, or an argument they wrote to. Later forecasts
    of the process ask much the same.
    """

    def __init__(self) -> None:
        self._recipes: dict[Hashable, _Recipe | None] = {}

    def key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
        """Gives what the shape of a result depends on."""
        try:
            named = tuple(kwargs), _known(tuple(kwargs.values()))
            return func, _known(args), named, torch.get_default_dtype()
        except _Unknown:
            return None

    def answer(self, key: Hashable, args: Sequence[Any], mode: Any) -> tuple[Tensor, bool] | None:
        """Makes a result as it was made before."""
        recipe = self._recipes.get(key)
        if recipe is None:
            return None
        if recipe.same and recipe.place is not None:
            return args[recipe.place], False
        with torch._C._DisableTorchDispatch():
            if recipe.place is None:
                hollow = torch.empty_strided(recipe.shape, recipe.stride, dtype=recipe.dtype, device="meta")
            else:
                hollow = torch.empty(0, dtype=recipe.dtype, device="meta")
                storage = args[recipe.place].untyped_storage()
                hollow.set_(storage, recipe.offset, recipe.shape, recipe.stride)
            made = Tensor._make_subclass(
                FakeTensor, hollow, False, dispatch_device=True, device_for_backend_keys=recipe.device
            )
            torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(recipe.about, fake_mode=mode)
        return made, recipe.place is None

    def remember(self, key: Hashable, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Learns how a result was made."""
        if key not in self._recipes:
            if len(self._recipes) >= _MOST_RECIPES:
                self._recipes.clear()
            self._recipes[key] = _recipe(func, args, kwargs, result)


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


def _recipe(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> _Recipe | None:
    """Says how to make a result again; None where it cannot be told."""
    if type(result) is not FakeTensor or func.name() in WORKSPACES or torch.Tag.inplace_view in func.tags:
        return None
    if result.layout is not torch.strided or result.is_conj() or result.is_neg() or result.constant is not None:
        return None
    storage = result.untyped_storage()
    given = [index for index, value in enumerate(args) if _shares(value, storage)]
    if not given and any(_shares(value, storage) for value in (*args, *kwargs.values())):
        return None  # into a list, or an argument by name
    place = next((index for index in given if args[index] is result), given[0] if given else None)
    if place is not None and not isinstance(args[place], Tensor):
        return None
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


def _shares(value: Any, storage: torch.UntypedStorage) -> bool:
    if isinstance(value, Tensor):
        return bool(value.untyped_storage()._cdata == storage._cdata)
    return isinstance(value, (list, tuple)) and any(_shares(one, storage) for one in value)
