"""Episodes that an agent of another library plays: it keeps the conversation, and asks for turns over HTTP."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from memsafe_rl.errors import MemsafeError
from memsafe_rl.rollout import refusal, unusable
from memsafe_rl.rollout.multi_turn.endpoint import ChatRequest, ChatServer
from memsafe_rl.rollout.multi_turn.protocol import Action, Environment, Message, Observation, Rewritten, Step, ToolCall

logger = logging.getLogger(__name__)

_OVER = (
    "the episode has reached a limit of the run: max_completion_length, max_turn_length, max_episode_turns or the "
    "model's context."
)
_MOST_FAILURES = 64
"""Agents that may fail one after another before a run ends that learns from none."""
_FAREWELL_SECONDS = 10.0
"""How long an agent may take to give its reward once its episode was cut."""


@dataclass(frozen=True)
class AgentClient:
    """What an agent needs to draw its turns from the model."""

    base_url: str  # of an endpoint in OpenAI's form, this episode's own
    api_key: str  # that it asks for
    model: str = "policy"  # a name for the model; any other does as well


Agent = Callable[[Mapping[str, Any], AgentClient], float | Awaitable[float | None] | None]
"""Plays an episode: takes the dataset's row and the client, gives the reward (None: none). Called in a thread."""


class AgentHarness:
    """Has agents of any library play the episodes: pass it as `environment_factory`.

    Each episode runs ``agent(example, client)`` in a thread of its own. The agent talks to ``client.base_url`` as to
    OpenAI's API (`openai.OpenAI(base_url=client.base_url, api_key=client.api_key)`, LangChain, any tool that takes a
    base URL); the turns it is given are drawn by the run's own engine, recorded with their token ids and log-probs, and
    trained on with the reward that it returns.

    Args:
        agent: plays one episode; a function or a coroutine function.
        host: address to listen at; only this machine's own unless `remote`.
        port: 0 for any that is free.
        token: key that requests must bear; None for a new random one.
        remote: whether the address may be one that other machines reach.
        timeout_seconds: longest wait for an agent's next request, after which its episode ends without a reward.

    Raises:
        ConfigError: the agent cannot be called, a number is out of range, or the address is not this machine's.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        remote: bool = False,
        timeout_seconds: float = 600.0,
    ) -> None:
        refusal.when(not callable(agent), "agent/call", agent=agent)
        known = isinstance(timeout_seconds, (int, float)) and timeout_seconds > 0
        refusal.when(not known, "agent/timeout", timeout_seconds=timeout_seconds)
        self.agent, self.timeout_seconds = agent, timeout_seconds
        self.server = ChatServer(host, port, token, remote=remote)
        self._told = False
        self._failures = 0  # since an agent last returned

    def __call__(self) -> Environment:
        """Makes the place of one episode at a time."""
        return AgentEpisode(self)

    def close(self) -> None:
        """Ends the endpoint."""
        self.server.close()

    def returned(self) -> None:
        """Takes note that an agent came to its end."""
        self._failures = 0

    def failed(self, error: BaseException) -> None:
        """Says once what agents fail with; their episodes have no reward."""
        self._failures, self._error = self._failures + 1, error
        if not self._told:
            self._told = True
            logger.warning("an agent failed, and its episode has no reward (further ones are not told): %r", error)

    def check(self) -> None:
        """Raises where no agent returns any more."""
        if self._failures >= _MOST_FAILURES:
            raise MemsafeError(
                f"{self._failures} agents in a row failed, the last with {self._error!r:.300}. Nothing can be "
                "learnt from them. Run the agent by hand on a row of the dataset to see why."
            )


class _Play:
    """One run of the agent, in a thread."""

    def __init__(self, harness: AgentHarness, example: Mapping[str, Any]) -> None:
        harness.check()
        self.harness = harness
        self.url, self.box = harness.server.open()
        self.over = threading.Event()
        self.failed = False
        self.reward: float | None = None
        client = AgentClient(self.url, harness.server.token)
        own = copy.deepcopy(dict(example))  # agents write into the prompt, which the row's other episodes have too
        threading.Thread(target=self._run, args=(own, client), name="memsafe-rl-agent", daemon=True).start()

    def _run(self, example: Mapping[str, Any], client: AgentClient) -> None:
        try:
            given: Any = self.harness.agent(example, client)
            self.reward = asyncio.run(_awaited(given)) if inspect.isawaitable(given) else given
            if not self.failed:
                self.harness.returned()
        except BaseException as error:
            self.fail(error)
        finally:
            self.over.set()
            self.box.wake()

    def next(self) -> ChatRequest | None:
        """Waits for the agent's next request; None where there is none."""
        request = self.box.take(self.over, self.harness.timeout_seconds)
        if request is None and not self.over.is_set() and not self.box.closed:
            self.fail(TimeoutError(f"no request for {self.harness.timeout_seconds:g} seconds"))
        return request

    def fail(self, error: BaseException) -> None:
        """Takes note that the episode has no reward, whatever the agent returns later."""
        self.failed = True
        self.harness.failed(error)


async def _awaited(given: Awaitable[Any]) -> Any:
    return await given


class AgentEpisode(Environment):
    """An episode that an agent plays."""

    blocking = conversational = True

    def __init__(self, harness: AgentHarness) -> None:
        self._harness = harness
        self._play: _Play | None = None
        self._request: ChatRequest | None = None
        self._given: Message | None = None

    def reset(self, example: Mapping[str, Any]) -> Observation:
        """Starts the agent, and waits for its first request."""
        self._play, self._given = _Play(self._harness, example), None
        seen = self._next()
        unusable.when(seen is None and self._play.over.is_set() and not self._play.failed, "agent/silent")
        return Rewritten(()) if seen is None else seen

    def step(self, action: Action) -> Step:
        """Returns the agent its turn, and waits for its next request or its end."""
        if self._request is not None:
            self._request.answer(action)
        self._given = action.message
        seen = self._next()
        return Step(seen, done=seen is None)

    def ended(self, messages: list[Message]) -> None:
        """Gives the agent a turn that was cut, and refuses what it asks for besides."""
        play, request = self._play, self._request
        if play is None:
            return
        if request is not None and not request.answered.is_set():
            last = messages[-1] if messages else {}
            if last.get("role") == "assistant" and last is not self._given:
                written = [call["function"] for call in last.get("tool_calls") or ()]
                calls = tuple(ToolCall(call["name"], call.get("arguments", {})) for call in written)
                request.answer(Action(str(last["content"]), calls, message=last), cut=True)
            else:
                request.refuse(_OVER)
        play.box.close(_OVER)

    def close(self) -> None:
        """Refuses what the agent still asks for, as after an error that ends the run."""
        if self._play is not None:
            self._play.box.close(_OVER)
            self._harness.server.forget(self._play.url)

    def reward(self) -> float | None:
        """Returns what the agent returned; None where it failed, or does not end."""
        play = self._play
        if play is None:
            return None
        if not play.over.wait(_FAREWELL_SECONDS):
            play.fail(TimeoutError("an agent went on after the end of its episode"))
        self._harness.server.forget(play.url)
        return None if play.failed else play.reward

    def _next(self) -> Rewritten | None:
        assert self._play is not None, "an episode is reset first"
        self._request = request = self._play.next()
        if request is None:
            return None
        self.tools = list(request.tools)
        return Rewritten(request.messages)
