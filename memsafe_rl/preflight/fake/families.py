"""Configs of common networks by name, so that a forecast needs neither a hub nor a file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from memsafe_rl.errors import texts_beside
from memsafe_rl.hub import places_for
from memsafe_rl.preflight import refusal

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    name: {**networks["shared"], **sizes}
    for networks in texts_beside(__file__, "families.yaml").values()
    for name, sizes in networks.items()
    if name != "shared"
}
"""Sizes of common networks by name; other fields are transformers' defaults."""

_IN_BFLOAT16 = ("qwen2", "qwen3", "llama", "mistral", "gemma3_text")
"""Families whose weights are published in bfloat16, which decides where nobody chooses a type (reward models)."""

_UNREADABLE = (OSError, ValueError, TypeError, AttributeError, LookupError, StrictDataclassError)
"""What transformers raises of a config that is missing, no JSON, of an unknown kind, or whose fields are not right."""

_TUNED = ("-instruct", "-base", "-it", "-pt", "-instruct-2507", "-thinking-2507")
"""Endings under which the same network is published with other weights."""


def known_config(name: str) -> PretrainedConfig | None:
    """Returns the config of a network that is known by name."""
    wanted = _short(name)
    for known, sizes in FAMILIES.items():
        if _short(known) == wanted:
            config = AutoConfig.for_model(**sizes)
            config.dtype = torch.bfloat16 if config.model_type in _IN_BFLOAT16 else torch.float32
            return config
    return None


def config_for(model: str, role: str = "model", *, trust_remote_code: bool = False, **places: Any) -> PretrainedConfig:
    """Returns the config of a network: from a folder or a ``config.json``, from the names known here, or from a hub."""
    known = None if Path(model).exists() else known_config(model)
    if known is not None:
        return known
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            model, trust_remote_code=trust_remote_code, **places_for(model, **places)
        )
    except _UNREADABLE as error:
        if model and Path(model).exists():
            reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
            raise refusal("config/read", role=role, model=model, kind=type(error).__name__, reason=reason) from error
        alike = difflib.get_close_matches(_short(model), map(_short, FAMILIES), n=3, cutoff=0.75)
        near = [name for name in FAMILIES if _short(name) in alike]
        told = f"; near to it are {', '.join(near)}" if near else f", such as {', '.join(list(FAMILIES)[:3])}"
        raise refusal("config/unknown", role=role, model=model, known=told) from error
    return config


def _short(name: str) -> str:
    short = name.rsplit("/", 1)[-1].lower()
    for ending in sorted(_TUNED, key=len, reverse=True):
        short = short.removesuffix(ending)
    return short
