"""What every kind of model gives to the loops: pieces of a forward pass, no budgets, no loops."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from memsafe_rl.types import ModelGeometry, TokenDistribution, Trajectory


class DecodeState(Protocol):
    """Keys and values of the rows being decoded; opaque to the loops."""

    @property
    def rows(self) -> int:
        """Sequences held."""

    def nbytes(self) -> int:
        """Bytes of the cache."""


class ModelAdapter(Protocol):
    """A network as the rollout and the trainer use it.

    Attributes:
        model: the network that is trained, as the user knows it (a `PeftModel` when there is one).
        time_separable: whether columns of a trajectory can be scored one by one (diffusion: True, tokens: False).
        packs_prompts: whether `distribution` can take one copy of a prompt for all its completions.
    """

    model: nn.Module
    time_separable: bool
    packs_prompts: bool

    @property
    def device(self) -> torch.device:
        """Where the network computes."""

    @property
    def geometry(self) -> ModelGeometry:
        """Sizes from which bytes are counted."""

    def prefill(self, prompts: Sequence[Tensor]) -> tuple[Tensor, DecodeState]:
        """Reads prompts and fills a cache.

        Args:
            prompts: P tensors (length,) int64, on any device, none empty; lengths may differ.

        Returns:
            Logits of the next token (P, V), without graph, and the cache of P rows.
        """

    def select(self, state: DecodeState, rows: Tensor) -> DecodeState:
        """Keeps, drops, repeats or reorders rows of a cache; the given state must not be used afterwards.

        Args:
            state: a cache.
            rows: (R,) int64, indices of the rows wanted, with repeats; on the host or the device. Read once on the
                host where rows differ in padding.

        Returns:
            A cache of R rows.
        """

    def decode_step(self, state: DecodeState, tokens_B: Tensor) -> Tensor:
        """Appends one token to every row of a cache, in place.

        Args:
            state: a cache of B rows.
            tokens_B: (B,) int64.

        Returns:
            Logits of the next token (B, V).
        """

    def stretch(self, state: DecodeState, slots: int) -> bool:
        """Widens a cache in place as if so many tokens had been read, without reading them; to measure, not to decode.

        Args:
            state: a cache of rows that have been read.
            slots: slots of every row afterwards.

        Returns:
            Whether it could; False where this kind of cache only grows by reading.
        """

    def distribution(
        self, trajectory: Trajectory, rows: Sequence[int], columns: slice | None = None, *, packed: bool = False
    ) -> TokenDistribution:
        """Runs the network over stored rows, up to its output head.

        Args:
            trajectory: the store.
            rows: indices of the rows wanted.
            columns: columns wanted; only for a `time_separable` adapter.
            packed: whether rows lie end to end behind one copy of each prompt; only where ``packs_prompts``.

        Returns:
            The distribution at every action of these rows; carries a graph if gradients are enabled.
        """

    def reference(self) -> AbstractContextManager[ModelAdapter]:
        """Gives the reference network: this one with its LoRA adapter off, or a frozen copy.

        Returns:
            A context; what it yields may be this very adapter, so its distributions must be used inside.
        """

    def recompute(self, enabled: bool) -> AbstractContextManager[None]:
        """Recomputes each block's activations in the backward pass of what is run inside, in eval mode too.

        Args:
            enabled: False changes nothing.

        Returns:
            A context for the forward; the backward may run outside.
        """
