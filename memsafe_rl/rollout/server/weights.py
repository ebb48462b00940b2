"""The trained weights as files for a server: written whole or not at all, and read again before handing over."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from memsafe_rl.durable import contents, sync_all
from memsafe_rl.rollout.vllm.weights import named_weights

_LABEL = re.compile(r"\d+-[0-9a-f]{16}")
_FILE_BYTES = 1 << 30  # bytes of weights that are on the host at once, and of a file


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
    """Tells whether every byte of a folder is what was written."""
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
