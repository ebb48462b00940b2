"""Losses against loops over tokens, against hand computation, and against any split of the same step."""

import itertools
import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memsafe_rl.errors import ConfigError
from memsafe_rl.ops.entropy import (
    EntropyControl,
    adaptive_entropy_coef,
    applied_entropy_coef,
    entropy_threshold,
    high_entropy_mask,
)
from memsafe_rl.ops.losses import LOSSES, Loss, policy_loss
from memsafe_rl.types import Denominators, LossInputs, LossSettings
from tests.ops.naive_losses import counts_of, naive_loss, rows_of

LENGTHS = (7, 3, 1, 5, 4, 6)
LEVELS = ("token", "sequence", "sequence_sum")

OPTIONS = {
    "plain": {},
    "beta": {"beta": 0.04},
    "beta, uncorrected": {"beta": 0.04, "use_bias_correction_kl": False},
    "delta": {"delta": 1.25, "epsilon_high": 0.3},
    "off-policy mask": {"off_policy_mask_threshold": 0.01, "beta": 0.04},
}


def step_inputs(dtype=torch.float64, lengths=LENGTHS, **extra) -> LossInputs:
    """A step whose ratios spread over about 0.5 to 1.5, one row fully masked, one row masked in its middle."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    shape = (len(lengths), max(lengths))
    mask = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).to(dtype)
    present = mask.clone()
    mask[0, 3] = 0
    mask[4] = 0
    logprobs = (-0.71 - 3 * draw(*shape)) * present  # old ones up to -0.01: a probability is under 1
    advantages = torch.tensor([1.3, -0.7, 0.4, -1.1, 0.9, -0.2])
    values = {
        "logprobs_BT": logprobs.to(dtype, copy=True).requires_grad_(),
        "advantages_B": advantages[: len(lengths)].to(dtype),
        "mask_BT": mask,
        "old_logprobs_BT": ((logprobs - (draw(*shape) * 1.1 - 0.7)) * present).to(dtype),
        "ref_logprobs_BT": ((logprobs + draw(*shape) - 0.5) * present).to(dtype),
        "entropies_BT": (3 * draw(*shape) * present).to(dtype).requires_grad_(),
        "sampling_logprobs_BT": ((logprobs + draw(*shape) * 0.6 - 0.3) * present).to(dtype),
        "marks_BT": (draw(*shape) < 0.4).to(dtype),
    }
    return LossInputs(**{**values, **extra})


def leaves_of(inputs):
    return [inputs.logprobs_BT, inputs.entropies_BT]


def gradient(loss, inputs):
    grads = torch.autograd.grad(loss, leaves_of(inputs), allow_unused=True)
    return torch.cat([torch.zeros(inputs.mask_BT.numel()) if grad is None else grad.flatten() for grad in grads])


def split_gradient(inputs, settings, groups, counts_of_micro_batch):
    total = 0.0
    for rows in groups:
        part = rows_of(inputs, rows)
        total = total + policy_loss(part, settings, counts_of_micro_batch(part)).loss
    return gradient(total, inputs)


def distance(actual, expected):
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-300))  # all tokens may be clipped


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_equal_loops_over_tokens(name, level, options):
    inputs, settings = step_inputs(), LossSettings(name, level, **options)
    result = policy_loss(inputs, settings, counts_of(inputs))
    expected, scale = naive_loss(inputs, settings, counts_of(inputs))
    assert abs(result.loss - expected) <= 1e-12 * scale
    assert distance(gradient(result.loss, inputs), gradient(expected, inputs)) <= 1e-12


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", LOSSES)
def test_masks_weights_and_bonus_equal_loops_over_tokens(name, level):
    inputs = step_inputs()
    threshold = entropy_threshold(inputs.entropies_BT.flatten(), inputs.mask_BT.flatten(), 0.5)
    inputs = replace(
        inputs,
        entropy_mask_BT=high_entropy_mask(inputs.entropies_BT, inputs.mask_BT, threshold),
        entropy_coef=0.3,
        importance_weights_BT=(inputs.old_logprobs_BT - inputs.sampling_logprobs_BT).exp().clamp(max=1.2),
    )
    settings = LossSettings(name, level, beta=0.04)
    per_row = torch.tensor([[0.5], [2], [1], [0.7], [1], [3]], dtype=torch.float64)
    for variant in (inputs, replace(inputs, importance_weights_BT=per_row)):
        result = policy_loss(variant, settings, counts_of(variant))
        expected, scale = naive_loss(variant, settings, counts_of(variant))
        assert abs(result.loss - expected) <= 1e-12 * scale
        assert distance(gradient(result.loss, variant), gradient(expected, variant)) <= 1e-12


@pytest.mark.parametrize("name", LOSSES)
def test_advantages_per_token_equal_loops_over_tokens(name):
    inputs = step_inputs()
    per_token = inputs.advantages_B[:, None] * torch.linspace(-1, 1, max(LENGTHS), dtype=torch.float64)
    inputs, settings = replace(inputs, advantages_B=per_token), LossSettings(name, "sequence", beta=0.04)
    result = policy_loss(inputs, settings, counts_of(inputs))
    expected, _ = naive_loss(inputs, settings, counts_of(inputs))
    assert distance(gradient(result.loss, inputs), gradient(expected, inputs)) <= 1e-12


def splits():
    generator = random.Random(0)
    rows = list(range(len(LENGTHS)))
    yield [[row] for row in rows]
    for _ in range(3):
        shuffled = generator.sample(rows, len(rows))
        cuts = sorted(generator.sample(range(1, len(rows)), 2))
        yield [shuffled[a:b] for a, b in itertools.pairwise([0, *cuts, len(rows)])]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", LOSSES)
def test_any_split_of_a_step_gives_the_same_gradient(name, level, dtype, bound):
    inputs = step_inputs(dtype, entropy_coef=0.2)
    settings, counts = LossSettings(name, level, beta=0.04, delta=1.3), counts_of(inputs)
    whole = gradient(policy_loss(inputs, settings, counts).loss, inputs)
    for groups in splits():
        assert distance(split_gradient(inputs, settings, groups, lambda _: counts), whole) <= bound


@pytest.mark.parametrize("name", LOSSES)
def test_the_split_check_detects_a_denominator_of_the_micro_batch(name):
    inputs, settings = step_inputs(), LossSettings(name)
    whole = gradient(policy_loss(inputs, settings, counts_of(inputs)).loss, inputs)
    planted = [split_gradient(inputs, settings, groups, partial(own_counts, len(groups))) for groups in splits()]
    assert max(distance(gradient, whole) for gradient in planted) > 1e-2


def own_counts(micro_batches, part):
    """What dividing each micro-batch by its own counts and by the number of micro-batches amounts to."""
    counts = counts_of(part)
    return Denominators(
        counts.rows * micro_batches, counts.tokens * micro_batches, counts.entropy_tokens * micro_batches
    )


def test_sums_add_up_over_micro_batches():
    inputs, settings = step_inputs(entropy_coef=0.2), LossSettings(beta=0.04)
    counts = counts_of(inputs)
    whole = policy_loss(inputs, settings, counts)
    parts = [policy_loss(rows_of(inputs, rows), settings, counts) for rows in ([0, 3], [1], [2, 4, 5])]
    for name, value in whole.sums.items():
        torch.testing.assert_close(sum(part.sums[name] for part in parts), value, rtol=1e-12, atol=1e-12)
        assert not value.requires_grad
    assert whole.lows["clip_low"] == min(part.lows["clip_low"] for part in parts)
    assert whole.highs["clip_high"] == max(part.highs["clip_high"] for part in parts)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"cispo", "vespo"}))
def test_without_old_logprobs_the_ratio_is_exactly_one(name, level):
    inputs = replace(step_inputs(), old_logprobs_BT=None)
    current = replace(inputs, old_logprobs_BT=inputs.logprobs_BT.detach())
    settings, counts = LossSettings(name, level), counts_of(inputs)
    result, expected = policy_loss(inputs, settings, counts), policy_loss(current, settings, counts)
    assert torch.equal(gradient(result.loss, inputs), gradient(expected.loss, current))
    assert result.sums["approx_kl"] == result.sums["log_ratio"] == 0
    if "clip_region" in result.sums:
        assert result.sums["clip_region"] == 0


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if not loss.traits.every_row])
def test_rows_without_advantage_that_are_skipped_would_have_no_gradient(name):
    inputs = step_inputs()
    inputs = replace(inputs, advantages_B=torch.zeros_like(inputs.advantages_B))
    for level in LOSSES[name].traits.levels:
        assert not gradient(policy_loss(inputs, LossSettings(name, level), counts_of(inputs)).loss, inputs).any()


def test_measures_by_hand():
    ratios = torch.tensor([[0.5, 1.5, 1.0], [1.5, 0.5, 1.0]], dtype=torch.float64)
    inputs = LossInputs(
        logprobs_BT=ratios.log().requires_grad_(),
        old_logprobs_BT=torch.zeros_like(ratios),
        advantages_B=torch.tensor([-1.0, 2.0], dtype=torch.float64),
        mask_BT=torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64),
        ref_logprobs_BT=ratios.log() + math.log(2),
        entropies_BT=torch.full_like(ratios, 0.5),
        entropy_mask_BT=torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]], dtype=torch.float64),
    )
    settings = LossSettings("grpo", beta=1.0, use_bias_correction_kl=False)
    result = policy_loss(inputs, settings, counts_of(inputs))
    k3 = {1.5: 0.5 - math.log(1.5), 0.5: -0.5 - math.log(0.5)}
    both = math.log(0.5 * 1.5)
    expected = {
        "clip_low": 1,
        "clip_high": 1,
        "clip_region": 2,
        "ratios": 5,
        "entropy": 2.5,
        "active_entropy": 1.0,
        "kl": 5 * (2 - math.log(2) - 1),
        "log_ratio": 2 * both,
        "log_ratio_rows": both / 2 + both / 3,
        "approx_kl": 2 * (k3[1.5] + k3[0.5]),
        "approx_kl_rows": 2 * (0.75 - 1 - both),
        # Uncertain and counted: (-1, 0.5, clipped to 0.8) and (2, 1.0); rows of 2 and 3 tokens; KL everywhere.
        "policy_loss": (0.8 / 2 - 2 / 3) / 2 + (1 - math.log(2)),
    }
    assert {name: pytest.approx(float(value), abs=1e-12) for name, value in result.sums.items()} == expected
    assert result.lows == {"clip_low": 0.0}
    assert float(result.highs["clip_high"]) == pytest.approx(1 / 3)
    by_row = policy_loss(inputs, replace(settings, importance_sampling_level="sequence"), counts_of(inputs))
    assert by_row.sums["ratios"] == 2
    cispo = policy_loss(inputs, replace(settings, loss_type="cispo", epsilon_high=1.4), counts_of(inputs))
    assert (cispo.sums["cispo_clip"], cispo.sums["ratios"]) == (1, 5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", LOSSES)
def test_the_type_of_the_mask_does_not_matter(name, level, dtype):
    inputs, settings = (
        step_inputs(entropy_coef=0.1),
        LossSettings(name, level, beta=0.04, off_policy_mask_threshold=0.1),
    )
    counts = counts_of(inputs)
    expected = policy_loss(inputs, settings, counts)
    result = policy_loss(replace(inputs, mask_BT=inputs.mask_BT.to(dtype)), settings, counts)
    for actual, wanted in ((result.sums, expected.sums), (result.lows, expected.lows), (result.highs, expected.highs)):
        assert {key: float(value) for key, value in actual.items()} == pytest.approx(
            {key: float(value) for key, value in wanted.items()}, rel=1e-6
        )
    torch.testing.assert_close(result.loss, expected.loss, rtol=1e-12, atol=0)


def test_vespo_weight_is_one_on_policy_and_measured_per_row():
    inputs = replace(step_inputs(), old_logprobs_BT=None)
    result = policy_loss(inputs, LossSettings("vespo"), counts_of(inputs))
    assert result.sums["ratios"] == len(LENGTHS)
    assert float(result.sums["vespo_phi"]) == pytest.approx(len(LENGTHS))


def test_a_step_without_counted_tokens_has_loss_and_gradient_zero():
    inputs = step_inputs()
    inputs = replace(inputs, mask_BT=torch.zeros_like(inputs.mask_BT))
    for name, level in itertools.product(LOSSES, LEVELS):
        result = policy_loss(inputs, LossSettings(name, level, beta=0.04), counts_of(inputs))
        assert result.loss == 0
        assert not gradient(result.loss, inputs).any()


def test_a_sampler_that_gave_nan_counts_as_no_difference():
    inputs = step_inputs()
    sampler = inputs.sampling_logprobs_BT.clone()
    sampler[1, 1] = math.nan
    inputs = replace(inputs, sampling_logprobs_BT=sampler)
    settings = LossSettings("dapo", off_policy_mask_threshold=0.01)
    result = policy_loss(inputs, settings, counts_of(inputs))
    expected, _ = naive_loss(inputs, settings, counts_of(inputs))
    torch.testing.assert_close(result.loss, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kept", [0.0, 0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("count", [1, 2, 11, 100])
def test_entropy_threshold_is_torch_quantile_of_the_counted(kept, count):
    generator = torch.Generator().manual_seed(count)
    entropies, mask = torch.rand(2 * count, generator=generator), torch.zeros(2 * count)
    mask[torch.randperm(2 * count, generator=generator)[:count]] = 1
    expected = torch.quantile(entropies[mask.bool()], 1 - kept)
    actual = entropy_threshold(entropies, mask, kept)
    # Ranks of 100 numbers in float32 are off by at most 100 · 2**-24.
    assert float(actual) == pytest.approx(float(expected), abs=1e-5)
    marked = high_entropy_mask(entropies[None], mask[None], actual)
    assert torch.equal(marked[0].bool(), (entropies * mask >= expected - 1e-4) & mask.bool())


@pytest.mark.parametrize("kept", [0.3, 0.5, 0.7])
def test_equal_entropies_are_marked_together_however_they_were_rounded(kept):
    entropies = torch.tensor([1.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0, 4.0, 5.0])
    for seed in range(5):
        rounded = entropies + 1e-6 * torch.randn(9, generator=torch.Generator().manual_seed(seed))
        marked = high_entropy_mask(rounded[None], torch.ones(1, 9), entropy_threshold(rounded, torch.ones(9), kept))
        assert marked[0].tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1]


def test_entropy_threshold_of_nothing_marks_nothing():
    entropies, mask = torch.rand(5), torch.zeros(5)
    assert not high_entropy_mask(entropies[None], mask[None], entropy_threshold(entropies, mask, 0.5)).any()
    assert entropy_threshold(torch.rand(0), torch.rand(0), 0.5) == math.inf


@pytest.mark.parametrize("name", LOSSES)
def test_runs_on_fake_tensors(name):
    settings = LossSettings(name, beta=0.04, off_policy_mask_threshold=0.1)
    with FakeTensorMode():
        inputs = step_inputs(entropy_coef=0.1)
        threshold = entropy_threshold(inputs.entropies_BT.flatten(), inputs.mask_BT.flatten(), 0.5)
        marked = high_entropy_mask(inputs.entropies_BT, inputs.mask_BT, threshold)
        result = policy_loss(replace(inputs, entropy_mask_BT=marked), settings, Denominators(6, 20, 10))
        result.loss.backward()
    assert result.loss.shape == ()


def test_adaptive_entropy_coefficient_by_hand():
    steer = {"target": 0.2, "delta": 0.005, "minimum": 0.0, "maximum": 0.01}
    control = EntropyControl(0.001)
    assert applied_entropy_coef(control, 0.2) == 0.0
    coefs, applied = [], []
    for entropy in (0.5, 0.2, 0.1, 0.1, 0.3, 0.1):
        control = adaptive_entropy_coef(control, entropy, **steer)
        coefs.append(control.coef)
        applied.append(applied_entropy_coef(control, 0.2))
    assert coefs == pytest.approx([0.0, 0.005, 0.01, 0.01, 0.005, 0.01])
    assert applied == pytest.approx([0.0, 0.005, 0.01, 0.01, 0.0, 0.01])
    assert adaptive_entropy_coef(control, math.nan, **steer) == control  # a step that counts no token says nothing


@pytest.mark.parametrize(
    ("settings", "changes", "words"),
    [
        (LossSettings("ppo2"), {}, "'ppo2'.*Set it to one of .*bnpo, cispo"),
        (LossSettings(importance_sampling_level="row"), {}, "'row'.*sequence, sequence_sum, token"),
        (LossSettings(beta=0.1), {"ref_logprobs_BT": None}, "`beta` is 0.1"),
        (LossSettings(), {"entropies_BT": None, "entropy_coef": 0.1}, "`entropy_coef` is 0.1"),
    ],
)
def test_what_is_missing_or_unknown_is_named(settings, changes, words):
    inputs = replace(step_inputs(), **changes)
    with pytest.raises(ConfigError, match=words):
        policy_loss(inputs, settings, Denominators(1, 1, 1))


# A user's own loss


def surrogate(ratios):
    return -ratios.ratio * ratios.advantages


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            lambda ratios: surrogate(ratios).mean(),
            r"float64 of shape \(\)\. .* of shape \(6, 7\): one number",
        ),
        (lambda ratios: surrogate(ratios).sum(1), r"of shape \(6,\)"),
        (lambda ratios: surrogate(ratios).mean(0), r"of shape \(7,\)"),
        (lambda ratios: surrogate(ratios)[:1], r"of shape \(1, 7\)"),
        (lambda ratios: surrogate(ratios).mean(1, keepdim=True), r"of shape \(6, 1\)"),
        (lambda ratios: surrogate(ratios)[:, :-1], r"of shape \(6, 6\)"),
        (lambda ratios: surrogate(ratios).long(), r"torch.int64 of shape \(6, 7\)"),
        (lambda ratios: surrogate(ratios).detach().numpy(), "a ndarray"),
        (lambda ratios: surrogate(ratios).detach(), r"a tensor without gradient\. Compute it from its Ratios"),
        (lambda _: 1.0, "a float. Return"),
        (lambda _: 1, "a int. Return"),
        (lambda _: None, "a NoneType. Return"),
    ],
)
def test_a_loss_gives_a_number_with_gradient_for_each_action(function, words, monkeypatch):
    monkeypatch.setitem(LOSSES, "odd", Loss("odd", function))
    with pytest.raises(ConfigError, match=f"loss_type 'odd' gave .*{words}"):
        policy_loss(step_inputs(), LossSettings("odd"), Denominators(6, 20, 20))


def test_a_loss_may_give_a_number_for_each_row_where_a_row_has_one_ratio(monkeypatch):
    monkeypatch.setitem(LOSSES, "odd", Loss("odd", surrogate))
    inputs, denominators = step_inputs(), Denominators(6, 20, 20)
    assert policy_loss(inputs, LossSettings("odd", "sequence"), denominators).loss.requires_grad
    monkeypatch.setitem(LOSSES, "odd", Loss("odd", lambda ratios: surrogate(ratios).expand_as(ratios.logprobs_BT)))
    assert policy_loss(inputs, LossSettings("odd", "sequence"), denominators).loss.requires_grad
    with torch.no_grad():  # measuring needs no gradient
        policy_loss(inputs, LossSettings("odd"), denominators)


@pytest.mark.parametrize("measured", [None, {"a": torch.ones(())}])
def test_what_a_loss_measures_is_named_measures(measured, monkeypatch):
    monkeypatch.setitem(LOSSES, "odd", Loss("odd", surrogate, measure=lambda _: measured))
    with pytest.raises(ConfigError, match=r"measure of loss 'odd' gave (\{'a': .*\}|None)\. Return Measures"):
        policy_loss(step_inputs(), LossSettings("odd"), Denominators(6, 20, 20))
