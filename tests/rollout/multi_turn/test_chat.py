"""What stands between two turns, and how a turn is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trl.chat_template_utils import add_response_schema, parse_response, qwen3_chat_template

from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.rollout.multi_turn.chat import Chat, PlainText, check_tools
from memsafe_rl.rollout.multi_turn.protocol import Message
from memsafe_rl.rollout.multi_turn.tools import tool_schemas
from memsafe_rl.rollout.multi_turn.turn_reading import encodable, message_of
from tests.rollout.multi_turn.helpers import FORGETFUL, TEMPLATE, chat_tokenizer
from tests.tiny import EOS_ID, tiny_tokenizer
from tests.trainers.helpers import make_trainer

QUESTION: Message = {"role": "user", "content": "how?"}
CHATML = (
    "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function | tojson }}</tool_call>{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def look_up(name: str, day: int = 1) -> str:
    """Looks a booking up.

    Args:
        name: of the guest.
        day: of the month.

    Returns:
        What is booked.
    """
    return f"{name} on {day}"


SCHEMAS = tool_schemas([look_up])


@pytest.mark.parametrize("template", [TEMPLATE, CHATML, NO_END])
@pytest.mark.parametrize(
    "seen",
    [
        [{"role": "user", "content": "and then?"}],
        [{"role": "tool", "name": "look_up", "content": "none"}],
        [{"role": "tool", "name": "look_up", "content": "none"}, {"role": "tool", "name": "look_up", "content": "two"}],
    ],
)
@pytest.mark.parametrize("calls", [False, True])
def test_what_follows_a_turn_is_what_the_template_would_have_written(
    template: str, seen: list[Message], calls: bool
) -> None:
    tokenizer = chat_tokenizer(template)
    chat = Chat(tokenizer)
    turn: Message = {"role": "assistant", "content": "like this"}
    said = "like this"
    if calls and template is not NO_END:
        turn["tool_calls"] = [{"type": "function", "function": {"name": "look_up", "arguments": {"name": "a"}}}]
        said += '<tool_call>{"name": "look_up", "arguments": {"name": "a"}}</tool_call>'
    drawn = [*tokenizer(said)["input_ids"], EOS_ID]
    told = chat.following(turn, EOS_ID, seen, SCHEMAS)
    assert told is not None
    whole = chat.first([QUESTION, turn, *seen], SCHEMAS)
    if template is NO_END:  # the eos that was drawn is no part of this template
        whole_text = tokenizer.decode(whole).replace("like this", "like this<eos>")
        whole = tokenizer(whole_text)["input_ids"]
    assert [*chat.first([QUESTION], SCHEMAS), *drawn, *told] == whole


def test_a_template_that_rewrites_what_was_said_is_rendered_anew() -> None:
    chat = Chat(chat_tokenizer(FORGETFUL))
    assert chat.following({"role": "assistant", "content": "x"}, EOS_ID, [QUESTION], ()) is None


THINKING = (
    "{% set asked = messages | map(attribute='role') | list %}{% set ns = namespace(last=-1) %}"
    "{% for role in asked %}{% if role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set said = m.content.split('</think>')[-1].strip('\n') %}"
    "{% set thoughts = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m.content else '' %}<start>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thoughts) %}"
    "<think>\n{{ thoughts }}\n</think>\n\n{% endif %}{{ said }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
"""Keeps thoughts behind the last question, drops earlier ones, and puts empty ones before a last turn, as Qwen3's."""


@pytest.mark.parametrize("said", ["<think>\nso\n</think>\n\nlike this", "like this"])
def test_thoughts_that_are_kept_while_tools_answer_make_one_sequence(said: str) -> None:
    tokenizer = chat_tokenizer(THINKING)
    chat = Chat(tokenizer)
    turn: Message = {"role": "assistant", "content": said}
    answer: Message = {"role": "tool", "name": "look_up", "content": "none"}
    told = chat.following(turn, EOS_ID, [answer], SCHEMAS)
    assert told is not None
    drawn = [*tokenizer(said)["input_ids"], EOS_ID]
    assert [*chat.first([QUESTION], SCHEMAS), *drawn, *told] == chat.first([QUESTION, turn, answer], SCHEMAS)
    assert chat.following(turn, EOS_ID, [QUESTION], SCHEMAS) is None  # which drops them


def test_plain_text_goes_on_as_text() -> None:
    tokenizer = tiny_tokenizer()
    plain = PlainText(tokenizer)
    assert plain.first([QUESTION], ()) == tokenizer("how?")["input_ids"]
    assert plain.following({}, EOS_ID, [QUESTION], ()) == tokenizer("how?")["input_ids"]
    with pytest.raises(ConfigError, match="Tools need conversational prompts"):
        plain.first([QUESTION], SCHEMAS)


@pytest.mark.parametrize(
    ("text", "calls", "malformed"),
    [
        ("hello", [], False),
        (
            'ok <tool_call>{"name": "look_up", "arguments": {"name": "a"}}</tool_call>',
            [("look_up", {"name": "a"})],
            False,
        ),
        ('<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>', [("f", {}), ("g", {})], False),
        ('<tool_call>{"name": </tool_call>', [], True),
        ('<tool_call>{"name": "f", "arguments": 3}</tool_call>', [], True),
        ('<tool_call>["f"]</tool_call>', [], True),
        ('<tool_call>{"name": "f"}', [], True),
    ],
)
def test_calls_are_read_from_tags(text: str, calls: list[Any], malformed: bool) -> None:
    tokenizer = chat_tokenizer()
    action = Chat(tokenizer).read([], [*tokenizer(text)["input_ids"], EOS_ID], SCHEMAS)
    assert [(call.name, dict(call.arguments)) for call in action.calls] == calls
    assert action.malformed is malformed
    assert action.message["role"] == "assistant"
    assert action.text == (text if malformed or not calls else text.split("<tool_call>", maxsplit=1)[0].strip())


def test_a_tokenizer_that_knows_how_to_read_its_turns_is_asked() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.response_template = {"anything": 1}
    asked = []

    def parse_response(ids: list[int], prefix: list[int], tools: list[Any]) -> Any:
        asked.append((ids, prefix, len(tools)))
        call = {"type": "function", "function": {"name": "look_up", "arguments": {"day": 7}}}
        return {"role": "assistant", "content": None, "thinking": "hm", "tool_calls": [call]}

    tokenizer.parse_response = parse_response
    action = Chat(tokenizer).read([5, 6], [7, EOS_ID], SCHEMAS)
    assert asked == [([7, EOS_ID], [5, 6], 1)]
    assert (action.calls[0].name, action.calls[0].arguments) == ("look_up", {"day": 7})
    assert (action.text, action.message["thinking"]) == ("", "hm")
    tokenizer.eos_token, tokenizer.parse_response = None, lambda *_, **__: {"content": "so"}
    assert Chat(tokenizer).read([5, 6], [7], SCHEMAS).text == "so"


@pytest.mark.parametrize(
    "text",
    [
        "<think>\nhm\n</think>\n\n2",
        "2<|im_end|>",
        "<think>\nhm",
        'so<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>{"name": </tool_call>',
        "",
    ],
)
def test_a_completion_is_read_as_trl_reads_it(text: str) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = qwen3_chat_template
    add_response_schema(tokenizer)
    asked = [{"role": "user", "content": "1+1"}]
    context = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
    ids = [*tokenizer(text)["input_ids"], EOS_ID]
    assert message_of(tokenizer, context, ids) == parse_response(tokenizer, ids, prefix=context)


def test_a_template_without_tools_is_refused() -> None:
    check_tools(Chat(chat_tokenizer()), SCHEMAS)
    with pytest.raises(ConfigError, match=r"leaves out the tools, so the model could not use 'look_up'"):
        check_tools(Chat(chat_tokenizer(CHATML)), SCHEMAS)
    blind = TEMPLATE.replace("{{ m.content }}", "{% if m.role != 'tool' %}{{ m.content }}{% endif %}")
    with pytest.raises(ConfigError, match="leaves out the results of tools"):
        check_tools(Chat(chat_tokenizer(blind)), SCHEMAS)
    with pytest.raises(DataError, match="no chat template"):
        Chat(tiny_tokenizer())


QWEN = TEMPLATE.replace("{{ call.function | tojson }}", "{{ call.function.arguments | tojson }}")
"""Renders the arguments alone, which must be there."""


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"name": "f"}', {}),
        ('{"name": "f", "arguments": {"a": "\\ud83d", "\\ud83d": ["\\udc00x"]}}', {"a": "?", "?": ["?x"]}),
        ('{"name": "f", "arguments": {"a": "\\ud83d\\ude00"}}', {"a": "\U0001f600"}),
        ('{"name": "f", "arguments": {"a": ' + "[" * 59 + "]" * 59 + "}}", None),
        ('{"name": "f", "arguments": {"a": ' + "[" * 900 + "]" * 900 + "}}", "malformed"),
        ("[" * 100_000, "malformed"),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "malformed"),
    ],
    ids=["no arguments", "halves", "a pair", "deep", "deeper", "deepest", "long number"],
)
@pytest.mark.parametrize("template", [QWEN, FORGETFUL.replace("call.function |", "call.function.arguments |")])
def test_whatever_the_model_writes_can_be_rendered(template: str, call: str, arguments: Any) -> None:
    tokenizer = chat_tokenizer(template)
    chat = Chat(tokenizer)
    action = chat.read([], [*tokenizer(f"<tool_call>{call}</tool_call>")["input_ids"], EOS_ID], SCHEMAS)
    assert action.malformed is (arguments == "malformed")
    if isinstance(arguments, dict):
        assert action.calls[0].arguments == arguments
        assert action.message["tool_calls"][0]["function"]["arguments"] == arguments
    answer: Message = {"role": "tool", "name": "f", "content": "none"}
    chat.following(action.message, EOS_ID, [answer], SCHEMAS)
    assert chat.first([QUESTION, action.message, answer], SCHEMAS)


def test_halves_of_pairs_are_replaced_and_nothing_else() -> None:
    given = [{"a": ("\ud800x", 3, None)}, "h\u00e9 \U0001f600"]
    assert encodable(given) == [{"a": ["?x", 3, None]}, "h\u00e9 \U0001f600"]


def test_messages_that_a_template_refuses_are_named() -> None:
    once = TEMPLATE.replace(
        "{{ m.role }}: ", "{% if m.role == 'user' and loop.index > 1 %}{{ raise_exception('one') }}{% endif %}"
    )
    chat = Chat(chat_tokenizer(once))
    turn: Message = {"role": "assistant", "content": "x"}
    assert chat.following(turn, EOS_ID, [QUESTION], ()) is None
    with pytest.raises(DataError, match=r"cannot render messages of the roles user, assistant, user: one Set proc"):
        chat.first([QUESTION, turn, QUESTION], ())
    with pytest.raises(DataError, match=r"renders nothing for messages of the roles user"):
        Chat(chat_tokenizer("{% if messages | length > 5 %}x{% endif %}")).first([QUESTION], ())


def test_schemas_without_a_name_are_refused() -> None:
    assert tool_schemas(look_up) == SCHEMAS  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no JSON schema of a function"):
        tool_schemas([{"a": 1}])


def test_a_tool_without_type_hints_is_refused() -> None:
    def bare(x):  # type: ignore[no-untyped-def]
        return x

    with pytest.raises(ConfigError, match=r"tool 'bare' cannot be described.*type hint"):
        tool_schemas([bare])


def test_rewards_of_a_plain_run_see_turns_as_the_tokenizer_reads_them(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.response_template = {"anything": 1}
    tokenizer.parse_response = lambda ids, prefix: {"content": f"{len(ids)} after {len(prefix)}", "thinking": "hm"}
    seen: list[Any] = []

    def paid(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.extend(zip(completions, map(len, completion_ids), strict=True))
        return [float(len(ids)) for ids in completion_ids]

    prompts = [{"prompt": [QUESTION]}] * 2
    make_trainer(tmp_path, reward_funcs=paid, train_dataset=prompts, processing_class=tokenizer, max_steps=1).train()
    context = len(Chat(tokenizer).first([QUESTION], ()))
    assert len(seen) == 8
    for turns, length in seen:
        assert turns == [{"role": "assistant", "thinking": "hm", "content": f"{length} after {context}"}]


PARTS_ALONE = TEMPLATE.replace(
    "{{ m.content }}", "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
)


def test_a_template_that_reads_parts_alone_is_given_parts() -> None:
    turn, seen = {"role": "assistant", "content": "four"}, [{"role": "user", "content": "and then?"}]
    plain, alone = (Chat(chat_tokenizer(template)) for template in (TEMPLATE, PARTS_ALONE))
    for messages in ([QUESTION], [QUESTION, turn, *seen]):
        assert alone.first(messages, ()) == plain.first(messages, ())
    assert alone.following(turn, EOS_ID, seen, ()) == plain.following(turn, EOS_ID, seen, ())


STRIPS = TEMPLATE.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")


@pytest.mark.parametrize(("said", "is_known"), [("four", True), ("<think>hm</think>four", False)])
def test_thoughts_that_a_template_always_drops_are_not_gone_on_behind(said: str, is_known: bool) -> None:
    """The next turn is drawn behind what the model would be shown; the thoughts stayed in its context."""
    chat = Chat(chat_tokenizer(STRIPS))
    told = chat.following({"role": "assistant", "content": said}, EOS_ID, [QUESTION], ())
    assert (told is not None) is is_known
