"""The counter noise, the two-stage draw against exact distributions, and its indifference to batching."""

import math

import pytest
import torch

from memsafe_rl.ops import sampling
from memsafe_rl.ops.sampling import (
    Draw,
    gumbel_noise,
    hash_fields,
    noise_slots,
    sample_with_noise,
    taken_logprobs,
    uniform_noise,
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def sample_tokens(logits_BV: torch.Tensor, keys_B4: torch.Tensor, positions_B: torch.Tensor, **how: float) -> Draw:
    """Draws one token a row, with the noise of its key and position."""
    noise_BS = gumbel_noise(hash_fields(keys_B4, positions_B), noise_slots(logits_BV.shape[1]))
    return sample_with_noise(logits_BV, noise_BS, **how)


def keys_of(rows: int, seed: int = 0, rollout: int = 0, prompt: int = 0, sample: int | None = None) -> torch.Tensor:
    """Keys that differ in the sample alone, unless one is given."""
    keys = torch.tensor([[seed, rollout, prompt, 0]]).repeat(rows, 1)
    keys[:, 3] = torch.arange(rows) if sample is None else sample
    return keys


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Pearson's statistic as a standard normal deviate (Wilson and Hilferty 1931)."""
    statistic = float(((observed.double() - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def draws_from(logits_V: torch.Tensor, count: int, seed: int, rows: int = 4096) -> torch.Tensor:
    batches = [
        sample_tokens(logits_V.expand(rows, -1), keys_of(rows, seed), torch.full((rows,), position)).tokens_B
        for position in range(count // rows)
    ]
    return torch.cat(batches)


# Noise


def test_hash_agrees_with_a_plain_integer_form() -> None:
    mask = (1 << 64) - 1

    def mix(word: int) -> int:
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
        return word ^ (word >> 31)

    key, position = [-3, 7, 2**62, 11], 12345
    word = 0
    for field in (*key, position):
        word = mix(((word ^ (field & mask)) + 0x9E3779B97F4A7C15) & mask)
    words_B = hash_fields(torch.tensor([key]), torch.tensor([position]))
    assert words_B.item() & mask == word
    slots = [mix((word + step * 0x9E3779B97F4A7C15) & mask) >> 12 for step in (1, 2, 3)]
    assert uniform_noise(words_B, 3)[0].tolist() == [(bits + 0.5) / 2**52 for bits in slots]


def test_splitmix_reference_stream() -> None:
    # The published generator's first outputs from state 1234567.
    words = sampling._mix(torch.tensor([1234567]) + torch.arange(1, 4) * sampling._GAMMA)
    assert [word & ((1 << 64) - 1) for word in words.tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_uniforms_never_reach_zero_or_one() -> None:
    extremes = torch.tensor([0.0, float(2**52 - 1)], dtype=torch.float64)
    low, high = ((extremes + 0.5) * 2.0**-52).tolist()
    assert low > 0.0
    assert high < 1.0
    noise = gumbel_noise(hash_fields(keys_of(64), torch.zeros(64, dtype=torch.int64)), 500)
    assert noise.dtype == torch.float64
    assert bool(noise.isfinite().all())


@pytest.mark.parametrize("varied", ["seed", "rollout", "prompt", "sample", "position", "slot"])
def test_uniforms_are_even_and_uncorrelated_along_every_axis(varied: str) -> None:
    count = 1 << 17
    keys, positions, slots = torch.tensor([[5, 3, 2, 1]]).repeat(count, 1), torch.full((count,), 9), 1
    if varied == "position":
        positions = torch.arange(count)
    elif varied == "slot":
        keys, positions, slots = keys[:1], positions[:1], count
    else:
        keys[:, ["seed", "rollout", "prompt", "sample"].index(varied)] = torch.arange(count)
    uniforms = uniform_noise(hash_fields(keys, positions), slots).flatten()
    assert abs(chi_square(torch.histc(uniforms, 256, 0, 1), torch.full((256,), count / 256))) < 4.5
    low_bits = ((uniforms * 2**52).long() & 255).bincount(minlength=256)
    assert abs(chi_square(low_bits, torch.full((256,), count / 256))) < 4.5
    centred = (uniforms - 0.5) * math.sqrt(12)
    for lag in (1, 2, 3, 7, 64, 1024):
        # A correlation of independent draws has deviation 1 / sqrt(count).
        assert abs(float((centred[lag:] * centred[:-lag]).mean())) * math.sqrt(count) < 4.5
    pairs = (uniforms[0::2] * 32).long() * 32 + (uniforms[1::2] * 32).long()
    assert abs(chi_square(pairs.bincount(minlength=1024), torch.full((1024,), count / 2048))) < 4.5


def test_fields_do_not_stand_in_for_one_another() -> None:
    grid = torch.cartesian_prod(*[torch.arange(-1, 7)] * 5)
    words = hash_fields(grid[:, :4], grid[:, 4])
    assert len(words.unique()) == len(grid)


# Distribution


@pytest.mark.parametrize("vocab", [1, 2, 3, 5, 17, 64, 97])
def test_draws_follow_the_distribution(vocab: int) -> None:
    logits_V = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 1.5
    count = 1 << 17
    observed = draws_from(logits_V, count, seed=vocab).bincount(minlength=vocab)
    assert len(observed) == vocab
    if vocab > 1:
        assert abs(chi_square(observed, logits_V.double().softmax(0) * count)) < 4.5


@pytest.mark.slow
def test_draws_follow_the_distribution_over_a_large_vocabulary() -> None:
    vocab, count = 32_003, 1 << 14
    logits_V = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 2
    observed = draws_from(logits_V, count, seed=3, rows=512).bincount(minlength=vocab)
    probs = logits_V.double().softmax(0)
    for bins in (torch.arange(vocab) * 61 // vocab, torch.arange(vocab) % 47):
        expected = torch.zeros(int(bins.max()) + 1, dtype=torch.float64).index_add(0, bins, probs) * count
        grouped = torch.zeros_like(expected).index_add(0, bins, observed.double())
        assert abs(chi_square(grouped, expected)) < 4.5


def test_temperature_divides_the_logits() -> None:
    logits_V = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5])
    count = 1 << 16
    tokens = [
        sample_tokens(logits_V.expand(4096, -1), keys_of(4096), torch.full((4096,), p), temperature=0.7).tokens_B
        for p in range(count // 4096)
    ]
    observed = torch.cat(tokens).bincount(minlength=5)
    assert abs(chi_square(observed, (logits_V.double() / 0.7).softmax(0) * count)) < 4.5
    assert abs(chi_square(observed, logits_V.double().softmax(0) * count)) > 20


@pytest.mark.parametrize("axis", [0, 1, 2, 3, "position"])
def test_draws_are_independent_along_every_axis(axis: int | str) -> None:
    count = 1 << 16
    keys, positions = torch.tensor([[5, 3, 2, 1]]).repeat(count, 1), torch.full((count,), 9)
    if axis == "position":
        positions = torch.arange(count)
    else:
        keys[:, axis] = torch.arange(count)
    logits_BV = torch.tensor([0.3, -0.2, 0.9, 0.0, 0.5]).expand(count, -1)
    tokens = sample_tokens(logits_BV, keys, positions).tokens_B
    probs = logits_BV[0].double().softmax(0)
    for lag in (1, 2, 8):
        first, second = tokens[:-lag:2], tokens[lag::2]
        pairs = (first[: len(second)] * 5 + second[: len(first)]).bincount(minlength=25)
        assert abs(chi_square(pairs, (probs[:, None] * probs).flatten() * int(pairs.sum()))) < 4.5


@pytest.mark.parametrize("vocab", [2, 97, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprob_is_the_drawn_tokens_own(vocab: int, temperature: float) -> None:
    logits_BV = torch.randn(33, vocab, generator=torch.Generator().manual_seed(0)) * 4
    draw = sample_tokens(logits_BV, keys_of(33), torch.arange(33), temperature=temperature)
    naive = (logits_BV.double() / temperature).log_softmax(1).gather(1, draw.tokens_B[:, None])[:, 0]
    # fp32 block sums of up to 32 terms near 20 nats: a few units in the last place.
    torch.testing.assert_close(draw.logprobs_B, naive, rtol=0, atol=5e-6)
    alone = taken_logprobs(logits_BV, draw.tokens_B, temperature=temperature)
    torch.testing.assert_close(alone, draw.logprobs_B, rtol=0, atol=0)


def test_double_logits_stay_double() -> None:
    logits_BV = torch.randn(8, 50, dtype=torch.float64)
    draw = sample_tokens(logits_BV, keys_of(8), torch.arange(8))
    naive = logits_BV.log_softmax(1).gather(1, draw.tokens_B[:, None])[:, 0]
    torch.testing.assert_close(draw.logprobs_B, naive, rtol=0, atol=1e-13)


def test_half_precision_logits_are_summed_in_single() -> None:
    logits_BV = (torch.randn(16, 1000) * 3).bfloat16()
    half = sample_tokens(logits_BV, keys_of(16), torch.arange(16), temperature=0.9)
    single = sample_tokens(logits_BV.float(), keys_of(16), torch.arange(16), temperature=0.9)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(half, single, strict=True))


# Filtered and broken rows


def test_filtered_tokens_are_never_drawn() -> None:
    logits_V = torch.full((97,), -math.inf)
    kept = torch.tensor([3, 4, 50, 96])
    logits_V[kept] = torch.tensor([0.0, -8.0, 1.0, -9.0])
    tokens = draws_from(logits_V, 1 << 15, seed=8)
    assert set(tokens.unique().tolist()) <= set(kept.tolist())
    assert {3, 50} <= set(tokens.unique().tolist())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_shows_in_its_logprob_alone(bad: float) -> None:
    logits_BV = torch.randn(4, 30)
    logits_BV[1, 7] = bad
    logits_BV[2] = -math.inf
    for draw in (
        sample_tokens(logits_BV, keys_of(4), torch.zeros(4, dtype=torch.int64)),
        sampling.greedy_tokens(logits_BV),
    ):
        assert draw.logprobs_B.isfinite().tolist() == [True, False, False, True]
        assert bool(((draw.tokens_B >= 0) & (draw.tokens_B < 30)).all())


# Batching


@pytest.mark.parametrize("vocab", [17, 4096])
def test_any_batch_draws_the_same(vocab: int) -> None:
    logits_BV, keys = torch.randn(40, vocab), keys_of(40, seed=4)
    positions = torch.arange(40) % 7
    whole = sample_tokens(logits_BV, keys, positions)
    order = torch.randperm(40)
    for size in (1, 7, 40):
        parts = [sample_tokens(logits_BV[rows], keys[rows], positions[rows]) for rows in order.split(size)]
        assert torch.equal(torch.cat([part.tokens_B for part in parts]), whole.tokens_B[order])


def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_BV = torch.randn(9, 1000)
    whole = sample_tokens(logits_BV, keys_of(9), torch.zeros(9, dtype=torch.int64))
    monkeypatch.setattr(sampling, "_TILE_ELEMENTS", 2000)
    tiled = sample_tokens(logits_BV, keys_of(9), torch.zeros(9, dtype=torch.int64))
    assert torch.equal(whole.tokens_B, tiled.tokens_B)
    torch.testing.assert_close(whole.logprobs_B, tiled.logprobs_B, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_rounding_flips_only_marked_ties() -> None:
    rows, vocab = 2048, 512
    flips = unmarked = marked = 0
    for position in range(16):
        logits_BV = torch.randn(rows, vocab) * 2
        moved_BV = logits_BV + (torch.rand(rows, vocab) - 0.5) * 2e-5
        positions = torch.full((rows,), position)
        before = sample_tokens(logits_BV, keys_of(rows), positions)
        after = sample_tokens(moved_BV, keys_of(rows), positions)
        changed = before.tokens_B != after.tokens_B
        flips += int(changed.sum())
        unmarked += int((changed & ~before.tied_B & ~after.tied_B).sum())
        marked += int(before.tied_B.sum())
    assert unmarked == 0
    assert flips <= marked < rows * 16 * 1e-3


def test_equal_logits_are_a_tie_for_the_greedy_choice() -> None:
    logits_BV = torch.zeros(4, 30)
    logits_BV[0, 5] = 1.0
    logits_BV[1, [4, 29]] = 1.0  # in different blocks
    logits_BV[2, [6, 7]] = 1.0  # in one block
    logits_BV[3, 29], logits_BV[3, 3] = 1.0, 0.99999
    draw = sampling.greedy_tokens(logits_BV)
    assert draw.tokens_B.tolist() == [5, 4, 6, 29]
    assert draw.tied_B.tolist() == [False, True, True, True]


def test_greedy_is_argmax_with_the_models_logprob() -> None:
    logits_BV = torch.randn(64, 997)
    draw = sampling.greedy_tokens(logits_BV)
    assert torch.equal(draw.tokens_B, logits_BV.argmax(1))
    naive = logits_BV.double().log_softmax(1).amax(1)
    torch.testing.assert_close(draw.logprobs_B, naive, rtol=0, atol=5e-6)
