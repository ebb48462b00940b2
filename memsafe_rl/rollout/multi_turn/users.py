"""The user's side: a model, a script, or a service far away."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memsafe_rl.errors import MemsafeError
from memsafe_rl.rewards.calls import TimeoutPolicy
from memsafe_rl.rollout import refusal, unusable
from memsafe_rl.rollout.multi_turn.protocol import Message, User

logger = logging.getLogger(__name__)

Reply = Callable[[list[Message]], str | Awaitable[str | None] | None]
"""Takes the conversation as the user sees it (what the agent said has the role "user", what the user said
"assistant"); gives what the user says next, None to end the episode."""

STOPS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
"""What a simulated user says to end the conversation, as in tau2-bench."""

_ENDLESS = TimeoutPolicy()


class UserTimeoutError(MemsafeError, TimeoutError):
    """A user took longer to answer than it may."""


@dataclass(frozen=True)
class CallableUser(User):
    """A user whose words a function gives.

    Args:
        reply: the function, sync or async.
        stops: strings that end the episode.
        blocking: whether the function blocks, as a request does: then each episode calls it in a thread of its own.
        patience: how long an async function is waited for; one that took longer every time ends the episode as
            truncated where `gives_none`, else the run.

    Raises:
        ConfigError: one of these cannot be used.
    """

    reply: Reply
    stops: Sequence[str] = STOPS
    blocking: bool = False
    patience: TimeoutPolicy = _ENDLESS

    def __post_init__(self) -> None:
        refusal.when(not callable(self.reply), "user/reply", given=self.reply)
        patient, kind = isinstance(self.patience, TimeoutPolicy), type(self.patience).__name__
        refusal.when(not patient, "user/patience", given=self.patience, kind=kind)
        object.__setattr__(self, "stops", _checked_stops(self.stops))

    def answer(self, messages: list[Message]) -> Any:
        """Calls the function with the conversation as the user sees it."""
        output = self.reply(messages)
        return self._awaited(output, messages) if inspect.isawaitable(output) else output

    async def _awaited(self, first: Awaitable[Any], messages: list[Message]) -> Any:
        output: Any = first
        for left in reversed(range(self.patience.retries + 1)):
            try:
                async with asyncio.timeout(self.patience.timeout_seconds) as timer:
                    return await output
            except TimeoutError:
                if not timer.expired():
                    raise
            logger.warning("A user did not answer within %g seconds.", self.patience.timeout_seconds)
            output = self.reply(messages) if left else None
        if self.patience.gives_none:
            return NO_ANSWER
        raise UserTimeoutError(
            f"A user did not answer within {self.patience.timeout_seconds:g} seconds, asked "
            f"{self.patience.retries + 1} time(s). Raise the timeout or the retries of its TimeoutPolicy, or set "
            "gives_none to end such episodes."
        )


NO_ANSWER = object()
"""What a user gives that took too long."""


@dataclass(frozen=True)
class ModelUser(User):
    """A user whose words a model draws: the base model, with the trained adapter off, or another role of the hub.

    Args:
        system: what the user is told, or a function of the task.
        role: "base", the name of a PEFT adapter, or a role registered with the run's `ModelRoles`.
        max_tokens: longest answer, in tokens.
        stops: strings that end the episode.
        temperature: of its draws; None for the run's.

    Raises:
        ConfigError: one of these cannot be used.
    """

    system: str | Callable[[Mapping[str, Any]], str]
    role: str = "base"
    max_tokens: int = 128
    stops: Sequence[str] = STOPS
    temperature: float | None = None

    def __post_init__(self) -> None:
        most = self.max_tokens
        counts = isinstance(most, int) and not isinstance(most, bool) and most >= 1
        refusal.when(not isinstance(self.system, str) and not callable(self.system), "user/system", given=self.system)
        refusal.when(not isinstance(self.role, str), "user/role", given=self.role)
        refusal.when(not counts, "user/max_tokens", given=most)
        object.__setattr__(self, "stops", _checked_stops(self.stops))

    def instructions(self, example: Mapping[str, Any]) -> str:
        """Returns what the user is told in an episode, as a system message."""
        told = self.system if isinstance(self.system, str) else self.system(example)
        unusable.when(not isinstance(told, str), "user/told", told=told, kind=type(told).__name__)
        return told

    def manner(self) -> ModelUser:
        """Returns what users must have in common to draw in one call: all but their instructions."""
        return replace(self, system="", stops=())


def _checked_stops(stops: Any) -> tuple[str, ...]:
    """A text alone is one stop; an empty one would end every episode."""
    listed = (stops,) if isinstance(stops, str) else stops
    kept = tuple(listed) if isinstance(listed, Iterable) else (None,)
    refusal.when(not all(isinstance(stop, str) and stop for stop in kept), "user/stops", given=stops)
    return kept


def as_seen_by_user(messages: Sequence[Message]) -> list[Message]:
    """Turns a conversation round: the user sees its own words as the assistant's, nothing of tools, and no thoughts."""
    flipped = {"user": "assistant", "assistant": "user"}
    said = ((flipped[one["role"]], _aloud(one)) for one in messages if one["role"] in flipped)
    return [{"role": role, "content": content} for role, content in said if content]


def _aloud(message: Message) -> Any:
    """Returns the content of a message without the thoughts that stand in it."""
    content = message.get("content")
    if message["role"] != "assistant" or not isinstance(content, str):
        return content
    _, closed, rest = content.rpartition("</think>")
    return rest.lstrip("\n") if closed else content.partition("<think>")[0]
