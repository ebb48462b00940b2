"""What holds of every plan a policy finds, over random works, geometries and pasts; and what a past does to plans."""

import random
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from memsafe_rl.config.degradation import LOSSY_REMEDIES
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.planning.policies import (
    PRESETS,
    AdaptivePolicy,
    LadderPolicy,
    MemoryPolicy,
    WithinBudget,
    preset,
)
from memsafe_rl.memory.planning.search import (
    FALLBACKS,
    LOSSLESS,
    LOSSY,
    Room,
    extra_bytes,
    fallbacks_named,
    reachable,
    with_prediction,
)
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

Plan = RolloutPlan | UpdatePlan
GIB = 2**30
SEEDS = range(8)
SAMPLED = (Phase.ROLLOUT, Phase.EVALUATE, Phase.SCORE, Phase.REWARD)


def geometry(draw: random.Random) -> ModelGeometry:
    layers, hidden, kv = draw.choice([2, 12, 28]), draw.choice([64, 512, 2048]), draw.choice([2, 8])
    weights = draw.choice([10**6, 10**9, 4 * 10**9])
    return ModelGeometry(
        layers=layers,
        hidden_size=hidden,
        intermediate_size=draw.choice([2, 4]) * hidden,
        heads=8,
        kv_heads=kv,
        head_dim=hidden // 8,
        vocab_size=draw.choice([258, 32_000, 151_936]),
        max_positions=None,
        windows=tuple(draw.choice([None, None, 32]) for _ in range(layers)),
        parameter_bytes=weights,
        trainable_bytes=draw.choice([weights, weights // 100]),
        compute_bytes=draw.choice([2, 4]),
        cache_bytes=2,
        head_trainable=draw.random() < 0.5,
    )


def works(draw: random.Random) -> tuple[RolloutWork, UpdateWork]:
    sizes = geometry(draw)
    prompts = tuple(draw.randint(1, 600) for _ in range(draw.randint(1, 6)))
    actions = tuple(draw.randint(1, 1024) for _ in range(draw.randint(1, 64)))
    rows = tuple(action + draw.choice(prompts) for action in actions)
    rollout = RolloutWork(prompts, draw.choice([1, 2, 7, 16]), draw.randint(1, 1024), sizes, scored=True)
    return rollout, UpdateWork(rows, actions, sizes)


def memory(budget_bytes: int, draw: random.Random | None = None, **known: object) -> MemoryState:
    live = 0 if draw is None else draw.randint(0, GIB)
    device = "cuda" if draw is None else draw.choice(["cuda", "cpu"])
    state = MemoryState(device=device, budget_bytes=budget_bytes, live_bytes=live, peak_bytes=live)
    return replace(state, **known)  # type: ignore[arg-type]


def failure(phase: Phase, plan: Plan, work: RolloutWork | UpdateWork | None, **known: object) -> MemoryFailure:
    made = MemoryFailure(phase=phase, requested_bytes=None, attempt=1, message="", plan=plan, work=work)
    return replace(made, **known)  # type: ignore[arg-type]


def floor(work: RolloutWork | UpdateWork, state: MemoryState) -> dict[str, int]:
    """Says what the leanest lossless plan is predicted to hold, and who holds it."""
    phase = Phase.UPDATE if isinstance(work, UpdateWork) else Phase.ROLLOUT
    start: Any = UpdatePlan() if isinstance(work, UpdateWork) else RolloutPlan()
    room = Room(phase, work, state)
    plans = reachable(start, work, fallbacks_named(LOSSLESS, phase))
    leanest = min(plans, key=lambda plan: room.demand(plan, room.extra_bytes(plan)))
    predicted = with_prediction(leanest, work, state).predicted_bytes
    found = {name: size for name, size in predicted.items() if name.split("/")[0] == phase}
    return {"held": 2 * found[phase] - sum(found.values()), **found}


POLICIES: tuple[MemoryPolicy, ...] = (AdaptivePolicy(), LadderPolicy(), LadderPolicy(climbs=True), preset("8-12GB"))


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_smaller_budget_never_gives_a_plan_predicted_to_hold_more(seed: int, policy: MemoryPolicy) -> None:
    draw = random.Random(seed)
    rollout, update = works(draw)
    state = memory(0, draw, corrections={"update": 1.4, "rollout": 0.7})
    before: dict[str, float] = {}
    for budget in sorted((int(10 ** draw.uniform(5, 11)) for _ in range(25)), reverse=True):
        now = replace(state, budget_bytes=budget)
        plans = (policy.before_rollout(rollout, now), policy.before_update(update, now))
        predicted = {name: size for plan in plans for name, size in plan.predicted_bytes.items() if "/" not in name}
        assert all(size <= before.get(name, float("inf")) for name, size in predicted.items())
        before = dict(predicted)


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_fit_the_free_budget_or_are_nearly_the_leanest(seed: int) -> None:
    draw = random.Random(seed)
    rollout, update = works(draw)
    for budget in (10**7, 10**9, 10**10, 10**11):
        state = memory(budget, draw)
        for work, phase in ((rollout, Phase.ROLLOUT), (update, Phase.UPDATE)):
            plan: Plan = (
                AdaptivePolicy().before_rollout(rollout, state)
                if work is rollout
                else AdaptivePolicy().before_update(update, state)
            )
            least = floor(work, state)
            added = plan.predicted_bytes[phase] - state.live_bytes
            room = 0.8 * (budget - state.live_bytes)
            assert added <= max(room, 1.05 * (least[phase] - state.live_bytes) + 1)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("known", [True, False], ids=["work known", "work unknown"])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_way_down_ends_and_each_step_is_leaner(seed: int, known: bool, policy: MemoryPolicy) -> None:
    draw = random.Random(seed)
    rollout, update = works(draw)
    starts: list[tuple[Phase, Plan, RolloutWork | UpdateWork]] = [(p, RolloutPlan(256), rollout) for p in SAMPLED]
    starts += [(Phase.UPDATE, UpdatePlan(trajectory_device="device"), update), (Phase.SCORE, RolloutPlan(), update)]
    for phase, start, work in starts:
        plan: Plan | None = start
        steps = 0
        while plan is not None:
            failed = failure(phase, plan, work if known else None, budget_bytes=draw.choice([0, 10**9]), live_bytes=7)
            lower: Plan | None = policy.after_oom(plan, failed)  # type: ignore[type-var]
            assert lower == policy.after_oom(plan, failed)  # type: ignore[type-var]
            if lower is not None:
                assert_leaner(phase, work if known else None, plan, lower)
            plan, steps = lower, steps + 1
        assert steps <= 60


def assert_leaner(phase: Phase, work: RolloutWork | UpdateWork | None, plan: Plan, lower: Plan) -> None:
    changed = {f.name for f in fields(plan) if getattr(plan, f.name) != getattr(lower, f.name)} - {"predicted_bytes"}
    assert changed
    assert changed <= set(LOSSLESS)
    before, after = extra_bytes(phase, work, plan), extra_bytes(phase, work, lower)
    if before is not None and after is not None:
        assert after <= before or changed & {"park_optimizer", "checkpointing"}
    for name in changed:
        old, new = getattr(plan, name), getattr(lower, name)
        assert new == "host" or new is True or new < old


@pytest.mark.parametrize("seed", SEEDS)
def test_policies_are_functions_of_their_arguments(seed: int) -> None:
    draw = random.Random(seed)
    rollout, update = works(draw)
    state = memory(10**9, draw, failures=(failure(Phase.UPDATE, UpdatePlan(), update, step=3),), step=5)
    for policy in POLICIES:
        assert policy.before_rollout(rollout, state) == policy.before_rollout(rollout, state)
        assert policy.before_update(update, state) == policy.before_update(update, state)


def test_no_fallback_can_reach_the_work() -> None:
    plans = {entry.name for kind in (RolloutPlan, UpdatePlan) for entry in fields(kind)}
    works_fields = {entry.name for kind in (RolloutWork, UpdateWork) for entry in fields(kind)}
    assert set(LOSSLESS) <= plans
    assert not plans & works_fields
    assert all(fallback.about for fallback in FALLBACKS)
    assert not set(LOSSLESS) & set(LOSSY)


def test_the_lossy_fallbacks_are_those_the_trainer_can_take() -> None:
    assert set(LOSSY) == set(LOSSY_REMEDIES)


# ---------------------------------------------------------------------- the past

SIZES = ModelGeometry(8, 512, 1536, 8, 4, 64, 32_000, None, (None,) * 8, 10**8, 10**6, 2, 2, head_trainable=False)
WORK = UpdateWork((512,) * 64, (256,) * 64, SIZES)
SAMPLING = RolloutWork((256,) * 16, 16, 256, SIZES, scored=True)


def size_of(plan: Plan, phase: Phase = Phase.UPDATE) -> int:
    return extra_bytes(phase, WORK if isinstance(plan, UpdatePlan) else SAMPLING, plan) or 0


@pytest.mark.parametrize(("vocab", "cpu", "cuda"), [(151_936, 64, 512), (32_000, 262, 512), (4_000, 2097, 2097)])
def test_a_tile_is_as_large_as_the_device_is_fast(vocab: int, cpu: int, cuda: int) -> None:
    work, policy = replace(WORK, geometry=replace(SIZES, vocab_size=vocab)), AdaptivePolicy(checkpointing=False)
    for device, tile in (("cpu", cpu), ("cuda", cuda)):
        assert policy.before_update(work, memory(2**45, device=device)).logprob_tile == tile
    few = replace(work, row_tokens=(100,) * 2, action_tokens=(50,) * 2)
    assert policy.before_update(few, memory(2**45)).logprob_tile == 100


def test_a_tile_shrinks_only_where_bytes_bind() -> None:
    work, policy = replace(WORK, geometry=replace(SIZES, vocab_size=151_936)), AdaptivePolicy()
    budgets = (GIB // 10, GIB // 4, GIB // 2, 8 * GIB)
    assert [policy.before_update(work, memory(one)).logprob_tile for one in budgets] == [64, 256, 256, 512]


def test_with_room_to_spare_neither_noise_nor_corrections_move_the_plan() -> None:
    calm, policy = memory(2**45), AdaptivePolicy()
    noisy = memory(2**45, live_bytes=3 * GIB, corrections={"update": 3.0, "rollout": 0.3, "score": 2.0})
    for one, other in (
        (policy.before_update(WORK, calm), policy.before_update(WORK, noisy)),
        (policy.before_rollout(SAMPLING, calm), policy.before_rollout(SAMPLING, noisy)),
    ):
        assert replace(one, predicted_bytes={}) == replace(other, predicted_bytes={})


def test_a_measured_excess_shrinks_the_plan_and_is_part_of_the_prediction() -> None:
    policy = AdaptivePolicy()
    fast = policy.before_update(WORK, memory(2**45))
    budget = int(fast.predicted_bytes["update"] / 0.75)
    assert policy.before_update(WORK, memory(budget)) == fast
    corrected = policy.before_update(WORK, memory(budget, corrections={"update": 1.5}))
    assert size_of(corrected) < size_of(fast)
    assert corrected.predicted_bytes["update"] == pytest.approx(1.5 * size_of(corrected), rel=1e-6)


def test_a_plan_leaves_what_the_allocator_needs_in_its_phase() -> None:
    policy = AdaptivePolicy()
    fast = policy.before_update(WORK, memory(2**45))
    budget = int(fast.predicted_bytes["update"] / 0.75)
    aside = budget // 2
    assert policy.before_update(WORK, memory(budget, stranded_bytes={"rollout": aside})) == fast
    leaves = policy.before_update(WORK, memory(budget, stranded_bytes={"update": aside}))
    assert size_of(leaves) < size_of(fast)
    assert leaves == policy.before_update(WORK, memory(budget - aside))


def test_what_changes_no_bit_is_tried_before_rows_are_split() -> None:
    failed = failure(Phase.UPDATE, UpdatePlan(), WORK, budget_bytes=2**45)
    lower = AdaptivePolicy().after_oom(UpdatePlan(), failed)
    assert lower == UpdatePlan(checkpointing=True)


def test_a_failure_takes_as_many_fallbacks_as_the_free_bytes_ask_for() -> None:
    start = UpdatePlan(16384, 1024)
    free = size_of(start) // 20
    failed = failure(Phase.UPDATE, start, WORK, budget_bytes=GIB + free, live_bytes=GIB)
    lower = AdaptivePolicy().after_oom(start, failed)
    assert lower is not None
    assert size_of(lower) <= free


def test_plans_after_a_failure_stay_below_it_and_grow_back_a_notch_at_a_time() -> None:
    policy = AdaptivePolicy()
    fast = policy.before_update(WORK, memory(2**45))

    def planned(step: int, *failed_at: int) -> UpdatePlan:
        failures = tuple(failure(Phase.UPDATE, fast, WORK, step=at) for at in failed_at)
        return policy.before_update(WORK, memory(2**45, step=step, failures=failures))

    assert planned(11, 10).predicted_bytes["update"] < fast.predicted_bytes["update"]
    assert planned(18, 10) == planned(11, 10)
    assert planned(19, 10) == fast  # 8 steps, 11 to 18, went without trouble
    assert planned(20, 10, 19) == planned(35, 10, 19) == planned(11, 10)
    assert planned(36, 10, 19) == fast  # after 16 this time


@pytest.mark.slow
def test_growing_back_stops_at_the_next_notch_first() -> None:
    policy, wide = AdaptivePolicy(), memory(2**45)
    fast = policy.before_update(WORK, wide)
    small = replace(fast, micro_batch_tokens=1024)
    failures = (failure(Phase.UPDATE, small, WORK, step=0),)
    sizes = [size_of(policy.before_update(WORK, replace(wide, step=step, failures=failures))) for step in range(60)]
    assert sizes == sorted(sizes)
    assert sizes[0] < size_of(small)
    assert size_of(small) / 2 < sizes[9] <= size_of(small)
    assert len(set(sizes)) >= 3
    assert sizes[-1] == size_of(fast)


def test_a_ceiling_outlives_a_checkpoint_that_forgets_the_work() -> None:
    policy = AdaptivePolicy()
    fast = policy.before_update(WORK, memory(2**45))
    failures = (failure(Phase.UPDATE, fast, None, step=4),)
    assert size_of(policy.before_update(WORK, memory(2**45, step=5, failures=failures))) < size_of(fast)


@pytest.mark.parametrize(
    ("phase", "field"),
    [
        (Phase.ROLLOUT, "rows_in_flight"),
        (Phase.EVALUATE, "rows_in_flight"),
        (Phase.SCORE, "score_tokens"),
        (Phase.REWARD, "reward_rows"),
    ],
)
def test_a_failure_of_one_phase_shrinks_that_phase_alone(phase: Phase, field: str) -> None:
    policy = AdaptivePolicy()
    fast = policy.before_rollout(SAMPLING, memory(2**45))
    failures = (failure(phase, fast, SAMPLING, step=4),)
    later = policy.before_rollout(SAMPLING, memory(2**45, step=5, failures=failures))
    changed = {f.name for f in fields(fast) if getattr(fast, f.name) != getattr(later, f.name)} - {"predicted_bytes"}
    assert changed == {field}


def test_scoring_goes_on_below_the_longest_row() -> None:
    plan: RolloutPlan | None = RolloutPlan(score_tokens=256, park_optimizer=True)
    seen = []
    while plan is not None:
        seen.append(plan.score_tokens)
        plan = LadderPolicy().after_oom(plan, failure(Phase.SCORE, plan, WORK))
    assert seen[0] == 256
    assert seen[-1] == 1


def test_parking_waits_until_the_state_is_what_does_not_fit() -> None:
    policy, state = AdaptivePolicy(), 10 * GIB
    held = state + GIB
    roomy = memory(2**45, live_bytes=held, optimizer_bytes=state)
    assert not policy.before_update(WORK, roomy).park_optimizer
    tight = replace(roomy, budget_bytes=held + GIB // 100)
    plan, rollout = policy.before_update(WORK, tight), policy.before_rollout(SAMPLING, tight)
    assert plan.park_optimizer
    assert rollout.park_optimizer
    assert plan.predicted_bytes["update"] <= GIB + 0.8 * (tight.budget_bytes - GIB)
    # Parked already, the state is no part of what is held, and the plan must not bring it back.
    parked = replace(tight, live_bytes=GIB, parked_bytes=state)
    assert policy.before_update(WORK, parked) == plan


# ---------------------------------------------------------------------- ladders, compositions, presets


def test_a_ladder_starts_at_the_users_plans() -> None:
    update, rollout = UpdatePlan(4096, 512), RolloutPlan(128)
    policy = LadderPolicy(rollout=rollout, update=update)
    assert replace(policy.before_update(WORK, memory(2**45)), predicted_bytes={}) == update
    assert replace(policy.before_rollout(SAMPLING, memory(2**45)), predicted_bytes={}) == rollout


def test_a_ladder_takes_its_fallbacks_in_order_until_the_estimate_fits() -> None:
    fallbacks = ("micro_batch_tokens", "checkpointing")
    policy, start = LadderPolicy(fallbacks=fallbacks, update=UpdatePlan(8192, 64)), UpdatePlan(8192, 64)
    sizes = [(tokens, size_of(replace(start, micro_batch_tokens=tokens))) for tokens in (8192, 4096, 2048, 1024, 512)]
    for tokens, size in sizes:
        plan = policy.before_update(WORK, memory(int(size / 0.799)))
        assert (plan.micro_batch_tokens, plan.checkpointing) == (tokens, False)
    assert policy.before_update(WORK, memory(1)).checkpointing


def test_a_ladder_stays_where_it_stands_unless_it_may_climb() -> None:
    stands = UpdatePlan(1024, 64, checkpointing=True)
    for climbs in (False, True):
        policy = LadderPolicy(update=UpdatePlan(4096, 512), climbs=climbs)
        plan = policy.before_update(WORK, memory(2**45, last_update_plan=stands))
        expected = UpdatePlan(4096, 512) if climbs else stands
        assert replace(plan, predicted_bytes={}) == expected


def test_a_ladder_that_climbs_stays_below_what_failed() -> None:
    policy, start = LadderPolicy(climbs=True), UpdatePlan()
    failures = (failure(Phase.UPDATE, start, WORK, step=0),)
    assert policy.before_update(WORK, memory(2**45, step=1, failures=failures)).checkpointing
    assert not policy.before_update(WORK, memory(2**45, step=9, failures=failures)).checkpointing


def test_what_failed_in_the_forecast_fails_all_run_long() -> None:
    policy, large = LadderPolicy(climbs=True), size_of(UpdatePlan())
    failed = failure(Phase.UPDATE, UpdatePlan(), None, estimated_bytes=large, foreseen=True)
    for step in (1, 9, 1000):
        plan = policy.before_update(WORK, memory(2**45, step=step, failures=(failed,)))
        assert size_of(replace(plan, predicted_bytes={})) < large
    chance = (failed, failure(Phase.UPDATE, UpdatePlan(1024), WORK, step=3))
    assert size_of(policy.before_update(WORK, memory(2**45, step=5, failures=chance))) < size_of(UpdatePlan(1024))
    later = policy.before_update(WORK, memory(2**45, step=2000, failures=chance))
    assert size_of(UpdatePlan(1024)) < size_of(later) < large


def test_what_failed_for_long_rows_does_not_hold_short_ones_back() -> None:
    failed = failure(Phase.UPDATE, UpdatePlan(), None, estimated_bytes=size_of(UpdatePlan()), foreseen=True)
    short = replace(WORK, row_tokens=(128,) * 8, action_tokens=(64,) * 8)
    plan = LadderPolicy(climbs=True).before_update(short, memory(2**45, step=1, failures=(failed,)))
    assert replace(plan, predicted_bytes={}) == UpdatePlan()


def test_a_ladder_without_a_fallback_never_takes_it() -> None:
    policy = LadderPolicy(fallbacks=("logprob_tile",))
    lower = policy.after_oom(UpdatePlan(), failure(Phase.UPDATE, UpdatePlan(), WORK))
    assert lower is not None
    assert not lower.checkpointing
    assert policy.after_oom(RolloutPlan(), failure(Phase.ROLLOUT, RolloutPlan(), SAMPLING)) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [("optim", "list it in allow_lossy instead"), ("luck", "no fallback 'luck'; write some of kept")],
)
def test_a_ladder_refuses_what_is_no_lossless_fallback(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LadderPolicy(fallbacks=("checkpointing", name))


def test_a_bounded_policy_plans_and_recovers_within_its_bound() -> None:
    inner = AdaptivePolicy()
    bounded = WithinBudget(inner, GIB)
    assert bounded.before_update(WORK, memory(2**45)) == inner.before_update(WORK, memory(GIB))
    assert bounded.before_rollout(SAMPLING, memory(2**45)) == inner.before_rollout(SAMPLING, memory(GIB))
    assert bounded.before_update(WORK, memory(GIB // 2)) == inner.before_update(WORK, memory(GIB // 2))
    failed = failure(Phase.UPDATE, UpdatePlan(), WORK, budget_bytes=2**45)
    assert bounded.after_oom(UpdatePlan(), failed) == inner.after_oom(UpdatePlan(), replace(failed, budget_bytes=GIB))


def qwen(layers: int, hidden: int, inner: int, heads: int, kv: int, weights: int, trained: int) -> ModelGeometry:
    """A Qwen in bf16 with a vocabulary of 151,936; all of it trained where as many bytes are trained as there are."""
    return ModelGeometry(
        layers, hidden, inner, heads, kv, 128, 151_936, 32_768, (None,) * layers, weights, trained, 2, 2,
        head_trainable=trained == weights,
    )  # fmt: skip


MB = 10**6
MODELS = {
    "Qwen3-0.6B LoRA": qwen(28, 1024, 3072, 16, 8, 1232 * MB, 40 * MB),
    "Qwen3-0.6B full": qwen(28, 1024, 3072, 16, 8, 1192 * MB, 1192 * MB),
    "Qwen2.5-1.5B LoRA": qwen(28, 1536, 8960, 12, 2, 3161 * MB, 74 * MB),
    "Qwen2.5-7B 4-bit LoRA": qwen(28, 3584, 18_944, 28, 4, 5760 * MB, 160 * MB),
}
CARDS = {"24GB+": 24, "12-24GB": 12, "8-12GB": 8, "under-8GB": 6}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("card", CARDS)
def test_presets_fit_their_cards_or_the_floor_says_who_is_in_the_way(card: str, model: str) -> None:
    sizes = MODELS[model]
    rollout = RolloutWork((512,) * 4, 16, 1024, sizes, scored=True)
    update = UpdateWork((1536,) * 64, (1024,) * 64, sizes)
    held = sizes.parameter_bytes + 2 * sizes.trainable_bytes
    budget = int(0.9 * CARDS[card] * GIB)
    state = memory(budget, live_bytes=held, optimizer_bytes=2 * sizes.trainable_bytes)
    policy = preset(card)
    plans = (policy.before_rollout(rollout, state), policy.before_update(update, state))
    peak = max(size for plan in plans for name, size in plan.predicted_bytes.items() if "/" not in name)
    if (card, model) == ("under-8GB", "Qwen2.5-7B 4-bit LoRA"):
        least = floor(update, state)
        assert least["update"] > budget
        # Who is in the way: the weights, of which the state has been parked.
        assert max(least, key=lambda name: least[name] if name != "update" else 0) == "held"
        assert least["held"] == sizes.parameter_bytes
    else:
        assert peak <= budget


def test_presets_plan_alike_on_every_card_of_a_kind() -> None:
    assert list(PRESETS) == list(CARDS)
    policy = preset("12-24GB")
    plans = [policy.before_update(WORK, memory(int(0.9 * gib * GIB))) for gib in (12, 16, 23)]
    assert plans[0] == plans[1] == plans[2]
    with pytest.raises(ConfigError, match="no preset '48GB' of memory policies; write one of 24GB"):
        preset("48GB")


def test_the_plans_there_are_are_all_combinations() -> None:
    fallbacks = fallbacks_named(("checkpointing", "micro_batch_tokens"), Phase.UPDATE)
    work = UpdateWork((10,) * 4, (5,) * 4, SIZES)
    found = [(plan.checkpointing, plan.micro_batch_tokens) for plan in reachable(UpdatePlan(40, 5), work, fallbacks)]
    assert sorted(found) == sorted((on, tokens) for on in (False, True) for tokens in (40, 20, 10))


def test_the_composed_policy_of_the_docs_bounds_another_ones_answer() -> None:
    text = (Path(__file__).parents[3] / "docs" / "memory-policies.md").read_text()
    ladder, _, composed = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    scope: dict[str, Any] = {"__name__": "docs"}
    exec(ladder, scope)
    exec(composed, scope)
    wide = memory(2**45)
    # The default takes the leanest within a tenth: 3 pieces of 24 rows are 8 % slower by its reckoning than 2 of 32.
    own, default, bounded = scope["policy"], scope["GoodNeighbour"](), scope["GoodNeighbour"](scope["policy"])
    for policy, tokens in ((own, 16384), (default, 12288), (bounded, 16384)):
        assert policy.before_update(WORK, wide).micro_batch_tokens == tokens
        assert policy.after_oom(UpdatePlan(), failure(Phase.UPDATE, UpdatePlan(), WORK, budget_bytes=2**45)) is not None
    neighbour = scope["GoodNeighbour"](leave_bytes=2**45 - GIB)
    assert neighbour.before_rollout(SAMPLING, wide).rows_in_flight <= 32
    assert replace(neighbour.before_update(WORK, wide), predicted_bytes={}) == replace(
        AdaptivePolicy().before_update(WORK, memory(GIB)), predicted_bytes={}
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rollout": None}, "RolloutPlan"),
        ({"update": 5}, "UpdatePlan"),
        ({"fallbacks": 5}, "is 5; give a tuple"),
    ],
)
def test_a_ladder_of_no_plans_is_refused_when_it_is_made(given: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        LadderPolicy(**given)
