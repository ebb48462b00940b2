"""Episodes as a trainer plays them: environments and tools from its arguments, rewards, rollouts of many turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import call
from typing import Any

import torch
from datasets import Dataset, IterableDataset

from memsafe_rl.accounting import host_memory
from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.data import refusal, unusable
from memsafe_rl.data.external_rollout import ExternalRollout
from memsafe_rl.data.prompts import PLACEHOLDER, PromptReader, Prompts, Repeat, columns_of, copied, own_row
from memsafe_rl.errors import do_each
from memsafe_rl.ops.losses import LOSSES
from memsafe_rl.rollout.multi_turn.chat import Chat, check_tools, text_of
from memsafe_rl.rollout.multi_turn.episode import Ending, Episode, EpisodeLimits, Segment
from memsafe_rl.rollout.multi_turn.lockstep import (
    AgentDraw,
    Beginning,
    Call,
    Caller,
    EpisodeBatch,
    EpisodeSettings,
    UserDraw,
    begin,
)
from memsafe_rl.rollout.multi_turn.protocol import Environment, Tool
from memsafe_rl.rollout.multi_turn.tools import MethodEnvironment, ToolEnvironment, listed_tools, tool_schemas
from memsafe_rl.types import Completion, SequenceKey

EnvironmentFactory = Callable[[], Any]
"""Makes an environment: one of this library's, or one in TRL's form."""

ENVIRONMENTS = "environments"
"""What reward functions know the environments of their completions by."""


class EnvironmentReward:
    """A reward function that asks environments of one class; the others have no reward from it."""

    def __init__(self, kind: type[Any], caller: Caller) -> None:
        self.__name__ = kind.__name__
        self._kind = kind
        self._caller = caller

    def __call__(self, /, **given: Any) -> list[float | None]:
        """Judges every environment once."""
        environments = given[ENVIRONMENTS]
        own = {row: environment for row, environment in enumerate(environments) if type(environment) is self._kind}
        calls = [Call(judge_of(one), bool(getattr(one, "blocking", False))) for one in own.values()]
        rewards = dict(zip(own, self._caller(calls), strict=True))
        return [rewards.get(row) for row in range(len(environments))]


def judge_of(environment: Any) -> Any:
    """Returns what judges an environment's episodes."""
    if isinstance(environment, Environment):
        return None if type(environment).reward is Environment.reward else environment.reward
    return getattr(environment, "get_reward", None)


@dataclass
class _Pool:
    """Environments of one name, made once and reset often."""

    make: Callable[[], Environment]  # makes another
    made: list[Environment] = field(default_factory=list)  # all there are
    used: int = 0  # of them, those that the present rollout has

    def take(self) -> Environment:
        """Returns one that the present rollout does not have yet."""
        if self.used == len(self.made):
            self.made.append(self.make())
        self.used += 1
        return self.made[self.used - 1]


class EnvironmentPool:
    """Where a run's episodes are played."""

    def __init__(
        self,
        config: TrainerConfig,
        tokenizer: Any,
        reader: PromptReader,
        tools: Sequence[Tool] | None,
        environment_factory: Any,
    ) -> None:
        refusal.when(config.partial_rollout_tokens is not None, "partial_rollout_tokens", config=config)
        self._config = config
        self._tokenizer, self._reader = tokenizer, reader
        self.caller = Caller()
        self.named = isinstance(environment_factory, Mapping)
        factories: Mapping[Any, Any] = environment_factory if self.named else {None: environment_factory}
        refusal.when(not factories, "environment_factory/empty")
        for name, make in factories.items():
            if not callable(make) and (make is not None or self.named):
                place = f"environment_factory[{name!r}]" if self.named else "environment_factory"
                raise refusal("environment_factory/call", place=place, make=make, kind=type(make).__name__)
        offered = listed_tools(tools)
        self._pools = {name: _Pool(_maker(offered, make)) for name, make in factories.items()}
        probed = [pool.take() for pool in self._pools.values()]
        own_tools = [tool for environment in probed for tool in listed_tools(environment.tools)]
        self.tools = [*offered, *(tool for tool in own_tools if tool not in offered)]  # of all that there are
        self.latest: list[Any] | None = None  # those of the latest rollout's rows, as the user made them
        for environment in probed:
            if schemas := tool_schemas(environment.tools):
                check_tools(Chat(tokenizer, config.chat_template_kwargs, reader.contexts(call)), schemas)
        kinds = dict.fromkeys(type(own) for own in map(_own, probed) if judge_of(own) is not None)
        self.rewards = [EnvironmentReward(kind, self.caller) for kind in kinds]
        self.has_environments = environment_factory is not None

    def beside(self, functions: Any, tokenizers: Any, weights: Any) -> tuple[list[Any], list[Any] | None, Any]:
        """Puts the rewards of environments beside the reward functions, each with the weight 1."""
        listed = _listed(functions)
        own = None if tokenizers is None else _listed(tokenizers)
        if weights is not None and len(weights) == len(listed):
            weights = [*weights, *(1.0 for _ in self.rewards)]
        refusal.when(not listed and not self.rewards, "reward_funcs")
        return [*listed, *self.rewards], None if own is None else [*own, *(None for _ in self.rewards)], weights

    def begin(
        self, prompts: Prompts, rows: Mapping[int, SequenceKey], group_size: int, table: EpisodeSettings
    ) -> EpisodeBatch:
        """Resets an environment for each row; nothing is drawn."""
        for pool in self._pools.values():
            pool.used = 0
        beginnings = []
        for row, key in rows.items():
            prompt, example = copied(prompts.prompts[row // group_size]), own_row(prompts.examples[row // group_size])
            environment = self._environment(example)
            if prompt == PLACEHOLDER:
                example.pop("prompt", None)
                prompt = prompt if isinstance(environment, MethodEnvironment) else None
            beginnings.append(Beginning(key, example, prompt, environment))
        if self.has_environments:
            self.latest = [_own(one.environment) for one in beginnings]
        return begin(beginnings, table)

    def table(
        self, agent: AgentDraw, user: UserDraw, repeat: Repeat, *, completion_tokens: int, context_tokens: int | None
    ) -> EpisodeSettings:
        """Returns what episodes are played with; towers read images under a guard."""
        config = self._config
        turns = config.max_turn_length, config.max_episode_turns, config.max_tool_calling_iterations
        limits = EpisodeLimits(completion_tokens, *turns, context_tokens)
        kwargs, images = config.chat_template_kwargs, self._reader.contexts(repeat)
        return EpisodeSettings(self._tokenizer, limits, agent, user, self.caller, kwargs, context_tokens, images)

    def given(self, episodes: Sequence[Episode], *, external: bool) -> ExternalRollout:
        """Turns episodes into what the trainer learns from and reward functions see."""
        if any(len(episode.segments) > 1 for episode in episodes):
            settings = self._config.loss_settings()
            adds_up = LOSSES[settings.loss_type].traits.adds_up_over_parts
            by_token = settings.importance_sampling_level == "token"
            refusal.when(not (adds_up and by_token), "loss_type/sequences", settings=settings)
        with host_memory():
            whole = [_joined(episode.segments) for episode in episodes]
        return ExternalRollout(
            conditions=[one.condition for one in whole],
            completions=[one.completion for one in whole],
            masks=[one.mask for one in whole],
            extra={ENVIRONMENTS: [_own(episode.environment) for episode in episodes]} if self.has_environments else {},
            external=external,
            pieces=[episode.segments for episode in episodes],
            prompts=[_seen(episode.prompt, episode) for episode in episodes],
            texts=[_seen(episode.messages, episode) for episode in episodes],
            counts=[episode_counts(episode) for episode in episodes],
        )

    def close(self) -> None:
        """Leaves the episodes under way, if any, and ends the threads in which environments were called."""
        do_each(*(environment.close for pool in self._pools.values() for environment in pool.made), self.caller.close)

    def _environment(self, example: dict[str, Any]) -> Environment:
        name = example.pop("environment", None) if self.named else None
        unusable.when(name not in self._pools, "environment/name", name=name, pools=", ".join(map(repr, self._pools)))
        return self._pools[name].take()


def with_prompts(config: TrainerConfig, dataset: Any, stage: EnvironmentPool, *, evaluates: bool = False) -> Any:
    """Fills in the prompts of a dataset that leaves them to its environments, as TRL does."""
    if not stage.has_environments or (evaluates and dataset is None):
        return dataset
    if dataset is None:
        refusal.when(stage.named, "environment_factory/dataset")
        refusal.when(config.max_steps <= 0, "max_steps")
        return Dataset.from_dict({"prompt": [PLACEHOLDER] * config.prompts_per_rollout})
    if isinstance(dataset, Mapping):
        return {name: with_prompts(config, part, stage) for name, part in dataset.items()}
    if isinstance(dataset, (list, tuple)):
        return [{"prompt": PLACEHOLDER, **row} if isinstance(row, Mapping) else row for row in dataset]
    if isinstance(dataset, IterableDataset):
        return dataset.map(lambda row: {"prompt": PLACEHOLDER, **row})
    if isinstance(dataset, Dataset) and "prompt" not in columns_of(dataset) and len(dataset):
        return dataset.add_column("prompt", [PLACEHOLDER] * len(dataset))
    return dataset


def episode_counts(episode: Episode) -> dict[str, int]:
    """Counts what an episode did."""
    return {
        "calls": episode.tool_calls,
        "failures": episode.tool_failures,
        "malformed": episode.malformed,
        "turns": episode.turns,
        "sequences": len(episode.segments),
        episode.ending.value: 1,
    }


def episode_metrics(episodes: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Says how episodes went, of what each counted; TRL's names where it has them."""
    total: Counter[str] = sum(map(Counter, episodes), Counter())
    count, calls, turns = len(episodes), max(1, total["calls"]), max(1, total["turns"])
    return {
        "tools/call_frequency": total["calls"] / count,
        "tools/failure_frequency": total["failures"] / calls,
        "tools/malformed_frequency": total["malformed"] / turns,
        "episodes/mean_turns": total["turns"] / count,
        "episodes/sequences": total["sequences"] / count,
        "episodes/no_room": total[Ending.CONTEXT.value] / count,
        "episodes/out_of_turns": total[Ending.TURNS.value] / count,
    }


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _maker(tools: Sequence[Tool], make: EnvironmentFactory | None) -> Callable[[], Environment]:
    def made() -> Environment:
        instance = None if make is None else make()
        if not isinstance(instance, Environment):
            return ToolEnvironment(tools) if make is None else MethodEnvironment(instance, tools)
        refusal.when(tools, "tools/environment", kind=type(instance).__name__)
        return instance

    return made


def _own(environment: Environment) -> Any:
    """The environment as the user made it."""
    return environment.instance if isinstance(environment, MethodEnvironment) else environment


def _joined(segments: Sequence[Segment]) -> Segment:
    """Lays an episode's sequences end to end, as one for counts and reward functions."""
    if len(segments) == 1:
        return segments[0]
    parts = [segment.completion for segment in segments]
    logprobs = torch.cat([part.logprobs for part in parts])
    own = torch.cat([part.model_logprobs for part in parts])
    ids, ties = torch.cat([part.ids for part in parts]), sum(part.ties for part in parts)
    completion = Completion(ids, logprobs, own, parts[-1].finished, ties)
    return Segment(segments[0].condition, completion, torch.cat([segment.mask for segment in segments]))


def _seen(messages: Sequence[Mapping[str, Any]], episode: Episode) -> Any:
    """Messages as reward functions see them: a text where the row's prompt is one."""
    if isinstance(episode.example.get("prompt"), str):
        return "".join(text_of(message.get("content")) for message in messages)
    return [dict(message) for message in messages]
