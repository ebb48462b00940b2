"""Rollouts of several turns: episodes are played together, and only what draws is repeated when memory runs out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from memsafe_rl.data.external_rollout import ExternalRollout
from memsafe_rl.memory.runtime.stages import Stage
from memsafe_rl.rollout.engine import RolloutScope
from memsafe_rl.rollout.multi_turn.lockstep import EpisodeBatch
from memsafe_rl.rollout.multi_turn.users import ModelUser
from memsafe_rl.training.samples import Groups
from memsafe_rl.training.scorer import Scorer
from memsafe_rl.training.setup import TrainingSetup
from memsafe_rl.types import Completion, ModelGeometry, RolloutWork, SamplingSettings, SequenceKey


class Episodes:
    """Plays the episodes of a rollout in the run's environments."""

    def __init__(self, setup: TrainingSetup, scorer: Scorer) -> None:
        self._setup = setup
        self._scorer = scorer
        self.scope: RolloutScope | None = None
        config = setup.config
        limited = config.max_turn_length is not None or config.max_episode_turns is not None
        # whether completions are episodes of this run's environments
        self.played = setup.environments is not None
        # whether completions may have several turns; a dry run, which has no environments, goes by the limits
        self.several_turns = (self.played or limited) and config.max_episode_turns != 1

    def begin(self, groups: Groups) -> EpisodeBatch:
        """Resets the environments of this rank's rows, once."""
        setup, environments = self._setup, self._setup.environments
        assert environments is not None, "episodes are played in environments"
        keys = {row: groups.key(row) for row in setup.parallel.share(groups.rows)}
        contexts = [geometry.max_positions for geometry in setup.readers.values() if geometry.max_positions]
        table = environments.table(
            self.draw_turns,
            self.draw_answers,
            partial(setup.recovery.repeat, Stage.STORE),
            completion_tokens=setup.sampling.max_new_tokens,
            context_tokens=min(contexts, default=None),
        )
        return environments.begin(groups.prompts, keys, groups.size, table)

    def play(self, batch: EpisodeBatch, *, step: int) -> ExternalRollout:
        """Plays episodes to their ends."""
        setup, environments = self._setup, self._setup.environments
        assert environments is not None, "episodes are played in environments"
        setup.recovery.repeat(Stage.PREPARE, setup.engine.synchronise, step)
        try:
            with setup.engine.open(lambda: batch.live_keys) as self.scope:
                while batch.goes_on:
                    batch.agents_speak()
                    batch.users_speak()
        finally:
            self.scope = None
        setup.engine.release()
        return environments.given(batch.episodes(), external=setup.engine.supports.is_external)

    def first_tokens(self, prompt_tokens: Sequence[int], batch: EpisodeBatch) -> tuple[int, ...]:
        """Returns the longest first prompt of each group, as far as it is known."""
        longest = list(prompt_tokens)
        for key, context in zip(batch.keys, batch.contexts, strict=True):
            longest[key.prompt] = max(longest[key.prompt], len(context))
        return tuple(longest)

    def most_kept_bytes(self, work: RolloutWork, batch: EpisodeBatch | None = None) -> int:
        """Counts the keys and values that could wait between turns: of all agents at their longest, and of users."""
        geometry = work.geometry
        if not self._setup.engine.supports.kv_retention:
            return 0
        longest = max(work.prompt_tokens, default=1)
        prompts = len(work.prompt_tokens) * geometry.prompt_kv_bytes(longest)
        kept = geometry.batch_kv_bytes(prompts, work.rows, work.max_new_tokens)
        for role, rows in (Counter(batch.user_roles) if batch is not None else {}).items():
            with self._setup.roles.acting(role) as adapter:
                own, tokens = adapter.geometry, longest + work.max_new_tokens
                kept += rows * own.kv_bytes(min(tokens, own.max_positions or tokens))
        return kept

    def draw_turns(self, prompts: list[Tensor], keys: list[list[SequenceKey]], limits: list[int]) -> list[Completion]:
        """Draws one turn of every agent."""
        attempt = self._scorer.attempt(Stage.DRAW, self._turn_work(prompts, keys, limits, self._setup.adapter.geometry))
        sampling, progress = self._setup.sampling, self._setup.on_sampling
        return self._opened.generate(prompts, keys, sampling, attempt, progress, limits=limits)

    def draw_answers(
        self, user: ModelUser, prompts: list[Tensor], keys: list[list[SequenceKey]], limits: list[int]
    ) -> list[Completion]:
        """Draws one answer of every user that is a model of this role."""
        sampling = self._setup.sampling
        own = SamplingSettings(
            user.max_tokens,
            sampling.eos_token_ids,
            temperature=sampling.temperature if user.temperature is None else user.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
        )
        with self._setup.roles.acting(user.role) as adapter:
            attempt = self._scorer.attempt(Stage.DRAW, self._turn_work(prompts, keys, limits, adapter.geometry))
            return self._opened.generate_as(adapter, prompts, keys, own, attempt, limits=limits)

    @property
    def _opened(self) -> RolloutScope:
        assert self.scope is not None, "turns are drawn while episodes are played"
        return self.scope

    def _turn_work(
        self,
        prompts: Sequence[Tensor],
        keys: Sequence[Sequence[SequenceKey]],
        limits: Sequence[int],
        geometry: ModelGeometry,
    ) -> RolloutWork:
        return RolloutWork(
            prompt_tokens=tuple(len(ids) for ids in prompts),
            group_size=max(len(names) for names in keys),
            max_new_tokens=max(limits),
            geometry=geometry,
            kept_bytes=self._setup.memory.rollout_plan.kept_kv_bytes,
        )
