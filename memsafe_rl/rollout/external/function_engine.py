"""What engines of other libraries are asked for, what they have in common, and an engine made of one function."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from memsafe_rl.memory.runtime.recovery import Attempt, capture_random_state, set_random_state
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.models.module_state import eval_mode
from memsafe_rl.rollout import refusal, unusable
from memsafe_rl.rollout.engine import DrawsAhead, EngineCapabilities, EngineContext, Progress
from memsafe_rl.rollout.external.sampling_support import refuse_begun
from memsafe_rl.rollout.native.running_batch import WholeEngine
from memsafe_rl.rollout.native.sequences import checked_limits
from memsafe_rl.types import Completion, ModelGeometry, RolloutPlan, SamplingSettings, SequenceKey

Row = tuple[int, int]
"""Index of a prompt, and of a sample in its group."""


@dataclass(frozen=True)
class EngineRequest:
    """The sequences of one rollout."""

    ids: list[list[int]]  # token ids of each prompt
    rows: list[Row]  # the sequences wanted, prompt by prompt
    keys: Sequence[Sequence[SequenceKey]]  # of each prompt's sequences; equal keys must draw alike
    settings: SamplingSettings  # how tokens are drawn; its length is the longest limit's
    limits: list[int]  # most tokens of each sequence wanted; all alike for an engine that does not honour `LIMITS`
    row_tokens: int  # the longest prompt with its completion of full length, in tokens
    progress: Progress | None = None  # receives counts of finished sequences; None for nobody

    @property
    def prompts(self) -> list[list[int]]:
        """The prompt of each sequence wanted, as token ids."""
        return [self.ids[prompt] for prompt, _ in self.rows]

    @property
    def seeds(self) -> list[int]:
        """A seed for each sequence wanted, the same in every attempt."""
        return [seed_of(self.key(row)) for row in self.rows]

    @property
    def limited(self) -> dict[Row, SamplingSettings]:
        """How the tokens of each sequence wanted are drawn, its own length included."""
        pairs = zip(self.rows, self.limits, strict=True)
        return {row: replace(self.settings, max_new_tokens=limit) for row, limit in pairs}

    def key(self, row: Row) -> SequenceKey:
        """Names a sequence wanted."""
        return self.keys[row[0]][row[1]]


def request_of(
    prompts: Sequence[Tensor],
    keys: Sequence[Sequence[SequenceKey]],
    settings: SamplingSettings,
    geometry: ModelGeometry,
    progress: Progress | None = None,
    limits: Sequence[int] | None = None,
) -> EngineRequest:
    """Reads prompts, keys, and the limits of the prompts' completions; None: the settings' own."""
    ids, most = [prompt.tolist() for prompt in prompts], geometry.max_positions
    limits = [settings.max_new_tokens] * len(ids) if limits is None else limits
    wholes = [len(tokens) + limit for tokens, limit in zip(ids, limits, strict=True)]
    for index, (tokens, whole) in enumerate(zip(ids, wholes, strict=True)):
        unusable.when(not tokens, "prompts/nothing", index=index)
        unusable.when(most is not None and whole > most, "prompts/engine", index=index, whole=whole, limit=most)
    rows = [(prompt, sample) for prompt, group in enumerate(keys) for sample in range(len(group))]
    own = replace(settings, max_new_tokens=max(limits, default=settings.max_new_tokens))
    return EngineRequest(ids, rows, keys, own, [limits[prompt] for prompt, _ in rows], max(wholes, default=0), progress)


def seed_of(key: SequenceKey) -> int:
    """Turns a sequence's key into a seed."""
    return int.from_bytes(hashlib.blake2b(repr(tuple(key)).encode(), digest_size=8).digest(), "big") >> 1


DrawRows = Callable[[EngineRequest, RolloutPlan], Sequence[Completion]]
"""Draws one completion for each of a request's rows, under a plan."""

PLAIN = frozenset({"max_new_tokens", "eos_token_ids", "temperature"})
"""Sampling settings that every engine must honour."""

LIMITS = "limits"
"""What an engine honours that draws sequences of different limits in one call; others get a call for each limit."""


Draw = Callable[[Sequence[Tensor], Sequence[Sequence[SequenceKey]], SamplingSettings], list[Completion]]
"""Takes prompts, for each its keys, and settings; draws one completion a key, in their order."""


def drawn_by_limit(
    draw: Draw,
    prompts: Sequence[Tensor],
    keys: Sequence[Sequence[SequenceKey]],
    settings: SamplingSettings,
    limits: Sequence[int] | None,
) -> list[Completion]:
    """Draws one call for each different limit, and gives completions in the order of the prompts."""
    limits = checked_limits(limits, len(prompts), settings.max_new_tokens)
    found: dict[int, list[Completion]] = {}
    for limit in sorted(set(limits)):
        places = [place for place, own in enumerate(limits) if own == limit]
        own = replace(settings, max_new_tokens=limit)
        drawn = iter(draw([prompts[place] for place in places], [keys[place] for place in places], own))
        found |= {place: [next(drawn) for _ in keys[place]] for place in places}
    return [completion for place in range(len(prompts)) for completion in found[place]]


class ExternalEngine(WholeEngine, ABC):
    """An engine that draws completions whole, and keeps whatever cache it has itself."""

    _adapter: ModelAdapter
    _honours: Collection[str]

    @abstractmethod
    def draw_rows(self, request: EngineRequest, plan: RolloutPlan) -> list[Completion]:
        """Draws a completion for each of a request's rows, which is what is repeated when memory runs out."""

    def check(self, settings: SamplingSettings) -> None:
        """Refuses sampling settings that the engine would drop."""
        for name, value in settings.chosen().items():
            refusal.when(name not in self._honours, "engine/setting", name=name, value=value, engine=self.name)

    def generate(
        self,
        prompts: Sequence[Tensor],
        keys: Sequence[Sequence[SequenceKey]],
        settings: SamplingSettings,
        attempt: Attempt[RolloutPlan],
        progress: Progress | None = None,
        *,
        limits: Sequence[int] | None = None,
        begun: Sequence[Sequence[Completion | None]] | None = None,
    ) -> list[Completion]:
        """Draws one completion for every key."""
        refuse_begun(self.name, begun)

        def draw(
            some: Sequence[Tensor],
            names: Sequence[Sequence[SequenceKey]],
            own: SamplingSettings,
            bounds: Sequence[int] | None = None,
        ) -> list[Completion]:
            request = request_of(some, names, own, self._adapter.geometry, progress, bounds)
            return attempt(partial(self.draw_rows, request)) if request.rows else []

        if LIMITS in self._honours:
            return draw(prompts, keys, settings, checked_limits(limits, len(prompts), settings.max_new_tokens))
        return drawn_by_limit(draw, prompts, keys, settings, limits)


class FunctionEngine(ExternalEngine):
    """An engine that holds nothing between two calls but what its function does.

    The function runs in eval mode, without gradients and with the random state put back afterwards. It is repeated as
    a whole where memory runs out in it, first under the same plan.

    Args:
        context: what the engine is made from.
        draw: gives a completion for each of a request's rows, in their order, on the host.
        honours: names of the `SamplingSettings` that it keeps to, besides length, eos and temperature; others are
            refused. "limits": it draws rows of different `EngineRequest.limits` in one call. Where one of them shapes
            the distribution, ``model_logprobs`` must be the model's own, or NaN.
        synchronise: called before each rollout with the optimizer steps done, for engines with a copy of the weights.
        close: called when the run ends or its weights are loaded; a later call begins anew.
        is_external: whether log-probs come from other kernels or weights than the model's, so that the loss must
            correct for the difference.
        compares_filtered: whether the loss corrects what filters change too, by ``logprobs``; else it takes
            ``model_logprobs``, and tokens weigh 1 where those are NaN.
        ahead: draws rollouts before they are due, which ``draw`` then gives; None where that cannot be.
    """

    def __init__(
        self,
        context: EngineContext,
        draw: DrawRows,
        *,
        honours: Collection[str] = (),
        synchronise: Callable[[int], object] = lambda _: None,
        close: Callable[[], object] = lambda: None,
        is_external: bool = True,
        compares_filtered: bool = False,
        ahead: DrawsAhead | None = None,
    ) -> None:
        can = EngineCapabilities(is_external=is_external, compares_filtered=compares_filtered, ahead=ahead)
        self.name, self.supports = context.name, can
        self._adapter, self._draw, self._honours = context.adapter, draw, PLAIN.union(honours)
        self._synchronise, self._close = synchronise, close

    def synchronise(self, version: int) -> None:
        """Has the engine take over weights that have moved."""
        self._synchronise(version)

    def release(self) -> None:
        """Does nothing: every call gives its bytes back."""

    def close(self) -> None:
        """Has the engine end whatever outlives a call, and forget which weights it has."""
        self._close()

    def draw_rows(self, request: EngineRequest, plan: RolloutPlan) -> list[Completion]:
        """Calls the function, and refuses what it gives where that cannot be scored."""
        random = capture_random_state()
        try:
            with torch.no_grad(), eval_mode(self._adapter.model):
                drawn = list(self._draw(request, plan) or ())
        finally:
            set_random_state(random)
        given, wanted = len(drawn), len(request.rows)
        unusable.when(given != wanted, "completions", engine=self.name, completions=given, rows=wanted)
        rows = enumerate(zip(drawn, request.limits, strict=True))
        return [self._checked(row, completion, longest) for row, (completion, longest) in rows]

    def _checked(self, row: int, completion: Completion, longest: int) -> Completion:
        engine, kind = self.name, type(completion).__name__
        unusable.when(not isinstance(completion, Completion), "completion/kind", kind=kind, engine=engine, row=row)
        ids, mask, last = completion.ids, completion.mask, self._adapter.geometry.vocab_size - 1
        shape, dtype = tuple(getattr(ids, "shape", ())), getattr(ids, "dtype", type(ids).__name__)
        fit = dtype == torch.int64 and len(shape) == 1 and 1 <= len(ids) <= longest
        unusable.when(not fit, "completion/ids", shape=shape, dtype=dtype, longest=longest, engine=engine, row=row)
        for token in ids.tolist():
            unusable.when(not 0 <= token <= last, "completion/token", token=token, last=last, engine=engine, row=row)
        for name, values in (("logprobs", completion.logprobs), ("model_logprobs", completion.model_logprobs)):
            shape, dtype = tuple(getattr(values, "shape", ())), getattr(values, "dtype", type(values).__name__)
            known = shape == tuple(ids.shape) and dtype in (torch.float32, torch.float64)
            known = known and bool((values.isfinite() & (values <= 1e-3) | values.isnan() & (name != "logprobs")).all())
            unusable.when(not known, "completion/logprobs", name=name, shape=shape, dtype=dtype, engine=engine, row=row)
        shape = tuple(ids.shape if mask is None else getattr(mask, "shape", ()))
        known = mask is None or (shape == tuple(ids.shape) and bool(((mask == 0) | (mask == 1)).all()))
        unusable.when(not known, "completion/mask", shape=shape, count=len(ids), engine=engine, row=row)
        ended = completion.finished
        unusable.when(not isinstance(ended, bool), "completion/finished", engine=engine, row=row, ended=ended)
        return completion if mask is None else replace(completion, mask=torch.as_tensor(mask, dtype=torch.uint8))


@dataclass(frozen=True)
class Pool:
    """A key/value cache cut into blocks of equal size."""

    blocks: int  # blocks, those that the engine keeps for itself included
    spare: int  # blocks that the engine keeps for itself
    block_tokens: int  # tokens of a block
    block_bytes: int  # bytes of a block, over all layers

    @property
    def bytes(self) -> int:
        """Bytes of all blocks."""
        return self.blocks * self.block_bytes

    @property
    def tokens(self) -> int:
        """Tokens that sequences can hold in it together."""
        return (self.blocks - self.spare) * self.block_tokens


def pool_for(
    geometry: ModelGeometry,
    *,
    element_bytes: int,
    block_tokens: int,
    spare: int,
    row_tokens: int,
    rows: int,
    kv_bytes: int | None,
) -> Pool:
    """Sizes a pool: as many rows as may be in flight, within the plan's bytes, and one row in any case."""
    # A window of attention is not counted on: engines differ in what they free behind it.
    block_bytes = 2 * element_bytes * geometry.kv_heads * geometry.head_dim * geometry.layers * block_tokens
    row_blocks = math.ceil(row_tokens / block_tokens)
    wanted = spare + rows * row_blocks
    allowed = wanted if kv_bytes is None else min(wanted, kv_bytes // block_bytes)
    return Pool(max(allowed, spare + row_blocks), spare, block_tokens, block_bytes)
