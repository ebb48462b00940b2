"""One vLLM server: its routes over HTTP, and what of its answers is accepted."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from memsafe_rl.errors import MemsafeError
from memsafe_rl.rollout.external.sampling_support import completion_of, vllm_sampling
from memsafe_rl.types import Completion, SamplingSettings

KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable with the key that servers ask for, which vLLM itself reads too; never written anywhere."""

_POLL_SECONDS = 0.2
_TOLD = 300  # characters of a server's own words in a message


class ServerError(MemsafeError):
    """A server did not answer, or not as it must."""


@dataclass(frozen=True)
class Server:
    """A vLLM server."""

    url: str  # its address, without a path
    timeout: float  # longest wait for an answer, in seconds
    session: requests.Session  # holds its connections
    vocab_size: int  # how many token ids there are

    def wait(self) -> None:
        """Waits until the server is up."""
        until = time.monotonic() + self.timeout
        while True:
            try:
                self._call("GET", "/health")
                return
            except ServerError:
                if time.monotonic() >= until:
                    raise
                time.sleep(_POLL_SECONDS)

    def version(self) -> str:
        """Returns the label of the weights that the server says it has."""
        return str(self._read("GET", "/weight_info").get("weight_version"))

    def take(self, folder: Path, version: str) -> None:
        """Has the server load a folder of weights; one that cannot stays paused, and never draws with half of them."""
        self._call("POST", "/pause", params={"mode": "abort"})
        self._call(
            "POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder.resolve())}}
        )
        self._call("POST", "/reset_prefix_cache")
        self._call("POST", "/resume")
        self._call("POST", "/update_weight_version", {"new_version": version})  # last: what failed before is repeated

    def probe(self, ids: Sequence[int], version: str, temperature: float) -> tuple[list[float], int, float]:
        """Returns the log-probs, in nats, of a prompt's tokens but the first, and of a token drawn behind them."""
        name = f"probe-{version}"
        settings = SamplingSettings(1, (), temperature=temperature)
        answer = self._generate(name, ids, {**vllm_sampling(settings, seed=0), "prompt_logprobs": 0})
        drawn = self._completion(answer, name, settings, version)
        return self._of_prompt(answer, ids), int(drawn.ids[0]), float(drawn.logprobs[0])

    def model(self) -> str:
        """Returns the name of the model that the server has."""
        try:
            return str(self._read("GET", "/v1/models")["data"][0]["id"])
        except (KeyError, TypeError, IndexError):
            raise ServerError(f"{self.url} does not say which model it has") from None

    def text_logprobs(self, model: str, ids: Sequence[int]) -> list[float]:
        """Returns the log-probs, in nats, of all tokens of a text but the first, by the routes of any vLLM server."""
        asked = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        choices = self._read("POST", "/v1/completions", {"model": model, "prompt": list(ids), **asked}).get("choices")
        return self._of_prompt(choices[0] if isinstance(choices, list) and choices else None, ids)

    def _of_prompt(self, answer: Any, ids: Sequence[int]) -> list[float]:
        try:
            pairs = zip(ids[1:], answer["prompt_logprobs"][1:], strict=True)
            found = [float(entry[str(token)]["logprob"]) for token, entry in pairs]
            _check_logprobs(found)
            return found
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ServerError(f"{self.url} gave no log-probs of a prompt ({type(error).__name__}: {error})") from None

    def draw(self, name: str, ids: Sequence[int], settings: SamplingSettings, seed: int, version: str) -> Completion:
        """Draws one completion."""
        return self._completion(self._generate(name, ids, vllm_sampling(settings, seed)), name, settings, version)

    def _generate(self, name: str, ids: Sequence[int], params: Mapping[str, Any]) -> dict[str, Any]:
        body = {"request_id": name, "token_ids": list(ids), "sampling_params": params, "stream": False}
        try:
            return self._read("POST", "/inference/v1/generate", body)
        except ServerError as error:
            if isinstance(error.__cause__, requests.Timeout):
                self._abort(name)  # a client's timeout does not end the work
            raise

    def _abort(self, name: str) -> None:
        try:
            self._call("POST", "/abort_requests", {"request_ids": [f"generate-tokens-{name}"]}, longest=1.0)
        except ServerError as error:
            raise ServerError(
                f"{self.url} did not answer within {self.timeout:g} s, nor end the work: {error}"
            ) from None

    def _completion(self, answer: Mapping[str, Any], name: str, settings: SamplingSettings, version: str) -> Completion:
        """Reads an answer; refuses all that is not exactly one completion of this request."""
        try:
            if not str(answer["request_id"]).endswith(name):
                raise ValueError(f"it answers the request {answer['request_id']!r}, not {name!r}")
            (choice,) = answer["choices"]
            tokens = [int(token) for token in choice["token_ids"]]
            if unknown := [token for token in tokens if not 0 <= token < self.vocab_size]:
                raise ValueError(f"the vocabulary of {self.vocab_size} has no token {unknown[0]}")
            _check_version(choice.get("weight_versions"), len(tokens), version)
            _check_end(tokens, str(choice["finish_reason"]), settings)
            entries = choice["logprobs"]["content"]
            logprobs = [float(entry["logprob"]) for _, entry in zip(tokens, entries, strict=True)]
            if any(entry.get("token_id", token) != token for token, entry in zip(tokens, entries, strict=True)):
                raise ValueError("its log-probs are of other tokens")
            _check_logprobs(logprobs)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ServerError(f"{self.url} gave an answer that is refused: {error}") from None
        return completion_of(tokens, logprobs, settings, finished=tokens[-1] in settings.eos_token_ids)

    def _read(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        answer = self._call(method, route, body)
        try:
            content = answer.json()
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{self.url}{route} did not answer in JSON: {error}") from None
        if not isinstance(content, dict):
            raise ServerError(f"{self.url}{route} answered {str(content)[:_TOLD]!r}")
        return content

    def _call(
        self,
        method: str,
        route: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        longest: float | None = None,
    ) -> requests.Response:
        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else None
        try:
            answer = self.session.request(
                method, self.url + route, json=body, params=params, headers=headers, timeout=longest or self.timeout
            )
        except requests.RequestException as error:
            raise ServerError(f"{self.url}{route}: {type(error).__name__}: {error}") from error
        if answer.status_code == 404 and not route.startswith("/v1/"):
            raise ServerError(
                f"{self.url}{route} does not exist there. Start the server with --enable-scale-out and with "
                "VLLM_SERVER_DEV_MODE=1 in its environment."
            )
        if not answer.ok:
            raise ServerError(f"{self.url}{route} answered {answer.status_code}: {answer.text[:_TOLD]}")
        return answer


def connections(threads: int, again: Retry | None = None) -> requests.Session:
    """Returns a session for so many threads, and for what is asked for again."""
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=threads, max_retries=again or 0))
    return session


def _check_logprobs(logprobs: Sequence[float]) -> None:
    if not all(math.isfinite(logprob) and logprob <= 1e-3 for logprob in logprobs):
        raise ValueError("a log-prob is above 0 or not finite")


def _check_version(spans: Any, tokens: int, version: str) -> None:
    """Refuses tokens that other weights drew, or that do not say which."""
    end = 0
    for span in spans or ():
        label = span.get("version", span.get("weight_version"))
        if str(label) != version:
            raise ValueError(
                f"its tokens {span['start']} to {span['end']} carry the weights {label!r}, not {version!r}"
            )
        if span["start"] != end:
            raise ValueError(f"it does not say which weights drew token {end}")
        end = int(span["end"])
    if tokens == 0 or end != tokens:
        raise ValueError(f"it says of {end} tokens which weights drew them, and has {tokens}")


def _check_end(tokens: Sequence[int], reason: str, settings: SamplingSettings) -> None:
    """Refuses completions that end nowhere, go on after their end, or were cut off by something else."""
    ended = tokens[-1] in settings.eos_token_ids
    if any(token in settings.eos_token_ids for token in tokens[:-1]):
        raise ValueError("it goes on after its end")
    if len(tokens) > settings.max_new_tokens or (not ended and len(tokens) != settings.max_new_tokens):
        raise ValueError(f"it has {len(tokens)} of {settings.max_new_tokens} tokens and no end ({reason})")
    if reason not in ("stop", "length"):
        raise ValueError(f"it was ended by {reason!r}")
