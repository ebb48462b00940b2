"""What an environment and a user are to the episodes that are played with them."""

from __future__ import annotations

import math
import numbers
import operator
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from memsafe_rl.rollout import unusable

Message = dict[str, Any]
"""A chat message: "role", "content", and what chat templates know besides."""


@dataclass(frozen=True)
class Rewritten:
    """A whole conversation in place of the one before, as agents that keep their own send it.

    Args:
        messages: all that the model sees next, the prompt included. Where they extend what was said, its tokens stay.
            None at a reset end the episode before it begins.
    """

    messages: Sequence[Message]


class ImageContexts(Protocol):
    """Reads conversations with images: their tokens, and what stands for these where a network reads them."""

    def received(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages whose images stay as they are, whatever becomes of the files and objects that showed them.

        Args:
            messages: as an environment gives them.

        Returns:
            The messages, with copies of their images.

        Raises:
            DataError: an image cannot be read.
        """

    def shown(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages as chat templates take them, images as placeholders.

        Args:
            messages: a conversation.

        Returns:
            Copies that share nothing that a template could change.
        """

    def tokens(self, text: str) -> list[int]:
        """Tokenizes what a chat template has written.

        Args:
            text: with one placeholder an image.

        Returns:
            Token ids.
        """

    def plain(self, ids: Sequence[int]) -> list[int]:
        """Returns the tokens that a context stands for.

        Args:
            ids: of a context.

        Returns:
            As many ids of the vocabulary.
        """

    def entered(
        self, before: Sequence[int], told: Sequence[int], messages: Sequence[Message], seen: Sequence[Message]
    ) -> list[int]:
        """Puts tokens behind a context; where they bring images, the network's tower reads the whole anew.

        Args:
            before: ids of the context so far.
            told: token ids with one placeholder an image, as `tokens` gives them.
            messages: the whole conversation.
            seen: those of them whose tokens are told.

        Returns:
            Ids of the context.

        Raises:
            DataError: an image cannot be read, or the template does not show it.
        """


Observation = str | Sequence[Mapping[str, Any]] | Rewritten | None
"""What is seen: a text, parts of a message, chat messages, nothing, or a conversation in place of the one before."""

Tool = Callable[..., Any]
"""A typed function with a Google docstring, sync or async, which the model may call."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the model has written.

    Args:
        name: of the tool.
        arguments: by name.
    """

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Action:
    """What the agent has done in one turn.

    Args:
        text: what it said, without its tool calls.
        calls: the tools it calls, in order.
        message: the turn as a chat message.
        malformed: whether it wrote something that looks like a tool call and cannot be read as one.
        prompt_ids: ids of the context it was drawn behind.
        ids: ids that were drawn.
        logprobs: of each of them, in nats, under the distribution sampled from.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    message: Message = field(default_factory=dict)
    malformed: bool = False
    prompt_ids: Sequence[int] = ()
    ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()


@dataclass(frozen=True)
class Step:
    """What an action leads to.

    Args:
        observation: what the agent sees next; a text is a message of the role "user".
        done: whether the episode is over.
        failures: tool calls that failed.
        reward: part of the episode's reward that this turn has earned, for turn-level credit; the last turn has the
            rest. `Environment.reward` gives the whole.

    Raises:
        DataError: failures are no number of calls, the reward is not finite, or done is a text, which is always true.
    """

    observation: Observation = None
    done: bool = False
    failures: int = 0
    reward: float = 0.0

    def __post_init__(self) -> None:
        unusable.when(isinstance(self.done, str), "step/done", done=self.done)
        try:
            operator.index(self.failures)
        except TypeError as error:
            raise unusable("step/failures", failures=self.failures) from error
        reward: object = self.reward
        if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
            raise unusable("step/reward", reward=self.reward)


class User:
    """The other side of a conversation; see `memsafe_rl.rollout.multi_turn.users` for the kinds there are."""

    stops: Sequence[str] = ()
    """Strings that end the episode where the user says one."""


class Environment(ABC):
    """One episode at a time: begun by `reset`, moved on by `step`, judged by `reward`.

    Each of the three may be a coroutine function. An instance is used again, reset, in later rollouts.

    Attributes:
        blocking: whether the three block, as those of simulators and remote services do: they are called in a thread,
            those of all episodes at the same time.
        user: who answers when the agent calls no tool; None where `step` answers itself. Read after `reset`.
        tools: what the model is told it may call: functions, or JSON schemas.
        conversational: whether it speaks in messages even where the row's prompt is plain text.
        called: what it is called where that is not its class, such as the class of what it plays.
    """

    blocking: bool = False
    called: str = ""
    conversational: bool = False
    user: User | None = None
    tools: Sequence[Tool | Mapping[str, Any]] = ()

    @abstractmethod
    def reset(self, example: Mapping[str, Any]) -> Observation | Awaitable[Observation]:
        """Begins an episode.

        Args:
            example: the dataset's row.

        Returns:
            What the agent sees besides the row's prompt: a text goes behind its last message, messages follow it.
        """

    @abstractmethod
    def step(self, action: Action) -> Step | Awaitable[Step]:
        """Carries an action out, once.

        Args:
            action: the agent's. Where there is a user, only actions with tool calls come here.

        Returns:
            What follows.
        """

    def ended(self, messages: list[Message]) -> None:
        """Hears of the end of an episode, once, before `reward`.

        Args:
            messages: the whole conversation as the agent has seen it, its own words and tool calls with it.
        """
        del messages

    def reward(self) -> float | Awaitable[float | None] | None:
        """Judges the episode, once, after its end.

        Returns:
            The reward; None for none.
        """
        return None

    def close(self) -> None:
        """Hears that the run has left its episode, which may not be over; a later `reset` begins another."""
        return

    @property
    def name(self) -> str:
        """Names the column of its rewards."""
        return self.called or type(self).__name__
