"""Says in plain words why work does not fit: what was asked, who holds what, what was tried, what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from memsafe_rl.memory.planning.search import LOSSLESS, fallbacks_named
from memsafe_rl.types import Component, MemoryFailure, Phase, RolloutPlan, UpdatePlan
from memsafe_rl.units import format_bytes

_DOING = {
    Phase.LOAD: "Loading the model",
    Phase.ROLLOUT: "The rollout",
    Phase.REWARD: "Scoring completions with a reward model",
    Phase.SCORE: "Scoring log-probs",
    Phase.UPDATE: "The gradient",
    Phase.OPTIMIZER: "The optimizer's state or step",
    Phase.EVALUATE: "Evaluation",
    Phase.CHECKPOINT: "Writing a checkpoint",
}

_REMEDIES = {
    Component.WEIGHTS: "quantise the base model (quantization_config with peft_config), load it in bfloat16 "
    "(model_init_kwargs={'dtype': 'bfloat16'}; to train all of it, with master_weights='stochastic_rounding'), or "
    "take a smaller one",
    Component.GRADIENTS: "train an adapter (peft_config=LoraConfig(...)) instead of all weights",
    Component.OPTIMIZER: "train an adapter (peft_config=LoraConfig(...)) or use an optimizer with less state "
    "(optim='adamw_bnb_8bit', 'adafactor' or 'sgd')",
    Component.ACTIVATIONS: "lower max_completion_length or max_prompt_length",
    Component.KV_CACHE: "lower max_completion_length or max_prompt_length",
    Component.LOGITS: "lower max_completion_length",
    Component.TRAJECTORY: "set trajectory_device='host'",
}

_OF_DENOISERS = "train an adapter, set guidance_gradient=False, or take a smaller denoiser or smaller states"

_BY_PHASE = {
    Phase.LOAD: Component.WEIGHTS,
    Phase.ROLLOUT: Component.KV_CACHE,
    Phase.SCORE: Component.ACTIVATIONS,
    Phase.UPDATE: Component.ACTIVATIONS,
    Phase.OPTIMIZER: Component.OPTIMIZER,
    Phase.EVALUATE: Component.KV_CACHE,
}
"""What a phase needs most of, apart from what is held already."""


def changes(old: RolloutPlan | UpdatePlan, new: RolloutPlan | UpdatePlan) -> dict[str, tuple[Any, Any]]:
    """Lists the fields in which two plans differ."""
    before, after = asdict(old), asdict(new)
    return {
        name: (before[name], after[name])
        for name in before
        if name != "predicted_bytes" and before[name] != after[name]
    }


def explain(
    failure: MemoryFailure,
    held_bytes: Mapping[str, int],
    plans: Sequence[RolloutPlan | UpdatePlan],
    *,
    limit_bytes: int,
    policy: str,
) -> str:
    """Writes the message of a `MemoryBudgetError`."""
    asked = "an allocation" if failure.requested_bytes is None else format_bytes(failure.requested_bytes)
    holders = sorted(((size, name) for name, size in held_bytes.items() if size > 0), reverse=True)
    held = ", ".join(f"{name} {format_bytes(size)}" for size, name in holders) or "nothing this library knows of"
    largest = f" The largest holder is {holders[0][1]}." if holders else ""
    between = failure.phase is Phase.LOAD and failure.step > 0
    doing = "Work between two steps" if between else _DOING[failure.phase]
    return (
        f"{doing} does not fit in memory (step {failure.step + 1}): {asked} could not be allocated "
        f"within {format_bytes(limit_bytes)}, of which {format_bytes(max(0, failure.live_bytes))} are held outside "
        f"this work ({held}).{largest} {_tried(plans, failure, policy)} "
        f"{_remedy(failure, [name for _, name in holders])} The allocator said: {failure.message}"
    )


def _tried(plans: Sequence[RolloutPlan | UpdatePlan], failure: MemoryFailure, policy: str) -> str:
    if not plans:
        return "No plan cuts this work: there is nothing in it to cut."
    moved = ", ".join(f"{name} {old} to {new}" for name, (old, new) in changes(plans[0], plans[-1]).items())
    went = f", from the first to the last {moved}" if moved else ""
    # the ways in which the last plan could still have been leaner
    ways = fallbacks_named(LOSSLESS, failure.phase)
    unused = [one.name for one in ways if one.step(plans[-1], failure.work) is not None]
    if unused:
        went += (
            f". {policy} gave no further plan, though {', '.join(unused)} could still change; leave memory_policy out, "
            "and gradient_checkpointing=False, to have that done"
        )
    return f"{len(plans)} plan(s) were tried{went}."


def _remedy(failure: MemoryFailure, holders: Sequence[str]) -> str:
    advice, able = [_REMEDIES[_BY_PHASE[failure.phase]]] if failure.phase in _BY_PHASE else [], set(_REMEDIES)
    if failure.work is not None and failure.work.geometry.unit is not None:
        advice, able = [_OF_DENOISERS], {Component.OPTIMIZER, Component.TRAJECTORY}
    known = [Component(name) for name in holders if name in set(Component)]
    advice += [_REMEDIES[name] for name in known if name in able][:1]
    advice.append("raise memory_budget or use a larger device")
    return f"To change: {'; or '.join(dict.fromkeys(advice))}."
