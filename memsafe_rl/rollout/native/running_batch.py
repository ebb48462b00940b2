"""The library's own engine: a running batch that fits a plan; the company of a sequence never changes its tokens.

Sequences join the batch as room becomes free and leave it as they end. What they have drawn lies on the host: when
memory runs out the batch is dropped, and a leaner one reads it back and continues.

Axes: ``P`` unique prompts, ``B`` rows of the running batch, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memsafe_rl.accounting import host_memory
from memsafe_rl.memory.planning.policies import check_plan
from memsafe_rl.memory.runtime.recovery import Attempt
from memsafe_rl.models.adapter import DecodeState, ModelAdapter
from memsafe_rl.models.compiling import compiling
from memsafe_rl.models.decoding.shared_prefix_cache import PromptBlock, RowCache
from memsafe_rl.models.module_state import eval_mode
from memsafe_rl.rollout import refusal, unusable
from memsafe_rl.rollout.engine import Generate, LiveKeys, Progress, RolloutScope
from memsafe_rl.rollout.native.by_transformers import generate_by_override, generate_by_transformers
from memsafe_rl.rollout.native.kv_retention import KeptCaches, KeptRows, name_of
from memsafe_rl.rollout.native.sequences import (
    Candidate,
    Drawer,
    LiveSequence,
    Streams,
    admit,
    begin_sequences,
    check_settings,
    checked_limits,
    draw_next,
)
from memsafe_rl.types import Completion, ModelGeometry, RolloutPlan, SamplingSettings, SequenceKey

_SPAN_STEPS = 32  # steps that are repeated together when memory runs out
_COMPACT_SHARE = 8  # ended rows go once they are 1/8 of a batch: dropping copies the cache, keeping them costs steps


def generate(
    adapter: ModelAdapter,
    prompts: Sequence[Tensor],
    keys: Sequence[Sequence[SequenceKey]],
    settings: SamplingSettings,
    attempt: Attempt[RolloutPlan],
    progress: Progress | None = None,
    *,
    begun: Sequence[Sequence[Completion | None]] | None = None,
    limits: Sequence[int] | None = None,
    kept: KeptCaches | None = None,
) -> list[Completion]:
    """Samples completions for every prompt, without gradient, in eval mode, in a running batch that fits the plan.

    In float32, plan and other sequences change one only where a draw is marked in `Completion.ties`, or at the edge
    where top-k, top-p or min-p cuts; in bfloat16 another batch shape may draw other, equally likely tokens.
    """
    limits = checked_limits(limits, len(prompts), settings.max_new_tokens)
    _check([int(prompt.shape[0]) for prompt in prompts], keys, settings, adapter.geometry, limits)
    own = adapter.own_generate
    with torch.no_grad(), eval_mode(adapter.model):
        if own:
            return generate_by_override(adapter, own, prompts, keys, settings, attempt, begun=begun, limits=limits)
        with host_memory():
            sequences = begin_sequences(prompts, keys, settings, begun, limits)
        draw = Drawer(settings, adapter.start_token_id)
        if adapter.decodes:
            batch = _RunningBatch(adapter, sequences, draw, progress, kept)
            try:
                while batch.goes_on:
                    attempt(batch.advance, batch.give_up_all)
                if kept is not None:
                    attempt(batch.drop_ended, batch.give_up_all)
            finally:
                batch.give_up()
        else:
            generate_by_transformers(adapter, sequences, draw, attempt, progress)
    with host_memory():
        return [sequence.completion(draw.keeps_model_logprobs) for sequence in sequences]


@dataclass(frozen=True)
class _Template:
    """A prompt that has been read and that further samples wait for."""

    prompt: int  # index of the prompt
    logits_1V: Tensor  # (1, V), of the first token
    state: DecodeState  # a cache of one row that has drawn nothing


class _RunningBatch:
    """The sequences being decoded, and those that wait."""

    def __init__(
        self,
        adapter: ModelAdapter,
        sequences: Sequence[LiveSequence],
        draw: Drawer,
        progress: Progress | None,
        kept: KeptCaches | None = None,
    ) -> None:
        self._caches = kept
        self._kept = None if kept is None else kept.of(adapter)
        self._adapter, self._sequences, self._draw, self._progress = adapter, sequences, draw, progress
        self._order = sorted(range(len(sequences)), key=lambda place: -len(sequences[place].prompt_ids))
        self._longest = max((one.limit for one in sequences), default=0)
        self._told = 0
        self.give_up()

    @property
    def goes_on(self) -> bool:
        """Whether any sequence has not ended."""
        return any(not sequence.ended for sequence in self._sequences)

    def give_up(self) -> None:
        """Frees everything on the device; drawn tokens stay."""
        self._state: DecodeState | None = None
        self._rows: list[LiveSequence] = []
        self._tokens_B: Tensor | None = None
        self._streams: Streams | None = None
        self._template: _Template | None = None

    def give_up_all(self) -> None:
        """Frees what waits for later turns too, of every role."""
        self.give_up()
        if self._caches is not None:
            self._caches.clear()

    def advance(self, plan: RolloutPlan) -> None:
        """Drops rows that have ended, takes in rows that wait, and decodes a span of steps."""
        check_plan(plan, RolloutPlan)
        self.drop_ended(plan)
        while wave := self._next_to_join(plan):
            self._take_in(wave, plan)
        with compiling(plan.compile) if plan.compile else nullcontext():
            for _ in range(_SPAN_STEPS):
                if self._is_due():
                    break
                assert self._state is not None, "a step follows the rows' first tokens"
                assert self._tokens_B is not None, "likewise"
                self._streams = streams = self._streams or Streams.of(self._rows, self._adapter.device)
                logits_BV = self._adapter.decode_step(self._state, self._tokens_B)
                self._tokens_B = draw_next(self._draw, logits_BV, self._rows, streams)
                del logits_BV  # its bytes are free before the next ones are made
        ended = sum(one.ended for one in self._sequences)
        if self._progress is not None and ended > self._told:
            self._told = ended
            self._progress(ended, len(self._sequences))

    def _waiting(self) -> list[LiveSequence]:
        """Sequences that are not in the batch: those begun first, then those kept, then the longest prompts."""
        inside = {id(row) for row in self._rows}
        outside = [self._sequences[place] for place in self._order]
        waiting = [one for one in outside if not one.ended and id(one) not in inside]
        return sorted(waiting, key=lambda one: (not one.ids, not self._common(one)))

    def _common(self, one: LiveSequence) -> int:
        """Counts the tokens of a sequence that an earlier turn has left; 0 once it has begun."""
        if self._kept is None or one.ids:
            return 0
        return self._kept.common(name_of(one.key), one.prompt_ids)

    def _next_to_join(self, plan: RolloutPlan) -> list[LiveSequence]:
        """Chooses what joins the batch in one forward over prompts."""
        waiting = self._waiting()
        if not waiting or (self._rows and not self._adapter.joins):
            return []
        if self._kept is not None and self._common(waiting[0]):
            return self._next_kept(waiting, self._kept, plan)
        alike = [one for one in waiting if bool(one.ids) == bool(waiting[0].ids)]
        for one in alike:
            one.base = len(one.prompt_ids)  # it may have been less, of what was kept and is not there any more
        template = self._template
        if template is not None and not alike[0].ids and alike[0].prompt == template.prompt:
            alike = [one for one in alike if one.prompt == template.prompt]
        shared = self._widest(alike) if self._adapter.geometry.shares_prompts else 0
        candidates = [Candidate(one.prompt, len(one.prompt_ids), len(one.ids), max(one.limit, shared)) for one in alike]
        held = sum(block.nbytes() for block in self._blocks())
        return alike[: admit(candidates, plan, self._adapter.geometry, rows=len(self._rows), prompt_bytes=held)]

    def _next_kept(self, waiting: Sequence[LiveSequence], kept: KeptRows, plan: RolloutPlan) -> list[LiveSequence]:
        """Chooses what joins the batch from what was kept; what does not fit an empty batch is read anew."""
        alike = [one for one in waiting if self._common(one)]
        for one in alike:
            one.base = min(kept.rows[name_of(one.key)].cache.base, self._common(one))
        caches = {id(one): kept.rows[name_of(one.key)].cache for one in alike}
        alike.sort(key=lambda one: (id(caches[id(one)].block), caches[id(one)].prompt))  # rows of a block side by side
        blocks = {id(block): block for block in self._blocks()}
        blocks |= {id(cache.block): cache.block for cache in caches.values()}
        shared = self._widest(alike)
        candidates = [Candidate(one.prompt, len(one.prompt_ids), 0, shared, is_kept=True) for one in alike]
        held = sum(block.nbytes() for block in blocks.values())
        count = admit(candidates, plan, self._adapter.geometry, rows=len(self._rows), prompt_bytes=held)
        if count == 0 and not self._rows:
            longest = max(alike, key=lambda one: len(one.prompt_ids))
            del kept.rows[name_of(longest.key)]
            longest.base = len(longest.prompt_ids)
            return self._next_to_join(plan)
        return alike[:count]

    def _blocks(self) -> list[PromptBlock]:
        return [] if self._state is None else self._state.prompt_blocks()

    def _widest(self, joining: Sequence[LiveSequence]) -> int:
        """Most tokens that any row may have behind its block of prompts."""
        return max(self._longest, *(one.suffix for one in (*self._rows, *joining)))

    def _take_in(self, wave: Sequence[LiveSequence], plan: RolloutPlan) -> None:
        """Reads what sequences consist of so far, draws the next token of each, and joins them to the batch."""
        prompts = list(dict.fromkeys(one.prompt for one in wave))
        common = [self._common(one) for one in wave]
        resumed = self._kept.take([name_of(one.key) for one in wave]) if self._kept is not None and common[0] else []
        self._make_room(plan, wave, resumed)
        if resumed:
            with host_memory():
                tokens = [one.prompt_ids[count:] for one, count in zip(wave, common, strict=True)]
            logits_BV, state = self._adapter.resume(resumed, common, tokens, plan.prefill_tokens)
            spread = None
        else:
            logits_BV, state, spread = self._read(wave, prompts, plan)
        rows = list(wave)
        once = Streams.of(rows, self._adapter.device, draws=1)  # those of the batch follow when these have joined it
        tokens_B = draw_next(self._draw, logits_BV, rows, once)
        del once
        del logits_BV  # its bytes are free before the cache is spread
        going = [place for place, one in enumerate(rows) if not one.ended]
        if spread is not None and self._keeps(plan):
            state, spread = state.select(spread), None
        some_wait = len(going) < len(rows) and self._keeps(plan)
        if some_wait:
            state = self._without_ended(state, rows)
        elif going and (spread is not None or len(going) < len(rows)):
            state = state.select(going if spread is None else [spread[place] for place in going])
        if going:
            self._join(state, [rows[place] for place in going], tokens_B, going)
        if some_wait:
            self._make_room(plan)
        resumed.clear()  # held until here, so that none of their prompts is freed before all rows are together

    def _join(self, state: DecodeState, rows: list[LiveSequence], tokens_B: Tensor, going: Sequence[int]) -> None:
        """Puts rows behind those of the batch; of the tokens, those at the places ``going`` are theirs."""
        tokens_B = tokens_B[torch.tensor(going, device=self._adapter.device)]
        if self._state is not None and self._tokens_B is not None:
            held, self._state = self._state, None
            state = held.join(state)
            tokens_B = torch.cat([self._tokens_B, tokens_B])
        self._state, self._tokens_B, self._streams, self._rows = state, tokens_B, None, self._rows + rows

    def _make_room(
        self, plan: RolloutPlan, joining: Sequence[LiveSequence] = (), resumed: Sequence[RowCache] = ()
    ) -> None:
        """Frees what waits for later turns and does not fit beside the rows in flight at their longest."""
        if self._caches is None:
            return
        geometry = self._adapter.geometry
        blocks = list({id(b): b for b in (*self._blocks(), *(row.block for row in resumed))}.values())
        prompts = sum(block.nbytes() for block in blocks)
        if joining and not resumed:
            lengths = {one.prompt: len(one.prompt_ids) for one in joining}
            prompts += len(lengths) * geometry.prompt_kv_bytes(max(lengths.values()))
        rows = len(self._rows) + len(joining)
        in_flight = geometry.batch_kv_bytes(prompts, rows, self._widest(joining)) if rows else 0
        self._caches.shrink(plan.kept_limit_bytes - in_flight, blocks)

    def _keeps(self, plan: RolloutPlan) -> bool:
        return self._kept is not None and plan.kept_limit_bytes > 0

    def _without_ended(self, state: DecodeState, rows: Sequence[LiveSequence]) -> DecodeState:
        assert self._kept is not None, "called only where something is kept"
        with host_memory():
            leaving = [(place, name_of(one.key), one.history()) for place, one in enumerate(rows) if one.ended]
        return self._kept.set_aside(state, leaving, [place for place, one in enumerate(rows) if not one.ended])

    def _read(
        self, wave: Sequence[LiveSequence], prompts: Sequence[int], plan: RolloutPlan
    ) -> tuple[Tensor, DecodeState, list[int] | None]:
        """Reads prompts, and what was drawn after them."""
        adapter = self._adapter
        if wave[0].ids and not adapter.joins:
            logits_BV, state = adapter.prefill([one.history() for one in wave], plan.prefill_tokens)
            return logits_BV, state, None
        template = self._template
        if template is not None and template.prompt == prompts[0] and not wave[0].ids:
            logits_PV, state = template.logits_1V, template.state
        else:
            self._template = template = None
            ids = {one.prompt: one.prompt_ids for one in wave}
            logits_PV, state = adapter.prefill([ids[prompt] for prompt in prompts], plan.prefill_tokens)
        places = [prompts.index(one.prompt) for one in wave]
        if wave[0].ids:
            state = state.select(places)
            drawn = [torch.tensor(one.ids, dtype=torch.int64) for one in wave]
            return adapter.extend(state, drawn, plan.prefill_tokens), state, None
        self._keep_template(wave, prompts, logits_PV, state)
        alone = not adapter.joins and places == list(range(len(prompts)))
        return logits_PV[torch.tensor(places, device=logits_PV.device)], state, None if alone else places

    def _keep_template(
        self, wave: Sequence[LiveSequence], prompts: Sequence[int], logits_PV: Tensor, state: DecodeState
    ) -> None:
        """Keeps a prompt that further samples wait for; a wave that parts a group has no other prompt."""
        fresh = sum(1 for one in self._sequences if one.prompt == prompts[0] and not one.ids and not one.ended)
        parted = len(prompts) == 1 and fresh > len(wave) and self._adapter.joins
        self._template = _Template(prompts[0], logits_PV, state) if parted else None
        for block in state.prompt_blocks():
            block.kept_whole = parted

    def _is_due(self) -> bool:
        """Whether rows should leave before the next step; none may idle past its longest length."""
        ended = [one for one in self._rows if one.ended]
        if len(ended) == len(self._rows) or (ended and len(ended) * _COMPACT_SHARE >= len(self._rows)):
            return True
        return any(len(one.ids) + one.idle >= one.limit for one in ended)

    def drop_ended(self, plan: RolloutPlan) -> None:
        """Takes rows that have ended out of the cache; what they have read may be kept for a later turn."""
        ended, going = self._rows, [place for place, one in enumerate(self._rows) if not one.ended]
        if len(going) == len(ended):
            return
        held, self._state, self._streams = self._state, None, None
        self._rows = [ended[place] for place in going]
        if held is not None and self._keeps(plan):
            self._state = self._without_ended(held, ended)
            self._make_room(plan)
        elif held is not None and going:
            self._state = held.select(going)
        if not going or self._tokens_B is None:
            self._state = self._tokens_B = None
            return
        self._tokens_B = self._tokens_B[torch.tensor(going, device=self._tokens_B.device)]


def _check(
    lengths: Sequence[int],
    keys: Sequence[Sequence[SequenceKey]],
    settings: SamplingSettings,
    geometry: ModelGeometry,
    limits: Sequence[int],
) -> None:
    check_settings(settings, geometry.vocab_size)
    unusable.when(len(lengths) != len(keys), "prompts/keys", prompts=len(lengths), keys=len(keys))
    for index, (length, new) in enumerate(zip(lengths, limits, strict=True)):
        unusable.when(length == 0, "prompts/empty", index=index)
        limit = geometry.max_positions
        if limit is None or geometry.positions(length, new) <= limit:
            continue
        if geometry.source_bytes is not None:
            raise unusable("prompts/encoder", index=index, length=length, new=new, limit=limit)
        shorter = f" or lower max_completion_length to at most {limit - length}" if limit > length else ""
        raise unusable("prompts/long", index=index, length=length, new=new, limit=limit, shorter=shorter)


class LocalScope(NamedTuple):
    """Draws the agent's turns by a given function, and those of other roles by this library's own loop."""

    generate: Generate
    generate_as: Callable[..., list[Completion]]


@contextmanager
def opened(live_keys: LiveKeys | None, drawing: Callable[[KeptCaches], Generate]) -> Iterator[LocalScope]:
    """Opens a scope; ``drawing`` gives what draws the agent's turns, with the caches or, in other engines, without."""
    kept = KeptCaches(live_keys)
    try:
        yield LocalScope(drawing(kept), partial(generate, kept=kept))
    finally:
        kept.clear()


class WholeEngine:
    """An engine that draws completions whole: this library has no cache of it to round or to keep between turns."""

    name: str
    generate: Any
    cache_dtype: str | None = None

    def round_cache(self) -> None:
        """Refuses: a cache, if there is one, is the engine's own."""
        raise refusal("engine/cache", engine=self.name)

    def open(self, live_keys: LiveKeys | None = None) -> AbstractContextManager[RolloutScope]:
        """Opens a scope; what is kept between turns, if anything, is the engine's own affair."""
        return opened(live_keys, lambda _: self.generate)
