"""Slices by tokens never change a score; gradients come only where they are asked for."""

import itertools
import random

import pytest
import torch

from memsafe_rl.micro_batches import cut_by_tokens
from memsafe_rl.rollout.scoring import score_rows
from memsafe_rl.types import Ragged, RolloutPlan, SamplingSettings, SequenceKey, Trajectory
from tests.rollout.fake_adapter import FakeAdapter
from tests.rollout.plainly import generate, score_all


def trajectory_of(prompts: list[torch.Tensor], actions: list[torch.Tensor], group: int) -> Trajectory:
    lengths = [len(row) for row in actions]
    return Trajectory(
        conditions=Ragged.from_rows(prompts),
        condition_of_row=tuple(row // group for row in range(len(actions))),
        actions=Ragged.from_rows(actions),
        loss_mask=Ragged(torch.ones(sum(lengths)), tuple(lengths)),
        sampling_logprobs=None,
        advantages=torch.zeros(len(actions)),
        group_of_row=tuple(row // group for row in range(len(actions))),
        finished=(True,) * len(actions),
    )


def random_trajectory(count: int = 12, vocab: int = 23) -> Trajectory:
    generator = torch.Generator().manual_seed(3)

    def rows(number: int, longest: int) -> list[torch.Tensor]:
        lengths = torch.randint(1, longest + 1, (number,), generator=generator).tolist()
        return [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]

    return trajectory_of(rows(count // 3, 6), rows(count, 17), group=3)


def naive_logprobs(adapter: FakeAdapter, trajectory: Trajectory, row: int, temperature: float) -> torch.Tensor:
    hidden_1D, logprobs = torch.zeros(1, adapter.width), []
    for token in trajectory.conditions.rows()[trajectory.condition_of_row[row]]:
        hidden_1D = adapter.model.step(hidden_1D, token[None])
    for token in trajectory.actions.rows()[row]:
        logprobs.append((adapter.model.head(hidden_1D)[0] / temperature).log_softmax(0)[token])
        hidden_1D = adapter.model.step(hidden_1D, token[None])
    return torch.stack(logprobs)


# Slices


@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_cut_once_within_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(0, 60) for _ in range(rng.randint(1, 50))]
    budget = rng.choice([1, 40, 100, 500, 10_000])
    slices = cut_by_tokens(lengths, budget)
    assert sorted(row for rows in slices for row in rows) == list(range(len(lengths)))
    for rows in slices:
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= budget
    for rows, following in itertools.pairwise(slices):
        assert min(lengths[row] for row in rows) >= max(lengths[row] for row in following)
        assert (len(rows) + 1) * max(lengths[row] for row in rows) > budget
    assert slices == cut_by_tokens(lengths, budget)


def test_slices_by_hand() -> None:
    assert cut_by_tokens([3, 9, 3, 5, 4], 10) == [[1], [3, 4], [0, 2]]
    assert cut_by_tokens([3, 3, 3], 0) == [[0], [1], [2]]
    assert cut_by_tokens([0, 0], 10) == [[0, 1]]
    assert cut_by_tokens([], 10) == []


# Scores


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("score_tokens", [1, 40, 10_000])
def test_scores_do_not_depend_on_slices(temperature: float, score_tokens: int) -> None:
    adapter, trajectory, rows = FakeAdapter(), random_trajectory(), [7, 0, 3, 11, 2, 7]
    adapter.model.train()
    scores = score_all(adapter, trajectory, rows, temperature=temperature, score_tokens=score_tokens, tile=4)
    assert adapter.modes == {False}
    assert adapter.model.training
    adapter.model.eval()
    for row, logprobs in zip(rows, scores, strict=True):
        # float32 against itself in another order of summation.
        torch.testing.assert_close(
            logprobs, naive_logprobs(adapter, trajectory, row, temperature).detach(), rtol=0, atol=5e-6
        )
        assert not logprobs.requires_grad
        assert not logprobs.is_inference()


def test_slices_keep_to_the_budget() -> None:
    adapter, trajectory = FakeAdapter(), random_trajectory()
    score_all(adapter, trajectory, range(12), temperature=1.0, score_tokens=40, tile=8)
    totals = [
        prompt + action
        for prompt, action in zip(
            trajectory.condition_lengths(range(12)), trajectory.action_lengths(range(12)), strict=True
        )
    ]
    assert len(adapter.forwards) > 2
    assert all(len(rows) == 1 or len(rows) * max(totals[row] for row in rows) <= 40 for rows in adapter.forwards)


def test_one_slice_lives_at_a_time() -> None:
    adapter = FakeAdapter()
    score_all(adapter, random_trajectory(), range(12), temperature=1.0, score_tokens=40, tile=8)
    assert adapter.left_over == [0] * len(adapter.forwards)
    assert adapter.alive() == 0


def test_no_rows_are_no_scores() -> None:
    adapter = FakeAdapter()
    assert score_all(adapter, random_trajectory(), [], temperature=1.0, score_tokens=40, tile=8) == []
    assert adapter.forwards == []


def test_score_rows_pads_and_carries_a_graph() -> None:
    adapter, trajectory, rows = FakeAdapter(), random_trajectory(), [4, 1, 8]
    adapter.model.eval()
    scores = score_rows(adapter, trajectory, rows, temperature=0.9, tile=5, with_entropy=True)
    lengths = trajectory.action_lengths(rows)
    assert scores.entropies_BT is not None
    assert scores.logprobs_BT.shape == scores.entropies_BT.shape == (3, max(lengths))
    naive = [naive_logprobs(adapter, trajectory, row, 0.9) for row in rows]
    for position, (length, expected) in enumerate(zip(lengths, naive, strict=True)):
        torch.testing.assert_close(scores.logprobs_BT[position, :length], expected, rtol=0, atol=5e-6)
        assert bool((scores.logprobs_BT[position, length:] == 0).all())
        assert bool((scores.entropies_BT[position, length:] == 0).all())
        assert bool((scores.entropies_BT[position, :length] > 0).all())
    parameters = list(adapter.model.parameters())
    ours = torch.autograd.grad(scores.logprobs_BT.sum(), parameters)
    theirs = torch.autograd.grad(torch.cat(naive).sum(), parameters)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-5)


def test_entropies_are_left_out_unless_asked_for() -> None:
    adapter = FakeAdapter()
    assert score_rows(adapter, random_trajectory(), [0], temperature=1.0, tile=4).entropies_BT is None


def test_scores_agree_with_what_the_rollout_noted() -> None:
    adapter = FakeAdapter()
    prompts = [torch.tensor([4, 5, 6]), torch.tensor([9])]
    keys = [[SequenceKey(0, 0, prompt, sample) for sample in range(3)] for prompt in range(2)]
    settings = SamplingSettings(max_new_tokens=12, eos_token_ids=(1,), temperature=0.8, top_k=7)
    rows = generate(adapter, prompts, keys, settings, RolloutPlan(rows_in_flight=4))
    trajectory = trajectory_of(prompts, [row.ids for row in rows], group=3)
    scores = score_all(adapter, trajectory, range(6), temperature=0.8, score_tokens=50, tile=8)
    for row, logprobs in zip(rows, scores, strict=True):
        torch.testing.assert_close(row.model_logprobs, logprobs, rtol=0, atol=5e-6)
