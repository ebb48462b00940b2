"""One rollout as a story: prompts → completions → rewards → advantages → reference and old log-probs."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from memsafe_rl.accounting import charge, host_memory
from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.data.environments import EnvironmentPool
from memsafe_rl.data.external_rollout import ExternalRollout, RolloutFunction, check_contexts, read_rollout
from memsafe_rl.data.partial_rollouts import (
    Gathered,
    OpenGroup,
    begin_groups,
    gather_groups,
    groups_from,
    joined_prompts,
)
from memsafe_rl.data.prompts import Prompts, PromptSource
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.planning.plan_checks import check_rollout_plan
from memsafe_rl.memory.planning.policies import MemoryPolicy
from memsafe_rl.memory.runtime.recovery import Recovery
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.ops.advantages import estimated_advantages, zero_spread_groups
from memsafe_rl.ops.evaluation import sample_metrics
from memsafe_rl.parallel.ranks import Ranks
from memsafe_rl.rewards.base import PendingScores, RewardRunner
from memsafe_rl.rollout.engine import RolloutEngine, RolloutScope
from memsafe_rl.rollout.multi_turn.lockstep import EpisodeBatch
from memsafe_rl.rollout.multi_turn.roles import ModelRoles
from memsafe_rl.rollout.multi_turn.users import ModelUser
from memsafe_rl.trainers.kinds import Kind
from memsafe_rl.training.critic_advantages import CriticAdvantages
from memsafe_rl.training.objectives import judge, reward_metrics
from memsafe_rl.training.samples import (
    Answers,
    Rollout,
    Samples,
    build_trajectory,
    joined_pairs,
    judged,
    partial_metrics,
    rollout_metrics,
)
from memsafe_rl.training.scoring import RolloutScorer
from memsafe_rl.types import (
    AdvantageResult,
    Completion,
    Component,
    ModelGeometry,
    Phase,
    RolloutPlan,
    RolloutWork,
    SamplingSettings,
    SequenceKey,
    Trajectory,
)

logger = logging.getLogger(__name__)

Made = TypeVar("Made")

EVALUATION_ROLLOUT = -1
"""Rollout index of evaluations: they draw the same numbers every time, so that their differences are the model's."""


_NO_REWARDS = torch.empty(0, 0)


class ExperienceMaker(RolloutScorer):
    """Makes rollouts; holds no state that a failed attempt could spoil."""

    def __init__(
        self,
        *,
        config: TrainerConfig,
        adapter: ModelAdapter,
        engine: RolloutEngine,
        kind: Kind,
        rewards: RewardRunner,
        policy: MemoryPolicy,
        recovery: Recovery,
        ranks: Ranks,
        sampling: SamplingSettings,
        autocast: Callable[[], AbstractContextManager[object]],
        rollout_func: RolloutFunction | None,
        owner: Any,
        credit: CriticAdvantages | None = None,
        stage: EnvironmentPool | None = None,
    ) -> None:
        super().__init__(config, adapter, recovery, ranks, autocast, owner, credit)
        self._engine = engine
        self._kind = kind
        self._read_prompts = kind.reader
        self._rewards = rewards
        self._policy = policy
        self._sampling = sampling
        self._rollout_func = rollout_func
        self._stage = stage
        self.roles = ModelRoles(adapter)
        self._scope: RolloutScope | None = None
        if stage is not None and (adapter.time_separable or adapter.geometry.source_bytes is not None):
            raise ConfigError(
                f"{type(adapter.model).__name__} cannot play episodes, where a prompt grows by what was said: that "
                "takes a causal language model. Leave tools and environment_factory out."
            )
        engine.check(sampling)
        adapter.take_sources()

    def limit(self, max_new_tokens: int) -> None:
        """Sets the longest completion of the rollouts to come; a shortest one that is longer comes down to it."""
        least = min(self._sampling.min_new_tokens, max_new_tokens)
        self._sampling = replace(self._sampling, max_new_tokens=max_new_tokens, min_new_tokens=least)

    @property
    def corrects_sampler(self) -> bool:
        """Whether completions come from a sampler that is not quite the trained network, and the loss corrects it."""
        return self._rollout_func is None and self._corrected(self._engine.supports.is_external)

    @property
    def can_round_cache(self) -> bool:
        """Whether `round_cache` would do it."""
        able = self._engine.supports.int8_cache
        return able and self._rollout_func is None and self._config.partial_rollout_tokens is None

    def round_cache(self) -> None:
        """Keeps the caches of the rollouts to come in 8 bits."""
        self._engine.round_cache()

    def close(self) -> None:
        """Ends the engine and the threads of environments; the next rollout starts them anew."""
        self._engine.close()
        if self._stage is not None:
            self._stage.close()

    def make(
        self,
        source: PromptSource,
        *,
        rollout: int,
        position: int,
        later_rows: Sequence[int],
        waiting: Sequence[OpenGroup] = (),
    ) -> Rollout:
        """Draws, rewards and scores one rollout."""
        left: tuple[OpenGroup, ...] = ()
        partly: dict[str, float] = {}
        if self._config.partial_rollout_tokens is None:
            prompts = self._read(source, position, self._config.prompts_per_rollout)
            group_size = self._config.num_generations
            match = None if self._stage is None else self._begun(self._stage, prompts, rollout, group_size)
            self._plan(prompts, match)
            samples, answers = self._draw(prompts, rollout, group_size, match=match)
            consumed = len(prompts.ids)
        else:
            gathered = self._go_on(source, rollout, position, waiting)
            samples, answers = self._taken(gathered.whole, rollout)
            consumed, left, partly = gathered.consumed, gathered.waiting, partial_metrics(gathered, samples)
        # Which groups are replaced depends on the rewards.
        overlapping = self._config.overlap_async_rewards and not self._config.dynamic_sampling
        if not overlapping:
            samples, consumed = self._refill(self._rewarded(samples, answers), source, rollout, position)
        trajectory = self._scored_unrewarded(samples, answers, later_rows)
        if overlapping:
            samples = self._rewarded(samples, answers)
        advantages = self._repeat(lambda: self._advantages(samples))
        trajectory = self._repeat(lambda: judged(trajectory, advantages))
        trajectory, judgement = self._repeat(lambda: self._credited(trajectory, advantages))
        if not trajectory.sample_of_row:
            advantages = replace(advantages, advantages_B=trajectory.advantages)
        trajectory = self._score_later(trajectory, later_rows, external=samples.external)
        metrics, table = self._repeat(lambda: (self._metrics(samples, advantages), self._table(samples, advantages)))
        return Rollout(
            trajectory=trajectory,
            consumed=consumed,
            external=samples.external or any(samples.stale),
            metrics={**metrics, **partly, **judgement},
            table=table,
            waiting=left,
        )

    def evaluate(self, examples: Sequence[dict[str, Any]], group_size: int) -> dict[str, float]:
        """Draws and rewards completions for evaluation, with the plan of the last rollout."""
        prompts = self._repeat(lambda: self._read_prompts(examples), Phase.EVALUATE)
        samples = self._rewarded(*self._draw(prompts, EVALUATION_ROLLOUT, group_size, phase=Phase.EVALUATE))

        def metrics() -> dict[str, float]:
            advantages = self._advantages(samples)
            return {**self._metrics(samples, advantages), **self._sample_metrics(samples, advantages.rewards_B)}

        return self._repeat(metrics, Phase.EVALUATE)

    def _sample_metrics(self, samples: Samples, rewards_B: Tensor) -> dict[str, float]:
        """Computes pass@k and its like for evaluations of several completions a prompt."""
        tries, decisive = self._config.eval_tries, self._config.eval_pass_reward
        if not tries:
            return {}
        if decisive is not None:
            rewards_B = samples.rewards_BF[:, self._rewards.names.index(decisive)]
        return sample_metrics(rewards_B.view(-1, samples.group_size), tries, self._config.eval_pass_threshold)

    def _read(self, source: PromptSource, position: int, count: int) -> Prompts:
        return self._repeat(lambda: self._read_prompts(source.take(position, count)))

    def groups_from(self, plain: Sequence[Mapping[str, Any]], source: PromptSource) -> tuple[OpenGroup, ...]:
        """Restores groups that waited when a checkpoint was written."""
        return groups_from(plain, lambda position: self._read_prompts(source.take(position, 1)))

    def _repeat(self, unit: Callable[[], Made], phase: Phase = Phase.ROLLOUT) -> Made:
        """Repeats a small unit beside a phase's own work; no plan predicted it, and none is judged by it."""
        with self._tracker.phase(phase, compared=False):
            return self._recovery.repeat(unit)

    def _plan(self, prompts: Prompts, match: EpisodeBatch | None = None) -> None:
        """Asks the memory policy how to cut the rollout; episodes are as long as their environments make them."""
        work = self._work(prompts, self._config.num_generations)
        if match is not None:
            work = replace(work, prompt_tokens=self._first_tokens(work.prompt_tokens, match))
        work = replace(work, kept_bytes=self._kept_most(work, match))
        plan = self._policy.before_rollout(work, self._tracker.state())
        self._tracker.adopt(self.served(plan), RolloutPlan)

    def served(self, plan: Any) -> Any:
        """Writes the run's engine and its cache into a plan."""
        return _served_by(self._engine, plan)

    def _work(self, prompts: Prompts, group_size: int) -> RolloutWork:
        return RolloutWork(
            prompt_tokens=tuple(len(ids) for ids in prompts.ids),
            group_size=group_size,
            max_new_tokens=self._sampling.max_new_tokens,
            geometry=self._adapter.geometry,
            scored=self._config.has_reference and not self._adapter.closed_form_kl,
        )

    def _draw(
        self,
        prompts: Prompts,
        rollout: int,
        group_size: int,
        *,
        first_prompt: int = 0,
        phase: Phase = Phase.ROLLOUT,
        match: EpisodeBatch | None = None,
    ) -> tuple[Samples, Answers]:
        """Draws this rank's rows, has them rewarded, and joins all ranks' rows; rewards may still be under way."""
        mine = self._ranks.share(len(prompts.ids) * group_size)
        work = self._work(prompts, group_size)
        with self._tracker.phase(phase):
            if self._stage is not None:
                match = match or self._begun(self._stage, prompts, rollout, group_size, first_prompt)
                given = self._play(self._stage, match)
            elif self._rollout_func is None:
                drawn = self._generate(prompts, rollout, group_size, work, first_prompt, mine)
                external = self._engine.supports.is_external
                given = ExternalRollout([prompts.ids[row // group_size] for row in mine], drawn, external=external)
            else:
                given = self._call_rollout_func(prompts, group_size, mine)
        return self._answered(prompts, group_size, mine, given, phase)

    def _answered(
        self, prompts: Prompts, group_size: int, mine: range, given: ExternalRollout, phase: Phase
    ) -> tuple[Samples, Answers]:
        """Has this rank's rows rewarded, and joins all ranks' rows; rewards may still be under way."""
        work = self._work(prompts, group_size)
        texts = self._kind.shown(prompts, given.completions) if given.texts is None else given.texts
        answering = Phase.REWARD if phase is Phase.ROLLOUT else phase
        with self._tracker.phase(answering):
            pending = self._reward(prompts, group_size, mine, given, texts, work)
        try:
            samples = Samples(
                prompts=prompts,
                group_size=group_size,
                conditions=tuple(self._ranks.gather(given.conditions)),
                completions=tuple(self._ranks.gather(given.completions)),
                masks=None if given.masks is None else tuple(self._ranks.gather(given.masks)),
                texts=tuple(self._ranks.gather(texts)),
                rewards_BF=_NO_REWARDS,
                extras=(),
                external=given.external,
                pieces=() if given.pieces is None else tuple(self._ranks.gather(given.pieces)),
                facts=_averaged(self._ranks.gather([given.facts])) if self._stage is not None else {},
            )
        except BaseException:
            pending.cancel()
            raise
        return samples, Answers(pending, len(mine), answering)

    def _rewarded(self, samples: Samples, answers: Answers) -> Samples:
        """Waits for the rewards of this rank's rows, and joins all ranks'."""
        with self._tracker.phase(answers.phase, compared=False):
            scores = answers.pending.result()
            self._owner.record(scores)
            rewards = self._ranks.gather(scores.rewards_BF.tolist())
            rewards_BF = self._recovery.repeat(lambda: torch.tensor(rewards, dtype=torch.float32))
        extras = tuple(self._ranks.gather(_by_row(scores.extras, answers.rows)))
        return replace(samples, rewards_BF=rewards_BF, extras=extras)

    def _generate(
        self, prompts: Prompts, rollout: int, group_size: int, work: RolloutWork, first_prompt: int, mine: range
    ) -> list[Completion]:
        """Has the engine draw this rank's rows with the weights as they are now."""
        keys: dict[int, list[SequenceKey]] = {}
        for row in mine:
            prompt, sample = divmod(row, group_size)
            key = SequenceKey(self._config.seed, rollout, first_prompt + prompt, sample)
            keys.setdefault(prompt, []).append(key)
        self._recovery.repeat(lambda: self._engine.synchronise(self._owner.state.global_step))
        drawn = self._engine.generate(
            [prompts.ids[prompt] for prompt in keys],
            list(keys.values()),
            self._sampling,
            self._attempt(work),
            progress=self._owner.report_sampling,
        )
        self._engine.release()
        return drawn

    # ------------------------------------------------------------------ episodes

    def _begun(
        self, stage: EnvironmentPool, prompts: Prompts, rollout: int, group_size: int, first_prompt: int = 0
    ) -> EpisodeBatch:
        """Resets the environments of this rank's rows, once."""
        keys = {
            row: SequenceKey(self._config.seed, rollout, first_prompt + row // group_size, row % group_size)
            for row in self._ranks.share(len(prompts.ids) * group_size)
        }
        table = stage.table(
            self._draw_turns,
            self._draw_answers,
            completion_tokens=self._sampling.max_new_tokens,
            context_tokens=min((g.max_positions for g in self._readers.values() if g.max_positions), default=None),
        )
        return stage.begin(prompts, keys, group_size, table)

    def _first_tokens(self, prompt_tokens: Sequence[int], match: EpisodeBatch) -> tuple[int, ...]:
        """The longest first prompt of each group, as far as it is known."""
        longest = list(prompt_tokens)
        for key, context in zip(match.keys, match.contexts, strict=True):
            longest[key.prompt] = max(longest[key.prompt], len(context))
        return tuple(longest)

    @property
    def plays_turns(self) -> bool:
        """Whether completions are episodes of several turns; a forecast, which has no stage, goes by the limits."""
        config = self._config
        limited = config.max_turn_length is not None or config.max_episode_turns is not None
        return (self._stage is not None or limited) and config.max_episode_turns != 1

    def _kept_most(self, work: RolloutWork, match: EpisodeBatch | None = None) -> int:
        """Counts the keys and values that could wait between turns: of all agents at their longest, and of users."""
        geometry = work.geometry
        if not self.plays_turns or not self._engine.supports.kv_retention:
            return 0
        longest = max(work.prompt_tokens, default=1)
        prompts = len(work.prompt_tokens) * geometry.prompt_kv_bytes(longest)
        agents = geometry.batch_kv_bytes(prompts, work.rows, work.max_new_tokens)
        users = Counter(match.user_roles) if match is not None else {}
        for role, rows in users.items():
            with self.roles.acting(role) as adapter:
                read = longest + work.max_new_tokens
                most = adapter.geometry.max_positions
                agents += rows * adapter.geometry.kv_bytes(read if most is None else min(read, most))
        return agents

    def _play(self, stage: EnvironmentPool, match: EpisodeBatch) -> ExternalRollout:
        """Plays episodes to their ends; only what draws is repeated when memory runs out."""
        self._recovery.repeat(lambda: self._engine.synchronise(self._owner.state.global_step))
        try:
            with self._engine.open(lambda: match.live_keys) as self._scope:
                while match.goes_on:
                    match.agents_speak()
                    match.users_speak()
        finally:
            self._scope = None
        self._engine.release()
        return stage.given(match.episodes(), external=self._engine.supports.is_external)

    def _draw_turns(self, prompts: list[Tensor], keys: list[list[SequenceKey]], limits: list[int]) -> list[Completion]:
        """Draws one turn of every agent."""
        settings, attempt = self._sampling, self._attempt(self._turn_work(prompts, keys, limits, self._adapter))
        return self._opened.generate(prompts, keys, settings, attempt, self._owner.report_sampling, limits=limits)

    def _draw_answers(
        self, user: ModelUser, prompts: list[Tensor], keys: list[list[SequenceKey]], limits: list[int]
    ) -> list[Completion]:
        """Draws one answer of every user that is a model of this role."""
        own = SamplingSettings(
            user.max_tokens,
            self._sampling.eos_token_ids,
            temperature=self._sampling.temperature if user.temperature is None else user.temperature,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
            min_p=self._sampling.min_p,
        )
        with self.roles.acting(user.role) as adapter:
            attempt = self._attempt(self._turn_work(prompts, keys, limits, adapter))
            return self._opened.generate_as(adapter, prompts, keys, own, attempt, limits=limits)

    @property
    def _opened(self) -> RolloutScope:
        """The scope of the episodes that are being played."""
        if self._scope is None:
            raise AssertionError("turns are drawn while episodes are played")
        return self._scope

    def _turn_work(
        self, prompts: Sequence[Tensor], keys: Sequence[Sequence[SequenceKey]], limits: Sequence[int], adapter: Any
    ) -> RolloutWork:
        return RolloutWork(
            prompt_tokens=tuple(len(ids) for ids in prompts),
            group_size=max(len(names) for names in keys),
            max_new_tokens=max(limits),
            geometry=adapter.geometry,
            kept_bytes=self._tracker.rollout_plan.kept_kv_bytes,
        )

    # ------------------------------------------------------------------ completions of one turn

    def _go_on(self, source: PromptSource, rollout: int, position: int, waiting: Sequence[OpenGroup]) -> Gathered:
        """Draws a bounded number of tokens a round, beginning fresh prompts, until enough groups are whole."""
        samples, limit = self._config.num_generations, self._sampling.max_new_tokens
        planned = False

        def begin(begun: int, count: int) -> tuple[OpenGroup, ...]:
            prompts = self._read(source, position + begun, count)
            return begin_groups(prompts, samples, position=position + begun, rollout=rollout, first_prompt=begun)

        def draw(groups: Sequence[OpenGroup]) -> list[OpenGroup]:
            nonlocal planned
            if not planned:
                self._plan(joined_prompts(groups))
                planned = True
            return self._drawn_on(groups)

        gathered = gather_groups(
            [group.fitted(samples, limit) for group in waiting],
            wanted=self._config.prompts_per_rollout,
            limit=limit,
            begin=begin,
            draw=draw,
        )
        if not planned:  # nothing had to be drawn, but scoring has a plan too
            self._plan(joined_prompts(gathered.whole))
        return gathered

    def _drawn_on(self, groups: Sequence[OpenGroup]) -> list[OpenGroup]:
        """Goes on with every completion that has not ended, shared over the ranks."""
        settings = replace(self._sampling, max_step_tokens=self._config.partial_rollout_tokens)
        open_rows = [(place, s) for place, group in enumerate(groups) for s in group.waiting(settings.max_new_tokens)]
        mine: dict[int, list[int]] = {}
        for row in self._ranks.share(len(open_rows)):
            place, sample = open_rows[row]
            mine.setdefault(place, []).append(sample)
        with self._tracker.phase(Phase.ROLLOUT):
            drawn = self._engine.generate(
                [groups[place].prompts.ids[0] for place in mine],
                [
                    [groups[place].key(self._config.seed, sample) for sample in samples]
                    for place, samples in mine.items()
                ],
                settings,
                self._attempt(self._work(joined_prompts(groups), self._config.num_generations)),
                progress=self._owner.report_sampling,
                begun=[[groups[place].completions[sample] for sample in samples] for place, samples in mine.items()],
            )
        found: list[dict[int, Completion]] = [{} for _ in groups]
        for (place, sample), completion in zip(open_rows, self._ranks.gather(drawn), strict=True):
            found[place][sample] = completion
        return [group.with_drawn(new) for group, new in zip(groups, found, strict=True)]

    def _taken(self, groups: Sequence[OpenGroup], rollout: int) -> tuple[Samples, Answers]:
        """Takes whole groups as the rollout's samples and has them rewarded."""
        prompts, size = joined_prompts(groups), self._config.num_generations
        rows = [completion for group in groups for completion in group.completions if completion is not None]
        mine = self._ranks.share(len(rows))
        given = ExternalRollout([prompts.ids[row // size] for row in mine], [rows[row] for row in mine])
        samples, answers = self._answered(prompts, size, mine, given, Phase.ROLLOUT)
        stale = tuple(group.rollout != rollout for group in groups for _ in range(size))
        return replace(samples, stale=stale), answers

    def _call_rollout_func(self, prompts: Prompts, group_size: int, mine: range) -> ExternalRollout:
        """Has the user's function draw this rank's rows, and checks what it returns."""
        if self._rollout_func is None:
            raise AssertionError("called only with a rollout_func")
        repeated = [prompts.prompts[row // group_size] for row in mine]
        output = self._rollout_func(copy.deepcopy(repeated), self._owner)
        ends = {*self._sampling.eos_token_ids, self._kind.processing_class.pad_token_id}
        vocab_size = self._adapter.geometry.vocab_size
        given = self._recovery.repeat(lambda: read_rollout(output, rows=len(mine), vocab_size=vocab_size, ends=ends))
        check_contexts(given, self._readers)
        return given

    @property
    def _readers(self) -> dict[str, ModelGeometry]:
        """Sizes of the networks that read a rollout, by what they are called."""
        critic = None if self._credit is None else self._credit.critic.own_geometry
        return {"model": self._adapter.geometry, **({} if critic is None else {"critic": critic})}

    def _reward(
        self,
        prompts: Prompts,
        group_size: int,
        mine: range,
        given: ExternalRollout,
        texts: Sequence[Any],
        work: RolloutWork,
    ) -> PendingScores:
        """Calls every reward function once on this rank's rows, in prompt order; async ones may go on afterwards."""
        examples = [prompts.examples[row // group_size] for row in mine]
        names = {name for example in examples for name in example} - {"prompt", "completion", "completion_ids"}
        columns = {name: [example.get(name) for example in examples] for name in sorted(names)}
        for name, values in given.extra.items():
            columns[name] = list(values) if isinstance(values, (list, tuple)) else [values] * len(mine)
        attempt = self._attempt_in(work, nullcontext)
        return self._rewards.begin(
            given.prompts or [copy.deepcopy(prompts.prompts[row // group_size]) for row in mine],
            list(texts),
            self._kind.plain(given.completions),
            columns,
            trainer_state=self._owner.state,
            attempt=lambda unit: attempt(lambda plan: unit(plan.reward_rows)),
        )

    def _refill(self, samples: Samples, source: PromptSource, rollout: int, position: int) -> tuple[Samples, int]:
        """Replaces groups whose rewards are all equal by fresh prompts, up to the limit (DAPO's dynamic sampling)."""
        wanted = consumed = len(samples.prompts.ids)
        if not self._config.dynamic_sampling:
            return samples, consumed
        useful, spare = self._parted(samples)
        for _ in range(self._config.dynamic_sampling_max_rounds):
            if len(useful.prompts.ids) >= wanted:
                break
            prompts = self._read(source, position + consumed, wanted)
            fresh = self._rewarded(*self._draw(prompts, rollout, samples.group_size, first_prompt=consumed))
            consumed += wanted
            more, flat = self._parted(fresh)
            useful, spare = self._repeat(partial(joined_pairs, (useful, spare), (more, flat)))
        return self._repeat(lambda: useful.joined(spare).groups(list(range(wanted)))), consumed

    def _parted(self, samples: Samples) -> tuple[Samples, Samples]:
        """Parts the groups whose rewards differ from those whose rewards are all equal."""

        def part() -> tuple[Samples, Samples]:
            flat: list[bool] = zero_spread_groups(samples.rewards_BF, samples.group_size).tolist()
            useful, spare = ([i for i, is_flat in enumerate(flat) if is_flat is wanted] for wanted in (False, True))
            return samples.groups(useful), samples.groups(spare)

        return self._repeat(part)

    def _advantages(self, samples: Samples) -> AdvantageResult:
        def estimate(rewards_BF: Tensor, weights_F: Tensor) -> AdvantageResult:
            return estimated_advantages(rewards_BF, weights_F, samples.group_size, **self._config.advantage_settings())

        weights_F = torch.tensor(self._rewards.weights, dtype=torch.float32)
        return judge(samples.rewards_BF, self._rewards.names, weights_F, self._config.objective_list, estimate)

    def _scored_unrewarded(self, samples: Samples, answers: Answers, later_rows: Sequence[int]) -> Trajectory:
        """Lays the samples down and scores what all of them need, while reward functions may still be under way."""
        try:
            with host_memory(), charge(Component.TRAJECTORY):
                trajectory = self._repeat(
                    lambda: build_trajectory(
                        samples,
                        masks_truncated=self._config.mask_truncated_completions,
                        needs_whole=self._credit is not None,
                    )
                )
            trajectory = self._with_sources(trajectory)
            trajectory = self._score_everyone(trajectory, later_rows, external=samples.external)
            return self._score_stale(trajectory, samples)
        except BaseException:
            answers.pending.cancel()
            raise

    def _credited(self, trajectory: Trajectory, advantages: AdvantageResult) -> tuple[Trajectory, dict[str, float]]:
        """Adds what a critic makes of the rewards, and says what is logged of it."""
        if self._credit is None:
            return trajectory, {}
        with host_memory():  # where the rollout is
            return self._credit.assign(trajectory, advantages.rewards_B)

    def _metrics(self, samples: Samples, advantages: AdvantageResult) -> dict[str, float]:
        objectives = reward_metrics(self._config.objective_list, advantages)
        metrics = {**rollout_metrics(samples, advantages, self._rewards.names), **objectives}
        if self._config.num_generations == 1:  # a completion alone is always equal to itself
            metrics.pop("frac_reward_zero_std")
        return metrics

    def _table(self, samples: Samples, advantages: AdvantageResult) -> tuple[dict[str, Any], ...]:
        return tuple(
            {
                "prompt": samples.prompts.prompts[row // samples.group_size],
                "completion": self._kind.told(samples.texts[row]),
                **samples.extras[row],
                **{name: samples.rewards_BF[row, column].item() for column, name in enumerate(self._rewards.names)},
                "advantage": advantages.advantages_B[row].item(),
            }
            for row in range(len(samples.completions))
        )


def _averaged(facts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Averages what each rank logs of its rows, of which all have as many."""
    return {name: sum(one[name] for one in facts) / len(facts) for name in facts[0]}


def _served_by(engine: RolloutEngine, plan: Any) -> Any:
    """Writes the run's engine and the type of its cache into a plan; refuses a plan that asks for others."""
    if not isinstance(plan, RolloutPlan):
        return plan
    if plan.engine not in (engine.name, RolloutPlan.engine):
        check_rollout_plan(plan)
        raise ConfigError(
            f"The memory policy asks for the engine {plan.engine!r}, but the run's is {engine.name!r}. Leave "
            "RolloutPlan.engine out, or choose that engine in the configuration."
        )
    if plan.cache_dtype not in (engine.cache_dtype, None):
        check_rollout_plan(plan)
        raise ConfigError(
            f"The memory policy asks for a cache of {plan.cache_dtype!r}, which changes what is drawn, and which the "
            "run does not allow. Leave RolloutPlan.cache_dtype out, or set cache_implementation='quantized'."
        )
    return replace(plan, engine=engine.name, cache_dtype=engine.cache_dtype)


def _by_row(columns: Mapping[str, Sequence[Any]], rows: int) -> list[dict[str, Any]]:
    return [{name: values[row] for name, values in columns.items()} for row in range(rows)]
