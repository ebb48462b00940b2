"""Runs the front desk by hand and, in miniature, the example itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples import agent_user_grpo as example
from memsafe_rl import Action, ToolCall

BOOKING = {"guest": "ada", "wish": "day", "room": 4, "day": 7, "price": 2}


def played(*turns: Action) -> float:
    desk = example.FrontDesk()
    desk.reset(BOOKING)
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages.append({"role": "assistant", "content": turn.text})
        if turn.calls:
            messages += desk.step(turn).observation  # type: ignore[union-attr, operator]
    desk.ended(messages)
    return desk.reward()


def test_the_desk_pays_for_looking_up_and_telling() -> None:
    ask, wrong = (Action("", (ToolCall("find", {"guest": guest}),)) for guest in ("ada", "bob"))
    assert played(ask, Action("your day is 7")) == pytest.approx(1.0)
    assert played(ask, Action("your room is 4")) == pytest.approx(0.2)
    assert played(wrong, Action("your day is 7")) == 0.0
    assert played(Action("your day is 7")) == 0.0


def test_the_warm_up_writes_what_the_template_writes() -> None:
    tokenizer = example.make_tokenizer()
    desk = example.FrontDesk()
    call = {"type": "function", "function": {"name": "find", "arguments": {"guest": "ada"}}}
    messages = [
        {"role": "system", "content": "serve guests"},
        {"role": "user", "content": example.guest_says(BOOKING)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "find", "content": example.told_by_tool(BOOKING)},
        {"role": "assistant", "content": "your day is 7"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tools=[desk.find], tokenize=False)
    view = example.agents_view(BOOKING, example.random.Random(0), 0.0)
    assert "".join(text for text, _ in view) == rendered


@pytest.mark.slow
def test_the_example_leaves_the_guest_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = example.settings

    def small(*place: Any) -> Any:
        config = whole(*place)
        config.per_device_train_batch_size, config.num_generations_eval, config.disable_tqdm = 16, 1, True
        return config

    monkeypatch.setattr(example, "settings", small)
    found = example.run(tmp_path, 0, 2, example.WarmUp(steps=3, batch=8), judged=4)
    assert found["guest_changed"] == 0.0
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "checkpoint-2" / "adapter_model.safetensors").stat().st_size > 0
