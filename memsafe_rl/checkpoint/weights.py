"""Writes and reads the trained weights in the form users load: transformers' or PEFT's own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping
from functools import reduce
from itertools import chain, repeat
from operator import or_
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from memsafe_rl.accounting import host_memory, local_part
from memsafe_rl.checkpoint import refusal
from memsafe_rl.errors import kind_and_line
from memsafe_rl.memory.runtime.failures import is_out_of_memory
from memsafe_rl.models.critic import CRITIC_ADAPTER, Critic
from memsafe_rl.models.module_state import adapter_weights, copy_into, quiet_peft, tensor_place

_ADAPTER = "default"
_PLAIN = "model.safetensors"
_CRITIC = "critic.safetensors"
_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""What safetensors calls types of weights."""


Weights = Mapping[str, Tensor]
"""Tensors by their name in a model's `state_dict`."""


def write_weights(model: Any, tokenizer: Any, folder: Path, weights: Weights | None = None) -> None:
    """Writes a model, of an adapted one its adapter, and its tokenizer; ``weights`` are copies by `saved_weights`."""
    if isinstance(model, PeftModel):
        model.save_pretrained(folder, selected_adapters=[model.active_adapter], state_dict=weights)
    elif isinstance(model, PreTrainedModel):
        model.save_pretrained(folder, state_dict=weights)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        save_model(model if weights is None else SimpleNamespace(state_dict=lambda: weights), str(folder / _PLAIN))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def check_savable(tokenizer: Any) -> None:
    """Proves that a tokenizer's files can be written, which some only find out when the first checkpoint is due."""
    if tokenizer is None:
        return
    try:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
    except Exception as error:
        raise refusal("processing_class", kind=type(tokenizer).__name__, told=kind_and_line(error)) from error


def refuse_unsaved(model: Any) -> None:
    """Refuses weights that are trained beside an adapter and that PEFT would not save with it."""
    if not isinstance(model, PeftModel):
        return
    # not its `state_dict`, for which bitsandbytes packs a base's scales anew
    state = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    with quiet_peft():
        saved = get_peft_model_state_dict(model, state_dict=state, adapter_name=model.active_adapter)
    # a critic's are saved by whose critic it is
    kept = set(map(tensor_place, (*saved.values(), *adapter_weights(model, CRITIC_ADAPTER).values())))
    trained = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
    lost = [name for name, weight in trained if tensor_place(weight) not in kept]
    refusal.when(lost, "weights/unsaved", count=len(lost), lost=lost, adapter=model.active_adapter)


def saved_weights(model: Any) -> Weights:
    """Returns the tensors that `write_weights` writes: the adapter's where there is one, else all."""
    weights: Weights = model.state_dict()
    if not isinstance(model, PeftModel):
        return weights
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    adapter = model.active_adapter
    with quiet_peft():  # which says again what it does as it writes
        trained |= get_peft_model_state_dict(model, state_dict=weights, adapter_name=adapter).keys()  # with embeddings
    return {name: weight for name, weight in weights.items() if name in trained or adapter in name.split(".")}


class HostCopies:
    """Copies tensors to the host, time and again into the same memory: to fill fresh memory costs many times more."""

    def __init__(self) -> None:
        self._made: list[Tensor] = []

    def prepared(self, value: Any) -> Callable[[], None]:
        """Returns what makes the memory for copies of nested tensors, in any thread; it holds none of the tensors."""
        forms = [torch.empty_like(tensor, device="meta") for tensor in _tensors_of(value).values()]

        def prepare() -> None:
            self._made = [_host_like(form).zero_() for form in forms]

        return prepare

    def copy(self, value: Any) -> Any:
        """Copies all tensors in nested dicts, lists and tuples, over the copies made before; ties are kept."""
        copies: dict[Any, Tensor] = {}
        for made, (key, tensor) in zip(chain(self._made, repeat(None)), _tensors_of(value).items(), strict=False):
            fits = made is not None and (made.shape, made.dtype) == (tensor.shape, tensor.dtype)
            copies[key] = (made if made is not None and fits else _host_like(tensor)).copy_(tensor.detach())
        self._made = list(copies.values())
        return tree_map_only(Tensor, lambda tensor: copies[tensor_place(tensor)], value)


def host_copy(value: Any) -> Any:
    """Copies all tensors in nested dicts, lists and tuples to the host; tensors of one storage stay so."""
    return HostCopies().copy(value)


def _host_like(tensor: Tensor) -> Tensor:
    with host_memory():
        return torch.empty_like(tensor, device="cpu")


def _tensors_of(value: Any) -> dict[tuple[Any, ...], Tensor]:
    """Returns the tensors in nested dicts, lists and tuples by where their values lie."""
    return {tensor_place(leaf): leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}


def bytes_of(value: Any) -> int:
    """Sums the bytes of all tensors in nested dicts, lists and tuples; those of one storage count once."""
    return sum(int(tensor.nbytes) for tensor in _tensors_of(value).values())


def read_weights(model: Any, folder: Path) -> None:
    """Copies saved weights into a model, in place and bit for bit."""
    try:
        if isinstance(model, PeftModel):
            _read_adapter(model, folder)
        elif isinstance(model, PreTrainedModel):
            _read_model(model, folder)
        else:
            load_model(model, folder / _PLAIN)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise refusal("weights/model", folder=str(folder), reason=str(error).splitlines()[0]) from error


def write_critic(weights: Weights, folder: Path) -> None:
    """Writes a critic's weights beside those of the model."""
    save_file({name: weight.detach().cpu().contiguous() for name, weight in weights.items()}, folder / _CRITIC)


def read_critic(critic: Critic, folder: Path) -> None:
    """Copies a critic's saved weights into it, in place and bit for bit."""
    try:
        saved = load_file(folder / _CRITIC)
    except (OSError, SafetensorError) as error:
        raise refusal("weights/critic", folder=str(folder), reason=str(error).splitlines()[0]) from error
    critic.load_weights(saved)


def _saved_types(folder: Path) -> set[torch.dtype]:
    """Returns the types of saved weights, which reading would convert without a word."""
    found: set[str] = set()
    for file in folder.glob("model*.safetensors"):
        with safe_open(file, "pt") as weights:
            found |= {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    return {_TYPES[name] for name in found if name in _TYPES}


def _read_adapter(model: PeftModel, folder: Path) -> None:
    name = model.active_adapter
    place = folder if name == _ADAPTER else folder / name
    if not (place / "adapter_config.json").exists():  # else PEFT would look for a repository of that name
        raise FileNotFoundError("it holds no adapter")
    saved = load_peft_weights(str(place), device="cpu")
    own = get_peft_model_state_dict(model, adapter_name=name)
    wanted = {key: tuple(value.shape) for key, value in own.items()}
    found = {key: tuple(value.shape) for key, value in saved.items()}
    if wanted != found:
        differing = sorted({key for key, _ in wanted.items() ^ found.items()})
        raise ValueError(f"{len(differing)} weights of the adapter differ, such as {differing[0]}")
    if any(local_part(weight) is not weight for weight in own.values()):
        for key, target in own.items():
            copy_into(target, saved[key])
    else:
        set_peft_model_state_dict(model, saved, adapter_name=name)


def _read_model(model: Any, folder: Path) -> None:
    # The config is given, for without one a default network of any size would be built.
    types = {weight.dtype for weight in model.parameters() if weight.dtype in _TYPES.values()}
    wide = reduce(torch.promote_types, types, model.dtype)  # which holds the numbers of all
    saved, loading = type(model).from_pretrained(
        folder, config=model.config, dtype=wide, device_map=None, output_loading_info=True
    )
    if types := types ^ _saved_types(folder):
        raise ValueError(f"types of weights differ: {', '.join(sorted(map(str, types)))}")
    # What no file holds was made by whoever made the model, and maybe rounded on the way.
    stored = model.state_dict().keys() - (getattr(model, "_keys_to_ignore_on_save", None) or ())
    if differing := sorted({*loading["missing_keys"], *loading["unexpected_keys"]}):
        if not _read_by_name(model, folder, stored):
            raise ValueError(f"{len(differing)} weights differ, such as {differing[0]}")
        return
    own, read = ([*network.named_parameters(), *network.named_buffers()] for network in (model, saved))
    for (name, target), (_, source) in zip(own, read, strict=True):
        if name in stored:
            copy_into(target, source)


def _read_by_name(model: Any, folder: Path, stored: Collection[str]) -> bool:
    """Copies weights that lie under the model's own names, as those of layers put in by hand do; tells if all do."""
    saved: dict[str, Tensor] = reduce(or_, map(load_file, folder.glob("model*.safetensors")), {})
    own = model.state_dict()
    found = {tensor_place(own[name]) for name, value in saved.items() if name in own and own[name].shape == value.shape}
    if saved.keys() - own.keys() or any(tensor_place(own[name]) not in found for name in stored):
        return False
    for name, value in saved.items():
        copy_into(own[name], value)
    return True
