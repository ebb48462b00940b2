"""Credit for turns in runs: each token has its turn's advantage, and no cut, fault or resume changes what is learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from memsafe_rl.config.grpo import GRPOConfig
from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.ops.advantages import normalised_in_group
from memsafe_rl.rollout.multi_turn.episode import seen_since
from memsafe_rl.rollout.multi_turn.protocol import Environment, Step
from memsafe_rl.training.algorithms import advantages
from tests.faults.audit import audited
from tests.images import picture
from tests.rollout.multi_turn.helpers import FORGETFUL, chat_tokenizer
from tests.tiny import tiny_model
from tests.trainers.helpers import cut, make_trainer, relative, weights
from tests.trainers.test_episodes import trainer_of

CREDIT = {"turn_advantage_coef": 0.5, "turn_discount": 0.5}


class Halves(Environment):
    """Answers "even" or "odd" to the length of what was said, three times, and pays for it turn by turn."""

    def reset(self, example: Any) -> Any:
        self.paid, self.turns = 0.0, 0
        return f" {example['number']}"

    def step(self, action: Any) -> Any:
        self.turns += 1
        paid = len(action.text) / 10
        self.paid += paid
        return Step("odd" if len(action.text) % 2 else "even", done=self.turns >= 3, reward=paid)

    def reward(self) -> float:
        return self.paid + 1.0 * (self.turns == 3)


def credited(folder: Path, **given: Any) -> Any:
    return trainer_of(folder, environment_factory=Halves, **{**CREDIT, **given})


@pytest.mark.parametrize("forgets", [False, True], ids=["one sequence", "a sequence a turn"])
def test_each_token_has_the_advantage_of_its_episode_and_turn(tmp_path: Path, forgets: bool) -> None:
    trainer = credited(tmp_path, processing_class=chat_tokenizer(FORGETFUL) if forgets else chat_tokenizer())
    trainer.loop.begin(None)
    trainer.loop.files.folder.release()
    trainer.loop.begin_step()
    collector, state = trainer.loop.collector, trainer.loop.state
    drawn = collector.draw(state)
    scored = collector.score(drawn, [])
    drawn = collector.reward(drawn, state)
    rollout = collector.assign(drawn, scored, [])
    stored, turns = rollout.trajectory, scored.turns
    rewards = drawn.samples.rewards_BF[:, 0].double()
    samples = stored.sample_of_row or range(len(stored))
    assert stored.turns == ()
    assert forgets == (len(turns) > len(rewards))
    found: list[tuple[int, int, tuple[int, int], float]] = []  # row, turn, state, what follows; by loops
    for sample in range(len(rewards)):
        own = [(row, place) for row, of in enumerate(samples) if of == sample for place in range(len(turns[row]))]
        paid = [turns[row][place].reward for row, place in own]
        paid[-1] += float(rewards[sample]) - sum(paid)
        for index, (row, place) in enumerate(own):
            after = sum(0.5 ** (later - index) * paid[later] for later in range(index, len(paid)))
            found.append((row, place, (sample // 4, turns[row][place].state), after))
    compared = 0
    for row, place, where, _ in found:
        alike = [other for other in found if other[2] == where]
        mine = [other[:2] for other in alike].index((row, place))
        relative_to = normalised_in_group(torch.tensor([[other[3] for other in alike]], dtype=torch.float64))
        of_turn = float(relative_to[0, mine]) if len(alike) > 1 else 0.0
        compared += len(alike) > 1
        starts = [turn.start for turn in turns[row]] + [stored.actions.lengths[row]]
        part = slice(starts[place], starts[place + 1])
        mask = stored.loss_mask.rows()[row][part].bool()
        actual, wanted = stored.action_advantages.rows()[row][part], float(stored.advantages[row]) + 0.5 * of_turn
        assert mask.any()
        torch.testing.assert_close(actual[mask], torch.full_like(actual[mask], wanted))
        assert not actual[~mask].any()
    assert compared > 0
    assert rollout.metrics["turns/compared"] == pytest.approx(compared / len(found))
    assert any(turn.reward > 0 for row in turns for turn in row)


def test_states_are_named_by_what_was_seen_last() -> None:
    said = {"role": "assistant", "content": "x"}
    seen = [{"role": "tool", "content": "y"}]
    assert seen_since([said, *seen]) == seen_since([{"role": "user", "content": "z"}, said, *seen])
    assert seen_since([said, *seen]) != seen_since([said, {"role": "tool", "content": "n"}])
    assert 0 <= seen_since([]) < 2**63
    shown = [[said, {"role": "user", "content": [{"type": "image", "image": picture(8, 8, one)}]}] for one in (1, 1, 2)]
    assert seen_since(shown[0]) == seen_since(shown[1]) != seen_since(shown[2]), "images are named by their pixels"


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_no_cut_changes_what_is_learnt(tmp_path: Path, dtype: torch.dtype, bound: float) -> None:
    def run(policy: Any, **own: Any) -> torch.Tensor:
        model = tiny_model(positions=512, dtype=dtype)
        before = torch.cat([weight.detach().flatten().double() for weight in model.parameters()])
        settings = {"optim": "sgd", "overwrite_output_dir": True, "num_iterations": 2, "learning_rate": 0.1, **own}
        trainer = credited(tmp_path, model=model, memory_policy=policy, **settings)
        trainer.train()
        return weights(trainer) - before

    whole = run(cut())
    for policy in (cut(1), cut(60, rows_in_flight=3)):
        assert relative(run(policy), whole) < bound
    assert relative(run(cut(), turn_advantage_coef=0.0, turn_discount=0.95), whole) > 1e-2


@pytest.mark.slow
def test_a_resume_and_a_failed_attempt_leave_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(folder: Path, resume: Any = None) -> torch.Tensor:
        trainer = credited(folder, num_iterations=2, max_steps=4, save_strategy="steps", save_steps=3)
        with audited() as audit:
            trainer.train(resume_from_checkpoint=resume)
        assert audit.unguarded == []
        return weights(trainer)

    calm = run(tmp_path / "calm")
    assert torch.equal(run(tmp_path / "calm", str(tmp_path / "calm" / "checkpoint-3")), calm)
    own, calls = advantages.turn_returns, iter(range(1000))

    def failing(*arguments: Any) -> Any:
        if next(calls) == 5:
            raise torch.OutOfMemoryError("out of memory")
        return own(*arguments)

    monkeypatch.setattr(advantages, "turn_returns", failing)
    assert torch.equal(run(tmp_path / "failing"), calm)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"turn_discount": 0.5}, "turn_discount is 0.5 without turn-level credit"),
        ({**CREDIT, "loss_type": "gmpo"}, "loss_type is 'gmpo' with turn_advantage_coef.*Set one of"),
        ({**CREDIT, "importance_sampling_level": "sequence"}, "importance_sampling_level is 'sequence' with turn_adv"),
    ],
)
def test_what_knows_no_advantage_of_a_token_is_refused(tmp_path: Path, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **settings)


def test_completions_of_one_turn_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"turn_advantage_coef is 0\.5, but completions have a single turn"):
        make_trainer(tmp_path, turn_advantage_coef=0.5)


def test_turns_are_not_compared_with_rewards_of_another_weight(tmp_path: Path) -> None:
    """The last turn had the rest of a tenth of the reward, less what turns were paid: it was punished."""
    credited(tmp_path / "a", reward_weights=[1.0])
    with pytest.raises(ConfigError, match=r"reward_weights gives \(0.1,\) to the rewards of environments"):
        credited(tmp_path / "b", reward_weights=[0.1])


def test_a_step_whose_reward_is_no_number_is_refused() -> None:
    with pytest.raises(DataError, match=r"a Step has reward=nan\. Give a finite number"):
        Step("x", reward=float("nan"))
