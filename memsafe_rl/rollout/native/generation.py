"""Samples completions in a running batch that fits a plan; the company of a sequence never changes its tokens.

Sequences join the batch as room becomes free and leave it as they end. What they have drawn lies on the host: when
memory runs out the batch is given up, and a leaner one reads it back and goes on.

Axes: ``P`` unique prompts, ``B`` rows of the running batch, ``V`` vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from memsafe_rl.accounting import host_memory
from memsafe_rl.errors import DataError
from memsafe_rl.memory.planning.plan_checks import check_rollout_plan
from memsafe_rl.memory.runtime.recovery import Attempt
from memsafe_rl.models.adapter import DecodeState, ModelAdapter
from memsafe_rl.models.decoding.shared_prefix_cache import RowCache
from memsafe_rl.rollout.engine import Progress
from memsafe_rl.rollout.native.admission import Candidate, admit
from memsafe_rl.rollout.native.by_transformers import generate_by_transformers
from memsafe_rl.rollout.native.drawing import Drawer, key_tensor, refuse_broken
from memsafe_rl.rollout.native.kv_retention import KeptCaches, blocks_of, name_of
from memsafe_rl.rollout.sampling_checks import check_settings, checked_limits
from memsafe_rl.types import Completion, ModelGeometry, RolloutPlan, SamplingSettings, SequenceKey

_SPAN_STEPS = 32
"""Steps that are repeated together when memory runs out."""
_COMPACT_SHARE = 8
"""An ended row costs its share of every step to come; dropping rows copies the cache once."""


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

    A span of steps is what is repeated when memory runs out. Tokens drawn before it are on the host and are kept: the
    batch is given up and read back, by as many rows as the plan then in force allows.

    A sequence depends on its prompt, its key and the settings; the plan and the other sequences change it only where
    a draw is marked in `Completion.ties`. That holds for networks that compute in float32. In bfloat16 another batch
    shape moves logits by more than a tie's gap, so another batch may draw other, equally likely tokens; and the edge
    at which top-k, top-p or min-p cuts can move by rounding in any type, which is not marked.
    """
    limits = checked_limits(limits, len(prompts), settings.max_new_tokens)
    _check([int(prompt.shape[0]) for prompt in prompts], keys, settings, adapter.geometry, limits)
    if not adapter.decodes:
        with torch.no_grad(), eval_mode(adapter.model):
            return generate_by_transformers(
                adapter, prompts, keys, settings, attempt, progress, begun=begun, limits=limits
            )
    with host_memory():
        sequences = _sequences(prompts, keys, begun, limits)
    batch = _RunningBatch(adapter, sequences, settings, progress, kept)
    try:
        with torch.no_grad(), eval_mode(adapter.model):
            while batch.goes_on:
                attempt(batch.advance, batch.give_up_all)
            if kept is not None:
                attempt(batch.drop_ended, batch.give_up_all)
    finally:
        batch.give_up()
    with host_memory():
        return [sequence.completion(batch.draw.keeps_model_logprobs) for sequence in sequences]


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switches every module to eval mode, and each back to its own mode at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@dataclass
class _Sequence:
    """One completion as far as it has been drawn, on the host.

    Args:
        prompt: index of the prompt.
        prompt_ids: (length,) int64, on the host.
        key: name of its random stream.
        limit: longest completion, in tokens.
        base: tokens of its prompt that lie in a block of prompts.
        ids: tokens drawn.
        logprobs: nats, of the distribution sampled from.
        model_logprobs: nats, of the model's own.
        ties: draws that rounding may change.
        first: tokens that an earlier call had drawn.
        idle: steps it has taken part in after its end.
        ended: whether nothing more is drawn in this call.
        finished: whether an eos or a stop string was drawn.
    """

    prompt: int
    prompt_ids: Tensor
    key: SequenceKey
    limit: int
    base: int
    ids: array[int] = field(default_factory=lambda: array("q"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    model_logprobs: array[float] = field(default_factory=lambda: array("d"))
    ties: int = 0
    first: int = 0
    idle: int = 0
    ended: bool = False
    finished: bool = False

    @property
    def suffix(self) -> int:
        """Most tokens that it may have behind its block of prompts."""
        return len(self.prompt_ids) + self.limit - self.base

    def history(self, window: int = 0, *, with_prompt: bool = True) -> Tensor:
        """Gives prompt and completion, or the last tokens of them, (length,) int64 on the host."""
        drawn = torch.tensor(self.ids[-window:], dtype=torch.int64)
        if not with_prompt or (window and len(drawn) >= window):
            return drawn
        return torch.cat([self.prompt_ids[-(window - len(drawn)) :] if window else self.prompt_ids, drawn])

    def completion(self, keeps_model_logprobs: bool) -> Completion:
        """Gives what was drawn."""
        logprobs = torch.tensor(self.logprobs, dtype=torch.float32)
        own = torch.tensor(self.model_logprobs, dtype=torch.float32) if keeps_model_logprobs else logprobs
        return Completion(torch.tensor(self.ids, dtype=torch.int64), logprobs, own, self.finished, self.ties)


@dataclass(frozen=True)
class _Template:
    """A prompt that has been read and that further samples wait for.

    Args:
        prompt: index of the prompt.
        logits_1V: (1, V), of the first token.
        state: a cache of one row that has drawn nothing.
    """

    prompt: int
    logits_1V: Tensor
    state: DecodeState


class _RunningBatch:
    """The sequences being decoded, and those that wait."""

    def __init__(
        self,
        adapter: ModelAdapter,
        sequences: Sequence[_Sequence],
        settings: SamplingSettings,
        progress: Progress | None,
        kept: KeptCaches | None = None,
    ) -> None:
        self._caches = kept
        self._kept = None if kept is None else kept.of(adapter)
        self.draw = Drawer(settings, adapter.start_token_id)
        self._adapter, self._sequences, self._settings, self._progress = adapter, sequences, settings, progress
        self._eos = frozenset(settings.eos_token_ids)
        self._most = settings.max_new_tokens if settings.max_step_tokens is None else settings.max_step_tokens
        self._order = sorted(range(len(sequences)), key=lambda place: -len(sequences[place].prompt_ids))
        self._longest = max((one.limit for one in sequences), default=0)
        self._told = 0
        self.give_up()

    @property
    def goes_on(self) -> bool:
        """Whether any sequence has not ended."""
        return any(not sequence.ended for sequence in self._sequences)

    def give_up(self) -> None:
        """Lets go of everything on the device; what was drawn stays."""
        self._state: DecodeState | None = None
        self._rows: list[_Sequence] = []
        self._tokens_B: Tensor | None = None
        self._keys_B4: Tensor | None = None
        self._template: _Template | None = None

    def give_up_all(self) -> None:
        """Lets go of what waits for later turns too, of every role."""
        self.give_up()
        if self._caches is not None:
            self._caches.clear()

    def advance(self, plan: RolloutPlan) -> None:
        """Drops rows that have ended, takes in rows that wait, and decodes a span of steps."""
        check_rollout_plan(plan)
        self.drop_ended(plan)
        while wave := self._next_to_join(plan):
            self._take_in(wave, plan)
        for _ in range(_SPAN_STEPS):
            if self._is_due():
                break
            self._step()
        self._tell()

    def _waiting(self) -> list[_Sequence]:
        """Sequences that are not in the batch: those begun first, then those kept, then the longest prompts."""
        inside = {id(row) for row in self._rows}
        outside = [self._sequences[place] for place in self._order]
        waiting = [one for one in outside if not one.ended and id(one) not in inside]
        return sorted(waiting, key=lambda one: (not one.ids, not self._common(one)))

    def _common(self, one: _Sequence) -> int:
        """Counts the tokens of a sequence that an earlier turn has left; 0 once it has begun."""
        if self._kept is None or one.ids:
            return 0
        return self._kept.common(name_of(one.key), one.prompt_ids)

    def _next_to_join(self, plan: RolloutPlan) -> list[_Sequence]:
        """Chooses what joins the batch in one forward over prompts."""
        waiting = self._waiting()
        if not waiting or (self._rows and not self._adapter.joins):
            return []
        if self._kept is not None and self._common(waiting[0]):
            return self._next_kept(waiting, plan)
        alike = [one for one in waiting if bool(one.ids) == bool(waiting[0].ids)]
        for one in alike:
            one.base = len(one.prompt_ids)  # it may have been less, of what was kept and is not there any more
        template = self._template
        if template is not None and not alike[0].ids and alike[0].prompt == template.prompt:
            alike = [one for one in alike if one.prompt == template.prompt]
        shared = self._widest(alike) if self._adapter.geometry.shares_prompts else 0
        candidates = [Candidate(one.prompt, len(one.prompt_ids), len(one.ids), max(one.limit, shared)) for one in alike]
        held = 0 if self._state is None else self._state.prompt_bytes()
        count = admit(candidates, plan, self._adapter.geometry, rows=len(self._rows), prompt_bytes=held)
        return alike[:count]

    def _next_kept(self, waiting: Sequence[_Sequence], plan: RolloutPlan) -> list[_Sequence]:
        """Chooses what joins the batch from what was kept; what does not fit an empty batch is read anew."""
        if self._kept is None:
            raise AssertionError("called only where something was kept")
        kept = self._kept
        alike = [one for one in waiting if self._common(one)]
        for one in alike:
            one.base = min(kept.base_of(name_of(one.key)), self._common(one))
        alike.sort(key=lambda one: kept.place_of(name_of(one.key)))
        blocks = {id(block): block for block in blocks_of(self._state)}
        blocks |= {id(block): block for block in (kept.block_of(name_of(one.key)) for one in alike)}
        shared = self._widest(alike)
        candidates = [Candidate(one.prompt, len(one.prompt_ids), 0, shared, is_kept=True) for one in alike]
        held = sum(block.nbytes() for block in blocks.values())
        count = admit(candidates, plan, self._adapter.geometry, rows=len(self._rows), prompt_bytes=held)
        if count == 0 and not self._rows:
            longest = max(alike, key=lambda one: len(one.prompt_ids))
            kept.drop(name_of(longest.key))
            longest.base = len(longest.prompt_ids)
            return self._next_to_join(plan)
        return alike[:count]

    def _widest(self, joining: Sequence[_Sequence]) -> int:
        """Most tokens that any row may have behind its block of prompts."""
        return max(self._longest, *(one.suffix for one in (*self._rows, *joining)))

    def _take_in(self, wave: Sequence[_Sequence], plan: RolloutPlan) -> None:
        """Reads what sequences consist of so far, draws the next token of each, and joins them to the batch."""
        prompts = list(dict.fromkeys(one.prompt for one in wave))
        common = [self._common(one) for one in wave]
        resumed = self._kept.take([name_of(one.key) for one in wave]) if self._kept is not None and common[0] else []
        self._make_room(plan, wave, resumed)
        if resumed:
            logits_BV, state = self._read_on(wave, resumed, common, plan)
            spread = None
        else:
            logits_BV, state, spread = self._read(wave, prompts, plan)
        rows, keys_B4 = list(wave), key_tensor([one.key for one in wave]).to(self._adapter.device)
        tokens_B = self._draw_and_note(logits_BV, rows, keys_B4)
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
            self._join(state, [rows[place] for place in going], tokens_B, keys_B4, going)
        if some_wait:
            self._make_room(plan)
        resumed.clear()  # held until here, so that no prompt of theirs was given up before all rows were together

    def _join(
        self, state: DecodeState, rows: list[_Sequence], tokens_B: Tensor, keys_B4: Tensor, going: Sequence[int]
    ) -> None:
        """Puts rows behind those of the batch; of their tokens and keys, those at the places ``going`` are theirs."""
        index = torch.tensor(going, device=self._adapter.device)
        tokens_B, keys_B4 = tokens_B[index], keys_B4[index]
        if self._state is not None and self._tokens_B is not None and self._keys_B4 is not None:
            held, self._state = self._state, None
            state = held.join(state)
            tokens_B, keys_B4 = torch.cat([self._tokens_B, tokens_B]), torch.cat([self._keys_B4, keys_B4])
        self._state, self._tokens_B, self._keys_B4, self._rows = state, tokens_B, keys_B4, self._rows + rows

    def _read_on(
        self, wave: Sequence[_Sequence], resumed: Sequence[RowCache], common: Sequence[int], plan: RolloutPlan
    ) -> tuple[Tensor, DecodeState]:
        """Reads what contexts have beyond what was kept, and gives logits (B, V) and a cache."""
        if self._kept is None:
            raise AssertionError("called only where something was kept")
        with host_memory():
            tokens = [one.prompt_ids[count:] for one, count in zip(wave, common, strict=True)]
        return self._kept.resume(resumed, common, tokens, plan.prefill_tokens)

    def _make_room(
        self, plan: RolloutPlan, joining: Sequence[_Sequence] = (), resumed: Sequence[RowCache] = ()
    ) -> None:
        """Gives up what waits for later turns, as far as it does not fit beside the rows in flight at their longest."""
        if self._caches is None:
            return
        geometry = self._adapter.geometry
        blocks = list({id(b): b for b in (*blocks_of(self._state), *(row.block for row in resumed))}.values())
        prompts = sum(block.nbytes() for block in blocks)
        if joining and not resumed:
            lengths = {one.prompt: len(one.prompt_ids) for one in joining}
            prompts += len(lengths) * geometry.prompt_kv_bytes(max(lengths.values()))
        rows = len(self._rows) + len(joining)
        in_flight = geometry.batch_kv_bytes(prompts, rows, self._widest(joining)) if rows else 0
        self._caches.shrink(plan.kept_limit_bytes - in_flight, blocks)

    def _keeps(self, plan: RolloutPlan) -> bool:
        return self._kept is not None and plan.kept_limit_bytes > 0

    def _without_ended(self, state: DecodeState, rows: Sequence[_Sequence]) -> DecodeState:
        """Takes rows that have ended out of a cache, and keeps them for a later turn."""
        if self._kept is None:
            raise AssertionError("called only where something is kept")
        with host_memory():
            leaving = [(place, name_of(one.key), one.history()) for place, one in enumerate(rows) if one.ended]
        return self._kept.set_aside(state, leaving, [place for place, one in enumerate(rows) if not one.ended])

    def _read(
        self, wave: Sequence[_Sequence], prompts: Sequence[int], plan: RolloutPlan
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
        self, wave: Sequence[_Sequence], prompts: Sequence[int], logits_PV: Tensor, state: DecodeState
    ) -> None:
        """Keeps a prompt that further samples wait for; a wave that parts a group has no other prompt."""
        fresh = sum(1 for one in self._sequences if one.prompt == prompts[0] and not one.ids and not one.ended)
        parted = len(prompts) == 1 and fresh > len(wave) and self._adapter.joins
        self._template = _Template(prompts[0], logits_PV, state) if parted else None
        state.keep_whole(parted)

    def _step(self) -> None:
        """Decodes one token of every row."""
        if self._state is None or self._tokens_B is None or self._keys_B4 is None:
            raise AssertionError("a step follows the rows' first tokens")
        logits_BV = self._adapter.decode_step(self._state, self._tokens_B)
        self._tokens_B = self._draw_and_note(logits_BV, self._rows, self._keys_B4)

    def _draw_and_note(self, logits_BV: Tensor, rows: Sequence[_Sequence], keys_B4: Tensor) -> Tensor:
        """Draws a token of every row, and notes it for those that have not ended.

        The one place where a rollout reads tensor values.
        """
        positions = [len(one.ids) for one in rows]
        with host_memory():
            positions_B = torch.tensor(positions)
            histories = [one.history() for one in rows] if self.draw.needs_history else None
        lengths = [len(one.prompt_ids) for one in rows] if self.draw.needs_prompt_lengths else None
        tokens_B, values_4B = self.draw(logits_BV, keys_B4, positions_B.to(keys_B4.device), histories, lengths)
        with host_memory():
            values_4B = values_4B.cpu()
            going = [place for place, one in enumerate(rows) if not one.ended]
            keys = [rows[place].key for place in going]
            refuse_broken(values_4B[:, torch.tensor(going)], keys, [positions[place] for place in going])
            values = values_4B.tolist()
        for one, token, logprob, own, tied in zip(rows, *values, strict=True):
            if one.ended:
                one.idle += 1
            else:
                self._note(one, int(token), logprob, own, bool(tied))
        self._end_by_text(rows)
        return tokens_B

    def _note(self, one: _Sequence, token: int, logprob: float, own: float, tied: bool) -> None:
        one.logprobs.append(logprob)
        one.model_logprobs.append(own)
        one.ids.append(token)
        one.ties += tied
        one.finished = token in self._eos
        one.ended = one.finished or len(one.ids) >= min(one.limit, one.first + self._most)

    def _end_by_text(self, rows: Sequence[_Sequence]) -> None:
        if not self.draw.stops_by_text:
            return
        with host_memory():
            running = [one for one in rows if not one.finished]
            tails = [one.history(self.draw.text_window, with_prompt=self.draw.reads_on) for one in running]
            ends = self.draw.ends_by_text(tails)
        for one, end in zip(running, ends, strict=True):
            one.finished, one.ended = end, one.ended or end

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
        held, self._state = self._state, None
        self._rows = [ended[place] for place in going]
        if held is not None and self._keeps(plan):
            self._state = self._without_ended(held, ended)
            self._make_room(plan)
        elif held is not None and going:
            self._state = held.select(going)
        if not going or self._tokens_B is None or self._keys_B4 is None:
            self._state = self._tokens_B = self._keys_B4 = None
            return
        index = torch.tensor(going, device=self._tokens_B.device)
        self._tokens_B, self._keys_B4 = self._tokens_B[index], self._keys_B4[index]

    def _tell(self) -> None:
        ended = sum(one.ended for one in self._sequences)
        if self._progress is not None and ended > self._told:
            self._told = ended
            self._progress(ended, len(self._sequences))


def _sequences(
    prompts: Sequence[Tensor],
    keys: Sequence[Sequence[SequenceKey]],
    begun: Sequence[Sequence[Completion | None]] | None,
    limits: Sequence[int],
) -> list[_Sequence]:
    """Lists all samples, prompt by prompt, with what was drawn of them before."""
    sequences = []
    for index, prompt in enumerate(prompts):
        prompt_ids = prompt.cpu()
        for sample, key in enumerate(keys[index]):
            one = _Sequence(index, prompt_ids, key, limits[index], len(prompt_ids))
            earlier = None if begun is None else begun[index][sample]
            if earlier is not None:
                one.ids.extend(earlier.ids.tolist())
                one.logprobs.extend(earlier.logprobs.tolist())
                one.model_logprobs.extend(earlier.model_logprobs.tolist())
                one.ties, one.first = earlier.ties, len(one.ids)
                one.finished, one.ended = earlier.finished, earlier.finished or len(one.ids) >= one.limit
            sequences.append(one)
    return sequences


def _check(
    lengths: Sequence[int],
    keys: Sequence[Sequence[SequenceKey]],
    settings: SamplingSettings,
    geometry: ModelGeometry,
    limits: Sequence[int],
) -> None:
    check_settings(settings, geometry.vocab_size)
    if len(lengths) != len(keys):
        raise DataError(f"{len(lengths)} prompts came with keys for {len(keys)}; give one list of keys per prompt.")
    for index, length in enumerate(lengths):
        if length == 0:
            raise DataError(f"Prompt {index} has 0 tokens; give it at least one, such as the tokenizer's bos token.")
        limit = geometry.max_positions
        if limit is not None and geometry.positions(length, limits[index]) > limit:
            raise DataError(_too_long(index, length, limits[index], limit, geometry.source_bytes is None))


def _too_long(index: int, length: int, new_tokens: int, limit: int, one_sequence: bool) -> str:
    if one_sequence:
        shorter = f" or lower max_completion_length to at most {limit - length}" if limit > length else ""
        return (
            f"Prompt {index} has {length} tokens; with up to {new_tokens} new ones it passes the model's {limit} "
            f"positions. Shorten the prompt{shorter}."
        )
    return (
        f"Prompt {index} has {length} tokens and its completion up to {new_tokens}; the model's encoder and decoder "
        f"have {limit} positions each. Shorten the prompt, or lower max_completion_length, to at most {limit}."
    )
