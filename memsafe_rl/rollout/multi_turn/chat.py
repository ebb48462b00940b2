"""Conversations as token ids: what follows a turn is added to the ids that the model drew, which stay as they are."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError

from memsafe_rl.errors import DataError
from memsafe_rl.rollout import refusal, unusable
from memsafe_rl.rollout.multi_turn.protocol import Action, ImageContexts, Message, ToolCall
from memsafe_rl.rollout.multi_turn.turn_reading import (
    PROBE,
    PROBE_SCHEMAS,
    UNREADABLE,
    TurnReader,
    by_tags,
    calling,
    encodable,
    parsed,
    turn_reader,
)

_MARK = "\u241fturn\u241f"  # stands for what a turn said while its surroundings are rendered; nobody writes this
_STAND_INS = _MARK, f"<think>\n{_MARK}\n</think>\n\n{_MARK}"  # some templates put empty thoughts before a last turn
_THOUGHTS = ("reasoning_content", "thinking")
"""Keys of messages under which chat templates look for thoughts."""
_ASKED: Message = {"role": "user", "content": "?"}


class UnrenderableError(DataError):
    """A chat template refuses messages."""


class PlainText:
    """Conversations that are one running text; there are no roles and no tools."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def first(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the ids of a whole text."""
        refusal.when(schemas, "tools/plain")
        return list(self._tokenizer(text="".join(message["content"] for message in messages))["input_ids"])

    def following(self, _turn: Message, _last_id: int, messages: Sequence[Message], _schemas: object) -> list[int]:
        """Returns the ids of a text that follows."""
        text = "".join(message["content"] for message in messages)
        return list(self._tokenizer(text=text, add_special_tokens=False)["input_ids"])

    def joined(self, before: Sequence[int], told: Sequence[int], *_messages: object) -> list[int]:
        """Puts the ids of what follows behind a context."""
        return [*before, *told]

    def received(self, messages: list[Message]) -> list[Message]:
        """Refuses images, for which a running text has no place."""
        unusable.when(any(map(shows_image, messages)), "images/text", roles=_roles(messages))
        return messages

    def plain(self, ids: Sequence[int]) -> Sequence[int]:
        """Returns the tokens that a context stands for."""
        return ids

    def read(self, _context: Sequence[int], ids: Sequence[int], _schemas: object) -> Action:
        """Reads a turn that the model drew."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return Action(text, message={"role": "assistant", "content": text})


def check_template(tokenizer: Any) -> None:
    """Refuses conversations without a chat template."""
    unusable.when(getattr(tokenizer, "chat_template", None) is None, "template/none")


def contents_for(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> Callable[[Sequence[Message]], list[Message]]:
    """Returns what gives messages contents that a chat template shows: parts, where it reads them alone, or texts."""
    turn, how = {"role": "user", "content": _MARK}, {**template_kwargs, "tokenize": False}

    def shown(form: Callable[[Sequence[Message]], list[Message]]) -> str:
        for begun in ([], [{"role": "system", "content": _MARK}]):  # some templates want one
            with suppress(TemplateError, *UNREADABLE):
                return str(tokenizer.apply_chat_template(form([*begun, turn]), **how))
        return ""

    as_text, as_parts = shown(list), shown(in_parts)
    if _MARK in as_text:  # some templates leave parts out, others print the list itself
        return list if _MARK in as_parts and not re.search("[\"']text[\"']:", as_parts) else in_texts
    return in_parts if _MARK in as_parts else list


def in_texts(messages: Sequence[Message]) -> list[Message]:
    """Returns messages whose parts, where all are texts, are one text."""
    return [{**turn, "content": _joined(turn["content"])} if "content" in turn else turn for turn in messages]


def _joined(content: Any) -> Any:
    texts = isinstance(content, list) and all(isinstance(one, Mapping) and one.get("type") == "text" for one in content)
    return text_of(content) if texts else content


def in_parts(messages: Sequence[Message]) -> list[Message]:
    """Returns messages whose contents are lists of parts."""
    return [{**turn, "content": parts_of(turn.get("content"))} for turn in messages]


def parts_of(content: Any) -> list[dict[str, Any]]:
    """Returns a message's content as parts, each with its own keys."""
    if not isinstance(content, list):
        return [] if content is None else [{"type": "text", "text": content}]
    return [{key: value for key, value in part.items() if value is not None} for part in content]


class Chat:
    """Conversations in a tokenizer's chat template, with images where something reads them."""

    def __init__(
        self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None, images: ImageContexts | None = None
    ) -> None:
        check_template(tokenizer)
        self._tokenizer, self._images = tokenizer, images
        self._kwargs = dict(template_kwargs or {})
        self._contents = contents_for(tokenizer, self._kwargs)
        self._closing: str | None = None

    def first(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the ids of a whole conversation, up to where the next turn begins."""
        if self._images is None:
            ids = list(self._rendered(messages, schemas, add_generation_prompt=True, return_dict=True)["input_ids"])
        else:
            ids = self._images.tokens(self._text(messages, schemas, goes_on=True))
        unusable.when(not ids, "template/nothing", roles=_roles(messages))
        return self.joined([], ids, messages, messages)

    def received(self, messages: list[Message]) -> list[Message]:
        """Returns messages with images of their own, where something reads them."""
        return messages if self._images is None else self._images.received(messages)

    def joined(
        self, before: Sequence[int], told: Sequence[int], messages: Sequence[Message], seen: Sequence[Message]
    ) -> list[int]:
        """Puts the ids of what was seen behind a context, and has its images read."""
        return [*before, *told] if self._images is None else self._images.entered(before, told, messages, seen)

    def plain(self, ids: Sequence[int]) -> Sequence[int]:
        """Returns the tokens that a context stands for."""
        return ids if self._images is None else self._images.plain(ids)

    def _tokens(self, text: str) -> list[int]:
        if self._images is not None:
            return self._images.tokens(text)
        return list(self._tokenizer(text=text, add_special_tokens=False)["input_ids"])

    def following(
        self, turn: Message, last_id: int, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]
    ) -> list[int] | None:
        """Returns the ids between a model's turn and its next one; None unless they are the same after any turn."""
        own = {"tool_calls": turn["tool_calls"]} if turn.get("tool_calls") else {}
        own |= {name: _MARK for name in _THOUGHTS if turn.get(name)}
        apart = any(name in own for name in _THOUGHTS)
        thinks = apart or "</think>" in text_of(turn.get("content"))
        for said in _STAND_INS[:1] if apart else _STAND_INS[thinks:]:
            stand_in = {"role": "assistant", "content": said, **own}
            try:
                before = self._text([_ASKED, stand_in], schemas)
                after = self._text([_ASKED, stand_in, *messages], schemas, goes_on=True)
            except UnrenderableError:
                return None
            if after.startswith(before) and before.count(_MARK) > thinks:  # its thoughts stay, too
                closing = self._turn_end(before).removeprefix(self._tokenizer.decode([last_id]))
                return self._tokens(closing + after[len(before) :])
        return None

    def _turn_end(self, rendered: str) -> str:
        """What the template writes behind a turn, with its own end-of-turn token."""
        if self._closing is None:
            alone = self._text([_ASKED, {"role": "assistant", "content": _MARK}], ())
            self._closing = alone[alone.rindex(_MARK) + len(_MARK) :]
        return self._closing if rendered.endswith(self._closing) else ""

    def read(self, context: Sequence[int], ids: Sequence[int], schemas: Sequence[Mapping[str, Any]]) -> Action:
        """Reads a turn that the model drew: what it said, and which tools it calls."""
        with suppress(*UNREADABLE):
            if getattr(self._tokenizer, "response_template", None) is not None:
                before, tools = list(self.plain(context)), list(schemas)
                action = parsed(self._tokenizer, list(ids), prefix=before, tools=tools)
                if schemas or not action.calls:  # where there is no tool, a call is text
                    return action
            elif schemas:
                reader = self._reader or partial(by_tags, self._tokenizer)
                return reader(list(ids), list(self.plain(context)), schemas)
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return Action(text, message={"role": "assistant", "content": text}, malformed=bool(schemas))

    @cached_property
    def _reader(self) -> TurnReader | None:
        """What reads a call as the chat template writes it."""
        try:
            asked, written = (self._text(turns, PROBE_SCHEMAS) for turns in ([_ASKED], [_ASKED, calling(PROBE)]))
        except UnrenderableError:  # such as a template that takes arguments as text alone
            return None
        return turn_reader(self._tokenizer, asked, written)

    def reads_calls(self) -> bool:
        """Whether a call is read as one, as the chat template writes it."""
        return getattr(self._tokenizer, "response_template", None) is not None or self._reader is not None

    def _text(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]], *, goes_on: bool = False) -> str:
        return str(self._rendered(messages, schemas, add_generation_prompt=goes_on, tokenize=False))

    def _rendered(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]], **how: Any) -> Any:
        if self._images is not None:
            own = self._images.shown(messages)
        else:
            unusable.when(any(map(shows_image, messages)), "images/text", roles=_roles(messages))
            own = copy.deepcopy(list(messages))
        try:
            return self._tokenizer.apply_chat_template(
                self._contents(own), tools=list(schemas) or None, **how, **self._kwargs
            )
        except (TemplateError, TypeError) as error:
            raise UnrenderableError(
                f"the chat template cannot render messages of the roles {_roles(messages)}: {error} Set "
                "processing_class.chat_template to one that can, or have prompts, environments and users give messages "
                "whose roles and contents it takes."
            ) from error


TurnFormat = PlainText | Chat
"""Between messages and token ids."""


def shows_image(turn: Mapping[str, Any]) -> bool:
    """Whether a message has an image, or a place for one."""
    parts = turn.get("content")
    return isinstance(parts, list) and any(isinstance(part, Mapping) and part.get("type") == "image" for part in parts)


def as_template(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Turns OpenAI's messages into those of chat templates: text, arguments by name, results that name their tool."""
    called: dict[Any, str] = {}
    found = []
    for message in messages:
        plain: Message = {"role": message["role"], "content": text_of(message.get("content"))}
        calls = [call["function"] for call in message.get("tool_calls") or () if isinstance(call.get("function"), dict)]
        if calls:
            called |= {call.get("id"): call["function"].get("name", "") for call in message["tool_calls"]}
            plain["tool_calls"] = [
                {"type": "function", "function": {"name": call.get("name"), "arguments": _arguments(call)}}
                for call in calls
            ]
        if message["role"] == "tool":
            plain["name"] = message.get("name") or called.get(message.get("tool_call_id"), "")
        found.append(encodable(plain))
    return tuple(found)


def text_of(content: Any) -> str:
    """Returns the text of a message's content, images left out."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def _arguments(call: Mapping[str, Any]) -> Any:
    arguments = call.get("arguments") or "{}"
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def shared_messages(said: Sequence[Message], sent: Sequence[Message]) -> int:
    """Counts the messages that two conversations begin with, whatever ids and thoughts the one leaves out."""
    pairs = zip(as_template(said), as_template(sent), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def check_tools(chat: Chat, schemas: Sequence[Mapping[str, Any]]) -> None:
    """Refuses a chat template that does not tell the model of its tools, or does not show it their results."""
    name = str(schemas[0].get("function", schemas[0]).get("name"))
    told = chat._text([_ASKED], schemas)
    turn = calling(ToolCall(name, {}))
    shown = chat._text([_ASKED, turn, {"role": "tool", "name": name, "content": _MARK}], schemas)
    for what, missing in (("the tools", name not in told), ("the results of tools", _MARK not in shown)):
        refusal.when(missing, "chat_template", what=what, name=name)
    refusal.when(not chat.reads_calls(), "response_template", name=name)


def _roles(messages: Sequence[Message]) -> str:
    return ", ".join(str(message.get("role")) for message in messages) or "(none)"
