"""A server with vLLM's routes, over real HTTP in this process: it draws from its own model, and fails on demand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file

from tests.rollout.external.common import small_model


class _Http(ThreadingHTTPServer):
    request_queue_size = 128  # connections that wait: clients open 64 at once


class FakeServer:
    """Its weights are random until it is given others; ``spoil`` changes an answer before it is sent."""

    def __init__(self, port: int = 0, *, tied: bool = False) -> None:
        self.model = small_model(tied=tied, seed=77)
        self.version = "default"
        self.asked: list[str] = []  # routes, in order
        self.aborted: list[str] = []
        self.keys: list[str | None] = []
        self.spoil: Callable[[dict[str, Any]], dict[str, Any]] = dict
        self.dies_after: int | None = None  # completions
        self.fails: set[str] = set()  # routes that answer 500
        self.fails_once: set[str] = set()  # routes that answer 503, and then as ever
        self.paused = False
        self.slow = 0.0  # seconds
        self.stumbles = 0  # texts that it answers 503 first
        self.drops: set[str] = set()  # tensors it does not load
        self.drawn = 0
        self._lock = threading.Lock()
        self._http = _Http(("127.0.0.1", port), _handler(self))
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()
        self._alive = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """Closes the port: later connections are refused."""
        if self._alive:
            self._alive = False
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()

    def answer(self, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.asked.append(route)
        if not self._alive or route in self.fails:
            return 500, {"error": "the engine is dead"}
        if route in self.fails_once:
            self.fails_once.remove(route)
            return 503, {"error": "busy"}
        if route in ("/pause", "/resume"):
            self.paused = route == "/pause"
        if route == "/collective_rpc":
            weights = {}
            for path in sorted(Path(body["kwargs"]["weights_path"]).glob("*.safetensors")):
                weights |= load_file(path)
            kept = {name: tensor for name, tensor in weights.items() if name not in self.drops}
            self.model.load_state_dict(kept, strict=False)
        elif route == "/update_weight_version":
            self.version = body["new_version"]
        elif route == "/weight_info":
            return 200, {"weight_version": self.version}
        elif route == "/abort_requests":
            self.aborted += body["request_ids"]
        elif route == "/inference/v1/generate":
            return self._generate(body)
        elif route == "/v1/models":
            return 200, {"data": [{"id": "teacher"}]}
        elif route == "/v1/completions":
            return self._score(body)
        return 200, {}

    def _score(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        assert body["model"] == "teacher"
        with self._lock:
            if self.stumbles:
                self.stumbles -= 1
                return 503, {"error": "come back later"}
            own = prompt_logprobs(self.model, body["prompt"])
        return 200, self.spoil({"choices": [{"index": 0, "text": "a", "prompt_logprobs": own}]})

    def _generate(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        params = body["sampling_params"]
        probes = "prompt_logprobs" in params
        with self._lock:
            if not probes and self.dies_after is not None and self.drawn >= self.dies_after:
                return 500, {"error": "the engine is dead"}
            if self.paused:
                return 503, {"error": "paused"}
            self.drawn += not probes
        if not probes:
            time.sleep(self.slow)
        answer = draw(self.model, body, self.version)
        return 200, answer if probes else self.spoil(answer)


@torch.no_grad()
def draw(model: Any, body: dict[str, Any], version: str) -> dict[str, Any]:
    """Draws as a server does: what comes depends on prompt, seed and weights alone."""
    params, ids_L = body["sampling_params"], torch.tensor(body["token_ids"])
    chosen = torch.Generator().manual_seed(params["seed"])
    start, content = len(ids_L), []
    for _ in range(params["max_tokens"]):
        logprobs_V = (model(ids_L[None]).logits[0, -1] / params["temperature"]).log_softmax(-1)
        token = int(logprobs_V.exp().multinomial(1, generator=chosen))
        content.append({"token_id": token, "logprob": float(logprobs_V[token])})
        ids_L = torch.cat([ids_L, torch.tensor([token])])
        if token in params["stop_token_ids"]:
            break
    return {
        "request_id": f"generate-tokens-{body['request_id']}",
        "choices": [
            {
                "index": 0,
                "token_ids": ids_L[start:].tolist(),
                "logprobs": {"content": content},
                "finish_reason": "stop" if content[-1]["token_id"] in params["stop_token_ids"] else "length",
                "weight_versions": [{"version": version, "start": 0, "end": len(content)}],
            }
        ],
        "prompt_logprobs": prompt_logprobs(model, body["token_ids"]),
    }


@torch.no_grad()
def prompt_logprobs(model: Any, ids: list[int]) -> list[Any]:
    """Returns what a server says of a prompt's tokens; nothing of the first."""
    rows_LV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [None, *({str(token): {"logprob": float(row[token])}} for token, row in zip(ids[1:], rows_LV, strict=False))]


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            self._answer(json.loads(self.rfile.read(length) or b"{}"))

        def _answer(self, body: dict[str, Any]) -> None:
            server.keys.append(self.headers.get("Authorization"))
            status, content = server.answer(urlsplit(self.path).path, body)
            written = json.dumps(content).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(written)))
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(written)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # the client has gone, as after its timeout

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    return Handler
