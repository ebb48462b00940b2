"""Environments of gymnasium's and tau2-bench's shapes, by small doubles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memsafe_rl.rollout.multi_turn.episode import Ending
from memsafe_rl.rollout.multi_turn.lockstep import play
from memsafe_rl.rollout.multi_turn.other_libraries import GymEnvironment, HalfDuplex
from memsafe_rl.types import SequenceKey
from tests.rollout.multi_turn.helpers import beginning, chat_tokenizer, says, script, table

KEY = SequenceKey(0, 0, 0, 0)


class Corridor:
    """Gymnasium's shape: walk right to the end."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.place, self.given = seed or 0, options
        return self.place, {}

    def step(self, action: int) -> Any:
        self.place += action
        return self.place, 0.5 if action > 0 else -1.0, self.place >= 4, False, {}


def moves(action: Any) -> int:
    words = {"left": -1, "right": 1}
    if action.text not in words:
        raise ValueError("Say left or right.")
    return words[action.text]


def test_gymnasiums_loop() -> None:
    tokenizer, corridor = chat_tokenizer(), Corridor()
    environment = GymEnvironment(corridor, moves, "at {}".format)
    agent = says(tokenizer, script(KEY, "left", "up", "right", "right"))
    (episode,) = play([beginning(environment, seed=3, asked=None)], table(tokenizer, agent))
    seen = [message["content"] for message in (*episode.prompt, *episode.messages)]
    assert seen == ["at 3", "left", "at 2", "up", "Say left or right.", "right", "at 3", "right", "at 4"]
    assert (episode.ending, environment.reward(), environment.name) == (Ending.DONE, 0.0, "Corridor")
    assert corridor.given == {"seed": 3}


@dataclass
class Said:
    content: str
    error: bool = False


@dataclass
class Shop:
    """tau2's shape: a domain with a policy, a tool, and answers to calls."""

    stock: dict[str, int] = field(default_factory=lambda: {"tea": 2})
    asked: list[Any] = field(default_factory=list)

    def get_policy(self) -> str:
        return "sell"

    def get_tools(self) -> list[Any]:
        class Tool:
            openai_schema = {  # noqa: RUF012
                "type": "function",
                "function": {
                    "name": "sell",
                    "description": "Sells.",
                    "parameters": {"type": "object", "properties": {}},
                },
            }

        return [Tool()]

    def get_response(self, message: Any) -> Said:
        self.asked.append((message.id, message.name, dict(message.arguments), message.requestor))
        item = message.arguments["item"]
        if self.stock.get(item, 0) == 0:
            return Said(f"no {item}", error=True)
        self.stock[item] -= 1
        return Said("sold")


class Customer:
    """tau2's shape: a user simulator whose state is handed in and out."""

    def __init__(self, wish: str) -> None:
        self.wish = wish
        self.heard: list[str] = []

    def get_init_state(self, message_history: list[Any] | None = None) -> int:
        return 0

    def generate_next_message(self, message: Any, state: int) -> tuple[Said, int]:
        self.heard.append(message.content)
        return Said([f"a {self.wish}, please", "thanks ###STOP###"][state]), state + 1


def test_tau2s_half_duplex() -> None:
    tokenizer, made = chat_tokenizer(), []

    def make(example: Any) -> Any:
        made.append((Shop(), Customer(example["wish"])))
        return made[-1]

    def judge(example: Any, shop: Any, conversation: list[Any]) -> float:
        assert conversation[0] == {"role": "system", "content": "sell"}
        return float(shop.stock["tea"] == 1 and conversation[-1]["content"].startswith("thanks"))

    call = '<tool_call>{"name": "sell", "arguments": {"item": "%s"}}</tool_call>'
    environment = HalfDuplex(make, judge, blocking=False)
    agent = says(tokenizer, script(KEY, call % "ale", call % "tea", "here you are"))
    (episode,) = play([beginning(environment, wish="tea", asked=None)], table(tokenizer, agent, completion_tokens=500))
    shop, customer = made[0]
    assert [(message["role"], message["content"]) for message in (*episode.prompt, *episode.messages)] == [
        ("system", "sell"),
        ("assistant", "Hi! How can I help you today?"),
        ("user", "a tea, please"),
        ("assistant", ""),
        ("tool", "no ale"),
        ("assistant", ""),
        ("tool", "sold"),
        ("assistant", "here you are"),
        ("user", "thanks ###STOP###"),
    ]
    assert customer.heard == ["Hi! How can I help you today?", "here you are"]  # nothing of the tools
    assert [call[:2] for call in shop.asked] == [("call_1", "sell"), ("call_2", "sell")]
    assert (episode.tool_calls, episode.tool_failures, episode.segments[-1].completion.finished) == (2, 1, True)
    assert environment.reward() == 1.0
    # the greeting is no word of the model's: it stands in the prompt
    assert "Hi! How can I help" in tokenizer.decode(episode.segments[0].condition)
