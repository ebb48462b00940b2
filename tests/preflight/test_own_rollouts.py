"""A run holds what its own rollouts make it hold: the forecast tries these, in the order in which they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig

from memsafe_rl import AdaptivePolicy, FixedPolicy, GRPOTrainer, RolloutPlan, UpdatePlan
from memsafe_rl.micro_batches import cut_work
from memsafe_rl.preflight import own_rollouts as own_rollouts_module
from memsafe_rl.preflight.own_rollouts import candidates, own_rollouts, worst_trials
from memsafe_rl.preflight.worst_case import Longest, find_longest
from memsafe_rl.preflight.worst_rows import PlannedStep, Step
from memsafe_rl.types import Phase, UpdateWork
from tests.preflight import beside
from tests.tiny import tiny_model, tiny_tokenizer

LENGTHS = (5, 40, 12, 70, 9, 31, 66, 22, 58, 17, 80, 3, 44, 27, 13, 61)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen3", vocab_size=3000, layers=2, hidden=64).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def ragged(*lengths: int) -> Dataset:
    return Dataset.from_dict({"prompt": [f"{index:02d}".ljust(most, ".")[:most] for index, most in enumerate(lengths)]})


def run(folder: Path, policy: Any = None, **settings: Any) -> tuple[Any, dict[Phase, int]]:
    given = {
        "train_dataset": ragged(*LENGTHS),
        "memory_policy": policy,
        "peft_config": LoraConfig(r=8, target_modules="all-linear") if settings.pop("lora", False) else None,
    }
    return beside.run(folder, given=given, alarms=False, **{"per_device_train_batch_size": 12, **settings})


@pytest.mark.slow
def test_a_slice_is_packed_where_all_rows_that_are_scored_with_it_are(tmp_path: Path) -> None:
    """Of 12 rows behind 3 prompts a slice has 8; by themselves they would be packed, and hold less."""
    tiny_model("qwen3", layers=1, hidden=256).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    given = {"train_dataset": ragged(4, 6, 11), "peft_config": LoraConfig(r=4, target_modules="all-linear")}
    settings = {"num_generations": 4, "max_completion_length": 48, "beta": 0.1, "max_steps": 1}
    policy = FixedPolicy(RolloutPlan(score_tokens=512), UpdatePlan(micro_batch_tokens=512, checkpointing=True))
    trainer, held = beside.run(
        tmp_path, given={**given, "memory_policy": policy}, alarms=False, per_device_train_batch_size=12, **settings
    )
    assert trainer.forecast is not None
    assert trainer.forecast.phase_bytes[Phase.SCORE] == pytest.approx(held[Phase.SCORE], rel=0.005)


def check(trainer: Any, held: dict[Phase, int], *, rel: float = 0.005) -> None:
    assert trainer.forecast is not None
    for phase, size in trainer.forecast.phase_bytes.items():
        assert size == pytest.approx(held[phase], rel=rel), phase


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_shorter_prompts_may_get_a_plan_that_holds_more(folder: Path, seed: int) -> None:
    trainer, held = run(folder, AdaptivePolicy(pack_prompts=False), seed=seed, max_steps=3)
    check(trainer, held)


@pytest.mark.slow
def test_steps_of_a_shuffled_rollout_are_those_of_the_run(folder: Path) -> None:
    parts = {"per_device_train_batch_size": 6, "steps_per_generation": 2, "num_iterations": 2}
    trainer, held = run(folder, AdaptivePolicy(pack_prompts=False), max_steps=8, **parts)
    check(trainer, held)


@pytest.mark.slow
def test_the_first_rollout_is_scored_under_the_tile_of_no_plan(folder: Path) -> None:
    narrow = FixedPolicy(RolloutPlan(), UpdatePlan(logprob_tile=32))
    trainer, held = run(folder, narrow, lora=True, beta=0.04, max_steps=2)
    check(trainer, held)


@pytest.mark.slow
def test_entropies_of_the_first_step_are_scored_under_the_tile_of_no_plan(folder: Path) -> None:
    wide = FixedPolicy(RolloutPlan(), UpdatePlan(logprob_tile=4096))
    rows = {"num_generations": 12, "per_device_train_batch_size": 72}
    trainer, held = run(folder, wide, top_entropy_quantile=0.3, max_steps=1, **rows)
    check(trainer, held)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_the_first_step_comes_before_an_optimizer_that_makes_its_state_in_it(folder: Path, steps: int) -> None:
    trainer, held = run(folder, optim="adamw_torch", beta=0.04, max_steps=steps)
    check(trainer, held)


def setup_of(folder: Path, lengths: tuple[int, ...] = LENGTHS, policy: Any = None, **settings: Any) -> Any:
    config = beside.config_for(folder, memory_forecast=False, **{"per_device_train_batch_size": 12, **settings})
    return GRPOTrainer(str(folder), beside.alternating, config, ragged(*lengths), memory_policy=policy).setup


def test_rollouts_are_those_that_the_run_will_draw(folder: Path) -> None:
    setup = setup_of(folder, max_steps=3)
    found = own_rollouts(setup, find_longest(setup))
    drawn = [tuple(len(example["prompt"]) for example in setup.source.take(3 * place, 3)) for place in range(3)]
    assert [one.longest_prompts for one in found] == drawn
    assert [(one.rollout, len(one.prompt)) for one in found] == [(place, max(drawn[place])) for place in range(3)]


@pytest.mark.parametrize(
    ("settings", "count"), [({"num_iterations": 2}, 2), ({"num_iterations": 2, "kl_stop": 0.1, "beta": 0.1}, 3)]
)
def test_rollouts_are_as_many_as_the_steps_may_take(folder: Path, settings: dict[str, Any], count: int) -> None:
    setup = setup_of(folder, max_steps=3, **settings)
    assert len(own_rollouts(setup, find_longest(setup))) == count


def test_where_nobody_knows_the_prompts_the_longest_stand_for_all(folder: Path) -> None:
    setup, alone = setup_of(folder, max_steps=3), Longest((1,) * 9, 4, "as given")
    assert own_rollouts(setup, alone) == [alone]


@pytest.mark.parametrize("setting", [{"dynamic_sampling": True}, {"partial_rollout_tokens": 8}])
def test_where_what_is_drawn_decides_prompts_of_any_lengths_may_meet(folder: Path, setting: dict[str, Any]) -> None:
    setup = setup_of(folder, (5, 5, 70, 5, 5, 5), max_steps=1, **setting)
    longest = find_longest(setup)
    found = own_rollouts(setup, longest)
    assert found[0] == longest
    assert {tuple(sorted(one.longest_prompts)) for one in found} == {(5, 5, 70), (5, 5, 5)}
    assert {one.rollout for one in found} == {None}


@pytest.mark.slow
def test_rollouts_of_short_prompts_alone_may_hold_most_where_groups_are_drawn_again(folder: Path) -> None:
    """Behind the one long prompt a micro-batch has fewer rows, and less is held."""
    given = {"train_dataset": ragged(*(5,) * 15, 90), "memory_policy": None, "peft_config": None}
    rows = {"per_device_train_batch_size": 16, "max_completion_length": 24}
    check(*beside.run(folder, given=given, alarms=False, dynamic_sampling=True, max_steps=3, **rows))


@pytest.mark.slow
def test_a_first_step_whose_shape_does_not_come_again_is_tried_once(folder: Path) -> None:
    """Beside optimizer state that it makes, no step of its shape ever meets what earlier ones left."""
    rows = {"per_device_train_batch_size": 3, "steps_per_generation": 2, "num_generations": 2, "num_iterations": 2}
    recurs = set()
    for seed in range(4):
        setup = setup_of(folder, max_steps=4, seed=seed, scale_rewards="none", **rows)
        among = candidates(setup, find_longest(setup))[:1]
        first, *others = among[0].steps
        assert first.times + sum(one.times for one in others) == 4
        tried, *later = worst_trials(setup, among, grows=True)
        assert tried.steps == (first,)
        again = any(step.rows == first.rows for one in later for step in one.steps)
        assert not again or first.times > 1, f"seed {seed}"
        recurs.add(first.times > 1)
    assert recurs == {False, True}


def test_beyond_what_is_tokenized_the_longest_prompts_stand_for_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_rollouts_module, "_PROMPTS", 6)
    setup = setup_of(folder, max_steps=5)
    longest = find_longest(setup)
    found = own_rollouts(setup, longest)
    assert [one.rollout for one in found] == [0, 1, None]
    assert found[-1] == longest


def test_a_run_that_grows_begins_with_its_first_step(folder: Path) -> None:
    setup = setup_of(folder, max_steps=3)
    among = candidates(setup, find_longest(setup))
    first, *others = worst_trials(setup, among, grows=True)
    assert (first.longest.rollout, first.draws, len(first.steps)) == (0, True, 1)
    assert all(one.longest.rollout != 0 for one in others)
    assert sum(len(one.steps) for one in worst_trials(setup, among[:1], grows=True)) == 1


def test_among_rollouts_that_the_policy_expects_to_be_alike_lengths_decide(folder: Path) -> None:
    """The largest slice is the same in both; the second one, which meets gradients, and what is scored are not."""
    policy = FixedPolicy(RolloutPlan(), UpdatePlan(micro_batch_tokens=256, pack_prompts=False))
    setup = setup_of(folder, (40, 5, 5, 40, 39, 5), policy, max_steps=2, shuffle_dataset=False)
    trials = worst_trials(setup, candidates(setup, find_longest(setup)), grows=False)
    assert {one.longest.rollout: (one.scores, len(one.steps)) for one in trials} == {0: (True, 1), 1: (True, 1)}


def test_of_steps_of_as_many_tokens_that_one_is_tried_whose_attention_copies_most(folder: Path) -> None:
    """Behind prompts of 40, 40 and 5 tokens, completions of 23 are padded to 40; behind 60, 20 and 5 they are not."""
    policy = FixedPolicy(RolloutPlan(), UpdatePlan(micro_batch_tokens=1024, pack_prompts=True))
    setup = setup_of(folder, (60, 20, 5, 40, 40, 5), policy, max_steps=2, shuffle_dataset=False)
    trials = worst_trials(setup, candidates(setup, find_longest(setup)), grows=False)
    assert {one.longest.rollout: len(one.steps) for one in trials} == {0: 0, 1: 1}


def test_a_step_whose_most_completions_meet_gradients_is_expected_to_hold_most(folder: Path) -> None:
    """Both are cut into 7 completions (383 tokens in all) and 9 (380); in the first one the 9 come second."""
    geometry, plan = setup_of(folder).adapter.geometry, UpdatePlan(micro_batch_tokens=384, pack_prompts=True)

    def step(**rows_of_prompt: int) -> PlannedStep:
        prompts = [int(name[1:]) for name, rows in rows_of_prompt.items() for _ in range(rows)]
        work = UpdateWork(tuple(one + 33 for one in prompts), (33,) * len(prompts), geometry, tuple(prompts))
        return PlannedStep(Step(range(len(prompts)), work, 1), plan)

    meeting, alone = step(p74=5, p78=2, p60=5, p23=4), step(p60=5, p78=4, p74=3, p23=4)
    assert [len(rows) for rows in cut_work(meeting.step.work, 384, packed=True)] == [7, 9]
    assert [len(rows) for rows in cut_work(alone.step.work, 384, packed=True)] == [9, 7]
    assert meeting.sizes > alone.sizes


@pytest.mark.parametrize(("tile", "scored"), [(4096, {0, 1}), (512, {0})])
def test_a_shorter_rollout_is_scored_where_its_tile_is_larger(folder: Path, tile: int, scored: set[int]) -> None:
    policy = FixedPolicy(RolloutPlan(), UpdatePlan(logprob_tile=tile))
    setup = setup_of(folder, (40, 40, 40, 9, 9, 9), policy, max_steps=2, shuffle_dataset=False)
    trials = worst_trials(setup, candidates(setup, find_longest(setup)), grows=False)
    assert {one.longest.rollout for one in trials if one.scores} == scored


def test_a_rollout_that_stands_for_all_is_tried_before_and_after_the_run_has_grown(folder: Path) -> None:
    setup = setup_of(folder, max_steps=3)
    (one,) = candidates(setup, Longest((1,) * 9, 4, "as given"))
    trials = worst_trials(setup, [one], grows=True)
    assert [(trial.draws, trial.scores, len(trial.steps)) for trial in trials] == [(True, True, 1)] * 2
