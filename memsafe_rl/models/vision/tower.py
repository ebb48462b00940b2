"""What image towers make of prompts, and how one that learns gets its gradient: last, and once in an optimizer step.

Features depend on nothing but weights, and these move between steps alone. So micro-batches read features that were
made without a graph, and leave gradients there, as rows do at a `Trunk`. When all of them are done, the tower runs
again, one prompt at a time, and goes back from those gradients. By the chain rule that gives what a forward of the
tower in every micro-batch would give, and holds the activations of one prompt.

Axes: ``L`` tokens of a prompt, ``F`` features of all prompts, ``D`` hidden width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from memsafe_rl.models.adapter import Context
from memsafe_rl.models.module_state import eval_mode, peft_adapters_on, weights_mark
from memsafe_rl.models.vision.families import Images, VisionFamily
from memsafe_rl.ops.fixed_tiles import FIXED_TILES

Reader = tuple[int, tuple[str, ...]]
"""A network, by its id, and the PEFT adapters under which its tower reads."""


class ImagePrompt(NamedTuple):
    """A prompt as a processor gives it, on the host."""

    ids: Tensor  # (L,) int64, with one placeholder for each feature
    images: Images  # of all its images in order


class Shown(NamedTuple):
    """A prompt, and where its features lie."""

    prompt: ImagePrompt
    rows: slice


@dataclass(eq=False)
class Features:
    """What a tower made of the prompts of a table."""

    values: Tensor  # (F, levels * D); while an optimizer step accumulates, a leaf at which gradients gather
    mark: int = 0  # of the weights that made those which are fresh, and of how they were computed
    fresh: set[int] = field(default_factory=set)  # first rows of prompts whose features are those of the weights now
    learnt: dict[int, Shown] = field(default_factory=dict)  # by first row, prompts that rows of the step have read


class Tower:
    """The tower of a network, under its adapters, and those of the networks beside it."""

    def __init__(self, family: VisionFamily, lm: Any, *, dtype: torch.dtype | None, reference: Any = None) -> None:
        """Names a network, the type of its autocast, and the frozen copy that answers for the reference."""
        self._family, self._lm, self._dtype = family, lm, dtype
        self._modules = family.modules_of(lm)
        self._weights = nn.ParameterList(nn.ModuleList(self._modules).parameters())
        self._adapted = any(isinstance(module, BaseTunerLayer) for module in lm.modules())
        self.learns = self.is_trained()
        self.reads_again = self.learns or (reference is not None and not self._shares(reference))
        self.own = self._reads_as(lm)
        weight = lm.get_input_embeddings().weight
        # In halves, small shares would soon add nothing to a large sum.
        self.feature_dtype = torch.promote_types(weight.dtype, torch.float32) if self.learns else weight.dtype

    def is_trained(self) -> bool:
        """Whether a weight is trained as things are now."""
        return any(weight.requires_grad for weight in self._weights)

    def reader(self, lm: Any) -> Reader:
        """Says whose features a network reads as it is now; all that share a frozen tower read the same."""
        return self.own if not self.learns and self._shares(lm) else self._reads_as(lm)

    def _reads_as(self, lm: Any) -> Reader:
        return id(lm), peft_adapters_on(lm) if self._adapted else ()

    def _shares(self, lm: Any) -> bool:
        return self._family.modules_of(lm) == self._modules

    def autocast(self) -> torch.autocast:
        """Returns the context of a tower's forward, which uses every weight once, so that no copy need be kept."""
        kind = self._lm.get_input_embeddings().weight.device.type
        dtype, rounds = self._dtype or torch.bfloat16, self._dtype is not None
        return torch.autocast(kind, dtype=dtype, enabled=rounds, cache_enabled=False)

    @torch.no_grad()
    def fill(self, lm: Any, features: Features, wanted: Iterable[Shown]) -> None:
        """Makes features of prompts where they are missing, or of weights that have moved since; may be repeated."""
        mark = hash((weights_mark(self._weights), FIXED_TILES.get()))  # a scoring pass may compute in tiles of its own
        if mark != features.mark:
            features.fresh.clear()
            features.mark = mark
        stale = [one for one in wanted if one.rows.start not in features.fresh]
        if not stale:
            return
        with eval_mode(nn.ModuleList(self._family.modules_of(lm))):
            for prompt, rows in stale:
                features.values[rows] = self._made(lm, prompt)
                features.fresh.add(rows.start)

    def learn(self, features: Features, forward: Context, around: Context) -> None:
        """Runs the backward of the own tower from where gradients have gathered; dropout leaves features alone."""
        gradient = features.values.grad
        if gradient is None:  # no row was run
            return
        with eval_mode(nn.ModuleList(self._modules)), around():
            for prompt, rows in features.learnt.values():
                with forward():
                    made_ND = self._made(self._lm, prompt)
                if not made_ND.requires_grad:  # as under a critic's adapter that leaves the tower out
                    return
                torch.autograd.backward(made_ND, gradient[rows].to(made_ND.dtype))
                del made_ND  # lest it lie beside the next one's

    def _made(self, lm: Any, prompt: ImagePrompt) -> Tensor:
        """Returns the features of a prompt, in the type that the tower gives them."""
        device = lm.get_input_embeddings().weight.device
        with self.autocast():
            # pixels of the host's own too, lest a made-up run keep them
            given = {name: one.to(device, copy=one.is_floating_point()) for name, one in prompt.images.items()}
            return self._family.features(lm.base_model, given)
