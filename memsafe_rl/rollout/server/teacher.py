"""A teacher on a server: the log-probs that a model under `vllm serve` gives to tokens that another one drew."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor
from urllib3.util import Retry

from memsafe_rl.rollout import failure
from memsafe_rl.rollout.server.routes import Server, ServerError, connections

_THREADS = 32
_AGAIN = Retry(total=4, backoff_factor=0.5, status_forcelist=(429, 500, 502, 503, 504), allowed_methods=None)
"""What is asked for again: a log-prob changes nothing on the server."""


def taught_logprobs(url: str, timeout: float, rows: Sequence[tuple[list[int], int]]) -> list[Tensor]:
    """Scores rows of tokens, of each so many of the last ones; nats, at a temperature of 1."""
    with connections(_THREADS, _AGAIN) as session, ThreadPoolExecutor(_THREADS) as threads:
        server = Server(url.rstrip("/"), timeout, session, vocab_size=0)
        try:
            found = list(threads.map(partial(server.text_logprobs, server.model()), [ids for ids, _ in rows]))
        except ServerError as error:
            raise failure("teacher/server", reason=error) from error
        finally:
            threads.shutdown(cancel_futures=True)
    return [torch.tensor(one[len(one) - count :]) for one, (_, count) in zip(found, rows, strict=True)]
