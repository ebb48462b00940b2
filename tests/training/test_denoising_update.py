"""The gradient of any rows × columns split is the whole one's, and its bytes do not grow with the steps."""

import copy
import itertools
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig

from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.micro_batches import cut_columns
from memsafe_rl.models.diffusion.adapter import DiffusionAdapter
from memsafe_rl.models.diffusion.policy import TrainedSteps, prepare_policy
from memsafe_rl.rollout.scoring import score_all, score_rows
from memsafe_rl.training.gradient import StepTerms, accumulate_gradient
from memsafe_rl.types import Denominators, LossSettings, RolloutPlan, UpdatePlan
from tests.models.diffusion.small import (
    Denoiser,
    distance,
    draw,
    frames,
    gradient_of,
    lay_down,
    make_policy,
)

LOSSES = {
    "grpo": {"beta": 0.1},
    "dr_grpo": {"max_completion_length": 6},
    "dapo": {"beta": 0.3},
    "bnpo": {},
    "cispo": {},
    "sapo": {},
    "luspo": {},
}


def terms_of(trajectory, settings):
    counts = Denominators(len(trajectory), sum(trajectory.counted_actions), sum(trajectory.counted_actions))
    return StepTerms(settings=settings, denominators=counts, temperature=1.0, with_entropy=True)


def accumulate(adapter, trajectory, settings, plan):
    adapter.model.eval()
    rows = list(range(len(trajectory)))
    step = accumulate_gradient(
        adapter,
        trajectory,
        rows,
        plan,
        terms_of(trajectory, settings),
        autocast=nullcontext,
        scale=lambda loss: loss,
    )
    return step, gradient_of(adapter)


def moved_policy(dtype=torch.float32, **options):
    """A policy that is no longer its reference, nor what drew its rollout: a first epoch's second step."""
    policy = make_policy(dtype=dtype, elements=frames, guidance_scale=2.0, **options)
    model, reference = prepare_policy(policy, device="cpu", with_reference=True)
    adapter = DiffusionAdapter(model, reference_denoiser=reference)
    trajectory = lay_down(adapter, draw(adapter))
    scored = score_all(
        adapter, trajectory, range(6), temperature=1.0, attempt=under(RolloutPlan(score_tokens=4)), tile=1
    )
    store = trajectory.actions.beside({row: one.logprobs for row, one in enumerate(scored)})
    trajectory = replace(trajectory, old_logprobs=store, has_old=(True,) * 6)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in policy.denoiser.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return adapter, trajectory


@pytest.mark.parametrize("rows", [1, 4, 7])
@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 100])
def test_rectangles_cover_every_pair_once(rows, budget):
    columns = [0, 2, 3, 7, 8]
    cut = cut_columns(rows, columns, budget)
    pairs = [pair for piece, chosen in cut for pair in itertools.product(piece, chosen)]
    assert sorted(pairs) == sorted(itertools.product(range(rows), columns))
    assert max(len(piece) * len(chosen) for piece, chosen in cut) <= budget
    assert cut_columns(0, columns, budget) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_any_split_gives_the_same_gradient_and_the_same_measures(name, dtype, tolerance):
    adapter, trajectory = moved_policy(dtype, reduce="mean" if dtype == torch.float32 else "sum")
    settings = LossSettings(name, **LOSSES[name])
    whole, expected = accumulate(adapter, trajectory, settings, UpdatePlan(micro_batch_tokens=1000))
    assert whole.micro_batches == 1
    for budget, checkpointing in ((1, False), (4, False), (6, True), (13, False)):
        plan = UpdatePlan(micro_batch_tokens=budget, checkpointing=checkpointing)
        step, found = accumulate(adapter, trajectory, settings, plan)
        assert step.micro_batches > 1
        assert distance(found, expected) <= tolerance
        for part in ("sums", "lows", "highs"):
            for key, value in getattr(whole, part).items():
                torch.testing.assert_close(getattr(step, part)[key], value, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(step.loss, whole.loss, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_the_gradient_is_that_of_the_formula(name):
    adapter, trajectory = moved_policy(torch.float64)
    _, found = accumulate(adapter, trajectory, LossSettings(name, beta=0.2), UpdatePlan(micro_batch_tokens=4))
    scores = score_rows(adapter, trajectory, range(6), temperature=1.0, tile=1, with_kl=True)
    mask = trajectory.loss_mask.pad(range(6), 0).double()
    ratio = (scores.logprobs_BT - trajectory.old_logprobs.pad(range(6), 0)).exp()
    gain = trajectory.advantages[:, None]
    losses = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain) + 0.2 * scores.kl_BT
    per_row = (losses * mask).sum(1)
    loss = (per_row / mask.sum(1)).mean() if name == "grpo" else per_row.sum() / mask.sum()
    loss.backward()
    assert distance(found, gradient_of(adapter)) <= 1e-12


def test_the_first_pass_has_ratio_exactly_1():
    adapter = DiffusionAdapter(make_policy())
    trajectory = lay_down(adapter, draw(adapter))
    step, _ = accumulate(adapter, trajectory, LossSettings(), UpdatePlan(micro_batch_tokens=5))
    assert float(step.sums["log_ratio"]) == 0.0
    assert float(step.sums["approx_kl"]) == 0.0


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_log_probs_do_not_depend_on_slices_and_agree_with_the_rollout(reduce):
    adapter = DiffusionAdapter(make_policy(reduce=reduce, guidance_scale=3.0, elements=frames))
    trajectory = lay_down(adapter, draw(adapter))
    adapter.model.train()
    for budget in (1, 4, 7, 1000):
        plan = under(RolloutPlan(score_tokens=budget))
        scored = score_all(adapter, trajectory, range(6), temperature=1.0, attempt=plan, tile=1, with_entropy=True)
        for row, one in enumerate(scored):
            counted = trajectory.loss_mask.rows()[row] != 0
            drawn = trajectory.sampling_logprobs.rows()[row]
            assert float((one.logprobs - drawn)[counted].abs().max()) < (1e-5 if reduce == "mean" else 1e-4)
            assert bool((one.logprobs[~counted] == 0).all())
    assert adapter.model.training


def test_columns_that_nobody_counts_are_not_run():
    policy = make_policy(steps=8, trained_steps=TrainedSteps(fraction=0.4, random=True))
    adapter = DiffusionAdapter(policy)
    trajectory = lay_down(adapter, draw(adapter))
    assert len(trajectory.counted_columns) == 2
    assert adapter.work(trajectory, range(6)).row_tokens == (2,) * 6
    policy.denoiser.calls.clear()
    step, _ = accumulate(adapter, trajectory, LossSettings("grpo"), UpdatePlan(micro_batch_tokens=6))
    assert step.tokens == 12
    wanted = {float(policy.scheduler.timesteps[column]) for column in trajectory.counted_columns}
    assert {time for times, _ in policy.denoiser.calls for time in times} == wanted


def test_guidance_without_gradient_is_the_detached_half():
    """Flow-GRPO's way: the same values, and the gradient of the conditional half alone."""
    adapter, trajectory = moved_policy(torch.float64)
    adapter.policy.guidance_gradient = False
    scores = score_rows(adapter, trajectory, [1, 4], [0, 2], temperature=1.0, tile=1)
    scores.logprobs_BT.sum().backward()
    found = gradient_of(adapter)
    adapter.policy.guidance_gradient = True
    whole = score_rows(adapter, trajectory, [1, 4], [0, 2], temperature=1.0, tile=1)
    torch.testing.assert_close(scores.logprobs_BT, whole.logprobs_BT, rtol=1e-12, atol=1e-12)
    predict = adapter.policy.predict

    def detached(denoiser, x, timesteps, condition):
        null = adapter.policy._null(condition)
        free = denoiser(x, timesteps, null).detach()
        return free + 2.0 * (denoiser(x, timesteps, condition) - free)

    adapter.policy.predict = detached
    score_rows(adapter, trajectory, [1, 4], [0, 2], temperature=1.0, tile=1).logprobs_BT.sum().backward()
    adapter.policy.predict = predict
    assert distance(found, gradient_of(adapter)) <= 1e-12


def test_lora_off_is_the_reference():
    policy = make_policy()
    before = {name: weight.clone() for name, weight in policy.denoiser.state_dict().items()}
    config = LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    model, copied = prepare_policy(policy, peft_config=config, device="cpu", with_reference=True)
    assert copied is None
    adapter = DiffusionAdapter(model)
    trajectory = lay_down(adapter, draw(adapter))
    scores = score_rows(adapter, trajectory, range(6), temperature=1.0, tile=1, with_kl=True)
    plain = make_policy()
    plain.denoiser.load_state_dict(before)
    theirs = DiffusionAdapter(plain.eval()).distribution(trajectory, range(6))
    ours = adapter.distribution(trajectory, range(6))
    stds = torch.where(ours.stds_M > 0, ours.stds_M, 1)
    kl = (ours.means - theirs.means).square().flatten(1).mean(1) / (2 * stds**2) * (ours.stds_M > 0)
    assert float(kl.detach().max()) > 1e-4
    torch.testing.assert_close(scores.kl_BT.flatten(), kl, rtol=1e-4, atol=1e-7, check_dtype=False)
    step, gradient = accumulate(adapter, trajectory, LossSettings(beta=0.1), UpdatePlan(micro_batch_tokens=7))
    assert float(step.sums["kl"]) > 0
    assert gradient.numel() == sum(weight.numel() for name, weight in model.named_parameters() if "lora" in name)


def test_a_denoiser_under_peft_is_its_own_reference():
    from peft import get_peft_model

    config = LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    torch.manual_seed(0)
    policy = make_policy(denoiser=get_peft_model(Denoiser(), config))
    model, copied = prepare_policy(policy, device="cpu", with_reference=True)
    adapter = DiffusionAdapter(model)
    trajectory = lay_down(adapter, draw(adapter))
    scores = score_rows(adapter, trajectory, range(6), temperature=1.0, tile=1, with_kl=True)
    assert copied is None
    assert float(scores.kl_BT.detach().max()) > 1e-4
    plan = UpdatePlan(micro_batch_tokens=7, checkpointing=True)
    _, gradient = accumulate(adapter, trajectory, LossSettings(beta=0.1), plan)
    assert float(gradient.norm()) > 0


def test_elements_outside_a_mask_move_nothing():
    adapter, trajectory = moved_policy(torch.float64)
    settings = LossSettings(beta=0.1)
    _, expected = accumulate(adapter, trajectory, settings, UpdatePlan(micro_batch_tokens=9))
    changed = trajectory.actions.flat.clone()
    short = [row for row in range(6) if trajectory.condition_of_row[row] == 0]
    last = trajectory.actions.lengths[0] - 1  # a later state is read by the next step, the last by nobody
    for row in short:
        changed[row * (last + 1) + last, :, 2:] += 100.0
    _, found = accumulate(
        adapter,
        replace(trajectory, actions=replace(trajectory.actions, flat=changed)),
        settings,
        UpdatePlan(micro_batch_tokens=9),
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (LossSettings(importance_sampling_level="sequence"), "importance_sampling_level='token'"),
        (LossSettings("vespo"), "a loss_type whose traits are separable: [a-z_, ]+"),
        (LossSettings(off_policy_mask_threshold=0.1), "off_policy_mask_threshold=None"),
    ],
)
def test_losses_of_whole_rows_are_refused_and_only_what_is_wrong_is_to_be_changed(settings, remedy):
    adapter = DiffusionAdapter(make_policy())
    with pytest.raises(ConfigError, match=rf"one by one\. Set {remedy}( in GRPOConfig)?\.$"):
        accumulate(adapter, lay_down(adapter, draw(adapter)), settings, UpdatePlan())


def peak_of_update(steps, pairs):
    """Bytes over weights, gradients and trajectory, columns one by one."""
    torch.manual_seed(0)
    policy = make_policy(steps, denoiser=Denoiser(width=64))
    adapter = DiffusionAdapter(policy, reference_denoiser=copy.deepcopy(policy.denoiser).requires_grad_(False))
    trajectory = lay_down(adapter, draw(adapter, group=1), group=1)
    assert len(trajectory.counted_columns) == steps - 1
    with SimulatedMemory() as memory:
        plan = UpdatePlan(micro_batch_tokens=pairs)
        accumulate(adapter, trajectory, LossSettings(beta=0.1), plan)
        return memory.peak_bytes


@pytest.mark.parametrize("pairs", [1, 2])
@pytest.mark.slow
def test_peak_bytes_do_not_grow_with_the_steps(pairs):
    few = peak_of_update(5, pairs)
    for steps in (50, 200):
        assert peak_of_update(steps, pairs) == few
