"""What a breaker found: resume, best checkpoints, scripts written for TRL, and careless rollout functions."""

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig

from memsafe_rl.config.grpo import GRPOConfig, RLOOConfig
from memsafe_rl.config.ppo import PPOConfig
from memsafe_rl.config.resume_checks import check_same_run, run_facts
from memsafe_rl.errors import ConfigError, DataError, MemoryBudgetError, MemsafeError
from memsafe_rl.memory.planning.policies import PRESETS, FixedPolicy, LadderPolicy, MemoryPolicy
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.trainers.grpo import GRPOTrainer
from memsafe_rl.trainers.ppo import PPOTrainer
from memsafe_rl.training import checkpoints
from memsafe_rl.types import RolloutPlan, UpdatePlan
from memsafe_rl.units import format_bytes
from tests.rollout.multi_turn.helpers import chat_tokenizer
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.helpers import PROMPTS, count_digits, make_trainer, rewire, weights
from tests.training.test_training import StopAt

EVALUATION = Dataset.from_dict({"prompt": PROMPTS[:2]})


@pytest.mark.slow
def test_a_finished_run_is_not_trained_further(tmp_path: Path) -> None:
    make_trainer(tmp_path, save_strategy="steps", save_steps=1).train()
    for _ in range(2):
        again = make_trainer(tmp_path, save_strategy="steps", save_steps=1)
        assert again.train(resume_from_checkpoint=True).global_step == 2
        assert len(again.history) == 2
    assert not (tmp_path / "checkpoint-3").exists()


@pytest.mark.slow
@pytest.mark.parametrize("critic", [False, True])
def test_user_code_that_leaves_autograd_off_changes_nothing(critic: bool, tmp_path: Path) -> None:
    def careless(completions: list[str], **_: Any) -> list[float]:
        torch.set_grad_enabled(False)
        return count_digits(completions)

    def learnt(name: str, reward: Any) -> torch.Tensor:
        made = (_ppo if critic else make_trainer)(tmp_path / name, reward_funcs=reward)
        with torch.set_grad_enabled(reward is count_digits):
            made.train()
        return weights(made)

    assert torch.equal(learnt("careless", careless), learnt("careful", count_digits))


def _ppo(folder: Path, reward_funcs: Any) -> Any:
    config = PPOConfig(str(folder), per_device_train_batch_size=8, max_completion_length=4, max_steps=2, use_cpu=True)
    prompts = Dataset.from_dict({"prompt": PROMPTS})
    return PPOTrainer(tiny_model(), reward_funcs, config, prompts, processing_class=tiny_tokenizer())


@pytest.mark.slow
def test_the_best_step_is_saved_when_asked_for(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        save_strategy="best",
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=EVALUATION,
        max_steps=3,
        load_best_model_at_end=True,
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint is not None
    assert Path(trainer.state.best_model_checkpoint).is_dir()


@pytest.mark.slow
def test_a_best_step_that_was_not_saved_keeps_the_last_weights_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scores = iter([5.0] * 2 + [1.0] * 100)

    def falling(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        return [next(scores) if len(completions) == 2 else 0.1 * i for i in range(len(completions))]

    trainer = make_trainer(
        tmp_path,
        reward_funcs=falling,
        eval_dataset=EVALUATION.select([0]),
        num_generations_eval=2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        max_steps=2,
    )
    trainer.train()
    assert trainer.state.best_global_step == 1
    assert "was not saved" in caplog.text


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 9}, "seed was 42 and is 9"),
        ({"num_generations": 8}, "num_generations was 4 and is 8"),
        ({"beta": 0.1}, "beta was 0.0 and is 0.1"),
        ({"optim": "sgd"}, "optim was"),
        ({"per_device_train_batch_size": 4}, "rows of an optimizer step was 8 and is 4"),
        ({"train_dataset": Dataset.from_dict({"prompt": PROMPTS[::-1]})}, "first prompts of train_dataset"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    make_trainer(tmp_path, num_iterations=2, max_steps=1, save_strategy="steps", save_steps=1).train()
    other = make_trainer(tmp_path, num_iterations=2, max_steps=4, **changed)
    with pytest.raises(ConfigError, match=f"belongs to another run: .*{message}"):
        other.train(resume_from_checkpoint=True)


def test_the_checkpoint_of_another_algorithm_is_refused_by_its_name(tmp_path: Path) -> None:
    saved = run_facts(GRPOConfig(str(tmp_path), report_to="none"), [], 4)
    other = RLOOConfig(str(tmp_path), report_to="none")
    with pytest.raises(ConfigError, match=r"another run: algorithm was 'GRPO' and is 'RLOO'\. Set it back"):
        check_same_run(saved, run_facts(other, [], 4), other)


@pytest.mark.slow
def test_a_checkpoint_of_before_a_setting_resumes_where_that_has_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: str, **settings: Any) -> Any:
        return make_trainer(tmp_path / folder, num_iterations=2, beta=0.1, **{"max_steps": 3, **settings})

    def old_facts(*values: Any) -> dict[str, Any]:
        return {
            name: value
            for name, value in run_facts(*values).items()
            if name not in ("entropy_coef", "bf16", "algorithm")
        }

    def later_facts(*values: Any) -> dict[str, Any]:
        return {**run_facts(*values), "dropped_later": 2}

    whole = run("whole")
    whole.train()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "run_facts", later_facts)
        run("later", max_steps=1, save_strategy="steps", save_steps=1).train()
        patch.setattr(checkpoints, "run_facts", old_facts)
        run("old", max_steps=1, save_strategy="steps", save_steps=1).train()
    with pytest.raises(ConfigError, match=r"another run: entropy_coef was 0\.0 and is 0\.5"):
        run("old", entropy_coef=0.5).train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match=r"another run: dropped_later was 2 and is no setting of this run"):
        run("later").train(resume_from_checkpoint=True)
    resumed = run("old")
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_another_layout_of_the_same_batch(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "a", max_steps=3)
    whole.train()
    make_trainer(tmp_path / "b", max_steps=3, save_strategy="steps", save_steps=1, callbacks=[StopAt(1)]).train()
    second = make_trainer(
        tmp_path / "b", max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=4, logging_steps=7
    )
    second.train(resume_from_checkpoint=True)
    assert torch.equal(weights(second), weights(whole))


@pytest.mark.parametrize("target", ["v_proj", "k_proj"])
def test_weights_of_another_adapter_or_model_are_refused(tmp_path: Path, target: str) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    make_trainer(tmp_path, peft_config=lora, max_steps=1, save_strategy="steps", save_steps=1).train()
    other = LoraConfig(r=4, target_modules=[target], task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="weights of the adapter differ"):
        make_trainer(tmp_path, peft_config=other).train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match="does not hold the weights of this model"):
        make_trainer(tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_damaged_and_unfinished_checkpoints_are_named_or_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-10").write_text("a file")
    assert make_trainer(tmp_path, max_steps=2).train(resume_from_checkpoint="true").global_step == 2
    shutil.copytree(tmp_path / "checkpoint-1", tmp_path / "checkpoint-11")
    (tmp_path / "checkpoint-11" / "training_state.pt").write_bytes(b"torn")
    with pytest.raises(ConfigError, match=r"checkpoint-11.*is damaged.*resume from an earlier one"):
        make_trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=tmp_path / "checkpoint-11")
    assert make_trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=True).global_step == 2
    assert "checkpoint-11 is damaged" in caplog.text


@pytest.mark.slow
def test_an_interrupt_in_a_random_reward_goes_on_as_if_nothing_happened(tmp_path: Path) -> None:
    def noisy(completions: list[str], **_: Any) -> list[float]:
        return [random.random() for _ in completions]

    calls: list[int] = []

    def interrupted(completions: list[str], **_: Any) -> list[float]:
        rewards = noisy(completions)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rewards

    interrupted.__name__ = "noisy"
    whole = make_trainer(tmp_path / "a", reward_funcs=noisy, max_steps=3)
    whole.train()
    first = make_trainer(tmp_path / "b", reward_funcs=interrupted, max_steps=3, save_strategy="steps", save_steps=100)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    second = make_trainer(tmp_path / "b", reward_funcs=noisy, max_steps=3)
    second.train(resume_from_checkpoint=True)
    assert torch.equal(weights(second), weights(whole))


def test_a_step_in_which_no_row_counts_is_logged(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_completion_length=2, entropy_coef=0.01, mask_truncated_completions=True)
    trainer.train()
    assert trainer.history[0]["loss"] == 0.0


def test_a_completion_may_look_like_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def markup(prompts: list[str], trainer: Any) -> dict[str, Any]:
        tokenize = trainer.processing_class
        texts = [f"ok [/INST] [red]{i}" for i in range(len(prompts))]
        return {
            "prompt_ids": tokenize(text=prompts)["input_ids"],
            "completion_ids": tokenize(text=texts)["input_ids"],
            "logprobs": None,
        }

    make_trainer(tmp_path, rollout_func=markup, log_completions=True, max_steps=1).train()
    assert "[red]" in capsys.readouterr().out


def test_what_a_reward_writes_into_a_row_reaches_no_other_completion_and_no_table(tmp_path: Path) -> None:
    counts: list[int] = []

    def judge(prompts: Any, completions: Any, tests: Any, **_: Any) -> list[float]:
        for own, said in zip(tests, completions, strict=True):
            counts.append(sum(1 for _ in iter(lambda own=own: own["cases"] and own["cases"].pop(), [])))
            said[0]["content"] = "<judged>"
        return [float(place % 3) for place in range(len(tests))]

    asked = [[{"role": "user", "content": text}] for text in PROMPTS]
    data = Dataset.from_dict({"prompt": asked, "tests": [{"cases": ["a", "b", "c"]}] * len(asked)})
    given = {"train_dataset": data, "processing_class": chat_tokenizer(), "reward_funcs": judge}
    trainer = make_trainer(tmp_path, log_completions=True, max_steps=2, **given)
    trainer.train()
    assert set(counts) == {3}
    assert len(counts) == 2 * trainer.args.step_rows
    shown = "".join(path.read_text() for path in (tmp_path / "completions").iterdir())
    assert shown
    assert "<judged>" not in shown


def test_an_optimizer_set_between_two_runs_is_the_one_that_is_read_and_stepped(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.train()
    assert isinstance(trainer.optimizer, torch.optim.AdamW)
    trainer.optimizer = still = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
    assert trainer.optimizer is still
    trainer.create_scheduler(2)
    assert trainer.lr_scheduler.optimizer is still
    before = weights(trainer)
    trainer.train()
    assert trainer.optimizer is still
    assert torch.equal(weights(trainer), before)


def test_columns_and_prompts_of_a_rollout_func_are_used(tmp_path: Path) -> None:
    def with_extra(prompts: list[str], trainer: Any) -> dict[str, Any]:
        del trainer
        rows = len(prompts)
        return {
            "prompt_ids": [[7, 8, 9 + i // 4] for i in range(rows)],
            "completion_ids": [[20 + i, 1] for i in range(rows)],
            "logprobs": None,
            "env_reward": [0.1 * i for i in range(rows)],
        }

    def paid_by_environment(completions: list[str], env_reward: list[float]) -> list[float]:
        return env_reward

    trainer = make_trainer(
        tmp_path, rollout_func=with_extra, reward_funcs=paid_by_environment, max_steps=1, num_iterations=2
    )
    trainer.train()
    trajectory = trainer.loop.state.rollout.trajectory
    assert [row.tolist() for row in trajectory.conditions.rows()] == [[7, 8, 9], [7, 8, 10]]
    assert trajectory.condition_of_row == (0, 0, 0, 0, 1, 1, 1, 1)
    assert trainer.history[0]["reward"] == pytest.approx(0.35)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"logprobs": [[0.0, 0.0]]}, "returned 1 logprobs for 8 prompts"),
        ({"env_mask": [[1]] * 8}, r"env_mask\[0\] must hold 0 or 1 for each of 2 tokens"),
        ({"env_mask": [[0.5, 1]] * 8}, r"env_mask\[0\] must hold 0 or 1"),
        ({"env_mask": [None] * 8}, r"env_mask\[0\] must hold 0 or 1 for each of 2 tokens; it has 0 entries: None"),
        ({"env_mask": 5}, "returned a int of no env_mask for 8 prompts"),
        ({"completion_ids": iter(())}, "returned a tuple_iterator of no completion_ids for 8 prompts"),
        ({"logprobs": [["a", None]] * 8}, r"logprobs\[0\] must hold one number"),
        ({"logprobs": [[[0.0], [0.0]]] * 8}, r"logprobs\[0\] must hold one number"),
        ({"completion_ids": [[]] * 8}, r"completion_ids\[0\] must be a list of at least one token id"),
        ({"completion_ids": [[9999, 1]] * 8}, "holds the id 9999; ids lie from 0 to"),
        ({"completion_ids": [[5, -3]] * 8}, "holds the id -3; ids lie from 0 to"),
        ({"logprobs": [[-1.0, 1.0]] * 8}, r"logprobs\[0\]\[1\] is 1.0; .* at most 0, in nats. Return .* None where"),
        ({"logprobs": [[float("nan"), None]] * 8}, r"logprobs\[0\]\[0\] is nan"),
        ({"logprobs": [[-float("inf"), None]] * 8}, r"logprobs\[0\]\[0\] is -inf"),
        ({"prompt_ids": [["a"]] * 8}, r"prompt_ids\[0\] is no list of token ids"),
    ],
)
def test_a_careless_rollout_func_is_told_what_is_wrong(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    right = {"prompt_ids": [[5, 6]] * 8, "completion_ids": [[20, 1]] * 8, "logprobs": None}
    trainer = make_trainer(tmp_path, rollout_func=lambda *_: {**right, **wrong}, max_steps=1)
    with pytest.raises(DataError, match=message):
        trainer.train()


def test_a_rollout_func_that_returns_nothing_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="rollout_func returned NoneType"):
        make_trainer(tmp_path, rollout_func=lambda *_: None, max_steps=1).train()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eval_dataset": Dataset.from_dict({"prompt": []})}, "eval_dataset is empty"),
        ({"eval_dataset": {"a": Dataset.from_dict({"prompt": ["x" * 400]})}}, "longer than"),
        ({"eval_strategy": "steps"}, "there is no eval_dataset"),
    ],
)
def test_evaluation_prompts_are_checked_at_the_start(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        make_trainer(tmp_path, **settings)


def test_the_usual_idioms_of_a_trl_script_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(tmp_path, max_steps=1, eval_dataset=EVALUATION)
    result = trainer.train(resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None)
    steps, _, metrics = result
    assert (steps, result.metrics) == (1, metrics)
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    trainer.save_model(str(tmp_path / "final"))
    assert "train metrics" in capsys.readouterr().out
    for name in ("train_results.json", "all_results.json", "trainer_state.json", "final"):
        assert (tmp_path / name).exists()
    assert trainer.is_world_process_zero()
    assert trainer.is_local_process_zero()
    assert trainer.tokenizer is trainer.processing_class
    callback = trainer.callback_handler.callbacks[0]
    assert trainer.pop_callback(type(callback)) is callback
    assert "eval_reward" in trainer.evaluate(ignore_keys=[])
    trainer.end()


@pytest.mark.parametrize(
    ("name", "reason"), [("init_hf_repo", "repository"), ("get_train_dataloader", "read by position")]
)
def test_what_is_not_there_says_why(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(AttributeError, match=f"no '{name}'.*{reason}"):
        getattr(make_trainer(tmp_path), name)
    assert not hasattr(make_trainer(tmp_path), "nonsense")


def test_anothers_config_is_refused_with_the_import_to_change(tmp_path: Path) -> None:
    theirs = trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(ConfigError, match="from memsafe_rl import GRPOConfig"):
        GRPOTrainer(tiny_model(), count_digits, args=theirs, train_dataset=EVALUATION)


def test_what_is_not_known_is_null_in_the_log(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, eval_dataset=EVALUATION, max_steps=1)
    trainer.rewards._sources[0] = lambda completions: [None] * len(completions)
    trainer.evaluate()
    assert trainer.state.log_history[-1]["eval_reward"] is None


def test_a_memory_policy_may_be_named(tmp_path: Path) -> None:
    assert make_trainer(tmp_path, policy="8-12GB").memory_policy == PRESETS["8-12GB"]
    assert make_trainer(tmp_path, policy="ladder").memory_policy == LadderPolicy()
    with pytest.raises(ConfigError, match=r"8-14GB.*Did you mean '8-12GB'"):
        make_trainer(tmp_path, policy="8-14GB")
    with pytest.raises(ConfigError, match=r"is the class LadderPolicy. Pass an instance: LadderPolicy\(\)"):
        make_trainer(tmp_path, policy=LadderPolicy)
    with pytest.raises(ConfigError, match=r"memory_policy is a SimpleNamespace.* Derive that class from MemoryPolicy"):
        make_trainer(tmp_path, policy=SimpleNamespace(before_rollout=id, before_update=id, after_oom=id))


@dataclass(frozen=True)
class Answers(MemoryPolicy):
    """Answers whatever it is given."""

    rollout: Any = field(default_factory=RolloutPlan)
    update: Any = field(default_factory=UpdatePlan)
    later: Any = None

    def before_rollout(self, work: Any, memory: Any) -> Any:
        return self.rollout

    def before_update(self, work: Any, memory: Any) -> Any:
        return self.update

    def after_oom(self, plan: Any, failure: Any) -> Any:
        return self.later and self.later(plan)


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        (Answers(rollout=UpdatePlan()), "RolloutPlan"),
        (Answers(rollout=None), "RolloutPlan"),
        (Answers(update=RolloutPlan()), "UpdatePlan"),
        (Answers(rollout=RolloutPlan(predicted_bytes=None)), "predicted_bytes is None"),  # type: ignore[arg-type]
    ],
)
def test_a_policy_must_answer_the_kind_of_plan_it_is_asked_for(tmp_path: Path, policy: Answers, kind: str) -> None:
    with pytest.raises(ConfigError, match=kind):
        make_trainer(tmp_path, policy=policy).train()


def fails_always(trainer: GRPOTrainer, device: SimulatedMemory) -> None:
    """Refuses every update whatever its plan: the device is as full as it may be when the gradient begins."""

    def wrap(begin: Any) -> Any:
        def full(*arguments: Any) -> None:
            begin(*arguments)
            device.set_capacity(device.live_bytes + 16_384)

        return full

    rewire(trainer, "learner", "plan", wrap)


def test_a_policy_that_goes_in_circles_is_stopped_and_one_that_gives_up_early_is_told_what_is_left(
    tmp_path: Path,
) -> None:
    pair = [UpdatePlan(micro_batch_tokens=64), UpdatePlan(micro_batch_tokens=65)]
    messages = []
    for policy in (Answers(update=pair[0], later=lambda plan: pair[plan == pair[0]]), FixedPolicy()):
        with SimulatedMemory() as device:
            trainer = make_trainer(tmp_path, policy=policy)
            fails_always(trainer, device)
            with pytest.raises(MemsafeError) as caught:
                trainer.train()
            device.set_capacity(None)
        messages.append(str(caught.value))
    assert "after_oom answered a plan that had failed already" in messages[0]
    assert "FixedPolicy gave no further plan, though checkpointing, offload_activations, logprob_tile" in messages[1]
    assert "leave memory_policy out" in messages[1]


def test_a_trainer_is_used_on_the_device_it_was_built_on(tmp_path: Path) -> None:
    outside = make_trainer(tmp_path)
    with SimulatedMemory(2**30):
        with pytest.raises(ConfigError, match="built outside of the SimulatedMemory it is used in"):
            outside.train()
        inside = make_trainer(tmp_path)
        with SimulatedMemory():
            inside.train()
    with pytest.raises(ConfigError, match="built inside a SimulatedMemory that has been left"):
        inside.train()


def test_what_does_not_fit_is_named_with_the_limit_that_refused_it(tmp_path: Path) -> None:
    model = tiny_model()
    weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with SimulatedMemory() as device:
        trainer = make_trainer(tmp_path, model=tiny_model(), memory_budget=int(1.5 * weights_bytes))
        with pytest.raises(MemoryBudgetError, match=r"The optimizer's state or step.*optim='adamw_bnb_8bit'") as caught:
            trainer.train()
    assert format_bytes(int(1.5 * weights_bytes)) in str(caught.value)
    assert device.capacity_bytes is None


@pytest.mark.slow
def test_hints_of_checkpointing_move_activations_and_no_weight(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TRL 1.16's GRPO ends with both keys: `Unexpected keyword arguments: offload`."""
    hints = {"offload": True, "every_n_layers": 2}
    trained = []
    for name, given in (("plain", None), ("hinted", hints)):
        trainer = make_trainer(tmp_path / name, gradient_checkpointing_kwargs=given, max_steps=2)
        trainer.train()
        assert trainer.setup.memory.update_plan.offload_activations is (given is not None)
        trained.append(weights(trainer))
    assert torch.equal(*trained)
    assert "every_n_layers=2, which changes nothing here: the plan recomputes all blocks or none" in caplog.text
