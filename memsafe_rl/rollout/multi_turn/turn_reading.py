"""How a turn that the model drew is read: what it says, what it thinks, and which tools it calls."""

from __future__ import annotations

import ast
import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

from memsafe_rl.errors import texts_beside
from memsafe_rl.rollout.multi_turn.protocol import Action, Message, ToolCall

TurnReader = Callable[[list[int] | str, list[int] | str, Sequence[Any]], Action]
"""Reads a turn, behind its context, with the schemas of the tools; raises one of `UNREADABLE` for a malformed turn."""

PROBE = ToolCall("look_up", {"name": "a b", "days": 3})
"""A call that shows how a chat template writes calls."""
_FIELDS = {"name": {"type": "string", "description": "Whose."}, "days": {"type": "integer", "description": "How many."}}
_PARAMETERS = {"type": "object", "properties": _FIELDS, "required": list(_FIELDS)}
_FUNCTION = {"name": PROBE.name, "description": "Looks up.", "parameters": _PARAMETERS}
PROBE_SCHEMAS = ({"type": "function", "function": _FUNCTION},)
"""The schema of its tool."""

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
"""How Qwen, SmolLM3 and Hermes write a call: JSON with "name" and "arguments"."""

_DEEPEST_TURN = 64
"""Lists and objects inside each other in a turn, 4 of them around a call's arguments: copying and rendering recurse."""

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What reading a malformed turn may raise."""


def turn_reader(tokenizer: Any, asked: str, written: str) -> TurnReader | None:
    """Returns what reads the call of `PROBE` as a chat template writes it behind what was asked, or None."""
    for known in texts_beside(__file__, "response_templates.yaml"):
        begins = known.get("start_anchor_pattern") or re.escape(known["start_anchor"])
        if re.search(begins, written) and _reads(reader := partial(_by_known, tokenizer, known), "", written):
            return reader
    reader, turn = partial(by_tags, tokenizer), written.removeprefix(asked)
    leaves_out = PROBE.name not in turn  # a template that does not show calls again says nothing of their form
    return reader if leaves_out or _reads(reader, turn, asked) else None


def _reads(reader: TurnReader, turn: str, context: str) -> bool:
    with suppress(*UNREADABLE):
        return reader(turn, context, PROBE_SCHEMAS).calls == (PROBE,)
    return False


def calling(call: ToolCall) -> Message:
    """Returns a turn that calls a tool and says nothing."""
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def _by_known(tokenizer: Any, known: Any, turn: Any, context: Any, schemas: Sequence[Any]) -> Action:
    return parsed(tokenizer, turn, schema=known, prefix=context, tools=list(schemas))


def parsed(tokenizer: Any, turn: list[int] | str, **how: Any) -> Action:
    """Has a tokenizer read a turn; its eos is taken off a content in which its `response_template` left it."""
    message = tokenizer.parse_response(turn, **how)
    if isinstance(message, Mapping) and isinstance(message.get("content"), str):
        message = {**message, "content": message["content"].removesuffix(tokenizer.eos_token or "")}
    return _action(message)


def by_tags(tokenizer: Any, turn: list[int] | str, _context: object, _schemas: object) -> Action:
    """Reads JSON calls between tags."""
    text = turn if isinstance(turn, str) else tokenizer.decode(turn, skip_special_tokens=False)
    for end in tokenizer.all_special_tokens:
        text = text if "tool_call" in end else text.replace(end, "")
    calls = [json.loads(found) for found in _TOOL_CALL.findall(text)]
    rest = _TOOL_CALL.sub("", text).strip()
    if "<tool_call>" in rest:
        raise ValueError("a call is not closed")
    message: Message = {"role": "assistant", "content": rest}
    if calls:
        message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return _action(message)


def _action(message: Any) -> Action:
    """Turns a parsed message into an action; raises ValueError where a call has no name or no arguments."""
    if not isinstance(message, Mapping):
        raise ValueError("no message")
    check_depth(message)
    message = encodable(message)
    calls, written = [], []
    read = [_in_python(one) if isinstance(one, str) else [one] for one in message.get("tool_calls") or ()]
    for call in chain.from_iterable(read):
        function = call["function"]
        name, arguments = function["name"], function.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            raise ValueError("a call has no name, or no arguments by name")
        calls.append(ToolCall(name, copy.deepcopy(dict(arguments))))
        written.append({**call, "function": {**function, "arguments": arguments}})
    text = str(message.get("content") or "")
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    own = {"tool_calls": written} if written else {}
    return Action(text, tuple(calls), {"role": "assistant", **kept, **own, "content": text})


def _in_python(text: str) -> list[dict[str, Any]]:
    """Reads a list of calls with arguments by name, in Python's syntax; mappings may be JSON."""
    try:
        calls = ast.parse(text.strip(), mode="eval").body.elts  # type: ignore[attr-defined]
    except SyntaxError as error:
        raise ValueError(f"calls are no Python: {error}") from error
    if any(call.args for call in calls):
        raise ValueError("an argument has no name")
    given = [{str(one.arg): _literal(text, one.value) for one in call.keywords} for call in calls]
    functions = [{"name": ast.unparse(call.func), "arguments": one} for call, one in zip(calls, given, strict=True)]
    return [{"type": "function", "function": function} for function in functions]


def _literal(text: str, node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return json.loads(ast.get_source_segment(text, node) or "")


def encodable(value: Any) -> Any:
    """Replaces what is no text in strings: halves of surrogate pairs, which JSON can spell and tokenizers refuse."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()
    if isinstance(value, Mapping):
        return {encodable(name): encodable(one) for name, one in value.items()}
    return [encodable(one) for one in value] if isinstance(value, (list, tuple)) else value


def check_depth(message: Any) -> None:
    """Raises ValueError where lists and objects lie deeper inside each other than a turn needs."""
    level = [message]
    for _ in range(_DEEPEST_TURN):
        inner = [one.values() if isinstance(one, Mapping) else one for one in level]
        level = [one for values in inner for one in values if isinstance(one, (Mapping, list, tuple))]
        if not level:
            return
    raise ValueError(f"a turn is deeper than {_DEEPEST_TURN} lists and objects")


def message_of(tokenizer: Any, context: Sequence[int] | None, ids: Sequence[int]) -> Message:
    """Reads a turn as the tokenizer's `response_template` has it; a malformed one is its text."""
    try:
        return parsed(tokenizer, list(ids), prefix=context).message
    except UNREADABLE:
        return {"role": "assistant", "content": tokenizer.decode(list(ids), skip_special_tokens=True)}
