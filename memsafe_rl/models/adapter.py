"""What every kind of model gives to the loops: pieces of a forward pass, no budgets, no loops.

An adapter that derives from its protocol need not write what it lacks: an encoder, a cache, a shared prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from memsafe_rl.micro_batches import MicroBatchGroup, token_micro_batches, token_work
from memsafe_rl.models import refusal
from memsafe_rl.models.decoding.shared_prefix_cache import PromptBlock, RowCache
from memsafe_rl.models.host_weights import HostWeights
from memsafe_rl.models.routing import RouterLosses, Routers
from memsafe_rl.ops.registry import Registry
from memsafe_rl.types import Distribution, ModelGeometry, TokenDistribution, Trajectory, UpdateWork

Context = Callable[[], AbstractContextManager[object]]
"""Gives the context of a forward pass."""

Choose = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Takes logits (B, V) float32 of the next token; gives tokens (B,) int64, and (B,) bool, whether a row ends there."""


class DecodeState(Protocol):
    """Keys and values of the rows being decoded."""

    @property
    def rows(self) -> int:
        """Sequences held."""

    def nbytes(self) -> int:
        """Bytes of the cache."""

    def prompt_blocks(self) -> list[PromptBlock]:
        """The blocks that hold these prompts, each once; they know whether rows may still begin at them."""
        return []

    def select(self, rows: Sequence[int]) -> Self:
        """Keeps, drops, repeats or reorders rows.

        Args:
            rows: indices of the rows wanted, with repeats.

        Returns:
            A cache of these rows. This one is spent then, unless the adapter ``joins`` and the rows have drawn nothing.
        """

    def join(self, other: Self) -> Self:
        """Puts the rows of another cache behind this one's; only where the adapter ``joins``.

        Args:
            other: a cache of the same network.

        Returns:
            A cache of both, which must not be used afterwards, unless their rows have drawn nothing.
        """

    def stretch(self, tokens: int) -> bool:
        """Widens the cache in place as if every row had drawn so many more tokens; to measure, not to decode.

        Args:
            tokens: tokens that every row has more afterwards.

        Returns:
            Whether it could; False where this kind of cache only grows by reading.
        """


class ScoringAdapter(Protocol):
    """A network whose stored actions can be scored and trained on, whatever an action is.

    Attributes:
        model: the network that is trained, as the user knows it (a `PeftModel` when there is one).
        time_separable: whether columns of a trajectory can be scored one by one (diffusion: True, tokens: False).
        closed_form_kl: whether the KL to the reference follows from the two distributions, so that no log-probs of the
            reference are stored (Gaussian steps of a chain: True, tokens: False).
        packs_prompts: whether `distribution` can take one copy of a prompt for all its completions.
        routers: those of a mixture of experts, where the loss has terms on them; None without.
        host_weights: the blocks whose frozen weights can wait on the host, as ``geometry.frozen_block_bytes`` says.
    """

    model: nn.Module
    time_separable: bool = False
    closed_form_kl: bool = False
    packs_prompts: bool = False
    routers: Routers | None = None
    host_weights: HostWeights = HostWeights(())

    def hear_routers(self, losses: RouterLosses) -> None:
        """Has updates add losses on the routers of a mixture of experts.

        Args:
            losses: their coefficients.

        Raises:
            ConfigError: the network has none that can be heard.
        """
        raise refusal("routers/none", off=losses.off, kind=type(self.model).__name__)

    @property
    def reads_alike(self) -> bool:
        """Whether an encoder reads the prompts, and reads them alike for policy and reference as long as both learn."""
        return False

    def take_sources(self, *, for_copy: bool) -> None:  # noqa: ARG002
        """Reads prompts from trajectories from now on, where these hold what its encoder made; so does its copy."""
        return

    @property
    def device(self) -> torch.device:
        """Where the network computes."""

    @property
    def geometry(self) -> ModelGeometry:
        """Sizes from which bytes are counted."""

    def work(self, trajectory: Trajectory, rows: Sequence[int], *, packable: bool = True) -> UpdateWork:
        """Returns the shape of rows, as a memory policy may know it.

        Args:
            trajectory: the store.
            rows: indices of the rows.
            packable: whether rows may lie behind one copy of each prompt, where ``packs_prompts``.

        Returns:
            The shape of all their columns in which actions count.
        """

    def micro_batches(
        self,
        trajectory: Trajectory,
        rows: Sequence[int],
        tokens: int,
        *,
        columns: Sequence[int] | None = None,
        packed: bool = False,
    ) -> list[MicroBatchGroup]:
        """Cuts rows into forward passes; where they are cut changes no sum over them.

        Args:
            trajectory: the store.
            rows: indices of the rows.
            tokens: most tokens of a pass, or (row, column) pairs where columns are run one by one; one row or pair may
                have more.
            columns: columns wanted, ascending; None for those in which actions count.
            packed: whether rows lie behind one copy of each prompt, where ``packs_prompts``.

        Returns:
            Groups of passes; those of a group run inside one `read_together` of all its rows.
        """

    def distribution(
        self, trajectory: Trajectory, rows: Sequence[int], columns: Sequence[int] | None = None, *, packed: bool = False
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
        self, trajectory: Trajectory, rows: Sequence[int], forward: Context
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
        del trajectory, rows, forward
        return nullcontext()

    def learning(self, forward: Context) -> AbstractContextManager[None]:  # noqa: ARG002
        """Gathers, over all micro-batches of a step, the gradients of what rows read besides their tokens.

        Leaving without an exception runs the backward pass of what made it; leaving with one drops them.

        Args:
            forward: gives the context of a forward; its backward runs outside.

        Returns:
            A context. Enter it by a ``with`` of its own, as `read_together`'s.
        """
        return nullcontext()

    def reference(self) -> AbstractContextManager[ScoringAdapter]:
        """Returns the reference network: this one with its LoRA adapter off, or a frozen copy.

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
        in_8_bits: whether caches are rounded to 8 bits.
        start_token_id: what the decoder of an encoder-decoder reads before a completion; None without an encoder.
        pad_token_id: what stands where a shorter row has no token.
    """

    joins: bool = False
    in_8_bits: bool = False
    start_token_id: int | None = None
    pad_token_id: int = 0

    def work(self, trajectory: Trajectory, rows: Sequence[int], *, packable: bool = True) -> UpdateWork:
        """Returns the shape of rows; see `ScoringAdapter.work`."""
        return token_work(trajectory, rows, self.geometry, packs=packable and self.packs_prompts)

    def micro_batches(
        self,
        trajectory: Trajectory,
        rows: Sequence[int],
        tokens: int,
        *,
        columns: Sequence[int] | None = None,
        packed: bool = False,
    ) -> list[MicroBatchGroup]:
        """Cuts rows by tokens; see `ScoringAdapter.micro_batches`."""
        if columns is not None:
            raise refusal("columns/tokens", columns=columns)
        return token_micro_batches(self.work(trajectory, rows, packable=packed), tokens)

    @property
    def decodes(self) -> bool:
        """Whether this library's loop decodes rows together; if not, `decode_plainly` decodes rows of one length."""
        return False

    @property
    def caches(self) -> bool:
        """Whether `decode_plainly` may keep a cache."""
        return False

    @property
    def own_generate(self) -> Callable[..., Any] | None:
        """What draws in the place of transformers' `generate`, None where nobody has put anything there."""
        return None

    @property
    def kv_retention(self) -> bool:
        """Whether rows can wait between turns, and caches be in 8 bits: this library keeps the caches itself."""
        return False

    def cache_in_8_bits(self, wanted: bool) -> None:
        """Says how the caches to come are kept: in the network's own type, or rounded to 8 bits, which is lossy.

        Args:
            wanted: whether they are rounded.

        Raises:
            ConfigError: they cannot be, as `kv_retention` says.
        """
        refusal.when(wanted and not self.kv_retention, "cache_implementation", kind=type(self.model).__name__)
        self.in_8_bits = wanted

    @property
    def value_inputs(self) -> tuple[int, torch.dtype] | None:
        """Width and type of the hidden states that a critic's head can read; None where it shows none."""

    def reread(self) -> None:
        """Forgets the sizes read so far, after weights were added or frozen."""
        return

    def read_sources(self, prompts: Sequence[Tensor]) -> list[Tensor]:  # noqa: ARG002
        """Returns what the encoder makes of prompts, to be kept; only where it `reads_alike`.

        Args:
            prompts: P tensors (length,) int64.

        Returns:
            For each prompt (length, D), on the device.
        """
        raise AssertionError("no encoder reads prompts")

    def prefill(self, prompts: Sequence[Tensor], chunk_tokens: int | None = None) -> tuple[Tensor, DecodeState]:
        """Reads prompts and fills a cache.

        Args:
            prompts: P tensors (length,) int64, on any device, none empty; lengths may differ.
            chunk_tokens: most tokens of one forward when there is one prompt; None for no limit. Kept to only where
                the adapter ``joins``.

        Returns:
            Logits of the next token (P, V), without graph, and the cache of P rows.
        """

    def decode_step(self, state: DecodeState, tokens_B: Tensor) -> Tensor:
        """Appends one token to every row of a cache, in place.

        Args:
            state: a cache of B rows.
            tokens_B: (B,) int64.

        Returns:
            Logits of the next token (B, V).
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

    def resume(
        self, rows: Sequence[RowCache], kept: Sequence[int], tokens: Sequence[Tensor], chunk_tokens: int
    ) -> tuple[Tensor, DecodeState]:
        """Puts rows that waited into a cache and reads on; only where `kv_retention`.

        Args:
            rows: the rows.
            kept: for each, tokens of it that still hold.
            tokens: for each (length,) int64, what follows them, at least one.
            chunk_tokens: as in `extend`.

        Returns:
            Logits of the next token (B, V), and the cache.
        """

    def decode_plainly(
        self, ids_BL: Tensor, choose: Choose, *, prompt_tokens: int, max_new_tokens: int, cached: bool
    ) -> None:
        """Decodes rows of one length, until all have ended, where this library's loop does not decode them.

        Args:
            ids_BL: (B, L) int64, prompts and what was drawn after them.
            choose: chooses the next tokens.
            prompt_tokens: of these, the prompts' tokens.
            max_new_tokens: most tokens drawn now.
            cached: whether it keeps a cache.
        """

    def distribution(
        self, trajectory: Trajectory, rows: Sequence[int], columns: Sequence[int] | None = None, *, packed: bool = False
    ) -> TokenDistribution:
        """Runs the network over stored rows, up to its output head; see `ScoringAdapter.distribution`."""

    def reference(self) -> AbstractContextManager[ModelAdapter]:
        """Returns the reference network; see `ScoringAdapter.reference`."""


@dataclass(frozen=True)
class Adapter:
    """A family of networks that draw tokens, built in or a user's own.

    Args:
        name: its name in messages.
        function: wraps a network of the family, ``make(model, pad_token_id=..., reference_model=...)``; the model is a
            `PeftModel` where there is an adapter, and the reference a frozen copy, or None.
        matches: whether a network, without PEFT around it, is of the family.
        check: compares an adapter's own paths with the network's logits; it may choose another path. None to compare
            rows scored together with rows alone.
    """

    name: str
    function: Callable[..., ModelAdapter]
    matches: Callable[[Any], bool]
    check: Callable[[Any], None] | None = None


ADAPTERS: Registry[Adapter] = Registry("model", Adapter)
"""Every family by name; where several match a network, the last."""

register_adapter = ADAPTERS.add
"""Makes a family known; its networks can be passed as ``model`` from then on."""
