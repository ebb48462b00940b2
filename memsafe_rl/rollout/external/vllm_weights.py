"""The trained weights as another engine wants them: under the names of a checkpoint, adapters merged in.

In this process they are handed over one by one; a server reads them from files, written whole or not at all, and read
again before handing over.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from safetensors.torch import save_file
from torch import Tensor, nn

from memsafe_rl.durable import contents, sync_all
from memsafe_rl.rollout import refusal

_LABEL = re.compile(r"\d+-[0-9a-f]{16}")
_FILE_BYTES = 1 << 30  # bytes of weights that are on the host at once, and of a file


def refuse_unmergeable(model: nn.Module) -> None:
    """Refuses a model whose weights another engine could not be given one by one."""
    for name, parameter in model.named_parameters():
        refusal.when(not parameter.is_floating_point(), "use_vllm/quantised", name=name, dtype=parameter.dtype)
    base = _base(model)
    head = base.get_output_embeddings()
    tied = getattr(base.config, "tie_word_embeddings", False)
    for name, module in base.named_modules():
        known = isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper))
        apart = hasattr(module, "parameter_name") or (isinstance(module, AuxiliaryTrainingWrapper) and not known)
        refusal.when(apart, "use_vllm/unmergeable", kind=type(module).__name__, name=name)
        refusal.when(known and tied and module in (head, base.get_input_embeddings()), "use_vllm/tied", name=name)


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields every weight once, as the model computes with it now: an adapter is merged into a copy of one layer."""
    yield from _walk(_base(model), "", set())


def _base(model: nn.Module) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _walk(module: nn.Module, prefix: str, seen: set[nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(module, BaseTunerLayer):
        yield from _merged(module, prefix)
        return
    if isinstance(module, ModulesToSaveWrapper):
        off = module.disable_adapters or not module.active_adapters
        active = module.original_module if off else module.modules_to_save[module.active_adapters[0]]
        yield from _walk(cast(nn.Module, active), prefix, seen)
        return
    for name, parameter in module.named_parameters(recurse=False):
        if parameter not in seen:  # tied weights come once, under the first of their names
            seen.add(parameter)
            yield prefix + name, parameter.detach()
    for name, child in module.named_children():
        yield from _walk(child, f"{prefix}{name}.", seen)


def _merged(layer: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of a layer with its active adapters merged in."""
    base = layer.get_base_layer()
    with _scratch(base), torch.no_grad():
        before = list(layer.merged_adapters)
        if not layer.disable_adapters:
            layer.merge()
        merged = [(name, parameter.data) for name, parameter in base.named_parameters()]
        del layer.merged_adapters[len(before) :]
        getattr(layer, "_caches", {}).clear()  # what DoRA keeps for taking the merge back
    for name, tensor in merged:
        yield prefix + name, tensor


@contextmanager
def _scratch(layer: nn.Module) -> Iterator[None]:
    """Lets a layer's weights be written for a while: into copies, which are left behind."""
    own = [(parameter, parameter.data) for parameter in layer.parameters()]
    try:
        for parameter, data in own:
            parameter.data = data.clone()
        yield
    finally:
        for parameter, data in own:
            parameter.data = data


def written(model: nn.Module, parent: Path, step: int) -> tuple[Path, str]:
    """Writes a model's weights and removes those that were written before."""
    draft = parent / ".part"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for number, tensors in enumerate(_files(model)):
        save_file(tensors, draft / f"model-{number:05}.safetensors")
    sync_all(draft)
    label = _label(draft, step)
    final = parent / label
    for old in parent.iterdir():
        if _LABEL.fullmatch(old.name):  # whatever else lies there is the user's
            shutil.rmtree(old)
    draft.rename(final)
    sync_all(parent)
    return final, label


def is_whole(folder: Path, label: str) -> bool:
    """Returns whether every byte of a folder is what was written."""
    return folder.is_dir() and _label(folder, int(label.partition("-")[0])) == label


def _label(folder: Path, step: int) -> str:
    """Names the content of a folder: the label of files that differ in one bit is another."""
    return f"{step}-{hashlib.sha256(json.dumps(contents(folder)).encode()).hexdigest()[:16]}"


def _files(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    for name, tensor in named_weights(model):
        tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if sum(each.nbytes for each in tensors.values()) >= _FILE_BYTES:
            yield tensors
            tensors = {}
    if tensors:
        yield tensors
