"""Each rule of `alarms` speaks once an episode, says what to do, and can be switched off; a real run gives them."""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import HfArgumentParser

from memsafe_rl.config.alarm_rules import ALARMS, AlarmRules
from memsafe_rl.config.grpo import GRPOConfig
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.training import learner
from memsafe_rl.training.metrics.alarms import STEPS_TO_END, WINDOW_STEPS, AlarmWatch
from memsafe_rl.training.metrics.step_metrics import is_due, sample_weights
from tests.tiny import tiny_model
from tests.trainers.helpers import make_trainer


class OfTheirOwn(torch.optim.SGD):
    """An optimizer of which nobody knows how it rounds."""


OFF = AlarmRules(**dict.fromkeys(ALARMS))  # type: ignore[arg-type]
HEALTHY = {"completions/clipped_ratio": 0.0, "frac_reward_zero_std": 0.0, "reward": 0.5, "kl": 0.05, "step_time": 4.0}


def heard(watch: AlarmWatch, name: str, values: list[float | None], **others: float) -> list[int]:
    """Returns the steps at which the values of one metric gave alarms; None for a step without it."""
    steps = []
    for step, value in enumerate(values, start=1):
        metrics = {**HEALTHY, **others, name: value}
        known = {key: number for key, number in metrics.items() if number is not None}
        steps += [event["step"] for event in watch.observe(step, known)]
    return steps


# Each rule: from which value, once an episode, and what it says


@pytest.mark.parametrize(
    ("rules", "metric", "fine", "broken"),
    [
        (AlarmRules(), "completions/clipped_ratio", 0.049, 0.05),
        (AlarmRules(), "time/reward/judge_seconds", 5.9, 6.0),
        (AlarmRules(), "frac_reward_zero_std", 0.89, 0.9),
        (AlarmRules(kl=(0.02, 0.06)), "kl", 0.06, 0.061),
        (AlarmRules(kl=(0.02, 0.06)), "kl", 0.02, 0.019),
    ],
)
def test_a_broken_rule_speaks_once_until_it_has_held(
    rules: AlarmRules, metric: str, fine: float, broken: float
) -> None:
    flickering = [fine, broken, broken, fine, fine, broken]
    over = [fine] * STEPS_TO_END
    assert heard(AlarmWatch(rules), metric, [*flickering, *over, broken, broken]) == [2, 7 + STEPS_TO_END]


def test_each_objective_has_a_band_and_episodes_of_its_own() -> None:
    watch = AlarmWatch(AlarmRules(), {"fairness": (0.02, 0.06), "truth": (0.08, 0.15)})
    kls = [(0.0, 0.0), (0.07, 0.1), (0.07, 0.2), (0.05, 0.07), (0.01, 0.1), (math.nan, 0.1)]
    told = []
    for step, (fairness, truth) in enumerate(kls, start=1):
        metrics = {**HEALTHY, "objectives/fairness/kl": fairness, "objectives/truth/kl": truth}
        told += [(event["step"], event["objective"], event["value"]) for event in watch.observe(step, metrics)]
    assert told == [(2, "fairness", 0.07), (3, "truth", 0.2)]
    (event,) = AlarmWatch(AlarmRules(), {"truth": (0.08, 0.15)}).observe(1, {**HEALTHY, "objectives/truth/kl": 0.2})
    assert (event["kind"], event["limit"]) == ("objective_kl", [0.08, 0.15])
    assert event["sentence"] == (
        "The KL to the reference on the rows of objective 'truth' is 0.2 nats per token, above its band of 0.08 to "
        "0.15: the model drifts away from the reference; raise its beta or lower learning_rate."
    )
    assert AlarmWatch(OFF, {"truth": (0.08, 0.15)}).observe(1, metrics) == []


def test_a_healthy_run_is_silent() -> None:
    watch = AlarmWatch(AlarmRules(kl=(0.02, 0.06)))
    assert [watch.observe(step, HEALTHY) for step in range(1, 60)] == [[]] * 59


def test_steps_that_do_not_tell_neither_begin_nor_end_an_episode() -> None:
    values: list[float | None] = [0.5, *[None] * (STEPS_TO_END + 1), 0.5]
    assert heard(AlarmWatch(AlarmRules()), "completions/clipped_ratio", values) == [1]
    assert heard(AlarmWatch(AlarmRules(kl=(0.02, 0.06))), "kl", [float("nan"), None, 0.05]) == []


def test_the_event_has_value_limit_and_a_sentence_with_the_remedy() -> None:
    (event,) = AlarmWatch(AlarmRules()).observe(7, {**HEALTHY, "completions/clipped_ratio": 0.125})
    sentence = event.pop("sentence")
    assert event == {"event": "alarm", "kind": "truncation", "step": 7, "value": 0.125, "limit": 0.05}
    assert sentence.startswith(
        "12.5% of the rollout's completions were cut off at max_completion_length (alarm from 5.0%)"
    )
    assert "mask_truncated_completions=True" in sentence


def test_the_slowest_judge_is_named() -> None:
    seconds = {"time/reward/toxicity_seconds": 7.25, "time/reward/judge_seconds": 8.5, "time/reward_seconds": 20.0}
    (event,) = AlarmWatch(AlarmRules()).observe(1, {**HEALTHY, **seconds})
    assert (event["kind"], event["reward"], event["value"]) == ("judge_seconds", "judge", 8.5)
    assert event["sentence"].startswith("The reward function judge took 8.5 s for a rollout (alarm from 6 s)")
    assert "async" in event["sentence"]
    assert "reward_timeout_seconds" in event["sentence"]


# Updates that rounding swallows


def bfloat16_trainer(tmp_path: Path, rate: float, **settings: Any) -> Any:
    model = settings.pop("model", None) or tiny_model(dtype=torch.bfloat16, scale=1.0)
    return make_trainer(
        tmp_path, model=model, learning_rate=rate, **{"max_steps": 4, "master_weights": False, **settings}
    )


def lost(trainer: Any) -> list[dict[str, Any]]:
    return [event for event in trainer.memory_events if event.get("kind") == "lost_updates"]


def test_updates_below_the_rounding_of_bfloat16_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = bfloat16_trainer(tmp_path, 1e-6)
    before = [weight.clone() for weight in trainer.model.parameters() if weight.ndim > 1]
    trainer.train()
    shares = [record.get("lost_updates") for record in trainer.history]
    assert shares[0] > 0.9
    assert shares[1] > 0.9
    assert shares[2:] == [None, None]
    (event,) = lost(trainer)
    assert (event["step"], event["limit"], event["value"]) == (1, 0.5, shares[0])
    for words in ("were not moved by the step", "learning rate of 1e-06", "float32", "peft_config"):
        assert words in event["sentence"]
    assert caplog.text.count("were not moved by the step") == 1
    assert "lost_updates" in trainer.state.log_history[0]
    # What is said of the sample holds for all elements: Adam gives each the same step in the beginning.
    after = [weight for weight in trainer.model.parameters() if weight.ndim > 1]
    stayed = sum(int((old == new).sum()) for old, new in zip(before, after, strict=True))
    assert stayed > 0.9 * sum(weight.numel() for weight in after)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("rate", "settings"),
    [
        (3e-3, {}),
        (1e-6, {"model": tiny_model()}),
        (1e-6, {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}),
        (1e-6, {"alarms": {"lost_updates": None}}),
        (1e-6, {"optimizers": (OfTheirOwn, None)}),
    ],
    ids=["large updates", "float32", "adapter", "switched off", "unknown optimizer"],
)
def test_nothing_is_said_where_updates_arrive_or_are_not_known(
    rate: float, settings: dict[str, Any], tmp_path: Path
) -> None:
    if "optimizers" in settings:
        model = tiny_model(dtype=torch.bfloat16, scale=1.0)
        settings = {"model": model, "optimizers": (OfTheirOwn(model.parameters(), lr=rate), None)}
    trainer = bfloat16_trainer(tmp_path, rate, **settings)
    trainer.train()
    assert lost(trainer) == []
    if rate == 1e-6:
        assert "lost_updates" not in trainer.history[0]


def test_updates_are_first_looked_at_when_the_rate_has_risen(tmp_path: Path) -> None:
    risen = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}
    trainer = bfloat16_trainer(tmp_path, 3e-3, **risen)
    trainer.train()
    assert [("lost_updates" in record) for record in trainer.history] == [False, False, True, False]
    assert lost(trainer) == []


@pytest.mark.slow
def test_looking_changes_no_bit_and_next_to_no_byte(tmp_path: Path) -> None:
    ends, peaks = [], []
    for limit in (0.5, None):
        with SimulatedMemory() as device:
            trainer = bfloat16_trainer(tmp_path, 1e-4, alarms={"lost_updates": limit})
            trainer.train()
            peaks.append(device.peak_bytes)
            ends.append([weight.clone() for weight in trainer.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    assert abs(peaks[0] - peaks[1]) < 4096


def test_a_sample_is_taken_all_over_and_counts_what_has_a_gradient() -> None:
    wide = nn.Parameter(torch.ones(64, 256, dtype=torch.bfloat16))
    norm, narrow = nn.Parameter(torch.ones(8, dtype=torch.bfloat16)), nn.Parameter(torch.ones(4, 4))
    wide.grad, norm.grad, narrow.grad = torch.ones_like(wide), torch.ones_like(norm), torch.ones_like(narrow)
    wide.grad[32:] = 0
    look = sample_weights([norm, narrow, wide])
    assert look is not None
    assert look.tensors == (wide,), "matrices go before vectors, and float32 loses nothing"
    assert len(look.pushed[0]) == 128
    assert sum(look.pushed[0]) == 65, "every 127th of 16,384 elements, of which the first half has a gradient"
    assert look.lost_share() == 1.0
    with torch.no_grad():
        wide[:16] += 1
    assert look.lost_share() == pytest.approx(0.5, abs=0.02)
    assert sample_weights([narrow]) is None
    assert [step for step in range(40) if is_due(step, 4, 40)] == [4, 5, 7, 11, 19]
    assert is_due(0, 0, 1)


def test_equal_rewards_say_what_they_are() -> None:
    (event,) = AlarmWatch(AlarmRules()).observe(1, {**HEALTHY, "frac_reward_zero_std": 1.0, "reward": 0.0})
    assert event["kind"] == "equal_rewards"
    assert event["sentence"].startswith(
        "In 100.0% of the groups all rewards are equal (alarm from 90.0%; mean reward 0), so the model learns nothing"
    )
    assert "dynamic_sampling=True" in event["sentence"]


def test_a_reward_that_tells_nothing_in_the_first_rollout_is_named() -> None:
    of = {"rewards/a/mean": 0.25, "rewards/a/std": 0.0, "rewards/b/mean": math.nan, "rewards/b/std": math.nan}
    fine = {"rewards/c/mean": 0.5, "rewards/c/std": 0.1}
    (event,) = AlarmWatch(AlarmRules()).observe(1, {**HEALTHY, **of, **fine})
    assert event["kind"] == "equal_rewards"
    assert event["sentence"].startswith(
        "For every completion of the rollout, reward function a gave 0.25 and b gave no reward, so the model learns"
    )
    alone = {name: value for name, value in {**HEALTHY, **of}.items() if name != "frac_reward_zero_std"}
    assert AlarmWatch(AlarmRules()).observe(1, alone), "a group of one, too"
    assert not AlarmWatch(AlarmRules()).observe(2, {**HEALTHY, **of, **fine}), "later, a format may be learnt"
    assert not AlarmWatch(OFF).observe(1, {**HEALTHY, **of})
    assert AlarmWatch(AlarmRules()).observe(2, {**HEALTHY, **of, "reward": math.nan}), "no reward at all"


def test_a_reward_that_is_always_nan_is_named_by_rows_and_by_an_alarm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(completions: list[str], **_: Any) -> list[float]:
        return [math.nan] * len(completions)

    trainer = make_trainer(tmp_path, reward_funcs=broken)
    trainer.train()
    told = "\n".join(caplog.messages)
    assert "Reward function 'broken' returned NaN for 8 of 8 completions, the first at row(s) 0, 1, 2. NaN" in told
    assert "step 1: For every completion of the rollout, reward function broken gave no reward" in told
    assert [event["kind"] for event in trainer.memory_events if event["event"] == "alarm"].count("equal_rewards") == 1


def test_a_run_begins_at_its_reference_without_an_alarm() -> None:
    rules = AlarmRules(kl=(0.02, 0.06))
    assert heard(AlarmWatch(rules), "kl", [0.0, 0.001, 0.01, 0.03, 0.01]) == [5]
    watch = AlarmWatch(rules)
    (above,) = watch.observe(1, {**HEALTHY, "kl": 0.25})
    assert (above["kind"], above["value"], above["limit"]) == ("kl", 0.25, [0.02, 0.06])
    assert "is 0.25 nats per token, above its band of 0.02 to 0.06" in above["sentence"]
    assert above["sentence"].endswith("raise beta or lower learning_rate.")
    watch = AlarmWatch(rules)
    watch.observe(1, HEALTHY)
    (below,) = watch.observe(2, {**HEALTHY, "kl": 0.01})
    assert below["sentence"].endswith("lower beta or raise learning_rate.")


# Throughput


def test_throughput_is_the_last_steps_against_those_before() -> None:
    # The usual 4 s; half the speed is 8 s. One slow step is no fall, a second within three is.
    assert heard(AlarmWatch(AlarmRules()), "step_time", [*[4.0] * 8, 9.0, *[4.0] * 8, 8.0, 4.0, 8.0, 8.0]) == [20]
    assert heard(AlarmWatch(AlarmRules()), "step_time", [*[4.0] * 8, *[7.9] * 6]) == []
    # Fewer than five steps before are not known well enough.
    assert heard(AlarmWatch(AlarmRules()), "step_time", [1.0, 1.0, 1.0, 9.0, 9.0, 9.0]) == []
    # A slow creep is compared with what was just before, a lasting slowness becomes the usual.
    assert heard(AlarmWatch(AlarmRules()), "step_time", [4.0 * 1.02**step for step in range(200)]) == []
    assert heard(AlarmWatch(AlarmRules()), "step_time", [*[4.0] * 20, *[9.0] * 60]) == [22]


def test_a_fall_that_costs_less_than_a_second_is_noise() -> None:
    assert heard(AlarmWatch(AlarmRules()), "step_time", [*[0.1] * 20, *[1.0] * 5]) == []


def test_only_steps_that_begin_a_rollout_are_compared() -> None:
    watch = AlarmWatch(AlarmRules())
    events = []
    for step in range(40):
        rollout = {"completions/clipped_ratio": 0.0, "step_time": 9.0}
        events += watch.observe(step + 1, rollout if step % 4 == 0 else {"step_time": 1.0})
    assert events == []


def test_throughput_names_the_phase_that_became_slow() -> None:
    watch = AlarmWatch(AlarmRules())
    usual = {**HEALTHY, "time/rollout_seconds": 2.0, "time/reward_seconds": 0.5, "time/update_seconds": 1.5}
    slow = {**usual, "step_time": 10.0, "time/reward_seconds": 6.5, "time/evaluate_seconds": 99.0}
    events = [event for step in range(12) for event in watch.observe(step + 1, usual if step < 10 else slow)]
    assert [(event["kind"], event["value"]) for event in events] == [("throughput_drop", 0.6)]
    assert "takes 10.0 s where it took 4.0 s: throughput fell by 60.0% (alarm from 50.0%)" in events[0]["sentence"]
    assert "mostly in the reward phase (from 0.5 to 6.5 s)" in events[0]["sentence"]
    assert "reward_timeout_seconds" in events[0]["sentence"]


# Work done again


def test_failures_within_the_window_are_counted() -> None:
    def failure(step: int) -> dict[str, Any]:
        return {"event": "failure", "step": step}

    watch = AlarmWatch(AlarmRules())
    events = [failure(0), failure(0), {"event": "plan", "step": 3}]
    assert watch.observe(4, HEALTHY, events) == []
    events.append(failure(WINDOW_STEPS))
    # The first two belong to the first step, which the last twenty no longer hold.
    assert watch.observe(WINDOW_STEPS + 1, HEALTHY, events) == []
    events += [failure(WINDOW_STEPS + 1), failure(WINDOW_STEPS + 1)]
    (alarm,) = watch.observe(WINDOW_STEPS + 2, HEALTHY, events)
    assert (alarm["kind"], alarm["value"], alarm["limit"]) == ("retries", 3, 3)
    assert alarm["sentence"].startswith("Memory ran out 3 times in the last 20 steps (alarm from 3)")
    assert "memory_budget" in alarm["sentence"]
    assert watch.observe(WINDOW_STEPS + 3, HEALTHY, events) == []


# Off, and kept over a resume


@pytest.mark.parametrize("name", ALARMS)
def test_one_rule_can_be_off_alone(name: str) -> None:
    def sick(step: int) -> dict[str, float]:
        bad = {
            "completions/clipped_ratio": 1.0,
            "frac_reward_zero_std": 1.0,
            "kl": 9.0,
            "objectives/truth/kl": 9.0,
            "time/reward/judge_seconds": 60.0,
        }
        return {**HEALTHY, **bad, "step_time": 4.0 if step < 10 else 40.0}

    failures = [{"event": "failure", "step": 0}] * 5

    def kinds(rules: AlarmRules) -> set[str]:
        watch = AlarmWatch(rules, {"truth": (0.08, 0.15)})
        told = [event for step in range(12) for event in watch.observe(step + 1, sick(step), failures)]
        return {event["kind"] for event in [*told, *watch.observe_weights(1, 0.9, 1e-6)]}

    every = AlarmRules(kl=(0.02, 0.06))
    assert kinds(every) == set(ALARMS)
    assert kinds(replace(every, **{name: None})) == set(ALARMS) - {name}
    assert kinds(OFF) == set()


def test_the_state_goes_through_json_and_the_episode_with_it() -> None:
    values: list[dict[str, float]] = [{**HEALTHY, "step_time": 4.0, "completions/clipped_ratio": 0.5}] * 12
    values += [{**HEALTHY, "step_time": 9.0, "completions/clipped_ratio": 0.5, "kl": 0.01}] * 4
    rules = AlarmRules(kl=(0.02, 0.06))
    whole, before, after = AlarmWatch(rules), AlarmWatch(rules), AlarmWatch(rules)
    expected = [whole.observe(step, metrics) for step, metrics in enumerate(values)]
    found = [before.observe(step, metrics) for step, metrics in enumerate(values[:13])]
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    found += [after.observe(step, metrics) for step, metrics in enumerate(values[13:], start=13)]
    assert found == expected
    assert [event["kind"] for events in expected for event in events] == ["truncation", "kl", "throughput_drop"]


# The setting


@pytest.mark.parametrize("given", [None, True, "true", "on", {}])
def test_the_rules_there_are_without_a_word(given: Any) -> None:
    assert GRPOConfig(alarms=given).alarm_rules == AlarmRules(0.05, 6.0, 0.9, None, 0.5, 3)


@pytest.mark.parametrize("given", [False, "false", "off", "No", dict.fromkeys(ALARMS), dict.fromkeys(ALARMS, False)])
def test_all_rules_off(given: Any) -> None:
    config = GRPOConfig(alarms=given)
    assert config.alarm_rules == OFF
    assert GRPOConfig(**config.to_dict()).alarm_rules == OFF


def test_limits_are_set_by_name_and_the_others_stay() -> None:
    config = GRPOConfig(
        beta=0.04, alarms={"truncation": "0.1", "kl": [0.02, 0.06], "retries": None, "judge_seconds": 30}
    )
    assert config.alarm_rules == AlarmRules(0.1, 30, 0.9, (0.02, 0.06), 0.5, None)
    assert GRPOConfig(alarms='{"equal_rewards": 0.5}').alarm_rules == AlarmRules(equal_rewards=0.5)
    parser = HfArgumentParser(GRPOConfig)
    (parsed,) = parser.parse_args_into_dataclasses(["--alarms", '{"truncation": null}'])
    assert parsed.alarm_rules == AlarmRules(truncation=None)
    assert parser.parse_args_into_dataclasses(["--alarms", "false"])[0].alarm_rules == OFF


@pytest.mark.parametrize(
    ("alarms", "message"),
    [
        ({"truncaton": 0.1}, "There is no alarm 'truncaton'. Did you mean 'truncation'?"),
        ({"loss": 1}, "There is no alarm 'loss'. What there is: truncation, judge_seconds, equal_rewards, kl, "),
        ({"truncation": 5}, "alarms['truncation'] is 5; it must be more than 0 and at most 1, or None for no alarm."),
        ({"judge_seconds": 0}, "alarms['judge_seconds'] is 0; it must be more than 0, or None for no alarm."),
        ({"judge_seconds": "slow"}, "alarms['judge_seconds'] is 'slow'; it must be a number or none."),
        ({"truncation": True}, "alarms['truncation'] is True; it must be a number or none."),
        ({"throughput_drop": 1}, "alarms['throughput_drop'] is 1; it must be more than 0 and less than 1"),
        ({"retries": 0}, "alarms['retries'] is 0; it must be at least 1"),
        ({"kl": 0.1}, "alarms['kl'] is 0.1; it must be a list or none."),
        ({"kl": [0.06, 0.02]}, "alarms['kl'] is [0.06, 0.02]; it must be [low, high] in nats per token"),
        ({"kl": [0.06]}, "alarms['kl'] is [0.06]; it must be [low, high] in nats per token"),
        ({"kl": [0, float("inf")]}, "alarms['kl'] is inf; it must be finite"),
        (0.05, "alarms is 0.05; it must be a mapping"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_remedy(alarms: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(beta=0.04, alarms=alarms)
    assert message in str(caught.value)


def test_a_band_for_the_kl_needs_a_reference() -> None:
    with pytest.raises(
        ConfigError, match=r"alarms has kl=\[0\.02, 0\.06\], but beta is 0.*Set beta above 0, or kl_stop"
    ):
        GRPOConfig(alarms={"kl": [0.02, 0.06]})


# Real runs


def alarms_of(trainer: Any) -> list[dict[str, Any]]:
    return [event for event in trainer.memory_events if event["event"] == "alarm"]


def test_a_run_whose_completions_are_cut_off_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(tmp_path, max_steps=3, alarms={"equal_rewards": None})
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert min(step["completions/clipped_ratio"] for step in trainer.history) >= 0.05
    (alarm,) = alarms_of(trainer)
    assert (alarm["kind"], alarm["step"]) == ("truncation", 1)
    assert alarm["value"] == trainer.history[0]["completions/clipped_ratio"]
    assert [f"step 1: {alarm['sentence']}"] == [text for text in caplog.messages if "cut off" in text]
    written = [json.loads(line) for line in (tmp_path / "memory.jsonl").read_text().splitlines()]
    (line,) = (event for event in written if event["event"] == "alarm")
    assert alarm.items() <= line.items()


def test_a_run_with_alarms_off_is_silent(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=2, alarms=False)
    trainer.train()
    assert alarms_of(trainer) == []


@pytest.mark.slow
def test_a_slow_judge_is_heard_in_training_and_not_in_evaluation(tmp_path: Path) -> None:
    asked: list[int] = []

    def judge(completions: list[str], **_: Any) -> list[float]:
        asked.append(len(completions))
        time.sleep(0.0 if len(completions) == 8 else 0.3)
        return [float(row) for row in range(len(completions))]

    settings: dict[str, Any] = {"reward_funcs": judge, "eval_dataset": [{"prompt": "1+1="}], "num_generations_eval": 3}
    only = {"truncation": None, "judge_seconds": 0.25}
    quiet = make_trainer(tmp_path / "a", eval_strategy="steps", eval_steps=1, alarms=only, **settings)
    quiet.train()
    assert sorted(set(asked)) == [3, 8]
    assert alarms_of(quiet) == []
    settings["per_device_train_batch_size"] = 4
    loud = make_trainer(tmp_path / "b", alarms=only, **settings)
    loud.train()
    assert [(alarm["kind"], alarm["step"], alarm["reward"]) for alarm in alarms_of(loud)] == [
        ("judge_seconds", 1, "judge")
    ]


def test_failed_allocations_are_counted_from_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulate, calls = learner.accumulate_gradient, itertools.count()

    def failing_twice(*arguments: Any, **named: Any) -> Any:
        if next(calls) in (0, 2):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return accumulate(*arguments, **named)

    monkeypatch.setattr(learner, "accumulate_gradient", failing_twice)
    trainer = make_trainer(tmp_path, max_steps=3, alarms={"truncation": None, "retries": 2})
    trainer.train()
    assert [(alarm["kind"], alarm["step"], alarm["value"]) for alarm in alarms_of(trainer)] == [("retries", 2, 2)]


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_episode(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"alarms": {"equal_rewards": None}, "save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path, max_steps=1, **settings).train()
    resumed = make_trainer(tmp_path, max_steps=3, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert len(resumed.history) == 3
    assert alarms_of(resumed) == []
    other = make_trainer(tmp_path, max_steps=3, **{**settings, "alarms": {"equal_rewards": 0.001}})
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))  # the rules are free to change
    assert other.state.global_step == 3
