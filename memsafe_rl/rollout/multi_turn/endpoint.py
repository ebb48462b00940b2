"""A local endpoint in OpenAI's form, through which agents of any library draw turns from the model in training."""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any

from memsafe_rl.rollout import refusal
from memsafe_rl.rollout.multi_turn.chat import as_template
from memsafe_rl.rollout.multi_turn.protocol import Action, Message
from memsafe_rl.rollout.multi_turn.tools import tool_schemas
from memsafe_rl.rollout.multi_turn.turn_reading import UNREADABLE, check_depth, encodable

logger = logging.getLogger(__name__)

_LARGEST_BODY = 16 * 2**20
"""Bytes of the largest request that is read."""

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "max_completion_tokens"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "response_format"),
)
"""What a request may ask of the sampler; the run's own settings are used, or the samples were not the model's."""

_LEFT_OUT = ("refusal", "thinking", "reasoning")
"""Parts of a content that the model does not see again."""


class RefusedError(Exception):
    """A request that is answered by an error, as OpenAI spells it."""

    def __init__(self, code: str, reason: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(reason)
        self.status, self.body = status, {"error": {"message": reason, "type": "invalid_request_error", "code": code}}


@dataclass(eq=False)
class ChatRequest:
    """One turn that an agent asks for, and who waits for it."""

    messages: tuple[Message, ...]  # the agent's whole conversation, as chat templates want it
    tools: tuple[Mapping[str, Any], ...]  # JSON schemas of the tools that the model may call
    answered: threading.Event = field(default_factory=threading.Event)
    action: Action | None = None  # the turn that was drawn
    cut: bool = False  # whether it was cut at its longest length
    refused: RefusedError | None = None  # why there is none
    answers: int = 0  # that have reached the agent, or are on their way

    def answer(self, action: Action, *, cut: bool = False) -> None:
        """Gives the turn to whoever waits."""
        self.action, self.cut = action, cut
        self.answered.set()

    def refuse(self, reason: str) -> None:
        """Has whoever waits know that there will be no turn."""
        self.refused = RefusedError("episode_over", reason)
        self.answered.set()

    def asks_the_same(self, other: ChatRequest) -> bool:
        """Whether two requests have one conversation and the same tools."""
        return self.messages == other.messages and self.tools == other.tools


class Mailbox:
    """Requests of one episode, in their order; one that is sent twice is drawn once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[ChatRequest] = []
        self._keyed: dict[str, ChatRequest] = {}
        self._taken: list[ChatRequest] = []
        self._closed = ""

    def put(self, request: ChatRequest, *, key: str = "", again: bool | None = None) -> ChatRequest:
        """Returns the request to wait for: this one, or the one that it repeats by key, by ``again``, or in haste."""
        with self._changed:
            if key and key in self._keyed:
                return self._keyed[key]
            lost = (one for one in reversed(self._taken) if not one.answers)
            for earlier in () if key or again is False else (*self._waiting, *self._taken[-1:], *lost):
                if earlier.asks_the_same(request) and (again or not earlier.answers):
                    return earlier
            if key:
                self._keyed[key] = request
            if self._closed:
                request.refuse(self._closed)
                return request
            self._waiting.append(request)
            self._changed.notify_all()
            return request

    def take(self, over: threading.Event, seconds: float) -> ChatRequest | None:
        """Waits for the next request; None once the agent or the box is done, or nothing comes for so long."""
        last = time.monotonic() + seconds
        with self._changed:
            while not (self._waiting or self._closed or over.is_set()) and (left := last - time.monotonic()) > 0:
                self._changed.wait(min(left, 0.5))
            if not self._waiting:
                return None
            self._taken.append(self._waiting.pop(0))
            return self._taken[-1]

    def wake(self) -> None:
        """Has whoever waits look again."""
        with self._changed:
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether it refuses what comes."""
        return bool(self._closed)

    def close(self, reason: str) -> None:
        """Refuses what waits, and all that comes; whoever waits for requests goes on."""
        with self._changed:
            self._closed = reason
            for request in (*self._waiting, *self._taken):
                if not request.answered.is_set():
                    request.refuse(reason)
            self._waiting.clear()
            self._changed.notify_all()


class ChatServer:
    """Serves `/v1/chat/completions`, at one address an episode, to whoever knows the token; see `AgentHarness`."""

    def __init__(self, host: str, port: int, token: str | None, *, remote: bool) -> None:
        refusal.when(not remote and host != "localhost" and not _is_loopback(host), "endpoint/host", host=host)
        self.token = token or secrets.token_urlsafe(24)
        self._boxes: dict[str, Mailbox] = {}
        try:
            self._http = _HTTPServer((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise refusal("endpoint/listen", host=host, port=port, error=error) from error
        self._http.owner = self
        self._told = False
        self.root = f"http://{host}:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, name="memsafe-rl-endpoint", daemon=True).start()

    def open(self) -> tuple[str, Mailbox]:
        """Returns the address of a new episode, and where its requests arrive."""
        name = secrets.token_hex(8)
        self._boxes[name] = box = Mailbox()
        return f"{self.root}/{name}/v1", box

    def forget(self, url: str) -> None:
        """Ends an episode's address."""
        self._boxes.pop(url.split("/")[-2], None)

    def close(self) -> None:
        """Ends the server; whoever waits for a turn is refused."""
        for box in list(self._boxes.values()):
            box.close("the endpoint is closed.")
        self._http.shutdown()
        self._http.server_close()

    def box(self, path: str, bearer: str) -> Mailbox:
        """Finds an episode by its address; raises RefusedError without the token or where there is none."""
        if not hmac.compare_digest(bearer.encode(), f"Bearer {self.token}".encode()):
            raise RefusedError("invalid_api_key", "the API key is not this endpoint's.", HTTPStatus.UNAUTHORIZED)
        parts = path.strip("/").split("/")
        if len(parts) != 4 or parts[1:] != ["v1", "chat", "completions"]:
            raise RefusedError("unknown_url", f"{path} is not served, chat completions are.", HTTPStatus.NOT_FOUND)
        if parts[0] not in self._boxes:
            raise RefusedError("episode_over", "this episode is over.")
        return self._boxes[parts[0]]

    def note_sampling(self, body: Mapping[str, Any]) -> None:
        """Says once that the run's sampling holds."""
        asked = [name for name in _SAMPLING if body.get(name) is not None]
        if asked and not self._told:
            self._told = True
            logger.warning("an agent sets %s: the run's own sampling and lengths are used instead.", ", ".join(asked))


class _HTTPServer(ThreadingHTTPServer):
    """The server, which knows whose it is."""

    daemon_threads = True
    request_queue_size = 128
    owner: ChatServer


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    protocol_version = "HTTP/1.1"
    server: _HTTPServer

    def do_POST(self) -> None:
        """Waits for the turn that a request asks for, and gives it."""
        body: Mapping[str, Any] = {}
        request = None
        try:
            raw = self._read()
            box = self.server.owner.box(self.path, self.headers.get("Authorization", ""))
            body = _parsed(raw)
            tries = self.headers.get("x-stainless-retry-count")  # OpenAI's clients count them
            request = box.put(
                read_request(body),
                key=self.headers.get("Idempotency-Key", ""),
                again=None if tries is None else tries != "0",
            )
            self.server.owner.note_sampling(body)
            request.answered.wait()
            if request.refused is not None:
                raise request.refused
            status, answer = HTTPStatus.OK, completion(request, str(body.get("model", "")), bool(body.get("logprobs")))
        except RefusedError as error:
            status, answer = error.status, error.body
        # Counted before it is sent: whoever has an answer may ask for another turn behind the same conversation.
        delivery = request or ChatRequest((), ())
        delivery.answers += 1
        try:
            self._write(status, answer, stream=bool(body.get("stream")) and status is HTTPStatus.OK)
        except OSError:  # the agent has hung up; it may ask again
            delivery.answers -= 1
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Writes nothing: requests hold the data."""

    def _read(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > 20 or int(length) > _LARGEST_BODY:
            self.close_connection = True
            what = f"of {length:.20} bytes" if length else "without Content-Length"
            raise RefusedError(
                "too_large", f"a body {what} is not read; {_LARGEST_BODY} are.", HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            )
        return self.rfile.read(int(length))

    def _write(self, status: HTTPStatus, answer: Mapping[str, Any], *, stream: bool) -> None:
        kind, text = "application/json", json.dumps(answer)
        if stream:
            kind, text = "text/event-stream", f"data: {json.dumps(_chunk(answer))}\n\ndata: [DONE]\n\n"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())
        self.wfile.flush()


def _parsed(raw: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RefusedError("invalid_json", f"the body is no JSON: {error}") from error
    if not isinstance(body, Mapping):
        raise RefusedError("invalid_json", "the body is no JSON object.")
    return body


def read_request(body: Mapping[str, Any]) -> ChatRequest:
    """Reads a request in OpenAI's form; refuses one for what a turn of an episode cannot be, or without messages."""
    messages, count = body.get("messages"), body.get("n")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise RefusedError("invalid_messages", "messages is no list of messages.")
    if any(not isinstance(one.get("role"), str) for one in messages):
        raise RefusedError("invalid_messages", "a message has no role.")
    if count not in (None, 1):
        raise RefusedError("invalid_n", f"n is {count!r}; an episode takes one turn at a time.")
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        reason = f"tool_choice is {choice!r:.100}, but what the model draws cannot be forced. Leave it out."
        raise RefusedError("invalid_tool_choice", reason)
    return ChatRequest(_conversation(messages), _tools([] if choice == "none" else tools))


def _conversation(messages: list[dict[str, Any]]) -> tuple[Message, ...]:
    for part in (part for one in messages if isinstance(one.get("content"), list) for part in one["content"]):
        if not (isinstance(part, dict) and ("text" in part or part.get("type") in _LEFT_OUT)):
            reason = f"the model reads text; a content has a part that is none: {part!r:.100}"
            raise RefusedError("invalid_content", reason)
    try:
        found = as_template(messages)
        for one in found:
            check_depth(one)
    except UNREADABLE as error:
        raise RefusedError("invalid_messages", f"messages cannot be read: {error!r:.200}") from error
    return found


def _tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
        raise RefusedError("invalid_tools", "tools is no list of tools.")
    try:
        check_depth(tools)
        return tuple(tool_schemas(encodable(tools)))
    except ValueError as error:  # ConfigError is one
        raise RefusedError("invalid_tools", str(error)) from error


def completion(request: ChatRequest, model: str, with_logprobs: bool) -> dict[str, Any]:
    """Writes an answered request in OpenAI's form; its ``token_ids`` and ``prompt_token_ids`` are the true ids."""
    action = request.action
    assert action is not None, "an answered request has a turn"
    calls = [
        {
            "id": f"call_{secrets.token_hex(6)}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for call in action.calls
    ]
    message = {"role": "assistant", "content": action.text, **({"tool_calls": calls} if calls else {})}
    said = action.message.get("reasoning_content") or action.message.get("thinking")
    message |= {"reasoning_content": said} if said else {}
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "finish_reason": "length" if request.cut else "tool_calls" if calls else "stop",
        "token_ids": list(action.ids),
    }
    if with_logprobs:
        pairs = zip(action.ids, action.logprobs, strict=True)
        told = [{"token": f"token_id:{one}", "logprob": value, "top_logprobs": []} for one, value in pairs]
        choice["logprobs"] = {"content": told}
    counts = len(action.prompt_ids), len(action.ids)
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "prompt_token_ids": list(action.prompt_ids),
        "usage": dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), (*counts, sum(counts)), strict=True)),
    }


def _chunk(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Writes a whole completion as the only chunk of a stream."""
    choice = dict(answer["choices"][0])
    delta = choice.pop("message")
    delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta.get("tool_calls", ()))]
    return {**answer, "object": "chat.completion.chunk", "choices": [{**choice, "delta": delta}]}


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
