"""Denoising steps against the formulas of the papers, against the distributions they must lead to, and diffusers."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from memsafe_rl.errors import ConfigError
from memsafe_rl.models.diffusion.schedulers import (
    DDIMScheduler,
    DDPMScheduler,
    DiffusersScheduler,
    FlowSDEScheduler,
    as_scheduler,
)
from memsafe_rl.ops.gaussian import gaussian_kl
from memsafe_rl.types import GaussianDistribution
from tests.models.diffusion.small import make_policy

PREDICTIONS = ("epsilon", "sample", "v_prediction")


def states(count=4):
    generator = torch.Generator().manual_seed(2)
    return (torch.randn(count, 3, 2, generator=generator, dtype=torch.float64) for _ in range(2))


def output_for(clean, noise, alpha, prediction):
    """What a perfect denoiser says of a state made of these two."""
    kept, lost = alpha**0.5, (1 - alpha) ** 0.5
    return {"epsilon": noise, "sample": clean, "v_prediction": kept * noise - lost * clean}[prediction]


def laid_out(scheduler, steps):
    scheduler.set_timesteps(steps)
    return scheduler


@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "squaredcos_cap_v2"])
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_ddim_is_its_paper_whatever_the_denoiser_predicts(prediction, schedule, eta):
    scheduler = laid_out(DDIMScheduler(beta_schedule=schedule, prediction_type=prediction, eta=eta), 10)
    clean, noise = states(1)
    alphas = [*scheduler.alphas_cumprod[scheduler.timesteps].tolist(), 1.0]
    for column, (alpha, after) in enumerate(pairwise(alphas)):
        state = alpha**0.5 * clean + (1 - alpha) ** 0.5 * noise
        sigma = eta * ((1 - after) / (1 - alpha) * (1 - alpha / after)) ** 0.5
        expected = after**0.5 * clean + max(0.0, 1 - after - sigma**2) ** 0.5 * noise
        found = scheduler.mean(output_for(clean, noise, alpha, prediction), [column], state)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
        assert float(scheduler.stds[column]) == pytest.approx(sigma, abs=1e-12)
    assert float(scheduler.stds[-1]) == 0.0
    assert bool((scheduler.stds[:-1] > 0).all())


@pytest.mark.parametrize("variance", ["fixed_small", "fixed_large"])
def test_ddpm_is_the_posterior(variance):
    scheduler = laid_out(DDPMScheduler(prediction_type="sample", variance_type=variance), 20)
    clean, state = states(1)
    alphas = [*scheduler.alphas_cumprod[scheduler.timesteps].tolist(), 1.0]
    for column, (cumulative, after) in enumerate(pairwise(alphas)):
        alpha = cumulative / after
        beta = 1 - alpha
        mean = after**0.5 * beta * clean + alpha**0.5 * (1 - after) * state
        torch.testing.assert_close(
            scheduler.mean(clean, [column], state), mean / (1 - cumulative), rtol=1e-9, atol=1e-12
        )
        variances = {"fixed_small": beta * (1 - after) / (1 - cumulative), "fixed_large": beta}
        expected = variances[variance] if after < 1 else 0.0
        assert float(scheduler.stds[column]) ** 2 == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_entries_may_stand_at_different_steps():
    scheduler = laid_out(DDIMScheduler(), 8)
    output, state = states(4)
    columns = [5, 0, 7, 5]
    together = scheduler.mean(output, columns, state)
    alone = [scheduler.mean(output[[row]], [column], state[[row]]) for row, column in enumerate(columns)]
    assert torch.equal(together, torch.cat(alone))


def variance_after(scheduler, gain):
    """The variance of samples when the denoiser answers ``gain(column) · x``: every step is linear."""
    variance = 1.0
    one = torch.ones(1, 1, dtype=torch.float64)
    for column in range(len(scheduler.stds)):
        factor = float(scheduler.mean(gain(column) * one, [column], one))
        variance = factor**2 * variance + float(scheduler.stds[column]) ** 2
    return variance


@pytest.mark.parametrize("scheduler", [DDIMScheduler(eta=1.0), DDIMScheduler(eta=0.4), DDPMScheduler()])
def test_diffusion_leads_to_the_data(scheduler):
    """Data N(0, 0.25): the best guess of the noise in x at cumulative alpha a is x sqrt(1 - a) / (a / 4 + 1 - a)."""
    laid_out(scheduler, 1000)
    alphas = scheduler.alphas_cumprod[scheduler.timesteps].tolist()
    found = variance_after(scheduler, lambda column: (1 - alphas[column]) ** 0.5 / (1 - 0.75 * alphas[column]))
    assert found == pytest.approx(0.25, rel=0.02)


@pytest.mark.parametrize("shape", ["rising", "constant"])
@pytest.mark.parametrize("level", [0.3, 0.7])
def test_a_flow_leads_to_the_data_whatever_its_noise(shape, level):
    """Data N(0, 0.25): the velocity at x_t = (1 - t) x_0 + t e is x (t - (1 - t) / 4) / ((1 - t)^2 / 4 + t^2)."""
    scheduler = laid_out(FlowSDEScheduler(level, shape), 4000)
    times = [1 - column / 4000 for column in range(4000)]

    def gain(column):
        time = times[column]
        return (time - (1 - time) / 4) / ((1 - time) ** 2 / 4 + time**2)

    assert variance_after(scheduler, gain) == pytest.approx(0.25, rel=0.01)


def test_the_kl_of_a_flow_is_that_of_velocities():
    """``dt / 2 (s (1 - t) / (2 t) + 1 / s)^2 ||dv||^2``."""
    scheduler = laid_out(FlowSDEScheduler(0.7), 10)
    velocity, state = states(1)
    other = velocity + 0.1
    for column in range(1, 9):
        time = 1 - column / 10
        means, reference = (scheduler.mean(value, [column], state) for value in (velocity, other))
        one = GaussianDistribution(means, scheduler.stds[[column]], state, (1,), "sum", reference_means=reference)
        noise = 0.7 * (time / (1 - time)) ** 0.5
        factor = 0.1 / 2 * (noise * (1 - time) / (2 * time) + 1 / noise) ** 2
        expected = factor * float((velocity - other).square().sum())
        assert float(gaussian_kl(one)[0]) == pytest.approx(expected, rel=1e-9)


def test_a_window_of_a_flow_has_noise_and_the_rest_has_none():
    scheduler = laid_out(FlowSDEScheduler(noisy_steps=(2, 5)), 10)
    assert [column for column in range(10) if scheduler.stds[column] > 0] == [2, 3, 4]
    velocity, state = states(1)
    torch.testing.assert_close(scheduler.mean(velocity, [7], state), state - 0.1 * velocity, rtol=1e-12, atol=1e-12)
    shifted = laid_out(FlowSDEScheduler(shift=3.0, time_scale=1.0), 4)
    torch.testing.assert_close(shifted.timesteps, torch.tensor([1.0, 0.9, 0.75, 0.5]))


@pytest.mark.parametrize("shift", [0.01, 0.1, 0.2, 0.3, 0.46, 7.3])
def test_the_first_step_of_any_flow_takes_the_noise_of_the_second_timestep(shift):
    scheduler = laid_out(FlowSDEScheduler(shift=shift), 8)
    second = shift * 0.875 / (1 + (shift - 1) * 0.875)
    assert float(scheduler.stds[0]) == pytest.approx(0.7 * (1 / (1 - second)) ** 0.5 * (1 - second) ** 0.5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DDIMScheduler(eta=0.0), r"eta is 0.0; a step without noise has no log-prob.*Set it above 0"),
        (lambda: laid_out(DDIMScheduler(eta=1.2), 20), r"eta is 1.2, with which a step has more noise"),
        (lambda: DDIMScheduler(prediction_type="x0"), r"prediction_type is 'x0'\. Set it to one of epsilon, sample"),
        (lambda: DDIMScheduler(beta_schedule="cosine"), r"beta_schedule is 'cosine'\. Set it to one of linear"),
        (lambda: laid_out(DDIMScheduler(100), 101), r"num_inference_steps is 101.*between 1 and 100"),
        (lambda: DDIMScheduler(10.5), r"num_train_timesteps is 10.5. Set it to a whole number above 0"),
        (lambda: DDPMScheduler(0), r"num_train_timesteps is 0\."),
        (lambda: DDIMScheduler(beta_start=-0.1), r"beta_start is -0.1 and beta_end is 0.02. Set both to at least 0"),
        (lambda: DDPMScheduler(beta_end=2.0), r"beta_start is 0.0001 and beta_end is 2.0"),
        (lambda: DDPMScheduler(variance_type="learned"), r"variance_type is 'learned'"),
        (lambda: FlowSDEScheduler(noise_level=0), r"noise_level is 0"),
        (lambda: FlowSDEScheduler(shift=-1), r"shift is -1"),
        (lambda: FlowSDEScheduler(time_scale=math.nan), r"time_scale is nan"),
        (lambda: laid_out(FlowSDEScheduler(), 1), r"num_inference_steps is 1; the last step of a flow has no noise"),
        (lambda: laid_out(FlowSDEScheduler(noisy_steps=(3, 10)), 10), r"noisy_steps is \(3, 10\).*end <= 9"),
        (lambda: as_scheduler(SimpleNamespace(config=SimpleNamespace())), r"neither alphas_cumprod nor sigmas"),
    ],
)
def test_what_cannot_work_is_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


class TheirDDIM:
    """The face that a scheduler of diffusers shows, as far as it is read."""

    def __init__(self, **config):
        self.config = SimpleNamespace(**{"prediction_type": "epsilon", "clip_sample": False, **config})
        self.alphas_cumprod = (1 - torch.linspace(1e-4, 0.02, 1000)).cumprod(0)
        self.final_alpha_cumprod = self.alphas_cumprod[0]

    def set_timesteps(self, steps):
        self.timesteps = torch.arange(steps).flip(0) * (1000 // steps)


class TheirFlow:
    config = SimpleNamespace()
    sigmas = torch.tensor([1.0])

    def set_timesteps(self, steps):
        self.sigmas = torch.linspace(1, 0, steps + 1)
        self.timesteps = 1000 * self.sigmas[:-1]


def test_a_scheduler_of_diffusers_is_read():
    ours, theirs = laid_out(DDIMScheduler(), 20), laid_out(as_scheduler(TheirDDIM()), 20)
    output, state = states(19)
    columns = list(range(19))
    torch.testing.assert_close(
        theirs.mean(output, columns, state), ours.mean(output, columns, state), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(theirs.stds[:-1], ours.stds[:-1], rtol=1e-4, atol=1e-7)
    assert torch.equal(theirs.timesteps, ours.timesteps)
    flow, their_flow = laid_out(FlowSDEScheduler(), 20), laid_out(as_scheduler(TheirFlow()), 20)
    torch.testing.assert_close(
        their_flow.mean(output, columns, state), flow.mean(output, columns, state), rtol=1e-5, atol=1e-5
    )
    assert float(their_flow.stds[-1]) == 0.0
    large = laid_out(as_scheduler(TheirDDIM(variance_type="fixed_large")), 20).stds
    own = laid_out(DDPMScheduler(variance_type="fixed_large"), 20).stds
    torch.testing.assert_close(large[:-1], own[:-1], rtol=1e-4, atol=1e-7)
    with pytest.raises(ConfigError, match="clip_sample of TheirDDIM is True"):
        as_scheduler(TheirDDIM(clip_sample=True))
    with pytest.raises(ConfigError, match="variance_type of TheirDDIM is 'learned_range'"):
        as_scheduler(TheirDDIM(variance_type="learned_range"))


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize(("spacing", "offset"), [("leading", 1), ("trailing", 0)])
def test_steps_are_those_of_diffusers(prediction, spacing, offset):
    diffusers = pytest.importorskip("diffusers")
    options = {"prediction_type": prediction, "timestep_spacing": spacing, "steps_offset": offset}
    theirs = diffusers.DDIMScheduler(**options, clip_sample=False)
    ours = laid_out(DDIMScheduler(**options, eta=0.7), 50)
    wrapped = laid_out(DiffusersScheduler(theirs, eta=0.7), 50)
    output, state = states(1)
    assert torch.equal(ours.timesteps, theirs.timesteps)
    for column, timestep in enumerate(theirs.timesteps):
        without, with_noise = (
            theirs.step(output, timestep, state, eta=0.7, variance_noise=torch.full_like(state, noise)).prev_sample
            for noise in (0.0, 1.0)
        )
        for one in (ours, wrapped):
            torch.testing.assert_close(one.mean(output, [column], state), without, rtol=1e-4, atol=1e-4)
            assert float(one.stds[column]) == pytest.approx(float((with_noise - without).mean()), abs=1e-5)
    assert math.isfinite(float(ours.stds.sum()))


def test_two_policies_may_be_given_one_scheduler():
    scheduler = DDIMScheduler(prediction_type="sample")
    first = make_policy(6, scheduler=scheduler)
    steps = first.scheduler.timesteps.clone()
    make_policy(12, scheduler=scheduler)
    assert torch.equal(first.scheduler.timesteps, steps)
