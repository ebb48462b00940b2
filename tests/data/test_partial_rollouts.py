"""Long completions wait half drawn: which groups are learnt from, with which tokens and weights, and after a stop."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from memsafe_rl.data.partial_rollouts import OpenGroup, _cut, begin_groups, gather_groups, groups_from, plain_groups
from memsafe_rl.data.prompts import Prompts
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.planning.policies import LadderPolicy
from memsafe_rl.memory.runtime.stages import Stage
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.rollout.native.running_batch import generate
from memsafe_rl.trainers.grpo import GRPOTrainer
from memsafe_rl.types import Completion
from tests.parallel.test_ranks import run_ranks, set_up_rank
from tests.tiny import tiny_model
from tests.trainers.helpers import make_trainer, rewire, weights

LIMIT, STEP, WANTED = 12, 4, 2


def prompts(first: int, count: int) -> Prompts:
    places = range(first, first + count)
    return Prompts(
        tuple({"prompt": str(i)} for i in places), tuple(map(str, places)), tuple(torch.tensor([i]) for i in places)
    )


class Script:
    """Draws completions of one sample each whose lengths are written down by position; notes what was in play."""

    def __init__(self, rollout: int, position: int, lengths: Sequence[int]) -> None:
        self.rollout, self.position, self.lengths = rollout, position, lengths
        self.in_play: list[list[int]] = []

    def begin(self, begun: int, count: int) -> tuple[OpenGroup, ...]:
        position = self.position + begun
        return begin_groups(prompts(position, count), 1, position=position, rollout=self.rollout, first_prompt=begun)

    def draw(self, groups: Sequence[OpenGroup]) -> list[OpenGroup]:
        self.in_play.append([group.position for group in groups])
        return [self._longer(group) for group in groups]

    def _longer(self, group: OpenGroup) -> OpenGroup:
        (earlier,) = group.completions
        whole = self.lengths[group.position]
        length = min(whole, LIMIT, STEP + (0 if earlier is None else len(earlier.ids)))
        zeros = torch.zeros(length)
        return group.with_drawn({0: Completion(torch.zeros(length, dtype=torch.int64), zeros, zeros, length == whole)})


def test_groups_wait_in_turn_and_the_oldest_whole_ones_are_learnt_from() -> None:
    lengths = [9, 3, 4, 5, 2, 99, 1, 1]
    first = Script(0, 0, lengths)
    found = gather_groups((), wanted=WANTED, limit=LIMIT, begin=first.begin, draw=first.draw)
    # Group 0 has 4 of 9 tokens after a round and 8 after two; 2 takes the free place.
    assert first.in_play == [[0, 1], [0, 2]]
    assert [group.position for group in found.whole] == [1, 2]
    assert [group.position for group in found.waiting] == [0]
    assert (found.consumed, found.rounds) == (3, 2)
    second = Script(1, 3, lengths)
    then = gather_groups(found.waiting, wanted=WANTED, limit=LIMIT, begin=second.begin, draw=second.draw)
    assert second.in_play == [[0, 3], [3, 4]]
    assert [group.position for group in then.whole] == [0, 3]
    # Whole, but one too many: it waits, and nothing is drawn for it again.
    assert [group.position for group in then.waiting] == [4]
    third = Script(2, 5, lengths)
    last = gather_groups(then.waiting, wanted=WANTED, limit=LIMIT, begin=third.begin, draw=third.draw)
    # Group 5 never ends by itself: three rounds reach the limit, beside 6, which is whole after one.
    assert third.in_play == [[5, 6]]
    assert [group.position for group in last.whole] == [4, 6]
    assert [group.position for group in last.waiting] == [5]


def decode_steps(step_tokens: int, limit: int = 4096, rollouts: int = 20, prompts_each: int = 16) -> float:
    """Steps of a rollout, each giving every completion in play a token; lengths are lognormal, median 400."""
    waiting: Sequence[OpenGroup] = ()
    steps, position = 0, 0
    for rollout in range(rollouts):
        rounds: list[int] = []

        def length(group: OpenGroup, sample: int) -> int:
            return min(limit, int(random.Random(f"{group.position} {sample}").lognormvariate(math.log(400), 0.9)))

        def begin(begun: int, count: int, rollout: int = rollout, position: int = position) -> tuple[OpenGroup, ...]:
            fresh = prompts(position + begun, count)
            return begin_groups(fresh, 8, position=position + begun, rollout=rollout, first_prompt=begun)

        def draw(groups: Sequence[OpenGroup], rounds: list[int] = rounds) -> list[OpenGroup]:
            longer, drawn = [], 0
            for group in groups:
                new = {}
                for sample in group.waiting(limit):
                    earlier = group.completions[sample]
                    had = 0 if earlier is None else len(earlier.ids)
                    has = min(length(group, sample), had + step_tokens)
                    drawn = max(drawn, has - had)
                    nothing = torch.empty(has)
                    new[sample] = Completion(nothing, nothing, nothing, has == length(group, sample))
                longer.append(group.with_drawn(new))
            rounds.append(drawn)
            return longer

        found = gather_groups(waiting, wanted=prompts_each, limit=limit, begin=begin, draw=draw)
        waiting, position = found.waiting, position + found.consumed
        steps += sum(rounds)
    return steps / rollouts


def test_long_tails_cost_fewer_decode_steps() -> None:
    whole = decode_steps(4096)
    assert decode_steps(1024) < 0.62 * whole
    assert decode_steps(256) < 0.5 * whole


def test_a_completion_that_never_ends_is_whole_at_the_limit() -> None:
    script = Script(0, 0, [99, 99, 99])
    found = gather_groups((), wanted=WANTED, limit=LIMIT, begin=script.begin, draw=script.draw)
    assert script.in_play == [[0, 1]] * 3
    assert [len(group.completions[0].ids) for group in found.whole if group.completions[0]] == [LIMIT, LIMIT]


def test_lower_limits_cut_what_waits() -> None:
    script = Script(0, 0, [99])
    (group,) = script.draw(script.draw(script.begin(0, 1)))
    (kept,) = group.fitted(1, 5).completions
    assert kept is not None
    assert (len(kept.ids), kept.finished, kept.model_logprobs is kept.logprobs) == (5, False, True)
    assert not group.fitted(1, 5).waiting(5)
    assert group.fitted(1, 8).completions == group.completions
    assert len(replace(group, completions=group.completions * 4).fitted(2, 8).completions) == 2


def test_groups_come_back_from_plain_values_bit_for_bit() -> None:
    logprobs = torch.tensor([-0.1, -1e-30, -float("inf")])
    own = torch.tensor([-0.3, -2.0, float("nan")])
    mask = torch.tensor([1, 0, 1], dtype=torch.uint8)
    drawn = Completion(torch.tensor([5, 6, 7]), logprobs, own, finished=True, ties=2, mask=mask)
    alike = Completion(torch.tensor([5]), own[:1], own[:1], finished=False)
    same = replace(alike, model_logprobs=alike.logprobs)
    group = OpenGroup(11, 3, 4, prompts(11, 1), (drawn, same, None))
    (back,) = groups_from(json.loads(json.dumps(plain_groups([group]))), lambda position: prompts(position, 1))
    assert (back.position, back.rollout, back.prompt, back.prompts.prompts) == (11, 3, 4, ("11",))
    one, two, none = back.completions
    assert none is None
    assert one is not None
    assert two is not None
    assert torch.equal(one.logprobs, logprobs)
    assert one.model_logprobs.view(torch.int32).tolist() == own.view(torch.int32).tolist()
    assert (one.ids.tolist(), one.finished, one.ties) == ([5, 6, 7], True, 2)
    assert torch.equal(one.mask, mask)
    assert (two.model_logprobs is two.logprobs, two.mask) == (True, None)
    assert _cut(one, 2).mask.tolist() == [1, 0]


# With the real engine


def partly(tmp_path: Path, **settings: Any) -> GRPOTrainer:
    given = {
        "partial_rollout_tokens": 3,
        "max_completion_length": 12,
        "max_steps": 5,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 16,
        "model": tiny_model(scale=4.0),
        "generation_kwargs": {"eos_token_id": list(range(1, 50))},  # about one draw in five ends a completion
    }
    return make_trainer(tmp_path, **{**given, **settings})


@pytest.mark.slow
def test_pieces_are_the_tokens_that_one_draw_gives(tmp_path: Path) -> None:
    trainer = partly(tmp_path, learning_rate=0.0)
    seen: list[OpenGroup] = []

    def wrap(taken: Any) -> Any:
        def noted(gathered: Any, state: Any) -> Any:
            seen.extend(gathered.whole)
            return taken(gathered, state)

        return noted

    rewire(trainer, "collector", "_taken", wrap)
    trainer.train()
    lengths = [len(drawn.ids) for group in seen for drawn in group.completions if drawn]
    assert max(lengths) > 6
    assert min(lengths) < 3
    collector = trainer.loop.collector
    whole = generate(
        trainer.adapter,
        [group.prompts.ids[0] for group in seen],
        [[group.key(trainer.args.seed, sample) for sample in range(4)] for group in seen],
        trainer.setup.sampling,
        collector.scorer.attempt(Stage.DRAW, collector.work(seen[0].prompts, 4)),
    )
    pieces = [drawn for group in seen for drawn in group.completions if drawn]
    for piece, alone in zip(pieces, whole, strict=True):
        assert torch.equal(piece.ids, alone.ids)
        assert piece.finished == alone.finished
        torch.testing.assert_close(piece.logprobs, alone.logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_what_is_left_undone_and_taken_over_is_logged(tmp_path: Path) -> None:
    trainer = partly(tmp_path)
    trainer.train()
    history = trainer.history
    assert {name for name in history[0] if name.startswith("partial/")} == {
        "partial/rounds",
        "partial/fresh_prompts",
        "partial/waiting_groups",
        "partial/stale_fraction",
    }
    assert history[0]["partial/stale_fraction"] == 0
    assert any(record["partial/stale_fraction"] > 0 for record in history)
    begun = sum(record["partial/fresh_prompts"] for record in history)
    assert begun == 4 * len(history) + history[-1]["partial/waiting_groups"]
    assert trainer.loop.state.cursor.position == begun


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"num_iterations": 2, "beta": 0.1}])
def test_a_resumed_run_goes_on_with_what_waits(tmp_path: Path, settings: dict[str, Any]) -> None:
    calm = partly(tmp_path / "calm", **settings)
    calm.train()
    saved = {"save_strategy": "steps", "save_steps": 1, **settings}
    partly(tmp_path / "stopped", **{**saved, "max_steps": 3}).train()
    again = partly(tmp_path / "stopped", **saved)
    again.train(resume_from_checkpoint=True)
    assert torch.equal(weights(again), weights(calm))
    assert [r["partial/waiting_groups"] for r in again.history if "partial/rounds" in r] == [
        r["partial/waiting_groups"] for r in calm.history if "partial/rounds" in r
    ]


@pytest.mark.slow
def test_rows_that_older_weights_began_weigh_what_the_present_ones_say(tmp_path: Path) -> None:
    trainer = partly(
        tmp_path, vllm_importance_sampling_mode="token_truncate", learning_rate=1e-2, steps_per_generation=2, top_k=40
    )
    checked = 0

    def noted(score: Any, trajectory: Any, samples: Any) -> Any:
        nonlocal checked
        scored = score(trajectory, samples)
        for row, stale in enumerate(samples.stale):
            if not stale:
                assert scored.importance_weights is None or bool((scored.importance_weights.rows()[row] == 1).all())
                continue
            old, drawn = scored.old_logprobs.rows()[row], samples.completions[row]
            expected = (old - drawn.model_logprobs).exp().clamp(max=3.0)
            torch.testing.assert_close(scored.importance_weights.rows()[row], expected)
            assert (expected - 1).abs().max() > 1e-4
            assert scored.has_old[row]
            checked += 1
        return scored

    rewire(trainer, "collector.scorer", "score_stale", lambda score: partial(noted, score))
    trainer.train()
    assert checked > 0


@pytest.mark.slow
def test_failures_while_pieces_are_drawn_change_no_token(tmp_path: Path) -> None:
    def trained(folder: Path, *, failing: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
        with SimulatedMemory() as device:
            trainer = partly(folder, policy=LadderPolicy(), max_steps=3)
            start = weights(trainer)
            rounds = 0

            def failing_round(drawn_on: Any, groups: Sequence[OpenGroup]) -> list[OpenGroup]:
                nonlocal rounds
                rounds += 1
                if failing:
                    device.fail_after(7 * rounds)
                return drawn_on(groups)

            rewire(trainer, "collector", "draw_round", lambda drawn_on: partial(failing_round, drawn_on))
            trainer.train()
            return start, weights(trainer), sum(event["event"] == "failure" for event in trainer.memory_events)

    start, calm, none = trained(tmp_path / "calm", failing=False)
    _, troubled, failures = trained(tmp_path / "troubled", failing=True)
    assert none == 0
    assert failures >= 3
    # The same tokens, and what rounding makes of the log-probs of rows that were read back.
    apart = (troubled - calm).norm() / (calm - start).norm()
    assert apart < 1e-6


def test_evaluations_draw_completions_to_their_end(tmp_path: Path) -> None:
    dataset = make_trainer(tmp_path).train_dataset.select(range(4))
    parts = partly(tmp_path / "a", eval_dataset=dataset).evaluate()
    whole = partly(tmp_path / "b", eval_dataset=dataset, partial_rollout_tokens=None).evaluate()
    timed = {name for name in parts if "time" in name or "per_second" in name}
    assert parts.keys() == whole.keys() > timed
    assert all(parts[name] == whole[name] for name in parts.keys() - timed)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dynamic_sampling": True}, "dynamic_sampling replaces groups by what their rewards are"),
        ({"vllm_importance_sampling_correction": False}, "vllm_importance_sampling_correction is False"),
        ({"rollout_func": lambda *_: {}}, "only this library's own engine can continue completions"),
        ({"loss_type": "vespo"}, "vllm_importance_sampling_mode is 'sequence_mask' with loss_type 'vespo'"),
        ({"partial_rollout_tokens": 0}, "partial_rollout_tokens is 0; it must be at least 1"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        partly(tmp_path, **settings)


def train_rank(rank: int, port: int, folder: str) -> None:
    set_up_rank(rank, port)
    trainer = partly(Path(folder) / "two", per_device_train_batch_size=8, max_steps=3)
    trainer.train()
    torch.save({"weights": weights(trainer), "history": trainer.history}, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_share_what_waits(tmp_path: Path) -> None:
    zero, one = run_ranks(train_rank, tmp_path, patience_seconds=90)
    assert torch.equal(zero["weights"], one["weights"])
    waiting = [record["partial/waiting_groups"] for record in zero["history"]]
    assert waiting == [record["partial/waiting_groups"] for record in one["history"]]
    assert any(waiting)
