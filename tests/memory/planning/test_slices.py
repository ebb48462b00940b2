"""Rows cut behind one copy of their prompts, and who decides that they are."""

import random
from dataclasses import replace

import pytest

from memsafe_rl.memory.planning.estimator import update_parts
from memsafe_rl.memory.planning.policies import AdaptivePolicy, LadderPolicy
from memsafe_rl.micro_batches import (
    cut_work,
    measure_slices,
    packed_tokens,
    packing_saves,
    telling,
    widest,
)
from memsafe_rl.types import MemoryState, ModelGeometry, UpdatePlan, UpdateWork

GEOMETRY = ModelGeometry(4, 64, 128, 4, 2, 16, 1000, 2048, (None,) * 4, 10**6, 10**6, 4, 4)
ROOM = MemoryState(device="cpu", budget_bytes=2**40, live_bytes=0, peak_bytes=0)


def group_work(prompts: tuple[int, ...], completions: tuple[tuple[int, ...], ...]) -> UpdateWork:
    rows = [(prompt, length) for prompt, lengths in enumerate(completions) for length in lengths]
    return UpdateWork(
        row_tokens=tuple(prompts[prompt] + length for prompt, length in rows),
        action_tokens=tuple(length for _, length in rows),
        geometry=GEOMETRY,
        prompts=tuple(prompt for prompt, _ in rows),
    )


def test_slices_by_hand() -> None:
    work = group_work((10, 4), ((5, 3, 5), (2, 2)))
    assert packed_tokens(work, [0, 1, 2]) == 23
    assert packed_tokens(work, [0, 4]) == 21
    assert cut_work(work, 31, packed=True) == [[0, 2, 1, 3, 4]]
    assert cut_work(work, 30, packed=True) == [[0, 2, 1], [3, 4]]
    assert cut_work(work, 22, packed=True) == [[0, 2], [1, 3, 4]]  # the prompt of the first group comes twice
    assert cut_work(work, 1, packed=True) == [[0], [2], [1], [3], [4]]
    assert measure_slices(work, 22, packed=True) == (21, 10, 2, 41)
    assert cut_work(replace(work, prompts=()), 30, packed=True) == cut_work(work, 30, packed=False)


def test_slices_are_those_of_plain_first_fit() -> None:
    rng = random.Random(7)
    for lengths in (3, 40):  # many pieces of one size, and few
        work = group_work((5, 9) * 20, tuple(tuple(rng.randint(1, lengths) for _ in range(6)) for _ in range(40)))
        assert work.packed_tokens == packed_tokens(work, range(len(work.prompts)))
        for budget in (1, 12, 30, 60, 200):
            pieces = sorted(filled(work, budget), key=lambda piece: -piece[0])
            slices: list[list[int]] = []
            room: list[int] = []
            for tokens, rows in pieces:
                places = [place for place, free in enumerate(room) if free >= tokens]
                if places:
                    slices[places[0]] += rows
                    room[places[0]] -= tokens
                else:
                    slices.append(list(rows))
                    room.append(budget - tokens)
            assert cut_work(work, budget, packed=True) == slices


def filled(work: UpdateWork, budget: int) -> list[tuple[int, list[int]]]:
    """Tokens and rows of what a prompt's rows fill one after another, the longest first."""
    pieces: list[tuple[int, list[int]]] = []
    longest_first = sorted(range(len(work.prompts)), key=lambda row: -work.action_tokens[row])
    for prompt in dict.fromkeys(work.prompts[row] for row in longest_first):
        rows = [row for row, owner in enumerate(work.prompts) if owner == prompt]
        length, begun = work.row_tokens[rows[0]] - work.action_tokens[rows[0]], len(pieces)
        for row in sorted(rows, key=lambda row: -work.action_tokens[row]):
            if len(pieces) == begun or pieces[-1][0] + work.action_tokens[row] > budget:
                pieces.append((length, []))
            pieces[-1] = pieces[-1][0] + work.action_tokens[row], [*pieces[-1][1], row]
    return pieces


@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_cut_once_within_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    prompts = tuple(rng.randint(1, 60) for _ in range(6))
    work = group_work(prompts, tuple(tuple(rng.randint(1, 40) for _ in range(rng.randint(1, 9))) for _ in prompts))
    for budget in (1, 50, 120, 400, 10_000):
        slices = cut_work(work, budget, packed=True)
        assert sorted(row for rows in slices for row in rows) == list(range(len(work.prompts)))
        assert all(len(rows) == 1 or packed_tokens(work, rows) <= budget for rows in slices)
        measured = measure_slices(work, budget, packed=True)
        assert measured.tokens == max(packed_tokens(work, rows) for rows in slices)
        assert measured.total == sum(packed_tokens(work, rows) for rows in slices)


def test_packing_is_chosen_where_it_saves() -> None:
    work = group_work((512,), ((64,) * 16,))
    assert packing_saves(work)
    assert not packing_saves(replace(work, prompts=()))
    assert not packing_saves(group_work((512, 512), ((64,), (64,))))
    assert not packing_saves(group_work((3,), ((500, 500),)))
    for policy in (AdaptivePolicy(), LadderPolicy()):
        plan = policy.before_update(work, ROOM)
        assert plan.pack_prompts
        assert measure_slices(work, plan.micro_batch_tokens, packed=True).total == 512 + 16 * 64
        assert not policy.before_update(replace(work, prompts=()), ROOM).pack_prompts
        assert not replace(policy, pack_prompts=False).before_update(work, ROOM).pack_prompts


def test_a_ladder_packs_what_its_top_packs() -> None:
    little = group_work((3,), ((500, 500),))
    assert LadderPolicy(update=UpdatePlan(pack_prompts=True)).before_update(little, ROOM).pack_prompts
    assert not LadderPolicy().before_update(little, ROOM).pack_prompts


def test_a_group_stays_together_while_there_is_room() -> None:
    """Micro-batches that a wide network is fast with are too small for a group; its prompt would be run 16 times."""
    work = replace(group_work((512,), ((64,) * 16,)), geometry=replace(GEOMETRY, hidden_size=576))
    plan = AdaptivePolicy().before_update(work, ROOM)
    slices = measure_slices(work, plan.micro_batch_tokens, packed=True)
    assert slices.total == 1536  # once, before the others
    assert slices.number <= 5
    tight = replace(ROOM, budget_bytes=sum(update_parts(work, plan).values()))
    leaner = AdaptivePolicy().before_update(work, tight)
    assert sum(update_parts(work, leaner).values()) <= 0.8 * tight.budget_bytes


def test_packed_rows_are_predicted_to_hold_less() -> None:
    work = group_work((512,), ((64,) * 16,))
    together = UpdatePlan(micro_batch_tokens=10**6, logprob_tile=64)
    packed = sum(update_parts(work, replace(together, pack_prompts=True)).values())
    assert packed < 0.35 * sum(update_parts(work, together).values())


def test_the_widest_slices_by_hand() -> None:
    work = UpdateWork(row_tokens=(90, 50, 50, 50, 9), action_tokens=(10, 40, 40, 40, 4), geometry=GEOMETRY)
    slices = [[0], [1, 2], [3, 4]]
    assert widest(work, slices) == [1]  # 100 tokens padded, 80 completion tokens
    assert widest(work, [[0], [1], [3]]) == [0, 2]  # 90 tokens; 40 completion tokens, the last of two alike
    assert telling(work, [[0], [1], [3]]) == [0, 2]  # the first meets no gradients: of the others, the widest
    assert telling(work, [[0, 1], [2]]) == [0, 1]
    assert telling(work, [[1], [2]]) == [1]
    assert widest(work, []) == telling(work, []) == []
    encoded = replace(work, sources=(0, 1, 1, 2, 2))
    assert widest(encoded, slices) == [0, 1]  # 80 tokens of a prompt are attended to
    alike = UpdateWork((50,) * 4, (40,) * 4, GEOMETRY, sources=(0, 1, 1, 1))
    assert widest(alike, [[0, 1], [2, 3]]) == [0]  # two prompts are read, or one


def test_packed_slices_are_measured_as_packed() -> None:
    work = group_work((10, 20), ((5, 5), (5,)))
    assert widest(work, [[0, 1], [2]], packed=True) == [0, 1]  # 20 and 25 tokens; 10 and 5 completion tokens
