"""Writes and reads the trained weights in the form users load: transformers' or PEFT's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, load_peft_weights, set_peft_model_state_dict

_ADAPTER = "default"


def write_weights(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes a model (its adapter only, when it has one) and its tokenizer.

    Args:
        model: a transformers model or a `PeftModel`.
        tokenizer: saved beside it.
        folder: made if missing.
    """
    if isinstance(model, PeftModel):
        model.save_pretrained(folder, selected_adapters=[model.active_adapter])
    else:
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def read_weights(model: Any, folder: Path) -> None:
    """Copies saved weights into a model, in place and bit for bit.

    Args:
        model: the model that was saved, or one made alike.
        folder: written by `write_weights`.
    """
    if isinstance(model, PeftModel):
        name = model.active_adapter
        inner = folder if name == _ADAPTER else folder / name
        set_peft_model_state_dict(model, load_peft_weights(str(inner), device="cpu"), adapter_name=name)
        return
    saved = type(model).from_pretrained(folder, dtype=model.dtype, device_map=None)
    with torch.no_grad():
        for (_, target), (_, source) in zip(model.named_parameters(), saved.named_parameters(), strict=True):
            target.copy_(source)
        for (_, target), (_, source) in zip(model.named_buffers(), saved.named_buffers(), strict=True):
            target.copy_(source)
