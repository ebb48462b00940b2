"""Runs whose completions are episodes: tools, environments, users; what is learnt from, and what is left alone."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from memsafe_rl.config.grpo import GRPOConfig
from memsafe_rl.config.ppo import PPOConfig
from memsafe_rl.data.environments import episode_metrics
from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.memory.planning.policies import AdaptivePolicy, FixedPolicy, LadderPolicy
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.micro_batches import Walk, cut_trees
from memsafe_rl.models.language.causal_lm import CausalLMAdapter
from memsafe_rl.rollout.multi_turn.protocol import Environment, Step
from memsafe_rl.rollout.multi_turn.users import CallableUser, ModelUser
from memsafe_rl.trainers.grpo import GRPOTrainer
from memsafe_rl.trainers.ppo import PPOTrainer
from memsafe_rl.training.samples import Rollout
from memsafe_rl.types import (
    Component,
    MemoryFailure,
    MemoryState,
    Phase,
    Ragged,
    RolloutPlan,
    RolloutWork,
    Trajectory,
    UpdatePlan,
)
from tests.parallel.test_ranks import run_ranks, set_up_rank
from tests.rollout.multi_turn.helpers import FORGETFUL, TEMPLATE, chat_tokenizer
from tests.tiny import tiny_model
from tests.trainers.helpers import cut, relative, rewire, weights

ENDS = list(range(1, 80))
"""So many tokens end a turn that a random model ends its turns soon."""


class Digits(Environment):
    """Pays for digits over three turns; counts how often it is asked for anything."""

    made: list[Digits] = []  # noqa: RUF012

    def __init__(self, turns: int = 3, user: Any = None) -> None:
        self.turns, self.user = turns, user
        self.resets = self.steps = self.judged = 0
        self.made.append(self)

    def reset(self, example: Any) -> Any:
        self.resets += 1
        self.said: list[str] = []
        return f" {example['number']}"

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.said.append(action.text)
        return Step(f"turn {len(self.said)}", done=len(self.said) >= self.turns)

    def reward(self) -> float:
        self.judged += 1
        text = "".join(self.said)
        return sum(character.isdigit() for character in text) / 4 + len(text) / 50


@pytest.fixture(autouse=True)
def forget() -> None:
    Digits.made.clear()


def tasks(count: int = 16) -> Dataset:
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"q{n % 5}"}], "number": n} for n in range(count)]
    )


def trainer_of(folder: Path, **given: Any) -> GRPOTrainer:
    names = ("model", "reward_funcs", "train_dataset", "eval_dataset", "processing_class", "peft_config")
    names += ("tools", "environment_factory", "memory_policy", "rollout_func")
    arguments = {name: given.pop(name) for name in names if name in given}
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 160,
        "max_turn_length": 6,
        "learning_rate": 1e-2,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
        "generation_kwargs": {"eos_token_id": ENDS},
        **given,
    }
    defaults: dict[str, Any] = {
        "model": tiny_model(positions=512),
        "reward_funcs": None,
        "train_dataset": tasks(),
        "processing_class": chat_tokenizer(),
        "environment_factory": Digits,
    }
    return GRPOTrainer(args=GRPOConfig(output_dir=str(folder), **settings), **{**defaults, **arguments})


def collected(trainer: GRPOTrainer) -> Rollout:
    trainer.loop.begin(None)
    trainer.loop.files.folder.release()
    trainer.loop.begin_step()
    return trainer.loop.collect()


def first_rollout(trainer: GRPOTrainer) -> Trajectory:
    return collected(trainer).trajectory


# ------------------------------------------------------------------ what is learnt from


@pytest.mark.slow
def test_a_run_plays_judges_and_learns(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    before = weights(trainer)
    trainer.train()
    assert not torch.equal(weights(trainer), before)
    first = trainer.history[0]
    assert {"rewards/Digits/mean", "reward", "episodes/mean_turns", "tools/call_frequency"} <= first.keys()
    assert 1 < first["episodes/mean_turns"] <= 3
    assert len(Digits.made) == 8  # one for each row of a rollout, used again in the second
    assert [one.resets for one in Digits.made] == [2] * 8
    assert [one.judged for one in Digits.made] == [2] * 8


def test_only_the_agents_own_tokens_move_the_weights(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trajectory = first_rollout(trainer)

    def gradient(change: Any) -> torch.Tensor:
        """The gradient of first turns only, so that nothing that counts can see what is changed behind them."""
        changed = replace(
            trajectory,
            actions=Ragged(trajectory.actions.flat.clone(), trajectory.actions.lengths),
            loss_mask=Ragged(trajectory.loss_mask.flat.clone(), trajectory.loss_mask.lengths),
        )
        for mask, ids in zip(changed.loss_mask.rows(), changed.actions.rows(), strict=True):
            own = int(mask.long().cumprod(0).sum())
            mask[own:] = 0
            change(ids, own)
        experience = Rollout(changed, consumed=2, external=False)
        terms = trainer.loop.learner.terms(experience, range(8), trainer.loop.state.controllers)
        trainer.loop.learner.plan(changed, range(8))
        trainer.loop.learner.gradient(experience, list(range(8)), terms, step=trainer.state.global_step)
        found = torch.cat([p.grad.flatten().clone() for p in trainer.model.parameters() if p.grad is not None])
        trainer.setup.committed.drop_gradients()
        return found

    plain = gradient(lambda *_: None)
    others = gradient(lambda ids, own: ids[own:].fill_(90))
    mine = gradient(lambda ids, _: ids[:1].fill_(90))
    assert plain.norm() > 0
    assert relative(others, plain) < 1e-6
    assert relative(mine, plain) > 1e-2


def test_masks_mark_exactly_what_the_agent_drew(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    trainer = trainer_of(tmp_path)
    trajectory = first_rollout(trainer)
    assert trajectory.sample_of_row == ()
    for row, environment in enumerate(Digits.made):
        ids, mask = trajectory.actions.rows()[row], trajectory.loss_mask.rows()[row].bool()
        own = tokenizer.decode(ids[mask], skip_special_tokens=True)
        assert own.startswith("".join(environment.said))
        told = tokenizer.decode(ids[~mask], skip_special_tokens=True)
        later_turns = int(mask.long().diff().eq(1).sum())
        assert [f"turn {turn + 1}" in told for turn in range(3)] == [turn < later_turns for turn in range(3)]


def test_the_log_probs_that_were_sampled_are_those_that_are_scored(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, num_iterations=2)
    trajectory = first_rollout(trainer)
    scored = trainer.loop.collector.scorer.scored(trainer.adapter, trajectory, list(range(8)))
    for mask, old, drawn in zip(
        trajectory.loss_mask.rows(), scored.rows(), trajectory.sampling_logprobs.rows(), strict=True
    ):
        torch.testing.assert_close(old[mask.bool()], drawn[mask.bool()], rtol=1e-4, atol=1e-4)


def test_turns_that_do_not_extend_each_other_are_rows_of_one_sample(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, processing_class=chat_tokenizer(FORGETFUL))
    trajectory = first_rollout(trainer)
    samples = trajectory.sample_of_row
    assert len(trajectory) > 8
    assert sorted(set(samples)) == list(range(8))
    assert list(samples) == sorted(samples)
    for row, sample in enumerate(samples):
        first = samples.index(sample)
        assert trajectory.advantages[row] == trajectory.advantages[first]
        assert trajectory.group_of_row[row] == sample // 4
    assert trajectory.rows_of([1, 3]) == [row for row, sample in enumerate(samples) if sample in (1, 3)]
    assert trainer.loop.state.rollout is None


@pytest.mark.slow
def test_rows_of_a_sample_are_learnt_from_in_the_same_step(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, processing_class=chat_tokenizer(FORGETFUL), steps_per_generation=2, max_steps=4)
    steps: list[list[int]] = []

    def noted(fix: Any, rollout: Any, rows: Any, *others: Any, **named: Any) -> Any:
        steps.append([rollout.trajectory.sample_of_row[row] for row in rows])
        return fix(rollout, rows, *others, **named)

    rewire(trainer, "learner", "terms", lambda fix: partial(noted, fix))
    trainer.train()
    for first, second in zip(steps[::2], steps[1::2], strict=True):
        assert set(first).isdisjoint(second)
        assert set(first) | set(second) == set(range(16))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("template", [None, FORGETFUL])
def test_how_episodes_are_cut_changes_no_gradient(tmp_path: Path, template: str | None) -> None:
    found = []
    for policy in (cut(100_000), cut(128, rows_in_flight=2)):
        tokenizer = chat_tokenizer(template) if template else chat_tokenizer()
        model = tiny_model(positions=512, dtype=torch.float64)
        trainer = trainer_of(tmp_path, model=model, memory_policy=policy, processing_class=tokenizer, num_iterations=2)
        trainer.train()
        found.append(weights(trainer))
    assert relative(found[1], found[0]) < 1e-10


@pytest.mark.slow
def test_turns_that_repeat_others_are_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the template that forgets, later turns repeat earlier ones; a pass too small for all walks their tree."""
    monkeypatch.setattr("memsafe_rl.micro_batches._LEAST_TRUNK", 16)
    found = []
    for plan in ({"pack_prompts": False}, {"pack_prompts": True}, {"micro_batch_tokens": 90, "pack_prompts": True}):
        model = tiny_model(positions=512, dtype=torch.float64)
        policy = cut(**{"micro_batch_tokens": 100_000, **plan})
        trainer = trainer_of(tmp_path, model=model, memory_policy=policy, processing_class=chat_tokenizer(FORGETFUL))
        trainer.train()
        found.append(weights(trainer))
    assert max(relative(other, found[0]) for other in found[1:]) < 1e-6  # norms round to float32
    trajectory = first_rollout(trainer_of(tmp_path, processing_class=chat_tokenizer(FORGETFUL)))
    work = trainer.setup.adapter.work(trajectory, range(len(trajectory)))
    assert work.packed_tokens < 0.6 * sum(work.row_tokens)
    assert any(isinstance(part, Walk) for part in cut_trees(work, 90))


def test_losses_that_count_sequences_refuse_split_episodes(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, processing_class=chat_tokenizer(FORGETFUL), loss_type="grpo")
    with pytest.raises(ConfigError, match=r"An episode became several sequences.*Set loss_type='dapo'"):
        trainer.train()


def test_cut_episodes_are_masked_where_asked(tmp_path: Path) -> None:
    trajectory = first_rollout(trainer_of(tmp_path, max_turn_length=2, mask_truncated_completions=True))
    assert not all(trajectory.finished)
    for finished, mask in zip(trajectory.finished, trajectory.loss_mask.rows(), strict=True):
        assert bool(mask.any()) == finished


# ------------------------------------------------------------------ rewards, tools, TRL's form


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one number.
        b: another.
    """
    return a + b


def test_reward_functions_see_the_whole_conversation(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def judge(prompts: Any, completions: Any, environments: Any, number: Any, **_: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, environments=environments, number=number)
        return [float(len(messages)) for messages in completions]

    trainer = trainer_of(tmp_path, reward_funcs=judge, reward_weights=[0.5], max_steps=1)
    trainer.train()
    assert trainer.rewards.weights == (0.5, 1.0)
    assert trainer.rewards.names == ("judge", "Digits")
    assert seen["environments"] == Digits.made
    assert [message["role"] for message in seen["completions"][0]][:2] == ["assistant", "user"]
    assert seen["prompts"][0][0]["content"].endswith(f" {seen['number'][0]}")


def test_tools_alone_need_no_environment(tmp_path: Path) -> None:
    def judge(completions: Any, **_: Any) -> list[float]:
        return [float(len(messages[0]["content"])) for messages in completions]

    trainer = trainer_of(tmp_path, tools=[add], environment_factory=None, reward_funcs=judge)
    trajectory = first_rollout(trainer)
    text = trainer.processing_class.decode(trajectory.conditions.rows()[0])
    assert text.startswith("tools: add<eos>")
    trainer.train()


class Till:
    """TRL's form."""

    def reset(self, **columns: Any) -> str:
        self.total, self.columns = 0, columns
        return "pay"

    def ring_up(self, price: int) -> int:
        """Rings up.

        Args:
            price: in cents.
        """
        self.total += price
        return self.total

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return 1.0


class Silent:
    """TRL's form without a reward."""

    def reset(self, **_: Any) -> None: ...


def test_environments_by_name_and_datasets_without_prompts(tmp_path: Path) -> None:
    dataset = Dataset.from_list([{"environment": name, "day": 3} for name in ("till", "quiet") * 4])
    seen: dict[str, Any] = {}

    def judge(environments: Any, prompts: Any, **_: Any) -> list[float | None]:
        seen.update(environments=environments, prompts=prompts)
        return [0.25 if isinstance(one, Silent) else None for one in environments]

    trainer = trainer_of(
        tmp_path,
        environment_factory={"till": Till, "quiet": Silent},
        train_dataset=dataset,
        reward_funcs=judge,
        shuffle_dataset=False,
        max_steps=1,
    )
    assert trainer.rewards.names == ("judge", "Till")
    assert [tool.__name__ for tool in trainer.tools] == ["ring_up"]
    assert trainer.environments is None
    trainer.train()
    assert trainer.environments == seen["environments"]
    assert [type(one).__name__ for one in seen["environments"]] == ["Till"] * 4 + ["Silent"] * 4
    assert len({id(one) for one in seen["environments"]}) == 8
    assert seen["environments"][0].columns == {"day": 3}
    assert seen["prompts"][0] == [{"role": "user", "content": "pay"}]
    assert trainer.history[0]["reward"] == pytest.approx((4 * 1.0 + 4 * 0.25) / 8)


class Raises(TrainerCallback):
    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a callback")


def test_an_environment_that_cannot_be_closed_keeps_no_other_open(tmp_path: Path) -> None:
    open_ones: set[int] = set()

    class Stuck(Digits):
        def reset(self, example: Any) -> Any:
            open_ones.add(id(self))
            return super().reset(example)

        def close(self) -> None:
            open_ones.discard(id(self))
            raise OSError(f"{len(open_ones)} are open")

    trainer = trainer_of(tmp_path, environment_factory=Stuck, max_steps=1)
    failing = trainer_of(tmp_path / "failing", environment_factory=Stuck, max_steps=1)
    failing.add_callback(Raises())
    for one in (trainer, failing):
        with pytest.raises(OSError, match="are open") as caught:
            one.train()
        assert not open_ones
    assert isinstance(caught.value.__context__, ZeroDivisionError)  # what ended the run is told with it


def test_environments_are_closed_after_an_evaluation_beside_training(tmp_path: Path) -> None:
    open_ones: set[int] = set()

    class Counted(Digits):
        def reset(self, example: Any) -> Any:
            open_ones.add(id(self))
            return super().reset(example)

        def close(self) -> None:
            open_ones.discard(id(self))

    trainer = trainer_of(tmp_path, environment_factory=Counted, max_steps=1)
    assert "eval_reward" in trainer.evaluate(trainer.train_dataset)
    assert not open_ones


def test_environments_alone_need_no_dataset(tmp_path: Path) -> None:
    trainer_of(tmp_path, environment_factory=Till, train_dataset=None, max_steps=1).train()
    rows = [{"day": 3}] * 8
    for name, given in (("list", rows), ("stream", Dataset.from_list(rows).to_iterable_dataset())):
        trainer_of(tmp_path / name, environment_factory=Till, train_dataset=given, max_steps=1).train()
    with pytest.raises(ConfigError, match="Set max_steps"):
        trainer_of(tmp_path, environment_factory=Till, train_dataset=None, max_steps=-1)
    with pytest.raises(ConfigError, match=r"column 'environment' names the one that plays"):
        trainer_of(tmp_path, environment_factory={"till": Till}, train_dataset=None, max_steps=1)


def test_tables_show_what_environments_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They showed the dataset's placeholder, of which it was said that it repeats."""

    def spoils(prompts: Any, **_: Any) -> list[float]:
        return [float(len(prompt.pop())) for prompt in prompts]

    trainer = trainer_of(tmp_path, reward_funcs=spoils, environment_factory=Till, train_dataset=None)
    table = collected(trainer).table
    assert [row["prompt"] for row in table] == [[{"role": "user", "content": "pay"}]] * 8
    assert "repeat" not in caplog.text


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"environment_factory": Silent}, ConfigError, "There is no reward"),
        ({"tools": [add]}, ConfigError, "tools are given beside Digits"),
        ({"tools": add}, ConfigError, "tools are given beside Digits"),
        ({"tools": "add"}, ConfigError, "Give a list of functions"),
        ({"environment_factory": 5}, ConfigError, "environment_factory is 5"),
        ({"environment_factory": "Digits"}, ConfigError, "environment_factory is 'Digits'"),
        ({"environment_factory": Silent()}, ConfigError, "it is of the type Silent"),
        ({"environment_factory": {"a": 5}}, ConfigError, r"environment_factory\['a'\] is 5"),
        ({"environment_factory": {}}, ConfigError, "an empty mapping"),
        ({"rollout_func": lambda *_: {}}, ConfigError, "Leave tools and environment_factory out, or rollout_func"),
        ({"partial_rollout_tokens": 4}, ConfigError, "played to their ends"),
        ({"max_episode_turns": 0}, ConfigError, "max_episode_turns"),
        ({"environment_factory": {"a": Digits}}, DataError, r"environment=None, but environment_factory has 'a'"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, given: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        trainer_of(tmp_path, **given).train()


# ------------------------------------------------------------------ roles


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **settings)


@pytest.mark.slow
def test_the_agent_learns_and_its_user_stays_the_same(tmp_path: Path) -> None:
    def environment() -> Digits:
        return Digits(3, ModelUser("ask for digits", max_tokens=5))

    def by_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(ids) % 7 / 7 for ids in completion_ids]

    settings = {"reward_funcs": by_tokens, "peft_config": lora(), "max_steps": 2, "beta": 0.01}
    trainer = trainer_of(tmp_path, environment_factory=environment, **settings)
    prompt = torch.arange(20, 40)

    def logits(role: str) -> torch.Tensor:
        with trainer.roles.acting(role) as adapter:
            return adapter.prefill([prompt])[0].clone()

    user, agent, reference = logits("base"), logits("agent"), logits("reference")
    pointers = {weight.untyped_storage().data_ptr() for weight in trainer.model.parameters()}
    switches = trainer.roles.switches
    trainer.train()
    assert all(record["reward_std"] > 0 for record in trainer.history)  # nothing could be learnt otherwise
    assert trainer.roles.switches > switches
    assert torch.equal(logits("base"), user)
    assert torch.equal(logits("reference"), reference)
    assert not torch.equal(logits("agent"), agent)
    assert {weight.untyped_storage().data_ptr() for weight in trainer.model.parameters()} == pointers
    assert len(trainer.roles.models) == 1


def test_a_base_user_without_adapters_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, environment_factory=lambda: Digits(3, ModelUser("hm")))
    with pytest.raises(ConfigError, match="Pass a peft_config"):
        trainer.train()


def test_scripted_users_answer_once_a_round(tmp_path: Path) -> None:
    asked: list[int] = []

    def reply(messages: Any) -> str | None:
        asked.append(len(messages))
        return None if len(messages) > 3 else "and?"

    trainer = trainer_of(tmp_path, environment_factory=lambda: Digits(3, CallableUser(reply)), max_steps=1)
    trainer.train()
    assert set(asked) == {2, 4}


# ------------------------------------------------------------------ memory and checkpoints


@pytest.mark.slow
def test_memory_that_runs_out_in_a_turn_changes_nothing(tmp_path: Path) -> None:
    def run(fail_at: tuple[int, ...] = ()) -> tuple[torch.Tensor, Any, list[Any]]:
        Digits.made.clear()
        trainer = trainer_of(tmp_path, max_steps=1)
        calls = [0]

        def failing(drawing: Any, *work: Any) -> Any:
            step = trainer.adapter.decode_step

            def decode(state: Any, tokens_B: Any) -> Any:
                calls[0] += 1
                if calls[0] in fail_at:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
                return step(state, tokens_B)

            trainer.adapter.decode_step = decode
            try:
                return drawing(*work)
            finally:
                trainer.adapter.decode_step = step

        rewire(trainer, "collector.episodes", "draw_turns", lambda drawing: partial(failing, drawing))
        trainer.train()
        counts = [(one.resets, one.steps, one.judged, tuple(one.said)) for one in Digits.made]
        return weights(trainer), trainer.memory_events, counts

    plain, _, counts = run()
    failed, events, again = run((2, 3, 8, 13))
    assert sum(event["event"] == "failure" for event in events) == 4
    assert again == counts
    assert relative(failed, plain) < 1e-6


@pytest.mark.slow
def test_faults_anywhere_in_a_run_change_no_bit(tmp_path: Path) -> None:
    """Rollouts, rewards, updates and commits of episodes, one refused allocation a run."""

    def run(place: int | None = None) -> tuple[Any, Any, int, int]:
        Digits.made.clear()
        with SimulatedMemory(exact=True) as memory:
            torch.manual_seed(0)
            trainer = trainer_of(tmp_path, memory_policy=cut(64), max_steps=2)
            if place is not None:
                memory.fail_after(place)
            before = memory.allocations
            trainer.train()
            asked = [(one.resets, one.steps, one.judged, tuple(one.said)) for one in Digits.made]
            return weights(trainer), asked, memory.allocations - before, memory.refusals

    plain, asked, allocations, _ = run()
    for part in range(1, 8):
        learnt, again, _, refusals = run(part * allocations // 8)
        assert refusals == 1
        assert again == asked
        assert torch.equal(learnt, plain)


@pytest.mark.slow
def test_a_run_fits_a_budget_that_its_plain_plan_does_not(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 1, "per_device_train_batch_size": 32, "peft_config": lora()}
    with SimulatedMemory() as memory:
        trainer = trainer_of(tmp_path, memory_policy=cut(100_000), **settings)
        trainer.train()
        peak = max(record.peak_bytes for record in memory.timeline)
    Digits.made.clear()
    with SimulatedMemory(capacity_bytes=peak // 4) as memory:
        lean = trainer_of(tmp_path, memory_budget=peak // 4, **settings)
        lean.train()
        assert max(record.peak_bytes for record in memory.timeline) <= peak // 4
    assert relative(weights(lean), weights(trainer)) < 1e-5
    assert [one.resets for one in Digits.made] == [1] * 32


@pytest.mark.slow
@pytest.mark.parametrize("template", [None, FORGETFUL])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, template: str | None) -> None:
    def run(folder: str, **settings: Any) -> GRPOTrainer:
        tokenizer = chat_tokenizer(template) if template else chat_tokenizer()
        return trainer_of(
            tmp_path / folder,
            processing_class=tokenizer,
            num_iterations=2,
            steps_per_generation=2,
            save_strategy="steps",
            save_steps=3,
            max_steps=6,
            **settings,
        )

    whole = run("a")
    whole.train()
    again = run("a")
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert torch.equal(weights(again), weights(whole))
    index = json.loads((tmp_path / "a" / "checkpoint-3" / "trajectory.json").read_text())
    assert bool(index["sample_of_row"]["value"]) is (template is not None)


def test_evaluation_plays_episodes_too(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, eval_dataset=tasks(2), num_generations_eval=2, max_steps=1)
    trainer.train()
    first, second = trainer.evaluate(), trainer.evaluate()
    assert first["eval_rewards/Digits/mean"] == second["eval_rewards/Digits/mean"]
    assert first["eval_episodes/mean_turns"] > 1


# ------------------------------------------------------------------ other algorithms, several ranks


@pytest.mark.slow
def test_ppo_plays_episodes_that_are_one_sequence(tmp_path: Path) -> None:
    def trainer_with(template: str) -> PPOTrainer:
        config = PPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=8,
            max_completion_length=160,
            max_turn_length=6,
            learning_rate=1e-3,
            max_steps=2,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            generation_kwargs={"eos_token_id": ENDS},
        )
        return PPOTrainer(
            tiny_model(positions=512),
            None,
            config,
            tasks(),
            processing_class=chat_tokenizer(template),
            environment_factory=Digits,
        )

    trainer = trainer_with(TEMPLATE)
    before = weights(trainer)
    trainer.train()
    assert not torch.equal(weights(trainer), before)
    assert trainer.history[0]["episodes/mean_turns"] > 1
    with pytest.raises(ConfigError, match="PPO and RLOO take an episode as one sequence"):
        trainer_with(FORGETFUL).train()


SPLIT: dict[str, Any] = {"num_iterations": 2, "max_steps": 2, "optim": "sgd"}
"""Under Adam, entries whose gradient is nothing but rounding move as far as the others."""


def play_rank(rank: int, port: int, folder: str) -> None:
    set_up_rank(rank, port)
    trainer = trainer_of(
        Path(folder) / "two", per_device_train_batch_size=4, processing_class=chat_tokenizer(FORGETFUL), **SPLIT
    )
    trainer.train()
    made = [(one.resets, one.judged) for one in Digits.made]
    torch.save((weights(trainer), trainer.history, made), Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_play_what_one_does(tmp_path: Path) -> None:
    ranks = run_ranks(play_rank, tmp_path, 120)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    one = trainer_of(tmp_path / "one", processing_class=chat_tokenizer(FORGETFUL), **SPLIT)
    one.train()
    start = weights(trainer_of(tmp_path / "start"))
    assert torch.equal(ranks[0][0], ranks[1][0])
    assert float((ranks[0][0] - weights(one)).norm() / (weights(one) - start).norm()) < 1e-4
    for mine, theirs in zip(ranks[0][1], one.history, strict=True):
        for name in theirs.keys() & {"loss", "reward", "num_tokens", "episodes/mean_turns", "episodes/sequences"}:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-7), name
    assert [len(made) for _, _, made in ranks] == [4, 4]  # each rank plays its own rows only


# ------------------------------------------------------------------ caches between turns


def kept_or_dropped(kept_kv_bytes: int, micro_batch_tokens: int = 8192) -> FixedPolicy:
    plain = cut(micro_batch_tokens)
    return replace(plain, rollout=replace(plain.rollout, kept_kv_bytes=kept_kv_bytes))


def talking() -> Digits:
    return Digits(user=ModelUser("you are a guest", max_tokens=5))


USED = {None: Digits, "base": talking}
"""Environments by the role of their users."""


@pytest.mark.slow
@pytest.mark.parametrize("role", USED)
def test_kept_caches_change_nothing_that_is_drawn(
    tmp_path: Path, role: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, reads = [], []
    resume = CausalLMAdapter.resume

    def noted(self: Any, rows: Any, kept: Any, *given: Any) -> Any:
        reads[-1] += sum(kept)
        return resume(self, rows, kept, *given)

    monkeypatch.setattr(CausalLMAdapter, "resume", noted)
    some = kept_or_dropped(150_000 if role is None else 700_000)
    for policy in (kept_or_dropped(0), kept_or_dropped(2**30), AdaptivePolicy(), some):
        torch.manual_seed(0)
        reads.append(0)
        given = {} if role is None else {"peft_config": lora()}
        trainer = trainer_of(tmp_path, environment_factory=USED[role], memory_policy=policy, **given)
        found.append(first_rollout(trainer))
        assert trainer.loop.collector.episodes.scope is None
    assert reads[0] == 0
    assert reads[1] == reads[2] > reads[3] > 0
    for other in found[1:]:
        assert other.actions.lengths == found[0].actions.lengths
        assert torch.equal(other.actions.flat, found[0].actions.flat)
        assert torch.equal(other.loss_mask.flat, found[0].loss_mask.flat)
        drawn, plain = other.sampling_logprobs, found[0].sampling_logprobs
        assert drawn is not None
        assert plain is not None
        torch.testing.assert_close(drawn.flat, plain.flat, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("template", [TEMPLATE, FORGETFUL])
def test_kept_caches_change_no_gradient(tmp_path: Path, template: str) -> None:
    found = []
    for policy in (kept_or_dropped(0), kept_or_dropped(2**30, 128)):
        model = tiny_model(positions=512, dtype=torch.float64)
        tokenizer = chat_tokenizer(template)
        trainer = trainer_of(tmp_path, model=model, memory_policy=policy, processing_class=tokenizer, num_iterations=2)
        trainer.train()
        found.append(weights(trainer))
    assert relative(found[1], found[0]) < 1e-10


def test_nothing_is_kept_after_a_rollout_nor_after_an_exception(tmp_path: Path) -> None:
    class Breaking(Digits):
        def step(self, action: Any) -> Any:
            if len(self.said) == 1 and len(self.made) == 8:
                held.append(memory.live_by_component().get(Component.KV_CACHE, 0))
                if breaks:
                    raise RuntimeError("the environment broke")
            return super().step(action)

    for breaks in (False, True):
        held: list[int] = []
        Digits.made.clear()
        with SimulatedMemory() as memory:
            trainer = trainer_of(tmp_path, environment_factory=Breaking, max_steps=1)
            if breaks:
                with pytest.raises(RuntimeError, match="the environment broke"):
                    trainer.train()
            else:
                trainer.train()
            assert memory.live_by_component().get(Component.KV_CACHE, 0) == 0
        assert max(held) > 0


def test_what_is_kept_goes_first_when_memory_runs_out(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=1)
    expected = first_rollout(trainer)
    Digits.made.clear()
    trainer = trainer_of(tmp_path, max_steps=1)
    step, calls = trainer.adapter.decode_step, []

    def failing(state: Any, tokens_B: Any) -> Any:
        calls.append(1)
        if len(calls) in (10, 12):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return step(state, tokens_B)

    trainer.adapter.decode_step = failing  # type: ignore[method-assign]
    trajectory = first_rollout(trainer)
    fallbacks = [event["changes"] for event in trainer.memory_events if event["event"] == "fallback"]
    assert len(calls) > 12
    assert len(fallbacks) <= 1
    if fallbacks:
        assert "kept_kv_bytes" in str(fallbacks[0])
        assert trainer.setup.memory.rollout_plan.kept_kv_bytes == 0
    assert torch.equal(trajectory.actions.flat, expected.actions.flat)


def test_a_fallback_drops_what_is_kept_before_it_lowers_anything_else() -> None:
    geometry = CausalLMAdapter(tiny_model(), pad_token_id=0).geometry
    work = RolloutWork((20,) * 4, 4, 64, replace(geometry, shares_prompts=True), kept_bytes=2**30)
    plan = RolloutPlan(rows_in_flight=4, kept_kv_bytes=2**30)
    failure = MemoryFailure(Phase.ROLLOUT, None, 1, "", plan=plan, work=work)
    for policy in (AdaptivePolicy(), LadderPolicy()):
        assert policy.after_oom(plan, failure) == replace(plan, kept_kv_bytes=0)
    roomy = MemoryState("cpu", budget_bytes=2**40, live_bytes=0, peak_bytes=0)
    assert AdaptivePolicy().before_rollout(work, roomy).kept_kv_bytes == 2**30
    tight = MemoryState("cpu", budget_bytes=2**28, live_bytes=0, peak_bytes=0)
    part = AdaptivePolicy().before_rollout(work, tight)
    assert 0 < part.kept_kv_bytes <= 0.8 * 2**28
    assert part.predicted_bytes["rollout"] <= 2**28
    one_turn = AdaptivePolicy().before_rollout(replace(work, kept_bytes=0), roomy)
    assert one_turn.kept_kv_bytes == 0


class Filling(Digits):
    """Answers so that the last turn has two tokens left, or a few."""

    def reset(self, example: Any) -> None:
        super().reset(example)

    def step(self, action: Any) -> Any:
        self.said.append(action.text)
        return Step("x" * 20)


@pytest.mark.parametrize(("kept_kv_bytes", "margin"), [(2**30, 0.025), (0, 0.01)])
@pytest.mark.slow
def test_a_forecast_knows_of_later_turns(tmp_path: Path, kept_kv_bytes: int, margin: float) -> None:
    tiny_model(positions=1024, hidden=64, layers=4).save_pretrained(tmp_path / "named")
    policy = FixedPolicy(
        RolloutPlan(prefill_tokens=512, score_tokens=512, kept_kv_bytes=kept_kv_bytes),
        UpdatePlan(micro_batch_tokens=512),
    )
    with SimulatedMemory() as memory:
        trainer = trainer_of(
            tmp_path,
            model=str(tmp_path / "named"),
            environment_factory=Filling,
            memory_policy=policy,
            per_device_train_batch_size=16,
            max_completion_length=249,
            max_turn_length=24,
            max_steps=1,
            generation_kwargs={"eos_token_id": [i for i in range(2, 258) if not 60 <= i < 70], "min_new_tokens": 19},
            memory_budget="256MiB",
            memory_forecast=True,
        )
        trainer.train()
        held = max(record.peak_bytes for record in memory.timeline if record.phase is Phase.ROLLOUT)
    assert trainer.forecast is not None
    assert trainer.forecast.phase_bytes[Phase.ROLLOUT] == pytest.approx(held, rel=margin)


class Takes:
    """Changes what it is given, as an environment may that has it for itself."""

    def reset(self, stock: list[int], prompt: Any, **_: Any) -> str:
        self.seen = len(stock)
        stock.pop()
        prompt.append({"role": "user", "content": "more"})
        return "go"

    def get_reward(self) -> float:
        return float(self.seen)


def test_each_episode_has_its_row_for_itself(tmp_path: Path) -> None:
    """Completions of one prompt shared its lists: the second found them as the first had left them."""
    seen: list[Any] = []

    def lengths(stock: list[list[int]], prompts: list[Any], **_: Any) -> list[float]:
        seen.extend((len(one), len(prompt)) for one, prompt in zip(stock, prompts, strict=True))
        return [0.0] * len(stock)

    rows = [{"prompt": [{"role": "user", "content": "hi"}], "stock": [1, 2, 3, 4, 5]}] * 2
    trainer = trainer_of(tmp_path, reward_funcs=lengths, train_dataset=rows, environment_factory=Takes, max_steps=1)
    trainer.train()
    assert trainer.history[0]["rewards/Takes/mean"] == 5.0
    assert {length for length, _ in seen} == {5}
    assert {length for _, length in seen} == {1}


def test_what_episodes_count_is_divided_once() -> None:
    """Averages of the episodes' rates would say 0.5 of ten calls of which one failed."""
    first = {"calls": 1, "failures": 1, "turns": 2, "sequences": 1, "no room": 1}
    second = {"calls": 9, "failures": 0, "turns": 6, "sequences": 3, "malformed": 4}
    found = episode_metrics([first, second])
    assert (found["tools/failure_frequency"], found["tools/malformed_frequency"]) == (0.1, 0.5)
    assert (found["tools/call_frequency"], found["episodes/mean_turns"], found["episodes/no_room"]) == (5.0, 4.0, 0.5)


def test_metrics_of_episodes_are_those_of_the_groups_that_dynamic_sampling_keeps(tmp_path: Path) -> None:
    """They were the first round's, whatever replaced its groups."""

    class Longer(Digits):
        def reset(self, example: Any) -> Any:
            self.turns = 1 if example["number"] < 2 else 3
            return super().reset(example)

        def reward(self) -> float:
            return 0.0 if self.turns == 1 else super().reward()

    settings: dict[str, Any] = {"dynamic_sampling": True, "shuffle_dataset": False, "max_steps": 1}
    trainer = trainer_of(tmp_path, environment_factory=Longer, **settings)
    trainer.train()
    assert trainer.history[0]["episodes/mean_turns"] > 1.0
