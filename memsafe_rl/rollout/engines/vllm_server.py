"""vLLM servers as the rollout engine: any that has the run's weights draws a row, else the own engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.models.language.causal_lm import causal_lm_of
from memsafe_rl.models.module_state import eval_mode
from memsafe_rl.rollout import failure
from memsafe_rl.rollout.engine import ENGINES, Engine, EngineContext, RolloutEngine, register_engine
from memsafe_rl.rollout.external.function_engine import LIMITS, EngineRequest, FunctionEngine, Row, request_of, seed_of
from memsafe_rl.rollout.external.sampling_support import FILTERS, refuse_other_networks
from memsafe_rl.rollout.external.vllm_weights import is_whole, refuse_unmergeable, written
from memsafe_rl.rollout.server.routes import Server, ServerError, connections
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings, SequenceKey

logger = logging.getLogger(__name__)

NAME = "vllm_server"

_THREADS = 64  # requests under way at once, over all servers
_PASSES = 2  # the second is for servers that came back
_PROBED_TOKENS = 16
_WRITES = 2  # of the same weights, before the disk is blamed
_EXACT, _ROUNDED = 1e-3, 0.1  # nats by which the probe may be off on average; rounded: in 16 bits


class Servers:
    """Draws the rows of a rollout on servers; what has been answered is kept while a rollout is repeated."""

    def __init__(self, context: EngineContext, own: RolloutEngine) -> None:
        refuse_unmergeable(context.adapter.model)
        self._adapter, self._config, self._own = context.adapter, context.config, own
        # at the same path on the servers' machines
        self._folder = Path(self._config.vllm_server_weights_dir or Path(self._config.output_dir) / "vllm_weights")
        rounded = self._config.bf16 or self._config.fp16 or next(self._adapter.model.parameters()).dtype.itemsize < 4
        self._tolerance = _ROUNDED if rounded else _EXACT
        self._step: int | None = None
        self._weights: tuple[Path, str] | None = None  # folder and label of the newest weights written
        self._probe: list[float] = []  # what the model itself says of the probe under them
        self._next = torch.zeros(0)  # and its logits of what follows
        self._met = False  # whether any server has served this run
        self._handed: set[str] = set()  # addresses of those that this process has given weights
        self._request: EngineRequest | None = None
        self._answered: dict[Row, Completion] = {}
        self._under_way: _Pass | None = None  # of a rollout that is not due yet
        self._connections = ExitStack()  # to the servers that draw it
        self._ahead: dict[SequenceKey, Completion] = {}  # what has been drawn of it

    def synchronise(self, step: int) -> None:
        """Forgets the weights written before if an optimizer step has moved them; the next draw writes them."""
        if step != self._step:
            self._step, self._weights = step, None

    def close(self) -> None:
        """Forgets which weights were written, and what was drawn ahead."""
        self._step = self._weights = None
        self._forget_ahead()

    def begin(
        self,
        prompts: Sequence[Tensor],
        keys: Sequence[Sequence[SequenceKey]],
        settings: SamplingSettings,
        plan: RolloutPlan,
    ) -> None:
        """Hands the weights over and asks for a rollout that is not due yet; see `DrawsAhead.begin`."""
        self._forget_ahead()
        request, reasons = request_of(prompts, keys, settings, self._adapter.geometry), dict[str, str]()
        with ExitStack() as opened:
            servers = opened.enter_context(_servers(self._config, self._adapter.geometry.vocab_size))
            with torch.no_grad(), eval_mode(self._adapter.model):
                ready = self._prepared(servers, reasons)
            if not ready:
                logger.warning("No vLLM server draws ahead: %s", "; ".join(reasons.values()))
                return
            self._under_way = _Pass(ready, request, self._label, reasons, request.rows, plan)
            self._connections = opened.pop_all()

    def drawn(self) -> Mapping[SequenceKey, Completion]:
        """Waits for what is under way; see `DrawsAhead.drawn`."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return self._ahead
        with self._connections:
            missing = self._keep(under_way)
            if missing:
                missing = self._keep(under_way.again(missing))
        if missing:
            logger.warning(
                "%d of %d completions were not drawn ahead and are drawn with newer weights: %s",
                len(missing),
                len(under_way.request.rows),
                "; ".join(under_way.reasons.values()),
            )
        return self._ahead

    def _keep(self, under_way: _Pass) -> list[Row]:
        """Keeps what is drawn ahead; returns the rows that no server answered."""
        key = under_way.request.key
        self._ahead |= {key(row): completion for row, completion in under_way.answers()}
        return [row for row in under_way.rows if key(row) not in self._ahead]

    def restore(self, drawn: Mapping[SequenceKey, Completion]) -> None:
        """Takes over what was drawn ahead before a checkpoint; see `DrawsAhead.restore`."""
        self._forget_ahead()
        self._ahead = dict(drawn)

    def _forget_ahead(self) -> None:
        if self._under_way is not None:
            self._under_way.cancel()
        self._connections.close()
        self._under_way, self._ahead = None, {}

    def draw(self, request: EngineRequest, plan: RolloutPlan) -> list[Completion]:
        """Draws one completion for each row."""
        self.drawn()  # servers whose weights may be replaced below finish first
        if self._request is not request:
            self._request, known = request, [row for row in request.rows if request.key(row) in self._ahead]
            self._answered = {row: self._ahead.pop(request.key(row)) for row in known}
        reasons: dict[str, str] = {}
        with _servers(self._config, self._adapter.geometry.vocab_size) as servers:
            for _ in range(_PASSES):
                missing = [row for row in request.rows if row not in self._answered]
                if not missing:
                    break
                ready = self._prepared(servers, reasons)
                if ready:
                    for row, completion in _Pass(ready, request, self._label, reasons, missing, plan).answers():
                        self._answered[row] = completion
                        if request.progress is not None:
                            request.progress(len(self._answered), len(request.rows))
        missing = [row for row in request.rows if row not in self._answered]
        if missing:
            self._draw_here(missing, request, plan, reasons)
        answered, self._request, self._answered = self._answered, None, {}
        return [answered[row] for row in request.rows]

    @property
    def _label(self) -> str:
        if self._weights is None:
            self._probe = self._own_logprobs()
            self._weights = written(self._adapter.model, self._folder, self._step or 0)
        return self._weights[1]

    def _prepared(self, servers: Sequence[Server], reasons: dict[str, str]) -> list[Server]:
        """Returns the servers that have the weights, and proves it, after handing them over where they do not."""
        ready = []
        for server in servers:
            try:
                self._prepare(server)
                ready.append(server)
            except ServerError as error:
                reasons[server.url] = str(error)
        self._met = self._met or bool(ready)
        return ready

    def _prepare(self, server: Server) -> None:
        if not self._met:
            server.wait()
        if server.url not in self._handed or server.version() != self._label:  # a killed process leaves servers paused
            server.take(*self._whole_weights())
            self._handed.add(server.url)
        label = self._label
        temperature = self._config.temperature or 1.0  # at 0 none counts
        found, token, drawn = server.probe(self._probed_ids(), label, temperature)
        given = torch.tensor(found, dtype=torch.float64)
        gap = float((given - torch.tensor(self._probe, dtype=torch.float64)).abs().mean())
        if not gap <= self._tolerance:
            raise ServerError(
                f"{server.url} says that it has the weights {label!r}, but its log-probs of a fixed prompt lie "
                f"{gap:.3g} nats from the model's own on average, more than {self._tolerance:g}: it "
                "dropped or kept some, or computes in another type"
            )
        plain, right = (float((self._next / heat).log_softmax(-1)[token]) for heat in (1.0, temperature))
        if abs(drawn - right) > self._tolerance and abs(drawn - plain) < abs(drawn - right):
            raise ServerError(
                f"{server.url} gives log-probs before the temperature, {drawn:.3g} nats where its sampler had "
                f"{right:.3g}; start it with --logprobs-mode processed_logprobs"
            )

    def _whole_weights(self) -> tuple[Path, str]:
        """Returns folder and label of the weights, read back, and written again unless they are what was written."""
        for _ in range(_WRITES):
            label = self._label
            assert self._weights is not None
            if is_whole(*self._weights):
                return self._weights
            logger.warning("The weights %s in %s are damaged", label, self._folder)
            self._weights = None
        raise failure("server/disk", folder=str(self._folder))

    def _probed_ids(self) -> list[int]:
        vocab = self._adapter.geometry.vocab_size
        return [(7 + 9973 * place * place) % vocab for place in range(_PROBED_TOKENS)]

    def _own_logprobs(self) -> list[float]:
        ids_L = torch.tensor(self._probed_ids(), device=self._adapter.device)
        logits_LV = causal_lm_of(self._adapter.model)(input_ids=ids_L[None], use_cache=False).logits[0]
        self._next = logits_LV[-1].double().cpu()
        return list(map(float, logits_LV[:-1].float().log_softmax(-1).gather(1, ids_L[1:, None])[:, 0]))

    def _draw_here(
        self, rows: Sequence[Row], request: EngineRequest, plan: RolloutPlan, reasons: dict[str, str]
    ) -> None:
        told = "; ".join(reasons.values())
        falls_back = self._met and self._config.vllm_server_fallback
        failure.when(not falls_back, "server/none", missing=len(rows), rows=len(request.rows), told=told)
        logger.warning("The own engine draws %d of %d completions: %s", len(rows), len(request.rows), told)
        groups: dict[int, list[SequenceKey]] = {}
        for row in rows:
            groups.setdefault(row[0], []).append(request.key(row))
        prompts = [torch.tensor(request.ids[prompt]) for prompt in groups]
        # a failure goes to the attempt around, which repeats what is not answered
        longest = {prompt: limit for (prompt, _), limit in zip(request.rows, request.limits, strict=True)}
        limits = [longest[prompt] for prompt in groups]
        drawn = self._own.generate(prompts, list(groups.values()), request.settings, under(plan), limits=limits)
        self._answered.update(zip(rows, drawn, strict=True))


class _Pass:
    """Asks for rows once, side by side; a server that fails is asked for nothing more, the next one is."""

    def __init__(
        self,
        servers: Sequence[Server],
        request: EngineRequest,
        label: str,
        reasons: dict[str, str],
        rows: Sequence[Row],
        plan: RolloutPlan,
    ) -> None:
        self._servers, self.request, self._label, self.reasons = servers, request, label, reasons
        self.rows, self._plan, self._settings = rows, plan, request.limited
        self._failed: set[str] = set()
        self._threads = ThreadPoolExecutor(min(len(rows), max(1, plan.rows_in_flight), _THREADS))
        self._asked: dict[Future[Completion | None], Row] = {
            self._threads.submit(self._row, row, first): row for first, row in enumerate(rows)
        }

    def answers(self) -> Iterator[tuple[Row, Completion]]:
        """Yields each completion as it comes; a row that no server answered is left out."""
        try:
            for done in as_completed(self._asked):
                completion = done.result()
                if completion is not None:
                    yield self._asked[done], completion
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Asks for nothing more; requests under way end in their threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def again(self, rows: Sequence[Row]) -> _Pass:
        """Asks for some rows once more, of servers that still have the weights: an answer with others is refused."""
        return _Pass(self._servers, self.request, self._label, self.reasons, rows, self._plan)

    def _row(self, row: Row, first: int) -> Completion | None:
        key, settings = self.request.key(row), self._settings[row]
        name = "-".join(map(str, (*key, self._label)))
        for turn in range(len(self._servers)):
            server = self._servers[(first + turn) % len(self._servers)]
            if server.url in self._failed:
                continue
            try:
                return server.draw(name, self.request.ids[row[0]], settings, seed_of(key), self._label)
            except ServerError as error:
                self._failed.add(server.url)
                self.reasons[server.url] = str(error)
        return None


@contextmanager
def _servers(config: Any, vocab_size: int) -> Iterator[list[Server]]:
    """Opens connections for one rollout."""
    with connections(_THREADS) as session:
        yield [Server(url, config.vllm_server_timeout, session, vocab_size) for url in config.vllm_servers]


def vllm_server_engine(context: EngineContext) -> FunctionEngine:
    """Makes the engine that the configuration describes."""
    refuse_other_networks(context)
    servers = Servers(context, ENGINES["native"].function(context))
    calls: dict[str, Any] = {"synchronise": servers.synchronise, "close": servers.close, "ahead": servers}
    return FunctionEngine(context, servers.draw, honours={*FILTERS, LIMITS}, compares_filtered=True, **calls)


register_engine(Engine(NAME, vllm_server_engine))
