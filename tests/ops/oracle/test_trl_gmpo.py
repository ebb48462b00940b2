"""TRL 1.16's GMPO, on its own trainer, against ours: value, gradient of every parameter, and metrics."""

import functools
import tempfile
import warnings

import pytest
import torch
from datasets import Dataset

from memsafe_rl.ops.entropy import entropy_threshold, high_entropy_mask
from memsafe_rl.ops.losses import policy_loss
from memsafe_rl.types import LossSettings
from tests.ops.oracle.trl_trainer import (
    LENGTHS,
    MAX_LENGTH,
    TEMPERATURE,
    TRUNCATED_ROW,
    counts_of,
    distance,
    gradient_of,
    our_inputs,
    step_batch,
)
from tests.tiny import tiny_model, tiny_tokenizer

with warnings.catch_warnings(action="ignore"):  # that it is experimental
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer


@functools.cache
def trainer():
    arguments = GMPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=len(LENGTHS),
        num_generations=2,
        max_completion_length=MAX_LENGTH,
        temperature=TEMPERATURE,
        epsilon=0.15,
        epsilon_high=0.25,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_dropout=True,
    )
    made = GMPOTrainer(
        model=tiny_model("qwen3", hidden=16),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * len(LENGTHS)}),
        processing_class=tiny_tokenizer(),
    )
    made.current_gradient_accumulation_steps = 1
    made.model.train()
    return made


@pytest.mark.parametrize("with_old", [True, False])
@pytest.mark.parametrize("quantile", [1.0, 0.5])
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_loss_gradient_and_metrics_agree(beta, quantile, with_old):
    theirs = trainer()
    theirs.beta, theirs.top_entropy_quantile = beta, quantile
    theirs._metrics["train"].clear()
    batch = step_batch(theirs.model)
    if not with_old:
        del batch["old_per_token_logps"]
    expected = theirs._compute_loss(theirs.model, batch)
    expected_gradient = gradient_of(expected, theirs.model)
    settings = LossSettings(
        "gmpo", epsilon_low=0.15, epsilon_high=0.25, beta=beta, use_bias_correction_kl=False, max_completion_length=11
    )
    inputs = our_inputs(theirs.model, batch, settings)
    if quantile < 1:
        threshold = entropy_threshold(inputs.entropies_BT.flatten(), inputs.mask_BT.flatten(), quantile)
        marked = high_entropy_mask(inputs.entropies_BT, inputs.mask_BT, threshold)
        assert 0 < marked.sum() < inputs.mask_BT.sum()
        inputs = inputs.__class__(**{**vars(inputs), "entropy_mask_BT": marked})
    result = policy_loss(inputs, settings, counts_of(batch))
    # A row without a counted token has ratio 1 in TRL, a constant; here it has no loss.
    constant = batch["advantages"][TRUNCATED_ROW] / len(LENGTHS)
    torch.testing.assert_close(result.loss - constant, expected, rtol=1e-5, atol=1e-6)
    assert expected_gradient.norm() > 0
    assert distance(gradient_of(result.loss, theirs.model), expected_gradient) <= 1e-5
    shares = {part: float(result.sums[f"clip_{part}"] / result.sums["ratios"]) for part in ("low", "high", "region")}
    logged = {part: theirs._metrics["train"][f"clip_ratio/{part}_mean"][-1] for part in shares}
    assert shares == pytest.approx(logged, rel=1e-5)
    assert min(shares.values()) > 0 or not with_old
