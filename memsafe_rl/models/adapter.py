"""What every kind of model gives to the loops: pieces of a forward pass, no budgets, no loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from memsafe_rl.types import Distribution, ModelGeometry, TokenDistribution, Trajectory


class DecodeState(Protocol):
    """Keys and values of the rows being decoded; opaque to the loops."""

    @property
    def rows(self) -> int:
        """Sequences held."""

    def nbytes(self) -> int:
        """Bytes of the cache."""


class ScoringAdapter(Protocol):
    """A network whose stored actions can be scored and learnt from, whatever an action is.

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

    def distribution(
        self,
        trajectory: Trajectory,
        rows: Sequence[int],
        columns: Sequence[int] | None = None,
        *,
        packed: bool = False,
    ) -> Distribution:
        """Runs the network over stored rows, up to its output head.

        Args:
            trajectory: the store.
            rows: indices of the rows wanted.
            columns: columns wanted, ascending; None for all, and always None unless the adapter is `time_separable`.
            packed: whether rows lie end to end behind one copy of each prompt; only where ``packs_prompts``.

        Returns:
            The distribution at every action of these rows and columns; carries a graph if gradients are enabled.
        """

    def read_together(
        self, trajectory: Trajectory, rows: Sequence[int], forward: Callable[[], AbstractContextManager[object]]
    ) -> AbstractContextManager[None]:
        """Reads once what rows are conditioned on, where an encoder does that, for all `distribution` calls inside.

        Entering runs the encoder on each unique prompt; leaving without an exception runs its backward pass, if
        gradients have reached what it read.

        Args:
            trajectory: the store.
            rows: indices of the rows that will be scored inside.
            forward: gives the context of the encoder's forward; its backward runs outside.

        Returns:
            A context. Enter it by a ``with`` of its own: an exception that leaves an `ExitStack` through a callback
            holds on to its own frame, and with it to what failed.
        """

    def reference(self) -> AbstractContextManager[ScoringAdapter]:
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


class ModelAdapter(ScoringAdapter, Protocol):
    """A network that draws tokens one after another, as the rollout and the trainer use it.

    Attributes:
        joins: whether a prompt is kept once for its group, and rows of several caches can be put together.
    """

    joins: bool

    def prefill(self, prompts: Sequence[Tensor], chunk_tokens: int | None = None) -> tuple[Tensor, DecodeState]:
        """Reads prompts and fills a cache.

        Args:
            prompts: P tensors (length,) int64, on any device, none empty; lengths may differ.
            chunk_tokens: most tokens of one forward when there is one prompt; None for no limit. Kept to only where
                the adapter ``joins``.

        Returns:
            Logits of the next token (P, V), without graph, and the cache of P rows.
        """

    def select(self, state: DecodeState, rows: Sequence[int]) -> DecodeState:
        """Keeps, drops, repeats or reorders rows of a cache.

        Args:
            state: a cache; must not be used afterwards, unless the adapter ``joins`` and its rows have drawn nothing.
            rows: indices of the rows wanted, with repeats.

        Returns:
            A cache of these rows.
        """

    def decode_step(self, state: DecodeState, tokens_B: Tensor) -> Tensor:
        """Appends one token to every row of a cache, in place.

        Args:
            state: a cache of B rows.
            tokens_B: (B,) int64.

        Returns:
            Logits of the next token (B, V).
        """

    def join(self, first: DecodeState, second: DecodeState) -> DecodeState:
        """Puts the rows of one cache behind those of another; only where the adapter ``joins``.

        Args:
            first: a cache; must not be used afterwards, unless its rows have drawn nothing.
            second: likewise.

        Returns:
            A cache of both.
        """

    def extend(self, state: DecodeState, tokens: Sequence[Tensor], chunk_tokens: int) -> Tensor:
        """Appends tokens that were drawn before to the rows of a cache, in place; only where the adapter ``joins``.

        Args:
            state: a cache of B rows.
            tokens: for each row (length,) int64, at least one.
            chunk_tokens: most tokens of one forward, padding included; at least one of each row in any case.

        Returns:
            Logits of the next token (B, V).
        """

    def keep_whole(self, state: DecodeState, whole: bool) -> None:
        """Says whether rows may still begin at the prompts of a cache, so that nothing of them may be given up.

        Args:
            state: a cache.
            whole: whether they may.
        """

    def prompt_bytes(self, state: DecodeState) -> int:
        """Counts the keys and values of prompts that are kept once for all their rows.

        Args:
            state: a cache.

        Returns:
            int, bytes; 0 where each row has its own.
        """

    def stretch(self, state: DecodeState, tokens: int) -> bool:
        """Widens a cache in place as if every row had drawn so many more tokens; to measure, not to decode.

        Args:
            state: a cache of rows that have been read.
            tokens: tokens that every row has more afterwards.

        Returns:
            Whether it could; False where this kind of cache only grows by reading.
        """

    def distribution(
        self,
        trajectory: Trajectory,
        rows: Sequence[int],
        columns: Sequence[int] | None = None,
        *,
        packed: bool = False,
    ) -> TokenDistribution:
        """Runs the network over stored rows, up to its output head.

        Args:
            trajectory: the store.
            rows: indices of the rows wanted.
            columns: must be None.
            packed: whether rows lie end to end behind one copy of each prompt; only where ``packs_prompts``.

        Returns:
            The distribution at every action of these rows; carries a graph if gradients are enabled.
        """

    def reference(self) -> AbstractContextManager[ModelAdapter]:
        """Gives the reference network: this one with its LoRA adapter off, or a frozen copy.

        Returns:
            A context; what it yields may be this very adapter, so its distributions must be used inside.
        """
