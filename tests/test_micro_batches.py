"""Adapters cut rows themselves: each row, or pair of row and column, lies in exactly one pass of a bounded size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memsafe_rl.accounting import only_bytes_matter
from memsafe_rl.micro_batches import packed_tokens, token_micro_batches
from memsafe_rl.types import UpdateWork

WORK = UpdateWork((12, 9, 7, 7, 4), (4, 5, 3, 2, 1), None)  # type: ignore[arg-type]
OWNERS = (0, 1, 0, 2, 1)


@pytest.mark.parametrize("budget", [1, 12, 20, 1000])
@pytest.mark.parametrize("work", [WORK, replace(WORK, prompts=OWNERS), replace(WORK, sources=OWNERS)])
def test_every_row_of_tokens_is_run_once(work: UpdateWork, budget: int) -> None:
    groups = token_micro_batches(work, budget)
    batches = [batch for group in groups for batch in group.run()]
    assert sorted(place for batch in batches for place in batch.places) == list(range(5))
    for batch in batches:
        assert batch.columns is None
        assert batch.packed == bool(work.prompts)
        padded = len(batch.places) * max(work.row_tokens[place] for place in batch.places)
        assert batch.tokens == (packed_tokens(work, batch.places) if work.prompts else padded)
        assert batch.tokens <= budget or len(batch.places) == 1
    if work.sources:  # an encoder reads a prompt once
        owners = [{OWNERS[place] for place in group.places} for group in groups]
        assert sum(map(len, owners)) == len(set(OWNERS))


def test_a_dry_run_runs_what_tells_what_all_hold() -> None:
    with only_bytes_matter():
        plain = token_micro_batches(WORK, 1)[0]
        encoded = token_micro_batches(replace(WORK, sources=(0,) * 5), 12)[0]
        assert len(list(plain.run())) == len(plain.batches) == 5
        assert len(list(encoded.run())) < len(encoded.batches)
