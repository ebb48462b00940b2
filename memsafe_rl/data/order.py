"""Where a run stands and which rows come next: plain integers and pure functions, nothing an exception can kill."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

_PROMPT_STREAM = 1
_ROW_STREAM = 2
_MERGE_STREAM = 3
_MULTIPLIER = 6364136223846793005
"""Knuth's multiplier for 64-bit linear congruential generators (MMIX): keeps nearby keys apart."""


@dataclass(frozen=True)
class Cursor:
    """The next optimizer step of a run."""

    rollout: int = 0  # index of the rollout it learns from
    epoch: int = 0  # pass over that rollout's rows
    step: int = 0  # optimizer step within the pass
    position: int = 0  # prompts consumed before that rollout

    @property
    def starts_rollout(self) -> bool:
        """Whether this is the first optimizer step after its rollout: the weights have not moved since."""
        return self.epoch == 0 and self.step == 0

    def advance(self, *, steps: int, epochs: int, consumed: int, stop: bool) -> Cursor:
        """Gives the step after this one."""
        if not stop and self.step + 1 < steps:
            return replace(self, step=self.step + 1)
        if not stop and self.epoch + 1 < epochs:
            return replace(self, epoch=self.epoch + 1, step=0)
        return Cursor(rollout=self.rollout + 1, position=self.position + consumed)


def permutation(size: int, *keys: int) -> list[int]:
    """Shuffles `range(size)` as a pure function of some integers."""
    mixed = 0
    for key in keys:
        mixed = (mixed * _MULTIPLIER + key + 1) % 2**63
    generator = torch.Generator()
    generator.manual_seed(mixed)
    return torch.randperm(size, generator=generator).tolist()


def prompt_order(size: int, seed: int, epoch: int, *, shuffle: bool) -> list[int]:
    """Gives the order of a dataset's prompts in one epoch."""
    return permutation(size, _PROMPT_STREAM, seed, epoch) if shuffle else list(range(size))


def merge_orders(objectives: int, seed: int, step: int) -> list[list[int]]:
    """Gives, for each objective, the order in which PCGrad holds its gradient against the others."""
    return [permutation(objectives, _MERGE_STREAM, seed, step, objective) for objective in range(objectives)]


def rows_of_step(cursor: Cursor, rows: int, step_rows: int, seed: int) -> list[int]:
    """Gives the rows of one optimizer step; rows are reshuffled in every pass over a rollout."""
    order = permutation(rows, _ROW_STREAM, seed, cursor.rollout, cursor.epoch)
    return sorted(order[cursor.step * step_rows : (cursor.step + 1) * step_rows])
