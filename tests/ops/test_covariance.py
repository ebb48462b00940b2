"""Clip-Cov's and KL-Cov's marks against loops over the tokens of a step, and by hand."""

import math

import pytest
import torch

from memsafe_rl import GRPOConfig
from memsafe_rl.errors import ConfigError
from memsafe_rl.ops.losses import LOSSES, Loss
from memsafe_rl.ops.losses.core import StepTokens
from memsafe_rl.ops.losses.covariance import covariances, mark_greatest, mark_in_band
from memsafe_rl.types import LossSettings


def step(count: int = 400, seed: int = 0) -> StepTokens:
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(5, count, generator=generator, dtype=torch.float64)
    return StepTokens(-6 * draws[0], draws[1] - 0.5, 4 * draws[2] - 2, draws[3] < 0.8, draws[4])


def naive_covariances(tokens: StepTokens) -> list[float]:
    kept = [place for place, counts in enumerate(tokens.mask_M.tolist()) if counts]
    logprobs, advantages = tokens.logprobs_M.tolist(), tokens.advantages_M.tolist()
    mean_logprob = math.fsum(logprobs[place] for place in kept) / len(kept)
    mean_advantage = math.fsum(advantages[place] for place in kept) / len(kept)
    return [(advantages[place] - mean_advantage) * (logprobs[place] - mean_logprob) for place in range(len(logprobs))]


@pytest.mark.parametrize("fraction", [1e-4, 0.01, 0.1, 1.0])
def test_marks_equal_loops_over_the_tokens_of_a_step(fraction: float) -> None:
    tokens, settings = step(), LossSettings(cov_fraction=fraction, clip_cov_low=0.5, clip_cov_high=3.0)
    expected = naive_covariances(tokens)
    kept = [place for place, counts in enumerate(tokens.mask_M.tolist()) if counts]
    wanted = torch.tensor([expected[place] for place in kept], dtype=torch.float64)
    torch.testing.assert_close(covariances(tokens)[kept], wanted, rtol=1e-12, atol=1e-12)
    most = max(1, int(fraction * len(kept) + 1e-9))
    greatest = sorted(kept, key=lambda place: -expected[place])[:most]
    assert set(mark_greatest(tokens, settings).nonzero()[:, 0].tolist()) == {p for p in greatest if expected[p] > 0}
    band = []
    for place in kept:
        ratio, advantage = math.exp(tokens.log_ratio_M[place]), float(tokens.advantages_M[place])
        clipped = (ratio > 1.2 and advantage > 0) or (ratio < 0.8 and advantage < 0)
        if 0.5 < expected[place] < 3.0 and not clipped:
            band.append(place)
    drawn = sorted(band, key=lambda place: float(tokens.uniforms_M[place]))[:most]
    assert 0 < len(band) < len(kept)
    assert set(mark_in_band(tokens, settings).nonzero()[:, 0].tolist()) == set(drawn)


def test_marks_by_hand() -> None:
    logprobs, advantages = torch.tensor([-1.0, -3.0, -1.0, -3.0, 0.0]), torch.tensor([1.0, -1.0, -1.0, 1.0, 9.0])
    tokens = StepTokens(
        logprobs.double(), torch.zeros(5).double(), advantages.double(), torch.tensor([1, 1, 1, 1, 0]).bool(),
        torch.tensor([0.9, 0.1, 0.2, 0.3, 0.0]).double(),
    )  # fmt: skip
    assert covariances(tokens).tolist() == [1.0, 1.0, -1.0, -1.0, -math.inf]
    settings = LossSettings(cov_fraction=0.25, clip_cov_low=0.5)
    assert mark_greatest(tokens, settings).tolist() == [True, True, False, False, False]  # both, for they tie
    assert mark_in_band(tokens, settings).tolist() == [False, True, False, False, False]  # the smaller uniform
    assert not mark_in_band(tokens, LossSettings(clip_cov_low=1.0)).any()


@pytest.mark.parametrize("mark", [mark_greatest, mark_in_band])
def test_without_a_counted_token_or_a_spread_nothing_is_marked(mark: object) -> None:
    tokens = step(8)
    for flat in (
        tokens._replace(mask_M=torch.zeros(8, dtype=torch.bool)),
        tokens._replace(advantages_M=torch.zeros(8, dtype=torch.float64)),
        StepTokens(*(value[:0] for value in tokens)),
    ):
        assert not mark(flat, LossSettings(cov_fraction=1.0)).any()  # type: ignore[operator]


def test_a_mark_that_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="loss 'mine' has mark 3; give a function, or None"):
        Loss("mine", LOSSES["dapo"].function, mark=3)  # type: ignore[arg-type]


def test_a_band_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"clip_cov_low is 5\.0 and clip_cov_high 1\.0.*Set clip_cov_low below 1\.0"):
        GRPOConfig("run", loss_type="clip_cov", clip_cov_low=5.0, clip_cov_high=1.0)
