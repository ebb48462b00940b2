"""Chains do not depend on their company, on repetitions after a failure, or on how they are stored."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from memsafe_rl.errors import ConfigError, DataError, MemsafeError
from memsafe_rl.memory.planning.estimator import rollout_parts, update_parts
from memsafe_rl.memory.planning.policies import AdaptivePolicy, LadderPolicy
from memsafe_rl.memory.runtime.meters import SimulatedMeter
from memsafe_rl.memory.runtime.recovery import Recovery, under
from memsafe_rl.memory.runtime.stages import Stage
from memsafe_rl.memory.runtime.tracker import MemoryTracker
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.models.diffusion.adapter import DiffusionAdapter
from memsafe_rl.models.diffusion.policy import DiffusionPolicy, TrainedSteps, policy_of, prepare_policy
from memsafe_rl.models.diffusion.schedulers import DDIMScheduler, FlowSDEScheduler
from memsafe_rl.ops.gaussian import normal_noise
from memsafe_rl.rollout.engines.denoising import DenoisingEngine
from memsafe_rl.rollout.native.sequences import key_tensor
from memsafe_rl.rollout.scoring import score_rows
from memsafe_rl.training.gradient import accumulate_gradient
from memsafe_rl.types import (
    LossSettings,
    MemoryState,
    Phase,
    RolloutPlan,
    RolloutWork,
    SamplingSettings,
    UpdatePlan,
)
from tests.models.diffusion.small import (
    PROMPTS,
    SHAPE,
    WIDTH,
    Denoiser,
    distance,
    draw,
    frames,
    gradient_of,
    keys_of,
    lay_down,
    make_policy,
)
from tests.training.test_denoising_update import terms_of

ROOM = MemoryState(device="cpu", budget_bytes=2**40, live_bytes=0, peak_bytes=0)


@pytest.mark.parametrize("rows_in_flight", [1, 4])
def test_waves_change_nothing(rows_in_flight):
    adapter = DiffusionAdapter(make_policy(guidance_scale=2.5, elements=frames))
    adapter.model.train()
    whole, cut = draw(adapter), draw(adapter, rows_in_flight=rows_in_flight)
    for one, other in zip(whole, cut, strict=True):
        assert torch.equal(one.start, other.start)
        assert torch.equal(one.mask, other.mask)
        torch.testing.assert_close(one.ids, other.ids, rtol=0, atol=2e-5)
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-4)
        assert one.ids.shape == (6, *SHAPE)
    assert adapter.model.training
    assert {size for _, size in adapter.policy.denoiser.calls} == {
        12,
        2 * rows_in_flight,
        2 * (6 % rows_in_flight or 1),
    }
    assert len({one.start.sum().item() for one in whole}) == 6


def test_a_step_is_mean_and_keyed_noise_and_the_last_has_none():
    adapter = DiffusionAdapter(make_policy())
    drawn = draw(adapter)
    key = keys_of(2, 3)[1][0]
    one = drawn[3]
    before = one.start
    condition = adapter.condition(adapter.policy.embed([PROMPTS[1]]))
    adapter.model.eval()
    for column in range(6):
        with torch.no_grad():
            mean, std = adapter.step(before[None], [column], condition)
        noise = normal_noise(key_tensor([key]), torch.tensor([column + 1]), SHAPE)
        torch.testing.assert_close(one.ids[column], (mean + std * noise)[0], rtol=0, atol=1e-5)
        before = one.ids[column]
    assert float(std) == 0.0
    assert float(one.logprobs[-1]) == 0.0
    assert one.mask.tolist() == [1, 1, 1, 1, 1, 0]


def test_states_that_are_stored_rounded_are_gone_on_with_rounded():
    adapter = DiffusionAdapter(make_policy(state_dtype=torch.bfloat16))
    drawn = draw(adapter)
    assert drawn[0].ids.dtype == drawn[0].start.dtype == torch.bfloat16
    trajectory = lay_down(adapter, drawn)
    adapter.model.eval()
    scores = score_rows(adapter, trajectory, range(6), temperature=1.0, tile=1)
    found = scores.logprobs_BT.detach().float()
    torch.testing.assert_close(found, trajectory.sampling_logprobs.pad(range(6), 0), rtol=0, atol=1e-5)
    half = trajectory.nbytes()["actions"] + trajectory.nbytes()["starts"]
    assert half == 2 * 6 * 7 * 15  # 6 steps and the start, each stored once


def test_a_group_may_share_its_first_noise():
    adapter = DiffusionAdapter(make_policy(shared_noise=True))
    drawn = draw(adapter)
    assert all(torch.equal(drawn[row].start, drawn[0].start) for row in (1, 2))
    assert not torch.equal(drawn[3].start, drawn[0].start)
    assert not torch.allclose(drawn[0].ids[0], drawn[1].ids[0], atol=1e-2)


def test_rollouts_differ_and_repeat():
    adapter = DiffusionAdapter(make_policy())
    first, again, other = draw(adapter), draw(adapter), draw(adapter, rollout=1)
    assert all(torch.equal(one.ids, two.ids) for one, two in zip(first, again, strict=True))
    assert not any(torch.allclose(one.start, two.start, atol=0.1) for one, two in zip(first, other, strict=True))


def test_each_prompt_is_embedded_once():
    asked = []

    def embed(prompt):
        asked.append(prompt)
        return torch.full((2, WIDTH), float(len(prompt)))

    policy = make_policy(embed=embed)
    found = policy.embed(["walk", "run", "walk", "walk"])
    assert asked == ["walk", "run"]
    assert found[0] is found[2]
    assert float(found[1][0, 0]) == 3.0
    policy.embed(["run"])
    assert asked == ["walk", "run"]


def test_an_encoder_is_neither_trained_nor_saved():
    encoder = torch.nn.Linear(1, WIDTH)
    policy = make_policy(embed=lambda _: encoder(torch.ones(1, 1)))
    encoded = make_policy(embed=encoder)
    assert not policy.embed(["x"])[0].requires_grad
    assert len(list(encoded.parameters())) == len(list(policy.parameters()))


def test_conditions_are_as_long_as_the_longest_whatever_their_company():
    adapter = DiffusionAdapter(make_policy(null_condition=torch.ones(WIDTH)))
    condition = adapter.condition([torch.ones(1, WIDTH), torch.full((2, WIDTH), 2.0)], repeats=2)
    assert condition.embedding_MLD.shape == (4, 2, WIDTH)
    assert condition.mask_ML.tolist() == [[True, False], [True, False], [True, True], [True, True]]
    null = adapter.policy._null(condition)
    assert null.mask_ML.tolist() == [[True, False]] * 4
    assert null.embedding_MLD[:, 0].eq(1).all()
    assert null.embedding_MLD[:, 1].eq(0).all()


@pytest.mark.parametrize(
    ("steps", "columns"),
    [
        (TrainedSteps(), [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (TrainedSteps(fraction=0.6), [0, 1, 2, 3, 4]),
        (TrainedSteps(fraction=0.01), [0]),
        (TrainedSteps(window=(3, 6)), [3, 4, 5]),
        (TrainedSteps(window=(7, 99)), [7, 8]),
    ],
)
def test_which_steps_are_learnt_from(steps, columns):
    mask = draw(DiffusionAdapter(make_policy(10, trained_steps=steps)))[0].mask
    assert mask.nonzero()[:, 0].tolist() == columns


def test_random_steps_are_all_rows_and_others_in_every_rollout():
    adapter = DiffusionAdapter(make_policy(10, trained_steps=TrainedSteps(fraction=0.5, random=True)))
    seen = set()
    for rollout in range(6):
        masks = {tuple(one.mask.tolist()) for one in draw(adapter, group=2, rollout=rollout)}
        assert len(masks) == 1
        assert sum(next(iter(masks))) == 4
        seen |= masks
    assert len(seen) > 3


def recovering(memory, policy):
    tracker = MemoryTracker("cpu", SimulatedMeter(memory), 10**9)
    return tracker, Recovery(tracker, policy)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("fail_at", [1, 7, 40, 133, 260])
def test_running_out_of_memory_changes_nothing(fail_at):
    adapter = DiffusionAdapter(make_policy(guidance_scale=2.0))
    embedded = adapter.policy.embed(PROMPTS)
    expected = draw(adapter)
    trajectory = lay_down(adapter, expected)
    terms = terms_of(trajectory, LossSettings())
    adapter.model.eval()

    def accumulate(plan):
        return accumulate_gradient(
            adapter, trajectory, range(6), plan, terms, autocast=nullcontext, scale=lambda loss: loss
        )

    accumulate(UpdatePlan(micro_batch_tokens=9))
    gradient = gradient_of(adapter)
    work = RolloutWork((2, 2), 3, 6, adapter.geometry)
    with SimulatedMemory(fail_at=fail_at, exact=False) as memory:
        tracker, recovery = recovering(memory, LadderPolicy())
        attempts = recovery.attempts(Stage.DRAW, RolloutPlan(rows_in_flight=4), work)
        drawn = DenoisingEngine(adapter).generate(embedded, keys_of(2, 3), SamplingSettings(6, ()), attempts)
        assert memory.refusals == 1
        assert [event["event"] for event in tracker.events] == ["failure", "retry"]
    for one, other in zip(drawn, expected, strict=True):
        torch.testing.assert_close(one.ids, other.ids, rtol=0, atol=2e-5)
    with SimulatedMemory(fail_at=fail_at, exact=False) as memory:
        tracker, recovery = recovering(memory, LadderPolicy())
        attempts = recovery.attempts(
            Stage.ACCUMULATE, UpdatePlan(micro_batch_tokens=9), adapter.work(trajectory, range(6))
        )
        attempts(accumulate, undo=lambda: adapter.model.zero_grad(set_to_none=True))
        assert memory.refusals == 1
    assert distance(gradient_of(adapter), gradient) <= 1e-6


@pytest.mark.slow
def test_a_small_device_is_served_by_smaller_waves_and_rectangles():
    torch.manual_seed(0)
    adapter = DiffusionAdapter(make_policy(denoiser=Denoiser(width=64)))
    adapter.model.eval()
    embedded, expected = adapter.policy.embed(PROMPTS), draw(adapter, group=16)
    work = RolloutWork((2, 2), 16, 6, adapter.geometry)
    with SimulatedMemory(exact=False) as memory:
        draw(adapter, group=16, rows_in_flight=4)
        lean = memory.peak_bytes
    with SimulatedMemory(capacity_bytes=2 * lean, exact=False) as memory:
        tracker, recovery = recovering(memory, AdaptivePolicy())
        attempts = recovery.attempts(Stage.DRAW, RolloutPlan(rows_in_flight=32), work)
        with tracker.phase(Phase.ROLLOUT):
            drawn = DenoisingEngine(adapter).generate(embedded, keys_of(2, 16), SamplingSettings(6, ()), attempts)
        assert attempts.plan.rows_in_flight < 32
    for one, other in zip(drawn, expected, strict=True):
        torch.testing.assert_close(one.ids, other.ids, rtol=0, atol=2e-5)

    trajectory = lay_down(adapter, expected, group=16)
    terms = terms_of(trajectory, LossSettings())

    def accumulate(plan):
        return accumulate_gradient(
            adapter, trajectory, range(32), plan, terms, autocast=nullcontext, scale=lambda loss: loss
        )

    peaks = []
    for tokens in (160, 8):
        with SimulatedMemory(exact=False) as memory:
            accumulate(UpdatePlan(micro_batch_tokens=tokens))
            gradient = gradient_of(adapter)
            peaks.append(memory.peak_bytes)
    with SimulatedMemory(capacity_bytes=sum(peaks) // 2, exact=False) as memory:
        tracker, recovery = recovering(memory, AdaptivePolicy())
        attempts = recovery.attempts(
            Stage.ACCUMULATE, UpdatePlan(micro_batch_tokens=160), adapter.work(trajectory, range(32))
        )
        with tracker.phase(Phase.UPDATE):
            attempts(accumulate, undo=lambda: adapter.model.zero_grad(set_to_none=True))
        assert attempts.plan.micro_batch_tokens < 160
    assert distance(gradient_of(adapter), gradient) <= 1e-6


def test_policies_plan_pairs():
    adapter = DiffusionAdapter(make_policy(denoiser=Denoiser(width=64)))
    trajectory = lay_down(adapter, draw(adapter))
    work = adapter.work(trajectory, range(6))
    rollout = RolloutWork((2, 2), 3, 6, adapter.geometry)
    for policy in (AdaptivePolicy(), LadderPolicy()):
        plan = policy.before_update(work, ROOM)
        assert plan.micro_batch_tokens >= 1
        assert not plan.pack_prompts
        assert policy.before_rollout(rollout, ROOM).rows_in_flight >= 1
        unit = adapter.geometry.unit
        tight = replace(ROOM, budget_bytes=adapter.geometry.trainable_bytes + 4 * unit.kept)
        assert policy.before_update(work, tight).micro_batch_tokens < 30
        assert policy.before_rollout(rollout, replace(ROOM, budget_bytes=1)).rows_in_flight == 1
    with pytest.raises(Exception, match="rows_in_flight"):
        DenoisingEngine(adapter).generate(
            adapter.policy.embed(PROMPTS), keys_of(2, 1), SamplingSettings(6, ()), under(RolloutPlan(rows_in_flight=0))
        )


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_estimates_are_near(checkpointing):
    adapter = DiffusionAdapter(make_policy(denoiser=Denoiser(width=512, blocks=4)))
    adapter.model.eval()
    trajectory = lay_down(adapter, draw(adapter, group=32), group=32)
    terms, plan = terms_of(trajectory, LossSettings()), UpdatePlan(micro_batch_tokens=64, checkpointing=checkpointing)
    work = adapter.work(trajectory, range(64))
    predicted = AdaptivePolicy().before_update(work, ROOM)
    assert predicted.predicted_bytes["update"] > 0
    with SimulatedMemory(exact=False) as memory:
        accumulate_gradient(adapter, trajectory, range(64), plan, terms, autocast=nullcontext, scale=lambda loss: loss)
        assert 0.6 < sum(update_parts(work, plan).values()) / memory.peak_bytes < 1.7
    adapter.model.zero_grad(set_to_none=True)
    with SimulatedMemory(exact=False) as memory:
        draw(adapter, group=32)
        rollout = RolloutWork((2, 2), 32, 6, adapter.geometry)
        assert 0.6 < sum(rollout_parts(rollout, RolloutPlan()).values()) / memory.peak_bytes < 1.7


def test_what_cannot_work_is_refused():
    adapter = DiffusionAdapter(make_policy())
    engine = DenoisingEngine(adapter)
    engine.check(SamplingSettings(6, ()))
    with pytest.raises(ConfigError, match=r"temperature is 0\.7, which says how tokens are drawn"):
        engine.check(SamplingSettings(6, (), temperature=0.7))
    with pytest.raises(ConfigError, match=r"reduce is 'max'"):
        make_policy(reduce="max")
    with pytest.raises(ConfigError, match=r"fraction is 0\."):
        make_policy(trained_steps=TrainedSteps(fraction=0.0))
    with pytest.raises(ConfigError, match=r"No step of 6 between 5 and 6 has noise"):
        make_policy(trained_steps=TrainedSteps(window=(5, 6)))
    with pytest.raises(DataError, match=r"shape \(3, 4\); condition_shape allows 1 to 2 vectors of width 4"):
        adapter.policy.embed([[[0.0] * 4] * 3])
    with pytest.raises(DataError, match=r"mask of shape \(1, 4\) for states of shape \(3, 5\)"):
        make_policy(elements=lambda _: torch.ones(4)).count_elements([torch.ones(1, WIDTH)])
    with pytest.raises(ConfigError, match=r"Linear is no DiffusionPolicy"):
        policy_of(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"no trainable weight"):
        prepare_policy(make_policy().requires_grad_(False), device="cpu", with_reference=False)
    with pytest.raises(ConfigError, match=r"neither a PEFT adapter nor a frozen copy"), adapter.reference():
        pass
    with torch.no_grad():
        adapter.policy.denoiser.write.bias.fill_(torch.nan)
    with pytest.raises(MemsafeError, match=r"prompt 0, sample 0 is not finite \(6 of 6 rows\)"):
        draw(adapter)


class TwoOutputs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x, timesteps, condition):
        return torch.cat([x, x], 1) * self.weight


def test_a_denoiser_that_learns_its_variance_is_refused():
    policy = DiffusionPolicy(TwoOutputs(), FlowSDEScheduler(), SHAPE, condition_shape=(1, WIDTH), num_inference_steps=3)
    with pytest.raises(ConfigError, match=r"gave \(6, 6, 5\) for states of shape \(6, 3, 5\)"):
        draw(DiffusionAdapter(policy))
    assert isinstance(make_policy().scheduler, DDIMScheduler)
