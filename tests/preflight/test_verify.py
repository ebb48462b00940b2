"""The proof on the user's own model: it passes where plans are equal, catches a planted wrong one, leaves no trace."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from memsafe_rl import Ratios
from memsafe_rl.errors import MemoryBudgetError, MemsafeError
from memsafe_rl.memory.planning.policies import AdaptivePolicy, FixedPolicy
from memsafe_rl.memory.runtime.recovery import capture_random_state
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.preflight import verify as verify_module
from memsafe_rl.preflight.verify import Verification, verify_plan
from memsafe_rl.rollout.native import sequences
from memsafe_rl.training import gradient as update_module
from memsafe_rl.types import Denominators, LossInputs, RolloutPlan, UpdatePlan
from tests.tiny import tiny_model
from tests.trainers.helpers import PROMPTS, count_digits, cut, make_trainer, weights
from tests.trainers.test_ppo import make_ppo

LEAN = {"micro_batch_tokens": 24, "rows_in_flight": 3, "checkpointing": True, "logprob_tile": 5}
"""Micro-batches of two rows, waves of three: nothing is cut as in the plain plan."""


def never(**_: Any) -> list[float]:
    raise AssertionError("a reward function was called")


def without_times(history: list[dict[str, float]]) -> list[dict[str, float]]:
    bytes_and_times = ("step_time", "time/", "memory/")
    return [{k: v for k, v in record.items() if not k.startswith(bytes_and_times)} for record in history]


@pytest.mark.slow
def test_three_plans_are_equal_and_differently_cut(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, policy=cut(**LEAN), reward_funcs=never)
    found = verify_plan(trainer.loop)
    assert found.passed
    assert found.sentence().startswith("EQUAL: the plain plan, the chosen plan, and the chosen plan with failures")
    assert (found.plain.micro_batches, found.chosen.micro_batches) == (1, 4)
    assert (found.plain.rollout_plan.rows_in_flight, found.chosen.rollout_plan.rows_in_flight) == (8, 3)
    assert not found.plain.update_plan.checkpointing
    assert found.plain.update_plan.logprob_tile >= 8 * 6
    assert found.chosen.tokens == found.plain.tokens_equal == found.failing.tokens_equal > 8
    # Sums in another order do differ: a proof that compared a gradient with itself would say 0.
    assert 0 < found.difference < 1e-6
    assert found.plain.gradient_difference is None
    assert not found.plain.same_bits
    # Two failures, recovered from under the same plan: bit for bit the chosen plan's gradient.
    assert (found.chosen.failures, found.failing.failures) == (0, 2)
    assert found.failing.same_bits
    assert found.failing.update_plan == found.chosen.update_plan
    assert (found.tolerance, found.precision) == (1e-5, "float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"beta": 0.1, "num_iterations": 2}, id="reference"),
        pytest.param({"steps_per_generation": 2, "loss_type": "grpo"}, id="old log-probs"),
        pytest.param({"top_entropy_quantile": 0.5, "entropy_coef": 0.1}, id="entropy"),
        pytest.param({"loss_type": "clip_cov", "cov_fraction": 0.2, "clip_cov_low": 0.0}, id="marks"),
        pytest.param({"peft_config": LoraConfig(r=2, target_modules="all-linear"), "beta": 0.1}, id="lora"),
        pytest.param({"top_k": 20, "repetition_penalty": 1.1, "mask_truncated_completions": True}, id="filters"),
        pytest.param({"disable_dropout": False}, id="dropout"),
        pytest.param({"policy": cut(24, 3, park_optimizer=True, offload_activations=True)}, id="parking"),
    ],
)
def test_kinds_of_runs_pass(tmp_path: Path, settings: dict[str, Any]) -> None:
    found = verify_plan(make_trainer(tmp_path, reward_funcs=never, **{"policy": cut(**LEAN), **settings}).loop)
    assert found.passed, found.sentence()
    assert found.difference > 0
    assert found.failing.failures == 2
    assert found.chosen.phase_peaks.keys() == found.plain.phase_peaks.keys()
    assert any("Dropout was off" in note for note in found.notes) is ("disable_dropout" in settings)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["allocator", "ledger"])
def test_bytes_saved_and_genuine_failures_on_a_simulated_device(tmp_path: Path, exact: bool) -> None:
    with SimulatedMemory(2**26, exact=exact) as device:
        model = tiny_model(vocab_size=2000)
        trainer = make_trainer(tmp_path, model=model, policy=cut(**LEAN), max_completion_length=12)
        live = device.live_bytes
        refusals = device.refusals
        found = verify_plan(trainer.loop)
        assert found.passed, found.sentence()
        assert found.exact_bytes
        assert found.failing.failures == 2
        if exact:  # the ledger's refusals are its own; such an allocation is refused before it
            assert device.refusals == refusals + 2
        # The plain plan holds the logits of all tokens: 8 rows of 12 tokens and 2,000 entries.
        assert found.plain.peak_bytes - found.chosen.peak_bytes > 8 * 12 * 2000 * 4
        assert max(found.plain.phase_peaks.values()) == found.plain.peak_bytes == found.plain.phase_peaks["update"]
        assert found.failing.peak_bytes < found.plain.peak_bytes
        state_bytes = 2 * sum(p.nbytes for p in model.parameters())
        assert device.live_bytes - live <= state_bytes * 1.01  # the optimizer's state, and nothing of the proof


@pytest.mark.slow
def test_a_plain_plan_that_does_not_fit_is_replaced_by_half_the_chosen_one(tmp_path: Path) -> None:
    with SimulatedMemory() as device:
        model = tiny_model(vocab_size=2000)
        trainer = make_trainer(tmp_path, model=model, policy=cut(40, 4, logprob_tile=8), max_completion_length=12)
        verify_plan(trainer.loop)
        device.set_capacity(device.live_bytes + 3 * 2**19)
        found = verify_plan(trainer.loop)
    assert found.passed, found.sentence()
    assert found.plain.name == "halved"
    assert "the halved plan" in found.sentence()
    (told,) = [note for note in found.notes if "does not fit" in note]
    assert "in phase update" in told
    assert (found.plain.rollout_plan.rows_in_flight, found.chosen.rollout_plan.rows_in_flight) == (2, 4)
    assert found.plain.micro_batches > found.chosen.micro_batches


@pytest.mark.slow
def test_a_machine_that_kills_is_not_tried_with_what_cannot_fit(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, policy=cut(**LEAN))
    trainer.setup.memory.budget_bytes = 1
    found = verify_plan(trainer.loop)
    assert found.plain.name == "halved"
    assert "of the 0 B that are left. So the chosen plan" in found.notes[0]


@pytest.mark.slow
def test_a_chosen_plan_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    with SimulatedMemory() as device:
        trainer = make_trainer(tmp_path, policy=cut(**LEAN))
        verify_plan(trainer.loop)
        before = weights(trainer)
        device.set_capacity(device.live_bytes + 1000)
        with pytest.raises(MemoryBudgetError):
            verify_plan(trainer.loop)
        device.set_capacity(None)
    assert torch.equal(weights(trainer), before)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


@pytest.mark.slow
def test_rows_that_run_out_under_every_plan_but_the_smallest_are_recovered(tmp_path: Path) -> None:
    class Halving(FixedPolicy):
        def after_oom(self, plan: Any, failure: Any) -> Any:
            if isinstance(plan, RolloutPlan):
                return replace(plan, rows_in_flight=plan.rows_in_flight // 2) if plan.rows_in_flight > 1 else None
            return (
                replace(plan, micro_batch_tokens=plan.micro_batch_tokens // 2) if plan.micro_batch_tokens > 1 else None
            )

    with SimulatedMemory() as device:
        policy = Halving(RolloutPlan(rows_in_flight=8), UpdatePlan(micro_batch_tokens=256, logprob_tile=32))
        trainer = make_trainer(tmp_path, model=tiny_model(vocab_size=2000), policy=policy, max_completion_length=12)
        device.set_capacity(verify_plan(trainer.loop).chosen.peak_bytes - 2**16)
        found = verify_plan(trainer.loop)
    assert found.passed, found.sentence()
    assert found.chosen.failures > 0
    assert found.chosen.update_plan.micro_batch_tokens < 256
    assert found.failing.update_plan == found.chosen.update_plan
    assert trainer.memory_events == []


# Planted defects


def per_micro_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Divides each micro-batch by its own tokens, as an accumulation without a plan would."""

    def loss(inputs: LossInputs, settings: Any, denominators: Denominators) -> Any:
        own = int(inputs.mask_BT.sum())
        return original(inputs, settings, replace(denominators, tokens=own, rows=len(inputs.mask_BT)))

    return loss


@pytest.mark.slow
def test_denominators_of_micro_batches_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(update_module, "policy_loss", per_micro_batch(update_module.policy_loss))
    trainer = make_trainer(tmp_path, policy=cut(**LEAN), verify_plan=True)
    found = verify_plan(trainer.loop)
    assert not found.passed
    assert found.difference > 1e-2
    assert found.sentence().startswith("NOT EQUAL: the chosen plan's gradient differs from that of the plain plan by")
    assert "tolerance 1e-05 in float32" in found.sentence()
    before = weights(trainer)
    with pytest.raises(MemsafeError, match=r"NOT EQUAL.*memsafe-rl verify"):
        trainer.train()
    assert torch.equal(weights(trainer), before)
    assert [event["event"] for event in trainer.memory_events] == ["verify"]
    assert trainer.memory_events[0]["passed"] is False


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="one objective"),
        pytest.param(
            {
                "reward_funcs": [never, count_digits],
                "objectives": {name: {"rewards": [name]} for name in ("never", "count_digits")},
            },
            id="two objectives",
        ),
    ],
)
def test_a_loss_that_averages_over_what_it_sees_is_caught_where_the_plan_cuts_nothing(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    def mean_of_its_tokens(ratios: Ratios) -> torch.Tensor:
        return -ratios.ratio * ratios.advantages / ratios.mask_BT.sum()

    found = verify_plan(make_trainer(tmp_path, loss_type=mean_of_its_tokens, **settings).loop)
    assert found.plain.micro_batches == found.chosen.micro_batches == 1
    assert found.failing.micro_batches > 1
    assert found.failing.failures == 2
    assert "NOT EQUAL: a leaner plan's gradient after failures differs from that of the plain plan" in found.sentence()


@pytest.mark.slow
def test_a_step_of_one_row_takes_both_failures_too(tmp_path: Path) -> None:
    found = verify_plan(make_ppo(tmp_path, per_device_train_batch_size=1, steps_per_generation=1).loop)
    assert [arm.failures for arm in found.arms] == [0, 0, 2]
    assert "Cuts were not tested" in found.sentence()


@pytest.mark.slow
def test_a_gradient_that_a_failed_attempt_leaves_behind_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, policy=cut(**LEAN))
    trainer.loop.make_optimizer()
    drop = trainer.setup.committed.drop_gradients

    def forgetful() -> None:
        """Drops gradients, but not where recovery asks for it."""
        if sys._getframe(1).f_code.co_name != "_clear":
            drop()

    monkeypatch.setattr(trainer.setup.committed, "drop_gradients", forgetful)
    found = verify_plan(trainer.loop)
    assert found.chosen.gradient_difference is not None
    assert found.chosen.gradient_difference < 1e-6
    assert found.failing.gradient_difference is not None
    assert found.failing.gradient_difference > 1e-2
    assert not found.passed
    assert "gradient after failures differs" in found.sentence()


@pytest.mark.slow
def test_tokens_that_depend_on_the_wave_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = sequences.key_tensor

    def of_the_place(keys: Any) -> Any:
        return original([key._replace(sample=place) for place, key in enumerate(keys)])

    monkeypatch.setattr(sequences, "key_tensor", of_the_place)
    found = verify_plan(make_trainer(tmp_path, policy=cut(**LEAN)).loop)
    assert found.difference <= found.tolerance
    assert not found.tokens_agree
    assert not found.passed
    assert "completions differ between plans without a certified tie" in found.sentence()


# No trace


class _Counted:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        self.calls += 1
        return [len(set(text)) / 6 + sum(map(ord, text)) % 5 for text in completions]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="adaptive"),
        pytest.param({"policy": cut(**LEAN), "num_iterations": 2, "beta": 0.1}, id="lean"),
        pytest.param({"policy": cut(24, 3, park_optimizer=True), "optim": "sgd"}, id="parked"),
    ],
)
def test_a_verified_run_learns_bitwise_what_another_does(tmp_path: Path, settings: dict[str, Any]) -> None:
    runs = []
    for verified in (False, True):
        reward = _Counted()
        trainer = make_trainer(
            tmp_path / str(verified), reward_funcs=reward, verify_plan=verified, max_steps=4, **settings
        )
        trainer.train()
        runs.append((trainer, reward.calls, capture_random_state()))
    (plain, plain_calls, _), (verified_run, calls, _) = runs
    assert torch.equal(weights(plain), weights(verified_run))
    assert calls == plain_calls
    assert without_times(plain.history) == without_times(verified_run.history)
    events = [event for event in verified_run.memory_events if event["event"] != "verify"]
    kinds = [(event["event"], event["step"]) for event in events]
    assert kinds == [(event["event"], event["step"]) for event in plain.memory_events]
    assert [event["event"] for event in verified_run.memory_events][:1] == ["verify"]
    first = plain.optimizer.state_dict()["state"]  # type: ignore[union-attr]
    second = verified_run.optimizer.state_dict()["state"]  # type: ignore[union-attr]
    for key, state in first.items():
        assert all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(second[key][name])) for name, value in state.items()
        )


@pytest.mark.slow
def test_everything_is_as_before_afterwards(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, policy=cut(**LEAN), beta=0.1)
    trainer.loop.make_optimizer()
    trainer.model.model.layers[0].train()  # a mode of the user's own
    modes = [module.training for module in trainer.model.modules()]
    states = [torch.clone(value) for value in trainer.model.state_dict().values()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in trainer.model.modules()]
    random = capture_random_state()
    cursor, history = trainer.loop.state.cursor, list(trainer.history)
    names = ("_plans", "_planned_at", "_corrections", "_failures", "_peak_bytes", "phase_peaks", "phase_seconds")
    remembered = copy.deepcopy([vars(trainer.setup.memory)[name] for name in names])
    verify_plan(trainer.loop)
    assert [module.training for module in trainer.model.modules()] == modes
    assert all(torch.equal(*pair) for pair in zip(states, trainer.model.state_dict().values(), strict=True))
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    now = capture_random_state()
    assert (now.python, now.torch) == (random.python, random.torch)
    assert (trainer.loop.state.cursor, trainer.history, trainer.memory_events) == (cursor, history, [])
    assert [vars(trainer.setup.memory)[name] for name in names] == remembered
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in trainer.model.modules()] == hooks
    assert trainer.args.disable_dropout


@pytest.mark.slow
def test_callbacks_hear_nothing_of_it(tmp_path: Path) -> None:
    heard: list[str] = []

    class Listener:
        def __getattr__(self, name: str) -> Any:
            if not name.startswith("on_"):
                raise AttributeError(name)
            return lambda *_, **__: heard.append(name)

    verify_plan(make_trainer(tmp_path, policy=cut(**LEAN), callbacks=[Listener()]).loop)
    assert heard == ["on_init_end"]


@pytest.mark.slow
def test_a_stream_is_read_from_its_start_again(tmp_path: Path) -> None:
    final = []
    for verified in (False, True):
        stream = Dataset.from_dict({"prompt": PROMPTS}).to_iterable_dataset()
        trainer = make_trainer(tmp_path / str(verified), train_dataset=stream, verify_plan=verified, policy=cut(**LEAN))
        trainer.train()
        final.append(weights(trainer))
    assert torch.equal(*final)


# Judgement


def outcome(**changes: Any) -> Verification:
    arm = verify_module.PlanRun(
        "chosen", RolloutPlan(), UpdatePlan(), 10, 10, 0, 0, 1e-7, True, 1, 0, 100, {"update": 100}, 1.0
    )
    given: dict[str, Any] = {
        "plain": replace(arm, name="plain", gradient_difference=None, peak_bytes=150),
        "chosen": arm,
        "failing": arm,
        "rows": 4,
        "precision": "float32",
        "tolerance": 1e-6,
        "judges_tokens": True,
        "exact_bytes": True,
        "notes": (),
    }
    return Verification(**{**given, **changes})


def test_verdicts() -> None:
    arm = outcome().chosen
    assert outcome().passed
    tied = replace(arm, tokens_equal=8, rows_differing=1, rows_excused=1)
    assert outcome(failing=tied).passed
    other = replace(arm, tokens_equal=8, rows_differing=1, rows_excused=0)
    assert not outcome(failing=other).passed
    half = outcome(failing=other, judges_tokens=False, precision="bfloat16", tolerance=1e-2)
    assert half.passed
    assert "the same tokens" not in half.sentence()
    assert "the same tokens" in outcome().sentence()
    assert not outcome(failing=replace(arm, gradient_difference=1.1e-6)).passed
    assert outcome(failing=replace(arm, gradient_difference=1e-6)).passed
    broken = outcome(chosen=replace(arm, gradient_difference=float("nan")))
    assert not broken.passed
    assert broken.sentence().startswith("NOT PROVED")
    assert "Cuts were not tested" in outcome().sentence()
    cut = outcome(failing=replace(arm, micro_batches=2)).sentence()
    assert "the chosen plan, and a leaner plan with failures give" in cut
    assert "not tested" not in cut


def test_ratio_of_norms() -> None:
    assert verify_module._ratio(9.0, 4.0) == 1.5
    assert verify_module._ratio(0.0, 0.0) == 0.0
    assert verify_module._ratio(1.0, 0.0) == float("inf")


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float32, (1e-5, "float32")), (torch.bfloat16, (1e-2, "bfloat16"))]
)
def test_the_coarsest_type_sets_the_tolerance(tmp_path: Path, dtype: torch.dtype, expected: Any) -> None:
    trainer = make_trainer(tmp_path, model=tiny_model(dtype=dtype), policy=cut(**LEAN))
    assert verify_module._tolerance(trainer.setup) == expected


@pytest.mark.slow
def test_half_precision_passes_within_its_own_tolerance(tmp_path: Path) -> None:
    found = verify_plan(
        make_trainer(tmp_path, model=tiny_model(dtype=torch.bfloat16, scale=1.0), policy=cut(**LEAN)).loop
    )
    assert found.passed, found.sentence()
    assert found.difference > 1e-6


def test_the_default_policy_is_verified(tmp_path: Path) -> None:
    found = verify_plan(make_trainer(tmp_path, policy=AdaptivePolicy()).loop)
    assert found.passed, found.sentence()


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_every_arm_begins_with_the_optimizer_on_the_device(tmp_path: Path) -> None:
    with SimulatedMemory() as device:
        policy = FixedPolicy(RolloutPlan(3, park_optimizer=True), UpdatePlan(24, park_optimizer=True))
        trainer = make_trainer(tmp_path, policy=policy)
        found = verify_plan(trainer.loop)
        held = device.live_by_component()
    weights_bytes = sum(parameter.nbytes for parameter in trainer.model.parameters())
    assert found.plain.phase_peaks["rollout"] > 3 * weights_bytes
    assert found.chosen.phase_peaks["rollout"] == pytest.approx(found.failing.phase_peaks["rollout"], rel=0.05)
    assert held["optimizer"] > 2 * weights_bytes  # unparked afterwards
