"""One episode as it grows: what was said, the ids that the model read and drew, and why it ended."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from memsafe_rl.accounting import host_memory
from memsafe_rl.rollout import refusal
from memsafe_rl.rollout.multi_turn.protocol import Action, Environment, Message, User
from memsafe_rl.types import Completion, SequenceKey, Turn

_TURN_MULTIPLIER = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio (Knuth, TAOCP 3, 6.4): spreads small numbers over 64 bits."""


class Ending(StrEnum):
    """Why an episode is over."""

    DONE = "done"  # the environment, the agent or the user ended it
    TOOL_CALLS = "max_tool_calling_iterations"  # the agent called tools once more than it may
    TURN = "turn cut"  # a turn reached its longest length, or the episode's
    TURNS = "max_episode_turns"  # the agent has had all its turns
    CONTEXT = "no room"  # what was observed left no room for another turn
    USER = "user"  # the user gave no answer, or its context is full


_BY_ITSELF = (Ending.DONE, Ending.TOOL_CALLS)
"""Rather than for want of turns, tokens or an answer."""


@dataclass(frozen=True)
class EpisodeLimits:
    """How long an episode may become; each limit holds for every episode alone, whatever the others do."""

    completion_tokens: int  # tokens behind the first prompt, the agent's and all others together
    turn_tokens: int | None = None  # tokens of one turn of the agent; None for as many as are left
    turns: int | None = None  # turns of the agent; None for no limit
    tool_rounds: int | None = None  # turns of the agent whose tool calls are answered; None for no limit
    context_tokens: int | None = None  # tokens that the network can read; None for no limit

    def __post_init__(self) -> None:
        for name, value, least in (
            ("max_completion_length", self.completion_tokens, 1),
            ("max_turn_length", self.turn_tokens, 1),
            ("max_episode_turns", self.turns, 1),
            ("max_tool_calling_iterations", self.tool_rounds, 0),
        ):
            refusal.when(value is not None and value < least, "episodes/limit", name=name, value=value, least=least)

    def room(self, first_tokens: int, context_tokens: int) -> int:
        """Counts the tokens that the next turn may have."""
        limits = [self.completion_tokens, first_tokens + self.completion_tokens - context_tokens]
        if self.turn_tokens is not None:
            limits.append(self.turn_tokens)
        if self.context_tokens is not None:
            limits.append(self.context_tokens - context_tokens)
        return min(limits)


@dataclass(frozen=True)
class Segment:
    """Turns whose prompts extend each other, as one sequence."""

    condition: Tensor  # (length,) int64, the prompt of the first of them
    completion: Completion  # everything behind it, as one; log-probs are 0 where ``mask`` is
    mask: Tensor  # (T,) uint8, 1 where the agent drew the token and its engine counts it
    turns: tuple[Turn, ...] = ()  # what it holds


@dataclass(frozen=True)
class Episode:
    """A whole episode, on the host."""

    key: SequenceKey  # its name
    example: Mapping[str, Any]  # the task
    prompt: tuple[Message, ...]  # messages that the agent saw before its first turn
    messages: tuple[Message, ...]  # what was said from then on
    segments: tuple[Segment, ...]  # what the agent is trained on: one sequence where each prompt extended the last
    ending: Ending  # why it is over
    turns: int  # turns of the agent
    tool_calls: int  # calls of the agent that were carried out
    tool_failures: int  # of them, those that failed
    malformed: int  # turns whose tool calls could not be read
    environment: Environment  # as it is after the end


def seen_since(messages: Sequence[Message]) -> int:
    """Names, in 63 bits, what an agent has seen since it last spoke; equal words have one name in every process."""
    spoke = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    seen = messages[spoke[-1] + 1 if spoke else 0 :]
    text = json.dumps([dict(message) for message in seen], sort_keys=True, default=_named)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _named(value: Any) -> str:
    """Names what JSON has no form for: an image by its pixels."""
    if not hasattr(value, "tobytes"):
        return str(value)
    return f"{value.size} {hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest()}"


def turn_key(key: SequenceKey, turn: int, *, user: bool = False) -> SequenceKey:
    """Names the random stream of one turn; the agent's first is the episode's own."""
    return key._replace(seed=(key.seed ^ ((2 * turn + user) * _TURN_MULTIPLIER)) % 2**64)


@dataclass
class _Growing:
    """A segment that may still grow."""

    condition: list[int]  # ids of its first prompt
    ids: array[int] = field(default_factory=lambda: array("q"))  # ids behind it, as far as the agent drew them last
    mask: bytearray = field(default_factory=bytearray)  # 1 where the agent drew, and its engine counts it
    logprobs: array[float] = field(default_factory=lambda: array("f"))  # nats, one an id
    # likewise, of the model's own distribution
    model_logprobs: array[float] = field(default_factory=lambda: array("f"))
    ties: int = 0
    turns: list[Turn] = field(default_factory=list)

    def begins(self, context: Sequence[int]) -> bool:
        """Whether a context begins with all its tokens."""
        first, known = len(self.condition), len(self.condition) + len(self.ids)
        return list(context[:first]) == self.condition and list(context[first:known]) == self.ids.tolist()

    def add(self, context: Sequence[int], completion: Completion, state: int) -> None:
        """Adds what a context holds beyond it, and a turn."""
        told = context[len(self.condition) + len(self.ids) :]
        self.ids.extend(told)
        self.mask.extend(bytes(len(told)))
        self.logprobs.extend([0.0] * len(told))
        self.model_logprobs.extend([0.0] * len(told))
        self.turns.append(Turn(len(self.ids), state, 0.0))
        self.ids.extend(completion.ids.tolist())
        self.mask.extend(b"\x01" * len(completion.ids) if completion.mask is None else completion.mask.tolist())
        self.logprobs.extend(completion.logprobs.tolist())
        self.model_logprobs.extend(completion.model_logprobs.tolist())
        self.ties += completion.ties

    def earn(self, reward: float) -> None:
        """Pays the last turn."""
        turn = self.turns[-1]
        self.turns[-1] = turn._replace(reward=turn.reward + float(reward))

    def segment(self, finished: bool) -> Segment:
        """Returns it as it is, whole."""
        logprobs = torch.tensor(self.logprobs, dtype=torch.float32)
        own = torch.tensor(self.model_logprobs, dtype=torch.float32)
        completion = Completion(torch.tensor(self.ids, dtype=torch.int64), logprobs, own, finished, self.ties)
        mask = torch.tensor(list(self.mask), dtype=torch.uint8)
        return Segment(torch.tensor(self.condition, dtype=torch.int64), completion, mask, tuple(self.turns))


@dataclass
class LiveEpisode:
    """An episode under way; all of it lies on the host."""

    key: SequenceKey  # its name
    example: Mapping[str, Any]  # the task
    environment: Environment  # what it is played in
    messages: list[Message] = field(default_factory=list)  # the conversation as the agent sees it
    # ids of the agent's next prompt, or of its last while others have their turn
    context: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)  # ids of its last turn
    opening: int = 0  # messages of them before the agent's first turn
    first_tokens: int = 0
    user: User | None = None
    instructions: str = ""
    schemas: list[dict[str, Any]] = field(default_factory=list)
    action: Action = field(default_factory=lambda: Action(""))
    users_turn: bool = False
    ending: Ending | None = None
    turns: int = 0
    user_turns: int = 0
    tool_rounds: int = 0
    tool_calls: int = 0
    tool_failures: int = 0
    malformed: int = 0
    grown: list[_Growing] = field(default_factory=list)

    def take(self, completion: Completion) -> None:
        """Notes a turn that the agent drew behind the present context."""
        if not self.grown or not self.grown[-1].begins(self.context):
            self.grown.append(_Growing(list(self.context)))
        self.grown[-1].add(self.context, completion, seen_since(self.messages))
        self.drawn = completion.ids.tolist()
        self.turns += 1

    def whole(self) -> Episode:
        """Returns the episode when it is over."""
        assert self.ending is not None, "an episode is whole when it has ended"
        finished = self.ending in _BY_ITSELF
        with host_memory():
            segments = tuple(part.segment(finished) for part in self.grown) or (_nothing(self.context),)
        return Episode(
            key=self.key,
            example=self.example,
            prompt=tuple(self.messages[: self.opening]),
            messages=tuple(self.messages[self.opening :]),
            segments=segments,
            ending=self.ending,
            turns=self.turns,
            tool_calls=self.tool_calls,
            tool_failures=self.tool_failures,
            malformed=self.malformed,
            environment=self.environment,
        )


def _nothing(context: Sequence[int]) -> Segment:
    """Stands for an episode in which the agent had no turn: one token that counts for nothing."""
    ids, zero = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    # of the context one token, for the whole may be longer than any network that scores it can read
    condition = torch.tensor(list(context[:1]) or [0], dtype=torch.int64)
    return Segment(condition, Completion(ids, zero, zero, finished=False), torch.zeros(1, dtype=torch.uint8))
