from pathlib import Path

import torch

from memsafe_rl.checkpoint.store import load_trajectory, save_trajectory
from memsafe_rl.types import Ragged, Trajectory


def small_trajectory() -> Trajectory:
    completions = Ragged.from_rows([torch.tensor([5, 6]), torch.tensor([7]), torch.tensor([8, 9, 1])])
    return Trajectory(
        conditions=Ragged.from_rows([torch.tensor([1, 2]), torch.tensor([3])]),
        condition_of_row=(0, 0, 1),
        actions=completions,
        loss_mask=Ragged(torch.ones(6, dtype=torch.uint8), completions.lengths),
        sampling_logprobs=Ragged(torch.linspace(-1, 0, 6), completions.lengths),
        advantages=torch.tensor([1.0, -1.0, 0.0]),
        group_of_row=(0, 0, 1),
        finished=(True, False, True),
        has_old=(False, False, False),
    )


def test_rows_are_joined_and_padded_to_their_own_longest() -> None:
    trajectory = small_trajectory()
    assert trajectory.token_rows([1, 0], 0, "cpu").tolist() == [[1, 2, 7, 0], [1, 2, 5, 6]]
    assert trajectory.token_rows([1], 0, "cpu").tolist() == [[1, 2, 7]]
    assert trajectory.actions.pad([2, 1], -1).tolist() == [[8, 9, 1], [7, -1, -1]]


def test_rows_are_views_and_take_copies() -> None:
    store = small_trajectory().sampling_logprobs
    assert store is not None
    taken = store.take([1, 0])
    store.rows()[1].fill_(-9.0)
    assert store.flat[2].item() == -9.0
    assert taken.rows()[0].item() != -9.0


def test_numbers_beside_some_rows_keep_what_was_known_of_the_others() -> None:
    actions = small_trajectory().actions
    first = actions.beside({2: torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)})
    both = actions.beside({1: torch.tensor([4.0], dtype=torch.float64)}, first)
    assert [row.tolist() for row in both.rows()] == [[0, 0], [4], [1, 2, 3]]
    assert [row.tolist() for row in first.rows()] == [[0, 0], [0], [1, 2, 3]]
    assert both.flat.dtype is torch.float64
    assert actions.beside({}).flat.tolist() == [0.0] * 6


def test_states_of_a_denoising_chain_are_rows_too() -> None:
    states = Ragged.from_rows([torch.zeros(3, 2, 4), torch.ones(2, 2, 4)])
    assert states.pad([1, 0], 5).shape == (2, 3, 2, 4)
    assert states.pad([1, 0], 5)[0, 2].unique().item() == 5


def test_bytes_are_counted_by_field() -> None:
    sizes = small_trajectory().nbytes()
    assert sizes["actions"] == 6 * 8
    assert sizes["loss_mask"] == 6
    assert "ref_logprobs" not in sizes


def test_a_stored_trajectory_comes_back_bit_for_bit(tmp_path: Path) -> None:
    before = small_trajectory()
    save_trajectory(before, tmp_path)
    after = load_trajectory(tmp_path)
    assert after is not None
    assert torch.equal(after.actions.flat, before.actions.flat)
    assert after.sampling_logprobs is not None
    assert before.sampling_logprobs is not None
    assert torch.equal(after.sampling_logprobs.flat, before.sampling_logprobs.flat)
    assert (after.group_of_row, after.finished, after.has_old) == (before.group_of_row, before.finished, before.has_old)
    assert load_trajectory(tmp_path / "nowhere") is None
