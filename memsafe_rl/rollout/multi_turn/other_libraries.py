"""Environments of other libraries, by their shape alone: gymnasium, and tau2-bench in half-duplex."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

from memsafe_rl.rollout.multi_turn.protocol import Action, Environment, Message, Observation, Step
from memsafe_rl.rollout.multi_turn.users import STOPS, CallableUser


class GymLike(Protocol):
    """An environment of gymnasium's shape."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode; returns an observation and more."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Returns observation, reward, whether it is over, whether it was cut, and more."""


def said(action: Action) -> str:
    """Takes what the agent said as the action."""
    return action.text.strip()


@dataclass(eq=False)
class GymEnvironment(Environment):
    """Plays an environment of gymnasium's shape: the agent's text is the action, the sum of rewards the reward.

    Args:
        env: the environment.
        read: turns an action into what `env.step` takes; may raise ValueError, which the agent is told.
        show: turns an observation into a text.
        seed_column: column of the dataset whose number seeds `env.reset`; None for none.
        blocking: whether it is called in a thread.
    """

    env: GymLike
    read: Callable[[Action], Any] = said
    show: Callable[[Any], str] = str
    _: KW_ONLY
    seed_column: str | None = "seed"
    blocking: bool = True
    _total = 0.0

    def __post_init__(self) -> None:
        self.called = type(self.env).__name__

    def reset(self, example: Mapping[str, Any]) -> Observation:
        """Begins an episode; the whole task is passed as `options`."""
        self._total = 0.0
        seed = None if self.seed_column is None else example.get(self.seed_column)
        return self.show(self.env.reset(seed=seed, options=dict(example))[0])

    def step(self, action: Action) -> Step:
        """Carries an action out; what cannot be read as one moves nothing."""
        try:
            chosen = self.read(action)
        except ValueError as error:
            return Step(str(error))
        seen, reward, terminated, truncated, _ = self.env.step(chosen)
        self._total += float(reward)
        return Step(self.show(seen), done=bool(terminated or truncated))

    def reward(self) -> float:
        """Returns the sum of the rewards since `reset`."""
        return self._total


class DuplexDomain(Protocol):
    """The environment of a tau2-shaped domain."""

    def get_policy(self) -> str:
        """Returns what the agent must keep to."""

    def get_tools(self) -> Sequence[Any]:
        """Returns the tools; each is a function, or has `openai_schema`."""

    def get_response(self, message: Any) -> Any:
        """Carries a tool call out; returns a message with `content` and maybe `error`."""


class DuplexUser(Protocol):
    """The user simulator of a tau2-shaped domain."""

    def get_init_state(self, message_history: list[Any] | None = None) -> Any:
        """Returns the state of a new conversation."""

    def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
        """Answers the agent's message; returns the user's message and the next state."""


@dataclass(frozen=True)
class DuplexMessage:
    """What is handed to a tau2-shaped user or environment."""

    role: str = "assistant"  # "assistant" or "user"
    content: str | None = None  # what was said
    id: str = ""  # of a tool call
    name: str = ""  # of the tool
    arguments: Mapping[str, Any] | None = None  # of the call
    requestor: str = "assistant"  # who calls


@dataclass(eq=False)
class HalfDuplex(Environment):
    """Plays a domain of tau2-bench's shape: greeting, then user and agent in turn, the agent's tool calls in between.

    The user simulator sees neither tool calls nor their results. One episode needs one domain and one user: `make`
    gives them anew at every reset.

    Args:
        make: takes the task; gives the domain's environment and its user.
        judge: takes the task, the domain and the conversation; gives the reward.
        greeting: what the agent says first, by itself; its tokens are excluded from the loss.
        stops: strings in the user's words that end the conversation.
        blocking: whether domain and user block, as calls of remote models do.
    """

    make: Callable[[Mapping[str, Any]], tuple[DuplexDomain, DuplexUser]]
    judge: Callable[[Mapping[str, Any], DuplexDomain, list[Message]], float]
    _: KW_ONLY
    greeting: str = "Hi! How can I help you today?"
    stops: Sequence[str] = STOPS
    blocking: bool = True

    def reset(self, example: Mapping[str, Any]) -> Observation:
        """Makes domain and user of a task; returns the domain's policy and the greeting."""
        self._example = example
        self._domain, self._simulator = self.make(example)
        self._state = self._simulator.get_init_state()
        self._calls = 0
        self.tools = [getattr(tool, "openai_schema", None) or tool for tool in self._domain.get_tools()]
        self.user = CallableUser(self._answer, stops=self.stops, blocking=self.blocking)
        greeting = {"role": "assistant", "content": self.greeting}
        return [{"role": "system", "content": self._domain.get_policy()}, greeting]

    def step(self, action: Action) -> Step:
        """Carries tool calls out in their order; returns one message a call."""
        results: list[Message] = []
        failures = 0
        for call in action.calls:
            self._calls += 1
            asked = DuplexMessage(id=f"call_{self._calls}", name=call.name, arguments=call.arguments)
            answer = self._domain.get_response(asked)
            failures += bool(getattr(answer, "error", False))
            results.append({"role": "tool", "name": call.name, "content": str(answer.content)})
        return Step(results, failures=failures)

    def ended(self, messages: list[Message]) -> None:
        """Keeps the conversation for the judge."""
        self._conversation = messages

    def reward(self) -> float:
        """Judges the conversation."""
        return self.judge(self._example, self._domain, self._conversation)

    def _answer(self, messages: list[Message]) -> str:
        heard = DuplexMessage(content=messages[-1]["content"])
        answer, self._state = self._simulator.generate_next_message(heard, self._state)
        return str(answer.content)
