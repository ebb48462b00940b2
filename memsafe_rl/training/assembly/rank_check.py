"""What the ranks of a run begin with in common: settings, prompts and weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from memsafe_rl.data.prompts import read_alike
from memsafe_rl.memory.runtime.stages import Stage
from memsafe_rl.parallel.replicas import Replicas
from memsafe_rl.training import refusal
from memsafe_rl.training.setup import TrainingSetup

_OWN = ("output_dir", "memory_budget", "trajectory_device", "torch_empty_cache_steps")
"""Settings of which a rank may have its own, as of those of the log."""
_LOOKS = 16
"""Prompts that are compared, and elements of a frozen weight."""


def begin_alike(setup: TrainingSetup, ranks: Replicas, eval_dataset: Any = None) -> None:
    """Gives all ranks the main rank's trained weights, and refuses ranks that differ in anything else."""
    trained = [weight for weight in setup.trained.parameters() if weight.requires_grad]
    values, known = setup.config.to_dict(), setup.config.declared
    shared = [name for name in values if name not in _OWN and known[name].group != "Log"]
    facts: dict[tuple[str, str], str] = {
        **{("setting", name): _text(values[name]) for name in shared},
        ("weights", "trained weights"): f"{len(trained)} {_hash(str([weight.shape for weight in trained]))}",
        ("prompts", "train_dataset"): _prompts(setup.source),
        ("prompts", "eval_dataset"): _evaluated(eval_dataset),
    }
    for place, network in enumerate(setup.networks):  # several may be of one class: a model and its reference
        name = f"frozen weights of network {place} ({type(network).__name__})"
        facts["weights", name] = setup.recovery.repeat(Stage.LOAD, _frozen, network)
    first, *others = ranks.gather([facts])
    for rank, theirs in enumerate(others, 1):
        for (kind, name), ours in first.items():
            other = theirs.get((kind, name))
            refusal.when(other != ours, f"ranks/{kind}", name=name, ours=ours, theirs=other, rank=rank)
    ranks.spread(trained)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=lambda one: getattr(one, "__qualname__", type(one).__qualname__))


def _prompts(source: Any) -> str:
    """Names a dataset by its length and some of its prompts; a stream, which could be read but once, by nothing."""
    count = source.prompts_per_epoch
    if count is None:
        return ""
    places = range(0, count, max(1, count // _LOOKS))
    return f"{count} {_hash(_text([source.take(place, 1)[0].get('prompt') for place in places]))}"


def _evaluated(dataset: Any) -> str:
    """Names the prompts of evaluations likewise."""
    if isinstance(dataset, Mapping):
        return str([(name, _evaluated(part)) for name, part in dataset.items()])
    count = 0 if dataset is None else len(dataset)
    rows = read_alike((dataset[place] for place in range(0, count, max(1, count // _LOOKS))), seed=0)
    return f"{count} {_hash(_text([row.get('prompt') for row in rows]))}"


def _frozen(network: nn.Module) -> str:
    flat = (weight.detach().reshape(-1) for weight in network.parameters() if not weight.requires_grad)
    return _hash(str([values[:: max(1, len(values) // _LOOKS)].tolist() for values in flat]))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
