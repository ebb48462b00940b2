"""Tools in TRL's form: typed functions that the model calls, and environments whose public methods are tools."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from transformers.utils import get_json_schema

from memsafe_rl.memory.runtime.failures import is_out_of_memory
from memsafe_rl.rollout import refusal
from memsafe_rl.rollout.multi_turn.protocol import Action, Environment, Message, Observation, Step, Tool, ToolCall, User

_OWN = ("reset", "get_reward")  # methods of an environment in TRL's form that the trainer calls, not the model


def tool_schemas(tools: Sequence[Tool | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Describes tools as chat templates want them."""
    return [_named(tool) if isinstance(tool, Mapping) else _schema(tool) for tool in listed_tools(tools)]


def listed_tools(tools: Any) -> list[Any]:
    """Returns tools as a list."""
    if tools is None:
        return []
    if callable(tools):
        return [tools]
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Iterable):
        raise refusal("tools", given=tools, kind=type(tools).__name__)
    return list(tools)


def _named(schema: Mapping[str, Any]) -> dict[str, Any]:
    function = schema.get("function", schema)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise refusal("tools/schema", schema=dict(schema))
    return dict(schema)


def _schema(tool: Tool) -> dict[str, Any]:
    name, own = getattr(tool, "__name__", repr(tool)), getattr(tool, "openai_schema", None)
    if isinstance(own, Mapping):  # a tool that describes itself
        return _named(own)
    try:
        return dict(get_json_schema(tool))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise refusal("tools/description", name=name, error=error) from error


def methods_of(instance: Any) -> list[Tool]:
    """Returns the tools of an environment in TRL's form."""
    members = inspect.getmembers(type(instance), predicate=inspect.isfunction)
    return [getattr(instance, name) for name, _ in members if name not in _OWN and not name.startswith("_")]


class ToolEnvironment(Environment):
    """Calls the tools that the agent names; where it names none, the user answers, or the episode ends.

    Derive from it for tools with a state, a task or a reward of their own. What a tool raises becomes its result,
    ``{"error": ...}``, as does a tool that there is not.

    Args:
        tools: functions.
        user: who answers when no tool is called; None to end there.

    Raises:
        ConfigError: two tools have one name, or one is no function.
    """

    def __init__(self, tools: Sequence[Tool] = (), user: User | None = None) -> None:
        self.tools = listed_tools(tools)
        self.user = user
        self._functions: dict[str, Tool] = {}
        for tool in self.tools:
            refusal.when(not callable(tool), "tools/function", given=tool, kind=type(tool).__name__)
            name = getattr(tool, "__name__", type(tool).__name__)
            refusal.when(name in self._functions, "tools/name", name=name)
            self._functions[name] = tool

    def reset(self, example: Mapping[str, Any]) -> Observation | Awaitable[Observation]:
        """Begins an episode, with nothing besides the row's prompt."""
        del example
        return None

    def step(self, action: Action) -> Step | Awaitable[Step]:
        """Calls an action's tools in order; returns one message a call, in a coroutine if a tool is async."""
        if not action.calls:
            return Step(done=True)
        results = [self._call(call) for call in action.calls]
        if any(inspect.isawaitable(result) for result in results):
            return self._awaited(action.calls, results)
        return _told(action.calls, results)

    def _call(self, call: ToolCall) -> Any:
        function = self._functions.get(call.name)
        if function is None:
            return _Failed(error=f"Unknown tool {call.name!r}; there are {', '.join(sorted(self._functions))}.")
        try:
            return function(**call.arguments)
        except (Exception, SystemExit) as error:  # what runs a model's code may meet its exit()
            return _failed(error)

    async def _awaited(self, calls: Sequence[ToolCall], results: Sequence[Any]) -> Step:
        known = []
        for result in results:
            if inspect.isawaitable(result):  # gathered: that a task of the tool's own was cancelled is its failure only
                (result,) = await asyncio.gather(_without_exit(result), return_exceptions=True)
                result = _failed(result) if isinstance(result, BaseException) else result
            known.append(result)
        return _told(calls, known)


class MethodEnvironment(Environment):
    """An environment in TRL's form: `reset(**columns)`, maybe `get_reward()`, and methods that are tools."""

    def __init__(self, instance: Any, tools: Sequence[Tool] = ()) -> None:
        if isinstance(instance, type):
            raise refusal("environment_factory/class", name=instance.__name__)
        resets = callable(getattr(instance, "reset", None))
        refusal.when(not resets, "environment_factory/reset", kind=type(instance).__name__)
        self._calling = ToolEnvironment([*listed_tools(tools), *methods_of(instance)])
        self.tools = self._calling.tools
        self.instance, self.called = instance, type(instance).__name__
        self.blocking = bool(getattr(instance, "blocking", False))

    def reset(self, example: Mapping[str, Any]) -> Observation | Awaitable[Observation]:
        """Begins an episode."""
        seen: Observation | Awaitable[Observation] = self.instance.reset(**example)
        return seen

    def step(self, action: Action) -> Step | Awaitable[Step]:
        """Calls the tools of an action in their order."""
        return self._calling.step(action)

    def reward(self) -> float | Awaitable[float | None] | None:
        """Returns what the instance's `get_reward` does."""
        judge: Callable[[], Any] | None = getattr(self.instance, "get_reward", None)
        return None if judge is None else judge()


class _Failed(dict[str, str]):
    """The result of a call that failed: why, under ``error``."""


async def _without_exit(result: Awaitable[Any]) -> Any:
    try:
        return await result
    except SystemExit as error:  # which would end the loop that awaits all tools
        return _failed(error)


def _failed(error: BaseException) -> _Failed:
    """Turns what a tool raised into its result; memory that ran out is no answer."""
    if is_out_of_memory(error):
        raise error
    try:
        return _Failed(error=str(error))
    except Exception:
        return _Failed(error=type(error).__name__)


def _told(calls: Sequence[ToolCall], results: Sequence[Any]) -> Step:
    shown = [_shown(result) for result in results]
    messages: list[Message] = [
        {"role": "tool", "name": call.name, "content": str(result) if isinstance(result, _Failed) else result}
        for call, result in zip(calls, shown, strict=True)
    ]
    return Step(messages, failures=sum(isinstance(result, _Failed) for result in shown))


def are_parts(value: Any) -> bool:
    """Whether a value is the parts of one message's content, texts and images."""
    return bool(value) and isinstance(value, list) and all(map(_is_part, value))


def _is_part(value: Any) -> bool:
    kind = value.get("type") if isinstance(value, Mapping) else None
    return kind == "image" or (kind == "text" and isinstance(value.get("text"), str))


def _shown(result: Any) -> Any:
    """A result as the content of a message; one that cannot be shown as text is a failure."""
    if isinstance(result, _Failed) or are_parts(result):
        return result
    try:
        return str(result)
    except Exception as error:
        return _failed(error)
