"""The stages of a rollout: draw completions, have them rewarded, score them, give them advantages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from memsafe_rl.accounting import charge, host_memory
from memsafe_rl.data.external_rollout import ExternalRollout, check_contexts, read_rollout
from memsafe_rl.data.partial_rollouts import (
    Gathered,
    OpenGroup,
    begin_groups,
    gather_groups,
    groups_from,
    joined_prompts,
)
from memsafe_rl.data.prompts import Prompts, copied, hollow, own_row
from memsafe_rl.memory.planning.policies import check_plan
from memsafe_rl.memory.runtime.recovery import Attempt
from memsafe_rl.memory.runtime.stages import Stage
from memsafe_rl.ops.advantages import estimated_advantages, zero_spread_groups
from memsafe_rl.ops.evaluation import sample_metrics
from memsafe_rl.rewards.runner import PendingScores, over_ranks
from memsafe_rl.rollout.engine import DrawsAhead, RolloutEngine
from memsafe_rl.rollout.multi_turn.lockstep import EpisodeBatch
from memsafe_rl.training import refusal
from memsafe_rl.training.algorithms.advantages import advantages_by_objective, reward_metrics
from memsafe_rl.training.episodes import Episodes
from memsafe_rl.training.samples import (
    Groups,
    Rollout,
    Samples,
    build_trajectory,
    partial_metrics,
    rejection_metrics,
    rollout_metrics,
    with_advantages,
)
from memsafe_rl.training.scorer import Scorer
from memsafe_rl.training.setup import DrawRollout, RunState, TrainingSetup
from memsafe_rl.types import AdvantageResult, Completion, Component, Phase, RolloutPlan, RolloutWork, Trajectory

Made = TypeVar("Made")

EVALUATION_ROLLOUT = -1
"""Rollout index of evaluations: they draw the same numbers every time, so that their differences are the model's."""

_NO_REWARDS = torch.empty(0, 0)


@dataclass(frozen=True)
class Drawn:
    """Completions of a rollout, whose rewards may still be under way."""

    samples: Samples  # prompts and completions, over all ranks
    pending: PendingScores | None  # this rank's rewards; None once they are among the samples
    consumed: int  # prompts taken from the source
    waiting: tuple[OpenGroup, ...] = ()  # groups that the next rollout resumes
    metrics: Mapping[str, float] = field(default_factory=dict)  # what is logged of how they were drawn


class Collector:
    """Runs the stages of a rollout on a run's parts; holds no state that a failed attempt could spoil."""

    def __init__(self, setup: TrainingSetup) -> None:
        self._setup = setup
        self._config, self._settings, self.reader = setup.config, setup.settings, setup.models.reader
        self.scorer = Scorer(setup)
        self.episodes = Episodes(setup, self.scorer)

    @property
    def overlaps_rewards(self) -> bool:
        """Whether rewards may still be under way while rows are scored."""
        # Which groups are replaced depends on the rewards.
        return self._config.overlap_async_rewards and not self._config.dynamic_sampling

    def draw(self, state: RunState) -> Drawn:
        """Reads the next prompts, plans the rollout, draws completions and begins their rewards."""
        self.reader.forget()
        if self._config.partial_rollout_tokens is not None:
            return self._draw_partly(state)
        groups = self._groups(self._read(state.cursor.position, self._settings.prompts_per_rollout), state)
        with self._setup.memory.phase(Phase.ROLLOUT, compared=False):
            batch = self.episodes.begin(groups) if self.episodes.played else None
        self.plan(groups.prompts, batch)
        samples, pending = self._draw(groups, state, batch=batch)
        return Drawn(samples, pending, consumed=len(groups.prompts.ids))

    def reward(self, drawn: Drawn, state: RunState) -> Drawn:
        """Waits for the rewards; under dynamic sampling, replaces groups whose rewards are all equal."""
        if drawn.pending is None:
            return drawn
        samples = self._rewarded(drawn.samples, drawn.pending)
        samples, consumed = self._refill(samples, drawn.consumed, state)
        return replace(drawn, samples=samples, pending=None, consumed=consumed)

    def score(self, drawn: Drawn, later_samples: Sequence[int]) -> Trajectory:
        """Stores the samples as a trajectory and scores what needs no rewards, which may still be under way."""
        samples, scorer = drawn.samples, self.scorer
        try:
            with host_memory(), charge(Component.TRAJECTORY):
                trajectory = self._repeat(
                    build_trajectory,
                    samples,
                    masks_truncated=self._config.mask_truncated_completions,
                    needs_whole=not self._setup.advantages.joins_sequences,
                    with_turns=self._setup.advantages.needs.turns,
                    # what filters leave out of a draw is no fault of a sampler that is corrected
                    filtered=self._setup.engine.supports.compares_filtered
                    or not (samples.external or any(samples.stale)),
                )
            trajectory = scorer.with_sources(trajectory)
            trajectory = scorer.score_unrewarded(trajectory, later_samples, external=samples.external)
            return scorer.score_stale(trajectory, samples)
        except BaseException:
            if drawn.pending is not None:
                drawn.pending.cancel()
            raise

    def assign(self, drawn: Drawn, trajectory: Trajectory, later_samples: Sequence[int]) -> Rollout:
        """Turns rewards into advantages, group by group; rows trained on after weights moved get old log-probs."""
        samples = drawn.samples
        advantages = self._repeat(self._advantages, samples)
        trajectory = self._repeat(with_advantages, trajectory, advantages)
        with host_memory():  # where the rollout is
            rewards_B, size = advantages.rewards_B, samples.group_size
            trajectory, credited = self._repeat(self._setup.advantages.assign, trajectory, rewards_B, size)
        if not trajectory.sample_of_row:
            advantages = replace(advantages, advantages_B=trajectory.advantages)
        trajectory = self.scorer.score_later(trajectory, later_samples, external=samples.external)
        credited |= self._repeat(rejection_metrics, trajectory)
        return Rollout(
            trajectory=trajectory,
            consumed=drawn.consumed,
            external=samples.external or any(samples.stale),
            metrics={**self._repeat(self._metrics, samples, advantages), **drawn.metrics, **credited},
            table=self._repeat(self._table, samples, advantages),
            waiting=drawn.waiting,
        )

    def evaluate(self, examples: Sequence[dict[str, Any]], state: RunState) -> tuple[dict[str, float], Rollout | None]:
        """Draws and rewards completions for evaluation; gives metrics, and a rollout where its loss needs no critic."""
        prompts = self._repeat(self._reads, examples, phase=Phase.EVALUATE)
        groups = Groups(prompts, self._config.eval_generations, self._config.seed, EVALUATION_ROLLOUT)
        samples = self._rewarded(*self._draw(groups, state, phase=Phase.EVALUATE), phase=Phase.EVALUATE)
        metrics = self._repeat(self._evaluation_metrics, samples, phase=Phase.EVALUATE)
        if not self.evaluates_loss:
            return metrics, None
        drawn = Drawn(samples, None, consumed=0)
        return metrics, self.assign(drawn, self.score(drawn, []), [])

    @property
    def evaluates_loss(self) -> bool:
        """Whether evaluations have a loss: it needs no critic, is one, and is of tokens."""
        setup = self._setup
        return not (setup.advantages.critics or self._settings.objectives or setup.adapter.time_separable)

    def close(self) -> None:
        """Ends the engine and the threads of environments; the next rollout starts them anew."""
        try:
            self._setup.engine.close()
        finally:
            if self._setup.environments is not None:
                self._setup.environments.close()

    def plan(self, prompts: Prompts, batch: EpisodeBatch | None = None) -> None:
        """Asks the memory policy how to cut the rollout; episodes are as long as their environments make them."""
        work = self.work(prompts, self._config.num_generations)
        if batch is not None:
            work = replace(work, prompt_tokens=self.episodes.first_tokens(work.prompt_tokens, batch))
        if self.episodes.several_turns:
            work = replace(work, kept_bytes=self.episodes.most_kept_bytes(work, batch))
        plan = self._setup.memory_policy.before_rollout(work, self._setup.memory_state())
        self._setup.memory.adopt(served_by(self._setup.engine, plan), RolloutPlan)

    def work(self, prompts: Prompts, group_size: int) -> RolloutWork:
        """Describes a rollout to the memory policy."""
        adapter = self._setup.adapter
        return RolloutWork(
            prompt_tokens=tuple(len(ids) for ids in prompts.ids),
            group_size=group_size,
            max_new_tokens=self._setup.sampling.max_new_tokens,
            geometry=adapter.geometry,
            scored=self._settings.has_reference and not adapter.closed_form_kl,
        )

    @property
    def corrects_sampler(self) -> bool:
        """Whether an external sampler such as vLLM drew the completions, whose mismatch the loss corrects."""
        setup = self._setup
        return setup.draw_rollout is None and self.scorer.corrects(setup.engine.supports.is_external)

    def groups_from(self, plain: Sequence[Mapping[str, Any]]) -> tuple[OpenGroup, ...]:
        """Restores groups that waited when a checkpoint was written."""
        return groups_from(plain, partial(self._read_now, count=1))

    def generate(self, groups: Groups, rows: Sequence[int], *, step: int) -> list[Completion]:
        """Has the engine draw some rows with the weights as they are now."""
        setup, keys = self._setup, groups.keys(rows)
        setup.recovery.repeat(Stage.PREPARE, setup.engine.synchronise, step)
        drawn = setup.engine.generate(
            [groups.prompts.ids[prompt] for prompt in keys],
            list(keys.values()),
            setup.sampling,
            self.scorer.attempt(Stage.DRAW, self.work(groups.prompts, groups.size)),
            setup.on_sampling,
        )
        setup.engine.release()
        return drawn

    def draw_ahead(self, state: RunState, rollout: Rollout) -> None:
        """Has the engine begin the next rollout, if any, with the weights as they are: those after rollout k - 2."""
        setup, config, ahead = self._setup, self._config, self._setup.engine.supports.ahead
        least = 1 if config.kl_stop_rule else config.steps_per_rollout
        if ahead is None or state.step + least >= setup.planned_steps:
            return

        def begin(ahead: DrawsAhead) -> None:
            prompts = self._read_now(state.cursor.position + rollout.consumed, self._settings.prompts_per_rollout)
            groups = Groups(prompts, config.num_generations, config.seed, state.cursor.rollout + 1)
            keys = list(groups.keys(range(groups.rows)).values())
            ahead.begin(prompts.ids, keys, setup.sampling, setup.memory.rollout_plan)

        with setup.memory.phase(Phase.ROLLOUT, compared=False):
            setup.recovery.repeat(Stage.PREPARE, begin, ahead)

    def _groups(self, prompts: Prompts, state: RunState, first: int = 0) -> Groups:
        return Groups(prompts, self._config.num_generations, self._config.seed, state.cursor.rollout, first)

    def _draw(
        self, groups: Groups, state: RunState, *, phase: Phase = Phase.ROLLOUT, batch: EpisodeBatch | None = None
    ) -> tuple[Samples, PendingScores]:
        """Draws this rank's rows, begins their rewards, and joins all ranks' rows."""
        setup, mine = self._setup, self._setup.parallel.share(groups.rows)
        with setup.memory.phase(phase):
            if self.episodes.played:
                given = self.episodes.play(batch or self.episodes.begin(groups), step=state.step)
            elif setup.draw_rollout is None:
                drawn = self.generate(groups, mine, step=state.step)
                given = ExternalRollout(groups.conditions(mine), drawn, external=setup.engine.supports.is_external)
            else:
                given = self._drawn_by_user(setup.draw_rollout, groups, mine)
        return self._with_rewards_begun(groups, mine, given, phase, state)

    def _with_rewards_begun(
        self, groups: Groups, mine: range, given: ExternalRollout, phase: Phase, state: RunState
    ) -> tuple[Samples, PendingScores]:
        """Begins the rewards of this rank's rows, and joins all ranks' rows."""
        setup, gather = self._setup, self._setup.parallel.gather
        said = given.texts
        if said is None:
            said = setup.models.decoded(groups.prompts, given.conditions, given.completions)
        shown = given.prompts and list(map(hollow, given.prompts))
        with setup.memory.phase(Phase.REWARD if phase is Phase.ROLLOUT else phase):
            pending = self._begin_rewards(groups, mine, given, said, state)
        nothing, sampler = [None] * len(mine), [given.external] * len(mine)
        columns = given.conditions, given.completions, said, sampler
        optional = [values or nothing for values in (given.masks, given.pieces, shown, given.counts)]
        try:
            rows = gather([*zip(*columns, *optional, strict=True)])
            conditions, completions, texts, external, masks, pieces, asked, counts = zip(*rows, strict=True)
            samples = Samples(
                prompts=groups.prompts,
                group_size=groups.size,
                conditions=conditions,
                completions=completions,
                masks=_completed(masks, completions),
                texts=texts,
                rewards_BF=_NO_REWARDS,
                extras=(),
                external=all(external),
                pieces=() if None in pieces else pieces,
                asked=() if None in asked else asked,
                counts=() if None in counts else counts,
            )
        except BaseException:
            pending.cancel()
            raise
        return samples, pending

    def _drawn_by_user(self, draw_rollout: DrawRollout, groups: Groups, mine: range) -> ExternalRollout:
        """Has the user's function draw this rank's rows, and checks what it returns."""
        setup = self._setup
        output = draw_rollout(copy.deepcopy([groups.prompts.prompts[row // groups.size] for row in mine]))
        ends = {*setup.sampling.eos_token_ids, setup.models.processing_class.pad_token_id}
        given = setup.recovery.repeat(
            Stage.PREPARE, read_rollout, output, rows=len(mine), vocab_size=setup.adapter.geometry.vocab_size, ends=ends
        )
        check_contexts(given, setup.readers)
        return given

    def _read(self, position: int, count: int) -> Prompts:
        return self._repeat(self._read_now, position, count)

    def _read_now(self, position: int, count: int) -> Prompts:
        return self._reads(self._setup.source.take(position, count))

    @property
    def _reads(self) -> Callable[[Sequence[dict[str, Any]]], Prompts]:
        """What reads prompts; episodes have contexts of their own."""
        return self.reader.measured if self.episodes.played else self.reader

    def _repeat(self, function: Callable[..., Made], *values: Any, phase: Phase = Phase.ROLLOUT, **named: Any) -> Made:
        """Runs a small bookkeeping stage with retries; its peak does not correct estimates."""
        with self._setup.memory.phase(phase, compared=False):
            return self._setup.recovery.repeat(Stage.STORE, function, *values, **named)

    def _draw_partly(self, state: RunState) -> Drawn:
        """Draws a bounded number of tokens a round, beginning fresh prompts, until enough groups are whole."""
        samples, limit = self._config.num_generations, self._setup.sampling.max_new_tokens
        position, rollout = state.cursor.position, state.cursor.rollout
        planned = False

        def begin(begun: int, count: int) -> tuple[OpenGroup, ...]:
            prompts = self._read(position + begun, count)
            return begin_groups(prompts, samples, position=position + begun, rollout=rollout, first_prompt=begun)

        def draw(groups: Sequence[OpenGroup]) -> list[OpenGroup]:
            nonlocal planned
            if not planned:
                self.plan(joined_prompts(groups))
                planned = True
            return self.draw_round(groups)

        gathered = gather_groups(
            [group.fitted(samples, limit) for group in state.waiting],
            wanted=self._settings.prompts_per_rollout,
            limit=limit,
            begin=begin,
            draw=draw,
        )
        if not planned:  # nothing had to be drawn, but scoring has a plan too
            self.plan(joined_prompts(gathered.whole))
        return self._taken(gathered, state)

    def draw_round(self, groups: Sequence[OpenGroup]) -> list[OpenGroup]:
        """Resumes every completion that has not ended, shared over the ranks, for a bounded number of tokens."""
        setup = self._setup
        settings = replace(setup.sampling, max_step_tokens=self._config.partial_rollout_tokens)
        open_rows = [(place, s) for place, group in enumerate(groups) for s in group.waiting(settings.max_new_tokens)]
        mine: dict[int, list[int]] = {}
        for row in setup.parallel.share(len(open_rows)):
            place, sample = open_rows[row]
            mine.setdefault(place, []).append(sample)
        work = self.work(joined_prompts(groups), self._config.num_generations)
        with setup.memory.phase(Phase.ROLLOUT):
            drawn = setup.engine.generate(
                [groups[place].prompts.ids[0] for place in mine],
                [[groups[place].key(self._config.seed, sample) for sample in own] for place, own in mine.items()],
                settings,
                self.scorer.attempt(Stage.DRAW, work),
                setup.on_sampling,
                begun=[[groups[place].completions[sample] for sample in own] for place, own in mine.items()],
            )
        found: list[dict[int, Completion]] = [{} for _ in groups]
        for (place, sample), completion in zip(open_rows, setup.parallel.gather(drawn), strict=True):
            found[place][sample] = completion
        return [group.with_drawn(new) for group, new in zip(groups, found, strict=True)]

    def _taken(self, gathered: Gathered, state: RunState) -> Drawn:
        """Takes whole groups as the rollout's samples and has them rewarded."""
        groups = self._groups(joined_prompts(gathered.whole), state)
        rows = [completion for group in gathered.whole for completion in group.completions if completion is not None]
        mine = self._setup.parallel.share(len(rows))
        given = ExternalRollout(groups.conditions(mine), [rows[row] for row in mine])
        samples, pending = self._with_rewards_begun(groups, mine, given, Phase.ROLLOUT, state)
        stale = tuple(group.rollout != state.cursor.rollout for group in gathered.whole for _ in range(groups.size))
        samples = replace(samples, stale=stale)
        return Drawn(samples, pending, gathered.consumed, gathered.waiting, partial_metrics(gathered, samples))

    def _begin_rewards(
        self, groups: Groups, mine: range, given: ExternalRollout, texts: Sequence[Any], state: RunState
    ) -> PendingScores:
        """Calls every reward function once on this rank's rows, in prompt order; async ones may go on afterwards."""
        prompts, size = groups.prompts, groups.size
        examples = [own_row(prompts.examples[row // size]) for row in mine]
        names = {name for example in examples for name in example} - {"prompt", "completion", "completion_ids"}
        columns = {name: [example.get(name) for example in examples] for name in sorted(names)}
        for name, values in given.extra.items():
            columns[name] = list(values) if isinstance(values, (list, tuple)) else [values] * len(mine)
        return self._setup.rewards.begin(
            list(map(copied, given.prompts or [prompts.prompts[row // size] for row in mine])),
            [copied(text) if isinstance(text, list) else text for text in texts],
            self._setup.models.completion_ids(given.completions),
            columns,
            trainer_state=state.progress,
            attempt=by_reward_rows(self.scorer.attempt(Stage.REWARD_PASS, self.work(prompts, size), nullcontext)),
        )

    def _rewarded(self, samples: Samples, pending: PendingScores, phase: Phase = Phase.REWARD) -> Samples:
        """Waits for the rewards of this rank's rows, and joins all ranks'."""
        setup = self._setup
        with setup.memory.phase(phase, compared=False):
            scores = pending.result()
            everywhere = setup.parallel.gather([scores])
            setup.on_rewards(over_ranks(scores, everywhere))
            rewards = [row for one in everywhere for row in one.rewards_BF.tolist()]
            rewards_BF = setup.recovery.repeat(Stage.STORE, torch.tensor, rewards, dtype=torch.float32)
        extras = [
            {name: values[row] for name, values in one.extras.items()}
            for one in everywhere
            for row in range(len(one.rewards_BF))
        ]
        return replace(samples, rewards_BF=rewards_BF, extras=tuple(extras))

    def _refill(self, samples: Samples, consumed: int, state: RunState) -> tuple[Samples, int]:
        """Replaces groups whose rewards are all equal by fresh prompts, up to the limit (DAPO's dynamic sampling)."""
        if not self._config.dynamic_sampling:
            return samples, consumed
        wanted, paid_F = len(samples.prompts.ids), [weight != 0 for weight in self._setup.rewards.weights]
        for _ in range(self._config.dynamic_sampling_max_rounds):
            if self._repeat(_flat_groups, samples, paid_F).count(False) >= wanted:
                break
            prompts = self._read(state.cursor.position + consumed, wanted)
            fresh = self._rewarded(*self._draw(self._groups(prompts, state, first=consumed), state))
            consumed += wanted
            samples = self._repeat(samples.joined, fresh)
        return self._repeat(_useful_groups, samples, paid_F, wanted), consumed

    def _advantages(self, samples: Samples) -> AdvantageResult:
        rewards, settings = self._setup.rewards, dict[str, Any](self._settings.advantages)
        compare = partial(estimated_advantages, group_size=samples.group_size, lengths_B=samples.lengths, **settings)
        weights_F = torch.tensor(rewards.weights, dtype=torch.float32)
        return advantages_by_objective(samples.rewards_BF, rewards.names, weights_F, self._settings.objectives, compare)

    def _metrics(self, samples: Samples, advantages: AdvantageResult) -> dict[str, float]:
        objectives = reward_metrics(self._settings.objectives, advantages)
        metrics = {**rollout_metrics(samples, advantages, self._setup.rewards.names), **objectives}
        if self._config.num_generations == 1:  # a completion alone is always equal to itself
            metrics.pop("frac_reward_zero_std")
        return metrics

    def _evaluation_metrics(self, samples: Samples) -> dict[str, float]:
        """Computes an evaluation's metrics, with pass@k and best@k where a prompt has several completions."""
        config, advantages = self._config, self._advantages(samples)
        metrics = self._metrics(samples, advantages)
        if not config.eval_tries:
            return metrics
        rewards_B = advantages.rewards_B
        if config.eval_pass_reward is not None:
            rewards_B = samples.rewards_BF[:, self._setup.rewards.names.index(config.eval_pass_reward)]
        rewards_PG = rewards_B.view(-1, samples.group_size)
        return {**metrics, **sample_metrics(rewards_PG, config.eval_tries, config.eval_pass_threshold)}

    def _table(self, samples: Samples, advantages: AdvantageResult) -> tuple[dict[str, Any], ...]:
        names, prompts = self._setup.rewards.names, samples.prompts.prompts
        asked = samples.asked or [hollow(prompt) for prompt in prompts for _ in range(samples.group_size)]
        return tuple(
            {
                "prompt": asked[row],
                "completion": self._setup.models.loggable(samples.texts[row]),
                **samples.extras[row],
                **{name: samples.rewards_BF[row, column].item() for column, name in enumerate(names)},
                "advantage": advantages.advantages_B[row].item(),
            }
            for row in range(len(samples.completions))
        )


def served_by(engine: RolloutEngine, plan: RolloutPlan) -> RolloutPlan:
    """Writes the run's engine and the type of its cache into a plan; refuses a plan that asks for others."""
    check_plan(plan, RolloutPlan)
    if plan.engine not in (engine.name, RolloutPlan.engine):
        raise refusal("plan/engine", wanted=plan.engine, own=engine.name)
    if plan.cache_dtype not in (engine.cache_dtype, None):
        raise refusal("plan/cache", wanted=plan.cache_dtype)
    return replace(plan, engine=engine.name, cache_dtype=engine.cache_dtype)


def by_reward_rows(attempt: Attempt[RolloutPlan]) -> Callable[[Callable[[int], Made]], Made]:
    """Runs a reward model on as many rows at once as the plan in force allows."""

    def run(unit: Callable[[int], Made]) -> Made:
        def planned(plan: RolloutPlan) -> Made:
            return unit(plan.reward_rows)

        return attempt(planned)

    return run


def _completed(masks: Sequence[Any], completions: Sequence[Completion]) -> tuple[Any, ...] | None:
    """Returns all rows' masks, ones where a rank's function gave none; None where no rank's did."""
    if all(mask is None for mask in masks):
        return None
    with host_memory():
        whole = [torch.ones(len(one.ids), dtype=torch.uint8) for one in completions]
    return tuple(ones if mask is None else mask for ones, mask in zip(whole, masks, strict=True))


def _flat_groups(samples: Samples, paid_F: Sequence[bool]) -> list[bool]:
    """Returns for each group whether its rewards are all equal, those that are only logged left out."""
    flat: list[bool] = zero_spread_groups(samples.rewards_BF * torch.tensor(paid_F), samples.group_size).tolist()
    return flat


def _useful_groups(samples: Samples, paid_F: Sequence[bool], count: int) -> Samples:
    """Takes the first groups whose rewards differ, and where they are too few, the first of the others."""
    flat = _flat_groups(samples, paid_F)
    return samples.groups(sorted(range(len(flat)), key=flat.__getitem__)[:count])
