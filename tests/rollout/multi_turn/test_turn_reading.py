"""Turns are read as TRL reads them, for every chat template that it ships, without being told the model's family."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import trl
from trl.chat_template_utils import add_response_schema, parse_response, supports_tool_calling

from memsafe_rl.data.prompts import PromptTokenizer
from memsafe_rl.errors import ConfigError
from memsafe_rl.rollout.multi_turn.chat import Chat, check_tools
from memsafe_rl.rollout.multi_turn.protocol import Message
from memsafe_rl.rollout.multi_turn.tools import tool_schemas
from memsafe_rl.rollout.multi_turn.users import as_seen_by_user
from tests.rollout.multi_turn.helpers import chat_tokenizer

TEMPLATES = {
    path.stem: path.read_text() for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
}
ENDS = {"llama3": "<|eot_id|>", "gptoss": "<|return|>", "gemma4": "<turn|>", "diffusion": "<turn|>"}
USER: Message = {"role": "user", "content": "?"}


def book(room: str, nights: int, loud: bool, guests: list[str], price: float = 1.5, notes: dict | None = None) -> None:
    """Books a room.

    Args:
        room: its name.
        nights: how many.
        loud: whether it may be.
        guests: who comes.
        price: of a night.
        notes: what else.
    """


SCHEMAS = tool_schemas([book])
ARGUMENTS = [
    {"room": "blue", "nights": 3, "loud": False, "guests": ["a", "b c"], "price": 2.5, "notes": {"k": 1}},
    {"room": "7", "nights": 0, "loud": True, "guests": []},
]


def tokenizer_of(name: str) -> Any:
    tokenizer = chat_tokenizer(TEMPLATES[name])
    end = next((end for family, end in ENDS.items() if name.startswith(family)), "<|im_end|>")
    tokenizer.add_special_tokens({"eos_token": end})
    return tokenizer


CALLING = [name for name in TEMPLATES if not name.startswith("deepseek") and supports_tool_calling(tokenizer_of(name))]
UNKNOWN = [name for name in CALLING if name.startswith("muse")]


def turns(arguments: dict[str, Any]) -> list[Message]:
    call = {"type": "function", "function": {"name": "book", "arguments": arguments}}
    asks: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    two = {**asks, "tool_calls": [call, call]}
    thinks: Message = {"role": "assistant", "content": "hi", "reasoning_content": "hm", "thinking": "hm"}
    return [asks, two, {**asks, "content": "Sure."}, thinks]


def cut(written: str, asked: str) -> int:
    """Where a turn begins; templates without a prefilled thought write another beginning than they ask with."""
    same = next((at for at, (one, two) in enumerate(zip(written, asked, strict=False)) if one != two), len(asked))
    return same if same == len(asked) else max(asked.rfind("\n", 0, same), asked.rfind(">", 0, same)) + 1


@pytest.mark.parametrize("name", [name for name in CALLING if name not in UNKNOWN])
def test_calls_and_thoughts_are_read_as_trl_reads_them(name: str) -> None:
    tokenizer, chat = tokenizer_of(name), Chat(tokenizer_of(name))
    try:
        oracle = add_response_schema(copy.deepcopy(tokenizer))
    except ValueError:  # a template of TRL's own for training, which stands for the family's
        oracle = None
    check_tools(chat, SCHEMAS)
    for turn in (turn for arguments in ARGUMENTS for turn in turns(arguments)):
        how: dict[str, Any] = {"tools": list(SCHEMAS), "tokenize": False}
        asked = tokenizer.apply_chat_template([USER], add_generation_prompt=True, **how)
        try:
            written = tokenizer.apply_chat_template([USER, turn], **how)
        except Exception:
            assert name.startswith("llama3")  # which writes one call and no words beside it
            continue
        begin = cut(written, asked)
        context, ids = (
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in (written[:begin], written[begin:])
        )
        action = chat.read(context, ids, SCHEMAS)
        shown = turn.get("tool_calls", [])[
            : 1 if name.startswith("gptoss") else None
        ]  # whose template writes the first
        assert [(call.name, call.arguments) for call in action.calls] == [
            (call["function"]["name"], call["function"]["arguments"]) for call in shown
        ]
        assert action.malformed is False
        if oracle is not None:
            message = parse_response(oracle, ids, prefix=context, tools=[book])
            wanted = {**message, "content": (message.get("content") or "").removesuffix(tokenizer.eos_token)}
            assert action.message == wanted


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_template_whose_calls_nobody_reads_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"A call of 'book' could not be read.* Set processing_class.response_template"
    ):
        check_tools(Chat(tokenizer_of(name)), SCHEMAS)


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("room='a', nights=1", {"room": "a", "nights": 1}),
        ("room='f(x), y(z)', nights=2", {"room": "f(x), y(z)", "nights": 2}),
        ("room='it\\'s'", {"room": "it's"}),
        ("loud=False, price=None", {"loud": False, "price": None}),
        ("notes={'k': [1, {'z': 2}]}", {"notes": {"k": [1, {"z": 2}]}}),
        ('notes={"k": true}', {"notes": {"k": True}}),
        ("room=", None),
        ("'a'", None),
    ],
)
def test_calls_in_pythons_syntax_are_read_and_nothing_else_is(written: str, arguments: Any) -> None:
    tokenizer, said = tokenizer_of("lfm2_2_5"), "Sure, f(x), g(2)."
    text = f"{said}<|tool_call_start|>[book({written})]<|tool_call_end|>"
    context = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=True)["input_ids"]
    action = Chat(tokenizer).read(context, tokenizer(text)["input_ids"], SCHEMAS)
    assert [call.arguments for call in action.calls] == ([] if arguments is None else [arguments])
    assert (action.text, action.malformed) == ((text, True) if arguments is None else (said, False))


def test_a_call_where_there_are_no_tools_is_what_was_said() -> None:
    tokenizer = add_response_schema(tokenizer_of("qwen3"))
    text = 'so <tool_call>{"name": "book", "arguments": {}}</tool_call>'
    context = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=True)["input_ids"]
    action = Chat(tokenizer).read(context, tokenizer(text)["input_ids"], ())
    assert (action.text, action.calls, action.malformed) == (text, (), False)


def test_what_is_said_before_and_behind_a_call_is_kept() -> None:
    tokenizer = tokenizer_of("qwen3")
    text = 'hello <tool_call>{"name": "book", "arguments": {}}</tool_call> and then<|im_end|>'
    context = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=True)["input_ids"]
    action = Chat(tokenizer).read(context, tokenizer(text)["input_ids"], SCHEMAS)
    assert (action.text, len(action.calls)) == ("hello\nand then", 1)


WANTS_A_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('first the system') }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
)


def test_a_template_of_parts_that_wants_a_system_message_sees_texts() -> None:
    tokenizer = chat_tokenizer(WANTS_A_SYSTEM)
    messages: list[Message] = [{"role": "system", "content": "be good"}, {"role": "user", "content": "hello"}]
    assert tokenizer.decode(Chat(tokenizer).first(messages, ())) == "[system]be good[user]hello"


def test_a_call_that_is_no_json_is_malformed_and_stays_text() -> None:
    tokenizer = tokenizer_of("qwen3")
    context = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=True)["input_ids"]
    action = Chat(tokenizer).read(context, tokenizer('<tool_call>{"name": </tool_call>')["input_ids"], SCHEMAS)
    assert (action.text, action.calls, action.malformed) == ('<tool_call>{"name": </tool_call>', (), True)


def test_thoughts_are_read_by_a_tokenizers_own_template_without_tools_too() -> None:
    tokenizer = add_response_schema(tokenizer_of("qwen3"))
    context = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=True)["input_ids"]
    action = Chat(tokenizer).read(context, tokenizer("<think>\nhm\n</think>\n\nfree<|im_end|>")["input_ids"], ())
    assert (action.text, action.message["reasoning_content"], action.malformed) == ("free", "hm", False)


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5"])
def test_what_follows_a_turn_whose_thoughts_are_read_apart_keeps_them_or_is_rendered_anew(name: str) -> None:
    chat = Chat(tokenizer_of(name))
    turn: Message = {"role": "assistant", "content": "free", "reasoning_content": "hm"}
    answer: Message = {"role": "tool", "name": "book", "content": "none"}
    last = chat._tokenizer.eos_token_id
    told = chat.following(turn, last, [answer], SCHEMAS)
    assert (told is not None) is (name == "qwen3")  # the other one drops thoughts of every turn
    assert chat.following(turn, last, [USER], SCHEMAS) is None
    if told is not None:
        drawn = chat._tokenizer("<think>\nhm\n</think>\n\nfree<|im_end|>")["input_ids"]
        assert [*chat.first([USER], SCHEMAS), *drawn, *told] == chat.first([USER, turn, answer], SCHEMAS)


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_2", "smolvlm"])
def test_a_text_in_parts_is_shown_as_the_text_itself(name: str) -> None:
    tokenizer = tokenizer_of(name)
    chat, read = Chat(tokenizer), PromptTokenizer(tokenizer, template_kwargs=None, limit=None, truncate=False)
    forms = "1+1=", [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    text, parts = ([{"role": "user", "content": content}] for content in forms)
    assert "1+1=" in tokenizer.decode(chat.first(text, ()))
    assert chat.first(parts, ()) == chat.first(text, ())
    assert read.ids([text]) == read.ids([parts]) == [chat.first(text, ())]


def test_a_user_hears_no_thoughts() -> None:
    said = ["<think>\nsecret\n</think>\n\nfree", "<think>\nsecret", "plain"]
    messages: list[Message] = [{"role": "assistant", "content": text} for text in said]
    assert [one["content"] for one in as_seen_by_user([*messages, USER])] == ["free", "plain", "?"]
