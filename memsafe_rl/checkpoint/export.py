"""A run's weights as one folder that transformers and vLLM load: merged, cast, with a card that says what they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from peft import PeftConfig, PeftModel
from safetensors import SafetensorError
from transformers import AutoConfig, AutoProcessor

from memsafe_rl.checkpoint.hub_push import model_card
from memsafe_rl.checkpoint.store import checkpoints
from memsafe_rl.diagnostics.run_figures import run_figures
from memsafe_rl.diagnostics.run_folder import read_run
from memsafe_rl.errors import ConfigError
from memsafe_rl.hub import loading_places_for, places_for
from memsafe_rl.models.loading import auto_class_of
from memsafe_rl.records import RUN_FILE, read_json
from memsafe_rl.units import format_bytes

_ADAPTER, _CONFIG, _CARD = "adapter_config.json", "config.json", "README.md"
_EMPTY, _OURS = "[More Information Needed]", "<!-- memsafe_rl writes this card; remove this line to keep changes. -->"


def export(source: str, target: str, dtype: str | None) -> Path:
    """Writes the weights of a run (its final model, else its latest checkpoint) or of a checkpoint, with a model card.

    An adapter is merged in float32; ``dtype`` None keeps the base's.
    """
    out, folder = Path(target), _with_weights(Path(source))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{target!r} is there and not empty. Give a new folder.")
    try:
        config, model, base = _loaded(folder)
        model.to(config.dtype or torch.float32 if dtype is None else getattr(torch, dtype)).save_pretrained(out)
        AutoProcessor.from_pretrained(folder).save_pretrained(out)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"The weights in {str(folder)!r} cannot be exported: {str(error).splitlines()[0].rstrip('.')}. Give a "
            "folder that `memsafe-rl train` or save_model wrote."
        ) from error
    _card(folder, base, out.name).save(out / _CARD)
    return out


def _with_weights(folder: Path) -> Path:
    """Finds the weights: in the folder itself, else in the latest of its checkpoints."""
    places = [folder, *reversed(checkpoints(folder))] if folder.is_dir() else []
    found = next((place for place in places if any((place / name).is_file() for name in (_ADAPTER, _CONFIG))), None)
    if found is None:
        raise ConfigError(
            f"{str(folder)!r} holds no weights: neither {_ADAPTER} nor {_CONFIG}, nor a checkpoint with one. Give "
            "a run's output_dir or a checkpoint's folder."
        )
    return found


def _loaded(folder: Path) -> tuple[Any, Any, str]:
    """Gives the network's config, the network, and the name of what it was trained from; unknown where empty."""
    if not (folder / _ADAPTER).is_file():
        config = AutoConfig.from_pretrained(folder)
        return config, auto_class_of(config).from_pretrained(folder, dtype="auto"), ""
    base = str(PeftConfig.from_pretrained(folder).base_model_name_or_path)
    try:
        config = AutoConfig.from_pretrained(base, **places_for(base))
        model = auto_class_of(config).from_pretrained(base, **loading_places_for(base, dtype=torch.float32))
    except OSError as error:
        raise ConfigError(
            f"The adapter in {str(folder)!r} belongs to the base {base!r}, which cannot be loaded here. Run this where "
            "it can, or write its place as base_model_name_or_path into adapter_config.json."
        ) from error
    return config, PeftModel.from_pretrained(model, str(folder)).merge_and_unload(), base


def fill_card(folder: Path, run_folder: Path) -> None:
    """Writes a model card in the place of the empty form that PEFT leaves beside an adapter, or of an earlier one."""
    card = folder / _CARD
    if card.is_file() and any(mark in card.read_text(encoding="utf-8") for mark in (_EMPTY, _OURS)):
        _card(run_folder, "", folder.resolve().name, library="peft").save(card)


def _card(folder: Path, base: str, name: str, library: str = "transformers") -> ModelCard:
    """Writes a model card from what the run has recorded."""
    run_folder = next((place for place in (folder, folder.parent) if (place / RUN_FILE).is_file()), None)
    run: Mapping[str, Any] = {} if run_folder is None else read_json(run_folder / RUN_FILE) or {}
    facts = {"data": run.get("data", ""), **run.get("facts", {})}
    base = base or facts.get("model", "")
    if run_folder is not None:
        read = read_run(run_folder)
        names = dict.fromkeys(key.split("/")[1] for step in read.steps for key in step if key.startswith("rewards/"))
        found = run_figures(read.steps, read.events)
        facts |= {"rewards": ", ".join(names), "optimizer steps": str(found.steps)}
        if None not in (found.first_reward, found.last_reward, found.peak_bytes, found.budget_bytes):
            facts["reward"] = f"{found.first_reward:.3f} in the first rollout, {found.last_reward:.3f} in the last"
            facts["peak memory"] = f"{format_bytes(found.peak_bytes or 0)} of {format_bytes(found.budget_bytes or 0)}"
    facts |= {f"version of {package}": version for package, version in run.get("versions", {}).items()}
    rows = "".join(f"\n| {fact} | {value} |" for fact, value in facts.items() if value not in ("", "None"))
    text = f"Trained with memsafe_rl.\n\n| | |\n|---|---|{rows}\n\n{_OURS}"
    return model_card(name, text, library_name=library, base_model=base or None)
