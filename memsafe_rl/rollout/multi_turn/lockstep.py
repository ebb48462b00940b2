"""Plays episodes together, half-turn by half-turn: all agents draw in one call, then environments move, then users.

Agents continue until every live episode waits for its user or is over; only then do users speak. So roles switch once
for a round of all episodes, and nothing of one episode depends on the others: its draws are named by its own key, its
limits are its own, and the calls of users and environments come in the order of the episodes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memsafe_rl.accounting import host_memory
from memsafe_rl.rewards.background import BackgroundLoop
from memsafe_rl.rollout import refusal, unusable
from memsafe_rl.rollout.multi_turn.chat import Chat, PlainText, TurnFormat, shared_messages, shows_image
from memsafe_rl.rollout.multi_turn.episode import Ending, Episode, EpisodeLimits, LiveEpisode, turn_key
from memsafe_rl.rollout.multi_turn.protocol import Environment, ImageContexts, Message, Observation, Rewritten, Step
from memsafe_rl.rollout.multi_turn.tools import are_parts, tool_schemas
from memsafe_rl.rollout.multi_turn.turn_reading import encodable
from memsafe_rl.rollout.multi_turn.users import NO_ANSWER, CallableUser, ModelUser, as_seen_by_user
from memsafe_rl.types import Completion, SequenceKey

_THREADS = 32  # blocking calls at the same time


@dataclass(frozen=True)
class Call:
    """One call to be made once."""

    function: Callable[[], Any]  # takes nothing; may give a coroutine
    blocking: bool = False  # whether it goes into a thread


class Caller:
    """Makes calls, each exactly once; results come in the order of the calls, however they were made."""

    def __init__(self) -> None:
        self._loop = BackgroundLoop()
        self._pool: ThreadPoolExecutor | None = None

    def __call__(self, calls: Sequence[Call]) -> list[Any]:
        """Makes the blocking calls in threads, the others in order, and waits for coroutines together."""
        begun = {place: self._submit(call) for place, call in enumerate(calls) if call.blocking}
        try:
            results = {place: call.function() for place, call in enumerate(calls) if not call.blocking}
        finally:
            for future in begun.values():
                future.exception()
        results |= {place: future.result() for place, future in begun.items()}
        if waiting := {place: value for place, value in results.items() if inspect.isawaitable(value)}:
            running = self._loop.start(list(waiting.values()))
            running.ended(None)
            results |= dict(zip(waiting, running.result(), strict=True))
        return [results[place] for place in range(len(calls))]

    def close(self) -> None:
        """Ends the threads; a later call starts others."""
        self._loop.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _submit(self, call: Call) -> Future[Any]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="memsafe-rl-episodes")
        return self._pool.submit(call.function)


AgentDraw = Callable[[list[Tensor], list[list[SequenceKey]], list[int]], list[Completion]]
"""Takes prompts, for each its keys, and for each the longest completion; draws one completion a key, in their order."""

UserDraw = Callable[[ModelUser, list[Tensor], list[list[SequenceKey]], list[int]], list[Completion]]
"""The same in a user's role."""


@dataclass(frozen=True)
class Beginning:
    """An episode to be played."""

    key: SequenceKey  # names it, and its random streams
    example: Mapping[str, Any]  # the task: a row of the dataset
    prompt: Any  # the row's prompt, plain or conversational; None where the environment gives it
    environment: Environment  # an instance of its own


@dataclass(frozen=True)
class EpisodeSettings:
    """What episodes are played with."""

    tokenizer: Any  # of the agent
    limits: EpisodeLimits  # of every episode
    agent: AgentDraw  # draws the agents' turns
    user: UserDraw | None  # draws the turns of users that are models; None where there are none
    caller: Caller  # calls environments and other users
    template_kwargs: Mapping[str, Any] | None = None  # extra arguments of the chat template
    user_context: int | None = None  # longest prompt and answer of a user that is a model, in tokens; None for no limit
    images: ImageContexts | None = None  # reads images in conversations; None where these are text alone


def play(beginnings: Sequence[Beginning], table: EpisodeSettings) -> list[Episode]:
    """Plays episodes from their beginnings to their ends."""
    match = begin(beginnings, table)
    while match.goes_on:
        match.agents_speak()
        match.users_speak()
    return match.episodes()


def begin(beginnings: Sequence[Beginning], table: EpisodeSettings) -> EpisodeBatch:
    """Resets environments and reads what agents see first; nothing is drawn."""
    refusal.when(len({id(one.environment) for one in beginnings}) < len(beginnings), "episodes/shared")
    chat = any(one.environment.conversational or not isinstance(one.prompt, str) for one in beginnings)
    dialect = Chat(table.tokenizer, table.template_kwargs, table.images) if chat else PlainText(table.tokenizer)
    match = EpisodeBatch([LiveEpisode(one.key, one.example, one.environment) for one in beginnings], table, dialect)
    match.reset([one.prompt for one in beginnings])
    return match


class EpisodeBatch:
    """Episodes under way."""

    def __init__(self, live: list[LiveEpisode], table: EpisodeSettings, dialect: TurnFormat) -> None:
        self._all = live
        self._table = table
        self._dialect = dialect

    @property
    def goes_on(self) -> bool:
        """Whether any episode is not over."""
        return any(one.ending is None for one in self._all)

    @property
    def contexts(self) -> list[list[int]]:
        """The ids that each agent reads next."""
        return [one.context for one in self._all]

    @property
    def keys(self) -> list[SequenceKey]:
        """The names of the episodes."""
        return [one.key for one in self._all]

    @property
    def live_keys(self) -> list[SequenceKey]:
        """The names of those that are not over."""
        return [one.key for one in self._all if one.ending is None]

    @property
    def user_roles(self) -> list[str]:
        """The roles of users that are models, one for each episode that has one."""
        return [one.user.role for one in self._all if isinstance(one.user, ModelUser)]

    def episodes(self) -> list[Episode]:
        """Returns the episodes when all are over, and tells their environments."""
        episodes = [one.whole() for one in self._all]
        for one in self._all:
            one.environment.ended(list(one.messages))
        return episodes

    def reset(self, prompts: Sequence[Any]) -> None:
        """Resets every environment once."""
        calls = [Call(partial(one.environment.reset, one.example), one.environment.blocking) for one in self._all]
        for one, prompt, seen in zip(self._all, prompts, self._table.caller(calls), strict=True):
            one.user = one.environment.user
            one.schemas = tool_schemas(one.environment.tools)
            one.messages = self._dialect.received(opened(prompt, seen))
            if isinstance(seen, Rewritten) and not one.messages:
                one.ending = Ending.DONE
                continue
            refusal.when(one.user is not None and not isinstance(self._dialect, Chat), "episodes/plain_user")
            if isinstance(one.user, ModelUser):
                one.instructions = one.user.instructions(one.example)
            unusable.when(not one.messages and one.user is None, "environment/prompt", name=one.environment.name)
            one.users_turn = one.user is not None and (not one.messages or one.messages[-1]["role"] != "user")
            if not one.users_turn:
                self._open(one)

    def _open(self, one: LiveEpisode) -> None:
        one.context = self._dialect.first(one.messages, one.schemas)
        one.opening, one.first_tokens = len(one.messages), len(one.context)
        if self._room(one) < 1:
            one.ending = Ending.CONTEXT

    def _room(self, one: LiveEpisode) -> int:
        return self._table.limits.room(one.first_tokens, len(one.context))

    def agents_speak(self) -> None:
        """Has agents and environments take turns until every live episode waits for its user or is over."""
        while speaking := [one for one in self._all if one.ending is None and not one.users_turn]:
            self._draw_turns(speaking)
            self._move([one for one in speaking if one.ending is None and not one.users_turn])

    def _draw_turns(self, speaking: Sequence[LiveEpisode]) -> None:
        """Draws one turn of every agent in one call; equal prompts of a group are read once."""
        rounds = self._table.limits.tool_rounds
        keys = [turn_key(one.key, one.turns) for one in speaking]
        contexts, limits = [one.context for one in speaking], [self._room(one) for one in speaking]
        for one, completion in zip(speaking, _drawn(self._table.agent, contexts, limits, keys), strict=True):
            one.take(completion)
            action = self._dialect.read(one.context, one.drawn, one.schemas)
            read = self._dialect.plain(one.context)
            one.action = replace(action, prompt_ids=read, ids=one.drawn, logprobs=completion.logprobs.tolist())
            one.messages.append(action.message)
            one.malformed += action.malformed
            if not completion.finished:
                one.ending = Ending.TURN
            elif action.calls and rounds is not None and one.tool_rounds >= rounds:
                one.ending = Ending.TOOL_CALLS
            one.users_turn = one.ending is None and one.user is not None and not action.calls

    def _spent(self, one: LiveEpisode) -> bool:
        return self._table.limits.turns is not None and one.turns >= self._table.limits.turns

    def _move(self, moved: Sequence[LiveEpisode]) -> None:
        calls = [Call(partial(one.environment.step, one.action), one.environment.blocking) for one in moved]
        for one, step in zip(moved, self._table.caller(calls), strict=True):
            name, kind = one.environment.name, type(step).__name__
            unusable.when(not isinstance(step, Step), "environment/step", name=name, step=step, kind=kind)
            self._observe(one, step)

    def _observe(self, one: LiveEpisode, step: Step) -> None:
        one.tool_calls += len(one.action.calls)
        one.tool_rounds += bool(one.action.calls)
        one.tool_failures += step.failures
        one.grown[-1].earn(step.reward)
        seen = self._dialect.received(observed(step.observation))
        kept, told_tools = len(one.messages), one.schemas
        if isinstance(step.observation, Rewritten):
            one.schemas = tool_schemas(one.environment.tools)
            kept = shared_messages(one.messages, seen)
            seen = seen[kept:]
        elif not step.done and not self._spent(one):
            unusable.when(not seen, "environment/observation", name=one.environment.name)
        if step.done or self._spent(one):
            one.messages = [*one.messages[:kept], *seen]
            one.ending = Ending.DONE if step.done else Ending.TURNS
        else:
            self._go_on(one, seen, kept, anew=one.schemas != told_tools)

    def _go_on(self, one: LiveEpisode, seen: Sequence[Message], kept: int, *, anew: bool = False) -> None:
        """Puts what was seen behind the messages that are kept; where that leaves no room, the episode ends before."""
        before, extends = (one.context, one.messages, one.opening), kept == len(one.messages) and not anew
        told = self._dialect.following(one.messages[-1], one.drawn[-1], seen, one.schemas) if extends else None
        one.messages, one.opening = [*one.messages[:kept], *seen], min(one.opening, kept)
        if told is None:
            one.context = self._dialect.first(one.messages, one.schemas)
        else:
            one.context = self._dialect.joined([*one.context, *one.drawn], told, one.messages, seen)
        if self._room(one) < 1:
            one.context, one.messages, one.opening = before
            one.ending = Ending.CONTEXT

    def users_speak(self) -> None:
        """Has every user answer whose agent waits for it."""
        waiting = [one for one in self._all if one.ending is None and one.users_turn]
        for one in [one for one in waiting if one.turns and self._spent(one)]:
            one.ending = Ending.TURNS
        waiting = [one for one in waiting if one.ending is None]
        called = [(one, one.user) for one in waiting if isinstance(one.user, CallableUser)]
        calls = [Call(partial(user.answer, as_seen_by_user(one.messages)), user.blocking) for one, user in called]
        answers = {id(one): answer for (one, _), answer in zip(called, self._table.caller(calls), strict=True)}
        alike: dict[ModelUser, list[LiveEpisode]] = {}
        for one in waiting:
            if isinstance(one.user, ModelUser):
                alike.setdefault(one.user.manner(), []).append(one)
        for user, group in alike.items():
            answers |= self._drawn_by_model(user, group)
        for one in waiting:
            refusal.when(id(one) not in answers, "episodes/user", name=one.environment.name, user=one.user)
            self._hear(one, answers[id(one)])

    def _drawn_by_model(self, user: ModelUser, asking: Sequence[LiveEpisode]) -> dict[int, Any]:
        """Draws the answers of users of one role and one manner in one call."""
        if self._table.user is None:
            raise refusal("episodes/model_user", role=user.role)
        contexts = [self._seen_by(one) for one in asking]
        most = self._table.user_context
        rooms = [user.max_tokens if most is None else min(user.max_tokens, most - len(ids)) for ids in contexts]
        able = [place for place, room in enumerate(rooms) if room > 0]
        keys = [turn_key(asking[place].key, asking[place].user_turns, user=True) for place in able]
        work = [contexts[place] for place in able], [rooms[place] for place in able], keys
        drawn = _drawn(partial(self._table.user, user), *work) if able else []
        answers: dict[int, Any] = {id(one): NO_ANSWER for one in asking}
        for place, completion in zip(able, drawn, strict=True):
            text = self._table.tokenizer.decode(completion.ids.tolist(), skip_special_tokens=True)
            answers[id(asking[place])] = text.strip()
        return answers

    def _seen_by(self, one: LiveEpisode) -> list[int]:
        system: Message = {"role": "system", "content": encodable(one.instructions)}
        said = as_seen_by_user(one.messages)
        refusal.when(any(map(shows_image, said)), "episodes/user_images")
        return self._dialect.first([system, *said], ())

    def _hear(self, one: LiveEpisode, answer: Any) -> None:
        one.user_turns += 1
        one.users_turn = False
        if answer is NO_ANSWER:
            one.ending = Ending.USER
            return
        unusable.when(not isinstance(answer, str | None), "user/answer", answer=answer, kind=type(answer).__name__)
        said: list[Message] = [] if answer is None else [{"role": "user", "content": encodable(answer)}]
        if answer is None or any(stop in answer for stop in getattr(one.user, "stops", ())):
            one.messages += said
            one.ending = Ending.DONE
        elif one.turns:
            self._go_on(one, said, len(one.messages))
        else:
            one.messages += said
            self._open(one)


def opened(prompt: Any, seen: Observation) -> list[Message]:
    """Puts the first observation behind a prompt, as TRL does: a text, or parts, behind its last message's own."""
    if isinstance(seen, Rewritten):
        return observed(seen)
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or ()
    messages: list[Message] = encodable(list(asked))
    if messages and messages[-1]["role"] == "user" and (isinstance(seen, str) or are_parts(seen)):
        both = [messages[-1]["content"], encodable(seen)]
        if not all(isinstance(one, str) for one in both):
            both = [[{"type": "text", "text": one}] if isinstance(one, str) else one for one in both]
        return [*messages[:-1], {**messages[-1], "content": both[0] + both[1]}]
    return [*messages, *observed(seen)]


def observed(seen: Observation) -> list[Message]:
    """Turns an observation into messages."""
    if isinstance(seen, Rewritten):
        seen = seen.messages
        unusable.when(any(map(shows_image, seen or ())), "episodes/rewritten_images")
    if seen is None:
        return []
    if isinstance(seen, str) or are_parts(seen):
        return [{"role": "user", "content": encodable(seen)}]
    if not isinstance(seen, Sequence) or not all(
        isinstance(message, Mapping) and "role" in message for message in seen
    ):
        raise unusable("environment/seen", seen=seen)
    return [encodable(message) for message in seen]


def _drawn(
    draw: AgentDraw, contexts: Sequence[Sequence[int]], limits: Sequence[int], keys: Sequence[SequenceKey]
) -> list[Completion]:
    """Draws one completion a row; rows of equal contexts and limits follow one prompt, in order of appearance."""
    rows: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for row, (context, limit) in enumerate(zip(contexts, limits, strict=True)):
        rows.setdefault((limit, tuple(context)), []).append(row)
    with host_memory():
        prompts = [torch.tensor(ids, dtype=torch.int64) for _, ids in rows]
    drawn = draw(prompts, [[keys[row] for row in alike] for alike in rows.values()], [limit for limit, _ in rows])
    found = dict(zip((row for alike in rows.values() for row in alike), drawn, strict=True))
    return [found[row] for row in range(len(keys))]
