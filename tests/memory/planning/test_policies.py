from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.planning.estimator import update_time
from memsafe_rl.memory.planning.policies import (
    AdaptivePolicy,
    FixedPolicy,
    LadderPolicy,
    MemoryPolicy,
    WithinBudget,
    check_packing,
)
from memsafe_rl.memory.planning.search import extra_bytes, fallbacks_named
from memsafe_rl.memory.runtime.meters import HostMeter
from memsafe_rl.memory.runtime.tracker import MemoryTracker
from memsafe_rl.types import (
    MemoryFailure,
    MemoryState,
    ModelGeometry,
    Phase,
    RolloutPlan,
    RolloutWork,
    UpdatePlan,
    UpdateWork,
)

GEOMETRY = ModelGeometry(
    layers=4,
    hidden_size=64,
    intermediate_size=128,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab_size=1000,
    max_positions=2048,
    windows=(None, None, None, 32),
    parameter_bytes=1_000_000,
    trainable_bytes=1_000_000,
    compute_bytes=4,
    cache_bytes=4,
)


def memory(budget_bytes: int, live_bytes: int = 0, device: str = "cpu") -> MemoryState:
    return MemoryState(device=device, budget_bytes=budget_bytes, live_bytes=live_bytes, peak_bytes=live_bytes)


def update_work(*row_tokens: int) -> UpdateWork:
    return UpdateWork(row_tokens=row_tokens, action_tokens=tuple(n // 2 for n in row_tokens), geometry=GEOMETRY)


def test_cache_bytes_follow_the_formula_with_windows() -> None:
    # 2 (keys, values) x 4 bytes x 2 kv heads x 16 wide x (three full layers of 100 and one window of 32)
    assert GEOMETRY.kv_bytes(100) == 2 * 4 * 2 * 16 * (3 * 100 + 32)


def test_with_room_to_spare_the_micro_batch_is_as_large_as_is_fast() -> None:
    work = update_work(*[100] * 100)
    plan = AdaptivePolicy().before_update(work, memory(2**40))
    # Of 512 tokens, 20 pieces: 10,000 + 20 x 51 tokens' time; of 384, 34 pieces and 7 % more; of 288, 50 and 14 % more.
    assert plan.micro_batch_tokens == 384
    assert not plan.checkpointing
    wide = replace(work, geometry=replace(GEOMETRY, hidden_size=576))
    assert AdaptivePolicy().before_update(wide, memory(2**40)).micro_batch_tokens == 341  # of 455
    assert AdaptivePolicy().before_update(work, memory(2**40, device="cuda")).micro_batch_tokens == 10_000


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gradients_are_added_up_once_a_step_where_whole_ones_fit(device: str) -> None:
    alone = update_work(*[100] * 64)
    # Of 1 MB of weights and gradients, this rank's part is a quarter.
    work = replace(alone, geometry=replace(GEOMETRY, trainable_bytes=250_000), whole_gradient_bytes=1_000_000)
    policy, roomy = AdaptivePolicy(checkpointing=True), memory(2**40, device=device)
    assert policy.before_update(alone, roomy).reduce_each  # nothing to add up
    cut = UpdatePlan(micro_batch_tokens=100, checkpointing=True, reduce_each=False)
    each = replace(cut, reduce_each=True)
    # The last of 64 micro-batches begins with the gradients of the others: a part of them, or all.
    assert update_bytes(work, cut) - update_bytes(work, each) == 750_000
    assert update_time(device, work, cut, cut) < update_time(device, work, each, cut)
    assert update_time(device, alone, cut, cut) == update_time(device, alone, each, cut)
    failure = MemoryFailure(Phase.UPDATE, 1, 1, "", plan=cut, work=work, live_bytes=0)
    assert AdaptivePolicy().after_oom(cut, failure) == each
    assert not fallbacks_named(("reduce_each",), Phase.UPDATE)[0].step(cut, alone)
    # On cards a micro-batch of 6,400 tokens is all there is, which is added up at once either way.
    assert policy.before_update(work, roomy).reduce_each is (device == "cuda")
    assert policy.before_update(work, memory(1, device=device)).reduce_each


def update_bytes(work: UpdateWork, plan: UpdatePlan) -> int:
    return extra_bytes(Phase.UPDATE, work, plan) or 0


def test_the_plan_fits_the_budget_or_is_the_smallest_there_is() -> None:
    work = update_work(1000, 400, 300, 300, 200)
    leanest = UpdatePlan(micro_batch_tokens=1000, logprob_tile=1, checkpointing=True, offload_activations=True)
    smallest = update_bytes(work, leanest)
    for budget in (smallest * 100, smallest * 4, smallest * 2):
        plan = AdaptivePolicy().before_update(work, memory(budget))
        assert plan.predicted_bytes["update"] <= 0.8 * budget
    assert AdaptivePolicy().before_update(work, memory(1)).predicted_bytes["update"] <= 1.05 * smallest


def test_checkpointing_comes_before_refusing_and_a_hint_is_obeyed() -> None:
    work = update_work(500)
    plain = AdaptivePolicy().before_update(work, memory(2**40))
    tight = int(plain.predicted_bytes["update"] * 0.6)
    assert AdaptivePolicy().before_update(work, memory(tight)).checkpointing
    assert not AdaptivePolicy(checkpointing=False).before_update(work, memory(tight)).checkpointing
    assert AdaptivePolicy(checkpointing=True).before_update(work, memory(2**40)).checkpointing


def test_rows_in_flight_follow_the_bytes_that_fit() -> None:
    work = RolloutWork(prompt_tokens=(10, 20), group_size=8, max_new_tokens=44, geometry=GEOMETRY)
    policy = AdaptivePolicy()
    eight = extra_bytes(Phase.ROLLOUT, work, RolloutPlan(rows_in_flight=8)) or 0
    assert policy.before_rollout(work, memory(2**40)).rows_in_flight == 16
    assert policy.before_rollout(work, memory(int(eight / 0.79))).rows_in_flight == 8
    assert policy.before_rollout(work, memory(0)).rows_in_flight == 1


def test_fixed_policy_gives_what_it_was_given_and_never_retries() -> None:
    policy = FixedPolicy(RolloutPlan(rows_in_flight=3), UpdatePlan(micro_batch_tokens=7))
    work = RolloutWork(prompt_tokens=(1,), group_size=2, max_new_tokens=1, geometry=GEOMETRY)
    assert policy.before_rollout(work, memory(0)).rows_in_flight == 3
    assert policy.before_update(update_work(9), memory(0)).micro_batch_tokens == 7


def test_a_policy_of_ones_own_needs_two_methods() -> None:
    @dataclass(frozen=True)
    class OneRow(MemoryPolicy):
        def before_rollout(self, work: RolloutWork, memory: MemoryState) -> RolloutPlan:
            return RolloutPlan(rows_in_flight=1)

        def before_update(self, work: UpdateWork, memory: MemoryState) -> UpdatePlan:
            return UpdatePlan(micro_batch_tokens=1)

    assert OneRow().before_update(update_work(5), memory(0)).micro_batch_tokens == 1
    with pytest.raises(TypeError, match="abstract"):
        MemoryPolicy()  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (RolloutPlan(rows_in_flight=0), "RolloutPlan.rows_in_flight is 0"),
        (RolloutPlan(cache_dtype="int4"), "cache_dtype is 'int4'; write one of None, 'int8'"),
        (UpdatePlan(micro_batch_tokens=0), "UpdatePlan.micro_batch_tokens is 0"),
        (UpdatePlan(trajectory_device="moon"), "trajectory_device is 'moon'"),
        (RolloutPlan(kv_bytes=0), "RolloutPlan.kv_bytes is 0; it must be at least 1"),
        (RolloutPlan(rows_in_flight=2.5), "RolloutPlan.rows_in_flight is 2.5; it must be a whole number"),  # type: ignore[arg-type]
        (RolloutPlan(score_tokens="8"), "RolloutPlan.score_tokens is '8'; it must be a whole number"),  # type: ignore[arg-type]
        (RolloutPlan(reward_rows=True), "RolloutPlan.reward_rows is True; it must be a whole number"),
        (UpdatePlan(checkpointing="no"), "UpdatePlan.checkpointing is 'no'; write True or False"),  # type: ignore[arg-type]
        (UpdatePlan(predicted_bytes={"update": float("nan")}), "predicted_bytes\\['update'\\] is nan"),  # type: ignore[dict-item]
        (UpdatePlan(predicted_bytes={1: 100}), "predicted_bytes has a key 1; it must be the name of a phase"),  # type: ignore[dict-item]
        (None, "The memory policy answered None where it must give a"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused_by_name(plan: RolloutPlan | UpdatePlan, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MemoryTracker("cpu", HostMeter(), 1).adopt(plan, type(plan))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdaptivePolicy(checkpointing="yes"), "AdaptivePolicy.checkpointing is 'yes'; write True or False"),  # type: ignore[arg-type]
        (lambda: AdaptivePolicy(pack_prompts="None"), "AdaptivePolicy.pack_prompts is 'None'; write True or False"),  # type: ignore[arg-type]
        (lambda: AdaptivePolicy(trajectory_device="cpu"), "trajectory_device is 'cpu'; write one of 'device', 'host'"),
        (lambda: AdaptivePolicy(compile="fast"), "AdaptivePolicy.compile is 'fast'; write one of None, 'default'"),
        (lambda: LadderPolicy(climbs=None), "LadderPolicy.climbs is None; write True or False"),  # type: ignore[arg-type]
        (lambda: WithinBudget(AdaptivePolicy(), "8GB"), "budget_bytes is '8GB'; it must be a number of bytes"),  # type: ignore[arg-type]
        (lambda: WithinBudget("adaptive", 1 << 30), "WithinBudget.policy is 'adaptive'; pass a MemoryPolicy"),  # type: ignore[arg-type]
        (lambda: WithinBudget(AdaptivePolicy(), 0), "WithinBudget.budget_bytes is 0; it must be a number of bytes"),
    ],
)
def test_numbers_and_choices_that_a_policy_does_not_offer_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_plans_of_other_classes_would_be_passed_over_and_are_refused_while_policies_may_have_more_fields() -> None:
    @dataclass(frozen=True)
    class Noted(UpdatePlan):
        note: str = "x"

    @dataclass(frozen=True)
    class Warming(AdaptivePolicy):
        warmup_rollouts: "int" = 0

    with pytest.raises(ConfigError, match="where it must give a UpdatePlan itself"):
        MemoryTracker("cpu", HostMeter(), 1).adopt(Noted(), UpdatePlan)
    assert Warming().warmup_rollouts == 0
    assert WithinBudget(AdaptivePolicy(), 0.5 * 2**30).budget_bytes == 2**29  # type: ignore[arg-type]


def test_packing_what_cannot_be_packed_is_refused() -> None:
    alone = UpdateWork((9, 9), (4, 4), GEOMETRY)
    with pytest.raises(ConfigError, match="these 2 rows cannot share their prompts"):
        check_packing(UpdatePlan(pack_prompts=True), alone)
    check_packing(UpdatePlan(), alone)
    check_packing(UpdatePlan(pack_prompts=True), replace(alone, prompts=(0, 1)))
    check_packing(UpdatePlan(pack_prompts=True), UpdateWork((), (), GEOMETRY))


def test_large_caches_are_decoded_in_fewer_rows_on_a_cpu() -> None:
    work = RolloutWork(prompt_tokens=(64,) * 64, group_size=8, max_new_tokens=512, geometry=GEOMETRY)
    rows = AdaptivePolicy().before_rollout(work, memory(2**40)).rows_in_flight
    assert rows == 64 * 2**20 // (GEOMETRY.kv_bytes(576) + 4 * 1000)
    assert AdaptivePolicy().before_rollout(work, memory(2**40, device="cuda")).rows_in_flight == 256


def test_a_packed_micro_batch_is_as_small_as_a_tenth_of_the_time_affords() -> None:
    """Four prompts of 40 tokens, each with 8 completions of 160."""
    work = replace(update_work(*[200] * 32), action_tokens=(160,) * 32, prompts=tuple(row // 8 for row in range(32)))
    plan = AdaptivePolicy().before_update(work, memory(2**40))
    # In 1,024: 6 pieces of 5,440 tokens; in 576: 12 of 5,600, by 51 tokens a piece 8 % slower; in 432: 16 and 14 %.
    assert plan.pack_prompts
    assert plan.micro_batch_tokens == 576
    fast, lower = replace(plan, micro_batch_tokens=1024), replace(plan, micro_batch_tokens=432)
    piece = 0.1 * 512
    assert update_time("cpu", work, plan, fast) == pytest.approx((5600 + 12 * piece) / (5440 + 6 * piece))
    assert update_time("cpu", work, lower, fast) == pytest.approx((5760 + 16 * piece) / (5440 + 6 * piece))


def test_a_fixed_policy_checks_its_plans_when_built() -> None:
    with pytest.raises(ConfigError, match="micro_batch_tokens is '8'; it must be a whole number, without quotes"):
        FixedPolicy(update=UpdatePlan(micro_batch_tokens="8"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rows_in_flight is 0"):
        FixedPolicy(RolloutPlan(rows_in_flight=0))
