"""A recurrent network of a few kilobytes behind the adapter's interface, with a log of what it was asked."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from memsafe_rl.micro_batches import MicroBatchGroup, token_micro_batches, token_work
from memsafe_rl.models.decoding.shared_prefix_cache import PromptBlock
from memsafe_rl.types import LinearHead, ModelGeometry, TokenDistribution, Trajectory, UpdateWork


class FakeState:
    """Rows of a `FakeAdapter`; those that it does not let join are spent by a selection."""

    def __init__(self, hidden_BD: Tensor, adapter: FakeAdapter) -> None:
        self.hidden_BD = hidden_BD
        self.adapter = adapter

    @property
    def rows(self) -> int:
        return len(self.hidden_BD)

    def nbytes(self) -> int:
        return self.hidden_BD.nbytes

    def prompt_blocks(self) -> list[PromptBlock]:
        return []

    def select(self, rows: Sequence[int]) -> FakeState:
        selected = self.adapter.handed_out(FakeState(self.hidden_BD[rows], self.adapter))
        if not self.adapter.joins:
            del self.hidden_BD
        return selected

    def join(self, other: FakeState) -> FakeState:
        return self.adapter.handed_out(FakeState(torch.cat([self.hidden_BD, other.hidden_BD]), self.adapter))


class FakeModel(nn.Module):
    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.mix = nn.Linear(width, width)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(width, vocab)

    def step(self, hidden_BD: Tensor, tokens_B: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.mix(hidden_BD) + self.embed(tokens_B)))


class FakeAdapter:
    """Keeps weak references to all it hands out; `fail_at` names the steps that raise: all from there on, or a set."""

    time_separable = False
    packs_prompts = False
    decodes = True
    kv_retention = False
    start_token_id = None
    own_generate = None

    def __init__(
        self,
        vocab: int = 23,
        width: int = 16,
        max_positions: int | None = None,
        gain: float = 1.0,
        seed: int = 0,
        joins: bool = False,
    ) -> None:
        self.joins = joins
        torch.manual_seed(seed)
        self.model = FakeModel(vocab, width)
        with torch.no_grad():
            self.model.head.weight.mul_(4 * gain)
            self.model.mix.weight.mul_(2)
        self.vocab, self.width, self.max_positions = vocab, width, max_positions
        self.prefills: list[list[int]] = []
        self.steps: list[int] = []
        self.forwards: list[list[int]] = []
        self.left_over: list[int] = []
        self.modes: set[bool] = set()
        self.handed: list[weakref.ref[object]] = []
        self.extended: list[list[int]] = []
        self.fail_at: int | set[int] | None = None
        self.poison: tuple[int, int] | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def geometry(self) -> ModelGeometry:
        sizes = ModelGeometry(1, self.width, 0, 1, 1, 8, self.vocab, self.max_positions, (None,), 0, 0, 4, 4)
        return replace(sizes, shares_prompts=self.joins)

    def alive(self) -> int:
        return sum(ref() is not None for ref in self.handed)

    def prefill(self, prompts: Sequence[Tensor], chunk_tokens: int | None = None) -> tuple[Tensor, FakeState]:
        self.prefills.append([len(prompt) for prompt in prompts])
        rows = []
        for prompt in prompts:
            hidden_1D = torch.zeros(1, self.width)
            for token in prompt:
                hidden_1D = self.model.step(hidden_1D, token[None])
            rows.append(hidden_1D)
        return self._hand(torch.cat(rows))

    def handed_out(self, state: FakeState) -> FakeState:
        self.handed.append(weakref.ref(state))
        return state

    def extend(self, state: FakeState, tokens: Sequence[Tensor], chunk_tokens: int) -> Tensor:
        self.extended.append([len(row) for row in tokens])
        hidden = []
        for hidden_D, row in zip(state.hidden_BD, tokens, strict=True):
            hidden_1D = hidden_D[None]
            for token in row:
                hidden_1D = self.model.step(hidden_1D, token[None])
            hidden.append(hidden_1D)
        state.hidden_BD = torch.cat(hidden)
        return self.model.head(state.hidden_BD)

    def decode_step(self, state: FakeState, tokens_B: Tensor) -> Tensor:
        assert tokens_B.shape == (state.rows,)
        self.steps.append(state.rows)
        fails = self.fail_at
        if fails is not None and (len(self.steps) in fails if isinstance(fails, set) else len(self.steps) >= fails):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        state.hidden_BD = self.model.step(state.hidden_BD, tokens_B)
        logits_BV = self.model.head(state.hidden_BD)
        if self.poison is not None and len(self.steps) == self.poison[0]:
            logits_BV[self.poison[1]] = float("nan")
        self.modes.add(self.model.training)
        self.handed += [weakref.ref(logits_BV), weakref.ref(state.hidden_BD)]
        return logits_BV

    def work(self, trajectory: Trajectory, rows: Sequence[int], *, packable: bool = True) -> UpdateWork:
        return token_work(trajectory, rows, self.geometry, packs=False)

    def micro_batches(
        self,
        trajectory: Trajectory,
        rows: Sequence[int],
        tokens: int,
        *,
        columns: Sequence[int] | None = None,
        packed: bool = False,
    ) -> list[MicroBatchGroup]:
        return token_micro_batches(self.work(trajectory, rows), tokens)

    def distribution(
        self, trajectory: Trajectory, rows: Sequence[int], columns: slice | None = None, *, packed: bool = False
    ) -> TokenDistribution:
        assert not packed
        self.forwards.append(list(rows))
        self.left_over.append(self.alive())
        self.modes.add(self.model.training)
        prompts, actions = trajectory.conditions.rows(), trajectory.actions.rows()
        hidden, tokens = [], []
        for row in rows:
            hidden_1D = torch.zeros(1, self.width)
            for token in prompts[trajectory.condition_of_row[row]]:
                hidden_1D = self.model.step(hidden_1D, token[None])
            for token in actions[row]:
                hidden.append(hidden_1D)
                tokens.append(token)
                hidden_1D = self.model.step(hidden_1D, token[None])
        head = LinearHead(self.model.head.weight, self.model.head.bias)
        hidden_MD = torch.cat(hidden)
        self.handed.append(weakref.ref(hidden_MD))
        return TokenDistribution(hidden_MD, torch.stack(tokens), trajectory.action_lengths(rows), head)

    @contextmanager
    def reference(self) -> Iterator[FakeAdapter]:
        yield self

    @contextmanager
    def recompute(self, enabled: bool) -> Iterator[None]:
        yield

    def _hand(self, hidden_BD: Tensor) -> tuple[Tensor, FakeState]:
        logits_BV, state = self.model.head(hidden_BD), FakeState(hidden_BD, self)
        self.handed += [weakref.ref(logits_BV), weakref.ref(state), weakref.ref(hidden_BD)]
        return logits_BV, state
