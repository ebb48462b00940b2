"""TRL 1.16's own loss, on a real TRL trainer, against ours: value, gradient of every parameter, and metrics."""

import functools
import random

import pytest
import torch
import trl

from memsafe_rl.ops.entropy import entropy_threshold, high_entropy_mask
from memsafe_rl.ops.logprobs import pad_rows
from memsafe_rl.ops.losses import LOSSES, policy_loss
from memsafe_rl.types import Denominators, LossSettings
from tests.ops.naive_losses import naive_loss
from tests.ops.oracle.trl_trainer import (
    LENGTHS,
    MAX_LENGTH,
    TEMPERATURE,
    counts_of,
    distance,
    distribution,
    gradient_of,
    our_inputs,
    step_batch,
    trl_trainer,
)
from tests.tiny import tiny_model

_TOLD = trl.GRPOConfig.__dataclass_fields__["loss_type"].metadata["help"]
TRLS = [name for name in LOSSES if f"'{name}'" in _TOLD]
"""Losses of TRL's GRPO; those of its RLOO and GMPO are compared in files of their own, and it lacks the others."""

CASES = {
    "plain": {},
    "beta": {"beta": 0.04},
    "beta, uncorrected": {"beta": 0.04, "use_bias_correction_kl": False},
    "delta": {"delta": 1.2, "epsilon": 0.1, "epsilon_high": 0.3},
    "off-policy mask": {"off_policy_mask_threshold": 0.05, "beta": 0.04},
    "top entropy": {"top_entropy_quantile": 0.5, "beta": 0.04},
    "entropy bonus": {"entropy_coef": 0.1},
    "top entropy and bonus": {"top_entropy_quantile": 0.5, "entropy_coef": 0.1},
}
LEVELS = ("token", "sequence")


@functools.cache
def shared_trainer():
    return trl_trainer()


@functools.cache
def shared_batch(with_sampler=False):
    batch = step_batch(shared_trainer().model)
    return {key: value for key, value in batch.items() if with_sampler or key != "sampling_per_token_logps"}


def trl_with(name, level, **options):
    """Sets the shared trainer up as its constructor would from these options (the next test holds this)."""
    trainer = shared_trainer()
    arguments = {**DEFAULTS, "loss_type": name, "importance_sampling_level": level, **options}
    for field, value in arguments.items():
        setattr(trainer.args, field, value)
    apply_arguments(trainer)
    trainer._metrics["train"].clear()
    return trainer


DEFAULTS = {
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "delta": None,
    "epsilon": 0.2,
    "epsilon_high": 0.2,
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
}


def apply_arguments(trainer):
    arguments = trainer.args
    trainer.loss_type, trainer.importance_sampling_level = arguments.loss_type, arguments.importance_sampling_level
    trainer.beta, trainer.epsilon_low, trainer.epsilon_high = arguments.beta, arguments.epsilon, arguments.epsilon_high
    trainer.off_policy_mask_threshold = arguments.off_policy_mask_threshold
    trainer.top_entropy_quantile, trainer.entropy_coef = arguments.top_entropy_quantile, arguments.entropy_coef
    trainer._entropy_bonus_enabled = arguments.entropy_coef != 0.0
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = False


def settings_of(name, level, options):
    kept = {key: value for key, value in options.items() if key in LossSettings.__dataclass_fields__}
    return LossSettings(
        name,
        level,
        epsilon_low=options.get("epsilon", 0.2),
        max_completion_length=MAX_LENGTH,
        **{"epsilon_high": 0.2, **kept},
    )


def ours(model, batch, settings, options, **extra):
    """Gives our result and the inputs it came from; the entropy mask is over the whole step, as in the trainer."""
    inputs = our_inputs(model, batch, settings, entropy_coef=options.get("entropy_coef", 0.0), **extra)
    active = None
    if "top_entropy_quantile" in options:
        flat = inputs.entropies_BT.flatten(), inputs.mask_BT.flatten()
        threshold = entropy_threshold(*flat, options["top_entropy_quantile"])
        active = high_entropy_mask(inputs.entropies_BT, inputs.mask_BT, threshold)
        inputs = inputs.__class__(**{**vars(inputs), "entropy_mask_BT": active})
    counts = counts_of(batch, active)
    return policy_loss(inputs, settings, counts), inputs, counts


def assert_agrees(trainer, batch, settings, options, **extra):
    expected = trainer._compute_loss(trainer.model, batch)
    expected_gradient = gradient_of(expected, trainer.model)
    result, inputs, counts = ours(trainer.model, batch, settings, options, **extra)
    with torch.no_grad():
        _, scale = naive_loss(inputs, settings, counts)
    # float32: sums of tens of terms, each right to 2**-23 of the largest.
    assert abs(result.loss - expected) <= 1e-5 * scale
    assert expected_gradient.norm() > 0
    assert distance(gradient_of(result.loss, trainer.model), expected_gradient) <= 1e-5
    return result, counts


def options_for(name, options):
    # CISPO's epsilon_high is the bound of the ratio itself; among ratios of 0.5 to 1.5, 1.1 clips some.
    return {**options, "epsilon_high": 1.1} if name == "cispo" else options


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", TRLS)
def test_loss_and_gradient_agree(name, level, options):
    options = options_for(name, options)
    trainer = trl_with(name, level, **options)
    assert_agrees(trainer, shared_batch(), settings_of(name, level, options), options)


@pytest.mark.parametrize(
    "options", [case for case in CASES.values() if case], ids=[name for name in CASES if CASES[name]]
)
@pytest.mark.parametrize("level", LEVELS)
def test_every_option_changes_trls_gradient(level, options):
    gradients = []
    for given in ({}, options):
        trainer = trl_with("dapo", level, **given)
        gradients.append(gradient_of(trainer._compute_loss(trainer.model, shared_batch()), trainer.model))
    assert distance(*gradients) > 1e-3


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", TRLS)
def test_without_old_logprobs_they_agree(name, level):
    batch = {key: value for key, value in shared_batch().items() if key != "old_per_token_logps"}
    options = options_for(name, {"beta": 0.04})
    trainer = trl_with(name, level, **options)
    assert_agrees(trainer, batch, settings_of(name, level, options), options)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("name", TRLS)
def test_importance_weights_agree(name, per_row):
    batch = dict(shared_batch(with_sampler=True))
    gaps = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]) * batch["completion_mask"]
    weights = (gaps.sum(1, keepdim=True) if per_row else gaps).exp().clamp(max=3.0)
    batch["importance_sampling_ratio"] = weights
    options = options_for(name, {"beta": 0.04, "off_policy_mask_threshold": 0.02})
    trainer = trl_with(name, "token", **options)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    settings = settings_of(name, "token", options)
    sampler = batch["sampling_per_token_logps"]
    assert_agrees(trainer, batch, settings, options, importance_weights_BT=weights, sampling_logprobs_BT=sampler)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", TRLS)
def test_metrics_agree(name, level):
    options = options_for(name, {"beta": 0.04, "epsilon": 0.1, "delta": 1.4})
    trainer = trl_with(name, level, **options)
    result, counts = assert_agrees(trainer, shared_batch(), settings_of(name, level, options), options)
    expected = {key: values[-1] for key, values in trainer._metrics["train"].items()}
    sums = {key: float(value) for key, value in result.sums.items()}
    actual = {"kl": sums["kl"] / counts.tokens, "entropy": sums["entropy"] / counts.tokens}
    if "clip_region" in sums:
        actual |= {
            f"clip_ratio/{part}_mean": sums[f"clip_{part}"] / sums["ratios"] for part in ("low", "high", "region")
        }
        actual["clip_ratio/low_min"] = float(result.lows["clip_low"])
        actual["clip_ratio/high_max"] = float(result.highs["clip_high"])
    if "cispo_clip" in sums:
        actual["cispo_clip_ratio"] = sums["cispo_clip"] / sums["ratios"]
    if "vespo_phi" in sums:
        actual["vespo/phi_seq_mean"] = sums["vespo_phi"] / sums["ratios"]
    assert actual == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("name", "level"), [("grpo", "sequence"), ("dapo", "token")])
def test_a_trainer_built_with_the_options_gives_the_same(name, level):
    # No beta: the constructor would load a reference by the model's path, which this model does not have.
    options = {"delta": 1.2, "epsilon_high": 0.3, "entropy_coef": 0.1, "top_entropy_quantile": 0.5}
    built = trl_trainer(loss_type=name, importance_sampling_level=level, **options)
    reference = trl_with(name, level, **options)
    expected = reference._compute_loss(reference.model, shared_batch())
    assert torch.equal(built._compute_loss(built.model, shared_batch()), expected)


def double_model():
    return tiny_model("qwen3", hidden=16, dtype=torch.float64)


def full_logits_inputs(model, batch, settings, **extra):
    """The naive form: all logits, log_softmax, gather."""
    inputs = our_inputs(model, batch, settings, **extra)
    scored = distribution(model, batch)
    all_logprobs = (model.lm_head(scored.hidden_MD) / TEMPERATURE).log_softmax(-1)
    taken = all_logprobs.gather(1, scored.tokens_M[:, None])[:, 0]
    entropies = -(all_logprobs.exp() * all_logprobs).sum(1)
    replaced = {"logprobs_BT": pad_rows(taken, LENGTHS), "entropies_BT": pad_rows(entropies, LENGTHS)}
    return inputs.__class__(**{**vars(inputs), **replaced})


@pytest.mark.slow_after(8)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", LOSSES)
def test_full_logits_in_float64_agree(name, level):
    model = double_model()
    batch, settings = step_batch(model, torch.float64), LossSettings(name, level, beta=0.04)
    counts = counts_of(batch)
    naive, scale = naive_loss(full_logits_inputs(model, batch, settings, entropy_coef=0.1), settings, counts)
    result = policy_loss(our_inputs(model, batch, settings, entropy_coef=0.1), settings, counts)
    assert abs(result.loss - naive) <= 1e-12 * scale
    assert distance(gradient_of(result.loss, model), gradient_of(naive, model)) <= 1e-12


def split_gradient(model, batch, settings, groups, counts):
    shares = [gradient_of(share, model) for share in split_shares(model, batch, settings, groups, counts)]
    return torch.stack(shares).sum(0)


def split_shares(model, batch, settings, groups, counts):
    for rows in groups:
        yield policy_loss(our_inputs(model, batch, settings, rows, entropy_coef=0.1), settings, counts(rows)).loss


def random_groups(seed):
    rows = random.Random(seed).sample(range(len(LENGTHS)), len(LENGTHS))
    return [rows[:1], rows[1:3], rows[3:]]


GROUPS = [[[row] for row in range(len(LENGTHS))], random_groups(0), random_groups(1)]


@pytest.mark.slow_after(10)
@pytest.mark.parametrize(
    ("dtype", "bound"), [pytest.param(torch.float32, 1e-6, marks=pytest.mark.slow), (torch.float64, 1e-12)]
)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", LOSSES)
def test_any_split_gives_the_same_gradient_of_the_model(name, level, dtype, bound):
    model = tiny_model("qwen3", hidden=16, dtype=dtype)
    batch, settings = step_batch(model, dtype), LossSettings(name, level, beta=0.04)
    counts = counts_of(batch)
    whole = split_gradient(model, batch, settings, [list(range(len(LENGTHS)))], lambda _: counts)
    for groups in GROUPS:
        assert distance(split_gradient(model, batch, settings, groups, lambda _: counts), whole) <= bound


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("name", LOSSES)
def test_a_denominator_of_the_micro_batch_is_seen(name):
    model = double_model()
    batch, settings = step_batch(model, torch.float64), LossSettings(name, beta=0.04)

    def planted(rows):
        mask = batch["completion_mask"][rows]
        pieces = len(groups)
        return Denominators(len(rows) * pieces, max(1, int(mask.sum())) * pieces, max(1, int(mask.sum())) * pieces)

    whole = split_gradient(model, batch, settings, [list(range(len(LENGTHS)))], lambda _: counts_of(batch))
    for groups in GROUPS[1:]:
        assert distance(split_gradient(model, batch, settings, groups, planted), whole) > 1e-2
